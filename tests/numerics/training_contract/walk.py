"""All contracts by the words of the table, and the public names that each has to have."""

import dataclasses
from typing import Any

import peft
from tests.numerics.training_contract import Contract
from tests.numerics.training_contract.lora_config import LORA_CONFIG
from tests.numerics.training_contract.methods import METHODS
from tests.numerics.training_contract.peft_models import PEFT_MIXED_MODEL, PEFT_MODEL
from tests.numerics.training_contract.training_arguments import TRAINING_ARGUMENTS
from tests.numerics.training_contract.transformers_model import PRE_TRAINED_MODEL
from torch import nn
from transformers import PreTrainedModel, TrainingArguments

CONTRACTS: dict[str, Contract] = {
    "methods of peft": METHODS,
    "peft.LoraConfig": LORA_CONFIG,
    "peft.PeftModel": PEFT_MODEL,
    "peft.PeftMixedModel": PEFT_MIXED_MODEL,
    "transformers.PreTrainedModel": PRE_TRAINED_MODEL,
    "transformers.TrainingArguments": TRAINING_ARGUMENTS,
}


def names_of(part: str) -> list[str]:
    """The public names of this release."""
    classes: dict[str, Any] = {
        "peft.PeftModel": peft.PeftModel,
        "peft.PeftMixedModel": peft.PeftMixedModel,
        "transformers.PreTrainedModel": PreTrainedModel,
    }
    if part == "methods of peft":
        return [method.name for method in peft.PeftType]
    if part in classes:
        cls = classes[part]
        return [
            name
            for name in dir(cls)
            if not name.startswith("_") and getattr(cls, name) is not getattr(nn.Module, name, None)
        ]
    config: Any = peft.LoraConfig if part == "peft.LoraConfig" else TrainingArguments
    return [field.name for field in dataclasses.fields(config)]
