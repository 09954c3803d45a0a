"""A tiny random model of every decoder architecture of transformers, for tests that compare with the local model.

Configs name the same things in many ways. `COMMON` gives each name a tiny value, and a config takes those that it
knows; `SPECIFIC` holds what an architecture needs beyond that, mostly patterns of unlike blocks, so that every kind of
block lies on both sides of a cut.
"""

import inspect
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from swarmllm.models.architecture import find_blocks

NUM_BLOCKS = 4
VOCABULARY = 128

SIZES = {
    "vocab_size": VOCABULARY,
    "vocab_size_per_layer_input": VOCABULARY,
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim_model", "embedding_size", "word_embed_proj_dim"), 64),
    **dict.fromkeys(("lru_width",), 64),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "dim_ff", "block_ff_dim", "intermediate_size_mlp"), 96),
    **dict.fromkeys(("ffn_hidden_size",), 96),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), 48),
    **dict.fromkeys(("expert_ffn_hidden_size",), 48),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 256),
}
BLOCKS = dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), NUM_BLOCKS)
HEADS = {
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_global_key_value_heads"), 2),
    **dict.fromkeys(("head_dim", "global_head_dim", "dim_head", "v_head_dim", "qk_head_dim", "index_head_dim"), 16),
    **dict.fromkeys(("query_pre_attn_scalar", "kv_lora_rank"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "rotary_dim", "index_topk"), 8),
    "q_lora_rank": 32,
    "index_n_heads": 2,
}
WINDOWS = {"sliding_window": 5, "attention_chunk_size": 8, "attention_window_size": 8}
EXPERTS = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk"), 2),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "n_shared_experts", "num_shared_experts"), 1),
    "moe_layer_freq": 1,
    "zero_expert_num": 0,
}
RECURRENT = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "mamba_d_head"), 16),
    "linear_conv_kernel_dim": 4,
    **dict.fromkeys(("mamba_d_state", "mamba_n_heads", "mamba_chunk_size", "mamba_dt_rank"), 8),
    **dict.fromkeys(("state_size", "time_step_rank"), 8),
    "mamba_n_groups": 1,
    **dict.fromkeys(("mamba_expand", "n_mamba_heads"), 2),
}
PER_LAYER_INPUTS = {
    "hidden_size_per_layer_input": 8,
    "laurel_rank": 8,
    "num_kv_shared_layers": 0,
    "altup_num_inputs": 2,
}
NO_DROPOUT = dict.fromkeys(
    ("dropout", "attn_pdrop", "resid_pdrop", "embd_pdrop", "hidden_dropout", "attention_dropout"), 0.0
)
SPECIAL_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
COMMON: dict[str, Any] = {
    **SIZES, **BLOCKS, **HEADS, **WINDOWS, **EXPERTS, **RECURRENT, **PER_LAYER_INPUTS, **NO_DROPOUT, **SPECIAL_TOKENS
}  # fmt: skip

LINEAR_AND_FULL = ["linear_attention", "full_attention"] * 2
SLIDING_AND_FULL = ["sliding_attention", "full_attention"] * 2
CONV_AND_FULL = ["conv", "full_attention"] * 2
MAMBA_AND_HYBRID = ["mamba", "hybrid"] * 2
LATENT_ATTENTION = {"num_key_value_heads": 4}

