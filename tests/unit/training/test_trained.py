"""Homes that train different things of equal shapes are told apart."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from swarmllm.training.trained import description, disagreement

SIZES = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1}
CONFIG = LlamaConfig(vocab_size=8, **SIZES, num_attention_heads=2, num_key_value_heads=2)


def home(adapter: str = "default", **lora: Any) -> dict[str, str]:
    settings = {"r": 2, "lora_alpha": 8, "target_modules": ["q_proj"], **lora}
    model = get_peft_model(LlamaForCausalLM(CONFIG), LoraConfig(task_type="CAUSAL_LM", **settings), adapter)
    return description(torch.optim.SGD([one for one in model.parameters() if one.requires_grad], 0.1), model)


@pytest.mark.parametrize(
    ("lora", "told"),
    [
        ({"target_modules": ["o_proj"]}, r"layers.0.self_attn.q_proj.lora_A.weight .* in one and .*o_proj.* in other"),
        ({"lora_alpha": 16}, "lora_alpha is 8 in one and 16 in other"),
        ({"use_rslora": True}, "use_rslora is false in one and true in other"),
        ({"lora_dropout": 0.5, "init_lora_weights": "gaussian"}, None),
        ({"adapter": "poet"}, None),
    ],
)
def test_adapters_of_equal_shapes_differ(lora: dict[str, Any], told: str | None) -> None:
    found = disagreement(home(), "one", home(**lora), "other")
    assert found is None if told is None else re.search(told, str(found))


def test_base_models_of_equal_shapes_differ(tmp_path: Path) -> None:
    told = []
    for name in ("base", "copy", "chat"):
        if name != "copy":
            model = LlamaForCausalLM(CONFIG)
        model.save_pretrained(tmp_path / name)
        model = LlamaForCausalLM.from_pretrained(tmp_path / name)
        told.append(description(torch.optim.SGD(model.parameters(), 0.1), model))
    assert disagreement(told[0], "one", told[1], "other") is None
    assert "the base model is fingerprint" in str(disagreement(told[0], "one", told[2], "other"))


def test_names_of_an_optimizer_are_compared() -> None:
    layers = torch.nn.ModuleDict({name: torch.nn.Linear(2, 2) for name in ("a", "b")})
    one, other = (description(torch.optim.SGD(layers[name].named_parameters(name), 0.1)) for name in layers)
    assert "trained parameters" in str(disagreement(one, "one", other, "other"))
    assert disagreement(one, "one", {}, "other") is None  # it doesn't know
