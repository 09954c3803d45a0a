"""The logits processors that options ask for: called for `generate()` by the client, and for requests by the gateway.

transformers has two places for them. *Before* temperature, top-k and their kin: DRY, and FSD, which decides by the
model's own probabilities and leaves one token, or the row as it is. *Behind* them, if tokens are drawn: top-n-sigma,
tail-free, XTC, mirostat, in this order, each on what the ones before have left.
"""

from collections.abc import Collection, Sequence

import torch
from transformers import LogitsProcessor

from swarmllm.decoding.dry import Dry
from swarmllm.decoding.frustratingly_simple import FrustratinglySimple, RandomSteps
from swarmllm.decoding.mirostat import Mirostat
from swarmllm.decoding.options import DecodingOptions
from swarmllm.decoding.truncation import ExcludeTopChoices, TailFree, TopNSigma


def processors_before(
    options: DecodingOptions,
    *,
    start: int,
    breakers: Collection[int] = (),
    padding: Sequence[int] = (),
    generator: torch.Generator | None = None,
) -> list[LogitsProcessor]:
    """Those before temperature, for texts whose prompts have `start` tokens, `padding` of them before each row."""
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
    """Those behind temperature and its kin, for texts whose prompts have `start` tokens."""
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
