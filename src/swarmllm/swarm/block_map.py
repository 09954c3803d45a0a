"""A swarm as plain text: one line per server with a drawing of its blocks; a route in words and numbers.

    ████····  …Xc81p3  desk    0:4  online  …
    ····████  …p7aQ4z  laptop  4:8  online  …

Used by `swarmllm status`, the demo and `model.swarm.route()`, which explains the cost of each hop and whether a server
alone would be faster. Servers' texts are shown without control characters.
"""

import shutil
import statistics
import sys
from collections.abc import Container, Sequence

from swarmllm.data_structures import RouteHop, ServerInfo, ServerState, SwarmSnapshot
from swarmllm.errors import MissingBlocksError
from swarmllm.swarm.claims import agreed_digests, contradicts
from swarmllm.swarm.route_costs import RouteCosts
from swarmllm.swarm.routing import find_route, route_cost_ms
from swarmllm.swarm.stacks import describe_blocks, describe_span, stack_spans

MAX_MAP_COLUMNS = 64
"""Longest drawing. For more blocks, each character stands for several, so that a line fits a terminal."""
HELD, PARTLY_HELD, NOT_HELD, BETWEEN_STACKS = "█", "▒", "·", "│"
COLUMNS = (
    "", "peer", "name", "blocks", "state", "tokens/s", "ms/token", "seen ms", "p95 ms", "served", "failed", "cache",
    "weights", "version", "hardware",
)  # fmt: skip
OPTIONAL = ("name", "hardware")
"""Columns that are left out if no server has a value."""
LEAST_NEEDED = (
    "version", "hardware", "p95 ms", "cache", "failed", "served", "weights", "seen ms", "ms/token", "name", "tokens/s",
)  # fmt: skip
"""Columns to drop on a narrow terminal, in this order."""


