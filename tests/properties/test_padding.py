"""Padding in a batch changes no text, and reaches no server."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.numerics.tiny_models import save_tiny
from torch import Tensor

from swarmllm.client.batches.padding import Layout
from swarmllm.data_structures import BlockTraits, Span
from swarmllm.models.boundary.block_inputs import BlockInputs
from swarmllm.models.checkpoint.checkpoint import open_checkpoint
from swarmllm.models.span.block_span import BlockSpan
from swarmllm.models.span.loading import load_block_span

HIDDEN, NUM_BLOCKS = 64, 4
BOTH = BlockTraits(skips_padding=("left", "right"))
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 0.05}
Texts = list[tuple[int, int]]


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> dict[torch.dtype, BlockSpan]:
    directory: Path = tmp_path_factory.mktemp("model")
    save_tiny("llama", directory)
    checkpoint = open_checkpoint(str(directory))
    return {
        dtype: load_block_span(checkpoint, Span(0, NUM_BLOCKS), dtype=dtype, progress=False) for dtype in TOLERANCES
    }


@st.composite
def padded(draw: st.DrawFn) -> tuple[int, Texts]:
    """A width, and the columns of each row's text; some have none."""
    width = draw(st.integers(1, 14))
    sides = draw(st.sampled_from(["left", "right", "both"]))
    texts: Texts = []
    for _ in range(draw(st.integers(1, 7))):
        first = draw(st.integers(0, width)) if sides != "right" else 0
        end = draw(st.integers(first, width)) if sides != "left" else width
        texts.append((first, end))
    return width, texts


def batch(width: int, texts: Sequence[tuple[int, int]], dtype: torch.dtype, padding: float) -> BlockInputs:
    hidden = torch.randn(len(texts), width, HIDDEN, generator=torch.Generator().manual_seed(width)).to(dtype)
    mask = torch.zeros(len(texts), width, dtype=torch.int64)
    for row, (first, end) in enumerate(texts):
        mask[row, first:end] = 1
    hidden[mask == 0] = padding
    return BlockInputs(hidden_states=hidden, batch_size=len(texts), seq_len=width, attention_mask=mask)


