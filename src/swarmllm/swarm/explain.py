"""A route in words and numbers: what each hop costs, why, and who would be faster alone.

Used by `model.swarm.route()` and by `swarmllm status`.
"""

from collections.abc import Sequence

from swarmllm.data_structures import RouteHop, SwarmSnapshot
from swarmllm.swarm.route_costs import RouteCosts
from swarmllm.swarm.routing import route_cost_ms
from swarmllm.swarm.stacks import describe_span


class Route(list[RouteHop]):
    """The hops, with their expected costs; `print()` tells why."""

    def __init__(self, hops: Sequence[RouteHop], explanation: Sequence[str], expected_ms: float) -> None:
        super().__init__(hops)
        self.explanation = tuple(explanation)
        self.expected_ms = expected_ms
        """Milliseconds of one decode step."""

    def __str__(self) -> str:
        return "\n".join(self.explanation)


def explain_route(
    route: Sequence[RouteHop],
    snapshot: SwarmSnapshot,
    costs: RouteCosts,
    *,
    here_ms: float | None = None,
    head_ms: float = 0.0,
) -> Route:
    """Say what is expected of a route through all blocks.

    Args:
        here_ms: what a step would take on the asker's own machine; None: it can't hold the blocks, or nobody knows.
        head_ms: what the asker takes itself, for the head of the model.
    """
    of_hops = costs.of_hops(route)
    network_ms, queue_ms = sum(hop.network_ms for hop in of_hops), sum(hop.queue_ms for hop in of_hops)
    compute_ms = sum(hop.compute_ms for hop in of_hops)
    total_ms = network_ms + queue_ms + compute_ms + head_ms
    lines = [_in_numbers(f"{total_ms:.1f} ms per token", network_ms, queue_ms, compute_ms)]
    lines[0] += f", this client's head {head_ms:.1f} ms" if head_ms else ""
    if len(route) > 1:
        lines += [
            _in_numbers(
                f"  {_blocks_of(hop, snapshot)} …{hop.server.peer_id[-6:]}",
                cost.network_ms,
                cost.queue_ms,
                cost.compute_ms,
            )
            for hop, cost in zip(route, of_hops, strict=True)
        ]
    lines += _faster_alone(route, snapshot, costs)
    if here_ms is not None and here_ms + head_ms < total_ms:
        lines.append(
            f"this machine alone would take about {here_ms + head_ms:.1f} ms: it has the memory to hold all blocks"
        )
    return Route(route, lines, total_ms)


def _in_numbers(what: str, network_ms: float, queue_ms: float, compute_ms: float) -> str:
    return f"{what}: network {network_ms:.1f} ms, queue {queue_ms:.1f} ms, computing {compute_ms:.1f} ms"


def _blocks_of(hop: RouteHop, snapshot: SwarmSnapshot) -> str:
    """`0:4`, or of which stack they are."""
    of_stack = snapshot.encoder_blocks
    return describe_span(hop.span.start, hop.span.end, of_stack) if of_stack else str(hop.span)


def _faster_alone(route: Sequence[RouteHop], snapshot: SwarmSnapshot, costs: RouteCosts) -> list[str]:
    """A line about the server that would beat the route if it held all blocks."""
    route_ms = route_cost_ms(route, costs)
    lines = []
    candidates = [(costs.alone_ms(server, snapshot.num_blocks), server) for server in snapshot.online()]
    if candidates:
        best_ms, best = min(candidates, key=lambda pair: pair[0])
        if best_ms < route_ms and len(best.span) < snapshot.num_blocks:
            lines.append(
                f"server …{best.peer_id[-6:]} alone would take about {best_ms:.1f} ms if it held all "
                f"{snapshot.num_blocks} blocks (it holds {best.span})"
            )
    return lines
