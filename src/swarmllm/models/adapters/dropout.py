"""Dropout that can be repeated, because a seed of each token decides it: that of adapters' inputs, and the blocks' own.

The client draws the seeds. They travel like other inputs, and stay with their tokens when the batch is cut. So a
replay, another server and the backward all drop the same values.

Within `training`, blocks are in train mode, and each dropout of their code, also that of attention, is computed from
the seeds. The block and the number of dropouts before it there make its key. Other random numbers are refused, because
they couldn't be computed again. Used by `block_adapter`.
"""

import math
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from swarmllm.errors import RemoteProtocolError

SEEDS = 1 << 31
"""Seeds are below this."""
_FACTORS = (0x7FEB352D, 0x846CA68B - (1 << 32))
"""Constants of the integer hash "lowbias32", found by Chris Wellons' search for the least bias
(https://nullprogram.com/blog/2018/07/31/). As signed numbers, which wrap around alike."""

_UNSEEDED: Any = {
    *(torch.rand, torch.rand_like, torch.randn, torch.randn_like, torch.bernoulli, torch.dropout),
    *(Tensor.bernoulli_, Tensor.uniform_, Tensor.normal_, Tensor.exponential_, Tensor.bernoulli),
    *(functional.dropout1d, functional.dropout2d, functional.dropout3d),
    *(functional.alpha_dropout, functional.feature_alpha_dropout),
}


def draw_seeds(batch_size: int, seq_len: int) -> Tensor:
    """`[batch, seq]`, by torch's generator: `torch.manual_seed` makes them, and so the masks, the same again."""
    return torch.randint(SEEDS, (batch_size, seq_len))


def seeds_of_source(seeds: Tensor, source_len: int) -> Tensor:
    """`[batch, source]`: seeds for the positions of an encoder's outputs, from those of the text `[batch, seq]`.

    All blocks get the encoder's outputs with a text's first tokens; the first seed makes texts differ.
    """
    places = _mixed(torch.arange(source_len, dtype=torch.int32, device=seeds.device))
    return (_mixed(seeds[:, :1].to(torch.int32, copy=True)) ^ places) & (SEEDS - 1)


def drop_out(values: Tensor, seeds: Tensor, key: int, probability: float) -> Tensor:
    """`[batch, seq, features]`, or all tokens in a row, with some values 0 and the others larger to make up for it.

    Args:
        seeds: `[batch, seq]`.
        key: of the module, below 2**31; each leaves out others.

    Raises:
        RemoteProtocolError: the values are of other places than the seeds.
    """
    places = tuple(values.shape[:-1])
    if places not in (tuple(seeds.shape), (seeds.numel(),)):
        raise RemoteProtocolError(
            f"dropout is for inputs {[*seeds.shape, values.shape[-1]]}, but a module here takes {list(values.shape)}: "
            "leave it out of target_modules, or set the dropout to 0"
        )
    noise = keep_mask(seeds.to(values.device), values.shape[-1], key, probability).view(values.shape).to(values.dtype)
    return values * noise.div_(1 - probability)


def keep_mask(seeds: Tensor, num_features: int, key: int, probability: float) -> Tensor:
    """`[…, features]`: True with 1 - `probability`."""
    of_tokens = _mixed(seeds.to(torch.int32) ^ key)
    of_features = _mixed(torch.arange(num_features, dtype=torch.int32, device=seeds.device))
    bits = _mixed(of_tokens[..., None] ^ of_features) & (SEEDS - 1)
    return bits >= int(probability * SEEDS)


def keep_mask_of_pairs(seeds: Tensor, others: Tensor, num_heads: int, key: int, probability: float) -> Tensor:
    """`[batch, heads, seq, keys]`, for tokens of these seeds `[batch, seq]` that look at `others` `[batch, keys]`."""
    of_tokens = _mixed(seeds.to(torch.int32) ^ key)
    of_heads = _mixed(torch.arange(num_heads, dtype=torch.int32, device=seeds.device))
    of_others = _mixed(_mixed(others.to(torch.int32, copy=True))[:, None] ^ of_heads[:, None])
    bits = _mixed(of_tokens[:, None, :, None] ^ of_others[:, :, None]) & (SEEDS - 1)
    return bits >= int(probability * SEEDS)


def _mixed(bits: Tensor) -> Tensor:
    """Other 32 bits; each depends on all bits before; in place."""
    for shift, factor in zip((16, 15), _FACTORS, strict=True):
        bits ^= (bits >> shift) & ((1 << (32 - shift)) - 1)  # without the copies of the sign
        bits *= factor
    bits ^= (bits >> 16) & 0xFFFF
    return bits


