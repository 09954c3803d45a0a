"""Some blocks on the client's machine, the others on real servers: the local model's logits, gradients and text."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from swarm_models import (
    OPTIONS,
    assert_same_tokens,
    connected,
    generate_seeded,
    load_local,
    prompt,
)
from test_peft import INSIDE, results, tuned
from tests.planners import FixedPlanner
from torch import Tensor
from transformers import PreTrainedModel

from swarmllm import AutoDistributedModel, ClientConfig, LocalSwarm
from swarmllm.client.view.connection import Connection
from swarmllm.errors import ConfigurationError, WeightsMismatchError

ENDS, FIRST, ALTERNATING = "0:2,6:8", "0:2", "5:6,1:4"
pytestmark = [
    pytest.mark.filterwarnings("ignore:Position ids are not supported for parameter efficient:UserWarning"),
    pytest.mark.rotates(6, whole_file=True),
]


@pytest.fixture(scope="module")
def middle(llama: Path) -> Iterator[LocalSwarm]:
    """Servers of all blocks but the first and the last two."""
    with LocalSwarm(llama, spans=[(2, 4), (4, 6)], **OPTIONS) as swarm:
        yield swarm


@pytest.fixture(scope="module")
def ends(llama: Path, middle: LocalSwarm) -> Iterator[Any]:
    with connected(llama, middle.initial_peers, local_blocks=ENDS) as model:
        yield model


@pytest.fixture(scope="module", params=[FIRST, ALTERNATING])
def some(request: pytest.FixtureRequest, llama: Path, swarm: LocalSwarm) -> Iterator[Any]:
    with connected(llama, swarm.initial_peers, local_blocks=request.param, prefill_chunk_tokens=32) as model:
        yield model


@pytest.fixture(scope="module", params=["ends", "some"])
def mixed(request: pytest.FixtureRequest, some: Any, ends: Any) -> Any:
    return ends if request.param == "ends" else some


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"do_sample": True, "temperature": 0.7},
        {"num_beams": 3, "num_return_sequences": 2},
        {"use_cache": False},
        {"prompt_lookup_num_tokens": 3},
    ],
    ids=str,
)
def test_the_same_tokens(mixed: Any, local: PreTrainedModel, options: dict[str, Any]) -> None:
    assert_same_tokens(mixed, local, prompt(1, 50), max_new_tokens=12, **options)


def test_a_padded_batch(mixed: Any, local: PreTrainedModel) -> None:
    ids = prompt(3, 9)
    mask = torch.ones_like(ids)
    ids[0, :4] = ids[1, :1] = mask[0, :4] = mask[1, :1] = 0
    assert_same_tokens(mixed, local, ids, attention_mask=mask, max_new_tokens=8)
    assert_same_tokens(mixed, local, ids, attention_mask=mask, max_new_tokens=8, num_beams=2)
    with torch.no_grad():
        logits = mixed(ids, attention_mask=mask).logits
    assert torch.equal(logits[mask.bool()], local(ids, attention_mask=mask).logits[mask.bool()])


@pytest.mark.parametrize("guesses", ["itself", "ngram"])
def test_guesses_under_way(llama: Path, middle: LocalSwarm, local: PreTrainedModel, guesses: str) -> None:
    speculation = str(llama) if guesses == "itself" else guesses
    ids = torch.cat([prompt(1, 6), prompt(1, 6), prompt(1, 3)], dim=1)
    with connected(llama, middle.initial_peers, local_blocks=ENDS, speculation=speculation) as model:
        model.speculator.planner = planner = FixedPlanner()
        assert_same_tokens(model, local, ids, max_new_tokens=24)
        assert planner.judged, "nothing was guessed"
        if guesses == "itself":
            assert planner.right.total() >= 12


def test_no_server_sees_embeddings(llama: Path, swarm: LocalSwarm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though these servers hold the first blocks, too."""
    sent: list[Tensor] = []
    compressed = Connection.compressed

    async def noted(self: Connection, tensors: dict[str, Tensor], **options: Any) -> Any:
        sent.extend(tensors.values())
        return await compressed(self, tensors, **options)

    monkeypatch.setattr(Connection, "compressed", noted)
    with connected(llama, swarm.initial_peers, local_blocks=FIRST) as model:
        ids = prompt(1, 6)
        model.generate(ids, max_new_tokens=3)
        model(ids, labels=ids).loss.backward()
        embedded = model.embed(ids)
        assert sent
        assert all(tensor.shape != embedded.shape or not torch.equal(tensor, embedded) for tensor in sent)
        with model.inference_session(max_length=8) as session:
            session.step(embedded)
            assert session.route[0].span.start == 2


# ---------------------------------------------------------------------- training


