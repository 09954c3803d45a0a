"""Shallow and deep prompts through servers: the losses, gradients and texts of a local implementation."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from swarm_models import OPTIONS, load_local, prompt
from tests.numerics.tiny_models import save_tiny
from torch import Tensor, nn
from transformers import PreTrainedModel

from swarmllm import AutoDistributedModelForCausalLM, AutoDistributedModelForSequenceClassification, LocalSwarm
from swarmllm.client.distributed_model import DistributedModel
from swarmllm.errors import BlockWeightsNotFoundError, ConfigurationError, WeightsMismatchError
from swarmllm.models.architecture import find_blocks

pytestmark = pytest.mark.rotates(6, whole_file=True)

NUM_PROMPTS = 5
MODES = ["ptune", "deep_ptune"]


def swarm_model(directory: Path, swarm: LocalSwarm, mode: str | None, cls: Any = None, **options: Any) -> Any:
    cls = cls or AutoDistributedModelForCausalLM
    options = {**({"pre_seq_len": NUM_PROMPTS} if mode else {}), **options}
    return cls.from_pretrained(str(directory), initial_peers=swarm.initial_peers, tuning_mode=mode, **options)


def trained_values(model: DistributedModel) -> None:
    """As if it had been trained: values that matter."""
    generator = torch.Generator().manual_seed(5)
    for parameter in model.tuned_prompts.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3


@contextmanager
def deep(local: PreTrainedModel, prompts: Tensor | None) -> Iterator[None]:
    """The local model with prompts in its blocks, whose inputs begin with the text's first position."""

    def hook(values: Tensor) -> Any:
        def change(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            name = None if args else "hidden_states"
            hidden = args[0] if name is None else kwargs[name]
            rest = torch.zeros(hidden.shape[1] - len(values), hidden.shape[2])
            hidden = hidden + torch.cat([values, rest])
            return ((hidden, *args[1:]), kwargs) if name is None else (args, {**kwargs, name: hidden})

        return change

    hooks = []
    if prompts is not None:
        for block, values in zip(find_blocks(local).blocks, prompts, strict=True):
            hooks.append(block.register_forward_pre_hook(hook(values), with_kwargs=True))
    try:
        yield
    finally:
        for hook_ in hooks:
            hook_.remove()


def local_results(
    local: PreTrainedModel, prompts: Any, ids: Tensor, mask: Tensor
) -> tuple[Tensor, list[Tensor], Tensor]:
    """Loss, gradients and a greedy text, computed over from the begin for each token."""
    values = [parameter.detach().clone().requires_grad_() for parameter in prompts.parameters()]

    def logits(ids: Tensor, mask: Tensor) -> Tensor:
        embeds = local.get_input_embeddings()(ids)
        embeds = torch.cat([values[0].expand(len(ids), -1, -1), embeds], dim=1)
        positions = (mask.cumsum(-1) - 1).clamp_min(0) + NUM_PROMPTS
        positions = torch.cat([torch.arange(NUM_PROMPTS).expand(len(ids), -1), positions], dim=1)
        mask = torch.cat([torch.ones(len(ids), NUM_PROMPTS, dtype=mask.dtype), mask], dim=1)
        with deep(local, values[1] if len(values) > 1 else None):
            output = local(inputs_embeds=embeds, attention_mask=mask, position_ids=positions, use_cache=False)
        return output.logits[:, NUM_PROMPTS:]

    scores = logits(ids, mask)
    loss = nn.functional.cross_entropy(scores[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    text = ids
    with torch.no_grad():
        for _ in range(6):
            grown = nn.functional.pad(mask, (0, text.shape[1] - mask.shape[1]), value=1)
            text = torch.cat([text, logits(text, grown)[:, -1:].argmax(-1)], dim=1)
    return loss.detach(), [value.grad for value in values], text


def assert_exact(model: Any, local: PreTrainedModel, ids: Tensor, mask: Tensor) -> None:
    trained_values(model)
    loss, gradients, text = local_results(local, model.tuned_prompts, ids, mask)
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    output = model(input_ids=ids, attention_mask=mask, position_ids=positions, labels=ids)
    output.loss.backward()
    torch.testing.assert_close(output.loss.detach(), loss)
    for parameter, expected in zip(model.tuned_prompts.parameters(), gradients, strict=True):
        assert float((parameter.grad - expected).abs().max() / expected.abs().max()) <= 1e-5
    assert {name for name, parameter in model.named_parameters() if parameter.grad is not None} == {
        f"tuned_prompts.{name}" for name, _ in model.tuned_prompts.named_parameters()
    }
    generated = model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False)
    assert generated.tolist() == text.tolist()


@pytest.mark.parametrize("mode", MODES)
def test_prompts_are_exact(mode: str, llama: Path, swarm: LocalSwarm) -> None:
    ids, mask = prompt(3), torch.ones(3, 9, dtype=torch.int64)
    mask[1, :4] = 0  # padded on the left, as for generating
    with swarm_model(llama, swarm, mode) as model:
        model.swarm.config.__dict__["prefill_chunk_tokens"] = 6  # prompts and text in several steps
        assert_exact(model, load_local(llama), ids, mask)
        with pytest.raises(ConfigurationError, match="outside of inference sessions"), model.inference_session():
            model.generate(ids)


def test_trained_prompts_are_saved_and_loaded(llama: Path, swarm: LocalSwarm, tmp_path: Path) -> None:
    ids = prompt(2)
    with swarm_model(llama, swarm, "deep_ptune") as model:
        trained_values(model)
        expected = model(ids).logits
        text = model.generate(ids, max_new_tokens=4, do_sample=False)
        beams = model.generate(ids, max_new_tokens=4, do_sample=False, num_beams=3)
        model.save_pretrained(tmp_path)
    with swarm_model(llama, swarm, "deep_ptune") as model:
        model.load_trained(tmp_path)
        assert torch.equal(model(ids).logits, expected)
        assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), text)
        assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False, num_beams=3), beams)
        assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False, use_cache=False), text)
    with swarm_model(llama, swarm, "deep_ptune", pre_seq_len=4) as model:
        as_saved = r'tuned_prompts\.deep in .* doesn\'t fit: open .* tuning_mode="deep_ptune", pre_seq_len=5, as'
        with pytest.raises(WeightsMismatchError, match=as_saved):
            model.load_trained(tmp_path)
        model.tuned_prompts.deep.data = torch.zeros(2, 4, 64)
        with pytest.raises(ConfigurationError, match=r"tuned_prompts\.deep must be \[8, 4, 64\]"):
            model(ids)


