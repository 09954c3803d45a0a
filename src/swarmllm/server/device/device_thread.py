"""The device thread: takes in what is asked for, runs what `scheduler` says next, and tells what came of it.

Started by `executor`, which knows the event loop. All private methods run in the thread.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from swarmllm.errors import ServerOutOfMemoryError
from swarmllm.server.device.accelerator import Accelerator
from swarmllm.server.device.burst_wait import BurstWait
from swarmllm.server.device.calls import UNFINISHED, Call, joined, outcome_of, outcomes_of
from swarmllm.server.device.device import log_lacks, lost_context, out_of_memory
from swarmllm.server.device.load_meter import DecodeTimes, Load, LoadMeter
from swarmllm.server.device.niceness import Niceness
from swarmllm.server.device.scheduler import Budget, Priority, Scheduler

logger = logging.getLogger(__name__)

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
