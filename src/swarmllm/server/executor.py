"""The device thread: the only place where blocks and caches are touched. `server/scheduler` says what goes together.

Called by sessions and batch requests from the event loop; knows neither streams nor messages.
"""

import asyncio
import logging
import queue
import resource
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Generic, Never, Protocol, TypeVar, cast

import torch
from torch import Tensor

from swarmllm.errors import BlocksNotServedError, LocalProtocolError, ServerOutOfMemoryError
from swarmllm.models.block_span import BlockSpan
from swarmllm.models.packing import SessionCall
from swarmllm.server.courtesy import Courtesy
from swarmllm.server.device import lost_context, out_of_memory
from swarmllm.server.gathering import Gathering
from swarmllm.server.scheduler import Budget, Priority, Scheduler, Work

__all__ = ["Executor", "Load", "Priority", "SessionStep", "Timed"]

T = TypeVar("T")

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 2.0
"""A server must be gone within 10 s of SIGTERM, however long a block's load or a batch would still take."""
SMOOTHING = 0.1
"""Share of the newest forward in the smoothed numbers."""
FORGET_QUEUE_S = 10.0
"""An idle server's last queue says nothing about the next step: its time halves in so many seconds."""
_UNFINISHED = object()
"""What a turn gives that isn't the last one."""


@dataclass(frozen=True, slots=True)
class Timed(Generic[T]):
    """A call's value and where its time went."""

    value: T
    queue_us: int
    compute_us: int


@dataclass(frozen=True, slots=True)
class Load:
    """How busy the device thread is, and what it has done so far."""

    queue_ms: float
    """Smoothed time that a session's step waited for its turn."""
    batch_size: float
    """Smoothed number of sessions per forward."""
    num_steps: int
    num_tokens: int
    num_forwards: int
    """Of sessions; training's batches are not counted."""


class SessionStep(Protocol):
    """One step of one session, which may be packed with those of others."""

    session: str
    blocks: BlockSpan
    priority: Priority
    num_tokens: int
    granule: int
    """Tokens of its smallest piece; `num_tokens` if it can't be cut."""

    def take(self, num_tokens: int) -> SessionCall:
        """The next piece, ready to run. Called in the device thread; what it raises fails this step alone."""


@dataclass(eq=False, slots=True)
class _Waiting(Work):
    """What the scheduler sees of a call, and what the device thread has to know in addition."""

    future: "asyncio.Future[Timed[object]]"
    call: Callable[[], object] | None = None
    step: SessionStep | None = None
    outputs: list[Tensor] = field(default_factory=list)
    started_at: float = 0.0
    compute_s: float = 0.0


class _LostContextError(Exception):
    """The device takes no calls any more: better to end than to fail everybody for ever."""


class _Withdrawn:
    def __init__(self, waiting: _Waiting) -> None:
        self.waiting = waiting


