"""`swarmllm status`: the servers of a swarm, their blocks and speed, and missing blocks; as a table or as JSON."""

import asyncio
import json
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from swarmllm.command_line import Parser, announced_imports, run_command
from swarmllm.config import SwarmConfig, address_book_path, is_of_machines, require_addresses, require_model_place
from swarmllm.data_structures import ModelRecord, SwarmSnapshot, size_in_words
from swarmllm.errors import ConfigurationError, MissingBlocksError
from swarmllm.files import existing_path, user_path
from swarmllm.swarm.block_map import (
    describe_adapters,
    describe_coverage,
    describe_different_weights,
    describe_machines,
    describe_shared_identities,
    describe_swarm,
    seen_ms_per_token,
    state_name,
    terminal_width,
)
from swarmllm.swarm.routing import find_route, route_cost_ms
from swarmllm.swarm.stacks import command_to_serve, stack_spans

if TYPE_CHECKING:
    from swarmllm.network.p2p.block_directory import BlockDirectory

EXAMPLES = """examples:
  swarmllm status --initial_peers ADDRESS
  swarmllm status --model bigscience/bloom --json

columns, for all blocks of a server together:
  tokens/s  tokens of large batches per second, as measured, then as seen
  ms/token  expected time of one token of one text
  seen ms   half of its last steps were ready within this time, with waiting
  p95 ms    95 % of them were
  served    tokens of texts since its start
  failed    failed requests since its start, for any reason
  cache     tokens of texts for which it has room
  weights   format of its weights
"""

SECOND_LOOK_S = 1.0
"""Seconds before blocks are called missing. Assumed: a busy node answers by then."""


@dataclass(frozen=True)
class ModelStatus:
    """One checkpoint of the swarm and its servers."""

    record: ModelRecord
    snapshot: SwarmSnapshot

    def as_text(
        self,
        width: int | None = None,
        initial_peers: Sequence[str] = (),
        *,
        is_private: bool = False,
        plans_itself: bool = False,
    ) -> str:
        """A headline, the table of servers in lines of `width`, and what that means for users.

        `plans_itself`: it is a swarm of `swarmllm up`, so nobody starts servers by hand.
        """
        return "\n".join(
            [
                f"{self.record.name} (fingerprint {self.record.fingerprint[:12]})",
                *self._stacks(),
                *(f"  {line}" for line in describe_swarm(self.snapshot, width and width - 2)),
                *(f"  {line}" for line in describe_machines(self.snapshot)),
                f"  {describe_coverage(self.snapshot)}",
                *([] if plans_itself else self._missing(initial_peers, is_private)),
                *(f"  {line}" for line in describe_shared_identities(self.snapshot)),
                *(f"  {line}" for line in describe_different_weights(self.snapshot)),
                *(f"  {line}" for line in describe_adapters(self.snapshot)),
            ]
        )

    def _stacks(self) -> list[str]:
        """The encoder's blocks, in a model that has an encoder."""
        stacks = stack_spans(self.record.num_blocks, self.record.encoder_blocks)
        if len(stacks) == 1:
            return []
        return [
            "  "
            + ", ".join(f"{name} 0:{len(span)} is --block_indices {span.start}:{span.end}" for name, span in stacks)
        ]

    def _missing(self, initial_peers: Sequence[str], is_private: bool) -> list[str]:
        """The memory that the missing blocks need, and the command that serves them."""
        missing, block_bytes = self.snapshot.missing_blocks(), self.record.block_bytes
        if not missing:
            return []
        lines = []
        if block_bytes:
            each, together = size_in_words(block_bytes), size_in_words(len(missing) * block_bytes)
            lines.append(f"  {len(missing)} blocks of {each} are missing: {together}, and room for caches")
        command = command_to_serve(missing, self.record.name, initial_peers, is_private=is_private)
        return [*lines, f"  to serve them: {command}"]

    def as_json(self) -> dict[str, Any]:
        """The announcements, `missing_blocks`, `expected_ms_per_token` (null: the model can't be used) and
        `seen_ms_per_token` (null: nobody has used it)."""
        expected_ms = seen_ms = None
        with suppress(MissingBlocksError):
            route = find_route(self.snapshot)
            expected_ms, seen_ms = round(route_cost_ms(route), 3), round(seen_ms_per_token(route), 3) or None
        return {
            **self.record.model_dump(mode="json"),
            "missing_blocks": list(self.snapshot.missing_blocks()),
            "expected_ms_per_token": expected_ms,
            "seen_ms_per_token": seen_ms,
            "servers": [
                {**server.model_dump(mode="json"), "state": state_name(server.state)}
                for server in self.snapshot.servers
            ],
        }


def is_on_this_machine(model: str) -> bool:
    """True if this names a checkpoint on this machine; False for a hub id or the name of a model of the swarm.

    Raises:
        ConfigurationError: it looks like a path, but nothing is there.
    """
    require_model_place(model)
    place, _, kind = model.rpartition(":")  # of a GGUF file
    return existing_path(model) is not None or bool(place and "/" not in kind and user_path(place).is_dir())


