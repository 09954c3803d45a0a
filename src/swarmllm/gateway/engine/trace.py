"""Where the time of one request went: hop by hop, for `X-Swarm-Trace`, the chat page's route line and the metrics."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from swarmllm.data_structures import RouteHop, Span
from swarmllm.gateway.metrics import GatewayMetrics
from swarmllm.network.wire.messages import Timings


@dataclass
class _HopTimes:
    hop: RouteHop
    num_steps: int = 0
    queue_us: int = 0
    compute_us: int = 0
    max_us: int = 0


@dataclass
class Trace:
    """Filled by `generation`: from its worker thread, and `on_route` from the client's event loop."""

    metrics: GatewayMetrics
    began_at: float = field(default_factory=time.monotonic)
    construct_s: float | None = None
    """Time for the first route: finding it, dialling its servers, opening sessions."""
    first_token_s: float | None = None
    num_repairs: int = 0
    num_tokens: int = 0
    _route: Sequence[RouteHop] = ()
    _hops: dict[tuple[str, Span], _HopTimes] = field(default_factory=dict)
    _by_start: dict[int, _HopTimes] = field(default_factory=dict)
    """Those of the route, by their first block."""
    _steps_s: float = 0.0
    _last_at: float = 0.0

    def on_route(self, route: Sequence[RouteHop], seconds: float) -> bool:
        """A route has been opened (False) or repaired (True)."""
        self._route = route
        self._by_start = {
            hop.span.start: self._hops.setdefault((hop.server.peer_id, hop.span), _HopTimes(hop)) for hop in route
        }
        if self.construct_s is None:
            self.construct_s = seconds
            self.metrics.speed.construct_ms.observe(1000 * seconds)
            return False
        self.num_repairs += 1
        self.metrics.swarm.failovers.inc()
        return True

    def on_step(self, timings: Timings, num_tokens: int) -> None:
        """A step has come back, and that many tokens with it."""
        now = time.monotonic()
        if self.first_token_s is None:
            self.first_token_s = now - self.began_at
            self.metrics.speed.first_token_ms.observe(1000 * self.first_token_s)
        else:
            self._steps_s += now - self._last_at
        self._last_at = now
        self.num_tokens += num_tokens
        self.metrics.tokens.inc(num_tokens)
        for start, queue_us, compute_us in timings:
            times = self._by_start.get(start)
            if times is None:
                continue
            times.num_steps += 1
            times.queue_us += queue_us
            times.compute_us += compute_us
            times.max_us = max(times.max_us, queue_us + compute_us)
            self.metrics.speed.observe_hop(times.hop.server.peer_id, (queue_us + compute_us) / 1000)

    @property
    def tokens_per_s(self) -> float | None:
        """After the first token; None with fewer than two."""
        return (self.num_tokens - 1) / self._steps_s if self.num_tokens > 1 and self._steps_s else None

    def as_json(self) -> dict[str, Any]:
        """Milliseconds, rounded; per hop the means of its steps."""
        hops = [
            {
                "peer_id": times.hop.server.peer_id,
                "blocks": [times.hop.span.start, times.hop.span.end],
                "num_steps": times.num_steps,
                "queue_ms": round(times.queue_us / times.num_steps / 1000, 3),
                "compute_ms": round(times.compute_us / times.num_steps / 1000, 3),
                "max_ms": round(times.max_us / 1000, 3),
            }
            for times in self._hops.values()
            if times.num_steps
        ]
        return {
            "pipeline_construct_ms": _ms(self.construct_s),
            "first_token_ms": _ms(self.first_token_s),
            "tokens_per_s": None if self.tokens_per_s is None else round(self.tokens_per_s, 2),
            "failovers": self.num_repairs,
            "route": describe_route(self._route),
            "hops": hops,
        }


def describe_route(route: Sequence[RouteHop]) -> list[dict[str, Any]]:
    """For JSON."""
    return [
        {
            "peer_id": hop.server.peer_id,
            "public_name": hop.server.public_name,
            "blocks": [hop.span.start, hop.span.end],
        }
        for hop in route
    ]


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1000 * seconds, 3)
