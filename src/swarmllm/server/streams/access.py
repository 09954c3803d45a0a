"""What is served at the moment, and to whom: what all streams of a server share."""

import asyncio
import time
from collections.abc import Collection
from dataclasses import dataclass, field

from swarmllm.data_structures import ServedBlocks, Span
from swarmllm.errors import BlocksNotServedError
from swarmllm.network.wire.protocol import MessageType
from swarmllm.server.peers.peer_limits import PeerLimits
from swarmllm.server.streams.serving import Serving

OF_SERVERS = frozenset((MessageType.PUSH,))
"""Types of messages that may be large from anybody: who pushes what for which client shows only when it has come."""
OF_PREDECESSORS = OF_SERVERS | {MessageType.STEP}
"""Those that may be large from peers who have shown the token of a session."""
OF_CLIENTS = OF_PREDECESSORS | {MessageType.FORWARD, MessageType.BACKWARD, MessageType.ADAPTER}
"""Those that may be large from peers whom this server is there for."""


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
