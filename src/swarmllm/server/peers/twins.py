"""Other processes with the identity of this server, as on cloned machines: each takes the other's place in the swarm.

Connections to the peer id reach either of them, and their records replace each other, so the blocks of one or the other
seem to be missing. Nobody else can tell which one is meant, but each of them can see the other:

- in the swarm's records, where a record of the own peer id comes from another process (`other_servers` shows it);
- at the address of an initial peer with the own peer id (`greet_twin`, before the server begins), which is then told.

Both say so in their logs and in what they announce, so `swarmllm status` and `swarmllm doctor` say it as well.
"""

import logging
import secrets
import time
from collections.abc import Callable, Sequence

from swarmllm.config import RECORD_PERIODS
from swarmllm.data_structures import ServerInfo
from swarmllm.errors import SwarmError
from swarmllm.network.p2p.addresses import split_initial_peer
from swarmllm.network.p2p.identity import Identity, contribution, is_genuine
from swarmllm.network.p2p.peer import Peer
from swarmllm.network.wire.protocol import HelloHeader, hello

logger = logging.getLogger(__name__)

MEND = "give each server an --identity_path of its own, and remove copied files"


class Twins:
    """What one server knows of others with its identity."""

    def __init__(self, update_period_s: float = 0.0, clock: Callable[[], float] = time.monotonic) -> None:
        self.instance = secrets.token_hex(4)
        """Names this process in its records."""
        self.seen = False
        """Whether there has been another one since this process began."""
        self._clock = clock
        self._expected_from = clock() + RECORD_PERIODS * update_period_s
        self._last: ServerInfo | None = None

    def note_record(self, own: ServerInfo) -> None:
        """A record of this peer id was found. One of an earlier process of this server stays as it is, and expires."""
        if own.instance in ("", self.instance):
            return
        last, self._last = self._last, own
        if last is not None and last.instance == own.instance and last != own and self._clock() > self._expected_from:
            self.tell(f"the swarm has records of it from a process at {', '.join(own.addrs) or 'unknown addresses'}")

    def note_greeting(self, own_peer_id: str, greeting: HelloHeader, client: str) -> None:
        """A client has said that it is going to serve by this key; it counts if it proves that it has the key."""
        shown = greeting.contribution
        if greeting.same_identity and shown is not None and shown.server == own_peer_id and is_genuine(shown, client):
            self.tell("a process that begins now has said so")

    def tell(self, how: str) -> None:
        """Log it once."""
        if not self.seen:
            logger.warning("another process has this server's identity (%s): %s", how, MEND)
        self.seen = True


async def greet_twin(identity: Identity, initial_peers: Sequence[str]) -> str | None:
    """The address among these at which a process with this identity answers, which is told; None: there is none.

    To be called before this server listens anywhere, or it would find itself.
    """
    own = [maddr for maddr in initial_peers if split_initial_peer(maddr)[0] == identity.peer_id]
    if not own:
        return None
    try:
        peer = await Peer.create(initial_peers=own, client_mode=True)
    except SwarmError as error:  # as usual: a server that is among its own initial peers begins again
        logger.debug("nobody else has this identity: %s", error)
        return None
    async with peer:
        try:
            stream = await peer.open_stream(identity.peer_id, [split_initial_peer(maddr)[1] for maddr in own])
            await hello(stream, contribution=contribution(identity, peer.peer_id), same_identity=True)
            stream.abort()
        except SwarmError as error:
            logger.debug("the other process with this identity can't be told: %s", error)
    return own[0]