SPECIFIC: dict[str, dict[str, Any]] = {
    "axk1": LATENT_ATTENTION,
    "axk2": LATENT_ATTENTION,
    "bailing_hybrid": {**LATENT_ATTENTION, "layer_types": LINEAR_AND_FULL},
    "bamba": {"attn_layer_indices": [1, 3], "attn_rotary_emb": 8},
    "cohere_compass_text": {
        "layer_types": SLIDING_AND_FULL,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "dots3_note_text": {
        "num_key_value_heads": 4,
        "layer_types": ["indexed_attention", "sliding_attention"] * 2,
        **{f"swa_{name}": 4 for name in ("num_attention_heads", "num_key_value_heads")},
        **{f"swa_{name}": 16 for name in ("q_lora_rank", "kv_lora_rank", "head_dim", "v_head_dim")},
        **{f"swa_{name}": 8 for name in ("qk_nope_head_dim", "qk_rope_head_dim")},
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": LATENT_ATTENTION,
    "deepseek_v3": LATENT_ATTENTION,
    "deepseek_v32": LATENT_ATTENTION,
    "falcon": {"alibi": False, "new_decoder_architecture": True, "num_kv_heads": 2},
    "falcon_alibi": {"alibi": True, "new_decoder_architecture": False, "multi_query": True},
    "falcon_h1": {"mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_head": 16},
    "gemma3n_text": {
        "layer_types": SLIDING_AND_FULL,
        "activation_sparsity_pattern": [0.0] * NUM_BLOCKS,
        "intermediate_size": [96] * NUM_BLOCKS,
    },
    "gemma3_text": {"layer_types": SLIDING_AND_FULL},
    "kolibri1": {"layer_types": SLIDING_AND_FULL},
    "gemma3n_shared_kv": {
        "layer_types": SLIDING_AND_FULL,
        "activation_sparsity_pattern": [0.0] * NUM_BLOCKS,
        "intermediate_size": [96] * NUM_BLOCKS,
        "num_kv_shared_layers": 1,
    },
    "gemma4_shared_kv": {"layer_types": SLIDING_AND_FULL, "num_kv_shared_layers": 1},
    "glm4_moe_lite": LATENT_ATTENTION,
    "glm_moe_dsa": LATENT_ATTENTION,
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 5},
    "granitemoehybrid": {"layer_types": LINEAR_AND_FULL},
    "inkling_text": {
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 16,
        "sliding_window_size": 5,
        "layer_types": ["hybrid_sliding", "hybrid"] * 2,
    },
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "use_mamba_kernels": False,
    },
    "kimi_linear": {**LATENT_ATTENTION, "layer_types": LINEAR_AND_FULL, "linear_head_dim": 16, "linear_num_heads": 4},
    "lfm2": {"layer_types": CONV_AND_FULL},
    "lfm3": {"layer_types": ["conv", "sliding_attention", "full_attention", "sliding_attention"]},
    "lfm2_moe": {"layer_types": CONV_AND_FULL},
    "llama4_text": {"no_rope_layers": [1, 0, 1, 0], "interleave_moe_layer_step": 2, "attention_chunk_size": 5},
    "longcat_flash": LATENT_ATTENTION,
    "mamba2": {"num_heads": 8, "head_dim": 16, "expand": 2, "n_groups": 1, "chunk_size": 8},
    "minicpm3": LATENT_ATTENTION,
    "nemotron_h": {
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "layers_block_type": ["mamba", "attention", "mlp", "attention"],
    },
    "nemotron_h_experts": {
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "layers_block_type": ["mamba", "moe", "attention", "moe"],
    },
    "qwen4_exp_text": {
        "layer_types": ["linear_attention", "indexed_attention"] * 2,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
        "ple_layer_ids": [1, 3],
        "ple_embed_dim": 16,
        "ngram_vocab_size_base": 1000,
    },
    "qwen3_next": {"layer_types": LINEAR_AND_FULL},
    "smollm3": {"no_rope_layers": [1, 0, 1, 0]},
    "xlstm": {"num_blocks": NUM_BLOCKS, "embedding_dim": 64},
    "youtu": LATENT_ATTENTION,
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
    "zamba": {"layers_block_type": MAMBA_AND_HYBRID},
    "zamba2": {"layers_block_type": MAMBA_AND_HYBRID},
}
VARIANTS = {
    "falcon_alibi": "falcon",
    "gemma3n_shared_kv": "gemma3n_text",
    "gemma4_shared_kv": "gemma4_text",
    "nemotron_h_experts": "nemotron_h",
}
"""Second configs of an architecture → its model type."""


def tiny_config(model_type: str) -> PreTrainedConfig:
    """A config of 4 blocks and well below a million parameters."""
    cls = CONFIG_MAPPING[VARIANTS.get(model_type, model_type)]
    known = _fields(cls)
    aliases = getattr(cls, "attribute_map", {})
    common = {name: value for name, value in COMMON.items() if name in known or aliases.get(name) in known}
    return cls(**{**common, **SPECIAL_TOKENS, **SPECIFIC.get(model_type, {})})


def tiny_model(model_type: str, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> PreTrainedModel:
    """A model with random weights that are large enough for a wrong block to show in the logits."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(tiny_config(model_type)).to(dtype).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.is_floating_point():
                    parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return model


def save_tiny(model_type: str, directory: str | Path, *, shard_size: str = "60KB", **options: Any) -> PreTrainedModel:
    """Save a tiny model as a sharded checkpoint, and return it as `load_tiny` does."""
    tiny_model(model_type, **options).save_pretrained(directory, max_shard_size=shard_size)
    return load_tiny(directory)


def load_tiny(directory: str | Path) -> PreTrainedModel:
    """The local model to compare with, as transformers loads it, with frozen blocks.

    The model that was saved would not do: its weights lie at other addresses, and some kernels round differently by
    alignment. Blocks are frozen because torch multiplies matrices in another order for trained ones.
    """
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(directory, dtype="auto")
    find_blocks(model).blocks.requires_grad_(False)
    return model


def _fields(cls: type) -> set[str]:
    own = [base for base in cls.__mro__ if base.__module__.startswith("transformers.models")]
    parameters = {name for base in own for name in inspect.signature(base.__init__).parameters}
    return parameters | {name for base in own for name in getattr(base, "__annotations__", {})}
