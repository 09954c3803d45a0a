"""The device thread: the only thread that touches blocks and caches. It runs what `scheduler` chooses.

`Executor` is the event loop's side: sessions and sessionless requests await their results there. `DeviceThread` is the
thread's side; its private methods run in the thread. A `Call` runs on its own, or is a step of a session, which runs
together with steps of other sessions. `LoadMeter` counts what was computed, for announcements and metrics; it is pure,
times are passed in, in seconds.
"""

import asyncio
import logging
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Generic, Never, Protocol, TypeVar, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from swarmllm.errors import BlocksNotServedError, LocalProtocolError, ServerOutOfMemoryError
from swarmllm.models.span.packing import Packer, SessionCall
from swarmllm.server.device.device import Accelerator, log_lacks, lost_context, out_of_memory
from swarmllm.server.device.niceness import Niceness
from swarmllm.server.device.scheduler import HOUSE, Account, Budget, BurstWait, Priority, Scheduler, Work

logger = logging.getLogger(__name__)

T = TypeVar("T")

UNFINISHED = object()
"""What a turn gives that isn't the last one."""

LAST_STEPS = 512
"""Steps that the 95th percentile is of. Assumed: some minutes of one text, some seconds of many."""
SMOOTHING = 0.1
"""Share of the newest forward in the smoothed numbers."""
MEASURED_BATCH = 8
"""Rows of `DecodeTimes.ms_per_block_batch8`."""
MOST_PACE = 100.0
"""What no busy machine explains any more."""
FORGET_QUEUE_S = 10.0
"""An idle server's last queue says nothing about the next step: its time halves in this many seconds."""

CLOSE_TIMEOUT_S = 2.0
"""A server must be gone within 10 s of SIGTERM, however long a block's load or a batch would still take."""


@dataclass(frozen=True, slots=True)
class Timed(Generic[T]):
    """A call's value and where its time went."""

    value: T
    queue_us: int
    compute_us: int


class SessionStep(Protocol):
    """One step of one session, which may be packed with those of others."""

    session: str
    priority: Priority
    account: Account
    num_tokens: int
    granule: int
    """Tokens of its smallest piece; `num_tokens` if it can't be cut."""
    num_blocks: int
    context_tokens: int
    """Tokens in its session's cache before it, in all rows together."""

    @property
    def packer(self) -> Packer:
        """Runs it, together with those of others on the same blocks."""
        ...

    def take(self, num_tokens: int) -> SessionCall:
        """The next piece, ready to run. Called in the device thread; what it raises fails this step alone."""


@dataclass(eq=False, slots=True)
class Call(Work):
    """What the scheduler sees of a call or step, and what the device thread has to know in addition."""

    future: "asyncio.Future[Timed[object]]"
    run: Callable[[], object] | None = None
    """What runs on its own; None: `step` is computed with others."""
    step: SessionStep | None = None
    outputs: list[Tensor] = field(default_factory=list)
    started_at: float = 0.0
    compute_s: float = 0.0

    def settle(self, outcome: object) -> None:
        """Tell whoever waits for it; called in the event loop."""
        if self.future.done():  # cancelled
            return
        if isinstance(outcome, BaseException):
            self.future.set_exception(outcome)
        else:
            queue_us = int((self.started_at - self.queued_at) * 1e6)
            self.future.set_result(Timed(outcome, queue_us, int(self.compute_s * 1e6)))


Piece = tuple[Call, int]
"""Some tokens of a call."""


def outcomes_of(pieces: Sequence[Piece]) -> list[object]:
    """What each piece gives: outputs or an exception. One that runs on its own comes alone."""
    call = pieces[0][0].run
    return _forward(pieces) if call is None else [outcome_of(call)]


def _forward(pieces: Sequence[Piece]) -> list[object]:
    """One forward for each span of blocks, which is mostly one."""
    outcomes: list[object] = [None] * len(pieces)
    calls: dict[Packer, list[tuple[int, SessionCall]]] = {}
    for idx, (waiting, num_tokens) in enumerate(pieces):
        step = cast(SessionStep, waiting.step)
        call = outcome_of(partial(step.take, num_tokens))
        if isinstance(call, SessionCall):
            calls.setdefault(step.packer, []).append((idx, call))
        else:
            outcomes[idx] = call
    for packer, group in calls.items():
        results = outcome_of(partial(packer.run, [call for _, call in group]))
        for place, (idx, _) in enumerate(group):
            outcomes[idx] = results[place] if isinstance(results, list) else results
    return outcomes


