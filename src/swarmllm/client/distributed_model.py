"""The model as users hold it: a Hugging Face class whose blocks run in a swarm.

    model = AutoDistributedModel.from_pretrained(name_or_path, initial_peers=[...])
    model.generate(...)

It is an instance of the architecture's class and of `DistributedModel`, or, to generate,
`DistributedModelForCausalLM`. `open_in_swarm` joins the swarm and loads the checkpoint without its blocks.

Vision models have their towers here (`models/shell/stack_forward`). Models with an encoder and a decoder have both
stacks on servers: the encoder's blocks run without sessions, the decoder's in sessions, which are given the encoder
outputs once.

`without_refused` knows the options of `from_pretrained` that can't work here.
"""

import difflib
import inspect
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from types import MethodType
from typing import TYPE_CHECKING, Any, Never, Self, SupportsIndex

import torch
from torch import Tensor
from transformers import GenerationMixin, PreTrainedModel

from swarmllm.client import generation, saving
from swarmllm.client.batches.batch_runner import BatchRunner
from swarmllm.client.generation import Submitted
from swarmllm.client.local_blocks import LocalBlocks, wanted_spans
from swarmllm.client.local_fallback import LocalFallback, open_fallback
from swarmllm.client.remote_blocks import RemoteBlocks
from swarmllm.client.session.inference_session import InferenceSession, entered_session, note_position
from swarmllm.client.speculative_generation import Speculator, require_no_drafts
from swarmllm.client.view.event_loop import EventLoop
from swarmllm.client.view.swarm_view import SwarmView
from swarmllm.config import ClientConfig, default_cache_dir, hub_token, own_cache_dir
from swarmllm.data_structures import BlockTraits, Span
from swarmllm.errors import ConfigurationError
from swarmllm.models.architecture import Task, cache_argument, decoder_stack, stacks, task_class, task_of, text_config
from swarmllm.models.checkpoint.checkpoint import Checkpoint, open_checkpoint, resolve_dtype
from swarmllm.models.checkpoint.fingerprint import fingerprint
from swarmllm.models.checkpoint.skeleton import block_bytes
from swarmllm.models.quantization.whole import hasten
from swarmllm.models.shell.client_shell import embed, head
from swarmllm.models.shell.hollow_modules import remove_row_hooks
from swarmllm.models.shell.loading import load_client_shell
from swarmllm.models.shell.packed_head import keep_head_as_stored, round_head
from swarmllm.models.shell.remote_cache import RemoteCache, one_generate
from swarmllm.models.shell.stack_forward import SplitForward
from swarmllm.models.shell.tuned_prompts import TunedPrompts
from swarmllm.models.span.probe_results import PROBES
from swarmllm.models.span.small_copy import traits_of

_BY_SERVERS = "servers quantize the blocks (--quant_type)"


_BY_CHECKPOINT = "config and weights are those of the checkpoint, as the servers have them"


_SMALL = "only embeddings, final norm and head are here; the memory for blocks is a setting of servers (--max_memory)"


_REFUSED = {
    **dict.fromkeys(("quantization_config", "load_in_8bit", "load_in_4bit"), _BY_SERVERS),
    **dict.fromkeys(("config", "state_dict"), _BY_CHECKPOINT),
    **dict.fromkeys(("max_memory", "offload_folder", "offload_state_dict", "offload_buffers"), _SMALL),
    **dict.fromkeys(
        ("tp_plan", "tp_size", "device_mesh", "distributed_config"), "the swarm is what blocks are spread over"
    ),
    "subfolder": "give the directory itself; of a hub repository the model at its root is used",
    "variant": "the checkpoint's usual files are used, as servers do",
    "output_loading_info": "only the model is returned",
}
"""Arguments of transformers that can't work without the blocks, and the reason."""


MISTYPED = 0.85
"""An unknown argument this similar to one of ours is a typing mistake. Assumed: transformers has no such name."""


_PLACED = ("auto", "balanced", "balanced_low_0", "sequential")
"""accelerate's ways to spread a model. The client's part is small, so all of them put it on the first device."""


