"""Whether a command's ports are free: asked before anything heavy is imported, so that it is told at once."""

import errno
import os
import re
import socket
from collections.abc import Sequence

from swarmllm.errors import ConfigurationError


def require_free_ports(maddrs: Sequence[str]) -> None:
    """Raises ConfigurationError if another program listens on one of these TCP multiaddresses.

    For commands: importing what would find out takes seconds.
    """
    for maddr in maddrs:
        if place := re.fullmatch(r"/ip[46]/([^/]+)/tcp/(\d+)", maddr):
            require_free_port(place[1], int(place[2]), f"can't listen on {maddr}", "choose another port")


def require_free_port(host: str, port: int, problem: str, mend: str) -> None:
    """Raises ConfigurationError if another program listens there; other reasons are left to who really listens."""
    try:
        (family, kind, _, _, address), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        with socket.socket(family, kind) as one:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.bind(address)
    except OSError as error:
        if port and error.errno == errno.EADDRINUSE:
            raise ConfigurationError(f"{problem}: {os.strerror(error.errno)}; {mend}") from None
