"""The Hugging Face model without its blocks: embeddings, final norm and head here, the blocks elsewhere.

`loading` gives an instance of the architecture's own class, so `generate()`, `forward(labels=…)`, pipelines and
trainers work on it. Its block list holds one proxy module (`blocks_proxy`), and its stack has a forward of ours
(`stack_forward`). `ClientShell` overrides methods of the class: caches of `generate()`, peft's adapters.
`TrainingNotices` logs, once, how training differs from training the whole model locally.

`UnseenChanges` refuses changes of the user that change what blocks compute, but that servers can't see: in the config,
in arguments, in rotary embeddings, by hooks on all modules, or by torch.func's transforms. `stack_forward`
calls it at each forward. `hollow_modules` refuses changes of the blocks' own modules.

`cache_of_call` chooses the cache of one forward, before the architecture's code sees the arguments:

    a remote cache is given                         its session goes on
    use_cache is False, or the model is an encoder  no cache: the blocks run on the whole batch at once
    use_cache=True, without gradients               a session is opened, and its cache is returned
    use_cache=True, in generate() of a user's       the text of a logits processor, such as that of guidance_scale: it
    session                                         gets a session of its own
    the same, of a LongRoPE model, and the text     the session begins anew, at position 0: the model has dropped its
    comes as a whole                                cache, as these do when a text becomes long
    other calls for which transformers makes a      the blocks run without a session. The returned cache opens one only
    cache, for example with gradients               if the user continues it, and then computes its positions again
"""

import copy
import logging
import math
import re
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from swarmllm.data_structures import BlockTraits
from swarmllm.errors import ConfigurationError, LocalProtocolError
from swarmllm.models.adapters.block_adapter import AUTOCAST
from swarmllm.models.architecture import Stack, cache_argument, decoder_stack, has_vision, is_encoder
from swarmllm.models.block_slots import ForwardStopped
from swarmllm.models.boundary.block_inputs import check_mask
from swarmllm.models.shell.blocks_proxy import BlocksRunner, Call, calling
from swarmllm.models.shell.hollow_blocks import BlockAdapters
from swarmllm.models.shell.hollow_modules import ModulePlace, close_hooks, fix_children, remove_row_hooks
from swarmllm.models.shell.remote_cache import CacheSession, RemoteCache
from swarmllm.models.shell.tuned_prompts import TunedPrefix, TunedPrefixCache, TunedPrompts, prompts_in_use

logger = logging.getLogger(__name__)

SOFT_PROMPT_ROOM = 128
"""Positions that a session of `generate()` keeps free for peft's soft prompts, which `generate()` doesn't count.
Assumed: soft prompts rarely have more than 100 tokens, and the cache for them costs servers little."""

NO_CACHE_IN_TRAINING = {"falcon_mamba", "mamba", "mamba2", "rwkv"}
"""Types of models whose forward makes a cache in train mode only if `use_cache` is given."""
_spent: "weakref.WeakSet[Any]" = weakref.WeakSet()
"""Caches of transformers that a call has used as a prefix. Using one twice is refused: a local model would have added
the first call's text to it, and this model doesn't."""
_FREE_FIELDS = re.compile(
    r"_.*|output_.*|.*_token_id|.*logit.*|use_cache|(use_)?return_dict|vocab_size|tie_word_embeddings|layerdrop|dtype"
    r"|num_labels|id2label|label2id|problem_type|classifier_dropout|.*aux_loss_coef|summary_.*|mask_.*"
    r"|apply_spec_augment|embedding_multiplier|scale_embedding|architectures|transformers_version|pretraining_tp"
)
"""Config fields that blocks don't read, so users may change them: only the code on the client reads them (embeddings,
heads, losses, `generate()`)."""
_MASK_FIELDS = ("is_causal", "sliding_window", "attention_chunk_size", "layer_types", "partial_rotary_factor")
"""Config fields that transformers reads for masks and positions. If a config lacks one, adding it is a change."""
_GLOBAL_HOOKS = tuple(f"_global_{kind}_hooks" for kind in ("forward_pre", "forward", "backward_pre", "backward"))
"""Tables of torch with the hooks on all modules."""
_PACKED_TEXT_ARGUMENTS = dict.fromkeys(("seq_idx", "cu_seq_lens_q", "cu_seq_lens_k"), "give each text a row of its own")
"""Arguments that say where texts begin in a row that holds several, and what to do instead."""
_BLOCK_ARGUMENTS = {
    **dict.fromkeys(("is_causal", "position_bias"), "use a mask of four axes"),
    "encoder_hidden_states": "put its content into the text",
}
"""Arguments that a model only passes on to its blocks, and what to do instead."""
_ROUNDING, _TINY = 2.0**-7, 1e-6
"""Relative and absolute tolerance for rotary embeddings: a cast of the model to bfloat16 or half and back changes them
by less."""


