"""A client's view of the swarm: `model.swarm`, and the object that sessions and sessionless requests share.

`servers` knows the servers and their distances, `routes` chooses among them. Everything but the methods for users runs
in the client's event loop. `AdapterUploads` sends adapters once to each server, and again only after they have changed
or the server has forgotten them. `decode_ms` estimates the speed of this machine alone, for explained routes.
"""

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional

from swarmllm.client.view.connection import Connection, OnAnswer, new_request_id
from swarmllm.client.view.event_loop import EventLoop
from swarmllm.client.view.routes import Routes
from swarmllm.client.view.servers import (
    ActiveAdapter,
    Distances,
    LookUps,
    check_abilities,
    check_claims,
    lacking_abilities,
    trusted_traits,
    with_abilities_of,
)
from swarmllm.config import ClientConfig
from swarmllm.data_structures import BlockTraits, RouteHop, ServedBlocks, ServerInfo, Span
from swarmllm.errors import (
    ConfigurationError,
    LocalProtocolError,
    MissingBlocksError,
    PeerError,
    PeerTimeoutError,
    RemoteProtocolError,
    ServerOutOfMemoryError,
    SessionTooLargeError,
    SwarmError,
)
from swarmllm.machine_memory import available_memory_bytes
from swarmllm.models.adapters.block_adapter import BlockAdapter
from swarmllm.network.wire.messages import MAX_PATCHES, AdapterHeader
from swarmllm.network.wire.protocol import FrameStream, MessageType
from swarmllm.swarm.block_map import Route, explain_route
from swarmllm.swarm.retry import FULL_SERVER_PAUSE_S, MOST_REFUSALS, DialTimes, PeerHealth, Retries
from swarmllm.swarm.round_trips import DIAL_ROUND_TRIPS
from swarmllm.swarm.routing import route_cost_ms

logger = logging.getLogger(__name__)

MOST_SHOWN = 8
"""Servers that `print(model)` lists."""
MOST_LIARS_TOLD = 64
"""Most servers whose false greetings a client logs, because peer ids cost nothing."""

MAX_HANDLES = 1024
"""Uploaded parts of adapters that the client remembers; beyond that it forgets the oldest and uploads it again."""

MEMORY_SHARE = 0.8
"""Share of the free memory for blocks. Assumed: the rest is for caches, activations and other programs."""
ROWS, COLUMNS = 8192, 4096
"""64 MB in bfloat16, more than the caches of a CPU."""
REPEATS = 3