class UnlessOwn:
    """A method that gives way to a module of the same name, where the architecture has one."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method
        self.__doc__ = method.__doc__

    def __get__(self, model: Any, cls: type | None = None) -> Any:
        if model is None:
            return self._method
        own = model.__dict__.get("_modules", {}).get(self._method.__name__)
        return MethodType(self._method, model) if own is None else own


class DistributedModel(PreTrainedModel if TYPE_CHECKING else object):  # type: ignore[misc]
    """Mixed into the architecture's own class; holds embeddings, final norm and head, and a swarm for the rest.

    `enter_swarm` sets all its attributes. What it can do besides are functions in files of their own, such as `saving`.
    """

    swarm: SwarmView
    """`.servers()`, `.route()`."""
    remote_blocks: RemoteBlocks
    """All blocks, as a differentiable module; slices of it are modules too. Of an encoder-decoder, the decoder's."""
    remote_encoder_blocks: RemoteBlocks | None
    """The blocks of the encoder, if there is one."""
    tuned_prompts: TunedPrompts | None
    """The vectors that `tuning_mode` trains."""
    swarm_origin: Sequence[str] = ()
    """Tags for model cards, which name the base model."""
    swarm_embeds_positions: bool | None = None
    """True if the first block's inputs depend on positions; None: not known yet."""
    _finalizer: Any
    """A weakref.finalize; not annotated as such because transformers evaluates its subclasses' annotations."""

    save_pretrained = saving.save_pretrained
    push_to_hub = saving.push_to_hub
    load_trained = saving.load_trained

    def enter_swarm(
        self, view: SwarmView, blocks: RemoteBlocks, encoder: RemoteBlocks | None, origin: Sequence[str]
    ) -> None:
        """Take over what runs the blocks; `close()` closes the view's loop."""
        self.swarm, self.remote_blocks, self.remote_encoder_blocks = view, blocks, encoder
        self.swarm_origin, self._finalizer = origin, weakref.finalize(self, view.loop.close)
        head = self.get_output_embeddings()
        if head is not None:
            view.head = weakref.ref(head)

    @property
    def model_tags(self) -> list[str]:
        """Tags for model cards: base model and methods. peft puts them into its adapters' cards as well."""
        return saving.tags_of_card(self, self.swarm_origin)

    def inference_session(self, max_length: int = 2048, batch_size: int = 1) -> InferenceSession:
        """KV caches for `batch_size` rows of at most `max_length` tokens on all servers of a route.

        Inside `with … as session:`, `generate()` continues on that session. In other threads it doesn't.
        """
        return self.remote_blocks.new_session(batch_size, max_length)

    def embed(self, input_ids: Tensor, **kwargs: Any) -> Tensor:
        """Everything before the first block: `[batch, seq]` ids → hidden states `[batch, seq, hidden]`.

        Inside an inference session, positions continue where the session stands.
        """
        generation.require_text_alone(self, "embed() takes", kwargs)
        session = self.active_cache_session()
        position = 0 if session is None else session.position
        if session is not None and position:
            name = cache_argument(decoder_stack(self))
            kwargs.setdefault(name, RemoteCache(self.config, session, input_ids.shape[0]))
        hidden = embed(self, input_ids, **kwargs)
        if "position_ids" not in kwargs and self._embeds_positions():
            note_position(hidden, position)
        return hidden

    def _embeds_positions(self) -> bool:
        """Find out, once, if the first block's inputs depend on positions."""
        if self.swarm_embeds_positions is None:
            if self.training:  # dropout would tell them apart
                return False
            one = torch.zeros((1, 1), dtype=torch.long, device=self.get_input_embeddings().weight.device)
            later = {cache_argument(decoder_stack(self)): SplitForward(self, 1).cache}
            with torch.no_grad():
                first, second = embed(self, one), embed(self, one, **later)
            self.swarm_embeds_positions = not torch.equal(first, second)
        return self.swarm_embeds_positions

    @UnlessOwn
    def head(self, hidden_states: Tensor) -> Tensor:
        """Everything after the last block: hidden states `[batch, seq, hidden]` → logits `[batch, seq, vocabulary]`.

        Some architectures, such as ModernBERT, have a module of this name: there it is that module.
        """
        return head(self, hidden_states)

    def close(self) -> None:
        """Leave the swarm; sessions end. Harmless when done twice."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def active_cache_session(self) -> InferenceSession | None:
        """The session that `generate()` continues in this thread or task."""
        return entered_session(self.swarm)

    def extra_repr(self) -> str:
        """The first line that `print(model)` shows."""
        return f"(swarm): {self.swarm!r}" if "swarm" in self.__dict__ else ""

    def __reduce_ex__(self, protocol: SupportsIndex) -> Never:
        raise ConfigurationError(
            "a model of a swarm can't be pickled or copied deeply, because its blocks are on servers: keep what is "
            "here with save_pretrained() or as its state_dict(), and open another by from_pretrained()"
        )

    def __copy__(self) -> Self:
        twin = type(self).__new__(type(self))
        twin.__dict__.update(self.__dict__)
        return twin


class DistributedModelForCausalLM(DistributedModel):
    """A distributed model with `generate()`."""

    speculator: Speculator | None = None
    """Guesses tokens ahead; None: never."""
    local_fallback: LocalFallback | None = None
    """The model on this machine that finishes texts when the swarm fails."""
    submitted: Submitted

    submit = generation.submit
    generate_many = generation.generate_many

    def write_with(self, speculator: Speculator | None, fallback: LocalFallback | None) -> None:
        """Take over what writes texts, besides transformers."""
        self.speculator, self.local_fallback, self.submitted = speculator, fallback, Submitted()

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """Same as `AutoDistributedModelForCausalLM.from_pretrained`; of a model's own class, transformers'."""
        owner: Any = super() if issubclass(cls, PreTrainedModel) else AutoDistributedModelForCausalLM
        return owner.from_pretrained(*args, **kwargs)

    @torch.no_grad()
    def generate(self, inputs: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        """transformers' `generate()`, which also takes the fields of `DecodingOptions`.

        Inside an inference session only what the session hasn't seen is computed. As with transformers, give the whole
        text so far: the session is rolled back to where it agrees with it.
        """
        ids = inputs if inputs is not None else kwargs.get("input_ids")
        if isinstance(ids, Tensor) and ids.ndim < 2:
            raise ConfigurationError(f"input_ids must be [batch, seq], not {list(ids.shape)}")
        try:
            with one_generate(), generation.continued_session(self, (inputs, *args), kwargs) as note:
                if getattr(super().generate, "__func__", None) is GenerationMixin.generate:
                    generation.add_own_loop(self, (inputs, *args), kwargs)
                output = super().generate(inputs, *args, **kwargs)
                note(output)
        except BaseException:
            remove_row_hooks(self)
            raise
        return output

    def _prepare_generation_config(self, generation_config: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """transformers': the config of this call, here with our options, and the inputs of the model."""
        taken = generation.take_options(kwargs)
        config, model_kwargs = super()._prepare_generation_config(generation_config, **kwargs)
        generation.put_options(config, taken)
        return config, model_kwargs

    def _get_logits_processor(
        self,
        generation_config: Any,
        input_ids_seq_length: int | None = None,
        *args: Any,
        logits_processor: Any = None,
        model_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """transformers' processors with ours: behind the caller's own, and behind all but the last."""
        mask = (model_kwargs or {}).get("attention_mask")
        before, behind = generation.processors_of(generation_config, input_ids_seq_length or 0, mask)
        given = [*(logits_processor or ()), *before]
        found = super()._get_logits_processor(
            generation_config, input_ids_seq_length, *args, logits_processor=given, model_kwargs=model_kwargs, **kwargs
        )
        generation.insert_behind(found, behind)
        return found


class DistributedModelForImageTextToText(DistributedModelForCausalLM):
    """A distributed model with vision."""


class DistributedEncoderDecoder(DistributedModel):
    """A distributed model with an encoder and a decoder; `remote_blocks` are those of the decoder."""

    def inference_session(self, *_: Any, **__: Any) -> Never:
        raise ConfigurationError(
            "generate() of an encoder-decoder opens a session for each text: call it without inference_session()"
        )

    def embed(self, *_: Any, **__: Any) -> Never:
        raise ConfigurationError("embed() is for models without an encoder: call this model as transformers does")

    def head(self, *_: Any, **__: Any) -> Never:
        raise ConfigurationError("head() is for models without an encoder: call this model as transformers does")


class _WritingEncoderDecoder(DistributedEncoderDecoder):
    """One with `generate()`."""

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """transformers' `generate()`."""
        with one_generate():
            return super().generate(*args, **kwargs)


class DistributedModelForSeq2SeqLM(_WritingEncoderDecoder):
    """A distributed model that writes text from text."""


class DistributedModelForSpeechSeq2Seq(_WritingEncoderDecoder):
    """A distributed model that writes text from sound."""


_MIXINS = {
    Task.CAUSAL_LM: DistributedModelForCausalLM,
    Task.IMAGE_TEXT_TO_TEXT: DistributedModelForImageTextToText,
    Task.SEQ_TO_SEQ_LM: DistributedModelForSeq2SeqLM,
    Task.SPEECH_SEQ_TO_SEQ: DistributedModelForSpeechSeq2Seq,
}


def _mixin(task: Task, *, with_encoder: bool) -> type[DistributedModel]:
    return _MIXINS.get(task, DistributedEncoderDecoder if with_encoder else DistributedModel)


class _AutoDistributed:
    """`from_pretrained` gives the architecture's class for one task."""

    _task: Task | None
    """None = the task that the checkpoint was saved for."""

    def __init__(self) -> None:
        raise TypeError(f"use {type(self).__name__}.from_pretrained(…)")

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str,
        *,
        initial_peers: Sequence[str] | str | None = None,
        revision: str | None = None,
        dtype: str | torch.dtype = "auto",
        client_config: ClientConfig | None = None,
        token: str | None = None,
        cache_dir: str | None = None,
        gguf_file: str | None = None,
        local_blocks: str | None = None,
        tuning_mode: str | None = None,
        pre_seq_len: int = 0,
        **hf_kwargs: Any,
    ) -> Any:
        """The model of that checkpoint, its blocks in the swarm that `initial_peers` belong to.

        Reads only embeddings, final norm and head. A head that the checkpoint lacks is a new one, as with transformers.

        Args:
            name_or_path: hub id or local directory, or a GGUF file of one (owner/repository/file.gguf), as servers do.
            initial_peers: multiaddresses of any peers of the swarm; default: `client_config`'s.
            dtype: for the local parts; "auto" = as stored.
            gguf_file: a GGUF file in that directory or repository.
            local_blocks: blocks to run here, as "0:2" or "0:2,30:32"; default: `client_config`'s.
            tuning_mode: "ptune" = `pre_seq_len` trained vectors before each text, "deep_ptune" = in every block as
                well (`model.tuned_prompts`); all else in the checkpoint is frozen.
            hf_kwargs: for transformers' `from_pretrained`; `device_map` is one device, for the local parts.

        Raises:
            SwarmError: arguments, architecture or files can't be used; the swarm lacks blocks, or can't be joined.
        """
        hf_kwargs = without_refused(hf_kwargs, inspect.signature(cls.from_pretrained).parameters)
        config = _with_arguments(client_config, initial_peers, local_blocks)
        where = {"revision": revision, "token": token or hub_token(), "cache_dir": cache_dir or default_cache_dir()}
        checkpoint = open_checkpoint(f"{name_or_path}/{gguf_file}" if gguf_file else str(name_or_path), **where)
        hf_kwargs |= {"tuning_mode": tuning_mode, "pre_seq_len": pre_seq_len}
        task = cls._task or task_of(checkpoint.config)
        dtype = hf_kwargs.pop("torch_dtype", None) or dtype
        mixin = _mixin(task, with_encoder=len(stacks(checkpoint.config)) > 1)
        return open_in_swarm(checkpoint, task, mixin, config, dtype, **hf_kwargs)


