"""`swarmllm models`: checkpoints here and known ones, on one machine or on those of a swarm, as text and as JSON."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

import swarmllm.server.device.throughput  # noqa: F401 - imported here, or the first test would take seconds
from swarmllm.commands import models
from swarmllm.commands.models import ModelsConfig, machines_of_swarm
from swarmllm.commands.status import ModelStatus
from swarmllm.data_structures import ModelRecord, ServerInfo, SwarmSnapshot
from swarmllm.demo.local_swarm import embedded_model_path
from swarmllm.errors import ConfigurationError
from swarmllm.machines import catalogue as listed
from swarmllm.machines.catalogue import Entry, Machines, answer
from swarmllm.swarm.planning import Link, Machine, PlannedModel

MIB = 1 << 20
PEER = "/ip4/127.0.0.1/tcp/4000/p2p/12D3KooWFfoRMzqUD91vDKX6igC7p7M2G2EMN2SZG28GBvt4SvGU"
SMALL = PlannedModel(block_bytes={"int8": [8 * MIB] * 4, "q4_k": [4 * MIB] * 4}, read_share=0.5)


def one_machine(mib: int, **options: Any) -> Machines:
    machine = Machine(peer_id="here".ljust(46, "-"), memory_bytes=mib * MIB, bytes_per_s=1024 * MIB)
    link = Link(round_trip_ms=0.0)
    return Machines((machine,), {machine.peer_id: "this machine"}, {}, link, "a machine", **options)


def server(name: str, **changes: Any) -> ServerInfo:
    usual: dict[str, Any] = {
        "start": 0, "end": 4, "throughput": 100.0, "decode_ms_per_block": 10.3, "memory_left_bytes": 100 * MIB,
        "quant_type": "int8", "public_name": name,
    }  # fmt: skip
    return ServerInfo(peer_id=name.ljust(46, "-"), **usual | changes)


def swarm_of(*servers: ServerInfo, block_bytes: int = 10 * MIB) -> list[ModelStatus]:
    record = ModelRecord(name="m", fingerprint="f" * 12, num_blocks=8, block_bytes=block_bytes)
    return [ModelStatus(record, SwarmSnapshot(8, servers))]


@pytest.mark.parametrize(
    ("mib", "text"),
    [
        (40, "fits with int8, about 60 tokens/s on this machine"),
        (20, "fits with q4_k, about 113 tokens/s on this machine"),
        (8, "needs 8.4 MB more, with q4_k"),
    ],
)
def test_a_model_fits_in_a_format_or_lacks_memory(mib: int, text: str) -> None:
    """A token reads 16 MiB at 1 GiB/s in int8, 8 in q4_k. The only hop takes another millisecond."""
    where = one_machine(mib)
    assert answer(Entry("m", True, SMALL), where).as_text(where.names) == text


def test_the_client_s_part_takes_memory_here() -> None:
    where = one_machine(40, holds_client=True)
    found = answer(Entry("m", True, SMALL, client_bytes=20 * MIB), where)
    assert found.plan is not None
    assert found.plan.format == "q4_k"
    assert found.as_json(where.names)["hosts"] == [{"machine": "this machine", "blocks": "0:4"}]


def test_machines_of_a_swarm_offer_what_they_hold_and_what_is_free() -> None:
    found = machines_of_swarm(
        swarm_of(
            server("a", round_trips=(("b".ljust(46, "-"), 5.0),)),
            server("b", quant_type="none"),
            server("silent", memory_left_bytes=0),
            server("paused", speed_share=0.0),
        ),
        0.8,
    )
    a, b = found.machines
    assert a.memory_bytes == 80 * MIB + 4 * 10 * MIB
    assert b.memory_bytes == 80 * MIB + 4 * 20 * MIB
    assert a.bytes_per_s == pytest.approx(10 * MIB * 100)
    assert found.links == {(a.peer_id, b.peer_id): Link(round_trip_ms=5.0)}
    assert found.assumed_link == Link(round_trip_ms=5.0)
    assert "2 machines of the swarm" in found.headline
    assert "2 more don't tell" in found.headline
    model = PlannedModel(block_bytes={"int8": [20 * MIB] * 9})
    assert answer(Entry("m", False, model), found).as_text(found.names).endswith("tokens/s on a, b")


def test_tiny_blocks_tell_no_speed() -> None:
    found = machines_of_swarm(swarm_of(server("a", decode_ms_per_block=0.35)), 0.8)
    line = answer(Entry("m", False, SMALL), found)
    assert line.as_text(found.names) == "fits with int8, on a"
    assert line.as_json(found.names)["tokens_per_s"] is None


@pytest.fixture
def catalogue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with one good checkpoint, one without weights, one damaged file and one file that is no model; and
    one known model."""
    (tmp_path / "good").symlink_to(embedded_model_path())
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").symlink_to(Path(embedded_model_path(), "config.json"))
    (tmp_path / "damaged.gguf").write_bytes(b"GGUF")
    (tmp_path / "mmproj-vision.gguf").write_bytes(b"GGUF")
    known = listed.known_models()
    monkeypatch.setattr(listed, "known_models", lambda: {"Qwen/Qwen3-30B-A3B": known["Qwen/Qwen3-30B-A3B"]})
    monkeypatch.setattr(models, "this_machine", lambda max_memory: one_machine(1000))
    return tmp_path


