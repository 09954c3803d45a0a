"""What peft's layers do to a linear module of a hollow block, in forms that servers know (`adapters/block_adapter`).

A method that isn't one of these forms may be computed to one here: autograd goes on from the tensors that travel to the
parameters that they were made of. Called by `hollow_adapters`; peft has been imported by whoever put the layers there.
"""

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from swarmllm.data_structures import Patch
from swarmllm.errors import ConfigurationError
from swarmllm.models.shell.hollow_modules import MAX_WHOLE


class Change(NamedTuple):
    """One adapter of one module."""

    kind: str
    scale: float
    values: list[Tensor]
    dropout: Any = None
    """peft's module for it."""


_classes: dict[tuple[str, str], Any] = {}
"""Those that `of_peft` has found; of functools.cache torch.compile would warn."""


def of_peft(module: str, name: str) -> Any:
    """A class of peft, which the user has imported: swarmllm doesn't need it otherwise."""
    if (module, name) not in _classes:
        _classes[module, name] = getattr(import_module(f"peft.{module}"), name)
    return _classes[module, name]


def is_tuner(module: nn.Module) -> bool:
    """Whether peft has put it around a module."""
    return bool(isinstance(module, of_peft("tuners.tuners_utils", "BaseTunerLayer")))


def is_copied(module: nn.Module) -> bool:
    """Whether it is a module that is trained as a whole."""
    classes = (of_peft("utils.other", "ModulesToSaveWrapper"), of_peft("tuners.ln_tuning.layer", "LNTuningLayer"))
    return isinstance(module, classes)


def patches_of(
    block_idx: int, path: str, tuner: nn.Module, names: list[str] | None, begins: bool
) -> Iterator[tuple[Patch, list[Tensor]]]:
    """A patch, and the tensors that travel for it, for each active adapter of a tuner layer.

    Args:
        names: the adapter of each row of the batch, where they differ.
        begins: whether it will be trained is not known yet.

    Raises:
        ConfigurationError: servers can't compute it.
    """
    module: Any = tuner
    if module.disable_adapters:
        return
    where = f"{path} of block {block_idx}"
    if module.merged:
        raise ConfigurationError(
            f"the adapter of {where} was merged, but the weights are the servers': unmerge it, save it, and let "
            "`swarmllm adapters merge` make a model of it and its base"
        )
    if path.endswith(".base_layer"):
        raise ConfigurationError(
            f"{where.replace('.base_layer', '')} has adapters of two methods (mixed=True), of which servers apply one: "
            "use several adapters of one method"
        )
    _check_forward(module, "peft.", where)
    numbers = numbers_of(names or ())
    for name in numbers or module.active_adapters:
        for change in _changes(module, name, begins, where):
            shapes = tuple((value.numel(),) if "ia3" in change.kind else tuple(value.shape) for value in change.values)
            if numbers and change.kind != "lora":
                raise ConfigurationError(f"adapter_names works with LoRA alone, and {name} is another ({where})")
            kind = "row_lora" if numbers else change.kind
            fields: dict[str, Any] = {"block": block_idx, "path": path, "kind": kind, "shapes": shapes}
            drops = change.dropout is not None and change.dropout.training
            rate = getattr(change.dropout, "p", 0.0) if drops else 0.0
            yield Patch(**fields, scale=change.scale, dropout=rate, number=numbers.get(name, 0)), change.values


def numbers_of(names: Any) -> dict[str, int]:
    """A number above 0 for each of the adapters in use; rows of the base model have 0."""
    return {name: number for number, name in enumerate(dict.fromkeys(n for n in names if n != "__base__"), start=1)}


def whole_patches(block_idx: int, path: str, wrapper: nn.Module) -> Iterator[tuple[Patch, list[Tensor]]]:
    """A patch for each parameter of a module that is trained as a whole, in place of the block's own."""
    module: Any = wrapper
    if module.disable_adapters:
        return
    copies = module.modules_to_save if hasattr(module, "modules_to_save") else module.ln_tuning_layers
    for name in module.active_adapters:
        if name in copies:
            for key, parameter in copies[name].named_parameters():
                shapes = (tuple(parameter.shape),)
                yield Patch(block=block_idx, path=f"{path}.{key}", kind="tensor", shapes=shapes), [parameter]


def _changes(module: Any, name: str, begins: bool, where: str) -> Iterator[Change]:
    """What the adapter of that name does to the module; nothing if it isn't for this one."""
    for package, cls, read in _READERS:
        if isinstance(module, of_peft(f"tuners.{package}", cls)):
            yield from read(module, name, begins, where)
            return
    raise ConfigurationError(
        f"{type(module).__module__}.{type(module).__name__} ({where}) can't run on servers: "
        "use LoRA, or another method of the table in docs/training.md, on linear modules, or prompts"
    )


