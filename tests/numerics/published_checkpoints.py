"""Tiny checkpoints in the layouts in which models are published, and beside each the same weights stored as ever."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gguf_writer import F32, Q4_0, Q4_K, Q6_K, save_gguf
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

Stored = tuple[dict[str, Tensor], Tensor]
"""What a format stores for a weight: suffix (in place of ".weight") → tensor; and the weight that it stands for."""
NUM_BLOCKS = 4
_SIZES: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 128, "intermediate_size": 160, "num_hidden_layers": NUM_BLOCKS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512,
    "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
_EXPERTS: dict[str, Any] = {
    **_SIZES, "moe_intermediate_size": 64, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1, "q_lora_rank": 64, "kv_lora_rank": 64,
    "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 32, "num_key_value_heads": 4,
}  # fmt: skip


def fp8(weight: Tensor) -> Stored:
    """Blocks of 64×64, the last of which may be parts."""
    size, (rows, columns) = 64, weight.shape
    scale = torch.empty(math.ceil(rows / size), math.ceil(columns / size)).fill_(weight.abs().max() / 448)
    scale *= 1 + torch.arange(scale.numel()).view_as(scale) / 7
    whole = scale.repeat_interleave(size, 0)[:rows].repeat_interleave(size, 1)[:, :columns]
    codes = (weight / whole).to(torch.float8_e4m3fn)
    return {".weight": codes, ".weight_scale_inv": scale}, codes.float() * whole


def _groups(weight: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes `[out, in]` of 4 bits, scales and zeros `[out, groups]`."""
    groups = weight.unflatten(1, (-1, size))
    low, high = groups.amin(-1).clamp_max(0), groups.amax(-1).clamp_min(0)
    scale = ((high - low) / 15).half()
    zero = (-low / scale.float()).round().clamp(1, 15)
    codes = (groups / scale.float()[..., None] + zero[..., None]).round().clamp(0, 15)
    return codes.flatten(1).int(), scale, zero.int()


def _whole(codes: Tensor, scale: Tensor, zero: Tensor | int) -> Tensor:
    size = codes.shape[1] // scale.shape[1]
    zeros = zero.repeat_interleave(size, 1) if isinstance(zero, Tensor) else zero
    return (codes - zeros) * scale.float().repeat_interleave(size, 1)


def _words(codes: Tensor, dim: int) -> Tensor:
    """Codes of 4 bits, eight to a word of 32, the first lowest."""
    packed = (codes.movedim(dim, -1).long().unflatten(-1, (-1, 8)) << torch.arange(0, 32, 4)).sum(-1)
    return torch.where(packed >= 2**31, packed - 2**32, packed).int().movedim(-1, dim).contiguous()


def int4(weight: Tensor) -> Stored:
    groups = weight.unflatten(1, (-1, 32))
    scale = (groups.abs().amax(-1) / 7).bfloat16()
    codes = (groups / scale.float()[..., None]).round().clamp(-8, 7).flatten(1).int()
    parts = {
        ".weight_packed": _words(codes + 8, 1),
        ".weight_scale": scale,
        ".weight_shape": torch.tensor(weight.shape),
    }
    return parts, _whole(codes, scale, 0)


def awq(weight: Tensor) -> Stored:
    codes, scale, zero = _groups(weight, 32)

    def packed(values: Tensor) -> Tensor:
        return _words(values.T.unflatten(-1, (-1, 8))[..., [0, 2, 4, 6, 1, 3, 5, 7]].flatten(-2), 1)

    parts = {".qweight": packed(codes), ".qzeros": packed(zero), ".scales": scale.T.contiguous()}
    return parts, _whole(codes, scale, zero)


