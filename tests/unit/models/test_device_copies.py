"""Copies between host memory and a device: small tensors go together, and come out as they were."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from swarmllm.models.boundary.block_inputs import BlockInputs, all_on_device
from swarmllm.models.boundary.device_copies import (
    ALIGNMENT,
    SMALL_BYTES,
    begin_copies,
    copies_on,
    in_host_memory,
    on_device,
)

CPU, META = torch.device("cpu"), torch.device("meta")


def to_device(tensors: Sequence[Tensor]) -> list[Tensor]:
    return copies_on(tensors, CPU)


def to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    return begin_copies(tensors)()


@pytest.fixture
def tensors() -> list[Tensor]:
    random = torch.Generator().manual_seed(0)
    floats = [torch.randn(shape, generator=random) for shape in ((1, 1, 33), (2, 1, 33), (1, 3, 7), (0, 4), ())]
    large = torch.randn(2, SMALL_BYTES, generator=random)
    strided = torch.randn(4, 6, generator=random).t()
    integers = [torch.arange(5)[None], torch.ones(1, 9, dtype=torch.int64)]
    halves = [tensor.bfloat16() for tensor in floats]
    return [*floats, large, *integers, strided, torch.tensor([True, False]), *halves]


@pytest.mark.parametrize("copy", [to_device, to_host])
def test_copies_are_equal(copy: Callable[[Sequence[Tensor]], list[Tensor]], tensors: list[Tensor]) -> None:
    copies = copy(tensors)
    assert len(copies) == len(tensors)
    for found, tensor in zip(copies, tensors, strict=True):
        assert found.dtype == tensor.dtype
        assert torch.equal(found, tensor)
        assert not tensor.numel() or found.data_ptr() != tensor.data_ptr()


def test_small_tensors_of_a_dtype_are_copied_at_once(monkeypatch: pytest.MonkeyPatch, tensors: list[Tensor]) -> None:
    copied: list[int] = []
    to = Tensor.to

    def count(tensor: Tensor, *args: object, **options: object) -> Tensor:
        copied.append(tensor.numel())
        return to(tensor, *args, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(Tensor, "to", count)
    copies = copies_on(tensors, CPU)
    assert len(copied) == 5  # float32, the large one, int64, bool, bfloat16
    assert all(copy.data_ptr() % ALIGNMENT == copies[0].data_ptr() % ALIGNMENT for copy in copies[:3])


def test_copies_on_the_host_own_their_memory(tensors: list[Tensor]) -> None:
    """A session may keep its outputs for long, and the others of its step may not."""
    for copy in to_host(tensors):
        assert copy.untyped_storage().nbytes() == copy.nbytes


def test_what_is_there_is_not_copied(tensors: list[Tensor]) -> None:
    assert all(map(lambda one, other: one is other, on_device(tensors, CPU), tensors))
    assert all(map(lambda one, other: one is other, in_host_memory(tensors), tensors))
    there = torch.empty(3, device=META)
    moved = on_device([*tensors, there], META)
    assert moved[-1] is there
    assert [(one.device, one.shape) for one in moved[:-1]] == [(META, tensor.shape) for tensor in tensors]


def test_calls_are_moved_with_all_their_tensors() -> None:
    calls = [
        BlockInputs(
            hidden_states=torch.randn(1, length, 8),
            batch_size=1,
            seq_len=length,
            attention_mask=torch.ones(1, length, dtype=torch.int64),
            of_texts_alone=True,
        )
        for length in (1, 2, 5)
    ]
    for call, moved in zip(calls, all_on_device(calls, META), strict=True):
        assert {name: (one.device, one.shape) for name, one in moved.tensors().items()} == {
            name: (META, one.shape) for name, one in call.tensors().items()
        }
        assert (moved.seq_len, moved.of_texts_alone) == (call.seq_len, True)
