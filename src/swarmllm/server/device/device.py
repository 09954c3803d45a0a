"""The device that computes the blocks: its name and memory, waiting for its work, and errors of blocks that fail on it.

`span_loader` chooses a device here and plans the use of its memory. `swarmllm doctor` does the same without loading
blocks. The device thread waits here for an accelerator (`Accelerator.fetch`), because a call on a GPU returns as soon
as the work is queued. Without this wait, measured times would be those of queueing, the event loop would block when it
reads an output, and unread outputs would fill the device's memory. Tests pass an accelerator of their own, and decide
when it has finished.
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
from swarmllm.machine_memory import available_memory_bytes, memory_ran_out, total_memory_bytes
from swarmllm.models.architecture import as_config_says, is_encoder, text_config
from swarmllm.models.boundary.block_inputs import BESIDE, BlockInputs
from swarmllm.models.boundary.device_copies import in_host_memory
from swarmllm.models.span.block_span import BlockSpan
from swarmllm.models.span.offload import num_slots
from swarmllm.server.settings import memory_limit_bytes, require_device

logger = logging.getLogger(__name__)

FREE_SHARE = 0.8
"""Share of the free memory that blocks and caches may take by default. Assumed: activations take the rest."""
COUNTED_TOKENS = 8192
"""Tokens of cache that a server plans for each block when it chooses the number of its blocks. Assumed: some chats of
2048 tokens. With the default of `attn_cache_tokens`, 65536, a block of Llama-2-7B and its cache would take as much
memory as six blocks."""
LEAST_TOKENS = 256
"""Fewest tokens of cache with which a server starts. Assumed: with less, no client could use the blocks."""
PAGES_SHARE = 1 / 8
"""Largest share of the memory left by the blocks for pages of prompts that sessions share. Assumed."""
ADAPTERS_SHARE = 1 / 16
"""Largest share of the memory left by the blocks for adapters that clients send. Assumed: they are small compared with
the caches."""
ADAPTERS_BYTES = 2 << 30
"""Most bytes for these adapters. Assumed."""
OWN_MEMORY = ("cuda", "xpu")
"""Kinds of devices with memory of their own. The others use the machine's main memory."""


def resolve_device(name: str) -> torch.device:
    """Return the torch device of this name; `auto` means cuda if there is a CUDA device, else cpu.

    Raises:
        ConfigurationError: the device can't be used here.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    require_device(name)
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:  # torch built without CUDA asserts
        reason = str(error).strip().split("\n")[0].split(". ")[0]  # the message about mps is long
        raise ConfigurationError(f"device {name!r} can't be used here: {reason}") from None


@cache
def hardware_name(device: torch.device, number: int = 1) -> str:
    """Return the name of the hardware, short enough for an announcement. `number`: how many such devices there are."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines() if device.type == "cpu" else []
        name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), name)
    return f"{number} × {name}"[:64] if number > 1 else name[:64]


def out_of_memory(error: object) -> ServerOutOfMemoryError | None:
    """Return the error for the client if `error` means that memory ran out, else None. It may be a result."""
    if isinstance(error, ServerOutOfMemoryError):
        return error
    if not isinstance(error, BaseException) or not memory_ran_out(error):
        return None
    return ServerOutOfMemoryError("this server ran out of memory: use another one, or ask for less at once")


def log_out_of_memory(errors: Iterable[object]) -> None:
    """Log a line for each error that means that memory ran out. Errors of other kinds are ignored.

    An error that several sessions of one forward share gives one line. A `ServerOutOfMemoryError` gives none, because
    it was logged when it was made.
    """
    for error in {id(error): error for error in errors}.values():
        if not isinstance(error, ServerOutOfMemoryError) and out_of_memory(error):
            reason = f"{type(error).__name__} {error}".strip().split("\n")[0][:300]
            logger.warning("memory ran out, and the client gets an error: %s", reason)


def lost_context(error: object) -> str | None:
    """Return the reason if `error` means that this process can't compute any more, else None.

    There are two such reasons. A follower (a process of `--tensor_parallel`) has gone. Or CUDA has ended the context of
    this process, after an index outside its table, a failed kernel or a lost device, but not after lack of memory. Call
    it in the device thread: it waits for the device.
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
    """Replace errors of libraries that mean that memory ran out by `ServerOutOfMemoryError`, and log them.

    Raises:
        ServerOutOfMemoryError: the code within ran out of memory.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:  # torch's OutOfMemoryError is a RuntimeError
        found = out_of_memory(error)
        if found is None:
            raise
        log_out_of_memory([error])
        raise found from error


@contextmanager
def block_errors_translated() -> Iterator[None]:
    """Replace exceptions of blocks by errors for the client.

    Raises:
        ServerOutOfMemoryError: memory ran out, which is no peer's fault.
        RemoteProtocolError: the blocks failed otherwise. The sender of their inputs is blamed.
    """
    try:
        yield
    except SwarmError:
        raise
    except Exception as error:
        if found := out_of_memory(error):
            log_out_of_memory([error])
            raise found from error
        reason = f"{type(error).__name__}: {str(error).strip().split(chr(10))[0][:300]}"
        raise RemoteProtocolError(f"the blocks can't run on these inputs: {reason}") from error


