"""A tiny random model of every architecture of transformers that takes pictures and text, and a picture for it.

Configs are transformers' defaults with small sizes; what an architecture wants otherwise is in `SPECIFIC`. A picture is
random numbers in the form that its tower takes, found by trying the few forms that there are.
"""

import copy
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tests.numerics import tiny_models
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

VOCABULARY, IMAGE_TOKEN = 160, 150
TEXT: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCABULARY),
    **dict.fromkeys(("hidden_size", "word_embed_proj_dim", "embed_dim"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "intermediate_size_mlp"), 96),
    **dict.fromkeys(("num_hidden_layers", "layers", "num_attention_heads", "attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_global_key_value_heads"), 2),
    **dict.fromkeys(("head_dim", "v_head_dim", "query_pre_attn_scalar", "global_head_dim"), 16),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k"), 2),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "n_group", "topk_group"), 1),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "linear_key_head_dim", "linear_value_head_dim"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "sliding_window"), 8),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 2),
    **dict.fromkeys(("dropout", "attention_dropout"), 0.0),
    "hidden_size_per_layer_input": 16,
    "max_position_embeddings": 512,
    "first_k_dense_replace": 1,
}
TOWER: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "embed_dim", "projection_dim", "d_model", "hidden_dim", "encoder_hidden_size"), 32),
    **dict.fromkeys(("intermediate_size", "encoder_ffn_dim"), 48),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "layers", "encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "num_heads", "encoder_attention_heads", "mlp_ratio"), 2),
    **dict.fromkeys(("spatial_merge_size", "temporal_patch_size"), 2),
    **dict.fromkeys(("num_position_embeddings", "out_hidden_size"), 64),
    **dict.fromkeys(("dropout", "attention_dropout"), 0.0),
    "image_size": 32,
    "patch_size": 8,
    "num_channels": 3,
    "depth": 3,
    "window_size": 16,
    "fullatt_block_indexes": [1],
    "deepstack_visual_indexes": [0, 1],
}
FOR_MORE_BLOCKS = (
    *("layer_types", "mlp_layer_types", "no_rope_layers", "moe_layers", "rope_parameters", "per_layer_config"),
    *("layers_block_type", "hybrid_override_pattern", "number_of_conv_states"),
)
"""Fields of a default config about each of its many blocks, or about larger heads."""
MARKS_OF_TEXT = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
MARKS = {
    **dict.fromkeys(("image_token_id", "image_token_index", "image_patch_id"), IMAGE_TOKEN),
    **dict.fromkeys(("video_token_id", "video_token_index"), 151),
    **dict.fromkeys(("vision_start_token_id", "boi_token_index", "boi_token_id", "image_start_token_id"), 152),
    **dict.fromkeys(("vision_end_token_id", "eoi_token_index", "eoi_token_id", "image_end_token_id"), 153),
    "audio_token_id": 154,
}
STARTS = ("vision_start_token_id", "boi_token_index", "boi_token_id", "image_start_token_id")
ENDS = ("vision_end_token_id", "eoi_token_index", "eoi_token_id", "image_end_token_id")


def _rope(*sections: int, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [*sections], **more}}


