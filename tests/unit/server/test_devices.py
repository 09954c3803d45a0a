"""How what a machine is told is divided between its devices, and what can't be."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarmllm.errors import ConfigurationError
from swarmllm.network.p2p.identity import Identity
from swarmllm.server.__main__ import parse_config
from swarmllm.server.devices import _DeviceServer, all_devices, of_each_device
from swarmllm.server.settings import ServerConfig

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
        ({"port": 65535}, "port must be 0 to 65535"),
    ],
)
def test_what_cannot_be_divided(settings: dict[str, Any], reason: str) -> None:
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
async def test_all_announce_on_the_local_network_what_the_first_one_would(
    settings: dict[str, Any], announces: bool
) -> None:
    """Also one that is started again, and joins by the others."""
    servers: list[_DeviceServer] = []
    for one in of_each_device(ServerConfig(model="M", **settings), TWO):
        servers.append(_DeviceServer("x", one, servers))
    first, second = servers
    assert first._settings().announces_on_lan == announces
    first.maddrs = (OTHER,)
    joined = second._settings()
    assert joined.initial_peers == (*([PEER] if "initial_peers" in settings else []), OTHER)
    assert (joined.announces_on_lan, joined.new_swarm) == (announces, False)


def test_flags() -> None:
    assert parse_config(ASKED).device == ("auto",)
    assert parse_config([*ASKED, "--device", "cpu"]).device == ("cpu",)
    assert parse_config([*ASKED, "--device", "cuda:0", "cuda:1"]).device == ("cuda:0", "cuda:1")
    with pytest.raises(ConfigurationError, match="name a device"):
        config(device=())
