"""Tiny checkpoints with every rotary type of transformers; some compute long calls otherwise than short ones."""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PhimoeConfig,
    PhimoeForCausalLM,
    PreTrainedModel,
)

from swarmllm.data_structures import Span
from swarmllm.models.checkpoint.checkpoint import open_checkpoint
from swarmllm.models.span.block_span import BlockSpan
from swarmllm.models.span.loading import load_block_span

NUM_BLOCKS, HEAD_DIM, VOCABULARY = 4, 8, 64
BORDER = 24
"""Positions up to which all calls compute alike."""
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": NUM_BLOCKS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
ORIGINAL = {"factor": 4.0, "original_max_position_embeddings": BORDER}
FACTORS = {
    "short_factor": [1 + 0.1 * place for place in range(HEAD_DIM // 2)],
    "long_factor": [2 + 0.5 * place for place in range(HEAD_DIM // 2)],
}
TYPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": ORIGINAL,
    "longrope": {**ORIGINAL, **FACTORS},
    "llama3": {**ORIGINAL, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "proportional": {"partial_rotary_factor": 0.5},
}
UNEVEN = ("dynamic", "longrope", "phi3", "phimoe", "gemma3")
"""Kinds that look at the length of a call."""
KINDS = (*TYPES, "phi3", "phimoe", "gemma3")


def rope(rope_type: str, **more: Any) -> dict[str, Any]:
    return {"rope_type": rope_type, "rope_theta": 1e4, **TYPES[rope_type], **more}


def save_rope(kind: str, directory: Path) -> PreTrainedModel:
    """A model of that rotary type, or of an architecture that does more about it, with weights that show mistakes."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(1)
        model = _model(kind)
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.save_pretrained(directory)
    return model.eval()


def load_rope(kind: str, directory: Path, dtype: torch.dtype = torch.float32) -> BlockSpan:
    """All blocks of such a model, as a server has them."""
    save_rope(kind, directory)
    return load_block_span(open_checkpoint(str(directory)), Span(0, NUM_BLOCKS), dtype=dtype, progress=False)


def _model(kind: str) -> PreTrainedModel:
    long = {"max_position_embeddings": 4 * BORDER, "original_max_position_embeddings": BORDER}
    if kind == "phi3":
        return Phi3ForCausalLM(Phi3Config(**SIZES, **long, rope_parameters=rope("longrope")))
    if kind == "phimoe":
        settings = rope("longrope", short_mscale=1.1, long_mscale=1.3)
        config = PhimoeConfig(**SIZES, **long, num_local_experts=4, rope_parameters=settings)
        return PhimoeForCausalLM(config)
    if kind == "gemma3":
        of_layers = {"sliding_attention": rope("longrope"), "full_attention": rope("dynamic")}
        layers = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 9}
        sizes = {**SIZES, "head_dim": HEAD_DIM, "max_position_embeddings": BORDER + 6}
        return Gemma3ForCausalLM(Gemma3TextConfig(**sizes, **layers, rope_parameters=of_layers))
    most = BORDER if kind == "dynamic" else 4 * BORDER
    return LlamaForCausalLM(LlamaConfig(**SIZES, max_position_embeddings=most, rope_parameters=rope(kind)))
