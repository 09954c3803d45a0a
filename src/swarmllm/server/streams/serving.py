"""The blocks that a server serves now, with everything that clients have on them, and which clients may use them.

`Serving` is made when blocks are loaded, and gone when they go. `Access` outlives it: all streams of a server share
it, and find there what is served at the moment. Both know no messages.
"""

import asyncio
import logging
import time
from collections.abc import Collection
from dataclasses import dataclass, field

from swarmllm.data_structures import BlockTraits, ServedBlocks, Span, StackTraits
from swarmllm.errors import BlocksNotServedError, RemoteProtocolError
from swarmllm.models.adapters.block_adapter import BlockAdapter
from swarmllm.models.span.block_span import BlockSpan
from swarmllm.network.wire.messages import BatchHeader, OpenHeader
from swarmllm.network.wire.protocol import MessageType
from swarmllm.server.adapters import AdapterStore, ServedAdapters
from swarmllm.server.device.device_thread import Executor
from swarmllm.server.device.forward_backward import KeptBatches
from swarmllm.server.peers.peer_limits import PeerLimits
from swarmllm.server.peers.pushes import Pushes
from swarmllm.server.sessions.session_table import SessionTable
from swarmllm.server.streams.input_checks import InputChecks

logger = logging.getLogger(__name__)

OF_SERVERS = frozenset((MessageType.PUSH,))
"""Types of messages that may be large from anybody: who pushes what for which client shows only when it has come."""
OF_PREDECESSORS = OF_SERVERS | {MessageType.STEP}
"""Those that may be large from peers who have shown the token of a session."""
OF_CLIENTS = OF_PREDECESSORS | {MessageType.FORWARD, MessageType.BACKWARD, MessageType.ADAPTER}
"""Those that may be large from peers whom this server is there for."""


@dataclass(frozen=True, eq=False)
class StackPart:
    """Blocks of one stack."""

    blocks: BlockSpan
    inputs: InputChecks


@dataclass(frozen=True, eq=False)
class StackParts:
    """All parts, in the order of their blocks."""

    parts: tuple[StackPart, ...]

    @property
    def span(self) -> Span:
        """All blocks."""
        return Span(self.parts[0].blocks.span.start, self.parts[-1].blocks.span.end)

    @property
    def digests(self) -> str:
        """What of the checkpoint each block was made of."""
        return "".join(part.blocks.digests for part in self.parts)

    @property
    def traits(self) -> BlockTraits:
        """What is announced of the blocks."""
        first, last = self.parts[0].blocks, self.parts[-1].blocks
        if not first.is_of_encoder:
            return last.traits
        encoder = StackTraits(**first.traits.model_dump(exclude={"encoder"}))
        cuts = tuple(cut for part in self.parts for cut in part.blocks.traits.forbidden_cuts)
        main = BlockTraits() if last is first else last.traits
        return main.model_copy(update={"encoder": encoder, "forbidden_cuts": cuts})

    def of(self, start: int, end: int) -> StackPart:
        """The part that holds these blocks.

        Raises:
            BlocksNotServedError: none does.
        """
        for part in self.parts:
            if start < end and Span(start, end) in part.blocks.span:
                return part
        raise BlocksNotServedError(f"this server holds blocks {self.span}, not {start}:{end} within one stack")


