"""Every model of transformers that writes text from sound: equal to the local model, or refused with a reason.

In one process, each stack on two servers, as in `test_encoder_decoders`; the conv front end is the client's.
"""

import copy
from typing import Any

import pytest
import torch
from tests.numerics.speaking import IDS, save_speaking_whisper
from tests.numerics.test_encoder_decoders import check_generation, check_gradients, client_of
from tests.numerics.tiny_hearing_models import FRAMES, MEL_BINS, SPECIFIC, names, save_tiny_model, sound, tiny_config
from transformers import AutoModelForSpeechSeq2Seq, PreTrainedModel

from swarmllm.errors import ConfigurationError, UnsupportedModelError
from swarmllm.models.architecture import Task, task_class, task_of
from swarmllm.models.refused_architectures import HEARING

EXACT = sorted(SPECIFIC)


@pytest.fixture(scope="module", params=EXACT)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, ...]:
    """The local model, and a client of the same checkpoint."""
    path = save_tiny_model(request.param, tmp_path_factory.mktemp(request.param))
    local = AutoModelForSpeechSeq2Seq.from_pretrained(path)
    client = client_of(path)
    client.generation_config = copy.deepcopy(local.generation_config)
    return local, client


def test_all_that_are_exact_are_tested() -> None:
    assert set(EXACT) == HEARING


@pytest.mark.parametrize("name", [name for name in names() if name not in EXACT])
def test_others_are_refused_with_a_reason(name: str) -> None:
    with pytest.raises(UnsupportedModelError, match=r"can't be split over servers: it |were not seen to be exact"):
        task_class(tiny_config(name), Task.SPEECH_SEQ_TO_SEQ)


@pytest.mark.parametrize("name", EXACT)
def test_their_task_is_found_and_others_are_refused(name: str) -> None:
    config = tiny_config(name)
    assert task_of(config) == Task.SPEECH_SEQ_TO_SEQ
    for task in (Task.CAUSAL_LM, Task.SEQ_TO_SEQ_LM, Task.FEATURES):
        with pytest.raises(UnsupportedModelError, match="use AutoDistributedModelForSpeechSeq2Seq"):
            task_class(config, task)


def test_forward_is_exact(pair: tuple[PreTrainedModel, ...]) -> None:
    local, client = pair
    assert client.main_input_name == local.main_input_name
    target = torch.randint(3, 100, (2, 5), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        for more in ({}, {"use_cache": False}):
            want, got = (model(**sound(local), decoder_input_ids=target, **more).logits for model in pair)
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_generation_is_exact(pair: tuple[PreTrainedModel, ...]) -> None:
    check_generation(*pair, sound(pair[0]))


def test_gradients_are_exact(pair: tuple[PreTrainedModel, ...]) -> None:
    labels = torch.randint(3, 100, (2, 5), generator=torch.Generator().manual_seed(3))
    check_gradients(*pair, sound(pair[0]), labels=labels)
    first = next(name for name, _ in pair[0].named_parameters() if "conv" in name)
    assert dict(pair[1].named_parameters())[first].grad is not None


@pytest.fixture(scope="module")
def whispers(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, ...]:
    """The same of a Whisper that knows languages and tasks."""
    path = save_speaking_whisper(tmp_path_factory.mktemp("whisper"))
    return AutoModelForSpeechSeq2Seq.from_pretrained(path), client_of(path)


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
def test_whispers_own_generate(whispers: tuple[PreTrainedModel, ...], options: dict[str, Any], length: int) -> None:
    """Of short sounds and of long ones, which it writes piece by piece."""
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
