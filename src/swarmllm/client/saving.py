"""Save and load the client's part of a model: embeddings, norm and head, trained or not. Blocks stay on servers.

These functions are methods of `DistributedModel`. The file has a name of its own: transformers' `from_pretrained` of
the directory fails, instead of making up the blocks that are not in it. Adapters are saved by peft, as usual.
"""

import json
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from huggingface_hub import HfApi
from huggingface_hub.errors import HTTPError, StrictDataclassError
from peft.mapping import PEFT_TYPE_TO_PREFIX_MAPPING
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME

from swarmllm.config import default_cache_dir, hub_token
from swarmllm.errors import BlockWeightsNotFoundError, ConfigurationError, CorruptWeightsError, WeightsMismatchError
from swarmllm.files import replace_file, replaced
from swarmllm.models.architecture import TASK_TAGS, Task, text_config
from swarmllm.models.checkpoint.checkpoint import ADAPTER_CONFIG, Checkpoint
from swarmllm.models.checkpoint.fingerprint import fingerprint
from swarmllm.models.checkpoint.sources import Source, find_source, first_line, read_object
from swarmllm.models.shell.loading import require_head_settings
from swarmllm.version import __version__

logger = logging.getLogger(__name__)

_OF_PEFT = re.compile("|".join(rf"\b{re.escape(one)}" for one in sorted({*PEFT_TYPE_TO_PREFIX_MAPPING.values()})))
"""In the names of tensors that peft has put into a model, and saves itself."""
_OF_ADAPTERS = re.compile(r"(\w+)\.(modules_to_save|original_module)\.")
"""In the names of tensors of whole modules that adapters of peft have copies of."""
OWN_TENSORS = "swarmllm_client.safetensors"
HEAD_SETTINGS = ("id2label", "label2id", "problem_type", "pad_token_id")
"""Fields of the config that `load_trained` takes over: heads and pipelines read them, and no tensor shows them."""
NO_MODEL = "The blocks are not here: load this with load_trained()."
"""Takes the place of the table that transformers' `from_pretrained` needs and trainers don't: it fails."""

MODEL_CARD = """---
base_model: {base}
library_name: swarmllm
pipeline_tag: {task}
tags:
{tags}
---
The client's part of a {cls} on the blocks of `{base}`: everything but the blocks, which a swarm serves.

    model = ….from_pretrained("{base}", initial_peers=[…])
    model.load_trained("this repository or directory")
"""


def describe_origin(checkpoint: Checkpoint, task: Task) -> list[str]:
    """Tags that name the base model, for cards of what is trained on it; `swarmllm adapters` searches for them."""
    tags = ["swarmllm", f"fingerprint:{fingerprint(checkpoint)}", f"task:{TASK_TAGS[task]}"]
    if checkpoint.revision is not None:
        tags += [f"revision:{checkpoint.revision}", f"base_model:{checkpoint.public_name}"]
    return tags


def tags_of_card(model: Any, origin: Sequence[str]) -> list[str]:
    """Tags for a model card: the base model, and the methods of the adapters that peft trains."""
    tuners = getattr(model, "peft_config", None) or {}
    methods = {str(getattr(config.peft_type, "value", config.peft_type)).lower() for config in tuners.values()}
    return [*origin, *(f"method:{method}" for method in sorted(methods))]


def save_pretrained(
    model: Any,
    save_directory: str | Path,
    is_main_process: bool = True,
    state_dict: dict[str, Tensor] | None = None,
    push_to_hub: bool = False,
    **kwargs: Any,
) -> None:
    """Write the tensors that are here, the config, and a card that names the base model.

    Blocks are not among them, unless they run here and are trained. Load the directory with `load_trained`, into a
    model of the same base. Adapters of `add_adapter` are written into it as peft's files, as transformers does.
    """
    directory = Path(save_directory)
    if is_main_process:
        directory.mkdir(parents=True, exist_ok=True)
        model.config.save_pretrained(directory)
        _write_tensors(model, directory, state_dict)
        card = directory / "README.md"
        if not card.exists():
            cls, origin = type(model).__name__, model.swarm_origin
            said = dict(tag.split(":", 1) for tag in origin if ":" in tag)
            tags = "\n".join(f'- "{tag}"' for tag in [*origin, "method:parts", f"class:{cls}"])
            base = model.swarm.model_name
            replace_file(card, MODEL_CARD.format(base=base, task=said.get("task", ""), tags=tags, cls=cls))
    if getattr(model, "_hf_peft_config_loaded", False):  # an adapter by transformers' own add_adapter
        PreTrainedModel.save_pretrained(model, directory, is_main_process=is_main_process, state_dict=state_dict)
    if push_to_hub:
        model.push_to_hub(kwargs.pop("repo_id", directory.name), **kwargs)


