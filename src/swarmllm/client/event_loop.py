"""The client's one event-loop thread, and the one function at which synchronous callers cross into it.

Owned by the model; works inside Jupyter, whose own loop runs in another thread. Calls cross without the caller's
context variables: tasks that outlive the call (readers of streams) would keep alive whatever those refer to, such as
the very session whose end is to end the task.
"""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import CancelledError as FutureCancelledError
from contextvars import Context
from typing import Any, TypeVar

import uvloop

from swarmllm.errors import SessionClosedError

T = TypeVar("T")


class EventLoop:
    """A thread that runs an event loop until `close()`. `tasks` is a TaskGroup for whatever lives as long as it."""

    tasks: asyncio.TaskGroup
    on_close: list[Callable[[], Awaitable[None]]]
    """Awaited in the loop when it is closed."""

    def __init__(self, name: str = "swarmllm-client") -> None:
        self.on_close = []
        self._loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
        self._closing = asyncio.Event()
        self._closed = False
        self._lock = threading.RLock()  # finalizers may come at any moment, in any thread
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        self._ready.wait()

    def check_open(self) -> None:
        """Raises: SessionClosedError: the loop has been closed."""
        if self._closed:
            raise SessionClosedError("the model has been closed")

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """The coroutine's value, run in the loop's thread while this thread waits; Ctrl-C cancels it.

        Raises:
            SessionClosedError: the loop has been closed.
        """
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise RuntimeError("called from the client's own event loop, which would wait for itself")
        with self._lock:  # what is handed over before `close()` is run or cancelled, never forgotten
            if self._closed or not self._thread.is_alive():
                coroutine.close()
                raise SessionClosedError("the model has been closed")
            future = Context().run(asyncio.run_coroutine_threadsafe, coroutine, self._loop)
        try:
            return future.result()
        except FutureCancelledError:
            raise SessionClosedError("the model was closed meanwhile") from None
        except BaseException:
            future.cancel()
            raise

    def call_soon(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run the coroutine some time soon, without waiting; safe in finalizers, also in the loop's own thread."""
        with self._lock:
            if self._closed or not self._thread.is_alive():
                coroutine.close()
                return
            self._loop.call_soon_threadsafe(self.spawn, coroutine, context=Context())

    def spawn(self, coroutine: Coroutine[Any, Any, None], name: str | None = None) -> "asyncio.Task[None]":
        """A task that lives until it ends or the loop is closed; call it in the loop's thread."""
        return self.tasks.create_task(coroutine, name=name)

    def close(self) -> None:
        """Cancel what still runs and end the thread; harmless when done twice, and in finalizers."""
        with self._lock:
            if not self._closed and self._thread.is_alive():
                self._loop.call_soon_threadsafe(self._closing.set)
            self._closed = True
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._main())

    async def _main(self) -> None:
        try:
            async with asyncio.TaskGroup() as self.tasks:
                self._ready.set()
                await self._closing.wait()
                raise _ClosingError
        except* _ClosingError:
            pass
        finally:
            for cleanup in self.on_close:
                await cleanup()


class _ClosingError(Exception):
    """Ends the TaskGroup, which cancels its tasks."""
