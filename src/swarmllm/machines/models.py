"""The models that a swarm of machines should serve, as one machine knows them.

The agent keeps them here. It learns the sizes of new ones from their manifests, and sees which blocks are online. It
brings the client's part here when somebody wants to chat. Models that nobody wants any more stay while servers of this
machine still have sessions. `find` looks for a model that somebody names in a command.
"""

import asyncio
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from swarmllm.config import default_cache_dir, require_model_name
from swarmllm.data_structures import ServerInfo, ServerState, printable
from swarmllm.errors import ConfigurationError, SwarmError, WeightsError
from swarmllm.files import existing_path
from swarmllm.machines.catalogue import Entry, entry_of, known_checkpoint, known_models, models_to_list
from swarmllm.machines.decisions import is_covered
from swarmllm.machines.records import Command, Hosted, Wanted
from swarmllm.machines.weights import Giver, WeightStore
from swarmllm.network.p2p.block_directory import BlockDirectory
from swarmllm.server.downloads import in_background
from swarmllm.swarm.planning import PlannedModel

LEARN_AGAIN_S = 2.0
"""Seconds until a manifest that nobody gave is asked for again."""


@dataclass
class Model:
    """Facts about a model, as far as this machine knows them."""

    wanted: Wanted
    entry: Entry | None = None
    fingerprint: str = ""
    place: Path | None = None
    """With the client's part."""
    problem: str = ""
    is_failure: bool = False
    """True if this machine can't have the model, as when its disk is full; false if nobody gives it yet."""
    learning: "asyncio.Task[None] | None" = None
    preparing: "asyncio.Task[Path] | None" = None
    servers: tuple[ServerInfo, ...] = ()
    """As they announce themselves."""

    @property
    def sizes(self) -> PlannedModel | None:
        return None if self.entry is None else self.entry.sizes

    def is_online(self, without: frozenset[str] = frozenset()) -> bool:
        """True if servers are online for all blocks. `without`: peer ids of servers that don't count."""
        online = [
            (one.peer_id, one.span)
            for one in self.servers
            if one.state == ServerState.ONLINE and one.peer_id not in without
        ]
        return self.sizes is not None and is_covered(online, self.sizes.num_blocks)


