"""Settings refuse what can't work, in a sentence that names the mend."""

from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from swarmllm.config import (
    ClientConfig,
    ClientModelConfig,
    default_initial_peers,
    default_log_level,
    hub_token,
    parse_block_indices,
)
from swarmllm.errors import ConfigurationError
from swarmllm.server.settings import ServerConfig

SERVER = {"model": "m", "new_swarm": True}
PEER_ID = "12D3KooW".ljust(52, "x")


@pytest.mark.parametrize(
    "settings",
    [
        {"connect_timeout_s": 0},
        {"step_timeout_s": -1},
        {"route_timeout_s": 0},
        {"max_retries": -1},
        {"ban_s": -0.1},
        {"prefill_chunk_tokens": 0},
        {"max_batch_tokens": 0},
        {"max_message_bytes": 0},
        {"compression": "zip"},
        {"head": "int4"},
        {"active_adapter": ""},
        {"activation_noise": -0.1},
        {"activation_noise": float("inf")},
        {"activation_noise": float("nan")},
    ],
    ids=str,
)
def test_clients_refuse(settings: dict[str, Any]) -> None:
    (name,) = settings
    with pytest.raises(ConfigurationError, match=name):
        ClientConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"num_blocks": 0}, "num_blocks"),
        ({"num_blocks": 2, "block_indices": (0, 2)}, "not both"),
        ({"block_indices": (2, 2)}, "START < END"),
        ({"block_indices": (-1, 2)}, "0 <= START < END"),
        ({"initial_peers": ["/ip4/1.2.3.4/tcp/1/p2p/x"]}, "not both"),
        ({"new_swarm": False, "lan_discovery": False}, "initial_peers"),
        ({"new_swarm": False, "host_maddrs": "/ip4/127.0.0.1/tcp/0"}, "initial_peers"),
        ({"port": 65536}, "port"),
        ({"quant_type": "int1"}, "quant_type"),
        ({"activations": "int4"}, "activations"),
        ({"activations": "int8", "tensor_parallel": 2}, "activations"),
        ({"compression": "int4"}, "compression"),
        ({"throughput": 0.0}, "throughput"),
        ({"attn_cache_tokens": 0}, "attn_cache_tokens"),
        ({"max_sessions": 0}, "max_sessions"),
        ({"prefix_cache_tokens": -1}, "prefix_cache_tokens"),
        ({"max_batch_tokens": -5}, "max_batch_tokens"),
        ({"update_period": 0}, "update_period"),
        ({"update_period": 721}, "update_period must be at most 720 s"),
        ({"update_period": float("nan")}, "update_period"),
        ({"num_threads": 0}, "num_threads"),
        ({"num_threads": 100_000}, r"num_threads must be at most \d+ here, 4 for each of the \d+ cores"),
        ({"port": 80, "host_maddrs": "/ip4/127.0.0.1/tcp/81"}, "port 80 is in no address of host_maddrs"),
        ({"metrics_host": "0.0.0.0"}, "metrics_host 0.0.0.0 needs metrics_port"),
        ({"port": 8000, "metrics_port": 8000}, "port and metrics_port are both 8000: choose another metrics_port"),
        ({"port": 8000, "direct_port": 8000}, "port and direct_port are both 8000: choose another direct_port"),
        ({"direct_port": 8000, "metrics_port": 8000, "metrics_host": "::"}, "direct_port and metrics_port are both"),
        ({"host_maddrs": "/ip4/127.0.0.1/tcp/81", "metrics_port": 81, "metrics_host": "localhost"}, "are both 81"),
        ({"priority_clients": PEER_ID[1:]}, "priority_clients: .* has 51 characters instead of 52"),
        ({"allowed_clients": [PEER_ID, "bogus"]}, "allowed_clients: 'bogus' is no peer id"),
        ({"allowed_servers": PEER_ID.replace("x", "0")}, "allowed_servers: .* holds '0'"),
        ({"nice": "no"}, "nice must be true or false, not 'no'"),
        ({"block_indices": "0:4"}, "block_indices must be two whole numbers or None, not '0:4'"),
        ({"public_name": "x" * 65}, "public_name .* at most 64 characters"),
        ({"throughput": 2e9}, "throughput 2000000000.0 .* less than or equal to 1000000000"),
        ({"throughput": float("inf")}, "throughput"),
        ({"announce_maddrs": ["/ip4/1.2.3.4/tcp/5"] * 17}, "announce_maddrs"),
        ({"announce_maddrs": ["/dns4/" + "x" * 250 + "/tcp/5"]}, "announce_maddrs"),
        ({"max_batch_tokens": 1 << 31}, "max_batch_tokens"),
        ({"attn_cache_tokens": 1 << 54}, "attn_cache_tokens"),
        ({"num_blocks": 5000}, "num_blocks"),
        ({"block_indices": (0, 5000)}, "block_indices"),
        ({"identity_path": str(Path(__file__).parent)}, "directory"),
    ],
    ids=str,
)
def test_servers_refuse(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        ServerConfig(**{**SERVER, **settings})


def test_servers_may_use_a_port_at_two_addresses() -> None:
    for maddrs, host in (("/ip4/127.0.0.1/tcp/81", "127.0.0.2"), ("/ip4/0.0.0.0/tcp/81", "::1")):
        assert ServerConfig(**SERVER, host_maddrs=maddrs, metrics_port=81, metrics_host=host).metrics_port == 81


@pytest.mark.parametrize("text", ["", "3", "3:", ":3", "3:3", "4:3", "-1:3", "a:b", "0:1:2", "0x1:2"])
def test_block_indices_that_are_none(text: str) -> None:
    with pytest.raises(ConfigurationError, match="START:END"):
        parse_block_indices(text)


def test_block_indices() -> None:
    assert parse_block_indices(" 4:12 ") == (4, 12)


def test_one_peer_need_not_be_a_list() -> None:
    assert ClientConfig(initial_peers="/ip4/1").initial_peers == ("/ip4/1",)
    assert ClientConfig(allowed_servers=[PEER_ID, PEER_ID]).allowed_servers == (PEER_ID, PEER_ID)
    assert ClientConfig(blocked_servers=PEER_ID).blocked_servers == (PEER_ID,)
    assert ClientConfig().allowed_servers is None


def test_initial_peers_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWARMLLM_INITIAL_PEERS", "/ip4/1 /ip4/2,/ip4/3")
    assert ClientConfig().initial_peers == ("/ip4/1", "/ip4/2", "/ip4/3")
    assert ServerConfig(model="m").initial_peers == ("/ip4/1", "/ip4/2", "/ip4/3")


def test_an_empty_variable_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """As programs that pass variables on make them."""
    for name in ("SWARMLLM_LOG_LEVEL", "SWARMLLM_INITIAL_PEERS", "HF_TOKEN"):
        monkeypatch.setenv(name, "")
    assert (default_log_level(), default_initial_peers(), hub_token()) == ("INFO", (), None)
    monkeypatch.setenv("SWARMLLM_LOG_LEVEL", "debug")
    assert default_log_level() == "DEBUG"


def test_the_port_replaces_only_an_open_one() -> None:
    maddrs = ("/ip4/0.0.0.0/tcp/0", "/ip4/1.2.3.4/tcp/77")
    config = ServerConfig(**SERVER, host_maddrs=maddrs, port=31337)
    assert config.listen_maddrs == ("/ip4/0.0.0.0/tcp/31337", "/ip4/1.2.3.4/tcp/77")


def test_ports_of_different_addresses_may_have_one_number() -> None:
    config = ServerConfig(**SERVER, host_maddrs="/ip4/192.168.1.2/tcp/81", metrics_port=81)
    assert (config.metrics_host, config.direct_port) == ("127.0.0.1", None)
    for open_one in ({"port": 0, "metrics_port": 0}, {"port": 0, "direct_port": 0, "metrics_port": 0}):
        assert ServerConfig(**SERVER, **open_one).metrics_port == 0


def test_a_port_may_be_said_twice() -> None:
    config = ServerConfig(**SERVER, host_maddrs="/ip4/127.0.0.1/tcp/80", port=80)
    assert config.listen_maddrs == ("/ip4/127.0.0.1/tcp/80",)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"push": "no"}, "push must be true or false, not 'no'"),
        ({"compute_padding": 3}, "compute_padding must be true or false, not 3"),
        ({"max_retries": "x"}, "max_retries must be a whole number, not 'x'"),
        ({"max_retries": True}, "max_retries must be a whole number, not True"),
        ({"max_retries": 2.0}, "max_retries must be a whole number, not 2.0"),
        ({"fallback_after": "x"}, "fallback_after must be a whole number or None, not 'x'"),
        ({"activation_noise": "x"}, "activation_noise must be a number, not 'x'"),
        ({"ban_s": float("nan")}, "ban_s must be a number, not nan"),
        ({"ban_s": None}, "ban_s must be a number, not None"),
        ({"compression": None}, "compression must be a text, not None"),
        ({"initial_peers": 7}, "initial_peers must be a list of texts, not 7"),
        ({"initial_peers": [7]}, r"initial_peers must be a list of texts, not [7]"),
        ({"allowed_servers": {"a": 1}}, "allowed_servers must be a list of texts or None, not {'a': 1}"),
    ],
    ids=str,
)
def test_settings_of_another_type_are_refused(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        ClientConfig(**settings)
    assert str(refused.value) == sentence


def test_settings_of_a_type_like_theirs_are_taken(tmp_path: Path) -> None:
    config = ClientConfig(
        max_retries=np.int64(3), ban_s=2, activation_noise=np.float32(0.5), identity_path=tmp_path / "key"
    )
    assert (config.max_retries, config.ban_s, config.activation_noise) == (3, 2, 0.5)
    assert (type(config.max_retries), type(config.activation_noise)) == (int, float)
    assert config.identity_path == str(tmp_path / "key")
    server = ServerConfig(**SERVER, block_indices=[0, 4], max_memory=12, nice=np.bool_(True), dtype=torch.bfloat16)
    assert (server.block_indices, server.max_memory, server.nice) == ((0, 4), "12", True)
    assert (server.dtype, type(server.nice)) == ("torch.bfloat16", bool)
    assert ClientModelConfig(model="m", device=torch.device("cpu")).device == "cpu"


@pytest.mark.parametrize("name", ["allowed_servers", "blocked_servers"])
@pytest.mark.parametrize("peer_id", ["…xNyRoU", "bogus", "", "12D3KooW", "Q" * 52])
def test_what_is_no_peer_id_is_refused(name: str, peer_id: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^{name}: '{peer_id}' is no peer id, .*status --json"):
        ClientConfig(**{name: [PEER_ID, peer_id]})


def test_settings_are_frozen_and_tokens_stay_secret() -> None:
    config = ServerConfig(**SERVER, token="hf_secret")
    assert "hf_secret" not in repr(config)
    with pytest.raises(FrozenInstanceError):
        config.model = "other"