def _with_arguments(
    config: ClientConfig | None, initial_peers: Sequence[str] | str | None, local_blocks: str | None
) -> ClientConfig:
    """The config with these arguments in place of its own.

    Raises:
        ConfigurationError: these are no settings.
    """
    config = ClientConfig() if config is None else config
    if not isinstance(config, ClientConfig):
        raise ConfigurationError(
            f"client_config must be a ClientConfig, like client_config=ClientConfig(max_retries=3), not {config!r}"
        )
    arguments: dict[str, Any] = {"initial_peers": initial_peers, "local_blocks": local_blocks}
    return replace(config, **{name: value for name, value in arguments.items() if value is not None})


def open_in_swarm(
    checkpoint: Checkpoint, task: Task, mixin: type, config: ClientConfig, dtype: str | torch.dtype, **options: Any
) -> Any:
    """Join the swarm, and load the model as the architecture's class for that task with `mixin`."""
    model_class, dtype = task_class(checkpoint.config, task), resolve_dtype(checkpoint, dtype)
    require_no_drafts(config, task)
    device = device_of(options.pop("device_map", None))
    loop = EventLoop()
    with ExitStack() as undo:
        undo.callback(loop.close)
        spans = [stack.span for stack in stacks(checkpoint.config)]
        view, everything = _view_of(checkpoint, config, dtype, loop, spans), spans[-1]
        wanted = wanted_spans(config, checkpoint.num_blocks)
        loop.run_coroutine(view.connect(), meanwhile=lambda: _find_traits(checkpoint, view))
        local = LocalBlocks.load(checkpoint, wanted, dtype, progress=options.get("progress", True))
        view.look_ups.spans = (*spans[:-1], *(span for span, here in local.parts(everything) if here is None))
        traits = loop.run_coroutine(view.begin())
        blocks = RemoteBlocks(view, BatchRunner(view, traits), traits, everything, local)
        encoder = encoder_blocks(view, traits, spans)
        model: Any = load_client_shell(
            checkpoint,
            model_class=model_class,
            mixin=mixin,
            dtype=dtype,
            runner=blocks,
            traits=traits,
            encoder=None if encoder is None else (encoder, encoder.traits),
            here=local.modules(),
            **options,
        )
        if device is not None:
            model.to(device)
        if config.head == "int8":
            round_head(model)
        else:
            keep_head_as_stored(model, checkpoint)
        if (head := model.get_output_embeddings()) is not None:
            hasten([head])
        fallback = open_fallback(config, checkpoint, model)
        model.enter_swarm(view, blocks, encoder, saving.describe_origin(checkpoint, task))
        if isinstance(model, DistributedModelForCausalLM):
            # guesses know neither pictures nor the positions of tuned prompts
            guesses = task == Task.CAUSAL_LM and model.tuned_prompts is None
            model.write_with(Speculator(config, checkpoint, model) if guesses else None, fallback)
        undo.pop_all()
    return model


