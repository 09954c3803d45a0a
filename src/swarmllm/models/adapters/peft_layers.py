"""peft's layers in the forms of `block_adapter`, and its settings that can't be served.

`_READERS` has a line for each class of peft. A method in another form may be computed to one of these forms here. Then
gradients go on from the tensors that travel to the parameters that they were computed from. The client's shell calls it
for the layers that peft has put into its hollow blocks (`shell/hollow_blocks`); it works on any layer of peft.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from swarmllm.data_structures import MAX_WHOLE, Patch
from swarmllm.errors import ConfigurationError

SAFE_INITS = (None, True, False, "gaussian", "orthogonal")
"""Values of `init_lora_weights` that leave the base weights alone."""

_names: dict[type, list[str]] = {}


def _peft_names(module: nn.Module) -> list[str]:
    """The classes of peft that the module is an instance of, most special first."""
    cls = type(module)
    if cls not in _names:
        names = (f"{one.__module__}.{one.__qualname__}" for one in cls.__mro__)
        _names[cls] = [name.removeprefix("peft.") for name in names if name.startswith("peft.")]
    return _names[cls]


def check_config(config: Any) -> None:
    """Check the settings of an adapter of peft.

    Raises:
        ConfigurationError: servers can't compute it.
    """
    init = getattr(config, "init_lora_weights", True)
    if init not in SAFE_INITS:
        raise ConfigurationError(
            f"init_lora_weights={init!r} reads base weights and changes them, which only servers have: use True or "
            "'gaussian'"
        )
    if parameters := getattr(config, "target_parameters", None):
        raise ConfigurationError(
            f"target_parameters={list(parameters)} can't be adapted, because servers apply adapters to linear modules: "
            "use target_modules"
        )


def takes_rows(module: nn.Module) -> bool:
    """True if peft tells this module the adapter of each row."""
    return not {"tuners.lora.layer.LoraLayer", "utils.other.AuxiliaryTrainingWrapper"}.isdisjoint(_peft_names(module))


def patches_of(
    block_idx: int, path: str, module: Any, names: list[str] | None, begins: bool
) -> Iterator[tuple[Patch, list[Tensor]]]:
    """A patch, and the tensors that travel for it, for each active adapter of a module; nothing if peft has none there.

    Args:
        names: the adapter of each row of the batch, where they differ.
        begins: the adapter has just been added: it may be called in eval mode only.

    Raises:
        ConfigurationError: servers can't compute it.
    """
    of_peft = _peft_names(module)
    if "utils.other.ModulesToSaveWrapper" in of_peft or "tuners.ln_tuning.layer.LNTuningLayer" in of_peft:
        yield from _whole_patches(block_idx, path, module, names)
    elif "tuners.tuners_utils.BaseTunerLayer" in of_peft and not module.disable_adapters:
        where = f"{path} of block {block_idx}"
        _check_state(module, path, where)
        numbers = numbers_of(names or ())
        for name in numbers or module.active_adapters:
            if (change := _change(module, name, where)) is None:
                continue
            kind, values, scale = change
            if numbers and kind != "lora":
                raise ConfigurationError(f"adapter_names works with LoRA alone, and {name} is another ({where})")
            kind = "row_lora" if numbers else kind
            shapes = tuple((value.numel(),) if "ia3" in kind else tuple(value.shape) for value in values)
            rate = _dropout(module, name, kind, where, begins)
            fields: dict[str, Any] = {"block": block_idx, "path": path, "kind": kind, "shapes": shapes}
            yield Patch(**fields, scale=scale, dropout=rate, number=numbers.get(name, 0)), values


def _check_state(module: Any, path: str, where: str) -> None:
    if module.merged:
        raise ConfigurationError(
            f"the adapter of {where} was merged, but the weights are the servers': unmerge it, save it, and let "
            "`swarmllm adapters merge` make a model of it and its base"
        )
    if path.endswith(".base_layer"):
        raise ConfigurationError(
            f"{where.replace('.base_layer', '')} has adapters of two methods (mixed=True), and servers apply one: "
            "use several adapters of one method"
        )
    _check_forward(module, "peft.", where)


def _check_forward(module: Any, package: str, where: str) -> None:
    """Refuse a module with another forward than those of this package: servers would compute theirs."""
    if not getattr(module.forward, "__module__", "").startswith(package):
        raise ConfigurationError(
            f"{type(module).__name__} of {where} has a forward of its own, which can't run on servers: use peft's own "
            "layers, or put modules of your own between slices of model.remote_blocks"
        )


def numbers_of(names: Any) -> dict[str, int]:
    """A number above 0 for each of the adapters in use; rows of the base model have 0."""
    return {name: number for number, name in enumerate(dict.fromkeys(n for n in names if n != "__base__"), start=1)}


def _whole_patches(
    block_idx: int, path: str, module: Any, names: list[str] | None
) -> Iterator[tuple[Patch, list[Tensor]]]:
    """A patch for each parameter of a module that is trained as a whole, in place of the block's own."""
    copies = module.modules_to_save if hasattr(module, "modules_to_save") else module.ln_tuning_layers
    if module.disable_adapters:
        return
    check_rows(copies, names, f"{path} of block {block_idx}")
    for name in module.active_adapters if names is None else ():
        for key, parameter in copies[name].named_parameters() if name in copies else ():
            shapes = (tuple(parameter.shape),)
            yield Patch(block=block_idx, path=f"{path}.{key}", kind="tensor", shapes=shapes), [parameter]


