"""Loading a client's model: the architecture's own class, without the weights of its blocks.

Called by the client. What a loaded model can do more than others is told in `client_shell`.

The model's forward gets a subclass (`adopt_head`), which notes before the stack runs whether the head or the loss
looks at outputs of padding: then a batch can't do without them. Mostly it doesn't. But a loss counts labels of padding
unless they are -100, a head for classes may take what it has for the last token, and answers are looked for
everywhere. `blocks_proxy` says it to whoever runs the blocks.
"""

import copy
import functools
import inspect
import re
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from swarmllm.data_structures import BlockTraits
from swarmllm.errors import ConfigurationError
from swarmllm.models.architecture import (
    Stack,
    blocks_class,
    decoder_stack,
    find_blocks,
    hears,
    is_encoder,
    sees,
    stack_module,
    stack_root,
    stacks,
)
from swarmllm.models.checkpoint.checkpoint import Checkpoint, resolve_dtype
from swarmllm.models.checkpoint.skeleton import drop_blocks, load_pruned, on_meta, pruned
from swarmllm.models.shell.blocks_proxy import BlocksProxy, BlocksRunner, forward_of_model
from swarmllm.models.shell.client_shell import ClientShell, ShellStack, TrainingNotices
from swarmllm.models.shell.hollow_adapters import BlockAdapters
from swarmllm.models.shell.hollow_blocks import BlockReader, hollow_blocks
from swarmllm.models.shell.hollow_modules import ModulePlace, fix_children
from swarmllm.models.shell.stack_forward import adopt_stack
from swarmllm.models.shell.tuned_prompts import attach_prompts
from swarmllm.models.shell.unseen_changes import UnseenChanges
from swarmllm.models.shell.vision_inputs import keep_offsets_apart

HEAD_SETTINGS = re.compile(
    r"num_labels|id2label|label2id|problem_type|classifier_dropout|use_cache|return_dict|output_.*|.*_token_id"
)
"""Config fields that a caller may give to `from_pretrained`, as with transformers: they concern no block."""
_OTHERWISE = ("dtype", "torch_dtype", "tie_word_embeddings", "attn_implementation", "experts_implementation")
"""Fields that are arguments of their own."""

IGNORED = -100
"""The label that no loss of transformers counts."""


def load_client_shell(
    checkpoint: Checkpoint,
    *,
    model_class: type[PreTrainedModel],
    mixin: type,
    dtype: torch.dtype | str,
    runner: BlocksRunner,
    traits: BlockTraits,
    encoder: tuple[BlocksRunner, BlockTraits] | None = None,
    here: Mapping[int, nn.Module] = MappingProxyType({}),
    progress: bool = True,
    tuning_mode: str | None = None,
    pre_seq_len: int = 0,
    **hf_kwargs: Any,
) -> PreTrainedModel:
    """An instance of `type(model_class.__name__, (mixin, model_class), …)` that runs its blocks through `runner`.

    Reads only the tensors outside the blocks. `traits` come from the servers; blocks that the runner has `here` take
    the place of hollow ones. `encoder`: the same for the blocks of the encoder, if the model has one.

    Raises:
        ConfigurationError: the model can't have the prompts of `tuning_mode`.
        WeightsError: the checkpoint's files are missing, damaged or of another model.
    """
    of_stacks = dict(zip(stacks(checkpoint.config), ([encoder] if encoder else []) + [(runner, traits)], strict=True))
    if encoder is not None and tuning_mode is not None:
        raise ConfigurationError("tuning_mode is for models without an encoder: train LoRA adapters of peft instead")
    checkpoint = _with_head_settings(checkpoint, hf_kwargs)
    new_head = _new_head(checkpoint, model_class)
    cls = pruned(model_class, partial(_put_proxies, of_stacks), mixin, ClientShell)
    dtype = resolve_dtype(checkpoint, dtype)
    model = load_pruned(cls, checkpoint, dtype=dtype, progress=progress, may_lack=new_head, **hf_kwargs)
    model.swarm_runner, model.swarm_traits = runner, traits
    model.name_or_path = checkpoint.name  # peft writes it into its adapters
    if "generation_config" not in hf_kwargs and (generation_config := checkpoint.generation_config()) is not None:
        model.generation_config = generation_config
    read = None if checkpoint.comes_packed or encoder is not None else BlockReader(checkpoint, dtype)
    model.swarm_stacks = [_hollow_out(model, model_class, stack, here, read) for stack in of_stacks]
    model.swarm_adapters = model.swarm_stacks[-1].adapters
    model.swarm_notices = TrainingNotices(model.swarm_adapters)
    model.tuned_prompts = None
    if tuning_mode is not None:
        attach_prompts(model, tuning_mode, pre_seq_len, checkpoint.num_blocks, new_head)
    keep_offsets_apart(model)
    for stack in model.swarm_stacks:
        adopt_stack(model, stack)
    if encoder is None:  # otherwise padding is computed anyway
        adopt_head(model)
    return model.train(model.training)  # of what was put in since, too


