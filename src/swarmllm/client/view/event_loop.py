"""The client's one event-loop thread, and the one function by which synchronous callers enter it.

The model owns it. It works inside Jupyter, whose own loop runs in another thread. Coroutines don't get the caller's
context variables, which hold its session. Readers of streams live longer than a call. They would keep the session
alive, and only the end of that session ends them.

A failed task ends neither the loop nor other tasks: a bug in one session stays in that session.

`gather` and `in_turns` run several jobs at a time, and cancel the others when one has failed.
"""

import asyncio
import logging
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import CancelledError as FutureCancelledError
from contextlib import suppress
from contextvars import Context
from typing import Any, TypeVar

import uvloop

from swarmllm.errors import SessionClosedError, SwarmError

logger = logging.getLogger(__name__)

T = TypeVar("T")

CALLS_END_S = TASKS_END_S = 2.0
"""Longest time for calls or tasks to end after `close()` has cancelled them. Assumed: their cleanup doesn't wait."""
CLEAN_UP_S = 15.0
"""Longest time for one entry of `on_close`. A peer takes less than 10 s even if its p2pd is frozen."""
CLOSE_S = 30.0
"""Longest time of `close()`, reached only if something blocks the thread, which then ends with the process."""

Job = Callable[[], Awaitable[T]]


class EventLoop:
    """A thread with an event loop, which runs until `close()`."""

    on_close: list[Callable[[], Awaitable[None]]]
    """Functions that are awaited in the loop when it is closed."""

    def __init__(self, name: str = "swarmllm-client") -> None:
        self.on_close = []
        self._loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closing = asyncio.Event()
        self._closed = False
        self._pid = os.getpid()
        self._calls: set[asyncio.Task[Any]] = set()
        self._lock = threading.RLock()  # finalizers run at any moment, in any thread
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        self._ready.wait()

    def check_open(self) -> None:
        """Raises: SessionClosedError: the loop has been closed."""
        if self._closed:
            raise self._is_closed()

    @property
    def is_running(self) -> bool:
        """True if the thread runs and accepts work."""
        return self._thread.is_alive() and not self._closed

    def run_coroutine(self, coroutine: Coroutine[Any, Any, T], *, meanwhile: Callable[[], None] = lambda: None) -> T:
        """Run the coroutine in the loop's thread, wait for it, and return its value; Ctrl-C cancels it.

        `meanwhile` runs in this thread before it waits.

        Raises:
            SessionClosedError: the loop has been closed.
        """
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise RuntimeError("called from the client's own event loop, which would wait for itself")
        if not self._is_ours:
            coroutine.close()
            raise self._is_closed()
        with self._lock:  # a call before `close()` is run or cancelled, never lost
            if self._closed or not self._thread.is_alive():
                coroutine.close()
                raise self._is_closed()
            future = Context().run(asyncio.run_coroutine_threadsafe, self._call(coroutine), self._loop)
        try:
            meanwhile()
            return future.result()
        except FutureCancelledError:
            coroutine.close()  # if it has not begun
            raise SessionClosedError("the session or the model was closed meanwhile") from None
        except BaseException:
            future.cancel()
            raise

    @property
    def _is_ours(self) -> bool:
        """True if this process made the loop. In a forked one, a thread that doesn't exist there may hold the lock."""
        return os.getpid() == self._pid

    def _is_closed(self) -> SessionClosedError:
        if not self._is_ours:
            return SessionClosedError(
                "the model belongs to the process that this one was forked from: load it here anew"
            )
        return SessionClosedError("the model has been closed")

    async def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Note the call, so that closing the loop ends it before the tasks that it needs."""
        task = asyncio.current_task()
        assert task is not None
        self._calls.add(task)
        try:
            return await coroutine
        finally:
            self._calls.discard(task)

    def call_soon(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run the coroutine soon, without waiting; safe in finalizers, also in the loop's own thread."""
        if not self._is_ours:
            coroutine.close()
            return
        with self._lock:
            if self._closed or not self._thread.is_alive():
                coroutine.close()
                return
            self._loop.call_soon_threadsafe(self.spawn, coroutine, context=Context())

    def spawn(self, coroutine: Coroutine[Any, Any, T], name: str | None = None) -> "asyncio.Task[T]":
        """Start a task that runs until it ends or the loop is closed; call it in the loop's thread.

        An error in it reaches only callers that wait for the task.
        """
        task = asyncio.get_running_loop().create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            level = logging.DEBUG if isinstance(error, SwarmError) else logging.ERROR
            logger.log(level, "%s failed; everything else goes on", task.get_name(), exc_info=error)

    def close(self) -> None:
        """Cancel everything and end the thread; harmless when called twice, in finalizers, and in forked processes."""
        if not self._is_ours:
            return
        with self._lock:
            if not self._closed and self._thread.is_alive():
                self._loop.call_soon_threadsafe(self._closing.set)
            self._closed = True
        if threading.current_thread() is not self._thread:
            self._thread.join(CLOSE_S)
            if self._thread.is_alive():
                logger.warning("the client's event loop did not end within %g s; this process goes on without", CLOSE_S)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._main())

    async def _main(self) -> None:
        self._ready.set()
        await self._closing.wait()
        if calls := set(self._calls):
            for call in calls:
                call.cancel()
            await asyncio.wait(calls, timeout=CALLS_END_S)
        with suppress(TimeoutError):
            async with asyncio.timeout(TASKS_END_S):
                while self._tasks:  # some start others while they end
                    for task in tuple(self._tasks):
                        task.cancel()
                    await asyncio.wait(tuple(self._tasks))
        for cleanup in self.on_close:
            try:
                async with asyncio.timeout(CLEAN_UP_S):
                    await cleanup()
            except TimeoutError:
                logger.warning(
                    "closing the model took longer than %g s; what is left ends with this process", CLEAN_UP_S
                )


async def in_turns(groups: Sequence[tuple[int, Sequence[Job[T]]]]) -> list[T]:
    """The values of all jobs, group after group. A group is (most jobs at a time, jobs); the groups begin in turns.

    So a server that all groups use first soon has work from each of them.
    """

    def limited(job: Job[T], limit: asyncio.Semaphore) -> Job[T]:
        async def run() -> T:
            async with limit:
                return await job()

        return run

    jobs: list[tuple[float, Job[T]]] = []
    for most, of_group in groups:
        limit = asyncio.Semaphore(most)
        jobs += [(place / len(of_group), limited(job, limit)) for place, job in enumerate(of_group)]
    order = sorted(range(len(jobs)), key=lambda place: jobs[place][0])
    values = dict(zip(order, await gather([jobs[place][1] for place in order]), strict=True))
    return [values[place] for place in range(len(jobs))]


async def gather(jobs: Sequence[Job[T]]) -> list[T]:
    """The values of all jobs, in order; the first error cancels the others, unlike in asyncio.gather."""

    async def run(job: Job[T]) -> T:
        return await job()

    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(run(job)) for job in jobs]
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from None
    return [task.result() for task in running]
