"""A saved adapter merged into its base checkpoint, one block after the other.

Each block is a model of its own for a moment. peft itself loads its part of the adapter into it and merges it. So the
result is the same, bit for bit, as that of peft's `merge_and_unload()` on the whole model, for every method that can be
merged. There is never more than one block in memory, or the part outside of blocks. Called by `commands/adapters`.
"""

import copy
import gc
import json
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from peft import PeftModel, get_peft_model_state_dict
from peft.utils.constants import DUMMY_TARGET_MODULES
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel

from swarmllm.data_structures import Span
from swarmllm.errors import BlockWeightsNotFoundError, ConfigurationError, CorruptWeightsError, WeightsMismatchError
from swarmllm.files import replace_file
from swarmllm.models.adapters.adapter_files import CONFIG, WEIGHTS, fingerprint_of_card
from swarmllm.models.architecture import Task, task_class, task_of
from swarmllm.models.checkpoint.checkpoint import Checkpoint
from swarmllm.models.checkpoint.fingerprint import fingerprint
from swarmllm.models.checkpoint.skeleton import (
    drop_blocks,
    load_pruned,
    named_blocks,
    on_meta,
    parameters_of,
    prune_to_span,
    pruned,
)
from swarmllm.models.checkpoint.sources import Source, first_line, read_object

TASKS = {
    "SEQ_CLS": Task.SEQUENCE_CLASSIFICATION,
    "TOKEN_CLS": Task.TOKEN_CLASSIFICATION,
    "QUESTION_ANS": Task.QUESTION_ANSWERING,
    "FEATURE_EXTRACTION": Task.FEATURES,
}
"""peft's names of tasks whose heads the adapter may bring; for other tasks the checkpoint's class is used."""
PREFIX = "base_model.model."
NOT_MERGED = ("PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING", "MULTITASK_PROMPT_TUNING", "CPT", "ADAPTION_PROMPT")
"""Methods that add something to the text instead of changing weights."""
MAX_SHARD = "1TB"
"""Each block is one file, as large as it is."""