def fingerprint_of_files(place: str) -> str:
    """The fingerprint of a checkpoint on this machine.

    Raises:
        SwarmError: there is none.
    """
    from swarmllm.models.checkpoint.checkpoint import open_checkpoint
    from swarmllm.models.checkpoint.fingerprint import fingerprint  # imports torch

    return fingerprint(open_checkpoint(place))


async def look_up(
    directory: "BlockDirectory", name: str | None = None, fingerprint: str | None = None
) -> list[ModelStatus]:
    """Look up all models of the swarm, or those called `name` (the last component of a hub id is enough).

    `fingerprint`: of the checkpoint at `name`, if that is a path.

    Raises:
        MissingBlocksError: nobody serves it.
        PeerUnreachableError: this peer's daemon died.
    """
    records = {record.fingerprint: record for record in (await directory.models()).values()}
    wanted = sorted(records.values(), key=lambda record: (record.name, record.fingerprint))
    if name is not None:
        names = {record.name for record in wanted}
        if fingerprint is not None:
            name = f"the checkpoint in {name} (fingerprint {fingerprint[:12]})"
            wanted = [record for record in wanted if record.fingerprint == fingerprint]
        else:
            wanted = [record for record in wanted if name in (record.name, PurePath(record.name).name)]
        if not wanted:
            served = f"it serves {', '.join(sorted(names))}" if names else "it serves no model"
            raise MissingBlocksError(f"nobody in this swarm serves {name}; {served}")
    found = []
    for record in wanted:
        servers = tuple(s for s in await directory.servers(record.fingerprint) if s.end <= record.num_blocks)
        found.append(ModelStatus(record, SwarmSnapshot(record.num_blocks, servers, record.encoder_blocks)))
    return found


async def look_twice(
    directory: "BlockDirectory", name: str | None = None, fingerprint: str | None = None
) -> list[ModelStatus]:
    """Call `look_up`, and again if blocks seem to be missing, because late answers are left out.

    Raises:
        MissingBlocksError, PeerUnreachableError: as `look_up`.
    """
    models = await look_up(directory, name, fingerprint)
    if any(status.snapshot.missing_blocks() for status in models):
        await asyncio.sleep(SECOND_LOOK_S)
        models = await look_up(directory, name, fingerprint)
    return models


@dataclass(frozen=True, kw_only=True)
class StatusConfig(SwarmConfig):
    """The report."""

    model: str | None = None
    """Hub id or directory of the only model to show. The last component of a hub id is enough."""
    json: bool = False
    """Print JSON, for programs."""


def build_parser() -> Parser:
    """A flag for each field of StatusConfig."""
    parser = Parser(
        prog="swarmllm status",
        description="Show the servers of a swarm, their blocks, and missing blocks.",
        epilog=EXAMPLES,
    )
    parser.add_settings(StatusConfig, [SwarmConfig, StatusConfig], without=["identity_path"])
    return parser


async def show_status(config: StatusConfig) -> None:
    """Look once and print.

    Raises:
        SwarmError: the swarm can't be reached, or nobody serves the model.
    """
    if not config.initial_peers and not config.lan_discovery:
        raise ConfigurationError("name peers of the swarm with --initial_peers (or SWARMLLM_INITIAL_PEERS)")
    is_place = config.model is not None and is_on_this_machine(config.model)
    with announced_imports(torch=is_place):
        from swarmllm.network.p2p.block_directory import BlockDirectory
        from swarmllm.network.p2p.discovery import find_any_swarm, find_swarm_here
        from swarmllm.network.p2p.peer import Peer  # after the flags: --help needs no hivemind

        fingerprint = fingerprint_of_files(config.model) if config.model is not None and is_place else None
    initial_peers, swarm_name = config.initial_peers, config.swarm_name
    here = None if initial_peers else await find_swarm_here()
    if here is not None:
        initial_peers, swarm_name = here.initial_peers, here.swarm_name
    elif not initial_peers:
        initial_peers = await find_any_swarm()
    joining = Peer.create(initial_peers=initial_peers, client_mode=True, address_book=address_book_path())
    async with await joining as peer:
        models = await look_twice(BlockDirectory(peer, swarm_name), config.model, fingerprint)
    if config.json:
        print(json.dumps({"models": [status.as_json() for status in models]}, indent=2))
        return
    texts = [
        status.as_text(
            terminal_width(), initial_peers, is_private=swarm_name is not None, plans_itself=is_of_machines(swarm_name)
        )
        for status in models
    ] + _same_names(models)
    if here is not None:
        texts.insert(0, f"This machine is in the swarm {here.name}; `swarmllm use` shows its machines and its page.")
    if not models:
        texts.append("This swarm serves no model" + (": choose one by `swarmllm use MODEL`." if here else "."))
    print("\n\n".join(texts))


def _same_names(models: Sequence[ModelStatus]) -> list[str]:
    """A note on different models with the same name."""
    counts = Counter(status.record.name for status in models)
    return [
        f"{count} models are called {name}: their config or weights differ, so clients and servers of one don't use "
        "those of another"
        for name, count in counts.items()
        if count > 1
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return the exit code."""

    async def run() -> None:
        config = StatusConfig(**build_parser().parse_settings(argv))
        require_addresses(config.initial_peers)
        await show_status(config)

    return run_command(run, default_log_level="WARNING")


if __name__ == "__main__":
    sys.exit(main())
