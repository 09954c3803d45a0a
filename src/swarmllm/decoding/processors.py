"""The logits processors that options ask for, and what they need to know about the text.

The client calls it for `generate()`, the gateway for requests. transformers has two places for processors. *Before*
temperature, top-k and the like: DRY, and FSD, which decides by the model's own probabilities. *Behind* them, if tokens
are drawn: top-n-sigma, tail-free, XTC, mirostat, in this order, each on what the ones before have left.
"""

from collections.abc import Collection, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import LogitsProcessor

from swarmllm.decoding.methods import (
    Dry,
    ExcludeTopChoices,
    FrustratinglySimple,
    Mirostat,
    RandomSteps,
    TailFree,
    TopNSigma,
)
from swarmllm.decoding.options import DecodingOptions

_texts: "WeakKeyDictionary[Any, list[str]]" = WeakKeyDictionary()
"""The text of each token, by tokenizer: to decode a large vocabulary takes a second."""


def processors_before(
    options: DecodingOptions,
    *,
    start: int,
    breakers: Collection[int] = (),
    padding: Sequence[int] = (),
    generator: torch.Generator | None = None,
) -> list[LogitsProcessor]:
    """The processors before temperature. Prompts have `start` tokens, `padding` of them before each row."""
    value = options.resolved()
    found: list[LogitsProcessor] = []
    if options.is_on("dry_multiplier"):
        names = ("dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n")
        multiplier, base, allowed_length, last_n = (value[name] for name in names)
        found.append(Dry(multiplier, base, allowed_length, last_n, breakers, padding))
    if options.is_on("fsd_alpha"):
        random = None
        if options.is_on("fsd_random_steps"):
            random = RandomSteps(start, value["fsd_random_steps"], value["fsd_random_probability"], generator)
        names = ("fsd_alpha", "fsd_k", "fsd_n", "fsd_beta")
        found.append(FrustratinglySimple(*(value[name] for name in names), padding=padding, random=random))
    return found


def processors_behind(
    options: DecodingOptions, *, start: int, generator: torch.Generator | None = None
) -> list[LogitsProcessor]:
    """The processors behind temperature and the like. Prompts have `start` tokens."""
    value = options.resolved()
    found: list[LogitsProcessor] = []
    if options.is_on("top_n_sigma"):
        found.append(TopNSigma(value["top_n_sigma"]))
    if options.is_on("tfs_z"):
        found.append(TailFree(value["tfs_z"]))
    if options.is_on("xtc_probability"):
        found.append(ExcludeTopChoices(value["xtc_probability"], value["xtc_threshold"], generator))
    if options.is_on("mirostat_mode"):
        found.append(Mirostat(value["mirostat_mode"], value["mirostat_tau"], value["mirostat_eta"], start))
    return found


def padding_lengths(attention_mask: Tensor | None) -> list[int]:
    """The number of padding tokens before each row's text, from a `[rows, seq]` mask. Empty: no padding."""
    if attention_mask is None or attention_mask.ndim != 2:
        return []
    lengths: list[int] = (attention_mask != 0).int().argmax(dim=1).tolist()
    return lengths


def tokens_with(strings: Sequence[str], tokenizer: Any) -> frozenset[int]:
    """All tokens with one of these strings in their text."""
    texts = _texts.get(tokenizer)
    if texts is None:
        ids = [[token] for token in range(len(tokenizer))]
        texts = _texts[tokenizer] = tokenizer.batch_decode(ids, clean_up_tokenization_spaces=False)
    return frozenset(token for token, text in enumerate(texts) if any(string in text for string in strings))