class UnseenChanges:
    """Remembers config and rotary embeddings of a stack when it is opened, and refuses later changes of them."""

    def __init__(self, stack: nn.Module, *, takes_encoder_outputs: bool) -> None:
        """`takes_encoder_outputs`: the stack is a decoder, whose encoder outputs are sent to servers."""
        self._config: Any = stack.config
        fields = dict.fromkeys(_MASK_FIELDS) | vars(self._config)
        self._was = {name: copy.deepcopy(value) for name, value in fields.items() if not _FREE_FIELDS.fullmatch(name)}
        layers = DynamicCache(config=self._config).layers
        # Attention keeps packed texts apart by positions alone, recurrent blocks only by these arguments.
        recurrent = any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in layers)
        self._arguments = _BLOCK_ARGUMENTS | (_PACKED_TEXT_ARGUMENTS if recurrent else {})
        if takes_encoder_outputs:
            del self._arguments["encoder_hidden_states"]
        self._rotary = _RotaryEmbeddings(stack)

    def refuse(self, kwargs: Mapping[str, Any]) -> None:
        """Refuse a forward that servers would compute differently; `kwargs` are the arguments of the stack's forward.

        Raises:
            ConfigurationError: there is such a change or argument.
        """
        fields = vars(self._config)
        for name, was in self._was.items():
            if (now := fields.get(name)) is not was and now != was:
                raise ConfigurationError(
                    f"config.{name} is {now!r} now, but the servers' blocks run with {was!r}, as the checkpoint has "
                    "it: set it back, or serve a checkpoint that was saved with it"
                )
        self._rotary.refuse()
        for name, instead in self._arguments.items():
            if kwargs.get(name) is not None:
                raise ConfigurationError(f"{name} can't be given to blocks on servers: leave it out, and {instead}")
        if any(getattr(nn.modules.module, table) for table in _GLOBAL_HOOKS):
            raise ConfigurationError(
                "hooks on all modules (register_module_forward_hook and the like) can't run in blocks on servers: "
                "remove them, and put hooks on whole blocks"
            )
        if torch._C._are_functorch_transforms_active():
            raise ConfigurationError(
                "torch.func's transforms (grad, vmap, jvp …) can't pass through blocks on servers: call backward() or "
                "torch.autograd.grad(), for gradients of each text with one text at a time"
            )


class _RotaryEmbeddings:
    """The stack's rotary embeddings, and their values when the stack was opened.

    The stack computes them here as well, but only the servers' own copies have an effect.
    """

    def __init__(self, stack: nn.Module) -> None:
        parts = {name: part for name, part in stack.named_children() if "Rotary" in type(part).__name__}
        for name, part in parts.items():
            close_hooks(part, ModulePlace("the model", name))
        fix_children(stack, ModulePlace("the model"), parts.keys())
        changing = ("dynamic", "longrope")  # transformers itself changes these when a text becomes longer
        fixed = [
            one for one in parts.values() if not any(kind in str(getattr(one, "rope_type", "")) for kind in changing)
        ]
        self._scales = [(one, name, value) for one in fixed for name, value in vars(one).items() if "scaling" in name]
        self._buffers = [(one, name, value.detach().clone()) for one in fixed for name, value in one.named_buffers()]
        self._seen: dict[int, tuple[Tensor, int]] = {}
        """By the index of a buffer: the tensor and its version at the last check that found it unchanged."""

    def refuse(self) -> None:
        """Refuse changed embeddings. A buffer is compared only if it is another tensor or was written to.

        Raises:
            ConfigurationError: one of them has changed.
        """
        changed = [name for one, name, was in self._scales if getattr(one, name) != was]
        for idx, (one, name, was) in enumerate(self._buffers):
            now = one.get_buffer(name)
            if now.is_meta or (idx in self._seen and self._seen[idx][0] is now and self._seen[idx][1] == now._version):
                continue
            if now.shape == was.shape and torch.allclose(now.double(), was.to(now.device).double(), _ROUNDING, _TINY):
                self._seen[idx] = now, now._version
            else:
                changed.append(name)
        if changed:
            raise ConfigurationError(
                f"{changed[0]} of the rotary embeddings was changed, but servers have embeddings of their own: set it "
                "back, or serve a checkpoint that was saved with other rope_parameters"
            )