def _put_proxies(of_stacks: Mapping[Stack, tuple[BlocksRunner, BlockTraits]], model: PreTrainedModel) -> None:
    """Replace all blocks of each stack by the one module that runs them elsewhere."""
    lists = {stack: find_blocks(model, stack) for stack in of_stacks}
    drop_blocks(model)
    for stack, (runner, traits) in of_stacks.items():
        found = lists[stack]
        getattr(found.owner, found.attribute).append(
            BlocksProxy(found.blocks[0], runner, traits, stack.span.end, encodes=stack.role == "encoder")
        )


def _hollow_out(
    model: PreTrainedModel,
    model_class: type[PreTrainedModel],
    stack: Stack,
    here: Mapping[int, nn.Module],
    read: BlockReader | None,
) -> ShellStack:
    """Show the blocks, without the weights of those that aren't here, to whoever looks for modules to adapt."""
    root = stack_root(model, stack)
    name, proxy = next((name, part) for name, part in root.named_modules() if isinstance(part, BlocksProxy))
    path = name.rpartition(".")[0]
    owner, _, attribute = path.rpartition(".")
    at_hand = {idx: block.to(model.device) for idx, block in here.items()}
    blocks = hollow_blocks(model_class, model, proxy, at_hand, stack, read)
    setattr(root.get_submodule(owner), attribute, blocks)
    fix_children(root.get_submodule(owner), ModulePlace("the model"), {attribute})
    proxy.__dict__["block"] = next(iter(blocks.hollow.values()))
    takes_sound = stack.role == "encoder" and hears(model.config)
    module, adapters = stack_module(model, stack), BlockAdapters(blocks)
    unseen = UnseenChanges(module, blocks.hollow.values(), takes_source=stack.role == "decoder")
    return ShellStack(stack, module, proxy.traits, adapters, unseen, sees(model.config), takes_sound)


def _with_head_settings(checkpoint: Checkpoint, hf_kwargs: dict[str, Any]) -> Checkpoint:
    """The checkpoint with a config for the head that the caller wants; takes those settings out of `hf_kwargs`.

    Raises:
        ConfigurationError: the caller wants another config for the blocks.
    """
    config = checkpoint.config
    fields = {*config.to_dict(), *config.attribute_map, "num_labels", "problem_type"}.difference(_OTHERWISE)
    settings = {name: hf_kwargs.pop(name) for name in sorted(fields & hf_kwargs.keys())}
    for name, value in settings.items():
        if not HEAD_SETTINGS.fullmatch(name) and value != (was := getattr(config, name, None)):
            raise ConfigurationError(
                f"{name}={value!r} can't be given here, because servers run the blocks by the checkpoint's config, "
                f"which has {was!r}: leave it out, or serve a checkpoint that was saved with it"
            )
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


def adopt_head(model: PreTrainedModel) -> None:
    """Give the model a subclass with our forward, if it has a head."""
    cls = type(model)
    if decoder_stack(model) is model:
        return
    positional = [parameter for parameter in inspect.signature(cls.forward).parameters if parameter != "self"]

    @functools.wraps(cls.forward)
    def forward(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(positional, args, strict=False)), **kwargs}
        mask = given.get("attention_mask")
        mask = mask if isinstance(mask, Tensor) and mask.ndim == 2 else None
        with forward_of_model(mask, reads_padding=reads_padding(self, given)):
            return cls.forward(self, *args, **kwargs)

    model.__class__ = type(cls.__name__, (cls,), {"forward": forward, "__module__": cls.__module__})


def reads_padding(model: PreTrainedModel, given: dict[str, Any]) -> bool | None:
    """Whether a forward of the model with these arguments looks at positions that the mask `[batch, seq]` hides.

    None: it doesn't, but has no loss either, so whoever gets its outputs may.
    """
    mask, labels, task = given.get("attention_mask"), given.get("labels"), type(model).__name__
    if task.endswith("ForQuestionAnswering"):
        return True
    if not isinstance(mask, Tensor) or mask.ndim != 2:
        return False
    if task.endswith("ForSequenceClassification"):
        read = _read_by_head_for_classes(model, given.get("input_ids"), mask)
    elif labels is None and isinstance(kept := given.get("logits_to_keep"), int) and kept > 0:  # as of generate()
        read = torch.zeros_like(mask, dtype=torch.bool)
        read[:, -kept:] = True
    elif labels is None:
        return None
    else:
        read = labels != IGNORED
        read[:, :-1] |= labels[:, 1:] != IGNORED  # what language models predict a label from
    if read.ndim != 2 or len(read) != len(mask) or read.shape[1] > mask.shape[1]:
        return True  # a mistake, or unknown
    hidden = mask[:, mask.shape[1] - read.shape[1] :].to(read.device) == 0  # of a prefix, nothing comes back
    return bool((read & hidden).any())


def _read_by_head_for_classes(model: PreTrainedModel, ids: Tensor | None, mask: Tensor) -> Tensor:
    """True at one position of each row: the first of encoders, what decoders take for the text's last one."""
    pad = model.config.get_text_config().pad_token_id
    is_text = torch.ones_like(mask) if ids is None or pad is None else ids != pad
    last = (torch.arange(is_text.shape[-1], device=is_text.device) * is_text).argmax(dim=-1, keepdim=True)
    position = torch.zeros_like(last) if is_encoder(model.config) else last
    return torch.zeros_like(is_text, dtype=torch.bool).scatter_(-1, position, True)
