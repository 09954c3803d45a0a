"""Two processes with one identity: what shows it, and what doesn't."""

import asyncio
import logging
from typing import Any

import pytest
from tests.unit.network.fake_servers import peer_id

from swarmllm.data_structures import ServerInfo, SwarmSnapshot
from swarmllm.network.p2p.identity import Identity, contribution
from swarmllm.network.wire.protocol import HelloHeader
from swarmllm.server.announcer import changed_notably
from swarmllm.server.peers.other_servers import TWIN_PERIODS, Twins
from swarmllm.swarm.block_map import describe_shared_identities

OWN = ServerInfo(peer_id=peer_id("own"), start=0, end=2)
PERIOD_S = 30.0


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def twins(clock: Clock) -> Twins:
    return Twins(PERIOD_S, clock)


def records(twins: Twins, clock: Clock, *found: dict[str, Any]) -> None:
    """Records of the own peer id as they are found, one in each period."""
    for changes in found:
        twins.note_record(OWN.model_copy(update=changes))
        clock.now += PERIOD_S


def test_a_process_that_renews_its_record(twins: Twins, clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        records(twins, clock, *({"instance": "ab", "num_sessions": number} for number in range(6)))
    assert twins.seen
    (line,) = caplog.messages
    assert "another process has this server's identity" in line
    assert "--identity_path" in line


def test_a_process_that_lives_on_is_told_all_the_time(twins: Twins, clock: Clock) -> None:
    """Also if its record doesn't change any more, and if this server's own record hides it for a while."""
    records(twins, clock, *({"instance": "ab", "num_sessions": number} for number in range(4)))
    for _ in range(20):
        records(twins, clock, {"instance": twins.instance}, {"instance": "ab", "num_sessions": 3})
        assert twins.seen


def test_a_process_that_has_ended(twins: Twins, clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        records(twins, clock, *({"instance": "ab", "num_sessions": number} for number in range(4)))
        assert twins.seen
        records(twins, clock, *[{"instance": twins.instance}] * TWIN_PERIODS)
        assert not twins.seen
    assert len(caplog.messages) == 2, "one that comes back is told again"


@pytest.mark.parametrize(
    "found",
    [
        [{"num_sessions": number} for number in range(6)],
        [{"instance": "ab"}] * 6,
        [{"instance": f"a{number}"} for number in range(6)],
        [{"instance": "ab"}, {"instance": "ab", "num_sessions": 1}],
    ],
    ids=["one that tells no instance", "one that isn't renewed", "a server that begins often", "until it expires"],
)
def test_records_of_earlier_processes(twins: Twins, clock: Clock, found: list[dict[str, Any]]) -> None:
    records(twins, clock, *found)
    assert not twins.seen


def test_own_records(twins: Twins, clock: Clock) -> None:
    records(twins, clock, *({"instance": twins.instance, "num_sessions": number} for number in range(6)))
    assert not twins.seen
    assert Twins().instance != twins.instance


def greeting(server: Identity, client: str, *, same_identity: bool = True) -> HelloHeader:
    shown = contribution(server, client)
    return HelloHeader(min_version=1, max_version=1, contribution=shown, same_identity=same_identity)


def test_a_process_that_says_so(twins: Twins, clock: Clock) -> None:
    own, client = Identity.generate(), Identity.generate().peer_id
    twins.note_greeting(own.peer_id, greeting(own, client, same_identity=False), client)
    assert not twins.seen, "a client of the server's owner"
    twins.note_greeting(own.peer_id, greeting(own, client), Identity.generate().peer_id)
    assert not twins.seen, "somebody else's words"
    twins.note_greeting(own.peer_id, greeting(Identity.generate(), client), client)
    assert not twins.seen, "another key"
    twins.note_greeting(own.peer_id, greeting(own, client), client)
    assert twins.seen
    clock.now += TWIN_PERIODS * PERIOD_S
    assert not twins.seen, "it was refused, so it never announced anything"


def test_one_that_answered_is_greeted_while_it_answers(clock: Clock) -> None:
    """The two may have no other peer in common, which would keep the records of both."""
    twins, answers = Twins(1e-4, clock), ["/here"] * 9 + [None] * 9

    async def greet() -> str | None:
        assert twins.seen
        clock.now += 1e-4
        return answers.pop(0)

    twins.greet = greet
    twins.report("it answers at /here")
    asyncio.run(twins.greet_while_seen())
    assert answers == [None] * (9 - TWIN_PERIODS)


def test_a_greeting_that_reaches_this_process_itself_counts_as_none(clock: Clock) -> None:
    """As when the address of the other one leads here by now."""
    twins, own, client = Twins(1e-4, clock), Identity.generate(), Identity.generate().peer_id
    times: list[None] = []

    async def greet() -> str | None:
        clock.now += 1e-4
        times.append(None)
        twins.note_greeting(own.peer_id, greeting(own, client), client)
        return "/here"

    twins.greet = greet
    twins.report("it answers at /here")
    asyncio.run(twins.greet_while_seen())
    assert len(times) == TWIN_PERIODS


def test_is_announced_and_shown_at_once() -> None:
    shared = OWN.model_copy(update={"identity_shared": True})
    assert changed_notably(OWN, shared)
    other = ServerInfo(peer_id=peer_id("other"), start=2, end=4)
    (line,) = describe_shared_identities(SwarmSnapshot(4, (shared, other)))
    assert "identity used twice" in line
    assert describe_shared_identities(SwarmSnapshot(4, (OWN, other))) == []
