"""The client's event loop: calls cross into it, and none of them hangs when it is closed."""

import asyncio
import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import suppress
from contextvars import ContextVar

import pytest

from swarmllm.client.view import event_loop
from swarmllm.client.view.event_loop import EventLoop
from swarmllm.errors import PeerError, SessionClosedError


@pytest.fixture
def loop() -> Iterator[EventLoop]:
    loop = EventLoop()
    yield loop
    loop.close()


async def answer() -> int:
    return 42


def test_values_and_errors_cross(loop: EventLoop) -> None:
    async def fail() -> None:
        raise ValueError("no")

    assert loop.run_coroutine(answer()) == 42
    with pytest.raises(ValueError, match="no"):
        loop.run_coroutine(fail())


def test_the_calling_thread_does_something_meanwhile(loop: EventLoop) -> None:
    done = asyncio.Event()
    cancelled = threading.Event()

    async def wait() -> int:
        try:
            await done.wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return 42

    def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        loop.run_coroutine(wait(), meanwhile=fail)
    assert cancelled.wait(60)
    assert loop.run_coroutine(wait(), meanwhile=lambda: loop.call_soon(set_event(done))) == 42


async def set_event(event: asyncio.Event) -> None:
    event.set()


def test_a_closed_loop_runs_nothing(loop: EventLoop) -> None:
    loop.close()
    loop.close()
    with pytest.raises(SessionClosedError):
        loop.run_coroutine(answer())
    loop.call_soon(answer())


def test_a_forked_process_is_told_that_it_has_none(loop: EventLoop) -> None:
    pid = os.fork()
    if not pid:
        try:
            loop.run_coroutine(answer())
        except SessionClosedError as error:
            os._exit("forked" not in str(error))
        finally:
            os._exit(2)
    assert os.waitpid(pid, 0)[1] == 0
    assert loop.run_coroutine(answer()) == 42


def test_a_task_that_fails_ends_nothing_else(loop: EventLoop, caplog: pytest.LogCaptureFixture) -> None:
    async def fail(error: Exception) -> None:
        raise error

    async def spawn() -> list[BaseException | None]:
        other = loop.spawn(asyncio.Event().wait(), name="other")
        failing = [loop.spawn(fail(error), name="some task") for error in (RuntimeError("no"), PeerError("gone"))]
        found = await asyncio.gather(*failing, return_exceptions=True)
        assert not other.done()
        return found

    assert [type(error) for error in loop.run_coroutine(spawn())] == [RuntimeError, PeerError]
    assert loop.run_coroutine(answer()) == 42
    assert [record.message for record in caplog.records] == ["some task failed; everything else goes on"]
    assert caplog.records[0].exc_info is not None


def test_tasks_that_others_begin_while_they_end_are_ended_too(loop: EventLoop) -> None:
    ended: list[int] = []

    async def begin(left: int) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            if left:
                loop.spawn(begin(left - 1))
                await asyncio.sleep(0)
            ended.append(left)

    async def spawn() -> None:
        loop.spawn(begin(3))
        await asyncio.sleep(0)

    loop.run_coroutine(spawn())
    loop.close()
    assert sorted(ended) == [0, 1, 2, 3]


def test_the_loop_does_not_wait_for_itself(loop: EventLoop) -> None:
    async def nested() -> None:
        loop.run_coroutine(answer())

    with pytest.raises(RuntimeError, match="wait for itself"):
        loop.run_coroutine(nested())


def test_closing_ends_calls_of_other_threads(loop: EventLoop) -> None:
    entered = threading.Event()
    errors: list[BaseException] = []

    async def for_ever() -> None:
        entered.set()
        await asyncio.Event().wait()

    def call() -> None:
        try:
            loop.run_coroutine(for_ever())
        except SessionClosedError as error:
            errors.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    assert entered.wait(5)
    loop.close()
    thread.join(120)
    assert not thread.is_alive()
    assert len(errors) == 1


