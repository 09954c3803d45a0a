"""Guesses of the next tokens: by n-grams of the text so far, by a small model, or by a head of the model's own.

A drafter follows the text (`extend`), begins a guess at its end (`begin`), and continues it on request (`more`), as if
its own guesses were right. Guesses are certain, not drawn: so they are easy to check against any distribution (see
`speculation/sampling_loop`). Each guess has a kind, by which `speculation/planner` measures acceptance.

A head for multi-token prediction (`MtpDrafter`) takes pairs: the hidden state of a position, and the token after it.
Its first guess follows the last pair of the text. Each further one follows the pair of its own output and its own
guess, as in EAGLE (Li et al. 2024): heads were not trained for this, but mostly can. When the model's hidden states of
guessed positions become known, they replace the head's own, and guesses still under way are computed again with them.

`BestDrafter` chooses one of several drafters whenever a guess begins. `speculation/planner` says which is fastest, from
the acceptance of each kind of guess and its cost. So n-grams guess where the text repeats itself, and elsewhere the
model's own head does.
"""

import math
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from swarmllm.models.architecture import cache_argument, decoder_stack, max_positions
from swarmllm.speculation.planner import Planner

MAX_OCCURRENCES = 16
"""At most this many recent places of a token or pair are compared with the end of the text."""
MAX_MATCH = 32
"""Places are compared back to this many tokens; a longer match says no more."""
GOOD_MATCH = 2
"""A match of this many tokens is trusted more than the continuation of the last copy."""
RESUMED_KIND, MODEL_KIND = -1, -2
"""Kinds of guesses: the first one that resumes a copy after a deviation, and those of a model. Other kinds are the bits
of the length of a match."""
RESUMED_PRIOR = 0.5
"""Assumed acceptance of a guess that resumes a copy."""
MAX_DEVIATIONS = 3
"""Assumed: a copy that was wrong this many times in a row isn't resumed."""
MODEL_PRIOR = 0.6
"""Assumed acceptance of a small model's guesses."""

MTP_KIND, DEEPEST = -3, 12
"""Kind of the guess that follows the last known hidden state; deeper ones count down from it, to this depth."""
MTP_PRIOR = 0.7
"""Assumed acceptance. DeepSeek-V3 reports 0.85 to 0.9 for the first guess; deeper ones are worse."""
MAX_CONTEXT = 1024
"""Assumed: the head is shown this many pairs from the end of a prompt. More would delay the first token."""


_hooking = threading.Lock()
_following: ContextVar[tuple[Any, list[Tensor]] | None] = ContextVar("swarmllm_following", default=None)
"""For the text that this thread or task generates: the module whose forwards are noted, and a list for its outputs."""


class Drafter(Protocol):
    """The guesses for one text."""

    @property
    def name(self) -> str:
        """The name by which its costs are kept."""
        ...

    def following(self, model: Any) -> AbstractContextManager[None]:
        """Within, the drafter may look at the model's forwards; all are of this text."""
        ...

    def extend(self, tokens: Sequence[int]) -> None:
        """Note the next tokens of the text."""
        ...

    def begin(self) -> bool:
        """Begin a guess at the end of the text; False if there is none."""
        ...

    def more(self, count: int) -> list[int]:
        """At most `count` further guesses, after all since `begin`. Fewer: there are no more."""
        ...

    def kinds(self, count: int) -> list[tuple[int, float]]:
        """(kind, assumed acceptance before any of the kind was seen) of the next `count` guesses."""
        ...


class _TextAlone:
    """A drafter that looks at the tokens alone."""

    def following(self, model: Any) -> AbstractContextManager[None]:
        return nullcontext()


class SilentDrafter(_TextAlone):
    """Never guesses: for texts that only measure how far away the swarm is."""

    name = "silent"

    def extend(self, tokens: Sequence[int]) -> None:
        pass

    def begin(self) -> bool:
        return False

    def more(self, count: int) -> list[int]:
        return []

    def kinds(self, count: int) -> list[tuple[int, float]]:
        return []


