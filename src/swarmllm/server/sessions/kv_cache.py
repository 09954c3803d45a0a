"""Memory that sessions lease before their first token, so that it can't run out later.

Pure accounting, called from the event loop; the tensors themselves live in `span/span_cache`, and grow in pages as
they are used.

`CacheBudget` is the number of bytes that all sessions share. A session leases everything that its `max_length` may
take when it is opened (`SessionSize`), not page by page as it grows. Paging would admit more sessions at a time, but
`generate()` opens sessions no longer than its text can become, so there is little to gain. Its price would be a
refusal in the middle of an answer: the client would have to compute the whole text again on another server, when all
are full.

If memory still runs out, because other programs took it, the budget shrinks: the leased memory wasn't all there. It
grows again when sessions that were opened later end, and is whole when there are no sessions. So a short lack of memory
has no long effect.

`WaitingRoom` counts the messages of one session, from before they are decoded until they have been run. A session's
lease covers its cache and the memory of its inputs, so inputs may wait for free. A step that takes more memory (a mask
of four axes, for example) may come alone, if the budget has as much left while it waits. All messages count as bytes of
the session's client, also those from a previous server: the client asked for them.
"""

from dataclasses import dataclass

from swarmllm.errors import CacheFullError, ServerOverloadedError, SessionLengthExceededError, SessionTooLargeError
from swarmllm.models.span.block_span import BlockSpan
from swarmllm.models.span.page_pool import PAGE_TOKENS
from swarmllm.network.wire.messages import OpenHeader, ReplayHeader, StepHeader
from swarmllm.network.wire.protocol import Message
from swarmllm.network.wire.tensor_codec import decompressed_bytes
from swarmllm.server.peers.peer_limits import PeerLimits

KEPT_SHARE = 0.75
"""Share of the leased bytes that is still offered after memory ran out. Assumed, as is the next."""
LEAST_SHARE = 0.25
"""Share of the capacity that is always offered: otherwise a server that once lacked memory could never show that it has
some."""

INPUTS_FACTOR = 2
"""Inputs may take this many times the hidden states of the session's whole length: clients may send wider types."""
BESIDE_BYTES = 32
"""Bytes of one position besides its hidden states: mask, position, token type and input id."""

MAX_WAITING = 1024
"""Number of messages of one session that may wait; a client that sends more without reading answers is refused."""
MESSAGE_BYTES = 2048
"""Bytes that each message takes at least: its header as Python objects."""
NUMBER_BYTES = 40
"""Bytes of a Python integer in a tuple."""


@dataclass
class CacheBudget:
    """The bytes that sessions may lease in all, and the bytes that they have leased."""

    capacity_bytes: int
    leased_bytes: int = 0
    lacking_bytes: int = 0
    """Bytes of the capacity that memory has turned out not to hold."""
    num_lacks: int = 0

    @property
    def offered_bytes(self) -> int:
        """The capacity that can be leased; all of it while there are no leases, as a large session may fit by now."""
        return self.capacity_bytes - (self.lacking_bytes if self.leased_bytes else 0)

    @property
    def left_bytes(self) -> int:
        return max(0, self.offered_bytes - self.leased_bytes)

    def shrink(self) -> None:
        """Offer less, as memory ran out; called in the device thread."""
        enough = int(max(LEAST_SHARE * self.capacity_bytes, KEPT_SHARE * self.leased_bytes))
        self.lacking_bytes = max(self.lacking_bytes, self.capacity_bytes - enough)
        self.num_lacks += 1

    def lease(self, num_bytes: int) -> "CacheLease":
        """Set `num_bytes` aside.

        Raises:
            SessionTooLargeError: the budget is smaller, even without other leases.
            CacheFullError: that much is not left.
        """
        lease = CacheLease(self, self.num_lacks)
        lease.resize(num_bytes)
        return lease


