"""Attention of blocks: switch a model to another attention function; attend from few new positions to many keys, fast.

`attend_few` exists because PyTorch is slow on CPUs in half precision if there are few queries. One row of
queries takes 20 to 40 times as long as reading its keys. Measured with torch 2.13, at 2048 positions and 4 key heads:
6.2 ms for a block, and 0.4 ms with `attend_few`. It differs in two ways. Several query heads share one key head: their
queries become the rows of one matrix, and the keys aren't repeated for each of them. If that gives only one row, the
row is computed twice, because PyTorch needs less time for two rows than for one. The result is as exact as PyTorch's,
but its last bits differ. So blocks whose weights are as stored use `whole_attention` instead: it has PyTorch's bits,
for one new position in bfloat16. Used by `block_span`, `packed_caches` and `paged_attention`.
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

from swarmllm.models.quantization import whole_attention

MOST_POSITIONS = 16
"""Most new positions of a text for `attend_few`. Measured with 2 and 4 query heads for each key head: with 8 positions
it takes half to two thirds of PyTorch's time, with 32 the same time."""
OTHER_RULES = ("softcap", "position_bias", "s_aux", "dropout")
"""Arguments of attention functions that change its result, besides mask and scale. `attend_few` knows none of them."""


def attention_configs(stack: nn.Module) -> list[Any]:
    """Return the configs of all modules of `stack` that name an attention function, each once."""
    configs: Iterator[Any] = (getattr(module, "config", None) for module in stack.modules())
    return list({id(one): one for one in configs if hasattr(one, "_attn_implementation_internal")}.values())


@contextmanager
def attending(configs: Sequence[Any], name: str) -> Iterator[None]:
    """Switch modules with these configs to the attention function `name` of transformers; switch back at the end."""
    usual = [config._attn_implementation_internal for config in configs]
    for config in configs:
        config._attn_implementation_internal = name
    try:
        yield
    finally:
        for config, before in zip(configs, usual, strict=True):
            config._attn_implementation_internal = before


# ---------------------------------------------------------------------- few positions, many keys


class _Preference(threading.local):
    """The choice of this thread; `faster_attention` sets it."""

    few = False
    as_torch = False


_preference = _Preference()


@contextmanager
def faster_attention(*, few: bool) -> Iterator[None]:
    """Make "sdpa" of transformers faster in this thread: with `few`, by `attend_few` where that applies, and otherwise
    by `whole_attention` where it has the bits of torch's."""
    _extend_sdpa()
    _preference.few, _preference.as_torch = few, not few
    try:
        yield
    finally:
        _preference.few = _preference.as_torch = False


def is_for_few(query: Tensor, mask: Tensor | None, options: dict[str, Any]) -> bool:
    """True if `attend_few` can compute this call.

    `query` `[rows, heads, seq, head size]` must have few positions, and only `mask` `[rows, 1, seq, keys]` may change
    what they attend to.
    """
    given = (options.get(name) for name in OTHER_RULES)
    if any(isinstance(option, Tensor) or option for option in given):
        return False
    if mask is None:  # without a mask, several positions mean a causal call, and `attend_few` needs a mask for that
        return query.shape[2] == 1
    # With a single head there are no heads to put together.
    return query.shape[2] <= MOST_POSITIONS and mask.shape[1] == 1 and query.shape[1] != 1


def attend_few(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """Attend like `scaled_dot_product_attention` with keys and values repeated for each query head.

    `query` is `[rows, heads, seq, head size]`, `keys` and `values` are `[rows, key heads, keys, head size]`. Returns
    `[rows, seq, heads, head size]`.
    """
    rows, heads, seq_len, head_dim = query.shape
    shared = query.reshape(*keys.shape[:2], -1, head_dim)
    num_shared = shared.shape[2]
    if mask is not None:
        mask = mask.repeat(1, 1, heads // keys.shape[1], 1)
    if num_shared == 1 and query.dtype != torch.float32:  # two rows are faster than one, see above
        shared = shared.expand(-1, -1, 2, -1)
    output = functional.scaled_dot_product_attention(shared, keys, values, attn_mask=mask, scale=scale)
    return output[:, :, :num_shared].reshape(rows, heads, seq_len, -1).transpose(1, 2)


def _with_few(usual: Callable[..., tuple[Tensor, Any]]) -> Callable[..., tuple[Tensor, Any]]:
    """Wrap an attention function: `attend_few` takes its place where a thread prefers that and it applies."""

    def sdpa(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, Any]:
        if _preference.few and is_for_few(query, attention_mask, options):
            return attend_few(query, key, value, attention_mask, options.get("scaling")).contiguous(), None
        is_one = _preference.as_torch and attention_mask is None and is_for_few(query, None, options)
        if is_one and whole_attention.takes(query, key, value):
            return whole_attention.attend_rows(query, key, value, options.get("scaling")), None
        return usual(module, query, key, value, attention_mask, **options)

    sdpa.usual = usual  # type: ignore[attr-defined]
    return sdpa


def usual_sdpa() -> Callable[..., tuple[Tensor, Any]]:
    """The "sdpa" of transformers, whatever threads prefer."""
    function: Callable[..., tuple[Tensor, Any]] = ALL_ATTENTION_FUNCTIONS["sdpa"]
    usual: Callable[..., tuple[Tensor, Any]] = getattr(function, "usual", function)
    return usual


@cache
def _extend_sdpa() -> None:
    """Put the wrapped "sdpa" into transformers' table, once per process. Most processes never need it."""
    ALL_ATTENTION_FUNCTIONS["sdpa"] = _with_few(ALL_ATTENTION_FUNCTIONS["sdpa"])
