"""Padded batches through servers: what is trained gets its gradients, and padding costs no traffic."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PrefixTuningConfig, TaskType, get_peft_model
from swarm_models import NUM_BLOCKS, OPTIONS, assert_same_tokens, connected, prompt, wait_until
from torch import Tensor
from transformers import AutoModel, PreTrainedModel

from swarmllm import AutoDistributedModelForCausalLM, ClientConfig, LocalSwarm
from swarmllm.client.distributed_model import AutoDistributedModelForFeatureExtraction
from swarmllm.data_structures import BlockTraits
from swarmllm.network.wire.stream import traffic

pytestmark = pytest.mark.rotates(6, whole_file=True)

LENGTHS = (7, 40, 3, 12, 25, 9, 1, 18)
WIDTH = 40


def mask_of(side: str) -> Tensor:
    places, lengths = torch.arange(WIDTH)[None], torch.tensor(LENGTHS)[:, None]
    return (places >= WIDTH - lengths if side == "left" else places < lengths).long()


def labels_of(ids: Tensor, mask: Tensor) -> Tensor:
    """Labels of the texts, except each first token, which a padded batch predicts from padding."""
    return ids.where((mask != 0) & (mask.roll(1, 1) != 0), -100)


@torch.no_grad()
def logits(model: Any, ids: Tensor, mask: Tensor) -> Tensor:
    found: Tensor = model(ids, attention_mask=mask, use_cache=False).logits
    return found[mask != 0]


def gradients(model: Any, mask: Tensor, trained: Callable[[Any], dict[str, Tensor]]) -> dict[str, Tensor]:
    ids = prompt(len(LENGTHS), WIDTH)
    loss = model(input_ids=ids, attention_mask=mask, labels=labels_of(ids, mask)).loss
    of = trained(model)
    return {"loss": loss.detach(), **dict(zip(of, torch.autograd.grad(loss, list(of.values())), strict=True))}


def computing_all(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on the client has padding computed."""
    monkeypatch.setattr(model.remote_blocks.batches, "traits", BlockTraits())


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_costs_no_traffic(
    model: Any, local: PreTrainedModel, side: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, mask = prompt(len(LENGTHS), WIDTH), mask_of(side)
    logits(model, ids, mask)  # opens connections

    def sent() -> int:
        before = traffic.sent_bytes
        torch.testing.assert_close(logits(model, ids, mask), logits(local, ids, mask))
        return traffic.sent_bytes - before

    without = sent()
    computing_all(model, monkeypatch)
    assert without < 0.6 * sent()  # 36 % of the positions are text


def of_adapter(model: Any) -> dict[str, Tensor]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(
    "trained", ["lora", "prefix", "ptune", "deep_ptune", pytest.param("head", marks=pytest.mark.slow)]
)
def test_what_is_trained(
    llama: Path, swarm: LocalSwarm, trained: str, side: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuning = {"tuning_mode": trained, "pre_seq_len": 3} if "tune" in trained else {}
    torch.manual_seed(0)
    with AutoDistributedModelForCausalLM.from_pretrained(
        str(llama), initial_peers=swarm.initial_peers, **tuning
    ) as model:
        adapted: Any = model
        if trained == "lora":
            config = LoraConfig(task_type=TaskType.CAUSAL_LM, target_modules="all-linear", init_lora_weights=False)
            adapted = get_peft_model(model, config)
        elif trained == "prefix":
            adapted = get_peft_model(model, PrefixTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=4))
        if model.tuned_prompts is not None:
            for parameter in model.tuned_prompts.parameters():
                parameter.data.normal_(std=0.3)
        adapted.eval()
        got = gradients(adapted, mask_of(side), of_adapter)
        computing_all(model, monkeypatch)
        want = gradients(adapted, mask_of(side), of_adapter)
    assert len(want) > 1
    for name, value in want.items():
        assert value.any(), name
        torch.testing.assert_close(got[name], value, rtol=1e-3, atol=1e-5 * float(value.abs().max()))


@pytest.mark.parametrize("side", ["left", "right"])
def test_nothing_of_the_padding_reaches_anybody(model: Any, side: str) -> None:
    mask = mask_of(side)
    hidden = torch.randn(len(LENGTHS), WIDTH, 64, generator=torch.Generator().manual_seed(2))
    found = []
    for padding in (0.0, torch.nan):
        inputs = hidden.where((mask != 0)[..., None], padding).requires_grad_()
        outputs = model.remote_blocks[1:](inputs, attention_mask=mask)
        (grad,) = torch.autograd.grad(outputs.square().sum(), [inputs])
        found.append((outputs.detach(), grad))
        for values in found[-1]:
            assert not values[mask == 0].any()
            assert values[mask != 0].all()
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("side", ["left", "right"])
def test_texts_without_a_cache(model: Any, local: PreTrainedModel, side: str, caplog: pytest.LogCaptureFixture) -> None:
    """On the right, the next token follows padding, which is computed then."""
    mask = {"attention_mask": mask_of(side)[:4]}
    assert_same_tokens(model, local, prompt(4, WIDTH), max_new_tokens=3, use_cache=False, **mask)
    assert not told(caplog)


def average(model: Any, side: str) -> tuple[Tensor, Tensor, Tensor]:
    """Features of a padded batch, a loss that takes in all of them, and its gradient."""
    ids, mask = prompt(len(LENGTHS), WIDTH), mask_of(side)
    embeds = model.get_input_embeddings()(ids).detach().requires_grad_()
    features = model(inputs_embeds=embeds, attention_mask=mask, use_cache=False).last_hidden_state
    loss = (features - 1).square().mean()
    return features.detach(), loss.detach(), torch.autograd.grad(loss, [embeds])[0]


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "compute_padding=True" in record.getMessage()]


