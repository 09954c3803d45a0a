"""Adapters as their authors would save them: trained on a local model, by peft."""

from pathlib import Path

import peft
import torch
from transformers import AutoModelForCausalLM


def save_adapter(model: Path, config: peft.PeftConfig, directory: Path, *, seed: int = 0) -> Path:
    """An adapter with random values, as large as training would make them, for the checkpoint in `model`."""
    adapted = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(model, dtype="auto"), config)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(adapted.named_parameters()):
        if parameter.requires_grad:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.2 + ("ia3" in name)
    adapted.save_pretrained(directory)
    return directory
