"""Dropout in adapters: what servers leave out is what the seeds say, so it can be done again, here and elsewhere."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from swarm_models import NUM_BLOCKS, OPTIONS, connected, load_local, prompt
from tests.numerics.test_blocks_dropout import save, the_same_masks
from tests.swarm.test_peft import difference, tuned
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from swarmllm import LocalSwarm
from swarmllm.models.adapters.block_adapter import dropout_key
from swarmllm.models.adapters.dropout import draw_seeds, drop_out

pytestmark = pytest.mark.rotates(6, whole_file=True)

HALF = NUM_BLOCKS // 2
RECIPE: dict[str, Any] = {"task_type": "CAUSAL_LM", "r": 16, "lora_alpha": 32, "target_modules": "all-linear"}


class Seeded(nn.Module):
    """In place of an adapter's dropout in a local model."""

    def __init__(self, dropout: Any, key: int, seeds: list[Tensor]) -> None:
        super().__init__()
        self.p, self._key, self._seeds = getattr(dropout, "p", 0.0), key, seeds

    def forward(self, values: Tensor) -> Tensor:
        return drop_out(values, self._seeds[-1], self._key, self.p) if self.training and self.p else values


def with_the_same_masks(adapted: Any) -> Any:
    """A local model that draws seeds where a client does: at each forward."""
    seeds: list[Tensor] = []
    for name, module in adapted.named_modules():
        if (found := re.search(r"layers\.(\d+)\.(.+)$", name)) and isinstance(module, peft.tuners.lora.Linear):
            for number, adapter in enumerate(one for one in module.active_adapters if one in module.lora_dropout):
                key = dropout_key(int(found[1]), found[2], number)
                module.lora_dropout[adapter] = Seeded(module.lora_dropout[adapter], key, seeds)

    def draw(module: nn.Module, args: Any, kwargs: Any) -> None:
        if module.training:
            seeds.append(draw_seeds(*kwargs["input_ids"].shape))

    adapted.get_base_model().model.register_forward_pre_hook(draw, with_kwargs=True)
    return adapted.train()


def learned(adapted: Any, ids: Tensor, mask: Tensor, *, steps: int = 2, between: Any = None) -> tuple[Any, Any]:
    """Losses and gradients of some steps, with seeds from 0 on."""
    labels, losses, gradients = ids.masked_fill(mask == 0, -100), [], {}
    adapted.train()
    torch.manual_seed(0)
    for step in range(steps):
        loss = adapted(input_ids=ids, attention_mask=mask, labels=labels).loss
        if between is not None:
            between()
        loss.backward()
        losses.append(loss.item())
        gradients |= {f"{step}{name}": p.grad.clone() for name, p in adapted.named_parameters() if p.grad is not None}
    return losses, gradients


def assert_learns_alike(remote: Any, local: Any, ids: Tensor, mask: Tensor, **options: Any) -> None:
    losses, gradients = learned(local, ids, mask)
    found_losses, found = learned(remote, ids, mask, **options)
    assert found_losses == pytest.approx(losses, rel=1e-5)
    assert difference(found, gradients) <= 1e-4


@pytest.fixture(scope="module")
def peers(llama: Path) -> Iterator[list[str]]:
    with LocalSwarm(llama, spans=[(0, HALF), (HALF, NUM_BLOCKS)], **OPTIONS) as swarm:
        yield swarm.initial_peers


@pytest.mark.parametrize(
    ("rows", "length", "max_tokens", "padding"),
    [(1, 2, 1024, None), (3, 9, 1024, None), (5, 12, 20, None), (4, 11, 24, "right"), (4, 11, 24, "left")],
)
def test_gradients(llama: Path, peers: list[str], rows: int, length: int, max_tokens: int, padding: str | None) -> None:
    """Whole batches and micro-batches; of padding nothing is computed, and the texts keep their seeds."""
    config = peft.LoraConfig(**RECIPE, lora_dropout=0.3)
    ids, mask = prompt(rows, length), torch.ones(rows, length, dtype=torch.int64)
    if padding is not None:
        for row in range(rows):
            mask[row, : 2 * row] = 0
        mask = mask if padding == "left" else mask.flip(1)
    with connected(llama, peers, max_batch_tokens=max_tokens) as model:
        assert_learns_alike(tuned(model, config), with_the_same_masks(tuned(load_local(llama), config)), ids, mask)


def test_without_dropout_it_would_be_another_gradient(llama: Path, peers: list[str]) -> None:
    """The control of these tests."""
    ids, mask = prompt(2), torch.ones(2, 9, dtype=torch.int64)
    found = [
        learned(with_the_same_masks(tuned(load_local(llama), peft.LoraConfig(**RECIPE, lora_dropout=rate))), ids, mask)
        for rate in (0.0, 0.3)
    ]
    assert difference(found[0][1], found[1][1]) > 0.1


