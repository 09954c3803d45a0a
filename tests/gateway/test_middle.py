"""Text between two others: `suffix` of completions, for models whose tokenizer has tokens for it."""

from collections.abc import Iterator
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from web_gateway import RunningGateway, running_gateway

from swarmllm import LocalSwarm
from swarmllm.gateway.engine.language_model import MiddleForm

PREFIX, SUFFIX = "Once upon a time there was", " and they were happy."
FORM = MiddleForm(10, 11, 12, frozenset({10, 11, 12, 13}))
WRITTEN = {  # as the models' own descriptions show it, for a prefix A and a suffix B
    "Qwen2.5-Coder, CodeGemma": "<|fim_prefix|>A<|fim_suffix|>B<|fim_middle|>",
    "StarCoder 2, Granite": "<fim_prefix>A<fim_suffix>B<fim_middle>",
    "SantaCoder": "<fim-prefix>A<fim-suffix>B<fim-middle>",
    "DeepSeek-Coder": "<｜fim▁begin｜>A<｜fim▁hole｜>B<｜fim▁end｜>",
    "GLM-4": "<|code_prefix|>A<|code_suffix|>B<|code_middle|>",
    "Code Llama": "▁<PRE>A▁<SUF>B▁<MID>",
    "Codestral": "[SUFFIX]B[PREFIX]A",
}


def tokenizer_with(names: list[str]) -> Any:
    vocabulary = {name: place for place, name in enumerate(["<unk>", "A", "B", *names])}
    found = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    return PreTrainedTokenizerFast(tokenizer_object=found, unk_token="<unk>")


@pytest.mark.parametrize("model", WRITTEN)
def test_forms_are_those_of_the_models(model: str) -> None:
    written = WRITTEN[model]
    names = [part for part in written.replace("A", "\n").replace("B", "\n").split("\n") if part]
    form = MiddleForm.of(tokenizer := tokenizer_with([*names, "<|file_sep|>"]))
    assert form is not None
    found = form.prompt([], [1], [2])
    assert "".join(tokenizer.convert_ids_to_tokens(found)) == written
    assert form.ends == set(range(3, 4 + len(names)))
    assert MiddleForm.of(tokenizer_with(names[1:])) is None


@pytest.fixture(scope="module")
def filling(swarm: LocalSwarm) -> Iterator[RunningGateway]:
    """A gateway whose model has learned it, with tokens that mean something else in truth."""
    with running_gateway(swarm.initial_peers) as gateway:
        gateway.gateway.models.first.__dict__["middle_form"] = FORM
        yield gateway


def test_a_suffix_is_read(filling: RunningGateway, tokenizer: Any, greedy: Any) -> None:
    before, after = (tokenizer(text, add_special_tokens=False).input_ids for text in (PREFIX, SUFFIX))
    expected = greedy([1, 10, *before, 11, *after, 12], 8)
    body = {"prompt": PREFIX, "suffix": SUFFIX, "max_tokens": 8, "temperature": 0}
    answer = filling.http.post("/v1/completions", json=body).json()
    assert answer["choices"][0]["text"] == expected
    assert answer["usage"]["prompt_tokens"] == len(before) + len(after) + 4
    for prompt in ([PREFIX] * 2, [before] * 2):
        several = filling.http.post("/v1/completions", json={**body, "prompt": prompt}).json()
        assert [choice["text"] for choice in several["choices"]] == [expected] * 2
    options = {"temperature": 0, "num_predict": 8}
    by_ollama = {"model": "embedded", "prompt": PREFIX, "suffix": SUFFIX, "stream": False, "options": options}
    assert filling.http.post("/api/generate", json=by_ollama).json()["response"] == expected


def test_its_tokens_end_the_middle(filling: RunningGateway) -> None:
    body = {"prompt": PREFIX, "suffix": SUFFIX, "max_tokens": 8, "temperature": 0, "logit_bias": {"13": 100}}
    choice = filling.http.post("/v1/completions", json=body).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("", "stop")


def test_clients_can_find_out(filling: RunningGateway) -> None:
    shown = filling.http.post("/api/show", json={"model": "embedded"}).json()
    assert "insert" in shown["capabilities"]
    assert ".Suffix" in shown["template"], "where Continue looks for it"


def test_a_model_without_the_tokens_refuses_it(gateway: RunningGateway, filling: RunningGateway) -> None:
    body = {"prompt": PREFIX, "suffix": SUFFIX}
    answer = gateway.http.post("/v1/completions", json=body)
    assert answer.status_code == 400
    assert "embedded has no tokens for the text between two others" in answer.json()["error"]["message"]
    assert gateway.http.post("/v1/completions", json={**body, "suffix": "", "max_tokens": 1}).status_code == 200
    echo = filling.http.post("/v1/completions", json={**body, "echo": True})
    assert (echo.status_code, "echo and suffix exclude each other" in echo.text) == (400, True)
