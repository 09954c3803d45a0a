"""Which file counts where those of a checkpoint disagree: transformers' own rules, with its `from_pretrained` as judge.

The table in the docstring of `models/checkpoint/stored_files` has them all.
"""

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, modeling_utils
from transformers.utils import logging as hf_logging

from swarmllm.errors import ConfigurationError, UnsupportedModelError
from swarmllm.models.checkpoint.checkpoint import Checkpoint, open_checkpoint
from swarmllm.models.checkpoint.skeleton import on_meta

CONFIG = LlamaConfig(
    vocab_size=32, hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, head_dim=4
)
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLE, PICKLE_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
EMBEDDINGS, NORM = "model.embed_tokens.weight", "model.norm.weight"

Change = Callable[[Path], None]
HALVES = (torch.float16, torch.bfloat16)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in one file; tests work on copies."""
    directory = tmp_path_factory.mktemp("saved")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlamaForCausalLM(CONFIG).save_pretrained(directory)
    return directory


@pytest.fixture
def path(saved: Path, tmp_path: Path) -> Path:
    hf_logging.disable_progress_bar()
    return Path(shutil.copytree(saved, tmp_path / "model"))


def tensors(path: Path, add: float = 0.0) -> dict[str, Tensor]:
    """The fields of the checkpoint, from which this one differs."""
    return {name: tensor + add for name, tensor in load_file(path / SINGLE).items()}


def shards(path: Path, index: str, found: dict[str, Tensor], **about: Any) -> None:
    """Write them as two shards."""
    kind = ".safetensors" if "safetensors" in index else ".bin"
    names = sorted(found)
    parts = {f"part-{place}{kind}": names[place::2] for place in (1, 0)}
    for file, held in parts.items():
        store(path / file, {name: found[name] for name in held})
    weight_map = {name: file for file, held in parts.items() for name in held}
    (path / index).write_text(json.dumps({"metadata": about, "weight_map": weight_map}))


def store(path: Path, found: dict[str, Tensor]) -> None:
    if path.suffix == ".bin":
        torch.save(found, path)
    else:
        save_file(found, path, metadata={"format": "pt"})


def change_config(path: Path, **fields: Any) -> None:
    config = json.loads((path / "config.json").read_text()) | fields
    (path / "config.json").write_text(json.dumps({name: value for name, value in config.items() if value is not None}))


def agrees(path: Path) -> Checkpoint:
    """Compares with what transformers reads from there."""
    local, checkpoint = AutoModelForCausalLM.from_pretrained(path), open_checkpoint(str(path))
    assert checkpoint.stored_dtype() == local.dtype
    assert checkpoint.config.num_attention_heads == local.config.num_attention_heads
    expected, found = local.state_dict(), checkpoint.tensors(checkpoint.weight_map())
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor[...].to(local.dtype), expected[name]), name
    return checkpoint


# Which weights


def test_one_file_before_shards(path: Path) -> None:
    shards(path, INDEX, tensors(path, add=1.0))
    assert agrees(path).weight_map()[NORM] == SINGLE


def test_shards_before_a_pickle(path: Path) -> None:
    torch.save(tensors(path, add=1.0), path / PICKLE)
    shards(path, INDEX, tensors(path))
    (path / SINGLE).unlink()
    assert agrees(path).weight_map()[NORM].startswith("part-")


def test_one_pickle_before_those_of_an_index(path: Path) -> None:
    torch.save(tensors(path), path / PICKLE)
    shards(path, PICKLE_INDEX, tensors(path, add=1.0))
    (path / SINGLE).unlink()
    assert agrees(path).weight_map()[NORM] == PICKLE


@pytest.mark.parametrize("named", ["other.safetensors", "other.safetensors.index.json"])
def test_the_file_that_the_config_names(path: Path, named: str) -> None:
    if named.endswith(".json"):
        shards(path, named, tensors(path, add=1.0))
    else:
        store(path / named, tensors(path, add=1.0))
    change_config(path, transformers_weights=named)
    assert agrees(path).weight_map()[NORM] != SINGLE


@pytest.mark.parametrize("named", ["../model.safetensors", "model.pt", 5, ["model.safetensors"]])
def test_a_config_that_names_no_such_file(path: Path, named: Any) -> None:
    change_config(path, transformers_weights=named)
    with pytest.raises(UnsupportedModelError, match="must name a safetensors file in its directory"):
        open_checkpoint(str(path)).weight_map()


# Which shard


def other_shard(path: Path) -> None:
    index = json.loads((path / INDEX).read_text())
    index["weight_map"][NORM] = index["weight_map"][EMBEDDINGS]
    (path / INDEX).write_text(json.dumps(index))


def twice(path: Path) -> None:
    """The index says that it is in the first one."""
    first = load_file(path / "part-0.safetensors")
    name = min(first)
    second = load_file(path / "part-1.safetensors") | {name: first[name] + 1.0}
    save_file(second, path / "part-1.safetensors", metadata={"format": "pt"})


def without_entry(path: Path) -> None:
    index = json.loads((path / INDEX).read_text())
    del index["weight_map"][NORM]
    (path / INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize("change", [other_shard, twice, without_entry])
def test_an_index_that_is_wrong(path: Path, change: Change) -> None:
    shards(path, INDEX, tensors(path))
    assert (path / "part-0.safetensors").exists()
    (path / SINGLE).unlink()
    change(path)
    agrees(path)


# Which dtype


def as_dtype(path: Path, dtype: torch.dtype, *only: str) -> None:
    found = {name: tensor.to(dtype) if not only or name in only else tensor for name, tensor in tensors(path).items()}
    store(path / SINGLE, found)


def weights_of_half(path: Path) -> None:
    as_dtype(path, torch.bfloat16)
    change_config(path, dtype=None)


def mixed_weights(path: Path) -> None:
    as_dtype(path, torch.float16, min(tensors(path)))
    change_config(path, dtype=None)


def mixed_shards(path: Path) -> None:
    """The second one in the index comes first in the order of names."""
    found = tensors(path)
    shards(path, INDEX, {name: found[name].to(dtype) for name, dtype in zip(sorted(found), HALVES * 99, strict=False)})
    (path / SINGLE).unlink()
    change_config(path, dtype=None)


def index_that_says_it(path: Path) -> None:
    shards(path, INDEX, tensors(path), dtype="float16")
    (path / SINGLE).unlink()
    change_config(path, dtype=None)


def pickle_of_half(path: Path) -> None:
    torch.save({name: tensor.half() for name, tensor in tensors(path).items()}, path / PICKLE)
    (path / SINGLE).unlink()
    change_config(path, dtype=None)


def config_against_weights(path: Path) -> None:
    as_dtype(path, torch.bfloat16)
    change_config(path, dtype="float16")


def old_name(path: Path) -> None:
    change_config(path, dtype=None, torch_dtype="bfloat16")


def both_names(path: Path) -> None:
    change_config(path, dtype="float16", torch_dtype="bfloat16")


DTYPES: dict[Change, torch.dtype] = {
    weights_of_half: torch.bfloat16,
    mixed_weights: torch.float16,
    mixed_shards: torch.float16,
    index_that_says_it: torch.float16,
    pickle_of_half: torch.float16,
    config_against_weights: torch.float16,
    old_name: torch.bfloat16,
    both_names: torch.float16,
}


@pytest.mark.parametrize("change", DTYPES, ids=lambda change: change.__name__)
def test_dtype(path: Path, change: Change) -> None:
    change(path)
    assert agrees(path).stored_dtype() == DTYPES[change]


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "bool"])
def test_a_dtype_that_no_model_computes_in(path: Path, dtype: str) -> None:
    change_config(path, dtype=dtype)
    with pytest.raises(UnsupportedModelError, match="give another dtype"):
        open_checkpoint(str(path)).stored_dtype()


# Which config, in which encoding


def test_the_config_for_this_release(path: Path) -> None:
    change_config(path, configuration_files=["config.4.0.0.json", "config.99.0.0.json"], num_attention_heads=1)
    raw = json.loads((path / "config.json").read_text())
    for name, num_heads in (("config.4.0.0.json", 2), ("config.99.0.0.json", 1)):
        text = json.dumps({**raw, "num_attention_heads": num_heads, "num_key_value_heads": num_heads})
        (path / name).write_text(text)
    checkpoint = agrees(path)
    assert checkpoint.config.num_attention_heads == checkpoint.raw_config()["num_attention_heads"] == 2


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "latin-1"])
def test_only_utf_8(path: Path, encoding: str) -> None:
    config = json.loads((path / "config.json").read_text()) | {"of": "Büro"}
    (path / "config.json").write_text(json.dumps(config, ensure_ascii=False), encoding=encoding)
    with pytest.raises(OSError, match="not a valid JSON file"):
        AutoModelForCausalLM.from_pretrained(path)
    with pytest.raises(ConfigurationError, match=r"config\.json is not (UTF-8|valid JSON)"):
        open_checkpoint(str(path))


def test_utf_8_whatever_the_locale_says(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = json.loads((path / "config.json").read_text()) | {"of": "Büro"}
    (path / "config.json").write_text(json.dumps(config, ensure_ascii=False), encoding="utf-8")
    monkeypatch.setattr("locale.getencoding", lambda: "ascii")
    monkeypatch.setattr("_io.text_encoding", lambda encoding, *_: encoding or "ascii", raising=False)
    assert open_checkpoint(str(path)).raw_config()["of"] == "Büro"


# Which generation config


@pytest.mark.parametrize("own", [None, "{", '{"num_beams": 3}'])
def test_generation_config(path: Path, own: str | None) -> None:
    change_config(path, num_beams=2, no_repeat_ngram_size=3)
    (path / "generation_config.json").unlink()
    if own is not None:
        (path / "generation_config.json").write_text(own)
    local = AutoModelForCausalLM.from_pretrained(path).generation_config
    found = open_checkpoint(str(path)).generation_config()
    assert found is not None
    assert found.to_dict() == local.to_dict()
    assert found.num_beams == (3 if own and "3" in own else 2)


# Refused, or ignored


def test_an_adapter_beside_the_model(path: Path) -> None:
    """transformers applies it in silence."""
    before = AutoModelForCausalLM.from_pretrained(path)
    adapter = get_peft_model(copy.deepcopy(before), LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    adapter.save_pretrained(path)
    ids = torch.arange(3, 9)[None]
    with torch.no_grad():
        assert not torch.equal(AutoModelForCausalLM.from_pretrained(path)(ids).logits, before(ids).logits)
    with pytest.raises(UnsupportedModelError, match="holds an adapter"):
        open_checkpoint(str(path))


def test_what_several_devices_have_saved(path: Path) -> None:
    """transformers looks at nothing else then."""
    shutil.copy(path / SINGLE, path / "shard-00000-model-00001-of-00001.safetensors")
    with pytest.raises(UnsupportedModelError, match="several devices"):
        open_checkpoint(str(path)).weight_map()


@pytest.mark.parametrize("name", ["_attn_implementation", "attn_implementation", "_experts_implementation"])
@pytest.mark.parametrize("value", ["org/kernel", "flash_attention_2", "eager", {"": "org/kernel"}])
def test_how_attention_is_computed_is_not_the_checkpoints_to_say(
    path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: Any
) -> None:
    def load_kernel(*_: Any, **__: Any) -> None:
        pytest.fail("a kernel that a checkpoint names was loaded")

    monkeypatch.setattr(modeling_utils, "lazy_import_flash_attention", load_kernel)
    monkeypatch.setattr(modeling_utils, "is_kernels_available", lambda: True)
    usual = on_meta(LlamaForCausalLM, open_checkpoint(str(path)).config).config._attn_implementation
    change_config(path, **{name: value})
    model = on_meta(LlamaForCausalLM, open_checkpoint(str(path)).config)
    assert model.config._attn_implementation == usual


def test_classes_of_transformers_are_not_the_checkpoints_to_change(path: Path) -> None:
    change_config(path, fusion_config={"patch_embeddings": True})
    assert not hasattr(open_checkpoint(str(path)).config, "fusion_config")
