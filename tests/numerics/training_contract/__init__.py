"""The contract of training: what becomes of each method of peft, and of each public name that may touch a model.

Everything is in one of three classes here, and `test_training_contract` runs each entry: what is `Equal` gives the same
on a model of a swarm as on the local one, what is `Refused` raises one sentence, what is `Apart` does not touch the
model. A name that a new release adds is in none, and fails the test. docs/training.md has what follows from it
(`.ci/training_contract.py`).

methods             methods of peft, by PeftType
lora_config         fields of LoraConfig
peft_models         PeftModel and PeftMixedModel
transformers_model  PreTrainedModel
training_arguments  fields of TrainingArguments
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Check = Callable[[Any], object]
"""Does something to a model, local or of a swarm, and says what came of it."""
RELATIVE = 1e-5
BLOCKS = "servers keep the blocks as they are"


@dataclass(frozen=True)
class Equal:
    """The same as locally."""

    check: Check
    note: str = ""
    """For the table, where something is to be said."""


@dataclass(frozen=True)
class Refused:
    """One sentence, at once."""

    attempt: Check
    sentence: str
    """A pattern of what is raised."""
    because: str
    """For the table."""


@dataclass(frozen=True)
class Apart:
    """Does not touch the model."""

    because: str


Entry = Equal | Refused | Apart
Contract = Mapping[str, Entry]


def assert_equal(got: Any, wanted: Any, where: str = "") -> None:
    """True if two results are the same, up to the order of adding up."""
    if isinstance(wanted, Tensor):
        assert isinstance(got, Tensor), where
        assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype), where
        error = float((got.detach().double() - wanted.detach().double()).abs().max()) if wanted.numel() else 0.0
        assert error <= RELATIVE * max(1e-6, float(wanted.detach().double().abs().max())), f"{where} differs: {error}"
    elif isinstance(wanted, Mapping):
        assert got.keys() == wanted.keys(), where
        for key, value in wanted.items():
            assert_equal(got[key], value, f"{where}.{key}")
    elif isinstance(wanted, list | tuple):
        assert len(got) == len(wanted), where
        for number, (one, other) in enumerate(zip(got, wanted, strict=True)):
            assert_equal(one, other, f"{where}[{number}]")
    elif isinstance(wanted, float):
        assert abs(got - wanted) <= RELATIVE * max(1e-6, abs(wanted)), f"{where}: {got} and not {wanted}"
    elif isinstance(wanted, nn.Module):
        assert type(got).__name__ == type(wanted).__name__, where
    else:
        assert got == wanted, f"{where}: {got!r} and not {wanted!r}"


def logits(model: Any) -> Tensor:
    """The model's logits for a text."""
    with torch.no_grad():
        found: Tensor = model(input_ids=torch.arange(3, 24).view(3, 7)).logits
    return found
