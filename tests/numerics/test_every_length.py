"""Every length of a prompt, every size of a batch, every cut: a server's answer is that of its blocks.

Whatever has a boundary somewhere (pages of 64 positions, steps that count as decoding, chunks of a prefill) has lengths
that lie on it, and a few lengths that were chosen once don't.
"""

import pytest
import torch
from in_process_server import InProcessServers, in_process_servers
from tiny_models import NUM_BLOCKS, save_tiny

from swarmllm.data_structures import BlockTraits, Span
from swarmllm.models.boundary.block_inputs import BlockInputs
from swarmllm.models.checkpoint.checkpoint import open_checkpoint
from swarmllm.models.span.block_span import BlockSpan
from swarmllm.models.span.loading import load_block_span

LONGEST = 1100
AT_BOUNDARIES = (1, 2, 16, 17, 63, 64, 65, 128, 129, 130, 193)


@pytest.fixture(scope="module")
def spans(tmp_path_factory: pytest.TempPathFactory) -> list[BlockSpan]:
    """The same blocks for each of two servers."""
    directory = tmp_path_factory.mktemp("llama")
    save_tiny("llama", directory)
    return [load_block_span(open_checkpoint(str(directory)), Span(0, NUM_BLOCKS), progress=False) for _ in range(2)]


@pytest.fixture(scope="module")
def blocks(spans: list[BlockSpan]) -> BlockSpan:
    return spans[0]


def prompt(blocks: BlockSpan, length: int, batch_size: int = 1) -> BlockInputs:
    """Inputs as a client sends them."""
    random = torch.Generator().manual_seed(0)
    hidden = torch.randn(batch_size, length, blocks.embedding_dim, generator=random)
    positions = torch.arange(length).expand(batch_size, length)
    return BlockInputs(hidden_states=hidden, batch_size=batch_size, seq_len=length, position_ids=positions)


def left_padded(blocks: BlockSpan, length: int, batch_size: int) -> BlockInputs:
    """Each row with one more position of padding, as long as one is left for text."""
    inputs = prompt(blocks, length, batch_size)
    num_padding = torch.arange(batch_size).clamp(max=length - 1)[:, None]
    inputs.attention_mask = (torch.arange(length) >= num_padding).long()
    inputs.position_ids = (torch.arange(length) - num_padding).clamp(min=0)
    return inputs


async def answers(swarm: InProcessServers, inputs: BlockInputs, span: Span, chunk: int) -> torch.Tensor:
    """The outputs of a session for `inputs` in steps of `chunk` positions, on a stream of its own."""
    (peer_id,) = swarm.servers
    stream = await swarm.dial(peer_id)
    name = await swarm.open_session(stream, span, batch_size=inputs.batch_size)
    outputs = []
    for start in range(0, inputs.seq_len, chunk):
        step = inputs.columns(start, min(start + chunk, inputs.seq_len), 0, BlockTraits())
        outputs.append(await swarm.step(stream, name, start, step, ones_mask=step.attention_mask is None))
    stream.abort()
    return torch.cat(outputs, dim=1)


def assert_equal(outputs: torch.Tensor, expected: torch.Tensor) -> None:
    """But for the order of additions, which depends on how many positions are computed together."""
    torch.testing.assert_close(outputs, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("longest", [200, pytest.param(LONGEST, marks=pytest.mark.slow)])
@pytest.mark.parametrize("chunk", [LONGEST, 100])
async def test_every_length(blocks: BlockSpan, chunk: int, longest: int) -> None:
    span = Span(0, 1)
    whole = prompt(blocks, longest)
    expected = blocks.forward(whole, span)
    async with in_process_servers(blocks) as swarm:
        for length in range(1, longest + 1):
            inputs = whole.columns(0, length, 0, blocks.traits)
            outputs = await answers(swarm, inputs, span, chunk)
            assert_equal(outputs, expected[:, :length])


@pytest.mark.parametrize("batch_size", range(1, 10))
async def test_every_batch_size_with_and_without_padding(blocks: BlockSpan, batch_size: int) -> None:
    span = Span(1, 3)
    async with in_process_servers(blocks) as swarm:
        for length in (1, 17, 65, 130):
            for inputs in (prompt(blocks, length, batch_size), left_padded(blocks, length, batch_size)):
                for chunk in (length, 60):
                    assert_equal(await answers(swarm, inputs, span, chunk), blocks.forward(inputs, span))


@pytest.mark.parametrize("cut", range(1, NUM_BLOCKS))
@pytest.mark.parametrize("batch_size", [1, 3])
async def test_every_cut(spans: list[BlockSpan], blocks: BlockSpan, cut: int, batch_size: int) -> None:
    async with in_process_servers(*spans) as swarm:
        for length in AT_BOUNDARIES:
            inputs = prompt(blocks, length, batch_size)
            first, second = [await swarm.dial(peer_id) for peer_id in swarm.servers]
            names = [
                await swarm.open_session(stream, span, batch_size=batch_size)
                for stream, span in ((first, Span(0, cut)), (second, Span(cut, NUM_BLOCKS)))
            ]
            await swarm.link(first, names[0], second, names[1])
            outputs = await swarm.step(first, names[0], 0, inputs, answered_by=second)
            assert_equal(outputs, blocks.forward(inputs))
            first.abort()
            second.abort()
