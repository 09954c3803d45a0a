"""All sessions of a server: opened within the byte budget, found by id, handed over when the server leaves.

Made with the blocks that are served (`streams/serving`), used by connections.
"""

import asyncio
import hmac
from collections import Counter
from collections.abc import Iterator
from functools import partial

from swarmllm.errors import RemoteProtocolError, ServerOverloadedError, SessionLostError
from swarmllm.models.adapters.block_adapter import BlockAdapter
from swarmllm.models.free_memory import return_free_memory
from swarmllm.models.span.packing import Packer
from swarmllm.network.wire.messages import OpenHeader
from swarmllm.network.wire.protocol import FrameStream
from swarmllm.server.device.device_thread import DeviceThread
from swarmllm.server.peers.peer_limits import PeerLimits
from swarmllm.server.sessions.kv_cache import CacheBudget, WaitingRoom, session_size
from swarmllm.server.sessions.prefix_cache import PrefixCache
from swarmllm.server.sessions.session import Outlet, Session
from swarmllm.server.sessions.step_runner import StepRunner

MAX_SESSIONS_PER_PEER = 256
NO_SUCH_SESSION = "this server has no such session (any more)"
"""Said of every session that isn't the asker's, whether it exists or not."""
SESSIONS_PER_TIDYING = 256
"""Number of ended sessions between two returns of free memory. Freed caches of all lengths leave holes between objects
that live longer: without it, servers grew by 170 MB over 10,000 requests (docs/benchmarks.md)."""


class SessionTable:
    """All sessions on one span of blocks; a server that moves makes a new one."""

    def __init__(
        self,
        packer: Packer,
        hidden_bytes_per_token: int,
        device_thread: DeviceThread,
        budget: CacheBudget,
        pages: PrefixCache | None = None,
        *,
        compression: str = "none",
        limits: PeerLimits | None = None,
        max_sessions: int | None = None,
    ) -> None:
        self.limits = limits or PeerLimits()
        """The same limits as those of the connections."""
        self.budget = budget
        self.pages = pages
        self._max_sessions = max_sessions
        self._hidden_bytes_per_token = hidden_bytes_per_token
        self._packer = packer
        self._compression = compression
        self._device_thread = device_thread
        self._sessions: dict[str, Session] = {}
        self._num_ended = 0
        self._empty = asyncio.Event()
        self._empty.set()

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter(tuple(self._sessions.values()))

    def open(self, header: OpenHeader, owner: FrameStream, adapter: BlockAdapter | None = None) -> Session:
        """Open a session, and lease its cache.

        Raises:
            CacheFullError, ServerOverloadedError: no room.
            SessionLengthExceededError: the model has no positions for any text.
            RemoteProtocolError: the id is taken.
        """
        blocks = self._packer.blocks
        self._require_welcome(header, owner)
        size = session_size(blocks, header, self._hidden_bytes_per_token, 0 if adapter is None else adapter.num_prefix)
        account = partial(self.limits.standing.account, owner.peer_id)
        num_bytes = size.row_bytes * header.batch_size
        if account().comes_first:
            self._dismiss_for(num_bytes)
        if self._max_sessions is not None and len(self) >= self._max_sessions:
            raise ServerOverloadedError(
                f"this server takes {self._max_sessions} session{'s' * (self._max_sessions > 1)} at a time"
            )
        lease = self.budget.lease(num_bytes)
        try:
            runner = StepRunner(
                self._packer,
                self._device_thread,
                header,
                size,
                lease,
                adapter=adapter,
                pages=self.pages,
                account=account,
            )
            compression = self._compression if header.compression == "auto" else header.compression
            session = Session(
                id=header.session,
                token=header.token,
                runner=runner,
                waiting_room=WaitingRoom(self.budget, self.limits, owner.peer_id),
                epoch=header.epoch,
                outlet=Outlet(owner, header.end, compression),
                on_close=self._forget,
            )
        except BaseException:  # out of memory, above all
            lease.release()
            raise
        self._sessions[header.session] = session
        self._empty.clear()
        return session

    def _require_welcome(self, header: OpenHeader, owner: FrameStream) -> None:
        if header.session in self._sessions:
            raise RemoteProtocolError("a session with this id is open already")
        if sum(s.owner.peer_id == owner.peer_id for s in self) >= MAX_SESSIONS_PER_PEER:
            raise ServerOverloadedError(f"one client may have {MAX_SESSIONS_PER_PEER} sessions open")

    def get(self, session_id: str) -> Session:
        """Return the session of this id.

        Raises:
            SessionLostError: there is none.
        """
        try:
            return self._sessions[session_id]
        except KeyError:
            raise SessionLostError(NO_SUCH_SESSION) from None

    def attachable(self, session_id: str, token: str) -> Session:
        """Return the session to which a previous server wants to attach.

        Raises:
            SessionLostError: there is none, or the token is wrong; the error is the same.
        """
        session = self._sessions.get(session_id)
        if session is None or not hmac.compare_digest(session.token.encode(), token.encode()):
            raise SessionLostError(NO_SUCH_SESSION)
        return session

    def _dismiss_for(self, num_bytes: int) -> None:
        """Send sessions of other clients to other servers, if that makes room for a client that comes first."""
        others = [session for session in self if not session.runner.account().comes_first]
        leased = Counter[str]()
        for session in others:
            leased[session.owner.peer_id] += session.runner.lease.num_bytes
        if num_bytes > self.budget.left_bytes + leased.total():
            return
        # The newest session of the client with the largest leases: it has the least to compute again elsewhere.
        while others and (num_bytes > self.budget.left_bytes or len(self) == self._max_sessions):
            session = max(reversed(others), key=lambda one: leased[one.owner.peer_id])
            others.remove(session)
            leased[session.owner.peer_id] -= session.runner.lease.num_bytes
            session.dismiss()
            session.close()

    def make_room(self) -> None:
        """Drop shared prompts and offer less; called in the device thread when memory has run out."""
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
        """Tell every client to take another route, and wait until all have gone; clients that don't go lose the
        session.

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
                session.owner.abort()  # its client has been told
