"""The Hugging Face model without its blocks: embeddings, final norm and head here, the blocks elsewhere.

`load_client_shell` gives an instance of the architecture's own class, so `generate()`, `forward(labels=…)`, pipelines
and trainers work on it. Its block list holds one proxy module, which hands the hidden states to a `BlocksRunner`; the
stack (the module that owns the loop over blocks) is given a subclass whose forward notes what the blocks need besides.
"""

import copy
import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from swarmllm.data_structures import BlockTraits
from swarmllm.errors import ConfigurationError, LocalProtocolError
from swarmllm.models.adapters import BlockAdapter
from swarmllm.models.architecture import blocks_class, cache_argument, decoder_stack, find_blocks
from swarmllm.models.block_inputs import BlockInputs, check_mask
from swarmllm.models.block_slots import ForwardStopped
from swarmllm.models.call_cache import cache_of_call, note_prepared, note_spent
from swarmllm.models.checkpoint import Checkpoint
from swarmllm.models.dtypes import resolve_dtype
from swarmllm.models.hollow_blocks import BlockAdapters, hollow_blocks
from swarmllm.models.hollow_modules import Place, fix_children
from swarmllm.models.remote_cache import CacheSession, RemoteCache
from swarmllm.models.skeleton import drop_blocks, load_pruned, on_meta, pruned
from swarmllm.models.training_notices import TrainingNotices
from swarmllm.models.tuned_prefix import PrefixCache, TunedPrefix, text_mask
from swarmllm.models.tuned_prompts import TunedPrompts, attach_prompts, whole_length

HEAD_SETTINGS = ("num_labels", "id2label", "label2id", "problem_type", "pad_token_id", "classifier_dropout")
"""Config fields that a caller may give to `from_pretrained`, as with transformers: they concern no block."""
SOFT_PROMPT_ROOM = 128
"""Positions that peft's soft prompts may take in a session that `generate()` opens, which doesn't count them. Assumed:
they rarely have more than 100 tokens; the servers' cache for them costs little."""


class BlocksRunner(Protocol):
    """What runs the blocks; implemented by the client."""

    def run_blocks(self, inputs: BlockInputs, cache: RemoteCache | None) -> Tensor:
        """All blocks on `inputs`: with a cache, its session advances by `inputs.seq_len`; without, differentiable."""
        ...

    def new_cache_session(self, batch_size: int, max_length: int | None) -> CacheSession:
        """Begin a session for `batch_size` rows; it grows beyond `max_length` positions if need be."""
        ...

    def longest_row(self) -> int:
        """Positions that one row of a batch without a cache may have."""
        ...


@dataclass(frozen=True)
class _Call:
    """What one forward of the stack gave; read by the proxy in the middle of it."""

    batch_size: int
    seq_len: int
    tensors: dict[str, Tensor]
    cache: RemoteCache | None
    has_embeds: bool
    """Whether the hidden states may be a tensor of the caller's own."""
    adapter: BlockAdapter | None = None
    trained: tuple[Tensor, ...] = ()


_call: ContextVar[_Call | None] = ContextVar("swarmllm_call", default=None)
_detour: ContextVar[Callable[[Tensor], Tensor] | None] = ContextVar("swarmllm_detour", default=None)
"""If set, runs instead of the blocks (`embed` and `head` use it)."""

_ON_THE_WIRE = ("attention_mask", "position_ids", "token_type_ids")