def _check_forward(module: Any, package: str, where: str) -> None:
    """Refuse a module that doesn't compute what those of this package do: servers would compute that."""
    if not getattr(module.forward, "__module__", "").startswith(package):
        raise ConfigurationError(
            f"{type(module).__name__} of {where} has a forward of its own, which can't run on servers: use peft's own "
            "layers, or put modules of your own between slices of model.remote_blocks"
        )


def _lora(module: Any, name: str, _begins: bool, where: str) -> Iterator[Change]:
    if name not in module.lora_A:
        return
    variant = type(module.lora_variant.get(name)).__name__
    if name in module.lora_variant and variant != "DoraLinearVariant":
        raise ConfigurationError(
            f"{where}: {variant.removesuffix('LinearVariant')}, a variant of LoRA, isn't known to servers: use plain "
            "LoRA or DoRA"
        )
    down, up = module.lora_A[name], module.lora_B[name]
    for part in (down, up):
        _check_forward(part, "torch.nn.modules.linear", where)
    if down.bias is not None or not isinstance(module.lora_dropout[name], nn.Dropout | nn.Identity):
        raise ConfigurationError(
            f"{where}: lora_A has a bias, or lora_dropout is no dropout, which servers don't know: leave peft's modules"
        )
    if isinstance(module.scaling[name], Tensor) and module.scaling[name].requires_grad:
        raise ConfigurationError(f"{where}: the scale of a LoRA can't be trained: make it a number, or use DoRA")
    values, scale, dropout = [down.weight, up.weight], float(module.scaling[name]), module.lora_dropout[name]
    if name in module.lora_variant:
        yield Change("dora", scale, [*values, module.lora_magnitude_vector[name].weight], dropout)
    else:
        yield Change("lora", scale, values if up.bias is None else [*values, up.bias], dropout)


def _adalora(module: Any, name: str, _begins: bool, _where: str) -> Iterator[Change]:
    if name in module.lora_A:
        scale = float(module.scaling[name]) / (float(module.ranknum[name]) + 1e-5)
        values = [module.lora_A[name] * module.lora_E[name], module.lora_B[name]]
        yield Change("lora", scale, values, module.lora_dropout[name])


def _vera(module: Any, name: str, _begins: bool, _where: str) -> Iterator[Change]:
    if name in module.vera_lambda_d:
        down = module.vera_lambda_d[name][:, None] * module.vera_A[name][:, : module.in_features]
        up = module.vera_lambda_b[name][:, None] * module.vera_B[name][: module.out_features]
        yield Change("lora", 1.0, [down, up], module.vera_dropout[name])


def _ia3(module: Any, name: str, _begins: bool, _where: str) -> Iterator[Change]:
    if name in module.ia3_l:
        yield Change("ia3_in" if module.is_feedforward else "ia3_out", 1.0, [module.ia3_l[name]])


def _loha(module: Any, name: str, begins: bool, where: str) -> Iterator[Change]:
    if name in module.hada_t1:
        raise ConfigurationError(f"{where}: LoHa of convolutions isn't known to servers: use it on linear modules")
    if name in module.hada_w1_a:
        _check_dropouts(module, name, begins, where)
        sources = (module.hada_w1_a, module.hada_w1_b, module.hada_w2_a, module.hada_w2_b)
        yield Change("loha", float(module.scaling[name]), [source[name] for source in sources])


def _lokr(module: Any, name: str, begins: bool, where: str) -> Iterator[Change]:
    if name not in module.lokr_w1 and name not in module.lokr_w1_a:
        return
    if name in module.lokr_t2:
        raise ConfigurationError(f"{where}: LoKr of convolutions isn't known to servers: use it on linear modules")
    _check_dropouts(module, name, begins, where)
    first = module.lokr_w1[name] if name in module.lokr_w1 else module.lokr_w1_a[name] @ module.lokr_w1_b[name]
    second = module.lokr_w2[name] if name in module.lokr_w2 else module.lokr_w2_a[name] @ module.lokr_w2_b[name]
    yield Change("kron", float(module.scaling[name]), [first, second])


def _check_dropouts(module: Any, name: str, begins: bool, where: str) -> None:
    if module.training and not begins and (module.rank_dropout[name] or module.module_dropout[name]):
        raise ConfigurationError(
            f"rank_dropout and module_dropout of {where} can't be computed by servers: set them to 0"
        )


