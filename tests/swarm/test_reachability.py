"""Reachability of a peer, and what it does without: real peers on 127.0.0.1, where libp2p itself can't tell."""

import asyncio
import os
import signal

import pytest
from echo_peers import greeted, polite_echo
from hop_streams import NewPeer, circuits, made_peers, until
from pytest_asyncio import fixture as in_loop
from tests.left_tasks import no_task_left_behind

from swarmllm.network.p2p import peer as peer_module
from swarmllm.network.p2p import reachability as reachability_module
from swarmllm.network.p2p.peer import Incoming, Peer
from swarmllm.network.p2p.reachability import RelayPeer
from swarmllm.network.relay.messages import AUTONAT, encode, framed, read_message
from swarmllm.network.relay.service import Caller, RelayRules

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.rotates(3, whole_file=True)]
_no_task_left_behind = in_loop(no_task_left_behind, loop_scope="module")
new_peer = in_loop(made_peers, loop_scope="module")

DIALLED, FAILED, REFUSED = 0, 100, 101


class Judge:
    """Says, in the place of a peer's libp2p, whether it could dial who asks."""

    def __init__(self, verdict: int | None) -> None:
        self.verdict = verdict
        """None: it says nothing."""
        self.num_asked = 0

    async def answer(self, caller: Caller, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_message(reader)
        self.num_asked += 1
        if self.verdict is not None:
            writer.write(framed(encode((1, 1), (3, encode((1, self.verdict))))))
            await writer.drain()
        await reader.read(1)

    async def sit_at(self, peer: Peer) -> None:
        await peer._take(Incoming(peer._running_daemon(), "judge.sock", AUTONAT, self.answer))


@pytest.fixture
def among_strangers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers look whether others can dial them, though they listen on this machine alone."""
    monkeypatch.setattr(peer_module, "is_loopback", lambda _: False)
    monkeypatch.setattr(reachability_module, "SILENCE_S", 1.0)


@pytest.mark.usefixtures("among_strangers")
@pytest.mark.parametrize(
    ("verdicts", "is_hidden"),
    [
        ((DIALLED,), False),
        ((FAILED,), True),
        ((None,), True),
        ((REFUSED,), False),
        ((None, REFUSED, DIALLED), False),
        ((REFUSED, FAILED), True),
        ((), False),
    ],
)
async def test_which_peers_are_hidden(new_peer: NewPeer, verdicts: tuple[int | None, ...], is_hidden: bool) -> None:
    known: list[Peer] = []
    for verdict in verdicts:
        known.append(await new_peer(*known, relay=RelayRules()))
        await Judge(verdict).sit_at(known[-1])
    peer = await new_peer(*known, reachability="auto", relay=RelayRules())
    assert peer.is_hidden is is_hidden
    assert peer.join_maddrs[0].endswith(known[0].peer_id if is_hidden else peer.peer_id)
    assert set(peer.addrs) == (
        {addr for one in known for addr in circuits(one)} if is_hidden else set(peer._daemon.addrs)
    )
    assert sum(one.relay.num_reservations for one in known) == (len(known) if is_hidden else 0)
    for one in known:
        assert one.is_neighbour(peer.peer_id) is not is_hidden


@pytest.mark.usefixtures("among_strangers")
async def test_what_is_announced_or_said_is_believed(new_peer: NewPeer) -> None:
    known = await new_peer(relay=RelayRules())
    judge = Judge(FAILED)
    await judge.sit_at(known)
    announced = ["/ip4/203.0.113.7/tcp/31337"]
    assert not (await new_peer(known, reachability="auto", announce_maddrs=announced)).is_hidden
    assert not (await new_peer(known, reachability="public")).is_hidden
    assert (await new_peer(known, reachability="private")).is_hidden
    assert judge.num_asked == 0


@pytest.mark.usefixtures("among_strangers")
async def test_a_change_is_noticed(new_peer: NewPeer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reachability_module, "FIRST_LOOK_S", 0.1)
    monkeypatch.setattr(reachability_module, "LOOK_S", 0.1)
    known = await new_peer(relay=RelayRules())
    judge = Judge(DIALLED)
    await judge.sit_at(known)
    peer = await new_peer(known, reachability="auto")
    direct = peer.addrs
    judge.verdict = FAILED
    await until(lambda: peer.is_hidden and peer.addrs == tuple(circuits(known)))
    judge.verdict = DIALLED
    await until(lambda: not peer.is_hidden)
    assert peer.addrs == direct
    judge.verdict = FAILED
    await until(lambda: peer.is_hidden and peer.addrs == tuple(circuits(known)))


async def test_when_a_relay_is_gone_another_takes_its_place(new_peer: NewPeer) -> None:
    relays = [await new_peer(relay=RelayRules()) for _ in range(5)]
    hidden = await new_peer(*relays[:2], reachability="private")
    await hidden.serve_streams(polite_echo)
    found = [RelayPeer(relay.peer_id, relay.addrs) for relay in relays]
    hidden.find_relays(lambda: found[2:])
    through = {relay.peer_id: set(circuits(relay)) for relay in relays}
    assert set(hidden.addrs) == through[relays[0].peer_id] | through[relays[1].peer_id]
    os.kill(relays[0].daemon_pid, signal.SIGKILL)
    await until(lambda: len(hidden.addrs) == 3)
    assert not through[relays[0].peer_id] & set(hidden.addrs)
    at = [relay for relay in relays[1:] if through[relay.peer_id] <= set(hidden.addrs)]
    assert [relay.relay.num_reservations for relay in at] == [1, 1, 1]
    client = await new_peer(relays[4], client_mode=True)
    for relay in at[:2]:
        os.kill(relay.daemon_pid, signal.SIGKILL)
    stream = await greeted(client.open_stream(hidden.peer_id, hidden.addrs))  # through whoever is left
    await stream.ping()


async def test_a_relay_that_freezes_is_left(new_peer: NewPeer, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("RENEWAL_S", 0.2), ("ANSWER_S", 2.0), ("ALONE_S", 0.2)):
        monkeypatch.setattr(reachability_module, name, seconds)
    frozen, other = await new_peer(relay=RelayRules()), await new_peer(relay=RelayRules())
    hidden = await new_peer(frozen, other, reachability="private")
    assert len(hidden.addrs) == 2
    os.kill(frozen.daemon_pid, signal.SIGSTOP)
    await until(lambda: list(hidden.addrs) == circuits(other))
    os.kill(frozen.daemon_pid, signal.SIGCONT)
    await until(lambda: other.relay.num_reservations == 1)


async def test_without_a_relay_it_says_so_and_goes_on_asking(
    new_peer: NewPeer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reachability_module, "ALONE_S", 0.1)
    first = await new_peer()
    hidden = await new_peer(first, reachability="private")
    assert hidden.addrs == ()
    assert "no peer relays for it yet" in caplog.text
    relay = await new_peer(first, relay=RelayRules())
    found = RelayPeer(relay.peer_id, relay.addrs)
    hidden.find_relays(lambda: [found])
    await until(lambda: list(hidden.addrs) == circuits(relay))
