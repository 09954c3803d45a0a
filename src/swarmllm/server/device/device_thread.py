"""The device thread: the only thread that touches blocks and caches. It runs the work that `scheduler` chooses.

Sessions and sessionless requests call `DeviceThread` from the event loop and await their results; it knows neither
streams nor messages. A `Call` runs on its own. A `SessionStep` runs together with steps of other sessions. `LoadMeter`
counts what was computed, for announcements and metrics; it is pure, times are passed in, in seconds.
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
from typing import Generic, Never, TypeVar, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from swarmllm.errors import BlocksNotServedError, LocalProtocolError, ServerOutOfMemoryError
from swarmllm.models.span.packing import Packer, SessionCall
from swarmllm.server.device.device import Accelerator, log_out_of_memory, lost_context, out_of_memory
from swarmllm.server.device.niceness import Niceness
from swarmllm.server.device.scheduler import HOUSE, Account, Budget, BurstWait, Priority, Scheduler, Work

logger = logging.getLogger(__name__)

T = TypeVar("T")

UNFINISHED = object()
"""Result of a turn that isn't the last one of its work."""

LAST_STEPS = 512
"""Number of steps in the percentiles. Assumed: some minutes of one text, some seconds of many."""
SMOOTHING = 0.1
"""Share of the newest forward in the smoothed numbers."""
MOST_PACE = 100.0
"""Largest slowdown that a busy machine can explain."""
FORGET_QUEUE_S = 10.0
"""An idle server's last queue says nothing about the next step: its time halves in this many seconds."""

COUNTED_AFTER_S = 1e-3
"""Longest wait before a forward is counted, as the event loop needs Python's lock to send its results. Measured on two
cores, whose caches are full of weights: that takes 0.4 ms, and counting 0.1 ms."""
CLOSE_TIMEOUT_S = 2.0
"""A server must be gone within 10 s of SIGTERM, however long a block's load or a backward would still take."""

LONG_FORWARD = 64
"""Fewest tokens of a forward that shows the speed of forwards. Shorter ones take longer for each token."""
FORWARD_SMOOTHING = 0.25
"""Share of the newest of these. Assumed: a text has one or two of them, and hundreds of decode steps."""

StepMs = Callable[[int, int, int], float]
"""Expected milliseconds of a decode step, from its numbers of blocks, rows, and tokens in the caches of all rows."""
ForwardMs = Callable[[int, int], float]
"""Expected milliseconds of a forward, from its numbers of blocks and tokens."""


@dataclass(frozen=True, slots=True)
class Timed(Generic[T]):
    """A call's value and where its time went."""

    value: T
    queue_us: int
    compute_us: int


@dataclass(eq=False, slots=True, kw_only=True)
class Call(Work):
    """Work for the device thread, and the future that its caller awaits."""

    run: Callable[[], object] | None = None
    """The function to run on its own; None for a `SessionStep`."""
    future: "asyncio.Future[Timed[object]]" = field(init=False)
    outputs: list[Tensor] = field(init=False, default_factory=list)
    started_at: float = field(init=False, default=0.0)
    compute_s: float = field(init=False, default=0.0)

    def settle(self, outcome: object) -> None:
        """Give the caller the result or the exception; called in the event loop."""
        if self.future.done():  # cancelled
            return
        if isinstance(outcome, BaseException):
            self.future.set_exception(outcome)
        else:
            queue_us = int((self.started_at - self.queued_at) * 1e6)
            self.future.set_result(Timed(outcome, queue_us, int(self.compute_s * 1e6)))


@dataclass(eq=False, slots=True, kw_only=True)
class SessionStep(Call):
    """One step of one session, which may be packed with steps of other sessions."""

    packer: Packer
    """Runs it, together with other steps on the same blocks."""
    num_blocks: int = 0
    context_tokens: int = 0
    """Tokens in its session's cache before it, in all rows together."""
    num_rows: int = 1

    def take(self, num_tokens: int) -> SessionCall:
        """Return the next piece, ready to run. Called in the device thread; an exception fails this step alone."""
        raise NotImplementedError


Piece = tuple[Call, int]
"""A number of tokens of a call."""


def outcomes_of(pieces: Sequence[Piece]) -> list[object]:
    """Run the pieces: the outputs or the exception of each. A call that runs on its own comes alone."""
    call = pieces[0][0].run
    return _forward(pieces) if call is None else [outcome_of(call)]


