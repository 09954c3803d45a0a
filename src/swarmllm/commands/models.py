"""`swarmllm models`: models of this machine and well-known ones of the hub; which of them fit, and about how fast.

It lists checkpoints in the Hugging Face cache and in given directories, GGUF files, and `known_models.json`, whose
configs are those of the hub. The plan of each (`swarm/planning`) is for this machine, or for the machines of a swarm.
Nothing is downloaded, and no weights are read.
"""

import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarmllm.command_line import Parser, announced_imports, one_line, run_command
from swarmllm.commands.status import ModelStatus, look_up
from swarmllm.config import SwarmConfig, address_book_path, default_cache_dir, require_addresses, require_model_place
from swarmllm.data_structures import printable, size_in_words
from swarmllm.errors import BlockWeightsNotFoundError, ConfigurationError, SwarmError
from swarmllm.files import user_path
from swarmllm.server.settings import memory_limit_bytes
from swarmllm.swarm.block_map import short_peer_id
from swarmllm.swarm.planning import Link, Machine, Plan, PlannedModel, make_plan, missing_bytes

if TYPE_CHECKING:
    from swarmllm.models.checkpoint.checkpoint import Checkpoint
    from swarmllm.models.quantization.rules import QuantType

EXAMPLES = """examples:
  swarmllm models                            # what fits this machine
  swarmllm models --model ~/models org/name  # and of these
  swarmllm models --initial_peers ADDRESS    # what fits a swarm
"""
KNOWN = Path(__file__).with_name("known_models.json")
FORMATS: "tuple[QuantType, ...]" = ("int8", "q4_k")
"""Values of --quant_type, the most precise first."""
AS_STORED = "auto"
"""The format of checkpoints that are published in few bits."""
IN_PLACE = Link(round_trip_ms=0.0)
"""Between devices of a machine."""
CPU_BLOCK_MS, GPU_BLOCK_MS = 0.3, 0.03
"""Milliseconds that a step takes in a block besides the time for reading its weights. Measured with the embedded model
on a CPU; assumed for GPUs, which replay recorded steps."""
LEAST_READING = 0.25
"""Least share that reading weights must have in a server's time per block. With less, the blocks are too small to tell
the machine's speed."""
ASSUMED_BYTES_PER_S = 10e9
"""Stands in plans for the speed of such servers. The command shows no speeds then."""
NEAR = Link(round_trip_ms=1.0)
"""Between servers, if none announces a round trip. Assumed: a local network."""


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
            memory_limit_bytes(self.max_memory, 1 << 50)
        for name in self.model:
            require_model_place(name)
        if self.initial_peers and self.max_memory is not None:
            raise ConfigurationError("--max_memory is for plans of this machine: leave it out for those of a swarm")


# --- machines


@dataclass(frozen=True)
class Machines:
    """The machines of the plans."""

    machines: tuple[Machine, ...]
    names: Mapping[str, str]
    """Name for people, by peer id."""
    links: Mapping[tuple[str, str], Link]
    assumed_link: Link
    headline: str
    holds_client: bool = False
    """True if the client's part of a model needs memory of the first machine."""
    shows_speed: bool = True
    """False if the speed of some machines is not known."""


def this_machine(max_memory: str | None) -> Machines:
    """The devices that a server would use here, with their measured speed.

    Raises:
        ConfigurationError: there is less memory than `max_memory`.
    """
    import torch

    from swarmllm.server.device.device import resolve_device, usable_bytes
    from swarmllm.server.device.throughput import measure_weights

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    devices = [resolve_device(f"cuda:{index}") for index in range(count)] or [resolve_device("cpu")]
    machines, lines = [], []
    for device in devices:
        speeds: dict[str, float] = {name: measure_weights(device, name) for name in FORMATS}
        memory_bytes = usable_bytes(device, max_memory)
        machines.append(
            Machine(
                peer_id=_as_peer_id(str(device)),
                memory_bytes=memory_bytes,
                bytes_per_s=speeds[FORMATS[-1]],
                ms_per_block=CPU_BLOCK_MS if device.type == "cpu" else GPU_BLOCK_MS,
                format_bytes_per_s=speeds,
            )
        )
        reads = " and ".join(f"{speed / 1e9:.1f} GB/s in {name}" for name, speed in speeds.items())
        lines.append(f"{device}: {size_in_words(memory_bytes)} for blocks and caches; it reads {reads}")
    names = {
        _as_peer_id(str(device)): "this machine" if len(devices) == 1 else f"{device} of this machine"
        for device in devices
    }
    pairs = {(one.peer_id, other.peer_id): IN_PLACE for one in machines for other in machines if one is not other}
    on_cpu = devices[0].type == "cpu"
    return Machines(tuple(machines), names, pairs, IN_PLACE, "\n".join(lines), on_cpu)


