"""Answers that follow a JSON schema, a regular expression or a grammar: which tokens may come next, from llguidance.

Used by `sampling`. A constraint comes from outside: it is compiled by a library that bounds the work, and
refused with its reason if that fails.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, Self

import torch
from torch import Tensor

from swarmllm.errors import ConfigurationError

ANY_OBJECT: dict[str, Any] = {"type": "object"}
"""The schema of `response_format: {"type": "json_object"}`."""


LAYOUT: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""Where spaces may stand, because where they may stand anywhere small models write nothing else any more."""


@dataclass(frozen=True)
class Constraint:
    """What answers must look like."""

    field: str
    """The field of the request that says so."""
    kind: Literal["json", "regex", "lark"]
    text: str

    @classmethod
    def json(cls, field: str, schema: dict[str, Any] | str) -> Self:
        """`schema` may be its text."""
        return cls(field, "json", schema if isinstance(schema, str) else json.dumps(schema))

    @classmethod
    def choice(cls, field: str, choices: Sequence[str]) -> Self:
        """One of these texts."""
        return cls(field, "lark", f"start: {' | '.join(map(json.dumps, choices))}")


class Grammars:
    """Makes one `GrammarMatcher` per answer; keeps the tokenizer's tables."""

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
        """For one answer.

        Raises:
            ConfigurationError: the constraint can't be used.
        """
        import llguidance

        grammar = self._compiled(constraint)
        return GrammarMatcher(constraint.field, llguidance.LLMatcher(self._tokenizer, grammar, log_level=0))


class GrammarMatcher:
    """Where one answer stands in its grammar."""

    def __init__(self, field: str, matcher: Any) -> None:
        self._field, self._matcher = field, matcher

    def allowed(self) -> Tensor:
        """`[vocabulary]` of bool: the tokens that may come next; when the text is complete, the end of text."""
        bias = self._matcher.compute_logit_bias()
        if self._matcher.is_error():
            raise ConfigurationError(f"{self._field}: {self._matcher.get_error()}")
        return torch.frombuffer(bytearray(bias), dtype=torch.uint8) != 0

    def take(self, token: int) -> None:
        """Go on behind that token, which has been chosen."""
        self._matcher.consume_token(token)
