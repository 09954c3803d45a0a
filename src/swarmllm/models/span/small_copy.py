"""The traits of a model's blocks, found without its weights: on a small copy of the model with random weights.

A client computes them when it opens a model, so that it need not trust any server. The copy has the same architecture
with the same number of blocks, but is narrow, with few heads, experts and words. What blocks take, return, need and can
do follows from the code and from settings that stay: kinds of layers, windows, rotations. So the probes find the same
traits as a server finds on its blocks, every trait that `BlockTraits` has or will have.

A config's numbers depend on each other in ways that only the model's code knows. So there are several ways to shrink
it, tried until a copy runs. Called by `client/distributed_model`; knows no network.
"""

import copy
import itertools
import json
import logging
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

from swarmllm.data_structures import BlockTraits, StackTraits
from swarmllm.errors import UnsupportedModelError
from swarmllm.models.architecture import Stack, blocks_class, has_vision, stacks, text_config
from swarmllm.models.checkpoint.checkpoint import Checkpoint
from swarmllm.models.checkpoint.skeleton import on_meta, prune_to_span, pruned, with_random_weights
from swarmllm.models.quantization import FULL_PRECISION
from swarmllm.models.span.block_span import BlockSpan
from swarmllm.models.span.probe_results import ProbeResults
from swarmllm.models.span.probes import probe

logger = logging.getLogger(__name__)

MOST_BYTES = 1 << 29
"""Memory of the largest copy. Most take 20 to 120 MB in float32; Llama's with 80 blocks takes 80."""
WIDTH, INNER_WIDTH, RANK, WORDS = 128, 64, 16, 256
ALIGNED = 8
"""Widths are multiples of it: products of groups of experts want rows of 16 bytes."""
NOISE = 0.05
"""Noise added to transformers' initial weights, so that no gate or bias of zeros disables a part."""

_MAIN_HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads", "decoder_attention_heads", "attention_heads")
_INNER = re.compile(r"(.*_)?(intermediate_size(_mlp)?|ffn_dim|ffn_hidden_size|n_inner|dff|dim_ff|d_ff)")
_WIDTH = re.compile(r"hidden_size|n_embd|d_model|dim_model|embedding_size|attention_hidden_size|word_embed_proj_dim|"
                    r"mamba_d_ssm|lru_width")  # fmt: skip
_HEADS = re.compile(r"(\w+_)?heads|n_head|num_attention_heads_per_layer|num_query_groups|(mamba_)?n_groups|o_groups")
_OF_KEYS = re.compile(r"(.*_)?(kv|key_value)_(n_)?heads|kv_n_heads|num_query_groups|(mamba_)?n_groups|o_groups")
_EXPERTS = re.compile(r"(num|n|moe_num)_(local_|routed_)?experts")
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "moe_top_k", "top_k", "top_k_experts")
_GROUPS = ("n_group", "num_expert_group")
_WORDS = re.compile(r"(.*_)?vocab_size(_per_layer_input|_base)?")
_RANK = re.compile(r"(q|kv|o)_lora_rank|adapter_rank|laurel_rank|hidden_size_per_layer_input|(mamba_)?dt_rank|"
                   r"time_step_rank|(mamba_d_|ssm_)?state(_size)?|(mamba_)?chunk_size")  # fmt: skip
"""Ranks, states, and chunks of recurrences: the few positions of the probes fill one chunk."""


MOST_KNOWN = 256
"""Number of stacks whose traits are kept in memory."""
_known: dict[Any, BlockTraits] = {}


