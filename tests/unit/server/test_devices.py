"""The settings of a machine are divided between its devices, or refused."""

import asyncio
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarmllm.errors import ConfigurationError
from swarmllm.network.p2p.identity import Identity
from swarmllm.server import devices
from swarmllm.server.__main__ import parse_config
from swarmllm.server.device.device import resolve_device
from swarmllm.server.devices import SpareProcess, _DeviceServer, all_devices, of_each_device, run_server_process
from swarmllm.server.settings import MAX_TENSOR_PARALLEL, ServerConfig

ASKED = ["--model", "M", "--new_swarm"]
TWO = ("cpu", "cuda:1")
PEER, OTHER = (
    f"/ip4/203.0.113.{number}/tcp/1/p2p/12D3KooWFfoRMzqUD91vDKX6igC7p7M2G2EMN2SZG28GBvt4SvGU" for number in (1, 2)
)


def config(**settings: Any) -> ServerConfig:
    return ServerConfig(model="M", new_swarm=True, **settings)


@given(count=st.integers(2, 9), more=st.integers(0, 100), start=st.integers(0, 50))
def test_shares_are_even(count: int, more: int, start: int) -> None:
    devices, num_blocks = ("cpu",) * count, count + more
    shares = [one.num_blocks or 0 for one in of_each_device(config(num_blocks=num_blocks), devices)]
    assert sum(shares) == num_blocks
    assert max(shares) - min(shares) <= 1
    spans = [one.block_indices for one in of_each_device(config(block_indices=(start, start + num_blocks)), devices)]
    covered = [block for span in spans for block in range(*(span or (0, 0)))]
    assert covered == list(range(start, start + num_blocks))


