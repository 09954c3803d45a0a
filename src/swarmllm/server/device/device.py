"""The device that computes the blocks: its name, its memory, its queue, and the errors of blocks that fail on it.

`span_loader` chooses a device and counts its memory, and `swarmllm doctor` does the same without blocks. The device
thread waits for an accelerator here: a call of one returns as soon as the work is queued. Without the wait, measured
times would be those of queueing, the event loop would wait for the device when it reads an output, and kept outputs
would fill the device's memory. Tests replace the accelerator by one that computes when they want it to.
"""

import logging
import platform
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from swarmllm.errors import ConfigurationError, GroupLostError, RemoteProtocolError, ServerOutOfMemoryError, SwarmError
from swarmllm.machine_memory import available_memory_bytes, total_memory_bytes
from swarmllm.models.architecture import as_config_says, is_encoder, text_config
from swarmllm.models.boundary.block_inputs import BESIDE, BlockInputs, queued_copy
from swarmllm.models.span.block_span import BlockSpan
from swarmllm.models.span.offload import num_slots
from swarmllm.server.settings import memory_limit_bytes, require_device

logger = logging.getLogger(__name__)

OUT_OF_MEMORY = ("DefaultCPUAllocator", "bad_alloc", "out of memory", "ALLOC_FAILED")
"""What is in the messages of plain RuntimeErrors by which torch and its libraries say so, on CPUs above all."""

FREE_SHARE = 0.8
"""Share of the free memory for blocks and caches if nothing else is said. Assumed: activations take the rest."""
COUNTED_TOKENS = 8192
"""Tokens of cache that each block is counted with when a server chooses how many to take. Assumed: some chats of 2048
tokens. With all 65536 of the default, a block of Llama-2-7B would count as six."""
LEAST_TOKENS = 256
"""With less room for sessions, nobody could use the blocks."""
PAGES_SHARE = 1 / 8
"""Most of the memory left beside the blocks that prompts kept for others may take."""
ADAPTERS_SHARE = 1 / 16
ADAPTERS_BYTES = 2 << 30
"""The same for adapters that clients send, of all clients together. Assumed: small beside their caches."""
OWN_MEMORY = ("cuda", "xpu")
"""Kinds of devices that have some; others compute in the processor's."""


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


def free_bytes(device: torch.device) -> int:
    """Memory of the device that nobody uses and this process may."""
    if device.type in OWN_MEMORY:
        return int(getattr(torch, device.type).mem_get_info(device)[0])
    return available_memory_bytes()


def total_bytes(device: torch.device) -> int:
    """All memory of the device."""
    if device.type in OWN_MEMORY:
        return int(getattr(torch, device.type).mem_get_info(device)[1])
    return total_memory_bytes()


def usable_bytes(device: torch.device, max_memory: str | None = None) -> int:
    """What blocks and caches may take now in all; `max_memory` as in the server's settings."""
    if max_memory is None:
        return int(free_bytes(device) * FREE_SHARE)
    return memory_limit_bytes(max_memory, total_bytes(device))


def cache_bytes_per_token(config: PreTrainedConfig, dtype: torch.dtype) -> int:
    """About what one position of a session takes on one block, by the config: on the safe side where blocks differ.

    Once blocks are loaded, it is measured.
    """
    if is_encoder(config):
        return 0
    config = text_config(config)
    blocks = config.per_layer_config if config.is_heterogeneous else (config,)
    with as_config_says(config.name_or_path):
        return max(_of_one_block(block, dtype) for block in blocks)


def _of_one_block(config: PreTrainedConfig, dtype: torch.dtype) -> int:
    heads = int(getattr(config, "num_attention_heads", None) or 1)
    if (rank := getattr(config, "qk_rope_head_dim", None)) is not None:  # DeepSeek: keys and values of all heads
        sizes = (rank, getattr(config, "qk_nope_head_dim", 0), getattr(config, "v_head_dim", 0))
        return int(heads * sum(int(size or 0) for size in sizes) * dtype.itemsize)
    head_size = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    return int(getattr(config, "num_key_value_heads", None) or heads) * 2 * head_size * dtype.itemsize


def num_blocks_that_fit(block_bytes: Sequence[int], cache_bytes: int, usable: int, num_offloaded: int = 0) -> int:
    """How many blocks fit, each with this much cache; one also with less; 0 if not even that.

    Offloaded ones take no memory but for those that are there while they compute.
    """
    largest = max(block_bytes)
    usable_with_them = usable + (num_offloaded - num_slots(num_offloaded)) * largest
    num_blocks = usable_with_them // (largest + cache_bytes)
    return min(max(num_blocks, int(usable >= largest)), len(block_bytes))


def num_to_offload(block_bytes: Sequence[int], cache_bytes: int, usable: int) -> int:
    """How many of these blocks must be offloaded so that all of them fit with this much cache each; all if none do."""
    for number in range(len(block_bytes)):
        if number != 1 and num_blocks_that_fit(block_bytes, cache_bytes, usable, number) == len(block_bytes):
            return number
    return len(block_bytes)


@dataclass(frozen=True)
class CacheRoom:
    """Bytes for sessions, for prompts that are kept for others, and for adapters that clients send."""

    sessions: int
    pages: int
    adapters: int = 0


def cache_room(
    left: int, *, bytes_per_token: int, bytes_per_session: int, session_tokens: int, prefix_tokens: int
) -> CacheRoom:
    """What can be promised of the memory that blocks have left.

    Raises:
        ConfigurationError: too little for a session.
    """
    pages = int(min(bytes_per_token * prefix_tokens, max(0, left) * PAGES_SHARE))
    wanted = bytes_per_token * session_tokens + bytes_per_session
    adapters = int(min(ADAPTERS_BYTES, max(0, left) * ADAPTERS_SHARE))
    sessions = min(wanted, left - pages - adapters)
    if sessions < min(wanted, bytes_per_token * LEAST_TOKENS + bytes_per_session):
        raise ConfigurationError(
            f"the blocks leave {max(0, left) / 1e6:.1f} MB of memory for sessions, of which {LEAST_TOKENS} tokens take "
            f"{bytes_per_token * LEAST_TOKENS / 1e6:.1f}: serve fewer (--num_blocks), in fewer bits (--quant_type), or "
            "allow more (--max_memory)"
        )
    return CacheRoom(sessions, pages, adapters)