def outcome_of(call: Callable[[], object]) -> object:
    """The value of `call()`, or what it raises."""
    try:
        return call()
    except StopIteration as error:  # no future takes it
        return RuntimeError(described(error))
    except BaseException as error:  # noqa: BLE001 - whoever awaits the call gets it, whatever it is
        return error


def described(error: BaseException) -> str:
    """The error in one line."""
    return f"{type(error).__name__}: {error}"


def next_turn(turns: Generator[None, None, object]) -> object:
    """Run work until it lets others pass: its value, or `UNFINISHED`."""
    try:
        next(turns)
    except StopIteration as end:
        return end.value
    return UNFINISHED


def joined(step: SessionStep, outputs: list[Tensor]) -> Tensor:
    """The outputs of a whole step, from those of its pieces."""
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=step.packer.blocks.traits.batch_axis + 1)


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
    """Forwards of sessions; training's batches are not counted."""
    num_failures: int
    """Calls that failed, training's as well."""


@dataclass(frozen=True, slots=True)
class DecodeTimes:
    """What decode steps were measured to take when the blocks were loaded, as `ServerInfo` announces it."""

    ms_per_block: float
    ms_per_block_batch8: float = 0.0
    """0 = not measured, here and below."""
    context_ms_per_block_per_1k: float = 0.0

    def step_ms(self, num_blocks: int, num_rows: int, context_tokens: int) -> float:
        """Of that many rows, which have so many tokens in the cache together."""
        per_row = max(0.0, self.ms_per_block_batch8 - self.ms_per_block) / (MEASURED_BATCH - 1)
        ms = self.ms_per_block + per_row * (num_rows - 1) + self.context_ms_per_block_per_1k * context_tokens / 1000
        return num_blocks * ms


class LoadMeter:
    """Counts forwards of sessions."""

    def __init__(self) -> None:
        self._queue_ms = self._batch_size = self._last_forward_at = 0.0
        self._num_steps = self._num_tokens = self._num_forwards = self.num_failures = 0
        self._step_s: deque[float] = deque(maxlen=LAST_STEPS)
        self._times: DecodeTimes | None = None
        self.pace = 1.0
        """Smoothed time of real decode steps, as a multiple of what they were measured to take."""

    def expect(self, times: DecodeTimes) -> None:
        """Compare decode steps with these from now on."""
        self._times, self.pace = times, 1.0

    def load(self, now: float) -> Load:
        """The load as of now."""
        idle_s = max(0.0, now - self._last_forward_at)
        queue_ms = self._queue_ms * 0.5 ** (idle_s / FORGET_QUEUE_S)
        return Load(
            queue_ms, self._batch_size, self._num_steps, self._num_tokens, self._num_forwards, self.num_failures
        )

    def step_ms_p95(self) -> float:
        """Within which 95 % of the last 512 decode steps were ready; 0 if there was none."""
        last = sorted(self._step_s.copy())  # a copy in one go, since the device thread goes on counting
        return last[int(0.95 * (len(last) - 1))] * 1e3 if last else 0.0

    def count(self, pieces: Sequence[Piece], now: float, since: float, ended_at: float) -> None:
        """A forward of these pieces began `now` and has ended; nobody has waited for us from before `since`."""
        waited_ms = sum(max(0.0, now - max(call.queued_at, since)) for call, _ in pieces) / len(pieces) * 1e3
        self._queue_ms = _smoothed(self.load(now).queue_ms, waited_ms)
        self._batch_size = _smoothed(self._batch_size or len(pieces), len(pieces))
        self._num_steps += sum(not call.num_tokens for call, _ in pieces)
        self._num_tokens += sum(num_tokens for _, num_tokens in pieces)
        self._num_forwards += 1
        self._step_s.extend(
            ended_at - max(call.queued_at, since) for call, _ in pieces if call.priority == Priority.DECODE
        )
        self._last_forward_at = now
        self._compare(pieces, (ended_at - now) * 1e3)

    def _compare(self, pieces: Sequence[Piece], took_ms: float) -> None:
        if self._times is None:
            return
        steps = [call.step for call, _ in pieces if call.priority is Priority.DECODE and call.step is not None]
        spans = {step.num_blocks for step in steps}
        if len(steps) < len(pieces) or len(spans) != 1:
            return  # a prompt was computed beside them, or other blocks
        rows, contexts = sum(step.num_tokens for step in steps), sum(step.context_tokens for step in steps)
        expected_ms = self._times.step_ms(spans.pop(), rows, contexts)
        if expected_ms > 0:
            self.pace = min(max(_smoothed(self.pace, took_ms / expected_ms), 1 / MOST_PACE), MOST_PACE)


