"""Adapters that peft has saved, read for serving: what they compute, and what is refused, in one sentence each."""

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from adapter_makers import save_adapter
from safetensors.torch import load_file, save_file
from tests.numerics.tiny_models import save_tiny
from transformers import AutoModelForCausalLM

from swarmllm.data_structures import Span
from swarmllm.errors import SwarmError
from swarmllm.models.adapters.adapter_files import CONFIG, WEIGHTS
from swarmllm.models.boundary.block_inputs import BlockInputs
from swarmllm.models.checkpoint.checkpoint import Checkpoint, open_checkpoint
from swarmllm.models.span.block_span import BlockSpan
from swarmllm.models.span.loading import load_block_span
from swarmllm.server.adapters import ServedAdapters

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory: Path = tmp_path_factory.mktemp("models") / "base"
    save_tiny("llama", directory)
    return directory


@pytest.fixture(scope="module")
def checkpoint(directory: Path) -> Checkpoint:
    return open_checkpoint(str(directory))


@pytest.fixture(scope="module")
def blocks(checkpoint: Checkpoint) -> BlockSpan:
    return load_block_span(checkpoint, Span(0, checkpoint.num_blocks), progress=False)


@pytest.fixture(scope="module")
def good(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "down_proj"])
    return save_adapter(directory, config, tmp_path_factory.mktemp("adapters") / "good")


CONFIGS: dict[str, peft.PeftConfig] = {
    "LoRA": peft.LoraConfig(
        task_type="CAUSAL_LM", r=4, target_modules="all-linear", rank_pattern={"q_proj": 2}, alpha_pattern={"k_proj": 3}
    ),
    "rsLoRA": peft.LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=16, use_rslora=True, target_modules=["v_proj"]),
    "IA3": peft.IA3Config(task_type="CAUSAL_LM", target_modules=["k_proj", "up_proj"], feedforward_modules=["up_proj"]),
    "LoHa": peft.LoHaConfig(task_type="CAUSAL_LM", r=4, alpha=6, target_modules=["o_proj"]),
    "one block": peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj"], layers_to_transform=[1]),
}


@pytest.mark.parametrize("method", CONFIGS)
def test_blocks_compute_what_peft_computes(
    method: str, directory: Path, checkpoint: Checkpoint, blocks: BlockSpan, tmp_path: Path
) -> None:
    saved = save_adapter(directory, CONFIGS[method], tmp_path / "mine")
    served = ServedAdapters([str(tmp_path)], checkpoint, token=None, cache_dir=None)
    served.load(blocks)
    (name,) = served.names
    assert name.startswith("mine@")
    local = AutoModelForCausalLM.from_pretrained(directory)
    ids = torch.randint(3, 90, (2, 7), generator=torch.Generator().manual_seed(1))
    embeds = local.get_input_embeddings()(ids)
    inputs = BlockInputs(hidden_states=embeds, batch_size=2, seq_len=7, adapter=served.get(name))
    with torch.no_grad():
        got = local.lm_head(local.model.norm(blocks.forward(inputs)))
        expected = peft.PeftModel.from_pretrained(local, saved)(input_ids=ids).logits
    torch.testing.assert_close(got, expected)


def with_config(**changes: Any) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        config = json.loads((directory / CONFIG).read_text())
        (directory / CONFIG).write_text(json.dumps(config | changes))

    return change


