"""Formats that transformers and torch read themselves: they make the same weights of them, whatever the shape."""

import pytest
import torch
from published_stores import bitsandbytes_4bit, gptq
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, _dequantize_fp8_weight
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from swarmllm.errors import CorruptWeightsError
from swarmllm.models.published_formats import format_of
from swarmllm.models.published_formats.stored_format import LazyWeight, Parts
from swarmllm.models.quantization.packed import Packed

F8 = torch.float8_e4m3fn


def read(settings: dict[str, object], parts: Parts) -> Tensor:
    """The dequantized weight, which is also what stays packed."""
    form = format_of({"quantization_config": settings})
    assert form is not None
    weight = form.dequantize(parts)
    packed = form.keep(parts, torch.float32)
    assert isinstance(packed, Packed)
    assert torch.equal(packed.dequantize(), weight)
    return weight


def codes(rows: int, columns: int) -> Tensor:
    return (100 * torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows + columns))).to(F8)


def scales(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(shape[0])) / 100 + 1e-4


@pytest.mark.parametrize("block", [(128, 128), (64, 32), (1, 32)], ids=str)
@pytest.mark.parametrize(
    ("rows", "columns"),
    [
        (256, 384),
        (256, 16384),  # as many blocks as rows, like DeepSeek-V3's o_proj
        (576, 384),  # the last blocks of the rows are parts of one
        (256, 200),
        (100, 100),
    ],
)
@pytest.mark.parametrize("of_bytes", [False, True])
def test_fp8_by_blocks(rows: int, columns: int, block: tuple[int, int], of_bytes: bool) -> None:
    height, width = block
    stored, scale = codes(rows, columns), scales(-(-rows // height), -(-columns // width))
    if of_bytes:
        exponents = torch.randint(115, 135, scale.shape, generator=torch.Generator().manual_seed(0))
        scale = exponents.to(torch.uint8)
    settings: dict[str, object] = {"quant_method": "fp8", "weight_block_size": [height, width]}
    weight = read(settings, {".weight": stored, ".weight_scale_inv": scale})
    numbers = torch.exp2(scale.float() - 127) if of_bytes else scale
    assert torch.equal(weight, _dequantize_fp8_weight(stored, numbers, [height, width], torch.float32))
    if rows % height == columns % width == 0:  # of others it makes something else
        assert torch.equal(weight, Fp8Dequantize(None)._dequantize_one(stored, scale, torch.float32))


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_fp8_of_one_scale(shape: tuple[int, ...]) -> None:
    stored, scale = codes(48, 64), scales(1).reshape(shape)
    parts = {".weight": stored, ".weight_scale": scale, ".input_scale": torch.tensor(0.5)}
    weight = read({"quant_method": "fp8", "activation_scheme": "static"}, parts)
    assert torch.equal(weight, _dequantize_fp8_weight(stored, scale, None, torch.float32))


@pytest.mark.parametrize("settings", [{"quant_method": "fbgemm_fp8"}, {"quant_method": "fp8"}])
def test_fp8_by_rows(settings: dict[str, object]) -> None:
    """The reader is the product that transformers' `FbgemmFp8Linear` calls, with a unit matrix."""
    stored, scale = codes(48, 64), scales(48, 1)
    unit, ones = torch.eye(64).to(F8), torch.ones(64, 1)
    expected = torch._scaled_mm(unit, stored.T, scale_a=ones, scale_b=scale.T, out_dtype=torch.float32).T
    for one in (scale, scale.flatten()) if settings["quant_method"] == "fp8" else (scale,):
        assert torch.equal(read(settings, {".weight": stored, ".weight_scale": one}), expected)


def test_scales_that_fit_no_weight() -> None:
    form = format_of({"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}})
    assert form is not None
    for shape in ((64, 4), (4, 4, 16), (2, 2), (16, 16)):
        with pytest.raises(CorruptWeightsError, match="a weight of 256×256 has scales of the shape"):
            form.dequantize({".weight": codes(256, 256), ".weight_scale_inv": scales(*shape)})


@pytest.mark.parametrize("experts", [1, 3])
def test_mxfp4(experts: int) -> None:
    generator = torch.Generator().manual_seed(experts)
    blocks = torch.randint(0, 256, (experts, 48, 2, 16), generator=generator, dtype=torch.uint8)
    exponents = torch.randint(100, 140, (experts, 48, 2), generator=generator, dtype=torch.uint8)
    weight = read({"quant_method": "mxfp4"}, {"_blocks": blocks, "_scales": exponents})
    assert torch.equal(weight.mT, convert_moe_packed_tensors(blocks, exponents, dtype=torch.float32))


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("shape", [(7, 40), (3, 96), (130, 130)])
def test_bitsandbytes_with_a_smaller_last_group(shape: tuple[int, int], nested: bool) -> None:
    pytest.importorskip("bitsandbytes")
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    parts, expected = bitsandbytes_4bit(weight, "nf4", nested)
    form = format_of({"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}})
    assert form is not None
    assert form.keep(parts, torch.float32) is None
    torch.testing.assert_close(form.dequantize(parts), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("size", [32, 48, 96, -1])
def test_gptq_without_the_groups_of_inputs(size: int) -> None:
    """The last group of 48 inputs is smaller."""
    length = 96 + 32 if size == 48 else 96
    parts, _ = gptq(torch.randn(64, length, generator=torch.Generator().manual_seed(0)))
    group = torch.arange(length) // (size if size > 0 else length)
    parts = {**parts, **{part: parts[part][: group.max() + 1] for part in (".scales", ".qzeros")}}
    settings = {"quant_method": "gptq", "bits": 4, "group_size": size}
    form = format_of({"quantization_config": settings})
    assert form is not None
    with_groups = form.dequantize({**parts, ".g_idx": group.int()})
    without = {part: tensor for part, tensor in parts.items() if part != ".g_idx"}
    assert torch.equal(form.dequantize(without), with_groups)
    packed = form.keep(without, torch.float32)
    assert (packed is None) == (size == 48)
    assert packed is None or torch.equal(packed.dequantize(), with_groups)


def test_memory_that_runs_out_is_no_fault_of_the_form(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    form = format_of({"quantization_config": {"quant_method": "fp8"}})
    assert form is not None
    monkeypatch.setattr(form, "dequantize", fails)
    with pytest.raises(RuntimeError, match="can't allocate"):
        LazyWeight("a.weight", form, {}, None)[...]
