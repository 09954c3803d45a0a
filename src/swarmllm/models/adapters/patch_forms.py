"""The forms in which a patch changes a linear module: the shapes of its tensors, and the hook that computes with them.

    form       tensors                        what the module computes (x its input, y its output, W its weight)
    lora       A [r, in], B [out, r], b?      y + (B(A(x)) + b) · scale, perhaps with dropout of x (`dropout`)
    dora       A, B, m [out]                  the same with the rows of W + BA · scale made as long as m
    ia3_in     l [in]                         the module on x · l
    ia3_out    l [out]                        y · l
    loha       a1 b1 a2 b2                    y + (a1 b1 ∘ a2 b2) · scale (x)
    kron       w1 [a, b], w2 [c, d]           y + (w1 ⊗ w2) · scale (x), with a·c = out and b·d = in
    rotate     R [in / n, n, n]               the module on x, of which each n features are multiplied by a matrix

Used by `block_adapter`, which knows whom a patch comes from. A method of peft that fits none of them may still be
computed to one of these on the client (`shell/tuner_layers`), where autograd goes on from it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from swarmllm.data_structures import Patch
from swarmllm.errors import RemoteProtocolError

MAX_RANK = 1024
Shapes = tuple[tuple[int, ...], ...]


class Inputs(NamedTuple):
    """How the inputs of one patch's module are used."""

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
    """Whether the patch's tensors fit the module.

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
    """Where tokens are in the outputs of a module, `[batch, seq, features]` or all tokens in a row."""
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
    """A weight `[out, in]` beside the module's own, made for each call."""

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