def test_calls_while_it_is_being_closed_end_in_some_way() -> None:
    for _ in range(20):
        loop = EventLoop()
        begin = threading.Barrier(3)

        def call(loop: EventLoop = loop, begin: threading.Barrier = begin) -> None:
            begin.wait()
            try:
                while True:
                    assert loop.run_coroutine(answer()) == 42
            except SessionClosedError:
                pass

        threads = [threading.Thread(target=call) for _ in range(2)]
        for thread in threads:
            thread.start()
        begin.wait()
        loop.close()
        for thread in threads:
            thread.join(120)
            assert not thread.is_alive()


def test_a_call_under_way_ends_before_what_it_leans_on(loop: EventLoop) -> None:
    """It would fail otherwise in whatever way that happens to end."""
    entered = threading.Event()
    events: list[str] = []

    async def leaning() -> None:
        try:
            while True:
                await loop.spawn(asyncio.sleep(0))
                entered.set()
        finally:
            await asyncio.sleep(0)
            events.append("the call")

    async def lasting() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            events.append("what it leans on")

    async def begin() -> None:
        loop.spawn(lasting())

    def call() -> None:
        try:
            loop.run_coroutine(leaning())
        except SessionClosedError:
            events.append("is told so")

    loop.run_coroutine(begin())
    thread = threading.Thread(target=call)
    thread.start()
    assert entered.wait(5)
    loop.close()
    thread.join(5)
    assert "is told so" in events
    events.remove("is told so")
    assert events == ["the call", "what it leans on"]


def test_what_is_closed_late_is_no_error(loop: EventLoop) -> None:
    begin, end = threading.Event(), threading.Event()

    async def block() -> None:
        begin.set()
        await asyncio.to_thread(end.wait, 5)

    loop.call_soon(block())
    assert begin.wait(5)
    closing = threading.Thread(target=loop.close)
    closing.start()
    loop.call_soon(answer())
    end.set()
    closing.join(5)
    assert not closing.is_alive()


def test_tasks_do_not_keep_the_callers_context_alive(loop: EventLoop) -> None:
    class Owner:
        pass

    variable: ContextVar[Owner] = ContextVar("variable")

    async def spawn() -> None:
        loop.spawn(asyncio.Event().wait())

    token = variable.set(owner := Owner())
    loop.run_coroutine(spawn())
    loop.call_soon(asyncio.Event().wait())
    loop.run_coroutine(answer())
    variable.reset(token)
    forgotten = weakref.ref(owner)
    del owner, token
    assert forgotten() is None


def test_what_is_to_be_cleaned_up_is_cleaned_up(loop: EventLoop) -> None:
    done: list[str] = []

    async def clean_up() -> None:
        done.append("cleaned")

    async def for_ever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            done.append("cancelled")

    async def spawn() -> None:
        loop.spawn(for_ever())
        await asyncio.sleep(0)

    loop.on_close.append(clean_up)
    loop.run_coroutine(spawn())
    loop.close()
    assert done == ["cancelled", "cleaned"]


@pytest.mark.parametrize("is_task", [True, False])
def test_what_does_not_end_keeps_nobody_from_closing(
    loop: EventLoop, is_task: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for limit in ("TASKS_END_S", "CLEAN_UP_S", "CLOSE_S"):
        monkeypatch.setattr(event_loop, limit, 0.02)
    may_end, cleaned = threading.Event(), threading.Event()

    async def stubborn() -> None:
        while not may_end.is_set():
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(0.001)

    async def clean_up() -> None:
        cleaned.set()

    async def spawn() -> None:
        loop.spawn(stubborn())

    if is_task:
        loop.run_coroutine(spawn())
    else:
        loop.on_close.append(stubborn)
    loop.on_close.append(clean_up)
    loop.close()
    assert "did not end within 0.02 s" in caplog.text
    may_end.set()
    assert cleaned.wait(120)
    loop._thread.join(120)


def test_a_forked_process_closes_nothing_even_if_the_lock_was_held(loop: EventLoop) -> None:
    with loop._lock:
        holder = threading.Thread(target=fork_and_close, args=[loop])
        holder.start()
        holder.join(120)
        assert not holder.is_alive()
    assert loop.run_coroutine(answer()) == 42


def fork_and_close(loop: EventLoop) -> None:
    """In a thread that doesn't hold the lock, as in the worker processes of a DataLoader."""
    pid = os.fork()
    if not pid:
        loop.call_soon(answer())
        loop.close()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
