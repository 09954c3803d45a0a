"""What a server with `--metrics_port` tells Prometheus: how busy it is and what it has done, read when it is asked.

`server/server` runs `serve_metrics` as one of its tasks. Counting costs nothing: the numbers are kept anyway.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from swarmllm.data_structures import ServerInfo
from swarmllm.errors import BlocksNotServedError, ConfigurationError
from swarmllm.network.stream import traffic
from swarmllm.server.executor import Executor
from swarmllm.server.handler import StreamHandler
from swarmllm.server.kv_cache import CacheBudget
from swarmllm.server.prefix_cache import PrefixCache
from swarmllm.swarm.block_map import state_name

logger = logging.getLogger(__name__)


class ServerMetrics(Collector):
    """Reads a running server; `describe` gives what it announces, `budget` its cache's."""

    def __init__(
        self,
        handler: StreamHandler,
        executor: Executor,
        describe: Callable[[], ServerInfo],
        budget: Callable[[], CacheBudget],
    ) -> None:
        self._handler = handler
        self._executor = executor
        self._describe = describe
        self._budget = budget

    def collect(self) -> Iterator[Metric]:
        """Called in a thread of its own; reads plain numbers only."""
        info, load, budget = self._describe(), self._executor.load, self._budget()
        about = {
            "peer_id": info.peer_id,
            "public_name": info.public_name,
            "blocks": f"{info.start}:{info.end}",
            "state": state_name(info.state),
            "quant_type": info.quant_type,
            "dtype": info.dtype,
            "version": info.version,
        }
        pages = self._prefixes()
        yield InfoMetricFamily("swarmllm_server", "What this server serves.", value=about)
        for name, text, value in (
            ("blocks", "Blocks served.", info.end - info.start),
            ("throughput_tokens_per_second", "Announced: tokens through the whole span.", info.throughput),
            ("streams", "Streams of clients and other servers.", self._handler.limits.num_streams()),
            ("sessions", "Sessions with a KV cache.", self._num_sessions()),
            ("queued_calls", "Steps and batches that wait or are computed.", self._executor.num_calls),
            ("queue_ms", "Smoothed time that a step waits for its turn.", load.queue_ms),
            ("batch_size", "Smoothed number of sessions in one forward.", load.batch_size),
            ("cache_bytes", "Room for KV caches.", budget.offered_bytes),
            ("cache_leased_bytes", "Of it, set aside for sessions.", budget.leased_bytes),
            ("prefix_cache_bytes", "Pages of prompts, kept for others.", 0 if pages is None else pages.num_bytes),
        ):
            yield GaugeMetricFamily(f"swarmllm_server_{name}", text, value=value)
        for name, text, value in (
            ("steps", "Steps of sessions.", load.num_steps),
            ("tokens", "Tokens of those steps.", load.num_tokens),
            ("forwards", "Forwards in which they were computed.", load.num_forwards),
            ("reused_tokens", "Not computed: known prompts.", 0 if pages is None else pages.num_reused_tokens),
            ("received_bytes", "From clients and other servers.", traffic.received_bytes),
            ("sent_bytes", "To clients and other servers.", traffic.sent_bytes),
        ):
            yield CounterMetricFamily(f"swarmllm_server_{name}", text, value=value)

    def _num_sessions(self) -> int:
        try:
            return len(self._handler.sessions)
        except BlocksNotServedError:
            return 0

    def _prefixes(self) -> PrefixCache | None:
        try:
            return self._handler.sessions.pages
        except BlocksNotServedError:
            return None


async def serve_metrics(host: str, port: int | None, metrics: ServerMetrics) -> None:
    """Answer Prometheus until cancelled; None = don't.

    Raises:
        ConfigurationError: the port can't be had.
    """
    if port is None:
        return
    registry = CollectorRegistry(auto_describe=False)
    registry.register(metrics)
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        raise ConfigurationError(f"can't serve metrics on {host} port {port}: {error}") from None
    logger.info("metrics are at http://%s:%d/metrics", host, server.server_port)
    try:
        await asyncio.Event().wait()
    finally:
        await asyncio.to_thread(server.shutdown)
        server.server_close()
        thread.join()