def test_padding_is_computed_for_losses_that_look_at_it(
    llama: Path, swarm: LocalSwarm, caplog: pytest.LogCaptureFixture
) -> None:
    local = AutoModel.from_pretrained(llama, dtype="auto")
    config = ClientConfig(compute_padding=True)
    with AutoDistributedModelForFeatureExtraction.from_pretrained(
        str(llama), initial_peers=swarm.initial_peers, client_config=config
    ) as model:
        for side in ("left", "right"):
            for got, want in zip(average(model, side), average(local, side), strict=True):
                torch.testing.assert_close(got, want)
    assert not told(caplog)


def test_a_loss_that_may_look_at_padding_is_told_once(
    llama: Path, swarm: LocalSwarm, local: PreTrainedModel, caplog: pytest.LogCaptureFixture
) -> None:
    ids, mask = prompt(len(LENGTHS), WIDTH), mask_of("right")
    with AutoDistributedModelForFeatureExtraction.from_pretrained(
        str(llama), initial_peers=swarm.initial_peers
    ) as model:
        model(ids[:1], attention_mask=torch.ones_like(mask[:1]), use_cache=False)
        assert not told(caplog)
        with torch.no_grad():
            model(ids, attention_mask=mask, use_cache=False)
        (of_outputs,) = told(caplog)
        assert "hidden states there are zeros" in of_outputs
        average(model, "left"), average(model, "right")
        assert told(caplog)[0] == of_outputs
        (of_gradients,) = told(caplog)[1:]
        assert "the loss takes in positions that attention_mask hides" in of_gradients
    caplog.clear()
    with connected(llama, swarm.initial_peers) as model:
        gradients(model, mask, lambda model: {"weight": model.get_input_embeddings().weight})
        assert not told(caplog), "the model's own loss takes in what has a label"
        model(ids, attention_mask=mask, use_cache=False).logits[mask != 0].sum().backward()
        assert told(caplog) == [of_outputs]


@pytest.fixture
def two_routes(llama: Path) -> Iterator[LocalSwarm]:
    with LocalSwarm(llama, spans=[(0, NUM_BLOCKS)] * 2, **OPTIONS) as swarm:
        yield swarm


def test_one_of_two_routes_dies_before_the_backward(
    llama: Path, two_routes: LocalSwarm, model: Any, local: PreTrainedModel
) -> None:
    ids, mask = prompt(len(LENGTHS), WIDTH), mask_of("right")

    def run(model: Any, between: Callable[[], object] = lambda: None) -> tuple[Tensor, Tensor]:
        embeds = model.get_input_embeddings()(ids).detach().requires_grad_()
        loss = model(inputs_embeds=embeds, attention_mask=mask, labels=labels_of(ids, mask), use_cache=False).loss
        between()
        return loss.detach(), torch.autograd.grad(loss, [embeds])[0]

    with connected(llama, two_routes.initial_peers) as client:
        wait_until(lambda: len(client.swarm.servers()) == 2, "both servers")
        opened = client.remote_blocks.batches.requests.opened

        def kill() -> None:
            assert all(opened(server.peer_id) for server in two_routes.servers)
            two_routes.servers[1].kill()

        got, want = run(client, kill), run(local)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other)
