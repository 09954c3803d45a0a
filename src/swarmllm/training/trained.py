"""What a home trains, in words that homes compare: names of parameters, base model, and settings of the adapter.

Shapes don't tell: q_proj and o_proj, or a base model and its chat version, often have the same. Each home tells what it
knows. Homes refuse each other if something that both know differs.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from swarmllm.errors import SwarmError
from swarmllm.models.checkpoint.checkpoint import open_checkpoint
from swarmllm.models.checkpoint.fingerprint import fingerprint

MAX_TEXT = 200
"""Longest description of one thing; of longer ones, their digest is told."""
MAX_FIELDS = 80
FREE = frozenset(
    (
        *("base_model_name_or_path", "revision", "peft_version", "auto_mapping", "inference_mode", "runtime_config"),
        *("task_type", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
        *("lora_dropout", "init_lora_weights", "init_weights", "megatron_config", "megatron_core"),
        *("loftq_config", "eva_config", "corda_config", "lora_ga_config"),
    )
)
"""Fields of an adapter's config in which homes may differ: places, how training begins and what it drops, and fields
that the names of the parameters show better."""


def description(optimizer: torch.optim.Optimizer, model: Any = None) -> dict[str, str]:
    """What this home trains. Without `model`, only an optimizer that was made with names knows something."""
    names = _names(optimizer, model)
    found = {} if names is None else {"the list of trained parameters": _of_names(names)}
    if model is None:
        return found
    if (base := _base(model)) is not None:
        found["the base model"] = base
    adapters = getattr(model, "peft_config", None)
    if isinstance(adapters, Mapping) and adapters:
        active = getattr(model, "active_adapter", None)
        config = adapters[active] if isinstance(active, str) and active in adapters else next(iter(adapters.values()))
        fields = sorted((name, value) for name, value in config.to_dict().items() if name not in FREE)
        found |= {name: _text(value) for name, value in fields[: MAX_FIELDS - len(found)]}
    return found


def disagreement(own: Mapping[str, str], own_name: str, theirs: Mapping[str, str], their_name: str) -> str | None:
    """The things in which two homes differ, in words; None: there are none."""
    differ = [name for name in own if name in theirs and own[name] != theirs[name]]
    told = [f"{name} is {own[name]} in {own_name} and {theirs[name]} in {their_name}" for name in differ[:3]]
    return "; ".join(told) or None


def _names(optimizer: torch.optim.Optimizer, model: Any) -> list[str] | None:
    """Names of the trained parameters in the order of the optimizer, without the adapter's own name."""
    groups = optimizer.param_groups
    trained = [one for group in groups for one in group["params"] if one.requires_grad]
    if model is not None:
        by_id = {id(one): name for name, one in model.named_parameters()}
    else:
        pairs = [zip(group["params"], group.get("param_names", ()), strict=False) for group in groups]
        by_id = {id(one): name for named in pairs for one, name in named}
    if any(id(one) not in by_id for one in trained):
        return None
    left_out = {"module", "_orig_mod", *(getattr(model, "peft_config", None) or ())}
    return [".".join(word for word in by_id[id(one)].split(".") if word not in left_out) for one in trained]


def _of_names(names: list[str]) -> str:
    digest = hashlib.sha256("\n".join(names).encode()).hexdigest()[:16]
    return f"{len(names)} from {names[0][-60:]} to {names[-1][-60:]} (digest {digest})"


def _base(model: Any) -> str | None:
    """The fingerprint of the base model; None: unknown, as of a model that was never on a disk."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if (swarm := getattr(base, "swarm", None)) is not None:
        return f"fingerprint {swarm.fingerprint}"
    config = getattr(base, "config", None)
    place, commit = str(getattr(config, "_name_or_path", "") or ""), getattr(config, "_commit_hash", None)
    if commit is None and not Path(place).is_dir():
        return None
    try:
        return f"fingerprint {fingerprint(open_checkpoint(place, revision=commit))}"
    except (SwarmError, OSError):
        return None


def _text(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=lambda one: sorted(one) if isinstance(one, set) else str(one))
    return text if len(text) <= MAX_TEXT else f"digest {hashlib.sha256(text.encode()).hexdigest()[:16]}"
