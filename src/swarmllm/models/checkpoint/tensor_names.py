"""Which parameter of a model each of a checkpoint's tensors is, by transformers' own renaming rules.

Used by `skeleton` and by whoever asks which tensors a part of a model needs; reads no weights.
"""

from collections.abc import Iterable

from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from swarmllm.models.architecture import as_config_says, stored_prefix


def needed_tensors(model: PreTrainedModel, names: Iterable[str]) -> list[str]:
    """Those of the checkpoint's tensors that end up in `model`."""
    return list(parameters_of(model, names))


def parameters_of(model: PreTrainedModel, names: Iterable[str]) -> dict[str, str]:
    """Each of the checkpoint's tensors that ends up in `model` → the parameter that it is, or is merged into."""
    wanted = model.state_dict()
    with as_config_says(model.config.name_or_path):
        mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    found = {}
    for name in sorted(names):
        given = as_of_this_class(model, name)
        renamed, _ = rename_source_key(given, renamings, converters, model.base_model_prefix, wanted)
        if renamed not in wanted and given in wanted:
            renamed = given
        if renamed in wanted:
            found[name] = renamed
    return found


def as_of_this_class(model: PreTrainedModel, name: str) -> str:
    """The name of a tensor, had the checkpoint been saved by the model's class.

    Classes of one architecture may call their stack differently: `transformer` where Qwen3 answers, else `model`.
    """
    stored, own = stored_prefix(model.config), model.base_model_prefix
    if not stored or not own or stored == own or not name.startswith(f"{stored}."):
        return name
    return f"{own}.{name.removeprefix(f'{stored}.')}"
