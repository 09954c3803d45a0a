"""Sessions in lockstep are computed in halves where that brings tokens, in a simulation of clients and servers."""

import heapq
import itertools
from collections.abc import Sequence
from random import Random

import pytest

from swarmllm.server.device.scheduler import Budget, BurstWait, Halving, Priority, Scheduler, Work

MESSAGE_S = 1e-4
"""Time between two messages of a burst."""


class Server:
    """A device thread in simulated time."""

    def __init__(self, token_s: float, alone_s: float) -> None:
        self.token_s, self.alone_s = token_s, alone_s
        budget = Budget(doubling_tokens=max(1, round(alone_s / token_s)))
        self.scheduler: Scheduler[Work] = Scheduler(budget)
        self.burst_wait = BurstWait()
        self.is_busy = False

    def add(self, session: str, now: float) -> None:
        work = Work(num_tokens=1, granule=1, priority=Priority.DECODE, queued_at=now, session=session)
        self.scheduler.add(work)
        self.burst_wait.came(now)

    def wait_s(self, now: float) -> float:
        """As `DeviceThread._wait_s`."""
        num_here, num_decoding = self.scheduler.decoding(now)
        return self.burst_wait.wait_s(now) if 0 < num_here < num_decoding and not self.scheduler.has_rest else 0.0

    def begin(self, now: float, noise: float) -> tuple[list[str], float]:
        """Begin the next forward: its sessions, and when it ends."""
        self.burst_wait.begins()
        sessions = [str(work.session) for work, _ in self.scheduler.next(now)]
        forward_s = (self.alone_s + self.token_s * len(sessions)) * noise
        self.burst_wait.took(forward_s)
        self.is_busy = True
        return sessions, now + forward_s

    def end(self, now: float) -> None:
        self.scheduler.ran(now)
        self.is_busy = False


def tokens_per_s(
    num_servers: int, num_clients: int, alone_ms: float, token_ms: float, way_ms: float, seconds: float = 1.5
) -> float:
    """Tokens of all clients, whose steps pass through all servers and need `way_ms` for each hop."""
    random, order = Random(0), itertools.count()
    servers = [Server(token_ms / 1e3, alone_ms / 1e3) for _ in range(num_servers)]
    events: list[tuple[float, int, int, Sequence[str] | None]] = []
    num_tokens = 0

    def put(at: float, place: int, sessions: Sequence[str] | None) -> None:
        heapq.heappush(events, (at, next(order), place, sessions))

    def send(sessions: Sequence[str], place: int, now: float) -> None:
        for number, session in enumerate(sessions):
            put(now + way_ms / 1e3 * random.uniform(1, 1.1) + number * MESSAGE_S, place, (session,))

    ends: dict[int, list[str]] = {}
    send([str(number) for number in range(num_clients)], 0, 0.0)
    while (event := heapq.heappop(events))[0] < seconds:
        now, _, place, arrived = event
        server = servers[place]
        if arrived is not None:
            server.add(arrived[0], now)
        elif server.is_busy and place in ends and now >= float(ends[place][0]):
            _, *sessions = ends.pop(place)
            server.end(now)
            num_tokens += len(sessions) if place == num_servers - 1 else 0
            send(sessions, (place + 1) % num_servers, now)
        if not server.is_busy and len(server.scheduler):
            if (wait_s := server.wait_s(now)) > 1e-9:
                put(now + wait_s, place, None)
            else:
                sessions, end = server.begin(now, random.uniform(0.95, 1.05))
                ends[place] = [repr(end), *sessions]
                put(end, place, None)
    return num_tokens / seconds


def gain(monkeypatch: pytest.MonkeyPatch, *setting: float) -> float:
    """Tokens with halves, relative to those without."""
    halved = tokens_per_s(*setting)  # type: ignore[arg-type]
    with monkeypatch.context() as patch:
        patch.setattr(Halving, "first_half", lambda self, decodes, doubling_tokens: decodes)
        return halved / tokens_per_s(*setting)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("num_servers", "num_clients", "least"), [(2, 8, 1.3), (2, 32, 1.3), (4, 8, 1.5), (4, 16, 1.8)]
)
def test_close_servers_compute_at_the_same_time(
    monkeypatch: pytest.MonkeyPatch, num_servers: int, num_clients: int, least: float
) -> None:
    assert gain(monkeypatch, num_servers, num_clients, 4, 1.4, 1) > least


@pytest.mark.parametrize(
    "setting",
    [
        (1, 8, 4, 1.4, 1),
        (2, 3, 8, 0.2, 1),
        (2, 8, 8, 0.2, 1),
        (2, 4, 20, 1, 5),
        (4, 16, 8, 0.2, 50),
        (2, 8, 4, 1.4, 50),
    ],
    ids=["one server", "few", "cheap tokens", "dear weights", "far and cheap", "far"],
)
def test_halves_cost_nothing_where_they_gain_nothing(monkeypatch: pytest.MonkeyPatch, setting: Sequence[float]) -> None:
    assert gain(monkeypatch, *setting) > 0.95


def test_the_second_half_comes_next_and_no_step_is_lost() -> None:
    scheduler: Scheduler[Work] = Scheduler(Budget(doubling_tokens=3))
    now, first = 0.0, True
    for _ in range(20):
        for session in "abcdefg":
            scheduler.add(Work(num_tokens=1, granule=1, priority=Priority.DECODE, queued_at=now, session=session))
        forwards = []
        while len(scheduler):
            forwards.append("".join(str(work.session) for work, _ in scheduler.next(now)))
            now += 0.001 * (3 + len(forwards[-1]))
            scheduler.ran(now)
        assert forwards == (["abcdefg"] if first else ["abcd", "efg"]), "without a time there is nothing to gain"
        first = False
        now += 0.01
    scheduler.add(Work(num_tokens=1, granule=1, priority=Priority.DECODE, queued_at=now, session="a"))
    assert len(scheduler.next(now)) == 1
    assert not scheduler.has_rest