class SwarmModels:
    """All of them.

    Args:
        givers: the machines that give pieces of the model with this manifest.
        changed: called when people should see a change.
    """

    def __init__(
        self,
        store: WeightStore,
        directory: BlockDirectory,
        givers: Callable[[str], Sequence[Giver]],
        changed: Callable[[], None],
    ) -> None:
        self._store, self._directory, self._givers, self._changed = store, directory, givers, changed
        self.wanted: dict[str, Model] = {}
        """By manifest, in the order of the command."""
        self.left: dict[str, Model] = {}
        """Models that nobody wants any more, while servers of this machine still have sessions."""

    def __iter__(self) -> Iterator[Model]:
        return iter((*self.wanted.values(), *self.left.values()))

    def get(self, manifest: str) -> Model | None:
        """The model with this manifest, wanted or not."""
        return self.wanted.get(manifest) or self.left.get(manifest)

    def keep(self, wanted: Sequence[Wanted], served: Collection[str]) -> None:
        """Learn about models that are wanted now, and forget the others, except those `served` here."""
        before = {**self.left, **self.wanted}
        self.wanted = {
            one.manifest: before.pop(one.manifest) if one.manifest in before else Model(one) for one in wanted
        }
        for manifest, model in before.items():
            if manifest not in served:
                _cancel(model)
        self.left = {manifest: model for manifest, model in before.items() if manifest in served}
        for model in self.wanted.values():
            if model.entry is None and (model.learning is None or model.learning.done()):
                name = f"learn {model.wanted.name}"
                model.learning = asyncio.get_running_loop().create_task(self._learn(model), name=name)

    async def _learn(self, model: Model) -> None:
        """Get the sizes of a model from its manifest."""
        try:
            place = await self._fetch(model.wanted.manifest, client=False)
            entry, model.fingerprint = await in_background(partial(_sizes_and_fingerprint, model.wanted.name, place))
            model.entry, model.problem, model.is_failure = entry, entry.problem, False
        except SwarmError as error:
            model.problem, model.is_failure = str(error), isinstance(error, WeightsError)
            await asyncio.sleep(LEARN_AGAIN_S)
        self._changed()

    def failures(self) -> tuple[Hosted, ...]:
        """For the record: wanted models that this machine can't have. Their sizes aren't known."""
        return tuple(
            Hosted(manifest=manifest, start=0, end=1, state="failed", problem=printable(model.problem)[:200])
            for manifest, model in self.wanted.items()
            if model.is_failure
        )

    async def _fetch(self, digest: str, *, client: bool) -> Path:
        """Bring the client's part of a model here, or only its config."""
        givers = partial(self._givers, digest)
        manifest = await self._store.manifest(digest, givers())
        return await self._store.fetch(manifest, None, client=client, givers=givers)

    async def look_at_servers(self) -> dict[str, int]:
        """Read from the DHT which servers are online. Returns the sessions of each, by peer id.

        Raises:
            PeerUnreachableError: this peer is closed, or its daemon died.
        """
        for model in self:
            if model.fingerprint:
                was_online = model.is_online()
                model.servers = await self._directory.servers(model.fingerprint)
                if model.is_online() != was_online:
                    self._changed()
        return {server.peer_id: server.num_sessions for model in self for server in model.servers}

    async def prepare(self, name: str) -> Path:
        """Bring the client's part of a wanted model here: embeddings, head, tokenizer.

        Raises:
            SwarmError: no such model is wanted, or nobody gives it.
        """
        model = next((one for one in self.wanted.values() if one.wanted.name == name), None)
        if model is None:
            raise ConfigurationError(f"the swarm doesn't serve {name!r}")
        if model.place is None:
            if model.preparing is None or model.preparing.done():
                bringing = self._fetch(model.wanted.manifest, client=True)
                model.preparing = asyncio.get_running_loop().create_task(bringing, name=f"prepare {name}")
            model.place = await asyncio.shield(model.preparing)
            self._changed()
        return model.place

    def close(self) -> None:
        """End what is under way."""
        for model in self:
            _cancel(model)

    # Models that somebody names

    async def find(self, model: str, earlier: Sequence[Command]) -> Wanted:
        """Find a model: on this machine, among those of earlier commands, or on the hub.

        Raises:
            SwarmError: it can't be found or served.
        """
        place = await in_background(partial(place_of, model))
        if place is not None:
            try:
                manifest = await self._store.add_local(place)
            except ConfigurationError:
                if place == model:  # else the hub's cache has only a part of it
                    raise
            else:
                name = manifest.name if place == model else model
                return await self._checked(Wanted(name=name, manifest=manifest.digest))
        for command in reversed(earlier):
            for one in command.wanted:
                if one.name == model:
                    return one
        manifest = await self._store.add_from_hub(model)
        return await self._checked(Wanted(name=model, manifest=manifest.digest))

    async def _checked(self, wanted: Wanted) -> Wanted:
        """Raises: ConfigurationError: swarmllm can't serve it."""
        place = await self._fetch(wanted.manifest, client=False)
        entry, _ = await in_background(partial(_sizes_and_fingerprint, wanted.name, place))
        if entry.sizes is None:
            raise ConfigurationError(f"{wanted.name} can't be served: {entry.problem}")
        return wanted


def _cancel(model: Model) -> None:
    for task in (model.learning, model.preparing):
        if task is not None:
            task.cancel()


def place_of(model: str) -> str | None:
    """The place of a model on this machine: the path itself, or that of a name of the catalogue.

    Raises:
        ConfigurationError: nothing can have this name.
    """
    require_model_name(model)
    if model in (known := dict(models_to_list(()))):
        return known[model]
    return model if existing_path(model) is not None else None


def named_entry(model: str) -> tuple[str, Entry]:
    """The name of a model for people, and its sizes. Only its config may come from the hub.

    Raises:
        SwarmError: it can't be found or served.
    """
    from swarmllm.models.checkpoint.checkpoint import open_checkpoint

    place = place_of(model)
    if place is None and model in known_models():
        with known_checkpoint(model) as known:
            return model, entry_of(model, known, is_here=False)
    checkpoint = open_checkpoint(place or model, cache_dir=default_cache_dir())
    name = checkpoint.public_name if place == model else model
    return name, entry_of(name, checkpoint, is_here=place is not None)


def _sizes_and_fingerprint(name: str, place: Path) -> tuple[Entry, str]:
    from swarmllm.models.checkpoint.checkpoint import open_checkpoint
    from swarmllm.models.checkpoint.fingerprint import fingerprint

    checkpoint = open_checkpoint(str(place))
    return entry_of(name, checkpoint, is_here=True), fingerprint(checkpoint)