@dataclass
class CacheLease:
    """One session's share of the budget."""

    budget: CacheBudget
    num_lacks: int
    """The budget's `num_lacks` when this lease was taken."""
    num_bytes: int = 0
    released: bool = False
    """True when its session has ended."""

    def resize(self, num_bytes: int) -> None:
        """Ask for `num_bytes` in all; on failure the lease stays unchanged.

        Raises:
            SessionTooLargeError: the budget is smaller, even without other leases.
            CacheFullError: that much is not left.
        """
        if num_bytes > self.budget.capacity_bytes:
            raise SessionTooLargeError(
                f"the session needs {num_bytes / 1e6:.1f} MB of KV cache, and this server has "
                f"{self.budget.capacity_bytes / 1e6:.1f} in all: use a smaller max_length or batch"
            )
        more = num_bytes - self.num_bytes
        if more > self.budget.left_bytes:
            raise CacheFullError(
                f"the session needs {more / 1e6:.1f} MB more of KV cache, {self.budget.left_bytes / 1e6:.1f} of "
                f"{self.budget.offered_bytes / 1e6:.1f} MB are free: use a smaller max_length or batch"
            )
        self.budget.leased_bytes += more
        self.num_bytes = num_bytes

    def release(self) -> None:
        """Give everything back; harmless if done twice."""
        self.budget.leased_bytes -= self.num_bytes
        if self.num_lacks == self.budget.num_lacks:
            self.budget.lacking_bytes = max(0, self.budget.lacking_bytes - self.num_bytes)
        self.num_bytes, self.released = 0, True


@dataclass(frozen=True, slots=True)
class SessionSize:
    """Memory that each row of a session may take."""

    max_length: int
    """Number of positions of text."""
    row_bytes: int
    """Bytes of the cache, and of inputs that wait or outputs that are kept."""
    row_waiting_bytes: int
    """Bytes of inputs that may wait without a lease of their own."""
    source_length: int
    """Number of positions of an encoder's outputs."""
    position_bytes: int
    """Bytes of one position's hidden states."""


