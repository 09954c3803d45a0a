"""Verified servers: they were greeted, and serve what they announce in the DHT.

A record costs nothing, so records alone decide nothing. Each process has one `VerifiedPeers` between the
`block_directory` and everything that uses servers: a server's placement, rebalancing and pings of its neighbours; a
client's routes and traits. Every stream that the process opens to a server goes through here and so verifies it.
Servers without a stream are dialled, a limited number at a time.

    no verdict         never dialled, or long ago
    confirmed          its greeting confirmed its record within the last `CONFIRMED_S`
    refuted            within the last `REFUTED_S` it couldn't be dialled or greeted, or its greeting differed
    asked again        another server was lost, so it is dialled again; until it answers, it has no verdict

The owner may add its own check of greetings (`check`): a client knows what a model's blocks need, and refutes servers
that claim something else. A server may still lie in its greeting and compute nonsense, but it has to exist.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

from swarmllm.data_structures import ServedBlocks, ServerInfo
from swarmllm.errors import BlocksNotServedError, PeerError, ServerOverloadedError, SwarmError
from swarmllm.network.p2p.identity import Identity, contribution
from swarmllm.network.p2p.peer import Peer
from swarmllm.network.wire.messages import parse
from swarmllm.network.wire.protocol import FrameStream, hello
from swarmllm.version import __version__

logger = logging.getLogger(__name__)

CONFIRMED_S = 300.0
"""Assumed: each process dials a server that it knows of once in this many seconds, unless it uses it anyway."""
REFUTED_S = 30.0
"""Assumed: seconds until a server that could not be reached is dialled again."""
AGAIN_S = 2.0
"""Seconds until a server is dialled again because others were lost."""
CHANGED_S = 2.0
"""If a record differs from a greeting older than this, the record may be newer."""
DIAL_TIMEOUT_S = 5.0
LOOK_TIMEOUT_S = 3.0
"""Seconds to wait for the servers that are dialled: long enough to cross half the internet. Others may count the next
time."""
MAX_DIALS = 32
"""Dials at a time."""
MAX_DIALS_PER_LOOK = 256
"""Dials per look. A flood of records keeps nobody busy for long, and the honest servers of a large swarm are met within
some looks."""


CheckGreeting = Callable[[ServerInfo, ServedBlocks], None]
"""Raises a PeerError if a server's greeting can't be true."""


@dataclass(frozen=True, slots=True)
class _Verdict:
    served: ServedBlocks | None
    """None: it couldn't be reached."""
    at: float


