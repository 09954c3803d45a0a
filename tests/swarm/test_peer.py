"""Real peers with real daemons on 127.0.0.1, several in one event loop."""

import asyncio
import json
import logging
import os
import re
import signal
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from echo_peers import FINGERPRINT, MODEL, echo, greeted, info, polite_echo
from pytest_asyncio import fixture as in_loop
from raw_peer import dht_node
from tests.left_tasks import no_task_left_behind

from swarmllm.commands.doctor_checks import check_swarm
from swarmllm.commands.doctor_findings import DoctorConfig, Verdict
from swarmllm.errors import (
    ConfigurationError,
    PeerTimeoutError,
    PeerUnreachableError,
    RemoteProtocolError,
    SwarmError,
)
from swarmllm.network.p2p import dht_node as dht_module
from swarmllm.network.p2p import direct
from swarmllm.network.p2p._hivemind import DHTLocalStorage
from swarmllm.network.p2p.block_directory import MODELS_KEY, BlockDirectory, servers_key
from swarmllm.network.p2p.identity import Identity, verify
from swarmllm.network.p2p.peer import STREAM_PROTOCOL, Peer
from swarmllm.network.p2p.records import SIGNATURE_BYTES, RecordValidator
from swarmllm.network.wire.protocol import FrameStream, MessageType, hello, welcome

SOMEBODY = "12D3KooWGRYpkGaDx4gAX4e8D3GUdVyM6z9ejguV9e6RigTPvRch"

NewPeer = Callable[..., Awaitable[Peer]]


pytestmark = pytest.mark.asyncio(loop_scope="module")
_no_task_left_behind = in_loop(no_task_left_behind, loop_scope="module")


