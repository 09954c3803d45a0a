"""What the client knows of the swarm: who serves what, which way to take, whom to avoid.

Used by sessions and batches; runs in the client's event loop. The decisions themselves are pure (`swarm/routing`,
`swarm/retry`).
"""

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from weakref import WeakSet

from swarmllm.client.active_adapter import ActiveAdapter
from swarmllm.client.adapter_uploads import AdapterUploads
from swarmllm.client.agreed_traits import agreed_traits, check_agrees
from swarmllm.client.connection import Connection, OnAnswer
from swarmllm.client.distances import PINGS_PER_ROUND, Distances
from swarmllm.client.event_loop import EventLoop
from swarmllm.client.this_machine import decode_ms
from swarmllm.client.tolerances import is_checkable
from swarmllm.config import ClientConfig
from swarmllm.data_structures import BlockTraits, RouteHop, ServerInfo, Span, SwarmSnapshot
from swarmllm.errors import (
    ConfigurationError,
    MissingBlocksError,
    PeerError,
    RemoteProtocolError,
    SwarmError,
    WeightsMismatchError,
)
from swarmllm.network.block_directory import DEFAULT_TTL_S, BlockDirectory
from swarmllm.network.discovery import find_swarm
from swarmllm.network.peer import Peer
from swarmllm.network.verified_peers import VerifiedPeers
from swarmllm.swarm.explain import Route, explain_route
from swarmllm.swarm.plausible import plausible
from swarmllm.swarm.retry import PeerHealth
from swarmllm.swarm.route_costs import RouteCosts
from swarmllm.swarm.routing import find_parallel_routes, find_route, is_worth_moving, route_cost_ms

logger = logging.getLogger(__name__)

LOOKUP_PATIENCE_S = 0.5
"""A look takes 3 s if the DHT asks a node that is frozen; then a route is made of what was known before."""
RETRY_LOOKUP_S = 0.5
"""From one look for missing blocks to the next: announcements become visible within 40–180 ms (measured)."""

NEIGHBOURS_MET = 8
"""Servers that are met after each look, if they weren't, because this client is connected to their nodes of the DHT."""
FIRST_PINGS_PATIENCE_S = 0.5
"""How long the first route waits for the first round of pings, where there is a choice of servers. Assumed: near ones
answer within it, far ones shall not be chosen."""