@dataclass(frozen=True, eq=False)
class ShellStack:
    """One stack of the model, on the client."""

    stack: Stack
    module: PreTrainedModel
    """The module that loops over the blocks."""
    traits: BlockTraits
    adapters: BlockAdapters
    """peft's adapters inside the blocks of this stack."""
    unseen: UnseenChanges
    """The check of changes that servers can't see."""
    has_vision: bool = False
    """The model has vision, and passes more than embeddings to this stack."""
    takes_audio: bool = False
    """The input of this stack is audio."""


class ClientShell:
    """A mixin for the architecture's class, which overrides some of its methods.

    The order of the bases is: the caller's mixin (`client/`), this one, the architecture's class.
    """

    swarm_runner: BlocksRunner
    swarm_traits: BlockTraits
    swarm_stacks: list[ShellStack]
    swarm_adapters: BlockAdapters
    """The adapters of the last stack, like the runner and the traits."""
    swarm_notices: "TrainingNotices"
    swarm_prepared: "weakref.WeakValueDictionary[int, RemoteCache]"
    """The cache of the last `generate()` in each thread. peft puts its own prefix in its place before the forward, so
    `_of_generate` finds it here."""
    config: PreTrainedConfig
    tuned_prompts: TunedPrompts | None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model; if that fails, remove peft's hooks for adapters of single rows."""
        try:
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        except BaseException:
            remove_row_hooks(self)  # type: ignore[arg-type]
            raise

    @property
    def prompts_in_use(self) -> TunedPrompts | None:
        """The trained prompts of the next forward (`tuning_mode`), perhaps those of an adapter of peft."""
        return None if self.tuned_prompts is None else prompts_in_use(self.tuned_prompts)

    @property
    def peft_config(self) -> dict[str, Any]:
        """peft's configs of the adapters in the model, by name."""
        if "_peft_config" not in self.__dict__:
            raise AttributeError("the model has no adapter of peft")
        found: dict[str, Any] = self.__dict__["_peft_config"]
        return found

    @peft_config.setter
    def peft_config(self, configs: dict[str, Any]) -> None:
        for stack in self.swarm_stacks:
            stack.adapters.check(configs)
        self.__dict__["_peft_config"] = configs

    @peft_config.deleter
    def peft_config(self) -> None:
        self.__dict__.pop("_peft_config", None)

    @property
    def local_blocks(self) -> nn.ModuleList:
        """The blocks that run here. They are frozen at first: call `.requires_grad_(True)` to train them."""
        return nn.ModuleList(self.swarm_adapters.blocks.here.values())

    @property
    def is_gradient_checkpointing(self) -> bool:
        """True if activation checkpointing is on. peft asks by this old name, and transformers' own property warns."""
        is_on: bool = self.is_activation_checkpointing  # type: ignore[attr-defined]
        return is_on

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """Parameters of the whole model, blocks included; `only_trainable`: of the trained ones, which are all here."""
        here: int = super().num_parameters(only_trainable, exclude_embeddings)  # type: ignore[misc]
        elsewhere = sum(stack.adapters.blocks.num_parameters(exclude_embeddings) for stack in self.swarm_stacks)
        return here if only_trainable else here + elsewhere

    def active_cache_session(self) -> CacheSession | None:
        """The session that `generate()` continues; None unless the user has opened one."""
        return None

    def _prepare_generation_config(self, *args: Any, **kwargs: Any) -> Any:
        found = super()._prepare_generation_config(*args, **kwargs)  # type: ignore[misc]
        if found[0].assistant_early_exit is not None:  # transformers would change the config for good
            raise ConfigurationError(
                "assistant_early_exit would run some of the blocks, and servers run all of them: set it to None, and "
                "give generate() an assistant_model= or prompt_lookup_num_tokens="
            )
        if found[0].cache_implementation == "quantized":  # others change where a cache is, and not what it holds
            raise ConfigurationError(
                "cache_implementation 'quantized' would round keys and values, and servers don't: leave it out"
            )
        return found

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
            if given.length and given.batch_size != (rows := batch_size * _rows_per_prompt(generation_config)):
                raise ConfigurationError(
                    f"past_key_values has {given.batch_size} rows and this text {rows}, one for each prompt, beam and "
                    "returned sequence: repeat or select rows of a copy of it, or leave it out"
                )
            given._is_user_defined = True  # transformers' own mark: continue positions, and return the cache
            return
        if generation_config.use_cache is False:
            return
        if not batch_size:
            raise ConfigurationError("the text is empty: give generate() at least one row")
        # Prompt lookup also sends guesses beyond the last token, and they need room.
        room = 1 + (generation_config.prompt_lookup_num_tokens or 0) + SOFT_PROMPT_ROOM
        room += len(self.prompts_in_use or ())
        cache = self.new_remote_cache(batch_size * _rows_per_prompt(generation_config), max_cache_length + room)
        if generation_config.is_assistant:
            cache.activate_past_recording()
        model_kwargs[name] = cache
        self.swarm_prepared[get_ident()] = cache

    def _postprocess_outputs(self, seek_outputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Call Whisper's method without the cache, because it would copy keys and values, which are on servers."""
        if not isinstance(seek_outputs, Tensor):
            kept = {name: value for name, value in seek_outputs.items() if name != "past_key_values"}
            seek_outputs = type(seek_outputs)(**kept)
        return super()._postprocess_outputs(seek_outputs, *args, **kwargs)  # type: ignore[misc]

    def _prepare_position_ids_for_generation(self, inputs_tensor: Tensor, model_kwargs: dict[str, Any]) -> Tensor:
        mask = model_kwargs.get("attention_mask")
        if mask is not None and not self.config.is_encoder_decoder:  # a mask of ones never reaches the forward's check
            cache = model_kwargs.get(cache_argument(decoder_stack(self)))
            batch_size, seq_len = inputs_tensor.shape[:2]
            past = cache.length if isinstance(cache, RemoteCache) and mask.shape[-1] > seq_len else 0
            check_mask(mask, batch_size, seq_len, past)
        positions: Tensor = super()._prepare_position_ids_for_generation(inputs_tensor, model_kwargs)  # type: ignore[misc]
        return positions

    def new_remote_cache(self, batch_size: int, max_length: int | None) -> RemoteCache:
        """Make a cache of `batch_size` rows for the user's session, or for a new session if the user has none."""
        session = self.active_cache_session() or self.swarm_runner.new_cache_session(batch_size, max_length)
        cache = RemoteCache(self.config, session, batch_size)
        cache.num_hidden = len(self.prompts_in_use or ())
        return cache


def embed(model: PreTrainedModel, input_ids: Tensor | None = None, **kwargs: Any) -> Tensor:
    """Compute everything before the first block; returns hidden states `[batch, seq, hidden]`."""
    entering: list[Tensor] = []

    def stop(hidden: Tensor) -> Tensor:
        entering.append(hidden)
        raise ForwardStopped

    with calling(Call(instead=stop)):
        try:
            model(input_ids=input_ids, use_cache=False, **kwargs)
        except ForwardStopped:
            return entering[0]
    raise LocalProtocolError(f"the forward of {type(model).__name__} never reached its blocks")


def head(model: PreTrainedModel, hidden_states: Tensor) -> Tensor:
    """Compute everything after the last block; returns logits `[batch, seq, vocabulary]`."""
    traits: BlockTraits = model.swarm_traits
    batch_size, seq_len = hidden_states.shape[traits.batch_axis : traits.batch_axis + 2]
    ids = torch.zeros((batch_size, seq_len), dtype=torch.long, device=hidden_states.device)
    with calling(Call(instead=lambda _: hidden_states)):
        logits: Tensor = model(input_ids=ids, use_cache=False).logits
    return logits


def _rows_per_prompt(generation_config: Any) -> int:
    """Rows into which `generate()` copies each prompt before the prefill."""
    return max(generation_config.num_beams or 1, generation_config.num_return_sequences or 1)


def cache_of_call(
    shell: Any, config: PreTrainedConfig, kwargs: dict[str, Any], name: str
) -> tuple[RemoteCache | None, TunedPrefix | None]:
    """Choose the cache of this forward, as the table above says; returns (cache, prefix).

    The cache is the given one, or a new one if transformers would make its own. The prefix is given if the caller
    passed a cache with peft's prefix tuning. Puts the cache that the stack's forward must see into `kwargs[name]`.

    Raises:
        ConfigurationError: the given cache can't be used, or the call could mean the user's session or a new one.
    """
    cache = kwargs.get(name)
    if isinstance(cache, RemoteCache):
        if cache.config is not shell.config:
            raise ConfigurationError(f"the {name} belong to another model: continue them with that model")
        return cache, None
    ids, embeds = kwargs.get("input_ids"), kwargs.get("inputs_embeds")
    given = embeds if ids is None else ids
    batch_size = 1 if given is None else given.shape[0]
    if has_vision(shell.config) and isinstance(cache, DynamicCache) and not cache.get_seq_length():
        cache = None  # an empty one: some models with vision make it before they call their text model
    prefix = None if cache is None else _prefix(cache, shell, batch_size)
    if not _wants_cache(shell, config, kwargs.get("use_cache")) or given is None:
        kwargs["use_cache"] = False
        kwargs[name] = None if prefix is None else TunedPrefixCache(config, len(prefix))
        return None, prefix
    session = shell.active_cache_session()
    is_within = session is not None and session.is_generating and bool(kwargs.get("use_cache"))
    if session is not None and (prefix is not None or not is_within):
        raise ConfigurationError(
            "inside an inference_session(), continue with generate() or session.step(); for a forward outside the "
            "session pass use_cache=False"
            if prefix is None
            else "with peft's prefix tuning, call the model outside of inference sessions"
        )
    length = given.shape[1] + sum(len(before) for before in (prefix, shell.prompts_in_use) if before is not None)
    asked = kwargs.get("use_cache") is not None or length > shell.swarm_runner.longest_row()
    at_once = asked and not torch.is_grad_enabled()
    opened = _of_generate(prefix, shell, batch_size) if at_once else None
    drops_caches = shell.swarm_traits.even_length != math.inf
    if session is not None and not (drops_caches and session.position < given.shape[1] and session.begins(given)):
        opened = RemoteCache(shell.config, shell.swarm_runner.new_cache_session(batch_size, None), batch_size)
    elif session is not None:
        session.position = 0
    opened = opened or shell.new_remote_cache(batch_size, None)
    opened.deferred = not at_once
    opened.num_prefix = 0 if prefix is None else len(prefix)
    kwargs[name] = opened
    return opened, prefix


def _wants_cache(shell: Any, config: PreTrainedConfig, use_cache: bool | None) -> bool:
    """True if transformers would run this forward with a cache."""
    if use_cache is None:
        is_off = shell.training and config.model_type in NO_CACHE_IN_TRAINING
        use_cache = getattr(config, "use_cache", False) and not is_off
    return bool(use_cache) and not is_encoder(config)


def _prefix(cache: Any, shell: Any, batch_size: int) -> TunedPrefix:
    prefix = TunedPrefix.read(cache, shell, batch_size)
    if cache in _spent:
        raise ConfigurationError(
            "this cache has been given to the model before, and the model didn't write to it: continue with the "
            "past_key_values of that call's output"
        )
    return prefix


def note_spent(cache: Any) -> None:
    """Note that a forward has used this cache of transformers as a prefix, so that a second use is refused."""
    _spent.add(cache)


def _of_generate(prefix: TunedPrefix | None, shell: Any, batch_size: int) -> RemoteCache | None:
    """The cache that `generate()` prepared before peft put `prefix` in its place; None if there is none that fits.

    It is better than a new one: it already has room for the length that `generate()` wants.
    """
    cache: RemoteCache | None = None if prefix is None else shell.swarm_prepared.get(get_ident())
    if cache is None or cache.session.position or cache.batch_size != batch_size:
        return None
    return cache


class TrainingNotices:
    """Warnings about differences from local training; one object per model."""

    def __init__(self, adapters: BlockAdapters) -> None:
        self._num_remote = adapters.blocks.num_tensors
        self._told = self._told_of_prompts = False

    def tell_of_prompts(self, prompts: TunedPrompts | None) -> None:
        """Log, once, that the prompts of a model whose adapter is trained are frozen."""
        if prompts is not None and not self._told_of_prompts and not prompts.shallow.requires_grad:
            self._told_of_prompts = True
            logger.warning(
                "the prompts of tuning_mode are used but not trained, because peft freezes what isn't its own: to "
                "train them as well, call tuned_prompts.requires_grad_(True). peft doesn't save them with its adapter: "
                "the base model's save_pretrained() does, and load_trained() loads them, after "
                "PeftModel.from_pretrained()"
            )

    def tell(self, model: PreTrainedModel) -> None:
        """Log the warnings that apply to this model; later calls log nothing."""
        if self._told:
            return
        self._told = True
        device = model.device.type
        dtype = str(torch.get_autocast_dtype(device)).removeprefix("torch.")
        if torch.is_autocast_enabled(device) and dtype not in AUTOCAST:
            logger.warning(
                "autocast to %s stays here: servers compute the blocks in their own dtype, so losses "
                "differ from a local model's by the rounding of %s; with bfloat16 (bf16=True) they don't",
                dtype,
                dtype,
            )
        own = [parameter for parameter in model.parameters() if parameter.numel()]
        if all(parameter.requires_grad for parameter in own):
            logger.warning(
                "this trains %d of %d tensors: the others belong to the blocks, which servers keep as they are; adapt "
                "those with peft, or freeze others with requires_grad_(False). A trainer that needs "
                "a reference and is given none (DPO without peft) loads the whole model onto this machine: give it "
                "ref_model=, this model opened from the swarm a second time",
                len(own),
                len(own) + self._num_remote,
            )
