"""What the client knows of the swarm: who serves what, which way to take, whom to avoid.

Used by sessions and batches; runs in the client's event loop. The decisions themselves are pure (`swarm/routing`,
`swarm/retry`).
"""

import asyncio
import logging
import math
import random
import time
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from weakref import WeakSet

from swarmllm import __version__
from swarmllm.client.active_adapter import ActiveAdapter
from swarmllm.client.adapter_uploads import AdapterUploads
from swarmllm.client.connection import Connection, OnAnswer
from swarmllm.client.event_loop import EventLoop
from swarmllm.client.this_machine import decode_ms
from swarmllm.client.tolerances import is_checkable
from swarmllm.config import ClientConfig
from swarmllm.data_structures import BlockTraits, RouteHop, ServerInfo, Span, SwarmSnapshot
from swarmllm.errors import ConfigurationError, MissingBlocksError, PeerError, SwarmError, WeightsMismatchError
from swarmllm.network.block_directory import DEFAULT_TTL_S, BlockDirectory
from swarmllm.network.discovery import find_swarm
from swarmllm.network.peer import Peer
from swarmllm.network.protocol import hello
from swarmllm.swarm.explain import Route, explain_route
from swarmllm.swarm.retry import PeerHealth
from swarmllm.swarm.round_trips import RoundTrips
from swarmllm.swarm.route_costs import RouteCosts
from swarmllm.swarm.routing import find_parallel_routes, find_route, is_worth_moving, route_cost_ms

logger = logging.getLogger(__name__)

LOOKUP_PATIENCE_S = 0.5
"""A look takes 3 s if the DHT asks a node that is frozen; then a route is made of what was known before."""
RETRY_LOOKUP_S = 0.5
"""From one look for missing blocks to the next: announcements become visible within 40–180 ms (measured)."""

