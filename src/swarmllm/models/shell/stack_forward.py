"""The forwards of the stack, which is the module with the loop over blocks, and of the model around it.

`loading` gives both a subclass. Before the architecture's own forward of the stack (`adopt_stack`):

1. The arguments are checked, and the cache is chosen (`client_shell`). `wanted_inner` reads the wish for hidden states
   and attentions, which `playback` returns.
2. Trained prompts are added (`tuned_prompts`).
3. A `Call` is made of everything that the blocks need besides hidden states; `blocks_proxy` runs it. Encoder outputs
   are part of it once per session (`source_of_call`).

Models with vision or audio compute embeddings with modules of their own in the client. Their text model's forward gets
more than embeddings if positions of a picture attend to each other, or if outputs of the vision tower are added between
blocks (`boundary/block_inputs`). `pack_vision_inputs` checks these arguments and makes them ready to travel. A mask is
not sent if servers make the same one.

The model's forward (`adopt_head`) finds out whether the head or the loss reads outputs of padding, which otherwise
aren't computed. Mostly it doesn't. But a loss counts labels of padding unless they are -100, a head for classes may
take padding for the last token, and a head for answers reads all positions.

`SplitForward` is one forward in two halves: before the blocks and after them. In between, the blocks' inputs travel,
and other forwards may begin. Speculation uses it (`speculation/sampling_loop`).
"""

import functools
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from threading import current_thread
from types import MappingProxyType
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import EncoderDecoderCache
from transformers.masking_utils import create_masks_for_generate
from transformers.utils.output_capturing import (
    _CAN_RECORD_REGISTRY,
    resolve_hidden_states_indices,
    selected_hidden_states,
)

from swarmllm.data_structures import Patch, Span
from swarmllm.errors import ConfigurationError, LocalProtocolError
from swarmllm.models.adapters.block_adapter import BlockAdapter
from swarmllm.models.adapters.dropout import draw_seeds
from swarmllm.models.architecture import cache_argument, decoder_stack, is_encoder, text_config
from swarmllm.models.block_slots import ForwardStopped
from swarmllm.models.boundary.block_inputs import (
    SOURCE,
    BlockInputs,
    DeepstackArguments,
    check_mask,
    check_positions,
    pack_masks,
)
from swarmllm.models.boundary.inner_states import InnerStates
from swarmllm.models.shell.blocks_proxy import Call, calling, current_call
from swarmllm.models.shell.client_shell import ShellStack, cache_of_call, note_spent
from swarmllm.models.shell.remote_cache import RemoteCache
from swarmllm.models.shell.tuned_prompts import (
    TunedPrefix,
    TunedPrefixCache,
    text_mask,
    whole_length,
)

NO_HIDDEN = torch.empty(0)
"""Hidden states that the model's code has not computed yet."""
INNER_OUTPUTS = ("output_hidden_states", "output_attentions")
IGNORED = -100
"""The label that no loss of transformers counts."""
_ON_THE_WIRE = ("attention_mask", "position_ids")
"""Types of tokens are part of the embeddings."""


