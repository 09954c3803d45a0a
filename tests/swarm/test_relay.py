"""Real peers on 127.0.0.1, of which some listen nowhere and are reached through others."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from commands import Running
from echo_peers import greeted, polite_echo
from hop_streams import HopStream, NewPeer, circuits, made_peers, until
from networks import has_ipv6
from pytest_asyncio import fixture as in_loop
from tests.left_tasks import no_task_left_behind

from swarmllm.errors import PeerUnreachableError
from swarmllm.network.p2p import daemon as daemon_module
from swarmllm.network.p2p.block_directory import MODELS_KEY
from swarmllm.network.p2p.peer import Peer
from swarmllm.network.relay import service as service_module
from swarmllm.network.relay.messages import Status, number, reserve
from swarmllm.network.relay.service import RelayRules
from swarmllm.network.wire.protocol import MessageType

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.rotates(3, whole_file=True)]
_no_task_left_behind = in_loop(no_task_left_behind, loop_scope="module")
new_peer = in_loop(made_peers, loop_scope="module")


async def new_hidden(new_peer: NewPeer, *relays: Peer) -> Peer:
    """Returns what it is sent; listens nowhere."""
    hidden = await new_peer(*relays, client_mode=True)
    await hidden.serve_streams(polite_echo)
    return hidden


@pytest.mark.parametrize("ip", ["ip4/127.0.0.1", "ip6/::1"])
async def test_a_peer_that_listens_nowhere_is_reached_through_a_relay(new_peer: NewPeer, ip: str) -> None:
    if "ip6" in ip and not has_ipv6():
        pytest.skip("this machine has no IPv6")
    relay = await new_peer(relay=RelayRules(mbps=8000), host_maddrs=[f"/{ip}/tcp/0"])
    assert all(addr.startswith(f"/{ip}/") for addr in relay.addrs)
    hidden = await new_hidden(new_peer, relay)
    client = await new_peer(relay, client_mode=True)
    reservation = await HopStream.open(hidden, relay)
    assert await reservation.reserve() is Status.OK
    assert await reservation.reserve() is Status.OK  # renewed
    assert relay.relay.num_reservations == 1
    stream = await greeted(client.open_stream(hidden.peer_id, circuits(relay)))
    assert stream.peer_id == hidden.peer_id
    assert relay.relay.num_circuits == 1
    payload = os.urandom(8 << 20)  # p2pd's own relay would cut the circuit after 128 KiB
    await stream.send(MessageType.STEP, {"id": 1}, [payload])
    assert (await stream.receive()).payload == payload
    assert relay.relay.num_bytes > 16 << 20
    other = await greeted(client.open_stream(hidden.peer_id))  # over the same circuit
    await other.ping()
    assert relay.relay.num_circuits == 1
    reservation.close()  # keeps nobody from going on who is connected
    await until(lambda: not relay.relay.num_reservations)
    await stream.ping()
    await client.close()
    await until(lambda: not relay.relay.num_circuits)
    late = await new_peer(relay, client_mode=True)
    with pytest.raises(PeerUnreachableError, match="NO_RESERVATION"):
        await late.open_stream(hidden.peer_id, circuits(relay))


@pytest.mark.parametrize("reachability", ["Public", "Private"])
async def test_ours_takes_the_place_of_p2pds_own_for_certain(
    new_peer: NewPeer, monkeypatch: pytest.MonkeyPatch, reachability: str
) -> None:
    """p2pd's has a limit, and comes back in a p2pd that finds itself public unless it is told not to."""
    spawn = daemon_module._spawn

    def spawn_so(directory: Any, identity: Any, settings: Any) -> Any:
        return spawn(directory, identity, (*settings, f"-forceReachability{reachability}", "-autonat"))

    monkeypatch.setattr(daemon_module, "_spawn", spawn_so)
    relay, other = await new_peer(relay=RelayRules()), await new_peer()
    hidden = await new_peer(relay, other, client_mode=True)
    for _ in range(3):
        granting = await HopStream.open(hidden, relay)
        granting.say(reserve())
        answer = await granting.answer()
        assert number(answer, 5) == Status.OK
        assert 4 not in answer  # a limit
        assert await (await HopStream.open(hidden, other)).reserve() is Status.PERMISSION_DENIED
        await relay.dht_store({MODELS_KEY: ""}, time.time() + 60)  # by which p2pd meets others
    assert (relay.relay.num_reservations, other.relay.num_refused) == (1, 3)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ((), Status.OK),
        (("--invite", "--allowed_servers", "12D3KooWnobody".ljust(52, "x")), Status.PERMISSION_DENIED),
        (("--no_relay",), Status.PERMISSION_DENIED),
    ],
)
async def test_bootstrap_peers_relay_unless_they_decline(
    tmp_path: Path, flags: tuple[Any, ...], expected: Status
) -> None:
    with Running("dht", "--host_maddrs", "/ip4/127.0.0.1/tcp/0", *flags, log=tmp_path / "dht.log") as dht:
        (maddr,) = dht.maddrs()
        async with await Peer.create(initial_peers=[maddr], client_mode=True) as hidden:
            stream = await HopStream.open(hidden, maddr.rpartition("/")[2])
            assert await stream.reserve() is expected
            HopStream.close_all()


async def test_a_relay_dies_or_its_guest_dies(new_peer: NewPeer) -> None:
    relays = [await new_peer(relay=RelayRules()) for _ in range(2)]
    hidden = await new_hidden(new_peer, *relays)
    client = await new_peer(*relays, client_mode=True)
    for relay in relays:
        assert await (await HopStream.open(hidden, relay)).reserve() is Status.OK
    addrs = [addr for relay in relays for addr in circuits(relay)]
    stream = await greeted(client.open_stream(hidden.peer_id, addrs))
    used, left = sorted(relays, key=lambda relay: -relay.relay.num_circuits)
    os.kill(used.daemon_pid, signal.SIGKILL)
    with pytest.raises(PeerUnreachableError):
        await stream.receive()
    stream = await greeted(client.open_stream(hidden.peer_id, addrs))  # through the other one
    await stream.ping()
    assert left.relay.num_circuits == 1
    os.kill(hidden.daemon_pid, signal.SIGKILL)
    await until(lambda: not left.relay.num_circuits and not left.relay.num_reservations)


async def test_a_reservation_that_is_not_renewed_ends(new_peer: NewPeer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "RESERVATION_S", 0.5)
    monkeypatch.setattr(service_module, "RENEWAL_REST_S", 0.0)
    relay = await new_peer(relay=RelayRules())
    hidden = await new_peer(relay, client_mode=True)
    stream = await HopStream.open(hidden, relay)
    for _ in range(3):
        assert await stream.reserve() is Status.OK
    await stream.ended()
    await until(lambda: not relay.relay.num_reservations)


async def test_an_idle_circuit_is_cut(new_peer: NewPeer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "IDLE_S", 0.5)
    relay = await new_peer(relay=RelayRules())
    hidden = await new_hidden(new_peer, relay)
    client = await new_peer(relay, client_mode=True)
    assert await (await HopStream.open(hidden, relay)).reserve() is Status.OK
    caller = await HopStream.open(client, relay)
    assert await caller.connect(hidden.peer_id) is Status.OK
    await caller.ended()  # it has said nothing; libp2p says something every 30 s
    await until(lambda: not relay.relay.num_circuits)
