"""Promises of the scheduler for any queue: nobody starves, nothing is over the budget, sessions keep their order."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmllm.server.device.scheduler import HOUSE, Account, Budget, Priority, Scheduler, Work

BUDGET = Budget(max_sessions=4, max_tokens=32, max_prefill_tokens_beside_decode=8, decoding_s=0.5, pause_s=0.3)
FORWARD_S = 0.1
SESSIONS = ("a", "b", "c", "d", "e", "f")


@dataclass(eq=False, slots=True)
class Job(Work):
    """Work that remembers what it was."""

    order: int = 0
    whole: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.whole = self.num_tokens


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    kind = draw(st.sampled_from(("decode", "prefill", "whole prefill", "alone", "training")))
    session = draw(st.sampled_from(SESSIONS))
    rows = draw(st.integers(1, 3))
    if kind == "decode":
        size = rows * draw(st.integers(1, 4))
        return Job(num_tokens=size, granule=size, priority=Priority.DECODE, queued_at=0, session=session)
    if kind.endswith("prefill"):
        size = rows * draw(st.integers(1, 60))
        granule = rows if kind == "prefill" else size
        return Job(num_tokens=size, granule=granule, priority=Priority.PREFILL, queued_at=0, session=session)
    priority = Priority.DECODE if kind == "alone" else Priority.SESSIONLESS
    return Job(num_tokens=1, granule=1, priority=priority, queued_at=0)


ARRIVALS = st.lists(st.tuples(jobs(), st.integers(0, 3)), max_size=40)
"""(job, forwards that run after its arrival)."""


class Device:
    """Runs what the scheduler says, one forward every FORWARD_S, and checks each of them."""

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self.scheduler: Scheduler[Job] = Scheduler(budget)
        self.now = 0.0
        self.waiting: list[Job] = []
        self.done: list[Job] = []

    def add(self, job: Job, order: int) -> None:
        job.order, job.queued_at = order, self.now
        self.scheduler.add(job)
        self.waiting.append(job)

    def forward(self) -> list[tuple[Job, int]]:
        before = {job: job.num_tokens for job in self.waiting}
        pieces = self.scheduler.next(self.now)
        assert bool(pieces) == bool(before), "work waits exactly when something runs"
        self._check(pieces, before)
        for job, size in pieces:
            assert job.num_tokens == before[job] - size
            if not job.num_tokens:
                self.waiting.remove(job)
                self.done.append(job)
        assert len(self.scheduler) == len(self.waiting)
        self.now += FORWARD_S
        self.scheduler.ran(self.now)
        return pieces

    def _check(self, pieces: list[tuple[Job, int]], before: dict[Job, int]) -> None:
        if len(pieces) > 1:
            assert len(pieces) <= self.budget.max_sessions
            assert sum(size for _, size in pieces) <= self.budget.max_tokens
            assert all(job.session is not None for job, _ in pieces)
        for job, size in pieces:
            assert 0 < size <= before[job]
            assert size % job.granule == 0
            older = [other for other in before if other.session == job.session and other.order < job.order]
            assert job.session is None or not older, "a session's work was taken out of order"
        sessions = [job.session for job, _ in pieces]
        assert len(set(sessions)) == len(sessions)
        if any(job.priority is Priority.DECODE and job.session for job, _ in pieces):
            cut = sum(size for job, size in pieces if job.priority is Priority.PREFILL and size < before[job])
            assert cut <= self.budget.max_prefill_tokens_beside_decode


@given(ARRIVALS, st.sampled_from((1, 2, 4)))
def test_everything_is_done_once_within_the_budget_and_in_order(
    arrivals: list[tuple[Job, int]], max_sessions: int
) -> None:
    device = Device(
        Budget(
            max_sessions=max_sessions,
            max_tokens=BUDGET.max_tokens,
            max_prefill_tokens_beside_decode=BUDGET.max_prefill_tokens_beside_decode,
        )
    )
    for order, (job, num_forwards) in enumerate(arrivals):
        device.add(job, order)
        for _ in range(num_forwards):
            device.forward()
    while device.waiting:
        device.forward()
    assert sorted(job.order for job in device.done) == list(range(len(arrivals)))


@given(ARRIVALS, st.integers(1, 6))
def test_nobody_starves_however_much_arrives(arrivals: list[tuple[Job, int]], num_decoding: int) -> None:
    """Sessions that decode for ever, and training that is never short of work, besides what is looked at."""
    device = Device(BUDGET)
    for order, (job, _) in enumerate(arrivals):
        device.add(job, order)
    wanted = list(device.waiting)
    order = len(arrivals)
    tokens = sum(job.num_tokens for job in wanted)
    # Each forward serves the oldest of some class; training has a tenth of the time.
    limit = (tokens + len(wanted)) * (2 + num_decoding) + len(wanted) * round(2 / BUDGET.training_share) + 50
    for _ in range(limit):
        if all(job not in device.waiting for job in wanted):
            return
        for session in (*(f"decoding {idx}" for idx in range(num_decoding)), None):
            if all(job.session != session or job in wanted for job in device.waiting):
                priority = Priority.SESSIONLESS if session is None else Priority.DECODE
                device.add(Job(num_tokens=1, granule=1, priority=priority, queued_at=0, session=session), order)
                order += 1
        device.forward()
    pytest.fail(f"after {limit} forwards {[job for job in wanted if job in device.waiting]} still wait")


@given(st.lists(jobs(), min_size=1, max_size=20), st.data())
def test_withdrawn_work_never_runs_and_costs_no_room(queue: list[Job], data: st.DataObject) -> None:
    device, other = Device(BUDGET), Device(BUDGET)
    kept = [data.draw(st.booleans()) for _ in queue]
    for order, (job, keep) in enumerate(zip(queue, kept, strict=True)):
        device.add(job, order)
        if keep:
            twin = Job(num_tokens=job.num_tokens, granule=job.granule, priority=job.priority, queued_at=0)
            twin.session = job.session
            other.add(twin, order)
    for job, keep in zip(queue, kept, strict=True):
        if not keep:
            device.scheduler.discard(job)
            device.waiting.remove(job)
            device.scheduler.discard(job)
    while other.waiting:
        expected = [(job.order, size) for job, size in other.forward()]
        assert [(job.order, size) for job, size in device.forward()] == expected
    assert not device.waiting


def decode(session: str, account: Account = HOUSE) -> Job:
    return Job(num_tokens=1, granule=1, priority=Priority.DECODE, queued_at=0, session=session, account=account)


def prefill(session: str, size: int, granule: int = 1, account: Account = HOUSE) -> Job:
    return Job(
        num_tokens=size, granule=granule, priority=Priority.PREFILL, queued_at=0, session=session, account=account
    )


def training() -> Job:
    return Job(num_tokens=1, granule=1, priority=Priority.SESSIONLESS, queued_at=0)


def forwards(device: Device, *work: Job) -> list[list[tuple[str | None, int]]]:
    for job in work:
        device.add(job, len(device.done) + len(device.waiting))
    taken = []
    while device.waiting:
        taken.append([(job.session, size) for job, size in device.forward()])
    return taken


def test_a_lone_prefill_takes_the_whole_budget() -> None:
    assert forwards(Device(BUDGET), prefill("a", 70)) == [[("a", 32)], [("a", 32)], [("a", 6)]]


def test_decode_goes_first_and_prefill_takes_small_pieces_beside_it() -> None:
    taken = forwards(Device(BUDGET), prefill("a", 20), decode("b"), decode("c"))
    assert taken == [[("b", 1), ("c", 1), ("a", 8)], [("a", 8)], [("a", 4)]]


def test_prefill_is_cut_small_only_while_others_decode() -> None:
    device = Device(BUDGET)
    assert forwards(device, decode("a"), decode("b")) == [[("a", 1), ("b", 1)]]
    assert forwards(device, prefill("a", 9)) == [[("a", 8)], [("a", 1)]]  # b's next step may come at any moment
    device.now += BUDGET.decoding_s
    assert forwards(device, prefill("a", 20)) == [[("a", 20)]]
    assert forwards(device, decode("a")) == [[("a", 1)]]
    assert forwards(device, prefill("a", 20)) == [[("a", 20)]]  # nobody but itself has decoded


def test_a_session_that_has_ended_cuts_no_prompt() -> None:
    device = Device(BUDGET)
    assert len(forwards(device, decode("a", Account("somebody")), decode("b"))) == 1
    assert device.scheduler.decoding(device.now) == (0, 2)
    device.scheduler.forget("a")
    device.scheduler.forget("b")
    assert device.scheduler.decoding(device.now) == (0, 0)
    assert forwards(device, prefill("c", 20)) == [[("c", 20)]]


def test_the_own_account_cuts_prompts_only_while_its_next_step_is_due() -> None:
    for account, is_cut_before, is_cut_after in ((Account("one"), True, False), (Account("other"), True, True)):
        for waited_s, is_cut in ((0.0, is_cut_before), (BUDGET.pause_s, is_cut_after)):
            device = Device(BUDGET)
            assert forwards(device, decode("a", Account("one"))) == [[("a", 1)]]
            device.now += waited_s
            expected = [[("b", 8)], [("b", 1)]] if is_cut else [[("b", 9)]]
            assert forwards(device, prefill("b", 9, account=account)) == expected


def test_prefill_that_can_not_be_cut_alternates_with_decoding() -> None:
    device = Device(BUDGET)
    device.add(prefill("a", 100, 100), 0)
    device.add(prefill("b", 100, 100), 1)
    taken = []
    for idx in range(4):
        device.add(decode("c"), 2 + idx)
        taken.append([job.session for job, _ in device.forward()])
        if taken[-1] != ["c"]:
            device.scheduler.discard(device.waiting[-1])
            device.waiting.pop()
    assert taken == [["c"], ["a"], ["c"], ["b"]]


def test_training_waits_for_its_turn_while_others_decode() -> None:
    device = Device(BUDGET)
    for order in range(40):
        device.add(training(), order)
    ran = []
    for order in range(100):
        device.add(decode("a"), 40 + order)
        (job, _), *_ = device.forward()
        ran.append(job.priority)
        if job.priority is Priority.SESSIONLESS:
            device.forward()
    assert 4 <= ran.count(Priority.SESSIONLESS) <= 12
    assert len(forwards(device)) == 40 - ran.count(Priority.SESSIONLESS)  # then nobody else waits


def test_between_two_steps_training_has_one_turn() -> None:
    device = Device(BUDGET)
    device.add(training(), 0)
    assert not device.scheduler.pause_s(device.now), "nobody decodes"
    device.add(decode("a"), 1)
    device.forward()
    assert not device.scheduler.pause_s(device.now), "its turn"
    turn = device.now
    device.forward()
    device.now = turn
    device.add(training(), 2)
    pause_s = device.scheduler.pause_s(device.now)
    assert pause_s == pytest.approx(BUDGET.pause_s - FORWARD_S)
    device.add(decode("a"), 3)
    assert not device.scheduler.pause_s(device.now), "here it is"
    device.scheduler.discard(device.waiting.pop())
    device.now += pause_s
    assert not device.scheduler.pause_s(device.now), "it doesn't come"


@given(st.lists(st.tuples(st.sampled_from(range(100)), st.floats(0, 0.3)), max_size=200))
def test_sessions_that_stopped_decoding_are_forgotten_whatever_else_runs(decodes: list[tuple[int, float]]) -> None:
    """Prompts of up to 16 tokens count as decoding, so a server may never see anything else."""
    scheduler: Scheduler[Job] = Scheduler(BUDGET)
    now, last = 0.0, {}
    for session, pause_s in decodes:
        now += pause_s
        scheduler.add(Job(num_tokens=1, granule=1, priority=Priority.DECODE, queued_at=now, session=str(session)))
        last[session] = now
        recent = sum(at >= now - BUDGET.decoding_s for at in last.values())
        assert scheduler.decoding(now) == (1, recent)
        assert len(scheduler.next(now)) == 1
        assert len(scheduler._decoded) == recent
