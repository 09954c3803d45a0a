"""What a client owns of a model, saved and loaded: its embeddings, norm and head, trained or not, and nothing else.

Mixed into the distributed model. The file has a name of its own, so that transformers' ordinary `from_pretrained` of
the directory fails instead of making up the blocks that aren't in it. Adapters are saved by peft, as ever.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from swarmllm import __version__
from swarmllm.client.swarm_view import SwarmView
from swarmllm.errors import BlockWeightsNotFoundError, CorruptWeightsError, WeightsMismatchError

OWN_TENSORS = "swarmllm_client.safetensors"

MODEL_CARD = """---
base_model: {base}
library_name: swarmllm
tags:
- swarmllm
- "fingerprint:{fingerprint}"
- "class:{cls}"
---
The client's part of a {cls} on the blocks of `{base}`: everything but the blocks, which a swarm serves.

    model = ….from_pretrained("{base}", initial_peers=[…])
    model.load_trained("this directory")
"""


class SavedParts(PreTrainedModel if TYPE_CHECKING else object):  # type: ignore[misc]
    """`save_pretrained` and `load_trained`."""

    swarm: SwarmView

    def save_pretrained(
        self,
        save_directory: str | Path,
        is_main_process: bool = True,
        state_dict: dict[str, Tensor] | None = None,
        push_to_hub: bool = False,
        **kwargs: Any,
    ) -> None:
        """Write the tensors that are here, the config, and a card that names the base model.

        The blocks are not among them: load the directory with `load_trained`, into a model of the same base.
        """
        directory = Path(save_directory)
        if is_main_process:
            directory.mkdir(parents=True, exist_ok=True)
            self.config.save_pretrained(directory)
            name, fingerprint, cls = self.swarm.model_name, self.swarm.fingerprint, type(self).__name__
            # cloned: tied tensors share memory, which the format refuses
            own = {key: value.detach().cpu().clone() for key, value in (state_dict or self.state_dict()).items()}
            about = {"format": "pt", "base": name, "fingerprint": fingerprint, "class": cls, "version": __version__}
            save_file(own, directory / OWN_TENSORS, metadata=about)
            card = directory / "README.md"
            if not card.exists():
                card.write_text(MODEL_CARD.format(base=name, fingerprint=fingerprint, cls=cls))
        if push_to_hub:
            self.push_to_hub(kwargs.pop("repo_id", directory.name), **kwargs)

    def load_trained(self, directory: str | Path) -> None:
        """Take over what `save_pretrained` has written; if it doesn't fit, nothing changes.

        Raises:
            BlockWeightsNotFoundError: there is no such file.
            CorruptWeightsError: it can't be read.
            WeightsMismatchError: it is of another base model, task or shape.
        """
        path = Path(directory) / OWN_TENSORS
        if not path.is_file():
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
        own = self.state_dict()
        for name in sorted(own.keys() | found.keys()):
            if name not in own or name not in found or own[name].shape != found[name].shape:
                raise WeightsMismatchError(
                    f"{directory} holds a {about.get('class', 'model')} whose {name} doesn't fit this "
                    f"{type(self).__name__}: load it with the class and number of labels that it was saved with"
                )
        with torch.no_grad():
            for name, tensor in found.items():
                own[name].copy_(tensor)
