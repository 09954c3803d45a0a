"""Answers that follow a JSON schema: which tokens may come next, from the llguidance library.

Used by `gateway/sampling`. A schema comes from outside: it is compiled by a library that bounds the work, and refused
with its reason if that fails.
"""

import json
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from swarmllm.errors import ConfigurationError

ANY_OBJECT: dict[str, Any] = {"type": "object"}
"""The schema of `response_format: {"type": "json_object"}`."""


LAYOUT: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""Where spaces may stand, because where they may stand anywhere small models write nothing else any more."""


class JsonGrammar:
    """Makes one `JsonMatcher` per answer; keeps the tokenizer's tables."""

    def __init__(self, tokenizer: Any, num_scores: int) -> None:
        """`num_scores`: the width of the model's logits.

        Raises:
            ConfigurationError: this kind of tokenizer can't be used.
        """
        import llguidance.hf

        try:
            self._tokenizer = llguidance.hf.from_tokenizer(tokenizer, n_vocab=num_scores)
        except (ValueError, TypeError, AttributeError) as error:
            raise ConfigurationError(f"response_format can't be used with this model's tokenizer: {error}") from None

    @lru_cache(maxsize=64)  # noqa: B019  as long as the gateway
    def _compiled(self, schema: str) -> str:
        import llguidance

        try:
            grammar = llguidance.LLMatcher.grammar_from_json_schema(schema, overrides=LAYOUT)
            failure = llguidance.LLMatcher.validate_grammar(grammar, self._tokenizer)
        except ValueError as error:
            failure = str(error)
        if failure:
            raise ConfigurationError(f"response_format: the JSON schema can't be used: {failure}")
        return str(grammar)

    def matcher(self, schema: dict[str, Any]) -> "JsonMatcher":
        """For one answer.

        Raises:
            ConfigurationError: the schema can't be used.
        """
        import llguidance

        grammar = self._compiled(json.dumps(schema))
        return JsonMatcher(llguidance.LLMatcher(self._tokenizer, grammar, log_level=0))


class JsonMatcher:
    """Where one answer stands in its grammar."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def allowed(self) -> Tensor:
        """`[vocabulary]` of bool: the tokens that may come next; when the JSON is complete, the end of text."""
        bias = self._matcher.compute_logit_bias()
        if self._matcher.is_error():
            raise ConfigurationError(f"response_format: {self._matcher.get_error()}")
        return torch.frombuffer(bytearray(bias), dtype=torch.uint8) != 0

    def take(self, token: int) -> None:
        """Go on behind that token, which has been chosen."""
        self._matcher.consume_token(token)
