"""Weights in published formats, packed by the formats' own packages, are what those packages make of them."""

import ctypes
import hashlib
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from tests.kernel_levels import LEVELS
from torch import Tensor

from swarmllm.errors import CorruptWeightsError, UnsupportedModelError
from swarmllm.models.published_formats import format_of
from swarmllm.models.published_formats.stored_format import LogicalView
from swarmllm.models.quantization import kernels
from swarmllm.models.quantization.loading import check_matrix
from swarmllm.models.quantization.packed import Packed

FILE = Path(__file__).parent / "data/published_weights.safetensors"
KEPT_BITS = {
    "ao_float8": 8.2, "ao_float8_tensor": 8.2, "ao_int4": 4.5, "ao_int4_tiles": 4.5, "ao_int8": 8.2,
    "ao_int8_groups": 9, "ao_intx4": 4.5, "ao_intx4_zeros": 4.75, "ao_intx8_zeros": 9, "awq": 4.5, "bnb_fp4": 4.5,
    "bnb_int8": 8.2, "bnb_nf4": 4.5, "bnb_nf4_nested": 4.5, "ct_fp8": 8.2, "ct_fp8_blocks": 8.3,
    "ct_fp8_rows": 8.2, "ct_int2": 4.5, "ct_int4": 4.5, "ct_int4_ordered": None, "ct_int4_zeros": 4.5, "ct_int8": 8.2,
    "ct_int8_packed": 8.5, "ct_int8_zeros": 8.5, "ct_mxfp4": 4.5, "ct_mxfp8": 9, "ct_nvfp4": 4.7, "fbgemm": 8.2,
    "fp8_144x256": 8.3, "fp8_160x192": 8.5, "gptq": 4.5, "gptq_2_bits": 4.5, "gptq_8_bits": 8.5,
    "gptq_act_order": None, "gptq_v2": 4.5, "hqq": 4.5, "hqq_1_bit": 5, "hqq_2_bits": 4.5, "hqq_3_bits": 4.5,
    "hqq_8_bits": 8.5, "hqq_as_float": 4.5, "hqq_axis_0": None, "modelopt_fp8": 8.2, "modelopt_fp8_rows": 8.2,
    "modelopt_nvfp4": 4.7, "modelopt_smoothed": None, "mxfp4": 4.5,
}  # fmt: skip
"""Most bits of a weight, scales included, while it stays packed; None: it doesn't."""

WITHOUT_NEGATIVE_ZERO = frozenset({"modelopt_nvfp4", "modelopt_smoothed"})
"""ModelOpt reads the code of -0 as 0; products are the same."""


