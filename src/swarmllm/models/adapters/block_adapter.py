"""Small trained tensors that a client adds to blocks on servers, for its own calls alone.

A `Patch` names a linear module of a block, and says how tensors change its output. A `BlockAdapter` holds the patches
of some blocks with their values. The client makes one from the layers that peft has put into its hollow blocks
(`shell/hollow_blocks`). It travels as one flat tensor and a list of patches, never as code. The server checks it
against its blocks (`checked`), and applies it by hooks while a call runs (`applied`). Gradients with respect to the
values come back the same way.

    kind       tensors                        computes (x a module's input, y its output, W its weight)
    lora       A [r, in], B [out, r], b?      y + (B(A(x)) + b) · scale, perhaps with dropout of x (`dropout`)
    dora       A, B, m [out]                  the same; the rows of W + BA · scale are made as long as m
    ia3_in     l [in]                         the module on x · l
    ia3_out    l [out]                        y · l
    loha       a1 b1 a2 b2                    y + (a1 b1 ∘ a2 b2) · scale (x)
    kron       w1 [a, b], w2 [c, d]           y + (w1 ⊗ w2) · scale (x), with a·c = out and b·d = in
    rotate     R [in / n, n, n]               the module on x; each n features of x are multiplied by a matrix
    tensor     any                            a module with this tensor in place of the parameter at the patch's path
    dropout    none                           a block in train mode (`dropout`), or one of its Dropouts at the patch's
                                              path with another rate
    autocast   none                           a block under torch.autocast, with the dtype that the path names
    prompt     p [prompts, hidden]            a whole block on x + p, at the first positions of a text
    prefix     k, v [heads, prefix, head]     a whole block with these keys and values before those of a text

A prefix is no hook: `BlockSpan` puts it into the cache of a call, and the text's positions begin after it. A method of
peft that has none of these forms may still be computed to one of them on the client (`peft_layers`); autograd
goes on from it.
"""

import itertools
import math
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from swarmllm.data_structures import Patch, Span
from swarmllm.errors import RemoteProtocolError
from swarmllm.models.adapters.dropout import SEEDS, drop_out, seeds_of_source, training
from swarmllm.models.block_slots import BlockSlots

MAX_RANK = 1024
Shapes = tuple[tuple[int, ...], ...]

MAX_PROMPTS = 1024
"""Positions of deep prompts, or of a prefix. Assumed: papers use up to some hundreds."""
AUTOCAST = {"bfloat16": torch.bfloat16}
"""Dtypes of blocks under autocast, by the paths of patches. Not float16: an overflow is the business of a client's
gradient scaler, and would look like a server's mistake."""

KeyValueShapes = Mapping[int, tuple[tuple[int, int], tuple[int, int]]]
"""(heads, head size) of the keys and of the values that a block keeps; blocks that can't have a prefix are missing."""


class Inputs(NamedTuple):
    """Dropout of the inputs of one patch's module, and the tokens that the patch is for."""

    drop: Callable[[Tensor], Tensor] | None = None
    """Dropout of them."""
    chosen: Tensor | None = None
    """`[batch, seq]`: the tokens that the patch is for; None = all."""


ALL = Inputs()


def in_and_out_features(module: nn.Module) -> tuple[int, int] | None:
    """(features in, features out) of a linear module; None if it is something else (GPT-2's Conv1D is linear)."""
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    if type(module).__name__ == "Conv1D":
        weight = getattr(module, "weight", None)
        return (weight.shape[0], weight.shape[1]) if weight is not None and weight.ndim == 2 else None
    return None


def check_shapes(patch: Patch, module: nn.Module, where: str) -> None:
    """Check that the patch's tensors fit the module.

    Raises:
        RemoteProtocolError: they don't.
    """
    features = in_and_out_features(module)
    if features is None:
        raise RemoteProtocolError(f"{where}: it is a {type(module).__name__}, not a linear module")
    fan_in, fan_out = features
    if not patch.shapes or not _fits(patch.kind, patch.shapes, fan_in, fan_out):
        raise RemoteProtocolError(f"{where}: its shapes {patch.shapes} don't fit a module {fan_in} → {fan_out}")


