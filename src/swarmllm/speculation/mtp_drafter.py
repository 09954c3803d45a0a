"""Guesses by a head for multi-token prediction, which sees the model's own last hidden states.

A head takes pairs: the hidden state of a position, and the token after it. Its first guess follows the last pair of the
text. Each further one follows the pair of its own output and its own guess, as in EAGLE (Li et al. 2024): what a head
was not trained for, but mostly can. As soon as the model's hidden states of what was guessed are known, they take the
place of the head's own, and what is still under way is gone through again with them.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor

from swarmllm.models.architecture import decoder_stack

MTP_KIND, DEEPEST = -3, 12
"""Kind of the guess that follows the last known hidden state; deeper ones count down from it, to this depth."""
MTP_PRIOR = 0.7
"""Assumed acceptance. DeepSeek-V3 reports 0.85 to 0.9 for the first guess; deeper ones are worse."""
MAX_CONTEXT = 1024
"""Assumed: pairs of a prompt, from its end back, that the head is shown. More would delay the first token."""


_hooking = threading.Lock()
_following: ContextVar[tuple[Any, list[Tensor]] | None] = ContextVar("swarmllm_following", default=None)
"""Of the text that this thread or task generates: whose forwards are seen, and where what they show goes."""


def note_states(stack: Any, _inputs: Any, outputs: Any) -> None:
    """A forward hook of the stack, for the text that this thread generates."""
    followed = _following.get()
    if followed is not None and followed[0] is stack:
        followed[1].extend(outputs[0][0].detach())


class PairCache(Protocol):
    """Pairs that a head has seen."""

    @property
    def position(self) -> int:
        """How many."""
        ...

    def rollback(self, position: int) -> None:
        """Forget those from there on."""
        ...


class Head(Protocol):
    """As `client/speculative_generation` has it."""

    def new_cache(self) -> PairCache: ...

    def states(self, tokens: list[int], hidden: Tensor, cache: Any) -> Tensor: ...

    def best(self, state: Tensor) -> int: ...


class MtpDrafter:
    """One text's guesses."""

    name = "mtp"

    def __init__(self, find_head: Callable[[], Head | None]) -> None:
        """`find_head` is called when a guess is wanted for the first time; None: there is no head, and no guess."""
        self._find_head = find_head
        self._head: Head | None = None
        self._cache: PairCache | None = None
        self._tokens: list[int] = []
        self._hidden: list[Tensor] = []
        """Of the positions before the last token, as far back as they are known; each `[hidden]`. What the cache has
        been fed is dropped, but for its place."""
        self._seen: list[Tensor] = []
        """Of positions that were computed since the text went on; those behind its end are of wrong guesses."""
        self._num_fed = self._num_ahead = 0
        """Pairs of the text that the cache has, and of guesses behind them."""
        self._state: Tensor | None = None
        """The head's output for the last pair of the text that it was fed."""
        self._state_ahead: Tensor | None = None
        """That for the last pair of all; None: no guess has been fed."""
        self._began_at = 0
        self._guesses: list[int] = []

    @contextmanager
    def following(self, model: Any) -> Iterator[None]:
        """Within, the hidden states of the model's forwards in this thread are seen."""
        stack = decoder_stack(model)
        with _hooking:
            if note_states not in stack._forward_hooks.values():  # for good: other threads may be in its forward now
                stack.register_forward_hook(note_states)
        before = _following.set((stack, self._seen))
        try:
            yield
        finally:
            _following.reset(before)

    def extend(self, tokens: Sequence[int]) -> None:
        self._tokens.extend(tokens)
        known = self._seen[: len(tokens)]
        self._hidden.extend(known)
        self._seen.clear()
        if not self._num_fed:
            del self._hidden[:-MAX_CONTEXT]

    def begin(self) -> bool:
        self._guesses, self._began_at = [], len(self._tokens)
        self._forget_ahead()
        if self._head is None and (head := self._find_head()) is not None:
            self._head, self._cache = head, head.new_cache()
        return self._head is not None and (bool(self._hidden) or self._state is not None)

    def more(self, count: int) -> list[int]:
        """Beyond the guesses since `begin`, of which the text may have some already."""
        first, head = len(self._guesses), self._head
        assert head is not None  # `begin` has said so
        if self._hidden:
            self._catch_up(head)
        confirmed = len(self._tokens) - self._began_at
        for _ in range(count):
            for token in self._guesses[confirmed + self._num_ahead :]:
                self._state_ahead = head.states([token], self._last_state[None], self._cache)[-1]
                self._num_ahead += 1
            self._guesses.append(head.best(self._last_state))
        return self._guesses[first:]

    def kinds(self, count: int) -> list[tuple[int, float]]:
        ahead = len(self._guesses) - (len(self._tokens) - self._began_at)
        return [(MTP_KIND - min(depth, DEEPEST), MTP_PRIOR) for depth in range(ahead, ahead + count)]

    @property
    def _last_state(self) -> Tensor:
        state = self._state if self._state_ahead is None else self._state_ahead
        assert state is not None  # `begin` has said so
        return state

    def _catch_up(self, head: Head) -> None:
        """Feed the pairs of the text whose hidden states have become known, in place of guesses."""
        self._forget_ahead()
        tokens = self._tokens[-len(self._hidden) :]
        self._state = head.states(tokens, torch.stack(self._hidden), self._cache)[-1]
        self._num_fed += len(self._hidden)
        self._hidden.clear()

    def _forget_ahead(self) -> None:
        if self._num_ahead and self._cache is not None:
            self._cache.rollback(self._num_fed)
        self._num_ahead, self._state_ahead = 0, None
