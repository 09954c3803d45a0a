"""Adapters that a client has trained go to the hub and back, and are found there by tags; the hub is a stub."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from commands import command, sentence
from hub_stub import HubStub, running_hub, use_hub
from swarm_models import NUM_BLOCKS, OPTIONS, connected, prompt

from swarmllm import AutoDistributedModelForSequenceClassification, LocalSwarm
from swarmllm.errors import BlockWeightsNotFoundError, ConfigurationError

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::UserWarning")]


@pytest.fixture(scope="module")
def hub() -> Iterator[HubStub]:
    """The hub, for this process and for the commands that it starts."""
    with running_hub() as hub, pytest.MonkeyPatch.context() as monkeypatch:
        use_hub(hub, monkeypatch)
        yield hub


def listed(*flags: object) -> list[dict[str, Any]]:
    ended = command("adapters", "--json", *flags)
    assert ended.returncode == 0, ended.stderr
    found: list[dict[str, Any]] = json.loads(ended.stdout)
    return found


def test_shared_found_and_taken_over(llama: Path, swarm: LocalSwarm, hub: HubStub) -> None:
    def classifier(num_labels: int = 3) -> Any:
        return AutoDistributedModelForSequenceClassification.from_pretrained(
            str(llama), initial_peers=swarm.initial_peers, pad_token_id=0, num_labels=num_labels
        )

    ids = prompt(2)
    with classifier() as model:
        with torch.no_grad():
            model.score.weight.add_(1.0)
        expected = model(ids).logits
        assert model.push_to_hub("me/judge").startswith(f"{hub.address}/me/judge/commit/")
        fingerprint = model.swarm.fingerprint
    with classifier() as model:
        model.load_trained("me/judge")
        assert torch.equal(model(ids).logits, expected)
        with pytest.raises(ConfigurationError, match="neither a directory nor a model"):
            model.load_trained("me/nothing")
    with connected(llama, swarm.initial_peers) as model:
        config = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"], init_lora_weights=False)
        adapted = peft.get_peft_model(model, config)
        logits = adapted(input_ids=ids).logits
        adapted.push_to_hub("me/poet", tags=model.model_tags)
    with connected(llama, swarm.initial_peers) as model:
        assert torch.equal(peft.PeftModel.from_pretrained(model, "me/poet")(input_ids=ids).logits, logits)
        with pytest.raises(BlockWeightsNotFoundError, match="me/poet is an adapter of peft: open it by"):
            model.load_trained("me/poet")

    assert sorted(hub.repositories["me/poet"].files) == [
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    judge = {"id": "me/judge", "method": "parts", "task": "text-classification", "downloads": 7}
    poet = {"id": "me/poet", "method": "lora", "task": "text-generation", "downloads": 7}
    same = {"fingerprint": fingerprint}
    assert listed("--base", llama) == [judge | same, poet | same]
    assert listed("--base", llama, "--task", "text-generation") == [poet | same]
    assert listed("--base", "checkpoint") == [judge | same]  # which the card of the other one does not name
    assert listed("--base", "another/base") == []
    text = command("adapters").stdout
    assert text.splitlines()[0].split() == ["id", "method", "task", "downloads"]
    assert text.splitlines()[2].split() == ["me/poet", "lora", "text-generation", "7"]


def test_a_server_offers_what_is_on_the_hub(llama: Path, swarm: LocalSwarm, hub: HubStub) -> None:
    ids = prompt(2)
    with connected(llama, swarm.initial_peers) as model:
        config = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"], init_lora_weights=False)
        adapted = peft.get_peft_model(model, config)
        logits = adapted(input_ids=ids).logits
        adapted.push_to_hub("me/singer")
    with (
        LocalSwarm(llama, spans=[(0, NUM_BLOCKS)], adapters="me/singer", **OPTIONS) as other,
        connected(llama, other.initial_peers, active_adapter="me/singer") as model,
    ):
        torch.testing.assert_close(model(ids, use_cache=False).logits, logits)


def test_a_hub_that_does_not_answer_is_one_sentence(hub: HubStub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "HF_HUB_OFFLINE is set" in sentence(command("adapters").stderr)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_ENDPOINT", f"{hub.address}/nowhere")
    assert "the hub can't be asked" in sentence(command("adapters").stderr)
    ended = command("adapters", "--task", "singing")
    assert ended.returncode == 2
    assert "use one of text-generation" in sentence(ended.stderr)