class Executor:
    """Runs calls in one thread of its own. `close()` ends the thread after the calls that are queued."""

    def __init__(
        self,
        budget: Budget | None = None,
        courtesy: Courtesy | None = None,
        *,
        name: str = "swarmllm-device",
    ) -> None:
        self._courtesy = courtesy or Courtesy()
        self._gathering = Gathering()
        self._inbox: queue.SimpleQueue[_Waiting | _Withdrawn | None] = queue.SimpleQueue()
        self._scheduler: Scheduler[_Waiting] = Scheduler(budget or Budget())  # belongs to the device thread
        self.num_calls = 0
        """Calls that are queued or running."""
        self.on_out_of_memory: Callable[[], None] | None = None
        """Called in the device thread after calls that failed for lack of memory."""
        self._idle = asyncio.Event()
        self._idle.set()
        self._waiting: set[asyncio.Future[Timed[object]]] = set()
        self._dead: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """How the thread ended, if that is a mistake."""
        self._lost_context = False
        """Whether it ended because the device takes no calls any more."""
        self._stopping = False
        self._queue_ms = 0.0
        self._batch_size = 0.0
        self._num_steps = self._num_tokens = self._num_forwards = 0
        self._last_forward_at = 0.0
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    @property
    def load(self) -> Load:
        """As of now."""
        idle_s = max(0.0, time.perf_counter() - self._last_forward_at)
        queue_ms = self._queue_ms * 0.5 ** (idle_s / FORGET_QUEUE_S)
        return Load(queue_ms, self._batch_size, self._num_steps, self._num_tokens, self._num_forwards)

    async def run(self, call: Callable[[], T], priority: Priority) -> Timed[T]:
        """The value of `call()`, run in the device thread on its own; its exceptions are raised here.

        A call that is cancelled before its turn is not run.
        """
        return cast(Timed[T], await self._result(self._alone(call, priority, num_turns=1)))

    async def run_in_turns(self, turns: Generator[None, None, T], priority: Priority) -> Timed[T]:
        """As `run`, of work that lets those pass who are more urgent, wherever it yields.

        Once begun, it comes before all that waits and isn't more urgent. If it is cancelled, it isn't continued.
        """
        # How many turns it takes shows when it has ended.
        return cast(Timed[T], await self._result(self._alone(partial(_turn, turns), priority, num_turns=sys.maxsize)))

    def _alone(self, call: Callable[[], object], priority: Priority, *, num_turns: int) -> _Waiting:
        return _Waiting(
            num_tokens=num_turns,
            granule=1,
            priority=priority,
            queued_at=time.perf_counter(),
            future=self._loop.create_future(),
            call=call,
        )

    async def step(self, step: SessionStep) -> Timed[Tensor]:
        """The step's outputs, computed in the device thread together with other sessions' steps; raises what fails it.

        A step that is cancelled before its turn is not run.
        """
        waiting = _Waiting(
            num_tokens=step.num_tokens,
            granule=step.granule,
            priority=step.priority,
            queued_at=time.perf_counter(),
            session=step.session,
            future=self._loop.create_future(),
            step=step,
        )
        return cast(Timed[Tensor], await self._result(waiting))

    async def _result(self, waiting: _Waiting) -> Timed[object]:
        if self._dead.done():
            raise _ended_here(self._dead.result())
        self._inbox.put(waiting)
        self.num_calls += 1
        self._idle.clear()
        self._waiting.add(waiting.future)
        try:
            return await waiting.future
        except asyncio.CancelledError:
            self._inbox.put(_Withdrawn(waiting))
            raise
        finally:
            self._waiting.discard(waiting.future)
            self.num_calls -= 1
            if not self.num_calls:
                self._idle.set()

    async def wait_until_idle(self) -> None:
        """Return when nothing is queued or running."""
        await self._idle.wait()

    async def watch(self) -> Never:
        """Wait until the thread ends without having been told to; everybody who waits for it is told as well.

        Raises:
            LocalProtocolError: it has ended, so this server can't compute any more.
        """
        reason = await asyncio.shield(self._dead)
        if self._lost_context:
            raise LocalProtocolError(
                f"this server's GPU can't be used by this process any more ({reason}): start the server again, and if "
                "that happens more than once, look whether the GPU is in order"
            )
        raise LocalProtocolError(
            f"the device thread, which computes for this server, ended by a mistake of swarmllm ({reason}): "
            "start the server again, and please report it"
        )

    def _died(self, reason: str) -> None:
        self._dead.set_result(reason)
        for future in self._waiting:
            if not future.done():
                future.set_exception(_ended_here(reason))

    async def close(self) -> None:
        """Let what is queued finish, then end the thread; a call that takes longer ends with the process."""
        self._inbox.put(None)
        await asyncio.to_thread(self._thread.join, CLOSE_TIMEOUT_S)

    # ------------------------------------------------------------------ in the device thread

    def limit_prefill_beside_decode(self, num_tokens: int) -> None:
        """From the next forward on; called by a call that runs here, who measured what these blocks can do."""
        budget = self._scheduler.budget
        self._scheduler.budget = replace(
            budget, max_prefill_tokens_beside_decode=min(max(1, num_tokens), budget.max_tokens)
        )

    def _work(self) -> None:
        try:
            while self._admit():
                # A method of its own: a session must not outlive its stream only because nobody else comes.
                self._run_next()
        except BaseException as error:  # what belongs to one call went to who awaits it; this is our own mistake
            logger.exception("the device thread ended")
            self._tell_loop(self._died, str(error) if isinstance(error, _LostContextError) else _described(error))

    def _admit(self) -> bool:
        """Take in what has arrived, and wait for it if nothing else is to be done; False when all is done for good."""
        while True:
            try:
                # Without a name here, which would keep the last session's cache as long as nobody else comes.
                self._take_in(self._inbox.get(timeout=self._wait_s()))
            except queue.Empty:
                return bool(len(self._scheduler)) or not self._stopping

    def _take_in(self, item: _Waiting | _Withdrawn | None) -> None:
        if item is None:
            self._stopping = True
        elif isinstance(item, _Withdrawn):
            self._scheduler.discard(item.waiting)
        else:
            self._scheduler.add(item)
            self._gathering.came(time.perf_counter())

    def _wait_s(self) -> float | None:
        """For something to arrive; None: for as long as it takes."""
        if self._stopping:
            return 0.0
        if not len(self._scheduler):
            return None
        now = time.perf_counter()
        if pause_s := self._courtesy.pause_s(now):
            return pause_s
        num_here, num_decoding = self._scheduler.decoding(now)
        if 0 < num_here < num_decoding:
            is_all = num_here == len(self._scheduler)
            return self._gathering.wait_s(now, num_here=num_here, num_decoding=num_decoding if is_all else 0)
        return self._scheduler.pause_s(now)

    def _run_next(self) -> None:
        now, cpu_before, lost_before = time.perf_counter(), time.thread_time(), _times_core_lost()
        self._gathering.ran()
        pieces = [(work, size) for work, size in self._scheduler.next(now) if not work.future.cancelled()]
        if not pieces:
            return
        for work, _ in pieces:
            work.started_at = work.started_at or now
        call = pieces[0][0].call
        if call is not None:
            outcomes = [_outcome_of(call)]
        else:
            outcomes = self._forward(pieces)
            self._count(pieces, now)
            self._gathering.computed(time.perf_counter() - now, _times_core_lost() - lost_before)
        ended_at = time.perf_counter()
        self._scheduler.ran(ended_at)
        compute_s = ended_at - now
        self._courtesy.ran(time.thread_time() - cpu_before, compute_s, ended_at)
        for work, _ in pieces:
            work.compute_s += compute_s
        for outcome in outcomes:
            if reason := lost_context(outcome):
                self._lost_context = True
                raise _LostContextError(reason)
        settled = self._settled(zip((work for work, _ in pieces), outcomes, strict=True))
        if self.on_out_of_memory and any(isinstance(outcome, ServerOutOfMemoryError) for _, outcome in settled):
            _outcome_of(self.on_out_of_memory)
        self._tell_loop(_settle, settled)

    def _settled(self, outcomes: Iterable[tuple[_Waiting, object]]) -> list[tuple[_Waiting, object]]:
        """The work that is done or has failed, with what it is to be told."""
        settled: list[tuple[_Waiting, object]] = []
        for work, outcome in outcomes:
            if outcome is _UNFINISHED:
                continue
            if work.step is None or isinstance(outcome, BaseException):
                self._scheduler.discard(work)  # what is left of it
                settled.append((work, outcome))
            else:
                work.outputs.append(cast(Tensor, outcome))
                if not work.num_tokens:
                    settled.append((work, _outcome_of(partial(_joined, work.outputs, work.step.blocks))))
        return [(work, out_of_memory(outcome) or outcome) for work, outcome in settled]

    def _tell_loop(self, tell: Callable[[T], None], what: T) -> None:
        with suppress(RuntimeError):  # the loop is closed: the server is gone and nobody waits
            self._loop.call_soon_threadsafe(tell, what)

    @staticmethod
    def _forward(pieces: Sequence[tuple[_Waiting, int]]) -> list[object]:
        """What each piece gave: outputs or an exception. One forward for each span of blocks, which is mostly one."""
        outcomes: list[object] = [None] * len(pieces)
        calls: dict[BlockSpan, list[tuple[int, SessionCall]]] = {}
        for idx, (work, num_tokens) in enumerate(pieces):
            step = cast(SessionStep, work.step)
            call = _outcome_of(partial(step.take, num_tokens))
            if isinstance(call, SessionCall):
                calls.setdefault(step.blocks, []).append((idx, call))
            else:
                outcomes[idx] = call
        for blocks, group in calls.items():
            results = _outcome_of(partial(blocks.forward_many, [call for _, call in group]))
            for place, (idx, _) in enumerate(group):
                outcomes[idx] = results[place] if isinstance(results, list) else results
        return outcomes

    def _count(self, pieces: Sequence[tuple[_Waiting, int]], now: float) -> None:
        # Without the pauses that are made for others: the announced speed has them already.
        since = self._courtesy.resumes_at
        waited_ms = sum(max(0.0, now - max(work.queued_at, since)) for work, _ in pieces) / len(pieces) * 1e3
        self._queue_ms = _smoothed(self.load.queue_ms, waited_ms)
        self._batch_size = _smoothed(self._batch_size or len(pieces), len(pieces))
        self._num_steps += sum(not work.num_tokens for work, _ in pieces)
        self._num_tokens += sum(num_tokens for _, num_tokens in pieces)
        self._num_forwards += 1
        self._last_forward_at = now


