"""Many prompts at once: a mixin of the distributed model.

Each has a session of its own, so servers compute them together, and a text that ends makes room for the next one.

Inferflow and EnergonAI have the same as queries that are added and waited for, and as remote references.
"""

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import StoppingCriteria, StoppingCriteriaList

from swarmllm.errors import ConfigurationError

AT_ONCE = 16
"""Texts that are written at the same time. Assumed: as many as a few servers compute together without long waits."""


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
