"""The blocks that a server serves now, the sessions and adapters of clients on them, and the clients that may use them.

A `Serving` is made when blocks are loaded, and ends when they are unloaded. One `Access` lives as long as the server:
all streams share it, and only it has a reference to the `Serving`. Neither knows messages.
"""

import asyncio
import logging
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from swarmllm.data_structures import BlockTraits, ServedBlocks, ServerInfo, Span, StackTraits
from swarmllm.errors import BlocksNotServedError, RemoteProtocolError
from swarmllm.models.adapters.block_adapter import BlockAdapter
from swarmllm.models.span.block_span import BlockSpan
from swarmllm.models.span.packing import Packer
from swarmllm.network.wire.messages import BatchHeader, OpenHeader
from swarmllm.network.wire.protocol import MessageType
from swarmllm.server.adapters import AdapterStore, ServedAdapters
from swarmllm.server.device.device import CacheRoom
from swarmllm.server.device.device_thread import DeviceThread
from swarmllm.server.device.forward_backward import KeptForwards
from swarmllm.server.device.throughput import Throughput
from swarmllm.server.peers.peer_limits import PeerLimits
from swarmllm.server.peers.pushes import Pushes
from swarmllm.server.sessions.kv_cache import CacheBudget
from swarmllm.server.sessions.prefix_cache import PrefixCache
from swarmllm.server.sessions.session import SessionTable
from swarmllm.server.settings import ServerLimits
from swarmllm.server.streams.input_checks import InputChecks

logger = logging.getLogger(__name__)

LARGE_FROM_ALL = frozenset((MessageType.PUSH,))
"""Types of messages that may be large from any peer: only its token tells which client asked for a PUSH."""
LARGE_WHEN_ATTACHED = LARGE_FROM_ALL | {MessageType.STEP}
"""Types of messages that may be large from peers that have shown the token of a session."""
LARGE_FROM_CLIENTS = LARGE_WHEN_ATTACHED | {MessageType.FORWARD, MessageType.BACKWARD, MessageType.ADAPTER}
"""Types of messages that may be large from clients that this server serves."""


@dataclass(frozen=True, eq=False)
class StackBlocks:
    """The server's blocks of one stack of the model, and the checks of their inputs."""

    blocks: BlockSpan
    inputs: InputChecks


