"""Trainers of others on the model as it is: transformers' and TRL's train what they train on a local model.

Also tools that only look: lm_eval and sentence-transformers. All but transformers are optional: `make
test-trainers` has them.
"""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

from swarmllm import (
    AutoDistributedModelForCausalLM,
    AutoDistributedModelForFeatureExtraction,
    LocalSwarm,
    SwarmError,
    embedded_model_path,
)

# TRL, lm_eval and what they import warn of much that is theirs.
pytestmark = [pytest.mark.lane("trainers"), pytest.mark.timeout(400), pytest.mark.filterwarnings("ignore")]

SETTINGS: dict[str, Any] = {
    "per_device_train_batch_size": 4,
    "max_steps": 4,
    # Adam divides by the gradient's size: where that is nearly zero, rounding would decide the sign.
    "optim": "sgd",
    "learning_rate": 0.1,
    "lr_scheduler_type": "constant",
    "save_steps": 2,
    "logging_steps": 1,
    "report_to": [],
    "disable_tqdm": True,
    "use_cpu": True,
    "bf16": False,
    "seed": 1,
}


@pytest.fixture(scope="module")
def embedded() -> Iterator[LocalSwarm]:
    options = {"num_threads": 1, "quant_type": "none", "dtype": "float32"}
    with LocalSwarm(embedded_model_path(), num_servers=2, **options) as swarm:
        yield swarm


def tokenizer() -> Any:
    found = AutoTokenizer.from_pretrained(embedded_model_path())
    found.pad_token = found.pad_token or found.eos_token
    return found


def local_model() -> Any:
    return AutoModelForCausalLM.from_pretrained(embedded_model_path(), dtype="float32").requires_grad_(False)


def remote_model(swarm: LocalSwarm) -> Any:
    return AutoDistributedModelForCausalLM.from_pretrained(
        str(embedded_model_path()), initial_peers=swarm.initial_peers, dtype="float32"
    ).requires_grad_(False)


def with_lora(model: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"])
        return peft.get_peft_model(model, config)


def with_head(model: Any) -> Any:
    """No adapter: the final norm is trained."""
    model.model.norm.weight.requires_grad_(True)
    return model


def tokens(count: int = 16) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(10, 2000, (12,), generator=generator).tolist() for _ in range(count)]
    return [{"input_ids": row, "attention_mask": [1] * len(row), "labels": row} for row in rows]


def huggingface(model: Any, directory: Path, **settings: Any) -> Any:
    arguments = TrainingArguments(output_dir=str(directory), **{**SETTINGS, **settings})
    return Trainer(model=model, args=arguments, train_dataset=tokens())


def sft(model: Any, directory: Path, **settings: Any) -> Any:
    import datasets
    import trl

    arguments = trl.SFTConfig(output_dir=str(directory), gradient_checkpointing=False, **{**SETTINGS, **settings})
    data = datasets.Dataset.from_list(tokens())
    return trl.SFTTrainer(model=model, args=arguments, train_dataset=data, processing_class=tokenizer())


def dpo(model: Any, directory: Path, ref_model: Any = None, **settings: Any) -> Any:
    import datasets
    import trl

    arguments = trl.DPOConfig(output_dir=str(directory), gradient_checkpointing=False, **{**SETTINGS, **settings})
    rows = [
        {"prompt": f"Tom saw {count} birds.", "chosen": " He was happy.", "rejected": " The cake was very nice."}
        for count in range(16)
    ]
    data = datasets.Dataset.from_list(rows)
    return trl.DPOTrainer(
        model=model, ref_model=ref_model, args=arguments, train_dataset=data, processing_class=tokenizer()
    )


def trained(trainer: Any) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}


def assert_same(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    assert got
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("make", "prepare"), [(huggingface, with_lora), (huggingface, with_head), (sft, with_lora), (dpo, with_lora)]
)
def test_a_run_and_its_continuation_are_the_local_ones(
    make: Callable[..., Any], prepare: Callable[[Any], Any], embedded: LocalSwarm, tmp_path: Path
) -> None:
    local = make(prepare(local_model()), tmp_path / "local")
    before = trained(local)
    local.train()
    expected = trained(local)
    assert any(not torch.equal(before[name], value) for name, value in expected.items())
    with remote_model(embedded) as model:
        whole = make(prepare(model), tmp_path / "remote")
        whole.train()
        assert_same(trained(whole), expected)
    with remote_model(embedded) as model:
        resumed = make(prepare(model), tmp_path / "remote")
        resumed.train(resume_from_checkpoint=str(tmp_path / "remote" / "checkpoint-2"))
        assert [entry["step"] for entry in resumed.state.log_history if "loss" in entry][-1] == SETTINGS["max_steps"]
        assert_same(trained(resumed), expected)


