"""A tiny random Whisper for which it matters what it hears, and sounds for it."""

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from recordings import RATE
from tests.numerics.tiny_whisper import save_speaking_whisper
from transformers import AutoFeatureExtractor, AutoModelForSpeechSeq2Seq

CONTRAST = 4.0


def chirp(seconds: float, seed: int = 1, rate: int = RATE) -> NDArray[np.float32]:
    """Three rising tones that swell and fade, in steps of 16 bits."""
    random, time = np.random.default_rng(seed), np.arange(round(seconds * rate)) / rate
    tones = [np.sin(2 * np.pi * time * random.uniform(100, 1500) * (1 + random.uniform(0, 0.5) * time)) for _ in "abc"]
    loudness = 0.2 * np.sin(2 * np.pi * random.uniform(1, 6) * time)
    return ((sum(tones) * loudness * 32768).round() / 32768).astype(np.float32)


@torch.no_grad()
def save_audio_model(path: Path) -> Path:
    """With all that its pipeline reads. The decoder attends to what is different in sounds, and little is written."""
    save_speaking_whisper(path)
    model, extractor = AutoModelForSpeechSeq2Seq.from_pretrained(path), AutoFeatureExtractor.from_pretrained(path)
    heard = [extractor(chirp(1.0, seed), sampling_rate=RATE, return_tensors="pt").input_features for seed in (7, 8)]
    usual = model.model.encoder(torch.cat(heard)).last_hidden_state.mean((0, 1))
    for block in model.model.decoder.layers:
        values = block.encoder_attn.v_proj
        values.bias.copy_(-values.weight @ usual)
        values.weight *= CONTRAST
        values.bias *= CONTRAST
    model.generation_config.max_length, model.generation_config.num_beams = 14, 2
    model.save_pretrained(path)
    return path
