"""Tensors that servers pass on to each other for requests without a session.

The client sends every server of a route its own request at once, and names, by secrets, which server sends what to
which (`client/batches/hop_batches`). A PUSH is taken in here for the request that names it, and sent to the next
server. Called by the code that handles streams and requests; knows nothing about blocks.

    a PUSH comes                                    what happens
    from the server that a waiting request names    the request goes on
    before its request                              it is kept for a while, within bounds
    from a stranger, or with another secret         it looks as if it had come early, and no request ever takes it
    without tensors, from the client                the request ends with SessionLostError
    none                                            the same after `WAIT_S`

The bytes of a PUSH that was taken count as bytes of the client whose request names it (`peer_limits`).
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from torch import Tensor

from swarmllm.errors import (
    BlocksNotServedError,
    RemoteProtocolError,
    ServerOverloadedError,
    SessionLostError,
    SwarmError,
)
from swarmllm.network.wire.compression import as_received, compressed
from swarmllm.network.wire.messages import Predecessor, PushHeader, Target, parse
from swarmllm.network.wire.protocol import Message, MessageType
from swarmllm.network.wire.tensor_codec import encode_tensors
from swarmllm.server.peers.links import Links
from swarmllm.server.peers.peer_limits import PeerLimits

logger = logging.getLogger(__name__)

WAIT_S = 300.0
"""Longest wait for a PUSH: as long as clients let servers compute. It costs hardly any memory, and clients whose route
has broken cancel it."""
EARLY_S = 30.0
"""Seconds that a PUSH is kept before its request. Assumed: a request arrives before the tensors that are computed for
it."""
MAX_EARLY_PER_PEER = 256
MAX_EARLY_BYTES_PER_PEER = 128 << 20
"""Assumed: one of the largest requests (8192 tokens × 4096 floats)."""
MAX_EARLY_BYTES = 512 << 20
"""Bytes of all peers together: peer ids cost nothing."""
EARLY_OVERHEAD_BYTES = 2048
"""Bytes counted in addition for each, so that empty ones fill the room too."""
DIAL_TIMEOUT_S = 8.0
"""Seconds to reach the target; fewer than its client would wait."""


@dataclass(frozen=True, eq=False)
class Pushed:
    """A PUSH that isn't decoded yet."""

    header: PushHeader
    message: Message

    @property
    def num_bytes(self) -> int:
        """Bytes of memory that it takes."""
        return len(self.message.payload)


@dataclass(frozen=True, eq=False)
class _Waiting:
    previous: str
    client: str
    arrival: "asyncio.Future[Pushed]"


class Pushes:
    """PUSH messages that requests wait for, or that came early."""

    def __init__(self, limits: PeerLimits) -> None:
        self._limits = limits
        self._waiting: dict[str, _Waiting] = {}  # by token
        self._early: dict[tuple[str, str], tuple[Pushed, asyncio.TimerHandle]] = {}  # by sender and token

    @property
    def num_waiting(self) -> int:
        """Requests that wait for what another server pushes."""
        return len(self._waiting)

    @property
    def num_early(self) -> int:
        """Messages that came before their request."""
        return len(self._early)

    @asynccontextmanager
    async def taken(self, previous: Predecessor, client: str) -> AsyncIterator[Pushed]:
        """Wait for the PUSH of `previous` for a request of `client`; its bytes count as the client's until the context
        ends.

        Raises:
            SessionLostError: it doesn't come: the client should send the tensors itself.
        """
        pushed = await self._wait_for(previous, client)
        if not self._limits.take_now(client, pushed.num_bytes):
            raise SessionLostError("too much is pushed here for one client: send it when there is room")
        try:
            yield pushed
        finally:
            self._limits.give_back(client, pushed.num_bytes)

    async def _wait_for(self, previous: Predecessor, client: str) -> Pushed:
        token = previous.token
        if token in self._waiting:
            raise RemoteProtocolError("another request waits with this token")
        waiting = _Waiting(previous.peer_id, client, asyncio.get_running_loop().create_future())
        self._waiting[token] = waiting
        try:
            for sender in (client, previous.peer_id):
                pushed = self._forget_early(sender, token)
                if pushed is not None:
                    self._settle(waiting, sender, pushed)
            async with asyncio.timeout(WAIT_S):
                return await waiting.arrival
        except TimeoutError:
            raise SessionLostError(f"nothing was pushed here within {WAIT_S:g} s") from None
        finally:
            del self._waiting[token]

    def arrived(self, message: Message, sender: str) -> None:
        """Take a PUSH in.

        Raises:
            RemoteProtocolError: its header is malformed.
            ServerOverloadedError: no request waits for it, and the sender has too many of that kind here.
        """
        pushed = Pushed(parse(PushHeader, message.header, None), message)
        waiting = self._waiting.get(pushed.header.token)
        if waiting is not None and sender in (waiting.previous, waiting.client):
            self._settle(waiting, sender, pushed)
        else:
            self._keep_early(sender, pushed)

    def clear(self) -> None:
        """Fail all waiting requests, as the blocks are going."""
        for waiting in self._waiting.values():
            if not waiting.arrival.done():
                waiting.arrival.set_exception(BlocksNotServedError("this server is leaving these blocks"))
        for sender, token in list(self._early):
            self._forget_early(sender, token)

    def _settle(self, waiting: _Waiting, sender: str, pushed: Pushed) -> None:
        if waiting.arrival.done():
            return
        if not pushed.header.tensors:
            waiting.arrival.set_exception(SessionLostError("what was to be pushed here doesn't come"))
        elif sender == waiting.previous:
            waiting.arrival.set_result(pushed)

    def _keep_early(self, sender: str, pushed: Pushed) -> None:
        token = pushed.header.token
        of_sender = list(self._early_bytes(sender))
        num_bytes = pushed.num_bytes + EARLY_OVERHEAD_BYTES
        if (
            len(of_sender) >= MAX_EARLY_PER_PEER
            or sum(of_sender) + num_bytes > MAX_EARLY_BYTES_PER_PEER
            or sum(self._early_bytes()) + num_bytes > MAX_EARLY_BYTES
        ):
            raise ServerOverloadedError("too much has been pushed here that no request waits for")
        self._forget_early(sender, token)
        timer = asyncio.get_running_loop().call_later(EARLY_S, self._forget_early, sender, token)
        self._early[sender, token] = pushed, timer

    def _early_bytes(self, sender: str | None = None) -> Iterator[int]:
        return (
            pushed.num_bytes + EARLY_OVERHEAD_BYTES
            for (peer_id, _), (pushed, _) in self._early.items()
            if sender in (None, peer_id)
        )

    def _forget_early(self, sender: str, token: str) -> Pushed | None:
        if (sender, token) not in self._early:
            return None
        pushed, timer = self._early.pop((sender, token))
        timer.cancel()
        return pushed


async def push(links: Links, target: Target, name: str, tensor: Tensor, compression: str) -> Tensor | None:
    """Send a tensor to the target; return the tensor as it arrives there, perhaps rounded, or None if it can't be
    reached."""
    try:
        async with asyncio.timeout(DIAL_TIMEOUT_S):
            link = await links.get(target)
        outgoing = await compressed({name: tensor}, link.stream, compression)
        descriptors, chunks = encode_tensors(outgoing)
        header = PushHeader(token=target.token, tensors=tuple(descriptors))
        await link.send(MessageType.PUSH, header.model_dump(), chunks)
    except (SwarmError, TimeoutError) as error:
        logger.info("%s can't be reached, so the client relays: %s", target.peer_id, str(error) or "no answer")
        return None
    return as_received(outgoing)[name]