def _smoothed(before: float, newest: float) -> float:
    return before + SMOOTHING * (newest - before)


Settled = list[tuple[Call, object]]
"""Calls that are done or have failed, with what they are to be told."""


class LostContextError(Exception):
    """The device takes no calls any more: better to end than to fail everybody for ever."""


@dataclass(frozen=True, slots=True)
class _Withdrawn:
    call: Call


@dataclass(frozen=True, slots=True)
class _Ended:
    session: str


class DeviceThread:
    """One thread and its queue. `on_settled` and `on_death` are called in the thread."""

    def __init__(
        self,
        budget: Budget,
        niceness: Niceness,
        *,
        name: str,
        on_settled: Callable[[Settled], None],
        on_death: Callable[[BaseException], None],
    ) -> None:
        self._niceness = niceness
        self._burst_wait = BurstWait()
        self._inbox: queue.SimpleQueue[Call | _Withdrawn | _Ended | None] = queue.SimpleQueue()
        self._scheduler: Scheduler[Call] = Scheduler(budget)
        self._meter = LoadMeter()
        self._on_settled, self._on_death = on_settled, on_death
        self.on_out_of_memory: Callable[[], None] | None = None
        """Called in the device thread after calls that failed for lack of memory."""
        self.accelerator: Accelerator | None = None
        """What blocks are on, if that isn't the processor itself."""
        self._stopping = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    @property
    def load(self) -> Load:
        """How busy it is, as of now."""
        return self._meter.load(time.perf_counter())

    @property
    def step_ms_p95(self) -> float:
        """Within which 95 % of the last decode steps were ready, waiting included."""
        return self._meter.step_ms_p95()

    @property
    def pace(self) -> float:
        """How long decode steps take, as a multiple of what was measured when the blocks were loaded."""
        return self._meter.pace

    def put(self, call: Call) -> None:
        """Queue a call."""
        self._inbox.put(call)

    def withdraw(self, call: Call) -> None:
        """Forget a call for which nobody waits any more; it isn't run, unless its turn has come already."""
        self._inbox.put(_Withdrawn(call))

    def forget(self, session: str) -> None:
        """Count no more on steps of a session that has ended."""
        self._inbox.put(_Ended(session))

    def stop(self) -> None:
        """End the thread after what is queued."""
        self._inbox.put(None)

    def join(self, timeout_s: float) -> None:
        """Wait until the thread has ended, but no longer than `timeout_s`."""
        self._thread.join(timeout_s)

    def adopt(self, *, doubling_tokens: int, beside_decode: int) -> None:
        """Go by these from the next forward on; called by a call that runs here, which measured what the blocks can do.

        They are `doubling_tokens` and `max_prefill_tokens_beside_decode` of `Budget`.
        """
        most = self._scheduler.budget.max_tokens
        self._scheduler.budget = replace(
            self._scheduler.budget,
            doubling_tokens=min(max(1, doubling_tokens), most),
            max_prefill_tokens_beside_decode=min(max(1, beside_decode), most),
        )

    def expect(self, times: DecodeTimes) -> None:
        """Compare decode steps with these from now on; called as `adopt` is."""
        self._meter.expect(times)

    # ------------------------------------------------------------------ in the thread

    def _work(self) -> None:
        try:
            while self._admit():
                # A method of its own: a session must not outlive its stream only because nobody else comes.
                self._run_next()
        except BaseException as error:  # what belongs to one call went to who awaits it; this is our own mistake
            logger.exception("the device thread ended")
            self._on_death(error)

    def _admit(self) -> bool:
        """Take in what has arrived, and wait for it if nothing else is to be done; False when all is done for good."""
        while True:
            try:
                # Without a name here, which would keep the last session's cache as long as nobody else comes.
                self._take_in(self._inbox.get(timeout=self._wait_s()))
            except queue.Empty:
                return bool(len(self._scheduler)) or not self._stopping

    def _take_in(self, item: Call | _Withdrawn | _Ended | None) -> None:
        if item is None:
            self._stopping = True
        elif isinstance(item, _Withdrawn):
            self._scheduler.discard(item.call)
        elif isinstance(item, _Ended):
            self._scheduler.forget(item.session)
        else:
            self._scheduler.add(item)
            self._burst_wait.came(time.perf_counter())

    def _wait_s(self) -> float | None:
        """How long to wait for something to arrive; None: for as long as it takes."""
        if self._stopping:
            return 0.0
        if not len(self._scheduler):
            return None
        now = time.perf_counter()
        if pause_s := self._niceness.pause_s(now):
            return pause_s
        if hold_s := self._scheduler.hold_s(now):
            return hold_s
        num_here, num_decoding = self._scheduler.decoding(now)
        if 0 < num_here < num_decoding:
            return self._burst_wait.wait_s(now)
        return self._scheduler.pause_s(now)

    def _run_next(self) -> None:
        now, cpu_before = time.perf_counter(), time.thread_time()
        self._burst_wait.begins()
        pieces = [(call, size) for call, size in self._scheduler.next(now) if not call.future.cancelled()]
        if not pieces:
            self._scheduler.ran(now)  # or it would keep what was cancelled, with its session's cache
            return
        for call, _ in pieces:
            call.started_at = call.started_at or now
        outcomes = self._fetched(outcomes_of(pieces))
        ended_at = time.perf_counter()
        self._meter.num_failures += sum(isinstance(outcome, BaseException) for outcome in outcomes)
        if all(call.step is not None and call.priority is Priority.DECODE for call, _ in pieces):
            self._burst_wait.took(ended_at - now)
        if pieces[0][0].step is not None:
            # Without the pauses that are made for others: the announced speed has them already.
            self._meter.count(pieces, now, self._niceness.resumes_at, ended_at)
        self._scheduler.ran(ended_at)
        self._niceness.ran(time.thread_time() - cpu_before, ended_at - now, ended_at)
        for call, _ in pieces:
            call.compute_s += ended_at - now
        for outcome in outcomes:
            if reason := lost_context(outcome):
                raise LostContextError(reason)
        settled = self._settled(zip((call for call, _ in pieces), outcomes, strict=True))
        if self.on_out_of_memory and any(isinstance(outcome, ServerOutOfMemoryError) for _, outcome in settled):
            outcome_of(self.on_out_of_memory)
        self._on_settled(settled)

    def _fetched(self, outcomes: list[object]) -> list[object]:
        """The same when the device has computed them, with all tensors in host memory; or why it couldn't."""
        if self.accelerator is None:
            return outcomes
        leaves, structure = tree_flatten(outcomes)
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        copies = outcome_of(partial(self.accelerator.fetch, [leaves[place] for place in places]))
        if isinstance(copies, BaseException):
            return [outcome if isinstance(outcome, BaseException) else copies for outcome in outcomes]
        for place, copy in zip(places, cast(list[Tensor], copies), strict=True):
            leaves[place] = copy
        return cast(list[object], tree_unflatten(leaves, structure))

    def _settled(self, outcomes: Iterable[tuple[Call, object]]) -> Settled:
        """Those that are done or have failed; the scheduler has no more of them."""
        settled: Settled = []
        for call, outcome in outcomes:
            if outcome is UNFINISHED:
                continue
            if call.step is None or isinstance(outcome, BaseException):
                self._scheduler.discard(call)  # what is left of it
                settled.append((call, outcome))
            else:
                call.outputs.append(cast(Tensor, outcome))
                if not call.num_tokens:
                    settled.append((call, outcome_of(partial(joined, call.step, call.outputs))))
        log_lacks(outcome for _, outcome in settled)
        return [(call, out_of_memory(outcome) or outcome) for call, outcome in settled]