class VerifiedPeers:
    """Verdicts about the servers of one checkpoint, reached through `peer()`."""

    def __init__(
        self,
        peer: Callable[[], Peer],
        fingerprint: str,
        *,
        contributor: Identity | None = None,
        check: CheckGreeting = lambda server, served: None,
        clock: Callable[[], float] = time.monotonic,
        generator: Random | None = None,
    ) -> None:
        """`contributor`: the key of the contributor's server, if this process belongs to one."""
        self._peer, self._contributor = peer, contributor
        self._fingerprint, self._check = fingerprint, check
        self._clock = clock
        self._generator = generator or Random()
        self._verdicts: dict[str, _Verdict] = {}
        self._dials: dict[str, asyncio.Task[None]] = {}
        self._asked_again: set[str] = set()
        self._room = asyncio.Semaphore(MAX_DIALS)

    # What is known

    def __contains__(self, peer_id: str) -> bool:
        """True if this peer was met as a server lately, whatever it serves."""
        verdict = self._verdicts.get(peer_id)
        return verdict is not None and verdict.served is not None and self._clock() - verdict.at < CONFIRMED_S

    def served(self, server: ServerInfo) -> ServedBlocks | None:
        """The greeting of this server if it confirms the record, else None."""
        verdict = self._verdicts.get(server.peer_id)
        if verdict is None or verdict.served is None or self._clock() - verdict.at >= CONFIRMED_S:
            return None
        if server.peer_id in self._asked_again:
            return None
        return verdict.served if verdict.served.confirms(server) else None

    def confirmed(self, servers: Iterable[ServerInfo]) -> tuple[ServerInfo, ...]:
        """The servers among these that serve what they announce."""
        return tuple(server for server in servers if self.served(server) is not None)

    def is_refuted(self, server: ServerInfo) -> bool:
        """True if this server couldn't be reached lately, or serves something else."""
        verdict = self._verdicts.get(server.peer_id)
        if verdict is None or self.served(server) is not None:
            return False
        return self._clock() - verdict.at < (REFUTED_S if verdict.served is None else CHANGED_S)

    def renew(self, server: ServerInfo) -> None:
        """Note that a stream to this server is in use, and answers."""
        served = self.served(server)
        if served is not None:
            self._note(server.peer_id, served)

    def forget_others(self, servers: Iterable[ServerInfo]) -> None:
        """Forget old verdicts about servers that aren't announced any more."""
        announced, now = {server.peer_id for server in servers}, self._clock()
        for peer_id in [peer_id for peer_id, verdict in self._verdicts.items() if now - verdict.at > CONFIRMED_S]:
            if peer_id not in announced:
                del self._verdicts[peer_id]

    # Finding out

    async def open_stream(
        self, server: ServerInfo, *, timeout_s: float = DIAL_TIMEOUT_S, **options: Any
    ) -> tuple[FrameStream, ServedBlocks | None]:
        """Open a stream to this server and greet it; also return its blocks (None: none at the moment).

        Raises:
            PeerError: it can't be reached, speaks another protocol, or its greeting can't be true.
            SwarmError: it refuses this peer.
        """
        try:
            peer = self._peer()
            stream = await peer.open_stream(server.peer_id, server.addrs, timeout_s=timeout_s, **options)
            try:
                proof = None if self._contributor is None else contribution(self._contributor, peer.peer_id)
                header = await hello(
                    stream,
                    fingerprint=self._fingerprint,
                    software=__version__,
                    contribution=proof,
                    timeout_s=timeout_s,
                )
                served = parse(ServedBlocks, header.info, server.peer_id) if header.info else None
                if served is not None:
                    self._check(server, served)
            except BaseException:
                stream.abort()
                raise
        except ServerOverloadedError:
            raise  # it exists
        except SwarmError:
            self._note(server.peer_id, None)
            raise
        self._note(server.peer_id, served)
        return stream, served

    async def greet(self, server: ServerInfo) -> ServedBlocks:
        """Ask this server what it serves, unless it has confirmed its record lately.

        Raises:
            BlocksNotServedError: its record is wrong.
            PeerError: as `open_stream`.
        """
        dial = self._dials.get(server.peer_id)
        if dial is not None and dial is not asyncio.current_task():
            await asyncio.wait([dial])
        served = self.served(server)
        if served is None:
            try:
                stream, served = await self.open_stream(server)
            except PeerError:
                raise
            except SwarmError as error:
                raise BlocksNotServedError(f"the server {server.peer_id} refuses: {error}", server.peer_id) from None
            stream.abort()
        if served is None or not served.confirms(server):
            says = "none at the moment" if served is None else f"{served.start}:{served.end}"
            raise BlocksNotServedError(
                f"the server {server.peer_id} announces blocks {server.span}, but serves {says}", server.peer_id
            )
        return served

    async def verify(
        self, servers: Sequence[ServerInfo], *, timeout_s: float = LOOK_TIMEOUT_S
    ) -> tuple[ServerInfo, ...]:
        """Dial the servers without a verdict; return the servers that serve what they announce."""
        self.forget_others(servers)
        dials = self.verify_soon(servers)
        if dials:
            await asyncio.wait(dials, timeout=timeout_s)
        return self.confirmed(servers)

    def neighbours(self, servers: Iterable[ServerInfo]) -> list[ServerInfo]:
        """The servers among these that are neighbours in the DHT. Some of the honest ones always are."""
        return [server for server in servers if self._peer().is_neighbour(server.peer_id)]

    def verify_soon(self, servers: Iterable[ServerInfo], *, again: bool = False) -> list[asyncio.Task[None]]:
        """Dial servers without a verdict in the background. Those met before and neighbours come first.

        `again`: also servers that were met or refuted before, but not just now.
        """

        def is_wanted(server: ServerInfo) -> bool:
            verdict = self._verdicts.get(server.peer_id)
            if again and verdict is not None and self._clock() - verdict.at >= AGAIN_S:
                return True
            return self.served(server) is None and not self.is_refuted(server)

        unknown = [server for server in servers if is_wanted(server)]
        self._generator.shuffle(unknown)
        first = {server.peer_id for server in self.neighbours(unknown)}
        unknown.sort(key=lambda server: server.peer_id not in self and server.peer_id not in first)
        for server in unknown[: max(0, (MAX_DIALS if again else MAX_DIALS_PER_LOOK) - len(self._dials))]:
            if server.peer_id not in self._dials:
                if again:
                    self._asked_again.add(server.peer_id)
                task = asyncio.get_running_loop().create_task(self._dial(server), name=f"verify {server.peer_id}")
                self._dials[server.peer_id] = task
                task.add_done_callback(partial(self._dialled, server.peer_id))
        return [self._dials[server.peer_id] for server in unknown if server.peer_id in self._dials]

    def _dialled(self, peer_id: str, _: "asyncio.Task[None]") -> None:
        self._asked_again.discard(peer_id)
        self._dials.pop(peer_id, None)

    async def close(self) -> None:
        """End the dials in progress."""
        dials = list(self._dials.values())
        for dial in dials:
            dial.cancel()
        await asyncio.gather(*dials, return_exceptions=True)

    async def _dial(self, server: ServerInfo) -> None:
        async with self._room:
            try:
                await self.greet(server)
            except SwarmError as error:
                logger.debug("not counted: %s", error)

    def _note(self, peer_id: str, served: ServedBlocks | None) -> None:
        self._asked_again.discard(peer_id)
        self._verdicts[peer_id] = _Verdict(served, self._clock())