class BlocksProxy(nn.Module):
    """The only entry of the client's block list: all blocks of the model at once."""

    def __init__(self, block: nn.Module, runner: BlocksRunner, traits: BlockTraits) -> None:
        super().__init__()
        # through __dict__: none of these is a submodule
        self.__dict__.update(block=block, runner=runner, traits=traits)
        self.__dict__["first_argument"] = next(iter(inspect.signature(block.forward).parameters))

    def __getattr__(self, name: str) -> Any:  # models ask their blocks for attention_type and the like
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "block" not in self.__dict__:
                raise
            return getattr(self.__dict__["block"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__["block"], name, value)  # which refuses

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden: Tensor = args[0] if args else kwargs[self.first_argument]
        traits: BlockTraits = self.traits
        output = self._run(hidden)
        return output if traits.block_output == 0 else (output, *(None,) * (traits.block_output - 1))

    def _run(self, hidden: Tensor) -> Tensor:
        if (detour := _detour.get()) is not None:
            return detour(hidden)
        call = _call.get()
        if call is None:
            raise LocalProtocolError("the blocks were called outside the forward of their model")
        inputs = BlockInputs(
            hidden_states=hidden,
            batch_size=call.batch_size,
            seq_len=call.seq_len,
            adapter=call.adapter,
            trained=call.trained,
            **call.tensors,
        )
        cache = call.cache
        output: Tensor = self.runner.run_blocks(inputs, None if cache is None or cache.deferred else cache)
        if cache is None:
            return output
        cache.has_graph |= hidden.requires_grad or any(tensor.requires_grad for tensor in call.trained)
        if cache.deferred:
            cache.deferred = False
            cache.session.remember(_remembered(inputs, call.has_embeds))
        elif cache.has_graph and torch.is_grad_enabled():
            output = _NoGradient.apply(output, torch.zeros((), requires_grad=True))  # type: ignore[no-untyped-call]
        return output


def _remembered(inputs: BlockInputs, has_embeds: bool) -> BlockInputs:
    """Outside of the graph, and with copies of what callers may change in place later."""
    copies = {
        name: tensor.detach().clone()
        for name, tensor in inputs.tensors().items()
        if has_embeds or name != "hidden_states"
    }
    return inputs.detached().with_tensors(copies)


class _NoGradient(torch.autograd.Function):
    """The result of a step with a remote cache: a backward through it is refused instead of silently cut off."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, *_: Tensor) -> Tensor:
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        raise ConfigurationError(
            "gradients don't flow through a KV cache on servers: call the model with the whole text and without "
            "past_key_values, best with use_cache=False"
        )


class ClientShell:
    """Mixed into the architecture's class, below the caller's own mixin."""

    swarm_runner: BlocksRunner
    swarm_traits: BlockTraits
    swarm_adapters: BlockAdapters
    swarm_notices: TrainingNotices
    config: PreTrainedConfig
    tuned_prompts: TunedPrompts | None

    @property
    def peft_config(self) -> dict[str, Any]:
        """By name, what peft says of the adapters that it has put into the model."""
        if "_peft_config" not in self.__dict__:
            raise AttributeError("the model has no adapter of peft")
        found: dict[str, Any] = self.__dict__["_peft_config"]
        return found

    @peft_config.setter
    def peft_config(self, configs: dict[str, Any]) -> None:
        self.swarm_adapters.check(configs)
        self.__dict__["_peft_config"] = configs

    @peft_config.deleter
    def peft_config(self) -> None:
        self.__dict__.pop("_peft_config", None)

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """Of the whole model, blocks included; `only_trainable`: of what can be trained here."""
        here: int = super().num_parameters(only_trainable, exclude_embeddings)  # type: ignore[misc]
        return here if only_trainable else here + self.swarm_adapters.blocks.num_parameters(exclude_embeddings)

    def active_cache_session(self) -> CacheSession | None:
        """The session that `generate()` shall continue, if the user has opened one."""
        return None

    def _prepare_cache_for_generation(
        self,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        generation_mode: Any,
        batch_size: int,
        max_cache_length: int,
    ) -> None:
        name = cache_argument(decoder_stack(self))
        given = model_kwargs.get(name)
        if given is not None:
            if not isinstance(given, RemoteCache):
                raise ConfigurationError("past_key_values of generate() can only be what an earlier call has returned")
            given._is_user_defined = True  # transformers' own mark: positions continue, the cache is returned
            return
        if generation_config.use_cache is False:
            return
        # Prompt lookup checks guesses up to, and some beyond, the last token that is wanted.
        room = 1 + (generation_config.prompt_lookup_num_tokens or 0) + SOFT_PROMPT_ROOM
        room += 0 if self.tuned_prompts is None else len(self.tuned_prompts)
        cache = self._remote_cache(batch_size * _rows_per_prompt(generation_config), max_cache_length + room)
        if generation_config.is_assistant:
            cache.activate_past_recording()
        model_kwargs[name] = cache
        note_prepared(self, cache)

    def _prepare_position_ids_for_generation(self, inputs_tensor: Tensor, model_kwargs: dict[str, Any]) -> Tensor:
        mask = model_kwargs.get("attention_mask")
        if mask is not None:  # of ones alone, no forward would see it
            cache = model_kwargs.get(cache_argument(decoder_stack(self)))
            batch_size, seq_len = inputs_tensor.shape[:2]
            past = cache.length if isinstance(cache, RemoteCache) and mask.shape[-1] > seq_len else 0
            check_mask(mask, batch_size, seq_len, past)
        positions: Tensor = super()._prepare_position_ids_for_generation(inputs_tensor, model_kwargs)  # type: ignore[misc]
        return positions

    def _remote_cache(self, batch_size: int, max_length: int | None) -> RemoteCache:
        session = self.active_cache_session() or self.swarm_runner.new_cache_session(batch_size, max_length)
        cache = RemoteCache(self.config, session, batch_size)
        cache.num_hidden = 0 if self.tuned_prompts is None else len(self.tuned_prompts)
        return cache


def load_client_shell(
    checkpoint: Checkpoint,
    *,
    model_class: type[PreTrainedModel],
    mixin: type,
    dtype: torch.dtype | str,
    runner: BlocksRunner,
    traits: BlockTraits,
    num_blocks: int,
    progress: bool = True,
    tuning_mode: str | None = None,
    pre_seq_len: int = 0,
    **hf_kwargs: Any,
) -> PreTrainedModel:
    """An instance of `type(model_class.__name__, (mixin, model_class), …)` that runs its blocks through `runner`.

    Reads only the tensors outside the blocks. `dtype="auto"` is what the config says; `traits` come from the servers.

    Raises:
        ConfigurationError: the swarm serves another number of blocks than this checkpoint has.
        WeightsError: the checkpoint's files are missing, damaged or of another model.
    """
    if num_blocks != checkpoint.num_blocks:
        raise ConfigurationError(f"{checkpoint.name} has {checkpoint.num_blocks} blocks, but the swarm {num_blocks}")

    def prune(model: PreTrainedModel) -> None:
        found = find_blocks(model)
        drop_blocks(model)
        getattr(found.owner, found.attribute).append(BlocksProxy(found.blocks[0], runner, traits))

    checkpoint = _with_head_settings(checkpoint, hf_kwargs)
    new_head = _new_head(checkpoint, model_class)
    cls = pruned(model_class, prune, mixin, ClientShell)
    model = load_pruned(
        cls,
        checkpoint,
        dtype=resolve_dtype(checkpoint, dtype),
        progress=progress,
        may_lack=new_head,
        **hf_kwargs,
    )
    model.swarm_runner, model.swarm_traits = runner, traits
    model.name_or_path = checkpoint.name  # peft writes it into its adapters
    if "generation_config" not in hf_kwargs and (generation_config := checkpoint.generation_config()) is not None:
        model.generation_config = generation_config
    _hollow_out(model, model_class)
    model.tuned_prompts = None
    if tuning_mode is not None:
        attach_prompts(model, tuning_mode, pre_seq_len, num_blocks, new_head)
    _adopt_stack(model)
    return model


def _hollow_out(model: PreTrainedModel, model_class: type[PreTrainedModel]) -> None:
    """Show the blocks, without their weights, to whoever looks for modules to adapt."""
    name, proxy = next((name, part) for name, part in model.named_modules() if isinstance(part, BlocksProxy))
    path = name.rpartition(".")[0]
    owner, _, attribute = path.rpartition(".")
    blocks = hollow_blocks(model_class, model, proxy)
    setattr(model.get_submodule(owner), attribute, blocks)
    fix_children(model.get_submodule(owner), Place("the model"), {attribute})
    proxy.__dict__["block"] = blocks.blocks()[0]
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


def embed(model: PreTrainedModel, input_ids: Tensor | None = None, **kwargs: Any) -> Tensor:
    """Everything that the model computes before its first block; returns hidden states `[batch, seq, hidden]`."""
    entering: list[Tensor] = []

    def stop(hidden: Tensor) -> Tensor:
        entering.append(hidden)
        raise ForwardStopped

    with _taking(stop):
        try:
            model(input_ids=input_ids, use_cache=False, **kwargs)
        except ForwardStopped:
            return entering[0]
    raise LocalProtocolError(f"the forward of {type(model).__name__} never reached its blocks")


def head(model: PreTrainedModel, hidden_states: Tensor) -> Tensor:
    """Everything that the model computes after its last block; returns logits `[batch, seq, vocabulary]`."""
    traits: BlockTraits = model.swarm_traits
    batch_size, seq_len = hidden_states.shape[traits.batch_axis : traits.batch_axis + 2]
    ids = torch.zeros((batch_size, seq_len), dtype=torch.long, device=hidden_states.device)
    with _taking(lambda _: hidden_states):
        logits: Tensor = model(input_ids=ids, use_cache=False).logits
    return logits


@contextmanager
def _taking(detour: Callable[[Tensor], Tensor]) -> Iterator[None]:
    token = _detour.set(detour)
    try:
        yield
    finally:
        _detour.reset(token)


def _adopt_stack(model: PreTrainedModel) -> None:
    """Give the stack a subclass with our forward: unlike a hook, it also serves callers of `stack.forward`."""
    stack = decoder_stack(model)
    cls = type(stack)
    shell = model
    name = cache_argument(stack)
    takes_cache = name in inspect.signature(cls.forward).parameters

    @functools.wraps(cls.forward)
    def forward(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        if args:
            kwargs = {**dict(zip(positional, args, strict=False)), **kwargs}
        _refuse_inner_outputs(self.config, kwargs)
        if _detour.get() is None:
            given = kwargs.get(name)
            cache, prefix = cache_of_call(shell, self.config, kwargs, name) if takes_cache else (None, None)
            prompts: TunedPrompts | None = shell.tuned_prompts
            with_prompts = prompts is not None and prompts.prepend(self, kwargs, cache)
            with whole_length(cache):
                token = _call.set(_describe(shell, self, kwargs, cache, prefix))
                try:
                    outputs = cls.forward(self, **kwargs)
                finally:
                    _call.reset(token)
                    if isinstance(spent := kwargs.get(name), PrefixCache):
                        spent.num_prefix = 0  # some models return it, and peft looks how long it is
            if prefix is not None:
                note_spent(given)
            return prompts.drop(outputs) if prompts is not None and with_prompts else outputs
        ids, mask, past = kwargs.get("input_ids"), kwargs.get("attention_mask"), kwargs.get(name)
        if ids is not None and mask is not None:
            check_mask(mask, ids.shape[0], ids.shape[1], 0 if past is None else past.get_seq_length())
        return cls.forward(self, **kwargs)

    positional = [parameter for parameter in inspect.signature(cls.forward).parameters if parameter != "self"]
    stack.__class__ = type(cls.__name__, (cls,), {"forward": forward, "__module__": cls.__module__})


def _describe(
    shell: PreTrainedModel,
    stack: PreTrainedModel,
    kwargs: dict[str, Any],
    cache: RemoteCache | None,
    prefix: TunedPrefix | None,
) -> _Call:
    ids, embeds = kwargs.get("input_ids"), kwargs.get("inputs_embeds")
    given = ids if ids is not None else embeds
    if given is None:
        raise ConfigurationError("give the model either input_ids or inputs_embeds")
    if 0 in given.shape:
        raise ConfigurationError(f"the text is empty: {list(given.shape)}")
    width = getattr(stack.get_input_embeddings(), "embedding_dim", None)
    if embeds is not None and width is not None and (embeds.ndim != 3 or embeds.shape[-1] != width):
        raise ConfigurationError(f"inputs_embeds must be [batch, seq, {width}], not {list(embeds.shape)}")
    tensors = {name: kwargs[name] for name in _ON_THE_WIRE if kwargs.get(name) is not None}
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise ConfigurationError(f"{name} must be a tensor, not a {type(tensor).__name__}")
    num_prefix = cache.num_prefix if cache is not None else len(prefix) if prefix is not None else 0
    if num_prefix and "attention_mask" in tensors:
        tensors["attention_mask"] = text_mask(tensors["attention_mask"], num_prefix)
    if "attention_mask" in tensors:
        past = 0 if cache is None else cache.session.position
        check_mask(tensors["attention_mask"], given.shape[0], given.shape[1], past)
    elif cache is not None and cache.deferred and "position_ids" in tensors:
        # Servers run this without the cache that transformers would have here, and would take positions that begin
        # anew for those of another text.
        tensors["attention_mask"] = torch.ones(given.shape[:2], dtype=torch.int64, device=given.device)
    extra_inputs = shell.swarm_traits.extra_inputs
    if "input_ids" in extra_inputs:
        if ids is None:
            raise ConfigurationError(
                f"the blocks of {type(shell).__name__} need input_ids; inputs_embeds are not enough"
            )
        tensors["input_ids"] = ids
    if "inputs_embeds" in extra_inputs:
        tensors["inputs_embeds"] = embeds if embeds is not None else stack.get_input_embeddings()(ids)
    adapters: BlockAdapters = shell.swarm_adapters
    call = _Call(given.shape[0], given.shape[1], tensors, cache, embeds is not None)
    if cache is not None and cache.session.position:  # a session keeps the adapter that it began with
        return replace(call, adapter=adapters.last if cache.begun_with is None else cache.begun_with[0])
    if stack.training and (rate := getattr(stack, "layerdrop", 0)):
        raise ConfigurationError(f"layerdrop={rate} would drop all blocks at once: set it to 0, or call model.eval()")
    if shell.training and torch.is_grad_enabled():
        shell.swarm_notices.tell(shell)
    in_blocks = prefix if prefix is not None else shell.tuned_prompts
    adapter, trained = adapters.collect(
        getattr(shell, "peft_config", None) or {}, () if in_blocks is None else in_blocks.patches()
    )
    if cache is not None:
        cache.begun_with = (adapter,)
    return replace(call, adapter=adapter, trained=trained)


def _refuse_inner_outputs(config: PreTrainedConfig, kwargs: dict[str, Any]) -> None:
    for name in ("output_hidden_states", "output_attentions", "output_router_logits"):
        wanted = kwargs.get(name)
        if wanted if wanted is not None else getattr(config, name, False):
            raise ConfigurationError(
                f"{name} is not available: the blocks run on the servers, which return only results"
            )


def _rows_per_prompt(generation_config: Any) -> int:
    """generate() repeats each prompt before the prefill."""
    return max(generation_config.num_beams or 1, generation_config.num_return_sequences or 1)