def _as_peer_id(name: str) -> str:
    return name.ljust(46, "-")  # as long as a peer id


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


# --- models


@dataclass(frozen=True)
class Entry:
    """One line of the catalogue."""

    name: str
    """A value of --model."""
    is_here: bool
    """True if it is on this machine, at least in parts."""
    sizes: PlannedModel | None
    client_bytes: int = 0
    """Memory of the client's part: embeddings and head."""
    problem: str = ""
    """The reason why it can't be served."""


def known_models() -> dict[str, dict[str, Any]]:
    """Hub id → config of well-known models, in the order of their names."""
    found: dict[str, dict[str, Any]] = json.loads(KNOWN.read_text())["models"]
    return found


@contextmanager
def known_checkpoint(name: str) -> Iterator["Checkpoint"]:
    """A checkpoint without weights, with the config of a known model."""
    from swarmllm.models.checkpoint.checkpoint import open_checkpoint

    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(json.dumps(known_models()[name]))
        yield open_checkpoint(directory)


def models_to_list(named: Sequence[str]) -> list[tuple[str, str]]:
    """(name, place) of all that may be models: in the hub's cache, named ones, and those in named directories or one
    level below."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    found: list[tuple[str, str]] = []
    try:
        repositories = scan_cache_dir(default_cache_dir()).repos
    except CacheNotFound:
        repositories = frozenset()
    for repository in sorted(repositories, key=lambda one: one.repo_id):
        if repository.repo_type == "model" and repository.revisions:
            newest = max(repository.revisions, key=lambda one: ("main" in one.refs, one.last_modified, one.commit_hash))
            found += _models_in(newest.snapshot_path, repository.repo_id)
    for name in named:
        top = user_path(name)
        if not top.is_dir():
            found.append((name, name))
            continue
        for directory in (top, *sorted(path for path in top.iterdir() if path.is_dir())):
            found += _models_in(directory, str(directory))
    return found


def _models_in(directory: Path, name: str) -> list[tuple[str, str]]:
    if (directory / "config.json").is_file():
        return [(name, str(directory))]
    from swarmllm.models.checkpoint.stored_files import gguf_models

    return [(f"{name}/{filename}", str(directory / filename)) for filename in gguf_models(directory)]


def entries(named: Sequence[str]) -> list[Entry]:
    """The whole catalogue: models on this machine and named ones, then known ones from small to large."""
    from swarmllm.models.checkpoint.checkpoint import open_checkpoint

    listed = []
    for name, place in models_to_list(named):
        is_here = user_path(place).exists()
        try:
            checkpoint = open_checkpoint(place, cache_dir=default_cache_dir())
            if is_here:
                is_here = _has_weights(checkpoint)
            listed.append(_entry(name, checkpoint, is_here=is_here))
        except SwarmError as error:
            listed.append(Entry(name, is_here, None, problem=one_line(error)))
    known = []
    for name in known_models().keys() - {one.name for one in listed}:
        with known_checkpoint(name) as checkpoint:
            known.append(_entry(name, checkpoint, is_here=False))
    return listed + sorted(known, key=lambda one: (_least_bytes(one), one.name))


def _has_weights(checkpoint: "Checkpoint") -> bool:
    """False for a model in the hub's cache whose weights aren't there yet.

    Raises:
        BlockWeightsNotFoundError: it is from no hub, so they can come from nowhere.
    """
    try:
        checkpoint.weight_map()
    except BlockWeightsNotFoundError:
        if checkpoint.revision is None:
            raise
        return False
    return True


def _least_bytes(entry: Entry) -> int:
    return 0 if entry.sizes is None else entry.sizes.needed_bytes(list(entry.sizes.block_bytes)[-1])


def _entry(name: str, checkpoint: "Checkpoint", *, is_here: bool) -> Entry:
    from swarmllm.models.architecture import text_config
    from swarmllm.models.checkpoint.checkpoint import resolve_dtype
    from swarmllm.models.checkpoint.skeleton import block_bytes, read_share
    from swarmllm.models.quantization import resolve_quantization
    from swarmllm.server.device.device import COUNTED_TOKENS, cache_bytes_per_token

    dtype, config = resolve_dtype(checkpoint, "auto"), text_config(checkpoint.config)
    formats = (AS_STORED,) if checkpoint.comes_packed else FORMATS
    hidden_bytes = int(config.hidden_size) * dtype.itemsize
    head_bytes = int(getattr(config, "vocab_size", None) or 0) * hidden_bytes
    sizes = PlannedModel(
        block_bytes={one: block_bytes(checkpoint, dtype, resolve_quantization(one)) for one in formats},
        cache_bytes_per_token=cache_bytes_per_token(checkpoint.config, dtype),
        cache_tokens=COUNTED_TOKENS,
        read_share=read_share(checkpoint),
        hidden_bytes=hidden_bytes,
        head_bytes=head_bytes,
    )
    return Entry(name, is_here, sizes, head_bytes * (1 if config.tie_word_embeddings else 2))


# --- the answer


@dataclass(frozen=True)
class Answer:
    """A model, and its plan on the machines."""

    entry: Entry
    plan: Plan | None
    missing_bytes: int
    """Memory that is missing in the smallest format; 0: the model fits."""
    tokens_per_s: float | None
    """Expected speed of one text; None: not known."""

    def as_text(self, names: Mapping[str, str]) -> str:
        """Where it fits, and how fast; or what is missing."""
        if self.entry.sizes is None:
            return f"can't be served: {self.entry.problem}"
        if self.plan is None:
            smallest = _format_in_words(list(self.entry.sizes.block_bytes)[-1])
            return f"needs {size_in_words(self.missing_bytes)} more, {smallest}"
        where = ", ".join(dict.fromkeys(names[peer_id] for peer_id, _ in self.plan.route))
        per_s = self.tokens_per_s
        speed = "" if per_s is None else f"about {per_s:.{0 if per_s >= 10 else 1}f} tokens/s "
        return f"fits {_format_in_words(self.plan.format)}, {speed}on {where}"

    def as_json(self, names: Mapping[str, str]) -> dict[str, Any]:
        """The same for programs."""
        plan = self.plan
        return {
            "model": self.entry.name,
            "is_here": self.entry.is_here,
            "num_blocks": self.entry.sizes and self.entry.sizes.num_blocks,
            "fits": plan is not None,
            "quant_type": plan and plan.format,
            "tokens_per_s": self.tokens_per_s and round(self.tokens_per_s, 3),
            "route": [{"machine": names[peer_id], "blocks": str(span)} for peer_id, span in plan.route] if plan else [],
            "hosts": [{"machine": names[peer_id], "blocks": str(span)} for peer_id, span in plan.hosts] if plan else [],
            "missing_bytes": self.missing_bytes,
            "problem": self.entry.problem or None,
        }


def _format_in_words(name: str) -> str:
    return "as it is stored" if name == AS_STORED else f"with {name}"


def answer(entry: Entry, where: Machines) -> Answer:
    """Plan a model on the machines. The client's part of it takes memory as well if it is on the same device."""
    if entry.sizes is None:
        return Answer(entry, None, 0, None)
    machines = list(where.machines)
    if where.holds_client and machines:
        machines[0] = replace(machines[0], memory_bytes=machines[0].memory_bytes - entry.client_bytes)
    plan = make_plan(machines, entry.sizes, where.links, assumed_link=where.assumed_link)
    if plan is None:
        return Answer(entry, None, missing_bytes(machines, entry.sizes), None)
    return Answer(entry, plan, 0, plan.one_tokens_per_s if where.shows_speed else None)


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
    where = await find_machines(config)
    answers = [answer(entry, where) for entry in entries(config.model)]
    if config.json:
        known = json.loads(KNOWN.read_text())
        about = {"machines": where.headline, "known_models": {key: known[key] for key in ("source", "date")}}
        print(json.dumps({**about, "models": [one.as_json(where.names) for one in answers]}, indent=2))
    else:
        print(as_table(answers, where))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return the exit code."""

    async def run() -> None:
        config = ModelsConfig(**build_parser().parse_settings(argv))
        require_addresses(config.initial_peers)
        await show_models(config)

    return run_command(run, default_log_level="WARNING")


if __name__ == "__main__":
    sys.exit(main())
