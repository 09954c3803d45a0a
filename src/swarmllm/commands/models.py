"""`swarmllm models`: models of this machine and well-known ones of the hub; which of them fit, and about how fast.

The catalogue is `machines/catalogue`. The plan of each model (`swarm/planning`) is for this machine, or for the
machines of a swarm's servers. Nothing is downloaded, and no weights are read.
"""

import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from swarmllm.command_line import Parser, announced_imports, run_command
from swarmllm.commands.status import ModelStatus, look_up
from swarmllm.config import SwarmConfig, address_book_path, require_addresses, require_model_place
from swarmllm.data_structures import printable
from swarmllm.errors import ConfigurationError
from swarmllm.machines.catalogue import (
    AS_STORED,
    CPU_BLOCK_MS,
    GPU_BLOCK_MS,
    KNOWN,
    NEAR,
    Answer,
    Machines,
    answer,
    entries,
    this_machine,
)
from swarmllm.server.settings import memory_limit_bytes
from swarmllm.swarm.block_map import short_peer_id
from swarmllm.swarm.planning import Link, Machine

EXAMPLES = """examples:
  swarmllm models                            # what fits this machine
  swarmllm models --model ~/models org/name  # and of these
  swarmllm models --initial_peers ADDRESS    # what fits a swarm
"""
LEAST_READING = 0.25
"""Least share that reading weights must have in a server's time per block. With less, the blocks are too small to tell
the machine's speed."""
ASSUMED_BYTES_PER_S = 10e9
"""Stands in plans for the speed of such servers. The command shows no speeds then."""


