"""TCP proxies that deliver later: a server that announces one's address seems to be far away, for everybody.

Lives in one thread of the test's process. A proxy's delay may be changed while connections run through it.
"""

import asyncio
import socket
import threading
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self

READ_BYTES = 1 << 16


class DelayProxies:
    """`with DelayProxies() as proxies:` the proxies run until the end of the block."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="delay proxies", daemon=True)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._servers: list[asyncio.Server] = []

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._run(self._close()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def in_front_of_new_server(self, delay_ms: float) -> dict[str, str]:
        """Options for a server that is to be found behind a new proxy, which delays each way by `delay_ms`."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            target = probe.getsockname()[1]
        port = self._run(self._listen(target, delay_ms / 1e3)).result()
        return {"host_maddrs": f"/ip4/127.0.0.1/tcp/{target}", "announce_maddrs": f"/ip4/127.0.0.1/tcp/{port}"}

    def _run(self, coroutine: Any) -> "Future[Any]":
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    async def _listen(self, target: int, delay_s: float) -> int:
        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            try:
                there, back = await asyncio.open_connection("127.0.0.1", target)
            except OSError:
                writer.close()
                return
            try:
                await asyncio.gather(_pipe(reader, back, delay_s), _pipe(there, writer, delay_s))
            except asyncio.CancelledError:
                pass  # the end of the test
            finally:
                writer.close()
                back.close()

        server = await asyncio.start_server(connected, "127.0.0.1", 0)
        self._servers.append(server)
        return int(server.sockets[0].getsockname()[1])

    async def _close(self) -> None:
        for server in self._servers:
            server.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay_s: float) -> None:
    """Until one end hangs up; what is under way is still delivered."""
    loop = asyncio.get_running_loop()
    under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

    async def deliver() -> None:
        while True:
            due_at, data = await under_way.get()
            await asyncio.sleep(max(0.0, due_at - loop.time()))
            if not data:
                break
            writer.write(data)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()

    delivery = asyncio.create_task(deliver())
    try:
        data = b"more"
        while data:
            try:
                data = await reader.read(READ_BYTES)
            except ConnectionError:
                data = b""
            under_way.put_nowait((loop.time() + delay_s, data))
        await delivery
    except (OSError, RuntimeError):
        pass
    finally:
        delivery.cancel()
