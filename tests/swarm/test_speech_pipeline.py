"""transformers' own pipeline for speech, on a model of the swarm."""

from pathlib import Path
from typing import Any

import pytest
import torch
from commands import command
from swarm_models import OPTIONS
from tests.numerics.tiny_whisper import save_speaking_whisper
from transformers import AutoFeatureExtractor, AutoModelForSpeechSeq2Seq, AutoTokenizer, pipeline

from swarmllm import AutoDistributedModelForSpeechSeq2Seq, LocalSwarm

pytestmark = pytest.mark.rotates(6, whole_file=True)


def test_automatic_speech_recognition(tmp_path: Path) -> None:
    """One piece, and several with their times; `status` and `doctor` count the blocks of each stack."""
    path = str(save_speaking_whisper(tmp_path))
    local = AutoModelForSpeechSeq2Seq.from_pretrained(path)
    extractor, tokenizer = AutoFeatureExtractor.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    random = torch.Generator().manual_seed(1)
    sounds = [torch.randn(length, generator=random).numpy() for length in (9_000, 40_000)]

    def written(model: torch.nn.Module) -> list[dict[str, Any]]:
        listen = pipeline("automatic-speech-recognition", model=model, feature_extractor=extractor, tokenizer=tokenizer)
        of_german = {"language": "de", "task": "transcribe"}
        return [
            listen({"raw": sound, "sampling_rate": 16_000}, return_timestamps=True, generate_kwargs=of_german)
            for sound in sounds
        ] + [listen(sounds[0], generate_kwargs=of_german)]

    with (
        LocalSwarm(path, spans=[(0, 3), (3, 5), (5, 7)], **OPTIONS) as swarm,
        AutoDistributedModelForSpeechSeq2Seq.from_pretrained(path, initial_peers=swarm.initial_peers) as model,
    ):
        found = written(model)
        status = command("status", "--initial_peers", *swarm.initial_peers)
        looked = command("doctor", "--model", path, "--device", "cpu", "--initial_peers", *swarm.initial_peers)
    assert "encoder 0:4 is --block_indices 0:4, decoder 0:3 is --block_indices 4:7" in status.stdout
    assert "encoder 3:4, decoder 0:1" in status.stdout
    assert "7 blocks (encoder 0:4, decoder 0:3)" in looked.stdout
    assert (status.returncode, looked.returncode) == (0, 0), looked.stdout
    assert found == written(local)
    assert len({one["text"] for one in found} - {""}) > 1
