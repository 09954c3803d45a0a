"""Which servers of a machine start, stay and end; and servers that fail."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from swarmllm.data_structures import Span
from swarmllm.errors import WeightsError
from swarmllm.machines import hosting
from swarmllm.machines.decisions import BUSY_S, IDLE_S, QUIET_S, Child, Target, next_steps
from swarmllm.machines.hosting import FAILED_S, Hosting, Hostings
from swarmllm.machines.weights import Progress
from swarmllm.server.devices import SpareProcess

OLD, NEW = "a" * 64, "b" * 64


def target(manifest: str = NEW, start: int = 0, end: int = 4) -> Target:
    return Target(manifest, Span(start, end), "int8")


def child(one: Target, **changes: Any) -> Child:
    return Child(target=one, memory_bytes=40, is_online=True, **changes)


WHOLE, LEFT, RIGHT = target(), target(end=2), target(start=2)


def test_a_server_starts_if_there_is_memory() -> None:
    assert next_steps({WHOLE: 40}, [], offered_bytes=40, wanted=[NEW]).start == (WHOLE,)
    assert next_steps({WHOLE: 41}, [], offered_bytes=40, wanted=[NEW]).start == ()
    assert next_steps({WHOLE: 40}, [child(WHOLE)], offered_bytes=40, wanted=[NEW]) == next_steps(
        {}, [], offered_bytes=0, wanted=[]
    )


def test_the_old_blocks_serve_until_the_new_ones_do_if_memory_allows_both() -> None:
    loading = Child(target=RIGHT, memory_bytes=40)
    steps = next_steps({RIGHT: 40}, [child(LEFT)], offered_bytes=80, wanted=[NEW])
    assert (steps.start, steps.end, steps.leaving) == ((RIGHT,), (), {LEFT})
    steps = next_steps({RIGHT: 40}, [child(LEFT), loading], offered_bytes=80, wanted=[NEW])
    assert (steps.start, steps.end) == ((), ())
    steps = next_steps({RIGHT: 40}, [child(LEFT), child(RIGHT)], offered_bytes=80, wanted=[NEW])
    assert (steps.start, steps.end) == ((), (LEFT,))


def test_without_memory_for_both_the_old_blocks_end_first() -> None:
    steps = next_steps({RIGHT: 40}, [child(LEFT)], offered_bytes=60, wanted=[NEW])
    assert (steps.start, steps.end) == ((), (LEFT,))
    ending = child(LEFT, is_ending=True)
    steps = next_steps({RIGHT: 40}, [ending], offered_bytes=60, wanted=[NEW])
    assert (steps.start, steps.end) == ((), ())  # its memory isn't free yet


def test_blocks_that_the_plan_gives_to_others_serve_until_these_do() -> None:
    assert not next_steps({}, [child(WHOLE)], offered_bytes=60, wanted=[NEW]).end
    assert next_steps({}, [child(WHOLE)], offered_bytes=60, wanted=[NEW], elsewhere=[NEW]).end == (WHOLE,)


def test_a_dropped_model_serves_its_sessions_to_the_end() -> None:
    dropped = target(OLD)
    for changes, ends in (({}, False), ({"idle_s": IDLE_S - 1}, False), ({"idle_s": IDLE_S}, True)):
        steps = next_steps({}, [child(dropped, **changes)], offered_bytes=100, wanted=[NEW])
        assert bool(steps.end) == ends
    # Its memory is needed: a session may go on for a while.
    quiet = {"idle_s": IDLE_S - 1}  # by an announcement that may be some seconds old
    for changes, ends in (
        ({"leaving_s": QUIET_S}, False),
        ({"leaving_s": BUSY_S}, True),
        (quiet, False),
        ({**quiet, "leaving_s": QUIET_S}, True),
    ):
        steps = next_steps({WHOLE: 40}, [child(dropped, **changes)], offered_bytes=60, wanted=[NEW])
        assert (bool(steps.end), steps.start) == (ends, ())
    # What only loads is of use to nobody.
    loading = Child(target=dropped, memory_bytes=40)
    assert next_steps({}, [loading], offered_bytes=100, wanted=[NEW]).end == (dropped,)


class FakeServers:
    """Server processes that say lines, and end with codes."""

    def __init__(self, *runs: tuple[list[str], str, int]) -> None:
        self._runs = list(runs)
        self.num_started = 0

    async def run(
        self,
        settings: Callable[[], Awaitable[Any]],
        on_output: Callable[[str], None],
        on_log: Callable[[str], None],
        spare: SpareProcess,
    ) -> int:
        self.num_started += 1
        await settings()
        lines, log, code = self._runs.pop(0)
        on_log(log)
        for line in lines:
            on_output(line)
        if code < 0:
            await asyncio.Event().wait()
        return code


ONLINE = [
    "swarmllm: serving blocks [0, 4) of m as 12D3KooWpeer",
    "swarmllm: join with --initial_peers /ip4/127.0.0.1/tcp/1/p2p/12D3KooWpeer",
]


async def fetched(one: Hosting) -> Path:
    one.took(Progress(5, 10, bytes_from_machines=5))
    return Path("/model")


def hostings(fetch: Any = fetched) -> Hostings:
    return Hostings(fetch, lambda one, place: None, lambda: None)  # type: ignore[arg-type, return-value]


async def ended(of: Hostings) -> None:
    while of.running:  # noqa: ASYNC110 - nothing tells
        await asyncio.sleep(0)


async def test_a_server_that_ends_by_itself_starts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    servers = FakeServers((ONLINE, "", 1), (ONLINE, "", -1))
    monkeypatch.setattr(hosting, "run_server_process", servers.run)
    monkeypatch.setattr(hosting, "PAUSE_S", 0.0)
    all_servers = hostings()
    all_servers.start(WHOLE, 40)
    while servers.num_started < 2:  # noqa: ASYNC110 - nothing tells
        await asyncio.sleep(0)
    (hosted,) = all_servers.hosted(0.0)
    assert (hosted.state, hosted.bytes_from_machines, hosted.done_bytes) == ("online", 5, 10)
    assert all_servers.running[WHOLE].peer_id == "12D3KooWpeer"
    all_servers.end(WHOLE)
    (hosted,) = all_servers.hosted(0.0)
    assert hosted.state == "leaving"
    await ended(all_servers)
    assert all_servers.hosted(0.0) == ()


async def test_a_server_that_fails_is_told_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    failing = [([], "12:00:00 ERROR swarmllm: no memory\x1b", 1)] * 2
    monkeypatch.setattr(hosting, "run_server_process", FakeServers(*failing).run)
    all_servers, now = hostings(), time.monotonic()
    for waits_s in (FAILED_S, 2 * FAILED_S):
        all_servers.start(WHOLE, 40)
        await ended(all_servers)
        (hosted,) = all_servers.hosted(now + waits_s - 1)
        assert (hosted.state, hosted.problem) == ("failed", "swarmllm: no memory?")
        assert all_servers.hosted(now + waits_s + 5) == ()


async def test_weights_that_cannot_be_had_are_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosting, "run_server_process", FakeServers(([], "", 0)).run)

    async def fetch(one: Hosting) -> Path:
        raise WeightsError("the disk is full")

    all_servers = hostings(fetch)
    all_servers.start(WHOLE, 40)
    await ended(all_servers)
    (hosted,) = all_servers.hosted(0.0)
    assert (hosted.state, hosted.problem) == ("failed", "the disk is full")


async def test_sessions_are_counted_by_what_servers_announce() -> None:
    one = Hosting(WHOLE, 40)
    for number, now, idle_s in ((None, 0.0, 0.0), (2, 5.0, 0.0), (0, 10.0, 0.0), (0, 15.0, 5.0), (1, 20.0, 0.0)):
        one.count_sessions(number, now)
        assert one.as_child(now).idle_s == idle_s
