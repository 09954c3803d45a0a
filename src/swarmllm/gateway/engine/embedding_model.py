"""A model that gives embeddings: its client in the swarm, its tokenizer, and what it makes of hidden states.

Made by `model_choice`, asked by `embedding_routes`.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from swarmllm.client.text_generation import open_model
from swarmllm.config import ClientModelConfig
from swarmllm.gateway.engine.embedding_recipe import EmbeddingRecipe
from swarmllm.gateway.engine.offered_model import OfferedModel, shortest
from swarmllm.models.architecture import decoder_stack, text_config
from swarmllm.models.positions import max_positions

BATCH_TOKENS = 8192
"""Positions of one forward, padding included, whose hidden states are in memory at a time: 128 MB of size 4096."""


class EmbeddingModel(OfferedModel):
    """One model for all requests; any thread may call it."""

    def __init__(
        self, swarm: Any, tokenizer: Any, recipe: EmbeddingRecipe, *, name: str, max_length: int | None
    ) -> None:
        known = (recipe.max_length, max_positions(decoder_stack(swarm)), tokenizer.model_max_length)
        super().__init__(swarm, tokenizer, name=name, max_length=shortest(max_length, *known))
        self.recipe = recipe
        self.size: int = text_config(swarm.config).hidden_size * len(recipe.pooling)
        """Numbers of an embedding."""
        takes = inspect.signature(decoder_stack(swarm).forward).parameters
        self._options = {"use_cache": False} if "use_cache" in takes else {}
        self._pad_id = tokenizer.pad_token_id or 0

    @classmethod
    def open(
        cls, config: ClientModelConfig, recipe: EmbeddingRecipe, *, name: str | None, max_length: int | None
    ) -> Self:
        """Join the swarm and load what the gateway needs itself.

        Raises:
            SwarmError: the swarm or the checkpoint can't be used.
        """
        swarm, tokenizer = open_model(config, features=True)
        try:
            return cls(swarm, tokenizer, recipe, name=name or swarm.swarm.model_name, max_length=max_length)
        except BaseException:
            swarm.close()
            raise

    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """Token ids of a text as it is embedded, its prompt included."""
        text = self.recipe.prompt + text
        return super().encode(text.lower() if self.recipe.lowercase else text, special_tokens=special_tokens)

    def cut(self, ids: list[int], length: int) -> list[int]:
        """The begin of a text, with the special tokens that end it."""
        if len(ids) <= length:
            return ids
        empty = super().encode("")  # what is put around any text
        num_after = 0
        while num_after < min(len(empty), length) and empty[-1 - num_after] == ids[-1 - num_after]:
            num_after += 1
        return ids[: length - num_after] + ids[len(ids) - num_after :]

    @torch.no_grad()
    def embed(
        self, rows: Sequence[list[int]], dimensions: int | None, go_on: Callable[[], None] = lambda: None
    ) -> Tensor:
        """Token ids of texts → their embeddings `[texts, size]`; `go_on` is asked before each batch of them.

        Raises:
            SwarmError: the swarm fails.
        """
        found: dict[int, Tensor] = {}
        for places in batches([len(ids) for ids in rows]):
            go_on()
            longest = max(len(rows[place]) for place in places)
            ids = torch.full((len(places), longest), self._pad_id)
            mask = torch.zeros_like(ids)
            for number, place in enumerate(places):
                ids[number, : len(rows[place])] = torch.tensor(rows[place])
                mask[number, : len(rows[place])] = 1
            ids, mask = ids.to(self.swarm.device), mask.to(self.swarm.device)
            hidden = self.swarm(input_ids=ids, attention_mask=mask, **self._options).last_hidden_state
            found |= dict(zip(places, self.recipe.embed(hidden, mask, dimensions), strict=True))
        return torch.stack([found[place] for place in range(len(rows))])


def batches(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Places of texts that are computed together: those of nearly the same length."""
    batch: list[int] = []
    for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        if batch and (len(batch) + 1) * lengths[batch[0]] > BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(place)
    yield batch
