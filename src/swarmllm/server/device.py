"""What a server computes on, and how many blocks its memory takes; used by `server/server`."""

import psutil
import torch

from swarmllm.errors import ConfigurationError

MEMORY_SHARE = 0.8
"""Of the free memory that blocks may take when their number isn't given. Assumed: the rest is cache and activations."""


def resolve_device(name: str) -> torch.device:
    """`auto` = cuda if there is one.

    Raises:
        ConfigurationError: it can't be used here.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:  # torch built without CUDA asserts
        reason = str(error).strip().split("\n")[0]
        raise ConfigurationError(f"device {name!r} can't be used here: {reason}") from None


def num_blocks_that_fit(block_bytes: list[int], device: torch.device) -> int:
    """How many blocks of these sizes the free memory takes.

    Raises:
        ConfigurationError: not even one.
    """
    free: int = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
    num_blocks = int(free * MEMORY_SHARE) // max(block_bytes)
    if num_blocks == 0:
        raise ConfigurationError(
            f"not even one block fits into the memory of {device}: it takes {max(block_bytes) / 1e9:.2f} GB, "
            f"{free / 1e9:.2f} GB are free"
        )
    return min(num_blocks, len(block_bytes))