def _find_traits(checkpoint: Checkpoint, view: SwarmView) -> None:
    """Find the traits of the model's blocks here, so that no server has to be believed."""
    view.own_traits = traits_of(checkpoint, own_cache_dir() / PROBES)


def _view_of(
    checkpoint: Checkpoint, config: ClientConfig, dtype: torch.dtype, loop: EventLoop, spans: Sequence[Span]
) -> SwarmView:
    view = SwarmView(
        config,
        loop,
        name=checkpoint.public_name,
        fingerprint=fingerprint(checkpoint),
        num_blocks=checkpoint.num_blocks,
    )
    view.model_place = checkpoint.place
    tell_stacks(view, spans, config)
    view.hidden_size = getattr(text_config(checkpoint.config), "hidden_size", None)
    # Not when a route is explained: building a model resets torch's random state, and another thread may be sampling
    # by then.
    view.num_bytes = sum(block_bytes(checkpoint, dtype))
    return view


def tell_stacks(view: SwarmView, spans: Sequence[Span], config: ClientConfig) -> None:
    """Tell the view the encoder's blocks, if there are any.

    Raises:
        ConfigurationError: a setting doesn't go with an encoder-decoder.
    """
    if len(spans) == 1:
        return
    view.look_ups.encoder_blocks = spans[0].end
    for name in ("local_blocks", "fallback_to_local", "active_adapter"):
        if getattr(config, name) is not None:
            raise ConfigurationError(f"{name} is for models without an encoder: leave it out for this encoder-decoder")


