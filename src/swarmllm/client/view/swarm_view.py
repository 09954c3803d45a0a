"""A client's view of the swarm: what users ask of it, and where what it knows comes together.

Who serves what is in `look_ups`, how far they are in `distances`, which way to take in `routes`. Used by sessions and
batches; runs in the client's event loop.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Sequence

from swarmllm.client.view.active_adapter import ActiveAdapter
from swarmllm.client.view.adapter_uploads import AdapterUploads
from swarmllm.client.view.agreed_traits import agreed_traits, check_agrees, check_stacks
from swarmllm.client.view.connection import Connection, OnAnswer
from swarmllm.client.view.distances import Distances
from swarmllm.client.view.event_loop import EventLoop
from swarmllm.client.view.look_ups import LookUps
from swarmllm.client.view.routes import Routes
from swarmllm.client.view.this_machine import decode_ms
from swarmllm.config import ClientConfig
from swarmllm.data_structures import BlockTraits, RouteHop, ServedBlocks, ServerInfo, Span, StackTraits
from swarmllm.errors import MissingBlocksError, PeerError, RemoteProtocolError, SwarmError
from swarmllm.swarm.explain import Route, explain_route
from swarmllm.swarm.retry import PeerHealth, Retries
from swarmllm.swarm.routing import route_cost_ms

MOST_SHOWN = 8
"""Servers that `print(model)` lists."""


class SwarmView:
    """One client's view of the swarm of one checkpoint."""

    def __init__(self, config: ClientConfig, loop: EventLoop, *, name: str, fingerprint: str, num_blocks: int) -> None:
        self.config = config
        self.loop = loop
        self.look_ups = LookUps(config, name=name, fingerprint=fingerprint, num_blocks=num_blocks)
        self.health = PeerHealth(config.ban_s)
        active_adapter = ActiveAdapter(config.active_adapter)
        self.adapters = AdapterUploads(active_adapter)
        self.distances = Distances(config, self.look_ups, self.health)
        self.routes = Routes(config, loop, self.look_ups, self.health, active_adapter, self.distances)
        self.counts: Counter[str] = Counter()
        """Events so far: errors by their code, what servers said of others (`accusations`), `repairs`,
        `spot_checks`, `spot_checks_failed`."""
        self.hidden_size: int | None = None
        """Width of the hidden states; None: nobody knows."""
        self.num_bytes: int | None = None
        """Bytes of all blocks, if this machine held them; None: nobody knows."""
        self._traits: BlockTraits | None = None
        """Traits about which the first route's servers agreed."""
        loop.on_close.append(self.look_ups.close)

    @property
    def encoder_blocks(self) -> Span | None:
        """Those of the encoder, if the model has one beside its decoder."""
        return Span(0, self.look_ups.encoder_blocks) if self.look_ups.encoder_blocks else None

    # ------------------------------------------------------------------ for users: synchronous

    def __repr__(self) -> str:
        """What is known without asking anybody."""
        servers = sorted(self.look_ups.snapshot.servers, key=lambda server: (server.start, server.peer_id))
        shown = [
            f"{one.start}:{one.end} by {one.public_name} …{one.peer_id[-6:]}".replace("  ", " ")
            for one in servers[:MOST_SHOWN]
        ]
        shown += [f"{len(servers) - MOST_SHOWN} more"] * (len(servers) > MOST_SHOWN)
        return f"{self.model_name}, {self.num_blocks} blocks, {len(servers)} servers: {', '.join(shown) or 'none seen'}"

    def servers(self) -> list[ServerInfo]:
        """The servers of this model, as they announce themselves now."""
        return list(self.loop.run(self.look_ups.refresh()).servers)

    def route(self) -> Route:
        """The route that would be taken now; `print()` it to see why, in numbers.

        Raises:
            MissingBlocksError: there is none.
        """
        return self.loop.run(self._explained_route())

    def expected_ms_per_token(self, route: Sequence[RouteHop] | None = None) -> float:
        """Expected milliseconds of one decode step along `route` (default: the one that would be taken now)."""
        return self.route().expected_ms if route is None else self.loop.run(self._expected_ms(route))

    @property
    def max_batch_tokens(self) -> int:
        """Most tokens of one batch that every server takes which is known to serve."""
        servers = self.look_ups.verified.confirmed(self.look_ups.snapshot.servers) or self.look_ups.snapshot.servers
        return min((server.max_batch_tokens for server in servers), default=0)

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
        """The blocks that servers are to run; the others are on this machine."""
        return self.look_ups.spans

    # ------------------------------------------------------------------ in the event loop

    @property
    def peer_id(self) -> str:
        return self.look_ups.peer.peer_id

    async def connect(self) -> None:
        """Join the swarm, and begin to measure how far its servers are; see `LookUps.connect`."""
        await self.look_ups.connect()
        self.loop.spawn(self.distances.keep_measuring(), name="measure round trips")

    async def daemon_exited(self) -> None:
        """Return when this client's p2pd has exited; without it nobody can be found or dialled any more."""
        await self.look_ups.peer.daemon_exited()

    @property
    def blamed(self) -> frozenset[str]:
        """Peers that have failed and are avoided for now."""
        return self.health.blamed(time.monotonic())

    async def _explained_route(self) -> Route:
        route = [hop for span in self.spans for hop in await self.routes.find(span)]
        num_bytes = self.num_bytes
        here_ms = None if num_bytes is None else await asyncio.to_thread(decode_ms, num_bytes)
        return explain_route(route, self.look_ups.snapshot, self.routes.costs(), here_ms=here_ms)

    async def _expected_ms(self, route: Sequence[RouteHop]) -> float:
        return route_cost_ms(route, self.routes.costs())

    async def traits(self, here: Sequence[BlockTraits] = ()) -> BlockTraits:
        """The traits of the model's blocks: what the servers of the best route say in their greetings, taken together.

        And those of the blocks that are `here`.

        Raises:
            MissingBlocksError: nobody who can be reached serves some blocks.
            ConfigurationError: they contradict each other.
        """
        said = [traits for span in self.spans if span != self.encoder_blocks for traits in await self._traits_of(span)]
        agreed = agreed_traits([*said, *(("this machine", traits) for traits in here)])
        if self.encoder_blocks is not None:
            of_encoder = await self._traits_of(self.encoder_blocks)
            encoder = agreed_traits([(peer_id, traits.of_encoder) for peer_id, traits in of_encoder])
            agreed = agreed.model_copy(update={"encoder": StackTraits(**encoder.model_dump(exclude={"encoder"}))})
        self._traits = agreed
        return self._traits

    async def _traits_of(self, span: Span) -> list[tuple[str, BlockTraits]]:
        """(peer id, traits) of the servers of the best route through these blocks."""
        deadline = time.monotonic() + self.config.route_timeout_s
        while True:
            servers = [hop.server for hop in await self.routes.find_soon(span)]
            greetings = await asyncio.gather(*map(self._greet, servers), return_exceptions=True)
            said: list[tuple[str, BlockTraits]] = []
            for server, greeting in zip(servers, greetings, strict=True):
                if isinstance(greeting, SwarmError):
                    self.report(greeting)
                    if time.monotonic() > deadline:
                        raise self.routes.what_is_wrong(greeting, span)
                elif isinstance(greeting, BaseException):
                    raise greeting
                elif greeting.traits is not None:
                    said.append((server.peer_id, greeting.traits))
            if len(said) == len(servers):
                return said

    async def _greet(self, server: ServerInfo) -> ServedBlocks:
        """What the server says of itself, which has to know of the model's stacks."""
        served = await self.look_ups.verified.greet(server)
        check_stacks(server.peer_id, served, self.encoder_blocks)
        return served

    async def open_connection(self, server: ServerInfo, on_answer: OnAnswer | None = None) -> Connection:
        """A new stream to `server`.

        Raises:
            PeerError: it can't be reached, or speaks another protocol.
        """
        timeout_s = self.config.connect_timeout_s
        stream, served = await self.look_ups.verified.open_stream(
            server, timeout_s=timeout_s, max_message_bytes=self.config.max_message_bytes
        )
        try:
            if served is not None and served.traits is not None and self._traits is not None:
                check_agrees(server.peer_id, served, self._traits, self.encoder_blocks)
        except RemoteProtocolError:
            stream.abort()
            raise
        stream.start_keepalive()
        connection = Connection(stream, server, on_answer, compression=self.config.compression)
        connection.asleep = served is not None and served.asleep
        self.distances.connections.add(connection)
        self.loop.spawn(connection.read(), name=f"read from {server.peer_id}")
        return connection

    def retries(self) -> Retries:
        """A count of tries for one piece of work."""
        return Retries(self.config.max_retries, self.config.route_timeout_s)

    async def wait_after(self, error: SwarmError, retries: Retries, span: Span) -> None:
        """Wait until another try for the blocks of `span` makes sense.

        Raises:
            SwarmError: none does, and why.
        """
        reason = self.routes.what_is_wrong(error, span)
        is_missing = isinstance(error, MissingBlocksError)  # the look for a route has waited for them
        delay_s = None if is_missing else retries.next_delay_s(reason, time.monotonic())
        if delay_s is None:
            if isinstance(reason, MissingBlocksError):
                self.routes.give_up()
            raise reason from error
        await asyncio.sleep(delay_s)

    def report(self, error: SwarmError) -> bool:
        """Take note of a failure, so that later routes avoid the peer if it is to blame; False if they did already."""
        is_hearsay = isinstance(error, PeerError) and error.is_hearsay
        self.counts["accusations" if is_hearsay else error.code] += 1
        is_news = self.health.report(error, time.monotonic())
        if isinstance(error, PeerError) and not is_hearsay:
            self.adapters.forget(error.peer_id)
        if isinstance(error, PeerError) and error.retriable:
            self.look_ups.is_outdated = True
        return is_news
