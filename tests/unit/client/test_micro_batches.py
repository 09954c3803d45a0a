"""Into what pieces a batch goes, and a prompt."""

import pytest
import torch

from swarmllm.client.batches.batch_runner import MICRO_BATCHES_PER_HOP, MIN_TOKENS, micro_batch_tokens
from swarmllm.client.session.chain import CHUNK_S, chunk_tokens, prompt_chunk_tokens
from swarmllm.config import ClientConfig
from swarmllm.data_structures import RouteHop, ServerInfo, Span
from swarmllm.models.boundary.block_inputs import BlockInputs


def route(*batch_tokens: int, most: int = 8192, throughput: float = 1e5) -> list[RouteHop]:
    servers = [
        ServerInfo(peer_id="p" * 46, start=0, end=4, batch_tokens=tokens, max_batch_tokens=most, throughput=throughput)
        for tokens in batch_tokens
    ]
    return [RouteHop(server, Span(0, 4)) for server in servers]


@pytest.mark.parametrize(
    ("num_tokens", "hops", "expected"),
    [
        (4096, route(0), 4096 // MICRO_BATCHES_PER_HOP),
        (4096, route(0, 0), 4096 // MICRO_BATCHES_PER_HOP // 2),
        (100, route(0), MIN_TOKENS),
        (1024, route(1024), 512),
        (1024, route(256, 1024), 512),
        (1024, route(1024, most=300), 300),
        (65536, route(1024), ClientConfig().max_batch_tokens),
    ],
)
def test_micro_batches_are_many_and_each_worth_a_request(num_tokens: int, hops: list[RouteHop], expected: int) -> None:
    assert micro_batch_tokens(num_tokens, hops, ClientConfig()) == expected


@pytest.mark.parametrize(
    ("hops", "expected"),
    [
        (route(0, 0), ClientConfig().prefill_chunk_tokens),
        (route(64), ClientConfig().prefill_chunk_tokens),
        (route(0, 512, 256), 512),
        (route(1 << 30), ClientConfig().max_batch_tokens),
        (route(1024, throughput=800 / CHUNK_S), 800),
        (route(1024, throughput=8 / CHUNK_S), ClientConfig().prefill_chunk_tokens),
    ],
)
def test_chunks_of_prompts_are_worth_a_forward_unless_links_are_slow(hops: list[RouteHop], expected: int) -> None:
    assert chunk_tokens(hops, ClientConfig()) == expected


@pytest.mark.parametrize(
    ("shape", "hops", "expected"),
    [
        ((1, 1), route(0, 0), 1),
        ((1, 127), route(0, 0, throughput=0), 127),
        ((1, 128), route(0, 0, throughput=0), 64),
        ((1, 128), route(0, throughput=0), 128),
        ((1, 255), route(*[0] * 3, throughput=0), 85),
        ((1, 400), route(*[0] * 3, throughput=0), 67),
        ((1, 256), route(*[0] * 20, throughput=0), 64),
        ((3, 100), route(0, 0, 0, 0, throughput=0), 75),
        ((100, 2), route(0, 0, 0, 0, throughput=0), 100),
        ((200, 1), route(0, 0, 0, 0, throughput=0), 128),
        ((1, 1000), route(0, 0, throughput=0), 128),
        ((1, 128), route(0, 0, throughput=1e9), 64),
        ((1, 400), route(0, 200), 200),
        ((1, 300), route(0, 200), 200),
    ],
)
def test_a_prompt_keeps_all_servers_busy(shape: tuple[int, int], hops: list[RouteHop], expected: int) -> None:
    """Unless its steps would be too short, for shared pages or for a GPU. The speed of CPUs has no part in it."""
    batch_size, seq_len = shape
    inputs = BlockInputs(hidden_states=torch.zeros(batch_size, seq_len, 1), batch_size=batch_size, seq_len=seq_len)
    assert prompt_chunk_tokens(inputs, hops, ClientConfig()) == expected


@pytest.mark.parametrize(
    ("hidden", "dtype", "num_tokens", "expected"),
    [
        (512, torch.bfloat16, 128, 64),  # small either way
        (512, torch.float32, 128, 128),
        (1024, torch.bfloat16, 128, 128),
        (1024, torch.bfloat16, 100, 100),
        (1024, torch.bfloat16, 1000, 128),
        (2048, torch.bfloat16, 128, 64),
        (8192, torch.bfloat16, 128, 64),
    ],
)
def test_large_messages_of_a_prompt_stay_large(hidden: int, dtype: torch.dtype, num_tokens: int, expected: int) -> None:
    """Over slow connections nothing else is timed or compressed."""
    inputs = BlockInputs(
        hidden_states=torch.zeros(1, num_tokens, hidden, dtype=dtype), batch_size=1, seq_len=num_tokens
    )
    assert prompt_chunk_tokens(inputs, route(0, 0, throughput=0), ClientConfig()) == expected