def test_the_catalogue_as_text(catalogue: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asyncio.run(models.show_models(ModelsConfig(model=(str(catalogue),))))
    headline, empty, head, *lines = capsys.readouterr().out.splitlines()
    assert (headline, empty) == ("a machine", "")
    assert head.split() == ["model", "is", "blocks", "one", "text", "at", "a", "time"]
    damaged, empty, good, known = lines
    assert f"{catalogue}/empty has no weights" in empty
    assert damaged.startswith(f"{catalogue}/damaged.gguf")
    assert "can't be served: " in damaged
    assert good.startswith(f"{catalogue}/good")
    assert "here  8       fits with int8, about " in good
    assert known.startswith("Qwen/Qwen3-30B-A3B")
    assert " GB more, with q4_k" in known


def test_the_catalogue_as_json(catalogue: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asyncio.run(models.show_models(ModelsConfig(model=(str(catalogue / "good"),), json=True)))
    found = json.loads(capsys.readouterr().out)
    assert found["known_models"]["date"]
    good, known = found["models"]
    assert (good["is_here"], good["fits"], good["quant_type"], good["num_blocks"]) == (True, True, "int8", 8)
    assert (known["is_here"], known["fits"], known["tokens_per_s"]) == (False, False, None)
    assert known["missing_bytes"] > 15e9


def test_a_token_reads_a_part_of_a_mixture_of_experts(catalogue: Path) -> None:
    """Qwen3-30B-A3B: 8 of 128 experts; 3.3 of 30.5 billion weights, 0.6 of them in embeddings and head."""
    (entry,) = [one for one in listed.entries(()) if one.name == "Qwen/Qwen3-30B-A3B"]
    assert entry.sizes is not None
    assert 2.5e9 < entry.sizes.read_share * sum(entry.sizes.block_bytes["int8"]) < 3.3e9


def test_models_of_the_hub_s_cache_are_listed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    repository = tmp_path / "cache" / "models--me--tiny"
    snapshot = repository / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    for file in Path(embedded_model_path()).iterdir():
        (snapshot / file.name).symlink_to(file)
    monkeypatch.setenv("SWARMLLM_CACHE", str(tmp_path / "cache"))
    assert listed.models_to_list(()) == [("me/tiny", str(snapshot))]
    monkeypatch.setattr(listed, "known_models", dict)
    assert [(one.name, one.is_here) for one in listed.entries(())] == [("me/tiny", True)]
    (snapshot / "model.safetensors").unlink()
    assert [(one.name, one.is_here) for one in listed.entries(())] == [("me/tiny", False)]


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"model": ("/no/such/place",)}, "'/no/such/place' does not exist"),
        ({"max_memory": "much"}, "max_memory must be in GB"),
        ({"max_memory": "4", "initial_peers": (PEER,)}, "--max_memory is for plans of this machine"),
    ],
)
def test_unusable_settings_are_refused(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigurationError, match=complaint):
        ModelsConfig(**settings)
