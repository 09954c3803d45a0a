"""Changes that transformers and peft allow to a model in training: each gives the local numbers, or one sentence.

One row for an option or an operation. None is accepted and ignored.
"""

import copy
import json
import zlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from tests.numerics.in_process_swarm import InProcessSwarm
from tests.numerics.tiny_models import save_tiny
from tests.selection import sampled
from torch import Tensor, nn
from torch.nn.utils import prune
from transformers import AutoModelForCausalLM, PreTrainedModel, Trainer, TrainingArguments

from swarmllm.client.distributed_model import DistributedModel
from swarmllm.errors import ConfigurationError
from swarmllm.models.architecture import find_blocks

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:peft", "ignore::RuntimeWarning:peft")

IDS = torch.randint(3, 90, (3, 7), generator=torch.Generator().manual_seed(1))
RELATIVE = 2e-5


@pytest.fixture(scope="module")
def shared(llama: Path) -> Any:
    """Nothing that is refused may change it."""
    return InProcessSwarm(llama).client


@pytest.fixture(scope="module")
def expected(shared: Any) -> Tensor:
    logits: Tensor = shared(IDS, use_cache=False).logits.detach()
    return logits


def load_local(directory: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(directory, dtype="auto")
    find_blocks(model).blocks.requires_grad_(False)
    return model


# ---------------------------------------------------------------------- what is done to blocks

Operation = Callable[[Any], object]


def block(model: Any) -> Any:
    return model.model.layers.blocks()[1]


def weight(model: Any) -> Any:
    return block(model).self_attn.q_proj.weight


def other_weights(model: Any) -> dict[str, Tensor]:
    return {**model.state_dict(), "model.layers.1.self_attn.q_proj.weight": torch.zeros(64, 64)}


def refused_twice(attempt: Callable[[], object], sentence: str) -> None:
    """The first attempt leaves nothing behind."""
    said = []
    for _ in range(2):
        with pytest.raises(ConfigurationError, match=sentence) as caught:
            attempt()
        said.append(str(caught.value))
    assert said[0] == said[1]
    assert "\n" not in said[0]


HOOK, WEIGHT, CHANGE = "no hook can run in", "is not here but on servers", "can't be changed here, because servers keep"
ON_BLOCKS: dict[str, tuple[Operation, str]] = {
    "a hook inside": (lambda m: block(m).mlp.register_forward_hook(print), f"{HOOK} mlp of block 1"),
    "a forward pre-hook": (lambda m: block(m).mlp.act_fn.register_forward_pre_hook(print), HOOK),
    "a backward hook": (lambda m: block(m).register_full_backward_hook(print), HOOK),
    "a backward pre-hook": (lambda m: block(m).register_full_backward_pre_hook(print), HOOK),
    "a hook inside the first block": (lambda m: m.model.layers[0].mlp.register_forward_hook(print), HOOK),
    "filling a weight": (lambda m: weight(m).fill_(1), WEIGHT),
    "a view of it": (lambda m: weight(m).T[0].fill_(1), WEIGHT),
    "its memory": (lambda m: weight(m).numpy(), WEIGHT),
    "its data": (lambda m: weight(m).data.zero_(), WEIGHT),
    "other data": (lambda m: setattr(weight(m), "data", torch.ones(64, 64)), WEIGHT),
    "copying into it": (lambda m: weight(m).copy_(torch.ones(64, 64)), WEIGHT),
    "a part of it": (lambda m: weight(m).__setitem__(0, 1), WEIGHT),
    "initializing it": (lambda m: nn.init.normal_(weight(m)), WEIGHT),
    "a result into it": (lambda m: torch.add(torch.ones(64, 64), 1, out=weight(m)), WEIGHT),
    "another size": (lambda m: weight(m).resize_(2), WEIGHT),
    "a row of a view": (lambda m: weight(m).view(-1)[3:9].mul_(2), WEIGHT),
    "its storage": (lambda m: weight(m).untyped_storage(), WEIGHT),
    "an optimizer": (lambda m: torch.optim.SGD([weight(m)], lr=0.1), WEIGHT),
    "pruning": (lambda m: prune.l1_unstructured(block(m).self_attn.q_proj, "weight", 0.5), CHANGE),  # type: ignore[no-untyped-call]
    "gradients of a weight": (lambda m: weight(m).requires_grad_(), WEIGHT),
    "gradients by attribute": (lambda m: setattr(weight(m), "requires_grad", True), WEIGHT),
    "gradients of a block": (lambda m: block(m).requires_grad_(True), CHANGE),
    "another parameter": (
        lambda m: setattr(block(m).self_attn.q_proj, "weight", nn.Parameter(torch.ones(64, 64))),
        f"self_attn.q_proj.weight of block 1 {CHANGE}",
    ),
    "another tensor": (lambda m: setattr(block(m).mlp.up_proj, "weight", torch.ones(128, 64)), CHANGE),
    "one parameter more": (lambda m: block(m).register_parameter("scale", nn.Parameter(torch.ones(1))), CHANGE),
    "one buffer more": (lambda m: block(m).register_buffer("scale", torch.ones(1)), CHANGE),
    "another module": (lambda m: setattr(block(m), "mlp", nn.Identity()), f"mlp of block 1 {CHANGE}"),
    "a wrapped module": (lambda m: setattr(block(m), "mlp", nn.Sequential(block(m).mlp, nn.ReLU())), CHANGE),
    "one module more": (lambda m: block(m).add_module("extra", nn.Identity()), CHANGE),
    "one module less": (lambda m: delattr(block(m), "mlp"), CHANGE),
    "another forward": (lambda m: setattr(block(m), "forward", print), CHANGE),
    "another constant": (lambda m: setattr(block(m).self_attn, "scaling", 3.0), CHANGE),
    "a module of the first block": (lambda m: setattr(m.model.layers[0], "mlp", nn.Identity()), CHANGE),
    "a constant of the first block": (lambda m: setattr(m.model.layers[0].self_attn, "scaling", 3.0), CHANGE),
    "another block": (lambda m: m.model.layers.__setitem__(3, nn.Identity()), f"block 3 {CHANGE}"),
    "one block more": (lambda m: m.model.layers.append(nn.Identity()), CHANGE),
    "a block between": (lambda m: m.model.layers.insert(1, nn.Identity()), CHANGE),
    "one block less": (lambda m: m.model.layers.pop(3), f"block 3 {CHANGE}"),
    "the last block less": (lambda m: m.model.layers.pop(-1), CHANGE),
    "no third block": (lambda m: m.model.layers.__delitem__(3), CHANGE),
    "fewer blocks": (
        lambda m: setattr(m.model, "layers", nn.ModuleList(m.model.layers[:2])),
        f"layers of the model {CHANGE}",
    ),
    "a slice of them": (lambda m: setattr(m.model, "layers", m.model.layers[:2]), f"layers of the model {CHANGE}"),
    "no blocks": (lambda m: delattr(m.model, "layers"), CHANGE),
    "weights of blocks to load": (lambda m: m.load_state_dict(other_weights(m), strict=False), CHANGE),
    "a copy of a block": (lambda m: copy.deepcopy(block(m)), "can't be copied"),
}


@pytest.mark.parametrize("name", ON_BLOCKS)
@pytest.mark.rotates(3)
def test_what_cannot_reach_the_servers(name: str, shared: Any, expected: Tensor) -> None:
    operation, sentence = ON_BLOCKS[name]
    names = [name for name, _ in shared.named_modules()]
    refused_twice(lambda: operation(shared), sentence)
    assert [name for name, _ in shared.named_modules()] == names
    assert torch.equal(shared(IDS, use_cache=False).logits, expected)


def test_weights_can_be_read(llama: Path, shared: Any) -> None:
    local = weight_of(load_local(llama))
    for look in (torch.norm, lambda w: 1 - w, lambda w: w.data.T @ w, lambda w: torch.stack([w, w])):
        assert torch.equal(look(weight(shared)), look(local))
    assert weight(shared).tolist() == local.tolist()
    ones = torch.ones(1, 1, 64)
    assert torch.equal(block(shared).mlp(ones), load_local(llama).model.layers[1].mlp(ones))


def weight_of(local: Any) -> Tensor:
    found: Tensor = local.model.layers[1].self_attn.q_proj.weight
    return found


HARMLESS: dict[str, Operation] = {
    "a frozen model": lambda m: m.requires_grad_(False).requires_grad_(True),
    "a frozen block": lambda m: block(m).requires_grad_(False),
    "a frozen weight": lambda m: weight(m).requires_grad_(False),
    "its own weights to load": lambda m: m.load_state_dict(m.state_dict()),
    "another dtype and back": lambda m: m.double().float(),
    "a look at a weight": lambda m: (
        weight(m).shape,
        weight(m).dtype,
        weight(m).device,
        weight(m).numel(),
        str(block(m)),
    ),
    "all parameters": lambda m: torch.optim.AdamW(m.parameters(), weight_decay=0.0).zero_grad(),
    "a look for gradients": lambda m: [part.weight.grad for part in m.modules() if isinstance(part, torch.nn.Linear)],
    "all parameters trained": lambda m: [setattr(parameter, "requires_grad", True) for parameter in m.parameters()],
    "copies of the parameters": lambda m: [parameter.detach().clone() for parameter in m.parameters()],
}


@pytest.mark.parametrize("name", HARMLESS)
@pytest.mark.rotates(3)
def test_what_changes_no_result(name: str, shared: Any, expected: Tensor) -> None:
    HARMLESS[name](shared)
    assert torch.equal(shared(IDS, use_cache=False).logits, expected)


def test_dropout_may_be_switched_off(tmp_path: Path) -> None:
    """As trainers do that compare two models; blocks compute without it anyway."""
    save_tiny("gpt2", tmp_path)
    client: Any = InProcessSwarm(tmp_path).client
    for module in client.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0
    with pytest.raises(ConfigurationError, match=CHANGE):
        client.transformer.h.blocks()[1].attn.attn_dropout.p = 0.5


def test_what_is_on_servers_never_counts_as_trained(llama: Path) -> None:
    client: Any = InProcessSwarm(llama).client
    adapted = peft.get_peft_model(client, lora())
    trained, _ = adapted.get_nb_trainable_parameters()
    client.requires_grad_(True)
    own = sum(parameter.numel() for parameter in client.parameters())
    assert trained < adapted.get_nb_trainable_parameters()[0] == own


@pytest.mark.parametrize("model_type", sampled(["llama", "gpt2", "qwen2", "mixtral", "opt"], 5))
def test_the_whole_model_is_counted(model_type: str, tmp_path: Path) -> None:
    local = save_tiny(model_type, tmp_path)
    client: Any = InProcessSwarm(tmp_path).client
    for options in ({}, {"exclude_embeddings": True}):
        assert client.num_parameters(**options) == local.num_parameters(**options)
    assert sum(p.numel() for p in client.parameters()) < sum(p.numel() for p in local.parameters())
    names = ["c_attn"] if model_type == "gpt2" else ["q_proj"]
    for config in (lora(target_modules=names), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)):
        models = [peft.get_peft_model(model, copy.deepcopy(config)) for model in (client, local)]
        assert models[0].get_nb_trainable_parameters() == models[1].get_nb_trainable_parameters()
        client, local = InProcessSwarm(tmp_path).client, load_local(tmp_path)
    assert {*client.state_dict()} < {*local.state_dict()}