def read(name: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    with safe_open(FILE, framework="pt") as file:
        parts = {key.partition("/")[2]: file.get_tensor(key) for key in file.keys() if key.startswith(f"{name}/")}  # noqa: SIM118
        return json.loads(file.metadata()[name]), parts


def test_every_frozen_weight_is_tested() -> None:
    with safe_open(FILE, framework="pt") as file:
        assert file.metadata().keys() == KEPT_BITS.keys()


def dequantized(name: str) -> Tensor:
    about, parts = read(name)
    form = format_of({"quantization_config": about["settings"]})
    assert form is not None
    return form.dequantize(parts).to(getattr(torch, about["dtype"]))


def kept(name: str, dtype: torch.dtype) -> Packed:
    about, parts = read(name)
    form = format_of({"quantization_config": about["settings"]})
    assert form is not None
    packed = form.keep(parts, dtype)
    assert packed is not None
    return packed[0] if len(packed.shape) == 3 else packed


@pytest.mark.parametrize("name", KEPT_BITS)
def test_a_weight_is_what_its_package_makes_of_it(name: str) -> None:
    weight = dequantized(name).float().contiguous()
    if name in WITHOUT_NEGATIVE_ZERO:
        weight += 0
    assert hashlib.sha256(weight.numpy().tobytes()).hexdigest() == read(name)[0]["sha256"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", [name for name, bits in KEPT_BITS.items() if bits])
def test_a_weight_that_stays_packed_is_the_same(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    about, parts = read(name)
    form = format_of({"quantization_config": about["settings"]})
    assert form is not None
    packed = form.keep(parts, dtype)
    assert packed is not None
    weight = form.dequantize(parts).to(dtype)
    for level in LEVELS or [0]:
        monkeypatch.setattr(kernels, "level", lambda level=level: level)
        if name == "bnb_int8" and dtype == torch.float32:  # its two factors are multiplied first
            torch.testing.assert_close(packed.dequantize(), weight)
        else:
            assert torch.equal(packed.dequantize(), weight)
    bits = sum(tensor.numel() * tensor.itemsize for tensor in packed.tensors().values()) * 8 / math.prod(packed.shape)
    assert bits <= KEPT_BITS[name]


@pytest.mark.parametrize("name", [name for name, bits in KEPT_BITS.items() if not bits])
def test_what_can_not_stay_packed(name: str) -> None:
    about, parts = read(name)
    form = format_of({"quantization_config": about["settings"]})
    assert form is not None
    assert form.keep(parts, torch.bfloat16) is None


@pytest.mark.parametrize("without_kernels", [False, True], ids=["kernels", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [name for name, bits in KEPT_BITS.items() if bits])
def test_products_and_gradients(
    name: str, dtype: torch.dtype, without_kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if without_kernels:
        monkeypatch.setattr(kernels, "library", lambda: None)
    for tokens in (1, 3, 16, 17, 40):
        check_matrix(kept(name, dtype), tokens)


@pytest.mark.skipif(kernels.library() is None, reason="swarmllm was installed without a C compiler")
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", [name for name, bits in KEPT_BITS.items() if bits])
def test_a_product_does_not_depend_on_other_rows(
    name: str, level: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "level", lambda: level)
    monkeypatch.setattr(kernels, "WORTH_A_THREAD", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    packed = kept(name, torch.float32)
    inputs = torch.randn(16, packed.shape[-1], generator=torch.Generator().manual_seed(1))
    together = packed.multiply(inputs)
    torch.testing.assert_close(together, F.linear(inputs, packed.dequantize()), rtol=1e-5, atol=1e-4)
    for count in range(1, 17):
        assert torch.equal(packed.multiply(inputs[16 - count :]), together[16 - count :])


@pytest.mark.skipif(kernels.library() is None, reason="swarmllm was installed without a C compiler")
def test_kernels_of_another_version_are_left_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Longer(kernels._Weight):
        _fields_ = (("new", ctypes.c_int64),)

    monkeypatch.setattr(kernels, "_Weight", Longer)
    assert kernels.library.__wrapped__() is None
    assert "is of another version: install swarmllm anew" in caplog.text


def test_kernels_without_a_function_are_left_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As after a new version of the code alone. A function that takes other arguments has a new name."""
    monkeypatch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace(swarmllm_multiply_tiles=None))
    assert kernels.library.__wrapped__() is None
    assert "is of another version: install swarmllm anew" in caplog.text


def test_tensors_beside_weights_are_no_weights() -> None:
    form = format_of({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}})
    assert form is not None
    stored = ["a.weight", "a.weight_scale_inv", "norm.weight", "b.bias", "k.weight_scale"]
    view = LogicalView(form, stored)
    assert view.names() == {"a.weight": "a.weight", **{name: name for name in stored[2:]}}
    assert view.is_packed("a.weight")
    assert not view.is_packed("norm.weight")
    assert view.stored(["a.weight", "b.bias"]) == ["a.weight", "a.weight_scale_inv", "b.bias"]


def test_damaged_parts_are_one_sentence() -> None:
    about, parts = read("awq")
    form = format_of({"quantization_config": about["settings"]})
    assert form is not None
    view = LogicalView(form, [f"w{part}" for part in parts])
    stored = {f"w{part}": tensor for part, tensor in parts.items()} | {"w.scales": parts[".scales"][:, :5]}
    (lazy,) = view.tensors(["w.weight"], stored, None).values()
    with pytest.raises(CorruptWeightsError, match=r"w\.weight is stored in a form that can't be read as Awq"):
        lazy[...]


def test_a_weight_of_a_class_that_is_not_known() -> None:
    about, parts = read("ao_int4")
    form = format_of({"quantization_config": about["settings"]})
    assert form is not None
    for note in (b"", b'{"_type": "MXTensor", "_data": {}}'):
        described = torch.tensor(list(note), dtype=torch.uint8)
        stored = {f"w._weight_{part}": tensor for part, tensor in parts.items() if part != "about"}
        view = LogicalView(form, stored)
        (lazy,) = view.tensors(["w.weight"], stored, None, {"w.weight": described}.__getitem__).values()
        with pytest.raises(CorruptWeightsError, match=r"w\.weight is stored in a form that can't be read as TorchAo"):
            lazy[...]


def test_what_is_not_kept_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    about, parts = read("hqq_axis_0")
    form = format_of({"quantization_config": about["settings"]})
    assert form is not None
    stored = {f"{name}{part}": tensor for name in "ab" for part, tensor in parts.items()}
    for lazy in LogicalView(form, stored).tensors(["a.weight", "b.weight"], stored, torch.bfloat16).values():
        assert torch.equal(lazy[...], form.dequantize(parts))
    (record,) = caplog.records
    assert "a.weight, and perhaps others, can't stay in the bits" in record.getMessage()


def _ao(kind: str, **data: Any) -> dict[str, Any]:
    return {"quant_method": "torchao", "quant_type": {"default": {"_type": kind, "_version": 2, "_data": data}}}


def _ct(form: str, bits: int) -> dict[str, Any]:
    groups = {"group_0": {"format": form, "targets": ["Linear"], "weights": {"num_bits": bits}}}
    return {"quant_method": "compressed-tensors", "config_groups": groups}


@pytest.mark.parametrize(
    "settings",
    [
        {"quant_method": "aqlm"},
        {"quant_method": "gptq", "bits": 3},
        {"quant_method": "awq", "bits": 4, "version": "gemv"},
        {"quant_method": "torchao", "quant_type": "int4_weight_only"},
        {"quant_method": "torchao", "quant_type": {"default": {"_type": "MXDynamicActivationMXWeightConfig"}}},
        _ao("FqnToConfig", fqn_to_config={"_default": {"_type": "NVFP4WeightOnlyConfig"}, "lm_head": None}),
        _ao("Int4WeightOnlyConfig", int4_packing_format={"_type": "Int4PackingFormat", "_data": "PRESHUFFLED"}),
        _ao("Int4WeightOnlyConfig", int4_packing_format="marlin_sparse"),
        {"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-24-bitmask"}},
        _ct("mxfp6-pack-quantized", 6),
        _ct("pack-quantized", 3),
        {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"},
        {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {"a": {"quant_algo": "FP8"}, "b": {"quant_algo": "MXFP8"}},
        },
        {},
    ],
)
def test_unknown_formats_are_refused_with_a_way_out(settings: dict[str, Any]) -> None:
    if not settings:
        assert format_of({"quantization_config": settings}) is None
        return
    with pytest.raises(UnsupportedModelError, match="use another one of the model"):
        format_of({"quantization_config": settings})
