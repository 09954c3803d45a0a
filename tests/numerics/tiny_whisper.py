"""The files of a tiny Whisper besides its weights: tokens of languages and tasks, a tokenizer, a feature extractor."""

from pathlib import Path

import torch
from tests.numerics.tiny_speech_models import FRAMES, MEL_BINS, VOCABULARY, tiny_model
from transformers import GenerationConfig, WhisperFeatureExtractor, WhisperTokenizer

SPECIAL = ["<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|de|>", "<|translate|>", "<|transcribe|>"]
SPECIAL += ["<|startofprev|>", "<|nospeech|>", "<|notimestamps|>"]
FIRST = 60
"""The first special token; behind the last come timestamps, to the end of the vocabulary."""
IDS = {token: FIRST + place for place, token in enumerate(SPECIAL)}


def save_speaking_whisper(path: Path) -> Path:
    """A Whisper that knows two languages, with all that its pipeline reads."""
    model = tiny_model("whisper")
    torch.nn.init.normal_(model.model.decoder.embed_positions.weight, std=2.0)  # so that it doesn't repeat itself
    config = {
        "decoder_start_token_id": IDS["<|startoftranscript|>"],
        "eos_token_id": IDS["<|endoftext|>"],
        "pad_token_id": IDS["<|endoftext|>"],
        "no_timestamps_token_id": IDS["<|notimestamps|>"],
        "prev_sot_token_id": IDS["<|startofprev|>"],
        "lang_to_id": {token: IDS[token] for token in ("<|en|>", "<|de|>")},
        "task_to_id": {name: IDS[f"<|{name}|>"] for name in ("translate", "transcribe")},
        "is_multilingual": True,
        "return_timestamps": False,
        "max_initial_timestamp_index": 10,
        "max_length": 40,
        "suppress_tokens": list(IDS.values()),
    }
    for name in ("decoder_start_token_id", "eos_token_id", "pad_token_id"):
        setattr(model.config, name, config[name])
    model.generation_config = GenerationConfig(**config)
    model.save_pretrained(path)
    vocabulary = {chr(ord("!") + place): place for place in range(FIRST)}
    timestamps = [f"<|{place * 0.02:.2f}|>" for place in range(VOCABULARY - FIRST - len(SPECIAL))]
    tokenizer = WhisperTokenizer(vocab=vocabulary, merges=[], unk_token="!")
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    tokenizer.add_tokens(timestamps)
    tokenizer.save_pretrained(path)
    WhisperFeatureExtractor(feature_size=MEL_BINS, chunk_length=FRAMES // 100).save_pretrained(path)
    return path