def adopt_stack(model: PreTrainedModel, of_shell: ShellStack) -> None:
    """Give the stack a subclass with our forward. Unlike a hook, it is also called by `stack.forward`."""
    stack, role = of_shell.module, of_shell.stack.role
    cls = type(stack)
    shell = model
    name = cache_argument(stack)
    takes_cache = role != "encoder" and name in inspect.signature(cls.forward).parameters
    positional = [parameter for parameter in inspect.signature(cls.forward).parameters if parameter != "self"]

    @functools.wraps(cls.forward)
    def forward(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        if args:
            kwargs = {**dict(zip(positional, args, strict=False)), **kwargs}
        if role and any(_wanted(self.config, kwargs, "output_hidden_states", "output_attentions")):
            raise ConfigurationError(
                "hidden states and attentions inside an encoder-decoder can't be shown: leave output_hidden_states and "
                "output_attentions out"
            )
        inner = wanted_inner(self, self.config, kwargs)
        if current_call().instead is not None:
            return cls.forward(self, **_of_half_a_forward(self, kwargs, name))
        given = kwargs.get(name)
        if not of_shell.takes_audio:
            _given(self, kwargs)
        cache, prefix = cache_of_call(shell, self.config, kwargs, name) if takes_cache else (None, None)
        prompts = shell.prompts_in_use
        if prompts is not None and inner is not None and inner.attentions:
            raise ConfigurationError("with tuning_mode there are no attentions of the text alone: leave them out")
        with_prompts = prompts is not None and prompts.prepend(self, kwargs, cache)
        counted = nullcontext() if cache is None or prompts is None else whole_length(cache)
        with counted, calling(_call_of(shell, of_shell, kwargs, cache, prefix, inner)):
            try:
                outputs = cls.forward(self, **kwargs)
            finally:
                if isinstance(spent := kwargs.get(name), TunedPrefixCache):
                    spent.num_prefix = 0  # some models return it, and peft reads its length
        if prefix is not None:
            note_spent(given)
        outputs = _with_cache(outputs, name, cache)
        return prompts.drop(outputs) if prompts is not None and with_prompts else outputs

    # torch.compile would trace all code up to the servers, for minutes, and warn of much of it.
    whole = torch.compiler.disable(forward, reason="servers run the blocks")  # type: ignore[no-untyped-call]
    stack.__class__ = type(cls.__name__, (cls,), {"forward": whole, "__module__": cls.__module__})


def _wanted(config: PreTrainedConfig, kwargs: dict[str, Any], *names: str) -> list[Any]:
    """What the arguments of a forward, or else the config, say of these outputs."""
    return [wanted if (wanted := kwargs.get(name)) is not None else getattr(config, name, False) for name in names]


def wanted_inner(stack: PreTrainedModel, config: PreTrainedConfig, kwargs: dict[str, Any]) -> InnerStates | None:
    """The inner states that the caller of the stack's forward wants; None: none.

    Raises:
        ConfigurationError: servers can't answer them.
    """
    hidden, attentions, routers = _wanted(
        config, kwargs, "output_hidden_states", "output_attentions", "output_router_logits"
    )
    if routers:
        raise ConfigurationError(
            "output_router_logits is not available: the blocks run on the servers, which return hidden states"
        )
    if attentions and (used := getattr(config, "_attn_implementation", None)) != "eager":
        raise ConfigurationError(
            f"output_attentions needs eager attention, and this model is loaded with {used}: give from_pretrained() "
            'attn_implementation="eager"'
        )
    if not hidden and not attentions:
        return None
    settings = text_config(config)
    num_blocks = int(settings.num_hidden_layers)
    outputs = _wanted_outputs(stack, hidden, num_blocks) if hidden else ()
    num_heads = int(getattr(settings, "num_attention_heads", None) or 1)
    return InnerStates(outputs, attentions=bool(attentions), num_heads=num_heads)


def _wanted_outputs(stack: PreTrainedModel, hidden: Any, num_blocks: int) -> set[int]:
    """The blocks whose outputs the model's code needs for it; the last block's come anyway."""
    every = set(range(num_blocks - 1))
    selected = selected_hidden_states(hidden)
    kind = _CAN_RECORD_REGISTRY.get(stack).get("hidden_states")
    if selected is None or not isinstance(kind, type):
        return every
    # Entry 0 is the input of block 0, and entry k the output of block k - 1.
    return {idx - 1 for idx in resolve_hidden_states_indices(stack, selected)} & every


def _with_cache(outputs: Any, name: str, cache: RemoteCache | None) -> Any:
    """The outputs with the cache that was used: whisper replaces an empty one by its own."""
    if cache is None:
        return outputs
    if isinstance(outputs, tuple):
        return tuple(cache if isinstance(one, EncoderDecoderCache) else one for one in outputs)
    if isinstance(outputs.get(name), EncoderDecoderCache):
        outputs[name] = cache
    return outputs


def _of_half_a_forward(stack: PreTrainedModel, kwargs: dict[str, Any], cache_name: str) -> dict[str, Any]:
    """Check the arguments, and take out the request for inner states: half a forward has none."""
    ids, mask, past = kwargs.get("input_ids"), kwargs.get("attention_mask"), kwargs.get(cache_name)
    if ids is not None and mask is not None:
        check_mask(mask, ids.shape[0], ids.shape[1], 0 if past is None else past.get_seq_length())
    asked = (one for one in INNER_OUTPUTS if kwargs.get(one) or getattr(stack.config, one, False))
    return kwargs | dict.fromkeys(asked, False)


def _call_of(
    shell: PreTrainedModel,
    of_shell: ShellStack,
    kwargs: dict[str, Any],
    cache: RemoteCache | None,
    prefix: TunedPrefix | None,
    inner: InnerStates | None,
) -> Call:
    of_shell.unseen.refuse(kwargs)
    if of_shell.takes_audio:
        return _call_of_audio(shell, of_shell, kwargs)
    stack = of_shell.module
    given = _given(stack, kwargs)
    if of_shell.stack.role == "encoder":
        _refuse_other_masks(kwargs)
    vision = pack_vision_inputs(stack, kwargs, given, cache) if of_shell.has_vision else VisionInputs(kwargs)
    tensors = _tensors_among(vision.kwargs, given)
    num_prefix = cache.num_prefix if cache is not None else len(prefix) if prefix is not None else 0
    if num_prefix and "attention_mask" in tensors:
        tensors["attention_mask"] = text_mask(tensors["attention_mask"], num_prefix)
    if "attention_mask" in tensors:
        past = 0 if cache is None else cache.session.position
        check_mask(tensors["attention_mask"], given.shape[0], given.shape[1], past)
    elif cache is not None and cache.deferred and "position_ids" in tensors:
        # Servers run this without a cache. transformers would take positions that begin anew for another text then.
        tensors["attention_mask"] = torch.ones(given.shape[:2], dtype=torch.int64, device=given.device)
    tensors |= vision.tensors | _extra_inputs(of_shell, kwargs)
    if of_shell.stack.role == "decoder":
        tensors |= source_of_call(kwargs, given.shape[0], cache)
    adapter, trained = _adapter(shell, of_shell, cache, prefix)
    if adapter is not None and adapter.has_dropout:
        tensors["dropout_seeds"] = draw_seeds(*given.shape[:2])
    if adapter is not None and adapter.has_numbers:
        tensors["adapter_numbers"] = _adapter_numbers(of_shell, given)
    hooked, reads_padding = of_shell.adapters.blocks.hooked(), current_call().reads_padding
    inputs = BlockInputs(
        hidden_states=NO_HIDDEN,
        batch_size=given.shape[0],
        seq_len=given.shape[1],
        adapter=adapter,
        trained=trained,
        inner=inner,
        whole=reads_padding is True or bool(hooked),
        of_texts_alone=reads_padding is False,
        **tensors,
    )
    callers = kwargs.get("inputs_embeds") is not None
    return Call(inputs=inputs, cache=cache, hidden_is_callers=callers, used_up=vision.used_up, hooked=hooked)


def _refuse_other_masks(kwargs: dict[str, Any]) -> None:
    for name, value in kwargs.items():
        if name.endswith("_mask") and name not in _ON_THE_WIRE and value is not None:
            raise ConfigurationError(f"servers run the encoder's blocks with attention_mask alone: leave {name} out")


def _adapter_numbers(of_shell: ShellStack, given: Tensor) -> Tensor:
    """`[batch, seq]`: which adapter each token has."""
    if of_shell.stack.role:
        raise ConfigurationError("adapter_names can't be used with an encoder-decoder: run each adapter by itself")
    numbers = of_shell.adapters.numbers(*given.shape[:2])
    if numbers is None:
        raise ConfigurationError("this text began with adapter_names=[…], so it can't go on without them")
    return numbers


def _call_of_audio(shell: PreTrainedModel, of_shell: ShellStack, kwargs: dict[str, Any]) -> Call:
    """The call of an encoder of audio. Only its hidden states will tell their number and their mask."""
    given = next((value for value in kwargs.values() if isinstance(value, Tensor)), None)
    if given is None or 0 in given.shape:
        name = shell.main_input_name
        raise ConfigurationError(f"give the model its audio as {name}: {'none' if given is None else [*given.shape]}")
    adapter, trained = _adapter(shell, of_shell, None, None)
    if adapter is not None and (adapter.has_dropout or adapter.has_numbers):
        raise ConfigurationError(
            "adapters inside an encoder of audio can have neither dropout nor adapter_names: set lora_dropout=0"
        )
    if of_shell.adapters.blocks.hooked():
        raise ConfigurationError("hooks on blocks of an encoder of audio can't be run: hook the encoder itself")
    inputs = BlockInputs(
        hidden_states=NO_HIDDEN, batch_size=given.shape[0], seq_len=0, adapter=adapter, trained=trained
    )
    return Call(inputs=inputs, from_audio=True)


def _tensors_among(kwargs: dict[str, Any], given: Tensor) -> dict[str, Tensor]:
    tensors = {name: kwargs[name] for name in _ON_THE_WIRE if kwargs.get(name) is not None}
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise ConfigurationError(f"{name} must be a tensor, not a {type(tensor).__name__}")
        if tensor.requires_grad and torch.is_grad_enabled():
            raise ConfigurationError(f"servers answer no gradient for {name}: give it detached")
    if "position_ids" in tensors:
        if tensors["position_ids"].ndim == 1:
            tensors["position_ids"] = tensors["position_ids"][None]
        check_positions(tensors["position_ids"], *given.shape[:2])
    return tensors


def _given(stack: PreTrainedModel, kwargs: dict[str, Any]) -> Tensor:
    """The text: its ids or its embeddings."""
    ids, embeds = kwargs.get("input_ids"), kwargs.get("inputs_embeds")
    given = ids if ids is not None else embeds
    if given is None:
        raise ConfigurationError("give the model either input_ids or inputs_embeds")
    if not isinstance(given, Tensor) or (ids is not None and (ids.is_floating_point() or ids.dtype == torch.bool)):
        name, kind = ("inputs_embeds", "numbers") if ids is None else ("input_ids", "token ids")
        found = given.dtype if isinstance(given, Tensor) else type(given).__name__
        raise ConfigurationError(f"{name} must be a tensor of {kind}, not {found}")
    if 0 in given.shape:
        raise ConfigurationError(f"the text is empty: {list(given.shape)}")
    embeddings = stack.get_input_embeddings()
    if given.is_meta or getattr(getattr(embeddings, "weight", given), "is_meta", False):
        raise ConfigurationError(
            "the meta device has no values, and servers compute with values: open the model anew by from_pretrained(), "
            "and give it tensors of the CPU or a GPU"
        )
    width = getattr(embeddings, "embedding_dim", None)
    if embeds is not None and width is not None and (embeds.ndim != 3 or embeds.shape[-1] != width):
        raise ConfigurationError(f"inputs_embeds must be [batch, seq, {width}], not {list(embeds.shape)}")
    if embeds is None and given.ndim != 2:
        raise ConfigurationError(f"input_ids must be [batch, seq], not {list(given.shape)}")
    return given


def _extra_inputs(of_shell: ShellStack, kwargs: dict[str, Any]) -> dict[str, Tensor]:
    """The token ids or embeddings that the blocks of some architectures need besides hidden states."""
    ids, embeds = kwargs.get("input_ids"), kwargs.get("inputs_embeds")
    extra: dict[str, Tensor] = {}
    if (of_blocks := kwargs.get("per_layer_inputs")) is not None:
        extra["per_layer_inputs"] = of_blocks
    elif "input_ids" in of_shell.traits.extra_inputs:
        if ids is None:
            raise ConfigurationError(
                f"the blocks of {type(of_shell.module).__name__} need input_ids; inputs_embeds are not enough"
            )
        extra["input_ids"] = ids
    if "inputs_embeds" in of_shell.traits.extra_inputs:
        extra["inputs_embeds"] = embeds if embeds is not None else of_shell.module.get_input_embeddings()(ids)
    return extra


def _adapter(
    shell: PreTrainedModel, of_shell: ShellStack, cache: RemoteCache | None, prefix: TunedPrefix | None
) -> tuple[BlockAdapter | None, tuple[Tensor, ...]]:
    """(the adapter of the blocks, the parameters that are trained)."""
    adapters, stack = of_shell.adapters, of_shell.module
    goes_on = cache is not None and cache.session.position > 0
    in_blocks = prefix if prefix is not None else shell.prompts_in_use

    def prompts() -> Iterator[tuple[Patch, list[Tensor]]]:
        return iter(()) if in_blocks is None else in_blocks.patches()

    def stamp() -> object:
        return adapters.stamp([one for _, tensors in prompts() for one in tensors], shell.device.type)

    if cache is not None and goes_on and cache.keeps_adapter(shell.training, stamp):
        return cache.adapter, ()
    if stack.training and (rate := getattr(stack, "layerdrop", 0)):
        raise ConfigurationError(f"layerdrop={rate} would drop all blocks at once: set it to 0, or call model.eval()")
    if shell.training and torch.is_grad_enabled():
        shell.swarm_notices.tell(shell)
    tuners = getattr(shell, "peft_config", None) or {}
    adapter, trained = adapters.collect(tuners, prompts(), shell.device.type)
    if tuners and torch.is_grad_enabled() and any(one.requires_grad for one in trained):
        shell.swarm_notices.tell_of_prompts(shell.prompts_in_use)
    if cache is not None:
        cache.note_adapter(adapter, shell.training, stamp)
    return adapter, () if goes_on else trained


def source_of_call(kwargs: dict[str, Any], batch_size: int, cache: RemoteCache | None) -> dict[str, Tensor]:
    """The encoder outputs to send with a forward of the decoder; none if its session has them.

    Raises:
        ConfigurationError: they are missing, of another shape, or not those of the session.
    """
    hidden, mask = (kwargs.get(name) for name in SOURCE)
    if not isinstance(hidden, Tensor) or hidden.ndim != 3 or hidden.shape[0] != batch_size or not hidden.shape[1]:
        found = list(hidden.shape) if isinstance(hidden, Tensor) else hidden
        raise ConfigurationError(
            f"the decoder needs encoder outputs [{batch_size}, positions, hidden], not {found}: give the model "
            "input_ids or encoder_outputs"
        )
    if mask is not None and (not isinstance(mask, Tensor) or mask.shape != hidden.shape[:2]):
        found = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise ConfigurationError(f"attention_mask of encoder outputs must be {list(hidden.shape[:2])}, not {found}")
    if mask is not None and mask.is_floating_point():  # as peft makes it for soft prompts
        mask = (mask != 0).to(torch.int64)
    if cache is None or not cache.session.position:
        if cache is not None:
            cache.source_mask = mask
        return {name: tensor for name, tensor in zip(SOURCE, (hidden, mask), strict=True) if tensor is not None}
    known = cache.source_mask
    if mask is not known and not (mask is not None and known is not None and torch.equal(mask, known)):
        raise ConfigurationError(
            "the attention_mask of the encoder outputs has changed since the text began: begin the text again, without "
            "past_key_values"
        )
    return {}


def adopt_head(model: PreTrainedModel) -> None:
    """Give the model a subclass with our forward, if it has a head around the stack."""
    cls = type(model)
    if decoder_stack(model) is model:
        return
    positional = [parameter for parameter in inspect.signature(cls.forward).parameters if parameter != "self"]
    name = cache_argument(decoder_stack(model))

    @functools.wraps(cls.forward)
    def forward(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(positional, args, strict=False)), **kwargs}
        if isinstance(cache := given.get(name), RemoteCache):
            resume_offsets(self, cache)
        mask = given.get("attention_mask")
        mask = mask if isinstance(mask, Tensor) and mask.ndim == 2 else None
        instead = current_call().instead
        with calling(Call(model_mask=mask, reads_padding=reads_padding(self, given), instead=instead)):
            return cls.forward(self, *args, **kwargs)

    model.__class__ = type(cls.__name__, (cls,), {"forward": forward, "__module__": cls.__module__})


