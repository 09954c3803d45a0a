"""The lease of a session: as much as its steps can use, and no more."""

from types import SimpleNamespace
from typing import Any

import pytest

from swarmllm.data_structures import Span
from swarmllm.errors import SessionLengthExceededError
from swarmllm.models.span.page_pool import PAGE_TOKENS
from swarmllm.models.span.span_cache import CacheSizes
from swarmllm.network.wire.messages import OpenHeader
from swarmllm.server.sessions.kv_cache import BESIDE_BYTES, INPUTS_FACTOR, session_size

HIDDEN_BYTES = 10


def blocks(longest_text: int | None = None, *, paged: bool = False) -> Any:
    """Four of them; each keeps 3 bytes for a position."""
    span = Span(4, 8)
    sizes = CacheSizes(bytes_per_token=12, bytes_per_session=100)
    pool = object() if paged else None
    return SimpleNamespace(
        span=span, cache_sizes=sizes, longest_text=longest_text, pool=pool, page_bytes=12 * PAGE_TOKENS
    )


def header(max_length: int, start: int = 4, end: int = 8) -> OpenHeader:
    name = "0" * 32
    return OpenHeader(id=1, session=name, token=name, start=start, end=end, batch_size=1, max_length=max_length)


def test_a_position_is_an_input_then_cache_and_perhaps_an_output() -> None:
    size = session_size(blocks(), header(50), HIDDEN_BYTES)
    assert size.max_length == 50
    assert size.row_bytes == 50 * (12 + HIDDEN_BYTES) + 100
    assert size.row_waiting_bytes == INPUTS_FACTOR * 50 * (HIDDEN_BYTES + BESIDE_BYTES)


def test_some_of_the_blocks_keep_their_share_rounded_up() -> None:
    assert session_size(blocks(), header(1, 4, 5), HIDDEN_BYTES).row_bytes == 3 + HIDDEN_BYTES + 100


@pytest.mark.parametrize(("max_length", "num_pages"), [(1, 1), (PAGE_TOKENS, 2), (PAGE_TOKENS + 60, 2)])
def test_whole_pages_of_all_blocks(max_length: int, num_pages: int) -> None:
    """Also for a session on some of the blocks, behind a prefix of 4 positions."""
    size = session_size(blocks(paged=True), header(max_length, 4, 5), HIDDEN_BYTES, num_prefix=4)
    assert size.row_bytes == num_pages * 12 * PAGE_TOKENS + max_length * HIDDEN_BYTES


def test_a_session_leases_no_more_than_the_positions_of_the_model() -> None:
    size = session_size(blocks(longest_text=20), header(1 << 20), HIDDEN_BYTES, num_prefix=5)
    assert size.max_length == 15
    assert size.row_bytes == 15 * (12 + HIDDEN_BYTES) + 100 + 5 * 12, "the prefix is in the cache, too"
    with pytest.raises(SessionLengthExceededError, match="a prefix of 20 positions"):
        session_size(blocks(longest_text=20), header(8), HIDDEN_BYTES, num_prefix=20)