@given(shares=st.lists(st.integers(1, 40), min_size=2, max_size=6), start=st.none() | st.integers(0, 50))
def test_shares_are_those_of_the_map(shares: list[int], start: int | None) -> None:
    device_map = tuple(f"cuda:{index}={count}" for index, count in enumerate(shares))
    indices = None if start is None else (start, start + sum(shares))
    asked = config(device_map=device_map, block_indices=indices)
    devices = all_devices(asked)
    assert devices == tuple(f"cuda:{index}" for index in range(len(shares)))
    each = of_each_device(asked, devices)
    assert [(one.device, one.device_map) for one in each] == [((device,), ()) for device in devices]
    if start is None:
        assert [one.num_blocks for one in each] == shares
    else:
        assert [end - begin for begin, end in (one.block_indices or (0, 0) for one in each)] == shares
        covered = [block for one in each for block in range(*(one.block_indices or (0, 0)))]
        assert covered == list(range(start, start + sum(shares)))


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"device_map": "cpu"}, "like cuda:0=12 cpu=4, not cpu"),
        ({"device_map": ("cpu=2", "cuda=0")}, "like cuda:0=12 cpu=4, not cpu=2 cuda=0"),
        ({"device_map": ("cpu=2", "=2")}, "like cuda:0=12 cpu=4"),
        ({"device_map": ("cpu=2", "cuda=1.5")}, "like cuda:0=12 cpu=4"),
        ({"device_map": "cpu=5 cpu=3"}, "device 'cpu=5 cpu' can't be used"),
        ({"device_map": ("cpu=2",)}, "give --device cpu --num_blocks 2"),
        ({"device_map": ("cpu=2", "cuda=3"), "device": "cpu"}, "leave --device and --num_blocks out"),
        ({"device_map": ("cpu=2", "cuda=3"), "num_blocks": 5}, "leave --device and --num_blocks out"),
        ({"device_map": ("cpu=2", "cuda=3"), "tensor_parallel": 2}, "give --device_map or --tensor_parallel"),
        ({"device_map": ("cpu=2", "cuda=3"), "block_indices": (0, 4)}, "has 5 blocks, and block_indices 4"),
        ({"device_map": ("cpu=2", "cuda=3"), "offload": 6}, "of 5 blocks, 6 can't be offloaded"),
    ],
)
def test_maps_that_cannot_be(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        config(**settings)


@pytest.mark.parametrize("name", ["meta", "gpu", "CPU", "xla:0", "cpu:1", "cuda:", "cuda:x", "cpu,cpu", " cpu", ""])
def test_devices_on_which_nothing_computes_are_refused(name: str) -> None:
    """Before anything is read or started, however they are named."""
    reason = r"can't be used: name one of cpu, cuda, mps, xpu"
    with pytest.raises(ConfigurationError, match=reason):
        resolve_device(name)
    for settings in ({"device": (name,)}, {"device": ("cpu", name)}):
        with pytest.raises(ConfigurationError, match=reason):
            config(**settings)
    if name:
        with pytest.raises(ConfigurationError, match=reason):
            config(device_map=("cpu=2", f"{name}=3"))


@pytest.mark.parametrize("settings", [{"device": ("auto", "cpu")}, {"device": ("auto", "auto")}])
def test_auto_is_not_one_of_several(settings: dict[str, Any]) -> None:
    """Its process would take all GPUs, beside those of the others."""
    with pytest.raises(ConfigurationError, match="auto is for all devices"):
        config(**settings)
    with pytest.raises(ConfigurationError, match="auto is for all devices"):
        config(device_map=("cpu=1", "auto=3"))


@pytest.mark.parametrize("name", ["cuda:7", "mps", "xpu"])
def test_devices_that_are_not_here_are_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^device '{name}' can't be used here: [^.\\n]+(\\.[a-z][^.\\n]*)*$"):
        resolve_device(name)  # in one sentence


def test_one_block_is_not_shared_by_hundreds_of_processes() -> None:
    assert config(tensor_parallel=MAX_TENSOR_PARALLEL).tensor_parallel == MAX_TENSOR_PARALLEL
    with pytest.raises(ConfigurationError, match="tensor_parallel must be 1 to 16, not 3000"):
        config(tensor_parallel=3000)


def test_each_has_its_device_and_ports_and_the_name_of_the_machine() -> None:
    first, second = of_each_device(config(port=31337, metrics_port=8000), TWO)
    assert (first.device, second.device) == (("cpu",), ("cuda:1",))
    assert (first.port, second.port) == (31337, 31338)
    assert (first.metrics_port, second.metrics_port) == (8000, 8001)
    assert first.machine == second.machine != of_each_device(config(), TWO)[0].machine
    assert (first.num_blocks, second.num_blocks) == (None, None)
    for one in of_each_device(config(port=0, metrics_port=0), TWO):
        assert (one.port, one.metrics_port) == (0, 0)


def test_identities_come_from_one(tmp_path: Path) -> None:
    path = tmp_path / "key"
    first, second = (Identity.load(one.identity_path or "") for one in of_each_device(config(identity_path=path), TWO))
    assert first.peer_id == Identity.load(path).peer_id != second.peer_id
    (tmp_path / "key.1").unlink()
    again = of_each_device(config(identity_path=path), TWO)[1]
    assert Identity.load(again.identity_path or "").peer_id == second.peer_id
    path.unlink()
    with pytest.raises(ConfigurationError, match=r"key\.1 doesn't come from the identity"):
        of_each_device(config(identity_path=path), TWO)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"num_blocks": 1}, "1 blocks can't be split between 2 devices"),
        ({"block_indices": (3, 4)}, "1 blocks can't be split between 2 devices"),
        ({"announce_maddrs": ("/ip4/1.2.3.4/tcp/5",)}, "name one --device"),
        ({"host_maddrs": ("/ip4/0.0.0.0/tcp/5",)}, "a port of its own"),
        ({"num_blocks": 4, "offload": 3}, "of 2 blocks, 3 can't be offloaded"),
        ({"direct_port": 65535}, "direct_port must be 0 to 65535, not 65536"),
        ({"metrics_port": 65535}, "metrics_port must be 0 to 65535, not 65536"),
        ({"port": 40001, "metrics_port": 40002}, "overlap"),
        ({"port": 40002, "metrics_port": 40001}, "overlap"),
        ({"port": 40003, "direct_port": 40002}, "overlap"),
        ({"port": 65535}, "port must be 0 to 65535"),
    ],
)
def test_settings_that_cannot_be_divided(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        of_each_device(config(**settings), TWO)


@pytest.mark.parametrize(
    ("count", "settings", "expected"),
    [
        (0, {}, ("auto",)),
        (1, {}, ("auto",)),
        (3, {}, ("cuda:0", "cuda:1", "cuda:2")),
        (3, {"num_blocks": 2}, ("cuda:0", "cuda:1")),
        (3, {"block_indices": (4, 5)}, ("auto",)),
        (3, {"device": "cuda"}, ("cuda",)),
        (0, {"device": ("cpu", "cpu")}, ("cpu", "cpu")),
        (0, {"device": ("cpu",), "tensor_parallel": 3}, ("cpu", "cpu", "cpu")),
        (0, {"tensor_parallel": 2}, ("cpu", "cpu")),
        (5, {"tensor_parallel": 2}, ("cuda:0", "cuda:1", "cuda:2", "cuda:3")),
        (5, {"tensor_parallel": 2, "num_blocks": 1}, ("cuda:0", "cuda:1")),
    ],
)
def test_auto_is_all_gpus(
    monkeypatch: pytest.MonkeyPatch, count: int, settings: dict[str, Any], expected: tuple[str, ...]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    assert all_devices(config(**settings)) == expected


@pytest.mark.parametrize(
    ("settings", "announces"),
    [
        ({"new_swarm": True}, True),
        ({}, True),
        ({"lan_discovery": False, "new_swarm": True}, False),
        ({"initial_peers": PEER}, False),
    ],
)
async def test_all_announce_on_the_local_network_like_the_first_one(settings: dict[str, Any], announces: bool) -> None:
    """Also one that is started again, and joins by the others."""
    servers: list[_DeviceServer] = []
    for one in of_each_device(ServerConfig(model="M", **settings), TWO):
        servers.append(_DeviceServer("x", one, servers))
    first, second = servers
    assert (await first._settings()).announces_on_lan == announces
    first.maddrs = (OTHER,)
    joined = await second._settings()
    assert joined.initial_peers == (*([PEER] if "initial_peers" in settings else []), OTHER)
    assert (joined.announces_on_lan, joined.new_swarm) == (announces, False)


def test_flags() -> None:
    assert parse_config(ASKED).device == ("auto",)
    assert parse_config([*ASKED, "--device", "cpu"]).device == ("cpu",)
    assert parse_config([*ASKED, "--device", "cuda:0", "cuda:1"]).device == ("cuda:0", "cuda:1")
    with pytest.raises(ConfigurationError, match="name a device"):
        config(device=())
    assert parse_config([*ASKED, "--device_map", "cuda:0=12", "cpu=4"]).device_map == ("cuda:0=12", "cpu=4")


def open_files() -> set[tuple[str, str]]:
    return {(fd.name, str(fd.readlink())) for fd in Path("/proc/self/fd").iterdir() if fd.exists()}


@pytest.mark.parametrize("at_once", [False, True])
async def test_processes_that_hold_the_pipes_of_a_server_do_not_keep_its_reader(
    at_once: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Processes that hold pipes: followers of --tensor_parallel that still start when Ctrl-C comes, or pipes that are
    being made."""
    program, holder = tmp_path / "program", tmp_path / "holder"
    program.write_text(
        f"#!/bin/sh\nsetsid sleep 60 &\necho $! > {holder}.new && mv {holder}.new {holder}\nexec sleep 60\n"
    )
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    before = open_files()
    running = asyncio.create_task(_DeviceServer("cpu", config(), ()).keep_running())
    monkeypatch.setattr(devices, "STOP_TIMEOUT_S", 0.5)
    if at_once:
        connect = asyncio.base_subprocess.BaseSubprocessTransport._connect_pipes

        async def connected(self: Any, waiter: Any) -> None:
            while not holder.exists():  # noqa: ASYNC110 - another process makes it
                await asyncio.sleep(0.01)
            running.cancel()
            await connect(self, waiter)

        monkeypatch.setattr(asyncio.base_subprocess.BaseSubprocessTransport, "_connect_pipes", connected)
    while not holder.exists():  # noqa: ASYNC110 - another process makes it
        await asyncio.sleep(0.01)
    if not at_once:
        running.cancel()
    await asyncio.wait({running}, timeout=20)
    left = asyncio.all_tasks() - {asyncio.current_task()}
    still = (await asyncio.wait(left, timeout=10))[1] if left else set()
    await asyncio.sleep(0)  # pipes close in the next round of the loop
    after = open_files()
    with suppress(ProcessLookupError):
        os.kill(int(holder.read_text()), signal.SIGKILL)
    assert not still
    assert after <= before


async def test_a_process_that_ends_just_now_keeps_its_exit_code() -> None:
    """The loop and whoever signals the process may both ask for the code, which there is once: 1 in 20 was 255."""
    for _ in range(60):
        process = await asyncio.create_subprocess_exec("/bin/sh", "-c", "exit 7", stdout=asyncio.subprocess.PIPE)
        assert process.stdout is not None
        await process.stdout.read()
        await devices._end(process)
        assert await process.wait() in (7, -signal.SIGTERM)


async def test_a_spare_process_becomes_the_next_server_unless_it_has_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program, started = tmp_path / "program", tmp_path / "started"
    program.write_text(f"#!/bin/sh\necho $$ >> {started}\nread settings\necho I am $$\n")
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))

    async def number_of_starts(count: int) -> list[int]:
        while not started.exists() or started.read_text().count("\n") < count:  # noqa: ASYNC110 - another process writes
            await asyncio.sleep(0.01)
        return [int(line) for line in started.read_text().split()]

    async def settings() -> ServerConfig:
        return config()

    spare, said = SpareProcess(), list[str]()
    spare.prepare()
    spare.prepare()
    (first,) = await number_of_starts(1)
    assert await run_server_process(settings, said.append, said.append, spare) == 0
    assert said == [f"I am {first}"]
    spare.prepare()
    _, second = await number_of_starts(2)
    assert spare._starting is not None
    process = await spare._starting
    assert process.pid == second
    process.kill()
    while process.returncode is None:  # noqa: ASYNC110 - asyncio hears of it some time after the process has gone
        await asyncio.sleep(0.01)
    assert await run_server_process(settings, said.append, said.append, spare) == 0
    *_, third = await number_of_starts(3)
    assert said[-1] == f"I am {third}"
    spare.prepare()
    *_, last = await number_of_starts(4)
    await spare.close()
    assert not psutil.pid_exists(last)
    await spare.close()
    spare.prepare()
    *_, dead = await number_of_starts(5)
    os.kill(dead, signal.SIGKILL)
    while psutil.pid_exists(dead):  # noqa: ASYNC110 - asyncio's own task waits for it
        await asyncio.sleep(0.01)
    await spare.close()
    assert len(await number_of_starts(5)) == 5, "none starts in order to be ended"
    monkeypatch.setattr(sys, "executable", str(tmp_path / "gone"))
    spare.prepare()
    await spare.close()