FIRST_PINGS_PATIENCE_S = 0.5
"""How long the first route waits for the first round of pings, where there is a choice of servers. Assumed: near ones
answer within it, far ones shall not be chosen."""
PINGS_PER_ROUND = 8
PING_SAMPLES = 3
"""Of which the least counts: everything else that a sample holds is somebody's delay."""
IDLE_S = 120.0
"""Without a route or a step for so long, nobody is pinged."""


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
        self._snapshot = SwarmSnapshot(num_blocks=num_blocks)
        self._has_news_to_find = False
        """A server has failed, so what was announced may be out of date."""
        self._refreshing = asyncio.Lock()
        self.round_trips = RoundTrips()
        self.news = 0
        """Counts what a running session might change its route for: looks and rounds of pings."""
        self.hidden_size: int | None = None
        """Width of the hidden states; None: nobody knows."""
        self.num_bytes: int | None = None
        """Of all blocks, if this machine held them; None: nobody knows."""
        self._connections: WeakSet[Connection] = WeakSet()
        self._first_pings: asyncio.Task[None] | None = None
        self._used_at = -math.inf
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
        """What every server that was last seen takes in one batch."""
        return min((server.max_batch_tokens for server in self._snapshot.servers), default=0)

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
        self._directory = BlockDirectory(self._peer)
        self.loop.spawn(self._keep_measuring(), name="measure round trips")

    async def daemon_exited(self) -> None:
        """Return when this client's p2pd has exited; without it nobody can be found or dialled any more."""
        await self._connected_peer.daemon_exited()

    async def close(self) -> None:
        """Leave the DHT and end the daemon."""
        if self._peer is not None:
            await self._peer.close()
            self._peer = None

    async def refresh(self) -> SwarmSnapshot:
        """Look into the DHT now; calls at the same time share one look."""
        asked_at = time.monotonic()
        async with self._refreshing:
            if self._snapshot.taken_at < asked_at:
                servers = await self._directory.servers(self._fingerprint)
                usable = tuple(s for s in servers if s.end <= self.num_blocks and self._may_use(s))
                self._snapshot = SwarmSnapshot(self.num_blocks, usable, taken_at=time.monotonic())
                self.news += 1
            return self._snapshot

    async def _look_again(self) -> None:
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
        self._used_at = time.monotonic()
        costs = costs or self.costs()
        age_s = time.monotonic() - self._snapshot.taken_at
        if not self._snapshot.servers:
            await self.refresh()
        elif age_s > self.config.update_period_s or self._has_news_to_find:
            looking = self.loop.spawn(self._look_again(), name="look into the DHT")
            if not self._has_news_to_find or age_s > DEFAULT_TTL_S:  # a repair takes whom we know
                await asyncio.wait((looking,), timeout=LOOKUP_PATIENCE_S)
            self._has_news_to_find = False
        if self._first_pings is None and self._snapshot.servers:
            self._first_pings = self.loop.spawn(self._ping_some(), name="first pings")
        deadline = time.monotonic() + self.config.route_timeout_s
        told = False
        while True:
            now = time.monotonic()
            try:
                return self._search(span, self._avoided(now), costs)
            except MissingBlocksError as error:
                if now > deadline:
                    raise await self._explain(error) from None
                if not self._snapshot.servers:
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
        """Look into the DHT; return soon if there is a route by then, else in time to look again."""
        enough = time.monotonic() + RETRY_LOOKUP_S
        looking = self.loop.spawn(self.refresh(), name="look into the DHT")
        await asyncio.wait((looking,), timeout=LOOKUP_PATIENCE_S)
        if looking.done():
            looking.result()
        if self.alternative(span, ()) is None:
            await asyncio.sleep(enough - time.monotonic())

    def _search(self, span: Span, avoid: Collection[str], costs: RouteCosts) -> list[RouteHop]:
        route = find_route(self._snapshot, span, avoid=avoid, costs=costs)
        self.active_adapter.keep(self._snapshot)
        return route

    def alternative(self, span: Span, without: Collection[str], *, even_avoided: bool = False) -> list[RouteHop] | None:
        """A route for `span` without these peers and those to be avoided, as far as is known; None if there is none."""
        avoid = (self._excluded if even_avoided else self._avoided(time.monotonic())) | frozenset(without)
        try:
            return find_route(self._snapshot, span, avoid=avoid, costs=self.costs())
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
        return find_parallel_routes(self._snapshot, span, avoid=avoid, costs=costs, max_routes=max_routes)

    def better_route(self, route: Sequence[RouteHop], costs: RouteCosts, tokens_left: int) -> list[RouteHop] | None:
        """A route to which a session on `route` should move, if there is one that is worth it."""
        self._used_at = time.monotonic()
        if self.config.min_gain_to_move >= 1:
            return None
        latest = {server.peer_id: server for server in self._snapshot.online()}
        current = [replace(hop, server=latest.get(hop.server.peer_id, hop.server)) for hop in route]
        avoid = self._avoided(time.monotonic())
        try:
            target = find_route(self._snapshot, Span(0, self.num_blocks), avoid=avoid, costs=costs)
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
        return self.health.avoided(now) | self.active_adapter.lacked_by(self._snapshot)

    @property
    def _excluded(self) -> frozenset[str]:
        """Peers that no route may use, even if there is no other one."""
        return frozenset(self.health.quarantined) | self.active_adapter.lacked_by(self._snapshot)

    def _updated(self, costs: RouteCosts | None) -> RouteCosts | None:
        return None if costs is None else replace(costs, round_trips_ms=self._distances())

    def _distances(self) -> dict[str, float]:
        return self.round_trips.known(time.monotonic())

    def _has_choice(self, span: Span) -> bool:
        held = Counter(block for server in self._snapshot.online() for block in server.span if block in span)
        return any(count > 1 for count in held.values())

    async def _explained_route(self) -> Route:
        route = await self.find_route(Span(0, self.num_blocks))
        num_bytes = self.num_bytes
        here_ms = None if num_bytes is None else await asyncio.to_thread(decode_ms, num_bytes)
        return explain_route(route, self._snapshot, self.costs(), here_ms=here_ms)

    async def _expected_ms(self, route: Sequence[RouteHop]) -> float:
        return route_cost_ms(route, self.costs())

    # ------------------------------------------------------------------ how far servers are

    async def _keep_measuring(self) -> None:
        """As long as somebody uses this view: look into the DHT, and ping servers."""
        while True:
            await asyncio.sleep(self.config.ping_period_s)
            now = time.monotonic()
            if now - self._used_at > IDLE_S:
                continue
            if now - self._snapshot.taken_at > self.config.update_period_s:
                await self._look_again()
            await self._ping_some()

    async def _ping_some(self) -> None:
        now = time.monotonic()
        in_use = {c.peer_id: c for c in self._connections if c.error is None}
        others = self.round_trips.to_measure(
            self._snapshot,
            now,
            count=max(0, PINGS_PER_ROUND - len(in_use)),
            avoid=self.health.avoided(now) | in_use.keys(),
            generator=random.Random(),
        )
        connected = random.sample(list(in_use.values()), min(PINGS_PER_ROUND, len(in_use)))
        await asyncio.gather(
            *(self._ping(connection.server, connection) for connection in connected),
            *(self._ping(server) for server in others),
        )
        self.news += 1

    async def _ping(self, server: ServerInfo, connection: Connection | None = None) -> None:
        """Measure one server's distance, over a stream that is there already or a new one.

        One that can't be reached is nobody's concern here.
        """
        self.round_trips.begin(server.peer_id, time.monotonic())
        try:
            async with asyncio.timeout(self.config.connect_timeout_s):
                if connection is not None:
                    samples = [await connection.ping() for _ in range(PING_SAMPLES)]
                else:
                    samples = await self._ping_over_new_stream(server)
        except (SwarmError, TimeoutError) as error:
            logger.debug("no ping to %s: %s", server.peer_id, error)
            self.round_trips.fail(server.peer_id)
            return
        self.round_trips.observe(server.peer_id, 1e3 * min(samples), time.monotonic())

    async def _ping_over_new_stream(self, server: ServerInfo) -> list[float]:
        timeout_s = self.config.connect_timeout_s
        stream = await self._connected_peer.open_stream(server.peer_id, server.addrs, timeout_s=timeout_s)
        try:
            await hello(stream, fingerprint=self._fingerprint, software=__version__, timeout_s=timeout_s)
            return [await stream.ping() for _ in range(PING_SAMPLES)]
        finally:
            stream.abort()

    async def traits(self) -> BlockTraits:
        """What the servers found out about the model's blocks, taken together.

        Raises:
            MissingBlocksError: nobody serves any block.
        """
        await self._some_route(Span(0, self.num_blocks))
        announced = [server.traits for server in self._snapshot.online()]
        extra = sorted({name for traits in announced for name in traits.extra_inputs})
        return announced[0].model_copy(
            update={
                "extra_inputs": tuple(extra),
                "forbidden_cuts": tuple(sorted({cut for traits in announced for cut in traits.forbidden_cuts})),
                "chunked_prefill": all(traits.chunked_prefill for traits in announced),
                "rollback": all(traits.rollback for traits in announced),
            }
        )

    async def open_connection(self, server: ServerInfo, on_answer: OnAnswer | None = None) -> Connection:
        """A new stream to `server`.

        Raises:
            PeerError: it can't be reached, or speaks another protocol.
        """
        timeout_s = self.config.connect_timeout_s
        stream = await self._connected_peer.open_stream(
            server.peer_id, server.addrs, timeout_s=timeout_s, max_message_bytes=self.config.max_message_bytes
        )
        try:
            await hello(stream, fingerprint=self._fingerprint, software=__version__, timeout_s=timeout_s)
        except BaseException:
            stream.abort()
            raise
        stream.start_keepalive()
        connection = Connection(stream, server, on_answer, compression=self.config.compression)
        self._connections.add(connection)
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
            find_route(self._snapshot, span, avoid=self._avoided(time.monotonic()))
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
        if not self._snapshot.servers:
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
