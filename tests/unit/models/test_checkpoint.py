"""Opening checkpoints: what is found, what is read, and how damage is reported."""

import errno
import io
import json
import os
import re
import shutil
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from swarmllm.client.local_fallback import open_local_model
from swarmllm.data_structures import Span
from swarmllm.errors import (
    BlockWeightsNotFoundError,
    ConfigurationError,
    CorruptWeightsError,
    UnsupportedModelError,
    WeightsMismatchError,
)
from swarmllm.models.architecture import Task, task_class
from swarmllm.models.checkpoint import checkpoint as checkpoint_module
from swarmllm.models.checkpoint import sources, weight_files
from swarmllm.models.checkpoint.checkpoint import load_tokenizer, open_checkpoint
from swarmllm.models.checkpoint.fingerprint import fingerprint
from swarmllm.models.checkpoint.skeleton import block_bytes, client_tensor_names, drop_blocks, load_pruned, pruned
from swarmllm.models.span.block_span import BlockSpan
from swarmllm.models.span.loading import load_block_span

CONFIG = LlamaConfig(
    vocab_size=32, hidden_size=8, intermediate_size=16, num_hidden_layers=4, num_attention_heads=2, head_dim=4
)
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sharded checkpoint and the same in one file; tests work on copies."""
    directory = tmp_path_factory.mktemp("saved")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(CONFIG)
    model.save_pretrained(directory / "sharded", max_shard_size="2KB")
    model.save_pretrained(directory / "single")
    return directory


@pytest.fixture
def sharded(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved / "sharded", tmp_path / "sharded"))


@pytest.fixture
def single(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved / "single", tmp_path / "single"))


def _load(directory: Path, span: Span | None = None) -> BlockSpan:
    return load_block_span(open_checkpoint(str(directory)), span or Span(1, 3), progress=False)


def _shard_of(directory: Path, part_of_name: str) -> Path:
    weight_map = json.loads((directory / INDEX).read_text())["weight_map"]
    return directory / next(file for name, file in weight_map.items() if part_of_name in name)


def test_what_a_config_tells(sharded: Path) -> None:
    checkpoint = open_checkpoint(str(sharded))
    assert checkpoint.num_blocks == 4
    assert checkpoint.name == str(sharded)
    assert checkpoint.revision is None
    block = sum(
        tensor.nbytes
        for file in sharded.glob("*.safetensors")
        for name, tensor in load_file(file).items()
        if ".layers.0." in name
    )
    assert block_bytes(checkpoint) == [block] * 4


def test_a_directory_is_named_so_that_it_is_found_from_everywhere(
    sharded: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(sharded.parent)
    opened = open_checkpoint(sharded.name)
    assert opened.public_name == sharded.name
    monkeypatch.chdir(tmp_path)
    assert opened.place != sharded.name
    assert open_checkpoint(str(sharded)).place == str(sharded)


def test_a_client_asks_for_nothing_of_the_blocks(sharded: Path) -> None:
    names = client_tensor_names(open_checkpoint(str(sharded)))
    assert sorted(names) == ["lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"]


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("./no/such/directory", "does not exist"),
        ("/no/such/directory", "does not exist"),
        (__file__, "is no directory: give"),
        ("no-such-owner/no-such-model", "hub"),
    ],
)
def test_unknown_checkpoint(path: str, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        open_checkpoint(path)


def test_directory_without_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"config\.json"):
        open_checkpoint(str(tmp_path))


def test_unknown_architecture(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "of-next-year"}')
    with pytest.raises(UnsupportedModelError, match="does not recognize this architecture"):
        open_checkpoint(str(tmp_path))


def test_directory_without_weights(tmp_path: Path) -> None:
    CONFIG.save_pretrained(tmp_path)
    with pytest.raises(BlockWeightsNotFoundError, match="no weights"):
        _load(tmp_path)


def test_span_outside_the_model(sharded: Path) -> None:
    with pytest.raises(ConfigurationError, match="blocks 0:4"):
        _load(sharded, Span(2, 5))


def test_only_the_needed_shards_have_to_exist(sharded: Path) -> None:
    """Not even the one with the final norm."""
    weight_map = json.loads((sharded / INDEX).read_text())["weight_map"]
    needed = {sharded / file for name, file in weight_map.items() if ".1." in name or ".2." in name}
    assert _shard_of(sharded, "model.norm") not in needed
    for file in sharded.glob("*.safetensors"):
        if file not in needed:
            file.unlink()
    assert _load(sharded)


def test_missing_shard_is_named(sharded: Path) -> None:
    shard = _shard_of(sharded, "layers.1.mlp.up_proj")
    shard.unlink()
    with pytest.raises(BlockWeightsNotFoundError, match=shard.name):
        _load(sharded)


def test_missing_tensor_is_named(single: Path) -> None:
    path = single / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.2.mlp.up_proj.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(BlockWeightsNotFoundError, match=r"layers\.2\.mlp\.up_proj"):
        _load(single)


def test_tensor_missing_from_its_shard(sharded: Path) -> None:
    path = _shard_of(sharded, "layers.1.mlp.up_proj")
    save_file({"other": torch.ones(1)}, path, metadata={"format": "pt"})
    with pytest.raises(BlockWeightsNotFoundError, match=path.name):
        _load(sharded)


def test_tensor_of_another_shape(single: Path) -> None:
    path = single / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.1.mlp.up_proj.weight"] = torch.ones(3, 8)
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(WeightsMismatchError, match="don't fit"):
        _load(single)


@pytest.mark.parametrize("damage", ["truncated", "empty", "garbage", "header"])
def test_damaged_file(single: Path, damage: str) -> None:
    path = single / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(
        {
            "truncated": data[: len(data) // 2],
            "empty": b"",
            "garbage": os.urandom(len(data)),
            "header": b"\xff" * 8 + data[8:],
        }[damage]
    )
    with pytest.raises(CorruptWeightsError, match=r"model\.safetensors"):
        _load(single)


@pytest.mark.parametrize("content", ["{", "[]", '{"weight_map": 3}', '{"weight_map": {"a": "../../etc/passwd"}}'])
def test_damaged_index(sharded: Path, content: str) -> None:
    (sharded / INDEX).write_text(content)
    with pytest.raises(CorruptWeightsError, match=r"index\.json"):
        _load(sharded)


class TestPickles:
    @pytest.fixture
    def pickled(self, single: Path) -> Path:
        torch.save(load_file(single / "model.safetensors"), single / "pytorch_model.bin")
        (single / "model.safetensors").unlink()
        return single

    def test_are_read(self, pickled: Path) -> None:
        assert _load(pickled)

    def test_of_before_torch_1_6_are_read(self, pickled: Path) -> None:
        path = pickled / "pytorch_model.bin"
        torch.save(torch.load(path, weights_only=True), path, _use_new_zipfile_serialization=False)
        assert _load(pickled)

    def test_of_torchao_are_refused_before_they_are_opened(self, pickled: Path) -> None:
        (pickled / "pytorch_model.bin").write_bytes(b"objects of torchao's own")
        quantization = {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int8WeightOnlyConfig"}}}
        config = json.loads((pickled / "config.json").read_text()) | {"quantization_config": quantization}
        (pickled / "config.json").write_text(json.dumps(config))
        with pytest.raises(UnsupportedModelError, match="use a checkpoint in safetensors"):
            open_checkpoint(str(pickled)).weight_map()

    def test_that_run_code_are_refused(self, pickled: Path, tmp_path: Path) -> None:
        class Evil:
            def __reduce__(self) -> tuple[object, tuple[str]]:
                return os.mkdir, (str(tmp_path / "pwned"),)

        torch.save({"model.norm.weight": Evil()}, pickled / "pytorch_model.bin")
        with pytest.raises(CorruptWeightsError, match="refused"):
            _load(pickled)
        assert not (tmp_path / "pwned").exists()

    @pytest.mark.parametrize("content", [b"", b"garbage"])
    def test_damaged(self, pickled: Path, content: bytes) -> None:
        (pickled / "pytorch_model.bin").write_bytes(content)
        with pytest.raises(CorruptWeightsError):
            _load(pickled)

    def test_memory_that_runs_out_is_no_fault_of_theirs(self, pickled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def fails(*_: object, **__: object) -> None:
            raise RuntimeError("unable to mmap 8 bytes from file: Cannot allocate memory (12)")

        monkeypatch.setattr(torch, "load", fails)
        with pytest.raises(ConfigurationError, match=r"memory ran out while .*pytorch_model\.bin was opened"):
            _load(pickled)

    def test_truncated(self, pickled: Path) -> None:
        path = pickled / "pytorch_model.bin"
        path.write_bytes(path.read_bytes()[:2000])
        with pytest.raises(CorruptWeightsError):
            _load(pickled)


class TestFingerprint:
    @staticmethod
    def of(directory: Path) -> str:
        return fingerprint(open_checkpoint(str(directory)))

    def test_is_the_same_for_copies(self, sharded: Path, saved: Path) -> None:
        assert self.of(sharded) == self.of(saved / "sharded")

    def test_ignores_which_library_saved_it(self, sharded: Path, saved: Path) -> None:
        config = json.loads((sharded / "config.json").read_text())
        config["transformers_version"], config["_name_or_path"] = "9.9", "elsewhere"
        (sharded / "config.json").write_text(json.dumps(config))
        assert self.of(sharded) == self.of(saved / "sharded")

    def test_sees_another_config(self, sharded: Path, saved: Path) -> None:
        config = json.loads((sharded / "config.json").read_text())
        config["rms_norm_eps"] = 0.1
        (sharded / "config.json").write_text(json.dumps(config))
        assert self.of(sharded) != self.of(saved / "sharded")

    @pytest.mark.parametrize("name", ["model.norm.weight", "model.embed_tokens.weight", "lm_head.weight"])
    @pytest.mark.parametrize("layout", ["single", "sharded"])
    def test_sees_a_fine_tune(self, request: pytest.FixtureRequest, saved: Path, layout: str, name: str) -> None:
        directory: Path = request.getfixturevalue(layout)
        path = _shard_of(directory, name) if layout == "sharded" else directory / "model.safetensors"
        tensors = load_file(path)
        tensors[name] = tensors[name] * 1.001
        save_file(tensors, path, metadata={"format": "pt"})
        assert self.of(directory) != self.of(saved / layout)

    @pytest.mark.parametrize("name", ["self_attn.v_proj", "mlp.down_proj", "input_layernorm"])
    @pytest.mark.parametrize("layout", ["single", "sharded", "pickled"])
    def test_sees_a_merged_fine_tune_of_one_block(self, saved: Path, tmp_path: Path, layout: str, name: str) -> None:
        """Files of the same names, sizes and headers, with the same tensors outside the blocks."""
        name = f"model.layers.2.{name}.weight"
        directory = shutil.copytree(saved / ("sharded" if layout == "sharded" else "single"), tmp_path / "copy")
        path = _shard_of(directory, name) if layout == "sharded" else directory / "model.safetensors"
        tensors = load_file(path)
        if layout == "pickled":
            path.unlink()
            path = directory / "pytorch_model.bin"

        def write() -> str:
            if layout == "pickled":
                torch.save(tensors, path)
            else:
                save_file(tensors, path, metadata={"format": "pt"})
            return self.of(directory)

        before = write()
        assert write() == before, "the control"
        tensors[name] = tensors[name] * 1.001
        size = path.stat().st_size
        assert write() != before
        assert path.stat().st_size == size

    def test_sees_a_shard_that_is_not_there(self, sharded: Path, saved: Path) -> None:
        _shard_of(sharded, "layers.1.mlp.up_proj").unlink()
        assert self.of(sharded) != self.of(saved / "sharded")

    @pytest.mark.parametrize("content", [b"", bytes(5000), b"\xff" * 5000, b"\x10" + bytes(7) + b"[" * 16])
    def test_damaged_shards_are_named(self, sharded: Path, content: bytes) -> None:
        shard = _shard_of(sharded, "layers.1.mlp.up_proj")
        shard.write_bytes(content)
        with pytest.raises(CorruptWeightsError, match=shard.name):
            self.of(sharded)

    def test_of_a_hub_snapshot_is_the_commit(self, sharded: Path, tmp_path: Path) -> None:
        commit = "0123456789abcdef0123456789abcdef01234567"
        snapshot = tmp_path / "models--owner--name" / "snapshots" / commit
        shutil.copytree(sharded, snapshot)
        assert open_checkpoint(str(snapshot)).revision == commit
        before = self.of(snapshot)
        for file in snapshot.glob("*.safetensors"):
            file.unlink()
        assert self.of(snapshot) == before
        other = snapshot.with_name(commit[::-1])
        shutil.copytree(sharded, other)
        assert self.of(other) != before


class TestHubOffline:
    """A cache of the hub as its client leaves it; nothing is downloaded (HF_HUB_OFFLINE is set for all tests)."""

    COMMIT = "0123456789abcdef0123456789abcdef01234567"

    @pytest.fixture
    def cache(self, sharded: Path, tmp_path: Path) -> Path:
        repo = tmp_path / "cache" / "models--owner--name"
        (repo / "refs").mkdir(parents=True)
        (repo / "refs" / "main").write_text(self.COMMIT)
        shutil.copytree(sharded, repo / "snapshots" / self.COMMIT)
        return repo.parent

    def test_is_read(self, cache: Path) -> None:
        checkpoint = open_checkpoint("owner/name", cache_dir=str(cache))
        assert (checkpoint.name, checkpoint.revision) == ("owner/name", self.COMMIT)
        assert load_block_span(checkpoint, Span(0, 1), progress=False)

    def test_has_the_fingerprint_of_its_snapshot_as_a_directory(self, cache: Path) -> None:
        (snapshot,) = cache.glob("*/snapshots/*")
        assert fingerprint(open_checkpoint("owner/name", cache_dir=str(cache))) == TestFingerprint.of(snapshot)

    def test_revisions(self, cache: Path) -> None:
        assert open_checkpoint("owner/name", cache_dir=str(cache), revision=self.COMMIT).revision == self.COMMIT
        with pytest.raises(ConfigurationError, match="owner/name"):
            open_checkpoint("owner/name", cache_dir=str(cache), revision="no-such-branch")

    def test_a_shard_that_is_not_there_is_named(self, cache: Path) -> None:
        (snapshot,) = cache.glob("*/snapshots/*")
        shard = _shard_of(snapshot, "layers.1.mlp.up_proj")
        shard.unlink()
        with pytest.raises(BlockWeightsNotFoundError, match=shard.name):
            load_block_span(open_checkpoint("owner/name", cache_dir=str(cache)), Span(1, 2), progress=False)


def test_loading_leaves_the_random_state_alone(single: Path) -> None:
    checkpoint = open_checkpoint(str(single))
    before = torch.get_rng_state()
    _load(single)
    cls = pruned(task_class(checkpoint.config, Task.CAUSAL_LM), drop_blocks)
    load_pruned(cls, checkpoint, dtype=torch.float32, progress=False)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    "lack",
    [
        RuntimeError("unable to mmap 8 bytes: Cannot allocate memory (12)"),
        torch.OutOfMemoryError("CUDA"),
        MemoryError(),
    ],
)
def test_memory_that_runs_out_is_no_fault_of_the_files(
    lack: Exception, single: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise lack

    checkpoint = open_checkpoint(str(single))
    cls = pruned(task_class(checkpoint.config, Task.CAUSAL_LM), drop_blocks)
    monkeypatch.setattr(cls, "from_pretrained", fails)
    with pytest.raises(ConfigurationError, match=r"memory ran out while .*: load fewer blocks, or end other programs"):
        load_pruned(cls, checkpoint, dtype=torch.float32, progress=False)


@pytest.mark.parametrize(
    "lack", [MemoryError("os error 12"), RuntimeError("unable to mmap 8 bytes: Cannot allocate memory (12)")]
)
def test_a_file_that_memory_does_not_suffice_to_open(
    lack: Exception, single: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a limit of `ulimit -v` that is smaller than the file."""

    def fails(*_: object, **__: object) -> None:
        raise lack

    monkeypatch.setattr(weight_files, "safe_open", fails)
    with pytest.raises(ConfigurationError, match=r"memory ran out while .*model\.safetensors was opened"):
        _load(single)


