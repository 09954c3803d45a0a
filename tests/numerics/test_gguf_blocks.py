"""GGUF's blocks of weights: what package gguf makes of the same bytes, and products with them while they are packed."""

import hashlib

import pytest
import torch
import torch.nn.functional as F
from gguf_writer import BLOCKS
from safetensors import safe_open
from tests.kernel_levels import LEVELS
from torch import Tensor

from swarmllm.models.quantization import kernels
from swarmllm.models.quantization.decoded import FORMS, KERNELS, KINDS, GgufBlocks, dequantize
from swarmllm.models.quantization.loading import check_matrix

KIND_IDS = sorted(KINDS)
NAMES = [KINDS[kind][0] for kind in KIND_IDS]


def frozen(kind: int) -> tuple[Tensor, str]:
    """Rows of blocks, and the SHA-256 of their weights as float32."""
    with safe_open(BLOCKS, framework="pt") as file:
        return file.get_tensor(str(kind)), file.metadata()[str(kind)]


def sha256(weight: Tensor) -> str:
    return hashlib.sha256(weight.contiguous().numpy().tobytes()).hexdigest()


def packed(kind: int, dtype: torch.dtype = torch.float32) -> GgufBlocks:
    return FORMS[kind](frozen(kind)[0], dtype)


def test_every_frozen_kind_is_tested() -> None:
    with safe_open(BLOCKS, framework="pt") as file:
        assert sorted(map(int, file.keys())) == KIND_IDS
    assert {KINDS[kind][0] for kind in KERNELS} >= {"Q4_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K"}


@pytest.mark.parametrize("kind", KIND_IDS, ids=NAMES)
def test_weights_are_those_of_package_gguf(kind: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, expected = frozen(kind)
    assert sha256(dequantize(kind, rows)) == expected
    for level in LEVELS:
        monkeypatch.setattr(kernels, "level", lambda level=level: level)
        assert sha256(packed(kind).dequantize()) == expected
    monkeypatch.setattr(kernels, "library", lambda: None)
    assert sha256(packed(kind).dequantize()) == expected


@pytest.mark.parametrize("kind", KIND_IDS, ids=NAMES)
def test_bits(kind: int) -> None:
    matrix, (_, weights, size) = packed(kind), KINDS[kind]
    assert [one.numel() * 8 for one in matrix.tensors().values()] == [matrix.shape.numel() * size * 8 // weights]


@pytest.mark.parametrize("kind", KIND_IDS, ids=NAMES)
def test_for_cuda_some_become_codes_and_scales_that_are_the_same_weights(kind: int) -> None:
    matrix = packed(kind)
    assert matrix.for_device(torch.device("cpu")) is matrix
    found = matrix.for_device(torch.device("cuda"))
    assert (found is matrix) == (KINDS[kind][0] not in ("Q4_0", "Q8_0"))
    assert (found.cuda_matrix() is None) == (found is matrix)
    assert torch.equal(found.dequantize(), matrix.dequantize())
    assert sum(one.nbytes for one in found.tensors().values()) == matrix.codes.nbytes
    experts = FORMS[kind](torch.stack([matrix.codes, matrix.codes.flip(0)]), torch.float32)
    found = experts.for_device(torch.device("cuda"))
    assert torch.equal(found[1].dequantize(), experts[1].dequantize())


@pytest.mark.parametrize("without_kernels", [False, True], ids=["kernels", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KIND_IDS, ids=NAMES)
def test_products_and_gradients(
    kind: int, dtype: torch.dtype, without_kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if without_kernels:
        monkeypatch.setattr(kernels, "library", lambda: None)
    for tokens in (1, 3, 16, 17, 40):
        check_matrix(packed(kind, dtype), tokens)


@pytest.mark.skipif(kernels.library() is None, reason="swarmllm was installed without a C compiler")
@pytest.mark.parametrize("columns", [32, 160, 1024 + 96])
def test_rows_that_are_no_multiple_of_what_kernels_decode_at_once(columns: int) -> None:
    rows, _ = frozen(2)
    matrix = FORMS[2](rows.flatten()[: 4 * columns // 32 * 18].view(4, -1).contiguous(), torch.float32)
    assert torch.equal(matrix.dequantize(), dequantize(2, matrix.codes))
    for tokens in (1, 5):
        check_matrix(matrix, tokens)


@pytest.mark.skipif(kernels.library() is None, reason="swarmllm was installed without a C compiler")
@pytest.mark.parametrize("kind", sorted(KERNELS), ids=[KINDS[kind][0] for kind in sorted(KERNELS)])
@pytest.mark.parametrize("level", LEVELS)
def test_a_product_does_not_depend_on_other_rows(kind: int, level: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "level", lambda: level)
    monkeypatch.setattr(kernels, "WORTH_A_THREAD", 1)
    matrix = packed(kind)
    inputs = torch.randn(16, matrix.shape[-1], generator=torch.Generator().manual_seed(1))
    together = matrix.multiply(inputs)
    torch.testing.assert_close(together, F.linear(inputs, matrix.dequantize()), rtol=1e-5, atol=1e-4)
    for threads in (1, 3):  # of eight rows, and of two or three: some kinds take four at once
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        for count in range(1, 17):
            assert torch.equal(matrix.multiply(inputs[16 - count :]), together[16 - count :])
