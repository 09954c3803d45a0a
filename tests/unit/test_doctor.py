"""Findings of `swarmllm doctor` on a machine that is well and on one that isn't, and the mends that it names."""

import asyncio
import fcntl
import importlib.metadata
import json
import os
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.gateway.vision_model import save_vision_model
from tests.numerics.tiny_speech_models import save_tiny_model, tiny_config

from swarmllm import embedded_model_path
from swarmllm.commands import doctor_checks as checks
from swarmllm.commands.doctor_findings import DoctorConfig, Finding, Verdict, check_versions, wrong_versions
from swarmllm.errors import ConfigurationError
from swarmllm.network.p2p.identity import Identity


def only(findings: Iterator[Finding]) -> Finding:
    (finding,) = findings
    return finding


def test_versions() -> None:
    installed = {"good": "1.5", "old": "0.9"}

    def version(name: str) -> str:
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    requirements = ["good>=1,<2", "old>=1", "gone>=3", 'extra>=1; extra == "dev"']
    old, gone = wrong_versions(requirements, version)
    assert "old is 0.9" in old
    assert 'pip install "old>=1"' in old
    assert "gone is not installed" in gone
    assert only(check_versions()).verdict is Verdict.OK


@pytest.mark.parametrize(
    ("has_gpu", "cuda", "verdict", "words"),
    [
        (False, None, Verdict.OK, "CPU"),
        (True, None, Verdict.BAD, "without CUDA"),
        (True, "13.0", Verdict.BAD, "driver"),
    ],
)
def test_a_gpu_that_torch_does_not_see(
    monkeypatch: pytest.MonkeyPatch, has_gpu: bool, cuda: str | None, verdict: Verdict, words: str
) -> None:
    monkeypatch.setattr(checks, "has_nvidia_gpu", lambda: has_gpu)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    finding = only(checks.check_device(DoctorConfig()))
    assert finding.verdict is verdict
    assert words in finding.text


def test_memory() -> None:
    assert checks.memory_finding([4, 5], 1, 80).text.startswith("2 of 2 blocks fit, the whole model")
    assert checks.memory_finding([10] * 8, 15, 80).text.startswith("3 of 8 blocks fit, 3 machines like this one")
    assert checks.memory_finding([50] * 8, 50, 80).text.startswith("1 of 8 blocks fit, 8 machines")
    tight = checks.memory_finding([100], 1, 80)
    assert tight.verdict is Verdict.BAD
    assert "--quant_type q4_k" in tight.text


def test_memory_with_offloaded_blocks() -> None:
    """Each takes 10, its cache 5; of those that are offloaded, two are in memory at a time."""
    assert checks.memory_finding([10] * 8, 5, 80, 4).text.startswith("6 of 8 blocks fit with 4 of them offloaded, 2 ma")
    assert checks.memory_finding([10] * 8, 5, 80, None).text.startswith("8 of 8 blocks fit with 6 of them offloaded")
    assert checks.memory_finding([10] * 8, 5, 120, None).text.startswith("8 of 8 blocks fit, the whole model")
    for num_offloaded, usable in [(9, 500), (4, 20)]:
        refused = checks.memory_finding([10] * 8, 5, usable, num_offloaded)
        assert refused.verdict is Verdict.BAD
        assert "choose a lower --offload" in refused.text


@pytest.mark.parametrize("offload", [0, 2, None])
def test_flags_of_a_server(offload: int | None) -> None:
    config = DoctorConfig(model=embedded_model_path(), device="cpu", offload=offload)
    _, memory = checks.check_model(config)
    assert memory.verdict is Verdict.OK
    assert config.server().offload == (offload or 0)


@pytest.mark.parametrize(
    ("quant_type", "verdict"), [("auto", Verdict.OK), ("none", Verdict.BAD), ("llm_int8", Verdict.BAD)]
)
def test_activations_that_cannot_be_rounded(quant_type: str, verdict: Verdict) -> None:
    options = {"model": embedded_model_path(), "device": "cpu", "activations": "int8", "quant_type": quant_type}
    _, found = checks.check_model(DoctorConfig(**options))
    assert found.verdict is verdict
    assert ("--activations" in found.text) == (verdict is Verdict.BAD)


def test_model() -> None:
    model, memory = checks.check_model(DoctorConfig(model=embedded_model_path(), device="cpu"))
    assert "8 blocks" in model.text
    assert memory.verdict is Verdict.OK
    assert only(checks.check_model(DoctorConfig(model="/nowhere/at-all"))).verdict is Verdict.BAD
    assert list(checks.check_model(DoctorConfig())) == []


def test_identity(tmp_path: Path) -> None:
    path = tmp_path / "key"
    made, _ = checks.check_identity(DoctorConfig(identity_path=str(path)))
    assert "made a new one" in made.text
    identity = Identity.load_or_create(path)
    free = only(checks.check_identity(DoctorConfig(identity_path=str(path))))
    assert free.verdict is Verdict.OK
    assert identity.peer_id in free.text
    with path.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        taken = only(checks.check_identity(DoctorConfig(identity_path=str(path))))
        assert taken.verdict is Verdict.BAD
        assert f"process {os.getpid()}" in taken.text
    assert checks.lock_holder(path) is None
    path.chmod(0o644)
    assert "chmod 600" in list(checks.check_identity(DoctorConfig(identity_path=str(path))))[1].text
    unwritable = list(checks.check_identity(DoctorConfig(identity_path="/nowhere/key")))
    assert unwritable[-1].verdict is Verdict.BAD
    path.write_bytes(b"no key")
    path.chmod(0o600)
    assert only(checks.check_identity(DoctorConfig(identity_path=str(path)))).verdict is Verdict.BAD