def test_a_checkpoints_own_code_is_never_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even when somebody answers "y" on standard input, which transformers would ask."""
    ran = tmp_path / "ran"
    (tmp_path / "own.py").write_text(f"open({str(ran)!r}, 'w')\n")
    config = {"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr("sys.stdin", io.StringIO("y\ny\n"))
    with pytest.raises(UnsupportedModelError, match="brings code of its own, which swarmllm never runs"):
        open_checkpoint(str(tmp_path))
    assert not ran.exists()


# Downloads to a disk that takes none


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_a_download_that_cannot_be_written_names_the_directory(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    reason = os.strerror(number)

    def refuse(*_: object, **__: object) -> NoReturn:
        raise OSError(number, reason)

    def wrap(*_: object, **__: object) -> NoReturn:
        try:
            refuse()
        except OSError as error:
            raise OSError("transformers says something else") from error

    where = {"revision": None, "token": None, "cache_dir": "/full"}
    sentence = re.escape(f"files of me/model can't be written to /full ({reason}): make room there, or name another")
    monkeypatch.setattr(sources, "is_offline_mode", lambda: True)
    monkeypatch.setattr(sources, "hf_hub_download", refuse)
    with pytest.raises(ConfigurationError, match=f"^{sentence}"):
        sources.find_source("me/model", **where).path("config.json", required=False)
    with pytest.raises(ConfigurationError, match=f"^{sentence}"):
        load_tokenizer("me/model", **where)

    monkeypatch.setattr(checkpoint_module, "locate", lambda *_, **__: (sources._Hub("me/model", **where), None))
    for fail in (refuse, wrap):
        monkeypatch.setattr(AutoTokenizer, "from_pretrained", fail)
        with pytest.raises(ConfigurationError, match=f"^{sentence}"):
            load_tokenizer("me/model", **where)


def test_a_file_elsewhere_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only root may read the hub's token after `sudo hf auth login`."""
    (cache := tmp_path / "cache").mkdir()
    unreadable = [tmp_path / "token"]

    def refuse(*_: object, **__: object) -> NoReturn:
        raise PermissionError(errno.EACCES, "Permission denied", str(unreadable[-1]))

    where = {"revision": None, "token": None, "cache_dir": str(cache)}
    monkeypatch.setattr(sources, "is_offline_mode", lambda: True)
    monkeypatch.setattr(sources, "hf_hub_download", refuse)
    with pytest.raises(ConfigurationError, match=r"can't be read from the hub: .*/token'$"):
        sources.find_source("me/model", **where).path("config.json", required=False)
    for file in (cache / "models--me--model", cache, tmp_path):
        unreadable.append(file)
        with pytest.raises(ConfigurationError, match="files of me/model can't be written to"):
            sources.find_source("me/model", **where).path("config.json", required=False)


def test_a_local_model_is_taken_from_where_downloads_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft, or a model that goes on without the swarm."""
    asked: list[tuple[str, object]] = []

    def load(name: str, **options: object) -> NoReturn:
        asked.append((name, options["cache_dir"]))
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setenv("SWARMLLM_CACHE", "/full")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", load)
    (tmp_path / "draft").mkdir()
    for name, place in (("me/draft", "/full"), ("~/draft", "can't be loaded as one")):
        with pytest.raises(ConfigurationError, match=place):
            open_local_model(name, "it must be a model", torch.device("cpu"))
    assert asked == [("me/draft", "/full"), (str(tmp_path / "draft"), "/full")]
