"""How much memory a session may take on this server: what it leases when it is opened.

A position is first an input that waits, then cache and perhaps an output that is kept. Called by `session_table`.
"""

from dataclasses import dataclass

from swarmllm.errors import SessionLengthExceededError
from swarmllm.models.span.block_span import BlockSpan
from swarmllm.models.span.page_pool import PAGE_TOKENS
from swarmllm.network.wire.messages import OpenHeader

INPUTS_FACTOR = 2
"""Inputs may take this many times the hidden states of the session's whole length: clients may send wider types."""
BESIDE_BYTES = 32
"""Bytes of one position beside its hidden states: mask, position, token type and input id."""


@dataclass(frozen=True, slots=True)
class SessionSize:
    """What each row of the session's batch may have."""

    max_length: int
    """Positions of text."""
    row_bytes: int
    """Cache, and inputs that wait or outputs that are kept."""
    row_waiting_bytes: int
    """Inputs that may wait without being leased."""
    source_length: int
    """Positions of an encoder's outputs."""
    position_bytes: int
    """Hidden states of one position."""


def session_size(
    blocks: BlockSpan, header: OpenHeader, hidden_bytes_per_token: int, num_prefix: int = 0
) -> SessionSize:
    """The size of the session that a client asks for, behind a prefix of `num_prefix` positions.

    Clients ask for more than the model has positions for: by default, and by doubling. Nobody leases what no step can
    use, and the step that goes beyond is refused before it looks up a position that doesn't exist.

    Raises:
        SessionLengthExceededError: the model has no positions for any text.
    """
    max_length, num_blocks = header.max_length, header.end - header.start
    if blocks.longest_text is not None:
        max_length = min(max_length, blocks.longest_text - num_prefix)
    if max_length < 1:
        raise SessionLengthExceededError(f"a prefix of {num_prefix} positions leaves none of the model's for a text")
    cache_bytes_per_token = -(-blocks.cache_sizes.bytes_per_token * num_blocks // len(blocks.span))
    source_bytes, cross_bytes = _source_bytes(blocks, header) if header.source_length else (0, 0)
    cache_bytes = cache_bytes_per_token * (max_length + num_prefix) + blocks.cache_sizes.bytes_per_session
    if blocks.pool is not None:  # whole pages, which have room for all blocks
        cache_bytes = blocks.page_bytes * -(-(max_length + num_prefix) // PAGE_TOKENS)
    row_bytes = cache_bytes + hidden_bytes_per_token * max_length
    return SessionSize(
        max_length=max_length,
        row_bytes=row_bytes + source_bytes + cross_bytes,
        row_waiting_bytes=INPUTS_FACTOR * ((hidden_bytes_per_token + BESIDE_BYTES) * max_length + source_bytes),
        source_length=header.source_length,
        position_bytes=hidden_bytes_per_token,
    )


def _source_bytes(blocks: BlockSpan, header: OpenHeader) -> tuple[int, int]:
    """What the encoder's outputs take that come with the first step, and their keys and values in the blocks."""
    num_blocks, kept = header.end - header.start, 2  # by the cache, and for a successor
    source_bytes = kept * blocks.source_dim * blocks.dtype.itemsize + BESIDE_BYTES
    cross_bytes = -(-blocks.cache_sizes.cross_bytes_per_token * num_blocks // len(blocks.span))
    return header.source_length * source_bytes, header.source_length * cross_bytes
