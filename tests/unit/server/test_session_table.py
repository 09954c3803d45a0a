"""What a server does now and then because sessions have ended."""

import asyncio
import threading
from unittest.mock import MagicMock

import pytest

from swarmllm.network.wire.messages import OpenHeader
from swarmllm.server.sessions import session_table
from swarmllm.server.sessions.kv_cache import CacheBudget
from swarmllm.server.sessions.session_table import SESSIONS_PER_TIDYING, SessionTable


async def test_free_memory_is_returned_every_so_many_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    returned = threading.Semaphore(0)
    monkeypatch.setattr(session_table, "return_free_memory", returned.release)
    blocks = MagicMock(cache_bytes_per_token=1, cache_bytes_per_session=0, num_blocks=1, longest_text=None)
    blocks.span.__len__.return_value = 1
    budget = CacheBudget(100)
    table = SessionTable(MagicMock(blocks=blocks), 1, MagicMock(), budget)
    owner = MagicMock(peer_id="somebody")

    def use(number: int) -> None:
        name = f"{number:032}"
        header = OpenHeader(id=1, session=name, token=name, start=0, end=1, batch_size=1, max_length=8)
        table.open(header, owner).close()

    for number in range(SESSIONS_PER_TIDYING - 1):
        use(number)
    assert not returned.acquire(timeout=0.1)
    use(SESSIONS_PER_TIDYING)
    assert returned.acquire(timeout=120)
    assert not returned.acquire(blocking=False)
    assert len(table) == budget.leased_bytes == 0
    await asyncio.get_running_loop().shutdown_default_executor()
