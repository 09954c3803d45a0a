"""The agent of a machine (`swarmllm up`): looks at the swarm of machines, plans, and serves this machine's blocks.

Every `LOOK_S` it reads the records of all members, follows the newest command, decides (`decisions`), starts and ends
servers (`hosting`), and publishes its own record. Nothing else is shared: no machine leads, and any may vanish.

The gateway's pages show `picture()` and `catalogue()`, and give commands by `use()` and `drop()`. Commands and blocks
are noted in the state directory, so that a machine goes on after a crash with the models that it served.

`Agent.start` enters the swarm, `run` works until it is cancelled, `close` leaves politely.
"""

import asyncio
import logging
import shutil
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from swarmllm.config import address_book_path, default_cache_dir, hub_token
from swarmllm.data_structures import ServerInfo, ServerState, Span
from swarmllm.errors import ConfigurationError, PeerUnreachableError, SwarmError
from swarmllm.files import user_path
from swarmllm.invite import Invite
from swarmllm.machines.catalogue import (
    NEAR,
    Entry,
    Machines,
    answer,
    entries,
    entry_of,
    known_checkpoint,
    known_models,
    models_to_list,
    this_machine,
)
from swarmllm.machines.decisions import (
    Decider,
    Decision,
    Facts,
    Target,
    has_failed,
    is_covered,
    links_of,
    machine_of,
    next_steps,
    plan_models,
    present_plan,
    span_bytes,
)
from swarmllm.machines.downloads import Hub
from swarmllm.machines.hosting import Hosting, Hostings
from swarmllm.machines.membership import (
    JOIN_PROTOCOL,
    SECOND_LOOK_S,
    Doorkeeper,
    Membership,
    find_membership,
    join_open_swarm,
)
from swarmllm.machines.records import (
    MAX_HOSTED,
    MAX_WANTED,
    Command,
    Hosted,
    MachineRecord,
    Wanted,
    membership,
    newest,
    sign_command,
)
from swarmllm.machines.settings import MachineConfig
from swarmllm.machines.state import StateDirectory
from swarmllm.machines.weights import Giver, Progress, WeightStore
from swarmllm.network.p2p.addresses import best_addrs, check_port_is_free
from swarmllm.network.p2p.block_directory import BlockDirectory, Register, machines_key
from swarmllm.network.p2p.discovery import LanAnnouncement, find_machines, initial_peers_of, lan_addresses
from swarmllm.network.p2p.identity import Identity
from swarmllm.network.p2p.peer import Peer
from swarmllm.network.relay.service import RelayRules
from swarmllm.server.settings import ServerConfig
from swarmllm.swarm.planning import Plan, PlannedModel, loaded_bytes, missing_bytes
from swarmllm.version import __version__

logger = logging.getLogger(__name__)

LOOK_S = 2.0
"""Seconds between two looks at the swarm."""
RENEWAL_S = 6.0
"""Seconds after which a record is published again, though nothing changed."""
TTL_S = 20.0
"""Seconds until the record of a machine that has vanished expires. Assumed: a busy machine misses two renewals."""
SERVER_PERIOD_S = 10.0
"""`update_period` of the servers: their sessions are counted by what they announce."""
CACHE_SLACK = 1.3
"""A server gets more memory for caches than the plan counts, because it keeps a share for other uses."""
SPARE_BYTES = 64 << 20
"""More memory for each server: pages of prompts, adapters, scratch."""
RECOVER_S = 20.0
"""Seconds between two looks for other members on the local network, while there are none."""


@dataclass(frozen=True)
class Offer:
    """Memory and speed that this machine offers."""

    memory_bytes: int
    bytes_per_s: float
    ms_per_block: float
    format_bytes_per_s: tuple[tuple[str, float], ...]


def measure_offer(config: MachineConfig, state: StateDirectory) -> Offer:
    """The memory that is free now, and the speed of the devices, which is measured once and noted.

    Raises:
        ConfigurationError: a device can't be used, or has less memory than `max_memory`.
    """
    import torch

    from swarmllm.server.device.device import hardware_name, resolve_device

    names = config.device
    if names == ("auto",):
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        names = tuple(f"cuda:{index}" for index in range(count)) or ("cpu",)
    hardware = ", ".join(hardware_name(resolve_device(name)) for name in names)
    noted = state.read("speeds.json", {})
    is_known = noted.get("hardware") == hardware and noted.get("version") == __version__
    machines = this_machine(config.max_memory, names, noted["formats"] if is_known else None).machines
    slowest = min(machines, key=lambda one: one.bytes_per_s)  # a token passes all devices, one after the other
    if not is_known:
        formats = dict(slowest.format_bytes_per_s)
        state.write("speeds.json", {"hardware": hardware, "version": __version__, "formats": formats})
    return Offer(
        min(one.memory_bytes for one in machines) * len(machines),  # servers share blocks evenly
        slowest.bytes_per_s,
        slowest.ms_per_block,
        tuple(slowest.format_bytes_per_s.items()),
    )


