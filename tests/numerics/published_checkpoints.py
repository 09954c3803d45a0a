"""Tiny checkpoints in the layouts in which models are published, and beside each the same weights stored as ever."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gguf_writer import F32, Q4_0, Q4_K, Q6_K, save_gguf
from published_stores import (
    Store,
    awq,
    bitsandbytes_4bit,
    bitsandbytes_int8,
    fp8,
    fp8_by_rows,
    fp8_of_one_scale,
    gptq,
    hqq,
    int4,
    int4_in_order_of_use,
    int8_by_rows,
    mxfp4,
    mxfp4_in_rows,
    nvfp4,
    torchao,
)
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


Kind = tuple[Callable[[], PreTrainedModel], Store, Callable[[str], bool], dict[str, Any]]


def _llama() -> PreTrainedModel:
    return _model(LlamaForCausalLM, LlamaConfig(**_SIZES))


def _qwen(**sizes: Any) -> PreTrainedModel:
    return _model(Qwen3ForCausalLM, Qwen3Config(**{**_SIZES, **sizes}))


def _gptq(bits: int = 4, **settings: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": 32, "desc_act": False, **settings}


def _hqq(bits: int) -> Kind:
    weights = {"nbits": bits, "axis": 1, "group_size": 32, "channel_wise": True, "optimize": True}
    found = {"offload_meta": False, "scale_quant_params": None, "zero_quant_params": None}
    found |= {"weight_quant_params": weights | {"round_zero": False, "view_as_float": False}}
    settings = {"quant_method": "hqq", "skip_modules": ["lm_head"], "quant_config": found}
    return _llama, partial(hqq, bits=bits), _linear, settings


def _torchao(kind: str, **data: Any) -> dict[str, Any]:
    quant_type = {"default": {"_type": kind, "_version": 2, "_data": data}}
    return {"quant_method": "torchao", "modules_to_not_convert": None, "quant_type": quant_type}


def _compressed(form: str, **weights: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups}


_PER_ROW = {"granularity": {"_type": "PerRow", "_version": 1, "_data": {"dim": -1}}}
_INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
KINDS: dict[str, Kind] = {
    "fp8": (_qwen, fp8, _linear, {"quant_method": "fp8", "weight_block_size": [64, 64]}),
    "fp8_tensor": (_llama, fp8_of_one_scale, _linear, {"quant_method": "fp8", "activation_scheme": "static"}),
    "fbgemm": (_llama, fp8_by_rows, _linear, {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}),
    "mxfp4": (
        lambda: _model(GptOssForCausalLM, GptOssConfig(
            **_SIZES, num_local_experts=4, num_experts_per_tok=2, sliding_window=16,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        )), mxfp4, _experts, {"quant_method": "mxfp4"},
    ),
    "int4": (
        lambda: _model(DeepseekV3ForCausalLM, DeepseekV3Config(**_EXPERTS)), int4, _experts,
        _compressed("pack-quantized", **_INT4),
    ),
    "ct_int4_ordered": (
        _llama, int4_in_order_of_use, _linear, _compressed("pack-quantized", **_INT4, actorder="group")
    ),
    "ct_int8": (_qwen, int8_by_rows, _linear, _compressed("int-quantized", num_bits=8, type="int", strategy="channel")),
    "ct_fp8": (
        _llama, fp8_by_rows, _linear, _compressed("float-quantized", num_bits=8, type="float", strategy="channel")
    ),
    "ct_fp8_blocks": (
        _qwen, partial(fp8, name=".weight_scale"), _linear, _compressed(
            "float-quantized", num_bits=8, type="float", strategy="block", block_structure=[64, 64]),
    ),
    "ct_nvfp4": (
        _llama, partial(nvfp4, divides=True), _linear, _compressed(
            "nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16),
    ),
    "ct_mxfp4": (
        _llama, mxfp4_in_rows, _linear, _compressed(
            "mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32),
    ),
    "modelopt_fp8": (
        _llama, fp8_of_one_scale, _linear, {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}
    ),
    "modelopt_nvfp4": (
        _qwen, partial(nvfp4, divides=False), _linear,
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]},
    ),
    "awq": (_llama, awq, _linear, {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}),
    "gptq": (_llama, gptq, _linear, _gptq()),
    "gptq_v2": (_llama, partial(gptq, version=2), _linear, _gptq(checkpoint_format="gptq_v2")),
    "gptq_ordered": (_llama, partial(gptq, in_order=False), _linear, _gptq(desc_act=True)),
    "gptq_2_bits": (_llama, partial(gptq, bits=2), _linear, _gptq(2)),
    "gptq_8_bits": (_llama, partial(gptq, bits=8), _linear, _gptq(8)),
    "nf4": (
        partial(_qwen, intermediate_size=192), partial(bitsandbytes_4bit, kind="nf4"), _linear,
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
    ),
    "nf4_nested": (
        partial(_qwen, intermediate_size=192), partial(bitsandbytes_4bit, kind="nf4", nested=True), _linear,
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_use_double_quant": True},
    ),
    "fp4": (
        partial(_qwen, intermediate_size=192), partial(bitsandbytes_4bit, kind="fp4"), _linear,
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
    ),
    "bnb_int8": (_llama, bitsandbytes_int8, _linear, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
    "hqq": _hqq(4),
    "hqq_2_bits": _hqq(2),
    "hqq_3_bits": _hqq(3),
    "hqq_8_bits": _hqq(8),
    "torchao": (
        _qwen, torchao, _linear, _torchao("Int4WeightOnlyConfig", group_size=32, set_inductor_config=True,
            int4_packing_format={"_type": "Int4PackingFormat", "_data": "PLAIN"}),
    ),
    "ao_int8": (
        _qwen, partial(int8_by_rows, prefix="._weight_qdata", scale_name="._weight_scale"), _linear,
        _torchao("Int8WeightOnlyConfig", **_PER_ROW),
    ),
    "ao_float8": (
        _llama, partial(fp8_by_rows, prefix="._weight_qdata", scale_name="._weight_scale"), _linear,
        _torchao("Float8WeightOnlyConfig", **_PER_ROW),
    ),
}  # fmt: skip
"""Name → (model, format of a weight, which weights are in it, `quantization_config`)."""
_AO_CLASSES = {"torchao": "Int4Tensor", "ao_int8": "Int8Tensor", "ao_float8": "Float8Tensor"}


def _torchao_header(kind: str, weights: dict[str, Tensor], is_stored: Callable[[str], bool]) -> dict[str, str]:
    """The header of the file about each weight."""

    def about(name: str, weight: Tensor) -> dict[str, Any]:
        if not is_stored(name):
            return {"_type": "Tensor"}
        parts, size = ["qdata", "scale"], 32 if kind == "torchao" else weight.shape[1]
        data = {"activation_dtype": {"_type": "torch.dtype", "_data": "bfloat16"}, "block_size": [1, size]}
        parts += ["zero_point"] if kind == "torchao" else []
        return {"_type": _AO_CLASSES[kind], "_data": data | {"shape": list(weight.shape)}, "_tensor_data_names": parts}

    notes = {name: json.dumps(about(name, weight)) for name, weight in weights.items()}
    return {**notes, "tensor_names": json.dumps(list(weights))}


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
    header = _torchao_header(kind, weights, is_stored) if kind in _AO_CLASSES else {}
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
