"""Hidden states between blocks, cut into pieces, joined, packed and taken: nothing is lost, whatever their shape."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from swarmllm.data_structures import Span
from swarmllm.errors import CorruptActivationsError
from swarmllm.models.boundary.inner_states import MAX_ABS, Described, InnerStates, are_finite, plausible

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LENGTH = 6
spans = st.tuples(st.integers(0, 7), st.integers(1, 8)).filter(lambda ends: ends[0] < ends[1]).map(lambda e: Span(*e))


@st.composite
def found(draw: st.DrawFn) -> tuple[InnerStates, Span, Tensor, int]:
    """The states that a server found in its blocks, hidden states of that call, and the axis of the batch."""
    span, axis = draw(spans), draw(st.sampled_from([0, 1]))
    batch_size, heads, dtype = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.sampled_from(DTYPES))
    inner = InnerStates(draw(st.frozensets(st.integers(0, 9))), attentions=draw(st.booleans()), num_heads=heads)
    like = torch.randn((2,) * axis + (batch_size, LENGTH, 8)).to(dtype)
    for block_idx in span:
        if block_idx in inner.outputs:
            inner.found[block_idx] = torch.randn(like.shape).to(dtype)
        if inner.attentions:
            shapes = draw(
                st.lists(st.integers(1, LENGTH), max_size=2)
            )  # of a window, fewer columns; of no attention, none
            weights = [torch.rand(batch_size, heads, LENGTH, columns).to(dtype) for columns in shapes]
            inner.maps[block_idx] = [(block_idx, place, one) for place, one in enumerate(weights)]
    return inner, span, like, axis


def taken(inner: InnerStates, span: Span, like: Tensor, axis: int, described: Described | None = None) -> InnerStates:
    blocks, said, tensors = inner.as_answer(span)
    other = inner.fresh()
    other.take(
        blocks,
        said if described is None else described,
        tensors,
        span=span,
        like=like,
        batch_axis=axis,
        end=LENGTH,
        mask=None,
        peer_id="peer",
    )
    return other


def assert_same(one: InnerStates, other: InnerStates) -> None:
    assert one.found.keys() == other.found.keys()
    assert all(torch.equal(one.found[idx], other.found[idx]) for idx in one.found)
    assert one.maps.keys() == other.maps.keys()
    for block_idx, maps in one.maps.items():
        assert [(idx, place) for idx, place, _ in maps] == [(idx, place) for idx, place, _ in other.maps[block_idx]]
        assert all(torch.equal(a[2], b[2]) for a, b in zip(maps, other.maps[block_idx], strict=True))


@given(found())
def test_what_is_packed_is_taken(case: tuple[InnerStates, Span, Tensor, int]) -> None:
    inner, span, like, axis = case
    assert_same(taken(inner, span, like, axis), inner)


@given(found(), st.integers(1, 3))
def test_rows_are_joined(case: tuple[InnerStates, Span, Tensor, int], size: int) -> None:
    inner, _, like, axis = case
    pieces = []
    for start in range(0, like.shape[axis], size):
        count = min(size, like.shape[axis] - start)
        piece = inner.fresh()
        piece.found = {idx: one.narrow(axis, start, count) for idx, one in inner.found.items()}
        piece.maps = {
            idx: [(idx, place, one.narrow(0, start, count)) for _, place, one in maps]
            for idx, maps in inner.maps.items()
        }
        pieces.append(piece)
    joined = inner.fresh()
    joined.join(pieces, axis)
    assert_same(joined, inner)


@given(found(), st.lists(st.tuples(st.integers(0, 9), st.integers(0, 15), st.tuples(*[st.integers(1, 1 << 24)] * 4))))
def test_no_description_does_harm(
    case: tuple[InnerStates, Span, Tensor, int], said: list[tuple[int, int, tuple[int, ...]]]
) -> None:
    """A server may describe what it likes: it is taken as it is, or refused in one sentence."""
    inner, span, like, axis = case
    honest = inner.as_answer(span)[1]
    if not inner.attentions or tuple(said) == honest:
        return
    try:
        other = taken(inner, span, like, axis, tuple(said))
    except CorruptActivationsError:
        return
    assert not said or all(one[2].shape[0] == like.shape[axis] for maps in other.maps.values() for one in maps)


def test_sizes_are_counted() -> None:
    inner = InnerStates({1, 2, 9}, attentions=True, num_heads=4)
    assert inner.num_bytes(Span(0, 3), 2, 5, 7, 100) == 2 * 2 * 5 * 100 + 3 * 2 * 4 * 5 * 12 * 4
    assert InnerStates({1}).num_bytes(Span(2, 3), 2, 5, 7, 100) == 0
    assert not InnerStates({1}).wants(Span(2, 3))
    with pytest.raises(CorruptActivationsError, match="others were wanted"):
        InnerStates({1}).take(
            (), (), {}, span=Span(0, 2), like=torch.zeros(1, 1, 1), batch_axis=0, end=1, mask=None, peer_id="peer"
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@given(values=st.lists(st.floats(width=16), max_size=40))
def test_finite_values(values: list[float], dtype: torch.dtype) -> None:
    tensor = torch.tensor(values).to(dtype)
    assert are_finite(tensor) is bool(tensor.isfinite().all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 4 * MAX_ABS, -6e4, 0.0])
def test_what_can_be_hidden_states(dtype: torch.dtype, value: float) -> None:
    """MAX_ABS is infinite in float16: infinite values passed there."""
    assert plausible(torch.tensor([[[1.0, value, -1.0]]]).to(dtype), 0) is (abs(value) <= MAX_ABS)
