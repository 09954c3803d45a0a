"""What a server computes on, and what it says when blocks fail or memory runs out.

Used by `span_loader`, and by whoever computes or allocates for a client.
"""

import logging
import platform
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import torch

from swarmllm.errors import ConfigurationError, GroupLostError, RemoteProtocolError, ServerOutOfMemoryError, SwarmError
from swarmllm.models.boundary.block_inputs import BESIDE, BlockInputs
from swarmllm.models.span.block_span import BlockSpan
from swarmllm.server.settings import require_device

logger = logging.getLogger(__name__)

OUT_OF_MEMORY = ("DefaultCPUAllocator", "bad_alloc", "out of memory", "ALLOC_FAILED")
"""What is in the messages of plain RuntimeErrors by which torch and its libraries say so, on CPUs above all."""


def resolve_device(name: str) -> torch.device:
    """`auto` = cuda if there is one.

    Raises:
        ConfigurationError: it can't be used here.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    require_device(name)
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:  # torch built without CUDA asserts
        reason = str(error).strip().split("\n")[0].split(". ")[0]  # torch tells a long story of mps
        raise ConfigurationError(f"device {name!r} can't be used here: {reason}") from None


@cache
def hardware_name(device: torch.device, number: int = 1) -> str:
    """What computes, in words that fit an announcement; `number` of them together."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines() if device.type == "cpu" else []
        name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), name)
    return f"{number} × {name}"[:64] if number > 1 else name[:64]


def out_of_memory(error: object) -> ServerOutOfMemoryError | None:
    """What `error` is for a client, if it means that memory ran out; None if it means something else."""
    if isinstance(error, ServerOutOfMemoryError):
        return error
    said_so = isinstance(error, RuntimeError) and any(words in str(error) for words in OUT_OF_MEMORY)
    if not said_so and not isinstance(error, MemoryError | torch.OutOfMemoryError):
        return None
    return ServerOutOfMemoryError("this server ran out of memory: use another one, or ask for less at once")


def log_lacks(errors: Iterable[object]) -> None:
    """Log a line for each of these errors that means that memory ran out, unless it was translated, and logged, before.

    The sessions of one forward share its error, which is one lack.
    """
    for error in {id(error): error for error in errors}.values():
        if not isinstance(error, ServerOutOfMemoryError) and out_of_memory(error):
            reason = f"{type(error).__name__} {error}".strip().split("\n")[0][:300]
            logger.warning("memory ran out, which the client is told: %s", reason)


def lost_context(error: object) -> str | None:
    """What took with it all that this process can compute by: no call will go well any more.

    That is a follower that has gone, or a failure of CUDA that ends the process's context; None if it is neither. An
    index outside its table does so, and a kernel that fails or a device that falls off its bus; lack of memory doesn't.
    To be called in the device thread.
    """
    if isinstance(error, GroupLostError):
        return str(error)
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
    """Translates what libraries raise when memory runs out.

    Raises:
        ServerOutOfMemoryError: what is within ran out of memory.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:  # of which torch's OutOfMemoryError is one
        found = out_of_memory(error)
        if found is None:
            raise
        log_lacks([error])
        raise found from error


@contextmanager
def block_errors_translated() -> Iterator[None]:
    """Translates what blocks raise: inputs that they can't run on are the sender's fault, lack of memory is nobody's.

    Raises:
        RemoteProtocolError, ServerOutOfMemoryError: the blocks within failed.
    """
    try:
        yield
    except SwarmError:
        raise
    except Exception as error:
        if lacking := out_of_memory(error):
            log_lacks([error])
            raise lacking from error
        reason = f"{type(error).__name__}: {str(error).strip().split(chr(10))[0][:300]}"
        raise RemoteProtocolError(f"the blocks can't run on these inputs: {reason}") from error


def on_device(inputs: BlockInputs, blocks: BlockSpan) -> BlockInputs:
    """The inputs as the blocks need them."""
    hidden = inputs.hidden_states
    fits = hidden.device == blocks.device and hidden.dtype == blocks.dtype
    if fits and all(getattr(inputs, name) is None for name in BESIDE):
        return inputs  # the usual case on a CPU
    return inputs.to(blocks.device, blocks.dtype)
