"""This client's node of the DHT, and what the servers of one checkpoint announce there.

Used by `SwarmView` and `routes`; runs in the client's event loop. Announcements may be anybody's inventions:
`p2p/verified_peers` says which of them have been met.
"""

import asyncio
import logging
import time

from swarmllm.client.view.tolerances import is_checkable
from swarmllm.config import ClientConfig, address_book_path
from swarmllm.data_structures import ServerInfo, Span, SwarmSnapshot
from swarmllm.errors import ConfigurationError, MissingBlocksError, SwarmError, WeightsMismatchError
from swarmllm.network.p2p.block_directory import BlockDirectory
from swarmllm.network.p2p.discovery import LOOK_ON_S, find_swarm
from swarmllm.network.p2p.identity import Identity
from swarmllm.network.p2p.peer import Peer
from swarmllm.network.p2p.verified_peers import CheckGreeting, VerifiedPeers
from swarmllm.swarm.stacks import command_to_serve

logger = logging.getLogger(__name__)

PINGS_PER_ROUND = 8
"""Servers, at most."""
NEIGHBOURS_MET = 8
"""Servers that are met after each look, if they weren't, because this client is connected to their nodes of the DHT."""


class LookUps:
    """The servers of one checkpoint, as far as they are known, and ways to know more."""

    def __init__(
        self, config: ClientConfig, *, name: str, fingerprint: str, num_blocks: int, check_greeting: CheckGreeting
    ) -> None:
        self.config = config
        self.name = name
        """The model's name in the swarm."""
        self.fingerprint = fingerprint
        self.num_blocks = num_blocks
        self.spans: tuple[Span, ...] = (Span(0, num_blocks),)
        """The blocks that servers are to run."""
        self.encoder_blocks = 0
        """How many blocks, the first ones, are an encoder's."""
        self.snapshot = SwarmSnapshot(num_blocks=num_blocks)
        path = config.contributor_identity
        contributor = None if path is None else Identity.load(path)
        self.verified = VerifiedPeers(lambda: self.peer, fingerprint, contributor=contributor, check=check_greeting)
        self.news = 0
        """Counts what a running session might change its route for: looks and rounds of pings."""
        self.is_outdated = False
        """A server has failed since the last look, so what was announced may no longer be true."""
        self._peer: Peer | None = None
        self._refreshing = asyncio.Lock()

    @property
    def peer(self) -> Peer:
        """This process in the swarm."""
        if self._peer is None:
            raise RuntimeError("the swarm view is not connected")
        return self._peer

    async def connect(self) -> None:
        """Join the swarm's DHT as a client.

        Raises:
            ConfigurationError: no initial peers although discovery is off, or not an address.
            MissingBlocksError: there are none on the local network either.
            PeerUnreachableError: none of them answers.
        """
        initial_peers = self.config.initial_peers
        if not initial_peers:
            if not self.config.lan_discovery:
                raise ConfigurationError(
                    "name peers of the swarm with --initial_peers (in Python: initial_peers=[…]), which servers "
                    "print when they start, or set SWARMLLM_INITIAL_PEERS"
                )
            initial_peers = await find_swarm(
                self.name, self.fingerprint, look_on_s=min(LOOK_ON_S, self.config.start_timeout_s)
            )
        self._peer = await Peer.create(
            initial_peers=initial_peers,
            identity_path=self.config.identity_path,
            client_mode=True,
            address_book=address_book_path(),
        )
        self._peer.prefer_records(self.verified.__contains__)
        self._directory = BlockDirectory(self._peer, self.config.swarm_name)

    async def close(self) -> None:
        """Leave the DHT and end the daemon."""
        await self.verified.close()
        if self._peer is not None:
            await self._peer.close()
            self._peer = None

    async def refresh(self) -> SwarmSnapshot:
        """Look into the DHT now; calls at the same time share one look."""
        asked_at = time.monotonic()
        async with self._refreshing:
            if self.snapshot.taken_at < asked_at:
                servers = await self._directory.servers(self.fingerprint)
                usable = tuple(s for s in servers if s.end <= self.num_blocks and self._may_use(s))
                self.snapshot = SwarmSnapshot(self.num_blocks, usable, self.encoder_blocks, taken_at=time.monotonic())
                self.verified.forget_others(usable)
                if len(online := self.snapshot.online()) > PINGS_PER_ROUND:  # else all are met by pings
                    self.verified.verify_soon(self.verified.neighbours(online)[:NEIGHBOURS_MET])
                self.news += 1
            return self.snapshot

    async def look_again(self) -> None:
        """`refresh`, whose failure is only logged."""
        try:
            await self.refresh()
        except SwarmError as error:
            logger.warning("could not look into the DHT: %s", error)

    async def check_fingerprint(self) -> None:
        """Look whether somebody serves another checkpoint of the same name, where nobody serves this one."""
        for record in (await self._directory.models()).values():
            if record.name == self.name and record.fingerprint != self.fingerprint:
                raise WeightsMismatchError(
                    f"the swarm serves another version of {self.name} (fingerprint {record.fingerprint[:12]}) "
                    f"than yours ({self.fingerprint[:12]}): use the same revision and files as its servers"
                )

    async def explained(self, error: MissingBlocksError, adapter: str | None, left_out: str) -> MissingBlocksError:
        """The error in words that name the mend; `adapter`: the one that servers have to offer; `left_out`: who wasn't
        used because of other weights."""
        names = sorted({record.name for record in (await self._directory.models()).values()})
        if not self.snapshot.servers:
            others = f"; this swarm serves {', '.join(names)}" if names else "; this swarm serves no model at all"
            return MissingBlocksError(f"nobody serves {self.name}{others}", error.block_idxs)
        if adapter is not None:
            return MissingBlocksError(
                f"{error} of {self.name} with the adapter {adapter}: start servers with --adapters {adapter}, "
                "or leave active_adapter out",
                error.block_idxs,
            )
        if left_out:
            return MissingBlocksError(f"{error} of {self.name}{left_out}", error.block_idxs)
        text = f"{error} of {self.name} (waited {self.config.route_timeout_s:.0f} s)"
        if missing := error.block_idxs:  # none are, where spans can't be joined
            is_private = self.config.swarm_name is not None
            command = command_to_serve(missing, self.name, self.config.initial_peers, is_private=is_private)
            text += f": start a server of them, {command}"
        return MissingBlocksError(text, missing)

    def _may_use(self, server: ServerInfo) -> bool:
        config, peer_id = self.config, server.peer_id
        if peer_id in config.blocked_servers or (config.verify_fraction and not is_checkable(server, config)):
            return False
        return config.allowed_servers is None or peer_id in config.allowed_servers
