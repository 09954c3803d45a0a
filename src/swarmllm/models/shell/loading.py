"""Load a client's model: the architecture's own class, without the weights of its blocks.

Called by the client. `client_shell` says how the loaded model differs from a local one.
"""

import copy
import inspect
import re
from collections.abc import Callable, Mapping
from functools import partial
from numbers import Integral
from types import MappingProxyType
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn
from transformers import PreTrainedModel

from swarmllm.data_structures import BlockTraits
from swarmllm.errors import ConfigurationError
from swarmllm.models.architecture import (
    Stack,
    blocks_class,
    find_blocks,
    has_audio,
    has_vision,
    stack_module,
    stack_root,
    stacks,
)
from swarmllm.models.checkpoint.checkpoint import Checkpoint, resolve_dtype
from swarmllm.models.checkpoint.skeleton import drop_blocks, load_pruned, on_meta, pruned
from swarmllm.models.shell.blocks_proxy import BlocksProxy, BlocksRunner
from swarmllm.models.shell.client_shell import ClientShell, ShellStack, TrainingNotices, UnseenChanges
from swarmllm.models.shell.hollow_blocks import BlockAdapters, BlockReader, hollow_blocks
from swarmllm.models.shell.hollow_modules import ModulePlace, fix_children
from swarmllm.models.shell.stack_forward import adopt_head, adopt_stack, keep_offsets_apart
from swarmllm.models.shell.tuned_prompts import attach_prompts