class Serving:
    """One span of blocks, and the sessions, kept forwards, pushed tensors and adapters of clients on it.

    Mostly the blocks are of one stack. They are of two if they begin in a model's encoder and end in its decoder.
    Requests are for blocks of one stack, as only the client has the tensors between the two. Sessions are on the blocks
    of the last stack.
    """

    def __init__(
        self,
        packer: Packer,
        stacks: Sequence[StackBlocks],
        device_thread: DeviceThread,
        room: CacheRoom,
        *,
        limits: PeerLimits,
        settings: ServerLimits,
        offered: ServedAdapters,
        throughput: Throughput,
    ) -> None:
        """Serve the blocks of `stacks`; `packer` runs those of the last one, and `throughput` was measured on it."""
        self.stacks, self.device_thread, self.limits, self.throughput = tuple(stacks), device_thread, limits, throughput
        self.max_batch_tokens = settings.max_batch_tokens
        self.sessions = SessionTable(
            packer,
            self.inputs.hidden_bytes,
            device_thread,
            CacheBudget(room.sessions),
            PrefixCache(room.pages) if room.pages else None,
            compression=settings.compression,
            limits=limits,
            max_sessions=settings.max_sessions,
        )
        self.offered, self.uploaded = offered, AdapterStore(room.adapters)
        self.kept_forwards = KeptForwards(self.max_batch_tokens)
        self.pushes = Pushes(limits)
        self.leaves = False
        """True when no new requests are taken any more."""
        device_thread.on_out_of_memory = self.sessions.make_room

    @property
    def blocks(self) -> BlockSpan:
        """The blocks of the last stack, on which sessions are."""
        return self.stacks[-1].blocks

    @property
    def inputs(self) -> InputChecks:
        """The checks of steps' inputs."""
        return self.stacks[-1].inputs

    @property
    def span(self) -> Span:
        """All blocks."""
        return Span(self.stacks[0].blocks.span.start, self.blocks.span.end)

    @property
    def digests(self) -> str:
        """Digests of all blocks' weights in the checkpoint."""
        return "".join(stack.blocks.digests for stack in self.stacks)

    @property
    def traits(self) -> BlockTraits:
        """Traits of all blocks, for announcements."""
        first, last = self.stacks[0].blocks, self.blocks
        if not first.is_of_encoder:
            return last.traits
        encoder = StackTraits(**first.traits.model_dump(exclude={"encoder"}))
        cuts = tuple(cut for stack in self.stacks for cut in stack.blocks.traits.forbidden_cuts)
        main = BlockTraits() if last is first else last.traits
        return main.model_copy(update={"encoder": encoder, "forbidden_cuts": cuts})

    @property
    def cache_tokens_left(self) -> int:
        """Positions of sessions on all these blocks for which there is memory."""
        bytes_per_token = self.blocks.cache_sizes.bytes_per_token + self.inputs.hidden_bytes
        return self.sessions.budget.left_bytes // bytes_per_token

    def check_stays(self) -> None:
        """Refuse new requests if this server is about to leave these blocks.

        Raises:
            BlocksNotServedError: it is.
        """
        if self.leaves:
            raise BlocksNotServedError("this server is leaving these blocks; take another route")

    def stack_of(self, start: int, end: int) -> StackBlocks:
        """Return the stack with these blocks, which a request names.

        Raises:
            BlocksNotServedError: this server doesn't hold them, or the model can't be cut there.
        """
        for stack in self.stacks:
            if start < end and Span(start, end) in stack.blocks.span:
                for cut in {start, end} & set(stack.blocks.traits.forbidden_cuts):
                    raise BlocksNotServedError(f"a route can't be cut at block {cut} of this model")
                return stack
        raise BlocksNotServedError(f"this server holds blocks {self.span}, not {start}:{end} within one stack")

    def adapter_of(self, header: OpenHeader | BatchHeader, peer_id: str) -> BlockAdapter | None:
        """Return the adapter that a request of this peer names: one that it has sent, or one that this server offers.

        Raises:
            BlocksNotServedError: it isn't here.
        """
        if header.served_adapter is None:
            return self.uploaded.get(peer_id, header.adapter)
        if header.adapter is not None:
            raise RemoteProtocolError("a request runs with an adapter of its own or with one of the server's, not both")
        return self.offered.get(header.served_adapter)

    async def retire(self, timeout_s: float) -> None:
        """Take no new requests, hand the sessions over, wait for running calls, and drop everything else."""
        self.leaves = True
        self.pushes.clear()
        await self.sessions.hand_over(timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                await self.device_thread.wait_until_idle()
        except TimeoutError:
            logger.warning("left %d calls unfinished after %.0f s", self.device_thread.num_calls, timeout_s)
        self.kept_forwards.clear()
        self.device_thread.on_out_of_memory = None  # it would keep the pages of prompts


@dataclass(eq=False)
class Sleep:
    """The time in which blocks that no client uses aren't in memory."""

    greeting: dict[str, object]
    """Said to clients meanwhile: the blocks can be used."""
    record: ServerInfo
    """Announced meanwhile."""
    wanted: asyncio.Event = field(default_factory=asyncio.Event)
    over: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(eq=False)
class Access:
    """Access to the blocks served at the moment: which clients may use them, and how much."""

    allowed_clients: Collection[str] | None
    """Peer ids of clients that may use this server; None: all."""
    limits: PeerLimits = field(default_factory=PeerLimits)
    loading: Span | None = None
    """Blocks that this server is about to serve."""
    serving: Serving | None = None
    """The only lasting reference: blocks leave the memory when it is None."""
    sleep: Sleep | None = None
    used_at: float = field(default_factory=time.monotonic)
    """Time of the last request for blocks."""

    def is_allowed(self, peer_id: str) -> bool:
        """True if this client may use the server. Other servers may pass on tensors that it has asked for."""
        return self.allowed_clients is None or peer_id in self.allowed_clients

    def large_messages_of(self, peer_id: str, *, attached: bool = False) -> frozenset[MessageType]:
        """Types of messages that may be large from that peer; `attached`: it has shown the token of a session."""
        if self.is_allowed(peer_id):
            return LARGE_FROM_CLIENTS
        return LARGE_WHEN_ATTACHED if attached else LARGE_FROM_ALL

    def served(self) -> Serving:
        """Return what is served now, for sessions and requests that have begun.

        Raises:
            BlocksNotServedError: no blocks are served at the moment.
        """
        self.used_at = time.monotonic()
        if self.serving is None:
            raise BlocksNotServedError("this server serves no blocks at the moment")
        return self.serving

    def served_to(self, peer_id: str) -> Serving:
        """Return what is served now, for a new request of this client.

        Raises:
            BlocksNotServedError: no new requests are taken, or none from this client.
        """
        if not self.is_allowed(peer_id):
            raise BlocksNotServedError(
                f"this server doesn't serve the peer id {peer_id}: use the --identity_path that its owner knows, or "
                "ask the owner to add this one to --allowed_clients"
            )
        serving = self.served()
        serving.check_stays()
        return serving

    async def wake(self, peer_id: str) -> None:
        """Wait until sleeping blocks are loaded again, if this client or another asks for them; else return at once."""
        if self.sleep is not None and self.is_allowed(peer_id):
            self.sleep.wanted.set()
        if self.sleep is not None and self.sleep.wanted.is_set():
            await self.sleep.over.wait()

    def fall_asleep(self, record: ServerInfo) -> None:
        """Make new requests wait until `end_sleep` is called; `record` is announced meanwhile."""
        self.sleep = Sleep({**self.greeting(), "asleep": True}, record)

    def end_sleep(self) -> None:
        """Let the waiting requests go on: blocks are served again, or will never be."""
        if self.sleep is not None:
            self.sleep.over.set()
            self.sleep = None

    async def retire(self, timeout_s: float) -> None:
        """End all sessions and requests, and free the blocks."""
        if self.serving is not None:
            await self.serving.retire(timeout_s)
            self.serving = None

    def greeting(self) -> dict[str, object]:
        """Describe the blocks to a peer that greets this server: fields of `ServedBlocks`; empty if none is served."""
        if self.sleep is not None:
            return self.sleep.greeting
        if self.serving is not None:
            span, traits = self.serving.span, self.serving.traits
            return ServedBlocks(start=span.start, end=span.end, traits=traits).model_dump()
        if self.loading is not None:
            return ServedBlocks(start=self.loading.start, end=self.loading.end, traits=None).model_dump()
        return {}