def session_size(
    blocks: BlockSpan, header: OpenHeader, hidden_bytes_per_token: int, num_prefix: int = 0
) -> SessionSize:
    """Compute the size of the session that a client asks for, behind a prefix of `num_prefix` positions.

    A position is first an input that waits, then cache and perhaps a kept output. Clients ask for more positions than
    the model has, by default and by doubling. A session leases only what its steps can use; a step beyond the model's
    positions is refused before it looks one up.

    Raises:
        SessionLengthExceededError: the model has no positions for any text.
    """
    max_length, num_blocks = header.max_length, header.end - header.start
    if blocks.longest_text is not None:
        max_length = min(max_length, blocks.longest_text - num_prefix)
    if max_length < 1:
        raise SessionLengthExceededError(f"a prefix of {num_prefix} positions leaves none of the model's for a text")
    cache_bytes_per_token = -(-blocks.cache_sizes.bytes_per_token * num_blocks // len(blocks.span))
    encoder_bytes, cross_bytes = _encoder_output_bytes(blocks, header) if header.source_length else (0, 0)
    cache_bytes = cache_bytes_per_token * (max_length + num_prefix) + blocks.cache_sizes.bytes_per_session
    if blocks.pool is not None:  # whole pages, which have room for all blocks
        cache_bytes = blocks.page_bytes * -(-(max_length + num_prefix) // PAGE_TOKENS)
    row_bytes = cache_bytes + hidden_bytes_per_token * max_length
    return SessionSize(
        max_length=max_length,
        row_bytes=row_bytes + encoder_bytes + cross_bytes,
        row_waiting_bytes=INPUTS_FACTOR * ((hidden_bytes_per_token + BESIDE_BYTES) * max_length + encoder_bytes),
        source_length=header.source_length,
        position_bytes=hidden_bytes_per_token,
    )


def _encoder_output_bytes(blocks: BlockSpan, header: OpenHeader) -> tuple[int, int]:
    """Bytes of the encoder's outputs, which come with the first step, and of their keys and values in the blocks."""
    num_blocks, kept = header.end - header.start, 2  # in the cache, and for the next server
    encoder_bytes = kept * blocks.source_dim * blocks.dtype.itemsize + BESIDE_BYTES
    cross_bytes = -(-blocks.cache_sizes.cross_bytes_per_token * num_blocks // len(blocks.span))
    return header.source_length * encoder_bytes, header.source_length * cross_bytes


def bytes_of(header: StepHeader | ReplayHeader, message: Message) -> int:
    """Bytes of memory that a message takes until it has been run."""
    num_numbers = len(header.batch_index or ())
    if isinstance(header, StepHeader):
        num_numbers += 4 * len(header.timings) + sum(3 + len(lengths) for _, _, lengths in header.pieces)
    else:
        num_numbers += len(header.cuts)
    num_bytes = decompressed_bytes(message.header.get("tensors"), len(message.payload))
    return MESSAGE_BYTES + NUMBER_BYTES * num_numbers + len(message.payload) + num_bytes


class WaitingRoom:
    """Counts the waiting messages of one session of the client `peer_id`."""

    def __init__(self, budget: CacheBudget, limits: PeerLimits, peer_id: str) -> None:
        self._extra = budget.lease(0)
        self._limits, self._peer_id = limits, peer_id
        self._waiting_bytes = self._running_bytes = self._num_waiting = 0
        self._closed = False

    @property
    def num_bytes(self) -> int:
        """Bytes of the waiting messages, and of the one that runs."""
        return self._waiting_bytes + self._running_bytes

    def enter(self, num_bytes: int, num_free_bytes: int) -> None:
        """Count a message of this many bytes; `num_free_bytes` may wait for free.

        The running message takes no place from the waiting ones: its answer may have gone out before it has ended.

        Raises:
            ServerOverloadedError: too many bytes of this session or of this client wait already.
            CacheFullError: the message takes more than may wait for free, and the budget has too little left.
        """
        num_free_bytes += MESSAGE_BYTES * (self._num_waiting + 1)
        waiting = self._waiting_bytes + num_bytes
        if self._num_waiting >= MAX_WAITING or (self._num_waiting and waiting > num_free_bytes):
            raise ServerOverloadedError("too many steps of this session are waiting")
        if not self._limits.take_now(self._peer_id, num_bytes):
            raise ServerOverloadedError("too many bytes of this client's steps and requests are waiting")
        try:
            extra = max(0, waiting - num_free_bytes) + max(0, self._running_bytes - num_free_bytes)
            self._extra.resize(max(self._extra.num_bytes, extra))
        except BaseException:
            self._limits.give_back(self._peer_id, num_bytes)
            raise
        self._waiting_bytes = waiting
        self._num_waiting += 1

    def forget(self, num_bytes: int) -> None:
        """Subtract a message that was refused after all."""
        if not self._closed:
            self._waiting_bytes -= num_bytes
            self._num_waiting -= 1
            self._give_back(num_bytes)

    def begin(self, num_bytes: int) -> None:
        """Count a message as running."""
        self._waiting_bytes -= num_bytes
        self._num_waiting -= 1
        self._running_bytes = num_bytes

    def end(self) -> None:
        """Subtract the running message, as it has been run."""
        if not self._closed:
            num_bytes, self._running_bytes = self._running_bytes, 0
            self._give_back(num_bytes)

    def _give_back(self, num_bytes: int) -> None:
        self._limits.give_back(self._peer_id, num_bytes)
        if not self.num_bytes:
            self._extra.resize(0)

    def close(self) -> None:
        """Give everything back, as nothing will be run any more; harmless if done twice."""
        if not self._closed:
            self._limits.give_back(self._peer_id, self.num_bytes)
            self._extra.release()
            self._closed = True
