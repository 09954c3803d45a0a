"""Pages of prompts are shared by hash, so nobody may have a page kept that isn't what its hash says.

A hostile client sends a victim's text, and between it whatever makes the server's cache hold something else. Then the
victim comes with the same text, and must get what it would get where nobody else has been.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch
from hostile import (
    HONEST,
    MALLORY,
    Server,
    answer,
    ask,
    error_code,
    hang_up,
    load_blocks,
    open_header,
    result,
    serving,
    step_header,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.numerics.tiny_models import save_tiny
from torch import Tensor

from swarmllm.data_structures import Span
from swarmllm.models.boundary.block_inputs import BlockInputs
from swarmllm.models.span.block_span import BlockSpan
from swarmllm.network.wire.protocol import FrameStream, Message, MessageType
from swarmllm.server.sessions.prefix_cache import PAGE_TOKENS, PrefixCache
from swarmllm.server.sessions.session import Outlet

SESSION, OTHER = "a" * 32, "b" * 32
LENGTH = PAGE_TOKENS + 40
SPAN = Span(0, 2)
"""Two of four blocks, so that sessions keep their outputs and can be asked to replay them."""


@pytest.fixture(scope="module", params=["llama", "bloom", "opt"])
def blocks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> BlockSpan:
    """Bloom and OPT count positions by adding up the mask."""
    torch.set_num_threads(1)
    directory = tmp_path_factory.mktemp(request.param)
    save_tiny(request.param, directory)
    return load_blocks(directory, SPAN)


def text(blocks: BlockSpan, seed: int) -> Tensor:
    return torch.randn(1, LENGTH, blocks.embedding_dim, generator=torch.Generator().manual_seed(seed))


class Client:
    """One session."""

    def __init__(self, stream: FrameStream, session: str) -> None:
        self._stream, self._session = stream, session
        self._epoch = 0

    async def open(self) -> None:
        header = open_header(self._session, SPAN, max_length=LENGTH)
        assert (await ask(self._stream, MessageType.OPEN, header)).type is MessageType.RESULT

    async def step(self, position: int, hidden: Tensor, mask: Tensor | None = None, **fields: Any) -> Message:
        """The server's answer; after an error the next step belongs to a new epoch."""
        header = step_header(self._session, position, hidden, epoch=self._epoch, ones_mask=mask is None, **fields)
        tensors = {"hidden_states": hidden} | ({} if mask is None else {"attention_mask": mask})
        message = await ask(self._stream, MessageType.STEP, header, **tensors)
        self._epoch += message.type is MessageType.ERROR
        return message

    async def replay(self, length: int, rows: int, batch_index: list[int]) -> None:
        fields = {"id": 1, "session": self._session, "epoch": self._epoch, "length": length, "replay_hops": 1}
        await self._stream.send(MessageType.REPLAY, {**fields, "rows": rows, "batch_index": batch_index})
        received = 0
        while received < length:
            message = await answer(self._stream)
            if message.type is MessageType.ERROR:
                self._epoch += 1
                return
            received += result(message).shape[1]

    async def close(self) -> None:
        await hang_up(self._stream)


@asynccontextmanager
async def client_of(server: Server, peer_id: str, session: str) -> AsyncIterator[Client]:
    client = Client(await server.connect(peer_id), session)
    await client.open()
    yield client
    async with asyncio.timeout(120):
        # A page is kept after the answer has gone out. Whoever hangs up before, ends that.
        while any(one.waiting_room.num_bytes for one in server.sessions):  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0)
    await client.close()


async def assert_victim_is_served(server: Server, victim: Tensor, pages: PrefixCache) -> None:
    """Right, and from a page of somebody's wherever there is one."""
    inputs = BlockInputs(hidden_states=victim, batch_size=1, seq_len=LENGTH)
    expected = server.blocks.forward(inputs, SPAN, server.blocks.new_cache(SPAN))
    async with client_of(server, HONEST, OTHER) as client:
        torch.testing.assert_close(result(await client.step(0, victim)), expected, rtol=1e-4, atol=1e-4)


