"""The Hugging Face model without its blocks: embeddings, final norm and head here, the blocks elsewhere.

`loading` gives an instance of the architecture's own class, so `generate()`, `forward(labels=…)`, pipelines and
trainers work on it. Its block list holds one proxy module (`blocks_proxy`), and its stack has a forward of ours
(`stack_forward`). `ClientShell` overrides methods of the class: caches of `generate()`, peft's adapters.
`TrainingNotices` logs, once, how training differs from training the whole model locally.

`UnseenChanges` finds changes that touch no module of the blocks, so that servers would compute as if they were not
there: in the config, in the arguments, in rotary embeddings, among hooks on all modules, and in torch.func's
transforms. `stack_forward` asks it at each forward. `hollow_modules` refuses changes of blocks.

`cache_of_call` chooses the cache of one forward, before the architecture's code sees the arguments:

    a remote cache is given                         its session goes on
    use_cache is False, or the model is an encoder  none: the blocks run on the whole batch at once
    use_cache=True, without gradients               a session is opened, and its cache returned
    the same inside generate() of a user's session  the model has dropped the cache, as it does with LongRoPE once a
                                                    text is long enough: the session begins anew
    anything else for which transformers makes one  the blocks run without a session; the returned cache opens one only
                                                    when it is continued, and computes its positions again
"""

import copy
import logging
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
from swarmllm.models.shell.tuned_prompts import TunedPrefix, TunedPrefixCache, TunedPrompts

logger = logging.getLogger(__name__)

SOFT_PROMPT_ROOM = 128
"""Positions that a session of `generate()` has left for peft's soft prompts, which `generate()` doesn't count. Assumed:
they rarely have more than 100 tokens, and the cache for them costs servers little."""

NO_CACHE_IN_TRAINING = {"falcon_mamba", "mamba", "mamba2", "rwkv"}
"""Types of models whose forward makes a cache in train mode only if `use_cache` is given."""
_spent: "weakref.WeakSet[Any]" = weakref.WeakSet()
"""Local caches used as a prefix before. With a local model they would hold the text of that call as well."""
_HERE = re.compile(
    r"_.*|output_.*|.*_token_id|.*logit.*|use_cache|(use_)?return_dict|vocab_size|tie_word_embeddings|layerdrop|dtype"
    r"|num_labels|id2label|label2id|problem_type|classifier_dropout|.*aux_loss_coef|summary_.*|mask_.*"
    r"|apply_spec_augment|embedding_multiplier|scale_embedding|architectures|transformers_version|pretraining_tp"
)
"""Config fields that only what is here reads: embeddings, heads, losses, and the code around them."""
_OF_MASKS = ("is_causal", "sliding_window", "attention_chunk_size", "layer_types", "partial_rotary_factor")
"""Config fields that transformers reads for masks and positions, even where a config lacks them."""
_GLOBAL_HOOKS = tuple(f"_global_{kind}_hooks" for kind in ("forward_pre", "forward", "backward_pre", "backward"))
_OF_PACKED_TEXTS = dict.fromkeys(("seq_idx", "cu_seq_lens_q", "cu_seq_lens_k"), "give each text a row of its own")
_OF_BLOCKS = {
    **dict.fromkeys(("is_causal", "position_bias"), "use a mask of four axes"),
    "encoder_hidden_states": "put what the blocks shall see into the text",
}
"""Arguments that a model hands through to its blocks, and what to do instead."""
_ROUNDING, _TINY = 2.0**-7, 1e-6
"""A cast of the model to bfloat16 or half and back changes a rotary embedding by at most this, relative or absolute."""