def trained(model: Any, ids: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits, and gradients by parameter."""
    model.zero_grad()
    output = model.train()(ids, labels=ids)
    output.loss.backward()
    model.eval()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return output.logits.detach(), found


def test_frozen_unless_asked_for(llama: Path, ends: Any) -> None:
    ids, whole = prompt(2), load_local(llama)
    whole.requires_grad_(True)
    expected = trained(whole, ids)[1]
    assert not any(".layers." in name for name in trained(ends, ids)[1])
    ends.local_blocks.requires_grad_(True)
    ends.activation_checkpointing_enable()
    try:
        logits, got = trained(ends, ids)
    finally:
        ends.activation_checkpointing_disable()
        ends.local_blocks.requires_grad_(False)
    torch.testing.assert_close(logits, whole(ids).logits.detach())
    assert {name.split(".")[2] for name in got if ".layers." in name} == {"0", "1", "6", "7"}
    for name, gradient in got.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6)
    assert ends.num_parameters() == whole.num_parameters()


def test_blocks_are_trained_saved_and_loaded(llama: Path, middle: LocalSwarm, tmp_path: Path) -> None:
    ids, whole = prompt(2), load_local(llama)

    def train(model: Any) -> None:
        parameters = [p for n, p in model.named_parameters() if any(f"layers.{idx}." in n for idx in (0, 1, 6, 7))]
        for parameter in parameters:
            parameter.requires_grad_(True)
        optimizer = torch.optim.SGD(parameters, lr=0.5)
        for _ in range(3):
            optimizer.zero_grad()
            model(ids, labels=ids).loss.backward()
            optimizer.step()

    before = whole(ids).logits
    train(whole)
    with connected(llama, middle.initial_peers, local_blocks=ENDS) as model:
        model.save_pretrained(tmp_path / "nothing trained")
        train(model)
        torch.testing.assert_close(model(ids).logits, whole(ids).logits)
        assert_same_tokens(model, whole, ids, max_new_tokens=6)
        model.save_pretrained(tmp_path / "trained")
        with pytest.raises(WeightsMismatchError, match="local_blocks that it was saved with"):
            model.load_trained(tmp_path / "nothing trained")  # what they were is not in there
    with connected(llama, middle.initial_peers, local_blocks=ENDS) as model:
        model.load_trained(tmp_path / "nothing trained")
        torch.testing.assert_close(model(ids).logits, before)
        model.load_trained(tmp_path / "trained")
        torch.testing.assert_close(model(ids).logits, whole(ids).logits)


def test_blocks_that_were_trained_need_a_place(llama: Path, swarm: LocalSwarm, tmp_path: Path) -> None:
    with connected(llama, swarm.initial_peers, local_blocks=FIRST) as model:
        model.local_blocks.requires_grad_(True)
        model.save_pretrained(tmp_path)
    with (
        connected(llama, swarm.initial_peers) as model,
        pytest.raises(WeightsMismatchError, match="local_blocks that it was saved with"),
    ):
        model.load_trained(tmp_path)


METHODS = {
    **{name: INSIDE[name] for name in ("LoRA", "IA3", "prefix tuning")},
    "DoRA": lambda _: peft.LoraConfig(
        task_type="CAUSAL_LM", r=4, use_dora=True, target_modules=["q_proj"], layers_to_transform=[0, 1, 6, 7]
    ),
}
"""The last one reads weights, so that it works in the blocks that are here and in no others."""


@pytest.mark.parametrize("method", METHODS)
def test_adapters_in_all_blocks(method: str, llama: Path, middle: LocalSwarm) -> None:
    config, ids = METHODS[method](["q_proj", "v_proj", "down_proj"]), prompt(3)
    with connected(llama, middle.initial_peers, local_blocks=ENDS) as model:
        got = results(tuned(model, config), ids)
    expected = results(tuned(load_local(llama), config), ids)
    torch.testing.assert_close(got[0], expected[0])
    assert got[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        torch.testing.assert_close(got[1][name], gradient, rtol=1e-4, atol=1e-6)
    assert got[2].tolist() == expected[2].tolist()


def test_deep_prompts_are_the_same_wherever_blocks_are(llama: Path, swarm: LocalSwarm) -> None:
    ids, found = prompt(2), []
    for local_blocks in (None, ALTERNATING):
        config = ClientConfig(local_blocks=local_blocks)
        with AutoDistributedModel.from_pretrained(
            str(llama), initial_peers=swarm.initial_peers, client_config=config, tuning_mode="deep_ptune", pre_seq_len=3
        ) as model:
            generator = torch.Generator().manual_seed(1)
            for parameter in model.tuned_prompts.parameters():
                parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
            loss = model(ids, labels=ids).loss
            loss.backward()
            text = generate_seeded(model, ids, max_new_tokens=6)
            found.append((loss.detach(), [p.grad for p in model.tuned_prompts.parameters()], text))
    torch.testing.assert_close(found[0], found[1])


# ---------------------------------------------------------------------- mistakes


@pytest.mark.parametrize("wrong", ["2", "2:2", "3:1", "0:2,1:3", "a:b", "-1:2", "0:2,", "0;2"])
def test_ranges_that_are_none(wrong: str) -> None:
    with pytest.raises(ConfigurationError, match="local_blocks must be ranges START:END"):
        ClientConfig(local_blocks=wrong)


@pytest.mark.parametrize(
    ("local_blocks", "options", "words"),
    [
        ("7:9", {}, "the model has blocks 0 to 7 only"),
        ("0:3,3:8", {}, "leaves no block to servers"),
        ("0:2", {"client_config": ClientConfig(active_adapter="a/b")}, "active_adapter='a/b' is applied by servers"),
    ],
)
def test_ranges_that_cannot_be(
    llama: Path, swarm: LocalSwarm, local_blocks: str, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigurationError, match=words):
        AutoDistributedModel.from_pretrained(
            str(llama), initial_peers=swarm.initial_peers, local_blocks=local_blocks, **options
        )
