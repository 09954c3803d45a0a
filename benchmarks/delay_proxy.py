"""A slow network on one machine: TCP proxies that delay bytes and limit their rate.

    with SlowNetwork(delay_ms=50, mbit_s=100) as network:
        with network.swarm(model, num_servers=4) as swarm: ...
        network.set(delay_ms=10, mbit_s=None)

Each server announces the address of a proxy in front of it, so all peers that dial it, servers included, go through the
proxy. The delay is one way, and equal in both directions. The bandwidth is that of the server's connection, which all
its peers share, in each direction. The proxies run in a process of their own, which ends with its standard input.
"""

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from swarmllm import LocalSwarm
from swarmllm.demo.local_swarm import LocalServer

READ_BYTES = 1 << 16
BUFFER_BYTES = 4 << 20
"""Most bytes on the way in one connection and direction. Beyond, the sender must wait, as with a socket's buffer."""


class SlowNetwork:
    """A process with proxies. `set()` changes all of them at once, also while they are in use."""

    def __init__(self, *, delay_ms: float = 0.0, mbit_s: float | None = None) -> None:
        self._settings = {"delay_ms": delay_ms, "mbit_s": mbit_s}
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        self.set(**self._settings)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def set(self, *, delay_ms: float, mbit_s: float | None = None) -> None:
        """Set the milliseconds one way and the megabits a second (None: no limit) of all proxies from now on."""
        self._ask({"delay_ms": delay_ms, "mbit_s": mbit_s})

    def add(self, target_port: int) -> int:
        """Start a proxy in front of a port of 127.0.0.1; return its own port."""
        return int(self._ask({"target": target_port})["port"])

    def bytes_carried(self) -> int:
        """Bytes through all proxies so far, both directions."""
        return int(self._ask({})["bytes"])

    def swarm(self, model: str | Path, **options: Any) -> "SlowSwarm":
        """A LocalSwarm whose servers are behind proxies."""
        return SlowSwarm(self, model, **options)

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            return dict(json.loads(self._process.stdout.readline()))


class SlowSwarm(LocalSwarm):
    """Make each server announce its proxy."""

    def __init__(self, network: SlowNetwork, model: str | Path, **options: Any) -> None:
        super().__init__(model, **options)
        self._network = network

    def _start(
        self, span: tuple[int, int] | None, initial_peers: Sequence[str], options: dict[str, object]
    ) -> LocalServer:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        addresses: dict[str, object] = {
            "host_maddrs": f"/ip4/127.0.0.1/tcp/{port}",
            "announce_maddrs": f"/ip4/127.0.0.1/tcp/{self._network.add(port)}",
        }
        return super()._start(span, initial_peers, {**addresses, **options})


# ---------------------------------------------------------------------- in the proxies' process


@dataclass
class _Link:
    """The shared state of all connections of one proxy in one direction."""

    free_at: float = 0.0
    """When the last byte so far was put on the wire."""


@dataclass
class _Proxies:
    delay_s: float = 0.0
    bytes_per_s: float | None = None
    bytes_carried: int = 0
    _servers: list[asyncio.Server] = field(default_factory=list)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        if "target" in request:
            links = _Link(), _Link()

            async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                await self._carry(reader, writer, request["target"], links)

            server = await asyncio.start_server(connected, "127.0.0.1", 0)
            self._servers.append(server)
            return {"port": server.sockets[0].getsockname()[1]}
        if "delay_ms" in request:
            mbit_s = request["mbit_s"]
            self.delay_s = request["delay_ms"] / 1e3
            self.bytes_per_s = None if mbit_s is None else mbit_s * 1e6 / 8
        return {"bytes": self.bytes_carried}

    async def _carry(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, target: int, links: tuple[_Link, _Link]
    ) -> None:
        try:
            there, back = await asyncio.open_connection("127.0.0.1", target)
        except OSError:
            writer.close()
            return
        for end in (writer, back):
            if (connected := end.transport.get_extra_info("socket")) is not None:  # None if it has hung up already
                connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            await asyncio.gather(self._pipe(reader, back, links[0]), self._pipe(there, writer, links[1]))
        finally:
            writer.close()
            back.close()

    async def _pipe(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, link: _Link) -> None:
        """Pass bytes on until one end hangs up. Bytes on the way are still delivered."""
        loop = asyncio.get_running_loop()
        under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(BUFFER_BYTES // READ_BYTES)

        async def read() -> None:
            data = b"more"
            while data:
                try:
                    data = await reader.read(READ_BYTES)
                except ConnectionError:
                    data = b""
                self.bytes_carried += len(data)
                sent_at = max(loop.time(), link.free_at)
                if self.bytes_per_s is not None:
                    sent_at += len(data) / self.bytes_per_s
                link.free_at = sent_at
                await under_way.put((sent_at + self.delay_s, data))

        task = asyncio.create_task(read())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            while True:
                due_at, data = await under_way.get()
                if (wait_s := due_at - loop.time()) > 0:
                    await asyncio.sleep(wait_s)
                if not data:
                    break
                writer.write(data)
                await writer.drain()
            if writer.can_write_eof():
                writer.write_eof()
        except (ConnectionError, RuntimeError, OSError):
            pass
        finally:
            task.cancel()


async def _serve() -> None:
    proxies = _Proxies()
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        print(json.dumps(await proxies.answer(json.loads(line))), flush=True)


if __name__ == "__main__":
    import uvloop

    with contextlib.suppress(KeyboardInterrupt):
        uvloop.run(_serve())