@dataclass(frozen=True)
class _Shrink:
    """One way to make the numbers of a config smaller. Bounds that are None are divided by the factor, too."""

    factor: int
    width: int | None = None
    inner: int | None = None
    """Bound of the inner width of feed-forward modules. Recurrent models derive it from the other width."""

    def number(self, name: str, number: int) -> int:
        """The new value of the number that the config has under that name."""
        if isinstance(number, bool) or number <= 0:
            return number
        if _HEADS.fullmatch(name):
            return max(1, number // self.factor)
        if _WIDTH.fullmatch(name):
            return max(1, number // self.factor) if self.width is None else min(number, self.width)
        if _INNER.fullmatch(name):
            return max(1, number // self.factor) if self.inner is None else min(number, self.inner)
        if _RANK.fullmatch(name):
            return min(number, RANK)
        if _WORDS.fullmatch(name):
            return min(number, WORDS)
        return min(number, WORDS - 1) if name.endswith("_token_id") else number


def traits_of(checkpoint: Checkpoint, directory: Path | None = None) -> BlockTraits | None:
    """The traits of all blocks of the checkpoint; None if no copy of this model runs. Results are kept in `directory`.

    It reads no weights; if the config has no dtype, it reads the header of a file. It takes some tenths of a second the
    first time, and at most `MOST_BYTES` of memory.
    """
    try:
        found = [_traits_of_stack(checkpoint, stack, directory) for stack in stacks(checkpoint.config)]
    except UnsupportedModelError as error:
        logger.warning("%s: %s", checkpoint.name, error)
        return None
    if len(found) == 1:
        return found[0]
    encoder, decoder = found
    cuts = (*encoder.forbidden_cuts, *decoder.forbidden_cuts)
    of_encoder = StackTraits(**encoder.model_dump(exclude={"encoder"}))
    return decoder.model_copy(update={"encoder": of_encoder, "forbidden_cuts": cuts})


def _traits_of_stack(checkpoint: Checkpoint, stack: Stack, directory: Path | None) -> BlockTraits:
    """The traits of the blocks of one stack.

    Raises:
        UnsupportedModelError: no copy of the model runs.
    """
    dtype = checkpoint.stored_dtype()
    key = (json.dumps(checkpoint.raw_config(), sort_keys=True, default=str), stack, dtype)
    if key in _known:
        return _known[key]
    kept = None if directory is None else ProbeResults(directory, checkpoint, FULL_PRECISION, left_out=["weights"])
    traits = None if kept is None else kept.traits_of(stack.span, dtype)
    if traits is None:
        blocks = _probed_copy(checkpoint, stack, dtype)
        traits = blocks.traits
        if kept is not None:
            kept.keep(blocks)
    if len(_known) < MOST_KNOWN:
        _known[key] = traits
    return traits


def _probed_copy(checkpoint: Checkpoint, stack: Stack, dtype: torch.dtype) -> BlockSpan:
    failure: Exception | None = None
    for config in _copies(checkpoint.config):
        try:
            blocks = _random_blocks(config, stack, dtype)
            probe(blocks)
        except Exception as error:  # model code with unforeseen sizes: try others
            logger.debug("a copy of %s doesn't run", checkpoint.name, exc_info=error)
            failure = failure or error
            continue
        return blocks
    raise UnsupportedModelError(f"the needs of its blocks can't be seen on a small copy: {failure!r}") from failure


def _random_blocks(config: PreTrainedConfig, stack: Stack, dtype: torch.dtype) -> BlockSpan:
    """All blocks of that stack with random weights.

    Raises:
        UnsupportedModelError: they are too large for that.
    """
    cls = pruned(blocks_class(config), prune_to_span(stack.span))
    hollow = on_meta(cls, config)
    num_bytes = sum(tensor.numel() * tensor.itemsize for tensor in (*hollow.parameters(), *hollow.buffers()))
    if num_bytes > MOST_BYTES:
        raise UnsupportedModelError(f"a copy of {num_bytes >> 20} MB is too large")
    model = with_random_weights(cls, config, dtype, noise=NOISE)
    return BlockSpan(model, stack.span, digests="")


def _copies(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    """Smaller configs, each in another way; the last is the config itself, which may be a tiny model's."""
    text = text_config(config)
    name = next((name for name in config.sub_configs if getattr(config, name, None) is text), None)
    alone = name is not None and has_vision(config)  # its tower isn't needed, and has numbers of its own
    for shrink in _ways(text.to_dict()):
        with suppress(Exception):  # the config's own checks of its numbers
            if not alone:
                yield type(config).from_dict(_shrunk(config.to_dict(), shrink))
                continue
            whole = copy.deepcopy(config)
            setattr(whole, str(name), type(text).from_dict(_shrunk(text.to_dict(), shrink)))
            yield whole
    yield config


def _ways(fields: Mapping[str, Any]) -> Iterator[_Shrink]:
    """First the ways that keep the size of a head. If that has no good divisor, the width mostly doesn't depend on
    it."""
    kinds = itertools.product((False, True), (ALIGNED, 1), (2, 4, 1))
    factors = [_factor(fields, heads, multiple, to_one=to_one) for to_one, multiple, heads in kinds]
    for factor in dict.fromkeys(factors):
        yield _Shrink(factor, inner=INNER_WIDTH)
        yield _Shrink(factor)
    yield _Shrink(max(1, _heads(fields) // 2), width=WIDTH, inner=INNER_WIDTH)


def _heads(fields: Mapping[str, Any]) -> int:
    return next((fields[name] for name in _MAIN_HEADS if isinstance(fields.get(name), int)), 1)


def _factor(fields: Mapping[str, Any], least_heads: int, multiple: int, *, to_one: bool) -> int:
    """The largest divisor of the numbers of heads and of the widths that leaves multiples of something.

    `to_one`: smaller numbers of other heads may become 1.
    """
    heads = _heads(fields)
    counts = [number for name, number in _numbers(fields) if _HEADS.fullmatch(name) and not _OF_KEYS.fullmatch(name)]
    widths = [number for name, number in _numbers(fields) if _WIDTH.fullmatch(name)]

    def fits(factor: int) -> bool:
        return (
            heads // factor >= least_heads
            and not any(number % factor for number in counts if not to_one or number >= factor)
            and not any(width % factor or (width // factor) % multiple for width in widths)
        )

    return max((factor for factor in range(1, heads + 1) if fits(factor)), default=1)


def _numbers(fields: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """All positive numbers of a config, with the names of their fields."""
    for name, value in fields.items():
        if isinstance(value, dict) and all(isinstance(key, str) for key in value):
            yield from _numbers(value)
        for one in value if isinstance(value, list | tuple) else (value,):
            if isinstance(one, int) and not isinstance(one, bool) and one > 0:
                yield name, one


def _shrunk(fields: Mapping[str, Any], shrink: _Shrink) -> dict[str, Any]:
    """The fields of a config for a smaller model."""
    found: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, dict) and all(isinstance(key, str) for key in value):
            found[name] = _shrunk(value, shrink)
        elif isinstance(value, list | tuple) and all(isinstance(one, int) for one in value):
            found[name] = [shrink.number(name, one) for one in value]
        elif isinstance(value, int):
            found[name] = shrink.number(name, value)
        else:  # without a width of their own, feed-forward parts take four times the model's
            found[name] = shrink.inner if value is None and name == "n_inner" else value
    groups = max((found[name] for name in _GROUPS if found.get(name)), default=1)
    chosen = max((found[name] for name in _CHOSEN if found.get(name)), default=1)
    enough = groups * max(2, math.ceil(2 * chosen / groups))
    for name, value in fields.items():
        if _EXPERTS.fullmatch(name) and isinstance(value, int) and value > enough and value % groups == 0:
            found[name] = enough
    return found
