"""The leanest HTTP client that can stream: plain sockets in one thread, so that little of what is measured is its own.

A process of its own, started by `gateway.py`. Reads lines `streams tokens` and a request's body as JSON; prints as JSON
the seconds until each stream's first event and until all have ended.
"""

import json
import selectors
import socket
import sys
import time
from typing import Any

FIRST, LAST, EVENT = b"data: {", b"data: [DONE]\n\n\r\n0\r\n\r\n", b"\ndata: {"


def ask(sockets: list[socket.socket], request: bytes, num_tokens: int) -> dict[str, Any]:
    """Send the request on every socket at once; when what came."""
    first: dict[int, float] = {}
    received = {one.fileno(): bytearray() for one in sockets}
    with selectors.DefaultSelector() as selector:
        for one in sockets:
            selector.register(one, selectors.EVENT_READ, one)
        began = time.perf_counter()
        for one in sockets:
            one.sendall(request)
        while selector.get_map():
            for key, _ in selector.select():
                data = received[key.fd]
                data += key.data.recv(1 << 16)
                if key.fd not in first and FIRST in data:
                    first[key.fd] = time.perf_counter() - began
                if data.endswith(LAST):
                    selector.unregister(key.data)
                elif data.endswith(b"0\r\n\r\n"):
                    raise RuntimeError(f"not a stream: {bytes(data)!r}")
        seconds = time.perf_counter() - began
    for data in received.values():
        if data.count(EVENT) != num_tokens:
            raise RuntimeError(f"{data.count(EVENT)} events for {num_tokens} tokens")
    return {"first_s": list(first.values()), "all_s": seconds}


def main(host: str, port: int, path: str) -> None:
    """Answer the lines of standard input; connections are kept."""
    sockets: list[socket.socket] = []
    for line in sys.stdin:
        num_streams, num_tokens, body = line.split(maxsplit=2)
        while len(sockets) < int(num_streams):
            sockets.append(socket.create_connection((host, port)))
            sockets[-1].setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        data = body.strip().encode()
        head = f"POST {path} HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
        request = f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data
        print(json.dumps(ask(sockets[: int(num_streams)], request, int(num_tokens))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