def encoder_blocks(view: SwarmView, traits: BlockTraits, spans: Sequence[Span]) -> RemoteBlocks | None:
    """The encoder's blocks, of a model that has one: `spans` are those of its stacks."""
    if len(spans) == 1:
        return None
    of_encoder = traits.of_encoder
    return RemoteBlocks(view, BatchRunner(view, of_encoder), of_encoder, spans[0])


class AutoDistributedModelForCausalLM(_AutoDistributed):
    """Text generation."""

    _task = Task.CAUSAL_LM


class AutoDistributedModelForSeq2SeqLM(_AutoDistributed):
    """Text from text, by an encoder and a decoder."""

    _task = Task.SEQ_TO_SEQ_LM


class AutoDistributedModelForSpeechSeq2Seq(_AutoDistributed):
    """Text from sound, by an encoder and a decoder."""

    _task = Task.SPEECH_SEQ_TO_SEQ


class AutoDistributedModelForImageTextToText(_AutoDistributed):
    """Text from pictures and text."""

    _task = Task.IMAGE_TEXT_TO_TEXT


class AutoDistributedModelForSequenceClassification(_AutoDistributed):
    """A class or a number for each text; `num_labels=…` as with transformers."""

    _task = Task.SEQUENCE_CLASSIFICATION


