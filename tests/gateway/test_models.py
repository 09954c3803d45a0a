"""Several models behind one gateway, one of them with an adapter: each request gets the model that it names."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from test_access import Socket
from tests.numerics.adapter_makers import save_adapter
from transformers import AutoModelForCausalLM, AutoTokenizer
from web_gateway import DTYPE, NAME, RunningGateway, local_swarm, running_gateway

from swarmllm import embedded_model_path
from swarmllm.errors import ConfigurationError
from swarmllm.gateway.engine.model_choice import ModelChoice
from swarmllm.gateway.settings import GatewayConfig, split_adapter

PROMPT = "Once upon a time"
NAMES = [NAME, "other", f"{NAME}:poet"]
NUM_TOKENS = 16


@pytest.fixture(scope="module")
def poet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of the embedded model."""
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=16, target_modules="all-linear")
    return save_adapter(Path(embedded_model_path()), config, tmp_path_factory.mktemp("shelf") / "poet", seed=1)


@pytest.fixture(scope="module")
def several(other: Path, poet: Path) -> Iterator[RunningGateway]:
    with local_swarm((0, 8)) as swarm:
        swarm.add_server((0, 8), adapters=poet)
        swarm.add_server((0, 6), model=other)
        models = (embedded_model_path(), str(other), f"{embedded_model_path()}:poet")
        with running_gateway(swarm.initial_peers, model=models) as gateway:
            yield gateway


@pytest.fixture(scope="module")
def expected(other: Path, poet: Path) -> dict[str, str]:
    """The text of each of them, on this machine alone."""
    tokenizer = AutoTokenizer.from_pretrained(embedded_model_path())
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids

    def write(model: Any) -> str:
        with torch.no_grad():
            output = model.generate(input_ids=ids, max_new_tokens=NUM_TOKENS, do_sample=False)[0]
        return str(tokenizer.decode(output[ids.shape[1] :], skip_special_tokens=True))

    def load(path: Any) -> Any:
        return AutoModelForCausalLM.from_pretrained(path, dtype=DTYPE)

    models = (
        load(embedded_model_path()),
        load(other),
        peft.PeftModel.from_pretrained(load(embedded_model_path()), poet),
    )
    found = dict(zip(NAMES, map(write, models), strict=True))
    assert len(set(found.values())) == 3
    return found


def ask(gateway: RunningGateway, **fields: Any) -> Any:
    answer = gateway.http.post(
        "/v1/completions", json={"prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0, **fields}
    )
    return answer.json()


def test_each_model_is_listed(several: RunningGateway) -> None:
    assert [model.id for model in several.openai.models.list()] == NAMES
    for name in NAMES:
        assert several.openai.models.retrieve(name).id == name


def test_each_request_gets_the_model_that_it_names(several: RunningGateway, expected: dict[str, str]) -> None:
    with ThreadPoolExecutor() as at_once:
        answers = list(at_once.map(lambda name: ask(several, model=name), NAMES * 4))
    assert [(answer["model"], answer["choices"][0]["text"]) for answer in answers] == list(expected.items()) * 4


def test_without_a_name_it_is_the_first(several: RunningGateway, expected: dict[str, str]) -> None:
    answer = ask(several)
    assert (answer["model"], answer["choices"][0]["text"]) == (NAME, expected[NAME])


def test_one_that_is_not_there(several: RunningGateway) -> None:
    error = ask(several, model="gpt-9")["error"]
    assert error["code"] == "model_not_found"
    assert error["message"] == (f"the model 'gpt-9' is not served here; {NAME!r}, 'other', '{NAME}:poet' are")
    assert several.http.get("/api/swarm?model=gpt-9").status_code == 404


def test_each_has_its_own_swarm(several: RunningGateway) -> None:
    several.wait_until_seen(2)  # both serve the embedded model, one of them with the adapter
    shown = several.http.get("/api/swarm", params={"model": "other"}).json()
    assert (shown["model"], [(server["start"], server["end"]) for server in shown["servers"]]) == ("other", [(0, 6)])
    health = several.http.get("/health")
    assert health.status_code == 200
    assert [(one["model"], one["status"]) for one in health.json()["models"]] == [(name, "ok") for name in NAMES]
    families = text_string_to_metric_families(several.http.get("/metrics").text)
    missing = {
        sample.labels["model"]: sample.value
        for family in families
        for sample in family.samples
        if sample.name == "swarmllm_swarm_missing_blocks"
    }
    assert missing == dict.fromkeys(NAMES, 0)


def test_on_one_websocket(several: RunningGateway, expected: dict[str, str]) -> None:
    socket, texts, done = Socket(several.url), dict.fromkeys(NAMES, ""), 0
    try:
        for name in NAMES:
            socket.ask({"prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0, "model": name, "id": name})
        while done < len(NAMES):
            message = socket.answer()
            done += "done" in message
            texts[message["request"]] += "".join(choice["text"] for choice in message.get("choices", []))
    finally:
        socket.close()
    assert texts == expected


def test_a_model_and_its_adapter(tmp_path: Path) -> None:
    with_colon = tmp_path / "a:b"
    with_colon.mkdir()
    assert split_adapter("owner/model") == ("owner/model", None)
    assert split_adapter("owner/model:owner/adapter") == ("owner/model", "owner/adapter")
    assert split_adapter(str(with_colon)) == (str(with_colon), None)
    assert split_adapter(f"{with_colon}:poet") == (str(with_colon), "poet")
    config = GatewayConfig(model=("m", "m:a"), served_name=("x", "y"), active_adapter="z")
    found = [(name, one.model, one.active_adapter) for name, one in config.each_model()]
    assert found == [("x", "m", "z"), ("y", "m", "a")]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"served_name": ("a",)}, "1 names were given for 2 models"),
        ({"revision": "main"}, "revision is for one model only"),
        ({"fallback_to_local": "m"}, "fallback_to_local is for one model only"),
        ({"identity_path": "key"}, "identity_path is for one model only"),
    ],
)
def test_settings_for_one_model_only(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        GatewayConfig(model=("m", "n"), **settings)


def test_more_threads_than_a_machine_starts_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"num_threads must be at most \d+ here, 4 for each of the \d+ cores"):
        GatewayConfig(model=("m",), num_threads=100_000)


def test_two_of_one_name_are_refused(several: RunningGateway) -> None:
    models = list(several.gateway.models)
    with pytest.raises(ConfigurationError, match="served_name"):
        ModelChoice([models[0], models[0]])
