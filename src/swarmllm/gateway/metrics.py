"""What `/metrics` shows: how requests fare, and what the swarm does to them. Names and units as Prometheus wants them.

Filled by `engine`, `generation`, `trace` and `swarm_watch`; the server's own are in `server/metrics`.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

MS_BUCKETS = (1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000, 2500, 5000, 10000, 30000, 60000, 120000)
MAX_PEERS = 1000
"""Peers with a histogram of their own; the one that was silent longest goes first, since peer ids are endless."""


class GatewayMetrics:
    """One gateway's; a registry of its own, so that several can live in one process."""

    content_type = "text/plain; version=0.0.4; charset=utf-8"

    def __init__(self) -> None:
        # Otherwise twice the lines, and Prometheus knows when it began to read.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            "swarmllm_gateway_requests", "Requests answered.", ["route", "status"], registry=registry
        )
        self.running = Gauge("swarmllm_gateway_generations_running", "Prompts being answered.", registry=registry)
        self.waiting = Gauge(
            "swarmllm_gateway_generations_waiting", "Prompts waiting for their turn.", registry=registry
        )
        self.cancelled = Counter(
            "swarmllm_gateway_cancelled", "Prompts given up because nobody listened any more.", registry=registry
        )
        self.prompt_tokens = Counter("swarmllm_gateway_prompt_tokens", "Tokens of prompts.", registry=registry)
        self.tokens = Counter("swarmllm_gateway_tokens", "Tokens written.", registry=registry)
        self.construct_ms = Histogram(
            "swarmllm_pipeline_construct_ms", "Finding and opening a route.", buckets=MS_BUCKETS, registry=registry
        )
        self.first_token_ms = Histogram(
            "swarmllm_first_token_ms", "From a prompt's turn to its first token.", buckets=MS_BUCKETS, registry=registry
        )
        self.tokens_per_s = Histogram(
            "swarmllm_tokens_per_second",
            "Of one prompt's answers, after the first token.",
            buckets=(1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512),
            registry=registry,
        )
        self.shard_latency_ms = Histogram(
            "swarmllm_shard_latency_ms", "A step on one server, its queue included.", ["peer_id"],
            buckets=MS_BUCKETS, registry=registry,
        )  # fmt: skip
        self.failovers = Counter("swarmllm_failovers", "Routes repaired in the middle of an answer.", registry=registry)
        self.fallbacks = Counter(
            "swarmllm_fallback_to_local", "Answers finished by the local model.", registry=registry
        )
        self.servers = Gauge("swarmllm_swarm_servers", "Servers of the model, by state.", ["state"], registry=registry)
        self.missing_blocks = Gauge("swarmllm_swarm_missing_blocks", "Blocks that nobody serves.", registry=registry)
        self._peers: OrderedDict[str, None] = OrderedDict()

    def observe_hop(self, peer_id: str, ms: float) -> None:
        """One step on that server."""
        if peer_id not in self._peers and len(self._peers) >= MAX_PEERS:
            oldest, _ = self._peers.popitem(last=False)
            self.shard_latency_ms.remove(oldest)
        self._peers[peer_id] = None
        self._peers.move_to_end(peer_id)
        self.shard_latency_ms.labels(peer_id).observe(ms)

    def read_from(self, counts: Callable[[], Mapping[str, int]]) -> None:
        """Show what the client counts: errors of the swarm by code, spot checks, wrong answers detected."""
        self.registry.register(_ClientCounts(counts))

    def page(self) -> bytes:
        """The text for Prometheus."""
        return generate_latest(self.registry)


class _ClientCounts(Collector):
    def __init__(self, counts: Callable[[], Mapping[str, int]]) -> None:
        self._counts = counts

    def collect(self) -> list[CounterMetricFamily]:
        counts = dict(self._counts())
        corrupt = counts.get("corrupt_activations", 0)
        detected = CounterMetricFamily(
            "swarmllm_shard_corruption_detected", "Answers of servers that can't be right.", value=corrupt
        )
        errors = CounterMetricFamily("swarmllm_swarm_errors", "Failures of the swarm, by code.", labels=["code"])
        for code, count in sorted(counts.items()):
            errors.add_metric([code], count)
        return [detected, errors]
