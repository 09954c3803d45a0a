"""How blocks attend: switching a model to another attention function, and attention of few positions to many keys.

PyTorch's attention of few new positions is slow on CPUs in half precision. A single row of queries takes 20 to 40 times
as long as reading its keys. (At 2048 positions and 4 heads of keys, a block takes 6.2 ms; in the way below 0.4 ms;
torch 2.13.) Two rows take less time than one. So query heads that share keys are rows of one matrix here, instead of
repeating the keys for each head, and a single row is used twice. The result is as exact as PyTorch's, but its last bits
differ. Used by `block_span`, `packed_caches` and `paged_attention`.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

MOST_POSITIONS = 16
"""Most new positions of a row. Measured with 2 and 4 query heads to one: 8 take half to two thirds of the time, 32 as
long."""
OTHER_RULES = ("softcap", "position_bias", "s_aux", "dropout")


def attention_configs(stack: nn.Module) -> list[Any]:
    """The configs that say how the parts of a model attend."""
    configs: Iterator[Any] = (getattr(module, "config", None) for module in stack.modules())
    return list({id(one): one for one in configs if hasattr(one, "_attn_implementation_internal")}.values())


@contextmanager
def attending(configs: Sequence[Any], name: str) -> Iterator[None]:
    """Within: models with these configs attend by the function that transformers knows under this name."""
    usual = [config._attn_implementation_internal for config in configs]
    for config in configs:
        config._attn_implementation_internal = name
    try:
        yield
    finally:
        for config, before in zip(configs, usual, strict=True):
            config._attn_implementation_internal = before


# ---------------------------------------------------------------------- few positions, many keys


class _Asked(threading.local):
    yes = False


_asked = _Asked()


@contextmanager
def few_preferred() -> Iterator[None]:
    """Within: models whose attention is "sdpa" use `attend_few` in this thread, where it is right."""
    _extend_sdpa()
    _asked.yes = True
    try:
        yield
    finally:
        _asked.yes = False


def is_for_few(query: Tensor, mask: Tensor | None, options: dict[str, Any]) -> bool:
    """True if queries `[rows, heads, seq, head]` are few, and nothing but the mask limits what they attend to."""
    given = (options.get(name) for name in OTHER_RULES)
    if any(isinstance(option, Tensor) or option for option in given):
        return False
    if mask is None:  # several would be causal
        return query.shape[2] == 1
    return query.shape[2] <= MOST_POSITIONS and mask.shape[1] == 1 != query.shape[1]


def attend_few(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """Attention as `scaled_dot_product_attention` computes it for keys repeated for all heads: `[rows, seq, heads,
    head]`."""
    rows, heads, seq_len, head_dim = query.shape
    shared = query.reshape(*keys.shape[:2], -1, head_dim)
    num_shared = shared.shape[2]
    if mask is not None:
        mask = mask.repeat(1, 1, heads // keys.shape[1], 1)
    if num_shared == 1 and query.dtype != torch.float32:
        shared = shared.expand(-1, -1, 2, -1)
    output = functional.scaled_dot_product_attention(shared, keys, values, attn_mask=mask, scale=scale)
    return output[:, :, :num_shared].reshape(rows, heads, seq_len, -1).transpose(1, 2)


def _either(usual: Callable[..., tuple[Tensor, Any]]) -> Callable[..., tuple[Tensor, Any]]:
    def sdpa(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, Any]:
        if _asked.yes and is_for_few(query, attention_mask, options):
            return attend_few(query, key, value, attention_mask, options.get("scaling")).contiguous(), None
        return usual(module, query, key, value, attention_mask, **options)

    return sdpa


@cache
def _extend_sdpa() -> None:
    """Make "sdpa" of transformers choose between both. Done at the first use, for most processes never need it."""
    ALL_ATTENTION_FUNCTIONS["sdpa"] = _either(ALL_ATTENTION_FUNCTIONS["sdpa"])
