"""Servers with copies of one identity file, as on cloned machines: both logs, `status` and `doctor` say it."""

import json
import shutil
from pathlib import Path

import pytest
from commands import command
from swarm_models import OPTIONS, wait_until

from swarmllm import LocalSwarm
from swarmllm.demo.local_swarm import LocalServer
from swarmllm.network.p2p.identity import Identity


@pytest.fixture
def copies(tmp_path: Path) -> tuple[Path, Path]:
    Identity.generate().write(tmp_path / "a.key")
    shutil.copy(tmp_path / "a.key", tmp_path / "b.key")
    return tmp_path / "a.key", tmp_path / "b.key"


def warned(server: LocalServer) -> bool:
    return "another process has this server's identity" in server.log_path.read_text()


def shown(swarm: LocalSwarm) -> bool:
    found = json.loads(command("status", "--json", "--initial_peers", *swarm.initial_peers).stdout)
    return any(server["identity_shared"] for model in found["models"] for server in model["servers"])


@pytest.mark.rotates(3)
def test_one_that_joins_through_the_other(llama: Path, copies: tuple[Path, Path]) -> None:
    with LocalSwarm(llama, spans=[(0, 4)], identity_path=copies[0], update_period=1, **OPTIONS) as swarm:
        assert not warned(swarm.servers[0])
        swarm.add_server((4, 8), identity_path=copies[1])
        wait_until(lambda: all(map(warned, swarm.servers)), "both logs say it")
        wait_until(lambda: shown(swarm), "status shows it")
        text = command("status", "--initial_peers", *swarm.initial_peers).stdout
        assert "identity used twice: …" in text
        doctor = command("doctor", "--initial_peers", *swarm.initial_peers)
        assert "BAD   swarm     identity used twice: …" in doctor.stdout
        assert doctor.returncode == 1


@pytest.mark.rotates(3)
def test_one_that_has_ended_is_forgotten(llama: Path, copies: tuple[Path, Path]) -> None:
    with LocalSwarm(llama, spans=[(0, 4)], identity_path=copies[0], update_period=1, **OPTIONS) as swarm:
        swarm.add_server((4, 8), identity_path=copies[1])
        wait_until(lambda: all(map(warned, swarm.servers)), "both logs say it")
        swarm.servers[1].kill()
        wait_until(lambda: not shown(swarm), "status doesn't say it any more")


@pytest.mark.slow
def test_both_join_through_a_third(llama: Path, copies: tuple[Path, Path]) -> None:
    with LocalSwarm(llama, spans=[(0, 8)], update_period=1, **OPTIONS) as swarm:
        founder = swarm.servers[0]
        for path, span in zip(copies, ((0, 4), (4, 8)), strict=True):
            swarm._start(span, founder.maddrs, {"identity_path": path}).wait_until_ready()
        wait_until(lambda: all(map(warned, swarm.servers[1:])), "both logs say it")
        assert not warned(founder)
        wait_until(lambda: shown(swarm), "status shows it")


@pytest.mark.rotates(3)
def test_one_that_begins_again(llama: Path, copies: tuple[Path, Path]) -> None:
    """Among its own initial peers, as where all machines have one list of them."""
    with LocalSwarm(llama, spans=[(0, 8)], update_period=1, **OPTIONS) as swarm:
        maddrs, port = swarm.initial_peers, 0
        for _ in range(2):
            server = swarm._start((0, 4), maddrs, {"identity_path": copies[0], "port": port})
            server.wait_until_ready()
            maddrs, port = [*maddrs, *server.maddrs], int(server.maddrs[0].split("/")[4])
            server.kill()
            assert not warned(server)
