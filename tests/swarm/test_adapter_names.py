"""peft's `adapter_names`: an adapter for each row of a batch, through real servers."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from swarm_models import NUM_BLOCKS, OPTIONS, connected, load_local, prompt

from swarmllm import LocalSwarm

pytestmark = pytest.mark.rotates(6, whole_file=True)

NAMES = ["first", "__base__", "third", "first"]
HALF = NUM_BLOCKS // 2


def with_three(model: Any) -> Any:
    """Adapters of several ranks, on several modules."""
    adapted: Any = None
    for number, (name, modules) in enumerate(
        {"first": ["q_proj", "down_proj"], "second": ["v_proj"], "third": ["q_proj", "up_proj", "lm_head"]}.items()
    ):
        config = peft.LoraConfig(task_type="CAUSAL_LM", r=2 + number, lora_alpha=8, target_modules=modules)
        if adapted is None:
            adapted = peft.get_peft_model(model, config, adapter_name=name)
        else:
            adapted.add_adapter(name, config)
    for name, parameter in sorted(adapted.named_parameters()):
        if "lora_" in name:
            generator = torch.Generator().manual_seed(len(name))
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.2
            parameter.requires_grad_(True)
    return adapted.eval()


@pytest.fixture(scope="module")
def local(llama: Path) -> Any:
    return with_three(load_local(llama))


@pytest.fixture(scope="module")
def remote(llama: Path) -> Iterator[Any]:
    """Micro-batches of two rows, and prompts in steps of 8 tokens."""
    with (
        LocalSwarm(llama, spans=[(0, HALF), (HALF, NUM_BLOCKS)], **OPTIONS) as swarm,
        connected(llama, swarm.initial_peers, max_batch_tokens=20, prefill_chunk_tokens=8) as model,
    ):
        yield with_three(model)


@pytest.mark.parametrize("padding", [None, "left", "right"])
def test_logits_and_gradients(padding: str | None, local: Any, remote: Any) -> None:
    ids, mask = prompt(4), torch.ones(4, 9, dtype=torch.int64)
    if padding is not None:
        for row in range(4):
            mask[row, : 2 * row] = 0
        mask = mask if padding == "left" else mask.flip(1)
    labels = ids.masked_fill(mask == 0, -100)
    found = []
    for model in (local, remote):
        model.zero_grad()
        output = model(input_ids=ids, attention_mask=mask, labels=labels, adapter_names=NAMES)
        output.loss.backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        found.append((output.logits.detach()[mask.bool()], {n: g for n, g in gradients.items() if g.any()}))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-5, atol=1e-5)
    assert found[0][1].keys() == found[1][1].keys()
    assert any("first" in name for name in found[0][1])
    assert not any("second" in name for name in found[0][1])
    for name, gradient in found[0][1].items():
        assert float((gradient - found[1][1][name]).abs().max()) <= 1e-5 * float(gradient.abs().max()), name


def test_each_row_is_what_its_adapter_makes_of_it(local: Any, remote: Any) -> None:
    ids = prompt(4)
    mixed = remote(input_ids=ids, adapter_names=NAMES).logits
    for row, name in enumerate(NAMES):
        if name == "__base__":
            with local.disable_adapter():
                expected = local(input_ids=ids[row : row + 1]).logits
        else:
            local.set_adapter(name)
            expected = local(input_ids=ids[row : row + 1]).logits
        torch.testing.assert_close(mixed[row : row + 1], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"use_cache": False}], ids=str)
def test_texts(options: dict[str, Any], local: Any, remote: Any) -> None:
    ids = prompt(4, 21)
    options = {"max_new_tokens": 6, "do_sample": False, "adapter_names": NAMES, **options}
    expected = local.generate(input_ids=ids, **options)
    assert remote.generate(input_ids=ids, **options).tolist() == expected.tolist()
    assert expected.tolist() != local.generate(input_ids=ids, **options | {"adapter_names": NAMES[::-1]}).tolist()


def test_what_peft_refuses(local: Any, remote: Any) -> None:
    for model in (local, remote):
        with pytest.raises(ValueError, match="Length of `adapter_names` should be the same"):
            model(input_ids=prompt(3), adapter_names=NAMES)
        with pytest.raises(ValueError, match="non-existing adapter"):
            model(input_ids=prompt(4), adapter_names=[*NAMES[:3], "nobody"])
        with pytest.raises(ValueError, match="in training mode"):
            model.train()(input_ids=prompt(4), adapter_names=NAMES)
        model.eval()
    torch.testing.assert_close(
        remote(input_ids=prompt(2), adapter_names=NAMES[:2]).logits,
        local(input_ids=prompt(2), adapter_names=NAMES[:2]).logits,
    )


def test_all_three_in_a_batch_of_four(local: Any, remote: Any) -> None:
    """Each adapter is in use at once, on its own modules and with its own rank."""
    names = ["first", "second", "third", "__base__"]
    found = []
    for model in (local, remote):
        for name, parameter in model.named_parameters():  # of several adapters, peft trains the active one alone
            parameter.requires_grad_("lora_" in name)
        model.zero_grad()
        output = model(input_ids=prompt(4), labels=prompt(4), adapter_names=names)
        output.loss.backward()
        gradients = {
            name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None and p.grad.any()
        }
        text = model.generate(input_ids=prompt(4), max_new_tokens=6, do_sample=False, adapter_names=names)
        found.append((output.logits.detach(), gradients, text))
    (expected, gradients, text), (logits, found_gradients, found_text) = found
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    assert found_text.tolist() == text.tolist()
    assert found_gradients.keys() == gradients.keys()
    assert all(any(name in key for key in gradients) for name in names[:3])
    for name, gradient in gradients.items():
        assert float((gradient - found_gradients[name]).abs().max()) <= 1e-5 * float(gradient.abs().max()), name