def run(inputs: BlockInputs, layout: Layout, max_tokens: int, blocks: BlockSpan, span: Span) -> Tensor:
    parts = []
    for rows in layout.micro_batches(range(inputs.batch_size), max_tokens):
        cut, place = layout.cut(inputs, rows)
        assert cut.batch_size * cut.seq_len <= max_tokens or cut.batch_size == 1
        parts.append((blocks.forward(cut, span), place))
    return layout.put_back("hidden_states", parts)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=padded(),
    max_tokens=st.integers(1, 60),
    start=st.integers(0, NUM_BLOCKS - 1),
    dtype=st.sampled_from(list(TOLERANCES)),
)
def test_texts_are_as_if_alone(
    blocks: dict[torch.dtype, BlockSpan], rows: tuple[int, Texts], max_tokens: int, start: int, dtype: torch.dtype
) -> None:
    (width, texts), span, of_dtype = rows, Span(start, NUM_BLOCKS), blocks[dtype]
    inputs = batch(width, texts, dtype, torch.nan)
    inputs.hidden_states.requires_grad_()
    weights = torch.randn(inputs.hidden_states.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    layout = Layout(inputs, BOTH)

    outputs = run(inputs, layout, max_tokens, of_dtype, span)
    (grad,) = torch.autograd.grad((outputs * weights).sum(), [inputs.hidden_states])
    outputs = outputs.detach()

    for row, (first, end) in enumerate(texts):
        is_text = torch.zeros(width, dtype=torch.bool)
        is_text[first:end] = True
        assert not outputs[row, ~is_text].any()
        assert not grad[row, ~is_text].any()
        if first == end:
            continue
        alone = replace(inputs, attention_mask=None).rows(row, row + 1, BOTH).cut_to(first, end, BOTH)
        leaf = alone.hidden_states.detach().requires_grad_()
        want = of_dtype.forward(alone.with_hidden(leaf), span)
        (of_leaf,) = torch.autograd.grad((want * weights[row : row + 1, first:end]).sum(), [leaf])
        for got, expected in ((outputs[row, first:end], want[0].detach()), (grad[row, first:end], of_leaf[0])):
            assert float((got - expected).norm()) <= TOLERANCES[dtype] * float(expected.norm())


@given(
    rows=padded(),
    max_tokens=st.integers(1, 60),
    shares=st.lists(st.floats(0.01, 1), min_size=1, max_size=4),
    axis=st.integers(0, 2),
)
def test_each_row_goes_once_and_comes_back(
    rows: tuple[int, Texts], max_tokens: int, shares: list[float], axis: int
) -> None:
    width, texts = rows
    inputs = batch(width, texts, torch.float32, 0.0)
    whole = inputs.hidden_states.clone()
    hidden = whole.view(*(1,) * axis, *whole.shape).expand(*(2,) * axis, *whole.shape)
    traits = BOTH.model_copy(update={"batch_axis": axis})
    layout = Layout(inputs.with_hidden(hidden), traits)
    parts, places, num_computed = [], [], 0
    for part in layout.split([share / sum(shares) for share in shares]):
        for of_rows in layout.micro_batches(part, max_tokens):
            cut, place = layout.cut(inputs.with_hidden(hidden), of_rows)
            assert torch.equal(layout.take(hidden, place), cut.hidden_states)
            parts.append((cut.hidden_states, place))
            places += place.rows.tolist()
            num_computed += cut.batch_size * cut.seq_len
    assert sorted(places) == list(range(len(texts)))
    assert num_computed >= layout.num_tokens == sum(max(1, end - first) for first, end in texts)
    assert torch.equal(layout.put_back("hidden_states", parts), hidden)


def test_as_many_tokens_for_each_route_as_it_can_take() -> None:
    texts = [(0, length) for length in (100, 1, 1, 50, 1, 49)]
    layout = Layout(batch(100, texts, torch.float32, 0.0), BOTH)
    parts = layout.split([0.5, 0.25, 0.25])
    assert [layout.tokens_of(part) for part in parts] == [100, 50, 52]


@pytest.mark.parametrize("change", ["whole", "no side", "mask of 4 axes", "no mask"])
def test_padding_that_is_computed(change: str) -> None:
    inputs, traits = batch(6, [(0, 2), (3, 6)], torch.float32, 5.0), BOTH
    if change == "whole":
        inputs = replace(inputs, whole=True)
    elif change == "no side":
        traits = BlockTraits()
    else:
        mask = None if change == "no mask" else torch.zeros(2, 1, 6, 6)
        inputs = replace(inputs, attention_mask=mask)
    layout = Layout(inputs, traits)
    assert layout.is_whole
    cut, place = layout.cut(inputs, range(2))
    assert torch.equal(cut.hidden_states, inputs.hidden_states)
    assert torch.equal(layout.put_back("hidden_states", [(cut.hidden_states, place)]), inputs.hidden_states)


def test_one_side_only() -> None:
    inputs = batch(6, [(0, 2), (3, 6), (1, 4)], torch.float32, 5.0)
    for side in ("left", "right"):
        layout = Layout(inputs, BlockTraits(skips_padding=(side,)))
        found = [layout.cut(inputs, range(row, row + 1)) for row in range(3)]
        starts = {int(place.rows): (place.first, place.end) for _, place in found}
        assert starts == ({0: (0, 6), 1: (3, 6), 2: (1, 6)} if side == "left" else {0: (0, 2), 1: (0, 6), 2: (0, 4)})
        assert all(cut.hidden_states.shape[1] == place.end - place.first for cut, place in found)


def test_what_lies_before_a_text_stays_where_it_is() -> None:
    inputs = batch(6, [(3, 5), (2, 6)], torch.float32, 0.0)
    for kind in ({"num_prompts": 1, "num_prefix": 0}, {"num_prompts": 0, "num_prefix": 2}):
        adapter = SimpleNamespace(**kind)
        layout = Layout(replace(inputs, adapter=adapter), BOTH)  # type: ignore[arg-type]
        _, place = layout.cut(replace(inputs, adapter=adapter), range(2))  # type: ignore[arg-type]
        assert (place.first, place.end) == (0, 6)
        assert layout.num_tokens == 5 + 6 + 2 * kind["num_prefix"]


def test_positions_that_are_given_are_kept() -> None:
    inputs = batch(6, [(3, 6), (4, 6)], torch.float32, 0.0)
    positions = torch.tensor([[0, 0, 0, 0, 1, 2], [0, 0, 0, 0, 0, 1]])
    for given_positions, want in ((positions, positions[:, 3:]), (None, torch.tensor([[3, 4, 5]]))):
        both = replace(inputs, position_ids=given_positions)
        cut, _ = Layout(both, BOTH).cut(both, range(2))
        assert cut.position_ids is not None
        assert cut.position_ids.tolist() == want.tolist()