ROWS = {"rows": 1, "batch_index": [0]}


@pytest.mark.parametrize("between", ["rows", "rows later", "rows of a replay", "rollback", "nothing"])
async def test_nobody_can_change_what_a_hash_stands_for(blocks: BlockSpan, between: str) -> None:
    """The victim's positions [0, 47), something else, the victim's [47, 64): its first page by its hash."""
    pages, victim, own = PrefixCache(1 << 30), text(blocks, 0), text(blocks, 1)
    async with serving(blocks, pages=pages) as server:
        async with client_of(server, MALLORY, SESSION) as mallory:
            result(await mallory.step(0, victim[:, :47]))
            fields: dict[str, Any] = {}
            match between:
                case "rows":
                    fields = {"rows": 1}
                    result(await mallory.step(0, own[:, :47], **ROWS))
                case "rows later":
                    fields = {"rows": 1}
                    result(await mallory.step(20, own[:, 20:47], **ROWS))
                case "rows of a replay":
                    fields = {"rows": 1}
                    await mallory.replay(47, **ROWS)
                    result(await mallory.step(20, own[:, 20:47], **fields))
                case "rollback":
                    result(await mallory.step(20, own[:, 20:47]))
            result(await mallory.step(47, victim[:, 47:64], **fields))
        assert (len(pages) == 0) == (between not in ("rows", "nothing"))  # a text that begins anew has a page again
        await assert_victim_is_served(server, victim, pages)
        assert (pages.num_reused_tokens > 0) == (between == "nothing")  # an honest beginning is shared


async def test_a_page_of_a_step_that_failed_is_not_kept(blocks: BlockSpan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its outputs were not noted, so those of the next step would be taken for those of other positions."""
    pages, victim = PrefixCache(1 << 30), text(blocks, 0)
    async with serving(blocks, pages=pages) as server:
        async with client_of(server, MALLORY, SESSION) as mallory:
            result(await mallory.step(0, victim[:, :30]))

            async def fail(*_: Any) -> None:
                raise MemoryError

            with monkeypatch.context() as patch:
                patch.setattr(Outlet, "send", fail)
                assert error_code(await mallory.step(30, victim[:, 30:50])) == "out_of_memory"
            result(await mallory.step(50, victim[:, 50:]))
        assert len(pages) == 0
        await assert_victim_is_served(server, victim, pages)


STEPS = st.lists(
    st.tuples(
        st.integers(0, LENGTH - 1),  # begins here, or where the cache ends
        st.booleans(),
        st.sampled_from([1, 17, 30, 47, 64]),
        st.booleans(),  # the victim's text or another one
        st.sampled_from([None, None, [0], [0, 0], [1]]),  # rows that are chosen
        st.sampled_from([None, None, 1, 2]),  # of the mask
    ),
    max_size=6,
)


@settings(max_examples=20, deadline=None)
@given(steps=STEPS)
def test_whatever_came_before_a_text_is_answered_rightly(blocks: BlockSpan, steps: list[Any]) -> None:
    asyncio.run(_answered_rightly(blocks, steps))


async def _answered_rightly(blocks: BlockSpan, steps: list[Any]) -> None:
    pages, texts = PrefixCache(1 << 30), [text(blocks, 0), text(blocks, 1)]
    async with serving(blocks, pages=pages) as server:
        async with client_of(server, MALLORY, SESSION) as mallory:
            (session,) = server.sessions
            for position, goes_on, length, own, chosen, ones in steps:
                start = session.runner.cache.position if goes_on else min(position, session.runner.cache.position)
                if start >= LENGTH:
                    continue
                hidden = texts[own][:, start : start + length]
                num_rows = session.runner.batch_size if chosen is None else len(chosen)
                mask = None if ones is None else torch.full((num_rows, start + hidden.shape[1]), ones)
                rows = {"rows": session.runner.num_choices + (chosen is not None), "batch_index": chosen}
                await mallory.step(start, hidden.expand(num_rows, -1, -1).contiguous(), mask, **rows)
        await assert_victim_is_served(server, texts[0], pages)
