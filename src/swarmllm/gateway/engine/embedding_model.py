"""Models that give numbers for texts: embeddings, or a score for how well a text fits a query.

`model_choice` opens them, `apis/embeddings` asks them. An embedding is made of a model's last hidden states by a recipe
in sentence-transformers' files: `modules.json` lists the transformer, a pooling (`1_Pooling/config.json`) and mostly
`2_Normalize`. A checkpoint without these files and without a head for text is pooled by the mean, as in
sentence-transformers. A ranking model is also known as a cross-encoder: it reads query and text together.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from transformers.models.auto.modeling_auto import MODEL_MAPPING

from swarmllm.api import (
    Checkpoint,
    ClientModelConfig,
    ConfigurationError,
    Task,
    decoder_stack,
    max_positions,
    task_of,
    text_config,
)
from swarmllm.gateway.engine.offered_model import OfferedModel, Use, opened, shortest

BATCH_TOKENS = 8192
"""Positions of one forward, padding included. It limits the memory of hidden states: 128 MB for width 4096."""

LEAST = 1e-9
"""sentence-transformers' guard against division by zero."""


class EmbeddingModel(OfferedModel):
    """A model that gives embeddings."""

    use = Use("an embedding model", "gives embeddings", "gives no embeddings", "/v1/embeddings", "no_embeddings")

    def __init__(
        self, swarm: Any, tokenizer: Any, recipe: "EmbeddingRecipe", *, name: str | None, max_length: int | None
    ) -> None:
        known = (recipe.max_length, max_positions(decoder_stack(swarm)), tokenizer.model_max_length)
        super().__init__(swarm, tokenizer, name=name, max_length=shortest(max_length, *known))
        self.recipe = recipe
        self.size: int = text_config(swarm.config).hidden_size * len(recipe.pooling)
        """Numbers of one embedding."""
        takes = inspect.signature(decoder_stack(swarm).forward).parameters
        self._options = {"use_cache": False} if "use_cache" in takes else {}
        self._pad_id = tokenizer.pad_token_id or 0

    @classmethod
    def open(
        cls, config: ClientModelConfig, recipe: "EmbeddingRecipe", *, name: str | None, max_length: int | None
    ) -> Self:
        """Join the swarm. Raises: SwarmError: the swarm or the checkpoint can't be used."""
        with opened(config, features=True) as (swarm, tokenizer):
            return cls(swarm, tokenizer, recipe, name=name, max_length=max_length)

    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """Token ids of a text, with the prompt that embeddings need."""
        text = self.recipe.prompt + text
        return super().encode(text.lower() if self.recipe.lowercase else text, special_tokens=special_tokens)

    def cut(self, ids: list[int], length: int) -> list[int]:
        """The first `length` tokens of a text, with the special tokens that end it."""
        if len(ids) <= length:
            return ids
        empty = super().encode("")  # the special tokens around any text
        num_after = 0
        while num_after < min(len(empty), length) and empty[-1 - num_after] == ids[-1 - num_after]:
            num_after += 1
        return ids[: length - num_after] + ids[len(ids) - num_after :]

    @torch.no_grad()
    def embed(
        self, rows: Sequence[list[int]], dimensions: int | None, go_on: Callable[[], None] = lambda: None
    ) -> Tensor:
        """Embed texts, given as token ids → `[texts, size]`. `go_on` is called before each forward.

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
    """Groups of texts for one forward each: places of texts of similar length."""
    batch: list[int] = []
    for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        if batch and (len(batch) + 1) * lengths[batch[0]] > BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(place)
    yield batch


def _cls(hidden: Tensor, _mask: Tensor) -> Tensor:
    return hidden[:, 0]


def _max(hidden: Tensor, mask: Tensor) -> Tensor:
    return hidden.masked_fill(mask[..., None] == 0, -torch.inf).amax(1)


def _mean(hidden: Tensor, mask: Tensor) -> Tensor:
    return (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True).clamp(min=LEAST)


def _mean_by_sqrt(hidden: Tensor, mask: Tensor) -> Tensor:
    return (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True).clamp(min=LEAST).sqrt()


def _weighted_mean(hidden: Tensor, mask: Tensor) -> Tensor:
    return _mean(hidden, mask * torch.arange(1, mask.shape[1] + 1))


def _last_token(hidden: Tensor, mask: Tensor) -> Tensor:
    return hidden[torch.arange(len(hidden)), mask.sum(1).long() - 1]


POOLINGS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cls": _cls,
    "max": _max,
    "mean": _mean,
    "mean_sqrt_len_tokens": _mean_by_sqrt,
    "weightedmean": _weighted_mean,
    "lasttoken": _last_token,
}
"""Functions of hidden states `[batch, seq, hidden]` and a mask `[batch, seq]` (1, and 0 behind each text). If there are
several, their results are joined in this order."""


_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}


@dataclass(frozen=True, kw_only=True)
class EmbeddingRecipe:
    """How a text becomes an embedding, apart from the model itself."""

    pooling: tuple[str, ...] = ("mean",)
    normalize: bool = False
    """Bring each embedding to length 1."""
    max_length: int | None = None
    """Most tokens of a text that the model was made for."""
    lowercase: bool = False
    prompt: str = ""
    """Text before each text."""

    def embed(self, hidden: Tensor, mask: Tensor, dimensions: int | None = None) -> Tensor:
        """Hidden states `[batch, seq, hidden]` and mask `[batch, seq]` → embeddings `[batch, size]`, in float32.

        `dimensions` keeps the first numbers only, brought to length 1.
        """
        hidden, mask = hidden.float(), mask.float()
        found = torch.cat([POOLINGS[name](hidden, mask) for name in self.pooling], dim=-1)
        found = found[:, :dimensions]
        if self.normalize or dimensions is not None:
            found = torch.nn.functional.normalize(found, dim=-1)
        return found


def recipe_of(checkpoint: Checkpoint) -> EmbeddingRecipe | None:
    """The recipe of this checkpoint; None: it gives no embeddings.

    Raises:
        ConfigurationError: the recipe is not known here.
    """
    modules = checkpoint.json_file("modules.json")
    if modules is None:
        return EmbeddingRecipe() if _is_headless(checkpoint) else None
    if checkpoint.config.is_encoder_decoder:
        raise ConfigurationError(
            f"{checkpoint.name} embeds by one stack of an encoder-decoder, which the gateway can't: use another model"
        )
    pooling: tuple[str, ...] = ("mean",)
    normalize = False
    kinds = [str(module.get("type", "")).rpartition(".")[2] for module in _objects(modules, checkpoint)]
    for kind, module in zip(kinds, modules, strict=True):
        if kind == "Pooling":
            pooling = _pooling(checkpoint, f"{module.get('path', '1_Pooling')}/config.json")
        elif kind == "Normalize":
            normalize = True
        elif kind != "Transformer":
            raise ConfigurationError(
                f"{checkpoint.name} has a module {kind} behind the model, which the gateway can't compute: "
                "use a model with Transformer, Pooling and Normalize alone"
            )
    details = checkpoint.json_file("sentence_bert_config.json") or {}
    return EmbeddingRecipe(
        pooling=pooling,
        normalize=normalize,
        max_length=details.get("max_seq_length"),
        lowercase=bool(details.get("do_lower_case")),
        prompt=_prompt(checkpoint),
    )


def _is_headless(checkpoint: Checkpoint) -> bool:
    """No head follows the last hidden states: an encoder, or a decoder that was saved without its head.

    Pretrained encoders have a head that fills gaps; embeddings leave it out.
    """
    config = checkpoint.config
    task = task_of(config)
    if task != Task.CAUSAL_LM:
        return task in (Task.FEATURES, Task.MASKED_LM)
    return bool((config.architectures or [""])[0] == MODEL_MAPPING[type(config)].__name__)


def _objects(modules: Any, checkpoint: Checkpoint) -> list[dict[str, Any]]:
    if not isinstance(modules, list) or not all(isinstance(one, dict) for one in modules):
        raise ConfigurationError(f"modules.json of {checkpoint.name} is no list of modules: download it again")
    return modules


def _pooling(checkpoint: Checkpoint, filename: str) -> tuple[str, ...]:
    config = checkpoint.json_file(filename)
    if not isinstance(config, dict):
        raise ConfigurationError(f"{checkpoint.name} lacks {filename}, which says how it pools: download it again")
    given = config.get("pooling_mode")
    chosen = {_FLAGS[flag] for flag in _FLAGS if config.get(flag)}
    if given is not None:
        chosen = {given} if isinstance(given, str) else set(given)
    if not chosen or chosen - POOLINGS.keys():
        unknown = ", ".join(sorted(chosen - POOLINGS.keys())) or "no way"
        raise ConfigurationError(
            f"{checkpoint.name} pools by {unknown}, and the gateway knows {', '.join(POOLINGS)}: use another model"
        )
    if config.get("include_prompt") is False and _prompt(checkpoint):
        raise ConfigurationError(
            f"{checkpoint.name} leaves its prompt out when it pools, which the gateway can't: use another model"
        )
    return tuple(name for name in POOLINGS if name in chosen)


def _prompt(checkpoint: Checkpoint) -> str:
    """The prompt that sentence-transformers puts before each text by default."""
    config = checkpoint.json_file("config_sentence_transformers.json") or {}
    name = config.get("default_prompt_name")
    return "" if name is None else str((config.get("prompts") or {}).get(name, ""))


class RankingModel(OfferedModel):
    """A model that scores how well a text fits a query, from 0 to 1."""

    use = Use("a model that ranks texts", "ranks texts", "ranks no texts", "/v1/rerank", "no_ranking")

    def __init__(self, swarm: Any, tokenizer: Any, *, name: str | None, max_length: int | None) -> None:
        known = shortest(max_length, max_positions(decoder_stack(swarm)), tokenizer.model_max_length)
        super().__init__(swarm, tokenizer, name=name, max_length=known)

    @classmethod
    def open(cls, config: ClientModelConfig, *, name: str | None, max_length: int | None) -> Self:
        """Join the swarm. Raises: SwarmError: the swarm or the checkpoint can't be used."""
        with opened(config) as (swarm, tokenizer):
            return cls(swarm, tokenizer, name=name, max_length=max_length)

    def pairs(self, query: str, texts: Sequence[str]) -> list[dict[str, list[int]]]:
        """The model's inputs for each text."""
        return [dict(self.tokenizer(query, text)) for text in texts]

    @torch.no_grad()
    def scores(self, pairs: Sequence[dict[str, list[int]]], go_on: Callable[[], None] = lambda: None) -> list[float]:
        """A score for each pair, as sentence-transformers' CrossEncoder gives it. `go_on` is called before each
        forward.

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