class SwarmView:
    """One client's view of the swarm of one checkpoint."""

    def __init__(self, config: ClientConfig, loop: EventLoop, *, name: str, fingerprint: str, num_blocks: int) -> None:
        self.config = config
        self.loop = loop
        self.look_ups = LookUps(
            config, name=name, fingerprint=fingerprint, num_blocks=num_blocks, check_greeting=self._check_greeting
        )
        self.health = PeerHealth(config.ban_s)
        active_adapter = ActiveAdapter(config.active_adapter)
        self.adapters = AdapterUploads(active_adapter)
        self.distances = Distances(config, self.look_ups, self.health)
        self.routes = Routes(config, loop, self.look_ups, self.health, active_adapter, self.distances)
        self.counts: Counter[str] = Counter()
        """Events so far: errors by their code, complaints of servers about others (`accusations`), `repairs`, `moves`,
        `spot_checks`, `spot_checks_failed`, `spot_checks_undecided`."""
        self.model_place = name
        """The value of `--model` for this model on this machine; its name in the swarm may lack the path."""
        self.hidden_size: int | None = None
        """Width of the hidden states; None: unknown."""
        self.num_bytes: int | None = None
        """Bytes that all blocks would take on this machine; None: unknown."""
        self.head: Callable[[], nn.Module | None] = lambda: None
        """The head, which the client computes for each token; None: the model has none."""
        self._head_ms: float | None = None
        self.own_traits: BlockTraits | None = None
        """The traits of the blocks that this client has found itself; None: it couldn't. Set before servers are met."""
        self._traits: BlockTraits | None = None
        """The traits that this client relies on."""
        self._dial_times = DialTimes()
        self._liars: set[str] = set()
        """Peers whose false greetings have been logged."""
        loop.on_close.append(self.look_ups.close)

    @property
    def encoder_blocks(self) -> Span | None:
        """The blocks of the encoder; None for a model of one stack."""
        return Span(0, self.look_ups.encoder_blocks) if self.look_ups.encoder_blocks else None

    # ------------------------------------------------------------------ for users: synchronous

    def __repr__(self) -> str:
        """The known servers, without asking anyone."""
        servers = sorted(self.look_ups.snapshot.servers, key=lambda server: (server.start, server.peer_id))
        shown = [f"{one.start}:{one.end} by {one.public_name or one.peer_id[-6:]}" for one in servers[:MOST_SHOWN]]
        shown += [f"{len(servers) - MOST_SHOWN} more"] * (len(servers) > MOST_SHOWN)
        return f"{self.model_name}, {self.num_blocks} blocks, {len(servers)} servers: {', '.join(shown) or 'none seen'}"

    def servers(self) -> list[ServerInfo]:
        """The servers of this model, as they announce themselves now."""
        return list(self.loop.run_coroutine(self.look_ups.refresh()).servers)

    def route(self) -> Route:
        """The route for a session that begins now; `print()` it to see its costs.

        Raises:
            MissingBlocksError: there is none.
        """
        return self.loop.run_coroutine(self._explained_route())

    def expected_ms_per_token(self, route: Sequence[RouteHop] | None = None) -> float:
        """Expected milliseconds of one decode step along `route` (default: that of `route()`)."""
        return self.route().expected_ms if route is None else self.loop.run_coroutine(self._expected_ms(route))

    @property
    def max_batch_tokens(self) -> int:
        """Most tokens of one row that at least one known server of each block accepts."""
        servers = self.look_ups.verified.confirmed(self.look_ups.snapshot.servers) or self.look_ups.snapshot.servers
        most: dict[int, int] = {}
        for server in servers:
            for block in server.span:
                most[block] = max(most.get(block, 0), server.max_batch_tokens)
        return min(most.values(), default=0)

    @property
    def model_name(self) -> str:
        """The model's name in the swarm."""
        return self.look_ups.name

    @property
    def fingerprint(self) -> str:
        """The checkpoint's fingerprint."""
        return self.look_ups.fingerprint

    @property
    def num_blocks(self) -> int:
        """Blocks of the whole model."""
        return self.look_ups.num_blocks

    @property
    def spans(self) -> tuple[Span, ...]:
        """The blocks on servers; the others are on this machine."""
        return self.look_ups.spans

    # ------------------------------------------------------------------ in the event loop

    @property
    def peer_id(self) -> str:
        return self.look_ups.peer.peer_id

    async def connect(self) -> None:
        """Join the swarm; see `LookUps.connect`."""
        await self.look_ups.connect()

    async def begin(self) -> BlockTraits:
        """Begin to measure round trips, and return the traits to rely on; see `traits`."""
        self.loop.spawn(self.distances.keep_measuring(), name="measure round trips")
        return await self.traits()

    async def daemon_exited(self) -> None:
        """Wait until this client's p2pd exits; without it no server can be found or dialled."""
        await self.look_ups.peer.daemon_exited()

    @property
    def blamed(self) -> frozenset[str]:
        """Peers that have failed, and are avoided now."""
        return self.health.blamed(time.monotonic())

    async def _explained_route(self) -> Route:
        route = [hop for span in self.spans for hop in await self.routes.find(span)]
        num_bytes = self.num_bytes
        here_ms = None if num_bytes is None else await asyncio.to_thread(decode_ms, num_bytes)
        head_ms = await self.time_of_head()
        return explain_route(route, self.look_ups.snapshot, self.routes.costs(), here_ms=here_ms, head_ms=head_ms)

    async def _expected_ms(self, route: Sequence[RouteHop]) -> float:
        return route_cost_ms(route, self.routes.costs()) + await self.time_of_head()

    async def time_of_head(self) -> float:
        """Milliseconds of the head for one token, measured at the first call."""
        head = self.head() if self._head_ms is None else None
        weight = getattr(head, "weight", None)
        if isinstance(weight, Tensor):
            multiply = head if isinstance(head, nn.Linear) else None
            self._head_ms = await asyncio.to_thread(product_ms, weight, multiply)
        return self._head_ms or 0.0

    async def traits(self) -> BlockTraits:
        """The traits of the blocks to rely on: this client's own, where servers have them as well.

        Raises:
            MissingBlocksError: no server with the right traits can be reached for some blocks.
            ConfigurationError: this client can't find the traits, and the user has named no servers to trust.
        """
        if self.own_traits is None and self.config.allowed_servers is None:
            raise ConfigurationError(
                f"what the blocks of {self.model_name} need can't be found out on this machine, and strangers aren't "
                "believed: name the servers that you trust in allowed_servers"
            )
        greetings = [greeting for span in self.spans for greeting in await self._greetings(span)]
        if self.own_traits is None:
            self._traits = trusted_traits(greetings, self.encoder_blocks)
        else:
            self._traits = with_abilities_of(self.own_traits, greetings, self.encoder_blocks)
        return self._traits

    async def _greetings(self, span: Span) -> list[ServedBlocks]:
        """The greetings of the servers of the best route for `span`.

        Servers that claim fewer abilities than the model has are left out if others serve their blocks.
        """
        deadline = math.inf
        weak: set[str] = set()
        while True:
            route = self.routes.alternative(span, weak) if weak else None
            servers = [hop.server for hop in route or await self.routes.find_soon(span, patient=True)]
            deadline = min(deadline, time.monotonic() + self.config.route_timeout_s)
            answers = await asyncio.gather(*map(self.look_ups.verified.greet, servers), return_exceptions=True)
            greetings: list[ServedBlocks] = []
            weaker: set[str] = set()
            for server, greeting in zip(servers, answers, strict=True):
                if isinstance(greeting, SwarmError):
                    self.report(greeting)
                    if time.monotonic() > deadline:
                        raise self.routes.what_is_wrong(greeting, span)
                elif isinstance(greeting, BaseException):
                    raise greeting
                elif greeting.traits is not None:
                    greetings.append(greeting)
                    if self.own_traits and lacking_abilities(greeting, self.own_traits, self.encoder_blocks):
                        weaker.add(server.peer_id)
            if len(greetings) == len(servers) and (
                weaker <= weak or self.routes.alternative(span, weak | weaker) is None
            ):
                return greetings
            weak |= weaker

    def _check_greeting(self, server: ServerInfo, served: ServedBlocks) -> None:
        """Raise RemoteProtocolError if a server's claims don't fit this model."""
        known = self.own_traits or self._traits
        if known is None:
            return
        try:
            check_claims(server.peer_id, served, known, self.encoder_blocks)
            if self._traits is not None:
                check_abilities(server.peer_id, served, self._traits, self.encoder_blocks)
        except RemoteProtocolError as error:
            self.health.report(error, time.monotonic())
            if server.peer_id not in self._liars and len(self._liars) < MOST_LIARS_TOLD:
                self._liars.add(server.peer_id)
                logger.warning("%s; it is left out", error)
            raise

    async def open_connection(
        self, server: ServerInfo, on_answer: OnAnswer | None = None, span: Span | None = None
    ) -> Connection:
        """A new connection to `server`, for blocks `span`. If it takes long, it is given up if others serve these.

        Raises:
            PeerError: it can't be reached, speaks another protocol, or its claims don't fit the model.
        """
        stream, served = await self._reached(server, span)
        stream.start_keepalive()
        connection = Connection(stream, server, on_answer, compression=self.config.compression)
        connection.asleep = served is not None and served.asleep
        self.distances.connections.add(connection)
        self.loop.spawn(connection.read(), name=f"read from {server.peer_id}")
        return connection

    async def _reached(self, server: ServerInfo, span: Span | None) -> tuple[FrameStream, ServedBlocks | None]:
        loop, config, limit = asyncio.get_running_loop(), self.config, asyncio.timeout(None)
        began_at = loop.time()

        def leave_if_others() -> None:
            if span and self.routes.alternative(span, [server.peer_id], even_avoided=True) is not None:
                self.routes.ask_again(span)
                limit.reschedule(loop.time())

        timer = loop.call_later(min(config.connect_timeout_s, self._longest_wait_s(server)), leave_if_others)
        try:
            async with limit:
                reached = await self.look_ups.verified.open_stream(
                    server, timeout_s=config.connect_timeout_s, max_message_bytes=config.max_message_bytes
                )
        except TimeoutError as error:
            if isinstance(error, SwarmError):
                raise
            took_s = loop.time() - began_at
            self._dial_times.took(took_s)
            raise PeerTimeoutError(
                f"the server {server.peer_id} was left after {took_s:.1f} s, as others serve its blocks", server.peer_id
            ) from None
        finally:
            timer.cancel()
        self._dial_times.took(loop.time() - began_at)
        return reached

    def _longest_wait_s(self, server: ServerInfo) -> float:
        """Longest time to reach a server while others serve its blocks as well."""
        if server.relayed:  # libp2p dials relays later
            return math.inf
        round_trip_ms = self.distances.round_trips.known(time.monotonic()).get(server.peer_id, 0.0)
        return self._dial_times.longest_s(DIAL_ROUND_TRIPS * round_trip_ms / 1e3)

    def retries(self) -> Retries:
        """A new count of tries, for one step or request."""
        return Retries(self.config.max_retries, self.config.route_timeout_s)

    async def wait_after(self, error: SwarmError, retries: Retries, span: Span) -> None:
        """Wait until another try for the blocks of `span` makes sense.

        Raises:
            SwarmError: none does, and why.
        """
        if error.said_by is not None and self._asks_others(error, error.said_by, retries, span):
            return
        least_s = 0.0
        if isinstance(error, SessionTooLargeError | ServerOutOfMemoryError) and error.peer_id is not None:
            retries.refused_by.append(error.peer_id)
            if self.routes.alternative(span, retries.refused_by, even_avoided=True) is None:
                # A cache's size doesn't change. Memory may be free again in a moment, or never.
                least_s = FULL_SERVER_PAUSE_S
                is_lack = isinstance(error, ServerOutOfMemoryError)
                if not is_lack or retries.refused_by.count(error.peer_id) >= MOST_REFUSALS:
                    raise error
        reason = self.routes.what_is_wrong(error, span)
        is_missing = isinstance(error, MissingBlocksError)  # the search for a route has waited for them
        delay_s = None if is_missing else retries.next_delay_s(reason, time.monotonic())
        if delay_s is None:
            if isinstance(reason, MissingBlocksError):
                self.routes.give_up()
            raise reason from error
        await asyncio.sleep(max(delay_s, least_s))

    def _asks_others(self, error: SwarmError, said_by: str, retries: Retries, span: Span) -> bool:
        """True if other servers should be asked as well, after one has said that a request is impossible.

        Its word alone proves nothing. It is blamed until others have said the same.
        """
        retries.refused_by.append(said_by)
        self.health.report(RemoteProtocolError(str(error), said_by), time.monotonic())
        is_believed = len(retries.refused_by) >= MOST_REFUSALS
        if not is_believed and self.routes.alternative(span, retries.refused_by) is not None:
            logger.warning("the server %s refuses, so others are asked: %s", said_by, error)
            return True
        for peer_id in retries.refused_by:
            self.health.succeeded(peer_id)
        return False

    def report(self, error: SwarmError) -> bool:
        """Note a failure, so that later routes avoid the peer if it is to blame; False if they did already."""
        is_hearsay = isinstance(error, PeerError) and error.is_hearsay
        self.counts["accusations" if is_hearsay else error.code] += 1
        is_news = self.health.report(error, time.monotonic())
        if isinstance(error, PeerError) and not is_hearsay:
            self.adapters.forget(error.peer_id)
        if isinstance(error, PeerError) and error.retriable:
            self.look_ups.is_outdated = True
        return is_news