def _forward(pieces: Sequence[Piece]) -> list[object]:
    """Run one forward for each span of blocks; mostly there is only one span."""
    outcomes: list[object] = [None] * len(pieces)
    calls: dict[Packer, list[tuple[int, SessionCall]]] = {}
    for idx, (waiting, num_tokens) in enumerate(pieces):
        step = cast(SessionStep, waiting)
        call = outcome_of(partial(step.take, num_tokens))
        if isinstance(call, SessionCall):
            calls.setdefault(step.packer, []).append((idx, call))
        else:
            outcomes[idx] = call
    for packer, group in calls.items():
        results = outcome_of(partial(packer.run_calls, [call for _, call in group]))
        for place, (idx, _) in enumerate(group):
            outcomes[idx] = results[place] if isinstance(results, list) else results
    return outcomes


def outcome_of(call: Callable[[], object]) -> object:
    """Run `call()`: its value, or the exception that it raises."""
    try:
        return call()
    except StopIteration as error:  # a future doesn't take it
        return RuntimeError(described(error))
    except BaseException as error:  # noqa: BLE001 - the caller gets it, whatever it is
        return error


def described(error: BaseException) -> str:
    """The error in one line."""
    return f"{type(error).__name__}: {error}"


def next_turn(turns: Generator[None, None, object]) -> object:
    """Run work until it yields: its value, or `UNFINISHED`."""
    try:
        next(turns)
    except StopIteration as end:
        return end.value
    return UNFINISHED


def joined(step: SessionStep) -> Tensor:
    """Join the outputs of a step's pieces."""
    outputs = step.outputs
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=step.packer.blocks.traits.batch_axis + 1)


@dataclass(frozen=True, slots=True)
class Load:
    """Load of the device thread, and its work so far."""

    queue_ms: float
    """Smoothed time that a session's step waited for its turn."""
    batch_size: float
    """Smoothed number of sessions per forward."""
    num_steps: int
    num_tokens: int
    num_forwards: int
    """Forwards of sessions; training's requests are not counted."""
    num_failures: int
    """Failed calls, of sessions and of training."""


class LoadMeter:
    """Counts forwards of sessions."""

    def __init__(self) -> None:
        self._queue_ms = self._batch_size = self._last_forward_at = 0.0
        self._num_steps = self._num_tokens = self._num_forwards = self.num_failures = 0
        self._step_s: deque[float] = deque(maxlen=LAST_STEPS)
        self._token_s: deque[float] = deque(maxlen=LAST_STEPS)
        self._last_tokens: dict[str, tuple[float, int]] = {}
        """Arrival and position of the last decode step, by session."""
        self._step_ms: StepMs | None = None
        self._forward_ms: ForwardMs | None = None
        self.pace = self.forward_pace = 1.0
        """Smoothed time of real decode steps, and of long forwards, as multiples of the expected times."""

    def expect(self, step_ms: StepMs | None, forward_ms: ForwardMs | None = None) -> None:
        """Compare the time of decode steps with `step_ms`, and that of forwards with `forward_ms`, from now on."""
        self._step_ms, self._forward_ms = step_ms, forward_ms
        self.pace = self.forward_pace = 1.0

    def load(self, now: float) -> Load:
        """Return the load as of now."""
        idle_s = max(0.0, now - self._last_forward_at)
        queue_ms = self._queue_ms * 0.5 ** (idle_s / FORGET_QUEUE_S)
        return Load(
            queue_ms, self._batch_size, self._num_steps, self._num_tokens, self._num_forwards, self.num_failures
        )

    def step_ms(self, share: float) -> float:
        """Return the time within which this share of the last 512 decode steps were ready; 0 if there was none."""
        return _percentile(self._step_s, share) * 1e3

    def token_ms(self) -> float:
        """Return the median of the time from token to token of texts, in the last 512 decode steps; 0 if unknown."""
        return _percentile(self._token_s, 0.5) * 1e3

    def forget(self, session: str) -> None:
        """Note that the session has ended."""
        self._last_tokens.pop(session, None)

    def count(self, pieces: Sequence[Piece], now: float, since: float, ended_at: float) -> None:
        """Count a forward of these pieces that began `now`; waiting before `since` was a pause for other programs."""
        waited_ms = sum(max(0.0, now - max(call.queued_at, since)) for call, _ in pieces) / len(pieces) * 1e3
        self._queue_ms = _smoothed(self.load(now).queue_ms, waited_ms)
        self._batch_size = _smoothed(self._batch_size or len(pieces), len(pieces))
        self._num_steps += sum(not call.num_tokens for call, _ in pieces)
        self._num_tokens += sum(num_tokens for _, num_tokens in pieces)
        self._num_forwards += 1
        self._step_s.extend(
            ended_at - max(call.queued_at, since) for call, _ in pieces if call.priority == Priority.DECODE
        )
        for call, _ in pieces:
            if isinstance(call, SessionStep) and call.session is not None and not call.num_tokens:
                self._token_came(call, call.session)
        self._last_forward_at = now
        self._compare(pieces, (ended_at - now) * 1e3)

    def _token_came(self, step: SessionStep, session: str) -> None:
        """Note how long the session's client took for a token: with all servers, the network and its own work."""
        before = self._last_tokens.pop(session, None)
        if step.priority is not Priority.DECODE:
            return  # a prompt: people may have thought about it
        position = step.context_tokens // step.num_rows
        self._last_tokens[session] = step.queued_at, position
        if before is not None and position > before[1]:
            self._token_s.append((step.queued_at - before[0]) / (position - before[1]))

    def _compare(self, pieces: Sequence[Piece], took_ms: float) -> None:
        steps = [call for call, _ in pieces if isinstance(call, SessionStep)]
        spans, kinds = {step.num_blocks for step in steps}, {step.priority for step in steps}
        if len(steps) < len(pieces) or len(spans) != 1 or len(kinds) != 1:
            return  # a prompt was computed together with decode steps, or other blocks
        num_tokens = sum(num_tokens for _, num_tokens in pieces)
        if kinds == {Priority.PREFILL}:
            self.compare_forward(spans.pop(), num_tokens, took_ms)
        elif kinds == {Priority.DECODE} and self._step_ms is not None:
            expected_ms = self._step_ms(spans.pop(), num_tokens, sum(step.context_tokens for step in steps))
            self.pace = _followed(self.pace, took_ms, expected_ms, SMOOTHING)

    def compare_forward(self, num_blocks: int, num_tokens: int, took_ms: float) -> None:
        """Compare a forward of so many tokens with the expected time."""
        if self._forward_ms is not None and num_tokens >= LONG_FORWARD:
            expected_ms = self._forward_ms(num_blocks, num_tokens)
            self.forward_pace = _followed(self.forward_pace, took_ms, expected_ms, FORWARD_SMOOTHING)


