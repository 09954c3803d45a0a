"""Blocks that are in the memory of the device only while they compute.

A GPU's blocks lie in pinned host memory, a processor's in a file. Each block is one flat buffer there, and comes as a
whole into one of a few slots of the device: the next block while one computes (peer memory pooling, EnergonAI, section
4.4). A block that has left its slot is NaN, so that a mistaken read is noticed.

Autograd would keep views of slots for the backward, but by then a slot holds another block. Instead it keeps the
block's number and a place in it, and the backward fetches the block again. `loading` makes it, `BlockSpan` uses it.
"""

import errno
import logging
import os
import tempfile
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from swarmllm.data_structures import Span
from swarmllm.errors import ConfigurationError, ServerOverloadedError

logger = logging.getLogger(__name__)

SLOTS = 2
"""Most offloaded blocks on the device at a time: one that computes, and one on its way."""
ALIGNMENT = 64
"""A tensor's address in a slot and in memory differ by a multiple of this. Seen in 8 of 130 architectures: with its
weight at another offset, a processor adds up a product in another order, and rounds it differently."""


def num_slots(num_offloaded: int) -> int:
    """`SLOTS`, but fewer than there are blocks: otherwise offloading would save nothing."""
    return min(SLOTS, max(num_offloaded - 1, 0))


def spread(span: Span, num_offloaded: int) -> list[int]:
    """Choose the blocks of a span to offload: evenly between the others, whose computing hides the copies."""
    return [span.start + (place + 1) * len(span) // num_offloaded - 1 for place in range(num_offloaded)]


@dataclass(frozen=True)
class _Place:
    """The place of one tensor in the flat buffer of its block."""

    start: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]

    def view(self, flat: Tensor) -> Tensor:
        """The tensor in a flat buffer of bytes."""
        return flat.view(self.dtype).as_strided(self.shape, self.stride, self.start // self.dtype.itemsize)


@dataclass(frozen=True, eq=False)
class _Block:
    tensors: list[Tensor]
    """The parameters and buffers of the block, whose data are exchanged."""
    absent: list[Tensor]
    """Their data while the block is elsewhere."""
    places: list[_Place]
    num_bytes: int


@dataclass(eq=False)
class _Slot:
    """Memory of the device for one block."""

    flat: Tensor
    block_idx: int | None = None
    arrived: Callable[[], object] = lambda: None
    """Waits until the block is there; raises the error of its copy."""


class _Home(Protocol):
    """A store of blocks."""

    def keep(self, block_idx: int, flat: Tensor) -> None:
        """Take in a block."""

    def fetch(self, block_idx: int, slot: Tensor) -> Callable[[], object]:
        """Begin to copy a block to `slot`, after the computing with the slot has ended; returns a function that waits
        for it."""


class _File:
    """A store on disk, for processors: a file without a name, which is gone as soon as the process is."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        with self._refusals_translated():
            directory.mkdir(parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=directory, buffering=0)  # noqa: SIM115 - open as long as there are blocks
        weakref.finalize(self, self._file.close)
        self._starts: dict[int, int] = {}

    @contextmanager
    def _refusals_translated(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ConfigurationError(
                f"the blocks that --offload takes out of memory can't be written to {self._directory} "
                f"({error.strerror}): make room there, or name another directory by SWARMLLM_CACHE"
            ) from error

    def keep(self, block_idx: int, flat: Tensor) -> None:
        left = flat.numpy().data
        with self._refusals_translated():
            self._starts[block_idx] = self._file.seek(0, 2)
            while left:
                left = left[self._file.write(left) :]

    def fetch(self, block_idx: int, slot: Tensor) -> Callable[[], object]:
        reader = ThreadPoolExecutor(1, thread_name_prefix="swarmllm-offload")
        reading = reader.submit(self._read, self._starts[block_idx], slot.numpy().data)
        reader.shutdown(wait=False)  # its thread ends with the copy, and so before the blocks
        return reading.result

    def _read(self, start: int, left: memoryview) -> None:
        try:
            while left:
                count = os.preadv(self._file.fileno(), [left], start)
                if not count:
                    raise OSError(errno.EIO, "the file ends too early")
                start, left = start + count, left[count:]
        except OSError as error:  # only the owner of the server can mend it
            logger.error("can't read offloaded blocks from %s: %s", self._directory, error.strerror)
            raise ServerOverloadedError(
                f"this server can't read the blocks that it has offloaded ({error.strerror}): use another one"
            ) from error


class _PinnedMemory:
    """A store in host memory, for a GPU, which copies during computing."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._flats = device, dict[int, Tensor]()
        self._copying = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def keep(self, block_idx: int, flat: Tensor) -> None:
        self._flats[block_idx] = flat.pin_memory()

    def fetch(self, block_idx: int, slot: Tensor) -> Callable[[], object]:
        self._copying.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._copying):
            slot.copy_(self._flats[block_idx], non_blocking=True)
            arrived = self._copying.record_event()
        return lambda: torch.cuda.current_stream(self._device).wait_event(arrived)