class AdapterUploads:
    """The handles of adapters that servers have."""

    def __init__(self, active: ActiveAdapter) -> None:
        self._active = active
        self._handles: dict[tuple[str, Span], tuple[int, int]] = {}
        self._locks: WeakValueDictionary[tuple[str, Span], asyncio.Lock] = WeakValueDictionary()
        self.num_uploads = 0

    async def header_fields(
        self, connection: Connection, adapter: BlockAdapter | None, span: Span, *, timeout_s: float
    ) -> dict[str, Any]:
        """The header fields about adapters: the server's adapter, or the client's own, which is uploaded if need be.

        Raises:
            ConfigurationError: the client wants both, or the server can't use this adapter.
            SwarmError: the server can't be reached.
        """
        served = self._active.version
        if served is None:
            return {"adapter": await self.handle(connection, adapter, span, timeout_s=timeout_s)}
        if adapter is not None:
            raise ConfigurationError(
                f"the blocks run with the servers' adapter {served}, so they can't have one of yours as well: leave "
                "active_adapter out, or train prompts and heads only"
            )
        return {"served_adapter": served}

    async def handle(
        self, connection: Connection, adapter: BlockAdapter | None, span: Span, *, timeout_s: float
    ) -> int | None:
        """The handle of the adapter's part for `span`, which is uploaded if need be; None if it has none there.

        Raises:
            ConfigurationError: the server can't use this adapter.
            SwarmError: the server can't be reached.
        """
        part = None if adapter is None else adapter.part(span)
        if part is None:
            return None
        key = connection.peer_id, span
        async with self._locks.setdefault(key, asyncio.Lock()):
            version, handle = self._handles.get(key, (None, 0))
            if version != part.version:
                handle = await self._upload(connection, part, timeout_s)
                self._handles.pop(key, None)
                self._handles[key] = part.version, handle
                if len(self._handles) > MAX_HANDLES:
                    del self._handles[next(iter(self._handles))]
        return handle

    def forget(self, peer_id: str | None) -> None:
        """Forget the handles of a server that has failed, as it may have lost its adapters."""
        for key in [key for key in self._handles if key[0] == peer_id]:
            del self._handles[key]

    async def _upload(self, connection: Connection, part: BlockAdapter, timeout_s: float) -> int:
        if len(part.patches) > MAX_PATCHES:
            raise ConfigurationError(f"an adapter may change {MAX_PATCHES} modules of one server, not more")
        handle = new_request_id()
        header = AdapterHeader(id=handle, handle=handle, tensors=(), patches=part.patches)
        try:
            await connection.request(MessageType.ADAPTER, header, {"values": part.flat()}, timeout_s=timeout_s)
        except LocalProtocolError as error:
            refusal = ConfigurationError(f"this adapter doesn't fit the model's blocks: {error}")
            refusal.said_by = error.said_by
            raise refusal from None
        self.num_uploads += 1
        return handle


