"""Blocks that all processes of a group run together: each has some attention heads, and some features of each MLP.

`Pairs` finds the modules whose matrices can be cut so that each process computes with its own part until the last
product, which is a sum of all processes' products (EnergonAI, section 4.1.3). Such a module is usually half a block:
attention, or the MLP. They are found by their shapes, and tried: the module is called with the parts of one process
after the other, and the results must add up to its own. So no architecture is named here. `load_block_span` calls
`Pairs.of` for each block that it reads, and spreads the matrices over the processes accordingly.

`run_together` gives each follower a copy of the blocks, with its own parts of the matrices. `BlockSpan.forward` and
`PackedForward.run_packed` then run on all processes at once, each with its own caches (the steps of `parallel/shared`).
This is tried, too. Calls that need whole outputs of inner modules run in this process, which multiplies by command:
adapters, gradients, and attention weights that a client asks for. If blocks have no pairs, or don't give the right
results together, all calls run that way.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from swarmllm.data_structures import Span
from swarmllm.errors import GroupLostError
from swarmllm.models.architecture import find_blocks
from swarmllm.models.parallel.exchange import SharedPart, added, check_copyable
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
"""Numbers of features that are never cut apart. The first one with which each process gets some is taken. Formats in
few bits have groups of up to 256 weights, and kernels are faster with multiples of 16."""
TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}
"""Largest relative errors by rounding. Measured: 3e-7 in float32; wrong parts have errors around 1."""
POSITIONS = 8
"""Length of the prompt with which blocks are tried."""


@dataclass(frozen=True)
class _Module:
    """A module with several matrices, which may be half a block."""

    module: nn.Module
    weights: dict[str, QuantizedWeight]
    """By the names of its linear layers."""

    @property
    def key(self) -> object:
        """A key that is equal for modules that can be cut in the same way."""
        of_weights = ((name, type(one.packed), one.packed.shape, one.dtype) for name, one in self.weights.items())
        return type(self.module), self.head_dim, *of_weights

    @property
    def head_dim(self) -> int:
        """Size of an attention head; 0: it has none."""
        head_dim = getattr(self.module, "head_dim", None) or getattr(self.module, "head_size", None)
        return head_dim if isinstance(head_dim, int) else 0

    def places(self, num_processes: int) -> Iterator[dict[str, Place]]:
        """Ways to cut its matrices that fit their shapes: one matrix is the last, the others get the same inputs."""
        for leaving in reversed(self.weights):
            outputs, width = self.weights[leaving].packed.shape
            shapes = {name: weight.packed.shape for name, weight in self.weights.items() if name != leaving}
            most, rest = divmod(gcd(width, *(rows for rows, _ in shapes.values())), self.head_dim or 1)
            if rest or any(columns != outputs for _, columns in shapes.values()):
                continue
            for unit in (1,) if self.head_dim else UNITS:
                num_units, rest = divmod(most, unit)
                if not rest and num_units >= num_processes:
                    sizes = {
                        name: counts(num_units, num_processes, rows // num_units) for name, (rows, _) in shapes.items()
                    }
                    last = Place(counts(num_units, num_processes, width // num_units), "columns")
                    yield {name: Place(one, "rows") for name, one in sizes.items()} | {leaving: last}

    def part(self, places: dict[str, Place], rank: int, call: "_Call") -> Tensor:
        """The module's result with the matrices of one process."""
        layers = {name: self.module.get_submodule(name) for name in places}
        before = {name: (dict(one._parameters), dict(one._modules)) for name, one in layers.items()}
        try:
            for name, place in places.items():
                weight, layer = self.weights[name], layers[name]
                own = part_of(weight.packed, place.sizes, rank, place.cut)
                matrix = SharedMatrix(
                    weight.dtype, SharedPart(-1), own, None, place.sizes, None, _Alone(rank), place.cut, True
                )
                put(layer, "weight", SharedWeight(matrix, transposed=weight.transposed))
                if place.cut == "columns" and rank and "bias" in layer._parameters:
                    layer._parameters["bias"] = None  # it is added once
            return _first(self.module(*call.args, **call.kwargs))
        finally:
            for name, (parameters, children) in before.items():
                for present, usual in ((layers[name]._parameters, parameters), (layers[name]._modules, children)):
                    present.clear()
                    present.update(usual)  # type: ignore[arg-type]


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
        modules = dict(_modules(model, prefix))
        wanted = [module.module for path, module in modules.items() if module.key not in self._known]
        calls = _recorded(model, span, wanted) if wanted else {}
        for path, module in modules.items():
            if module.key not in self._known:
                call = calls.get(module.module)
                self._known[module.key] = {} if call is None else self._tried(module, call)
            found |= {f"{path}.{name}": place for name, place in self._known[module.key].items()}
        return found

    @torch.no_grad()
    def _tried(self, module: "_Module", call: "_Call") -> dict[str, Place]:
        for places in module.places(self._num_processes):
            try:
                got = added([module.part(places, rank, call) for rank in range(self._num_processes)])
            except Exception as error:  # noqa: BLE001 - groups that can't be cut, or model code that needs all heads
                logger.debug("%s can't be cut: %s: %s", type(module.module).__name__, type(error).__name__, error)
                continue
            if _agrees(got, call.output):
                return places
        return {}


class _Alone:
    """Stands for the group while one process's part is tried: products aren't exchanged (`shared.Member`)."""

    is_stepping = True

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def exchanged(self, own: Tensor, most_bytes: int, combine: object) -> Tensor:
        return own


@dataclass(frozen=True)
class _Call:
    """A call of a module that was seen, and its output."""

    args: Any
    kwargs: Any
    output: Tensor


def _modules(model: PreTrainedModel, prefix: str) -> Iterator[tuple[str, _Module]]:
    """Modules of the blocks that have several matrices."""
    for path, module in model.named_modules():
        layers = module.named_children() if path.startswith(prefix) else ()
        matrices = {
            name: matrices_of(model, f"{path}.{name}", layer).get("weight")
            for name, layer in layers
            if isinstance(layer, nn.Linear | Conv1D)
        }
        weights = {name: weight for name, weight in matrices.items() if weight is not None}
        if len(weights) > 1:
            yield path, _Module(module, weights)


def _recorded(model: PreTrainedModel, span: Span, modules: Sequence[nn.Module]) -> dict[nn.Module, _Call]:
    """A call of each of these modules, in a forward of the block on random inputs."""
    calls: dict[nn.Module, _Call] = {}

    def note(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        args, kwargs, output = tree_map_only(
            Tensor, torch.clone, (args, kwargs, _first(output))
        )  # later code may change them in place
        calls[module] = _Call(args, kwargs, output)

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
        check_copyable(blocks.for_followers(), group.name)
        group.hold(blocks, BlockSpan.following, "__call__", blocks.for_followers())
        wanted = list(_results(blocks))
        blocks.is_together = True
        blocks.heads = _spread_heads(blocks)
        blocks.is_together = all(map(_agrees, _results(blocks), wanted))
    except GroupLostError:
        raise
    except Exception as error:  # noqa: BLE001 - model code that can't be copied, or do with some heads
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
