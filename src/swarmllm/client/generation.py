"""Further ways of `generate()`: mixins of the distributed model.

`MoreDecoding` adds the ways to choose tokens in `decoding/`. Their fields are given like transformers' own, to
`generate()` or in a GenerationConfig.

`ManyPrompts` writes many texts at once. Each has a session of its own, so servers compute them together, and a text
that ends makes room for the next one. Inferflow and EnergonAI have the same as queries that are added and waited for,
and as remote references.
"""

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import PreTrainedModel, StoppingCriteria, StoppingCriteriaList
from transformers.generation.logits_process import LogitNormalization

from swarmllm.decoding.options import ADDED, DECODING_TOKENIZER, DecodingOptions
from swarmllm.decoding.processors import processors_before, processors_behind
from swarmllm.decoding.text_so_far import padding_lengths, tokens_with
from swarmllm.errors import ConfigurationError

AT_ONCE = 16
"""Texts that are written at the same time. Assumed: as many as a few servers compute together without long waits."""


class MoreDecoding(PreTrainedModel if TYPE_CHECKING else object):  # type: ignore[misc]
    """Mixed into the distributed model."""

    def generate(self, inputs: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        """transformers' `generate()`, which also takes the fields of `DecodingOptions`."""
        if kwargs.get("tokenizer") is not None:
            kwargs[DECODING_TOKENIZER] = kwargs["tokenizer"]
        return super().generate(inputs, *args, **kwargs)

    def _prepare_generation_config(self, generation_config: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """transformers': the config of this call and what is for the model. Refuses values that won't do."""
        added = {name: kwargs.pop(name) for name in ADDED if name in kwargs}
        tokenizer = kwargs.pop(DECODING_TOKENIZER, None)
        config, model_kwargs = super()._prepare_generation_config(generation_config, **kwargs)
        for name, value in added.items():
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
        return config, model_kwargs

    def _get_logits_processor(
        self,
        generation_config: Any,
        input_ids_seq_length: int | None = None,
        encoder_input_ids: Any = None,
        prefix_allowed_tokens_fn: Any = None,
        logits_processor: Any = None,
        device: Any = None,
        model_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """transformers' processors and those that it lacks: behind the caller's own, and behind all but the last."""
        options, start = _added_options(generation_config), input_ids_seq_length or 0
        mask = (model_kwargs or {}).get(
            "decoder_attention_mask" if self.config.is_encoder_decoder else "attention_mask"
        )
        before = processors_before(
            options,
            start=start,
            breakers=getattr(generation_config, "_dry_breakers", frozenset()),
            padding=padding_lengths(mask),
        )
        found = super()._get_logits_processor(
            generation_config,
            input_ids_seq_length,
            encoder_input_ids,
            prefix_allowed_tokens_fn,
            [*(logits_processor or ()), *before],
            device,
            model_kwargs,
            **kwargs,
        )
        last = len(found) - 1 if found and isinstance(found[-1], LogitNormalization) else len(found)
        found[last:last] = processors_behind(options, start=start)
        return found


def _added_options(config: Any) -> DecodingOptions:
    """What a GenerationConfig says about ways that transformers lacks."""
    names = (one.name for one in fields(DecodingOptions) if one.name in ADDED)
    return DecodingOptions(**{name: getattr(config, name, None) for name in names})


class _Stop(StoppingCriteria):
    """Ends texts that nobody wants any more."""

    def __init__(self) -> None:
        self.wanted = threading.Event()

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
        return torch.full((len(input_ids),), self.wanted.is_set(), device=input_ids.device)


class Submitted:
    """Texts that somebody will ask for, and the threads that write them, which go when there are none."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num = 0
        self._pool: ThreadPoolExecutor | None = None

    def add(self, write: Callable[[], Any]) -> "Future[Any]":
        """Have it written when it is its turn."""
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


class ManyPrompts:
    """`generate()` for more than one text at a time; what each gets is what `generate()` alone gives it."""

    submitted: Submitted

    def submit(self, inputs: Tensor | Sequence[int], **kwargs: Any) -> "Future[Any]":
        """Begin `generate(inputs, **kwargs)` beside whatever else is going on; `.result()` waits for what it returns.

        16 texts are written at a time; those that are submitted later wait for their turn.
        """
        return self.submitted.add(partial(self.generate, self._as_ids(inputs), **kwargs))  # type: ignore[attr-defined]

    def generate_many(
        self,
        prompts: Iterable[Tensor | Sequence[int]],
        *,
        at_once: int = AT_ONCE,
        progress: bool = False,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> Iterator[tuple[int, Any]]:
        """Write on from each prompt; yields (its index, what `generate()` returns) in the order in which they end.

        Sampled texts depend on what is computed at the same time, since torch has one random state for all.

        Args:
            prompts: token ids, `[seq]` or `[1, seq]`; taken one by one, as there is room.
            at_once: most texts that are written at the same time.
            progress: show a bar.
            return_exceptions: yield the error of a text that fails in its place, and go on with the others;
                otherwise it is raised, and the others end.
            kwargs: for `generate()`.

        Raises:
            ConfigurationError: a prompt isn't token ids, or `at_once` isn't positive.
        """
        if at_once < 1:
            raise ConfigurationError(f"at_once must be positive, not {at_once}")
        stop = _Stop()
        criteria = StoppingCriteriaList([*(kwargs.pop("stopping_criteria", None) or ()), stop])
        generate = partial(self.generate, stopping_criteria=criteria, **kwargs)  # type: ignore[attr-defined]
        texts = (partial(generate, self._as_ids(prompt)) for prompt in prompts)
        size = len(prompts) if isinstance(prompts, Sequence | Tensor) else None
        bar = partial(tqdm, total=size, disable=not progress, unit="text")
        return _as_they_end(texts, at_once, bar, stop, return_exceptions=return_exceptions)

    def _as_ids(self, prompt: Tensor | Sequence[int]) -> Tensor:
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
        return ids.to(self.device)  # type: ignore[attr-defined]


def _as_they_end(
    texts: Iterator[Callable[[], Any]], at_once: int, show: Callable[[], Any], stop: _Stop, *, return_exceptions: bool
) -> Iterator[tuple[int, Any]]:
    """(Its place among the texts, what writing it returned), one by one."""
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
        finally:  # also if nobody wants the rest
            stop.wanted.set()
            pool.shutdown(wait=False, cancel_futures=True)
