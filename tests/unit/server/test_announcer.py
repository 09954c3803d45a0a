"""What makes a server announce itself before it is time to."""

import pytest

from swarmllm.data_structures import ServerInfo
from swarmllm.server.announcer import changed_notably

QUIET = ServerInfo(peer_id="a" * 46, start=0, end=2, queue_ms=1.0, cache_tokens_left=65536, max_batch_tokens=8192)


@pytest.mark.parametrize(
    ("change", "notable"),
    [
        ({}, False),
        ({"queue_ms": 40.0}, False),
        ({"queue_ms": 99.0}, False),
        ({"queue_ms": 101.0}, True),
        ({"cache_tokens_left": 40000}, False),
        ({"cache_tokens_left": 30000}, True),
        ({"cache_tokens_left": 0}, True),
        ({"speed_share": 0.6}, False),
        ({"speed_share": 0.3}, True),
        ({"speed_share": 0.0}, True),
    ],
)
def test_only_what_would_change_routes_is_told_at_once(change: dict[str, float], notable: bool) -> None:
    other = QUIET.model_copy(update=change)
    assert changed_notably(QUIET, other) == changed_notably(other, QUIET) == notable
