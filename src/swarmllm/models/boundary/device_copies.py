"""Copies between host memory and a device. Small tensors of one dtype go together: each copy costs about as much as one
of 100 KB.

A step of many sessions has many small inputs and outputs. Clients copy their inputs to the host here, the server's
device thread its outputs (`server/device/device`), and `models/span/packing` its inputs to the device.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

SMALL_BYTES = 64 << 10
"""Larger tensors are copied on their own. Assumed: joining them would take longer than another copy."""
ALIGNMENT = 64
"""Bytes. Each tensor begins at a multiple of it, as kernels are compiled anew for tensors at odd addresses."""


def in_host_memory(tensors: Sequence[Tensor], devices: frozenset[torch.device] = frozenset()) -> list[Tensor]:
    """The same tensors in host memory; tensors on a device are copied.

    Returns when all copies are complete, and all work that is queued on `devices`. It doesn't wait for other streams of
    these, where blocks that are offloaded may arrive.

    Raises:
        RuntimeError: the queued work has failed.
    """
    places = [place for place, tensor in enumerate(tensors) if tensor.device.type != "cpu"]
    there = [tensors[place].detach() for place in places]
    finish = begin_copies(there)
    for device in devices.union(one.device for one in there):
        torch.accelerator.current_stream(device).synchronize()
    copies = list(tensors)
    for place, copy in zip(places, finish(), strict=True):
        copies[place] = copy
    return copies


def begin_copies(tensors: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
    """Begin copies to host memory. Call the result for them when the devices have done the work that is queued now."""
    copies: list[Tensor | None] = [None] * len(tensors)
    groups: list[tuple[list[int], Tensor]] = []
    for places in _groups(tensors):
        if len(places) == 1:
            copies[places[0]] = _to_host(tensors[places[0]])
        else:
            groups.append((places, _to_host(torch.cat([tensors[place].flatten() for place in places]))))

    def finish() -> list[Tensor]:
        for places, joined in groups:
            parts = torch.split_with_sizes(joined, [tensors[place].numel() for place in places])
            for place, part in zip(places, parts, strict=True):
                copies[place] = part.clone().view(tensors[place].shape)  # a view would keep the memory of all
        return [copy for copy in copies if copy is not None]

    return finish


def on_device(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """The same tensors on that device; those that are elsewhere, on the host, are copied."""
    places = [place for place, tensor in enumerate(tensors) if tensor.device != device]
    found = list(tensors)
    for place, copy in zip(places, copies_on([tensors[place] for place in places], device), strict=True):
        found[place] = copy
    return found


def copies_on(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Copies of tensors in host memory, on that device. Small ones share memory there, as they are used together."""
    copies: list[Tensor | None] = [None] * len(tensors)
    pin = device.type == "cuda"  # other devices may read the host's memory when it has been freed
    for places in _groups(tensors):
        if len(places) == 1:
            copies[places[0]] = tensors[places[0]].to(device, copy=True)
            continue
        dtype = tensors[places[0]].dtype
        step = ALIGNMENT // dtype.itemsize
        starts = [0]
        for place in places:
            starts.append(starts[-1] + -(-tensors[place].numel() // step) * step)
        joined = torch.empty(starts[-1], dtype=dtype, pin_memory=pin)
        for place, start in zip(places, starts, strict=False):
            _part(joined, start, tensors[place]).copy_(tensors[place])
        there = joined.to(device, non_blocking=pin, copy=True)
        for place, start in zip(places, starts, strict=False):
            copies[place] = _part(there, start, tensors[place])
    return [copy for copy in copies if copy is not None]


def _part(joined: Tensor, start: int, like: Tensor) -> Tensor:
    return joined[start : start + like.numel()].view(like.shape)


def _to_host(tensor: Tensor) -> Tensor:
    pin = tensor.device.type == "cuda"  # without pinned memory, each copy would wait for the device
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pin)
    return copy.copy_(tensor, non_blocking=pin)


def _groups(tensors: Sequence[Tensor]) -> list[list[int]]:
    """The places of tensors that are copied together."""
    groups: dict[object, list[int]] = {}
    for place, tensor in enumerate(tensors):
        is_small = tensor.nbytes <= SMALL_BYTES
        groups.setdefault((tensor.device, tensor.dtype) if is_small else place, []).append(place)
    return list(groups.values())
