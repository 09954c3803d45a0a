"""What a server computes on, how many blocks its memory takes, and what it says when memory runs out.

Used by `server/server`, and by whoever computes or allocates for a client.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import torch

from swarmllm.errors import ConfigurationError, ServerOutOfMemoryError

MEMORY_SHARE = 0.8
"""Of the free memory that blocks may take when their number isn't given. Assumed: the rest is cache and activations."""

OUT_OF_MEMORY = ("DefaultCPUAllocator", "bad_alloc", "out of memory", "ALLOC_FAILED")
"""What is in the messages of plain RuntimeErrors by which torch and its libraries say so, on CPUs above all."""


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


def out_of_memory(error: object) -> ServerOutOfMemoryError | None:
    """What `error` is for a client, if it means that memory ran out; None if it means something else."""
    if isinstance(error, ServerOutOfMemoryError):
        return error
    said_so = isinstance(error, RuntimeError) and any(words in str(error) for words in OUT_OF_MEMORY)
    if not said_so and not isinstance(error, MemoryError | torch.OutOfMemoryError):
        return None
    return ServerOutOfMemoryError("this server ran out of memory: use another one, or ask for less at once")


def lost_context(error: object) -> str | None:
    """What CUDA says, if `error` has taken this process's whole context with it: no call will go well any more.

    None if it hasn't. An index outside its table does so, and a kernel that fails or a device that falls off its bus;
    lack of memory doesn't. To be called in the device thread.
    """
    if not isinstance(error, RuntimeError) or "CUDA" not in str(error):
        return None
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    try:
        torch.cuda.synchronize()
    except RuntimeError as lost:
        return str(lost).strip().split("\n")[0]
    return None


@contextmanager
def memory_errors_translated() -> Iterator[None]:
    """Raises ServerOutOfMemoryError when what is within runs out of memory."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:  # of which torch's OutOfMemoryError is one
        found = out_of_memory(error)
        if found is None:
            raise
        raise found from error
