"""Training and generating under `torch.autocast`, as with trainers' `bf16=True`: servers compute the blocks so, too."""

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from tests.numerics.in_process_swarm import InProcessSwarm
from tests.numerics.test_training_surface import EQUAL, IDS, assert_same, load_local, lora, told, tuned
from tests.numerics.tiny_models import save_tiny
from tests.selection import sampled
from torch import Tensor

from swarmllm.data_structures import Patch
from swarmllm.errors import RemoteProtocolError
from swarmllm.models.adapters.block_adapter import checked

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:peft", "ignore::RuntimeWarning:peft")
ROUNDING = 2**-7
"""Relative rounding of bfloat16."""
LIKE_LORA: dict[str, peft.PeftConfig] = {
    "everything linear": lora(target_modules="all-linear"),
    "ranks and scales": lora(rank_pattern={"down_proj": 2}, alpha_pattern={r"1\.self_attn\.q_proj": 32}),
    "biases of adapters": lora(lora_bias=True),
    "IA3": peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "norms": peft.LNTuningConfig(target_modules=["input_layernorm", "norm"]),
    "a whole part": lora(modules_to_save=["mlp"], target_modules=["q_proj"]),
    "a prefix": peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
}
LIKE_OTHERS: dict[str, peft.PeftConfig] = {
    "LoHa": peft.LoHaConfig(r=2, target_modules=["q_proj"]),
    "LoKr": peft.LoKrConfig(r=2, target_modules=["q_proj", "down_proj"]),
    "LoKr, decomposed": EQUAL["LoKr, decomposed"],
    "DoRA": lora(use_dora=True),
    "VeRA": peft.VeraConfig(r=4, target_modules=["q_proj", "v_proj"]),
    "AdaLoRA": peft.AdaLoraConfig(target_modules=["q_proj"], total_step=10),
    "OFT": peft.OFTConfig(target_modules=["q_proj", "down_proj"], oft_block_size=8),
}


def results(model: Any, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """Loss, logits and gradients, which trainers compute outside of autocast."""
    model.zero_grad()
    with torch.autocast("cpu", dtype):
        output = model(input_ids=IDS, attention_mask=torch.ones_like(IDS), labels=IDS)
    output.loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": output.loss.detach(), "logits": output.logits.detach(), **found}


@pytest.mark.parametrize("model_type", sampled(["llama", "gpt2", "qwen2", "mixtral", "opt", "gemma2", "phi3"], 3))
def test_without_an_adapter(model_type: str, tmp_path: Path) -> None:
    save_tiny(model_type, tmp_path)
    client, local = InProcessSwarm(tmp_path).client, load_local(tmp_path)
    plain = client(IDS, use_cache=False).logits.detach()
    got = results(client)
    assert_same(got, results(local))
    assert not torch.equal(got["logits"].float(), plain), "it makes a difference"
    assert torch.equal(client(IDS, use_cache=False).logits, plain), "and only within"


@pytest.mark.parametrize("name", LIKE_LORA)
@pytest.mark.rotates(3)
def test_adapters_exactly(name: str, tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    remote, local = (tuned(one, LIKE_LORA[name]) for one in (InProcessSwarm(tmp_path).client, load_local(tmp_path)))
    wanted = results(local.train())
    assert len(wanted) > 2
    assert_same(results(remote.train()), wanted)


@pytest.mark.parametrize("name", LIKE_OTHERS)
@pytest.mark.rotates(3)
def test_other_adapters_up_to_rounding(name: str, tmp_path: Path) -> None:
    """They add up in another order, of which bfloat16 shows more than float32."""
    save_tiny("llama", tmp_path)
    remote, local = (tuned(one, LIKE_OTHERS[name]) for one in (InProcessSwarm(tmp_path).client, load_local(tmp_path)))
    got, wanted = results(remote.train()), results(local.train())
    assert got.keys() == wanted.keys()
    for key, value in wanted.items():
        assert float((got[key] - value).norm()) <= 4 * ROUNDING * float(value.norm()), key


def test_generating(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    options: dict[str, Any] = {"max_new_tokens": 6, "output_logits": True, "return_dict_in_generate": True}
    found = []
    for model in (InProcessSwarm(tmp_path).client, load_local(tmp_path)):
        with torch.autocast("cpu", torch.bfloat16):
            found.append(model.generate(IDS, attention_mask=torch.ones_like(IDS), do_sample=False, **options))
    remote, local = found
    assert torch.equal(remote.sequences, local.sequences)
    assert all(torch.equal(*pair) for pair in zip(remote.logits, local.logits, strict=True))


def test_it_can_be_switched_off_within(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    client: Any = InProcessSwarm(tmp_path).client
    plain = client(IDS, use_cache=False).logits
    with torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", enabled=False):
        assert torch.equal(client(IDS, use_cache=False).logits, plain)


def test_float16_stays_here_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_tiny("llama", tmp_path)
    adapted = peft.get_peft_model(InProcessSwarm(tmp_path).client, lora()).train()
    with torch.autocast("cpu", torch.float16):
        (said,) = told(adapted, caplog)
    assert "autocast to float16 stays here" in said
    assert results(adapted, torch.float16)["loss"].isfinite()
    with torch.autocast("cpu", torch.bfloat16):
        assert not told(peft.get_peft_model(InProcessSwarm(tmp_path).client, lora()).train(), caplog)


@pytest.mark.parametrize("changes", [{"path": "float16"}, {"path": "mlp"}, {"shapes": ((2,),)}])
def test_servers_take_no_other_dtype(changes: dict[str, Any], tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    server, _ = InProcessSwarm(tmp_path).route[0]
    fields = {"block": 0, "path": "bfloat16", "kind": "autocast", "shapes": ()}
    checked([Patch(**fields)], torch.empty(0), server.slots, 64, {})
    patch = Patch(**(fields | changes))
    with pytest.raises(RemoteProtocolError, match="no such dtype"):
        checked([patch], torch.zeros(sum(map(sum, patch.shapes))), server.slots, 64, {})
