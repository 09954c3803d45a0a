"""GGUF files by their names: on servers, in clients and commands, and from the hub."""

from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest
from commands import command, sentence
from hub_stub import HubStub, Repository, running_hub
from swarm_models import prompt

from swarmllm import AutoDistributedModel, LocalSwarm
from swarmllm.errors import BlockWeightsNotFoundError, ConfigurationError
from swarmllm.models.checkpoint.checkpoint import load_tokenizer, open_checkpoint
from swarmllm.models.checkpoint.fingerprint import fingerprint

pytestmark = pytest.mark.rotates(6, whole_file=True)

FILE = Path(__file__).parents[1] / "numerics/data/gguf/llama.gguf"


def test_one_file_everywhere() -> None:
    with LocalSwarm(FILE, spans=[(0, 1), (1, 2)], num_threads=1) as swarm:
        peers = swarm.initial_peers
        texts = []
        for place in ({"name_or_path": str(FILE)}, {"name_or_path": str(FILE.parent), "gguf_file": FILE.name}):
            with AutoDistributedModel.from_pretrained(**place, initial_peers=peers) as model:
                texts.append(model.generate(prompt(1, 6), max_new_tokens=6, do_sample=False).tolist())
        assert texts[0] == texts[1]
        said = command("generate", "--model", FILE, "--initial_peers", *peers, "--max_new_tokens", 4, "hello world")
        assert said.returncode == 0, said.stderr
    looked = command("doctor", "--model", FILE, "--device", "cpu")
    assert f"{FILE}: 2 blocks, fingerprint {fingerprint(open_checkpoint(str(FILE)))[:12]}" in looked.stdout


def test_what_a_server_says_of_a_damaged_file(tmp_path: Path) -> None:
    damaged = tmp_path / "model.gguf"
    damaged.write_bytes(FILE.read_bytes()[:20000])
    ended = command("server", "--model", damaged, "--new_swarm")
    assert ended.returncode != 0
    assert "is no GGUF file, or damaged or incomplete" in sentence(ended.stderr)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubStub]:
    with running_hub() as hub:
        template = hub.address + "/{repo_id}/resolve/{revision}/{filename}"
        constants = {"ENDPOINT": hub.address, "HF_HUB_OFFLINE": False, "HUGGINGFACE_CO_URL_TEMPLATE": template}
        for name, value in constants.items():
            monkeypatch.setattr(huggingface_hub.constants, name, value)
        monkeypatch.setattr(huggingface_hub.hf_api.api, "endpoint", hub.address)  # it took the one of its import
        hub.repositories["me/quantized"] = Repository(
            {"tiny/llama-Q4.gguf": FILE.read_bytes(), "b.gguf": FILE.read_bytes()}
        )
        yield hub


def test_a_file_on_the_hub(hub: HubStub, tmp_path: Path) -> None:
    name, cache = "me/quantized/tiny/llama-Q4.gguf", str(tmp_path)
    checkpoint = open_checkpoint(name, cache_dir=cache)
    assert checkpoint.name == checkpoint.public_name == name
    assert checkpoint.revision == hub.repositories["me/quantized"].commit
    fingerprints = {fingerprint(open_checkpoint(one, cache_dir=cache)) for one in (name, "me/quantized/b.gguf")}
    assert len(fingerprints) == 2, "one commit may hold several models"
    local = next(tmp_path.rglob("snapshots/*/tiny/llama-Q4.gguf"))
    assert fingerprint(open_checkpoint(str(local))) == fingerprint(checkpoint)
    assert open_checkpoint(str(local)).public_name == name
    assert load_tokenizer(name, cache_dir=cache).vocab_size == checkpoint.config.vocab_size
    listed = r"holds 2 GGUF files: name one of them, such as me/quantized/b\.gguf \(b\.gguf, tiny/llama-Q4\.gguf\)"
    with pytest.raises(ConfigurationError, match=listed):
        open_checkpoint("me/quantized", cache_dir=cache)
    with pytest.raises(ConfigurationError, match="me/quantized holds no GGUF files of Q5"):
        open_checkpoint("me/quantized:Q5", cache_dir=cache)
    assert open_checkpoint("me/quantized:q4", cache_dir=cache).name == name
    with pytest.raises(BlockWeightsNotFoundError, match=r"lacks c\.gguf"):
        open_checkpoint("me/quantized/c.gguf", cache_dir=cache)


def test_the_one_file_of_a_repository(hub: HubStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where there is a config.json beside it, and once more without a connection."""
    cache = str(tmp_path)
    for name, beside in (("me/one", {}), ("me/other", {"config.json": b"{}", "mmproj-F16.gguf": b""})):
        hub.repositories[name] = Repository({"a-Q4_0.gguf": FILE.read_bytes(), **beside})
        assert open_checkpoint(name, cache_dir=cache).public_name == f"{name}/a-Q4_0.gguf"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    for name in ("me/one", "me/one:q4_0", "me/other:Q4_0"):
        assert fingerprint(open_checkpoint(name, cache_dir=cache))
    with pytest.raises(ConfigurationError, match="'me/none'"):
        open_checkpoint("me/none:Q4_0", cache_dir=cache)


def test_commands_take_a_kind(tmp_path: Path) -> None:
    for name in ("a-Q4_0.gguf", "a-Q8_0.gguf"):
        (tmp_path / name).write_bytes(FILE.read_bytes())
    looked = command("doctor", "--model", f"{tmp_path}:q8_0", "--device", "cpu")
    assert f"{tmp_path}/a-Q8_0.gguf: 2 blocks" in looked.stdout
    ended = command("server", "--model", f"{tmp_path}:Q9", "--new_swarm")
    assert "holds no GGUF files of Q9" in sentence(ended.stderr)