def gptq(weight: Tensor) -> Stored:
    codes, scale, zero = _groups(weight, 32)
    group = (torch.arange(weight.shape[1]) // 32).int()
    parts = {".qweight": _words(codes.T, 0), ".qzeros": _words(zero.T - 1, 1), ".scales": scale.T.contiguous()}
    return {**parts, ".g_idx": group}, _whole(codes, scale, zero)


def nf4(weight: Tensor) -> Stored:
    from bitsandbytes import functional

    codes, state = functional.quantize_4bit(weight, blocksize=64, quant_type="nf4")
    parts = {f".weight.{part}": tensor for part, tensor in state.as_dict(packed=True).items()}
    return {".weight": codes, **parts}, functional.dequantize_4bit(codes, state)


def hqq(weight: Tensor) -> Stored:
    """As hqq 0.2.8 saves it (`HQQLinear.state_dict`): 4 bits, groups of 32 in a row, which may lie across bytes."""
    groups = weight.view(-1, 32)
    low, high = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
    scale = ((high - low) / 15).half()
    zero = (-low / scale.float()).half()
    codes = (groups / scale.float() + zero.float()).round().clamp(0, 15).to(torch.uint8)
    half = len(codes) // 2
    numbers = {"nbits": 4, "group_size": 32, "axis": 1}
    flags = {"channel_wise": 1, "optimize": 1, "round_zero": 0, "view_as_float": 0, "quant_scale": 0, "quant_zero": 0}
    flags |= {"encoded_state_dict": 1, "stores_quant_config": 1, "offload_meta": 0}
    texts = {"packing": "4bit_u8", "unpack_view_dtype": "torch.uint8", "compute_dtype": "torch.float16"}
    parts = {
        ".W_q": codes[:half] << 4 | codes[half:],
        ".scale": scale,
        ".zero": zero,
        ".shape": torch.tensor(weight.shape),
    }
    parts |= {f".{name}": torch.tensor(number, dtype=torch.int32) for name, number in numbers.items()}
    parts |= {f".{name}": torch.tensor(flag, dtype=torch.uint8) for name, flag in flags.items()}
    parts |= {f".{name}": torch.tensor(list(text.encode()), dtype=torch.uint8) for name, text in texts.items()}
    return parts, ((codes - zero.float()) * scale.float()).view(weight.shape)


def torchao(weight: Tensor) -> Stored:
    """torchao 0.18's `Int4Tensor`: bytes of two neighbours in two's complement, the rest `[groups, out]`."""
    groups = weight.unflatten(1, (-1, 32))
    low, high = groups.amin(-1), groups.amax(-1)
    scale = ((high - low) / 15).bfloat16()
    added = (low + 8 * scale.float()).bfloat16()
    codes = ((groups - added.float()[..., None]) / scale.float()[..., None]).round().clamp(-8, 7)
    packed = codes.flatten(1).to(torch.int8)
    parts = {
        "._weight_qdata": (packed[:, 0::2] & 15) | (packed[:, 1::2] << 4),
        "._weight_scale": scale.T.contiguous(),
        "._weight_zero_point": added.T.contiguous(),
    }
    return parts, (codes * scale.float()[..., None] + added.float()[..., None]).flatten(1)


def _torchao_header(weights: dict[str, Tensor], is_stored: Callable[[str], bool]) -> dict[str, str]:
    """What the header of the file says of each weight."""

    def about(name: str, weight: Tensor) -> dict[str, Any]:
        if not is_stored(name):
            return {"_type": "Tensor"}
        data = {"activation_dtype": {"_type": "torch.dtype", "_data": "bfloat16"}, "block_size": [1, 32]}
        parts = ["qdata", "scale", "zero_point"]
        return {"_type": "Int4Tensor", "_data": data | {"shape": list(weight.shape)}, "_tensor_data_names": parts}

    notes = {name: json.dumps(about(name, weight)) for name, weight in weights.items()}
    return {**notes, "tensor_names": json.dumps(list(weights))}


def mxfp4(weight: Tensor) -> Stored:
    """Of experts `[experts, in, out]`; they are stored the other way round."""
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = torch.cat([values, -values])
    groups = weight.mT.unflatten(-1, (-1, 32))
    exponents = groups.abs().amax(-1).log2().floor() - 2
    scale = torch.exp2(exponents)[..., None]
    codes = ((groups / scale)[..., None] - values).abs().argmin(-1).to(torch.uint8)
    blocks = codes[..., 0::2] | (codes[..., 1::2] << 4)
    parts = {"_blocks": blocks.contiguous(), "_scales": (exponents + 127).to(torch.uint8)}
    return parts, (values[codes.long()] * scale).flatten(-2).mT.contiguous()


def _model(cls: type[PreTrainedModel], config: Any) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = cls(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return model


def _linear(name: str) -> bool:
    return name.endswith("proj.weight") or ("kv_a_proj" in name and name.endswith(".weight"))


def _experts(name: str) -> bool:
    return ".experts." in name and name.endswith(("proj.weight", "_proj"))


Kind = tuple[Callable[[], PreTrainedModel], Callable[[Tensor], Stored], Callable[[str], bool], dict[str, Any]]
KINDS: dict[str, Kind] = {
    "fp8": (
        lambda: _model(Qwen3ForCausalLM, Qwen3Config(**_SIZES)), fp8, _linear,
        {"quant_method": "fp8", "weight_block_size": [64, 64]},
    ),
    "mxfp4": (
        lambda: _model(GptOssForCausalLM, GptOssConfig(
            **_SIZES, num_local_experts=4, num_experts_per_tok=2, sliding_window=16,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        )), mxfp4, _experts, {"quant_method": "mxfp4"},
    ),
    "int4": (
        lambda: _model(DeepseekV3ForCausalLM, DeepseekV3Config(**_EXPERTS)), int4, _experts,
        {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {
            "group_0": {"weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}}}},
    ),
    "awq": (
        lambda: _model(LlamaForCausalLM, LlamaConfig(**_SIZES)), awq, _linear,
        {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"},
    ),
    "gptq": (
        lambda: _model(LlamaForCausalLM, LlamaConfig(**_SIZES)), gptq, _linear,
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False},
    ),
    "nf4": (
        lambda: _model(Qwen3ForCausalLM, Qwen3Config(**{**_SIZES, "intermediate_size": 192})), nf4, _linear,
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
    ),
    "hqq": (
        lambda: _model(LlamaForCausalLM, LlamaConfig(**_SIZES)), hqq, _linear,
        {"quant_method": "hqq", "skip_modules": ["lm_head"], "quant_config": {
            "offload_meta": False, "scale_quant_params": None, "zero_quant_params": None, "weight_quant_params": {
                "nbits": 4, "axis": 1, "group_size": 32, "channel_wise": True, "optimize": True, "round_zero": False,
                "view_as_float": False}}},
    ),
    "torchao": (
        lambda: _model(Qwen3ForCausalLM, Qwen3Config(**_SIZES)), torchao, _linear,
        {"quant_method": "torchao", "modules_to_not_convert": None, "quant_type": {"default": {
            "_type": "Int4WeightOnlyConfig", "_version": 2, "_data": {
                "group_size": 32, "set_inductor_config": True, "int4_packing_format": {
                    "_type": "Int4PackingFormat", "_data": "PLAIN"}}}}},
    ),
}  # fmt: skip
"""Name → (model, format of a weight, which weights are in it, `quantization_config`)."""


def _four_or_six_bits(name: str) -> int:
    """As files of llama.cpp mix them."""
    if not _linear(name):
        return F32
    return Q6_K if "down_proj" in name or "v_proj" in name else Q4_K


_WIDE = {**_SIZES, "hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
GGUF_KINDS: dict[str, tuple[Callable[[], PreTrainedModel], str, Callable[[str], int]]] = {
    "gguf_q4_0": (
        lambda: _model(LlamaForCausalLM, LlamaConfig(**_SIZES)), "llama",
        lambda name: Q4_0 if _linear(name) else F32,
    ),
    "gguf_q4_k": (lambda: _model(Qwen3ForCausalLM, Qwen3Config(**_WIDE)), "qwen3", _four_or_six_bits),
    "gguf_experts": (
        lambda: _model(Qwen3MoeForCausalLM, Qwen3MoeConfig(
            **_WIDE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=256, norm_topk_prob=True,
        )), "qwen3moe", _four_or_six_bits,
    ),
}  # fmt: skip
"""Name → (model, what llama.cpp calls its architecture, kind of a weight)."""
ALL_KINDS = (*KINDS, *GGUF_KINDS)


def save_published(kind: str, directory: Path) -> tuple[Path, Path]:
    """Directories (or a GGUF file) of a checkpoint in that format, and of the same weights stored as ever."""
    if kind in GGUF_KINDS:
        return _save_gguf(kind, directory)
    make, store, is_stored, settings = KINDS[kind]
    plain, published = directory / "plain", directory / "published"
    make().save_pretrained(plain)
    weights = load_file(plain / "model.safetensors")
    stored: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if not is_stored(name):
            stored[name] = weight
            continue
        parts, weights[name] = store(weight.float())
        stored |= {name.removesuffix(".weight") + suffix: tensor for suffix, tensor in parts.items()}
    save_file(
        {name: weight.contiguous() for name, weight in weights.items()}, plain / "model.safetensors", {"format": "pt"}
    )
    shutil.copytree(plain, published)
    header = _torchao_header(weights, is_stored) if kind == "torchao" else {}
    save_file(stored, published / "model.safetensors", {"format": "pt", **header})
    config = json.loads((plain / "config.json").read_text()) | {"quantization_config": settings}
    if kind == "int4":
        config["model_type"] = "kimi_k2"  # as its makers call it
    (published / "config.json").write_text(json.dumps(config))
    return published, plain


def _save_gguf(kind: str, directory: Path) -> tuple[Path, Path]:
    make, architecture, kind_of = GGUF_KINDS[kind]
    model, plain = make(), directory / "plain"
    model.save_pretrained(plain)
    published, weights = save_gguf(model, architecture, plain, kind_of)
    save_file(
        {name: weight.contiguous() for name, weight in weights.items()}, plain / "model.safetensors", {"format": "pt"}
    )
    return published, plain