@pytest.fixture(autouse=True)
def _patient_doors(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine, an honest peer may take longer than a stranger may; the stream would stay where it is."""
    for limit in ("KNOCK_S", "HANDSHAKE_S"):
        monkeypatch.setattr(direct, limit, 100.0)


@in_loop(scope="module", loop_scope="module")
async def two_peers() -> AsyncIterator[tuple[Peer, Peer]]:
    """A server that nobody harms, and a client that knows it."""
    async with (
        await Peer.create() as server,
        await Peer.create(initial_peers=server.join_maddrs, client_mode=True) as client,
    ):
        yield server, client


@in_loop(loop_scope="module")
async def server(two_peers: tuple[Peer, Peer]) -> AsyncIterator[Peer]:
    """It serves streams as the last test told it to; those that a test leaves open end with it."""
    yield two_peers[0]
    for peer in two_peers:
        peer.abort_streams()


@pytest.fixture
def client(server: Peer, two_peers: tuple[Peer, Peer]) -> Peer:
    return two_peers[1]


@in_loop(loop_scope="module")
async def new_peer() -> AsyncIterator[NewPeer]:
    """Makes peers, and closes them in the end."""
    made: list[Peer] = []

    async def make(*neighbours: Peer, **options: Any) -> Peer:
        initial_peers = [maddr for neighbour in neighbours for maddr in neighbour.join_maddrs]
        made.append(await Peer.create(initial_peers=options.pop("initial_peers", initial_peers), **options))
        return made[-1]

    yield make
    for peer in reversed(made):
        await peer.close()


async def wait_until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(120):
        while not condition():  # noqa: ASYNC110 - nobody tells of these states
            await asyncio.sleep(0.01)


# Streams


async def test_streams_both_ways_with_addresses_and_without(new_peer: NewPeer) -> None:
    first = await new_peer()
    second = await new_peer(first)
    client = await new_peer(first, client_mode=True)
    await first.serve_streams(echo)
    await second.serve_streams(echo)
    ways = [
        (second, first, first.addrs),
        (first, second, second.addrs),
        (client, second, ()),  # known to the client by its id only
        (client, first, ["nonsense", f"{first.addrs[0]}/p2p/{first.peer_id}"]),
    ]
    for caller, called, addrs in ways:
        stream = await caller.open_stream(called.peer_id, addrs)
        assert stream.peer_id == called.peer_id
        await stream.send(MessageType.STEP, {"id": 1}, [b"hello"])
        assert (await stream.receive()).payload == b"hello"
        await stream.close()


async def test_a_peer_opens_streams_to_itself(new_peer: NewPeer) -> None:
    peer = await new_peer()
    with pytest.raises(PeerUnreachableError, match="serves no streams"):
        await peer.open_stream(peer.peer_id, peer.addrs)
    await peer.serve_streams(polite_echo)
    streams = [await greeted(peer.open_stream(peer.peer_id, addrs)) for addrs in (peer.addrs, ())]
    for number, stream in enumerate(streams):
        assert stream.peer_id == peer.peer_id
        await stream.send(MessageType.STEP, {"id": number}, [bytes(1 << 20)])
    for number, stream in enumerate(streams):
        message = await stream.receive()
        assert message.header == {"id": number}
        assert message.payload == bytes(1 << 20)
    await streams[0].close()
    await streams[1].ping()  # left open: `close()` of the peer ends both sides


async def test_the_served_side_knows_the_caller_and_both_greet(server: Peer, client: Peer) -> None:
    callers = []

    async def serve(stream: FrameStream) -> None:
        callers.append((stream.peer_id, (await welcome(stream, info={"end": 4})).fingerprint))

    await server.serve_streams(serve)
    stream = await client.open_stream(server.peer_id)
    welcomed = await hello(stream, fingerprint=FINGERPRINT)
    assert welcomed.info == {"end": 4}
    with pytest.raises(PeerUnreachableError):  # the handler has ended, so the stream has
        await stream.receive()
    assert callers == [(client.peer_id, FINGERPRINT)]


async def test_the_last_words_of_a_handler_are_heard_by_a_peer_that_is_still_sending(
    server: Peer, client: Peer
) -> None:

    async def serve(stream: FrameStream) -> None:
        await stream.receive()
        await stream.send(MessageType.RESULT, {"id": 1})

    await server.serve_streams(serve)
    for _ in range(20):
        stream = await client.open_stream(server.peer_id)
        await stream.send(MessageType.FORWARD, {"id": 1})
        receiving = asyncio.create_task(stream.receive())
        while not stream.closed and not receiving.done():
            await stream.send(MessageType.PONG, {"n": 0})
            await asyncio.sleep(0)
        assert (await receiving).header == {"id": 1}
        stream.abort()


async def used(server: Peer, client: Peer, directory: str | None = None) -> FrameStream:
    """A stream that was greeted and used once."""
    stream = await greeted(client.open_stream(server.peer_id))
    stream.liveness.least_round_trip_s = 1e-9  # however busy this machine is, the peer counts as near
    if directory is not None and stream.offered is not None:
        stream.offered = stream.offered.model_copy(update={"directory": directory})
    await stream.send(MessageType.STEP, {"id": 1}, [b"hello"])
    assert (await stream.receive()).payload == b"hello"
    return stream


@pytest.mark.parametrize("directory", [None, ""])
async def test_streams_in_use_leave_the_daemons(server: Peer, client: Peer, directory: str | None) -> None:
    """They go on when one daemon is frozen. Streams that were only greeted stay there."""
    await server.serve_streams(polite_echo)
    idle = await greeted(client.open_stream(server.peer_id))
    stream = await used(server, client, directory)
    await wait_until(lambda: server.num_direct_streams == client.num_direct_streams == 1)
    os.kill(server.daemon_pid, signal.SIGSTOP)
    try:
        await stream.send(MessageType.STEP, {"id": 2}, [bytes(4 << 20)])
        assert (await stream.receive()).payload == bytes(4 << 20)
    finally:
        os.kill(server.daemon_pid, signal.SIGCONT)
    assert not idle.is_moved
    await stream.close()
    await wait_until(lambda: not server.num_direct_streams)


async def test_many_streams_leave_the_daemons_at_once(server: Peer, client: Peer) -> None:
    mistakes: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: mistakes.append(context))
    await server.serve_streams(polite_echo)

    async def use(number: int) -> None:
        stream = await used(server, client, None if number % 2 else "")
        for size in range(10, 22, 2):
            await stream.send(MessageType.STEP, {"id": size}, [bytes([number]) * (1 << size)])
            message = await stream.receive()
            assert (message.header, message.payload) == ({"id": size}, bytes([number]) * (1 << size))
        await stream.close()

    await asyncio.gather(*map(use, range(12)))
    await wait_until(lambda: not server.num_streams)
    asyncio.get_running_loop().set_exception_handler(None)
    assert not mistakes


@pytest.mark.parametrize("side", ["server", "client"])
async def test_direct_connections_can_be_switched_off(new_peer: NewPeer, side: str) -> None:
    server = await new_peer(direct_port=0 if side == "server" else None)
    client = await new_peer(server, client_mode=True, direct_port=0 if side == "client" else None)
    await server.serve_streams(polite_echo)
    stream = await used(server, client)
    assert stream.take_offer is None or stream.offered is None
    assert stream._move is None


async def test_no_door_behind_forwarded_addresses_unless_its_port_is_named(new_peer: NewPeer) -> None:
    """Nobody has forwarded an arbitrary port. Proxies of tests are such addresses, too: nothing may bypass them."""
    ports = []
    for _ in range(2):
        with socket.create_server(("127.0.0.1", 0)) as probe:
            ports.append(probe.getsockname()[1])
    place = {"host_maddrs": [f"/ip4/127.0.0.1/tcp/{ports[0]}"], "announce_maddrs": [f"/ip4/127.0.0.1/tcp/{ports[0]}"]}
    for direct_port in (None, ports[1]):
        server = await new_peer(**place, direct_port=direct_port)
        client = await new_peer(server, client_mode=True)
        await server.serve_streams(polite_echo)
        stream = await used(server, client, "")
        if direct_port is None:
            assert stream.offered is None
            assert client._direct is not None
            assert not client._direct._tasks
        else:
            await wait_until(lambda: stream.is_moved)  # noqa: B023
            assert stream._transport.get_extra_info("peername")[1] == direct_port
        await client.close()
        await server.close()


async def test_64_mib_both_ways_while_pings_go_through(server: Peer, client: Peer) -> None:
    await server.serve_streams(polite_echo)
    stream = await greeted(client.open_stream(server.peer_id))
    stream.start_keepalive(interval_s=0.05, misses=100)
    payload = os.urandom(1 << 20) * 64
    pings = stream.liveness.num_pings
    await stream.send(MessageType.FORWARD, {"id": 1}, [payload])
    message = await stream.receive()
    assert message.payload == payload
    assert stream.liveness.num_pings > pings
    assert stream.liveness.round_trip_s is not None


async def test_a_message_over_the_cap_ends_its_stream_only(server: Peer, client: Peer) -> None:
    async def serve(stream: FrameStream) -> None:
        await welcome(stream)
        while True:
            await stream.receive()
            await stream.send(MessageType.RESULT, {}, [bytes(2 << 20)])

    await server.serve_streams(serve)
    small = await greeted(client.open_stream(server.peer_id, max_message_bytes=1 << 20))
    large = await greeted(client.open_stream(server.peer_id))
    for stream in (large, small):
        await stream.send(MessageType.STEP, {})
    with pytest.raises(RemoteProtocolError, match="cap"):
        await small.receive()
    assert len((await large.receive()).payload) == 2 << 20


async def test_garbage_from_a_peer_ends_its_stream_only(server: Peer, client: Peer) -> None:
    errors: list[SwarmError] = []

    async def serve(stream: FrameStream) -> None:
        try:
            await echo(stream)
        except SwarmError as error:
            errors.append(error)
            raise

    await server.serve_streams(serve)
    good = await client.open_stream(server.peer_id)
    assert client._daemon is not None
    target = dht_module.PeerID.from_base58(server.peer_id).to_bytes()
    reader, writer = await client._daemon.open_stream(target, STREAM_PROTOCOL)
    writer.write(b"GET / HTTP/1.1\r\nHost: swarm\r\n\r\n")
    await reader.read()
    writer.close()
    assert isinstance(errors[0], RemoteProtocolError)
    assert errors[0].peer_id == client.peer_id
    await good.send(MessageType.STEP, {"id": 1})
    assert (await good.receive()).header == {"id": 1}


async def test_a_handler_that_fails_harms_no_other_stream(
    server: Peer, client: Peer, caplog: pytest.LogCaptureFixture
) -> None:

    async def serve(stream: FrameStream) -> None:
        if (await stream.receive()).type is MessageType.LINK:
            raise ZeroDivisionError("a bug")
        await echo(stream)

    await server.serve_streams(serve)
    good, bad = await client.open_stream(server.peer_id), await client.open_stream(server.peer_id)
    await good.send(MessageType.OPEN, {})
    await bad.send(MessageType.LINK, {})
    with pytest.raises(PeerUnreachableError):
        await bad.receive()
    await good.send(MessageType.STEP, {"id": 1})
    assert (await good.receive()).header == {"id": 1}
    assert "a bug" in caplog.text


async def test_a_peer_that_serves_nothing_or_does_not_exist_is_unreachable(new_peer: NewPeer, client: Peer) -> None:
    server = await new_peer()
    for peer_id, addrs in [(server.peer_id, server.addrs), (SOMEBODY, ("/ip4/127.0.0.1/tcp/1",)), ("nonsense", ())]:
        with pytest.raises(PeerUnreachableError) as caught:
            await client.open_stream(peer_id, addrs)
        assert caught.value.peer_id == peer_id


async def test_a_machine_that_does_not_answer_is_given_up(client: Peer) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        addr = f"/ip4/127.0.0.1/tcp/{silent.getsockname()[1]}"
        with pytest.raises(PeerTimeoutError, match="did not answer"):
            await client.open_stream(SOMEBODY, [addr], timeout_s=0.2)


async def test_another_peer_at_the_address_is_not_taken_for_the_right_one(server: Peer, client: Peer) -> None:
    await server.serve_streams(echo)
    with pytest.raises(PeerUnreachableError):
        await client.open_stream(SOMEBODY, server.addrs)


async def test_addresses_that_failed_are_listed_by_their_reason(client: Peer) -> None:
    peer_id, addrs = Identity.generate().peer_id, ["/ip4/127.0.0.1/tcp/1", "/ip4/127.0.0.1/tcp/2"]
    for reason in ("connection refused", "failed a moment ago"):
        with pytest.raises(PeerUnreachableError) as caught:
            await client.open_stream(peer_id, addrs)
        said = str(caught.value)
        assert all(addr in said for addr in addrs)
        assert said.endswith(f": {reason}")
        assert said.count(reason) == 1


# Faults


@pytest.mark.rotates(3)
async def test_a_stopped_daemon_is_noticed_by_its_silence(new_peer: NewPeer) -> None:
    server = await new_peer()
    client = await new_peer(server, client_mode=True)
    await server.serve_streams(echo)
    stream = await client.open_stream(server.peer_id)
    stream.start_keepalive(interval_s=0.1, misses=3)
    os.kill(server.daemon_pid, signal.SIGSTOP)
    try:
        with pytest.raises(PeerTimeoutError, match="no sign of life"):
            await stream.receive()
    finally:
        os.kill(server.daemon_pid, signal.SIGCONT)


@pytest.mark.rotates(3)
async def test_a_killed_daemon_ends_everything_that_needs_it(new_peer: NewPeer) -> None:
    server = await new_peer()
    client = await new_peer(server, client_mode=True)
    await server.serve_streams(echo)
    stream = await client.open_stream(server.peer_id)
    exited = asyncio.create_task(server.daemon_exited())
    os.kill(server.daemon_pid, signal.SIGKILL)
    with pytest.raises(PeerUnreachableError):
        await stream.receive()
    await exited
    for use in (
        server.open_stream(client.peer_id),
        server.dht_read(MODELS_KEY),
        server.dht_store({MODELS_KEY: ""}, time.time() + 60),
        server.serve_streams(echo),
    ):
        with pytest.raises(PeerUnreachableError, match="p2pd"):
            await use


@pytest.mark.rotates(3)
async def test_a_stopped_daemon_does_not_outlive_close(new_peer: NewPeer) -> None:
    peer = await new_peer()
    pid = peer.daemon_pid
    os.kill(pid, signal.SIGSTOP)
    await peer.close()
    assert not psutil.pid_exists(pid)


async def test_a_start_that_is_cancelled_leaves_nothing() -> None:
    for timeout_s in (0.001, 0.02, 0.05, 0.1):
        starting = asyncio.create_task(Peer.create())
        _, pending = await asyncio.wait([starting], timeout=timeout_s)
        if pending:
            starting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await starting
        else:
            await (await starting).close()


@pytest.mark.rotates(3)
async def test_close_in_the_midst_of_everything_leaves_nothing(new_peer: NewPeer) -> None:
    server = await new_peer()
    client = await new_peer(server)
    await server.serve_streams(echo)
    stream = await client.open_stream(server.peer_id)
    book = BlockDirectory(client)
    async with asyncio.TaskGroup() as tasks:
        work = [
            tasks.create_task(outcome(stream.send(MessageType.FORWARD, {}, [bytes(32 << 20)]))),
            tasks.create_task(outcome(stream.receive())),
            *(tasks.create_task(outcome(book.servers(str(idx) * 8))) for idx in range(5)),
            tasks.create_task(outcome(book.announce(MODEL, info(client)))),
        ]
        await asyncio.sleep(0)
        await client.close()
    assert all(isinstance(task.result(), (SwarmError, tuple, bool)) for task in work)
    with pytest.raises(PeerUnreachableError, match="closed"):
        await client.open_stream(server.peer_id)


async def outcome(coroutine: Awaitable[Any]) -> Any:
    try:
        return await coroutine
    except SwarmError as error:
        return error


async def test_a_look_up_that_is_cancelled_leaves_nothing(client: Peer) -> None:
    for _ in range(3):
        reading = asyncio.create_task(client.dht_read(MODELS_KEY))
        await asyncio.sleep(0)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading


# Joining


async def test_unreachable_initial_peers_are_named_in_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dht_module, "DIAL_TIMEOUT_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        maddrs = [f"/ip4/127.0.0.1/tcp/{port}/p2p/{SOMEBODY}" for port in (1, silent.getsockname()[1])]
        with pytest.raises(PeerUnreachableError, match="none of the initial peers") as caught:
            async with asyncio.timeout(120):
                await Peer.create(initial_peers=maddrs)
    assert all(maddr in str(caught.value) for maddr in maddrs)


async def test_one_good_initial_peer_is_enough_and_others_are_not_waited_for(
    new_peer: NewPeer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dht_module, "JOIN_GRACE_S", 2.0)  # for a busy machine; p2pd dials the frozen one for 5 s
    first = await new_peer()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        dead = f"/ip4/127.0.0.1/tcp/1/p2p/{SOMEBODY}"
        frozen = f"/ip4/127.0.0.1/tcp/{silent.getsockname()[1]}/p2p/{Identity.generate().peer_id}"
        second = await new_peer(initial_peers=[dead, frozen, *first.join_maddrs])
        assert second._dht._tasks  # it still dials
        assert dead in caplog.text
        await BlockDirectory(second).announce(MODEL, info(second))
        assert await BlockDirectory(first).servers(FINGERPRINT) == (info(second),)
        await second.close()


async def test_peers_met_earlier_are_said_to_stand_in_for_dead_initial_peers(
    server: Peer,
    new_peer: NewPeer,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    async def at_once(read: Callable[[], Any]) -> Any:  # the module's loop would keep the thread
        return read()

    monkeypatch.setattr(dht_module.asyncio, "to_thread", at_once)
    book = tmp_path / "swarmllm_peers.json"
    addrs = [maddr.partition("/p2p/")[0] for maddr in server.join_maddrs]
    book.write_text(json.dumps({SOMEBODY: {server.peer_id: [time.time(), addrs]}}))
    dead = f"/ip4/127.0.0.1/tcp/1/p2p/{SOMEBODY}"
    await new_peer(initial_peers=[dead], client_mode=True, address_book=book)
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warning.startswith(f"none of the initial peers answers: {dead} (")
    assert f"joined through {addrs[0]}/p2p/{server.peer_id}" in warning
    assert str(book) in warning


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"initial_peers": ["localhost:31337"]}, "must look like"),
        ({"initial_peers": ["/ip4/127.0.0.1/tcp/1/p2p/QmWrong"]}, "has 7 characters instead of 52"),
        ({"initial_peers": [f"/ip4/127.0.0.1/tcp/1/p2p/{'12D3KooW' + 44 * 'z'}"]}, "not the peer id of any key"),
        ({"initial_peers": [f"/ip4/127.0.0.1000/tcp/1/p2p/{SOMEBODY}"]}, "is wrong"),
        ({"host_maddrs": ["127.0.0.1:0"]}, "is wrong"),
        ({"host_maddrs": ["/ip4/127.0.0.1/udp/0/quic"]}, "TCP"),
        ({"host_maddrs": ["/ip4/192.0.2.1/tcp/31337"]}, "can't listen"),
        ({"announce_maddrs": ["/banana/1"]}, "is wrong"),
        ({"announce_maddrs": ["/ip4/127.0.0.1/tcp/0"]}, "port can.t be 0"),
        ({"identity_path": "/nowhere/identity"}, "can't be written"),
    ],
)
async def test_settings_that_cannot_work_are_named(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        await Peer.create(**options)


async def test_a_port_in_use_is_refused(server: Peer) -> None:
    with pytest.raises(ConfigurationError, match="choose another port"):
        await Peer.create(host_maddrs=server.addrs)


@pytest.mark.rotates(3)
async def test_an_identity_lasts_and_serves_one_process_at_a_time(new_peer: NewPeer, tmp_path: Path) -> None:
    path = tmp_path / "identity"
    first = await new_peer(identity_path=path)
    assert verify(first.peer_id, first.sign(b"data"), b"data")
    with pytest.raises(ConfigurationError, match="in use"):
        await Peer.create(identity_path=path)
    await first.close()
    second = await new_peer(identity_path=path)
    assert second.peer_id == first.peer_id


async def test_the_announced_address_is_the_one_that_others_see(new_peer: NewPeer) -> None:
    peer = await new_peer(announce_maddrs=["/ip4/203.0.113.7/tcp/31337"])
    assert peer.join_maddrs == (f"/ip4/203.0.113.7/tcp/31337/p2p/{peer.peer_id}",)


@pytest.mark.parametrize(("ahead_s", "seconds"), [(-60, r"-(59|60)\.\d"), (60, r"\+(59|60)\.\d")])
async def test_a_wrong_clock_is_named(
    server: Peer, monkeypatch: pytest.MonkeyPatch, ahead_s: int, seconds: str
) -> None:
    monkeypatch.setattr(dht_module, "time", SimpleNamespace(time=lambda: time.time() + ahead_s))
    with pytest.raises(ConfigurationError, match=f"differs by {seconds} s .* NTP"):
        await Peer.create(initial_peers=server.join_maddrs)
    *_, finding = await check_swarm(DoctorConfig(initial_peers=tuple(server.join_maddrs)))
    assert finding.verdict is Verdict.BAD
    assert re.search(f"differs by {seconds} s .* NTP", finding.text)


async def test_a_peer_finds_its_swarm_again_after_an_outage(
    new_peer: NewPeer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = await new_peer(identity_path=tmp_path / "identity")
    maddrs, addrs = first.join_maddrs, first.addrs
    second = await new_peer(initial_peers=maddrs)
    await first.close()
    for _ in range(3):
        assert await BlockDirectory(second).models() == {}
    said = [record for record in caplog.records if "this peer is alone" in record.message]
    assert [record.levelname for record in said].count("WARNING") == 1, "who waits asks twice a second"
    again = await new_peer(identity_path=tmp_path / "identity", host_maddrs=addrs)
    await BlockDirectory(again).announce(MODEL, info(again))
    async with asyncio.timeout(120):
        while not await BlockDirectory(second).models():  # noqa: ASYNC110 - the DHT tells nobody
            await asyncio.sleep(0.05)


# The directory


async def test_announce_look_up_withdraw(new_peer: NewPeer) -> None:
    first = await new_peer()
    servers = [await new_peer(first), await new_peer(first)]
    books = [BlockDirectory(server) for server in servers]
    client = BlockDirectory(await new_peer(first, client_mode=True))
    assert await client.servers(FINGERPRINT) == ()
    for book, server in zip(books, servers, strict=True):
        assert await book.announce(MODEL, info(server))
    expected = sorted((info(server) for server in servers), key=lambda one: one.peer_id)
    assert list(await client.servers(FINGERPRINT)) == expected
    assert await client.models() == {server.peer_id: MODEL for server in servers}
    assert await books[0].withdraw(MODEL)
    assert await client.servers(FINGERPRINT) == (info(servers[1]),)
    assert await books[0].announce(MODEL, info(servers[0]))
    assert list(await client.servers(FINGERPRINT)) == expected


@pytest.mark.rotates(3)
async def test_records_outlive_the_bootstrap_peer(new_peer: NewPeer) -> None:
    first = await new_peer()
    server, other = await new_peer(first), await new_peer(first)
    await BlockDirectory(server).announce(MODEL, info(server))
    await first.close()
    assert await BlockDirectory(other).servers(FINGERPRINT) == (info(server),)


class Forger(RecordValidator):
    """Believes all and signs with what it is told."""

    def __init__(self, signer: Identity | None) -> None:
        super().__init__(signer)
        self._honest = signer is not None

    def validate(self, record: Any) -> bool:
        return True

    def sign_value(self, record: Any) -> bytes:
        return super().sign_value(record) if self._honest else record.value + bytes(SIGNATURE_BYTES)


@pytest.mark.rotates(3)
async def test_forged_records_are_neither_stored_nor_believed(new_peer: NewPeer, tmp_path: Path) -> None:
    first = await new_peer()
    victim = await new_peer(first)
    identity = Identity.load_or_create(tmp_path / "identity")
    mallory = await new_peer(first, identity_path=tmp_path / "identity")
    client = BlockDirectory(await new_peer(first, client_mode=True))
    key = servers_key(FINGERPRINT)
    genuine = info(victim)
    forged = genuine.model_copy(update={"throughput": 1e9})
    await BlockDirectory(victim).announce(MODEL, genuine)

    node = dht_node(mallory)

    async def attack(value: Any, ttl_s: float, subkey: str | None, signer: Identity | None) -> None:
        node.protocol.record_validator = Forger(signer)
        await node.store(key, value, time.time() + ttl_s, subkey=subkey)
        assert await client.servers(FINGERPRINT) == (genuine,)
        assert await BlockDirectory(first).servers(FINGERPRINT) == (genuine,)

    text = [key, forged.model_dump_json()]
    own = [key, genuine.model_copy(update={"peer_id": mallory.peer_id}).model_dump_json()]
    await attack(text, 90, victim.peer_id, None)  # unsigned
    await attack(text, 91, victim.peer_id, identity)  # signed by another
    await attack(own, 3600, mallory.peer_id, identity)  # lives too long
    await attack(["elsewhere", own[1]], 92, mallory.peer_id, identity)  # another namespace
    await attack(own[1], 93, mallory.peer_id, identity)  # another shape
    await attack("all your base", 600, None, identity)  # plain: would replace the whole dictionary
    # What it may say is what it says of itself.
    node.protocol.record_validator = Forger(identity)
    assert await node.store(key, own, time.time() + 94, subkey=mallory.peer_id)
    assert {server.peer_id for server in await client.servers(FINGERPRINT)} == {victim.peer_id, mallory.peer_id}
    # A record of its own that speaks of another peer is stored, and skipped by readers.
    assert await node.store(key, text, time.time() + 95, subkey=mallory.peer_id)
    assert await client.servers(FINGERPRINT) == (genuine,)
    assert client.num_bad_records == 1


@pytest.mark.rotates(3)
async def test_a_node_that_lies_hides_nothing(new_peer: NewPeer) -> None:
    mallory = await new_peer()
    victim = await new_peer(mallory)
    client = BlockDirectory(await new_peer(mallory, client_mode=True))
    announced = info(victim)
    await BlockDirectory(victim).announce(MODEL, announced)
    protocol = dht_node(mallory).protocol
    key_id = type(dht_node(mallory).node_id).generate(servers_key(FINGERPRINT))
    genuine = protocol.storage.get(key_id).value.get(victim.peer_id)
    protocol.storage = DHTLocalStorage()  # hivemind's, which takes what it is given

    # What it returns never expires, and it leaves out the records of others.
    protocol.storage.store(key_id, b"nonsense", float("inf"), subkey=mallory.peer_id)
    assert await client.servers(FINGERPRINT) == (announced,)
    # It alone holds the record, and returns nonsense with it.
    protocol.storage.store(key_id, genuine.value, genuine.expiration_time, subkey=victim.peer_id)
    protocol.storage.store(key_id, b"nonsense", float("inf"), subkey=7)
    await victim.close()
    assert await client.servers(FINGERPRINT) == (announced,)
    # It returns one plain value in place of all records.
    del protocol.storage[key_id]
    protocol.storage.store(key_id, b"nonsense", float("inf"))
    assert await client.servers(FINGERPRINT) == ()
