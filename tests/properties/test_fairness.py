"""Shares of clients in one device: turns among equals, and most of it for clients that come first."""

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmllm.server.device.scheduler import Account, Budget, Priority, RoundRobin, Scheduler, Work

FIRST = Account("contributor", comes_first=True)
PREFILL_TOKENS = 64


@dataclass
class Machine:
    """Time of forwards: `fixed_s`, and `token_s` for each token."""

    fixed_s: float
    token_s: float

    def forward_s(self, num_tokens: int) -> float:
        return self.fixed_s + self.token_s * num_tokens

    @property
    def budget(self) -> Budget:
        doubling = max(1, round(self.forward_s(1) / self.token_s))
        return Budget(doubling_tokens=doubling, max_prefill_tokens_beside_decode=max(8, round(0.3 * doubling)))


CPU = Machine(fixed_s=0.02, token_s=0.004)
GPU = Machine(fixed_s=0.02, token_s=0.0001)
SLOW = Machine(fixed_s=0.3, token_s=0.1)
MACHINES = st.sampled_from((CPU, GPU, SLOW))


@dataclass
class Client:
    """Asks for one thing after the other, each `think_s` after the last was answered."""

    account: Account
    kind: Priority
    session: str
    think_s: float = 0.0
    num_tokens: int = PREFILL_TOKENS
    """Tokens of each prompt."""
    done: list[float] = field(default_factory=list)
    """Time of each step, from the last answer to this one."""
    last_at: float = 0.0

    def work(self, now: float) -> Work:
        size = self.num_tokens if self.kind is Priority.PREFILL else 1
        session = None if self.kind is Priority.SESSIONLESS else self.session
        return Work(
            num_tokens=size, granule=1, priority=self.kind, queued_at=now, session=session, account=self.account
        )


def run(machine: Machine, clients: list[Client], for_s: float) -> Counter[str]:
    """The device's seconds by account; what clients have had, they know."""
    scheduler: Scheduler[Work] = Scheduler(machine.budget)
    now, owners = 0.0, {}
    due = dict.fromkeys(range(len(clients)), 0.0)
    seconds: Counter[str] = Counter()
    while now < for_s:
        for idx in [idx for idx, at in due.items() if at <= now]:
            work = clients[idx].work(due.pop(idx))
            owners[work] = idx
            scheduler.add(work)
        next_s = min(due.values(), default=for_s) - now
        wait_s = scheduler.hold_s(now) if len(scheduler) else for_s
        if wait_s > 0:
            now += max(min(wait_s, next_s), 1e-6)
            continue
        pieces = scheduler.next(now)
        num_tokens = sum(20 if work.priority is Priority.SESSIONLESS else size for work, size in pieces)
        took_s = machine.forward_s(num_tokens)
        now += took_s
        scheduler.ran(now)
        for work, size in pieces:
            seconds[work.account.name] += took_s * (20 if work.priority is Priority.SESSIONLESS else size) / num_tokens
            if not work.num_tokens:
                client = clients[owners.pop(work)]
                client.done.append(now - client.last_at)
                client.last_at = now
                due[clients.index(client)] = now + client.think_s
    return seconds


def flood(kinds: list[Priority], num: int, *, peers: int) -> list[Client]:
    """`num` clients of so many peers, who ask for such things as fast as they are answered."""
    return [Client(Account(f"peer {idx % peers}"), kinds[idx % len(kinds)], f"flood {idx}") for idx in range(num)]


FEW = settings(max_examples=20)
"""Each runs a device for a while."""
KINDS = st.lists(st.sampled_from(Priority), min_size=1, max_size=3)
THINKING = st.sampled_from((0.0, 0.002, 0.05, 0.4))


@FEW
@given(MACHINES, KINDS, st.sampled_from(Priority), st.integers(1, 80), st.integers(1, 80), THINKING)
def test_a_flood_costs_privileged_clients_less_than_a_fifth(
    machine: Machine, kinds: list[Priority], wanted: Priority, num: int, peers: int, think_s: float
) -> None:
    """This holds for any work, any number of pretended peers, and any kind of machine."""
    alone = Client(FIRST, wanted, "mine", think_s)
    run(machine, [alone], for_s := 150 * (machine.forward_s(PREFILL_TOKENS) + think_s))
    contended = Client(FIRST, wanted, "mine", think_s)
    run(machine, [contended, *flood(kinds, num, peers=peers)], for_s)
    assert len(contended.done) > 0.8 * len(alone.done)


@FEW
@given(MACHINES, KINDS, st.integers(1, 20), THINKING)
def test_others_go_on_beside_privileged_clients(
    machine: Machine, kinds: list[Priority], num: int, think_s: float
) -> None:
    clients = [
        *(
            Client(Account(f"first {idx}", comes_first=True), Priority.DECODE, f"mine {idx}", think_s)
            for idx in range(8)
        ),
        *flood(kinds, num, peers=num),
    ]
    seconds = run(machine, clients, 600 * machine.forward_s(PREFILL_TOKENS))
    others = sum(seconds[name] for name in seconds if name.startswith("peer"))
    assert others > 0.04 * seconds.total()
    assert all(seconds[client.account.name] for client in clients if client.kind is not Priority.SESSIONLESS)