def check_rows(copies: Any, names: list[str] | None, where: str) -> None:
    """Refuse an adapter for each row, where one of these has a copy of a whole module.

    Raises:
        ConfigurationError: one has.
    """
    if found := [name for name in names or () if name in copies]:
        raise ConfigurationError(
            f"adapter_names works with LoRA alone, and {found[0]} has its own {where} (modules_to_save): call the "
            "model with each such adapter by itself, after set_adapter()"
        )


def _dropout(module: Any, name: str, kind: str, where: str, begins: bool) -> float:
    """The rate at which servers drop inputs of the adapter.

    Raises:
        ConfigurationError: the method drops something else.
    """
    method = type(module).__module__.split(".")[2]
    tables = ("lora_dropout", f"{method}_dropout", "rank_dropout", "module_dropout")
    found = [(table, getattr(module, table)[name]) for table in tables if name in getattr(module, table, ())]
    for table, dropout in found:
        rate = float(getattr(dropout, "p", 0.0) if isinstance(dropout, nn.Module) else dropout)
        if kind in _LOW_RANK:
            return rate if dropout.training else 0.0
        if rate and module.training and not begins:
            option = "module_dropout" if method == "oft" else table
            raise ConfigurationError(f"{option} of {where} can't be computed by servers: set it to 0")
    return 0.0


_LOW_RANK = ("lora", "dora", "row_lora")
_Change = tuple[str, list[Tensor], float]
"""The form, its tensors, and a scale."""


def _change(module: Any, name: str, where: str) -> _Change | None:
    """The change that the adapter of that name makes to the module; None: it is for other modules."""
    for cls in _peft_names(module):
        if cls in _READERS:
            tables, read = _READERS[cls]
            found = read(module, name, where) if any(name in getattr(module, table) for table in tables) else None
            return found if found is None or len(found) == 3 else (*found, 1.0)
    raise ConfigurationError(
        f"{type(module).__module__}.{type(module).__name__} ({where}) can't run on servers: "
        "use LoRA, or another method of the table in docs/training.md, on linear modules, or prompts"
    )


def _lora(m: Any, name: str, where: str) -> Any:
    variant = type(m.lora_variant.get(name)).__name__
    if name in m.lora_variant and variant != "DoraLinearVariant":
        raise ConfigurationError(
            f"{where}: {variant.removesuffix('LinearVariant')}, a variant of LoRA, isn't known to servers: use plain "
            "LoRA or DoRA"
        )
    down, up = m.lora_A[name], m.lora_B[name]
    for part in (down, up):
        _check_forward(part, "torch.nn.modules.linear", where)
    if down.bias is not None or not isinstance(m.lora_dropout[name], nn.Dropout | nn.Identity):
        raise ConfigurationError(
            f"{where}: lora_A has a bias, or lora_dropout is no dropout, which servers don't know: leave peft's modules"
        )
    if isinstance(m.scaling[name], Tensor) and m.scaling[name].requires_grad:
        raise ConfigurationError(f"{where}: the scale of a LoRA can't be trained: make it a number, or use DoRA")
    values, scale = [down.weight, up.weight], float(m.scaling[name])
    if name in m.lora_variant:
        return "dora", [*values, m.lora_magnitude_vector[name].weight], scale
    return "lora", values if up.bias is None else [*values, up.bias], scale


def _adalora(m: Any, name: str, _where: str) -> Any:
    scale = float(m.scaling[name]) / (float(m.ranknum[name]) + 1e-5)
    return "lora", [m.lora_A[name] * m.lora_E[name], m.lora_B[name]], scale


def _vera(m: Any, name: str, _where: str) -> Any:
    down = m.vera_lambda_d[name][:, None] * m.vera_A[name][:, : m.in_features]
    return "lora", [down, m.vera_lambda_b[name][:, None] * m.vera_B[name][: m.out_features]]


def _ia3(m: Any, name: str, _where: str) -> Any:
    return "ia3_in" if m.is_feedforward else "ia3_out", [m.ia3_l[name]]


def _loha(m: Any, name: str, where: str) -> Any:
    _require_linear(name not in m.hada_t1, "LoHa", where)
    return "loha", [getattr(m, f"hada_{one}")[name] for one in ("w1_a", "w1_b", "w2_a", "w2_b")], float(m.scaling[name])


