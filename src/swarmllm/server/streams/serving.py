"""All that a server has for the blocks that it serves now; one that moves to other blocks makes a new one.

Made by `span_life`, used by every stream; knows no messages.
"""

import asyncio
import logging
from dataclasses import dataclass, field

from swarmllm.data_structures import Span
from swarmllm.errors import BlocksNotServedError, RemoteProtocolError
from swarmllm.models.adapters.block_adapter import BlockAdapter
from swarmllm.network.wire.messages import BatchHeader, OpenHeader
from swarmllm.server.adapters.served_adapters import ServedAdapters
from swarmllm.server.adapters.uploaded_adapters import AdapterStore
from swarmllm.server.device.device_thread import Executor
from swarmllm.server.device.forward_backward import KeptBatches
from swarmllm.server.peers.peer_limits import PeerLimits
from swarmllm.server.peers.pushes import Pushes
from swarmllm.server.sessions.session_table import SessionTable
from swarmllm.server.streams.stack_parts import StackParts

logger = logging.getLogger(__name__)


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
