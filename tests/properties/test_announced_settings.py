"""The record of a server with any accepted settings passes the validators of all peers."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarmllm import embedded_model_path
from swarmllm.config import RECORD_PERIODS
from swarmllm.data_structures import MAX_ADDRS, MAX_TTL_S, BlockTraits, ServerInfo, Span
from swarmllm.errors import ConfigurationError
from swarmllm.models.checkpoint.checkpoint import Checkpoint, open_checkpoint, resolve_dtype
from swarmllm.models.quantization import resolve_quantization
from swarmllm.models.span.span_cache import CacheSizes
from swarmllm.network.p2p.addresses import best_addrs
from swarmllm.network.p2p.block_directory import VALUE_OVERHEAD_BYTES
from swarmllm.network.p2p.records import MAX_VALUE_BYTES
from swarmllm.server.announcer import OwnRecord
from swarmllm.server.device.device import CacheRoom
from swarmllm.server.device.niceness import Niceness
from swarmllm.server.device.throughput import Throughput
from swarmllm.server.settings import ServerConfig
from swarmllm.server.streams.serving import Access, Serving, StackBlocks

PEER_ID = "12D3KooWFfoRMzqUD91vDKX6igC7p7M2G2EMN2SZG28GBvt4SvGU"
MEASURED = Throughput(forward_tokens_per_s=4.0, decode_ms_per_block=1.0)  # real forwards take 4 times as long
BRIDGES = [f"/ip4/172.{number}.0.1/tcp/31337" for number in range(17, 32)]
OUTSIDE, LAN, OWN = "/ip4/93.184.216.34/tcp/31337", "/ip4/192.168.1.10/tcp/31337", "/ip4/127.0.0.1/tcp/31337"

numbers = st.one_of(st.integers(-1, 1 << 70), st.floats())
settings = st.fixed_dictionaries(
    {},
    optional={
        "public_name": st.text(max_size=80),
        "throughput": numbers,
        "update_period": numbers,
        "attn_cache_tokens": st.integers(-1, 1 << 70),
        "max_batch_tokens": st.integers(-1, 1 << 40),
        "block_indices": st.tuples(st.integers(-1, 5000), st.integers(-1, 5000)),
        "announce_maddrs": st.lists(st.text(max_size=300), max_size=20),
        "balance_quality": numbers,
    },
)
addresses = st.lists(
    st.one_of(
        st.builds("/ip4/{}/tcp/{}".format, st.ip_addresses(v=4), st.integers(1, 65535)),
        st.builds("/ip6/{}/tcp/{}".format, st.ip_addresses(v=6), st.integers(1, 65535)),
        st.text(max_size=400),
    ),
    max_size=40,
)


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return open_checkpoint(str(embedded_model_path()))


def announced(
    config: ServerConfig,
    checkpoint: Checkpoint,
    addrs: tuple[str, ...],
    mbps: float | None = None,
    probed_mbps: float | None = None,
) -> ServerInfo:
    """The record of a server that has loaded its blocks."""
    peer: Any = SimpleNamespace(peer_id=PEER_ID, addrs=addrs, relay=None)
    loader: Any = SimpleNamespace(
        device=torch.device("cpu"),
        dtype=resolve_dtype(checkpoint, config.dtype),
        quantization=resolve_quantization(config.quant_type),
        activations="int8",
        adapters=SimpleNamespace(names=()),
        device_thread=SimpleNamespace(
            load=SimpleNamespace(queue_ms=0.0, num_tokens=3, num_failures=0),
            step_ms_p50=1.0,
            step_ms_p95=1.5,
            token_ms=9.0,
            pace=2.0,
            forward_pace=4.0,
            niceness=Niceness(),
        ),
    )
    links: Any = SimpleNamespace(mbps=lambda _: mbps)
    successors: Any = SimpleNamespace(announced=(), mbps=probed_mbps)
    access = Access(None)
    record = OwnRecord(config, peer, loader, access, links, successors, Span(0, checkpoint.num_blocks))
    digests = "Ab_-" * checkpoint.num_blocks
    blocks: Any = SimpleNamespace(
        traits=BlockTraits(), cache_sizes=CacheSizes(bytes_per_token=1), digests=digests, is_of_encoder=False
    )
    inputs: Any = SimpleNamespace(hidden_bytes=1000)
    packer: Any = SimpleNamespace(blocks=blocks)
    access.serving = Serving(
        packer,
        [StackBlocks(blocks, inputs)],
        loader.device_thread,
        CacheRoom(1001 * config.attn_cache_tokens, 0),
        limits=access.limits,
        settings=config,
        offered=loader.adapters,
        throughput=MEASURED,
    )
    return record.describe()


@given(settings=settings, found=addresses)
def test_whatever_is_accepted_makes_a_valid_record(
    checkpoint: Checkpoint, settings: dict[str, Any], found: list[str]
) -> None:
    try:
        config = ServerConfig(model="m", new_swarm=True, **settings)
    except ConfigurationError:
        return
    text = announced(config, checkpoint, best_addrs(config.announce_maddrs or found)).model_dump_json()
    ServerInfo.model_validate_json(text)
    assert len(text.encode()) <= MAX_VALUE_BYTES - VALUE_OVERHEAD_BYTES
    assert RECORD_PERIODS * config.update_period <= MAX_TTL_S


@pytest.mark.parametrize(("mbps", "tokens_per_s"), [(None, 1.0), (100.0, 1.0), (0.004, 0.5)])
def test_a_batch_is_no_faster_than_the_network(checkpoint: Checkpoint, mbps: float | None, tokens_per_s: float) -> None:
    config = ServerConfig(model="m", new_swarm=True)
    assert announced(config, checkpoint, (), mbps, 0.008).throughput == tokens_per_s, "what links carry counts more"
    assert announced(config, checkpoint, (), None, mbps).throughput == tokens_per_s


@given(order=st.permutations([*BRIDGES, OUTSIDE, LAN, OWN]))
def test_the_addresses_that_most_can_reach_come_first(order: list[str]) -> None:
    best = best_addrs(order)
    assert best[:2] == (OUTSIDE, LAN)
    assert set(best[2:]) <= set(BRIDGES)
    assert len(best) == MAX_ADDRS
