"""Places among the sessions of a server, and its clean-up after sessions that have ended."""

import asyncio
import threading
from unittest.mock import AsyncMock, MagicMock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmllm.errors import CacheFullError, ServerOverloadedError
from swarmllm.models.span.span_cache import CacheSizes
from swarmllm.network.wire.messages import OpenHeader
from swarmllm.network.wire.protocol import MessageType
from swarmllm.server.peers.peer_limits import PeerLimits, Standing
from swarmllm.server.sessions import session as session_module
from swarmllm.server.sessions.kv_cache import CacheBudget
from swarmllm.server.sessions.session import SESSIONS_PER_TIDYING, Session, SessionTable


async def test_free_memory_is_returned_every_so_many_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    returned = threading.Semaphore(0)
    monkeypatch.setattr(session_module, "return_free_memory", returned.release)
    blocks = MagicMock(cache_sizes=CacheSizes(bytes_per_token=1), num_blocks=1, longest_text=None, pool=None)
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


class Server:
    """A table with room for so much, on blocks that exist only as numbers."""

    def __init__(self, capacity: int, max_sessions: int | None = None) -> None:
        blocks = MagicMock(cache_sizes=CacheSizes(bytes_per_token=1), num_blocks=1, longest_text=None, pool=None)
        blocks.span.__len__.return_value = 1
        blocks.new_cache.side_effect = lambda *_, **__: MagicMock()
        self.budget = CacheBudget(capacity)
        limits = PeerLimits(Standing(("first",)))
        packer = MagicMock(blocks=blocks)
        self.table = SessionTable(packer, 1, MagicMock(), self.budget, limits=limits, max_sessions=max_sessions)
        self.num_opened = 0

    def open(self, peer_id: str, max_length: int) -> Session:
        self.num_opened += 1
        name = f"{self.num_opened:032}"
        header = OpenHeader(id=1, session=name, token=name, start=0, end=1, batch_size=1, max_length=max_length)
        return self.table.open(header, MagicMock(peer_id=peer_id))


ASKED = st.lists(st.tuples(st.sampled_from(("first", "a", "b", "c")), st.integers(1, 30)), max_size=30)


@given(ASKED, st.integers(10, 120), st.none() | st.integers(1, 6))
def test_privileged_clients_find_room_and_no_session_leaves_in_vain(
    asked: list[tuple[str, int]], capacity: int, max_sessions: int | None
) -> None:
    server = Server(capacity, max_sessions)
    opened: list[Session] = []
    for peer_id, max_length in asked:
        before = [session for session in opened if not session.closed]
        others = [session for session in before if session.owner.peer_id != "first"]
        try:
            session = server.open(peer_id, max_length)
        except (CacheFullError, ServerOverloadedError):
            assert [session for session in opened if not session.closed] == before, "they left for nothing"
            if peer_id == "first":
                room = capacity - server.budget.leased_bytes + sum(one.runner.lease.num_bytes for one in others)
                full = max_sessions is not None and len(before) - len(others) == max_sessions
                assert full or room < bytes_of(max_length)
            continue
        gone = [one for one in before if one.closed]
        assert all(peer_id == "first" and one in others for one in gone)
        assert server.budget.leased_bytes == sum(one.runner.lease.num_bytes for one in server.table) <= capacity
        assert max_sessions is None or len(server.table) <= max_sessions
        opened.append(session)


def bytes_of(max_length: int) -> int:
    server = Server(10**6)
    server.open("first", max_length)
    return server.budget.leased_bytes


def test_the_device_counts_no_more_on_a_session_that_was_closed() -> None:
    server = Server(10**6)
    session = server.open("a", 8)
    session.close()
    session.close()
    session.runner.device_thread.forget.assert_called_once_with(session.id)  # type: ignore[attr-defined]


async def test_a_dismissed_session_is_told_once_and_keeps_no_memory() -> None:
    server = Server(10**6, max_sessions=1)
    session = server.open("a", 8)
    session.owner.closed = False  # type: ignore[misc]
    session.owner.send = AsyncMock()  # type: ignore[method-assign]
    cache = session.runner.cache
    server.open("first", 8)
    await session.work()  # ends by itself
    (said,) = session.owner.send.await_args_list
    assert said.args[0] == MessageType.ERROR
    assert said.args[1]["session"] == session.id
    assert "take another route" in said.args[1]["message"]
    assert session.runner.cache is not cache
