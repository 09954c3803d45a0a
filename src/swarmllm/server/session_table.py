"""All sessions of a server: opened within the byte budget, found by id, handed over when the server leaves.

Used by `server/handler` and `server/server`.
"""

import asyncio
import hmac
from collections.abc import Iterator

from swarmllm.data_structures import Span
from swarmllm.errors import RemoteProtocolError, ServerOverloadedError, SessionLengthExceededError, SessionLostError
from swarmllm.models.adapters import BlockAdapter
from swarmllm.models.block_span import BlockSpan
from swarmllm.models.quantization.heap import return_free_memory
from swarmllm.network.messages import OpenHeader
from swarmllm.network.protocol import FrameStream
from swarmllm.server.executor import Executor
from swarmllm.server.kv_cache import CacheBudget
from swarmllm.server.peer_limits import PeerLimits
from swarmllm.server.prefix_cache import PrefixCache
from swarmllm.server.sessions import Session

MAX_SESSIONS_PER_PEER = 256
NO_SUCH_SESSION = "this server has no such session (any more)"
"""What is said of any session that isn't the asker's, whether there is one of that id or not."""
SESSIONS_PER_TIDYING = 256
"""Sessions that end between two returns of free memory. Caches of all lengths, freed among what lives longer, leave
holes: without it, servers grew by 170 MB over 10,000 requests (docs/benchmarks.md)."""


class SessionTable:
    """All sessions on one span of blocks; a server that moves makes a new one."""

    def __init__(
        self,
        blocks: BlockSpan,
        hidden_bytes_per_token: int,
        executor: Executor,
        budget: CacheBudget,
        pages: PrefixCache | None = None,
        *,
        compression: str = "none",
        limits: PeerLimits | None = None,
    ) -> None:
        self.limits = limits or PeerLimits()
        """What one peer may have here; that of the handler which takes its messages."""
        self.budget = budget
        self.pages = pages
        self._hidden_bytes_per_token = hidden_bytes_per_token
        self._blocks = blocks
        self._compression = compression
        self._executor = executor
        self._sessions: dict[str, Session] = {}
        self._num_ended = 0
        self._empty = asyncio.Event()
        self._empty.set()

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter(tuple(self._sessions.values()))

    def open(self, header: OpenHeader, owner: FrameStream, adapter: BlockAdapter | None = None) -> Session:
        """A new session, its cache leased.

        Raises:
            CacheFullError, ServerOverloadedError: no room.
            SessionLengthExceededError: the model has no positions for any text.
            RemoteProtocolError: the id is taken.
        """
        if header.session in self._sessions:
            raise RemoteProtocolError("a session with this id is open already")
        if sum(s.owner.peer_id == owner.peer_id for s in self) >= MAX_SESSIONS_PER_PEER:
            raise ServerOverloadedError(f"one client may have {MAX_SESSIONS_PER_PEER} sessions open")
        if not self._blocks.keeps_cache:
            raise RemoteProtocolError("these are blocks of an encoder, which keep no KV cache: send whole batches")
        num_prefix = 0 if adapter is None else adapter.num_prefix
        # Clients ask for more than the model has positions for: by default, and by doubling. Nobody leases what no
        # step can use, and the step that goes beyond is refused before it looks up a position that doesn't exist.
        max_length = header.max_length
        if self._blocks.longest_text is not None:
            max_length = min(max_length, self._blocks.longest_text - num_prefix)
        if max_length < 1:
            raise SessionLengthExceededError(
                f"a prefix of {num_prefix} positions leaves none of the model's for a text"
            )
        span = Span(header.start, header.end)
        # A position is first an input that waits, then cache and perhaps an output that is kept.
        cache_bytes_per_token = -(-self._blocks.cache_bytes_per_token * len(span) // len(self._blocks.span))
        bytes_per_token = cache_bytes_per_token + self._hidden_bytes_per_token
        row_bytes = bytes_per_token * max_length + self._blocks.cache_bytes_per_session
        row_bytes += cache_bytes_per_token * num_prefix
        lease = self.budget.lease(row_bytes * header.batch_size)
        try:
            session = Session(
                id=header.session,
                token=header.token,
                owner=owner,
                blocks=self._blocks,
                span=span,
                executor=self._executor,
                lease=lease,
                row_bytes=row_bytes,
                hidden_bytes_per_token=self._hidden_bytes_per_token,
                batch_size=header.batch_size,
                max_length=max_length,
                epoch=header.epoch,
                keeps_outputs=header.end < self._blocks.num_blocks,
                record_past=header.record_past,
                on_close=self._forget,
                adapter=adapter,
                pages=self.pages,
                limits=self.limits,
                compression=self._compression if header.compression == "auto" else header.compression,
            )
        except BaseException:  # out of memory, above all
            lease.release()
            raise
        self._sessions[header.session] = session
        self._empty.clear()
        return session

    def get(self, session_id: str) -> Session:
        """Raises: SessionLostError: there is none of this id."""
        try:
            return self._sessions[session_id]
        except KeyError:
            raise SessionLostError(NO_SUCH_SESSION) from None

    def attachable(self, session_id: str, token: str) -> Session:
        """The session that a predecessor wants to attach to.

        Raises:
            SessionLostError: there is none, or the token is wrong (which is not told apart).
        """
        session = self._sessions.get(session_id)
        if session is None or not hmac.compare_digest(session.token.encode(), token.encode()):
            raise SessionLostError(NO_SUCH_SESSION)
        return session

    def make_room(self) -> None:
        """In the device thread, when memory has run out: give back what can be computed anew, and offer less."""
        self.budget.shrink()
        if self.pages is not None:
            self.pages.clear()
        return_free_memory()

    def _forget(self, session: Session) -> None:
        del self._sessions[session.id]
        self._num_ended += 1
        if self._num_ended % SESSIONS_PER_TIDYING == 0:
            asyncio.get_running_loop().run_in_executor(None, return_free_memory)
        if not self._sessions:
            self._empty.set()

    async def hand_over(self, timeout_s: float) -> None:
        """Tell every client to take another route, and wait until they have gone; those that don't lose the session.

        A client whose next step is refused would find another server as well; being told spares it the failed step.
        """
        for session in self:
            session.dismiss()
        try:
            async with asyncio.timeout(timeout_s):
                await self._empty.wait()
        except TimeoutError:
            for session in self:
                session.close()
                session.owner.abort()  # its client has been told; nothing is kept for one that doesn't come back