def _lokr(m: Any, name: str, where: str) -> Any:
    _require_linear(name not in m.lokr_t2, "LoKr", where)
    first = m.lokr_w1[name] if name in m.lokr_w1 else m.lokr_w1_a[name] @ m.lokr_w1_b[name]
    second = m.lokr_w2[name] if name in m.lokr_w2 else m.lokr_w2_a[name] @ m.lokr_w2_b[name]
    return "kron", [first, second], float(m.scaling[name])


def _require_linear(is_linear: bool, method: str, where: str) -> None:
    if not is_linear:
        raise ConfigurationError(f"{where}: {method} of convolutions isn't known to servers: use it on linear modules")


def _oft(m: Any, name: str, _where: str) -> Any:
    rotation, size = m.oft_R[name], m.oft_R[name].block_size
    turned = rotation(torch.eye(size).to(rotation.weight).repeat(1, m.in_features // size))
    return "rotate", [turned.unflatten(-1, (-1, size)).transpose(0, 1)]  # the result for each feature of its group


def _from_a_bank(m: Any, name: str, _where: str) -> Any:
    """UniLoRA and VB-LoRA: a LoRA whose numbers are of one vector or bank for the whole model."""
    return "lora", [*m._get_lora_matrices(name)]


def _tinylora(m: Any, name: str, _where: str) -> Any:
    return "lora", [m._compute_R(name) @ m.tinylora_A[name], m.tinylora_B[name]]


def _delora(m: Any, name: str, _where: str) -> Any:
    down, up = m.delora_A[name], m.delora_B[name]
    lengths = down.norm(dim=1).clamp(min=1e-4) * up.norm(dim=0).clamp(min=1e-4)
    scale = m.delora_lambda[name] / m.r[name] / lengths
    return "lora", [scale[:, None] * down * m.delora_w_norm[name], up]


def _miss(m: Any, name: str, where: str) -> Any:
    if m.miss_fn == "bat":
        raise ConfigurationError(f"{where}: MiSS with init_weights='bat' multiplies base weights: leave it out")
    up = m.miss_block[name]
    if m.miss_fn == "mini":
        up = up.repeat(1, m.out_features // m.miss_mini_r[name])
    rank = len(up)
    return "lora", [torch.eye(rank).to(up).repeat(1, -(-m.in_features // rank))[:, : m.in_features], up.T]


def _beft(m: Any, name: str, _where: str) -> Any:
    bias = m.beft_bias[name].flatten()
    return "lora", [bias.new_zeros(1, m.in_features), bias.new_zeros(len(bias), 1), bias]


def _whole_change(m: Any, name: str, where: str) -> Any:
    """The sum that is added to the weight, where no small tensors say it."""
    if (size := m.out_features * m.in_features) > MAX_WHOLE:
        raise ConfigurationError(
            f"{where}: {type(m).__module__.split('.')[2]} would send {size} numbers after each step, and at most "
            f"{MAX_WHOLE} can be sent for a module: use LoRA, or smaller modules"
        )
    change = m.get_delta_weight(name).to_dense()
    return "kron", [change.new_ones(1, 1), change]


_READERS: dict[str, tuple[tuple[str, ...], Callable[[Any, str, str], Any]]] = {
    "tuners.adalora.layer.SVDLinear": (("lora_A",), _adalora),
    "tuners.lora.layer.Linear": (("lora_A",), _lora),
    "tuners.ia3.layer.IA3Layer": (("ia3_l",), _ia3),
    "tuners.loha.layer.LoHaLayer": (("hada_w1_a",), _loha),
    "tuners.lokr.layer.LoKrLayer": (("lokr_w1", "lokr_w1_a"), _lokr),
    "tuners.vera.layer.Linear": (("vera_lambda_d",), _vera),
    "tuners.oft.layer.Linear": (("oft_R",), _oft),
    "tuners.unilora.layer.Linear": (("unilora_indices_A",), _from_a_bank),
    "tuners.vblora.layer.Linear": (("vblora_logits_A",), _from_a_bank),
    "tuners.tinylora.layer.Linear": (("tinylora_A",), _tinylora),
    "tuners.delora.layer.DeloraLinear": (("delora_A",), _delora),
    "tuners.miss.layer.MissLinear": (("miss_block",), _miss),
    "tuners.beft.layer.Linear": (("beft_bias",), _beft),
    "tuners.fourierft.layer.FourierFTLinear": (("fourierft_spectrum",), _whole_change),
    "tuners.waveft.layer.WaveFTLinear": (("waveft_spectrum",), _whole_change),
    "tuners.shira.layer.Linear": (("shira_weight",), _whole_change),
    "tuners.randlora.layer.Linear": (("randlora_lambda",), _whole_change),
    "tuners.gralora.layer.Linear": (("gralora_A",), _whole_change),
}
"""Classes of peft's layers: the tables that name their adapters, and the function that reads one: form, tensors, and a
scale if there is one."""