@contextmanager
def training(
    blocks: Mapping[int, nn.Module], rates: Mapping[nn.Module, float], seeds: Tensor, *, cached: bool
) -> Iterator[None]:
    """Within: these blocks drop out by the seeds.

    Args:
        rates: dropout modules with another rate than their own.
        seeds: `[batch, seq]`, of the tokens of the call.
        cached: True if there is a KV cache. Earlier tokens may be in it, and their seeds aren't known. So keys are told
            apart by their places; without a cache by their seeds, which padding can't move.
    """
    mode = _Seeded(seeds, cached, next(iter(blocks)))
    parts = [part for block in blocks.values() for part in block.modules()]
    with ExitStack() as undone:
        for block_idx, block in blocks.items():
            undone.callback(block.register_forward_pre_hook(mode.entering(block_idx)).remove)
        for module, rate in rates.items():
            undone.callback(setattr, module, "p", module.p)
            module.p = rate  # type: ignore[assignment]
        for part in parts:
            undone.callback(setattr, part, "training", part.training)
            part.training = not isinstance(part, nn.modules.batchnorm._BatchNorm)  # its statistics must not change
        undone.enter_context(mode)
        yield


class _Seeded(TorchFunctionMode):
    """Takes the place of torch's own dropout."""

    def __init__(self, seeds: Tensor, cached: bool, block_idx: int) -> None:
        """`block_idx` is the block that is run first."""
        super().__init__()
        self._seeds, self._cached = seeds, cached
        self._block_idx = block_idx
        self._met = Counter[int]()

    def entering(self, block_idx: int) -> Callable[..., None]:
        """A hook that says which block is run."""

        def hook(*_: Any) -> None:
            self._block_idx = block_idx

        return hook

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is functional.dropout:
            return self._dropout(*args, **kwargs)
        if func is functional.scaled_dot_product_attention and (kwargs.get("dropout_p") or any(args[4:5])):
            return self._attention(*args, **kwargs)
        if func in _UNSEEDED:
            raise RemoteProtocolError(
                f"block {self._block_idx} of this model draws random numbers in training, which no seeds can bring "
                "back: call eval() on the blocks, model.get_decoder().layers.blocks() or the encoder's"
            )
        return func(*args, **kwargs)

    def _key(self) -> int:
        self._met[self._block_idx] += 1
        return zlib.crc32(f"{self._block_idx}~{self._met[self._block_idx]}".encode()) % SEEDS

    def _dropout(self, values: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or not p:
            return values
        (batch, seq), shape = self._seeds.shape, tuple(values.shape)
        if shape[:-1] in ((batch, seq), (batch * seq,)):
            return drop_out(values, self._seeds, self._key(), p)
        if len(shape) in (3, 4) and shape[-2] == seq and shape[0] % batch == 0:  # attention weights
            by_head = values.view(batch, -1, *shape[-2:]) if len(shape) == 3 else values
            return self._drop_weights(by_head, p).view(shape)
        raise RemoteProtocolError(
            f"dropout of {list(shape)} in block {self._block_idx} can't be told from the tokens {[batch, seq]}: call "
            "eval() on the blocks, model.get_decoder().layers.blocks()"
        )

    def _drop_weights(self, weights: Tensor, p: float) -> Tensor:
        """Attention weights `[batch, heads, seq, keys]`."""
        batch, num_heads, seq, num_keys = weights.shape
        places = torch.arange(num_keys).expand(batch, num_keys)
        if not self._cached and num_keys >= seq:  # keys before the text are a prefix's
            places = torch.cat([places[:, : num_keys - seq], self._seeds.cpu()], dim=1)
        keep = keep_mask_of_pairs(self._seeds.to(weights.device), places.to(weights.device), num_heads, self._key(), p)
        return weights * keep.to(weights.dtype).div_(1 - p)

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if enable_gqa:
            times = query.shape[-3] // key.shape[-3]
            key, value = key.repeat_interleave(times, -3), value.repeat_interleave(times, -3)
        scores = query @ key.mT * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, -math.inf)
        elif attn_mask is not None:
            scores = scores + attn_mask
        weights = scores.softmax(-1)
        if attn_mask is not None:  # rows that see nothing, as padding may be: torch gives zeros
            weights = weights.nan_to_num(0.0)
        return self._drop_weights(weights, dropout_p) @ value