_THREE_AXES = {"text_config": _rope(2, 3, 3)}
_TILES = {"image_grid_pinpoints": [[32, 64], [64, 32], [64, 64]]}
_SMALL = {
    **dict.fromkeys(("hidden_size", "intermediate_size"), 32),
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "image_size": 32,
    "patch_size": 8,
}
_SAM = {
    **_SMALL,
    "output_channels": 16,
    "mlp_dim": 48,
    "window_size": 4,
    "global_attn_indexes": [1],
    "downsample_channels": [24, 32],
}
_MUSE = {
    "out_hidden_size": 128,
    "projector_hidden_size": 32,
    "text_config": {"layer_types": tiny_models.SLIDING_AND_FULL, "layer_rope_theta": [1e4, 0.0] * 2},
}
SPECIFIC: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("glm46v", "glm4v", "glm_ocr", "glmga", "paddleocr_vl", "qwen2_5_vl"), _THREE_AXES),
    **dict.fromkeys(("llava_next", "llava_next_video", "llava_onevision"), _TILES),
    **{name: {"vision_config": {"head_dim": 16}} for name in ("lighton_ocr", "mistral3")},
    "aria": {"projector_patch_to_query_dict": {16: 4}},
    "blip-2": {"image_token_index": IMAGE_TOKEN, "num_query_tokens": 4},
    "cosmos3_edge": {"text_config": _rope(2, 3, 3, mrope_interleaved=True)},
    "ernie4_5_vl_moe": {"text_config": {"moe_intermediate_size": [32, 32], **_rope(3, 3, 2)}},
    "exaone4_5": {"vision_config": {"num_key_value_heads": 2}},
    "gemma3": {"mm_tokens_per_image": 4, "text_config": {"layer_types": ["sliding_attention", "full_attention"] * 2}},
    "glm4v_moe": {"text_config": _rope(1, 1, 2, partial_rotary_factor=0.5)},
    "ovis2": {"vision_config": {"vocab_size": 40, "num_visual_indicator_tokens": 5}, "hidden_size": 64},
    "paligemma": {"projection_dim": 64, "vision_config": {"projection_dim": 64}},
    "qwen2_5_omni_thinker": {
        **_THREE_AXES,
        "vision_start_token_id": 152,
        "vision_end_token_id": 153,
        "position_id_per_seconds": 25,
    },
    "qwen2_vl": {**_THREE_AXES, "vision_config": {"hidden_size": 64}},
    "qwen3_omni_moe_thinker": {
        "text_config": _rope(2, 3, 3, mrope_interleaved=True),
        "vision_start_token_id": 152,
        "vision_end_token_id": 153,
    },
    "granite4_vision": {
        "vision_config": {"hidden_size": 128},
        "downsample_rate": "1/2",
        "spatial_target_layers": [1, 3],
        "deepstack_layer_map": [[-1, 0], [-2, 2]],
        "image_grid_pinpoints": [[32, 64], [64, 64]],
    },
    "mistral4": {"num_key_value_heads": 4},
    "janus": {
        "vision_config": {"projection_dim": 64},
        "vq_config": {"base_channels": 32, "channel_multiplier": [1, 1], "num_res_blocks": 1},
    },
    "glm5_next": {
        "text_config": {
            **dict.fromkeys(("num_key_value_heads", "linear_num_heads", "index_n_heads"), 4),
            **dict.fromkeys(("linear_head_dim", "index_head_dim"), 16),
            "layer_types": ["linear_attention", "indexed_attention"] * 2,
            "index_topk": 8,
            "index_kpool": 2,
            **dict.fromkeys(("qk_rope_head_dim", "head_dim"), 0),
        },
        "vision_config": {"projection_intermediate_size": 48},
    },
    "llama4": {
        "text_config": tiny_models.SPECIFIC["llama4_text"],
        "vision_config": {
            "intermediate_size": 128,
            **dict.fromkeys(("projector_input_dim", "projector_output_dim", "vision_output_dim"), 32),
        },
    },
    "vipllava": {"vision_feature_layers": [-1, -2]},
    "chameleon": {
        "vocabulary_map": {"<image>": IMAGE_TOKEN, **{f"IMGIMG{'ABCDEFGHIJ'[i]}Z": 110 + i for i in range(8)}},
        "image_token_id": IMAGE_TOKEN,
        "vq_config": {
            **dict.fromkeys(("embed_dim", "latent_channels", "base_channels", "resolution"), 32),
            "num_embeddings": 8,
            "channel_multiplier": [1, 1],
            "num_res_blocks": 1,
        },
    },
    "cohere_compass": {
        "text_config": {
            "layer_types": tiny_models.SLIDING_AND_FULL,
            "rope_parameters": dict.fromkeys(
                ("sliding_attention", "full_attention"), _rope(2, 3, 3)["rope_parameters"]
            ),
        }
    },
    "deepseek_ocr2": {
        "vision_config": {"sam_config": _SAM, "encoder_config": {**_SMALL, "vocab_size": 32}},
        "text_config": {"mlp_layer_types": ["dense", *["sparse"] * 3], "num_experts_per_tok": 2},
    },
    "unlimited_ocr": {"vision_config": {"sam_config": _SAM, "encoder_config": _SMALL}},
    "hunyuan_vl": {
        "text_config": {"head_dim": 16, **_rope(2, 3, 3)},
        "vision_config": {"text_hidden_size": 64, "temporal_patch_size": 1, "num_key_value_heads": 2},
    },
    "inkling2": {"vision_config": {"text_hidden_size": 64, "posemb_grid_size": 4, "projection_hidden_dim": 32}},
    "inkling_mm_model": {
        "vision_config": {"text_hidden_size": 64, "n_layers": 3, "patch_size": 4},
        "audio_config": {"text_hidden_size": 64},
        "text_config": tiny_models.SPECIFIC["inkling_text"],
    },
    "kimi_k25": {"projection_hidden_size": 32, "text_config": {"head_dim": 8, "num_key_value_heads": 4}},
    "instructblip": {"image_token_index": IMAGE_TOKEN, "num_query_tokens": 4},
    "instructblipvideo": {"video_token_index": IMAGE_TOKEN, "num_query_tokens": 4},
    "deepseek_vl_hybrid": {"high_res_vision_config": {**_SAM, "downsample_channels": None}},
    "nemotron_h_omni": {
        "image_token_id": IMAGE_TOKEN,
        "vision_config": {"patch_dim": 192, "max_img_size": 32},
        "text_config": {"layers_block_type": ["mamba", "moe", "attention", "mlp"]},
        "projector_hidden_size": 64,
        "vision_hidden_size": 32,
    },
    "mistral_large4": {
        "text_config": {
            "kv_source_layers": [0, 1, 2, 3],
            "num_key_value_heads": 4,
            "no_rope_layers": [1, 0, 1, 0],
            "index_topk": 4,
            "index_n_heads": 2,
            "index_head_dim": 16,
        },
        "vision_config": {"head_dim": 16},
    },
    "molmo2": {
        "video_token_id": IMAGE_TOKEN,
        "vision_config": {"head_dim": 16, "num_key_value_heads": 2, "num_position_embeddings": 16},
        "adapter_config": {
            "vision_feature_layer": [1, 0],
            "head_dim": 16,
            "num_key_value_heads": 2,
            "text_hidden_size": 64,
        },
        "text_config": {"rope_scaling_layers": [], "additional_vocab_size": 8},
    },
    "muse_glimmer": _MUSE,
    "muse_spark": {
        **_MUSE,
        "audio_config": {"num_hidden_layers": 4, "hidden_sizes": [16] * 4, "out_hidden_size": 64},
    },
    "qwen4_exp": {
        "text_config": {**tiny_models.SPECIFIC["qwen4_exp_text"], "hc_lowrank": 8, "ple_layer_ids": []},
    },
    "step3p7": {
        "text_config": {
            "sliding_window": 8,
            "layer_types": tiny_models.SLIDING_AND_FULL,
            "rope_parameters": {
                kind: {"rope_type": "default", "rope_theta": theta}
                for kind, theta in (("sliding_attention", 1e4), ("full_attention", 1e5))
            },
        }
    },
}


