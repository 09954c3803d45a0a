"""Announcements of a server before their time, and a DHT that doesn't listen."""

import asyncio
from typing import Any

import pytest

from swarmllm.data_structures import ServerInfo
from swarmllm.errors import PeerUnreachableError
from swarmllm.server import announcer
from swarmllm.server.announcer import Announcer, changed_notably

QUIET = ServerInfo(
    peer_id="a" * 46,
    start=0,
    end=2,
    queue_ms=1.0,
    cache_tokens_left=65536,
    max_batch_tokens=8192,
    decode_ms_per_block=1.0,
    throughput=100.0,
)


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
        ({"decode_ms_per_block": 1.9}, False),
        ({"decode_ms_per_block": 2.1}, True),
        ({"throughput": 150.0}, False),
        ({"throughput": 40.0}, True),
    ],
)
def test_only_changes_that_matter_to_routes_are_announced_at_once(change: dict[str, float], notable: bool) -> None:
    other = QUIET.model_copy(update=change)
    assert changed_notably(QUIET, other) == changed_notably(other, QUIET) == notable


class Directory:
    """Answers each announcement with the next of these."""

    def __init__(self, *answers: bool | Exception) -> None:
        self.answers = list(answers)

    async def announce(self, *_: Any, **__: Any) -> bool:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.mark.parametrize(
    ("answers", "expected", "num_left"),
    [
        ((True, True), True, 1),
        ((False, PeerUnreachableError("nobody"), True, True), True, 1),
        ((False, False, False, True), False, 1),
    ],
)
def test_a_new_server_tries_three_times(
    answers: tuple[bool | Exception, ...], expected: bool, num_left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(announcer, "DELAYS_S", (0.0, 0.0, 0.0))
    directory: Any = Directory(*answers)
    record: Any = None
    assert asyncio.run(Announcer(directory, record, lambda: QUIET, 30.0).introduce()) is expected
    assert len(directory.answers) == num_left
