"""Loading a client's model: the architecture's own class, without the weights of its blocks.

Called by the client. What a loaded model can do more than others is told in `client_shell`.
"""

import copy
import inspect
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from swarmllm.data_structures import BlockTraits
from swarmllm.models.architecture import blocks_class, find_blocks
from swarmllm.models.checkpoint.checkpoint import Checkpoint
from swarmllm.models.checkpoint.dtypes import resolve_dtype
from swarmllm.models.checkpoint.skeleton import drop_blocks, load_pruned, on_meta, pruned
from swarmllm.models.shell.blocks_proxy import BlocksProxy, BlocksRunner
from swarmllm.models.shell.client_shell import ClientShell
from swarmllm.models.shell.hollow_adapters import BlockAdapters
from swarmllm.models.shell.hollow_blocks import hollow_blocks
from swarmllm.models.shell.hollow_modules import ModulePlace, fix_children
from swarmllm.models.shell.read_blocks import BlockReader
from swarmllm.models.shell.read_positions import adopt_head
from swarmllm.models.shell.stack_forward import adopt_stack
from swarmllm.models.shell.training_notices import TrainingNotices
from swarmllm.models.shell.tuned_prompts import attach_prompts

HEAD_SETTINGS = ("num_labels", "id2label", "label2id", "problem_type", "pad_token_id", "classifier_dropout")
"""Config fields that a caller may give to `from_pretrained`, as with transformers: they concern no block."""


def load_client_shell(
    checkpoint: Checkpoint,
    *,
    model_class: type[PreTrainedModel],
    mixin: type,
    dtype: torch.dtype | str,
    runner: BlocksRunner,
    traits: BlockTraits,
    here: Mapping[int, nn.Module] = MappingProxyType({}),
    progress: bool = True,
    tuning_mode: str | None = None,
    pre_seq_len: int = 0,
    **hf_kwargs: Any,
) -> PreTrainedModel:
    """An instance of `type(model_class.__name__, (mixin, model_class), …)` that runs its blocks through `runner`.

    Reads only the tensors outside the blocks. `traits` come from the servers; blocks that the runner has `here` take
    the place of hollow ones.

    Raises:
        ConfigurationError: the model can't have the prompts of `tuning_mode`.
        WeightsError: the checkpoint's files are missing, damaged or of another model.
    """

    checkpoint = _with_head_settings(checkpoint, hf_kwargs)
    new_head = _new_head(checkpoint, model_class)
    cls = pruned(model_class, partial(_put_proxy, runner, traits), mixin, ClientShell)
    dtype = resolve_dtype(checkpoint, dtype)
    model = load_pruned(cls, checkpoint, dtype=dtype, progress=progress, may_lack=new_head, **hf_kwargs)
    model.swarm_runner, model.swarm_traits = runner, traits
    model.name_or_path = checkpoint.name  # peft writes it into its adapters
    if "generation_config" not in hf_kwargs and (generation_config := checkpoint.generation_config()) is not None:
        model.generation_config = generation_config
    _hollow_out(model, model_class, here, None if checkpoint.comes_packed else BlockReader(checkpoint, dtype))
    model.tuned_prompts = None
    if tuning_mode is not None:
        attach_prompts(model, tuning_mode, pre_seq_len, checkpoint.num_blocks, new_head)
    adopt_stack(model)
    adopt_head(model)
    return model


def _put_proxy(runner: BlocksRunner, traits: BlockTraits, model: PreTrainedModel) -> None:
    """Replace all blocks by the one module that runs them elsewhere."""
    found = find_blocks(model)
    drop_blocks(model)
    getattr(found.owner, found.attribute).append(BlocksProxy(found.blocks[0], runner, traits))


def _hollow_out(
    model: PreTrainedModel, model_class: type[PreTrainedModel], here: Mapping[int, nn.Module], read: BlockReader | None
) -> None:
    """Show the blocks, without the weights of those that aren't here, to whoever looks for modules to adapt."""
    name, proxy = next((name, part) for name, part in model.named_modules() if isinstance(part, BlocksProxy))
    path = name.rpartition(".")[0]
    owner, _, attribute = path.rpartition(".")
    at_hand = {idx: block.to(model.device) for idx, block in here.items()}
    blocks = hollow_blocks(model_class, model, proxy, at_hand, read)
    setattr(model.get_submodule(owner), attribute, blocks)
    fix_children(model.get_submodule(owner), ModulePlace("the model"), {attribute})
    proxy.__dict__["block"] = next(iter(blocks.hollow.values()))
    model.swarm_adapters, model.swarm_notices = BlockAdapters(blocks), TrainingNotices(blocks)


def _with_head_settings(checkpoint: Checkpoint, hf_kwargs: dict[str, Any]) -> Checkpoint:
    """The checkpoint with a config for the head that the caller wants; takes those settings out of `hf_kwargs`."""
    settings = {name: hf_kwargs.pop(name) for name in HEAD_SETTINGS if name in hf_kwargs}
    if not settings:
        return checkpoint
    changed = copy.copy(checkpoint)
    changed.config = copy.deepcopy(checkpoint.config)
    changed.config.update(settings)
    return changed


def _new_head(checkpoint: Checkpoint, model_class: type[PreTrainedModel]) -> set[str]:
    """Tensors that a checkpoint saved for another task can't have: those that class hasn't either.

    And an encoder's pooler, which many checkpoints lack: transformers makes a new one, too.
    """
    usual = blocks_class(checkpoint.config)
    without = {"add_pooling_layer": False} if "add_pooling_layer" in inspect.signature(usual).parameters else {}
    if model_class is usual and not without:
        return set()

    def names(cls: type[PreTrainedModel], **options: Any) -> dict[str, str]:
        model = on_meta(pruned(cls, drop_blocks), checkpoint.config, **options)
        return {name.removeprefix(f"{model.base_model_prefix}."): name for name in model.state_dict()}

    known = names(usual, **without)
    return {name for bare, name in names(model_class).items() if bare not in known}