@dataclass(eq=False, kw_only=True)
class Serving:
    """One span of blocks, and what clients have on it."""

    parts: StackParts
    executor: Executor
    sessions: SessionTable
    limits: PeerLimits
    max_batch_tokens: int
    served_adapters: ServedAdapters
    adapters: AdapterStore = field(default_factory=AdapterStore)
    """What clients have sent."""
    batches: KeptBatches = field(init=False)
    pushes: Pushes = field(init=False)
    leaves: bool = field(init=False, default=False)
    """Whether nothing new is taken any more."""

    def __post_init__(self) -> None:
        self.batches = KeptBatches(self.max_batch_tokens)
        self.pushes = Pushes(self.limits)
        self.executor.thread.on_out_of_memory = self.sessions.make_room

    def check_stays(self) -> None:
        """Refuse what is new when this server is about to leave these blocks.

        Raises:
            BlocksNotServedError: it is.
        """
        if self.leaves:
            raise BlocksNotServedError("this server is leaving these blocks; take another route")

    def check_span(self, start: int, end: int) -> Span:
        """The span asked for, which this server holds.

        Raises:
            BlocksNotServedError: it doesn't.
        """
        for cut in {start, end} & set(self.parts.of(start, end).blocks.traits.forbidden_cuts):
            raise BlocksNotServedError(f"a route can't be cut at block {cut} of this model")
        return Span(start, end)

    def adapter_of(self, header: OpenHeader | BatchHeader, peer_id: str) -> BlockAdapter | None:
        """The adapter that a request of that peer names: one that it has sent, or one that this server offers.

        Raises:
            BlocksNotServedError: it isn't here.
        """
        if header.served_adapter is None:
            return self.adapters.get(peer_id, header.adapter)
        if header.adapter is not None:
            raise RemoteProtocolError("a request runs with an adapter of its own or with one of the server's, not both")
        return self.served_adapters.get(header.served_adapter)

    async def retire(self, timeout_s: float) -> None:
        """Take nothing new, hand the sessions over, and forget the rest when everything that runs has ended."""
        self.leaves = True
        self.pushes.clear()
        await self.sessions.hand_over(timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                await self.executor.wait_until_idle()
        except TimeoutError:
            logger.warning("left %d calls unfinished after %.0f s", self.executor.num_calls, timeout_s)
        self.batches.clear()
        self.executor.thread.on_out_of_memory = None  # nor its pages of prompts


@dataclass(eq=False)
class Sleep:
    """While blocks that nobody uses aren't in memory."""

    greeting: dict[str, object]
    """What is said meanwhile: they are there for whoever asks."""
    wanted: asyncio.Event = field(default_factory=asyncio.Event)
    over: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(eq=False)
class Access:
    """What is served at the moment, who may use it, and how much of it."""

    allowed_clients: Collection[str] | None
    """Peer ids; None: this server is there for everybody."""
    limits: PeerLimits = field(default_factory=PeerLimits)
    loading: Span | None = None
    """Blocks that this server is about to serve."""
    serving: Serving | None = None
    sleep: Sleep | None = None
    used_at: float = field(default_factory=time.monotonic)
    """When something was last asked for that takes blocks."""

    def is_allowed(self, peer_id: str) -> bool:
        """Whether this server is there for that client; other servers may pass on what such a client has asked for."""
        return self.allowed_clients is None or peer_id in self.allowed_clients

    def large_messages_of(self, peer_id: str, *, attached: bool = False) -> frozenset[MessageType]:
        """Types of messages that may be large from that peer; `attached`: it has shown the token of a session."""
        if self.is_allowed(peer_id):
            return OF_CLIENTS
        return OF_PREDECESSORS if attached else OF_SERVERS

    def served(self) -> Serving:
        """What is served now, for what goes on.

        Raises:
            BlocksNotServedError: nothing at the moment.
        """
        self.used_at = time.monotonic()
        if self.serving is None:
            raise BlocksNotServedError("this server serves no blocks at the moment")
        return self.serving

    async def wake(self, peer_id: str) -> None:
        """Return at once, or if the blocks are loaded again, because of this client or another, when they are."""
        if self.sleep is not None and self.is_allowed(peer_id):
            self.sleep.wanted.set()
        if self.sleep is not None and self.sleep.wanted.is_set():
            await self.sleep.over.wait()

    def fall_asleep(self) -> Sleep:
        """From now on, whoever comes waits until somebody calls `end_sleep`."""
        self.sleep = Sleep({**self.greeting(), "asleep": True})
        return self.sleep

    def end_sleep(self) -> None:
        """Blocks are served again, or will never be."""
        if self.sleep is not None:
            self.sleep.over.set()
            self.sleep = None

    def served_to(self, peer_id: str) -> Serving:
        """What is served now, for something new that this client asks for.

        Raises:
            BlocksNotServedError: nothing new is taken, or nothing from this client.
        """
        if not self.is_allowed(peer_id):
            raise BlocksNotServedError(
                f"this server doesn't serve the peer id {peer_id}: use the --identity_path that its owner knows, or "
                "ask the owner to add this one to --allowed_clients"
            )
        serving = self.served()
        serving.check_stays()
        return serving

    async def retire(self, timeout_s: float) -> None:
        """End what is served, and let its blocks go."""
        if self.serving is not None:
            await self.serving.retire(timeout_s)
            self.serving = None

    def greeting(self) -> dict[str, object]:
        """What this server says of itself to whoever greets it: `ServedBlocks`, or nothing if it serves none."""
        if self.sleep is not None:
            return self.sleep.greeting
        if self.serving is not None:
            parts = self.serving.parts
            return ServedBlocks(start=parts.span.start, end=parts.span.end, traits=parts.traits).model_dump()
        if self.loading is not None:
            return ServedBlocks(start=self.loading.start, end=self.loading.end, traits=None).model_dump()
        return {}
