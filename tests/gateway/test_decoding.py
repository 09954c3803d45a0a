"""Ways to choose tokens as fields of requests: the same list as generate()'s and the commands', and the same tokens."""

from pathlib import Path
from typing import Any

import pytest
import torch
from web_gateway import RunningGateway

from swarmllm.client.distributed_model import DistributedModelForCausalLM
from swarmllm.client.text_generation import TextConfig
from swarmllm.decoding.methods import Dry, tokens_with
from swarmllm.decoding.options import DEFAULTS, DecodingOptions
from swarmllm.gateway.apis.chat_request import ChatRequest
from swarmllm.gateway.apis.request_bodies import CompletionRequest
from swarmllm.gateway.sampling import Sampler, SamplingOptions

pytestmark = pytest.mark.rotates(3, whole_file=True)

PROMPT = "Once upon a time there was a little"


def ask(gateway: RunningGateway, **body: Any) -> Any:
    return gateway.http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 24, "temperature": 0, **body})


def text_of(answer: Any) -> str:
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


@pytest.fixture(scope="module")
def local_text(local: Any, tokenizer: Any) -> Any:
    """The text of the local model with the mixin of the client."""
    kind = type(local)
    local.__class__ = type(kind.__name__, (DistributedModelForCausalLM, kind), {"swarm": None})

    def write(**options: Any) -> str:
        ids = tokenizer(PROMPT, return_tensors="pt").input_ids
        found = local.generate(ids, max_new_tokens=24, do_sample=False, tokenizer=tokenizer, **options)
        return str(tokenizer.decode(found[0, ids.shape[1] :], skip_special_tokens=True))

    yield write
    local.__class__ = kind


def test_one_list_of_names() -> None:
    for kind in (ChatRequest, CompletionRequest):
        assert DEFAULTS.keys() <= kind.model_fields.keys()
        assert "Basu" in str(kind.model_json_schema()["properties"]["mirostat_mode"]["description"])
    assert issubclass(TextConfig, DecodingOptions)


@pytest.mark.parametrize(
    "options",
    [
        {"fsd_alpha": 0.9},
        {"fsd_alpha": 0.8, "fsd_k": 4, "fsd_n": 4, "fsd_beta": 0.5},
        {"dry_multiplier": 30.0, "dry_allowed_length": 1},
        {"dry_multiplier": 30.0, "dry_allowed_length": 1, "dry_sequence_breakers": [" a", "."]},
    ],
)
def test_the_text_is_that_of_generate(gateway: RunningGateway, local_text: Any, options: dict[str, Any]) -> None:
    found = text_of(ask(gateway, **options))
    assert found == local_text(**options)
    assert found != text_of(ask(gateway))


@pytest.mark.parametrize(
    "options",
    [
        {"mirostat_mode": 1, "mirostat_tau": 3},
        {"mirostat_mode": 2, "mirostat_tau": 3, "mirostat_eta": 0.5},
        {"tfs_z": 0.9},
        {"top_n_sigma": 1},
        {"xtc_probability": 0.9, "xtc_threshold": 0.05},
        {"fsd_alpha": 0.5, "fsd_random_steps": 8},
        {"typical_p": 0.5},
        {"eta_cutoff": 0.05},
    ],
)
def test_a_seed_is_one_text_of_each_row(gateway: RunningGateway, options: dict[str, Any]) -> None:
    body = {"temperature": 1.2, "seed": 5, "n": 2, **options}
    first = ask(gateway, **body).json()["choices"]
    assert [one["text"] for one in first] == [one["text"] for one in ask(gateway, **body).json()["choices"]]
    assert first[0]["text"] != first[1]["text"]
    assert text_of(ask(gateway, **{**body, "n": 1})) == first[0]["text"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"mirostat_mode": 2}, "mirostat_mode has an effect only if tokens are sampled: give a temperature above 0"),
        ({"temperature": 1, "mirostat_mode": 3}, "mirostat_mode"),
        ({"temperature": 1, "tfs_z": 1.5}, "tfs_z"),
        ({"temperature": 1, "mirostat_tau": 3}, "mirostat_tau has no effect without mirostat_mode"),
        ({"temperature": 1, "xtc_probabilty": 0.5}, "did you mean 'xtc_probability'?"),
        ({"dry_multiplier": 1, "dry_sequence_breakers": ["x" * 65]}, "dry_sequence_breakers"),
    ],
)
def test_options_that_cannot_work_are_refused(gateway: RunningGateway, body: dict[str, Any], words: str) -> None:
    answer = ask(gateway, **body)
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]


def test_all_defaults_together_change_nothing(gateway: RunningGateway) -> None:
    assert text_of(ask(gateway, **{**DEFAULTS, "top_n_sigma": -1})) == text_of(ask(gateway))


def test_a_penalty_comes_before_the_choice_of_each_row(tokenizer: Any) -> None:
    breakers = tokens_with(DEFAULTS["dry_sequence_breakers"], tokenizer)
    assert breakers
    assert all(any(one in tokenizer.decode([i]) for one in DEFAULTS["dry_sequence_breakers"]) for i in breakers)
    decoding = DecodingOptions(dry_multiplier=2.0, dry_allowed_length=1)
    sampler = Sampler(SamplingOptions(seed=0, temperature=0, decoding=decoding), 2, start=1, breakers={9})
    ids = torch.tensor([[1, 2, 1], [9, 2, 9]])
    scores = torch.tensor([[0.0, 0.0, 0.5, 0.1, *[0.0] * 6]]).repeat(2, 1)
    assert sampler(ids, scores.clone()).argmax(-1).tolist() == [3, 2]
    assert Dry(2.0, 1.75, 1, -1, {9})(ids, scores).argmax(-1).tolist() == [3, 2]


def test_the_document_names_all_of_them() -> None:
    text = (Path(__file__).parents[2] / "docs" / "decoding.md").read_text()
    assert [name for name in DEFAULTS if f"`{name}`" not in text] == []
