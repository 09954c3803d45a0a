"""How much memory blocks and caches may take: how many blocks fit beside room for sessions, and how much is promised.

Used by `span_loader` and by `swarmllm doctor`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig

from swarmllm.errors import ConfigurationError
from swarmllm.machine_memory import available_memory_bytes, total_memory_bytes
from swarmllm.models.architecture import as_config_says, is_encoder, text_config
from swarmllm.models.span.offload import num_slots
from swarmllm.server.settings import memory_limit_bytes

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
