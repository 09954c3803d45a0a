"""Blocks that all processes of a group run together: each has some attention heads, and some features of each MLP.

`find_pairs` finds the modules whose matrices can be cut so that each process computes with its own part until the last
product, which is a sum of all processes' products (EnergonAI, section 4.1.3). They are found by their shapes, and
tried: the module is called with the parts of one process after the other, and the results must add up to its own. So
no architecture is named here. `load_block_span` calls it for each block that it reads, and spreads the matrices so.

`run_together` gives each follower a copy of the blocks, with its own parts of the matrices. `BlockSpan.forward` and
`PackedForward.run_packed` then run on all processes at once, each with its own caches (`parallel/shared`, steps). This
is tried, too. Calls that need whole outputs of inner modules run in this process, which multiplies by command:
adapters, gradients, and attention weights that a client asks for. If blocks have no pairs, or don't give the right
results together, all calls run that way.
"""

import logging
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from swarmllm.data_structures import Span
from swarmllm.errors import GroupLostError
from swarmllm.models.architecture import find_blocks
from swarmllm.models.parallel.exchange import SharedPart, added
from swarmllm.models.parallel.shared import (
    Place,
    SharedMatrix,
    SharedWeight,
    counts,
    matrices_of,
    part_of,
    put,
)
from swarmllm.models.quantization import QuantizedWeight
from swarmllm.models.span.block_span import BlockSpan, KeptState
from swarmllm.models.span.trials import random_inputs, rms

logger = logging.getLogger(__name__)

UNITS = (256, 64, 32, 16, 1)
"""Features that stay together: the first number that gives each process some. Formats in few bits have groups of up to
256 weights, and kernels like multiples of 16."""
TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}
"""Largest relative errors by rounding. Measured: 3e-7 in float32; wrong parts have errors around 1."""
POSITIONS = 8