def _write_tensors(model: Any, directory: Path, state_dict: dict[str, Tensor] | None) -> None:
    frozen = _names_of_frozen_blocks(model)
    tensors = (state_dict or model.state_dict()).items()
    # cloned: tied tensors share memory, which the format refuses
    own = {key: value.detach().cpu().clone() for key, value in tensors if not key.startswith(frozen)}
    about = {
        "format": "pt",
        "base": model.swarm.model_name,
        "fingerprint": model.swarm.fingerprint,
        "class": type(model).__name__,
        "version": __version__,
    }
    with replaced(directory / OWN_TENSORS) as new_file:  # the old file stays until the new one is complete
        save_file(own, new_file, metadata=about)
    if directory.name.startswith("checkpoint-"):  # transformers' Trainer looks for this file when it loads again
        index = {"metadata": NO_MODEL, "weight_map": dict.fromkeys(sorted(own), OWN_TENSORS)}
        replace_file(directory / SAFE_WEIGHTS_INDEX_NAME, json.dumps(index, indent=2))


def _names_of_frozen_blocks(model: Any) -> tuple[str, ...]:
    """Prefixes of tensor names, for blocks that run here and are not trained: the checkpoint has them."""
    here = model.swarm_adapters.blocks.here.values()
    frozen = [block for block in here if not any(parameter.requires_grad for parameter in block.parameters())]
    return tuple(f"{name}." for name, module in model.named_modules() if any(module is block for block in frozen))


def push_to_hub(
    model: Any,
    repo_id: str,
    *,
    commit_message: str | None = None,
    private: bool | None = None,
    token: str | None = None,
    revision: str | None = None,
    **_: Any,
) -> str:
    """Upload the files of `save_pretrained` to a repository of the hub, and create it if needed.

    Returns:
        The commit's address.

    Raises:
        ConfigurationError: the hub doesn't take it.
    """
    api = HfApi(token=token or hub_token())
    try:
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        with TemporaryDirectory() as directory:
            model.save_pretrained(directory)
            message = commit_message or f"Upload the client's part of {type(model).__name__}"
            commit = api.upload_folder(
                repo_id=repo_id, folder_path=directory, commit_message=message, revision=revision
            )
    except (HTTPError, OSError) as error:
        raise ConfigurationError(f"the hub doesn't take {repo_id}: {str(error).splitlines()[0]}") from error
    return str(commit.commit_url)


def load_trained(model: Any, directory: str | Path) -> None:
    """Take over what `save_pretrained` wrote, here or on the hub. If it doesn't fit, nothing changes.

    That is the tensors, and of the config what heads and pipelines read: labels, `problem_type`, `pad_token_id`.

    Raises:
        ConfigurationError: there is no such directory or repository.
        BlockWeightsNotFoundError: it has no such file.
        CorruptWeightsError: a file can't be read, or holds NaN.
        WeightsMismatchError: it is of another base model, task or shape.
    """
    source = find_source(str(directory), revision=None, token=hub_token(), cache_dir=default_cache_dir())
    about, found = _read_tensors(directory, source)
    if about.get("fingerprint") != model.swarm.fingerprint:
        raise WeightsMismatchError(
            f"{directory} was trained on {about.get('base', 'another model')} "
            f"(fingerprint {about.get('fingerprint', 'unknown')[:12]}), this is {model.swarm.model_name} "
            f"({model.swarm.fingerprint[:12]})"
        )
    _require_fit(model, str(directory), about.get("class", "model"), found)
    settings = _head_settings(model, source)
    own = model.state_dict()
    with torch.no_grad():
        for name, tensor in found.items():
            own[name].copy_(tensor)
    for name, value in settings.items():
        setattr(model.config, name, value)