async def test_ports() -> None:
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        assert await checks.dial(f"/ip4/127.0.0.1/tcp/{port}") is None
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # taken, but nobody listens
        problem = await checks.dial(f"/ip4/127.0.0.1/tcp/{closed.getsockname()[1]}")
    assert problem is not None
    assert "nothing listens" in problem


async def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        (finding,) = await checks.check_listening(DoctorConfig(host_maddrs=("/ip4/127.0.0.1/tcp/0",), port=port))
    assert finding.verdict is Verdict.BAD
    assert "choose another port" in finding.text


async def test_initial_peers_that_are_none() -> None:
    (finding,) = await checks.check_swarm(DoctorConfig(initial_peers=("localhost:80",)))
    assert finding.verdict is Verdict.BAD
    (finding,) = await checks.check_swarm(DoctorConfig(lan_discovery=False))
    assert finding.verdict is Verdict.NOTE


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("whisper", "7 blocks (encoder 0:4, decoder 0:3)"),
        ("moonshine", "7 blocks (encoder 0:4, decoder 0:3)"),
        ("llava", "4 blocks, fingerprint"),
    ],
)
def test_models_that_see_and_hear(kind: str, words: str, tmp_path: Path) -> None:
    """All of their blocks fit here, and how many there are is said by stack."""
    if kind == "llava":
        save_vision_model(tmp_path)
    else:
        save_tiny_model(kind, tmp_path)
    told, memory = checks.check_model(DoctorConfig(model=str(tmp_path), device=("cpu",)))
    assert (told.verdict, memory.verdict) == (Verdict.OK, Verdict.OK)
    assert words in told.text
    assert f"{words[0]} of {words[0]} blocks fit, the whole model" in memory.text


def test_a_model_that_is_not_served_is_named(tmp_path: Path) -> None:
    tiny_config("speecht5").save_pretrained(tmp_path)
    finding = only(checks.check_model(DoctorConfig(model=str(tmp_path), device=("cpu",))))
    assert finding.verdict is Verdict.BAD
    assert "speecht5" in finding.text


def test_which_bits_fit() -> None:
    """80 blocks, as of a 70B model, on three cards of 24 GB; then uneven machines, one, and none."""
    needs = {"none": 2.15, "int8": 1.14, "int6": 0.91, "int5": 0.79, "int4": 0.65}
    *short, answer = checks.bits_that_fit(needs, 80, ["24", "24", "24"])
    assert [finding.text for finding in short] == [
        "none: 33 of 80 blocks fit, 101.1 GB more would hold the other 47",
        "int8: 63 of 80 blocks fit, 19.4 GB more would hold the other 17",
        "int6: 78 of 80 blocks fit, 1.9 GB more would hold the other 2",
    ]
    assert "24 + 24 + 24 GB hold all 80 blocks with --quant_type int5 on each, or with int6 on 24, 24" in answer.text
    assert "each block is counted with 8192 tokens of cache, and 20 % are left free" in answer.text
    *_, uneven = checks.bits_that_fit({"int8": 1.2, "int6": 0.95}, 82, ["48", "24", "8"])
    assert "--quant_type int6 on each; " in uneven.text  # any finer one would be too much
    *_, uneven = checks.bits_that_fit({"int8": 1.2, "int6": 0.95}, 81, ["48", "24", "8"])
    assert "or with int8 on 8 and int6 on 48, 24; " in uneven.text
    (alone,) = checks.bits_that_fit({"none": 5.5, "int8": 2.7}, 80, ["500"])
    assert alone.text.startswith("500 GB hold all 80 blocks with --quant_type none; ")
    *_, none = checks.bits_that_fit({"int8": 1.0, "int2": 0.4}, 80, ["4"])
    assert none.verdict is Verdict.BAD


def test_a_directory_with_only_a_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(Path(embedded_model_path(), "config.json").read_bytes())
    config = DoctorConfig(model=str(tmp_path), memory=("0.001", "0.004"), device=("cpu",))
    model, here = checks.check_model(config)
    assert "8 blocks, a config without weights" in model.text
    assert "8 of 8 blocks fit" in here.text
    answers = list(checks.check_memory(config))
    assert "0.001 + 0.004 GB" in answers[-1].text


def test_a_config_that_names_no_dtype(tmp_path: Path) -> None:
    config = json.loads(Path(embedded_model_path(), "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "dtype": None}))
    asked = DoctorConfig(model=str(tmp_path), memory=("24",), device=("cpu",))
    for finding in (only(checks.check_model(asked)), only(checks.check_memory(asked))):
        assert finding.verdict is Verdict.BAD
        assert "add --dtype" in finding.text
    told = replace(asked, dtype="bfloat16")
    assert only(checks.check_memory(told)).verdict is Verdict.OK


@pytest.mark.parametrize("memory", ["many", "0", "-1", "inf", "1e3"])
def test_memory_that_is_no_size(memory: str) -> None:
    with pytest.raises(ConfigurationError, match="memory must be in GB"):
        DoctorConfig(model="m", memory=(memory,))
    with pytest.raises(ConfigurationError, match="name it with --model"):
        DoctorConfig(memory=("24",))


def test_the_end_does_not_wait_for_a_name_server(monkeypatch: pytest.MonkeyPatch) -> None:
    may_answer, has_answered = threading.Event(), threading.Event()

    def look_up(*_: Any, **__: Any) -> Any:
        may_answer.wait(20)
        has_answered.set()
        raise socket.gaierror(socket.EAI_AGAIN, "no name server")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(checks, "DIAL_TIMEOUT_S", 0.01)
    assert "no answer" in (asyncio.run(checks.dial("/dns4/nowhere.example/tcp/1")) or "")
    assert not has_answered.is_set()
    may_answer.set()
    for thread in threading.enumerate():
        if thread.name == "swarmllm-background":
            thread.join()