def with_tensors(change_tensors: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        tensors = load_file(directory / WEIGHTS)
        change_tensors(tensors)
        save_file(tensors, directory / WEIGHTS)

    return change


def cut(tensors: dict[str, torch.Tensor], end: str, size: int) -> None:
    for key in tensors:
        if key.endswith(end):
            tensors[key] = tensors[key][:, :size].contiguous()


REFUSED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "nothing there": (lambda path: (path / CONFIG).unlink(), "it has no adapter_config.json"),
    "no weights": (lambda path: (path / WEIGHTS).unlink(), "lacks adapter_model.safetensors"),
    "a pickle": (lambda path: (path / WEIGHTS).rename(path / "adapter_model.bin"), "is a pickle, which could run any"),
    "a pickle under another name": (lambda path: (path / WEIGHTS).write_bytes(b"\x80\x04cos\nsystem"), "safetensors"),
    "no JSON": (lambda path: (path / CONFIG).write_text("{"), "not valid JSON"),
    "another base": (with_config(base_model_name_or_path="some/other"), "was trained on some/other, this server holds"),
    "another fingerprint": (
        lambda path: (path / "README.md").write_text(f"tags:\n- fingerprint:{'f' * 32}\n"),
        r"\(fingerprint ffffffffffff\), this server holds base",
    ),
    "prompt tuning": (with_config(peft_type="PROMPT_TUNING"), "is PROMPT_TUNING, which servers can't apply"),
    "DoRA": (with_config(use_dora=True), "needs use_dora, which servers can't apply"),
    "PiSSA": (with_config(init_lora_weights="pissa"), "needs init_lora_weights='pissa', which servers can't apply"),
    "another rank": (with_config(r=8), "has rank 4 at .*, but 8 by its adapter_config.json"),
    "half a module": (with_tensors(lambda tensors: tensors.pop(next(iter(tensors)))), "lacks some of lora_A.weight"),
    "a head": (
        with_tensors(lambda tensors: tensors.update({"base_model.model.lm_head.weight": torch.zeros(2, 2)})),
        "also holds base_model.model.lm_head.weight, .*: let clients load it with peft instead",
    ),
    "other shapes": (with_tensors(lambda tensors: cut(tensors, "q_proj.lora_A.weight", 32)), "don't fit a module"),
    "NaN": (with_tensors(lambda tensors: next(iter(tensors.values())).fill_(torch.nan)), "must be finite"),
    "too many blocks": (
        with_tensors(lambda t: [t.update({key.replace(".1.", ".9."): t.pop(key)}) for key in list(t) if ".1." in key]),
        "is for more blocks than the 4 of base",
    ),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_what_cannot_be_served_is_refused(
    fault: str, good: Path, checkpoint: Checkpoint, blocks: BlockSpan, tmp_path: Path
) -> None:
    bad = shutil.copytree(good, tmp_path / "bad")
    change, reason = REFUSED[fault]
    change(bad)
    served = ServedAdapters([str(bad)], checkpoint, token=None, cache_dir=None)
    if fault == "nothing there":
        (bad / WEIGHTS).touch()
    with pytest.raises(SwarmError, match=reason) as caught:
        served.load(blocks)
    assert "\n" not in str(caught.value)
    assert served.names == ()


def test_a_directory_without_adapters_is_named(
    good: Path, checkpoint: Checkpoint, blocks: BlockSpan, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It may be another one than the user meant."""
    served = ServedAdapters([str(tmp_path), str(good)], checkpoint, token=None, cache_dir=None)
    served.load(blocks)
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert said == f"there is no adapter in {tmp_path} yet; new ones are offered when they are there"
    assert len(served.names) == 1


def test_a_bad_change_leaves_what_was_offered(
    good: Path, checkpoint: Checkpoint, blocks: BlockSpan, tmp_path: Path
) -> None:
    mine = shutil.copytree(good, tmp_path / "mine")
    served = ServedAdapters([str(tmp_path)], checkpoint, token=None, cache_dir=None)
    served.load(blocks)
    before = served.names
    assert not asyncio.run(served.refresh(blocks))
    content = (mine / WEIGHTS).read_bytes()
    (mine / WEIGHTS).write_bytes(content[:100])
    assert not asyncio.run(served.refresh(blocks))
    assert served.names == before
    (mine / WEIGHTS).write_bytes(content)
    with_config(lora_alpha=32)(mine)
    assert asyncio.run(served.refresh(blocks))
    assert len(served.names) == 1
    assert served.names != before
    shutil.copytree(mine, tmp_path / "deeper" / "mine")  # one level too deep to be seen
    assert not asyncio.run(served.refresh(blocks))
    shutil.rmtree(mine)
    assert asyncio.run(served.refresh(blocks))
    assert served.names == ()


def test_two_adapters_of_one_name_are_refused(
    good: Path, checkpoint: Checkpoint, blocks: BlockSpan, tmp_path: Path
) -> None:
    twin = shutil.copytree(good, tmp_path / good.name)
    with pytest.raises(SwarmError, match="two adapters are called good: rename one"):
        ServedAdapters([str(good), str(twin)], checkpoint, token=None, cache_dir=None).load(blocks)
