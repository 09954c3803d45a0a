"""Tensors that leave a device: one copy each, all queued before the first is waited for.

Used on servers by the device thread for what blocks have computed, and on clients for what goes to servers.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def queued_copy(tensor: Tensor) -> Tensor:
    """A copy in host memory, which is there when its device has done all that it was asked for until now."""
    pin = tensor.device.type == "cuda"  # or the copy would be one after the other with its own waiting
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pin)
    return copy.copy_(tensor, non_blocking=pin)


def in_host_memory(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The same tensors, those on a device as copies; returns when all are there."""
    copies = [tensor if tensor.device.type == "cpu" else queued_copy(tensor.detach()) for tensor in tensors]
    for device in {tensor.device for tensor in tensors} - {torch.device("cpu")}:
        torch.accelerator.current_stream(device).synchronize()
    return copies