def _require_fit(model: Any, directory: str, saved_class: str, found: dict[str, Tensor]) -> None:
    """Raise WeightsMismatchError or CorruptWeightsError unless these tensors can be those of the model."""
    own, frozen = model.state_dict(), _names_of_frozen_blocks(model)
    for name in sorted(own.keys() - found.keys()):
        if (module := _OF_ADAPTERS.search(name)) and not name.startswith(frozen):
            raise WeightsMismatchError(
                f"an adapter in the model has its own {module[1]}: load {directory} before the adapter is added"
            )
    for name in sorted(own.keys() | found.keys()):
        if name not in found and name.startswith(frozen):
            continue
        if name in own and name in found and own[name].shape == found[name].shape:
            if bool(found[name].isnan().any()) and not bool(own[name].isnan().any()):
                raise CorruptWeightsError(
                    f"{name} in {directory} holds NaN, so its training has diverged: load an earlier one"
                )
        elif _OF_PEFT.search(name):
            if name in found:
                raise WeightsMismatchError(
                    f"{directory} was saved with an adapter of peft in the model: add it before, by "
                    "PeftModel.from_pretrained(model, …) or get_peft_model"
                )
        elif "tuned_prompts." in name:
            raise WeightsMismatchError(f"{name} in {directory} doesn't fit: {_how_to_tune(found)}")
        else:
            raise WeightsMismatchError(
                f"{directory} holds a {saved_class} whose {name} doesn't fit this {type(model).__name__}: load it with "
                "the class, number of labels and local_blocks that it was saved with"
            )


def _how_to_tune(found: dict[str, Tensor]) -> str:
    """How to open a model for the prompts among these tensors."""
    shallow = next((tensor for name, tensor in found.items() if name.endswith("tuned_prompts.shallow")), None)
    if shallow is None:
        return "it was saved without prompts, so open the model without tuning_mode"
    mode = "deep_ptune" if any(name.endswith("tuned_prompts.deep") for name in found) else "ptune"
    return f'open the model with tuning_mode="{mode}", pre_seq_len={len(shallow)}, as it was saved'


def _head_settings(model: Any, source: Source) -> dict[str, Any]:
    """Settings of the saved config that take the place of the model's; logs which of them were others before."""
    path = source.path(CONFIG_NAME, required=False)
    if path is None:
        return {}
    config, usual = model.config, PreTrainedConfig(num_labels=model.config.num_labels)
    try:
        saved, own = read_object(path), json.loads(config.to_json_string(use_diff=False))
        named = {name: saved[name] for name in HEAD_SETTINGS if saved.get(name) not in (None, own.get(name))}
        require_head_settings(named, getattr(text_config(config), "vocab_size", None))
        kept = {name: getattr(PreTrainedConfig(**named), name) for name in named}
    except (ConfigurationError, StrictDataclassError, ValueError, TypeError, AttributeError) as error:
        raise CorruptWeightsError(f"{path} can't be read as a config: {first_line(error)}") from None
    if (count := len(kept.get("id2label", usual.id2label))) != config.num_labels:
        raise WeightsMismatchError(
            f"{path} names {count} labels, and this model has {config.num_labels}: open it with num_labels={count}"
        )
    if kept.get("id2label") == usual.id2label:  # nobody has named them, so names that were given here stay
        kept = {name: value for name, value in kept.items() if not name.endswith(("2label", "2id"))}
    for name, value in kept.items():
        if (was := getattr(config, name, None)) not in (None, getattr(usual, name, None)):
            logger.warning("config.%s is %r now, as it was saved, in place of %r", name, value, was)
    return kept


def _read_tensors(directory: str | Path, source: Source) -> tuple[dict[str, str], dict[str, Tensor]]:
    """The file's metadata and tensors."""
    path = source.path(OWN_TENSORS, required=False)
    if path is None:
        if source.path(ADAPTER_CONFIG, required=False) is not None:
            raise BlockWeightsNotFoundError(
                f"{directory} is an adapter of peft: open it by PeftModel.from_pretrained(model, {str(directory)!r})"
            )
        raise BlockWeightsNotFoundError(f"{directory} lacks {OWN_TENSORS}, which save_pretrained() writes")
    try:
        with safe_open(path, "pt") as file:
            return file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no dict
    except (SafetensorError, OSError) as error:
        raise CorruptWeightsError(f"{path} can't be read as safetensors: {error}") from error
