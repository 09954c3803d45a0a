"""Weights in huge pages: the same numbers, in memory that is given back."""

import gc
from pathlib import Path

import pytest
import torch
from tiny_models import save_tiny
from torch import Tensor, nn

from swarmllm import machine_memory
from swarmllm.data_structures import Span
from swarmllm.machine_memory import CHUNK_BYTES, HUGE_PAGE_BYTES, into_huge_pages
from swarmllm.models.checkpoint.checkpoint import open_checkpoint
from swarmllm.models.quantization import Quantization, QuantizedWeight
from swarmllm.models.span import loading
from swarmllm.models.span.loading import load_block_span

only_with_huge_pages = pytest.mark.skipif(not machine_memory._has_huge_pages(), reason="the system has none")


def is_mapped(address: int) -> bool:
    lines = Path("/proc/self/maps").read_text().splitlines()
    areas = ([int(one, 16) for one in line.split()[0].split("-")] for line in lines)
    return any(start <= address < end for start, end in areas)


@only_with_huge_pages
def test_they_hold_the_same_numbers_and_are_given_back() -> None:
    large = torch.randn(3 * HUGE_PAGE_BYTES // 4 + 16)
    many = [
        torch.randn(1 << idx, 1 << 6).to(dtype) for idx in range(9, 14) for dtype in (torch.float32, torch.bfloat16)
    ]
    huge = torch.arange(CHUNK_BYTES // 4 + 1)
    copies = [into_huge_pages(one) for one in (large, *many, huge)]
    for one, copy in zip((large, *many, huge), copies, strict=True):
        assert torch.equal(one, copy)
        assert copy.dtype == one.dtype
        assert copy.untyped_storage().nbytes() == one.nbytes  # or copies and files of it would take the whole chunk
        assert copy.data_ptr() % 64 == 0
    assert copies[-1].data_ptr() % HUGE_PAGE_BYTES == 0
    addresses = sorted(copy.data_ptr() for copy in copies[:-1])
    assert addresses[-1] - addresses[0] < 2 * CHUNK_BYTES  # they are side by side
    addresses.append(copies[-1].data_ptr())
    assert all(map(is_mapped, addresses))
    del copies, copy
    gc.collect()
    assert not any(map(is_mapped, addresses))


@only_with_huge_pages
def test_weights_of_blocks_have_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that aren't quantized in the same place of a line, which can change the last bits of torch's sums."""
    monkeypatch.setattr(machine_memory, "WORTH_MOVING_BYTES", 1)
    moved: list[Tensor] = []
    places: list[tuple[int, int]] = []

    def recorded(tensor: Tensor, *, same_place: bool = False) -> Tensor:
        moved.append(into_huge_pages(tensor, same_place=same_place))
        places.append((tensor.data_ptr() % 64, moved[-1].data_ptr() % 64))
        return moved[-1]

    monkeypatch.setattr(loading, "into_huge_pages", recorded)
    save_tiny("llama", tmp_path)
    checkpoint = open_checkpoint(str(tmp_path))
    blocks = load_block_span(checkpoint, Span(0, 2), progress=False)
    linears = [one for one in blocks.slots.modules() if isinstance(one, nn.Linear)]
    assert len(linears) == 2 * 7
    assert {one.weight.data_ptr() for one in linears} == {tensor.data_ptr() for tensor in moved}
    assert all(before == after for before, after in places)
    moved.clear()
    blocks = load_block_span(checkpoint, Span(0, 2), quantization=Quantization("int8", smallest=1), progress=False)
    weights = [one for one in blocks.slots.modules() if isinstance(one, QuantizedWeight)]
    assert len(weights) == 2 * 7
    held = {tensor.data_ptr() for one in weights for tensor in one.packed.tensors().values()}
    assert held == {tensor.data_ptr() for tensor in moved}


def test_without_them_nothing_is_copied(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine_memory, "HUGE_PAGES", tmp_path / "enabled")
    one = torch.ones(1 << 20)
    assert into_huge_pages(one) is one
    machine_memory.HUGE_PAGES.write_text("always madvise [never]")
    assert into_huge_pages(one) is one
    machine_memory.HUGE_PAGES.write_text("always [madvise] never")
    assert into_huge_pages(one) is not one


def test_small_tensors_and_views_stay_where_they_are() -> None:
    for one in (torch.ones(8), torch.ones(512, 512).T[:, ::2]):
        assert into_huge_pages(one) is one