def names() -> list[str]:
    """All model types of transformers that make text from pictures and text."""
    return sorted(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)


def tiny_config(name: str) -> PreTrainedConfig:
    usual, specific = AutoConfig.for_model(name), SPECIFIC.get(name, {})
    given: dict[str, Any] = {}
    for part in usual.sub_configs:
        if (config := getattr(usual, part, None)) is None:
            continue
        is_text = "text" in part
        kept = {key: value for key, value in config.to_dict().items() if key not in FOR_MORE_BLOCKS}
        sizes = {key: _like(kept[key], value) for key, value in (TEXT if is_text else TOWER).items() if key in kept}
        given[part] = copy.deepcopy({**kept, **sizes, **(MARKS_OF_TEXT if is_text else {}), **specific.get(part, {})})
    if not any("text" in part for part in given):
        of_text = usual.to_dict()
        given |= {key: _like(of_text[key], value) for key, value in TEXT.items() if key in of_text}
    given |= {key: value for key, value in MARKS.items() if getattr(usual, key, None) is not None}
    given |= {key: value for key, value in specific.items() if key not in usual.sub_configs}
    return AutoConfig.for_model(name, **given)


def _like(usual: Any, value: Any) -> Any:
    """The value in the form of the usual one."""
    if isinstance(usual, float):
        return float(value)
    if isinstance(usual, list | tuple) and not isinstance(value, list):
        return [value] * len(usual)
    return None if usual is None else value


def tiny_model(name: str, seed: int = 0) -> PreTrainedModel:
    """In float32, with weights so large that tokens differ."""
    torch.manual_seed(seed)
    config = tiny_config(name)
    model = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)](config).eval()
    for parameter in model.parameters():
        if parameter.ndim == 2 and parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.12)
    model.tie_weights()
    model.generation_config.eos_token_id = None
    return model


def save_tiny_model(name: str, path: Path) -> PreTrainedModel:
    model = tiny_model(name)
    model.save_pretrained(path)
    return model


def inputs_of(model: PreTrainedModel, seed: int = 3) -> dict[str, Tensor]:
    """A text with a picture in it, as the model's processor would give it."""
    failures = []
    for picture in _pictures(model.config, seed):
        try:
            return _with_text(model, picture, seed)
        except Exception as error:  # noqa: BLE001 - model code: most towers take one form only
            failures.append(f"{sorted(picture)}: {error!r:.200}")
    raise AssertionError("\n".join(failures))