class OffloadedBlocks:
    """Some blocks of a span. `take` gets them one after the other while they are loaded; used by the device thread."""

    def __init__(self, device: torch.device, directory: Path) -> None:
        """`directory` is for the file of a processor.

        Raises:
            ConfigurationError: there can't be a file, or blocks can't be offloaded from such a device.
        """
        if device.type not in ("cpu", "cuda"):
            raise ConfigurationError(f"--offload is for CPUs and GPUs with CUDA, not for {device}: leave it out")
        self._device = device
        self._home: _Home = _PinnedMemory(device) if device.type == "cuda" else _File(directory)
        self._blocks: dict[int, _Block] = {}
        self._slots: list[_Slot] = []
        """The slots; the one that was used last is at the end."""

    def __len__(self) -> int:
        return len(self._blocks)

    def slots(self) -> dict[int, int]:
        """The device's memory for all of them: the address of each slot, and its bytes."""
        return {slot.flat.data_ptr(): slot.flat.nbytes for slot in self._slots}

    @property
    def tensors(self) -> list[Tensor]:
        """Parameters and buffers of all blocks; their data are exchanged."""
        return [tensor for block in self._blocks.values() for tensor in block.tensors]

    def take(self, block_idx: int, block: nn.Module) -> None:
        """Move a block's weights out of memory; from now on they are fetched when it is called.

        Raises:
            ConfigurationError: there is no room for them.
        """
        tensors = list({id(tensor): tensor for tensor in (*block.parameters(), *block.buffers())}.values())
        places, end = [], 0
        for tensor in tensors:
            stride = torch.empty_like(tensor, device="meta").stride()  # its own, where there are no holes in it
            start = end + (tensor.data_ptr() - end) % ALIGNMENT
            start += -start % tensor.dtype.itemsize
            places.append(_Place(start, tensor.dtype, tensor.shape, stride))
            end = start + tensor.nbytes
        end += -end % ALIGNMENT
        flat = torch.zeros(end, dtype=torch.uint8)
        for place, tensor in zip(places, tensors, strict=True):
            place.view(flat).copy_(tensor.detach())
        self._home.keep(block_idx, flat)
        kept = _Block(tensors, [_absent(tensor, self._device) for tensor in tensors], places, end)
        self._blocks[block_idx] = kept
        _point(tensors, kept.absent)
        block.register_forward_pre_hook(partial(self._enter, block_idx))

    def _enter(self, block_idx: int, *_: Any) -> None:
        """Prepare a block that computes now, and begin to fetch the one after it, which is likely to be next."""
        slot = self._here(block_idx)
        block = self._blocks[block_idx]
        _point(block.tensors, [place.view(slot.flat) for place in block.places])
        self._expect(self._neighbour(block_idx, 1))

    @contextmanager
    def saved_for_backward(self) -> Iterator[None]:
        """Within: autograd keeps tensors of these blocks by block number and place."""
        with torch.autograd.graph.saved_tensors_hooks(self._name, self._named):
            yield

    def _name(self, tensor: Tensor) -> Tensor | tuple[int, _Place]:
        storage = tensor.untyped_storage().data_ptr()
        for slot in self._slots:
            if slot.flat.data_ptr() == storage and slot.block_idx is not None:
                start = int(tensor.storage_offset()) * tensor.dtype.itemsize
                return slot.block_idx, _Place(start, tensor.dtype, tensor.shape, tensor.stride())
        return tensor.detach()  # the tensor would keep its graph alive, and the graph the tensor

    def _named(self, saved: Tensor | tuple[int, _Place]) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        block_idx, place = saved
        slot = self._here(block_idx)
        self._expect(self._neighbour(block_idx, -1))
        return place.view(slot.flat)

    def _here(self, block_idx: int) -> _Slot:
        """The slot that holds the block, after waiting for it."""
        slot = self._fetched(block_idx)
        self._slots.remove(slot)
        self._slots.append(slot)
        try:
            slot.arrived()
        except BaseException:
            slot.block_idx = None
            raise
        return slot

    def _expect(self, block_idx: int) -> None:
        """Begin to fetch a block, if there is a slot for it besides the one in use."""
        if len(self._slots) > 1:
            self._fetched(block_idx)

    def _fetched(self, block_idx: int) -> _Slot:
        if not self._slots:
            size = max(block.num_bytes for block in self._blocks.values())
            self._slots = [
                _Slot(torch.empty(size, dtype=torch.uint8, device=self._device)) for _ in range(num_slots(len(self)))
            ]
        for slot in self._slots:
            if slot.block_idx == block_idx:
                return slot
        slot = self._slots[0]
        self._leave(slot)
        slot.arrived = self._home.fetch(block_idx, slot.flat[: self._blocks[block_idx].num_bytes])
        slot.block_idx = block_idx
        return slot

    def _leave(self, slot: _Slot) -> None:
        """Take the block out of this slot."""
        if slot.block_idx is None:
            return
        before = self._blocks[slot.block_idx]
        _point(before.tensors, before.absent)
        slot.block_idx = None
        with suppress(Exception):  # no call waits for this copy
            slot.arrived()  # two copies to one place would mix

    def _neighbour(self, block_idx: int, step: int) -> int:
        order = sorted(self._blocks)
        return order[(order.index(block_idx) + step) % len(order)]


def _absent(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the same shape, with next to no memory: NaN, or 0 where there are no such numbers."""
    value = float("nan") if tensor.is_floating_point() else 0
    return torch.full((), value, dtype=tensor.dtype, device=device).expand(tensor.shape)


def _point(tensors: list[Tensor], data: list[Tensor]) -> None:
    for tensor, new in zip(tensors, data, strict=True):
        tensor.data = new
