"""Order of clients at a server, and the accounts on which they come first."""

from swarmllm.network.p2p.identity import Identity, contribution
from swarmllm.server.device.scheduler import Account
from swarmllm.server.peers.peer_limits import PeerLimits, Standing

SERVER, MINE, ALSO_MINE, STRANGER = (Identity.generate() for _ in range(4))


def test_clients_that_the_owner_names_come_first_each_for_itself() -> None:
    standing = Standing((MINE.peer_id,))
    assert standing.account(MINE.peer_id) == Account(MINE.peer_id, comes_first=True)
    assert standing.account(STRANGER.peer_id) == Account(STRANGER.peer_id)


def test_a_client_that_serves_comes_first_while_its_server_is_there() -> None:
    servers: set[str] = set()
    standing = Standing(serves=servers.__contains__)
    for client in (MINE, ALSO_MINE):
        standing.note(client.peer_id, contribution(SERVER, client.peer_id))
        assert standing.account(client.peer_id) == Account(client.peer_id), "nobody has met that server"
    servers.add(SERVER.peer_id)
    assert {standing.account(client.peer_id) for client in (MINE, ALSO_MINE)} == {Account(SERVER.peer_id, True)}
    servers.clear()
    assert standing.account(MINE.peer_id) == Account(MINE.peer_id)


def test_somebody_else_s_proof_counts_for_nothing() -> None:
    standing = Standing(serves=lambda _: True)
    standing.note(STRANGER.peer_id, contribution(SERVER, MINE.peer_id))
    standing.note(STRANGER.peer_id, None)
    assert standing.account(STRANGER.peer_id) == Account(STRANGER.peer_id)


def test_it_is_forgotten_with_the_last_stream() -> None:
    limits = PeerLimits(Standing(serves=lambda _: True))
    limits.enter(MINE.peer_id)
    limits.enter(MINE.peer_id)
    limits.standing.note(MINE.peer_id, contribution(SERVER, MINE.peer_id))
    limits.leave(MINE.peer_id)
    assert limits.standing.account(MINE.peer_id).comes_first
    limits.leave(MINE.peer_id)
    assert not limits.standing.account(MINE.peer_id).comes_first
