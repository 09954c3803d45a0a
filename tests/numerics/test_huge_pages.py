"""Weights in huge pages: the same numbers, in memory that is given back."""

import gc
import mmap
from pathlib import Path

import pytest
import torch
from torch import Tensor

from swarmllm import machine_memory
from swarmllm.machine_memory import CHUNK_BYTES, HUGE_PAGE_BYTES, into_huge_pages


def mapped(tensor: Tensor) -> str:
    """The line of the process's memory map that has the tensor's first byte."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(one, 16) for one in line.split()[0].split("-"))
        if start <= tensor.data_ptr() < end:
            return line
    return ""


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="Linux only")
def test_huge_pages_hold_the_same_numbers_and_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_memory, "_huge_pages", machine_memory._HugePages())
    large = torch.randn(3 * HUGE_PAGE_BYTES // 4 + 16)
    many = [
        torch.randn(1 << idx, 1 << 6).to(dtype) for idx in range(9, 14) for dtype in (torch.float32, torch.bfloat16)
    ]
    copies = [into_huge_pages(one) for one in (large, *many)]
    for one, copy in zip((large, *many), copies, strict=True):
        assert torch.equal(one, copy)
        assert copy.dtype == one.dtype
        assert copy.untyped_storage().nbytes() == one.nbytes  # or copies and files of it would take the whole chunk
        assert copy.data_ptr() % 64 == 0
    addresses = {mapped(copy) for copy in copies}
    assert len(addresses) == 1  # they share a chunk
    huge = into_huge_pages(torch.zeros(CHUNK_BYTES // 4 + 1))
    assert huge.data_ptr() % HUGE_PAGE_BYTES == 0
    huge_pages = machine_memory._huge_pages
    monkeypatch.undo()
    del huge_pages, copies, copy
    gc.collect()
    assert not addresses & set(Path("/proc/self/maps").read_text().splitlines())


def test_small_tensors_and_views_stay_where_they_are() -> None:
    for one in (torch.ones(8), torch.ones(512, 512).T[:, ::2]):
        assert into_huge_pages(one) is one
