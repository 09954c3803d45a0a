"""GGUF files of tiny models, for tests: headers as the format's specification has them, matrices of frozen blocks."""

import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from swarmllm.models.quantization.decoded import KINDS, WHOLE, dequantize

BLOCKS = Path(__file__).parent / "data/gguf_blocks.safetensors"
"""Rows of each kind, made by `make_gguf.py`."""
F32, Q4_0, Q8_0, Q4_K, Q6_K = 0, 2, 8, 12, 14
ENDS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
STEMS = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "mlp.gate": "ffn_gate_inp", "block_sparse_moe.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp", "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp", "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "pre_feedforward_layernorm": "ffn_norm", "post_feedforward_layernorm": "post_ffw_norm",
    "w1": "ffn_gate_exps", "w2": "ffn_down_exps", "w3": "ffn_up_exps", "gate_proj": "ffn_gate_exps",
    "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps",
}  # fmt: skip
"""transformers' names within a block, or within an expert → llama.cpp's."""


def stored_name(name: str, family: str) -> str:
    """transformers' name of a weight → llama.cpp's."""
    stem, leaf = name.rsplit(".", 1)
    if stem in ENDS:
        return f"{ENDS[stem]}.{leaf}"
    _, _, block, part = stem.split(".", 3)
    if part == "post_attention_layernorm":
        return f"blk.{block}.{'post_attention_norm' if family in ('Gemma2', 'Gemma3') else 'ffn_norm'}.{leaf}"
    return f"blk.{block}.{STEMS[part.split('.')[-1] if '.experts.' in part else part]}.{leaf}"


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of queries or keys in the order that llama.cpp's converter gives them."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path: Path, settings: Mapping[str, Any], tensors: Mapping[str, tuple[int, np.ndarray]]) -> Path:
    """`tensors`: name → (kind, numbers or bytes of blocks, with dimensions as torch has them)."""
    header = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(settings))]
    header += [_string(key) + _value(value) for key, value in settings.items()]
    data = b""
    for name, (kind, array) in tensors.items():
        shape = [*array.shape]
        if kind in KINDS:
            _, weights, size = KINDS[kind]
            shape[-1] = shape[-1] // size * weights
        header += [_string(name), struct.pack("<I", len(shape)), struct.pack(f"<{len(shape)}Q", *reversed(shape))]
        header += [struct.pack("<IQ", kind, len(data))]
        data += _padded(array.tobytes())
    path.write_bytes(_padded(b"".join(header)) + data)
    return path


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _value(value: Any) -> bytes:
    kind, packed = _typed(value)
    return struct.pack("<I", kind) + packed


def _typed(value: Any) -> tuple[int, bytes]:
    match value:
        case bool():
            return 7, struct.pack("<?", value)
        case int():
            return 4, struct.pack("<I", value)
        case float():
            return 6, struct.pack("<f", value)
        case str():
            return 8, _string(value)
    items = [_typed(item) for item in value]
    return 9, struct.pack("<IQ", items[0][0] if items else 8, len(items)) + b"".join(packed for _, packed in items)


def _padded(data: bytes) -> bytes:
    return data + b"\0" * (-len(data) % 32)


def settings_of(config: Any, architecture: str) -> dict[str, Any]:
    """The fields that llama.cpp's converter writes for a model with the usual rotation."""
    own = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
    }
    if architecture == "qwen3moe":
        own["expert_count"] = config.num_experts
        own["expert_used_count"] = config.num_experts_per_tok
        own["expert_feed_forward_length"] = config.moe_intermediate_size
    return {"general.architecture": architecture, **{f"{architecture}.{key}": value for key, value in own.items()}}


def save_gguf(
    model: PreTrainedModel, architecture: str, plain: Path, kind_of: Callable[[str], int]
) -> tuple[Path, dict[str, Tensor]]:
    """A file beside `plain`, where the model is saved, with random blocks in place of its matrices; and all weights."""
    weights = load_file(plain / "model.safetensors")
    blocks = load_file(BLOCKS)
    generator = torch.Generator().manual_seed(0)
    stored: dict[str, list[tuple[int, np.ndarray]]] = {}
    for name, weight in weights.items():
        kind = kind_of(name)
        raw = weight.float().numpy()
        if kind not in WHOLE:
            _, count, size = KINDS[kind]
            every = blocks[str(kind)].view(-1, size)
            chosen = torch.randint(len(every), (weight.numel() // count,), generator=generator)
            raw = every[chosen].view(weight.shape[0], -1).numpy()
            weights[name] = dequantize(kind, torch.from_numpy(raw))
        if architecture == "llama" and (".q_proj." in name or ".k_proj." in name):
            heads = model.config.num_attention_heads if ".q_proj." in name else model.config.num_key_value_heads
            raw = interleaved(raw, heads)
        stored.setdefault(stored_name(name, ""), []).append((kind, raw))
    tensors = {
        name: (parts[0][0], np.stack([raw for _, raw in parts]) if "_exps" in name else parts[0][1])
        for name, parts in stored.items()
    }
    path = write_gguf(plain.parent / "model.gguf", settings_of(model.config, architecture), tensors)
    return path, weights
