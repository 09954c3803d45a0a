"""A tiny random model of every type that transformers has for text from sound, as far as a swarm can run it.

The encoder has 4 blocks, the decoder 3, as in `tiny_encoder_decoders`.
"""

from pathlib import Path
from typing import Any

import torch
from tests.numerics.tiny_encoder_decoders import COMMON, VOCABULARY, with_large_weights
from transformers import AutoConfig, AutoModelForSpeechSeq2Seq, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES

MEL_BINS, FRAMES = 8, 100
SPECIFIC: dict[str, dict[str, Any]] = {
    "whisper": {
        "num_mel_bins": MEL_BINS,
        "max_source_positions": FRAMES // 2,
        "max_target_positions": 64,
        "begin_suppress_tokens": None,
        "suppress_tokens": None,
    },
    "speech_to_text": {
        "input_feat_per_channel": MEL_BINS,
        "max_source_positions": FRAMES,
        "max_target_positions": 64,
        "conv_channels": 16,
    },
    "moonshine": {
        "encoder_num_hidden_layers": 4,
        "decoder_num_hidden_layers": 3,
        "encoder_num_attention_heads": 4,
        "decoder_num_attention_heads": 4,
        "encoder_num_key_value_heads": 4,
        "decoder_num_key_value_heads": 4,
    },
}


def names() -> list[str]:
    """All model types of transformers that write text from sound."""
    return sorted(MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES)


def tiny_config(name: str) -> PreTrainedConfig:
    """The config of a type; of a type that a swarm refuses its usual config, because only that is looked at."""
    if name not in SPECIFIC:
        return CONFIG_MAPPING[name]()
    unfit = ("num_hidden_layers", "num_attention_heads") if name == "moonshine" else ()
    known = {key: value for key, value in COMMON.items() if key not in unfit}
    return AutoConfig.for_model(name, **{**known, **SPECIFIC[name], "vocab_size": VOCABULARY})


def tiny_model(name: str) -> PreTrainedModel:
    """In float32."""
    torch.manual_seed(0)
    return with_large_weights(AutoModelForSpeechSeq2Seq.from_config(tiny_config(name)))


def save_tiny_model(name: str, path: Path) -> Path:
    tiny_model(name).save_pretrained(path)
    return path


def sound(model: PreTrainedModel, rows: int = 2, seed: int = 1) -> dict[str, torch.Tensor]:
    """Sounds in the form that the model takes; of those that know of padding, the second ends early."""
    random = torch.Generator().manual_seed(seed)
    kind, name = model.config.model_type, model.main_input_name
    if kind == "whisper":
        return {name: torch.randn(rows, MEL_BINS, FRAMES, generator=random)}
    shape = (rows, 8000) if kind == "moonshine" else (rows, FRAMES, MEL_BINS)
    mask = torch.ones(shape[:2], dtype=torch.long)
    mask[1:, shape[1] // 2 :] = 0
    return {name: torch.randn(shape, generator=random), "attention_mask": mask}
