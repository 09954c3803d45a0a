"""Tensors as bytes: exact, and strict about what comes in."""

from typing import Any

import pytest
import torch

from swarmllm.errors import LocalProtocolError, RemoteProtocolError
from swarmllm.network.wire.tensor_codec import ALIGNMENT, DTYPES, MAX_TENSORS, decode_tensors, encode_tensors

GOOD = ("x", "float32", (2, 2), 16)


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_comes_back_bit_for_bit(name: str) -> None:
    raw = torch.randint(0, 256, (3 * 5 * DTYPES[name].itemsize,), dtype=torch.uint8)
    tensor = raw.ne(7).view(3, 5) if name == "bool" else raw.view(DTYPES[name]).view(3, 5)
    descriptors, chunks = encode_tensors({"t": tensor})
    back = decode_tensors(descriptors, b"".join(chunks), max_bytes=1 << 20)["t"]
    assert back.dtype == tensor.dtype
    assert torch.equal(back.view(torch.uint8), tensor.view(torch.uint8))


def test_odd_layouts_are_sent_as_they_look() -> None:
    base = torch.arange(24.0).view(2, 3, 4)
    tensors = {
        "transposed": base.transpose(0, 2),
        "expanded": base[:1].expand(5, 3, 4),
        "scalar": torch.tensor(3),
        "empty": torch.empty(2, 0, 4),
        "grad": base.clone().requires_grad_(),
        "odd": torch.ones(3, dtype=torch.bool),
        "after_odd": base,
    }
    descriptors, chunks = encode_tensors(tensors)
    back = decode_tensors(descriptors, b"".join(chunks), max_bytes=1 << 20)
    assert list(back) == list(tensors)
    for name, tensor in tensors.items():
        assert back[name].shape == tensor.shape
        assert torch.equal(back[name], tensor.detach())
        assert not back[name].requires_grad
        assert back[name].data_ptr() % ALIGNMENT == 0 or not back[name].numel()


def test_nothing_is_copied_where_the_layout_allows() -> None:
    tensor = torch.zeros(4, 4)
    descriptors, chunks = encode_tensors({"t": tensor})
    tensor[0, 0] = 5
    payload = bytearray(b"".join(chunks))
    back = decode_tensors(descriptors, payload, max_bytes=64)["t"]
    assert back[0, 0] == 5
    payload[:4] = bytes(4)
    assert back[0, 0] == 0


def test_no_tensors_are_no_bytes() -> None:
    assert encode_tensors({}) == ([], [])
    assert decode_tensors((), b"", max_bytes=0) == {}


def test_what_cannot_be_sent_is_our_own_error() -> None:
    with pytest.raises(LocalProtocolError, match="complex64"):
        encode_tensors({"t": torch.zeros(1, dtype=torch.complex64)})
    with pytest.raises(LocalProtocolError, match="at most"):
        encode_tensors({str(idx): torch.zeros(1) for idx in range(MAX_TENSORS + 1)})


@pytest.mark.parametrize(
    ("descriptors", "size", "reason"),
    [
        (None, 0, "descriptors"),
        ([GOOD] * 33, 16 * 33, "descriptors"),
        (["x"], 16, "not \\["),
        ([GOOD[:3]], 16, "not \\["),
        ([GOOD, GOOD], 32, "twice"),
        ([(1, *GOOD[1:])], 16, "name"),
        ([("x" * 65, *GOOD[1:])], 16, "name"),
        ([("x", "float31", (2, 2), 16)], 16, "dtype"),
        ([("x", ["float32"], (2, 2), 16)], 16, "dtype"),
        ([("x", "float32", 4, 16)], 16, "shape"),
        ([("x", "float32", (1,) * 9, 4)], 16, "shape"),
        ([("x", "float32", (-2, -2), 16)], 16, "not a whole number"),
        ([("x", "float32", (2.0, 2), 16)], 16, "not a whole number"),
        ([("x", "float32", (True, 4), 16)], 16, "not a whole number"),
        ([("x", "float32", (1 << 62, 4, 0), 0)], 0, "too large"),
        ([("x", "float32", (1 << 41,), 1 << 43)], 16, "too large"),
        ([("x", "float32", (2, 2), 12)], 16, "size"),
        ([("x", "float32", (2, 2), 16.0)], 16, "size"),
        ([("x", "float32", (2, 2), None)], 16, "size"),
        ([GOOD], 15, "16 bytes, 15 came"),
        ([GOOD], 32, "16 bytes, 32 came"),
        ([GOOD], 2000, "cap"),
    ],
)
def test_what_does_not_add_up_is_refused(descriptors: Any, size: int, reason: str) -> None:
    with pytest.raises(RemoteProtocolError, match=reason) as caught:
        decode_tensors(descriptors, bytes(size), max_bytes=1000, peer_id="somebody")
    assert caught.value.peer_id == "somebody"


def test_bytes_other_than_0_and_1_become_true() -> None:
    back = decode_tensors([("b", "bool", (4,), 4)], bytes([0, 1, 2, 255]) + bytes(12), max_bytes=100)["b"]
    assert back.tolist() == [False, True, True, True]
    assert back.view(torch.uint8).tolist() == [0, 1, 1, 1]