def _fits(kind: str, shapes: Shapes, fan_in: int, fan_out: int) -> bool:
    if kind in ("lora", "row_lora", "dora", "loha"):
        rank = shapes[0][-1] if kind == "loha" else shapes[0][0]
        pair = ((rank, fan_in), (fan_out, rank))
        wanted = {
            "lora": (pair, (*pair, (fan_out,))),
            "row_lora": (pair, (*pair, (fan_out,))),
            "dora": ((*pair, (fan_out,)),),
            "loha": (((fan_out, rank), (rank, fan_in)) * 2,),
        }[kind]
        return rank <= MAX_RANK and shapes in wanted
    if kind == "kron":
        return [len(shape) for shape in shapes] == [2, 2] and (
            shapes[0][0] * shapes[1][0] == fan_out and shapes[0][1] * shapes[1][1] == fan_in
        )
    if kind == "rotate":
        (count, *sizes), *more = shapes
        return not more and len(sizes) == 2 and sizes[0] == sizes[1] <= MAX_RANK and count * sizes[0] == fan_in
    return shapes == {"ia3_in": ((fan_in,),), "ia3_out": ((fan_out,),)}.get(kind)


def put_in_place(module: nn.Module, values: tuple[Tensor, ...], patch: Patch, how: Inputs = ALL) -> Any:
    """Have `module` compute with the patch until the handle that is returned is removed."""
    return _FORMS[patch.kind](module, values, patch.scale, how)


