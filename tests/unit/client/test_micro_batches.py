"""Into what pieces a batch goes, and a prompt."""

import pytest

from swarmllm.client.batches.batch_runner import MICRO_BATCHES_PER_HOP, MIN_TOKENS, micro_batch_tokens
from swarmllm.client.session.chain import CHUNK_S, chunk_tokens
from swarmllm.config import ClientConfig
from swarmllm.data_structures import RouteHop, ServerInfo, Span


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
