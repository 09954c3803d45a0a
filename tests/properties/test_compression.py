"""Compressed tensors come back within their error bound, rounding is stable, and hostile bytes do no harm."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from swarmllm.errors import RemoteProtocolError
from swarmllm.network.wire.compression import BLOCK, COMPRESSIBLE_DTYPES, CompressedTensor, compress, compressed_bytes
from swarmllm.network.wire.tensor_codec import decode_tensors, encode_tensors

shapes = st.lists(st.integers(0, 4), max_size=3).flatmap(
    lambda head: st.integers(0, 3 * BLOCK + 1).map(lambda width: (*head, width))
)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Values of all sizes that a dtype knows, with some much larger than the others."""
    dtype, shape, seed = draw(st.sampled_from(COMPRESSIBLE_DTYPES)), draw(shapes), draw(st.integers(0, 1 << 30))
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator, dtype=torch.float64) * 2.0 ** draw(st.integers(-140, 120))
    outliers = torch.rand(shape, generator=generator) < draw(st.sampled_from((0.0, 0.01, 0.5)))
    values[outliers] *= draw(st.sampled_from((0.0, 3.0, 1000.0)))
    limit = torch.finfo(dtype).max
    return values.clamp(-limit, limit).to(dtype)


def through_the_wire(small: CompressedTensor) -> Tensor:
    descriptors, chunks = encode_tensors({"t": small})
    payload = b"".join(chunks)
    return decode_tensors(descriptors, payload, max_bytes=len(payload))["t"]


@given(tensors())
def test_errors_are_bounded_and_rounding_is_final(tensor: Tensor) -> None:
    small = compress(tensor)
    if small is None:
        assert tensor.numel() == 0
        return
    received = through_the_wire(small)
    assert (received.shape, received.dtype) == (tensor.shape, tensor.dtype)
    assert sum(part.nbytes for part in small.parts) == compressed_bytes(tuple(tensor.shape), tensor.dtype)

    width = tensor.shape[-1]
    for start in range(0, width, BLOCK):
        there = tensor[..., start : start + BLOCK].double()
        here = received[..., start : start + BLOCK].double()
        largest = there.abs().topk(min(2, there.shape[-1]), dim=-1).values
        smallest_step = 2.0**-24 if tensor.dtype is torch.float16 else 2.0**-126
        bound = (largest[..., -1:] / 127).clamp(min=smallest_step / 2)
        is_largest = there.abs() == largest[..., :1]
        assert bool(((here - there).abs() <= torch.where(is_largest, largest[..., :1] / 127 + bound, bound)).all())
        stands_out = (largest[..., 0] > 2.1 * largest[..., -1]) & (bound[..., 0] > smallest_step)
        assert torch.equal(here[is_largest & stands_out[..., None]], there[is_largest & stands_out[..., None]])

    again = compress(received)
    assert again is not None
    assert torch.equal(again.decompress(), received)


@given(tensors(), st.sampled_from((float("nan"), float("inf"), float("-inf"))), st.integers(0, 1 << 30))
def test_what_is_not_finite_is_not_compressed(tensor: Tensor, value: float, place: int) -> None:
    if tensor.numel():
        tensor.view(-1)[place % tensor.numel()] = value
    assert compress(tensor) is None


@given(tensors(), st.integers(1, 7))
def test_a_token_is_rounded_alike_in_whatever_company(tensor: Tensor, rows: int) -> None:
    """So prompts may be cut anyhow, and what is replayed in other pieces is the same."""
    whole = compress(tensor)
    if whole is None:
        return
    of_rows = tensor.view(-1, tensor.shape[-1]).split(rows)
    apart = torch.cat([small.decompress() for small in map(compress, of_rows) if small is not None])
    assert torch.equal(whole.decompress().view(apart.shape), apart)


@given(tensors(), st.data())
def test_the_layout_in_memory_makes_no_difference(tensor: Tensor, data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(tensor.dim())))
    room = torch.empty([2 * size for size in tensor.permute(order).shape], dtype=tensor.dtype)
    elsewhere = room[(slice(None, None, 2),) * tensor.dim()].permute([order.index(axis) for axis in range(len(order))])
    small, other = compress(tensor), compress(elsewhere.copy_(tensor))
    assert (small is None) == (other is None)
    if small is not None and other is not None:
        assert torch.equal(small.decompress(), other.decompress())
        assert torch.equal(through_the_wire(small), through_the_wire(other))


encodings = st.sampled_from(["int8/bfloat16", "int8/float16", "int8/float32", "int8/int8", "int8/", "int8", "float32"])


@given(encodings, st.lists(st.integers(0, 70), max_size=4).map(tuple), st.binary(max_size=400), st.booleans())
def test_any_bytes_give_a_tensor_of_that_shape_or_a_protocol_error(
    dtype: str, shape: tuple[int, ...], payload: bytes, fitting: bool
) -> None:
    known = {"int8/bfloat16": torch.bfloat16, "int8/float16": torch.float16, "int8/float32": torch.float32}.get(dtype)
    num_bytes = len(payload)
    if fitting and known is not None and torch.Size(shape).numel() in range(1, 10_000) and shape:
        num_bytes = compressed_bytes(shape, known)
        payload = (payload or b"\x80") * (num_bytes // max(len(payload), 1) + 1)
        payload = payload[:num_bytes] + bytes(-num_bytes % 16)
    descriptors: Any = [("t", dtype, shape, num_bytes)]
    try:
        received = decode_tensors(descriptors, payload, max_bytes=1 << 20)["t"]
    except RemoteProtocolError:
        return
    assert received.shape == shape
    assert received.nbytes <= 4 * len(payload)


@pytest.mark.parametrize("dtype", COMPRESSIBLE_DTYPES, ids=str)
def test_the_edges_of_every_dtype(dtype: torch.dtype) -> None:
    finfo = torch.finfo(dtype)
    edges = torch.tensor([finfo.max, -finfo.max, finfo.tiny, -finfo.tiny, 0.0, -0.0, 1.0, finfo.max / 2], dtype=dtype)
    for tensor in (edges, edges[2:6], edges[4:5], torch.full((200,), finfo.max, dtype=dtype)):
        small = compress(tensor)
        assert small is not None
        received = small.decompress()
        assert bool(received.isfinite().all())
        assert bool(((received.double() - tensor.double()).abs() <= tensor.double().abs().max() / 127).all())
        again = compress(received)
        assert again is not None
        assert torch.equal(again.decompress(), received)
