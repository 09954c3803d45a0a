"""The figures of `/metrics`, about requests and about the swarm. Names and units follow Prometheus.

`engine`, `generation` and `monitor` fill them in; servers have their own in `server/metrics`.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

MS_BUCKETS = (1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000, 2500, 5000, 10000, 30000, 60000, 120000)
MAX_PEERS = 1000
"""Most peers with a histogram of their own. Peer ids are endless, so the one that was silent longest is dropped."""


class _Speed:
    """Times and speeds of requests."""

    def __init__(self, registry: CollectorRegistry) -> None:
        histogram = partial(Histogram, registry=registry)
        in_ms = partial(histogram, buckets=MS_BUCKETS)
        self.construct_ms = in_ms("swarmllm_pipeline_construct_ms", "Finding and opening a route.")
        self.first_token_ms = in_ms("swarmllm_first_token_ms", "From a prompt's turn to its first token.")
        self.tokens_per_s = histogram(
            "swarmllm_tokens_per_second",
            "Of one prompt's answers, after the first token.",
            buckets=(1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512),
        )
        self._shard_latency_ms = in_ms(
            "swarmllm_shard_latency_ms", "A step on one server, its queue included.", ["peer_id"]
        )
        self._peers: OrderedDict[str, None] = OrderedDict()

    def observe_hop(self, peer_id: str, ms: float) -> None:
        """Count one step on that server."""
        if peer_id not in self._peers and len(self._peers) >= MAX_PEERS:
            oldest, _ = self._peers.popitem(last=False)
            self._shard_latency_ms.remove(oldest)
        self._peers[peer_id] = None
        self._peers.move_to_end(peer_id)
        self._shard_latency_ms.labels(peer_id).observe(ms)


class _OfSwarm:
    """Repairs of routes, and the servers that are there."""

    def __init__(self, registry: CollectorRegistry) -> None:
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        self.failovers = counter("swarmllm_failovers", "Routes repaired in the middle of an answer.")
        self.fallbacks = counter("swarmllm_fallback_to_local", "Answers finished by the local model.")
        self.servers = gauge("swarmllm_swarm_servers", "Servers of a model, by state.", ["model", "state"])
        self.missing_blocks = gauge("swarmllm_swarm_missing_blocks", "Blocks without a server.", ["model"])

    def forget(self, model: str) -> None:
        """Show a model no longer."""
        self.missing_blocks.remove_by_labels({"model": model})
        self.servers.remove_by_labels({"model": model})


class GatewayMetrics:
    """The figures of one gateway. Its registry is its own, so several gateways can live in one process."""

    content_type = "text/plain; version=0.0.4; charset=utf-8"

    def __init__(self) -> None:
        # They would double the lines, and Prometheus knows when it began to read.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        counter, gauge = partial(Counter, registry=self.registry), partial(Gauge, registry=self.registry)
        self.requests = counter("swarmllm_gateway_requests", "Requests answered.", ["route", "status"])
        self.running = gauge("swarmllm_gateway_generations_running", "Prompts being answered.")
        self.waiting = gauge("swarmllm_gateway_generations_waiting", "Prompts waiting for their turn.")
        self.cancelled = counter("swarmllm_gateway_cancelled", "Prompts cancelled because the client had gone.")
        self.prompt_tokens = counter("swarmllm_gateway_prompt_tokens", "Tokens of prompts.")
        self.tokens = counter("swarmllm_gateway_tokens", "Tokens written.")
        self.speed, self.swarm = _Speed(self.registry), _OfSwarm(self.registry)

    def read_from(self, counts: Callable[[], Mapping[str, int]]) -> None:
        """Also show the clients' own counts: errors of the swarm by code, spot checks, wrong answers detected."""
        self.registry.register(_ClientCounts(counts))

    def page(self) -> bytes:
        """The page for Prometheus."""
        return generate_latest(self.registry)


class _ClientCounts(Collector):
    def __init__(self, counts: Callable[[], Mapping[str, int]]) -> None:
        self._counts = counts

    def collect(self) -> list[CounterMetricFamily]:
        counts = dict(self._counts())
        corrupt = counts.get("corrupt_activations", 0)
        detected = CounterMetricFamily("swarmllm_shard_corruption_detected", "Wrong answers of servers.", value=corrupt)
        errors = CounterMetricFamily("swarmllm_swarm_errors", "Failures of the swarm, by code.", labels=["code"])
        for code, count in sorted(counts.items()):
            errors.add_metric([code], count)
        return [detected, errors]