def on_device(inputs: BlockInputs, blocks: BlockSpan) -> BlockInputs:
    """Move the inputs to the device and dtype of the blocks."""
    if inputs.hidden_states.device == blocks.device:
        return in_dtype(inputs, blocks)  # the usual case on a CPU
    return inputs.to(blocks.device, blocks.dtype)


def in_dtype(inputs: BlockInputs, blocks: BlockSpan) -> BlockInputs:
    """Convert the inputs to the dtype of the blocks, where they are."""
    hidden = inputs.hidden_states
    if hidden.dtype == blocks.dtype and all(getattr(inputs, name) is None for name in BESIDE):
        return inputs
    return inputs.to(hidden.device, blocks.dtype)


class Accelerator(Protocol):
    """A device other than the CPU, as the device thread uses it: it works through a queue, and must be waited for."""

    def fetch(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Wait until the device has done all queued work, and copy the tensors into host memory.

        Raises:
            RuntimeError: the queued work has failed.
        """


class DeviceStream:
    """The accelerator of real devices: waits for the torch stream on which the device thread computes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def fetch(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return in_host_memory(tensors, frozenset({self._device}))


def accelerator_of(device: torch.device) -> Accelerator | None:
    """Return the accelerator of a device; None for the CPU, where a call returns when its work is done."""
    return None if device.type == "cpu" else DeviceStream(device)


def free_bytes(device: torch.device) -> int:
    """Free memory of the device that this process may use."""
    if device.type in OWN_MEMORY:
        return int(getattr(torch, device.type).mem_get_info(device)[0])
    return available_memory_bytes()


def total_bytes(device: torch.device) -> int:
    """All memory of the device."""
    if device.type in OWN_MEMORY:
        return int(getattr(torch, device.type).mem_get_info(device)[1])
    return total_memory_bytes()


def usable_bytes(device: torch.device, max_memory: str | None = None) -> int:
    """Total bytes that blocks and caches may take now. `max_memory`: the server's setting (`ServerConfig`)."""
    if max_memory is None:
        return int(free_bytes(device) * FREE_SHARE)
    return memory_limit_bytes(max_memory, total_bytes(device))


def cache_bytes_per_token(config: PreTrainedConfig, dtype: torch.dtype) -> int:
    """Estimate from the config how many bytes one position of a session takes on one block; rather too many.

    It is for planning only: once blocks are loaded, the bytes are measured.
    """
    if is_encoder(config):
        return 0
    config = text_config(config)
    blocks = config.per_layer_config if config.is_heterogeneous else (config,)
    with as_config_says(config.name_or_path):
        return max(_bytes_on_one_block(block, dtype) for block in blocks)


def _bytes_on_one_block(config: PreTrainedConfig, dtype: torch.dtype) -> int:
    """Bytes of the keys and values of one position on a block with this config."""
    heads = int(getattr(config, "num_attention_heads", None) or 1)
    if (rank := getattr(config, "qk_rope_head_dim", None)) is not None:  # DeepSeek: keys and values of all heads
        sizes = (rank, getattr(config, "qk_nope_head_dim", 0), getattr(config, "v_head_dim", 0))
        return int(heads * sum(int(size or 0) for size in sizes) * dtype.itemsize)
    head_size = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    return int(getattr(config, "num_key_value_heads", None) or heads) * 2 * head_size * dtype.itemsize


def num_blocks_that_fit(block_bytes: Sequence[int], cache_bytes: int, usable: int, num_offloaded: int = 0) -> int:
    """Number of blocks that fit into `usable` bytes, each with `cache_bytes` of cache.

    It is 1 if one block fits only with less cache, and 0 if not even one block fits. Offloaded blocks take no memory
    here, except for the few that are copied in to compute (`offload.num_slots`).
    """
    largest = max(block_bytes)
    usable_with_them = usable + (num_offloaded - num_slots(num_offloaded)) * largest
    num_blocks = usable_with_them // (largest + cache_bytes)
    return min(max(num_blocks, int(usable >= largest)), len(block_bytes))


def num_to_offload(block_bytes: Sequence[int], cache_bytes: int, usable: int) -> int:
    """Smallest number of blocks to offload with which all blocks and their caches fit; all blocks if no number does."""
    # Not 1: a single block needs its whole size while it computes, so offloading it saves nothing.
    for number in range(len(block_bytes)):
        if number != 1 and num_blocks_that_fit(block_bytes, cache_bytes, usable, number) == len(block_bytes):
            return number
    return len(block_bytes)


@dataclass(frozen=True)
class CacheRoom:
    """The memory left by the blocks, divided by use; in bytes."""

    sessions: int
    """For the KV caches of sessions."""
    pages: int
    """For pages of prompts that sessions share."""
    adapters: int = 0
    """For adapters that clients send."""


def cache_room(
    left: int, *, bytes_per_token: int, bytes_per_session: int, session_tokens: int, prefix_tokens: int
) -> CacheRoom:
    """Divide the `left` bytes of memory that the blocks don't take.

    `session_tokens` and `prefix_tokens`: wanted tokens of all sessions together, and of shared prompts.

    Raises:
        ConfigurationError: it is too little for one session of `LEAST_TOKENS`.
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
