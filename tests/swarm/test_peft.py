"""peft inside remote blocks: the local model's logits, gradients and text; adapters travel only when changed."""

import copy
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from swarm_models import NUM_BLOCKS, OPTIONS, connected, load_local, prompt, save_llama
from torch import Tensor
from transformers import PreTrainedModel

from swarmllm import LocalSwarm
from swarmllm.errors import ConfigurationError

pytestmark = pytest.mark.filterwarnings(
    "ignore:Position ids are not supported for parameter efficient tuning:UserWarning",
    "ignore:`lora_bias=True` was passed but:UserWarning",
    "ignore:Model has `tie_word_embeddings=True`:UserWarning",
)

INSIDE: dict[str, Callable[[list[str]], peft.PeftConfig]] = {
    "LoRA": lambda names: peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear"),
    "IA3": lambda names: peft.IA3Config(task_type="CAUSAL_LM", target_modules=names, feedforward_modules=names[-1:]),
    "OFT": lambda names: peft.OFTConfig(task_type="CAUSAL_LM", oft_block_size=8, target_modules=names),
    "prefix tuning": lambda _: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5),
    "projected prefix tuning": lambda _: peft.PrefixTuningConfig(
        task_type="CAUSAL_LM", num_virtual_tokens=5, prefix_projection=True, encoder_hidden_size=16
    ),
}
"""One of each way in which adapters travel, by the names of linear modules to change, the last of them in the
feed-forward part. `tests/numerics/training_contract` has every method of peft."""


def tuned(model: PreTrainedModel, config: peft.PeftConfig) -> Any:
    """The model with an adapter whose values are random, but the same for equal configs."""
    generator = torch.Generator().manual_seed(7)  # not the global one: two threads may be here at once
    adapted = peft.get_peft_model(model, copy.deepcopy(config))
    for name, parameter in sorted(adapted.named_parameters()):
        if parameter.requires_grad and "modules_to_save" not in name and "trainable_tokens" not in name:
            kept = 1.0 if "ia3" in name else parameter.data if "magnitude" in name else 0.0
            size = 0.02 if "oft" in name else 0.2
            parameter.data = torch.randn(parameter.shape, generator=generator) * size + kept
    return adapted


def results(adapted: Any, ids: Tensor) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """Logits, gradients by parameter, and a generated text."""
    mask = torch.ones_like(ids)
    output = adapted.train()(input_ids=ids, attention_mask=mask, labels=ids)
    adapted.zero_grad()
    output.loss.backward()
    gradients = {name: p.grad.clone() for name, p in adapted.named_parameters() if p.grad is not None}
    text = adapted.eval().generate(input_ids=ids, attention_mask=mask, max_new_tokens=6, do_sample=False)
    return output.logits.detach(), gradients, text


