"""`generate()` of a model of a swarm: its sessions, loops and logits processors; many texts at once.

transformers' own `generate()` runs every text. What is added goes in by its arguments:

    sessions            inside `inference_session()`, `continued_session` gives it the session's cache
    loops               `add_own_loop` gives a `custom_generate`, for speculation and for the local fallback
    logits processors   `DecodingOptions` are fields like transformers' own, for `generate()` and for GenerationConfig

`generate_many` and `submit` write several texts at the same time. Each has a session of its own, so servers compute
them together, and a text that ends makes room for the next one.
"""

import inspect
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import GenerationMixin, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList
from transformers.generation import GenerationMode, StopStringCriteria
from transformers.generation.logits_process import LogitNormalization

from swarmllm.client.session.inference_session import TextSoFar
from swarmllm.decoding.methods import padding_lengths, processors_before, processors_behind, tokens_with
from swarmllm.decoding.options import ADDED, DECODING_TOKENIZER, DecodingOptions
from swarmllm.errors import ConfigurationError
from swarmllm.models.architecture import cache_argument, decoder_stack, has_vision
from swarmllm.models.shell.hollow_blocks import stamp_of
from swarmllm.models.shell.remote_cache import RemoteCache
from swarmllm.models.shell.stack_forward import forget_offsets, resume_offsets

AT_ONCE = 16
"""Texts that are written at the same time. Assumed: as many as a few servers compute together without long waits."""

# ---------------------------------------------------------------------- sessions

_TEXT = frozenset(
    ("input_ids", "attention_mask", "position_ids", "token_type_ids", "mm_token_type_ids", "inputs_embeds")
)
"""Tensors that every text is given as."""
_BESIDE_TOKENS = _TEXT - {"input_ids", "attention_mask"}
_TYPES = ("token_type_ids", "mm_token_type_ids")
"""Zeros, which many tokenizers give with each text, say nothing."""