def reads_padding(model: PreTrainedModel, given: dict[str, Any]) -> bool | None:
    """True if a forward of the model with these arguments reads positions that the mask `[batch, seq]` hides.

    None: it doesn't, but it has no loss either, and its caller may read them in the outputs.
    """
    mask, labels, task = given.get("attention_mask"), given.get("labels"), type(model).__name__
    if task.endswith("ForQuestionAnswering"):
        return True
    if not isinstance(mask, Tensor) or mask.ndim != 2:
        return False
    if task.endswith("ForSequenceClassification"):
        read = _read_by_head_for_classes(model, given.get("input_ids"), mask)
    elif labels is None and isinstance(kept := given.get("logits_to_keep"), int) and kept > 0:  # generate() asks for it
        read = torch.zeros_like(mask, dtype=torch.bool)
        read[:, -kept:] = True
    elif labels is None:
        return None
    else:
        read = labels != IGNORED
        read[:, :-1] |= labels[:, 1:] != IGNORED  # language models predict a label from the position before it
    if read.ndim != 2 or len(read) != len(mask) or read.shape[1] > mask.shape[1]:
        return True  # a mistake of the caller, or unknown
    hidden = mask[:, mask.shape[1] - read.shape[1] :].to(read.device) == 0  # a prefix has no outputs
    return bool((read & hidden).any())


