"""The agent of a machine (`swarmllm up`): looks at the swarm of machines, plans, and serves this machine's blocks.

Every `LOOK_S` it reads the records of all members, follows the newest command, decides (`decisions`), starts and ends
servers (`hosting`), and publishes its own record. Nothing else is shared: no machine leads, and any may vanish.

The gateway's pages show `picture()` and `catalogue()`, and give commands by `use()` and `drop()`. Commands and blocks
are noted in the state directory, so that a machine goes on after a crash with the models that it served.

`Agent.start` enters the swarm, `run` works until it is cancelled, `close` leaves politely.
"""

import asyncio
import logging
import math
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from swarmllm.config import address_book_path, hub_token
from swarmllm.data_structures import Span
from swarmllm.errors import ConfigurationError, PeerUnreachableError, SwarmError
from swarmllm.invite import Invite
from swarmllm.machines.catalogue import (
    Entry,
    entries,
)
from swarmllm.machines.decisions import (
    Decider,
    Decision,
    Facts,
    Target,
    has_failed,
    next_steps,
    span_bytes,
)
from swarmllm.machines.hosting import Hosting, Hostings
from swarmllm.machines.hub import Hub
from swarmllm.machines.membership import (
    JOIN_PROTOCOL,
    SECOND_LOOK_S,
    Doorkeeper,
    Membership,
    find_membership,
    join_open_swarm,
    note_membership,
)
from swarmllm.machines.models import SwarmModels
from swarmllm.machines.offers import (
    ECHO_PROTOCOL,
    ECHO_S,
    Offer,
    answer_echoes,
    measure_offer,
    measure_round_trip_ms,
)
from swarmllm.machines.picture import View, catalogue, picture, preview
from swarmllm.machines.records import (
    LAST_NUMBER,
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
from swarmllm.machines.reunion import Reunion
from swarmllm.machines.settings import MachineConfig
from swarmllm.machines.state import NUM_KEPT_COMMANDS, StateDirectory
from swarmllm.machines.weights import Giver, Progress, WeightStore
from swarmllm.network.p2p.addresses import best_addrs, is_loopback, on_port, port_of
from swarmllm.network.p2p.block_directory import BlockDirectory, Register, machines_key
from swarmllm.network.p2p.discovery import HERE_FILE, LanAnnouncement, lan_addresses
from swarmllm.network.p2p.identity import Identity
from swarmllm.network.p2p.peer import Peer
from swarmllm.network.relay.service import RelayRules
from swarmllm.network.wire.stream import FrameStream
from swarmllm.server.downloads import in_background
from swarmllm.server.settings import ServerConfig
from swarmllm.version import __version__

logger = logging.getLogger(__name__)

LOOK_S = 1.0
"""Seconds between two looks at the swarm."""
SECOND_LOOK_AFTER_S = 0.5
"""Seconds until it looks again if a new plan is considered. Measured: records become visible in 40–180 ms."""
FORGET_S = 6.0
"""Seconds for which a record counts that a look has not found again. A look may miss some on a busy network."""
NUM_ECHOES = 8
"""Most machines whose round trips are measured in a round."""
RENEWAL_S = 6.0
"""Seconds after which a record is published again, though nothing changed."""
TTL_S = 20.0
"""Seconds until the record of a machine that has vanished expires. Assumed: a busy machine misses two renewals."""
SERVER_PERIOD_S = 5.0
"""`update_period` of the servers: their sessions are counted by what they announce."""
CACHE_SLACK = 1.3
"""A server gets more memory for caches than the plan counts, because it keeps a share for other uses."""
SPARE_BYTES = 64 << 20
"""More memory for each server: pages of prompts, adapters, scratch."""
CATALOGUE_S = 60.0
"""Seconds for which a list of models counts: making one reads their configs."""


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
        self._command = newest(self._commands, swarm.swarm_id, math.inf)  # `_look_once` looks at the clock
        noted = [one for one in _read_targets(state) if any(one.manifest == each.manifest for each in self.wanted)]
        self._decider = Decider(noted)
        self._decision = Decision({}, tuple(noted))
        self._hostings = Hostings(self._fetch, self._server_config, self._note_change)
        self._register = Register(peer, machines_key(swarm.swarm_id), MachineRecord)
        directory = BlockDirectory(peer, swarm.swarm_id)
        self._reunion = Reunion(peer, swarm.swarm_id, on_lan=config.lan_discovery)
        self._models = SwarmModels(self._store, directory, self._givers, self._note_change)
        self._published: tuple[MachineRecord, float] | None = None
        self._round_trips: dict[str, float] = {}
        self._listed: tuple[float, list[Entry]] | None = None
        """The catalogue of this machine, and when it was made."""
        self._look_now = asyncio.Event()
        self._told: dict[str, Any] = {}
        """Content of `HERE_FILE`."""
        self._doorkeeper = Doorkeeper(swarm)
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
        agent = await cls._begin(config, state, found, identity)
        is_new = not found.initial_peers and not state.commands() and found.is_open and config.lan_discovery
        try:
            agent._doorkeeper.is_settled = not is_new
            await agent._open_doors()
            if is_new and lan_addresses(agent.peer.addrs)[0]:
                other = await agent._look_for_an_older_swarm()
                if other is not None:
                    await agent.close()
                    agent = await cls._begin(config, state, other, identity)
                    await agent._open_doors()
            agent._doorkeeper.is_settled = True
        except BaseException:
            await agent.close()
            raise
        return agent

    @classmethod
    async def _begin(
        cls, config: MachineConfig, state: StateDirectory, swarm: Membership, identity: Identity
    ) -> "Agent":
        """Join the swarm, and only then note it: a machine that can't start stays in the swarm where it was."""
        peer = await _member_peer(config, state, swarm)
        try:
            note_membership(state, swarm)
            return cls(config, state, swarm, peer, identity)
        except BaseException:
            await peer.close()
            raise

    async def _open_doors(self) -> None:
        """Let other machines in, and let members take weights.

        Raises:
            ConfigurationError: the store of weights can't be read.
        """
        try:
            await self._store.start()
        except OSError as error:
            raise ConfigurationError(f"{self._state.weights_path} can't be used: {error.strerror}") from None
        await self.peer.serve_protocol(JOIN_PROTOCOL, self._doorkeeper.serve)
        await self.peer.serve_protocol(ECHO_PROTOCOL, answer_echoes)
        await self.peer.serve_streams(self._give_weights)
        self._lan.start()
        await self._lan.announced()

    async def _give_weights(self, stream: FrameStream) -> None:
        with suppress(PeerUnreachableError):  # the taker hangs up when it has all
            await self._store.serve(stream)

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
            tasks.create_task(self._reunion.look_forever(), name="look for members")
            tasks.create_task(self._look_forever(), name="look at the swarm")
            tasks.create_task(self._measure_round_trips(), name="measure round trips")

    async def close(self) -> None:
        """End the servers politely, withdraw the record, leave the swarm."""
        self._state.remove(HERE_FILE)
        self._models.close()
        await self._lan.end()
        await self._hostings.close()
        await self._store.close()
        if self._published is not None:
            with suppress(SwarmError, TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._register.publish(None, 0.0)
        await self.peer.close()

    async def _watch_daemon(self) -> None:
        await self.peer.daemon_exited()
        raise PeerUnreachableError("the peer-to-peer daemon (p2pd) died, so this machine is alone: start it again")

    async def _measure(self) -> None:
        self.offer = await in_background(partial(measure_offer, self.config, self._state))
        self._note_change()
        self._hostings.keep_one_ready()

    async def _measure_round_trips(self) -> None:
        """Measure the round trips to the machines that were measured the longest time ago, again and again."""
        measured_at: dict[str, float] = {}
        while True:
            others = sorted(self.records, key=lambda peer_id: (measured_at.get(peer_id, 0.0), peer_id))[:NUM_ECHOES]
            for peer_id in others:
                measured_at[peer_id] = time.monotonic()
                with suppress(SwarmError, OSError, TimeoutError, EOFError):
                    self._round_trips[peer_id] = await measure_round_trip_ms(
                        self.peer, peer_id, self.records[peer_id].addrs
                    )
            for peer_id in self._round_trips.keys() - self.records.keys():
                del self._round_trips[peer_id]
            await asyncio.sleep(ECHO_S if others else LOOK_S)

    # The loop

    async def _look_forever(self) -> None:
        while True:
            try:
                await self._look_once(time.monotonic())
            except SwarmError as error:  # the network is down
                logger.warning("can't look at the swarm now: %s", error)
            with suppress(TimeoutError):
                async with asyncio.timeout(SECOND_LOOK_AFTER_S if self._decider.is_considering else LOOK_S):
                    await self._look_now.wait()
            self._look_now.clear()

    async def _look_once(self, now: float) -> None:
        """Read, follow the newest command, decide, act, publish."""
        await self._read_records(now)
        if (command := self._command) is not None and not command.may_be_given_by(time.time()):
            logger.warning("this machine's clock was set back: it gives the newest command again, for the others")
            await self._give(command.wanted, command.what)
        commands = (self._command, *(one.command for one in self.records.values()))
        self._follow(newest(commands, self.swarm.swarm_id, time.time()))
        sessions = await self._models.look_at_servers()
        for hosting in self._hostings.running.values():
            hosting.count_sessions(sessions.get(hosting.peer_id), now)
        before = self._decision
        self._decision = await in_background(partial(self._decider.look, self._facts(), now))
        if self._decision.targets != before.targets:
            self._state.keep("hosted.json", [_as_json(one) for one in self._decision.targets])
        self._act(now)
        await self._store.need({*self._models.wanted, *self._models.left})
        await self._publish(now)
        self._tell_programs_here()

    def _tell_programs_here(self) -> None:
        """Note how clients on this machine reach the swarm (`discovery.SwarmHere`)."""
        models = {one.fingerprint: one.wanted.name for one in self._models.wanted.values() if one.fingerprint}
        swarm, peers = self.swarm, list(self.peer.join_maddrs)
        told = {
            "name": swarm.name or swarm.swarm_id[-8:], "swarm_name": swarm.swarm_id, "initial_peers": peers,
            "models": models, "places": sorted(str(one.place or "") for one in self._models.wanted.values()),
        }  # fmt: skip
        if told != self._told and self._state.keep(HERE_FILE, told):
            self._told = told

    async def _read_records(self, now: float) -> None:
        found = await self._register.read()
        members = {
            peer_id: record
            for peer_id, record in found.items()
            if record.peer_id == peer_id != self.peer.peer_id and self._is_member(record)
        }
        for peer_id in members:
            self._seen_at[peer_id] = now
        for peer_id in self.records.keys() - members.keys():
            if now - self._seen_at[peer_id] < FORGET_S:
                members[peer_id] = self.records[peer_id]
        if members != self.records:
            self._reunion.note(self.records, members, now)
            self.records = members
            addresses = [maddr for one in members.values() for maddr in one.initial_peers[:2]]
            if addresses:
                self._state.keep("peers.json", addresses[:64])
            self._note_change()

    def _is_member(self, record: MachineRecord) -> bool:
        before = self.records.get(record.peer_id)
        known = before is not None and before.member == record.member
        return known or record.is_member(self.swarm.swarm_id)

    def _follow(self, command: Command | None) -> None:
        """Adopt a newer command."""
        if command is None or (self._command is not None and command.rank() <= self._command.rank()):
            self._keep_models()
            return
        logger.info("command %d of %s: %s", command.number, self._name_of(command.given_by), command.what)
        self._state.note_command(command)
        self._commands = [*self._commands, command][-NUM_KEPT_COMMANDS:]  # for people: only the newest one counts
        self._command = command
        self._keep_models()
        self._note_change()

    def _keep_models(self) -> None:
        self._models.keep(self.wanted, {target.manifest for target in self._hostings.running})

    def _facts(self) -> Facts:
        records = {self.peer.peer_id: self.record(), **self.records}
        sizes = {manifest: one.sizes for manifest, one in self._models.wanted.items() if one.sizes is not None}
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
            # A command may have come while the plan was made.
            if (model := self._models.wanted.get(one.manifest)) is not None
            and (sizes := model.sizes) is not None
            and not has_failed(own, one.manifest)
        }
        children = [one.as_child(now) for one in self._hostings.running.values()]
        own_servers = frozenset(one.peer_id for one in self._hostings.running.values())
        steps = next_steps(
            targets,
            children,
            offered_bytes=self.offer.memory_bytes,
            wanted=[one.manifest for one in self.wanted],
            elsewhere=[manifest for manifest, one in self._models.wanted.items() if one.is_online(without=own_servers)],
        )
        for target, hosting in self._hostings.running.items():
            hosting.note_leaving(target in steps.leaving, now)
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
                shorter = _shorter(record)
                if shorter == record:
                    raise
                record = shorter
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
        target, model = hosting.target, self._models.get(hosting.target.manifest)
        assert model is not None
        assert model.sizes is not None
        assert self.offer is not None
        cache_bytes = len(target.span) * model.sizes.cache_bytes_per_token * model.sizes.cache_tokens
        most_blocks = -(-len(target.span) // self.offer.num_devices)  # devices share them evenly
        needed = (hosting.memory_bytes + (CACHE_SLACK - 1) * cache_bytes) * most_blocks / len(target.span) + SPARE_BYTES
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
            max_memory=f"{min(needed, self.offer.device_bytes) / 1e9:.6f}GB",
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
            kept_bytes=self._store.kept_bytes,
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
        return (*self._models.failures(), *found, *waiting)[:MAX_HOSTED]

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
        others = [maddr for one in self.records.values() for maddr in one.initial_peers[:1]]
        known = [*self.peer.join_maddrs, *others]
        return str(self.swarm.invite([maddr for maddr in known if not is_loopback(maddr)] or known))

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
            for manifest, one in self._models.wanted.items()
        ]

    async def prepare(self, name: str) -> Path:
        """Bring the client's part of a wanted model here: embeddings, head, tokenizer.

        Raises:
            SwarmError: no such model is wanted, or nobody gives it.
        """
        return await self._models.prepare(name)

    # Commands

    async def use(self, model: str, *, add: bool = False) -> dict[str, Any]:
        """Let the swarm serve a model instead of all others, or besides them (`add`). Returns the command.

        Raises:
            SwarmError: it can't be found or served, or there are too many.
        """
        new = await self._models.find(model, self._commands)
        kept = tuple(one for one in self.wanted if one.manifest != new.manifest) if add else ()
        if any(one.name == new.name for one in kept):
            raise ConfigurationError(f"the swarm serves another model of the name {new.name!r}: drop that one first")
        if len(kept) >= MAX_WANTED:
            raise ConfigurationError(f"the swarm serves {MAX_WANTED} models already: drop one first")
        return await self._give((*kept, new), f"{'add' if add else 'use'} {new.name}")

    async def drop(self, name: str) -> dict[str, Any]:
        """Let the swarm serve a model no more.

        Raises:
            ConfigurationError: no such model is wanted.
        """
        kept = tuple(one for one in self.wanted if one.name != name)
        if len(kept) == len(self.wanted):
            known = ", ".join(one.name for one in self.wanted)
            raise ConfigurationError(
                f"the swarm doesn't serve {name!r}{f', but {known}' if known else '; it serves nothing'}"
            )
        return await self._give(kept, f"drop {name}")

    async def _give(self, wanted: tuple[Wanted, ...], what: str) -> dict[str, Any]:
        number, given_at = 1, time.time()
        if (before := self._command) is not None:
            number = min(before.number + 1, LAST_NUMBER)
            if before.may_be_given_by(given_at):
                given_at = max(given_at, math.nextafter(before.given_at, math.inf))
            else:  # this machine's clock was set back: the others wouldn't follow a later command
                self._command = None
        command = Command(number=number, given_at=given_at, given_by=self.peer.peer_id, wanted=wanted, what=what[:200])
        signed = sign_command(command, self.swarm.key, self._identity)
        self._follow(signed)
        self._look_now.set()
        return {"number": number, "what": what, "wanted": [one.model_dump() for one in wanted]}

    # Plans for people

    # For people

    def picture(self) -> dict[str, Any]:
        """The machines, models and commands, for pages and `swarmllm use`."""
        return picture(self._view())

    async def catalogue(self) -> list[dict[str, Any]]:
        """All models that this machine knows, with their plan on the machines, as if nothing else was served."""
        if self._listed is None or time.monotonic() - self._listed[0] > CATALOGUE_S:
            self._listed = time.monotonic(), await in_background(partial(entries, ()))
        names = {one.name for one in self._listed[1]}
        known = [one.entry for one in self._models if one.entry is not None and one.wanted.name not in names]
        return await catalogue(self._view(), [*known, *self._listed[1]])

    async def preview(self, model: str, add: bool) -> dict[str, Any]:
        """The plan before and after `use(model, add=add)`. Changes nothing.

        Raises:
            SwarmError: the model can't be found or served.
        """
        return await preview(self._view(), model, add)

    def _view(self) -> View:
        now, facts = time.monotonic(), self._facts()
        return View(
            facts=facts,
            swarm=self.swarm,
            names={peer_id: self._name_of(peer_id) for peer_id in facts.records},
            seen_s={peer_id: now - self._seen_at[peer_id] for peer_id in self.records},
            round_trips=self._round_trips,
            commands=self._commands,
            models=self._models,
            plans=self._decision.plans,
            hostings=tuple(self._hostings.running.values()),
        )


# --- parts


def _shorter(record: MachineRecord) -> MachineRecord:
    """The record with less that others can do without, for the DHT."""
    if record.round_trips:
        return record.model_copy(update={"round_trips": record.round_trips[: len(record.round_trips) // 2]})
    hosted = [one.model_copy(update={"problem": one.problem[:40]}) for one in record.hosted]
    return record.model_copy(update={"hosted": tuple(hosted)})


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
    port = state.read("port.json", {}).get("port")
    create = partial(
        Peer.create,
        host_maddrs=on_port(config.host_maddrs, port if isinstance(port, int) else None),
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
    if (port := port_of(peer.addrs)) is not None:
        state.write("port.json", {"port": port})
    return peer


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


def _disk_left(path: Path) -> int:
    """Free bytes, rounded so that a record doesn't change all the time."""
    with suppress(OSError):
        return shutil.disk_usage(path).free >> 28 << 28
    return 0
