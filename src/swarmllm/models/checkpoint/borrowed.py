"""Parameters that hosted blocks share with blocks that are elsewhere. Used by `skeleton`."""

from collections.abc import Collection, Iterable

from torch import nn
from transformers import PreTrainedModel


def borrowed(model: PreTrainedModel, prefix: str, hosted: Collection[int]) -> dict[int, set[str]]:
    """Parameters of other blocks that hosted blocks share: {block: names within it}."""
    borrowed: dict[int, set[str]] = {}
    for target, source in model.all_tied_weights_keys.items():
        user, owner = (_inside_block(name, prefix) for name in (target, source))
        if user is not None and owner is not None and user[0] in hosted and owner[0] not in hosted:
            borrowed.setdefault(owner[0], set()).add(owner[1])
    return borrowed


def parameters_alone(block: nn.Module, names: Iterable[str]) -> nn.Module:
    """A module that does nothing but hold some parameters of `block` under their names."""
    root = nn.Module()
    for name in names:
        path, _, leaf = name.rpartition(".")
        holder = root
        for part in path.split("."):
            if part not in holder._modules:
                holder.add_module(part, nn.Module())
            holder = holder.get_submodule(part)
        holder.register_parameter(leaf, block.get_parameter(name))
    return root


def _inside_block(name: str, prefix: str) -> tuple[int, str] | None:
    """`model.layers.3.mlp.weight` → (3, "mlp.weight")."""
    if not name.startswith(f"{prefix}."):
        return None
    index, _, rest = name.removeprefix(f"{prefix}.").partition(".")
    return int(index), rest