def test_prompts_that_peft_freezes(
    llama: Path, swarm: LocalSwarm, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They can't be lost unsaid: LoRA and prompts are trained together, or the prompts saved before."""
    ids = prompt(2)
    with swarm_model(llama, swarm, "ptune") as model:
        trained_values(model)
        model.save_pretrained(tmp_path / "prompts")
        adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
        adapted(input_ids=ids, labels=ids).loss.backward()
        assert model.tuned_prompts.shallow.grad is None
        assert caplog.text.count("used but not trained") == 1
        before = model.tuned_prompts.requires_grad_(True).shallow.detach().clone()
        optimizer = torch.optim.SGD([one for one in adapted.parameters() if one.requires_grad], lr=1.0)
        adapted(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        assert not torch.equal(model.tuned_prompts.shallow, before)
        adapted.save_pretrained(tmp_path / "lora")
        model.save_pretrained(tmp_path / "both")
        expected = adapted.eval()(input_ids=ids).logits
        assert caplog.text.count("used but not trained") == 1
    with swarm_model(llama, swarm, "ptune") as model:
        with pytest.raises(
            BlockWeightsNotFoundError, match=r"an adapter of peft: open it by PeftModel\.from_pretrained"
        ):
            model.load_trained(tmp_path / "lora")
        with pytest.raises(WeightsMismatchError, match="with an adapter of peft in the model: add it before"):
            model.load_trained(tmp_path / "both")
        adapted = peft.PeftModel.from_pretrained(model, tmp_path / "lora")
        model.load_trained(tmp_path / "prompts")
        assert torch.equal(model.tuned_prompts.shallow, before)
        model.load_trained(tmp_path / "both")
        assert torch.equal(adapted(input_ids=ids).logits, expected)
    with swarm_model(llama, swarm, "ptune") as model:  # frozen by hand: no news
        model.tuned_prompts.requires_grad_(False)
        model.train()(ids)
    assert caplog.text.count("used but not trained") == 1
    with swarm_model(llama, swarm, None) as model:
        with pytest.raises(WeightsMismatchError, match='tuning_mode="ptune", pre_seq_len=5'):
            model.load_trained(tmp_path / "prompts")
        model.save_pretrained(tmp_path / "none")
    without = pytest.raises(WeightsMismatchError, match="saved without prompts, so open the model without tuning_mode")
    with swarm_model(llama, swarm, "ptune") as model, without:
        model.load_trained(tmp_path / "none")


@pytest.mark.parametrize("mode", MODES)
def test_prompts_of_adapters(mode: str, llama: Path, swarm: LocalSwarm, tmp_path: Path) -> None:
    """`modules_to_save`: each adapter has prompts of its own, which peft saves with it; without it are the model's."""
    ids = prompt(2)
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"], modules_to_save=["tuned_prompts"])

    def results(model: Any) -> list[Tensor]:
        text = model.generate(input_ids=ids, max_new_tokens=4, do_sample=False)
        return [model(input_ids=ids).logits.detach(), text]

    with swarm_model(llama, swarm, mode) as model:
        trained_values(model)
        model.save_pretrained(tmp_path / "prompts")
        without = results(model)
        adapted = peft.get_peft_model(model, config, "one").eval()
        adapted.add_adapter("two", peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"]))
        assert all(torch.equal(*pair) for pair in zip(results(adapted), without, strict=True))
        optimizer = torch.optim.SGD([one for one in adapted.parameters() if one.requires_grad], lr=1.0)
        adapted(input_ids=ids, labels=ids).loss.backward()
        trained = dict(model.tuned_prompts.modules_to_save["one"].named_parameters())
        assert len(trained) == 1 + (mode == "deep_ptune")
        assert all(one.grad is not None and float(one.grad.abs().max()) > 0 for one in trained.values())
        optimizer.step()
        expected = results(adapted)
        assert not torch.equal(expected[0], without[0])
        with adapted.disable_adapter():
            assert all(torch.equal(*pair) for pair in zip(results(adapted), without, strict=True))
        with pytest.raises(ConfigurationError, match=r"one has its own tuned_prompts \(modules_to_save\)"):
            adapted(input_ids=ids, adapter_names=["one", "__base__"])
        adapted.set_adapter("two")
        assert all(torch.equal(*pair) for pair in zip(results(adapted), without, strict=True))
        adapted.save_pretrained(tmp_path)
        before = pytest.raises(WeightsMismatchError, match=r"has its own tuned_prompts: load .* before the adapter")
        with before:
            model.load_trained(tmp_path / "prompts")
    with swarm_model(llama, swarm, mode) as model:
        model.load_trained(tmp_path / "prompts")
        adapted = peft.PeftModel.from_pretrained(model, tmp_path / "one")
        assert all(torch.equal(*pair) for pair in zip(results(adapted), expected, strict=True))


def test_a_classifier_with_deep_prompts_learns(llama: Path, swarm: LocalSwarm) -> None:
    ids, labels = prompt(4), torch.tensor([0, 1, 1, 0])
    torch.manual_seed(0)  # of the prompts and the head
    cls = AutoDistributedModelForSequenceClassification
    with swarm_model(llama, swarm, "deep_ptune", cls, num_labels=2, pad_token_id=0) as model:
        trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        assert trained == ["score.weight", "tuned_prompts.shallow", "tuned_prompts.deep"]
        optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.01)
        losses = []
        for _ in range(5):
            loss = model(ids, labels=labels).loss
            losses.append(loss.item())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"tuning_mode": "sing"}, "one of ptune, deep_ptune"),
        ({"tuning_mode": "ptune"}, "needs pre_seq_len"),
        ({"tuning_mode": "ptune", "pre_seq_len": "4"}, "needs pre_seq_len"),
        ({"tuning_mode": "ptune", "pre_seq_len": 4.5}, "needs pre_seq_len"),
        ({"pre_seq_len": 4}, "tuning_mode must be one of ptune, deep_ptune, not None"),
        ({"tuning_mode": "deep_ptune", "pre_seq_len": 5000}, "1 to 1024"),
    ],
)
def test_what_makes_no_sense_is_refused(llama: Path, swarm: LocalSwarm, options: Any, reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        AutoDistributedModelForCausalLM.from_pretrained(str(llama), initial_peers=swarm.initial_peers, **options)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("model_type", ["gpt2", "bloom", "opt", "qwen3", "gemma2", "phi", "mixtral"])
def test_prompts_on_other_architectures(model_type: str, tmp_path: Path) -> None:
    save_tiny(model_type, tmp_path)
    ids = prompt(2).clamp_max(99)
    with LocalSwarm(tmp_path, spans=[(0, 2), (2, 4)], **OPTIONS) as swarm:
        for mode in MODES:
            with swarm_model(tmp_path, swarm, mode) as model:
                assert_exact(model, load_local(tmp_path), ids, torch.ones_like(ids))