def _read_by_head_for_classes(model: PreTrainedModel, ids: Tensor | None, mask: Tensor) -> Tensor:
    """True at one position of each row: encoders read the first one, decoders the last one that isn't padding."""
    pad = model.config.get_text_config().pad_token_id
    is_text = torch.ones_like(mask) if ids is None or pad is None else ids != pad
    last = (torch.arange(is_text.shape[-1], device=is_text.device) * is_text).argmax(dim=-1, keepdim=True)
    position = torch.zeros_like(last) if is_encoder(model.config) else last
    return torch.zeros_like(is_text, dtype=torch.bool).scatter_(-1, position, True)


class SplitForward:
    """A forward in two halves that begins at `position`; it is the session of the cache that the model gets.

    The model's own code runs in both halves, with the same arguments. The second one computes everything before the
    blocks again, which costs less than a suspended forward.
    """

    def __init__(self, model: PreTrainedModel, position: int, of_text: RemoteCache | None = None) -> None:
        """`of_text`: the cache of the text, whose adapter is used again."""
        self.position = position
        self.cache = RemoteCache(model.config, self, 1)
        """The cache for the model, of `position` positions."""
        if of_text is not None:
            self.cache.go_on_with_adapter_of(of_text)
        self._model = model
        self._kwargs: dict[str, Any] = {}
        self._inputs: BlockInputs | None = None
        self._hidden: Tensor | None = None

    def begin(self, model_inputs: dict[str, Any]) -> BlockInputs:
        """The first half: arguments of the forward → inputs of the blocks."""
        self._kwargs = {**model_inputs, cache_argument(decoder_stack(self._model)): self.cache}
        try:
            self._model(**self._kwargs, return_dict=True)
        except ForwardStopped:
            if self._inputs is not None:
                return self._inputs
        raise LocalProtocolError(f"the forward of {type(self._model).__name__} never reached its blocks")

    def finish(self, hidden: Tensor) -> Any:
        """The second half: hidden states after the last block → the model's output. Don't use the cache in it."""
        self._hidden = hidden
        return self._model(**self._kwargs, return_dict=True)

    # ------------------------------------------------------------------ the session of this one step

    is_generating = False

    def run_step(self, inputs: BlockInputs, part: Span | None = None) -> Tensor:
        """Called in place of running the blocks."""
        if self._hidden is None:
            self._inputs = inputs
            raise ForwardStopped
        return self._hidden

    def begins(self, ids: Tensor) -> bool:
        return False

    def select_batch(self, indices: Sequence[int]) -> None:
        raise LocalProtocolError("rows can't be chosen within a step")

    def record_past(self) -> None:
        raise LocalProtocolError("a session records its past from its begin on")

    def remember(self, inputs: BlockInputs, part: Span | None = None) -> None:
        raise LocalProtocolError("a step has no past of its own")

    def fork(self) -> NoReturn:
        raise LocalProtocolError("a step can't be copied")

    def close(self) -> None:
        """Nothing to free: the real session is another one."""


