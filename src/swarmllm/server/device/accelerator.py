"""A device that computes beside the thread that asks it to, and what that thread has to know of it.

A call of such a device returns as soon as the work has been queued. So the device thread, when it has asked for
something, waits here until it is there, in host memory. Else times would be those of queueing instead of computing,
whoever reads an output next (the event loop) would wait for the device, and what is kept would fill its memory.
Made by `span_loader`, used by `device_thread`; tests put one in its place that computes when they want it to.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from swarmllm.models.boundary.block_inputs import queued_copy


class Accelerator(Protocol):
    """What the device thread needs of a device that isn't the processor itself."""

    def fetch(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return when all that was asked of the device before is done: copies in host memory.

        Raises:
            RuntimeError: what was asked for has failed.
        """


class DeviceStream:
    """The stream of a device of torch on which this thread computes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def fetch(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        copies = [queued_copy(tensor) if tensor.device == self._device else tensor for tensor in tensors]
        # Not the whole device, on which blocks that are offloaded may be on their way beside it.
        torch.accelerator.current_stream(self._device).synchronize()
        return copies


def accelerator_of(device: torch.device) -> Accelerator | None:
    """None for a processor, which is done when a call returns."""
    return None if device.type == "cpu" else DeviceStream(device)