class AutoDistributedModelForTokenClassification(_AutoDistributed):
    """A class for each token."""

    _task = Task.TOKEN_CLASSIFICATION


class AutoDistributedModelForQuestionAnswering(_AutoDistributed):
    """The place in a text where an answer begins and ends."""

    _task = Task.QUESTION_ANSWERING


class AutoDistributedModelForMaskedLM(_AutoDistributed):
    """Tokens for masked places of a text, by an encoder."""

    _task = Task.MASKED_LM


class AutoDistributedModelForFeatureExtraction(_AutoDistributed):
    """No head: hidden states after the last block, as by transformers' `AutoModel`."""

    _task = Task.FEATURES


class AutoDistributedModel(_AutoDistributed):
    """The class that fits the checkpoint: the causal language model, unless its config says otherwise."""

    _task = None


def without_refused(hf_kwargs: dict[str, Any], own: Iterable[str] = ()) -> dict[str, Any]:
    """The options that ask for something: not None, False or "". `own`: the arguments of `from_pretrained`.

    Raises:
        ConfigurationError: one of them can't be honoured.
    """
    for option in _REFUSED.keys() & hf_kwargs.keys():
        if hf_kwargs[option] not in (None, "", False):
            raise ConfigurationError(f"{option} can't be given here: {_REFUSED[option]}")
    for option in hf_kwargs.keys() & vars(ClientConfig()).keys():
        raise ConfigurationError(f"give {option} as client_config=ClientConfig({option}=…)")
    for option in hf_kwargs:  # transformers would refuse it as well, but only after the swarm was found
        if near := difflib.get_close_matches(option, own, n=1, cutoff=MISTYPED):
            raise ConfigurationError(f"there is no argument {option}: did you mean {near[0]}?")
    return {name: value for name, value in hf_kwargs.items() if name not in _REFUSED}


def device_of(device_map: Any, setting: str = "device_map") -> torch.device | None:
    """The device for the client's part; None: where it is loaded. `setting`: its name in the error.

    Raises:
        ConfigurationError: it names several, or one that this machine lacks.
    """
    if isinstance(device_map, Mapping):
        places = set(device_map.values())
        device_map = places.pop() if len(places) == 1 else ""
    if device_map is None:
        return None
    try:
        if device_map in _PLACED:
            device = torch.accelerator.current_accelerator() or torch.device("cpu")
        else:
            device = torch.device(device_map)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError, TypeError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigurationError(
            f"{setting} must be auto or one device of this machine, for embeddings, norm and head: {reason}"
        ) from None
    return device