class NGramDrafter(_TextAlone):
    """Copies the tokens after the place that is most like the end of the text (prompt lookup).

    The longest match counts, and of several the latest. A copy may run into its own guesses, which repeats them. If the
    text deviates from a copy and nothing else matches, the copy is resumed behind the deviation, at the same distance.
    """

    name = "ngram"

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._places: dict[int, list[int]] = defaultdict(list)
        """The indices at which each token stands."""
        self._pairs: dict[tuple[int, int], list[int]] = defaultdict(list)
        """The same for a token and the one before it."""
        self._guesses: list[int] = []
        """All guesses since `begin`; they follow the text as it was then."""
        self._began_at = 0
        self._from = 0
        """Index of the next token to copy, as if the guesses were part of the text."""
        self._match = 0
        """Length of the match before the first guess; 0: the last copy is resumed."""
        self._copying = False
        self._deviations = 0

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            index = len(self._tokens)
            if index:
                self._pairs[self._tokens[-1], token].append(index)
            self._places[token].append(index)
            self._tokens.append(token)

    def begin(self) -> bool:
        if not self._tokens:
            return False
        end = len(self._tokens) - 1
        since = end + 1 - self._began_at
        resumed = self._from - len(self._guesses) + since
        if since:
            guess = self._guesses[:1] or self._tokens[self._from : self._from + 1]  # if it was not asked
            right = self._tokens[self._began_at : self._began_at + 1] == guess
            self._deviations = 0 if right else self._deviations + 1
        self._guesses, self._began_at, self._match = [], end + 1, 0
        places = self._pairs[self._tokens[end - 1], self._tokens[end]] if end else []
        if len(places) < 2:
            places = self._places[self._tokens[end]]
        for place in reversed(places[-MAX_OCCURRENCES - 1 : -1]):
            match = self._match_length(place, end)
            if match > self._match:
                self._match, self._from = match, place + 1
        if self._match < GOOD_MATCH and self._copying and self._deviations < MAX_DEVIATIONS and resumed <= end:
            self._match, self._from = 0, resumed
        else:
            self._copying = self._match > 0
            self._deviations = 0
        return self._copying

    def _match_length(self, place: int, end: int) -> int:
        tokens, length = self._tokens, 1
        most = min(MAX_MATCH, place + 1)
        while length < most and tokens[place - length] == tokens[end - length]:
            length += 1
        return length

    def more(self, count: int) -> list[int]:
        guesses = self._guesses
        first = len(guesses)
        for _ in range(count):
            start, began_at = self._from, self._began_at
            guesses.append(self._tokens[start] if start < began_at else guesses[start - began_at])
            self._from += 1
        return guesses[first:]

    def kinds(self, count: int) -> list[tuple[int, float]]:
        start = self._match + len(self._guesses)
        kinds = [_kind_of_match(match) for match in range(start, start + count)]
        if not start and kinds:
            kinds[0] = RESUMED_KIND, RESUMED_PRIOR
        return kinds


def _kind_of_match(match: int) -> tuple[int, float]:
    """The bits of the length, and the prior. Assumed: a match of m tokens goes on with probability m / (m + 1)."""
    match = min(match, MAX_MATCH)
    return match.bit_length(), match / (match + 1)


class ModelDrafter(_TextAlone):
    """The likeliest tokens of a small model with the same vocabulary."""

    name = "model"

    def __init__(self, model: PreTrainedModel, vocabulary_size: int) -> None:
        self._model = model
        self._vocabulary_size = vocabulary_size
        stack = decoder_stack(model)
        self._cache_name = cache_argument(stack)
        self._most_tokens = max_positions(stack) or math.inf
        self._last_token = len(model.get_input_embeddings().weight) - 1
        """The last one that it knows; the text's model may know a few more."""
        self._cache = DynamicCache(config=model.config)
        self._cache.activate_past_recording()
        self._tokens: list[int] = []
        self._guesses: list[int] = []
        self._began_at = 0
        self._seen: list[int] = []
        """Tokens that the cache has been fed."""

    def extend(self, tokens: Sequence[int]) -> None:
        self._tokens.extend(tokens)

    def begin(self) -> bool:
        self._guesses, self._began_at = [], len(self._tokens)
        same = 0
        for seen, token in zip(self._seen, self._tokens, strict=False):
            if seen != token:
                break
            same += 1
        same = min(same, len(self._tokens) - 1)
        if same < len(self._seen):
            self._cache.crop(same - len(self._seen))
            del self._seen[same:]
        return 0 < len(self._tokens) <= self._most_tokens

    @torch.no_grad()
    def more(self, count: int) -> list[int]:
        first = len(self._guesses)
        for _ in range(count):
            new = (self._tokens[: self._began_at] + self._guesses)[len(self._seen) :]
            if len(self._seen) + len(new) > self._most_tokens:  # it may have no embeddings for further positions
                break
            ids = torch.tensor([new], device=self._model.device).clamp(max=self._last_token)
            logits: Tensor = self._model(ids, **{self._cache_name: self._cache}, use_cache=True).logits
            self._seen += new
            token = int(logits[0, -1].argmax())
            if token >= self._vocabulary_size:  # padding of its own embedding
                break
            self._guesses.append(token)
        return self._guesses[first:]

    def kinds(self, count: int) -> list[tuple[int, float]]:
        return [(MODEL_KIND, MODEL_PRIOR)] * count


