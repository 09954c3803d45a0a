"""A swarm as plain text: one line per server, and which blocks it holds, drawn.

    ████····  …Xc81p3  0:4  online  …
    ····████  …p7aQ4z  4:8  online  …

Used by `swarmllm status` and the demo. Everything that servers announce is shown without control characters.
"""

from collections.abc import Container, Sequence

from swarmllm.data_structures import ServerInfo, ServerState, SwarmSnapshot
from swarmllm.errors import MissingBlocksError
from swarmllm.swarm.explain import explain_route
from swarmllm.swarm.route_costs import RouteCosts
from swarmllm.swarm.routing import describe_blocks, find_route
from swarmllm.swarm.weights import agreed_digests, contradicts

MAX_MAP_COLUMNS = 64
"""A map of more blocks than this shows several per column, so that a line fits a terminal."""
HELD, PARTLY_HELD, NOT_HELD = "█", "▒", "·"
COLUMNS = (
    *(
        "",
        "peer",
        "blocks",
        "state",
        "tokens/s",
        "ms/token",
        "p95 ms",
        "served",
        "failed",
        "cache",
        "weights",
        "version",
    ),
    "name",
)


def draw_blocks(held: Container[int], num_blocks: int) -> str:
    """One character per block, or per group of blocks if there are many."""
    per_column = -(-num_blocks // MAX_MAP_COLUMNS)
    drawn = []
    for first in range(0, num_blocks, per_column):
        group = range(first, min(first + per_column, num_blocks))
        num_held = sum(block in held for block in group)
        drawn.append(HELD if num_held == len(group) else PARTLY_HELD if num_held else NOT_HELD)
    return "".join(drawn)


def describe_swarm(snapshot: SwarmSnapshot) -> list[str]:
    """The lines of the table: its head, each server by its first block, and what all of them together hold."""
    servers = sorted(snapshot.servers, key=lambda server: (server.start, server.end, server.peer_id))
    rows = [COLUMNS, *(_row(server, snapshot.num_blocks) for server in servers)]
    if not any(server.public_name for server in servers):
        rows = [row[:-1] for row in rows]
    if snapshot.missing_blocks():
        together = set(range(snapshot.num_blocks)).difference(snapshot.missing_blocks())
        rows.append((draw_blocks(together, snapshot.num_blocks), "all that are online", *[""] * (len(rows[0]) - 2)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def describe_coverage(snapshot: SwarmSnapshot) -> str:
    """Say in words whether the model can be used, how fast and why, and what is missing.

    Without the round trips, which only a client that uses the swarm measures.
    """
    missing = snapshot.missing_blocks()
    if missing:
        return f"missing: nobody serves {describe_blocks(missing)}"
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
    return "\n  ".join([headline, *explained.explanation])


def describe_adapters(snapshot: SwarmSnapshot) -> list[str]:
    """A line for each adapter that servers offer: on all blocks, or which are missing."""
    held: dict[str, set[int]] = {}
    for server in snapshot.online():
        for name in server.adapters:
            held.setdefault(name, set()).update(server.span)
    lines = []
    for name, blocks in sorted(held.items()):
        missing = [block for block in range(snapshot.num_blocks) if block not in blocks]
        lines.append(f"adapter {name}: " + (f"not on {describe_blocks(missing)}" if missing else "complete"))
    return lines


def describe_different_weights(snapshot: SwarmSnapshot) -> list[str]:
    """A line for each server whose blocks are made of other weights than those of most."""
    chosen = agreed_digests(snapshot.online())
    others = {server.peer_id: contradicts(server.digests(), chosen) for server in snapshot.online()}
    return [
        f"weights differ: {short_peer_id(peer_id)} made {describe_blocks(blocks)} of other files than most servers, so "
        "no client uses both: compare the files, or name it in blocked_servers"
        for peer_id, blocks in others.items()
        if blocks
    ]


def describe_machines(snapshot: SwarmSnapshot) -> list[str]:
    """A line for each machine with a server for each of several devices, as they say."""
    machines: dict[str, list[str]] = {}
    for server in sorted(snapshot.servers, key=lambda server: (server.start, server.peer_id)):
        if server.machine:
            machines.setdefault(server.machine, []).append(short_peer_id(server.peer_id))
    return [f"one machine: {', '.join(peers)}" for peers in machines.values() if len(peers) > 1]


def short_peer_id(peer_id: str) -> str:
    """The end of a peer id, which tells peers apart; they all begin alike."""
    return f"…{peer_id[-6:]}"


def state_name(state: int) -> str:
    """`online`, or what a newer server may call itself by number."""
    return ServerState(state).name.lower() if state in list(ServerState) else f"state {state}"


def _state(server: ServerInfo) -> str:
    """The state, what the server does for others, and how far it gives way to its owner's programs."""
    name = state_name(server.state) + (", relayed" if server.relayed else "")
    if server.relays_for:
        name += f", relays for {server.relays_for}"
    if server.wake_s:
        return f"{name}, wakes in {server.wake_s:.0f} s"
    if server.speed_share == 1 or server.state != ServerState.ONLINE:
        return name
    return f"{name} at {server.speed_share:.0%}" if server.speed_share else f"{name}, paused"


def _row(server: ServerInfo, num_blocks: int) -> Sequence[str]:
    measured = server.throughput > 0
    return (
        draw_blocks(server.span, num_blocks),
        short_peer_id(server.peer_id),
        f"{server.start}:{server.end}",
        _state(server),
        f"{server.throughput:.0f}" if measured else "-",
        f"{server.decode_ms_per_block * len(server.span):.1f}" if measured else "-",
        f"{server.step_ms_p95:.1f}" if server.step_ms_p95 else "-",
        str(server.tokens_served),
        str(server.failures_seen),
        str(server.cache_tokens_left) if measured else "-",
        server.dtype if server.quant_type == "none" else server.quant_type,
        server.version,
        server.public_name,
    )
