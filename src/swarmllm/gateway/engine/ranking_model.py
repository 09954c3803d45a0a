"""A model that says how well a text fits a query: its client in the swarm and its tokenizer.

Asked by `embedding_routes`. Known elsewhere as a cross-encoder: query and text are read together.
"""

from collections.abc import Callable, Sequence
from typing import Any, Self

import torch

from swarmllm.client.text_generation import open_model
from swarmllm.config import ClientModelConfig
from swarmllm.gateway.engine.embedding_model import batches
from swarmllm.gateway.engine.offered_model import OfferedModel, shortest
from swarmllm.models.architecture import decoder_stack
from swarmllm.models.positions import max_positions


class RankingModel(OfferedModel):
    """One model for all requests; any thread may call it."""

    def __init__(self, swarm: Any, tokenizer: Any, *, name: str, max_length: int | None) -> None:
        known = shortest(max_length, max_positions(decoder_stack(swarm)), tokenizer.model_max_length)
        super().__init__(swarm, tokenizer, name=name, max_length=known)

    @classmethod
    def open(cls, config: ClientModelConfig, *, name: str | None, max_length: int | None) -> Self:
        """Join the swarm and load what the gateway needs itself.

        Raises:
            SwarmError: the swarm or the checkpoint can't be used.
        """
        swarm, tokenizer = open_model(config)
        try:
            return cls(swarm, tokenizer, name=name or swarm.swarm.model_name, max_length=max_length)
        except BaseException:
            swarm.close()
            raise

    def pairs(self, query: str, texts: Sequence[str]) -> list[dict[str, list[int]]]:
        """The inputs of the model for each text."""
        return [dict(self.tokenizer(query, text)) for text in texts]

    @torch.no_grad()
    def scores(self, pairs: Sequence[dict[str, list[int]]], go_on: Callable[[], None] = lambda: None) -> list[float]:
        """0 to 1 for each pair, as sentence-transformers' CrossEncoder gives it; `go_on` is asked before each batch.

        Raises:
            SwarmError: the swarm fails.
        """
        found = [0.0] * len(pairs)
        for places in batches([len(pair["input_ids"]) for pair in pairs]):
            go_on()
            inputs = self.tokenizer.pad([pairs[place] for place in places], padding_side="right", return_tensors="pt")
            for place, score in zip(places, self.swarm(**inputs).logits[:, 0].float().sigmoid().tolist(), strict=True):
                found[place] = score
        return found
