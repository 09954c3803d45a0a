"""Chooses tokens, so that a seed gives the same text whatever else the process computes at the same time.

transformers samples with torch's one global random generator. Here `generate()` is greedy, and its last logits
processor is a `Sampler` with random generators of its own: it chooses a token and gives all others no chance.
(`generate()` itself takes the likeliest token if that is wanted.) `engine/generation` makes a sampler for each request.

Answers may have to follow a JSON schema, a regular expression or a grammar: then llguidance says which tokens may come
next (`Grammars`). Strangers send these constraints; llguidance limits the work, and a constraint that can't be compiled
is refused with the reason.
"""

import json
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, Self

import torch
from torch import Tensor
from transformers import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopHLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from swarmllm.api import ConfigurationError, DecodingOptions, processors_before, processors_behind

SAMPLING_NAMES = ("temperature", "top_p", "top_k", "top_h", "repetition_penalty")
"""Options that a checkpoint may have preferences for, besides those of `DecodingOptions`."""

ANY_OBJECT: dict[str, Any] = {"type": "object"}
"""The schema of `response_format: {"type": "json_object"}`."""


LAYOUT: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""Places for spaces in JSON. If spaces were allowed everywhere, small models would write nothing else."""


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How tokens are chosen; fields as in the API."""

    seed: int
    temperature: float = 1.0
    """0 = the likeliest token."""
    top_p: float = 1.0
    top_k: int = 0
    """0 = all."""
    top_h: float | None = None
    """Share of the distribution's entropy that the kept tokens have. Nguyen et al. 2025."""
    decoding: DecodingOptions = field(default_factory=DecodingOptions)
    repetition_penalty: float = 1.0
    """Divides the scores of tokens that occur in the prompt or the answer (multiplies scores below 0)."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    top_logprobs: int | None = None
    """Number of likeliest tokens to name; None = no log probabilities at all."""


@dataclass(frozen=True)
class TokenLogprob:
    """The model's own probability of one token, before sampling options change it."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    """The likeliest tokens at this place."""
    spelled: Mapping[int, bytes | None] = field(default_factory=dict)
    """Bytes that each of these tokens adds to the text; None: a special token, which adds none."""
    offset: int = 0
    """Place in the returned text where the token begins, or where the character begins that it continues."""