class UnseenChanges:
    """Remembers how a stack was when it was opened."""

    def __init__(self, stack: nn.Module, *, takes_source: bool) -> None:
        """`takes_source`: whether encoder outputs are an argument that servers are sent."""
        self._config: Any = stack.config
        fields = dict.fromkeys(_OF_MASKS) | vars(self._config)
        self._was = {name: copy.deepcopy(value) for name, value in fields.items() if not _HERE.fullmatch(name)}
        layers = DynamicCache(config=self._config).layers
        # Attention keeps packed texts apart by positions alone, recurrent blocks only by these arguments.
        recurrent = any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in layers)
        self._arguments = _OF_BLOCKS | (_OF_PACKED_TEXTS if recurrent else {})
        if takes_source:
            del self._arguments["encoder_hidden_states"]
        self._rotary = _RotaryEmbeddings(stack)

    def refuse(self, kwargs: Mapping[str, Any]) -> None:
        """Refuse what servers can't follow; `kwargs` are the arguments of the stack's forward.

        Raises:
            ConfigurationError: there is something.
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
    """The stack's rotary embeddings. It computes them here for nothing: servers have their own."""

    def __init__(self, stack: nn.Module) -> None:
        parts = {name: part for name, part in stack.named_children() if "Rotary" in type(part).__name__}
        for name, part in parts.items():
            close_hooks(part, ModulePlace("the model", name))
        fix_children(stack, ModulePlace("the model"), parts.keys())
        grows = ("dynamic", "longrope")  # these change with the text, by themselves
        still = [one for one in parts.values() if not any(kind in str(getattr(one, "rope_type", "")) for kind in grows)]
        self._scales = [(one, name, value) for one in still for name, value in vars(one).items() if "scaling" in name]
        self._buffers = [(one, name, value.detach().clone()) for one in still for name, value in one.named_buffers()]
        self._seen: dict[int, tuple[Tensor, int]] = {}
        """By index of a buffer: it and its version, when it was last found to be right."""

    def refuse(self) -> None:
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
    unseen: UnseenChanges
    has_vision: bool = False
    """The model has vision, and its stack is given more than embeddings."""
    takes_audio: bool = False
    """The stack takes audio."""