@contextmanager
def continued_session(model: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[Callable[[Any], None]]:
    """Within, `generate()` continues the session that the caller has entered, if any. Call the result with its output.

    The session is rolled back to where it agrees with the given text. It begins anew if tokens and mask don't tell all
    of the text, or if the loop feeds all of it again.
    """
    session = model.active_cache_session()
    if isinstance(cache := kwargs.get(cache_argument(decoder_stack(model))), RemoteCache):
        resume_offsets(model, cache)
    if session is None:
        yield lambda output: None
        return
    if model.tuned_prompts is not None:
        raise ConfigurationError("with tuning_mode, call generate() outside of inference sessions")
    require_text_alone(model, "inside an inference session, generate() takes", kwargs)
    if has_vision(model.config):
        forget_offsets(model)
    given = dict(zip(_ARGUMENTS, args, strict=False)) | kwargs
    input_ids = given["inputs"] if given.get("inputs") is not None else given.get("input_ids")
    if input_ids is None:
        raise ConfigurationError("inside an inference session give generate() the input_ids of the whole text so far")
    settings = _settings_of(model, given, kwargs)
    input_ids = input_ids.clone()  # the caller may change it
    text = TextSoFar(input_ids, _mask_of(input_ids, given.get("attention_mask"), settings), _beside_the_text(model))
    is_all = not (_has_more_than_tokens(model, given) or settings.token_healing)
    is_all = is_all and max(settings.num_beams or 1, settings.num_return_sequences or 1) == 1
    nothing = TextSoFar(input_ids[:, :0], text.mask[:, :0], text.beside)

    def note(output: Any) -> None:
        if is_all:
            ids = (output if isinstance(output, Tensor) else output.sequences)[:, : session.position]
            more = text.mask.new_ones(len(ids), max(0, ids.shape[1] - text.mask.shape[1]))
            session.history = TextSoFar(ids.clone(), torch.cat([text.mask, more], 1)[:, : ids.shape[1]], text.beside)

    with session.for_one_text():
        if is_all and _feeds_the_rest(settings, given):
            session.rewind_to(text)
        else:
            session.position = 0
        if session.position:
            name = cache_argument(decoder_stack(model))
            kwargs[name] = RemoteCache(model.config, session, input_ids.shape[0])
        # If this fails or is interrupted, the next call can build only on these.
        session.history = text if is_all else nothing
        yield note


def _settings_of(model: Any, given: dict[str, Any], kwargs: dict[str, Any]) -> Any:
    """The GenerationConfig of a call of `generate()`."""
    fields = {name: value for name, value in kwargs.items() if name not in _OF_CALL}
    if given.get("tokenizer") is not None:
        fields[DECODING_TOKENIZER] = given["tokenizer"]
    settings, _ = model._prepare_generation_config(given.get("generation_config"), **fields)
    return settings


def _feeds_the_rest(settings: Any, given: dict[str, Any]) -> bool:
    """True if the loop of this call feeds only what a cache lacks. Those that guess feed the whole text at first."""
    mode = settings.get_generation_mode(given.get("assistant_model"))
    return mode in _LOOPS and settings.use_cache is not False and given.get("custom_generate") is None


def _has_more_than_tokens(model: Any, given: dict[str, Any]) -> bool:
    """True if tokens and a mask of two axes don't tell all of the text: also with soft prompts of peft, which then
    prepares the inputs of the model."""
    beside = {name: given[name] for name in _BESIDE_TOKENS if given.get(name) is not None}
    for name in _TYPES:
        if isinstance(types := beside.get(name), Tensor) and not bool(types.any()):
            del beside[name]
    mask = given.get("attention_mask")
    if beside or (isinstance(mask, Tensor) and mask.ndim != 2):
        return True
    tuner = getattr(vars(model).get("prepare_inputs_for_generation"), "__self__", None)
    return bool(getattr(getattr(tuner, "active_peft_config", None), "is_prompt_learning", False))


def _mask_of(ids: Tensor, given: Any, settings: Any) -> Tensor:
    """The given mask, or the one that `generate()` infers from padding, `[batch, seq]` of 0 and 1."""
    if isinstance(given, Tensor) and given.shape == ids.shape:
        return (given != 0).to(ids.device, torch.int64)
    padding, ends = settings.pad_token_id, settings.eos_token_id
    if padding is None or padding in (ends if isinstance(ends, Sequence) else (ends,)):
        return torch.ones_like(ids)
    return ids.ne(padding).to(torch.int64)


def _beside_the_text(model: Any) -> object:
    """What the states of a text depend on, on the client, besides the text: hooks on blocks, and whatever is in front
    of the blocks, with its hooks. Equal as long as none of it changes, but for what is written through `.data`."""
    blocks = model.swarm_adapters.blocks
    stack = decoder_stack(model)
    others = [one for child in stack.children() if child is not blocks for one in child.modules()]
    hooked = (model, stack, *blocks.blocks(), *others)
    return [(*one._forward_pre_hooks, None, *one._forward_hooks) for one in hooked], stamp_of(others)


def require_text_alone(model: Any, what: str, kwargs: dict[str, Any]) -> None:
    """Refuse pictures among these arguments: a session knows its text by its tokens, the same for all pictures.

    Raises:
        ConfigurationError: there are some.
    """
    for name, value in kwargs.items():
        if has_vision(model.config) and isinstance(value, Tensor) and name not in _TEXT:
            raise ConfigurationError(
                f"{what} text alone, and no {name}: give pictures to generate() or to the model, outside of sessions"
            )


# ---------------------------------------------------------------------- loops

_LOOPS = {
    GenerationMode.GREEDY_SEARCH: "_sample",
    GenerationMode.SAMPLE: "_sample",
    GenerationMode.BEAM_SEARCH: "_beam_search",
    GenerationMode.BEAM_SAMPLE: "_beam_search",
}
"""The methods of transformers that run these modes."""
_ARGUMENTS = tuple(inspect.signature(GenerationMixin.generate).parameters)[1:]
_FOR_ONE_LOOP = ("custom_generate", "assistant_model", "synced_gpus")
"""Arguments that choose a loop, or that transformers gives to its own loops alone."""
_OF_CALL = frozenset((*_ARGUMENTS, "tokenizer", "assistant_tokenizer", "trust_remote_code"))
"""Arguments of `generate()` that are neither settings nor inputs of the model."""
OWN_LOOP = "decoding_own_loop"
"""The name under which `put_options` learns that our loop runs, whose stop_strings are criteria already."""


def add_own_loop(model: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Add a `custom_generate` to the arguments of `generate()`, if our loop may run this text."""
    tokenizer = kwargs.get("tokenizer")
    if tokenizer is not None:
        kwargs[DECODING_TOKENIZER] = tokenizer
    given = dict(zip(_ARGUMENTS, args, strict=False)) | kwargs
    guesses = model.speculator is not None and model.speculator.enabled
    if any(given.get(name) for name in _FOR_ONE_LOOP) or not (guesses or model.local_fallback):
        return
    settings = _settings_of(model, given, kwargs)
    method = _LOOPS.get(settings.get_generation_mode())
    if method is None or settings.token_healing or (method == "_beam_search" and not model.local_fallback):
        return
    if settings.stop_strings is not None:  # transformers keeps the tokenizer from a loop that isn't its own
        if tokenizer is None or given.get("stopping_criteria") is not kwargs.get("stopping_criteria"):
            return
        stops = StopStringCriteria(tokenizer, settings.stop_strings)
        kwargs["stopping_criteria"] = StoppingCriteriaList([*(kwargs.get("stopping_criteria") or ()), stops])
        kwargs[OWN_LOOP] = True
    kwargs["custom_generate"] = partial(_write, method=method, streamer=given.get("streamer"))


def _write(
    model: Any,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: Any,
    method: str,
    streamer: Any,
    **model_kwargs: Any,
) -> Any:
    """Our loop: transformers' method of that name, or speculation. The local model goes on if the swarm fails."""
    given = {"logits_processor": logits_processor, "generation_config": generation_config}
    if streamer is not None:
        given["streamer"] = streamer

    def in_swarm(criteria: StoppingCriteriaList) -> Any:
        speculation = None
        if method == "_sample" and model.speculator is not None:
            speculation = model.speculator.speculation_for(model, generation_config, model_kwargs)
        if speculation is not None:
            return speculation.write_text(
                input_ids, logits_processor, criteria, generation_config, streamer, model_kwargs
            )
        return getattr(model, method)(input_ids, stopping_criteria=criteria, **given, **model_kwargs)

    if model.local_fallback is None:
        return in_swarm(stopping_criteria)
    return model.local_fallback.finish_if_swarm_fails(
        in_swarm, model, method, input_ids, stopping_criteria, given, model_kwargs
    )


# ---------------------------------------------------------------------- logits processors


def take_options(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Take the options that transformers doesn't know out of the arguments of a call."""
    return {name: kwargs.pop(name) for name in (*ADDED, DECODING_TOKENIZER, OWN_LOOP) if name in kwargs}


def put_options(config: Any, taken: dict[str, Any]) -> None:
    """Put these options into the prepared GenerationConfig of the call.

    Raises:
        ConfigurationError: a value can't be used.
    """
    tokenizer = taken.pop(DECODING_TOKENIZER, None)
    if taken.pop(OWN_LOOP, False):
        config.stop_strings = None
    for name, value in taken.items():
        setattr(config, name, value)
    options = _added_options(config)
    options.require_fitting(do_sample=bool(config.do_sample), num_beams=config.num_beams or 1)
    config._dry_breakers = frozenset()
    if options.is_on("dry_multiplier") and (strings := options.resolved()["dry_sequence_breakers"]):
        if tokenizer is None:
            raise ConfigurationError(
                "dry_sequence_breakers are strings: give generate() the tokenizer=…, or dry_sequence_breakers=[]"
            )
        config._dry_breakers = tokens_with(strings, tokenizer)


def processors_of(config: Any, start: int, mask: Tensor | None) -> tuple[list[Any], list[Any]]:
    """Our logits processors, before and behind temperature and the like; the prompt has `start` tokens."""
    options = _added_options(config)
    breakers: frozenset[int] = getattr(config, "_dry_breakers", frozenset())
    before = processors_before(options, start=start, breakers=breakers, padding=padding_lengths(mask))
    return before, processors_behind(options, start=start)


def insert_behind(found: LogitsProcessorList, more: Sequence[Any]) -> None:
    """Insert processors behind all others but the last, which normalizes."""
    end = len(found) - 1 if found and isinstance(found[-1], LogitNormalization) else len(found)
    found[end:end] = more


def _added_options(config: Any) -> DecodingOptions:
    """The values of a GenerationConfig for the options that transformers lacks."""
    names = (one.name for one in fields(DecodingOptions) if one.name in ADDED)
    return DecodingOptions(**{name: getattr(config, name, None) for name in names})


# ---------------------------------------------------------------------- many texts


class _Stop(StoppingCriteria):
    """Ends all texts of a `generate_many` that the caller has left."""

    def __init__(self) -> None:
        self.wanted = threading.Event()

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
        return torch.full((len(input_ids),), self.wanted.is_set(), device=input_ids.device)


class Submitted:
    """Texts of `submit()` that are not written yet, and the threads that write them while there are any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num = 0
        self._pool: ThreadPoolExecutor | None = None

    def add(self, write: Callable[[], Any]) -> "Future[Any]":
        """Queue a text."""
        with self._lock:
            self._pool = self._pool or ThreadPoolExecutor(AT_ONCE, thread_name_prefix="swarmllm-submit")
            self._num += 1
            future = self._pool.submit(write)
        future.add_done_callback(self._ended)
        return future

    def _ended(self, _: "Future[Any]") -> None:
        with self._lock:
            self._num -= 1
            if not self._num and self._pool is not None:
                self._pool.shutdown(wait=False)
                self._pool = None


def submit(model: Any, inputs: Tensor | Sequence[int], **kwargs: Any) -> "Future[Any]":
    """Begin `generate(inputs, **kwargs)` and return at once; `.result()` of the future waits for its output.

    16 texts are written at a time. Texts that are submitted later wait for their turn.
    """
    future: Future[Any] = model.submitted.add(partial(model.generate, _as_ids(model, inputs), **kwargs))
    return future


def generate_many(
    model: Any,
    prompts: Iterable[Tensor | Sequence[int]],
    *,
    at_once: int = AT_ONCE,
    progress: bool = False,
    return_exceptions: bool = False,
    **kwargs: Any,
) -> Iterator[tuple[int, Any]]:
    """Write on from each prompt; yields (its index, the output of `generate()`) in the order in which texts end.

    Sampled texts depend on what is computed at the same time, since torch has one random state for all.

    Args:
        prompts: token ids, `[seq]` or `[1, seq]`; taken one by one, as there is room.
        at_once: most texts that are written at the same time.
        progress: show a bar.
        return_exceptions: yield the error of a text that fails in its place, and go on with the others; otherwise it
            is raised, and the others end.
        kwargs: for `generate()`.

    Raises:
        ConfigurationError: a prompt isn't token ids, or `at_once` isn't positive.
    """
    if at_once < 1:
        raise ConfigurationError(f"at_once must be positive, not {at_once}")
    stop = _Stop()
    criteria = StoppingCriteriaList([*(kwargs.pop("stopping_criteria", None) or ()), stop])
    generate = partial(model.generate, stopping_criteria=criteria, **kwargs)
    texts = (partial(generate, _as_ids(model, prompt)) for prompt in prompts)
    size = len(prompts) if isinstance(prompts, Sequence | Tensor) else None
    bar = partial(tqdm, total=size, disable=not progress, unit="text")
    return _as_they_end(texts, at_once, bar, stop, return_exceptions=return_exceptions)


def _as_ids(model: Any, prompt: Tensor | Sequence[int]) -> Tensor:
    try:
        ids = torch.as_tensor(prompt)
    except (TypeError, ValueError, RuntimeError):
        ids = torch.empty(0)
    if ids.ndim == 1:
        ids = ids[None]
    if ids.ndim != 2 or len(ids) != 1 or ids.is_floating_point() or not ids.numel():
        raise ConfigurationError(
            'a prompt must be token ids, [seq] or [1, seq]: give tokenizer(text, return_tensors="pt").input_ids'
        )
    return ids.to(model.device, copy=True)  # the caller may fill the same tensor with the next prompt


def _as_they_end(
    texts: Iterator[Callable[[], Any]], at_once: int, show: Callable[[], Any], stop: _Stop, *, return_exceptions: bool
) -> Iterator[tuple[int, Any]]:
    """Yield (index of the text, its output), in the order in which they end."""
    numbered = enumerate(texts)

    def begin(count: int) -> dict[Future[Any], int]:
        return {pool.submit(write): index for index, write in itertools.islice(numbered, count)}

    with ThreadPoolExecutor(at_once, thread_name_prefix="swarmllm-many") as pool, show() as bar:
        try:
            running = begin(at_once)
            while running:
                ended = wait(running, return_when=FIRST_COMPLETED).done
                found = [(running.pop(future), future) for future in ended]
                running |= begin(len(found))
                for index, future in found:
                    bar.update()
                    error = future.exception()
                    if error is not None and not return_exceptions:
                        raise error
                    yield index, future.result() if error is None else error
        finally:  # also if the caller takes no more
            stop.wanted.set()
            pool.shutdown(wait=False, cancel_futures=True)
