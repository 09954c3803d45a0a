"""A relay among strangers: what it refuses, and that its guests don't notice."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
from echo_peers import greeted, polite_echo
from hop_streams import HopStream, circuits, until

from swarmllm.network.p2p.peer import Peer
from swarmllm.network.relay import service as service_module
from swarmllm.network.relay.messages import MAX_MESSAGE_BYTES, HopKind, Status, encode, framed, reserve, varint
from swarmllm.network.relay.service import Places, RelayRules
from swarmllm.network.wire.protocol import FrameStream

pytestmark = pytest.mark.rotates(6, whole_file=True)

SOMEBODY = "12D3KooWGRYpkGaDx4gAX4e8D3GUdVyM6z9ejguV9e6RigTPvRch"


@dataclass
class Guests:
    """A relay, a peer that is reached through it, a stream through it that must go on, and Mallory."""

    relay: Peer
    hidden: Peer
    stream: FrameStream
    mallory: Peer

    async def ask(self) -> HopStream:
        return await HopStream.open(self.mallory, self.relay)


@pytest.fixture
async def guests(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Guests]:
    """With the limits of `service` that a test gives; in the end, the honest stream must still be alive."""
    for name, value in getattr(request, "param", {}).items():
        monkeypatch.setattr(service_module, name, value)
    async with (
        await Peer.create(relay=RelayRules()) as relay,
        await Peer.create(initial_peers=relay.join_maddrs, client_mode=True, relay=RelayRules()) as hidden,
        await Peer.create(initial_peers=relay.join_maddrs, client_mode=True) as client,
        await Peer.create(initial_peers=relay.join_maddrs, client_mode=True) as mallory,
    ):
        await hidden.serve_streams(polite_echo)
        assert await (await HopStream.open(hidden, relay)).reserve() is Status.OK
        stream = await greeted(client.open_stream(hidden.peer_id, circuits(relay)))
        yield Guests(relay, hidden, stream, mallory)
        await stream.ping()
        assert relay.relay.num_reservations == 1
        HopStream.close_all()


async def test_targets_without_a_reservation(guests: Guests) -> None:
    for target in (SOMEBODY, guests.mallory.peer_id, guests.relay.peer_id):
        assert await (await guests.ask()).connect(target) is Status.NO_RESERVATION


async def test_relay_over_relay(guests: Guests) -> None:
    await guests.mallory.open_stream(guests.hidden.peer_id, circuits(guests.relay))
    asked = [await HopStream.open(guests.mallory, guests.hidden) for _ in range(2)]
    assert await asked[0].reserve() is Status.PERMISSION_DENIED
    assert await asked[1].connect(guests.mallory.peer_id) is Status.PERMISSION_DENIED
    await guests.mallory.close()
    await until(lambda: guests.relay.relay.num_circuits == 1)


async def test_messages_that_make_no_sense(guests: Guests) -> None:
    async def say(said: bytes) -> None:
        stream = await guests.ask()
        stream.say(said)
        await stream.ended()

    await asyncio.gather(
        say(varint(1 << 20) + bytes(1 << 20)),
        say(b"\xff" * 100),
        say(framed(encode((1, 7)))),
        say(framed(encode((1, HopKind.STATUS), (5, Status.OK)))),
        say(framed(encode((2, b"no type")))),
        say(framed(encode((1, HopKind.CONNECT), (2, b"\xff\xff")))),
        say(framed(encode((1, b"no number")))),
        say(framed(bytes(MAX_MESSAGE_BYTES))),
    )
    without_id = await guests.ask()
    without_id.say(framed(encode((1, HopKind.CONNECT))))
    assert await without_id.status() is Status.NO_RESERVATION


@pytest.mark.parametrize(
    "guests",
    [{"HANDSHAKE_S": 1.0, "MAX_STREAMS": Places(of_peer=8, of_host=20, in_all=30)}],
    indirect=True,
)
async def test_idle_handshakes(guests: Guests) -> None:
    streams = [await guests.ask() for _ in range(40)]
    for stream in streams:
        stream.say(b"\x7f")  # a length, and nothing behind it
    await asyncio.gather(*(stream.ended() for stream in streams))
    assert guests.relay.relay.num_refused >= 32
    assert await (await guests.ask()).connect(SOMEBODY) is Status.NO_RESERVATION


@pytest.mark.parametrize("guests", [{"MAX_STREAMS": Places(of_peer=8, of_host=20, in_all=30)}], indirect=True)
async def test_circuits_of_one_are_as_many_as_it_may_have(guests: Guests) -> None:
    streams = [await guests.ask() for _ in range(12)]
    answers = [stream.connect(guests.hidden.peer_id) for stream in streams]
    outcomes = await asyncio.gather(*answers, return_exceptions=True)
    assert outcomes.count(Status.OK) == 8
    assert sum(isinstance(one, (EOFError, OSError)) for one in outcomes) == 4
    assert guests.relay.relay.num_circuits == 9
    for stream in streams:
        stream.close()
    await until(lambda: guests.relay.relay.num_circuits == 1)


@pytest.mark.parametrize("guests", [{"MAX_RESERVATIONS": Places(of_peer=2, of_host=2, in_all=3)}], indirect=True)
async def test_floods_of_reservations(guests: Guests) -> None:
    streams = [await guests.ask() for _ in range(10)]
    for stream in streams:
        assert await stream.reserve() in (Status.OK, Status.RESERVATION_REFUSED)
    assert guests.relay.relay.num_reservations <= 2  # hidden's, and Mallory's last
    async with await Peer.create(initial_peers=guests.relay.join_maddrs, client_mode=True) as another:
        last = await guests.ask()
        assert await last.reserve() is Status.OK
        assert await (await HopStream.open(another, guests.relay)).reserve() is Status.RESERVATION_REFUSED
    last.say(reserve() * 1000)  # renewals, of which one a second is read
    assert await last.status() is Status.OK
    assert guests.relay.relay.num_reservations == 2
    last.close()
    await until(lambda: guests.relay.relay.num_reservations == 1)


async def test_lists_of_a_private_swarm_hold(guests: Guests) -> None:
    """Servers may reserve and connect, clients connect; who has a place is a server, whoever else is."""
    hidden, mallory = guests.hidden.peer_id, guests.mallory.peer_id
    for servers, clients, reserves, connects in (
        ([], None, Status.PERMISSION_DENIED, Status.OK),
        (None, [], Status.OK, Status.PERMISSION_DENIED),
        ([hidden], [mallory], Status.PERMISSION_DENIED, Status.OK),
        ([hidden, mallory], [], Status.OK, Status.OK),
        ([hidden], [hidden], Status.PERMISSION_DENIED, Status.PERMISSION_DENIED),
    ):
        guests.relay.relay._rules = RelayRules(servers=servers, clients=clients)
        connecting, reserving = await guests.ask(), await guests.ask()
        assert await connecting.connect(hidden) is connects
        assert await reserving.reserve() is reserves
        another = await guests.ask()
        assert await another.connect(hidden) is (Status.OK if Status.OK in (connects, reserves) else connects)
        for stream in (connecting, reserving, another):
            stream.close()
        await until(lambda: guests.relay.relay.num_circuits == guests.relay.relay.num_reservations == 1)
