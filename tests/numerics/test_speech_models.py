"""Models that write text from sound: Whisper's own generate(), their task, and what is refused.

`test_architectures` compares all of them with the local model. The conv front end is the client's.
"""

import copy
from typing import Any

import pytest
import torch
from tests.numerics.architectures import SPEECH
from tests.numerics.in_process_swarm import encoder_decoder_client
from tests.numerics.tiny_speech_models import FRAMES, MEL_BINS, names, save_tiny_model, tiny_config
from tests.numerics.tiny_whisper import IDS, save_speaking_whisper
from transformers import AutoModelForSpeechSeq2Seq, PreTrainedModel

from swarmllm.errors import ConfigurationError, UnsupportedModelError
from swarmllm.models.architecture import Task, task_class, task_of


@pytest.fixture(scope="module", params=SPEECH)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, ...]:
    """The local model, and a client of the same checkpoint."""
    path = save_tiny_model(request.param, tmp_path_factory.mktemp(request.param))
    local = AutoModelForSpeechSeq2Seq.from_pretrained(path)
    client = encoder_decoder_client(path)
    client.generation_config = copy.deepcopy(local.generation_config)
    return local, client


@pytest.mark.parametrize("name", [name for name in names() if name not in SPEECH])
def test_others_are_refused_with_a_reason(name: str) -> None:
    with pytest.raises(UnsupportedModelError, match=r"can't be split over servers: it |were not seen to be exact"):
        task_class(tiny_config(name), Task.SPEECH_SEQ_TO_SEQ)


@pytest.mark.parametrize("name", SPEECH)
def test_their_task_is_found_and_others_are_refused(name: str) -> None:
    config = tiny_config(name)
    assert task_of(config) == Task.SPEECH_SEQ_TO_SEQ
    for task in (Task.CAUSAL_LM, Task.SEQ_TO_SEQ_LM, Task.FEATURES):
        with pytest.raises(UnsupportedModelError, match="use AutoDistributedModelForSpeechSeq2Seq"):
            task_class(config, task)


@pytest.fixture(scope="module")
def whispers(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, ...]:
    """The same of a Whisper that knows languages and tasks."""
    path = save_speaking_whisper(tmp_path_factory.mktemp("whisper"))
    return AutoModelForSpeechSeq2Seq.from_pretrained(path), encoder_decoder_client(path)


@pytest.mark.parametrize(
    "options",
    [
        {"language": "en", "task": "transcribe"},
        {"language": "de", "task": "translate", "num_beams": 3},
        {},  # it looks which language it is
        {"language": "en", "return_timestamps": True},
        {"language": "en", "prompt_ids": torch.tensor([IDS["<|startofprev|>"], 7, 9])},
        {"language": "en", "temperature": (0.0, 0.6), "logprob_threshold": 0.0, "compression_ratio_threshold": 1.35},
    ],
)
@pytest.mark.parametrize("length", [FRAMES, 3 * FRAMES])
@pytest.mark.rotates(3)
def test_whispers_own_generate(whispers: tuple[PreTrainedModel, ...], options: dict[str, Any], length: int) -> None:
    """Short sounds, and long ones, which it writes piece by piece."""
    features = torch.randn(2, MEL_BINS, length, generator=torch.Generator().manual_seed(5))
    mask = torch.ones(2, length, dtype=torch.long)
    mask[1, length * 2 // 3 :] = 0
    more = {"return_timestamps": True} if length > FRAMES else {}
    written = []
    for model in whispers:
        torch.manual_seed(6)
        written.append(model.generate(input_features=features, attention_mask=mask, **{**options, **more}).tolist())
    assert written[0] == written[1]
    assert len({*written[0][0]}) > 4


def test_without_sound_it_says_how_to_give_it(pair: tuple[PreTrainedModel, ...]) -> None:
    _, client = pair
    with pytest.raises(ConfigurationError, match=f"give the model its audio as {client.main_input_name}"):
        client.get_encoder()(torch.zeros(1, 0, 8))