_TRAVELS = frozenset(
    (
        *("input_ids", "inputs_embeds", "attention_mask", "position_ids", "token_type_ids", "per_layer_inputs"),
        *("cache_position", "labels"),
    )
)
"""Arguments with tensors that servers are given or know themselves; labels reach stacks that don't read them."""


_OFFSETS = "rope_deltas"
"""The attribute of models with positions on several axes for the difference between the last text's positions and the
number of its tokens, which its pictures cause. The next call continues the text with it."""
_KEY = "swarm_offsets_key"
_offsets: ContextVar[Mapping[object, Any]] = ContextVar("swarmllm_offsets", default=MappingProxyType({}))
"""Values of `rope_deltas` by the module's `_KEY`, for each thread or task: several texts may be written at a time, and
transformers keeps one value in the module, also from one call to the next."""


@dataclass(frozen=True, eq=False)
class VisionInputs:
    """The usual arguments of a text model's forward, and the tensors that travel in place of the others."""

    kwargs: dict[str, Any]
    tensors: dict[str, Tensor] = field(default_factory=dict)
    used_up: tuple[Any, ...] = ()
    """Lists and dicts to clear when the blocks have run."""


def pack_vision_inputs(
    stack: PreTrainedModel, kwargs: dict[str, Any], given: Tensor, cache: RemoteCache | None
) -> VisionInputs:
    """Make the arguments ready to travel. Features to be added between blocks are replaced in `kwargs` by a copy.

    Raises:
        ConfigurationError: servers can't be sent one of them.
    """
    if cache is not None:
        cache.offsets = _offsets.get()
        cache.thread = current_thread()
    deepstack = DeepstackArguments.of(stack)
    own = set() if deepstack is None else {deepstack.features, deepstack.mask}
    for name, value in kwargs.items():
        if name not in _TRAVELS | own and any(True for _ in _tensors(value)):
            raise ConfigurationError(
                f"{type(stack).__name__} is given {name} besides embeddings, which servers don't take: run this model "
                "locally, or without pictures"
            )
    tensors: dict[str, Tensor] = {}
    used_up: list[Any] = []
    if deepstack is not None and (features := kwargs.get(deepstack.features)) is not None:
        tensors |= deepstack.pack(kwargs, stack.config.num_hidden_layers)
        kwargs[deepstack.features] = dict(features) if isinstance(features, dict) else list(features)
        used_up.append(kwargs[deepstack.features])
    usual = dict(kwargs)
    mask = kwargs.get("attention_mask")
    if isinstance(mask, dict) or (isinstance(mask, Tensor) and mask.ndim == 4):
        usual["attention_mask"] = None
        if _is_usual(stack, mask, kwargs, given, cache):
            usual["attention_mask"] = current_call().model_mask
        else:
            tensors |= pack_masks(mask, stack.config) if isinstance(mask, dict) else {"attention_mask": mask}
    return VisionInputs(usual, tensors, tuple(used_up))


