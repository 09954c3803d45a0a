"""A server to which every peer is near enough for a direct connection: `python near_server.py [flags]`.

On a busy machine, peers on loopback take longer to answer than near ones do.
"""

import math
import sys

from swarmllm.network.p2p import direct
from swarmllm.server.__main__ import main

PROGRAM = [sys.executable, __file__]
"""The command line for `LocalSwarm`'s option of that name."""

if __name__ == "__main__":
    direct.NEAR_S = math.inf
    sys.exit(main(sys.argv[1:]))
