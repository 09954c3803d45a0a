"""A tiny random model of every encoder-decoder of transformers that generates text from text.

The encoder has 4 blocks, the decoder 3, so that nobody can take one for the other.
"""

import inspect
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForSeq2SeqLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES

VOCABULARY = 128
ENCODER_BLOCKS, DECODER_BLOCKS = 4, 3

COMMON: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "src_vocab_size", "tgt_vocab_size", "decoder_vocab_size"), VOCABULARY),
    **dict.fromkeys(("d_model", "hidden_size"), 64),
    **dict.fromkeys(("encoder_layers", "num_encoder_layers", "num_layers", "num_hidden_layers"), ENCODER_BLOCKS),
    **dict.fromkeys(("decoder_layers", "num_decoder_layers"), DECODER_BLOCKS),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads", "num_heads", "num_attention_heads"), 4),
    **dict.fromkeys(("num_encoder_attention_heads", "num_decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "intermediate_size"), 96),
    "d_kv": 16,
    **dict.fromkeys(("max_position_embeddings", "max_encoder_position_embeddings"), 128),
    **dict.fromkeys(("max_decoder_position_embeddings",), 128),
    **dict.fromkeys(("dropout", "attention_dropout", "activation_dropout", "dropout_rate"), 0.0),
    **dict.fromkeys(("encoder_layerdrop", "decoder_layerdrop"), 0.0),
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": None,
    "forced_bos_token_id": None,
}
GEMMA: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": DECODER_BLOCKS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "sliding_window": 5,
    "max_position_embeddings": 128,
    "attention_dropout": 0.0,
    "dropout_rate": 0.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SPECIFIC: dict[str, dict[str, Any]] = {
    "fsmt": {"langs": ["en", "de"]},
    "led": {"attention_window": 4},
    "longt5": {"encoder_attention_type": "local", "local_radius": 4},
    "longt5_global": {"encoder_attention_type": "transient-global", "local_radius": 4, "global_block_size": 4},
    "bigbird_pegasus": {"block_size": 4, "num_random_blocks": 1},
    "pegasus_x": {"block_size": 4, "num_global_tokens": 4},
    "prophetnet": {"ngram": 2, "num_buckets": 8, "relative_max_distance": 16, "disable_ngram_loss": True},
    "nllb-moe": {"num_experts": 4, "expert_capacity": 64, "encoder_sparse_step": 2, "decoder_sparse_step": 2},
    "switch_transformers": {
        "num_experts": 4,
        "num_sparse_encoder_layers": 2,
        "num_sparse_decoder_layers": 1,
        "expert_capacity": 64,
    },
    "t5gemma": {"encoder": {**GEMMA, "num_hidden_layers": ENCODER_BLOCKS}, "decoder": GEMMA},
    "t5gemma2": {
        "encoder": {
            "text_config": {**GEMMA, "num_hidden_layers": ENCODER_BLOCKS},
            "vision_config": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
            | {"num_attention_heads": 4, "image_size": 16, "patch_size": 4},
            "mm_tokens_per_image": 4,
        },
        "decoder": GEMMA,
    },
    "bigbird_pegasus_full": {"attention_type": "original_full"},
    "t5_gated": {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
}
BASE = {"bigbird_pegasus_full": "bigbird_pegasus", "longt5_global": "longt5", "t5_gated": "t5"}
"""Variants of a model type."""


def names() -> list[str]:
    """All model types of transformers with an encoder and a decoder, and some variants."""
    types = [name for name in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES if CONFIG_MAPPING[name].is_encoder_decoder]
    return sorted({*types, "encoder-decoder", *BASE})


def tiny_config(name: str) -> PreTrainedConfig:
    cls = CONFIG_MAPPING[BASE.get(name, name)]
    known = set(inspect.signature(cls.__init__).parameters) | set(getattr(cls, "__annotations__", {}))
    given = {key: value for key, value in COMMON.items() if key in known or key.endswith("token_id")}
    return AutoConfig.for_model(cls.model_type, **{**given, **SPECIFIC.get(name, {})})


def with_large_weights(model: PreTrainedModel) -> PreTrainedModel:
    """So large that tokens differ; and no token ends the text."""
    for parameter in model.eval().parameters():
        if parameter.ndim == 2 and parameter.requires_grad:  # sines and cosines aren't stored
            torch.nn.init.normal_(parameter, std=0.15)
    model.tie_weights()
    model.generation_config.eos_token_id = None
    model.generation_config.forced_eos_token_id = None
    return model


def tiny_model(name: str) -> PreTrainedModel:
    """In float32."""
    torch.manual_seed(0)
    return with_large_weights(AutoModelForSeq2SeqLM.from_config(tiny_config(name)))


def save_tiny_model(name: str, path: Path) -> Path:
    tiny_model(name).save_pretrained(path)
    return path


def inputs_of(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Two texts of different lengths."""
    random = torch.Generator().manual_seed(1)
    ids, mask = torch.randint(3, 100, (2, 9), generator=random), torch.ones(2, 9, dtype=torch.long)
    mask[1, 6:] = 0
    return {"input_ids": ids, "attention_mask": mask}
