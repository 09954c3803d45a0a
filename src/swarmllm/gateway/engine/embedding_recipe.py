"""What becomes of a model's last hidden states to make an embedding of them, as sentence-transformers' files say it.

`modules.json` lists what follows each other: the transformer, a pooling (`1_Pooling/config.json`) and mostly
`2_Normalize`. A checkpoint without these files, but of a model without a head for text, is pooled by the mean, as
sentence-transformers does then. Read by `embedding_model`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.models.auto.modeling_auto import MODEL_MAPPING

from swarmllm.errors import ConfigurationError
from swarmllm.models.architecture import Task, task_of
from swarmllm.models.checkpoint.checkpoint import Checkpoint

LEAST = 1e-9
"""sentence-transformers' own guard against a text of no tokens."""


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
"""Of hidden states `[batch, seq, hidden]` and a mask `[batch, seq]` of 1 and, behind each text, 0. Results of several
are joined in this order."""
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
    """From a text to its embedding, but for the model."""

    pooling: tuple[str, ...] = ("mean",)
    normalize: bool = False
    """To length 1."""
    max_length: int | None = None
    """Tokens of a text that it was made for."""
    lowercase: bool = False
    prompt: str = ""
    """Put before each text."""

    def embed(self, hidden: Tensor, mask: Tensor, dimensions: int | None = None) -> Tensor:
        """Hidden states `[batch, seq, hidden]` and mask `[batch, seq]` → embeddings `[batch, size]`, in float32.

        With `dimensions` the first ones of them alone, brought to length 1.
        """
        hidden, mask = hidden.float(), mask.float()
        found = torch.cat([POOLINGS[name](hidden, mask) for name in self.pooling], dim=-1)
        found = found[:, :dimensions]
        if self.normalize or dimensions is not None:
            found = torch.nn.functional.normalize(found, dim=-1)
        return found


def recipe_of(checkpoint: Checkpoint) -> EmbeddingRecipe | None:
    """How this checkpoint makes embeddings; None: it writes text, or does something else.

    Raises:
        ConfigurationError: in a way that isn't known here.
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
    """Whether nothing follows the last hidden states: an encoder, or a decoder that was saved without its head.

    Encoders as they come from their first training have a head that fills gaps, which embeddings leave out.
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
    """What sentence-transformers puts before each text unasked."""
    config = checkpoint.json_file("config_sentence_transformers.json") or {}
    name = config.get("default_prompt_name")
    return "" if name is None else str((config.get("prompts") or {}).get(name, ""))
