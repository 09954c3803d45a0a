"""`swarmllm status`: who serves what in a swarm, how fast, and what is missing; as a table or as JSON."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from swarmllm.command_line import Parser, add_initial_peers_flags, run_command
from swarmllm.config import ClientConfig
from swarmllm.data_structures import ModelRecord, SwarmSnapshot
from swarmllm.errors import ConfigurationError, MissingBlocksError
from swarmllm.swarm.block_map import describe_adapters, describe_coverage, describe_swarm, state_name
from swarmllm.swarm.routing import find_route, route_cost_ms

if TYPE_CHECKING:
    from swarmllm.network.block_directory import BlockDirectory

EXAMPLES = """examples:
  swarmllm status --initial_peers /ip4/…/tcp/…/p2p/…
  swarmllm status --model bigscience/bloom --json
"""


@dataclass(frozen=True)
class ModelStatus:
    """One checkpoint of the swarm and its servers."""

    record: ModelRecord
    snapshot: SwarmSnapshot

    def as_text(self) -> str:
        """A headline, the table of servers, and what that means for users."""
        return "\n".join(
            [
                f"{self.record.name} (fingerprint {self.record.fingerprint[:12]})",
                *(f"  {line}" for line in describe_swarm(self.snapshot)),
                f"  {describe_coverage(self.snapshot)}",
                *(f"  {line}" for line in describe_adapters(self.snapshot)),
            ]
        )

    def as_json(self) -> dict[str, Any]:
        """What is announced, and `missing_blocks` and `expected_ms_per_token` (null: it can't be used)."""
        try:
            expected_ms = round(route_cost_ms(find_route(self.snapshot)), 3)
        except MissingBlocksError:
            expected_ms = None
        return {
            **self.record.model_dump(mode="json"),
            "missing_blocks": list(self.snapshot.missing_blocks()),
            "expected_ms_per_token": expected_ms,
            "servers": [
                {**server.model_dump(mode="json"), "state": state_name(server.state)}
                for server in self.snapshot.servers
            ],
        }


async def look_up(directory: "BlockDirectory", name: str | None = None) -> list[ModelStatus]:
    """All models of the swarm, or those called `name` (a path or hub id may be shortened to its last part).

    Raises:
        MissingBlocksError: nobody serves `name`.
        PeerUnreachableError: this peer's daemon died.
    """
    records = {record.fingerprint: record for record in (await directory.models()).values()}
    wanted = sorted(records.values(), key=lambda record: (record.name, record.fingerprint))
    if name is not None:
        names = {record.name for record in wanted}
        wanted = [record for record in wanted if name in (record.name, PurePath(record.name).name)]
        if not wanted:
            served = f"it serves {', '.join(sorted(names))}" if names else "it serves no model at all"
            raise MissingBlocksError(f"nobody in this swarm serves {name}; {served}")
    found = []
    for record in wanted:
        servers = tuple(s for s in await directory.servers(record.fingerprint) if s.end <= record.num_blocks)
        found.append(ModelStatus(record, SwarmSnapshot(record.num_blocks, servers)))
    return found


def build_parser() -> Parser:
    """The flags."""
    parser = Parser(
        prog="swarmllm status", description="Who serves what in a swarm, and what is missing.", epilog=EXAMPLES
    )
    add_initial_peers_flags(parser)
    parser.add_argument("--model", metavar="NAME", help="only this model")
    parser.add_argument("--json", action="store_true", help="for programs")
    return parser


async def show_status(config: ClientConfig, *, model: str | None = None, as_json: bool = False) -> None:
    """Look once and print.

    Raises:
        SwarmError: the swarm can't be reached, or nobody serves `model`.
    """
    if not config.initial_peers and not config.lan_discovery:
        raise ConfigurationError("name peers of the swarm with --initial_peers (or SWARMLLM_INITIAL_PEERS)")
    from swarmllm.network.block_directory import BlockDirectory
    from swarmllm.network.discovery import find_any_swarm
    from swarmllm.network.peer import Peer  # after the flags: --help needs no hivemind

    initial_peers = config.initial_peers or await find_any_swarm()
    async with await Peer.create(initial_peers=initial_peers, client_mode=True) as peer:
        models = await look_up(BlockDirectory(peer, config.swarm_name), model)
    if as_json:
        print(json.dumps({"models": [status.as_json() for status in models]}, indent=2))
    else:
        print("\n\n".join(status.as_text() for status in models) or "This swarm serves no model.")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit code."""

    async def run() -> None:
        settings = build_parser().parse_settings(sys.argv[1:] if argv is None else argv)
        model, as_json = settings.pop("model", None), settings.pop("json", False)
        await show_status(ClientConfig(**settings), model=model, as_json=as_json)

    return run_command(run, default_log_level="WARNING")


if __name__ == "__main__":
    sys.exit(main())
