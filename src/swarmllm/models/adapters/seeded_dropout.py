"""Dropout that can be computed anew: what is left out follows from a seed of each token.

The client draws the seeds, which travel like other inputs and stay with their tokens wherever rows and columns of the
batch are cut. So a replay, another server and the backward all leave out the same. Used by
`block_adapter` and `blocks_dropout`.
"""

import torch
from torch import Tensor

from swarmllm.errors import RemoteProtocolError

SEEDS = 1 << 31
"""Seeds are below this."""
_FACTORS = (0x7FEB352D, 0x846CA68B - (1 << 32))
"""Constants of the integer hash "lowbias32", found by Chris Wellons' search for the least bias
(https://nullprogram.com/blog/2018/07/31/). As signed numbers, which wrap around alike."""


def draw_seeds(batch_size: int, seq_len: int) -> Tensor:
    """`[batch, seq]`, by torch's generator: `torch.manual_seed` makes them, and so the masks, the same again."""
    return torch.randint(SEEDS, (batch_size, seq_len))


def seeds_of_source(seeds: Tensor, source_len: int) -> Tensor:
    """`[batch, source]`, for what a decoder attends to besides the text of these seeds `[batch, seq]`: by its places.

    All of a text's blocks are given its source with its first tokens, whose first seed makes texts differ.
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
    """Other 32 bits, of which each depends on all; in place."""
    for shift, factor in zip((16, 15), _FACTORS, strict=True):
        bits ^= (bits >> shift) & ((1 << (32 - shift)) - 1)  # without the copies of the sign
        bits *= factor
    bits ^= (bits >> 16) & 0xFFFF
    return bits