def _times_core_lost() -> int:
    """How often this thread was made to leave its core to another one so far; 0 where only Linux would tell."""
    of_thread: int | None = getattr(resource, "RUSAGE_THREAD", None)
    return 0 if of_thread is None else resource.getrusage(of_thread).ru_nivcsw


def _smoothed(before: float, newest: float) -> float:
    return before + SMOOTHING * (newest - before)


def _outcome_of(call: Callable[[], object]) -> object:
    try:
        return call()
    except StopIteration as error:  # no future takes it
        return RuntimeError(_described(error))
    except BaseException as error:  # noqa: BLE001 - whoever awaits the call gets it, whatever it is
        return error


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _ended_here(reason: str) -> BlocksNotServedError:
    return BlocksNotServedError(f"this server can't compute any more ({reason}); take another route")


def _turn(turns: Generator[None, None, object]) -> object:
    try:
        next(turns)
    except StopIteration as end:
        return end.value
    return _UNFINISHED


def _joined(outputs: list[Tensor], blocks: BlockSpan) -> Tensor:
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=blocks.traits.batch_axis + 1)


def _settle(settled: Sequence[tuple[_Waiting, object]]) -> None:
    for waiting, outcome in settled:
        if waiting.future.done():  # cancelled
            continue
        if isinstance(outcome, BaseException):
            waiting.future.set_exception(outcome)
        else:
            queue_us = int((waiting.started_at - waiting.queued_at) * 1e6)
            waiting.future.set_result(Timed(outcome, queue_us, int(waiting.compute_s * 1e6)))