def _pictures(config: PreTrainedConfig, seed: int) -> Iterator[dict[str, Tensor]]:
    """A picture in the forms that towers take: patches with a grid, pixels, tiles, patches with positions."""
    random = torch.Generator().manual_seed(seed)
    if getattr(config, "vision_config", None) is None:
        yield {}  # an architecture that only its place in transformers' lists tells from others
        return
    tower = config.vision_config
    patch, size = (
        _first(getattr(tower, name, None) or usual) for name, usual in (("patch_size", 8), ("image_size", 32))
    )
    channels = getattr(tower, "num_channels", None) or getattr(tower, "in_channels", None) or 3
    frames = getattr(tower, "temporal_patch_size", None) or getattr(tower, "patch_temporal", 1)

    def pixels(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random)

    grid = torch.tensor([[1, 4, 4]])
    yield {"pixel_values": pixels(16, channels * frames * patch * patch), "image_grid_thw": grid}
    yield {"pixel_values": pixels(16, channels, patch, patch), "image_grid_thw": grid}
    yield {"pixel_values": pixels(1, channels, size, size)}
    yield {"pixel_values": pixels(1, channels, size, size), "image_sizes": torch.tensor([[size, size]])}
    yield {"pixel_values": pixels(1, 5, channels, size, size), "image_sizes": torch.tensor([[64, 64]])}
    shown = torch.ones(1, 1, size, size, dtype=torch.bool)
    yield {"pixel_values": pixels(1, 1, channels, size, size), "pixel_attention_mask": shown}
    flat, whole = pixels(1, 16, channels * patch * patch), torch.ones(1, 16, dtype=torch.long)
    yield {"pixel_values": flat, "spatial_shapes": torch.tensor([[4, 4]]), "pixel_attention_mask": whole}
    rows = {"target_sizes": torch.tensor([[4, 4]])}
    yield {"pixel_values": pixels(1, channels, patch, 16 * patch), **rows}
    yield {"pixel_values": [pixels(channels, patch, 16 * patch)], **rows}
    merged = torch.tensor([1])
    yield {"pixel_values": flat[0], "image_grid_thw": grid, "image_merge_sizes": merged}
    yield {"pixel_values": flat[0], "image_grid_thw": grid}
    yield {"pixel_values": pixels(1, 1, channels, size, size), "pixel_attention_mask": torch.ones(1, 1).bool()}
    yield {"pixel_values": flat[0], "image_grid_hw": grid[:, 1:]}
    yield {"pixel_values": pixels(4, 2 * patch, 2 * patch, channels), "image_grid_thw": torch.tensor([[1, 2, 2]])}
    yield {"pixel_values": pixels(4, frames, patch, patch, channels)}
    instruction = torch.randint(3, 20, (1, 4), generator=random)
    yield {"pixel_values": pixels(1, channels, size, size), "qformer_input_ids": instruction}
    yield {"pixel_values": pixels(1, 2, channels, size, size), "qformer_input_ids": instruction}
    fine = getattr(getattr(config, "high_res_vision_config", None), "image_size", size)
    yield {"pixel_values": pixels(1, channels, size, size), "high_res_pixel_values": pixels(1, channels, fine, fine)}
    pooled = torch.arange(16).reshape(4, 4)
    yield {"pixel_values": flat, "image_token_pooling": pooled, "image_grids": torch.tensor([[2, 1, 1, 2]])}


def _with_text(model: PreTrainedModel, picture: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    parameters = inspect.signature(model.forward).parameters
    if not picture:
        ids = torch.arange(3, 15)[None]
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    inner = getattr(model, "model", model)
    features = next(
        getattr(part, name)
        for name in ("get_image_features", "get_video_features")
        for part in (model, inner)
        if hasattr(part, name)
    )
    taken = inspect.signature(features).parameters
    if not picture.keys() <= {*parameters, *taken}:
        raise ValueError("this model has no such arguments")
    with torch.no_grad():
        found = features(**{key: value for key, value in picture.items() if key in taken or "kwargs" in taken})
    count = _num_rows(found)
    random = torch.Generator().manual_seed(seed)
    before, after = (torch.randint(3, 100, (length,), generator=random).tolist() for length in (5, 4))
    start, end = (
        [mark for name in marks if (mark := getattr(model.config, name, None)) is not None][:1]
        for marks in (STARTS, ENDS)
    )
    ids = torch.tensor([[*before, *start, *[IMAGE_TOKEN] * count, *end, *after]])
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **picture}
    for name in ("mm_token_type_ids", "token_type_ids"):
        if name in parameters:
            given[name] = (ids == IMAGE_TOKEN).long()
    with torch.no_grad():
        model(**given, use_cache=False)
    return given


def _first(size: Any) -> int:
    return int(size[0] if isinstance(size, list | tuple) else size)


def _num_rows(found: Any) -> int:
    if hasattr(found, "last_hidden_state"):
        usual = found.last_hidden_state if found.pooler_output is None else found.pooler_output
        found = found.deepstack_features[0][1] if usual is None else usual
    parts = found if isinstance(found, list | tuple) else [found]
    return sum(part.reshape(-1, part.shape[-1]).shape[0] for part in parts)