@FEW
@pytest.mark.parametrize("kind", [Priority.PREFILL, Priority.SESSIONLESS])
@given(machine=MACHINES, sessions=st.lists(st.integers(1, 30), min_size=2, max_size=6))
def test_equals_have_equal_time_however_much_each_asks_for(
    kind: Priority, machine: Machine, sessions: list[int]
) -> None:
    clients = [
        Client(Account(f"peer {peer}"), kind, f"{peer} {idx}", num_tokens=1024 * (1 + idx % 2))
        for peer, num in enumerate(sessions)
        for idx in range(num)
    ]
    seconds = run(machine, clients, 100 * machine.forward_s(1024))
    assert min(seconds.values()) > 0.8 * max(seconds.values())


@FEW
@given(MACHINES, st.integers(1, 200))
def test_many_sessions_of_one_do_not_make_another_wait_twice_as_long(machine: Machine, num: int) -> None:
    one = Client(Account("one"), Priority.DECODE, "one")
    seconds = run(machine, [one, *flood([Priority.DECODE], num, peers=1)], 150 * machine.forward_s(1))
    assert max(one.done[2:]) <= 2 * machine.forward_s(1) * 1.01 + 1e-6
    assert seconds["peer 0"] > 0


@FEW
@given(MACHINES, st.integers(1, 12), st.integers(1, 100))
def test_sessions_wait_at_most_twice_as_long_beside_another_clients(machine: Machine, few: int, more: int) -> None:
    mine = [Client(Account("mine"), Priority.DECODE, f"mine {idx}") for idx in range(few)]
    run(machine, [*mine, *flood([Priority.DECODE], few + more, peers=1)], 60 * machine.forward_s(few))
    assert all(max(one.done[2:]) <= 2 * machine.forward_s(few) * 1.01 + 1e-6 for one in mine)


@given(st.integers(1, 16), st.integers(1, 16))
def test_steps_that_are_away_count_as_many_tokens_as_they_had(sessions: int, rows: int) -> None:
    """A batch, or guesses of a text, are one session with many tokens."""
    scheduler: Scheduler[Work] = Scheduler(Budget(doubling_tokens=1))

    def add(name: str, session: str, num_tokens: int) -> None:
        scheduler.add(
            Work(
                num_tokens=num_tokens,
                granule=num_tokens,
                priority=Priority.DECODE,
                session=session,
                account=Account(name),
            )
        )

    add("batch", "batch", rows)
    scheduler.next(0.0)
    scheduler.ran(0.1)
    for idx in range(sessions):
        add("texts", str(idx), 1)
    assert len(scheduler.next(0.1)) == min(sessions, 2 * min(sessions, rows))


@FEW
@given(MACHINES, st.integers(2, 8), st.integers(1, 8))
def test_clients_with_as_many_sessions_decode_together(machine: Machine, peers: int, sessions: int) -> None:
    clients = flood([Priority.DECODE], peers * sessions, peers=peers)
    run(machine, clients, 10 * machine.forward_s(peers * sessions))
    assert {len(client.done) for client in clients} <= {10, 11}


@FEW
@given(MACHINES, st.integers(1, 60))
def test_of_one_client_all_sessions_decode_together(machine: Machine, num: int) -> None:
    clients = flood([Priority.DECODE], num, peers=1)
    run(machine, clients, 10 * machine.forward_s(num))
    assert {len(client.done) for client in clients} <= {10, 11}


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.floats(0, 1e3)), max_size=60), st.sets(st.sampled_from("abcdef")))
def test_turns_name_all_waiting_accounts_and_forget_the_rest(
    charges: list[tuple[str, float]], waiting: set[str]
) -> None:
    turns = RoundRobin()
    for name, seconds in charges:
        turns.order({name, "a"})
        turns.charge(name, seconds)
    assert sorted(turns.order(waiting)) == sorted(waiting)
    while waiting and len(turns) > len(waiting):  # debts are repaid by turns, whoever has them
        turns.charge(turns.order(waiting)[0], 1.0)


@given(st.floats(0.001, 1.0), st.integers(0, 5))
def test_accounts_that_always_come_anew_keep_no_other_waiting_for_ever(debt_s: float, num_waiting: int) -> None:
    """Ids cost nothing; but a round has as many turns as there are who wait, and a new one waits for the next."""
    turns, waiting = RoundRobin(), {"one", *(f"old {idx}" for idx in range(num_waiting))}
    turns.order(waiting)
    turns.charge("one", debt_s)
    for new in range(1000):
        waiting.add(f"new {new}")
        first = turns.order(waiting)[0]
        turns.charge(first, 0.02)
        if first == "one":
            return
        waiting.remove(first)
    pytest.fail("it never had a turn")