def _percentile(seconds: deque[float], share: float) -> float:
    last = sorted(seconds.copy())  # a copy in one go, since the device thread goes on counting
    return last[int(share * (len(last) - 1))] if last else 0.0


def _followed(pace: float, took_ms: float, expected_ms: float, share: float) -> float:
    """The pace after another forward."""
    if expected_ms <= 0:
        return pace
    return min(max(pace + share * (took_ms / expected_ms - pace), 1 / MOST_PACE), MOST_PACE)


def _smoothed(before: float, newest: float) -> float:
    return before + SMOOTHING * (newest - before)


Settled = list[tuple[Call, object]]
"""Calls that are done or have failed, each with its result or exception."""


class LostContextError(Exception):
    """The device takes no calls any more: better to end than to fail all clients for ever."""


class DeviceThread:
    """One thread and its queue. `close()` ends the thread after the calls that are queued."""

    def __init__(
        self, budget: Budget | None = None, niceness: Niceness | None = None, *, name: str = "swarmllm-device"
    ) -> None:
        self.accelerator: Accelerator | None = None
        """The device of the blocks; None if the blocks are on the processor itself."""
        self.on_out_of_memory: Callable[[], None] | None = None
        """Called in the device thread after calls that failed for lack of memory."""
        self._loop = asyncio.get_running_loop()
        self._waiting: set[asyncio.Future[Timed[object]]] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._death: asyncio.Future[BaseException] = self._loop.create_future()
        """The mistake that ended the thread."""
        self.niceness = niceness or Niceness()
        self._burst_wait = BurstWait()
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        """Functions that change the scheduler, for the thread to call."""
        self._scheduler: Scheduler[Call] = Scheduler(budget or Budget())
        self._meter = LoadMeter()
        self._count_later: Callable[[], None] | None = None
        """Counts the last forward."""
        self._stopping = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------ called from the event loop

    @property
    def num_calls(self) -> int:
        """Number of calls that are queued or running."""
        return len(self._waiting)

    @property
    def load(self) -> Load:
        """Load of the thread, as of now."""
        return self._meter.load(time.perf_counter())

    @property
    def step_ms_p95(self) -> float:
        """Within this time 95 % of the last decode steps were ready, waiting included."""
        return self._meter.step_ms(0.95)

    @property
    def step_ms_p50(self) -> float:
        """The same for half of them."""
        return self._meter.step_ms(0.5)

    @property
    def token_ms(self) -> float:
        """Median of the time from token to token of texts, as this server has seen the steps come."""
        return self._meter.token_ms()

    @property
    def pace(self) -> float:
        """Time of decode steps now, as a multiple of the time measured when the blocks were loaded."""
        return self._meter.pace

    @property
    def forward_pace(self) -> float:
        """The same of forwards of many tokens."""
        return self._meter.forward_pace

    def note_forward(self, num_blocks: int, num_tokens: int, compute_us: int) -> None:
        """Note the time of a sessionless forward of so many tokens."""
        self._inbox.put(partial(self._meter.compare_forward, num_blocks, num_tokens, compute_us / 1e3))

    async def run_call(self, call: Callable[[], T], priority: Priority, account: Account = HOUSE) -> Timed[T]:
        """Run `call()` in the device thread on its own, on behalf of `account`; its exceptions are raised here.

        A call that is cancelled before its turn is not run.
        """
        work = Call(num_tokens=1, granule=1, priority=priority, account=account, run=call)
        return cast(Timed[T], await self._result(work))

    async def run_in_turns(
        self, turns: Generator[None, None, T], priority: Priority, account: Account = HOUSE
    ) -> Timed[T]:
        """Run work that lets more urgent calls pass wherever it yields; otherwise as `run_call`.

        Once begun, it comes before all waiting calls that aren't more urgent. If it is cancelled, it isn't continued.
        """
        # The number of turns isn't known before the end.
        run = partial(next_turn, turns)
        work = Call(num_tokens=sys.maxsize, granule=1, priority=priority, account=account, run=run)
        return cast(Timed[T], await self._result(work))

    async def run_step(self, step: SessionStep) -> Timed[Tensor]:
        """Compute the step's outputs, together with other sessions' steps; an exception of this step is raised here.

        A step that is cancelled before its turn is not run.
        """
        return cast(Timed[Tensor], await self._result(step))

    def forget(self, session: str) -> None:
        """Expect no more steps of a session that has ended."""
        self._inbox.put(partial(self._scheduler.forget, session))
        self._inbox.put(partial(self._meter.forget, session))

    async def wait_until_idle(self) -> None:
        """Return when nothing is queued or running."""
        await self._idle.wait()

    async def watch(self) -> Never:
        """Wait until the thread ends without having been told to; all waiting callers are told as well.

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
        """Let queued calls finish, then end the thread; a call that takes longer ends with the process."""
        self._inbox.put(self._stop)
        await asyncio.to_thread(self._thread.join, CLOSE_TIMEOUT_S)

    async def _result(self, call: Call) -> Timed[object]:
        if self._death.done():
            raise _ended_here(self._death.result())
        call.queued_at, call.future = time.perf_counter(), self._loop.create_future()
        self._inbox.put(partial(self._add, call))
        self._idle.clear()
        self._waiting.add(call.future)
        try:
            return await call.future
        except asyncio.CancelledError:
            self._inbox.put(partial(self._scheduler.discard, call))
            raise
        finally:
            self._waiting.discard(call.future)
            if not self._waiting:
                self._idle.set()

    def _died(self, error: BaseException) -> None:
        self._death.set_result(error)
        for future in self._waiting:
            if not future.done():
                future.set_exception(_ended_here(error))

    # ------------------------------------------------------------------ called in the thread

    def adopt(
        self,
        *,
        doubling_tokens: int,
        beside_decode: int,
        step_ms: StepMs | None = None,
        forward_ms: ForwardMs | None = None,
    ) -> None:
        """Use these numbers from the next forward on; called by a call that has measured them.

        `doubling_tokens` and `beside_decode` (`max_prefill_tokens_beside_decode`) are of `Budget`; decode steps are
        compared with `step_ms`, long forwards with `forward_ms`.
        """
        most = self._scheduler.budget.max_tokens
        self._scheduler.budget = replace(
            self._scheduler.budget,
            doubling_tokens=min(max(1, doubling_tokens), most),
            max_prefill_tokens_beside_decode=min(max(1, beside_decode), most),
        )
        self._meter.expect(step_ms, forward_ms)

    def _work(self) -> None:
        try:
            while self._admit():
                # A method of its own: its local variables would keep a session alive until the next call comes.
                self._run_next()
        except LostContextError as error:  # the process ends with a sentence about it
            self._tell_loop(self._died, error)
        except BaseException as error:  # exceptions of calls went to their callers; this is our own mistake
            logger.exception("the device thread ended")
            self._tell_loop(self._died, error)

    def _admit(self) -> bool:
        """Take in new calls, and wait for them if there is nothing else to do; False when the thread is to end."""
        if self._count_later is not None:
            self._count_last(self._count_later)
        while True:
            try:
                # Don't bind the function to a variable: it would keep the session's cache until the next call comes.
                self._inbox.get(timeout=self._wait_s())()
            except queue.Empty:
                return bool(len(self._scheduler)) or not self._stopping

    def _count_last(self, count: Callable[[], None]) -> None:
        """Count the last forward. If nothing else waits, this thread waits a moment before it does so: it would keep
        Python's lock, which the event loop needs to send the results."""
        arrived: Callable[[], None] | None = None
        if not len(self._scheduler):
            with suppress(queue.Empty):
                arrived = self._inbox.get(timeout=COUNTED_AFTER_S)
        self._count_later = None
        count()
        del count  # it keeps the forward's sessions
        if arrived is not None:
            arrived()

    def _add(self, call: Call) -> None:
        self._scheduler.add(call)
        self._burst_wait.came(time.perf_counter())

    def _stop(self) -> None:
        self._stopping = True

    def _wait_s(self) -> float | None:
        """Seconds to wait for new calls; None: until one comes."""
        if self._stopping:
            return 0.0
        if not len(self._scheduler):
            return None
        now = time.perf_counter()
        if pause_s := self.niceness.pause_s(now):
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
            self._scheduler.ran(now)  # or it would keep cancelled calls, with their sessions' caches
            return
        for call, _ in pieces:
            call.started_at = call.started_at or now
        outcomes = self._fetched(outcomes_of(pieces))
        ended_at = time.perf_counter()
        num_failures = sum(isinstance(outcome, BaseException) for outcome in outcomes)
        cpu_s = time.thread_time() - cpu_before
        self._count_later = partial(self._count, pieces, num_failures, now, ended_at, cpu_s)
        for call, _ in pieces:
            call.compute_s += ended_at - now
        for outcome in outcomes:
            if reason := lost_context(outcome):
                raise LostContextError(reason)
        settled = self._settled(zip((call for call, _ in pieces), outcomes, strict=True))
        if self.on_out_of_memory and any(isinstance(outcome, ServerOutOfMemoryError) for _, outcome in settled):
            outcome_of(self.on_out_of_memory)
        self._tell_loop(_settle, settled)

    def _count(self, pieces: list[Piece], num_failures: int, began_at: float, ended_at: float, cpu_s: float) -> None:
        """Count a forward that took so long, in the meters and in the scheduler."""
        self._meter.num_failures += num_failures
        if all(call.run is None and call.priority is Priority.DECODE for call, _ in pieces):
            self._burst_wait.took(ended_at - began_at)
        if pieces[0][0].run is None:
            # Without the pauses that are made for other programs: the announced speed has them already.
            self._meter.count(pieces, began_at, self.niceness.resumes_at, ended_at)
        self._scheduler.ran(ended_at)
        self.niceness.ran(cpu_s, ended_at - began_at, ended_at)

    def _fetched(self, outcomes: list[object]) -> list[object]:
        """Wait for the device and copy all tensors into host memory; if it has failed, return its exception instead."""
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
        """Pick the calls that are done or have failed, and take them out of the scheduler."""
        settled: Settled = []
        for call, outcome in outcomes:
            if outcome is UNFINISHED:
                continue
            if not isinstance(call, SessionStep) or isinstance(outcome, BaseException):
                self._scheduler.discard(call)  # its other pieces
                settled.append((call, outcome))
            else:
                call.outputs.append(cast(Tensor, outcome))
                if not call.num_tokens:
                    settled.append((call, outcome_of(partial(joined, call))))
        log_out_of_memory(outcome for _, outcome in settled)
        return [(call, out_of_memory(outcome) or outcome) for call, outcome in settled]

    def _tell_loop(self, tell: Callable[[T], None], what: T) -> None:
        with suppress(RuntimeError):  # the loop is closed: the server is gone
            self._loop.call_soon_threadsafe(tell, what)


def _settle(settled: Settled) -> None:
    for call, outcome in settled:
        call.settle(outcome)


def _ended_here(error: BaseException) -> BlocksNotServedError:
    reason = str(error) if isinstance(error, LostContextError) else described(error)
    return BlocksNotServedError(f"this server can't compute any more ({reason}); take another route")