@dataclass(frozen=True)
class Offered:
    """A wanted model, as clients use it."""

    name: str
    manifest: str
    ready: bool
    """True if servers are online for all blocks."""
    place: Path | None
    """Value of --model; None: the client's part isn't here yet (`Agent.prepare`)."""
    initial_peers: tuple[str, ...]
    swarm_name: str


@dataclass
class _Model:
    """Facts about a wanted model, as far as this machine knows them."""

    wanted: Wanted
    entry: Entry | None = None
    fingerprint: str = ""
    place: Path | None = None
    """With the client's part."""
    problem: str = ""
    learning: "asyncio.Task[None] | None" = None
    preparing: "asyncio.Task[Path] | None" = None
    servers: tuple[ServerInfo, ...] = ()

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


class Agent:
    """One machine of a swarm. Make it with `Agent.start`."""

    def __init__(
        self,
        config: MachineConfig,
        state: StateDirectory,
        swarm: Membership,
        peer: Peer,
        identity: Identity,
    ) -> None:
        self.config, self.swarm, self.peer = config, swarm, peer
        self._state, self._identity = state, identity
        self._member = membership(identity.peer_id, swarm.key)
        self._store = _open_store(config, state, peer, swarm, self._member)
        self.changed = asyncio.Event()
        """Set when `picture` or `offered` has changed. Readers clear it."""
        self.page = ""
        """Address of the page, for the other machines."""
        self.offer: Offer | None = None
        self.records: dict[str, MachineRecord] = {}
        """Records of the members, without this machine."""
        self._seen_at: dict[str, float] = {}
        commands = state.commands()
        self._commands = [one for one in commands if one.is_valid(swarm.swarm_id)]
        self._command = newest(self._commands, swarm.swarm_id)
        self._models: dict[str, _Model] = {}
        self._left: dict[str, _Model] = {}
        """Models that nobody wants any more, while servers of this machine still have sessions."""
        noted = [one for one in _read_targets(state) if any(one.manifest == each.manifest for each in self.wanted)]
        self._decider = Decider(noted)
        self._decision = Decision({}, tuple(noted))
        self._hostings = Hostings(self._fetch, self._server_config, self._note_change)
        self._register = Register(peer, machines_key(swarm.swarm_id), MachineRecord)
        self._directory = BlockDirectory(peer, swarm.swarm_id)
        self._published: tuple[MachineRecord, float] | None = None
        self._round_trips: dict[str, float] = {}
        self._catalogue: tuple[float, list[Entry]] | None = None
        self._look_now = asyncio.Event()
        self._lan = LanAnnouncement(
            peer.peer_id,
            peer.addrs if swarm.is_open and config.lan_discovery else (),
            model=f"machines of {swarm.name}",
            fingerprint=swarm.swarm_id,
            machines=True,
        )

    # Start and end

    @classmethod
    async def start(
        cls,
        config: MachineConfig,
        state: StateDirectory,
        *,
        invite: Invite | None = None,
    ) -> "Agent":
        """Enter the swarm: that of the invite, that of the state directory, an open one of the network, or a new one.

        Raises:
            SwarmError: the invite is of no use, or the network can't be used.
        """
        identity = Identity.load_or_create(state.identity_path)

        async def join() -> Membership | None:
            if not config.lan_discovery:
                return None
            return await join_open_swarm(partial(_asking_peer, config, state), config.name)

        found = await find_membership(state, join, invite=invite, private=config.private, name=config.name)
        is_new = not found.initial_peers and not state.commands()
        agent = cls(config, state, found, await _member_peer(config, state, found), identity)
        try:
            await agent._open_doors()
            if is_new and found.is_open and config.lan_discovery and lan_addresses(agent.peer.addrs)[0]:
                other = await agent._look_for_an_older_swarm()
                if other is not None:
                    await agent.close()
                    state.enter_swarm(other.key, name=other.name, is_open=other.is_open)
                    peer = await _member_peer(config, state, other)
                    agent = cls(config, state, other, peer, identity)
                    await agent._open_doors()
        except BaseException:
            await agent.close()
            raise
        return agent

    async def _open_doors(self) -> None:
        """Let other machines in, and let members take weights.

        Raises:
            ConfigurationError: the store of weights can't be read.
        """
        try:
            await self._store.start()
        except OSError as error:
            raise ConfigurationError(f"{self._state.weights_path} can't be used: {error.strerror}") from None
        await self.peer.serve_protocol(JOIN_PROTOCOL, Doorkeeper(self.swarm).serve)
        await self.peer.serve_streams(self._store.serve)
        self._lan.start()
        await self._lan.announced()

    async def _look_for_an_older_swarm(self) -> Membership | None:
        """Two machines that start at the same moment both found a swarm: the one with the smaller id counts."""
        own = self.swarm.swarm_id
        return await join_open_swarm(
            lambda: nullcontext(self.peer), self.config.name, below=own, timeout_s=SECOND_LOOK_S
        )

    async def run(self) -> None:
        """Look, decide and act, until cancelled.

        Raises:
            SwarmError: the peer-to-peer daemon died, or a device can't be used.
        """
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch_daemon(), name="watch the daemon")
            tasks.create_task(self._measure(), name="measure this machine")
            tasks.create_task(self._recover(), name="look for members")
            tasks.create_task(self._look_forever(), name="look at the swarm")

    async def close(self) -> None:
        """End the servers politely, withdraw the record, leave the swarm."""
        for model in (*self._models.values(), *self._left.values()):
            for task in (model.learning, model.preparing):
                if task is not None:
                    task.cancel()
        await self._lan.end()
        await self._hostings.close()
        if self._published is not None:
            with suppress(SwarmError, TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._register.publish(None, 0.0)
        await self.peer.close()

    async def _watch_daemon(self) -> None:
        await self.peer.daemon_exited()
        raise PeerUnreachableError("the peer-to-peer daemon (p2pd) died, so this machine is alone: start it again")

    async def _measure(self) -> None:
        self.offer = await asyncio.to_thread(measure_offer, self.config, self._state)
        self._note_change()

    async def _recover(self) -> None:
        """Look for the swarm's members on the local network while this machine knows none: addresses may change."""
        while self.config.lan_discovery and lan_addresses(self.peer.addrs)[0]:
            await asyncio.sleep(RECOVER_S)
            if self.peer.is_alone:
                found = await find_machines(lambda peer: peer.fingerprint == self.swarm.swarm_id)
                ours = [peer for peer in found if peer.fingerprint == self.swarm.swarm_id]
                self.peer.join_by(initial_peers_of(ours))

    # The loop

    async def _look_forever(self) -> None:
        while True:
            try:
                await self._look()
            except ConfigurationError as error:  # the disk is full
                logger.warning("%s", error)
            except PeerUnreachableError as error:
                logger.warning("can't look at the swarm: %s", error)
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._look_now.wait()
            self._look_now.clear()

    async def _look(self) -> None:
        """Read, follow the newest command, decide, act, publish."""
        now = time.monotonic()
        await self._read_records(now)
        self._follow(newest((self._command, *(one.command for one in self.records.values())), self.swarm.swarm_id))
        await self._look_at_servers(now)
        before = self._decision
        self._decision = await asyncio.to_thread(self._decider.look, self._facts(), now)
        if self._decision.targets != before.targets:
            self._state.write("hosted.json", [_as_json(one) for one in self._decision.targets])
        self._act(now)
        await self._publish(now)

    async def _read_records(self, now: float) -> None:
        found = await self._register.read()
        members = {
            peer_id: record
            for peer_id, record in found.items()
            if record.peer_id == peer_id != self.peer.peer_id and self._is_member(record)
        }
        for peer_id, record in members.items():
            if self.records.get(peer_id) != record:
                self._seen_at[peer_id] = now
        if members != self.records:
            self.records = members
            addresses = [f"{addr}/p2p/{peer_id}" for peer_id, one in members.items() for addr in one.addrs[:2]]
            if addresses:
                self._state.write("peers.json", addresses[:64])
            self._note_change()

    def _is_member(self, record: MachineRecord) -> bool:
        before = self.records.get(record.peer_id)
        known = before is not None and before.member == record.member
        return known or record.is_member(self.swarm.swarm_id)

    def _follow(self, command: Command | None) -> None:
        """Adopt a newer command."""
        if command is None or command == self._command:
            self._keep_models()
            return
        logger.info("command %d of %s: %s", command.number, self._name_of(command.given_by), command.what)
        self._state.note_command(command)
        self._commands.append(command)
        self._command = command
        self._keep_models()
        self._note_change()

    def _keep_models(self) -> None:
        """Learn about models that are wanted now, and forget the others."""
        wanted = {one.manifest: one for one in self.wanted}
        for manifest in self._models.keys() - wanted.keys():
            self._left[manifest] = self._models.pop(manifest)
        for manifest, one in wanted.items():
            if manifest not in self._models:
                self._models[manifest] = self._left.pop(manifest) if manifest in self._left else _Model(one)
            model = self._models[manifest]
            if model.entry is None and (model.learning is None or model.learning.done()):
                model.learning = asyncio.get_running_loop().create_task(self._learn(model), name=f"learn {one.name}")
        hosted = {target.manifest for target in self._hostings.running}
        for manifest in self._left.keys() - hosted:
            del self._left[manifest]

    async def _learn(self, model: _Model) -> None:
        """Get the sizes of a model from its manifest."""
        try:
            givers = partial(self._givers, model.wanted.manifest)
            manifest = await self._store.manifest(model.wanted.manifest, givers())
            place = await self._store.fetch(manifest, None, client=False, givers=givers)
            entry, model.fingerprint = await asyncio.to_thread(_sizes_and_fingerprint, model.wanted.name, place)
            model.entry, model.problem = entry, entry.problem
        except SwarmError as error:
            model.problem = str(error)
            await asyncio.sleep(LOOK_S)
        self._note_change()

    async def _look_at_servers(self, now: float) -> None:
        """Read from the DHT which servers are online, and count the sessions of this machine's own."""
        for model in (*self._models.values(), *self._left.values()):
            if model.fingerprint:
                was_online = model.is_online()
                model.servers = await self._directory.servers(model.fingerprint)
                if model.is_online() != was_online:
                    self._note_change()
        sessions = {
            one.peer_id: one.num_sessions
            for model in (*self._models.values(), *self._left.values())
            for one in model.servers
        }
        for hosting in self._hostings.running.values():
            hosting.count_sessions(sessions.get(hosting.peer_id), now)

    def _facts(self) -> Facts:
        records = {**self.records, self.peer.peer_id: self.record()}
        if self.offer is None:
            records[self.peer.peer_id] = records[self.peer.peer_id].model_copy(update={"memory_bytes": 0})
        sizes = {manifest: one.sizes for manifest, one in self._models.items() if one.sizes is not None}
        number = self._command.number if self._command is not None else 0
        return Facts(own=self.peer.peer_id, records=records, wanted=self.wanted, sizes=sizes, command=number)

    def _act(self, now: float) -> None:
        """Start and end servers."""
        if self.offer is None:
            return
        own = self.record()
        targets = {
            one: span_bytes(sizes, one.quant_type, one.span)
            for one in self._decision.targets
            if (sizes := self._models[one.manifest].sizes) is not None and not has_failed(own, one.manifest)
        }
        children = [one.as_child(now) for one in self._hostings.running.values()]
        own_servers = frozenset(one.peer_id for one in self._hostings.running.values())
        steps = next_steps(
            targets,
            children,
            offered_bytes=self.offer.memory_bytes,
            wanted=[one.manifest for one in self.wanted],
            elsewhere=[manifest for manifest, one in self._models.items() if one.is_online(without=own_servers)],
        )
        for target, hosting in self._hostings.running.items():
            hosting.is_leaving = target in steps.leaving
        for target in steps.end:
            self._hostings.end(target)
        for target in steps.start:
            self._hostings.start(target, targets[target])

    async def _publish(self, now: float) -> None:
        """Publish the record, at the latest after `RENEWAL_S`. Before this machine knows its memory, the others would
        take its blocks away."""
        if self.offer is None:
            return
        record = self.record()
        if self._published is not None:
            before, at = self._published
            if before == record and now - at < RENEWAL_S:
                return
        while True:
            try:
                await self._register.publish(record, TTL_S)
                break
            except ConfigurationError:
                if not record.round_trips:
                    raise
                record = record.model_copy(update={"round_trips": record.round_trips[: len(record.round_trips) // 2]})
        self._published = self.record(), now

    # Servers

    async def _fetch(self, hosting: Hosting) -> Path:
        """Bring the weights of a server here."""
        target = hosting.target
        givers = partial(self._givers, target.manifest)
        manifest = await self._store.manifest(target.manifest, givers())

        def progress(now: Progress) -> None:
            hosting.took(now)
            self.changed.set()

        return await self._store.fetch(manifest, target.span, client=False, givers=givers, progress=progress)

    def _server_config(self, hosting: Hosting, place: Path) -> ServerConfig:
        target, model = hosting.target, self._models.get(hosting.target.manifest) or self._left[hosting.target.manifest]
        assert model.sizes is not None
        cache_bytes = len(target.span) * model.sizes.cache_bytes_per_token * model.sizes.cache_tokens
        needed = hosting.memory_bytes + int((CACHE_SLACK - 1) * cache_bytes) + SPARE_BYTES
        return ServerConfig(
            model=str(place),
            quant_type=target.quant_type,
            block_indices=(target.span.start, target.span.end),
            initial_peers=self.peer.join_maddrs,
            swarm_name=self.swarm.swarm_id,
            lan_discovery=False,
            host_maddrs=self.config.host_maddrs,
            device=self.config.device,
            nice=self.config.nice,
            max_memory=f"{needed / 1e9:.6f}GB",
            public_name=self.config.name,
            update_period=SERVER_PERIOD_S,
            stop_on_stdin_eof=True,
        )

    def _givers(self, manifest: str) -> list[Giver]:
        """The machines that give pieces of this model."""
        return [Giver(peer_id, one.addrs) for peer_id, one in sorted(self.records.items()) if manifest in one.gives]

    # What others see

    @property
    def wanted(self) -> tuple[Wanted, ...]:
        """The models of the newest command."""
        return self._command.wanted if self._command is not None else ()

    def record(self) -> MachineRecord:
        """The record of this machine as it is now."""
        offer = self.offer or Offer(0, 0.0, 0.0, ())
        return MachineRecord(
            peer_id=self.peer.peer_id,
            member=self._member,
            name=self.config.name,
            addrs=best_addrs(self.peer.addrs),
            memory_bytes=offer.memory_bytes,
            disk_left_bytes=_disk_left(self._state.path),
            bytes_per_s=offer.bytes_per_s,
            format_bytes_per_s=offer.format_bytes_per_s,
            ms_per_block=offer.ms_per_block,
            round_trips=tuple(sorted(self._round_trips.items()))[:16],
            hosted=self._hosted(),
            gives=self._store.gives(),
            command=self._command,
            page=self.page,
            version=__version__,
        )

    def _hosted(self) -> tuple[Hosted, ...]:
        """Blocks that this machine has chosen, also those whose server hasn't been started yet."""
        found = self._hostings.hosted(time.monotonic())
        failed = {one.manifest for one in found if one.state == "failed"}
        waiting = tuple(
            Hosting(one, 0).as_hosted()
            for one in self._decision.targets
            if one not in self._hostings.running and one.manifest not in failed
        )
        return (*found, *waiting)[:MAX_HOSTED]

    def _note_change(self) -> None:
        self.changed.set()
        self._look_now.set()

    def _name_of(self, peer_id: str) -> str:
        if peer_id == self.peer.peer_id:
            return self.config.name
        record = self.records.get(peer_id)
        return record.name if record is not None and record.name else peer_id[-8:]

    def invite(self) -> str:
        """The word that makes another machine a member."""
        others = [f"{addr}/p2p/{peer_id}" for peer_id, one in self.records.items() for addr in one.addrs[:1]]
        return str(self.swarm.invite([*self.peer.join_maddrs, *others]))

    def offered(self) -> list[Offered]:
        """The wanted models, as clients use them."""
        peers = self.peer.join_maddrs
        return [
            Offered(
                one.wanted.name,
                manifest,
                one.is_online(),
                one.place,
                initial_peers=peers,
                swarm_name=self.swarm.swarm_id,
            )
            for manifest, one in self._models.items()
        ]

    async def prepare(self, name: str) -> Path:
        """Bring the client's part of a wanted model here: embeddings, head, tokenizer.

        Raises:
            SwarmError: no such model is wanted, or nobody gives it.
        """
        model = next((one for one in self._models.values() if one.wanted.name == name), None)
        if model is None:
            raise ConfigurationError(f"the swarm doesn't serve {name!r}")
        if model.place is None:
            if model.preparing is None or model.preparing.done():
                model.preparing = asyncio.get_running_loop().create_task(self._bring(model), name=f"prepare {name}")
            model.place = await asyncio.shield(model.preparing)
            self.changed.set()
        return model.place

    async def _bring(self, model: _Model) -> Path:
        givers = partial(self._givers, model.wanted.manifest)
        manifest = await self._store.manifest(model.wanted.manifest, givers())
        return await self._store.fetch(manifest, None, client=True, givers=givers)

    # Commands

    async def use(self, model: str, *, add: bool = False) -> dict[str, Any]:
        """Let the swarm serve a model instead of all others, or besides them (`add`). Returns the command.

        Raises:
            SwarmError: it can't be found or served, or there are too many.
        """
        new = await self._add_model(model)
        kept = tuple(one for one in self.wanted if one.manifest != new.manifest) if add else ()
        if any(one.name == new.name for one in kept):
            raise ConfigurationError(f"the swarm serves another model of the name {new.name!r}: drop that one first")
        if len(kept) >= MAX_WANTED:
            raise ConfigurationError(f"the swarm serves {MAX_WANTED} models already: drop one first")
        return await self._give((*kept, new), f"{'add' if add else 'use'} {new.name}")

    async def _add_model(self, model: str) -> Wanted:
        """Find a model: on this machine, among those of earlier commands, or on the hub.

        Raises:
            SwarmError: it can't be found or served.
        """
        place = await asyncio.to_thread(_place_of, model)
        if place is not None:
            try:
                manifest = await self._store.add_local(place)
            except ConfigurationError:
                if place == model:  # else the hub's cache has only a part of it
                    raise
            else:
                name = manifest.name if place == model else model
                return await self._checked(Wanted(name=name, manifest=manifest.digest))
        for command in reversed(self._commands):
            for one in command.wanted:
                if one.name == model:
                    return one
        manifest = await self._store.add_from_hub(model)
        return await self._checked(Wanted(name=model, manifest=manifest.digest))

    async def _checked(self, wanted: Wanted) -> Wanted:
        """Raises: ConfigurationError: swarmllm can't serve it."""
        manifest = await self._store.manifest(wanted.manifest, ())
        place = await self._store.fetch(manifest, None, client=False, givers=list)
        entry, _ = await asyncio.to_thread(_sizes_and_fingerprint, wanted.name, place)
        if entry.sizes is None:
            raise ConfigurationError(f"{wanted.name} can't be served: {entry.problem}")
        return wanted

    async def drop(self, name: str) -> dict[str, Any]:
        """Let the swarm serve a model no more.

        Raises:
            ConfigurationError: no such model is wanted.
        """
        kept = tuple(one for one in self.wanted if one.name != name)
        if len(kept) == len(self.wanted):
            known = ", ".join(one.name for one in self.wanted) or "nothing"
            raise ConfigurationError(f"the swarm doesn't serve {name!r}, but {known}")
        return await self._give(kept, f"drop {name}")

    async def _give(self, wanted: tuple[Wanted, ...], what: str) -> dict[str, Any]:
        number = self._command.number + 1 if self._command is not None else 1
        command = Command(
            number=number, given_at=time.time(), given_by=self.peer.peer_id, wanted=wanted, what=what[:200]
        )
        signed = sign_command(command, self.swarm.key, self._identity)
        self._follow(newest((self._command, signed), self.swarm.swarm_id))
        self._look_now.set()
        return {"number": number, "what": what, "wanted": [one.model_dump() for one in wanted]}

    # Plans for people

    def _names(self) -> dict[str, str]:
        return {peer_id: self._name_of(peer_id) for peer_id in (*self.records, self.peer.peer_id)}

    async def catalogue(self) -> list[dict[str, Any]]:
        """All models that this machine knows, with their plan on the machines of the swarm, as if nothing else was
        served."""
        if self._catalogue is None or time.monotonic() - self._catalogue[0] > 60.0:
            self._catalogue = time.monotonic(), await asyncio.to_thread(entries, ())
        where = self._machines()
        listed = self._catalogue[1]
        answers = await asyncio.to_thread(lambda: [answer(one, where) for one in listed])
        return [{**one.as_json(where.names), "text": one.as_text(where.names)} for one in answers]

    def _machines(self) -> Machines:
        records = [*self.records.values(), self.record()]
        machines = tuple(machine_of(one, one.memory_bytes) for one in records)
        headline = f"{len(machines)} machine{'' if len(machines) == 1 else 's'} of the swarm"
        return Machines(machines, self._names(), links_of(records), NEAR, headline)

    async def preview(self, model: str, add: bool) -> dict[str, Any]:
        """The plan before and after `use(model, add=add)`. Changes nothing.

        Raises:
            SwarmError: it can't be found or served.
        """
        name, entry = await asyncio.to_thread(_entry_of_model, model)
        if entry.sizes is None:
            raise ConfigurationError(f"{name} can't be served: {entry.problem}")
        facts = self._facts()
        known = next((one.manifest for one in facts.wanted if one.name == name), "0" * 64)
        new = Wanted(name=name, manifest=known)
        kept = tuple(one for one in facts.wanted if one.manifest != known) if add else ()
        after = replace(facts, wanted=(*kept, new), sizes={**facts.sizes, known: entry.sizes})
        plans = await asyncio.to_thread(plan_models, after)
        plan, names = plans[known], self._names()
        present = {one.manifest: present_plan(facts, one) for one in facts.wanted if one.manifest in facts.sizes}
        missing = 0 if plan is not None else missing_bytes(self._machines().machines, entry.sizes)
        before = {one.name: _hosts(present.get(one.manifest), names) for one in facts.wanted}
        return {
            "model": name,
            "before": before,
            "after": {one.name: _hosts(plans.get(one.manifest), names) for one in after.wanted},
            "loaded_bytes": {} if plan is None else _loaded(present.get(known), plan, entry.sizes, names),
            "quant_type": plan and plan.format,
            "one_tokens_per_s": plan and round(plan.one_tokens_per_s, 3),
            "all_tokens_per_s": plan and round(plan.all_tokens_per_s, 3),
            "missing_bytes": missing,
        }

    def picture(self) -> dict[str, Any]:
        """The machines, models and commands for pages and `swarmllm use`."""
        now, own = time.monotonic(), self.record()
        records = {self.peer.peer_id: own, **self.records}
        names = {one.manifest: one.name for command in self._commands for one in command.wanted}
        machines = []
        for peer_id, one in records.items():
            is_here = peer_id == self.peer.peer_id
            machines.append(
                {
                    "peer_id": peer_id,
                    "name": self._name_of(peer_id),
                    "is_here": is_here,
                    "seen_s": 0.0 if is_here else round(now - self._seen_at.get(peer_id, now), 1),
                    "memory_bytes": one.memory_bytes,
                    "used_bytes": self._used_bytes(one),
                    "disk_left_bytes": one.disk_left_bytes,
                    "page": one.page,
                    "round_trip_ms": None if is_here else self._round_trips.get(peer_id),
                    "hosted": [_hosted_as_json(each, names) for each in one.hosted],
                }
            )
        by_manifest: dict[str, list[Hosting]] = {}
        for target, hosting in self._hostings.running.items():
            if target.manifest in self._left:
                by_manifest.setdefault(target.manifest, []).append(hosting)
        return {
            "swarm": {"id": self.swarm.swarm_id, "name": self.swarm.name, "open": self.swarm.is_open},
            "machines": machines,
            "models": [self._model_as_json(manifest, one) for manifest, one in self._models.items()],
            "commands": [self._command_as_json(one) for one in self._commands[-20:]],
            "leaving": [
                {"name": names.get(manifest, manifest[:8]), "sessions": max(one.num_sessions or 0 for one in hostings)}
                for manifest, hostings in by_manifest.items()
            ],
        }

    def _used_bytes(self, record: MachineRecord) -> int:
        """Memory of the blocks that a machine holds, as far as this one knows their sizes."""
        used = 0
        for one in record.hosted:
            model = self._models.get(one.manifest) or self._left.get(one.manifest)
            sizes = None if model is None else model.sizes
            if sizes is None or one.quant_type not in sizes.block_bytes or not one.start < one.end <= sizes.num_blocks:
                continue
            if one.state in ("online", "loading", "leaving"):
                used += span_bytes(sizes, one.quant_type, Span(one.start, one.end))
        return used

    def _model_as_json(self, manifest: str, model: _Model) -> dict[str, Any]:
        plan, names, sizes = self._decision.plans.get(manifest), self._names(), model.sizes
        problem, missing = model.problem, 0
        if sizes is None:
            state = "incomplete" if problem else "planning"
        elif manifest not in self._decision.plans:
            state = "planning"
        elif model.is_online():
            state = "ready"
        elif plan is None:
            state, missing = "does not fit", missing_bytes(self._machines().machines, sizes)
        else:
            state = "loading"
        if not problem and state != "ready":
            said = (one for record in (self.record(), *self.records.values()) for one in record.hosted)
            problem = next((one.problem for one in said if one.manifest == manifest and one.problem), "")
        return {
            "name": model.wanted.name,
            "manifest": manifest,
            "num_blocks": sizes.num_blocks if sizes is not None else 0,
            "quant_type": plan.format if plan is not None else model.wanted.quant_type,
            "state": state,
            "missing_bytes": missing,
            "one_tokens_per_s": round(plan.one_tokens_per_s, 3) if plan is not None else None,
            "hosts": _hosts(plan, names),
            "problem": problem,
        }

    def _command_as_json(self, command: Command) -> dict[str, Any]:
        by = self._name_of(command.given_by)
        return {
            "number": command.number, "what": command.what, "by": by, "peer_id": command.given_by,
            "at": command.given_at,
        }  # fmt: skip


# --- parts


def _open_store(
    config: MachineConfig, state: StateDirectory, peer: Peer, swarm: Membership, member: str
) -> WeightStore:
    return WeightStore(
        state.weights_path,
        peer,
        swarm_id=swarm.swarm_id,
        member=member,
        upload_mbps=config.upload_mbps,
        shares=config.share_weights,
        hub=Hub(token=hub_token()),
    )


@asynccontextmanager
async def _asking_peer(config: MachineConfig, state: StateDirectory) -> AsyncIterator[Peer]:
    """A peer that asks members of another swarm to let this machine in."""
    async with await Peer.create(
        identity_path=state.identity_path, host_maddrs=config.host_maddrs, direct_port=0
    ) as peer:
        yield peer


async def _member_peer(config: MachineConfig, state: StateDirectory, swarm: Membership) -> Peer:
    """Join the DHT of the swarm, or begin it again if nobody answers. The port stays the same, for invites.

    Raises:
        SwarmError: the network can't be used.
    """
    create = partial(
        Peer.create,
        host_maddrs=_with_noted_port(config.host_maddrs, state),
        identity_path=state.identity_path,
        relay=RelayRules(),
        reachability="auto",
        address_book=address_book_path(),
    )
    try:
        peer = await create(initial_peers=swarm.initial_peers)
    except PeerUnreachableError as error:
        logger.warning("no other machine of the swarm answers now, so this one begins alone: %s", error)
        peer = await create()
        peer.join_by(swarm.initial_peers)
    for addr in peer.addrs:
        parts = addr.split("/")
        if parts[3:4] == ["tcp"] and parts[4].isdecimal():
            state.write("port.json", {"port": int(parts[4])})
            break
    return peer


def _with_noted_port(maddrs: Sequence[str], state: StateDirectory) -> tuple[str, ...]:
    port = state.read("port.json", {}).get("port")
    if not isinstance(port, int) or not 0 < port < 1 << 16:
        return tuple(maddrs)
    noted = tuple(f"{one.removesuffix('/0')}/{port}" if one.endswith("/tcp/0") else one for one in maddrs)
    try:
        for one in noted:
            check_port_is_free(one)
    except ConfigurationError:  # another program has it now
        return tuple(maddrs)
    return noted


def _as_json(target: Target) -> dict[str, Any]:
    return {
        "manifest": target.manifest, "start": target.span.start, "end": target.span.end,
        "quant_type": target.quant_type,
    }  # fmt: skip


def _read_targets(state: StateDirectory) -> list[Target]:
    """Blocks that this machine served before it was restarted."""
    found = []
    for one in state.read("hosted.json", []):
        with suppress(KeyError, TypeError, ValueError):
            found.append(Target(str(one["manifest"]), Span(one["start"], one["end"]), str(one["quant_type"])))
    return found


def _place_of(model: str) -> str | None:
    """The place of a model on this machine: the path itself, or that of a name of the catalogue."""
    if model in (known := dict(models_to_list(()))):
        return known[model]
    return model if user_path(model).exists() else None


def _entry_of_model(model: str) -> tuple[str, Entry]:
    """The sizes of a model by its name or path. Only its config may come from the hub."""
    from swarmllm.models.checkpoint.checkpoint import open_checkpoint

    if model in known_models() and _place_of(model) is None:
        with known_checkpoint(model) as known:
            return model, entry_of(model, known, is_here=False)
    place = _place_of(model) or model
    checkpoint = open_checkpoint(place, cache_dir=default_cache_dir())
    name = checkpoint.public_name if place == model else model
    return name, entry_of(name, checkpoint, is_here=True)


def _sizes_and_fingerprint(name: str, place: Path) -> tuple[Entry, str]:
    from swarmllm.models.checkpoint.checkpoint import open_checkpoint
    from swarmllm.models.checkpoint.fingerprint import fingerprint

    checkpoint = open_checkpoint(str(place))
    return entry_of(name, checkpoint, is_here=True), fingerprint(checkpoint)


def _disk_left(path: Path) -> int:
    """Free bytes, rounded so that a record doesn't change all the time."""
    with suppress(OSError):
        return shutil.disk_usage(path).free >> 28 << 28
    return 0


def _hosts(plan: Plan | None, names: Mapping[str, str]) -> list[dict[str, Any]]:
    hosts = plan.hosts if plan is not None else ()
    return [
        {"peer_id": peer_id, "machine": names.get(peer_id, peer_id[-8:]), "start": span.start, "end": span.end}
        for peer_id, span in hosts
    ]


def _loaded(present: Plan | None, plan: Plan, sizes: PlannedModel, names: Mapping[str, str]) -> dict[str, int]:
    return {names.get(peer_id, peer_id[-8:]): count for peer_id, count in loaded_bytes(present, plan, sizes).items()}


def _hosted_as_json(hosted: Any, names: Mapping[str, str]) -> dict[str, Any]:
    return {"model": names.get(hosted.manifest, hosted.manifest[:8]), **hosted.model_dump(exclude={"manifest"})}