class SwarmView:
    """One client's view of the swarm of one checkpoint."""

    def __init__(self, config: ClientConfig, loop: EventLoop, *, name: str, fingerprint: str, num_blocks: int) -> None:
        self.config = config
        self.loop = loop
        self.num_blocks = num_blocks
        self.health = PeerHealth(config.ban_s)
        self.active_adapter = ActiveAdapter(config.active_adapter)
        self.adapters = AdapterUploads(self.active_adapter)
        self.counts: Counter[str] = Counter()
        """What happened so far: errors by their code, what servers said of others (`accusations`), `repairs`,
        `spot_checks`, `spot_checks_failed`."""
        self._name = name
        self._fingerprint = fingerprint
        self._peer: Peer | None = None
        self.snapshot = SwarmSnapshot(num_blocks=num_blocks)
        self._has_news_to_find = False
        """A server has failed, so what was announced may be out of date."""
        self._refreshing = asyncio.Lock()
        self.distances = Distances(self)
        self.round_trips = self.distances.round_trips
        self.news = 0
        """Counts what a running session might change its route for: looks and rounds of pings."""
        self.hidden_size: int | None = None
        """Width of the hidden states; None: nobody knows."""
        self.num_bytes: int | None = None
        """Of all blocks, if this machine held them; None: nobody knows."""
        self.verified = VerifiedPeers(lambda: self._connected_peer, fingerprint)
        self._traits: BlockTraits | None = None
        """What the first route's servers agreed about."""
        self.connections: WeakSet[Connection] = WeakSet()
        self._first_pings: asyncio.Task[None] | None = None
        self.used_at = -math.inf
        loop.on_close.append(self.close)

    # ------------------------------------------------------------------ for users: synchronous

    def servers(self) -> list[ServerInfo]:
        """What the servers of this model announce now."""
        return list(self.loop.run(self.refresh()).servers)

    def route(self) -> Route:
        """The route that would be taken now; `print()` it to see why, in numbers.

        Raises:
            MissingBlocksError: there is none.
        """
        return self.loop.run(self._explained_route())

    def expected_ms_per_token(self, route: Sequence[RouteHop] | None = None) -> float:
        """What one decode step along `route` (default: the one that would be taken now) is expected to take."""
        return self.route().expected_ms if route is None else self.loop.run(self._expected_ms(route))

    @property
    def max_batch_tokens(self) -> int:
        """What every server that is known to serve takes in one batch."""
        servers = self.verified.confirmed(self.snapshot.servers) or self.snapshot.servers
        return min((server.max_batch_tokens for server in servers), default=0)

    @property
    def model_name(self) -> str:
        """As the swarm knows the model."""
        return self._name

    @property
    def fingerprint(self) -> str:
        """Of the checkpoint."""
        return self._fingerprint

    # ------------------------------------------------------------------ in the event loop

    @property
    def peer_id(self) -> str:
        return self._connected_peer.peer_id

    @property
    def _connected_peer(self) -> Peer:
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
                    "name peers of the swarm with initial_peers=[…] (a server prints them when it starts), "
                    "or set SWARMLLM_INITIAL_PEERS"
                )
            initial_peers = await find_swarm(self._name, self._fingerprint)
        self._peer = await Peer.create(
            initial_peers=initial_peers,
            identity_path=self.config.identity_path,
            client_mode=True,
        )
        self._peer.prefer_records(self.verified.__contains__)
        self._directory = BlockDirectory(self._peer, self.config.swarm_name)
        self.loop.spawn(self.distances.keep_measuring(), name="measure round trips")

    async def daemon_exited(self) -> None:
        """Return when this client's p2pd has exited; without it nobody can be found or dialled any more."""
        await self._connected_peer.daemon_exited()

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
                servers = await self._directory.servers(self._fingerprint)
                usable = tuple(s for s in servers if s.end <= self.num_blocks and self._may_use(s))
                self.snapshot = SwarmSnapshot(self.num_blocks, usable, taken_at=time.monotonic())
                self.verified.forget_others(usable)
                if len(online := self.snapshot.online()) > PINGS_PER_ROUND:  # else all are met by pings
                    self.verified.verify_soon(self.verified.neighbours(online)[:NEIGHBOURS_MET])
                self.news += 1
            return self.snapshot

    async def look_again(self) -> None:
        try:
            await self.refresh()
        except SwarmError as error:
            logger.warning("could not look into the DHT: %s", error)

    async def find_route(self, span: Span, costs: RouteCosts | None = None) -> list[RouteHop]:
        """The best route for `span`; waits up to `route_timeout_s` for somebody to serve it.

        Raises:
            MissingBlocksError: nobody does.
            WeightsMismatchError: the model's servers hold another checkpoint.
        """
        route = await self._some_route(span, costs)
        if self._first_pings is not None and not self._first_pings.done() and self._has_choice(span):
            await asyncio.wait((self._first_pings,), timeout=FIRST_PINGS_PATIENCE_S)
            return await self._some_route(span, self._updated(costs))
        return route

    async def _some_route(self, span: Span, costs: RouteCosts | None = None) -> list[RouteHop]:
        self.used_at = time.monotonic()
        costs = costs or self.costs()
        age_s = time.monotonic() - self.snapshot.taken_at
        if not self.snapshot.servers:
            await self.refresh()
        elif age_s > self.config.update_period_s or self._has_news_to_find:
            looking = self.loop.spawn(self.look_again(), name="look into the DHT")
            if not self._has_news_to_find or age_s > DEFAULT_TTL_S:  # a repair takes whom we know
                await asyncio.wait((looking,), timeout=LOOKUP_PATIENCE_S)
            self._has_news_to_find = False
        if self._first_pings is None and self.snapshot.servers:
            self._first_pings = self.loop.spawn(self.distances.ping_some(), name="first pings")
        deadline = time.monotonic() + self.config.route_timeout_s
        told = False
        while True:
            now = time.monotonic()
            try:
                return self._search(span, self._avoided(now), costs)
            except MissingBlocksError as error:
                if now > deadline:
                    raise await self._explain(error) from None
                if not self.snapshot.servers:
                    await self._check_fingerprint()
            await self._look_for_others(span)
            try:  # better a peer that failed before than none
                avoided_s = self.health.avoided_s(time.monotonic())
                return self._search(span, self._excluded, replace(costs, avoided_s=avoided_s))
            except MissingBlocksError as error:
                level = logging.DEBUG if told else logging.WARNING  # once is enough to explain the silence
                logger.log(level, "%s yet; looking again for %.0f s", error, max(0.0, deadline - now))
                told = True

    async def _look_for_others(self, span: Span) -> None:
        """Look into the DHT; return soon if there is a route by then, else in time to look again.

        Whoever was refuted is dialled again meanwhile, all at once: tried one after the other, as many dead ones as are
        still announced would come before the one that lives.
        """
        announced = [server for server in self.snapshot.online() if server.start < span.end and span.start < server.end]
        self.verified.verify_soon(announced, again=True)
        enough = time.monotonic() + RETRY_LOOKUP_S
        looking = self.loop.spawn(self.refresh(), name="look into the DHT")
        await asyncio.wait((looking,), timeout=LOOKUP_PATIENCE_S)
        if looking.done():
            looking.result()
        if self.alternative(span, ()) is None:
            await asyncio.sleep(enough - time.monotonic())

    def _search(self, span: Span, avoid: Collection[str], costs: RouteCosts) -> list[RouteHop]:
        route = self._best(span, avoid, costs)
        self.active_adapter.keep(self.snapshot)
        return route

    def _best(self, span: Span, avoid: Collection[str], costs: RouteCosts) -> list[RouteHop]:
        """The best route of servers that have been met, if there is one; better ones are met meanwhile.

        Else the best of those of which nothing bad is known, and else of all.

        Raises:
            MissingBlocksError: there is none.
        """
        snapshot, online = self.snapshot, self.snapshot.online()
        try:
            refuted = {server.peer_id for server in online if self.verified.is_refuted(server)}
            best = find_route(snapshot, span, avoid=refuted.union(avoid), costs=costs)
            confirmed = {server.peer_id for server in self.verified.confirmed(online)}
            strangers = [hop.server for hop in best if hop.server.peer_id not in confirmed]
            if not strangers:
                return best
        except MissingBlocksError:
            return find_route(snapshot, span, avoid=avoid, costs=costs)
        self.verified.verify_soon(strangers)
        try:
            unmet = {server.peer_id for server in online} - confirmed
            return find_route(snapshot, span, avoid=unmet.union(avoid), costs=costs)
        except MissingBlocksError:
            return best

    def alternative(self, span: Span, without: Collection[str], *, even_avoided: bool = False) -> list[RouteHop] | None:
        """A route for `span` without these peers and those to be avoided, as far as is known; None if there is none."""
        avoid = (self._excluded if even_avoided else self._avoided(time.monotonic())) | frozenset(without)
        try:
            return self._best(span, avoid, self.costs())
        except MissingBlocksError:
            return None

    def without_blamed(self, route: list[RouteHop]) -> list[RouteHop]:
        """The route, or another one for its blocks if one of its servers has failed meanwhile and can be spared."""
        if self.blamed.isdisjoint(hop.server.peer_id for hop in route):
            return route
        return self.alternative(Span(route[0].span.start, route[-1].span.end), ()) or route

    @property
    def blamed(self) -> frozenset[str]:
        """Peers that have failed and are avoided for now."""
        return self.health.blamed(time.monotonic())

    async def parallel_routes(self, span: Span, num_tokens: int, max_routes: int) -> list[tuple[list[RouteHop], float]]:
        """Routes for a batch without a common server, the best one first, and what share of it each should take.

        Raises:
            MissingBlocksError: nobody serves some blocks.
        """
        costs = replace(self.costs(), forward_tokens=num_tokens)
        route = await self.find_route(span, costs)
        avoid = self._avoided(time.monotonic())
        if max_routes == 1 or any(hop.server.peer_id in avoid for hop in route):
            return [(route, 1.0)]
        confirmed = self.verified.confirmed(self.snapshot.servers)
        if {hop.server.peer_id for hop in route} <= {server.peer_id for server in confirmed}:
            snapshot = replace(self.snapshot, servers=plausible(confirmed))
        else:
            snapshot = replace(self.snapshot, servers=plausible(self.snapshot.servers))
        return find_parallel_routes(snapshot, span, avoid=avoid, costs=costs, max_routes=max_routes)

    def better_route(self, route: Sequence[RouteHop], costs: RouteCosts, tokens_left: int) -> list[RouteHop] | None:
        """A route to which a session on `route` should move, if there is one that is worth it."""
        self.used_at = time.monotonic()
        if self.config.min_gain_to_move >= 1:
            return None
        latest = {server.peer_id: server for server in self.snapshot.online()}
        current = [replace(hop, server=latest.get(hop.server.peer_id, hop.server)) for hop in route]
        avoid = self._avoided(time.monotonic())
        try:
            target = self._best(Span(0, self.num_blocks), avoid, costs)
        except MissingBlocksError:
            return None
        gain = self.config.min_gain_to_move
        return target if is_worth_moving(current, target, costs, tokens_left=tokens_left, min_gain=gain) else None

    def costs(self, *, context_tokens: int = 0, batch_size: int = 1, cache_tokens: int = 0) -> RouteCosts:
        """What hops cost this client, as far as it knows now."""
        return RouteCosts(
            round_trips_ms=self._distances(),
            context_tokens=context_tokens,
            batch_size=batch_size,
            cache_tokens=cache_tokens,
            relayed=not self.config.push,
        )

    def _avoided(self, now: float) -> frozenset[str]:
        """Peers that no route should use now."""
        return self.health.avoided(now) | self.active_adapter.lacked_by(self.snapshot)

    @property
    def _excluded(self) -> frozenset[str]:
        """Peers that no route may use, even if there is no other one."""
        return frozenset(self.health.quarantined) | self.active_adapter.lacked_by(self.snapshot)

    def _updated(self, costs: RouteCosts | None) -> RouteCosts | None:
        return None if costs is None else replace(costs, round_trips_ms=self._distances())

    def _distances(self) -> dict[str, float]:
        return self.round_trips.known(time.monotonic())

    def _has_choice(self, span: Span) -> bool:
        held = Counter(block for server in self.snapshot.online() for block in server.span if block in span)
        return any(count > 1 for count in held.values())

    async def _explained_route(self) -> Route:
        route = await self.find_route(Span(0, self.num_blocks))
        num_bytes = self.num_bytes
        here_ms = None if num_bytes is None else await asyncio.to_thread(decode_ms, num_bytes)
        return explain_route(route, self.snapshot, self.costs(), here_ms=here_ms)

    async def _expected_ms(self, route: Sequence[RouteHop]) -> float:
        return route_cost_ms(route, self.costs())

    async def traits(self) -> BlockTraits:
        """What the servers of the best route say about the model's blocks when they are greeted, taken together.

        Raises:
            MissingBlocksError: nobody who can be reached serves some blocks.
            ConfigurationError: they contradict each other.
        """
        span, deadline = Span(0, self.num_blocks), time.monotonic() + self.config.route_timeout_s
        while True:
            servers = [hop.server for hop in await self._some_route(span)]
            greetings = await asyncio.gather(*map(self.verified.greet, servers), return_exceptions=True)
            said: list[tuple[str, BlockTraits]] = []
            for server, greeting in zip(servers, greetings, strict=True):
                if isinstance(greeting, SwarmError):
                    self.report(greeting)
                    if time.monotonic() > deadline:
                        raise self.what_is_wrong(greeting, span)
                elif isinstance(greeting, BaseException):
                    raise greeting
                elif greeting.traits is not None:
                    said.append((server.peer_id, greeting.traits))
            if len(said) == len(servers):
                self._traits = agreed_traits(said)
                return self._traits

    async def open_connection(self, server: ServerInfo, on_answer: OnAnswer | None = None) -> Connection:
        """A new stream to `server`.

        Raises:
            PeerError: it can't be reached, or speaks another protocol.
        """
        timeout_s = self.config.connect_timeout_s
        stream, served = await self.verified.open_stream(
            server, timeout_s=timeout_s, max_message_bytes=self.config.max_message_bytes
        )
        try:
            if served is not None and served.traits is not None and self._traits is not None:
                check_agrees(server.peer_id, served.traits, self._traits)
        except RemoteProtocolError:
            stream.abort()
            raise
        stream.start_keepalive()
        connection = Connection(stream, server, on_answer, compression=self.config.compression)
        self.connections.add(connection)
        self.loop.spawn(connection.read(), name=f"read from {server.peer_id}")
        return connection

    def report(self, error: SwarmError) -> bool:
        """Take note of a failure, so that later routes avoid the peer if it is to blame; False if they did already."""
        is_hearsay = isinstance(error, PeerError) and error.is_hearsay
        self.counts["accusations" if is_hearsay else error.code] += 1
        is_news = self.health.report(error, time.monotonic())
        if isinstance(error, PeerError) and not is_hearsay:
            self.adapters.forget(error.peer_id)
        if isinstance(error, PeerError) and error.retriable:
            self._has_news_to_find = True
        return is_news

    def what_is_wrong(self, error: SwarmError, span: Span) -> SwarmError:
        """The error; or which blocks are missing, if it is about the only servers of some: announced is not there."""
        if not isinstance(error, PeerError) or not error.blames_peer:
            return error
        try:
            find_route(self.snapshot, span, avoid=self._avoided(time.monotonic()))
        except MissingBlocksError as missing:
            adapter = self.active_adapter.wanted
            what = self._name if adapter is None else f"{self._name} with the adapter {adapter}"
            return MissingBlocksError(f"{missing} of {what} any more: {error}", missing.block_idxs)
        return error

    def _may_use(self, server: ServerInfo) -> bool:
        config, peer_id = self.config, server.peer_id
        if peer_id in config.blocked_servers or (config.verify_fraction and not is_checkable(server, config)):
            return False
        return config.allowed_servers is None or peer_id in config.allowed_servers

    async def _check_fingerprint(self) -> None:
        """Nobody serves this checkpoint: does somebody serve another one of the same name?"""
        for record in (await self._directory.models()).values():
            if record.name == self._name and record.fingerprint != self._fingerprint:
                raise WeightsMismatchError(
                    f"the swarm serves another version of {self._name} (fingerprint {record.fingerprint[:12]}) "
                    f"than yours ({self._fingerprint[:12]}): use the same revision and files as its servers"
                )

    async def _explain(self, error: MissingBlocksError) -> MissingBlocksError:
        records = (await self._directory.models()).values()
        names = sorted({record.name for record in records})
        if not self.snapshot.servers:
            others = f"; this swarm serves {', '.join(names)}" if names else "; this swarm serves no model at all"
            return MissingBlocksError(f"nobody serves {self._name}{others}", error.block_idxs)
        if (adapter := self.active_adapter.wanted) is not None:
            return MissingBlocksError(
                f"{error} of {self._name} with the adapter {adapter}: start servers with --adapters {adapter}, "
                "or leave active_adapter out",
                error.block_idxs,
            )
        return MissingBlocksError(
            f"{error} of {self._name}: start a server with --block_indices for them, "
            f"or wait for one (waited {self.config.route_timeout_s:.0f} s)",
            error.block_idxs,
        )
