"""A mistake in training is one sentence, and the next step works as if nothing had been."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from swarm_models import connected, prompt
from torch import Tensor
from transformers import DynamicCache

from swarmllm import AutoDistributedModel, LocalSwarm
from swarmllm.errors import ConfigurationError, SwarmError

pytestmark = pytest.mark.rotates(6, whole_file=True)

LORA = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"])


def nan_loss(model: Any, ids: Tensor) -> None:
    (model(input_ids=ids, labels=ids).loss * torch.nan).backward()


def infinite_loss(model: Any, ids: Tensor) -> None:
    (model(input_ids=ids, labels=ids).loss * torch.inf).backward()


def diverged(model: Any, ids: Tensor) -> None:
    weight = next(p for p in model.parameters() if p.requires_grad)
    before = weight.detach().clone()
    try:
        with torch.no_grad():
            weight.fill_(torch.nan)
        model(input_ids=ids, labels=ids)
    finally:
        with torch.no_grad():
            weight.copy_(before)


def too_many_tokens(model: Any, ids: Tensor) -> None:
    long = prompt(1, 9000)
    model(input_ids=long, labels=long)


def labels_of_another_length(model: Any, ids: Tensor) -> None:
    model(input_ids=ids, labels=ids[:, 1:].repeat(1, 2))


def prompts_of_another_width(model: Any, ids: Tensor) -> None:
    model(inputs_embeds=torch.randn(2, 5, 32), labels=ids[:2, :5])


MISTAKES: dict[str, tuple[Callable[[Any, Tensor], None], type[Exception], str]] = {
    "a NaN loss": (nan_loss, ConfigurationError, r"the loss is NaN or infinite.*call zero_grad\(\)"),
    "an infinite loss": (infinite_loss, ConfigurationError, "the loss is NaN or infinite"),
    "an adapter that diverged": (diverged, ConfigurationError, "NaN or infinite, so its training has diverged"),
    "a sample over the cap": (too_many_tokens, ConfigurationError, "above the servers' limit of 8192: use shorter"),
    "labels of another length": (labels_of_another_length, ValueError, "batch_size"),
    "prompts of another width": (
        prompts_of_another_width,
        ConfigurationError,
        r"inputs_embeds must be \[batch, seq, 64\], not \[2, 5, 32\]",
    ),
}


def trained(
    model: Any, mistake: Callable[[Any, Tensor], None] | None, kind: Any = None, text: str = ""
) -> list[Tensor]:
    """LoRA's weights after two steps, with a mistake between them. The model is then as it was."""
    torch.manual_seed(3)
    adapted = peft.get_peft_model(model, copy.deepcopy(LORA))
    optimizer = torch.optim.Adam([p for p in adapted.parameters() if p.requires_grad], lr=0.01)
    ids = prompt(2)
    for step in range(2):
        adapted(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if mistake is not None and step == 0:
            state = copy.deepcopy(optimizer.state_dict())
            with pytest.raises(kind, match=text) as caught:
                mistake(adapted, ids)
            if isinstance(caught.value, SwarmError):
                assert "\n" not in str(caught.value)
            optimizer.zero_grad()
            assert str(optimizer.state_dict()) == str(state)
    weights = [p.detach().clone() for p in adapted.parameters() if p.requires_grad]
    adapted.unload()
    return weights


@pytest.fixture(scope="module")
def client(llama: Path, swarm: LocalSwarm) -> Iterator[Any]:
    """All mistakes are made with one."""
    with connected(llama, swarm.initial_peers) as model:
        yield model


@pytest.fixture(scope="module")
def undisturbed(client: Any) -> list[Tensor]:
    return trained(client, None)


@pytest.mark.parametrize("name", MISTAKES)
def test_the_next_step_works(name: str, client: Any, undisturbed: list[Tensor]) -> None:
    assert all(map(torch.equal, trained(client, *MISTAKES[name]), undisturbed))


def test_buffers_that_are_used_again(client: Any) -> None:
    """Batches that are written into the same memory, with one backward for all of them."""
    ids = [prompt(2), prompt(2, seed=5)]

    def gradients(texts: list[Tensor], change: Callable[[Tensor], None]) -> list[Tensor]:
        torch.manual_seed(3)
        adapted = peft.get_peft_model(client, copy.deepcopy(LORA))
        weights = [p for p in adapted.parameters() if p.requires_grad]
        with torch.no_grad():
            embeds = [client.get_input_embeddings()(text) for text in texts]
        given, mask = embeds[0].clone(), torch.ones_like(texts[0])
        losses = []
        for text, one in zip(texts, embeds, strict=True):
            given.copy_(one)
            losses.append(adapted(inputs_embeds=given, attention_mask=mask, labels=text).loss)
        change(mask)
        found = torch.autograd.grad(sum(losses), weights)  # type: ignore[arg-type]
        adapted.unload()
        return list(found)

    both = gradients(ids, lambda mask: None)
    one, other = (gradients([text], lambda mask: None) for text in ids)
    for got, *parts in zip(both, one, other, strict=True):
        torch.testing.assert_close(got, parts[0] + parts[1], rtol=1e-4, atol=1e-7)
    assert all(map(torch.equal, gradients(ids, lambda mask: mask.zero_()), both))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_mistakes_with_prefix_tuning(llama: Path, swarm: LocalSwarm) -> None:
    config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    ids = prompt(2)
    with connected(llama, swarm.initial_peers) as model:
        adapted = peft.get_peft_model(model, config)
        expected = adapted(input_ids=ids).logits
        with model.inference_session(), pytest.raises(ConfigurationError, match="outside of inference sessions"):
            adapted.generate(input_ids=ids, max_new_tokens=2)
        with pytest.raises(ConfigurationError, match=r"above the servers' limit of 8192: use shorter"):
            adapted(input_ids=prompt(1, 8190))
        too_long = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=1025)
        with pytest.raises(ConfigurationError, match="a prefix may have 1 to 1024 positions, not 1025"):
            peft.get_peft_model(model, too_long)(input_ids=ids)
        other_heads = DynamicCache([(torch.ones(2, 3, 4, 16), torch.ones(2, 3, 4, 16))] * 8)
        with pytest.raises(ConfigurationError, match=r"doesn't fit the model's blocks: .*prefix of block") as caught:
            model(input_ids=ids, past_key_values=other_heads)
        assert "\n" not in str(caught.value)
        assert torch.equal(adapted(input_ids=ids).logits, expected)
    prompts = {"tuning_mode": "ptune", "pre_seq_len": 2}
    with AutoDistributedModel.from_pretrained(str(llama), initial_peers=swarm.initial_peers, **prompts) as model:
        adapted = peft.get_peft_model(model, config)
        with pytest.raises(ConfigurationError, match="don't go together"):
            adapted(input_ids=ids)