def difference(got: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest relative error of a gradient."""
    assert got.keys() == expected.keys()
    assert got
    return max(
        float((got[name] - value).abs().max() / value.abs().max().clamp_min(1e-12)) for name, value in expected.items()
    )


def assert_same(remote: Any, local: Any, config: peft.PeftConfig, ids: Tensor) -> None:
    expected, adapted = results(tuned(local, config), ids), tuned(remote, config)
    got = results(adapted, ids)
    if not config.is_prompt_learning:
        adapted.unload()
    assert float((got[0] - expected[0]).abs().max()) <= 1e-5
    assert difference(got[1], expected[1]) <= 1e-5
    assert got[2].tolist() == expected[2].tolist()


@pytest.fixture(scope="module")
def small_batches(llama: Path, swarm: LocalSwarm) -> Iterator[Any]:
    """A client that tries one adapter after the other."""
    with connected(llama, swarm.initial_peers, max_batch_tokens=20) as model:
        yield model


@pytest.mark.parametrize("method", INSIDE)
@pytest.mark.rotates(3)
def test_inside_remote_blocks(method: str, llama: Path, small_batches: Any) -> None:
    config = INSIDE[method](["q_proj", "v_proj", "down_proj"])
    assert_same(small_batches, load_local(llama), config, prompt(3))


def test_adapters_travel_only_after_they_have_changed(llama: Path, swarm: LocalSwarm) -> None:
    ids = prompt(2)
    with connected(llama, swarm.initial_peers) as model:
        adapted = tuned(model, INSIDE["LoRA"]([]))
        trained = [p for p in adapted.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=0.1)
        for step in range(1, 3):
            adapted(input_ids=ids, labels=ids).loss.backward()
            adapted.generate(input_ids=ids[:1], max_new_tokens=2)
            assert model.swarm.adapters.num_uploads == 2 * step, "once to each of the two servers"
            optimizer.step()
            optimizer.zero_grad()
        with adapted.disable_adapter():
            torch.testing.assert_close(adapted(input_ids=ids).logits, load_local(llama)(input_ids=ids).logits)


@pytest.mark.rotates(3)
def test_a_prefix_travels_once_and_its_adapter_works_locally(llama: Path, swarm: LocalSwarm, tmp_path: Path) -> None:
    ids, mask = prompt(2, 12), torch.ones(2, 12, dtype=torch.int64)
    mask[0, :5] = 0
    with connected(llama, swarm.initial_peers, prefill_chunk_tokens=8) as model:
        adapted = tuned(model, INSIDE["projected prefix tuning"]([]))
        optimizer = torch.optim.SGD([p for p in adapted.parameters() if p.requires_grad], lr=0.1)
        for step in range(1, 3):
            adapted(input_ids=ids, attention_mask=mask, labels=ids).loss.backward()
            adapted.generate(input_ids=ids[:1], max_new_tokens=2)
            assert model.swarm.adapters.num_uploads == 2 * step, "once to each of the two servers"
            optimizer.step()
            optimizer.zero_grad()
        adapted.eval().save_pretrained(tmp_path)
        inputs = {"input_ids": ids, "attention_mask": mask, "do_sample": False, "max_new_tokens": 8}
        texts = [adapted.generate(**inputs, num_beams=beams).tolist() for beams in (1, 3)]
        with adapted.disable_adapter():
            torch.testing.assert_close(adapted(input_ids=ids).logits, load_local(llama)(input_ids=ids).logits)
    loaded = peft.PeftModel.from_pretrained(load_local(llama), tmp_path)
    assert [loaded.generate(**inputs, num_beams=beams).tolist() for beams in (1, 3)] == texts
    with connected(llama, swarm.initial_peers) as model:
        loaded = peft.PeftModel.from_pretrained(model, tmp_path)
        assert [loaded.generate(**inputs, num_beams=beams).tolist() for beams in (1, 3)] == texts


@pytest.mark.parametrize("method", ["LoRA", "prefix tuning"])
@pytest.mark.rotates(3)
def test_a_text_goes_on_with_what_it_began_with(method: str, llama: Path, swarm: LocalSwarm) -> None:
    """Other calls of the model between two steps change nothing."""
    ids = torch.randint(3, 64, (1, 6), generator=torch.Generator().manual_seed(3))
    texts = []
    with connected(llama, swarm.initial_peers) as remote:
        for model in (remote, load_local(llama)):
            adapted = tuned(model, INSIDE[method](["q_proj", "down_proj"]))

            def without(ids: Tensor, scores: Tensor, adapted: Any = adapted) -> Tensor:
                with adapted.disable_adapter():
                    return scores - 0.5 * adapted(input_ids=ids, use_cache=False).logits[:, -1]

            texts.append(adapted.generate(input_ids=ids, max_new_tokens=8, do_sample=False, logits_processor=[without]))
    assert torch.equal(*texts)


@pytest.mark.rotates(3)
def test_texts_behind_several_prefixes_at_once(llama: Path, swarm: LocalSwarm) -> None:
    """Equal prompts, long enough to be shared, behind other prefixes: nobody gets another's keys and values."""
    ids = prompt(1, 80)
    expected, got = {}, {}

    def text(model: Any, num_virtual_tokens: int) -> list[list[int]]:
        config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=num_virtual_tokens)
        adapted = tuned(model, config) if num_virtual_tokens else model
        return adapted.generate(input_ids=ids, max_new_tokens=24, do_sample=False).tolist()

    def run(num_virtual_tokens: int) -> None:
        with connected(llama, swarm.initial_peers) as model:
            got[num_virtual_tokens] = text(model, num_virtual_tokens)

    for length in (0, 5, 40):
        expected[length] = text(load_local(llama), length)
    assert len({str(value) for value in expected.values()}) == 3
    for _ in range(2):
        threads = [threading.Thread(target=run, args=(length,)) for length in expected]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert got == expected