HEAD_SETTINGS = re.compile(
    r"num_labels|id2label|label2id|problem_type|classifier_dropout|use_cache|return_dict|output_.*|.*_token_id"
)
"""Config fields that callers may give to `from_pretrained`, as with transformers, because no block uses them."""
PROBLEM_TYPES = ("regression", "single_label_classification", "multi_label_classification")
"""transformers' names of losses of classifiers."""
_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "num_labels": (lambda value: type(value) is int and value > 0, "a whole number above 0"),
    "id2label": (
        lambda value: (
            isinstance(value, Mapping)
            and {*map(str, value)} == {*map(str, range(len(value)))} != set()
            and all(isinstance(name, str) for name in value.values())
        ),
        "names of the labels 0, 1, 2 and so on",
    ),
    "label2id": (
        lambda value: isinstance(value, Mapping) and all(type(number) is int for number in value.values()),
        "the numbers of labels, by their names",
    ),
    "problem_type": (
        lambda value: isinstance(value, str) and value in PROBLEM_TYPES,
        f"one of {', '.join(PROBLEM_TYPES)}",
    ),
    "classifier_dropout": (lambda value: isinstance(value, int | float) and 0 <= value <= 1, "a share from 0 to 1"),
    "use_cache": (lambda value: isinstance(value, bool | int | list), "true or false, without quotation marks"),
}
"""What such a field can be; fields that are missing are as the last one."""
_OTHERWISE = ("dtype", "torch_dtype", "tie_word_embeddings", "attn_implementation", "experts_implementation")
"""Config fields that are arguments of their own."""


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
    """An instance of a subclass of `mixin` and `model_class` that runs its blocks through `runner`.

    Reads only tensors outside the blocks. `here`: blocks of this process, which the runner runs as well. `encoder`:
    runner and traits of the encoder's blocks, if the model has an encoder.

    Raises:
        ConfigurationError: the model can't have prompts of `tuning_mode`.
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
    model.swarm_notices, model.swarm_prepared = TrainingNotices(model.swarm_adapters), WeakValueDictionary()
    model.tuned_prompts = None
    if tuning_mode is not None or pre_seq_len:
        attach_prompts(model, tuning_mode, pre_seq_len, checkpoint.num_blocks, new_head)
    keep_offsets_apart(model)
    for stack in model.swarm_stacks:
        adopt_stack(model, stack)
    if encoder is None:  # with an encoder, padding is computed anyway
        adopt_head(model)
    return model.train(model.training)  # sets the mode of modules that were added since, too


def _put_proxies(of_stacks: Mapping[Stack, tuple[BlocksRunner, BlockTraits]], model: PreTrainedModel) -> None:
    """Replace the blocks of each stack by one `BlocksProxy`."""
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
    """Put hollow blocks around the proxy, so that peft and others find modules to adapt."""
    root = stack_root(model, stack)
    name, proxy = next((name, part) for name, part in root.named_modules() if isinstance(part, BlocksProxy))
    path = name.rpartition(".")[0]
    owner, _, attribute = path.rpartition(".")
    at_hand = {idx: block.to(model.device) for idx, block in here.items()}
    blocks = hollow_blocks(model_class, model, proxy, at_hand, stack, read)
    setattr(root.get_submodule(owner), attribute, blocks)
    fix_children(root.get_submodule(owner), ModulePlace("the model"), {attribute})
    proxy.__dict__["block"] = next(iter(blocks.hollow.values()))
    takes_sound = stack.role == "encoder" and has_audio(model.config)
    module, adapters = stack_module(model, stack), BlockAdapters(blocks)
    unseen = UnseenChanges(module, takes_encoder_outputs=stack.role == "decoder")
    return ShellStack(stack, module, proxy.traits, adapters, unseen, has_vision(model.config), takes_sound)


def _with_head_settings(checkpoint: Checkpoint, hf_kwargs: dict[str, Any]) -> Checkpoint:
    """The checkpoint with the caller's settings of the head in its config; takes them out of `hf_kwargs`.

    Raises:
        ConfigurationError: the caller wants another config for the blocks.
    """
    config = checkpoint.config
    fields = {*config.to_dict(), *config.attribute_map, "num_labels", "problem_type"}.difference(_OTHERWISE)
    settings = {name: _plain(hf_kwargs.pop(name)) for name in sorted(fields & hf_kwargs.keys())}
    for name, value in settings.items():
        if not HEAD_SETTINGS.fullmatch(name) and value != (was := getattr(config, name, None)):
            raise ConfigurationError(
                f"{name}={value!r} can't be given here, because servers run the blocks by the checkpoint's config, "
                f"which has {was!r}: leave it out, or serve a checkpoint that was saved with it"
            )
    require_head_settings(settings)
    if settings.get("num_labels", 0) is None:  # as if it were left out
        del settings["num_labels"]
    if not settings:
        return checkpoint
    changed = copy.copy(checkpoint)
    changed.config = copy.deepcopy(checkpoint.config)
    first = {name: settings.pop(name) for name in ("num_labels",) if name in settings}  # it names the labels anew
    changed.config.update(first)
    changed.config.update(settings)
    return changed


def _plain(value: Any) -> Any:
    """A whole number of another kind, such as numpy's, as Python's."""
    return value if isinstance(value, bool) or not isinstance(value, Integral) else int(value)


def require_head_settings(settings: Mapping[str, Any], vocab_size: int | None = None) -> None:
    """Raise ConfigurationError unless a head can have these settings: transformers takes most of what it can't use.

    `vocab_size`: where it won't grow any more. Users name the token of padding that they are going to add.
    """
    for name, value in settings.items():
        if name.endswith("_token_id"):
            ids = value if isinstance(value, list | tuple) and name == "eos_token_id" else [value]
            is_right = all(type(one) is int and -1 <= one < (vocab_size or 1 << 31) for one in ids)
            kind = "a token id of the model" + (f", below {vocab_size}" if vocab_size else "")
        else:
            is_possible, kind = _KINDS.get(name, _KINDS["use_cache"])
            is_right = is_possible(value)
        if value is not None and not is_right:
            raise ConfigurationError(f"{name} must be {kind}, not {value!r}")
    num_labels, labels = settings.get("num_labels"), settings.get("id2label")
    if num_labels is not None and labels is not None and len(labels) != num_labels:
        raise ConfigurationError(f"num_labels is {num_labels}, but id2label names {len(labels)}: leave num_labels out")


def _new_head(checkpoint: Checkpoint, model_class: type[PreTrainedModel]) -> set[str]:
    """Tensors that the checkpoint may lack: those of `model_class` that the checkpoint's own class doesn't have.

    An encoder's pooler is one of them, as many checkpoints lack it. transformers makes a new one, too.
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
