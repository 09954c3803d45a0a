"""Which relays are asked, and what is believed of them."""

import asyncio
import time
from collections.abc import Callable

import pytest

from swarmllm.errors import PeerUnreachableError
from swarmllm.network.p2p import reachability as reachability_module
from swarmllm.network.p2p.reachability import NUM_RELAYS, RelayGuest, RelayPeer, choose
from swarmllm.network.relay.messages import Status, circuit_through, encode, framed, hop_status
from swarmllm.network.relay.service import ByteStream


def relay(name: str, *hosts: str) -> RelayPeer:
    return RelayPeer(name, tuple(f"/{'dns4' if host.isalpha() else 'ip4'}/{host}/tcp/1" for host in hosts))


A, B, C, D = relay("a", "9.1.0.1"), relay("b", "9.1.7.2"), relay("c", "9.2.0.3"), relay("d", "example")


@pytest.mark.parametrize(
    ("left", "kept", "num", "chosen"),
    [
        ([A, B, C, D], [], 3, [A, C, D]),
        ([A, B, C, D], [], 4, [A, C, D, B]),
        ([B, C], [A], 1, [C]),
        ([B], [A], 2, [B]),
        ([A, A, C], [], 3, [A, C]),
        ([A, C], [A, C], 3, []),
        ([], [A], 2, []),
    ],
)
def test_relays_of_other_networks_first(
    left: list[RelayPeer], kept: list[RelayPeer], num: int, chosen: list[RelayPeer]
) -> None:
    assert choose(left, kept, num) == chosen


class FakeRelays:
    """Answer what they are told; each stream's other end is kept."""

    def __init__(self) -> None:
        self.answers: dict[str, Callable[[], bytes] | None] = {}
        self.asked: list[str] = []
        self.servers: list[asyncio.AbstractServer] = []

    async def open(self, peer: RelayPeer) -> ByteStream:
        self.asked.append(peer.peer_id)
        answer = self.answers.get(peer.peer_id)
        if answer is None:
            raise PeerUnreachableError("gone", peer.peer_id)
        reader, writer = asyncio.StreamReader(), FakeWriter()
        reader.feed_data(answer())
        return reader, writer  # type: ignore[return-value]


class FakeWriter:
    def __init__(self) -> None:
        self.transport = self
        self.aborted = False

    def write(self, data: bytes) -> None:
        pass

    def abort(self) -> None:
        self.aborted = True


def granted() -> bytes:
    return hop_status(Status.OK, time.time() + 60)


async def kept(relays: FakeRelays, *candidates: RelayPeer) -> tuple[str, ...]:
    """The relays at which a guest has places after it has asked."""
    guest = RelayGuest(relays.open, lambda: candidates)
    await guest.fill()
    names = tuple(sorted(one.peer_id for one in guest.relays))
    running = asyncio.create_task(guest.keep_reservations())
    await asyncio.sleep(0)
    running.cancel()
    await asyncio.wait([running])
    assert not guest.relays
    return names


async def test_only_relays_that_grant_without_a_limit_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reachability_module, "ANSWER_S", 0.05)
    relays = FakeRelays()
    relays.answers = {
        "a": granted,
        "b": lambda: hop_status(Status.PERMISSION_DENIED),
        "c": lambda: framed(encode((1, 2), (4, encode((2, 1 << 17))), (5, Status.OK))),  # p2pd's own
        "e": lambda: b"",
        "f": lambda: b"\xff\xff\xff",
    }
    candidates = [A, B, C, D, relay("e", "9.5.0.1"), relay("f", "9.6.0.1")]
    assert await kept(relays, *candidates) == ("a",)
    assert sorted(relays.asked) == ["a", "b", "c", "d", "e", "f"]


async def test_no_more_are_asked_than_are_needed() -> None:
    relays = FakeRelays()
    many = [relay(f"r{number}", f"9.{number}.0.1") for number in range(20)]
    relays.answers = {one.peer_id: granted for one in many}
    assert len(await kept(relays, *many)) == NUM_RELAYS
    assert len(relays.asked) == NUM_RELAYS


async def test_addresses_take_turns_between_relays() -> None:
    relays = FakeRelays()
    two = [relay("r1", "9.1.0.1", "9.1.0.2", "9.1.0.3"), relay("r2", "9.2.0.1")]
    relays.answers = {one.peer_id: granted for one in two}
    guest = RelayGuest(relays.open, lambda: two)
    await guest.fill()
    assert guest.addrs == (
        circuit_through(two[0].addrs[0], "r1"),
        circuit_through(two[1].addrs[0], "r2"),
        circuit_through(two[0].addrs[1], "r1"),
    )
    running = asyncio.create_task(guest.keep_reservations())
    await asyncio.sleep(0)
    running.cancel()
    await asyncio.wait([running])
