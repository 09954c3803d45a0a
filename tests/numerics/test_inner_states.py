"""Hidden states and attentions of every architecture: what the local model returns, through a client and two spans."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.numerics.exactness import PROMPT
from tests.numerics.in_process_swarm import InProcessSwarm
from tests.numerics.test_sweep import ARCHITECTURES, ROUNDS_DIFFERENTLY
from tests.numerics.tiny_models import VARIANTS, save_tiny
from tests.selection import sampled
from torch import Tensor
from transformers import PreTrainedModel

MASK = torch.ones_like(PROMPT)
MASK[0, :3] = 0


def flat(found: Any) -> list[Tensor | None]:
    """All tensors of nested tuples, in order; None where an entry is."""
    if found is None or isinstance(found, Tensor):
        return [found]
    return [tensor for part in found for tensor in flat(part)]


def differences(wanted: Any, got: Any, relative: float) -> list[str]:
    """What is different about nested tuples of tensors."""
    if shape_of(wanted) != shape_of(got):
        return [f"{shape_of(got)!s:.400} instead of {shape_of(wanted)!s:.400}"]
    problems = []
    for index, (one, other) in enumerate(zip(flat(wanted), flat(got), strict=True)):
        if one is None or other is None:
            continue
        error = float((one.float() - other.float()).abs().max())
        if not error <= relative * float(one.abs().max()):
            problems.append(f"entry {index} differs by {error:.1e}")
    return problems


def shape_of(found: Any) -> Any:
    if isinstance(found, Tensor):
        return tuple(found.shape)
    return None if found is None else [shape_of(part) for part in found]


def of_forward(model: PreTrainedModel) -> Any:
    with torch.no_grad():
        return model(input_ids=PROMPT, attention_mask=MASK, use_cache=False, output_hidden_states=True).hidden_states


def of_cached_forward(model: PreTrainedModel) -> Any:
    with torch.no_grad():
        return model(input_ids=PROMPT, use_cache=True, output_hidden_states=True).hidden_states


def of_choice(model: PreTrainedModel) -> Any:
    with torch.no_grad():
        return model(input_ids=PROMPT, use_cache=False, output_hidden_states=[1, -2]).hidden_states


def of_generate(model: PreTrainedModel, **options: Any) -> Any:
    output = model.generate(
        PROMPT.where(MASK > 0, 0),
        attention_mask=MASK,
        max_new_tokens=4,
        min_new_tokens=4,
        return_dict_in_generate=True,
        output_hidden_states=True,
        **{"do_sample": False, **options},
    )
    return output.hidden_states


def of_beams(model: PreTrainedModel) -> Any:
    return of_generate(model, num_beams=3)


def gradients(model: PreTrainedModel) -> Any:
    """Of a loss on all hidden states, with respect to the embeddings' output."""
    seen: list[Tensor] = []

    def keep(_module: Any, _args: Any, output: Tensor) -> Tensor:
        seen.append(output.detach().requires_grad_() if not seen else output)
        return seen[0].clone()  # some models scale their embeddings in place

    hook = model.get_input_embeddings().register_forward_hook(keep)
    try:
        hidden = model(input_ids=PROMPT, use_cache=False, output_hidden_states=True).hidden_states
        torch.stack([(one * one).mean() * (1 + index) for index, one in enumerate(hidden)]).sum().backward()
    finally:
        hook.remove()
    return seen[0].grad


CHECKS: tuple[Callable[[PreTrainedModel], Any], ...] = (
    of_forward,
    of_cached_forward,
    of_choice,
    of_generate,
    of_beams,
    gradients,
)


def outcome(model: PreTrainedModel, check: Callable[[PreTrainedModel], Any]) -> Any:
    """What it returns, or how it refuses."""
    try:
        return check(model)
    except (ValueError, RuntimeError, NotImplementedError, AttributeError, TypeError, IndexError) as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("model_type", sampled([*ARCHITECTURES, *VARIANTS], 12))
def test_hidden_states(model_type: str, tmp_path: Path) -> None:
    local = save_tiny(model_type, tmp_path)
    swarm = InProcessSwarm(tmp_path)
    relative = ROUNDS_DIFFERENTLY.get(model_type, 0.0)
    failures = {}
    for check in CHECKS:
        wanted, got = outcome(local, check), outcome(swarm.client, check)
        if isinstance(wanted, str) or isinstance(got, str):
            uncut = any(server.traits.forbidden_cuts for server, _ in swarm.route)
            cut = check is gradients and uncut and isinstance(got, str) and "can't be cut there" in got
            problems = [] if wanted == got or cut else [f"local: {wanted!s:.200} remote: {got!s:.300}"]
        else:
            problems = differences(wanted, got, max(relative, 1e-5 if check is gradients else 0.0))
        if problems:
            failures[check.__name__] = problems[:3]
    assert not failures


def attentions_of_forward(model: PreTrainedModel) -> Any:
    with torch.no_grad():
        return model(input_ids=PROMPT, attention_mask=MASK, use_cache=False, output_attentions=True).attentions


def attentions_of_generate(model: PreTrainedModel) -> Any:
    output = model.generate(
        PROMPT,
        max_new_tokens=3,
        min_new_tokens=3,
        num_beams=2,
        return_dict_in_generate=True,
        output_attentions=True,
        output_hidden_states=True,
    )
    return output.attentions, output.hidden_states


OTHER_WEIGHTS = {"deepseek_v4": "not [batch, heads, seq, past + seq]"}
"""Architectures that attend to more than positions, and what is said of it."""


@pytest.mark.parametrize("model_type", sampled([*ARCHITECTURES, *VARIANTS], 24))
def test_attentions(model_type: str, tmp_path: Path) -> None:
    local = save_tiny(model_type, tmp_path)
    swarm = InProcessSwarm(tmp_path)
    for model in (local, swarm.client):
        model.set_attn_implementation("eager")
        model.config._attn_implementation_internal = (
            "eager"  # as from_pretrained() sets it for models that can't switch
        )
    failures = {}
    for check in (attentions_of_forward, attentions_of_generate):
        wanted, got = outcome(local, check), outcome(swarm.client, check)
        if model_type in OTHER_WEIGHTS:
            assert isinstance(got, str)
            assert OTHER_WEIGHTS[model_type] in got
        elif isinstance(wanted, str) or isinstance(got, str):
            if wanted != got:
                failures[check.__name__] = [f"local: {wanted!s:.200} remote: {got!s:.300}"]
        elif problems := differences(wanted, got, ROUNDS_DIFFERENTLY.get(model_type, 0.0)):
            failures[check.__name__] = problems[:3]
    assert not failures