class Executor:
    """Runs calls in one thread of its own. `close()` ends the thread after the calls that are queued."""

    def __init__(
        self, budget: Budget | None = None, niceness: Niceness | None = None, *, name: str = "swarmllm-device"
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiting: set[asyncio.Future[Timed[object]]] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._death: asyncio.Future[BaseException] = self._loop.create_future()
        """What ended the thread, if that is a mistake."""
        self.thread = DeviceThread(
            budget or Budget(),
            niceness or Niceness(),
            name=name,
            on_settled=partial(self._tell_loop, _settle),
            on_death=partial(self._tell_loop, self._died),
        )

    @property
    def num_calls(self) -> int:
        """Calls that are queued or running."""
        return len(self._waiting)

    async def run(self, call: Callable[[], T], priority: Priority, account: Account = HOUSE) -> Timed[T]:
        """The value of `call()`, run in the device thread on its own, for `account`; its exceptions are raised here.

        A call that is cancelled before its turn is not run.
        """
        return cast(Timed[T], await self._result(priority, account, num_tokens=1, run=call))

    async def run_in_turns(
        self, turns: Generator[None, None, T], priority: Priority, account: Account = HOUSE
    ) -> Timed[T]:
        """The value of work that lets those pass who are more urgent, wherever it yields; otherwise as `run`.

        Once begun, it comes before all that waits and isn't more urgent. If it is cancelled, it isn't continued.
        """
        # How many turns it takes shows when it has ended.
        run = partial(next_turn, turns)
        return cast(Timed[T], await self._result(priority, account, num_tokens=sys.maxsize, run=run))

    async def step(self, step: SessionStep) -> Timed[Tensor]:
        """The step's outputs, computed in the device thread together with other sessions' steps; raises what fails it.

        A step that is cancelled before its turn is not run.
        """
        return cast(
            Timed[Tensor], await self._result(step.priority, step.account, step.num_tokens, step.granule, step=step)
        )

    async def _result(
        self,
        priority: Priority,
        account: Account,
        num_tokens: int,
        granule: int = 1,
        *,
        run: Callable[[], object] | None = None,
        step: SessionStep | None = None,
    ) -> Timed[object]:
        if self._death.done():
            raise _ended_here(self._death.result())
        call = Call(
            num_tokens=num_tokens,
            granule=granule,
            priority=priority,
            queued_at=time.perf_counter(),
            session=None if step is None else step.session,
            account=account,
            future=self._loop.create_future(),
            run=run,
            step=step,
        )
        self.thread.put(call)
        self._idle.clear()
        self._waiting.add(call.future)
        try:
            return await call.future
        except asyncio.CancelledError:
            self.thread.withdraw(call)
            raise
        finally:
            self._waiting.discard(call.future)
            if not self._waiting:
                self._idle.set()

    async def wait_until_idle(self) -> None:
        """Return when nothing is queued or running."""
        await self._idle.wait()

    async def watch(self) -> Never:
        """Wait until the thread ends without having been told to; everybody who waits for it is told as well.

        Raises:
            LocalProtocolError: it has ended, so this server can't compute any more.
        """
        error = await asyncio.shield(self._death)
        if isinstance(error, LostContextError):
            raise LocalProtocolError(
                f"this server's device can't be used by its process any more ({error}): start the server again, and if "
                "that happens more than once, look whether the device is in order"
            )
        raise LocalProtocolError(
            f"the device thread, which computes for this server, ended by a mistake of swarmllm ({described(error)}): "
            "start the server again, and please report it"
        )

    async def close(self) -> None:
        """Let what is queued finish, then end the thread; a call that takes longer ends with the process."""
        self.thread.stop()
        await asyncio.to_thread(self.thread.join, CLOSE_TIMEOUT_S)

    def _died(self, error: BaseException) -> None:
        self._death.set_result(error)
        for future in self._waiting:
            if not future.done():
                future.set_exception(_ended_here(error))

    def _tell_loop(self, tell: Callable[[T], None], what: T) -> None:
        """Called in the device thread."""
        with suppress(RuntimeError):  # the loop is closed: the server is gone and nobody waits
            self._loop.call_soon_threadsafe(tell, what)


def _settle(settled: Settled) -> None:
    for call, outcome in settled:
        call.settle(outcome)


def _ended_here(error: BaseException) -> BlocksNotServedError:
    reason = str(error) if isinstance(error, LostContextError) else described(error)
    return BlocksNotServedError(f"this server can't compute any more ({reason}); take another route")