@pytest.mark.parametrize("prepare", [with_lora, with_head])
@pytest.mark.parametrize("make", [huggingface, sft])
def test_bf16_is_the_local_one(
    make: Callable[..., Any], prepare: Callable[[Any], Any], embedded: LocalSwarm, tmp_path: Path
) -> None:
    """Both trainers' autocast reaches the servers; in float32 the losses are others."""

    def run(model: Any, bf16: bool) -> tuple[list[float], dict[str, Tensor]]:
        trainer = make(prepare(model), tmp_path, bf16=bf16, save_strategy="no")
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], trained(trainer)

    losses, weights = run(local_model(), True)
    assert losses != pytest.approx(run(local_model(), False)[0], rel=1e-6)
    with remote_model(embedded) as model:
        got_losses, got_weights = run(model, True)
    assert got_losses == pytest.approx(losses, rel=1e-6)
    assert_same(got_weights, weights)


def test_dpo_without_an_adapter_has_its_reference_in_the_swarm(embedded: LocalSwarm, tmp_path: Path) -> None:
    """Without one it would load the whole checkpoint; `create_reference_model`, which copies, is refused."""
    local = dpo(with_head(local_model()), tmp_path / "local", save_strategy="no")
    before = trained(local)
    local.train()
    assert any(not torch.equal(before[name], value) for name, value in trained(local).items())
    with remote_model(embedded) as model, remote_model(embedded) as reference:
        with pytest.raises(SwarmError, match="open another by from_pretrained"):
            copy.deepcopy(model)
        remote = dpo(with_head(model), tmp_path / "remote", ref_model=reference, save_strategy="no")
        remote.train()
        assert remote.ref_model is reference
        assert reference.num_parameters() == local.ref_model.num_parameters()
        assert_same(trained(remote), trained(local))


def test_lm_eval_gives_the_local_likelihoods(embedded: LocalSwarm) -> None:
    from lm_eval.api.instance import Instance
    from lm_eval.models import huggingface as huggingface_models

    texts = [("Tom saw a", " big dog."), ("Lily was", " happy because the sun was out.")]
    requests = [Instance("loglikelihood", {}, text, index) for index, text in enumerate(texts)]

    def likelihoods(model: Any) -> list[tuple[float, bool]]:
        judged = huggingface_models.HFLM(pretrained=model, tokenizer=tokenizer(), batch_size=2, max_length=256)
        return list(judged.loglikelihood(requests, disable_tqdm=True))

    expected = likelihoods(local_model())
    with remote_model(embedded) as model:
        for got, wanted in zip(likelihoods(model), expected, strict=True):
            assert got == pytest.approx(wanted, abs=1e-4)


def test_sentence_transformers_give_the_local_vectors(embedded: LocalSwarm) -> None:
    import sentence_transformers
    from sentence_transformers import models

    texts = ["Tom saw a big dog.", "Lily ate a cake and was happy."]

    def vectors(model: Any) -> Tensor:
        transformer = models.Transformer(str(embedded_model_path()))
        transformer.tokenizer.pad_token = tokenizer().pad_token
        transformer.auto_model = model
        pooling = models.Pooling(model.config.hidden_size)
        encoder = sentence_transformers.SentenceTransformer(modules=[transformer, pooling], device="cpu")
        return encoder.encode(texts, convert_to_tensor=True, show_progress_bar=False)

    expected = vectors(AutoModel.from_pretrained(embedded_model_path(), dtype="float32"))
    with AutoDistributedModelForFeatureExtraction.from_pretrained(
        str(embedded_model_path()), initial_peers=embedded.initial_peers, dtype="float32"
    ) as model:
        torch.testing.assert_close(vectors(model), expected, rtol=1e-5, atol=1e-5)