@pytest.mark.parametrize("rate", [0.05, 0.5])
def test_it_is_off_outside_of_training(llama: Path, peers: list[str], rate: float) -> None:
    config, ids = peft.LoraConfig(**RECIPE, lora_dropout=rate), prompt(2)
    local = tuned(load_local(llama), config).eval()
    with connected(llama, peers) as model:
        adapted = tuned(model, config)
        torch.manual_seed(0)
        trained = [adapted.train()(input_ids=ids, use_cache=False).logits for _ in range(2)]
        assert not torch.equal(*trained), "each forward has seeds of its own"
        torch.testing.assert_close(adapted.eval()(input_ids=ids).logits, local(input_ids=ids).logits)
        torch.manual_seed(0)
        assert torch.equal(adapted.train()(input_ids=ids, use_cache=False).logits, trained[0])
        text = adapted.eval().generate(input_ids=ids, max_new_tokens=4, do_sample=False)
    assert text.tolist() == local.generate(input_ids=ids, max_new_tokens=4, do_sample=False).tolist()


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
def test_several_adapters_and_gradient_checkpointing(llama: Path, peers: list[str]) -> None:
    """Two adapters on the same modules leave out different values; what is computed twice leaves out the same."""
    ids, mask = prompt(3), torch.ones(3, 9, dtype=torch.int64)
    models = []
    with connected(llama, peers) as model:
        for one in (model, load_local(llama)):
            adapted = tuned(one, peft.LoraConfig(**RECIPE, lora_dropout=0.3))
            adapted.add_adapter("second", peft.LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=0.5))
            adapted.base_model.set_adapter(["default", "second"])
            for parameter in (p for name, p in adapted.named_parameters() if "second" in name):
                parameter.data = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)) * 0.2
            models.append(adapted)
        models[0].gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        assert_learns_alike(models[0], with_the_same_masks(models[1]), ids, mask)


def test_texts_in_train_mode(llama: Path, peers: list[str]) -> None:
    """As some trainers generate: each step draws its seeds, prompts longer than a step of prefill included."""
    config = peft.LoraConfig(**RECIPE, lora_dropout=0.3)
    local = with_the_same_masks(tuned(load_local(llama), config))
    with connected(llama, peers, prefill_chunk_tokens=8) as model:
        adapted = tuned(model, config).train()
        for rows, length in [(1, 9), (2, 21)]:
            texts = []
            for one in (adapted, local):
                torch.manual_seed(1)
                texts.append(one.generate(input_ids=prompt(rows, length), max_new_tokens=6, do_sample=False))
            assert torch.equal(*texts)


def test_servers_that_die(llama: Path) -> None:
    """Between forward and backward, and in the middle of a text: whoever takes over leaves out the same."""
    config, ids, mask = peft.LoraConfig(**RECIPE, lora_dropout=0.3), prompt(3), torch.ones(3, 9, dtype=torch.int64)
    local = with_the_same_masks(tuned(load_local(llama), config))
    spans = [(0, HALF), (0, HALF), (HALF, NUM_BLOCKS), (HALF, NUM_BLOCKS)]
    with LocalSwarm(llama, spans=spans, **OPTIONS) as swarm, connected(llama, swarm.initial_peers) as model:
        adapted = tuned(model, config)

        def kill_one() -> None:
            if all(server.alive for server in swarm.servers):
                swarm.servers[0].kill()

        assert_learns_alike(adapted, local, ids, mask, between=kill_one)
        torch.manual_seed(2)
        expected = local.generate(input_ids=ids[:1], max_new_tokens=8, do_sample=False)
        torch.manual_seed(2)
        with model.inference_session(max_length=64) as session:
            begun = adapted.generate(input_ids=ids[:1], max_new_tokens=4, do_sample=False)
            used = session.route[-1].server.peer_id
            next(server for server in swarm.servers if server.peer_id == used).kill()
            found = adapted.generate(input_ids=begun, max_new_tokens=4, do_sample=False)
    assert found.tolist() == expected.tolist()


def test_a_server_dies_while_blocks_drop_out(tmp_path: Path) -> None:
    """The blocks' own dropout: the one that takes over leaves out what the other one did."""
    directory = save("gpt2", tmp_path)
    ids, mask = prompt(3, 11) % 90, torch.ones(3, 11, dtype=torch.int64)
    mask[1, 7:] = 0
    config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["c_attn", "c_fc"], fan_in_fan_out=True)
    spans = [(0, 2), (0, 2), (2, 4), (2, 4)]
    found = []
    for victims in ((), (0, 2)):
        with LocalSwarm(directory, spans=spans, **OPTIONS) as swarm, connected(directory, swarm.initial_peers) as model:
            adapted = tuned(model, config)
            waiting = list(victims)

            def kill_one(swarm: LocalSwarm = swarm, waiting: list[int] = waiting) -> None:
                if waiting:
                    swarm.servers[waiting.pop()].kill()

            found.append(learned(adapted, ids, mask, between=kill_one))
            assert sum(server.alive for server in swarm.servers) == len(spans) - len(victims)
    (expected_losses, expected), (losses, gradients) = found
    assert losses == pytest.approx(expected_losses, rel=1e-6)
    assert difference(gradients, expected) <= 1e-5

    local = AutoModelForCausalLM.from_pretrained(directory, dtype="auto").requires_grad_(False)
    adapted = tuned(local, config)
    with the_same_masks(local):
        losses, gradients = learned(adapted, ids, mask)
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    assert difference(gradients, expected) <= 1e-4