# ---------------------------------------------------------------------- what peft puts into blocks


def lora(**options: Any) -> peft.LoraConfig:
    return peft.LoraConfig(**{"task_type": "CAUSAL_LM", "r": 4, "target_modules": ["q_proj", "down_proj"], **options})


EQUAL: dict[str, peft.PeftConfig] = {
    "a pattern": lora(target_modules=r".*\.[13]\..*(q|up)_proj"),
    "orthogonal": lora(init_lora_weights="orthogonal"),
    "embeddings and head": lora(target_modules=["q_proj", "embed_tokens", "lm_head"]),
    "LoKr, decomposed": peft.LoKrConfig(
        task_type="CAUSAL_LM", r=2, decompose_both=True, decompose_factor=8, target_modules=["q_proj", "down_proj"]
    ),
    "OFT of one matrix": peft.OFTConfig(
        task_type="CAUSAL_LM", target_modules=["q_proj"], oft_block_size=8, block_share=True, use_cayley_neumann=False
    ),
    "a whole norm": lora(modules_to_save=["input_layernorm"]),
}
"""Values of options; `training_contract` has each method of peft and each field of LoraConfig."""


def tuned(model: Any, config: peft.PeftConfig, adapter: str = "default", seed: int = 7) -> Any:
    """With an adapter of random values, the same for the same config and seed."""
    config = copy.deepcopy(config)
    torch.manual_seed(seed)
    if adapter == "default":
        model = peft.get_peft_model(model, config)
    else:
        model.add_adapter(adapter, config)
    for name, parameter in model.named_parameters():
        if adapter in name and any(part in name for part in ("lora_", "ia3", "hada", "prompt")):
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + seed)
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.2 + ("ia3" in name)
        elif parameter.requires_grad and any(part in name for part in ("vera", "oft", "lokr", "ln_tuning", ".bias")):
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + seed)
            parameter.data += torch.randn(parameter.shape, generator=generator) * 0.03
    return model