def _oft(module: Any, name: str, begins: bool, where: str) -> Iterator[Change]:
    if name not in module.oft_R:
        return
    if module.training and not begins and getattr(module.oft_dropout[name], "p", 0):
        raise ConfigurationError(f"module_dropout of {where} can't be computed by servers: set it to 0")
    rotation = module.oft_R[name]
    size = rotation.block_size
    unit = torch.eye(size).to(rotation.weight).repeat(1, module.in_features // size)
    turned = rotation(unit)  # what becomes of each feature of its group
    yield Change("rotate", 1.0, [turned.unflatten(-1, (-1, size)).transpose(0, 1)])


def _from_a_bank(module: Any, name: str, _begins: bool, _where: str) -> Iterator[Change]:
    """UniLoRA and VB-LoRA: a LoRA whose numbers are of one vector or bank for the whole model."""
    bank = "vblora" if hasattr(module, "vblora_logits_A") else "unilora"
    if name in getattr(module, f"{bank}_logits_A" if bank == "vblora" else f"{bank}_indices_A"):
        yield Change("lora", 1.0, [*module._get_lora_matrices(name)], getattr(module, f"{bank}_dropout")[name])


def _tinylora(module: Any, name: str, _begins: bool, _where: str) -> Iterator[Change]:
    if name in module.tinylora_A:
        down = module._compute_R(name) @ module.tinylora_A[name]
        yield Change("lora", 1.0, [down, module.tinylora_B[name]], module.tinylora_dropout[name])


def _delora(module: Any, name: str, _begins: bool, _where: str) -> Iterator[Change]:
    if name in module.delora_A:
        down, up = module.delora_A[name], module.delora_B[name]
        lengths = down.norm(dim=1).clamp(min=1e-4) * up.norm(dim=0).clamp(min=1e-4)
        scale = module.delora_lambda[name] / module.r[name] / lengths
        down = scale[:, None] * down * module.delora_w_norm[name]
        yield Change("lora", 1.0, [down, up], module.delora_dropout[name])


def _miss(module: Any, name: str, _begins: bool, where: str) -> Iterator[Change]:
    if name not in module.miss_block:
        return
    if module.miss_fn == "bat":
        raise ConfigurationError(f"{where}: MiSS with init_weights='bat' multiplies base weights: leave it out")
    up = module.miss_block[name]
    if module.miss_fn == "mini":
        up = up.repeat(1, module.out_features // module.miss_mini_r[name])
    rank = len(up)
    tiled = torch.eye(rank).to(up).repeat(1, -(-module.in_features // rank))[:, : module.in_features]
    yield Change("lora", 1.0, [tiled, up.T], module.miss_dropout[name])


def _beft(module: Any, name: str, _begins: bool, _where: str) -> Iterator[Change]:
    if name in module.beft_bias:
        bias = module.beft_bias[name].flatten()
        yield Change("lora", 1.0, [bias.new_zeros(1, module.in_features), bias.new_zeros(len(bias), 1), bias])


def _whole_change(module: Any, name: str, begins: bool, where: str) -> Iterator[Change]:
    """What is added to the weight, as a whole, where no small tensors say it."""
    kind = type(module).__module__.split(".")[2]
    if name not in getattr(module, module.adapter_layer_names[0]):
        return
    if (size := module.out_features * module.in_features) > MAX_WHOLE:
        raise ConfigurationError(
            f"{where}: {kind} would send {size} numbers after each step, and at most {MAX_WHOLE} can be sent for a "
            "module: use LoRA, or smaller modules"
        )
    drops: Any = getattr(module, f"{kind}_dropout", {})
    if module.training and not begins and name in drops and getattr(drops[name], "p", 0):
        raise ConfigurationError(f"dropout of {kind} ({where}) can't be computed by servers: set it to 0")
    change = module.get_delta_weight(name).to_dense()
    yield Change("kron", 1.0, [change.new_ones(1, 1), change])


_READERS: tuple[tuple[str, str, Callable[[Any, str, bool, str], Iterator[Change]]], ...] = (
    ("adalora", "SVDLinear", _adalora),
    ("lora", "Linear", _lora),
    ("ia3", "IA3Layer", _ia3),
    ("loha", "LoHaLayer", _loha),
    ("lokr", "LoKrLayer", _lokr),
    ("vera.layer", "Linear", _vera),
    ("oft.layer", "Linear", _oft),
    ("unilora.layer", "Linear", _from_a_bank),
    ("vblora.layer", "Linear", _from_a_bank),
    ("tinylora.layer", "Linear", _tinylora),
    ("delora.layer", "DeloraLinear", _delora),
    ("miss.layer", "MissLinear", _miss),
    ("beft.layer", "Linear", _beft),
    ("fourierft.layer", "FourierFTLinear", _whole_change),
    ("waveft.layer", "WaveFTLinear", _whole_change),
    ("shira.layer", "Linear", _whole_change),
    ("randlora.layer", "Linear", _whole_change),
    ("gralora.layer", "Linear", _whole_change),
)
"""Modules of peft and their classes, and who reads them."""