class Sampler:
    """The last logits processor for transformers: takes `[rows, vocabulary]` scores, and changes them in place.

    The chosen token has the highest score afterwards. Each operation of torch releases the interpreter lock, and gets
    it back late if many requests run: so there are only as many operations as the options need.
    """

    def __init__(
        self,
        options: SamplingOptions,
        num_rows: int,
        matchers: "Sequence[GrammarMatcher]" = (),
        not_yet: "NotYet | None" = None,
        *,
        start: int = 0,
        breakers: Collection[int] = (),
    ) -> None:
        """`start`: length of the prompt. `breakers`: tokens that end a repetition for DRY."""
        self._options = options
        self._matchers = matchers
        self._generators = [torch.Generator().manual_seed(_row_seed(options.seed, row)) for row in range(num_rows)]
        self._counts: list[Counter[int]] = [Counter() for _ in range(num_rows)]
        # each row has its own: some remember what they did
        self._processors = [
            processors_before(options.decoding, start=start, breakers=breakers, generator=generator)
            for generator in self._generators
        ]
        self._warpers = [
            [*_warpers(options), *processors_behind(options.decoding, start=start, generator=generator)]
            for generator in self._generators
        ]
        self._not_yet = not_yet
        self._repetition = None
        if options.repetition_penalty != 1:
            self._repetition = RepetitionPenaltyLogitsProcessor(options.repetition_penalty)
        self._bias = _Changes.of(options.logit_bias) if options.logit_bias else None
        by_row = self._penalizes or bool(matchers) or options.top_logprobs is not None or any(self._processors)
        self._chooses = options.temperature > 0 or by_row
        """More is to be done than taking the likeliest token, which `generate()` does itself."""
        self.logprobs: list[TokenLogprob | None] = [None] * num_rows
        """Log probabilities of the tokens chosen last."""
        self.finished = [False] * num_rows
        """Rows that need no token any more; the caller sets them."""

    @property
    def _penalizes(self) -> bool:
        return bool(self._options.presence_penalty or self._options.frequency_penalty)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.float()
        given = scores.clone() if self._options.top_logprobs is not None else scores
        if self._repetition is not None:
            scores = self._repetition(input_ids, scores)
        if self._bias is not None:
            self._bias.add_to(scores)
        if self._not_yet is not None:
            self._not_yet.hide(scores, input_ids.shape[1])
        if not self._chooses:
            return scores
        chosen = {}
        for row, finished in enumerate(self.finished):
            if not finished:
                chosen[row] = token = self._choose(row, scores[row], input_ids[row : row + 1])
                if self._options.top_logprobs is not None:
                    self.logprobs[row] = token_logprob(given[row], token, self._options.top_logprobs)
        scores.fill_(-torch.inf)
        for row, token in chosen.items():
            scores[row, token] = 0.0
        return scores

    def _choose(self, row: int, scores: Tensor, ids: Tensor) -> int:
        if self._penalizes and self._counts[row]:
            _Changes.of({token: self._penalty(count) for token, count in self._counts[row].items()}).add_to(
                scores[None]
            )
        if self._matchers:
            allowed = self._matchers[row].allowed()[: len(scores)].to(scores.device)
            scores = scores.masked_fill(~allowed, -torch.inf)
        for process in self._processors[row]:
            scores = process(ids, scores[None])[0]
        if self._options.temperature == 0:
            token = int(scores.argmax())
        else:
            warped = scores[None]
            for warp in self._warpers[row]:
                warped = warp(ids, warped)
            token = int(torch.multinomial(warped[0].softmax(-1).cpu(), 1, generator=self._generators[row]))
        if self._penalizes:
            self._counts[row][token] += 1
        if self._matchers:
            self._matchers[row].take(token)
        return token

    def _penalty(self, count: int) -> float:
        return -self._options.presence_penalty - count * self._options.frequency_penalty


@dataclass
class NotYet:
    """Tokens that may not come before the text has a length."""

    token_ids: list[int]
    length: int

    def hide(self, scores: Tensor, length: int) -> None:
        """Give them no chance in `[rows, vocabulary]`, if the text has fewer than `self.length` tokens."""
        if length < self.length:
            scores[:, self.token_ids] = -torch.inf


@dataclass
class _Changes:
    """Additions to the scores of some tokens."""

    token_ids: Tensor
    values: Tensor

    @classmethod
    def of(cls, by_token: Mapping[int, float]) -> Self:
        return cls(torch.tensor(list(by_token)), torch.tensor(list(by_token.values()), dtype=torch.float32))

    def add_to(self, scores: Tensor) -> None:
        """Add them to every row of `[rows, vocabulary]`."""
        if self.values.device != scores.device:
            self.token_ids, self.values = self.token_ids.to(scores.device), self.values.to(scores.device)
        scores.index_add_(1, self.token_ids, self.values.expand(len(scores), -1))


def token_logprob(scores: Tensor, token: int, num_top: int) -> TokenLogprob:
    """The log probability of `token`, given the scores `[vocabulary]`."""
    logprobs = scores.float().log_softmax(-1)
    values, ids = logprobs.topk(min(num_top, len(logprobs)))
    top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return TokenLogprob(token, float(logprobs[token]), top)


def _row_seed(seed: int, row: int) -> int:
    """A seed far from those of other rows, and of the next seeds, because users count seeds up."""
    return (seed + row * 0x5851F42D4C957F2D) % (1 << 63)