def _lora(module: nn.Module, values: tuple[Tensor, ...], scale: float, how: Inputs) -> Any:
    down, up, *bias = values

    def hook(_: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        inputs = args[0].to(down.dtype)
        if how.drop is not None:
            inputs = how.drop(inputs)
        rows = None if how.chosen is None else _places(how.chosen, output)
        if rows is not None:
            inputs = inputs[rows]
        inner = functional.linear(functional.linear(inputs, down), up, *bias) * scale
        if rows is None:
            return (output + inner).to(output.dtype)
        return output.index_put((rows,), (output[rows] + inner).to(output.dtype))

    return module.register_forward_hook(hook)


def _places(chosen: Tensor, output: Tensor) -> Tensor:
    """The places of tokens in the outputs of a module, `[batch, seq, features]` or all tokens in a row."""
    places = tuple(output.shape[:-1])
    if places not in (tuple(chosen.shape), (chosen.numel(),)):
        raise RemoteProtocolError(
            f"adapter_names are for outputs {[*chosen.shape, output.shape[-1]]}, but a module here gives "
            f"{list(output.shape)}: leave it out of target_modules"
        )
    return chosen.to(output.device).view(places)


def _dora(module: nn.Module, values: tuple[Tensor, ...], scale: float, how: Inputs) -> Any:
    down, up, magnitude = values

    def hook(module: Any, args: tuple[Any, ...], output: Tensor) -> Any:
        weight = module.weight
        weight = weight.T if type(module).__name__ == "Conv1D" else weight
        weight = weight.dequantize() if hasattr(weight, "packed") else weight
        inputs = args[0].to(down.dtype)
        if how.drop is not None:
            inputs = how.drop(inputs)
            base = functional.linear(inputs, weight.to(inputs.dtype))
        else:
            base = output if module.bias is None else output - module.bias
        long = torch.linalg.norm(weight + scale * (up @ down).detach().to(weight.dtype), dim=1).to(weight.dtype)
        factor = magnitude / long.detach()
        inner = functional.linear(functional.linear(inputs, down), up) * scale
        return (output + (factor - 1) * base + factor * inner).to(output.dtype)

    return module.register_forward_hook(hook)


def _ia3_in(module: nn.Module, values: tuple[Tensor, ...], _scale: float, _how: Inputs) -> Any:
    (factors,) = values

    def hook(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return ((args[0].to(factors.dtype) * factors).to(args[0].dtype), *args[1:])

    return module.register_forward_pre_hook(hook)


def _ia3_out(module: nn.Module, values: tuple[Tensor, ...], _scale: float, _how: Inputs) -> Any:
    (factors,) = values
    return module.register_forward_hook(lambda _, __, output: (output * factors).to(output.dtype))


def _loha(module: nn.Module, values: tuple[Tensor, ...], scale: float, _how: Inputs) -> Any:
    a1, b1, a2, b2 = values
    return _added(module, lambda: (a1 @ b1) * (a2 @ b2) * scale)


def _kron(module: nn.Module, values: tuple[Tensor, ...], scale: float, _how: Inputs) -> Any:
    return _added(module, lambda: torch.kron(*values) * scale)


def _added(module: nn.Module, delta: Callable[[], Tensor]) -> Any:
    """A weight `[out, in]` added to the module's own, made for each call."""

    def hook(_: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        weight = delta()
        return (output + functional.linear(args[0].to(weight.dtype), weight)).to(output.dtype)

    return module.register_forward_hook(hook)


def _rotate(module: nn.Module, values: tuple[Tensor, ...], _scale: float, _how: Inputs) -> Any:
    (blocks,) = values

    def hook(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        inputs = args[0]
        parts = inputs.to(blocks.dtype).unflatten(-1, blocks.shape[:2])
        turned = torch.einsum("...rk,rkc->...rc", parts, blocks).flatten(-2)
        return (turned.to(inputs.dtype), *args[1:])

    return module.register_forward_pre_hook(hook)


_FORMS: dict[str, Callable[[nn.Module, tuple[Tensor, ...], float, Inputs], Any]] = {
    "lora": _lora,
    "row_lora": _lora,
    "dora": _dora,
    "ia3_in": _ia3_in,
    "ia3_out": _ia3_out,
    "loha": _loha,
    "kron": _kron,
    "rotate": _rotate,
}


@dataclass(frozen=True, eq=False)
class BlockAdapter:
    """Patches and their values: on a client a copy of what was trained, on a server leaves of a call's graph."""

    patches: tuple[Patch, ...]
    values: tuple[tuple[Tensor, ...], ...]
    """Tensors of each patch; all of one floating-point dtype."""
    version: int = 0
    """The client's: equal for equal values."""
    name: str = ""
    """Name of an adapter that a server offers to everybody; such a one isn't trained."""

    @cached_property
    def has_dropout(self) -> bool:
        """True if each call with it needs seeds."""
        return any(patch.dropout or patch.kind == "dropout" for patch in self.patches)

    @cached_property
    def has_numbers(self) -> bool:
        """True if each call with it says which tokens are for which patches."""
        return any(patch.number for patch in self.patches)

    @cached_property
    def num_prompts(self) -> int:
        """Positions at the beginning of a text at which it does something else than later."""
        return max((patch.shapes[0][0] for patch in self.patches if patch.kind == "prompt"), default=0)

    @cached_property
    def num_prefix(self) -> int:
        """Positions of keys and values that come before a text."""
        return max((patch.shapes[0][1] for patch in self.patches if patch.kind == "prefix"), default=0)

    def prefix(self, span: Span) -> dict[int, tuple[Tensor, Tensor]]:
        """Keys and values `[heads, prefix, head]` by block of `span`."""
        pairs = zip(self.patches, self.values, strict=True)
        return {
            patch.block: (values[0], values[1])
            for patch, values in pairs
            if patch.kind == "prefix" and patch.block in span
        }

    def part(self, span: Span) -> "BlockAdapter | None":
        """The patches of the blocks of `span`; None if there are none."""
        kept = [index for index, patch in enumerate(self.patches) if patch.block in span]
        if not kept:
            return None
        return BlockAdapter(
            tuple(self.patches[i] for i in kept), tuple(self.values[i] for i in kept), version=self.version
        )

    def indices(self, span: Span) -> list[int]:
        """The indices of the tensors of `part(span)` among all `tensors()`."""
        counts = [len(patch.shapes) if patch.block in span else -len(patch.shapes) for patch in self.patches]
        starts = itertools.accumulate((abs(count) for count in counts), initial=0)
        return [start + i for start, count in zip(starts, counts, strict=False) for i in range(count)]

    def tensors(self) -> list[Tensor]:
        """All values in their order."""
        return [tensor for of_patch in self.values for tensor in of_patch]

    def flat(self) -> Tensor:
        """All values in one dimension, as they travel."""
        return torch.cat([torch.empty(0), *(tensor.detach().flatten() for tensor in self.tensors())])

    def unflatten(self, flat: Tensor) -> list[Tensor]:
        """The inverse of `flat`, for gradients."""
        sizes = [tensor.numel() for tensor in self.tensors()]
        parts = zip(torch.split_with_sizes(flat, sizes), self.tensors(), strict=True)
        return [part.view(like.shape) for part, like in parts]

    def leaves(self) -> "BlockAdapter":
        """The same values as tensors that want gradients of their own."""
        values = tuple(tuple(tensor.detach().requires_grad_() for tensor in of_patch) for of_patch in self.values)
        return BlockAdapter(self.patches, values, version=self.version)


def checked(
    patches: Sequence[Patch],
    flat: Tensor,
    slots: BlockSlots,
    hidden_size: int | None = None,
    key_value_shapes: KeyValueShapes | None = None,
) -> BlockAdapter:
    """Check a client's patches and values, and make an adapter for these blocks of them.

    Args:
        hidden_size: of hidden states `[batch, seq, hidden]`; None: they have another form, or are not known.
        key_value_shapes: of these blocks' keys and values in a cache; None: they can't have a prefix.

    Raises:
        RemoteProtocolError: they don't fit these blocks.
    """
    needed = 0
    _check_prefix([patch for patch in patches if patch.kind == "prefix"], key_value_shapes or {})
    for patch in patches:
        _check_patch(patch, slots, hidden_size)
        needed += sum(math.prod(shape) for shape in patch.shapes)
    if flat.ndim != 1 or not flat.is_floating_point() or len(flat) != needed:
        raise RemoteProtocolError(f"the adapter's values must be {needed} floats, got {list(flat.shape)} {flat.dtype}")
    if not bool(flat.isfinite().all()):
        raise RemoteProtocolError("the adapter's values must be finite: its training has diverged")
    sizes = [math.prod(shape) for patch in patches for shape in patch.shapes]
    parts = iter(torch.split_with_sizes(flat, sizes))
    values = tuple(tuple(next(parts).view(shape) for shape in patch.shapes) for patch in patches)
    return BlockAdapter(tuple(patches), values)


def _check_patch(patch: Patch, slots: BlockSlots, hidden_size: int | None) -> None:
    where = f"{patch.kind} for {patch.path or 'the whole'} of block {patch.block}"
    if patch.block not in slots.hosted:
        raise RemoteProtocolError(f"{where}: this server holds blocks {slots.hosted}")
    if (patch.number > 0) != (patch.kind == "row_lora"):
        raise RemoteProtocolError(f"{where}: row_lora has a number above 0, and others have none")
    if patch.kind == "prompt":
        num_prompts = patch.shapes[0][0] if patch.shapes else 0
        if patch.path or patch.shapes != ((num_prompts, hidden_size),) or num_prompts > MAX_PROMPTS:
            raise RemoteProtocolError(
                f"{where}: prompts must be [at most {MAX_PROMPTS}, {hidden_size}], got {patch.shapes}"
            )
        return
    if patch.kind == "prefix":
        return  # `_check_prefix` has
    if patch.kind == "autocast":
        if patch.path not in AUTOCAST or patch.shapes:
            raise RemoteProtocolError(f"{where}: there is no such dtype, or it has tensors")
        return
    path, _, name = patch.path.rpartition(".") if patch.kind == "tensor" else (patch.path, "", "")
    try:
        module = slots.block(patch.block).get_submodule(path)
    except AttributeError:
        raise RemoteProtocolError(f"{where}: this model has no such module") from None
    if patch.kind == "tensor":
        current = module._parameters.get(name)
        if current is None or patch.shapes != (tuple(current.shape),):
            raise RemoteProtocolError(f"{where}: there is no parameter of this shape, or it is quantized")
    elif patch.kind == "dropout":
        if patch.shapes or (patch.path and not isinstance(module, nn.Dropout)):
            raise RemoteProtocolError(f"{where}: there is no dropout")
    else:
        check_shapes(patch, module, where)


def _check_prefix(patches: Sequence[Patch], shapes: KeyValueShapes) -> None:
    """One for each block, and as long for all."""
    if not patches:
        return
    first = patches[0].shapes
    num_prefix = first[0][1] if first and len(first[0]) == 3 else 0
    if num_prefix > MAX_PROMPTS:
        raise RemoteProtocolError(f"a prefix may have {MAX_PROMPTS} positions, not {num_prefix}")
    for patch in patches:
        if patch.block not in shapes:
            raise RemoteProtocolError(f"block {patch.block} keeps no keys and values that a prefix could come before")
        wanted = tuple((heads, num_prefix, size) for heads, size in shapes[patch.block])
        if patch.path or patch.shapes != wanted:
            raise RemoteProtocolError(
                f"the prefix of block {patch.block} must be keys and values {wanted}, got {patch.shapes}"
            )
    if len({patch.block for patch in patches}) < len(patches):
        raise RemoteProtocolError("a block can have one prefix only")


@contextmanager
def applied(
    adapter: BlockAdapter,
    slots: BlockSlots,
    span: Span,
    past: int | None = None,
    seeds: Tensor | None = None,
    numbers: Tensor | None = None,
    device: str = "cpu",
    source_len: int = 0,
) -> Iterator[None]:
    """Within: the blocks of `span` compute with the adapter.

    Args:
        past: positions that a cache has; None = there is no cache.
        seeds: `[batch, seq]`, for dropout.
        numbers: `[batch, seq]`, the patches' numbers for each token.
        device: the type of the blocks' device.
        source_len: positions of an encoder's outputs, if the blocks are given some.

    Raises:
        RemoteProtocolError: it has dropout and there are no seeds, or it is for some tokens and there are no numbers.
    """
    if (seeds is None and adapter.has_dropout) or (numbers is None and adapter.has_numbers):
        missing = "dropout_seeds" if seeds is None and adapter.has_dropout else "adapter_numbers"
        raise RemoteProtocolError(f"this adapter needs {missing} with every call")
    met = Counter[tuple[int, str]]()
    of_span = [pair for pair in zip(adapter.patches, adapter.values, strict=True) if pair[0].block in span]
    with ExitStack() as hooks:
        for patch, values in of_span:
            block = slots.block(patch.block)
            if patch.kind == "tensor":
                hooks.enter_context(_in_the_place_of(block, patch.path, values[0]))
            elif patch.kind == "prompt":
                if (past or 0) < len(values[0]):
                    hooks.callback(_prompt(block, values[0][past or 0 :], slots).remove)
            elif patch.kind not in ("prefix", "dropout", "autocast"):
                key = dropout_key(patch.block, patch.path, met[patch.block, patch.path])
                met[patch.block, patch.path] += 1
                inputs = _inputs_of(patch, key, seeds, numbers, source_len)
                hooks.callback(put_in_place(block.get_submodule(patch.path), values, patch, inputs).remove)
        dropouts = [patch for patch, _ in of_span if patch.kind == "dropout"]
        in_training = {patch.block: slots.block(patch.block) for patch in dropouts if not patch.path}
        if in_training and seeds is not None:
            rates = {slots.block(one.block).get_submodule(one.path): one.dropout for one in dropouts if one.path}
            hooks.enter_context(training(in_training, rates, seeds, cached=past is not None))
        for dtype in {AUTOCAST[patch.path] for patch, _ in of_span if patch.kind == "autocast"}:
            hooks.enter_context(torch.autocast(device, dtype))
        yield


def _inputs_of(patch: Patch, key: int, seeds: Tensor | None, numbers: Tensor | None, source_len: int) -> Inputs:
    """Dropout of a patch's inputs by the seeds of this call, and the tokens that the patch is for."""
    drop = None
    if patch.dropout and seeds is not None:
        drop = partial(_drop_inputs, seeds=seeds, source_len=source_len, key=key, rate=patch.dropout)
    return Inputs(drop, numbers == patch.number if patch.number and numbers is not None else None)


def _drop_inputs(values: Tensor, *, seeds: Tensor, source_len: int, key: int, rate: float) -> Tensor:
    """Dropout of a module's inputs, which belong to the text, or to an encoder's outputs."""
    if source_len and values.shape[:-1] == (len(seeds), source_len):
        seeds = seeds_of_source(seeds, source_len)
    return drop_out(values, seeds, key, rate)


@contextmanager
def _in_the_place_of(block: nn.Module, path: str, value: Tensor) -> Iterator[None]:
    """Within, the value is used instead of this parameter."""
    owner, _, name = path.rpartition(".")
    parameters: dict[str, Any] = block.get_submodule(owner)._parameters
    before = parameters[name]
    parameters[name] = value.to(before)
    try:
        yield
    finally:
        parameters[name] = before


def dropout_key(block_idx: int, path: str, number: int) -> int:
    """The key of the adapter with that number on a module; it makes its dropout differ from that of others."""
    return zlib.crc32(f"{block_idx}.{path}#{number}".encode()) % SEEDS


def _prompt(block: nn.Module, values: Tensor, slots: BlockSlots) -> Any:
    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        hidden = slots.hidden_argument(args, kwargs)
        seq_len = hidden.shape[1]
        added = functional.pad(values[:seq_len], (0, 0, 0, max(0, seq_len - len(values))))
        return slots.with_hidden(args, kwargs, (hidden + added).to(hidden.dtype))

    return block.register_forward_pre_hook(hook, with_kwargs=True)
