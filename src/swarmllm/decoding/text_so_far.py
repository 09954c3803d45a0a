"""What processors need to know about the text so far: where padding ends, which tokens end a repetition, coins."""

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

_texts: "WeakKeyDictionary[Any, list[str]]" = WeakKeyDictionary()
"""The text of each token, by tokenizer: to decode a large vocabulary takes a second."""


def padding_lengths(attention_mask: Tensor | None) -> list[int]:
    """How many tokens before each row's text are padding; `[rows, seq]` mask. Nothing: no padding."""
    if attention_mask is None or attention_mask.ndim != 2:
        return []
    lengths: list[int] = (attention_mask != 0).int().argmax(dim=1).tolist()
    return lengths


def tokens_with(strings: Sequence[str], tokenizer: Any) -> frozenset[int]:
    """The tokens whose text holds one of these strings."""
    texts = _texts.get(tokenizer)
    if texts is None:
        ids = [[token] for token in range(len(tokenizer))]
        texts = _texts[tokenizer] = tokenizer.batch_decode(ids, clean_up_tokenization_spaces=False)
    return frozenset(token for token, text in enumerate(texts) if any(string in text for string in strings))


def uniform(count: int, generator: torch.Generator | None, device: torch.device) -> Tensor:
    """`[count]` random numbers in [0, 1), on `device`; `generator` None: torch's own."""
    if generator is None:
        return torch.rand(count, device=device)
    return torch.rand(count, generator=generator, device=generator.device).to(device)
