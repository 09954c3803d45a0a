"""Memory that a server promises: never more than blocks leave."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig

from swarmllm.errors import ConfigurationError
from swarmllm.server.device.device import LEAST_TOKENS, cache_bytes_per_token, cache_room, num_blocks_that_fit
from swarmllm.server.settings import ServerConfig, memory_limit_bytes

GIB = 1 << 30
sizes = st.integers(1, 1 << 34)


@given(
    left=st.integers(-GIB, 64 * GIB),
    per_token=st.integers(1, 1 << 20),
    per_session=st.integers(0, 1 << 24),
    tokens=st.integers(1, 1 << 18),
    prefix=st.integers(0, 1 << 15),
)
def test_no_more_is_promised_than_is_left(
    left: int, per_token: int, per_session: int, tokens: int, prefix: int
) -> None:
    try:
        room = cache_room(
            left,
            bytes_per_token=per_token,
            bytes_per_session=per_session,
            session_tokens=tokens,
            prefix_tokens=prefix,
        )
    except ConfigurationError:
        assert left * 13 / 16 - 1 < per_token * min(tokens, LEAST_TOKENS) + per_session + 1
        return
    assert 0 < room.sessions <= per_token * tokens + per_session
    assert 0 <= room.pages <= min(per_token * prefix, left / 8)
    assert 0 <= room.adapters <= left / 16
    assert room.sessions + room.pages + room.adapters <= left
    if left >= 2 * (per_token * (tokens + prefix) + per_session) and prefix * 8 <= tokens:
        assert room.sessions == per_token * tokens + per_session, "what was asked for, where there is room"


@given(blocks=st.lists(sizes, min_size=1, max_size=90), cache=st.integers(0, 1 << 34), usable=st.integers(0, 1 << 40))
def test_blocks_fit_with_their_cache(blocks: list[int], cache: int, usable: int) -> None:
    found = num_blocks_that_fit(blocks, cache, usable)
    assert 0 <= found <= len(blocks)
    assert found <= 1 or found * (max(blocks) + cache) <= usable
    assert (found == 0) == (max(blocks) > usable)


@pytest.mark.parametrize(
    ("settings", "megabytes_per_1k"),
    [
        ({"model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 32}, 16.4),
        ({"model_type": "llama", "hidden_size": 8192, "num_attention_heads": 64, "num_key_value_heads": 8}, 4.1),
        ({"model_type": "bert"}, 0.0),
    ],
)
def test_cache_by_the_config(settings: dict[str, object], megabytes_per_1k: float) -> None:
    """Configs as published for Llama-2-7B and 70B."""
    config = AutoConfig.for_model(**settings)
    assert cache_bytes_per_token(config, torch.bfloat16) * 1000 / 1e6 == pytest.approx(megabytes_per_1k, abs=0.05)


@pytest.mark.parametrize(
    ("text", "total", "expected"),
    [
        ("12", 64 * GIB, 12e9),
        ("9 GB", 64 * GIB, 9e9),
        ("1.5 GiB", 8 * GIB, 1.5 * GIB),
        ("50%", 8 * GIB, 4 * GIB),
        (".5GiB", GIB, GIB / 2),
    ],
)
def test_limits(text: str, total: int, expected: float) -> None:
    assert memory_limit_bytes(text, total) == expected


@pytest.mark.parametrize(
    ("text", "said"),
    [
        *((text, "max_memory must be in GB") for text in ("", "0", "-1", "9 TB", "all", "1e3", "nan")),
        ("101%", "'101%' is more than 100%"),
        ("69", "'69' is more than the 68.72 GB that the device has"),
        ("9" * 400, "more than the"),
    ],
)
def test_limits_that_mean_nothing(text: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        memory_limit_bytes(text, 64 * GIB)


def test_a_limit_is_checked_where_it_is_given() -> None:
    with pytest.raises(ConfigurationError, match="max_memory"):
        ServerConfig(model="M", new_swarm=True, max_memory="lots")