def decode_ms(num_bytes: int) -> float | None:
    """Estimated milliseconds per token on this machine, with blocks of `num_bytes`; None if they don't fit.

    The estimate is too high for a mixture of experts, which reads only some of its weights.
    """
    if num_bytes > MEMORY_SHARE * available_memory_bytes():
        return None
    return 1e3 * num_bytes / _bytes_per_s()


@cache
def _bytes_per_s() -> float:
    matrix = torch.ones(ROWS, COLUMNS, dtype=torch.bfloat16)
    return 1e3 * matrix.nbytes / product_ms(matrix)


@torch.inference_mode()
def product_ms(matrix: Tensor, multiply: Callable[[Tensor], Tensor] | None = None) -> float:
    """Milliseconds of a product with one vector, on the matrix's device: most of the time of a model's head.

    `multiply`: the head, if it has a way of its own.
    """
    multiply = multiply or partial(functional.linear, weight=matrix)
    vector = torch.ones(1, matrix.shape[1], dtype=matrix.dtype, device=matrix.device)
    elapsed_s = []
    for _ in range(1 + REPEATS):
        started = time.perf_counter()
        multiply(vector)
        if matrix.device.type != "cpu":
            torch.accelerator.synchronize(matrix.device)
        elapsed_s.append(time.perf_counter() - started)
    return 1e3 * min(elapsed_s[1:])  # the first one includes starting threads and mapping pages
