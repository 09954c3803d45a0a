"""`swarmllm adapters merge`: what peft's merge_and_unload() makes of the local model, bit for bit, in little memory."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from tests.numerics.tiny_models import save_tiny
from tests.selection import sampled
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from swarmllm.commands import adapters
from swarmllm.errors import ConfigurationError, WeightsMismatchError
from swarmllm.models.adapters.merging import merge_adapter
from swarmllm.models.checkpoint.checkpoint import open_checkpoint
from swarmllm.models.checkpoint.sources import Source, find_source

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:peft"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:peft"),
    pytest.mark.filterwarnings("ignore::UserWarning:torch"),
    pytest.mark.filterwarnings("ignore::UserWarning:transformers"),
]
SOME: dict[str, Any] = {"task_type": "CAUSAL_LM", "target_modules": ["q_proj", "down_proj"]}
METHODS: dict[str, Any] = {
    "lora": peft.LoraConfig(**SOME | {"target_modules": "all-linear"}, r=16, lora_alpha=32, lora_dropout=0.05),
    "rslora": peft.LoraConfig(**SOME, use_rslora=True, rank_pattern={r"layers\.1\.self_attn\.q_proj": 2}),
    "lora on the head": peft.LoraConfig(**SOME | {"target_modules": ["q_proj", "lm_head"]}),
    "lora of some blocks": peft.LoraConfig(**SOME, layers_to_transform=[1, 3]),
    "lora and biases": peft.LoraConfig(**SOME, layers_to_transform=[1], bias="all", modules_to_save=["lm_head"]),
    "lora and tokens": peft.LoraConfig(**SOME, trainable_token_indices=[3, 5]),
    "dora": peft.LoraConfig(**SOME, use_dora=True),
    "pissa": peft.LoraConfig(**SOME, init_lora_weights="pissa", r=4),
    "olora": peft.LoraConfig(**SOME, init_lora_weights="olora", r=4),
    "adalora": peft.AdaLoraConfig(**SOME, total_step=10),
    "ia3": peft.IA3Config(**SOME, feedforward_modules=["down_proj"]),
    "loha": peft.LoHaConfig(**SOME),
    "lokr": peft.LoKrConfig(**SOME),
    "oft": peft.OFTConfig(**SOME, oft_block_size=4),
    "hra": peft.HRAConfig(**SOME),
    "vera": peft.VeraConfig(**SOME),
    "vblora": peft.VBLoRAConfig(**SOME, vector_length=16, num_vectors=30),
    "fourierft": peft.FourierFTConfig(**SOME, n_frequency=10),
    "ln tuning": peft.LNTuningConfig(task_type="CAUSAL_LM", target_modules=["input_layernorm", "norm"]),
    "shira": peft.ShiraConfig(**SOME, r=2),
    "randlora": peft.RandLoraConfig(**SOME, r=4),
    "delora": peft.DeloraConfig(**SOME, r=4),
    "road": peft.RoadConfig(**SOME, group_size=16),
    "c3a": peft.C3AConfig(**SOME, block_size=16),
    "miss": peft.MissConfig(**SOME, r=4),
    "waveft": peft.WaveFTConfig(**SOME, n_frequency=16),
}


def source_of(directory: Path) -> Source:
    return find_source(str(directory), revision=None, token=None, cache_dir=None)


def tensors_of(directory: Path) -> dict[str, Tensor]:
    """All weights of a checkpoint."""
    return {name: value for path in directory.glob("*.safetensors") for name, value in load_file(path).items()}


def trained(model: PreTrainedModel, config: Any, directory: Path) -> Path:
    """An adapter that has been away from where it began."""
    torch.manual_seed(1)
    adapted = peft.get_peft_model(model, config)
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data += torch.randn_like(parameter) * 0.05
    adapted.save_pretrained(directory)
    return directory


def assert_merged(local: PreTrainedModel, base: Path, adapter: Path, root: Path) -> dict[str, Tensor]:
    """The files hold what those of the local merge hold."""
    wanted: Any = peft.PeftModel.from_pretrained(local, adapter)
    wanted.merge_and_unload().save_pretrained(root / "wanted")
    told: list[str] = []
    merge_adapter(open_checkpoint(str(base)), source_of(adapter), root / "merged", told.append)
    expected, found = tensors_of(root / "wanted"), tensors_of(root / "merged")
    assert sorted(found) == sorted(expected)
    different = [name for name in expected if not torch.equal(expected[name], found[name])]
    assert not different
    assert {value.dtype for value in found.values()} == {value.dtype for value in expected.values()}
    for name in ("config.json", "generation_config.json"):
        if (path := root / "wanted" / name).exists():
            assert json.loads((root / "merged" / name).read_text()) == json.loads(path.read_text())
    index = json.loads((root / "merged" / "model.safetensors.index.json").read_text())
    assert sorted(index["weight_map"]) == sorted(found)
    assert len(told) > 1
    return found


@pytest.mark.parametrize("method", sampled([*METHODS], 6))
def test_every_method(method: str, llama: Path, tmp_path: Path) -> None:
    adapter = trained(AutoModelForCausalLM.from_pretrained(llama), METHODS[method], tmp_path / "adapter")
    found = assert_merged(AutoModelForCausalLM.from_pretrained(llama), llama, adapter, tmp_path)
    before = tensors_of(llama)
    assert any(not torch.equal(before[name], found[name]) for name in before)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    wanted = AutoModelForCausalLM.from_pretrained(tmp_path / "wanted")
    ids = torch.arange(3, 12)[None]
    assert torch.equal(merged(ids).logits, wanted(ids).logits)


@pytest.mark.parametrize("model_type", ["gpt2", "mixtral", "qwen3_5_text", "gemma3_text", "phi3", "bloom"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.rotates(6)
def test_other_architectures(model_type: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Experts, tied embeddings, other names of tensors in files than in the model."""
    base = tmp_path / "base"
    save_tiny(model_type, base, dtype=dtype)
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear")
    adapter = trained(AutoModelForCausalLM.from_pretrained(base, dtype="auto"), config, tmp_path / "adapter")
    assert_merged(AutoModelForCausalLM.from_pretrained(base, dtype="auto"), base, adapter, tmp_path)