_BESIDE = (
    *("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "spiece.model", "chat_template.jinja", "generation_config.json"),
)
"""Files of the base that belong to the merged model as they are."""
Told = Callable[[str], None]


class SavedAdapter:
    """An adapter of peft on disk, read in parts."""

    def __init__(self, source: Source) -> None:
        """Raises: ConfigurationError, WeightsError: it is none, or can't be merged."""
        self.name = source.public_name
        path, weights = source.path(CONFIG, required=False), source.path(WEIGHTS, required=False)
        if path is None:
            raise ConfigurationError(f"{source.name} is no adapter of peft: it has no {CONFIG}")
        if weights is None:
            raise BlockWeightsNotFoundError(f"the adapter {source.name} lacks {WEIGHTS}")
        self.fingerprint = fingerprint_of_card(source)
        """The base's, if the adapter's card says it."""
        self.config = read_object(path)
        if (kind := self.config.get("peft_type")) in NOT_MERGED:
            raise ConfigurationError(f"{source.name} is {kind}, which changes no weights, so it can't be merged")
        self._weights = weights
        try:
            with safe_open(weights, framework="pt") as file:
                self.shapes = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
        except Exception as error:
            raise CorruptWeightsError(f"{weights} can't be read: {first_line(error)}") from error

    def save_part(self, keys: list[str], names: set[str], directory: Path) -> None:
        """The adapter as if it were for modules of these names alone, with the tensors of `keys`."""
        config = dict(self.config)
        if config["peft_type"] == "ADALORA" and config.get("rank_pattern"):  # it wants the modules of all of them
            kept = {name: ranks for name, ranks in config["rank_pattern"].items() if _module_of(name, names)}
            config["rank_pattern"] = kept
        if not any("trainable_tokens" in key for key in keys):  # of the embeddings
            config.pop("trainable_token_indices", None)
        (directory / CONFIG).write_text(json.dumps(config))
        with safe_open(self._weights, framework="pt") as file:
            save_file({key: file.get_tensor(key) for key in keys}, directory / WEIGHTS)


def _module_of(key: str, names: set[str]) -> str | None:
    """The longest of these modules' names with which a tensor's begins."""
    parts = key.removeprefix(PREFIX).split(".")
    found = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((name for name in found if name in names), None)


class Merging:
    """One base and one adapter."""

    def __init__(self, checkpoint: Checkpoint, adapter: SavedAdapter) -> None:
        """Raises: SwarmError: they don't go together."""
        if checkpoint.comes_packed:
            raise ConfigurationError(
                f"the weights of {checkpoint.public_name} are stored in few bits, and merged weights would be "
                "rounded to them: give the base in 16 or 32 bits"
            )
        if adapter.fingerprint not in (None, fingerprint(checkpoint)):
            raise WeightsMismatchError(
                f"the adapter {adapter.name} was trained on another model than {checkpoint.public_name}: give the base "
                f"whose fingerprint is {adapter.fingerprint}"
            )
        self.checkpoint, self.adapter = copy.copy(checkpoint), adapter
        self.checkpoint.config = copy.deepcopy(checkpoint.config)
        task = TASKS.get(adapter.config.get("task_type") or "") or task_of(checkpoint.config)
        self.cls = task_class(checkpoint.config, task)
        self._own = {key.removeprefix(PREFIX) for key in adapter.shapes}
        model = on_meta(self.cls, self.checkpoint.config)
        of_base = set(parameters_of(model, checkpoint.weight_map()).values())
        for name, _ in model.named_parameters():
            if name not in of_base and (shape := adapter.shapes.get(PREFIX + name)):  # a head
                self.checkpoint.config.num_labels = shape[0]
        self._blocks = [name for name, _ in named_blocks(model)]
        self._keys = self._by_block({name for name, _ in model.named_modules()})

    def _by_block(self, names: set[str]) -> dict[int | None, list[str]]:
        """The adapter's tensors of each block, and (None) those outside of blocks; a tensor of no module belongs to
        all."""
        found: dict[int | None, list[str]] = {None: [], **{idx: [] for idx in range(len(self._blocks))}}
        shared = []
        for key in sorted(self.adapter.shapes):
            module = _module_of(key, names - {""})
            if module is None and "." not in key.removeprefix("base_model."):
                shared.append(key)
            elif module is None:
                raise self._misfit(key)
            else:
                blocks = (i for i, name in enumerate(self._blocks) if f"{module}.".startswith(f"{name}."))
                found[next(blocks, None)].append(key)
        return {part: [*keys, *shared] if keys else [] for part, keys in found.items()}

    def parts(self) -> Iterator[PreTrainedModel]:
        """The part outside of blocks, and each block, merged."""
        yield self._merged(pruned(self.cls, drop_blocks), None)
        for block_idx in range(len(self._blocks)):
            yield self._merged(pruned(self.cls, prune_to_span(Span(block_idx, block_idx + 1))), block_idx)

    def _merged(self, cls: type[PreTrainedModel], block_idx: int | None) -> PreTrainedModel:
        model = load_pruned(
            cls, self.checkpoint, dtype=self.checkpoint.stored_dtype(), progress=False, may_lack=self._own
        )
        if block_idx is not None:
            _leave(model, self._blocks[block_idx])
            model.__dict__["get_input_embeddings"] = nn.Identity  # peft looks whether it trains tied ones: not here
        if not self._keys[block_idx]:
            return model
        with tempfile.TemporaryDirectory() as directory, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about tensors of other blocks
            names = {name for name, _ in model.named_modules()}
            self.adapter.save_part(self._keys[block_idx], names, Path(directory))
            try:
                adapted = _with_adapter(model, Path(directory))
                left = set(self._keys[block_idx]).difference(get_peft_model_state_dict(adapted))
                merged: PreTrainedModel = adapted.merge_and_unload()
            except (ValueError, RuntimeError, KeyError, AttributeError, NotImplementedError) as error:
                raise ConfigurationError(
                    f"peft can't merge {self.adapter.name} into {self.checkpoint.public_name}: {first_line(error)}"
                ) from error
        if left:
            raise self._misfit(min(left))
        return merged

    def _misfit(self, key: str) -> WeightsMismatchError:
        return WeightsMismatchError(
            f"the adapter {self.adapter.name} has {key}, for which {self.checkpoint.public_name} has no module: give "
            "the base that it was trained on"
        )


def _with_adapter(model: PreTrainedModel, directory: Path) -> Any:
    try:
        return PeftModel.from_pretrained(model, str(directory))
    except ValueError as error:
        if not any(text in str(error) for text in ("not found in the base model", "No modules were targeted")):
            raise
    # All that there is of it here are whole modules or biases.
    path = directory / CONFIG
    instead = {"target_modules": DUMMY_TARGET_MODULES, "layers_to_transform": None, "layers_pattern": None}
    path.write_text(json.dumps(json.loads(path.read_text()) | instead))
    return PeftModel.from_pretrained(model, str(directory))


def _leave(model: nn.Module, path: str) -> None:
    """Remove everything that is neither around the module of that path nor in it."""
    name, _, rest = path.partition(".")
    for other in list(model._modules):
        if other != name:
            model._modules[other] = None
    model._parameters.clear()
    model._buffers.clear()
    if rest:
        _leave(model.get_submodule(name), rest)


def merge_adapter(checkpoint: Checkpoint, adapter: Source, output: Path, tell: Told) -> None:
    """Write the checkpoint with the adapter merged into it to a new directory: a shard for each block, and an index.

    Raises:
        SwarmError: they don't go together, or the directory holds something.
    """
    if output.exists() and any(output.iterdir()):
        raise ConfigurationError(f"{output} is not empty: name a new directory")
    merging = Merging(checkpoint, SavedAdapter(adapter))
    output.mkdir(parents=True, exist_ok=True)
    shards: dict[str, str] = {}
    num_parts, total = len(merging._blocks) + 1, 0
    for number, model in enumerate(merging.parts(), start=1):
        shard = f"model-{number:05d}-of-{num_parts:05d}.safetensors"
        with tempfile.TemporaryDirectory(dir=output) as directory:
            model.save_pretrained(directory, max_shard_size=MAX_SHARD)
            if number == 1:
                shutil.move(Path(directory) / "config.json", output / "config.json")
            path = Path(directory) / "model.safetensors"
            if path.exists():
                with safe_open(path, framework="pt") as file:
                    shards |= dict.fromkeys(file.keys(), shard)
                total += path.stat().st_size
                shutil.move(path, output / shard)
        tell(f"{number} of {num_parts} parts")
        del model
        gc.collect()  # peft's layers and their models refer to each other
    for name in _BESIDE:
        if (found := checkpoint.file_beside(name)) is not None:
            shutil.copyfile(found, output / name)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(shards.items()))}
    replace_file(output / "model.safetensors.index.json", json.dumps(index, indent=2))
