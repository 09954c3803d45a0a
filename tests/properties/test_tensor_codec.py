"""Any tensors come back bit for bit; any descriptors and bytes give tensors within the cap, or a protocol error."""

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from swarmllm.errors import RemoteProtocolError
from swarmllm.network.wire.tensor_codec import DTYPES, decode_tensors, encode_tensors

shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)
names = st.text(max_size=20)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    dtype = DTYPES[draw(st.sampled_from(sorted(DTYPES)))]
    shape = draw(shapes)
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    seed = draw(st.binary(min_size=1, max_size=16))
    raw = torch.tensor(list((seed * (num_bytes // len(seed) + 1))[:num_bytes]), dtype=torch.uint8)
    if dtype == torch.bool:
        return raw.remainder(2).bool().view(shape)
    tensor = raw.view(dtype).view(shape)
    if tensor.dim() >= 2 and draw(st.booleans()):
        tensor = tensor.transpose(0, 1)
    if tensor.dim() and draw(st.booleans()):  # an axis of one position keeps the stride of what it was cut from
        axis = draw(st.integers(0, tensor.dim() - 1))
        tensor = tensor[(slice(None),) * axis + (slice(0, 1),)]
    return tensor


@given(st.dictionaries(names, tensors(), max_size=6))
def test_what_was_encoded_comes_back(sent: dict[str, Tensor]) -> None:
    descriptors, chunks = encode_tensors(sent)
    payload = bytearray(b"".join(chunks))
    received = decode_tensors(descriptors, payload, max_bytes=len(payload))
    assert list(received) == list(sent)
    for name, tensor in sent.items():
        assert received[name].dtype == tensor.dtype
        assert received[name].shape == tensor.shape
        ours, theirs = (t.unsqueeze(-1).view(torch.uint8) for t in (received[name], tensor))
        assert torch.equal(ours, theirs)


anything = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 40),
    st.integers(),
    st.floats(),
    st.text(max_size=3),
    st.binary(max_size=3),
)
descriptor_like = st.tuples(
    names | anything,
    st.sampled_from([*DTYPES, "float8", "object"]) | anything,
    st.lists(st.integers(0, 4) | anything, max_size=9).map(tuple) | anything,
    st.integers(0, 100) | anything,
)


@given(st.lists(descriptor_like | anything, max_size=4) | anything, st.binary(max_size=100))
def test_nonsense_raises_nothing_but_a_protocol_error(descriptors: Any, payload: bytes) -> None:
    try:
        received = decode_tensors(descriptors, payload, max_bytes=80)
    except RemoteProtocolError:
        return
    assert sum(tensor.numel() * tensor.element_size() for tensor in received.values()) <= 80