def note_states(stack: Any, _inputs: Any, outputs: Any) -> None:
    """A forward hook of the stack: keeps its outputs for the text that this thread generates."""
    followed = _following.get()
    if followed is not None and followed[0] is stack:
        followed[1].extend(outputs[0][0].detach())


class PairCache(Protocol):
    """The pairs that a head has been fed."""

    @property
    def position(self) -> int:
        """The number of pairs."""
        ...

    def rollback(self, position: int) -> None:
        """Forget the pairs from there on."""
        ...


class Head(Protocol):
    """The part of `client/speculative_generation`'s `MtpHead` that is used here."""

    def new_cache(self) -> PairCache: ...

    def states(self, tokens: list[int], hidden: Tensor, cache: Any) -> Tensor: ...

    def best(self, state: Tensor) -> int: ...


class MtpDrafter:
    """The guesses of the checkpoint's own head."""

    name = "mtp"

    def __init__(self, find_head: Callable[[], Head | None]) -> None:
        """`find_head` is called for the first guess; None: there is no head, and no guess."""
        self._find_head = find_head
        self._head: Head | None = None
        self._cache: PairCache | None = None
        self._tokens: list[int] = []
        self._hidden: list[Tensor] = []
        """Hidden states `[hidden]` of the last positions before the last token that the cache has not been fed."""
        self._seen: list[Tensor] = []
        """Hidden states computed since the last `extend`; those behind the end of the text are of wrong guesses."""
        self._num_fed = self._num_ahead = 0
        """Pairs of the text in the cache, and of guesses behind them."""
        self._state: Tensor | None = None
        """The head's output for the last pair of the text."""
        self._state_ahead: Tensor | None = None
        """The head's output for the last pair of all; None: no guess has been fed."""
        self._began_at = 0
        self._guesses: list[int] = []

    @contextmanager
    def following(self, model: Any) -> Iterator[None]:
        """Within, the hidden states of the model's forwards in this thread are kept."""
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
        """Guesses after all since `begin`; the text may contain some of these already."""
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
        """Feed the text's new pairs, in place of guesses."""
        self._forget_ahead()
        tokens = self._tokens[-len(self._hidden) :]
        self._state = head.states(tokens, torch.stack(self._hidden), self._cache)[-1]
        self._num_fed += len(self._hidden)
        self._hidden.clear()

    def _forget_ahead(self) -> None:
        if self._num_ahead and self._cache is not None:
            self._cache.rollback(self._num_fed)
        self._num_ahead, self._state_ahead = 0, None


class BestDrafter:
    """Guesses by the drafter that is expected to be fastest, chosen for each guess."""

    def __init__(self, drafters: Sequence[Drafter], planner: Planner) -> None:
        self._drafters = drafters
        self._planner = planner
        self._chosen = drafters[0]

    @property
    def name(self) -> str:
        return self._chosen.name

    @contextmanager
    def following(self, model: Any) -> Iterator[None]:
        with ExitStack() as stack:
            for drafter in self._drafters:
                stack.enter_context(drafter.following(model))
            yield

    def extend(self, tokens: Sequence[int]) -> None:
        for drafter in self._drafters:
            drafter.extend(tokens)

    def begin(self) -> bool:
        ready = [drafter for drafter in self._drafters if drafter.begin()]
        if ready:
            self._chosen = min(ready, key=self._seconds_per_token)
        return bool(ready)

    def more(self, count: int) -> list[int]:
        return self._chosen.more(count)

    def kinds(self, count: int) -> list[tuple[int, float]]:
        return self._chosen.kinds(count)

    def _seconds_per_token(self, drafter: Drafter) -> float:
        kinds = drafter.kinds(MAX_MATCH + 1)
        return self._planner.seconds_per_token([self._planner.acceptance(*kind) for kind in kinds], drafter.name)
