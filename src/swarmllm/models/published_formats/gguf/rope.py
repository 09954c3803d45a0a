"""Positions: llama.cpp's settings of the rotation → transformers' `rope_parameters`."""

from collections.abc import MutableMapping
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from swarmllm.errors import UnsupportedModelError

DEFAULT_THETA = 10000.0
"""llama.cpp's, of files that name none."""
LLAMA3_FACTORS = (8.0, 32.0, 16.0, 4.0, 2.0)
"""Those of Llama 3.1 and 3.2, and further ones to be tried."""


def rope_parameters(settings: MutableMapping[str, Any], factors: Tensor | None, head_dim: int) -> dict[str, Any]:
    """Takes what it understands out of `settings`; `factors` `[head_dim / 2]` divide the frequencies.

    Raises:
        UnsupportedModelError: the rotation is of a kind that isn't known here.
    """
    theta = float(settings.pop("rope.freq_base", DEFAULT_THETA))
    kind = settings.pop("rope.scaling.type", "none")
    factor, context = settings.pop("rope.scaling.factor", None), settings.pop("rope.scaling.original_context_length", 0)
    settings.pop("rope.scaling.finetuned", None)
    if factors is not None:
        if kind != "none":
            raise _refused(f"{kind} together with factors of frequencies")
        return _llama3(theta, factors, head_dim)
    if kind == "none":
        return {"rope_type": "default", "rope_theta": theta}
    if kind not in ("linear", "yarn") or not factor or (kind == "yarn" and not context):
        raise _refused(f"the scaling {kind!r}")
    found = {"rope_type": kind, "rope_theta": theta, "factor": float(factor)}
    return found if kind == "linear" else {**found, "original_max_position_embeddings": context}


def _llama3(theta: float, factors: Tensor, head_dim: int) -> dict[str, Any]:
    """Which settings of Llama 3 give these factors: files hold the factors only."""
    for factor in LLAMA3_FACTORS:
        found = {
            "rope_type": "llama3",
            "rope_theta": theta,
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
        config = LlamaConfig(head_dim=head_dim, max_position_embeddings=131072, rope_parameters=found)
        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
        usual = 1 / theta ** (torch.arange(0, head_dim, 2).float() / head_dim)
        if factors.shape == scaled.shape and torch.allclose(usual / scaled, factors.float(), rtol=1e-4):
            return found
    raise _refused("factors of frequencies that aren't those of Llama 3.1 to 3.3")


def _refused(what: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"this GGUF file turns positions by {what}, which swarmllm doesn't read from GGUF: use the model's safetensors"
    )