def draw_blocks(held: Container[int], num_blocks: int, encoder_blocks: int = 0) -> str:
    """Draw one character per block, or per group of blocks if there are many, with a line between the stacks."""
    per_column = -(-num_blocks // MAX_MAP_COLUMNS)
    return BETWEEN_STACKS.join(
        "".join(
            _column(held, range(first, min(first + per_column, stack.end)))
            for first in range(stack.start, stack.end, per_column)
        )
        for _, stack in stack_spans(num_blocks, encoder_blocks)
    )


def _column(held: Container[int], group: range) -> str:
    num_held = sum(block in held for block in group)
    return HELD if num_held == len(group) else PARTLY_HELD if num_held else NOT_HELD


def terminal_width() -> int | None:
    """Width of the terminal in columns; None: standard output is no terminal, and lines may have any length."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def describe_swarm(snapshot: SwarmSnapshot, width: int | None = None) -> list[str]:
    """The lines of the table: its head, each server by its first block, and the total.

    Lines longer than `width` lose columns, and the last line names these.
    """
    servers = sorted(snapshot.servers, key=lambda server: (server.start, server.end, server.peer_id))
    rows = [COLUMNS, *(_row(server, snapshot) for server in servers)]
    columns, left_out = _fitting(_told(list(zip(*rows, strict=True))), width)
    rows = list(zip(*columns, strict=True))
    if snapshot.missing_blocks():
        together = set(range(snapshot.num_blocks)).difference(snapshot.missing_blocks())
        drawn = draw_blocks(together, snapshot.num_blocks, snapshot.encoder_blocks)
        rows.append((drawn, "all that are online", *[""] * (len(rows[0]) - 2)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(room) for cell, room in zip(row, widths, strict=True)).rstrip() for row in rows]
    return [*lines, f"a wider terminal also shows: {', '.join(left_out)}"] if left_out else lines


def describe_coverage(snapshot: SwarmSnapshot) -> str:
    """Say whether the model can be used, how fast, why, and what is missing.

    Without round trips, which only a client of the swarm measures.
    """
    missing = snapshot.missing_blocks()
    if missing:
        return f"missing: nobody serves {describe_blocks(missing, snapshot.encoder_blocks)}"
    try:
        route = find_route(snapshot)
    except MissingBlocksError as error:
        return f"missing: {error}"
    num_servers = len(route)
    explained = explain_route(route, snapshot, RouteCosts())
    headline = (
        f"all {snapshot.num_blocks} blocks are served; best route: "
        f"{num_servers} server{'s' if num_servers > 1 else ''}, about {explained.expected_ms:.1f} ms per token"
    )
    if seen_ms := seen_ms_per_token(route):
        headline += f"; recent texts took {seen_ms:.1f} ms, with the network and their clients' own work"
    return "\n  ".join([headline, *explained.explanation])


def seen_ms_per_token(route: Sequence[RouteHop]) -> float:
    """Median of the times from token to token that servers of the route have seen; 0: they have seen none."""
    seen = [hop.server.token_ms for hop in route if hop.server.token_ms]
    return statistics.median(seen) if seen else 0.0


def describe_adapters(snapshot: SwarmSnapshot) -> list[str]:
    """A line for each adapter that servers offer: on all blocks, or which blocks lack it."""
    held: dict[str, set[int]] = {}
    for server in snapshot.online():
        for name in server.adapters:
            held.setdefault(name, set()).update(server.span)
    lines = []
    for name, blocks in sorted(held.items()):
        missing = [block for block in range(snapshot.num_blocks) if block not in blocks]
        lines.append(
            f"adapter {name}: "
            + (f"not on {describe_blocks(missing, snapshot.encoder_blocks)}" if missing else "complete")
        )
    return lines


def describe_different_weights(snapshot: SwarmSnapshot) -> list[str]:
    """A line for each server whose weights differ from those of most servers."""
    chosen = agreed_digests(snapshot.online())
    others = {server.peer_id: contradicts(server.digests(), chosen) for server in snapshot.online()}
    return [
        f"weights differ: {short_peer_id(peer_id)} made {describe_blocks(blocks, snapshot.encoder_blocks)} of other "
        "files than most servers, so no client uses both: compare the files, or name it in blocked_servers"
        for peer_id, blocks in others.items()
        if blocks
    ]


def describe_shared_identities(snapshot: SwarmSnapshot) -> list[str]:
    """A line for each server that has seen another process with its peer id."""
    return [
        f"identity used twice: {short_peer_id(server.peer_id)} is the peer id of several processes, which take each "
        "other's place: give each an --identity_path of its own"
        for server in snapshot.servers
        if server.identity_shared
    ]


def describe_machines(snapshot: SwarmSnapshot) -> list[str]:
    """A line for each machine with several servers, as they announce it."""
    machines: dict[str, list[str]] = {}
    for server in sorted(snapshot.servers, key=lambda server: (server.start, server.peer_id)):
        if server.machine:
            machines.setdefault(server.machine, []).append(short_peer_id(server.peer_id))
    return [f"one machine: {', '.join(peers)}" for peers in machines.values() if len(peers) > 1]


def short_peer_id(peer_id: str) -> str:
    """The end of a peer id, because all begin alike."""
    return f"…{peer_id[-6:]}"


def state_name(state: int) -> str:
    """Name of a state; for unknown states of newer servers their number."""
    return ServerState(state).name.lower() if state in list(ServerState) else f"state {state}"


def _state(server: ServerInfo) -> str:
    """The state, relayed peers, and how far the server gives way to its owner's programs."""
    name = state_name(server.state) + (", relayed" if server.relayed else "")
    if server.relays_for:
        name += f", relays for {server.relays_for}"
    if server.wake_s:
        return f"{name}, wakes in {server.wake_s:.0f} s"
    if server.speed_share == 1 or server.state != ServerState.ONLINE:
        return name
    return f"{name} at {server.speed_share:.0%}" if server.speed_share else f"{name}, paused"


def _row(server: ServerInfo, snapshot: SwarmSnapshot) -> Sequence[str]:
    measured = server.throughput > 0
    return (
        draw_blocks(server.span, snapshot.num_blocks, snapshot.encoder_blocks),
        short_peer_id(server.peer_id),
        server.public_name,
        describe_span(server.start, server.end, snapshot.encoder_blocks),
        _state(server),
        f"{server.throughput:.0f}" if measured else "-",
        f"{server.decode_ms_per_block * len(server.span):.1f}" if measured else "-",
        f"{server.step_ms_p50:.1f}" if server.step_ms_p50 else "-",
        f"{server.step_ms_p95:.1f}" if server.step_ms_p95 else "-",
        str(server.tokens_served),
        str(server.failures_seen),
        str(server.cache_tokens_left) if measured else "-",
        server.dtype if server.quant_type == "none" else server.quant_type,
        server.version,
        server.hardware,
    )


def _told(columns: Sequence[Sequence[str]]) -> list[Sequence[str]]:
    """The columns without optional ones that have no values."""
    return [column for column in columns if column[0] not in OPTIONAL or any(column[1:])]


def _fitting(columns: Sequence[Sequence[str]], width: int | None) -> tuple[list[Sequence[str]], list[str]]:
    """The columns that fit into `width`, and the heads of dropped ones."""
    kept, left_out = list(columns), []
    for head in LEAST_NEEDED:
        if width is None or sum(max(map(len, column)) + 2 for column in kept) - 2 <= width:
            break
        if head in (heads := [column[0] for column in kept]):
            del kept[heads.index(head)]
            left_out.append(head)
    return kept, left_out


class Route(list[RouteHop]):
    """The hops of a route and their expected costs. `print()` explains them."""

    def __init__(self, hops: Sequence[RouteHop], explanation: Sequence[str], expected_ms: float) -> None:
        super().__init__(hops)
        self.explanation = tuple(explanation)
        self.expected_ms = expected_ms
        """Expected milliseconds of one decode step."""

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
    """Explain the expected time of a route through all blocks.

    Args:
        here_ms: time of a step on the asker's own machine; None: it can't hold the blocks, or nobody knows.
        head_ms: time that the asker itself takes, for the model's head.
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
    """`0:4`, with the stack's name if there are two."""
    of_stack = snapshot.encoder_blocks
    return describe_span(hop.span.start, hop.span.end, of_stack) if of_stack else str(hop.span)


def _faster_alone(route: Sequence[RouteHop], snapshot: SwarmSnapshot, costs: RouteCosts) -> list[str]:
    """A line about a server that would beat the route if it held all blocks."""
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