def trained_alone(directory: Path, peers: list[str], seed: int) -> dict[str, Tensor]:
    ids = prompt(2, seed=seed)
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=2 + seed, target_modules=["q_proj", "up_proj"])
    with connected(directory, peers) as model:
        adapted = tuned(model, config)
        optimizer = torch.optim.SGD([p for p in adapted.parameters() if p.requires_grad], lr=0.05)
        for _ in range(3):
            adapted(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return {name: p.detach().clone() for name, p in adapted.named_parameters() if p.requires_grad}


@pytest.mark.slow
def test_two_clients_train_different_adapters_at_once_while_a_third_generates(llama: Path, swarm: LocalSwarm) -> None:
    with connected(llama, swarm.initial_peers) as model:
        before = model(prompt(2), use_cache=False).logits
        text = model.generate(prompt(), max_new_tokens=8)
        alone = [trained_alone(llama, swarm.initial_peers, seed) for seed in (1, 2)]
        together: dict[int, dict[str, Tensor]] = {}

        def train(seed: int) -> None:
            together[seed] = trained_alone(llama, swarm.initial_peers, seed)

        threads = [threading.Thread(target=train, args=(seed,)) for seed in (1, 2)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            assert torch.equal(model.generate(prompt(), max_new_tokens=8), text)
        for thread in threads:
            thread.join()
        assert torch.equal(model(prompt(2), use_cache=False).logits, before), "servers update nothing"
    for seed, expected in zip((1, 2), alone, strict=True):
        assert together[seed].keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(together[seed][name], value)


def test_what_servers_cannot_compute_is_refused_in_one_sentence(model: Any, llama: Path) -> None:
    with connected(llama, list(model.swarm.config.initial_peers)) as client:
        with pytest.raises(ConfigurationError, match="can't run on servers"):
            peft.get_peft_model(client, peft.HRAConfig(target_modules=["q_proj"]))
        with torch.no_grad():
            assert client(prompt(), use_cache=False).logits.isfinite().all()


def test_only_a_head_is_trained_without_a_single_backward_call(
    llama: Path, swarm: LocalSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    with connected(llama, swarm.initial_peers) as model:
        monkeypatch.setattr(type(model.remote_blocks.batches), "backward", lambda *_: pytest.fail("a backward call"))
        model.requires_grad_(False)
        model.lm_head.weight.requires_grad_(True)
        model(prompt(), labels=prompt()).loss.backward()
        assert model.lm_head.weight.grad.abs().sum() > 0


@pytest.mark.slow
def test_one_corrupted_weight_would_be_seen(llama: Path, tmp_path: Path) -> None:
    """The control of the matrix: it fails when the servers' weights are not the local ones."""
    other = save_llama(tmp_path / "other")
    local = load_local(llama)
    with torch.no_grad():
        local.model.layers[3].self_attn.q_proj.weight[0, 0] += 0.5
    config = INSIDE["LoRA"]([])
    with (
        LocalSwarm(other, spans=[(0, NUM_BLOCKS)], **OPTIONS) as swarm,
        connected(other, swarm.initial_peers) as model,
        pytest.raises(AssertionError),
    ):
        assert_same(model, local, config, prompt(2))
