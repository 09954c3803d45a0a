"""What all models of a gateway have: a name, a client in the swarm, a tokenizer. A part of `language_model` and
`embedding_model`."""

from collections.abc import Sequence
from typing import Any

from swarmllm.api import LocalFallback

UNKNOWN_LENGTH = 8192
"""Tokens of a model that doesn't say how many it takes. Assumed."""


def shortest(*lengths: int | None) -> int:
    """The least of these that are known."""
    return min((one for one in lengths if one), default=UNKNOWN_LENGTH)


class OfferedModel:
    """A model that requests can name."""

    local: LocalFallback | None = None
    """A model on this machine that goes on when the swarm can't, or None."""

    def __init__(self, swarm: Any, tokenizer: Any, *, name: str, max_length: int) -> None:
        self.swarm = swarm
        """The distributed model."""
        self.tokenizer = tokenizer
        self.name = name
        """In the API."""
        self.fingerprint = swarm.swarm.fingerprint
        self._longest = max_length
        self.num_scores: int = swarm.get_input_embeddings().weight.shape[0]
        """Tokens that it has, those for padding of its tables included."""

    @property
    def max_length(self) -> int:
        """Most tokens of a text; of a prompt and its answer together."""
        return self._longest

    def about(self) -> dict[str, Any]:
        """Facts for people who look at its swarm."""
        return {
            "architecture": next(iter(self.swarm.config.architectures or ()), self.swarm.config.model_type),
            "parameters": self.swarm.num_parameters(),
            "context_tokens": self.max_length,
        }

    def close(self) -> None:
        """Leave the swarm."""
        self.swarm.close()

    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt, with whatever the tokenizer puts before it."""
        return list(self.tokenizer(text, add_special_tokens=special_tokens).input_ids)

    def decode(self, ids: Sequence[int], *, special_tokens: bool = False) -> str:
        """Text of tokens, special ones left out."""
        return str(
            self.tokenizer.decode(ids, skip_special_tokens=not special_tokens, clean_up_tokenization_spaces=False)
        )

    def token_text(self, token_id: int) -> str:
        """One token as text, special ones by name."""
        return str(self.tokenizer.decode([token_id], clean_up_tokenization_spaces=False))