@dataclass(frozen=True)
class _Half:
    """A module that may be half a block: matrices that it enters by, and the one that it leaves by."""

    module: nn.Module
    entering: tuple[str, ...]
    leaving: str
    head_dim: int
    """Size of an attention head; 0: it has none."""

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.entering, self.leaving)

    def places(self, weights: dict[str, QuantizedWeight], num_processes: int) -> Iterator[dict[str, Place]]:
        """Ways to cut its matrices."""
        rows = [weights[name].packed.shape[0] for name in self.entering]
        width = weights[self.leaving].packed.shape[1]
        most, rest = divmod(gcd(width, *rows), self.head_dim or 1)
        if rest:
            return
        for unit in UNITS if not self.head_dim else (1,):
            num_units, rest = divmod(most, unit)
            if rest or num_units < num_processes:
                continue
            places = {
                name: Place(counts(num_units, num_processes, size // num_units), "rows")
                for name, size in zip(self.entering, rows, strict=True)
            }
            yield places | {self.leaving: Place(counts(num_units, num_processes, width // num_units), "columns")}


class Pairs:
    """Finds the pairs of blocks, one block after the other; blocks of the same shapes are tried once."""

    def __init__(self, num_processes: int) -> None:
        self._num_processes = num_processes
        self._known: dict[object, dict[str, Place]] = {}

    def of(self, model: PreTrainedModel, span: Span) -> dict[str, Place]:
        """The places of the matrices of pairs, by the path of their modules; `model` has one block."""
        slots = find_blocks(model).blocks
        prefix = next(f"{name}." for name, module in model.named_modules() if module is slots)
        found: dict[str, Place] = {}
        halves = dict(_halves(model, prefix))
        wanted = {path: half for path, half in halves.items() if self._key(model, path, half) not in self._known}
        calls = _recorded(model, span, [half.module for half in wanted.values()]) if wanted else {}
        for path, half in halves.items():
            key = self._key(model, path, half)
            if key not in self._known:
                call = calls.get(half.module)
                self._known[key] = {} if call is None else self._tried(half, _weights(model, path, half), call)
            found |= {f"{path}.{name}": place for name, place in self._known[key].items()}
        return found

    def _key(self, model: PreTrainedModel, path: str, half: _Half) -> object:
        weights = _weights(model, path, half).items()
        of_weights = tuple((name, type(one.packed), one.packed.shape, one.dtype) for name, one in weights)
        return type(half.module), path.rpartition(".")[2], half.head_dim, of_weights

    @torch.no_grad()
    def _tried(self, half: _Half, weights: dict[str, QuantizedWeight], call: "_Call") -> dict[str, Place]:
        for places in half.places(weights, self._num_processes):
            try:
                got = added([self._part(half, weights, places, rank, call) for rank in range(self._num_processes)])
            except Exception as error:  # noqa: BLE001 - groups that can't be cut, or model code that needs all heads
                logger.debug("%s can't be cut: %s: %s", type(half.module).__name__, type(error).__name__, error)
                continue
            if _agrees(got, call.output):
                return places
        return {}

    def _part(
        self, half: _Half, weights: dict[str, QuantizedWeight], places: dict[str, Place], rank: int, call: "_Call"
    ) -> Tensor:
        """The module's result with the matrices of one process."""
        modules = {name: half.module.get_submodule(name) for name in half.names}
        before = {name: (dict(one._parameters), dict(one._modules)) for name, one in modules.items()}
        try:
            for name, place in places.items():
                weight = weights[name]
                own = part_of(weight.packed, place.sizes, rank, place.cut)
                bias = None
                matrix = SharedMatrix(
                    weight.dtype, SharedPart(-1), own, None, place.sizes, bias, _Alone(rank), place.cut, True
                )
                put(modules[name], "weight", SharedWeight(matrix, transposed=weight.transposed))
                if place.cut == "columns" and rank and "bias" in modules[name]._parameters:
                    modules[name]._parameters["bias"] = None  # it is added once
            return _first(half.module(*call.args, **call.kwargs))
        finally:
            for name, (parameters, children) in before.items():
                modules[name]._parameters.clear()
                modules[name]._parameters.update(parameters)
                modules[name]._modules.clear()
                modules[name]._modules.update(children)


class _Alone:
    """One process of a step, without the others."""

    is_stepping = True

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def exchanged(self, own: Tensor, most_bytes: int, combine: object) -> Tensor:
        return own


@dataclass(frozen=True)
class _Call:
    args: Any
    kwargs: Any
    output: Tensor


def _halves(model: PreTrainedModel, prefix: str) -> Iterator[tuple[str, _Half]]:
    """Modules of the blocks whose matrices have the shapes of a pair."""
    for path, module in model.named_modules():
        if not path.startswith(prefix):
            continue
        shapes = {
            name: weights["weight"].packed.shape
            for name, child in module.named_children()
            if isinstance(child, nn.Linear | Conv1D)
            and (weights := matrices_of(model, f"{path}.{name}", child)).keys() == {"weight"}
        }
        if len(shapes) < 2:
            continue
        *entering, leaving = shapes
        width, inner = shapes[leaving]
        if all(shapes[name][1] == width and not shapes[name][0] % inner for name in entering) or all(
            shapes[name][1] == width and _head_dim(module) for name in entering
        ):
            yield path, _Half(module, tuple(entering), leaving, _head_dim(module))


def _head_dim(module: nn.Module) -> int:
    head_dim = getattr(module, "head_dim", None) or getattr(module, "head_size", None)
    return head_dim if isinstance(head_dim, int) else 0


def _weights(model: PreTrainedModel, path: str, half: _Half) -> dict[str, QuantizedWeight]:
    return {
        name: matrices_of(model, f"{path}.{name}", half.module.get_submodule(name))["weight"] for name in half.names
    }


def _recorded(model: PreTrainedModel, span: Span, modules: Sequence[nn.Module]) -> dict[nn.Module, _Call]:
    """A call of each of these modules, in a forward of the block on random inputs."""
    calls: dict[nn.Module, _Call] = {}

    def note(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        calls[module] = _Call(args, kwargs, _first(output))

    hooks = [module.register_forward_hook(note, with_kwargs=True) for module in modules]
    blocks = BlockSpan(model, span, "")
    fresh = KeptState.everything(blocks.stack)
    try:
        with torch.no_grad():
            blocks.run_blocks(random_inputs(blocks, min(POSITIONS, blocks.max_positions or POSITIONS)), span)
    except Exception as error:  # noqa: BLE001 - blocks that take more than hidden states
        logger.debug("the halves of blocks %s aren't tried: %s: %s", span, type(error).__name__, error)
        return {}
    finally:
        for hook in hooks:
            hook.remove()
        fresh.changed(blocks.stack).put_back()
    return calls


def _first(output: Any) -> Tensor:
    tensor: Tensor = output[0] if isinstance(output, tuple) else output
    return tensor


def _agrees(got: Tensor, wanted: Tensor) -> bool:
    error, limit = rms(got - wanted), TOLERANCES.get(wanted.dtype, 0.0)
    return error <= limit * rms(wanted)  # NaN never is


# ---------------------------------------------------------------------- copies of the blocks


def run_together(blocks: BlockSpan) -> None:
    """Have followers run these blocks, too, if that gives the right results."""
    group = blocks.group
    if group is None or not blocks.has_pairs:
        return
    blocks.kept_state.put_back()
    try:
        group.hold(blocks, BlockSpan.following, "__call__", blocks.for_followers())
    except (pickle.PicklingError, TypeError, AttributeError, RecursionError) as error:
        logger.info("followers only multiply: the blocks can't be copied: %s", error)
        return
    try:
        wanted = list(_results(blocks))
        blocks.is_together = True
        blocks.heads = _spread_heads(blocks)
        blocks.is_together = all(map(_agrees, _results(blocks), wanted))
    except GroupLostError:
        raise
    except Exception as error:  # noqa: BLE001 - model code that can't do with some heads
        logger.info("followers only multiply: %s: %s", type(error).__name__, error)
        blocks.is_together = False
    if blocks.is_together:
        logger.info("each process has its own attention heads, features of MLPs, and caches")


@torch.inference_mode()
def _spread_heads(blocks: BlockSpan) -> dict[int, tuple[int, ...]]:
    """Key heads of each process, for blocks where each has some of them."""
    if blocks.group is None or not blocks.keeps_cache:
        return {}
    cache = blocks.new_cache()
    blocks.forward(random_inputs(blocks, 1), cache=cache)
    heads = zip(cache.key_heads(), *blocks.group.ask(cache, "key_heads"), strict=True)
    whole = {block_idx: keys[0] for block_idx, (keys, _) in blocks.cache_sizes.key_value_shapes.items()}
    return {idx: of_block for idx, of_block in zip(blocks.span, heads, strict=True) if sum(of_block) == whole.get(idx)}


@torch.inference_mode()
def _results(blocks: BlockSpan) -> Iterator[Tensor]:
    """The outputs of some calls: a prompt, single steps behind it, other rows, a shared page, a cache made whole."""
    inputs = random_inputs(blocks, min(POSITIONS, blocks.max_positions or POSITIONS), batch_size=2)
    yield blocks.forward(inputs)
    if not blocks.keeps_cache or inputs.seq_len < 4:
        return
    last = inputs.seq_len - 1
    cache = blocks.new_cache(record_past=True)
    yield blocks.forward(inputs.columns(0, last - 1, 0, blocks.traits), cache=cache)
    yield blocks.forward(inputs.columns(last - 1, last, last - 1, blocks.traits), cache=cache)
    if blocks.traits.rollback:
        cache.rollback(last - 1)
        yield blocks.forward(inputs.columns(last - 1, last, last - 1, blocks.traits), cache=cache)
    cache.select_batch([1, 0])
    yield blocks.forward(inputs.columns(last, last + 1, last, blocks.traits), cache=cache)
    if cache.is_pageable:
        other = blocks.new_cache()
        other.append_page(cache.page(0, last))
        yield blocks.forward(inputs.columns(last, last + 1, last, blocks.traits), cache=other)
    cache.make_whole()
    yield blocks.forward(inputs.columns(last, last + 1, last, blocks.traits), cache=cache)
