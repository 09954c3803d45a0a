"""Servers' modules serve all sessions: no call depends on what other clients have run before or between."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from tests.numerics.rope_models import BORDER, KINDS, NUM_BLOCKS, UNEVEN, load_rope, save_rope
from tests.numerics.test_packing import load, some_inputs
from tests.numerics.test_sweep import ARCHITECTURES
from tests.numerics.tiny_models import VARIANTS
from tests.selection import sampled
from torch import Tensor

from swarmllm.data_structures import Span
from swarmllm.errors import UnsupportedModelError
from swarmllm.models.checkpoint.checkpoint import open_checkpoint
from swarmllm.models.span.block_span import BlockSpan
from swarmllm.models.span.loading import load_block_span
from swarmllm.models.span.packing import SessionCall
from swarmllm.models.span.span_cache import SpanCache

LENGTHS = ((5, 1, 1), (BORDER - 1, 2, 1), (BORDER + 9, 1, 1))
"""The steps of three clients: one stays short, one passes the border, one begins beyond it."""


class Client:
    """One text on a server that others use too."""

    def __init__(self, blocks: BlockSpan, number: int, lengths: Sequence[int]) -> None:
        self.blocks = blocks
        self.cache: SpanCache = blocks.new_cache()
        random = torch.Generator().manual_seed(number)
        self.inputs = [some_inputs(blocks, 1, length, random) for length in lengths]
        self.outputs: list[Tensor] = []

    @property
    def next(self) -> SessionCall:
        return SessionCall(self.inputs[len(self.outputs)], self.blocks.span, self.cache)

    def step(self) -> None:
        call = self.next
        self.outputs.append(self.blocks.forward(call.inputs, call.span, call.cache).clone())


def interleavings(lengths: Sequence[Sequence[int]], count: int) -> Iterator[list[int]]:
    """Whose turn it is, in some shuffled orders and with each client alone after the others."""
    turns = [number for number, steps in enumerate(lengths) for _ in steps]
    yield sorted(turns, reverse=True)
    for seed in range(count):
        order = torch.randperm(len(turns), generator=torch.Generator().manual_seed(seed)).tolist()
        yield [turns[place] for place in order]


def check_interleavings(blocks: BlockSpan, lengths: Sequence[Sequence[int]], count: int = 2) -> None:
    """Each call gives what it gives on blocks that nobody else has used, bit for bit."""
    alone = []
    for number, steps in enumerate(lengths):
        client = Client(blocks, number, steps)
        for _ in steps:
            client.step()
        alone.append(client.outputs)
    for order in interleavings(lengths, count):
        clients = [Client(blocks, number, steps) for number, steps in enumerate(lengths)]
        for number in order:
            clients[number].step()
        for got, want in zip(clients, alone, strict=True):
            assert all(map(torch.equal, got.outputs, want)), order


@pytest.mark.parametrize("kind", [pytest.param(k, marks=() if k in UNEVEN else pytest.mark.slow) for k in KINDS])
def test_nothing_is_left_of_others_calls(kind: str, tmp_path: Path) -> None:
    blocks = load_rope(kind, tmp_path)
    reference = Client(load_block_span(open_checkpoint(str(tmp_path)), blocks.span, progress=False), 1, LENGTHS[1])
    for _ in LENGTHS[1]:
        reference.step()
    check_interleavings(blocks, LENGTHS)
    after_others = Client(blocks, 1, LENGTHS[1])
    for want in reference.outputs:
        after_others.step()
        assert torch.equal(after_others.outputs[-1], want)


@pytest.mark.parametrize("model_type", sampled([*ARCHITECTURES, *VARIANTS], 12))
def test_nothing_is_left_of_others_calls_in_any_architecture(model_type: str, tmp_path: Path) -> None:
    try:
        blocks = load(model_type, tmp_path)
    except UnsupportedModelError:
        pytest.skip("has no sessions")
    if not blocks.keeps_cache:
        pytest.skip("has no sessions")
    most = min(blocks.max_positions or 40, 40)
    check_interleavings(blocks, ((5, 1, 1), (most // 2, 1, 1), (most - 3, 1, 1)))


def test_what_modules_keep_is_known_at_the_next_start(tmp_path: Path) -> None:
    save_rope("dynamic", tmp_path / "model")
    checkpoint, span = open_checkpoint(str(tmp_path / "model")), Span(0, NUM_BLOCKS)
    first, second = (
        load_block_span(checkpoint, span, progress=False, probes_dir=tmp_path / "probes") for _ in range(2)
    )
    assert second.kept_state.names == first.kept_state.names != ()
    assert second.traits == first.traits
    check_interleavings(second, LENGTHS, count=0)


def test_offloaded_blocks_are_left_alone(tmp_path: Path) -> None:
    """Their buffers share memory, which holds another block's by the time that somebody compares."""
    save_rope("dynamic", tmp_path)
    options = {"dtype": torch.float32, "progress": False, "num_offloaded": 2}
    blocks = load_block_span(open_checkpoint(str(tmp_path)), Span(0, NUM_BLOCKS), **options)  # type: ignore[arg-type]
    assert all(name.startswith("rotary_emb.") for name in blocks.kept_state.names)
    check_interleavings(blocks, LENGTHS, count=0)
