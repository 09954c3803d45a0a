"""The kernels for AVX2 with AVX-VNNI, on processors that have the same instructions in AVX-512's form only."""

import ctypes
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests.numerics.test_strips import KINDS_IN_STRIPS, block, row_by_row
from torch import Tensor

from swarmllm.models.quantization import kernels

SOURCES = Path(kernels.__file__).parent
OTHER_FORM = {"avxvnni": "avx512vnni,avx512vl", "_mm256_dpbusd_avx_epi32": "_mm256_dpbusd_epi32"}
AVX512_VNNI = 4

pytestmark = [
    pytest.mark.skipif(kernels.strips_version() < AVX512_VNNI, reason="this processor lacks AVX-512's VNNI"),
    pytest.mark.skipif(shutil.which("gcc") is None or not list(SOURCES.glob("strips.h")), reason="compiles"),
]


@pytest.fixture(scope="module")
def in_other_form(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """The library, with the functions for AVX-VNNI in place of those that the processor has."""
    directory = tmp_path_factory.mktemp("avx_vnni")
    names = [path.name for path in SOURCES.glob("*.h")] + ["strips_3_vnni.c", "int8_3_vnni.c"]
    for name in names:
        text = (SOURCES / name).read_text()
        for one, other in OTHER_FORM.items():
            text = text.replace(one, other)
        (directory / name).write_text(text)
    options = ["-O3", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC"]
    subprocess.run(["gcc", *options, *names[-2:], "-o", "kernels.so"], cwd=directory, check=True, capture_output=True)
    compiled, library = ctypes.CDLL(str(directory / "kernels.so")), kernels.library()
    for name, skipped in (("prepare_inputs", 0), ("multiply_strips", 0), ("round_inputs", 1), ("multiply_rounded", 1)):
        of_version = getattr(compiled, f"swarmllm_{name}_vnni_3")  # its version isn't among its arguments
        of_version.argtypes = getattr(library, f"swarmllm_{name}").argtypes[skipped:]
        of_version.restype = None
    return SimpleNamespace(
        swarmllm_strips_version=lambda _: 3,
        swarmllm_arrange=library.swarmllm_arrange,
        swarmllm_rounded_bytes=library.swarmllm_rounded_bytes,
        swarmllm_prepare_inputs=compiled.swarmllm_prepare_inputs_vnni_3,
        swarmllm_multiply_strips=compiled.swarmllm_multiply_strips_vnni_3,
        swarmllm_round_inputs=lambda _, *arguments: compiled.swarmllm_round_inputs_vnni_3(*arguments),
        swarmllm_multiply_rounded=lambda _, *arguments: compiled.swarmllm_multiply_rounded_vnni_3(*arguments),
    )


def products(kind: int | None, columns: int, inputs: Tensor) -> list[Tensor]:
    rows = row_by_row(kind, 48, columns, torch.Generator().manual_seed(columns), torch.float32)
    codes = kernels.into_strips(rows.codes, kind)
    if kind is None:
        strips = kernels.MatrixInStrips(codes, rows.scale[:, None])
    else:
        strips = kernels.MatrixInStrips(codes, gguf=(kind, columns))
    return [strips.multiply(inputs), strips.multiply_rounded(inputs), rows._matrix().multiply_rounded(inputs)]


@pytest.mark.parametrize("kind", KINDS_IN_STRIPS, ids=str)
def test_products_are_the_same_to_the_last_bit(
    kind: int | None, in_other_form: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(1)
    for blocks in (1, 3, 2048 // block(kind) + 1):
        columns = blocks * block(kind)
        for num_inputs in (1, 2, 3, 4, 5, 67):
            inputs = torch.randn(num_inputs, columns, generator=generator)
            inputs *= torch.randn(num_inputs, columns, generator=generator).mul(3).exp()
            expected = products(kind, columns, inputs)
            with monkeypatch.context() as patch:
                patch.setattr(kernels, "library", lambda: in_other_form)
                found = products(kind, columns, inputs)
            assert all(map(torch.equal, found, expected))
