"""The catalogue of models: sizes in each format, and the plan of a model on some machines, in words and as JSON.

It lists checkpoints in the Hugging Face cache and in given directories, GGUF files, and `known_models.json`, whose
configs are those of the hub. `swarmllm models` prints it for this machine or for a swarm of servers, the agent
(`machines/agent`) for its swarm of machines. Nothing is downloaded, and no weights are read.
"""

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarmllm.command_line import one_line
from swarmllm.config import default_cache_dir
from swarmllm.data_structures import size_in_words
from swarmllm.errors import BlockWeightsNotFoundError, SwarmError
from swarmllm.files import user_path
from swarmllm.swarm.planning import Link, Machine, Plan, PlannedModel, make_plan, missing_bytes

if TYPE_CHECKING:
    from swarmllm.models.checkpoint.checkpoint import Checkpoint
    from swarmllm.models.quantization.rules import QuantType

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
NEAR = Link(round_trip_ms=1.0)
"""Between servers, if none announces a round trip. Assumed: a local network."""


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


def this_machine(
    max_memory: str | None, names: Sequence[str] = (), speeds: Mapping[str, float] | None = None
) -> Machines:
    """The devices that a server would use here, with their speed.

    Args:
        names: of the devices; none: all GPUs, or the CPU.
        speeds: bytes of weights that each reads in a second, by format; None: they are measured.

    Raises:
        ConfigurationError: there is less memory than `max_memory`.
    """
    import torch

    from swarmllm.server.device.device import resolve_device, usable_bytes
    from swarmllm.server.device.throughput import measure_weights

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names = names or [f"cuda:{index}" for index in range(count)] or ["cpu"]
    devices = [resolve_device(name) for name in names]
    machines, lines = [], []
    for device in devices:
        measured = speeds or {name: measure_weights(device, name) for name in FORMATS}
        memory_bytes = usable_bytes(device, max_memory)
        machines.append(
            Machine(
                peer_id=_as_peer_id(str(device)),
                memory_bytes=memory_bytes,
                bytes_per_s=measured[FORMATS[-1]],
                ms_per_block=CPU_BLOCK_MS if device.type == "cpu" else GPU_BLOCK_MS,
                format_bytes_per_s=measured,
            )
        )
        reads = " and ".join(f"{speed / 1e9:.1f} GB/s in {name}" for name, speed in measured.items())
        lines.append(f"{device}: {size_in_words(memory_bytes)} for blocks and caches; it reads {reads}")
    called = {
        _as_peer_id(str(device)): "this machine" if len(devices) == 1 else f"{device} of this machine"
        for device in devices
    }
    pairs = {(one.peer_id, other.peer_id): IN_PLACE for one in machines for other in machines if one is not other}
    on_cpu = devices[0].type == "cpu"
    return Machines(tuple(machines), called, pairs, IN_PLACE, "\n".join(lines), on_cpu)


def _as_peer_id(name: str) -> str:
    return name.ljust(46, "-")  # as long as a peer id


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
            listed.append(entry_of(name, checkpoint, is_here=is_here))
        except SwarmError as error:
            listed.append(Entry(name, is_here, None, problem=one_line(error)))
    known = []
    for name in known_models().keys() - {one.name for one in listed}:
        with known_checkpoint(name) as checkpoint:
            known.append(entry_of(name, checkpoint, is_here=False))
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


def entry_of(name: str, checkpoint: "Checkpoint", *, is_here: bool) -> Entry:
    """The sizes of a checkpoint. Its weights may be missing.

    Raises:
        SwarmError: it can't be served.
    """
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
