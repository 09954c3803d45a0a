"""A trained model is saved and loaded elsewhere: its own parameters by swarmllm, adapters by peft."""

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors import safe_open
from swarm_models import connected, load_local, prompt, save_llama
from transformers import AutoModelForCausalLM

from swarmllm import AutoDistributedModelForSequenceClassification, LocalSwarm
from swarmllm.client.saving import HEAD_SETTINGS, OWN_TENSORS
from swarmllm.errors import BlockWeightsNotFoundError, CorruptWeightsError, WeightsMismatchError


def classifier(llama: Path, swarm: LocalSwarm, **options: Any) -> Any:
    return AutoDistributedModelForSequenceClassification.from_pretrained(
        str(llama), initial_peers=swarm.initial_peers, pad_token_id=0, **options
    )


def test_a_trained_head_is_saved_alone_and_loaded_again(llama: Path, swarm: LocalSwarm, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    with classifier(llama, swarm, num_labels=3) as model:
        with torch.no_grad():
            model.score.weight.add_(1.0)
        expected = model(prompt(2)).logits
        assert expected.shape == (2, 3)
        model.save_pretrained(saved)
    with safe_open(saved / OWN_TENSORS, "pt") as file:
        assert sorted(file.keys()) == ["model.embed_tokens.weight", "model.norm.weight", "score.weight"]
    assert "base_model: checkpoint" in (saved / "README.md").read_text()
    with pytest.raises(OSError, match="no file named"):
        AutoModelForCausalLM.from_pretrained(saved)
    with classifier(llama, swarm, num_labels=3) as model:
        assert not torch.equal(model(prompt(2)).logits, expected)
        model.load_trained(saved)
        assert torch.equal(model(prompt(2)).logits, expected)
    with classifier(llama, swarm, num_labels=5) as model:
        before = model.score.weight.clone()
        with pytest.raises(WeightsMismatchError, match=r"score\.weight doesn't fit"):
            model.load_trained(saved)
        with pytest.raises(BlockWeightsNotFoundError, match="lacks"):
            model.load_trained(tmp_path)
        (saved / OWN_TENSORS).write_bytes(b"\x80\x04 a pickle, or anything else")
        with pytest.raises(CorruptWeightsError, match="safetensors"):
            model.load_trained(saved)
        assert torch.equal(model.score.weight, before)


def test_the_labels_of_a_head_are_loaded_with_it(
    llama: Path, swarm: LocalSwarm, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What a pipeline shows is decided by the config: without it, other labels, and a softmax for a sigmoid."""
    labels = {0: "calm", 1: "angry", 2: "sad"}
    ids, saved = prompt(2), tmp_path / "saved"
    with classifier(llama, swarm, id2label=labels, label2id={one: idx for idx, one in labels.items()}) as model:
        model(ids, labels=torch.rand(2, 3)).loss.backward()
        assert model.config.problem_type == "multi_label_classification"
        model.config.pad_token_id = 7
        model.save_pretrained(saved)
        expected = dict(model.config.to_dict())
    options = {"num_labels": 3}, {"num_labels": 3, "id2label": {0: "a", 1: "b", 2: "c"}}
    for given, told in zip(options, (False, True), strict=True):
        caplog.clear()
        with classifier(llama, swarm, **given) as model:
            model.load_trained(saved)
            assert all(model.config.to_dict()[name] == expected[name] for name in HEAD_SETTINGS)
            assert model(ids, labels=torch.rand(2, 3)).loss is not None
        assert ("config.id2label is {0: 'calm'" in caplog.text) == told
    (saved / "config.json").write_text(json.dumps({"pad_token_id": 3}))
    with classifier(llama, swarm, **options[1]) as model:
        model.load_trained(saved)  # the saved config names no labels
        assert (model.config.id2label, model.config.pad_token_id) == (options[1]["id2label"], 3)


@pytest.mark.parametrize(
    "damaged",
    [
        *("{", "[]", '{"id2label": 5}', '{"id2label": {"a": "b"}}', '{"id2label": {"0": "one"}}'),
        *('{"id2label": {"5": "a", "6": "b", "7": "c"}}', '{"id2label": {"0": {"x": 1}, "1": null, "2": 3}}'),
        *('{"label2id": [1]}', '{"pad_token_id": "x"}', '{"pad_token_id": 1000000}'),
        *('{"problem_type": "evil"}', '{"problem_type": {"x": 1}}'),
    ],
)
def test_a_damaged_config_changes_nothing(damaged: str, llama: Path, swarm: LocalSwarm, tmp_path: Path) -> None:
    with classifier(llama, swarm, num_labels=3) as model:
        model.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(damaged)
    with classifier(llama, swarm, num_labels=3) as model:
        before, config = model.score.weight.clone(), model.config.to_dict()
        with pytest.raises((CorruptWeightsError, WeightsMismatchError), match=r"config\.json"):
            model.load_trained(tmp_path)
        assert torch.equal(model.score.weight, before)
        assert model.config.to_dict() == config


def test_values_that_are_no_numbers_are_not_loaded(llama: Path, swarm: LocalSwarm, tmp_path: Path) -> None:
    with classifier(llama, swarm, num_labels=3) as model:
        with torch.no_grad():
            model.score.weight[1, 2] = torch.nan
        model.save_pretrained(tmp_path)
    with classifier(llama, swarm, num_labels=3) as model:
        with pytest.raises(CorruptWeightsError, match=r"score\.weight in .* holds NaN, so its training has diverged"):
            model.load_trained(tmp_path)
        assert model.score.weight.isfinite().all()


def test_parts_of_another_base_are_refused(model: Any, llama: Path, swarm: LocalSwarm, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "mine")
    with connected(llama, swarm.initial_peers) as other:
        other.swarm.look_ups.fingerprint = "f" * 32
        with pytest.raises(WeightsMismatchError, match="was trained on"):
            other.load_trained(tmp_path / "mine")


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_adapters_go_from_the_swarm_to_a_local_model_and_back(llama: Path, swarm: LocalSwarm, tmp_path: Path) -> None:
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear", init_lora_weights=False)
    ids = prompt(2)
    with connected(llama, swarm.initial_peers) as client:
        adapted = peft.get_peft_model(client, config)
        expected = adapted(input_ids=ids).logits.detach()
        adapted.save_pretrained(tmp_path / "from_swarm")
    local = peft.PeftModel.from_pretrained(load_local(llama), tmp_path / "from_swarm")
    torch.testing.assert_close(local(input_ids=ids).logits, expected)
    local.save_pretrained(tmp_path / "from_local")
    with connected(llama, swarm.initial_peers) as client:
        back = peft.PeftModel.from_pretrained(client, tmp_path / "from_local")
        assert torch.equal(back(input_ids=ids).logits, expected)
    other = save_llama(tmp_path / "other", num_blocks=8, hidden_size=32)
    with pytest.raises(RuntimeError, match="size mismatch"):
        peft.PeftModel.from_pretrained(load_local(other), tmp_path / "from_swarm")