def results(model: Any) -> dict[str, Tensor]:
    """Logits and gradients by name."""
    model.zero_grad()
    output = model(input_ids=IDS, attention_mask=torch.ones_like(IDS), labels=IDS)
    output.loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": output.logits.detach(), **found}


def assert_same(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        assert float((got[name] - value).abs().max()) <= RELATIVE * max(1e-6, float(value.abs().max())), name


@pytest.mark.parametrize("name", EQUAL)
@pytest.mark.rotates(3)
def test_configs_that_are_the_local_ones(name: str, llama: Path) -> None:
    remote, local = (tuned(model, EQUAL[name]) for model in (InProcessSwarm(llama).client, load_local(llama)))
    wanted = results(local.train())
    assert len(wanted) > 1
    assert_same(results(remote.train()), wanted)


LINEAR = {
    "gpt2": ["c_attn", "c_fc"],
    "bloom": ["query_key_value", "dense_4h_to_h"],
    "falcon": ["query_key_value", "dense_4h_to_h"],
    "opt": ["q_proj", "v_proj", "fc2"],
    "qwen3": ["q_proj", "v_proj", "down_proj"],
    "gemma2": ["q_proj", "v_proj", "down_proj"],
    "phi": ["q_proj", "v_proj", "fc2"],
    "olmo2": ["q_proj", "v_proj", "down_proj"],
}


@pytest.mark.parametrize("model_type", sampled(list(LINEAR), 8))
def test_methods_on_other_architectures(model_type: str, tmp_path: Path) -> None:
    save_tiny(model_type, tmp_path)
    names = LINEAR[model_type]
    configs = [
        lora(target_modules="all-linear"),
        lora(target_modules=names, use_dora=True),
        lora(target_modules=names, modules_to_save=["lm_head"]),
        peft.IA3Config(task_type="CAUSAL_LM", target_modules=names, feedforward_modules=names[-1:]),
        peft.TrainableTokensConfig(task_type="CAUSAL_LM", token_indices=[3, 7, 9]),
    ]
    if model_type != "gpt2":  # peft has none for Conv1D
        configs += [peft.LoHaConfig(r=4, target_modules=names), peft.LoKrConfig(r=2, target_modules=names)]
        configs.append(peft.OFTConfig(oft_block_size=8, target_modules=names))
    for config in configs:
        remote, local = (tuned(model, config) for model in (InProcessSwarm(tmp_path).client, load_local(tmp_path)))
        assert_same(results(remote.train()), results(local.train()))


@pytest.mark.parametrize("bias", ["all", "lora_only"])
@pytest.mark.parametrize("model_type", ["qwen2", "opt"])
def test_biases_of_blocks(model_type: str, bias: Any, tmp_path: Path) -> None:
    """Trained, saved, loaded, and left in the model when the adapter goes, as peft does."""
    save_tiny(model_type, tmp_path / "base")
    client, local = InProcessSwarm(tmp_path / "base").client, load_local(tmp_path / "base")
    config = lora(bias=bias, target_modules=["q_proj", "v_proj"])
    remote_one, local_one = tuned(client, config), tuned(local, config)
    wanted = results(local_one)
    assert sum(".bias" in name and "layers" in name for name in wanted) >= 8
    assert_same(results(remote_one), wanted)
    remote_one.save_pretrained(tmp_path / "adapter")
    expected = local_one(input_ids=IDS).logits.detach()
    for base in (InProcessSwarm(tmp_path / "base").client, load_local(tmp_path / "base")):
        loaded = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
        torch.testing.assert_close(loaded(input_ids=IDS).logits.detach(), expected)
    left: Any = remote_one.unload()
    torch.testing.assert_close(left(input_ids=IDS).logits.detach(), local_one.unload()(input_ids=IDS).logits.detach())


REFUSED: dict[str, tuple[peft.PeftConfig, str]] = {
    "PiSSA": (lora(init_lora_weights="pissa"), "PiSSA"),
    "PiSSA, quickly": (lora(init_lora_weights="pissa_niter_4"), "PiSSA"),
    "OLoRA": (lora(init_lora_weights="olora"), "OLoRA"),
    "EVA": (lora(init_lora_weights="eva", eva_config=peft.EvaConfig()), "init_lora_weights='eva' reads base weights"),
    "activated LoRA": (lora(alora_invocation_tokens=[3]), "a variant of LoRA"),
    "parameters": (lora(target_parameters=["mlp.up_proj.weight"]), r"target_parameters=\['mlp.up_proj.weight'\]"),
    "blocks twice": (lora(layer_replication=[(0, 4), (2, 4)]), "layer_replication"),
    "BOFT": (peft.BOFTConfig(task_type="CAUSAL_LM", target_modules=["q_proj"]), "can't run on servers"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.rotates(3)
def test_configs_that_servers_cannot_compute(name: str, llama: Path, expected: Tensor) -> None:
    config, sentence = REFUSED[name]
    client: Any = InProcessSwarm(llama).client
    refused_twice(lambda: peft.get_peft_model(client, copy.deepcopy(config)), sentence)
    assert torch.equal(client(IDS, use_cache=False).logits, expected), "it is as if nothing had been"


def both(model: Any) -> None:
    tuned(model, lora(r=2), "other", seed=9)
    model.base_model.set_adapter(["default", "other"])


def weighted(model: Any) -> None:
    tuned(model, lora(r=4), "other", seed=9)
    model.add_weighted_adapter(["default", "other"], [0.3, 0.7], "sum", combination_type="linear")
    model.set_adapter("sum")


AFTER: dict[str, Operation] = {
    "two adapters at once": both,
    "a sum of adapters": weighted,
    "another scale": lambda m: [part.set_scale("default", 3.0) for part in m.modules() if hasattr(part, "set_scale")],
}


@pytest.mark.parametrize("name", AFTER)
@pytest.mark.rotates(3)
def test_operations_that_are_the_local_ones(name: str, llama: Path) -> None:
    found = []
    for model in (InProcessSwarm(llama).client, load_local(llama)):
        torch.manual_seed(5)
        adapted = tuned(model, lora()).train()
        adapted.base_model.model.lm_head.requires_grad_(True)
        AFTER[name](adapted)
        found.append(results(adapted))
    assert_same(*found)


def test_unloaded_it_is_the_model_that_it_was(llama: Path, expected: Tensor) -> None:
    adapted = tuned(InProcessSwarm(llama).client, lora())
    assert not torch.equal(adapted(IDS, use_cache=False).logits, expected)
    model = adapted.unload()
    assert not hasattr(model, "peft_config")
    assert torch.equal(model(IDS, use_cache=False).logits, expected)
    again, local = tuned(model, lora(r=2)), tuned(load_local(llama), lora(r=2))
    assert_same(results(again), results(local))


def test_adapters_by_transformers_alone_are_checked_too(llama: Path) -> None:
    with pytest.raises(ConfigurationError, match="target_parameters"):
        InProcessSwarm(llama).client.add_adapter(lora(target_parameters=["mlp.up_proj.weight"]))


@pytest.mark.parametrize("saved_by", ["remote", "local"])
def test_adapters_of_transformers_are_saved_as_it_does(saved_by: str, llama: Path, tmp_path: Path) -> None:
    """For a local base as for one in a swarm, and with what `load_trained` opens."""
    models = {"remote": InProcessSwarm(llama, user=Owner).client, "local": load_local(llama)}
    saving: Any = models.pop(saved_by)
    torch.manual_seed(3)
    saving.add_adapter(lora(init_lora_weights=False))
    expected = saving(IDS, use_cache=False).logits.detach()
    saving.save_pretrained(tmp_path)
    (loading,) = models.values()
    loading.load_adapter(str(tmp_path))
    torch.testing.assert_close(loading(IDS, use_cache=False).logits.detach(), expected)
    if saved_by == "remote":
        again: Any = InProcessSwarm(llama, user=Owner).client
        again.add_adapter(lora())
        again.load_trained(tmp_path)
        assert torch.equal(again(IDS, use_cache=False).logits, expected)


IA3 = peft.IA3Config(task_type="CAUSAL_LM", target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"])
REFUSED_AFTER: dict[str, tuple[Operation, str]] = {
    "merging": (lambda m: m.merge_and_unload(), "`swarmllm adapters merge`"),
    "merging safely": (lambda m: m.merge_and_unload(safe_merge=True), "`swarmllm adapters merge`"),
    "merging for a while": (lambda m: m.merge_adapter(), "`swarmllm adapters merge`"),
    "merging for a while, safely": (lambda m: m.merge_adapter(safe_merge=True), "`swarmllm adapters merge`"),
    "a hook on an adapter": (lambda m: block(m.base_model.model).self_attn.q_proj.register_forward_hook(print), HOOK),
    "a hook inside an adapter": (
        lambda m: block(m.base_model.model).self_attn.q_proj.lora_A["default"].register_forward_hook(print),
        HOOK,
    ),
    "another module for an adapter": (
        lambda m: setattr(block(m.base_model.model).self_attn, "q_proj", nn.Linear(64, 64)),
        CHANGE,
    ),
    "a second method": (
        lambda m: peft.get_peft_model(m.base_model.model, IA3, "second"),
        "two methods",
    ),
}


@pytest.mark.parametrize("name", REFUSED_AFTER)
@pytest.mark.rotates(3)
def test_operations_that_servers_cannot_follow(name: str, llama: Path) -> None:
    operation, sentence = REFUSED_AFTER[name]
    adapted = tuned(InProcessSwarm(llama).client, lora(target_modules=["k_proj", "q_proj", "down_proj"])).eval()
    before = adapted(IDS, use_cache=False).logits
    refused_twice(lambda: operation(adapted), sentence)
    if name != "a second method":  # which is in the blocks now, beside the first
        assert torch.equal(adapted(IDS, use_cache=False).logits, before)


@pytest.mark.parametrize("targets", [["q_proj"], ["lm_head"]], ids=str)
@pytest.mark.rotates(3)
def test_whole_modules_are_not_those_of_each_row(targets: list[str], llama: Path) -> None:
    """Not even where the LoRA itself is outside of the blocks. Adapters without such modules have their rows."""
    adapted = peft.get_peft_model(
        InProcessSwarm(llama).client, lora(target_modules=targets, modules_to_save=["o_proj"]), "whole"
    )
    adapted.add_adapter("small", lora(target_modules=targets, init_lora_weights=False))
    adapted.eval().set_adapter("small")
    names = ["small", "__base__", *["small"] * (len(IDS) - 2)]
    expected = adapted(IDS, use_cache=False).logits[0]
    torch.testing.assert_close(adapted(IDS, use_cache=False, adapter_names=names).logits[0], expected)
    whole = ["whole", *names[1:]]
    refused_twice(lambda: adapted(IDS, use_cache=False, adapter_names=whole), "whole has its own self_attn.o_proj")
    torch.testing.assert_close(adapted(IDS, use_cache=False).logits[0], expected)


LOHA_DROPOUT = peft.LoHaConfig(r=2, target_modules=["q_proj"], module_dropout=0.1)


def test_dropout_of_loha_is_refused_only_in_training(llama: Path) -> None:
    adapted = tuned(InProcessSwarm(llama).client, LOHA_DROPOUT)
    assert adapted.eval()(IDS, use_cache=False).logits.isfinite().all()
    with pytest.raises(ConfigurationError, match="set it to 0"):
        adapted.train()(IDS, labels=IDS)


# ---------------------------------------------------------------------- what is told, and what can't be told apart


def told(model: Any, caplog: pytest.LogCaptureFixture) -> list[str]:
    """In two steps of training."""
    caplog.clear()
    for _ in range(2):
        model(IDS, labels=IDS).loss.backward()
    return [record.getMessage() for record in caplog.records if record.name.startswith("swarmllm")]


def test_training_differs_from_local_training_once_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    num_tensors = len(list(save_tiny("gpt2", tmp_path).parameters()))
    settings = json.loads((tmp_path / "config.json").read_text()) | {"attn_pdrop": 0.1, "resid_pdrop": 0.1}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    whole: Any = InProcessSwarm(tmp_path).client
    assert not told(whole.eval(), caplog)
    (tensors,) = told(whole.train(), caplog)
    assert f"this trains 4 of {num_tensors} tensors" in tensors
    assert "give it ref_model=, this model opened from the swarm a second time" in tensors
    head: Any = InProcessSwarm(tmp_path).client.requires_grad_(False)
    head.transformer.ln_f.requires_grad_(True)
    assert not told(head.train(), caplog)
    adapted = peft.get_peft_model(InProcessSwarm(tmp_path).client, lora(target_modules=["c_attn"]))
    assert not told(adapted.train(), caplog)


def test_layers_are_not_dropped_all_at_once(tmp_path: Path) -> None:
    save_tiny("opt", tmp_path)
    client: Any = InProcessSwarm(tmp_path).client
    client.model.decoder.layerdrop = 0.5
    assert client.eval()(IDS).logits.isfinite().all()
    with pytest.raises(ConfigurationError, match=r"layerdrop=0\.5 would drop all blocks at once"):
        client.train()(IDS)


class Owner(DistributedModel):
    """Saves what it owns as a real client does."""

    swarm: Any = SimpleNamespace(model_name="checkpoint", fingerprint="f" * 32)


SETTINGS: dict[str, Any] = {
    "max_steps": 4,
    "optim": "sgd",
    "learning_rate": 0.1,
    "lr_scheduler_type": "constant",
    "report_to": [],
    "disable_tqdm": True,
    "use_cpu": True,
    "seed": 1,
    "eval_strategy": "steps",
    "eval_steps": 1,
    "save_steps": 1,
    "load_best_model_at_end": True,
    "metric_for_best_model": "loss",
    "greater_is_better": True,  # so that the first checkpoint is the best
}


def test_a_trainer_loads_its_best_checkpoint_and_resumes(llama: Path, tmp_path: Path) -> None:
    rows = [{"input_ids": row, "labels": row} for row in IDS.repeat(4, 1)]
    found: dict[str, dict[str, Tensor]] = {}
    for name, model in {"local": load_local(llama), "remote": InProcessSwarm(llama, user=Owner).client}.items():
        model.requires_grad_(False).model.norm.weight.requires_grad_(True)
        for settings in ({}, {"load_best_model_at_end": False}):
            arguments = TrainingArguments(output_dir=str(tmp_path / name), **{**SETTINGS, **settings})
            trainer = Trainer(model=model, args=arguments, train_dataset=rows, eval_dataset=rows)
            trainer.train(resume_from_checkpoint=str(tmp_path / name / "checkpoint-2") if settings else None)
            if not settings:
                assert trainer.state.best_model_checkpoint.endswith("checkpoint-1")
            found[f"{name} {settings}"] = {"norm": model.model.norm.weight.detach().clone()}
    best, last, *remote = found.values()
    assert not torch.equal(best["norm"], last["norm"])
    assert_same(remote[0], best)
    assert_same(remote[1], last)
    with pytest.raises(TypeError):  # it would make up the blocks
        AutoModelForCausalLM.from_pretrained(tmp_path / "remote" / "checkpoint-1")
