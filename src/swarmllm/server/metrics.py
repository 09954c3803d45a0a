"""Metrics for Prometheus (`--metrics_port`): how busy this server is, and how much it has done since its start.

`server` runs `serve_metrics` as one of its tasks. Nothing is counted here. Each request of Prometheus reads numbers
that the server's objects keep for other reasons anyway.
"""

import asyncio
import logging
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from swarmllm.data_structures import ServerInfo
from swarmllm.errors import ConfigurationError
from swarmllm.network.relay.service import RelayService
from swarmllm.network.wire.stream import traffic
from swarmllm.server.announcer import OwnRecord
from swarmllm.server.sessions.kv_cache import CacheBudget
from swarmllm.server.sessions.prefix_cache import PrefixCache
from swarmllm.server.sessions.session import SessionTable
from swarmllm.swarm.block_map import state_name

logger = logging.getLogger(__name__)


class ServerMetrics(Collector):
    """Turns the numbers of a running server into Prometheus' families of metrics."""

    def __init__(self, record: OwnRecord) -> None:
        self._record, self._access, self._device_thread = record, record.access, record.loader.device_thread

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics with their present values.

        Runs in a thread of the metrics' web server, at any time. This is safe because it only reads plain numbers.
        """
        info = self._record.describe()
        about = {
            "peer_id": info.peer_id,
            "public_name": info.public_name,
            "blocks": f"{info.start}:{info.end}",
            "state": state_name(info.state),
            "quant_type": info.quant_type,
            "activations": info.activations,
            "dtype": info.dtype,
            "version": info.version,
        }
        yield InfoMetricFamily("swarmllm_server", "Blocks and settings of this server.", value=about)
        for name, text, value in self._gauges(info):
            yield GaugeMetricFamily(f"swarmllm_server_{name}", text, value=value)
        for name, text, value in self._counters():
            yield CounterMetricFamily(f"swarmllm_server_{name}", text, value=value)
        if self._record.peer.relay is not None:
            yield from _of_relay(self._record.peer.relay)

    def _gauges(self, info: ServerInfo) -> Iterator[tuple[str, str, float]]:
        """(name, help, value) of each number that describes the present."""
        load, sessions, pages = self._device_thread.load, self._sessions, self._pages
        budget = CacheBudget(0) if sessions is None else sessions.budget
        yield "blocks", "Blocks served.", info.end - info.start
        yield "throughput_tokens_per_second", "Announced speed: tokens through the whole span.", info.throughput
        yield "streams", "Streams of clients and other servers.", self._access.limits.num_streams()
        yield "relayed_streams", "Streams through relays.", self._record.peer.num_relayed_streams
        yield "direct_streams", "Streams that don't pass libp2p's daemons.", self._record.peer.num_direct_streams
        yield "sessions", "Sessions with a KV cache.", 0 if sessions is None else len(sessions)
        yield "queued_calls", "Steps and requests that wait or are computed.", self._device_thread.num_calls
        yield "queue_ms", "Smoothed time that a step waits for its turn.", load.queue_ms
        thread = self._device_thread
        yield "step_ms_p50", "Time in which half of the last 512 decode steps were ready.", thread.step_ms_p50
        yield "step_ms_p95", "Time in which 95 % of the last 512 decode steps were ready.", thread.step_ms_p95
        yield "token_ms", "Median time between the steps of two tokens of a text.", thread.token_ms
        yield "batch_size", "Smoothed number of sessions in one forward.", load.batch_size
        yield "cache_bytes", "Bytes that sessions may lease for KV caches.", budget.offered_bytes
        yield "cache_leased_bytes", "Bytes that sessions have leased for KV caches.", budget.leased_bytes
        yield "prefix_cache_bytes", "Bytes of pages of shared prompts.", 0 if pages is None else pages.num_bytes

    def _counters(self) -> Iterator[tuple[str, str, float]]:
        """(name, help, value) of each number that only grows while the process runs."""
        load, pages = self._device_thread.load, self._pages
        yield "steps", "Steps of sessions.", load.num_steps
        yield "tokens", "Tokens in the steps of sessions.", load.num_tokens
        yield "failures", "Steps and requests that failed.", load.num_failures
        yield "forwards", "Forwards that computed steps of sessions.", load.num_forwards
        yield "reused_tokens", "Prompt tokens taken from shared pages.", 0 if pages is None else pages.num_reused_tokens
        yield "received_bytes", "Bytes from clients and other servers.", traffic.received_bytes
        yield "sent_bytes", "Bytes to clients and other servers.", traffic.sent_bytes

    @property
    def _sessions(self) -> SessionTable | None:
        serving = self._access.serving
        return None if serving is None else serving.sessions

    @property
    def _pages(self) -> PrefixCache | None:
        sessions = self._sessions
        return None if sessions is None else sessions.pages


def _of_relay(relay: RelayService) -> Iterator[Metric]:
    """Yield the metrics of the relay that this server runs for peers behind a NAT."""
    yield GaugeMetricFamily(
        "swarmllm_relay_reservations", "Peers that are reached through this relay.", value=relay.num_reservations
    )
    yield GaugeMetricFamily("swarmllm_relay_circuits", "Connections through this relay.", value=relay.num_circuits)
    yield CounterMetricFamily("swarmllm_relay_bytes", "Bytes that passed, both ways.", value=relay.num_bytes)
    yield CounterMetricFamily("swarmllm_relay_refusals", "Refused requests to this relay.", value=relay.num_refused)


async def serve_metrics(host: str, port: int | None, metrics: ServerMetrics) -> None:
    """Answer Prometheus until cancelled; without a port, do nothing.

    Raises:
        ConfigurationError: the port can't be opened, for example because another program uses it.
    """
    if port is None:
        return
    registry = CollectorRegistry(auto_describe=False)
    registry.register(metrics)
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        raise ConfigurationError(
            f"can't serve metrics on {host} port {port}: {error.strerror}; choose another --metrics_port or "
            "--metrics_host"
        ) from None
    logger.info("metrics are at http://%s:%d/metrics", host, server.server_port)
    try:
        await asyncio.Event().wait()
    finally:
        await asyncio.to_thread(server.shutdown)
        server.server_close()
        thread.join()