@dataclass(frozen=True, kw_only=True)
class ModelsConfig(SwarmConfig):
    """The catalogue."""

    model: tuple[str, ...] = ()
    """More models to list: hub ids, GGUF files, or directories. A directory may hold several."""
    max_memory: str | None = None
    """Most memory to count on this machine. In GB, like 12, or a share, like 50%, as for a server. None = 80 % of the
    free memory."""
    json: bool = False
    """Print JSON, for programs."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_memory is not None:
            memory_limit_bytes(self.max_memory)
        for name in self.model:
            require_model_place(name)
        if self.initial_peers and self.max_memory is not None:
            raise ConfigurationError("--max_memory is for plans of this machine: leave it out for those of a swarm")


# --- machines


def machines_of_swarm(models: Sequence[ModelStatus], free_share: float) -> Machines:
    """The machines of a swarm's servers, as if they served nothing else.

    Their memory is the memory of their blocks and a share of the free memory that they announce. Servers that don't
    tell enough are left out. Two servers that were started apart on one machine count its free memory twice.
    """
    machines: dict[str, Machine] = {}
    shows_speed = True
    servers = [(status.record.block_bytes, server) for status in models for server in status.snapshot.servers]
    for block_bytes, server in servers:
        if not (block_bytes and server.memory_left_bytes and server.throughput and server.speed_share):
            continue
        held = int(block_bytes * _bits(server.quant_type) / _bits(AS_STORED))
        ms_per_block = GPU_BLOCK_MS if server.batch_tokens else CPU_BLOCK_MS  # CPUs announce no batch_tokens
        reading_ms = server.decode_ms_per_block - ms_per_block
        is_told = reading_ms > LEAST_READING * server.decode_ms_per_block
        shows_speed &= is_told
        machines[server.peer_id] = Machine(
            peer_id=server.peer_id,
            memory_bytes=int(server.memory_left_bytes * free_share) + held * len(server.span),
            bytes_per_s=held * 1e3 / reading_ms if is_told else ASSUMED_BYTES_PER_S,
            ms_per_block=ms_per_block,
        )
    links = {
        (server.peer_id, peer_id): Link(round_trip_ms=round_trip_ms)
        for _, server in servers
        for peer_id, round_trip_ms in server.round_trips
    }
    assumed = Link(round_trip_ms=statistics.median(link.round_trip_ms for link in links.values())) if links else NEAR
    names = {server.peer_id: server.public_name or short_peer_id(server.peer_id) for _, server in servers}
    left_out = len({server.peer_id for _, server in servers}) - len(machines)
    number = f"{len(machines)} machine{'' if len(machines) == 1 else 's'}"
    headline = f"{number} of the swarm, as if nothing else was served"
    headline += f"; {left_out} more don't tell their memory and speed" if left_out else ""
    headline += "" if shows_speed else "; some blocks are too small to tell a speed"
    return Machines(tuple(machines.values()), names, links, assumed, headline, shows_speed=shows_speed)


def _bits(quant_type: str) -> float:
    """Bits of a weight, about; for unknown formats of newer servers 8."""
    from swarmllm.models.quantization.rules import BITS, BLOCKS

    if quant_type in BLOCKS:
        _, weights, size = BLOCKS[quant_type]
        return 8 * size / weights
    return {"none": 16.0, "nf4": 4.25, **{name: bits + 0.5 for name, bits in BITS.items()}}.get(quant_type, 8.0)


def as_table(answers: Sequence[Answer], where: Machines) -> str:
    """The machines and the catalogue for people."""
    rows = [
        (
            printable(one.entry.name),
            "here" if one.entry.is_here else "hub",
            str(one.entry.sizes.num_blocks if one.entry.sizes else "-"),
            printable(one.as_text(where.names)),
        )
        for one in answers
    ]
    rows = [("model", "is", "blocks", "one text at a time"), *rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "\n".join([where.headline, "", *lines])


def build_parser() -> Parser:
    """A flag for each field of ModelsConfig."""
    parser = Parser(
        prog="swarmllm models", description="List models, and say which of them fit, and how fast.", epilog=EXAMPLES
    )
    parser.add_settings(ModelsConfig, [ModelsConfig, SwarmConfig], without=["identity_path", "lan_discovery"])
    return parser


async def find_machines(config: ModelsConfig) -> Machines:
    """The machines for which to plan.

    Raises:
        SwarmError: the swarm can't be reached, or this machine has less memory than it should offer.
    """
    if not config.initial_peers:
        return this_machine(config.max_memory)
    from swarmllm.network.p2p.block_directory import BlockDirectory
    from swarmllm.network.p2p.peer import Peer
    from swarmllm.server.device.device import FREE_SHARE

    joining = Peer.create(initial_peers=config.initial_peers, client_mode=True, address_book=address_book_path())
    async with await joining as peer:
        models = await look_up(BlockDirectory(peer, config.swarm_name))
    return machines_of_swarm(models, FREE_SHARE)


async def show_models(config: ModelsConfig) -> None:
    """Print the catalogue.

    Raises:
        SwarmError: as `find_machines`.
    """
    with announced_imports():
        import swarmllm.server.device.throughput  # noqa: F401 - torch, and all else that is used below
        from swarmllm.network.p2p.discovery import find_swarm_here
    where = await find_machines(config)
    answers = [answer(entry, where) for entry in entries(config.model)]
    if config.json:
        known = json.loads(KNOWN.read_text())
        about = {"machines": where.headline, "known_models": {key: known[key] for key in ("source", "date")}}
        print(json.dumps({**about, "models": [one.as_json(where.names) for one in answers]}, indent=2))
    else:
        print(as_table(answers, where))
        if not config.initial_peers and (here := await find_swarm_here()) is not None:
            print(
                f"\nThis is for this machine alone. It is in the swarm {here.name}: the page that `swarmllm use` shows "
                "plans for all of its machines together."
            )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return the exit code."""

    async def run() -> None:
        config = ModelsConfig(**build_parser().parse_settings(argv))
        require_addresses(config.initial_peers)
        await show_models(config)

    return run_command(run, default_log_level="WARNING")


if __name__ == "__main__":
    sys.exit(main())