def test_a_new_head(llama: Path, tmp_path: Path) -> None:
    """A classifier's, which the base lacks and the adapter brings along."""

    def local() -> PreTrainedModel:
        model: PreTrainedModel = AutoModelForSequenceClassification.from_pretrained(llama, num_labels=5)
        return model

    config = peft.LoraConfig(task_type="SEQ_CLS", target_modules=["v_proj"])
    adapter = trained(local(), config, tmp_path / "adapter")
    found = assert_merged(local(), llama, adapter, tmp_path)
    assert found["score.weight"].shape[0] == 5
    assert AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged").num_labels == 5


def test_what_is_refused(llama: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    save_tiny("gpt2", other)
    adapter = trained(AutoModelForCausalLM.from_pretrained(llama), METHODS["lora of some blocks"], tmp_path / "adapter")
    with pytest.raises(WeightsMismatchError, match="has no module: give the base that it was trained on"):
        merge_adapter(open_checkpoint(str(other)), source_of(adapter), tmp_path / "merged", print)
    (adapter / "README.md").write_text("fingerprint:" + "0" * 32)
    with pytest.raises(WeightsMismatchError, match="was trained on another model"):
        merge_adapter(open_checkpoint(str(llama)), source_of(adapter), tmp_path / "merged", print)
    with pytest.raises(ConfigurationError, match="is not empty: name a new directory"):
        merge_adapter(open_checkpoint(str(llama)), source_of(adapter), other, print)
    prompts = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    trained(AutoModelForCausalLM.from_pretrained(llama), prompts, tmp_path / "prompts")
    with pytest.raises(ConfigurationError, match="is PROMPT_TUNING, which changes no weights"):
        merge_adapter(open_checkpoint(str(llama)), source_of(tmp_path / "prompts"), tmp_path / "merged", print)
    with pytest.raises(ConfigurationError, match=r"is no adapter of peft: it has no adapter_config\.json"):
        merge_adapter(open_checkpoint(str(llama)), source_of(llama), tmp_path / "merged", print)
    assert not (tmp_path / "merged").exists()


def test_flags(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert adapters.main(["merge", "--base", "a", "--output", "b"]) == 2
    assert "--adapter is required" in capsys.readouterr().err
    assert adapters.main(["merge", "--base", str(tmp_path / "nothing"), "--output", "b", "--adapter", "c"]) == 2


# ---------------------------------------------------------------------- memory


RUN = """
import re, sys
from pathlib import Path
from swarmllm.__main__ import main
status = main(sys.argv[1:])
print(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
sys.exit(status)
"""


def peak_bytes(*arguments: object) -> int:
    """Run the command to its end, as a process of its own."""
    line = [sys.executable, "-c", RUN, "adapters", "merge", *map(str, arguments)]
    ended = subprocess.run(line, env={**os.environ, "MALLOC_ARENA_MAX": "1"}, stdout=subprocess.PIPE, text=True)
    assert ended.returncode == 0
    return int(ended.stdout.split()[-1]) * 1024


@pytest.mark.slow
def test_memory_is_that_of_a_block(tmp_path: Path) -> None:
    """And not of the model, which is that of twelve."""
    sizes = {"tiny": (16, 16, 2), "large": (1024, 1408, 12)}
    peaks, parts = {}, {}
    for name, (hidden, intermediate, num_blocks) in sizes.items():
        config = LlamaConfig(
            vocab_size=1024,
            hidden_size=hidden,
            intermediate_size=intermediate,
            num_hidden_layers=num_blocks,
            num_attention_heads=4,
        )
        base = tmp_path / name
        LlamaForCausalLM(config).save_pretrained(base, max_shard_size="100MB")
        lora = peft.LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", r=4)
        adapter = trained(AutoModelForCausalLM.from_pretrained(base), lora, tmp_path / f"{name}-adapter")
        peaks[name] = peak_bytes("--base", base, "--adapter", adapter, "--output", tmp_path / f"{name}-merged")
        parts[name] = [path.stat().st_size for path in (tmp_path / f"{name}-merged").glob("*.safetensors")]
    block, whole = max(parts["large"]), sum(parts["large"])
    assert whole > 11 * block
    more = peaks["large"] - peaks["tiny"]
    assert more < 4 * block, f"{more / block:.1f} blocks of {block / 1e6:.0f} MB"
