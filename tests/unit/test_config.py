"""Settings refuse what can't work, in a sentence that names the mend."""

from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest

from swarmllm.config import ClientConfig, parse_block_indices
from swarmllm.errors import ConfigurationError
from swarmllm.server.settings import ServerConfig

SERVER = {"model": "m", "new_swarm": True}


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
        ({"block_indices": (-1, 2)}, "START < END"),
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


@pytest.mark.parametrize("text", ["", "3", "3:", ":3", "3:3", "4:3", "-1:3", "a:b", "0:1:2", "0x1:2"])
def test_block_indices_that_are_none(text: str) -> None:
    with pytest.raises(ConfigurationError, match="START:END"):
        parse_block_indices(text)


def test_block_indices() -> None:
    assert parse_block_indices(" 4:12 ") == (4, 12)


def test_one_peer_need_not_be_a_list() -> None:
    assert ClientConfig(initial_peers="/ip4/1").initial_peers == ("/ip4/1",)
    assert ClientConfig(allowed_servers=["a", "b"]).allowed_servers == ("a", "b")
    assert ClientConfig().allowed_servers is None


def test_initial_peers_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWARMLLM_INITIAL_PEERS", "/ip4/1 /ip4/2,/ip4/3")
    assert ClientConfig().initial_peers == ("/ip4/1", "/ip4/2", "/ip4/3")
    assert ServerConfig(model="m").initial_peers == ("/ip4/1", "/ip4/2", "/ip4/3")


def test_the_port_replaces_only_an_open_one() -> None:
    maddrs = ("/ip4/0.0.0.0/tcp/0", "/ip4/1.2.3.4/tcp/77")
    config = ServerConfig(**SERVER, host_maddrs=maddrs, port=31337)
    assert config.listen_maddrs == ("/ip4/0.0.0.0/tcp/31337", "/ip4/1.2.3.4/tcp/77")


def test_settings_are_frozen_and_tokens_stay_secret() -> None:
    config = ServerConfig(**SERVER, token="hf_secret")
    assert "hf_secret" not in repr(config)
    with pytest.raises(FrozenInstanceError):
        config.model = "other"
