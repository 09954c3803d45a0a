"""Weights are quantized on the device on which they lie: no tensor comes from the CPU, and no number goes there.

The device "meta" refuses both, as a CUDA graph would, and is everywhere.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from swarmllm.models.quantization import packed
from swarmllm.models.quantization.decoded import KBit
from swarmllm.models.quantization.loading import pack
from swarmllm.models.quantization.nf4 import Nf4
from swarmllm.models.quantization.packed import Int8, Packed
from swarmllm.models.quantization.rules import BITS, BLOCKS

FORMS: dict[str, Callable[[Tensor], Packed]] = {
    "int8": Int8.quantize,
    "nf4": lambda weight: Nf4.quantize(weight, tiled=False),
    **{name: lambda weight, bits=bits: KBit.quantize(weight, bits) for name, bits in BITS.items()},  # type: ignore[misc]
    **{name: lambda weight, name=name: pack(weight, name, weight.device) for name in BLOCKS},  # type: ignore[misc]
}


@pytest.mark.parametrize("name", FORMS)
def test_what_comes_out_is_on_the_device_of_the_weight(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "GPU_PACKING_BYTES", 1)  # several pieces
    weight = torch.randn(2, 32, 256, dtype=torch.bfloat16)
    here, there = FORMS[name](weight), FORMS[name](weight.to("meta"))
    for part, tensor in there.tensors().items():
        assert tensor.device.type == "meta"
        assert (tensor.shape, tensor.dtype) == (here.tensors()[part].shape, here.tensors()[part].dtype)


def test_slices_for_a_cache_are_for_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "SLICE_BYTES", 1)
    matrix = Int8.quantize(torch.randn(96, 128))
    there = Int8.quantize(torch.empty(96, 128, device="meta"))
    assert len(matrix._slices(torch.float32)) == 3
    assert there._slices(torch.float32) == [(0, 96)]
    grads = torch.randn(5, 96)
    torch.testing.assert_close(matrix.multiply_transposed(grads), grads @ matrix.dequantize())
    assert there.multiply_transposed(grads.to("meta")).shape == (5, 128)