def _warpers(options: SamplingOptions) -> list[Callable[[Tensor, Tensor], Any]]:
    """The warpers, in transformers' order."""
    warpers: list[Callable[[Tensor, Tensor], Any]] = []
    if options.temperature not in (0, 1):
        warpers.append(TemperatureLogitsWarper(options.temperature))
    if options.top_h is not None:
        warpers.append(TopHLogitsWarper(options.top_h))
    if options.top_k > 0:
        warpers.append(TopKLogitsWarper(options.top_k))
    if options.top_p < 1:
        warpers.append(TopPLogitsWarper(options.top_p))
    ways, value = options.decoding, options.decoding.resolved()
    if ways.is_on("min_p"):
        warpers.append(MinPLogitsWarper(value["min_p"]))
    if ways.is_on("typical_p"):
        warpers.append(TypicalLogitsWarper(value["typical_p"]))
    if ways.is_on("epsilon_cutoff"):
        warpers.append(EpsilonLogitsWarper(value["epsilon_cutoff"]))
    if ways.is_on("eta_cutoff"):
        warpers.append(EtaLogitsWarper(value["eta_cutoff"]))
    return warpers


@dataclass(frozen=True)
class Constraint:
    """A form that answers must have."""

    field: str
    """The field of the request that asks for it."""
    kind: Literal["json", "regex", "lark"]
    text: str

    @classmethod
    def json(cls, field: str, schema: dict[str, Any] | str) -> Self:
        """`schema` may also be JSON text."""
        return cls(field, "json", schema if isinstance(schema, str) else json.dumps(schema))

    @classmethod
    def choice(cls, field: str, choices: Sequence[str]) -> Self:
        """The answer is one of these texts."""
        return cls(field, "lark", f"start: {' | '.join(map(json.dumps, choices))}")


class Grammars:
    """Makes a `GrammarMatcher` for each answer; keeps the tokenizer's tables."""

    def __init__(self, tokenizer: Any, num_scores: int) -> None:
        """`num_scores`: the width of the model's logits.

        Raises:
            ConfigurationError: this kind of tokenizer can't be used.
        """
        import llguidance.hf

        try:
            self._tokenizer = llguidance.hf.from_tokenizer(tokenizer, n_vocab=num_scores)
        except (ValueError, TypeError, AttributeError) as error:
            raise ConfigurationError(f"constraints can't be used with this model's tokenizer: {error}") from None

    @lru_cache(maxsize=64)  # noqa: B019  as long as the gateway
    def _compiled(self, constraint: Constraint) -> str:
        import llguidance

        try:
            if constraint.kind == "json":
                grammar = llguidance.LLMatcher.grammar_from_json_schema(constraint.text, overrides=LAYOUT)
            elif constraint.kind == "regex":
                grammar = llguidance.LLMatcher.grammar_from_regex(constraint.text)
            else:
                grammar = llguidance.LLMatcher.grammar_from_lark(constraint.text)
            failure = llguidance.LLMatcher.validate_grammar(grammar, self._tokenizer)
        except ValueError as error:
            failure = str(error)
        if failure:
            what = {"json": "JSON schema", "regex": "regular expression", "lark": "grammar"}[constraint.kind]
            raise ConfigurationError(f"{constraint.field}: the {what} can't be used: {failure}")
        return str(grammar)

    def matcher(self, constraint: Constraint) -> "GrammarMatcher":
        """A matcher for one answer.

        Raises:
            ConfigurationError: the constraint can't be used.
        """
        import llguidance

        grammar = self._compiled(constraint)
        return GrammarMatcher(constraint.field, llguidance.LLMatcher(self._tokenizer, grammar, log_level=0))


class GrammarMatcher:
    """The state of one answer in its grammar."""

    def __init__(self, field: str, matcher: Any) -> None:
        self._field, self._matcher = field, matcher

    def allowed(self) -> Tensor:
        """`[vocabulary]` of bool: tokens that may come next. After a complete text, that is the end of text."""
        bias = self._matcher.compute_logit_bias()
        if self._matcher.is_error():
            raise ConfigurationError(f"{self._field}: {self._matcher.get_error()}")
        return torch.frombuffer(bytearray(bias), dtype=torch.uint8) != 0

    def take(self, token: int) -> None:
        """Go on after the chosen token."""
        self._matcher.consume_token(token)
