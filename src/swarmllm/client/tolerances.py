"""How much honest servers differ: what spot checks must forgive, and from whom that would be too much to ask.

Pure; used by `client/spot_checks`, and by `client/swarm_view` to leave out servers that can't be checked.
"""

import math

from swarmllm.config import ClientConfig
from swarmllm.data_structures import ServerInfo

BY_DTYPE = {"float64": 1e-3, "float32": 1e-3, "float16": 0.05, "bfloat16": 0.1}
"""Relative error of one position's hidden states. Assumed: ten times what other batch shapes and threads change."""
BY_QUANT_TYPE = {"none": 0.0, "int8": 0.15, "nf4": 0.5}
"""The same between a server that quantizes and one that doesn't. Measured through all blocks of the embedded model: on
single tokens up to 0.05 (int8) and 0.29 (nf4), at each of 200 positions of a text up to 0.013 and 0.20, with bfloat16
besides 0.031 and, alone, 0.022. Deeper models add up more."""
BY_COMPRESSION = 0.05
"""Added for messages of 8 bits a value, which both sides of a comparison have rounded. Measured: 0.009 per boundary
(docs/benchmarks.md)."""


def honest_error(server: ServerInfo) -> float:
    """The largest error of an honest server of that kind; infinite if nobody knows."""
    by_dtype = BY_DTYPE.get(server.dtype, math.inf)
    return max(by_dtype, BY_QUANT_TYPE.get(server.quant_type, math.inf))


def is_checkable(server: ServerInfo, config: ClientConfig) -> bool:
    """Whether an honest server of that kind is always within the client's tolerance.

    What a server announces decides whether it is used, never how much it may be wrong by: otherwise a liar would
    announce the coarsest kind of weights, and be forgiven everything.
    """
    return honest_error(server) <= config.verify_tolerance