class ClientShell:
    """A mixin of the architecture's class, behind the mixin of the caller."""

    swarm_runner: BlocksRunner
    swarm_traits: BlockTraits
    swarm_stacks: list[ShellStack]
    swarm_adapters: BlockAdapters
    """The adapters of the last stack, like the runner and the traits."""
    swarm_notices: "TrainingNotices"
    swarm_prepared: "weakref.WeakValueDictionary[int, RemoteCache]"
    """The cache of the last `generate()` in each thread. peft replaces it by its prefix."""
    config: PreTrainedConfig
    tuned_prompts: TunedPrompts | None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        except BaseException:
            remove_row_hooks(self)  # type: ignore[arg-type]
            raise

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
        """peft asks for it by this old name, at which transformers would warn."""
        is_on: bool = self.is_activation_checkpointing  # type: ignore[attr-defined]
        return is_on

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """Parameters of the whole model, blocks included; `only_trainable`: those that are trained here."""
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
            given._is_user_defined = True  # transformers' own mark: continue positions, and return the cache
            return
        if generation_config.use_cache is False:
            return
        # Prompt lookup checks guesses up to the last token, and some beyond it.
        room = 1 + (generation_config.prompt_lookup_num_tokens or 0) + SOFT_PROMPT_ROOM
        room += 0 if self.tuned_prompts is None else len(self.tuned_prompts)
        cache = self.new_remote_cache(batch_size * _rows_per_prompt(generation_config), max_cache_length + room)
        if generation_config.is_assistant:
            cache.activate_past_recording()
        model_kwargs[name] = cache
        self.swarm_prepared[get_ident()] = cache

    def _postprocess_outputs(self, seek_outputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Whisper's, without the cache: it would copy each row's keys and values, which are on servers."""
        if not isinstance(seek_outputs, Tensor):
            kept = {name: value for name, value in seek_outputs.items() if name != "past_key_values"}
            seek_outputs = type(seek_outputs)(**kept)
        return super()._postprocess_outputs(seek_outputs, *args, **kwargs)  # type: ignore[misc]

    def _prepare_position_ids_for_generation(self, inputs_tensor: Tensor, model_kwargs: dict[str, Any]) -> Tensor:
        mask = model_kwargs.get("attention_mask")
        if mask is not None and not self.config.is_encoder_decoder:  # a mask of ones would reach no forward
            cache = model_kwargs.get(cache_argument(decoder_stack(self)))
            batch_size, seq_len = inputs_tensor.shape[:2]
            past = cache.length if isinstance(cache, RemoteCache) and mask.shape[-1] > seq_len else 0
            check_mask(mask, batch_size, seq_len, past)
        positions: Tensor = super()._prepare_position_ids_for_generation(inputs_tensor, model_kwargs)  # type: ignore[misc]
        return positions

    def new_remote_cache(self, batch_size: int, max_length: int | None) -> RemoteCache:
        """A cache of `batch_size` rows, on the user's session or on a new one."""
        session = self.active_cache_session() or self.swarm_runner.new_cache_session(batch_size, max_length)
        cache = RemoteCache(self.config, session, batch_size)
        cache.num_hidden = 0 if self.tuned_prompts is None else len(self.tuned_prompts)
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
    """Rows that `generate()` makes of each prompt before the prefill."""
    return max(generation_config.num_beams or 1, generation_config.num_return_sequences or 1)


def cache_of_call(
    shell: Any, config: PreTrainedConfig, kwargs: dict[str, Any], name: str
) -> tuple[RemoteCache | None, TunedPrefix | None]:
    """(cache, prefix) of this forward. The cache is the given one, or a new one if transformers would make its own.

    The prefix is what the caller has given as a cache, if it is one of peft's. `kwargs[name]` is replaced by the cache
    that the stack's forward is to see.

    Raises:
        ConfigurationError: the given cache can't be used, or it isn't clear which session is meant.
    """
    cache = kwargs.get(name)
    if isinstance(cache, RemoteCache):
        if cache.config is not shell.config:
            raise ConfigurationError(f"the {name} are those of another model: continue them with that one")
        return cache, None
    ids, embeds = kwargs.get("input_ids"), kwargs.get("inputs_embeds")
    given = embeds if ids is None else ids
    batch_size = 1 if given is None else given.shape[0]
    if has_vision(shell.config) and isinstance(cache, DynamicCache) and not cache.get_seq_length():
        cache = None  # some models with vision make one before they call their text model
    prefix = None if cache is None else _prefix(cache, shell, batch_size)
    if not _wants_cache(shell, config, kwargs.get("use_cache")) or given is None:
        kwargs["use_cache"] = False
        kwargs[name] = None if prefix is None else TunedPrefixCache(config, len(prefix))
        return None, prefix
    session = shell.active_cache_session()
    is_replaced = session is not None and session.is_generating and session.position < given.shape[1]
    if session is not None and (prefix is not None or not (is_replaced and kwargs.get("use_cache"))):
        raise ConfigurationError(
            "inside an inference_session(), continue with generate() or session.step(); for a forward outside the "
            "session pass use_cache=False"
            if prefix is None
            else "with peft's prefix tuning, call the model outside of inference sessions"
        )
    length = given.shape[1] + sum(len(before) for before in (prefix, shell.tuned_prompts) if before is not None)
    asked = kwargs.get("use_cache") is not None or length > shell.swarm_runner.longest_row()
    at_once = asked and not torch.is_grad_enabled()
    opened = _of_generate(prefix, shell, batch_size) if at_once else None
    opened = opened or shell.new_remote_cache(batch_size, None)
    if session is not None:
        session.position = 0
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
            "this cache has been given to the model before, which doesn't write to it: continue with the "
            "past_key_values of that call's output"
        )
    return prefix


def note_spent(cache: Any) -> None:
    """Note that a forward has used this local cache as a prefix."""
    _spent.add(cache)


def _of_generate(prefix: TunedPrefix | None, shell: Any, batch_size: int) -> RemoteCache | None:
    """The cache of `generate()`, which peft has replaced by `prefix`; it has the length that the text needs."""
    cache: RemoteCache | None = None if prefix is None else shell.swarm_prepared.get(get_ident())
    if cache is None or cache.session.position or cache.batch_size != batch_size:
        return None
    return cache


class TrainingNotices:
    """Warnings about differences from local training; one object per model."""

    def __init__(self, adapters: BlockAdapters) -> None:
        self._num_remote = adapters.blocks.num_tensors
        self._told = False

    def tell(self, model: PreTrainedModel) -> None:
        """Log those that apply to this model, once."""
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