def keep_offsets_apart(model: PreTrainedModel) -> None:
    """Give each thread or task its own `rope_deltas`, which models with vision keep in a module."""
    for part in model.modules():
        if _OFFSETS in vars(part):
            del vars(part)[_OFFSETS]
            vars(part)[_KEY] = object()
            cls = type(part)
            members = {_OFFSETS: property(_get_offsets, _set_offsets), "__module__": cls.__module__}
            part.__class__ = type(cls.__name__, (cls,), members)


def forget_offsets(model: PreTrainedModel) -> None:
    """Forget `rope_deltas`: the next text has no pictures."""
    for part in model.modules():
        if _KEY in vars(part):
            _set_offsets(part, None)


def resume_offsets(model: PreTrainedModel, cache: RemoteCache) -> None:
    """Take over the `rope_deltas` of the text in this cache, if another thread or task went on with it last.

    Where one thread writes several texts, they stay those of the last one, as in transformers.
    """
    known, here = cache.offsets, _offsets.get()
    if known.keys() <= here.keys() and cache.thread in (None, current_thread()):
        return
    keys = {vars(part)[_KEY] for part in model.modules() if _KEY in vars(part)}
    _offsets.set({**here, **{key: value for key, value in known.items() if key in keys}})


def _get_offsets(part: Any) -> Any:
    return _offsets.get().get(vars(part)[_KEY])


def _set_offsets(part: Any, value: Any) -> None:
    _offsets.set({**_offsets.get(), vars(part)[_KEY]: value})


def _is_usual(
    stack: PreTrainedModel, mask: Any, kwargs: dict[str, Any], given: Tensor, cache: RemoteCache | None
) -> bool:
    """True if the text model would make this mask itself of the mask that the whole model was given."""
    embeds = kwargs.get("inputs_embeds")
    if embeds is None:
        embeds = given[..., None].to(stack.dtype)
    made = create_masks_for_generate(stack.config, embeds, current_call().model_mask, cache, position_ids=None)
    if not isinstance(mask, dict):
        return isinstance(made, Tensor) and torch.equal(made, mask)
    if not isinstance(made, dict):
        made = dict.fromkeys(mask, made)
    return all(_same(mask[name], made.get(name)) for name in mask)


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.dtype == other.dtype and torch.equal(one, other)


def _tensors(value: Any) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _tensors(part)
