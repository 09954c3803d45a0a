"""Where a call may be cut into pieces or rows, so that all of it is still computed as in one call.

Everything that cuts asks here: the client for prompts, batches and replays, servers for pieces beside decode steps. A
call must stay whole for three reasons:

    chunked_prefill is False     the blocks' caches take whole prompts or single tokens
    the mask                     some positions see later ones, those of one picture for example
    the length of the call       some rotary embeddings choose their frequencies for all positions by the largest one:
                                 LongRoPE has two tables, dynamic NTK has one for each length (`BlockTraits.arithmetic`)

The last reason concerns joining as well: calls that were computed with other tables can't be computed as one.
"""

from collections.abc import Iterator
from math import inf

import torch
from torch import Tensor

from swarmllm.data_structures import BlockTraits
from swarmllm.models.boundary.block_inputs import BlockInputs


def arithmetic(inputs: BlockInputs, past: int, traits: BlockTraits) -> int:
    """Equal for calls whose positions are computed alike; this one follows `past` positions of text."""
    if traits.even_length == inf:
        return 0
    if inputs.position_ids is None:
        return traits.arithmetic(past + inputs.num_prefix + inputs.seq_len)
    return traits.arithmetic(int(inputs.position_ids.max()) + 1)


def uncut(inputs: BlockInputs, past: int, traits: BlockTraits) -> int:
    """Positions of the shortest first piece; behind it the call may be cut anywhere. All of them: it stays whole."""
    if not traits.chunked_prefill or inputs.looks_ahead(past):
        return inputs.seq_len
    if traits.even_length == inf:
        return 1
    by_column = _arithmetics(_lengths(inputs, past).amax(dim=1), traits)
    whole = _arithmetics(_lengths(inputs, past).amax(dim=(1, 2)), traits)
    differs = (by_column != whole[:, None]).any(dim=0).nonzero()
    return min(int(differs[-1]) + 2, inputs.seq_len) if len(differs) else 1


def pieces(inputs: BlockInputs, past: int, traits: BlockTraits, max_tokens: int) -> Iterator[tuple[int, int]]:
    """Columns `[start, end)` of pieces of at most `max_tokens` in all rows, where that is possible."""
    size, length = max(1, max_tokens // inputs.batch_size), inputs.seq_len
    start = 0
    if length > size and (first := uncut(inputs, past, traits)) > 1:
        start = min(length, max(first, size))
        yield 0, start
    if start < length:
        num_pieces = -(-(length - start) // size)
        size = -(-(length - start) // num_pieces)  # all about equally long
    for begin in range(start, length, size):
        yield begin, min(begin + size, length)


def decisive_rows(inputs: BlockInputs, traits: BlockTraits) -> list[int] | None:
    """The rows of a batch by which all others are computed; None: each comes out by itself as in the batch."""
    if traits.even_length == inf or inputs.position_ids is None or inputs.position_ids.shape[-2] == 1:
        return None
    lengths = _lengths(inputs, 0).amax(dim=(0, 2))
    decides = _arithmetics(lengths, traits) == _arithmetics(lengths.max(), traits)
    return None if bool(decides.all()) else decides.nonzero().flatten().tolist()


def _lengths(inputs: BlockInputs, past: int) -> Tensor:
    """`[kinds, rows or 1, seq]`: the length that each position by itself would have."""
    given = inputs.position_ids
    if given is None:
        start = past + inputs.num_prefix + 1
        return torch.arange(start, start + inputs.seq_len)[None, None]
    return given.reshape(-1, *given.shape[-2:]).cpu() + 1


def _arithmetics(lengths: Tensor, traits: BlockTraits) -> Tensor:
    """`BlockTraits.arithmetic` of each."""
    found = -torch.bucketize(lengths, torch.tensor(traits.length_borders, dtype=lengths.dtype))
    beyond = traits.own_length_beyond
    return found if beyond is None else found.where(lengths <= beyond, lengths)
