"""Attention of few new positions to many keys, which PyTorch is slow at on CPUs.

In half precision a single row of queries takes 20 to 40 times as long as reading its keys would; two heads to one of
keys take less than one does (6.2 ms a block at 2048 positions and 4 heads of keys, 0.4 in the way below; torch 2.13).
So query heads that share keys are rows of one matrix, in place of keys repeated for each, and a row that is alone
stands twice. As exact as the other, with other last bits. Used by `block_span` and `packed_attention`.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

MOST_POSITIONS = 16
"""New ones of a row: 8 take half to two thirds of the time, 32 as long (measured, 2 and 4 query heads to one)."""
OTHER_RULES = ("softcap", "position_bias", "s_aux", "dropout")


class _Asked(threading.local):
    yes = False


_asked = _Asked()


@contextmanager
def preferred() -> Iterator[None]:
    """Within: models whose attention is "sdpa" attend so in this thread, where they can."""
    _asked.yes = True
    try:
        yield
    finally:
        _asked.yes = False


def applies(query: Tensor, mask: Tensor | None, options: dict[str, Any]) -> bool:
    """Whether queries `[rows, heads, seq, head]` are few, and attend to just what the mask says."""
    given = (options.get(name) for name in OTHER_RULES)
    if any(isinstance(option, Tensor) or option for option in given):
        return False
    if mask is None:  # several would be causal
        return query.shape[2] == 1
    return query.shape[2] <= MOST_POSITIONS and mask.shape[1] == 1 != query.shape[1]


def attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """What `scaled_dot_product_attention` returns for keys repeated for all heads: `[rows, seq, heads, head]`."""
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
        if _asked.yes and applies(query, attention_mask, options):
            return attend(query, key, value, attention_mask, options.get("scaling")).contiguous(), None
        return usual(module, query, key, value, attention_mask, **options)

    return sdpa


ALL_ATTENTION_FUNCTIONS["sdpa"] = _either(ALL_ATTENTION_FUNCTIONS["sdpa"])
