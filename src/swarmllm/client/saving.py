"""Saving and loading what a client owns of a model: embeddings, norm and head, trained or not, and nothing else.

Mixed into the distributed model. The file has a name of its own, so that transformers' ordinary `from_pretrained` of
the directory fails instead of making up the blocks that aren't in it. Adapters are saved by peft, as ever.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import HfApi
from huggingface_hub.errors import HTTPError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from swarmllm.client.view.swarm_view import SwarmView
from swarmllm.config import default_cache_dir, hub_token
from swarmllm.errors import BlockWeightsNotFoundError, ConfigurationError, CorruptWeightsError, WeightsMismatchError
from swarmllm.files import replace_file, replaced
from swarmllm.models.architecture import TASK_TAGS, Task
from swarmllm.models.checkpoint.checkpoint import Checkpoint
from swarmllm.models.checkpoint.fingerprint import fingerprint
from swarmllm.models.checkpoint.sources import find_source
from swarmllm.models.shell.hollow_adapters import BlockAdapters
from swarmllm.version import __version__

OWN_TENSORS = "swarmllm_client.safetensors"
NO_MODEL = "The blocks are not here: load this with load_trained()."
"""Stands in for the table that transformers' `from_pretrained` needs and trainers don't: it fails."""

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
    """Tags that say what something trained on this model belongs to; `swarmllm adapters` finds it by them."""
    tags = ["swarmllm", f"fingerprint:{fingerprint(checkpoint)}", f"task:{TASK_TAGS[task]}"]
    if checkpoint.revision is not None:
        tags += [f"revision:{checkpoint.revision}", f"base_model:{checkpoint.public_name}"]
    return tags


class SavedParts(PreTrainedModel if TYPE_CHECKING else object):  # type: ignore[misc]
    """`save_pretrained`, `push_to_hub` and `load_trained`."""

    swarm: SwarmView
    swarm_adapters: BlockAdapters
    _origin: Sequence[str] = ()

    @property
    def model_tags(self) -> list[str]:
        """Text for model cards: what this was trained on, and how. peft puts them into its adapters' cards as well."""
        tuners = getattr(self, "peft_config", None) or {}
        methods = {str(getattr(config.peft_type, "value", config.peft_type)).lower() for config in tuners.values()}
        return [*self._origin, *(f"method:{method}" for method in sorted(methods))]

    @model_tags.setter
    def model_tags(self, tags: Sequence[str] | None) -> None:
        self._origin = tuple(tags or ())

    def save_pretrained(
        self,
        save_directory: str | Path,
        is_main_process: bool = True,
        state_dict: dict[str, Tensor] | None = None,
        push_to_hub: bool = False,
        **kwargs: Any,
    ) -> None:
        """Write the tensors that are here, the config, and a card that names the base model.

        Blocks are not among them, unless they run here and are trained: load the directory with `load_trained`, into a
        model of the same base. Adapters of `add_adapter` are written beside as peft's files, as transformers does.
        """
        directory = Path(save_directory)
        if is_main_process:
            directory.mkdir(parents=True, exist_ok=True)
            self.config.save_pretrained(directory)
            name, fingerprint, cls = self.swarm.model_name, self.swarm.fingerprint, type(self).__name__
            # cloned: tied tensors share memory, which the format refuses
            frozen = self._names_of_frozen_blocks()
            tensors = (state_dict or self.state_dict()).items()
            own = {key: value.detach().cpu().clone() for key, value in tensors if not key.startswith(frozen)}
            about = {"format": "pt", "base": name, "fingerprint": fingerprint, "class": cls, "version": __version__}
            with replaced(directory / OWN_TENSORS) as beside:  # what was trained before is there until this is, too
                save_file(own, beside, metadata=about)
            if directory.name.startswith("checkpoint-"):  # transformers' Trainer finds by this file what it loads again
                index = {"metadata": NO_MODEL, "weight_map": dict.fromkeys(sorted(own), OWN_TENSORS)}
                replace_file(directory / SAFE_WEIGHTS_INDEX_NAME, json.dumps(index, indent=2))
            card = directory / "README.md"
            if not card.exists():
                said = dict(tag.split(":", 1) for tag in self._origin if ":" in tag)
                tags = "\n".join(f'- "{tag}"' for tag in [*self._origin, "method:parts", f"class:{cls}"])
                replace_file(card, MODEL_CARD.format(base=name, task=said.get("task", ""), tags=tags, cls=cls))
        if getattr(self, "_hf_peft_config_loaded", False):  # an adapter by transformers' own add_adapter
            super().save_pretrained(directory, is_main_process=is_main_process, state_dict=state_dict)
        if push_to_hub:
            self.push_to_hub(kwargs.pop("repo_id", directory.name), **kwargs)

    def _names_of_frozen_blocks(self) -> tuple[str, ...]:
        """How the names of tensors begin that are here and that nobody trains: they are the checkpoint's."""
        here = self.swarm_adapters.blocks.here.values()
        frozen = [block for block in here if not any(parameter.requires_grad for parameter in block.parameters())]
        return tuple(f"{name}." for name, module in self.named_modules() if any(module is block for block in frozen))

    def push_to_hub(
        self,
        repo_id: str,
        *,
        commit_message: str | None = None,
        private: bool | None = None,
        token: str | None = None,
        revision: str | None = None,
        **_: Any,
    ) -> str:
        """Upload what `save_pretrained` writes to a repository of the hub, made if need be; the commit's address.

        Raises:
            ConfigurationError: the hub doesn't take it.
        """
        api = HfApi(token=token or hub_token())
        try:
            repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
            with TemporaryDirectory() as directory:
                self.save_pretrained(directory)
                message = commit_message or f"Upload the client's part of {type(self).__name__}"
                commit = api.upload_folder(
                    repo_id=repo_id, folder_path=directory, commit_message=message, revision=revision
                )
        except (HTTPError, OSError) as error:
            raise ConfigurationError(f"the hub doesn't take {repo_id}: {str(error).splitlines()[0]}") from error
        return str(commit.commit_url)

    def load_trained(self, directory: str | Path) -> None:
        """Take over what `save_pretrained` has written, here or on the hub; if it doesn't fit, nothing changes.

        Raises:
            ConfigurationError: there is no such directory or repository.
            BlockWeightsNotFoundError: it has no such file.
            CorruptWeightsError: it can't be read.
            WeightsMismatchError: it is of another base model, task or shape.
        """
        source = find_source(str(directory), revision=None, token=hub_token(), cache_dir=default_cache_dir())
        path = source.path(OWN_TENSORS, required=False)
        if path is None:
            raise BlockWeightsNotFoundError(f"{directory} lacks {OWN_TENSORS}, which save_pretrained() writes")
        try:
            with safe_open(path, "pt") as file:
                about: dict[str, str] = file.metadata() or {}
                found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dict
        except (SafetensorError, OSError) as error:
            raise CorruptWeightsError(f"{path} can't be read as safetensors: {error}") from error
        if about.get("fingerprint") != self.swarm.fingerprint:
            raise WeightsMismatchError(
                f"{directory} was trained on {about.get('base', 'another model')} "
                f"(fingerprint {about.get('fingerprint', 'unknown')[:12]}), this is {self.swarm.model_name} "
                f"({self.swarm.fingerprint[:12]})"
            )
        own, frozen = self.state_dict(), self._names_of_frozen_blocks()
        for name in sorted(own.keys() | found.keys()):
            if name not in found and name.startswith(frozen):
                continue
            if name not in own or name not in found or own[name].shape != found[name].shape:
                raise WeightsMismatchError(
                    f"{directory} holds a {about.get('class', 'model')} whose {name} doesn't fit this "
                    f"{type(self).__name__}: load it with the class, number of labels and local_blocks that it was "
                    "saved with"
                )
        with torch.no_grad():
            for name, tensor in found.items():
                own[name].copy_(tensor)
