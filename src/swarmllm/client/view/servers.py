"""The servers of one checkpoint: their blocks, their round trips, and which of them a client may use.

Used by `SwarmView`, `routes` and spot checks; runs in the client's event loop. `LookUps` is this client's node of the
DHT. Anybody can invent announcements: `p2p/verified_peers` says which servers were greeted. `Distances` pings servers
as long as the client is in use, over streams that are open anyway and over new ones.

`check_claims` compares each greeting with the traits that this client has found itself:

    trait                      the value that counts
    batch_axis, block_output   the client's: a server that claims another value is left out
    takes_source, encoder      the same
    extra_inputs               the client's: a server that asks for more is left out, one that asks for less is used
    forbidden_cuts             the client's where the client cuts; each server's for its own blocks, in routes
    skips_padding, length_borders, own_length_beyond
                               the client's: servers have no say
    chunked_prefill, rollback  the client's; a server that claims less is used only if no other one serves its blocks,
                               and then the client does without this ability at all servers. An accelerator may run
                               other code, which can do less than the client has found

If the model can't be tried here (`models/span/small_copy`), only servers in the user's `allowed_servers` are believed.
By these rules, no server gets inputs that the model doesn't need. Add a new trait of `BlockTraits` to one of the tuples
below, or write a function for it here.

If servers hold different weights for the same blocks, a client uses one version (`AgreedWeights`), because the caches
of a session were computed with it. Verified servers vote, unless they are avoided. A server with a false digest can
win the vote. It is then used until it fails or is caught; after that the servers vote again. This is no worse than a
liar that copies the others' digests.

Servers announce adapters as `name@digest`. A client uses one version of `ClientConfig.active_adapter` as long as it
runs (`ActiveAdapter`), for the same reason.

Honest servers differ a little, by dtype and quantization. Spot checks allow for that (`honest_error`). A server whose
honest error is above the client's tolerance can't be checked and isn't used (`is_checkable`).
"""

import asyncio
import itertools
import logging
import math
import os
import random
import time
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from weakref import WeakSet

from swarmllm.client.view.connection import Connection
from swarmllm.config import ClientConfig, address_book_path, is_of_machines
from swarmllm.data_structures import BlockTraits, RouteHop, ServedBlocks, ServerInfo, Span, StackTraits, SwarmSnapshot
from swarmllm.errors import (
    ConfigurationError,
    MissingBlocksError,
    RemoteProtocolError,
    SwarmError,
    WeightsMismatchError,
)
from swarmllm.network.p2p.block_directory import BlockDirectory
from swarmllm.network.p2p.discovery import LOOK_ON_S, SwarmHere, find_swarm, find_swarm_here
from swarmllm.network.p2p.identity import Identity
from swarmllm.network.p2p.peer import Peer
from swarmllm.network.p2p.verified_peers import CheckGreeting, VerifiedPeers
from swarmllm.swarm.block_map import describe_different_weights
from swarmllm.swarm.claims import agreed_digests, contradicts
from swarmllm.swarm.retry import PeerHealth
from swarmllm.swarm.round_trips import RoundTrips
from swarmllm.swarm.stacks import describe_span, how_to_serve

logger = logging.getLogger(__name__)


PINGS_PER_ROUND = 8
"""Most servers to ping in one round."""
NEIGHBOURS_MET = 8
"""Most servers that the client greets after each look. It is connected to their DHT nodes anyway."""

PING_SAMPLES = 3
"""Pings per measurement. The shortest counts: the others include delays."""
LAN_LOOK_INTERVAL_S = 5.0
"""Seconds between looks at the local network while no peer answers. Assumed; a look takes 3 s."""
IDLE_S = 120.0
"""Seconds without a route or a step after which the client stops pinging."""


class LookUps:
    """The known servers of one checkpoint, and how to look for more."""

    def __init__(
        self, config: ClientConfig, *, name: str, fingerprint: str, num_blocks: int, check_greeting: CheckGreeting
    ) -> None:
        self.config = config
        self.name = name
        """The model's name in the swarm."""
        self.fingerprint = fingerprint
        self.num_blocks = num_blocks
        self.spans: tuple[Span, ...] = (Span(0, num_blocks),)
        """The blocks that servers are to run."""
        self.encoder_blocks = 0
        """Number of the encoder's blocks, which are the first ones."""
        self.snapshot = SwarmSnapshot(num_blocks=num_blocks)
        self._refused: tuple[ServerInfo, ...] = ()
        """Servers of the model that the user's settings leave out."""
        path = config.contributor_identity
        contributor = None if path is None else Identity.load(path)
        self.verified = VerifiedPeers(lambda: self.peer, fingerprint, contributor=contributor, check=check_greeting)
        self.news = 0
        """Counts looks and rounds of pings: after each, a session may find a better route."""
        self.is_outdated = False
        """A server has failed since the last look, so announcements may be outdated."""
        self._peer: Peer | None = None
        self._refreshing = asyncio.Lock()
        self._lan_look: asyncio.Task[None] | None = None
        self._lan_looked_at = -math.inf
        self._here: SwarmHere | None = None
        """The swarm of this machine's agent, if this client found it there."""

    @property
    def peer(self) -> Peer:
        """This process as a peer of the swarm."""
        if self._peer is None:
            raise RuntimeError("the swarm view is not connected")
        return self._peer

    async def connect(self) -> None:
        """Join the swarm's DHT as a client.

        Raises:
            ConfigurationError: no initial peers, and discovery is off; or one is not an address.
            MissingBlocksError: the local network has no peers either.
            PeerUnreachableError: none of them answers.
        """
        initial_peers = self.config.initial_peers
        if not initial_peers:
            if not self.config.lan_discovery:
                raise ConfigurationError(
                    "name peers of the swarm with --initial_peers (in Python: initial_peers=[…]), which servers "
                    "print when they start, or set SWARMLLM_INITIAL_PEERS"
                )
            initial_peers = await self._find_swarm()
        self._peer = await Peer.create(
            initial_peers=initial_peers,
            identity_path=self.config.identity_path,
            client_mode=True,
            address_book=address_book_path(),
        )
        self._peer.prefer_records(self.verified.__contains__)
        self._directory = BlockDirectory(self._peer, self._swarm_name)

    @property
    def _swarm_name(self) -> str | None:
        return self.config.swarm_name if self._here is None else self._here.swarm_name

    async def _find_swarm(self) -> tuple[str, ...]:
        """Initial peers of the swarm that this machine is in (`_here`) if it serves the model, else of one of the local
        network.

        Raises:
            MissingBlocksError: there is neither.
        """
        here = await find_swarm_here()
        if here is None or self.fingerprint not in here.models:
            look_on_s = min(LOOK_ON_S, self.config.start_timeout_s) if here is None else 0.0
            try:
                return await find_swarm(self.name, self.fingerprint, look_on_s=look_on_s)
            except MissingBlocksError as error:
                if here is None:
                    raise
                here = await find_swarm_here() or here  # the command may have come just now
                if self.fingerprint not in here.models:
                    told = f"{here.told}: give it this one by `swarmllm use {self.name}`"
                    raise MissingBlocksError(f"{told}; besides, {error}", error.block_idxs) from None
        logger.info("the swarm of this machine serves %s: %s", self.name, here.name)
        self._here = here
        return here.initial_peers

    async def close(self) -> None:
        """Leave the DHT and end the daemon."""
        if self._lan_look is not None:
            self._lan_look.cancel()
            await asyncio.gather(self._lan_look, return_exceptions=True)
        await self.verified.close()
        if self._peer is not None:
            await self._peer.close()
            self._peer = None

    async def refresh(self) -> SwarmSnapshot:
        """Look into the DHT now; concurrent calls share one look."""
        asked_at = time.monotonic()
        async with self._refreshing:
            if self.snapshot.taken_at < asked_at:
                if self.peer.is_alone and self._found_on_lan:
                    self._look_at_lan_soon()
                servers = await self._directory.servers(self.fingerprint)
                fitting = [server for server in servers if server.end <= self.num_blocks]
                usable = tuple(filter(self._may_use, fitting))
                self._refused = tuple(itertools.filterfalse(self._may_use, fitting))
                self.snapshot = SwarmSnapshot(self.num_blocks, usable, self.encoder_blocks, taken_at=time.monotonic())
                self.verified.forget_others(usable)
                if len(online := self.snapshot.online()) > PINGS_PER_ROUND:  # otherwise pings greet all of them
                    self.verified.verify_soon(self.verified.neighbours(online)[:NEIGHBOURS_MET])
                self.news += 1
            return self.snapshot

    @property
    def _found_on_lan(self) -> bool:
        return not self.config.initial_peers and self._here is None

    def _look_at_lan_soon(self) -> None:
        """Look for servers that were started after the last peer was lost, at new addresses."""
        now = time.monotonic()
        if self._lan_look is not None and not self._lan_look.done():
            return
        if now - self._lan_looked_at >= LAN_LOOK_INTERVAL_S:
            self._lan_looked_at = now
            self._lan_look = asyncio.get_running_loop().create_task(self._look_at_lan(), name="look at the LAN again")

    async def _look_at_lan(self) -> None:
        try:
            found = await find_swarm(self.name, self.fingerprint, look_on_s=0.0)
        except MissingBlocksError:
            return  # the error of the route will name the missing blocks
        self.peer.join_by(found)

    async def look_again(self) -> None:
        """`refresh`, whose failure is only logged."""
        try:
            await self.refresh()
        except SwarmError as error:
            logger.warning("could not look into the DHT: %s", error)

    async def check_fingerprint(self) -> None:
        """Check whether the swarm serves another checkpoint of this name. Call it if no server has this checkpoint.

        Raises:
            WeightsMismatchError: the swarm serves another one.
        """
        for record in (await self._directory.models()).values():
            if record.name == self.name and record.fingerprint != self.fingerprint:
                raise WeightsMismatchError(
                    f"the swarm serves another version of {self.name} (fingerprint {record.fingerprint[:12]}) "
                    f"than yours ({self.fingerprint[:12]}): use the same revision and files as its servers"
                )

    async def explained(
        self, error: MissingBlocksError, adapter: str | None, left_out: str, waited_s: float = 0.0
    ) -> MissingBlocksError:
        """The error with a text that names the mend.

        `adapter`: the adapter that servers must have; `left_out`: half a sentence about servers with other weights;
        `waited_s`: seconds for which the caller has waited for them.
        """
        names = sorted({record.name for record in (await self._directory.models()).values()})
        if settings := self._refused_by(error.block_idxs):
            return MissingBlocksError(
                f"{error} of {self.name} but servers that your {settings} leaves out: change it, or start others",
                error.block_idxs,
            )
        if not self.snapshot.servers and self.peer.is_alone:
            place = "on this network" if self._found_on_lan else "where it was"
            return MissingBlocksError(
                f"nobody serves {self.name}: no peer of the swarm that this one has met answers any more; start one "
                f"again {place}, or name peers that are there with --initial_peers",
                error.block_idxs,
            )
        if not self.snapshot.servers:
            others = f"; this swarm serves {', '.join(names)}" if names else "; this swarm serves no model at all"
            if is_of_machines(self._swarm_name):
                others = "; on one of the swarm's machines, `swarmllm use` shows what they serve and load"
            return MissingBlocksError(f"nobody serves {self.name}{others}", error.block_idxs)
        if adapter is not None:
            return MissingBlocksError(
                f"{error} of {self.name} with the adapter {adapter}: start servers with --adapters {adapter}, "
                "or leave active_adapter out",
                error.block_idxs,
            )
        if left_out:
            return MissingBlocksError(f"{error} of {self.name}{left_out}", error.block_idxs)
        text = f"{error} of {self.name} (waited {waited_s:.0f} s)"
        if missing := error.block_idxs:  # empty if the servers' spans can't be joined
            text += f": {how_to_serve(missing, self.name, self.config.initial_peers, self._swarm_name)}"
        return MissingBlocksError(text, missing)

    def _refused_by(self, block_idxs: Sequence[int]) -> str:
        """The setting by which this client leaves out all servers of one of these blocks; "" if others have them."""
        left = [block for block in block_idxs if not any(block in one.span for one in self.snapshot.servers)]
        if not any(block in server.span for server in self._refused for block in left):
            return ""
        config = self.config
        given = {
            "allowed_servers": config.allowed_servers is not None,
            "blocked_servers": bool(config.blocked_servers),
            "verify_fraction": bool(config.verify_fraction),
        }
        return " or ".join(name for name, is_given in given.items() if is_given)

    def _may_use(self, server: ServerInfo) -> bool:
        config, peer_id = self.config, server.peer_id
        if peer_id in config.blocked_servers or (config.verify_fraction and not is_checkable(server, config)):
            return False
        return config.allowed_servers is None or peer_id in config.allowed_servers


class Distances:
    """The pings of one client."""

    def __init__(self, config: ClientConfig, look_ups: LookUps, health: PeerHealth) -> None:
        self.round_trips = RoundTrips()
        self.connections: WeakSet[Connection] = WeakSet()
        """Streams that are open anyway."""
        self.used_at = -math.inf
        """`time.monotonic()` of the last route or step."""
        self._config = config
        self._look_ups = look_ups
        self._health = health
        self._random = random.Random()  # not the module's generator, which the user's program may have seeded

    async def keep_measuring(self) -> None:
        """Look into the DHT and ping servers, as long as this client is in use."""
        while True:
            await asyncio.sleep(self._config.ping_period_s)
            now = time.monotonic()
            if now - self.used_at > IDLE_S:
                continue
            if now - self._look_ups.snapshot.taken_at > self._config.update_period_s:
                await self._look_ups.look_again()
            await self.ping_some()

    async def ping_some(self) -> None:
        """Ping servers with open streams, and then others; at most `PINGS_PER_ROUND` in all."""
        now = time.monotonic()
        in_use = {c.peer_id: c for c in self.connections if c.error is None}
        others = self.round_trips.to_measure(
            self._look_ups.snapshot,
            count=max(0, PINGS_PER_ROUND - len(in_use)),
            avoid=self._health.avoided(now) | in_use.keys(),
            generator=self._random,
        )
        connected = self._random.sample(list(in_use.values()), min(PINGS_PER_ROUND, len(in_use)))
        await asyncio.gather(
            *(self._ping(connection.server, connection) for connection in connected),
            *(self._ping(server) for server in others),
        )
        self._look_ups.news += 1

    async def _ping(self, server: ServerInfo, connection: Connection | None = None) -> None:
        """Measure one server's round trip, over `connection` or a new stream. Skip it if it can't be reached."""
        self.round_trips.begin(server.peer_id, time.monotonic())
        try:
            async with asyncio.timeout(self._config.connect_timeout_s):
                if connection is not None:
                    samples = [await connection.ping() for _ in range(PING_SAMPLES)]
                    self._look_ups.verified.renew(server)
                else:
                    samples = await self._ping_over_new_stream(server)
        except (SwarmError, TimeoutError) as error:
            logger.debug("no ping to %s: %s", server.peer_id, error)
            self.round_trips.fail(server.peer_id)
            return
        self.round_trips.observe(server.peer_id, 1e3 * min(samples), time.monotonic())

    async def _ping_over_new_stream(self, server: ServerInfo) -> list[float]:
        timeout_s = self._config.connect_timeout_s
        stream, _ = await self._look_ups.verified.open_stream(server, timeout_s=timeout_s)
        try:
            return [await stream.ping() for _ in range(PING_SAMPLES)]
        finally:
            stream.abort()


SAME = ("batch_axis", "block_output")
"""Traits of a stack that a server must claim as this client has found them."""
ABILITIES = ("chunked_prefill", "rollback")
"""Traits of a stack that say what its blocks can do. A server may claim less."""

BY_DTYPE = {"float64": 1e-3, "float32": 1e-3, "float16": 0.05, "bfloat16": 0.1}
"""Relative error of one position's hidden states. Assumed: ten times the error from other batch shapes and
numbers of threads."""
BY_QUANT_TYPE = {
    "none": 0.0, "int8": 0.15, "q8_0": 0.15, "q6_k": 0.25, "llm_int8": 0.3, "int6": 0.3, "q5_k": 0.35, "int5": 0.4,
    "q4_k": 0.45, "int4": 0.5, "nf4": 0.5, "q3.5": 0.7, "int3": 0.8, "int2": 2.0,
}  # fmt: skip
"""Relative error of one position between a server that quantizes and one that doesn't. Measured through all blocks of
the embedded model, the largest error of 2400 positions in 20 texts: int8 0.029, llm_int8 0.081, int6 0.078, int5 0.17,
int4 0.27, nf4 0.41, q3.5 0.43, int3 0.46, int2 1.23; q8_0 0.013, q6_k 0.035, q5_k 0.081, q4_k 0.14; bfloat16, which
comes on top, 0.092 alone. On single tokens an earlier measurement gave up to 0.05 for int8 and 0.29 for nf4. Deeper
models add up more. A client with spot checks never uses int2, because `verify_tolerance` is below 1."""
BY_ACTIVATIONS = {"none": 0.0, "auto": 0.15, "int8": 0.15}
"""The same between a server that rounds inputs of its weights and one that doesn't. Measured in the same way: 0.021,
and 0.029 together with weights in int8."""
BY_COMPRESSION = 0.05
"""Added for messages of 8 bits a value, which both sides of a comparison have rounded. Measured: 0.009 per boundary
(docs/benchmarks.md)."""


def check_claims(peer_id: str, served: ServedBlocks, own: BlockTraits, encoder: Span | None) -> None:
    """Compare a greeting with the traits of the model; `encoder` are the blocks of its encoder, if it has one.

    Raises:
        RemoteProtocolError: the server says something else.
    """
    if served.traits is None:
        return
    _check_stacks(peer_id, served, encoder)
    for own_stack, claimed, name in _stacks(served, own, encoder):
        for trait in SAME:
            if getattr(claimed, trait) != getattr(own_stack, trait):
                raise _contradiction(peer_id, f"the {trait} of its {name} is {getattr(claimed, trait)}")
        if bool(claimed.takes_source) != bool(own_stack.takes_source):
            raise _contradiction(peer_id, f"takes_source of its {name} is {claimed.takes_source}")
        if more := sorted({*claimed.extra_inputs} - {*own_stack.extra_inputs}):
            raise _contradiction(peer_id, f"its {name} need {' and '.join(more)}")


def lacking_abilities(served: ServedBlocks, own: BlockTraits, encoder: Span | None) -> tuple[str, ...]:
    """Traits that the model's blocks have and this server says that its blocks lack."""
    return tuple(
        trait
        for own_stack, claimed, _ in _stacks(served, own, encoder)
        for trait in ABILITIES
        if getattr(own_stack, trait) and not getattr(claimed, trait)
    )


def check_abilities(peer_id: str, served: ServedBlocks, agreed: BlockTraits, encoder: Span | None) -> None:
    """Raise RemoteProtocolError if the server says that its blocks lack a trait that this client relies on."""
    for trait in lacking_abilities(served, agreed, encoder):
        raise _contradiction(peer_id, f"its blocks lack {trait}")


def with_abilities_of(own: BlockTraits, greetings: Iterable[ServedBlocks], encoder: Span | None) -> BlockTraits:
    """The client's own traits, less the abilities that one of these servers lacks."""
    lacking = {trait for served in greetings for trait in lacking_abilities(served, own, encoder)}
    return own.model_copy(update=dict.fromkeys(lacking, False))


def trusted_traits(greetings: Sequence[ServedBlocks], encoder: Span | None) -> BlockTraits:
    """The traits of the model by the claims of these servers, which the user trusts."""
    parts = [served.traits for served in greetings if served.traits and (not encoder or served.end > encoder.end)]
    found = _together(parts)
    if encoder is None:
        return found
    parts = [served.traits.of_encoder for served in greetings if served.traits and served.start < encoder.end]
    of_encoder = StackTraits(**_together(parts).model_dump(exclude={"encoder"}))
    return found.model_copy(update={"encoder": of_encoder})


def _together(claims: Sequence[BlockTraits]) -> BlockTraits:
    first = claims[0] if claims else BlockTraits()
    return first.model_copy(
        update={
            "extra_inputs": tuple(sorted({name for claimed in claims for name in claimed.extra_inputs})),
            "forbidden_cuts": tuple(sorted({cut for claimed in claims for cut in claimed.forbidden_cuts})),
            "length_borders": tuple(sorted({border for claimed in claims for border in claimed.length_borders})),
            "own_length_beyond": min(filter(None, (claimed.own_length_beyond for claimed in claims)), default=None),
            "skips_padding": tuple(
                side for side in first.skips_padding if all(side in one.skips_padding for one in claims)
            ),
            **{trait: all(getattr(claimed, trait) for claimed in claims) for trait in ABILITIES},
        }
    )


def _stacks(served: ServedBlocks, own: BlockTraits, encoder: Span | None) -> list[tuple[BlockTraits, BlockTraits, str]]:
    """(own traits, claimed traits, name) of each stack that the server has blocks of."""
    claimed = served.traits or own
    if encoder is None:
        return [(own, claimed, "blocks")]
    found = [(own, claimed, "decoder's blocks")] if served.end > encoder.end else []
    if served.start < encoder.end:
        found.append((own.of_encoder, claimed.of_encoder, "encoder's blocks"))
    return found


def _check_stacks(peer_id: str, served: ServedBlocks, encoder: Span | None) -> None:
    """Refuse servers of older versions, which don't know of two stacks.

    Raises:
        RemoteProtocolError: the server is one.
    """
    if encoder is None or served.traits is None:
        return
    lacks_encoder = served.start < encoder.end and served.traits.encoder is None
    lacks_decoder = served.end > encoder.end and not served.traits.takes_source
    if lacks_encoder or lacks_decoder:
        blocks = describe_span(served.start, served.end, encoder.end)
        raise RemoteProtocolError(
            f"the server {peer_id} offers {blocks}, but is of a version that serves no models with an encoder and a "
            "decoder: update swarmllm there",
            peer_id,
        )


def _contradiction(peer_id: str, claim: str) -> RemoteProtocolError:
    return RemoteProtocolError(
        f"the server {peer_id} says that {claim}, which is not so for this model: it lies, or runs another version of "
        "swarmllm or transformers",
        peer_id,
    )


class AgreedWeights:
    """The version of the weights that this client uses, by the digests that servers announce."""

    def __init__(self, verified: VerifiedPeers) -> None:
        self._verified = verified
        self._kept: dict[int, str] = {}
        self._snapshot: SwarmSnapshot | None = None
        self._digests: dict[str, dict[int, str]] = {}
        self._together: dict[int, str] = {}
        """The digests of all servers, if they agree."""
        self._all_agree = True
        self._told: list[str] = []

    def is_open(self, snapshot: SwarmSnapshot) -> bool:
        """True if the servers' weights differ, and none has been chosen."""
        self._read(snapshot)
        return not self._all_agree and not self._kept

    def differing(self, snapshot: SwarmSnapshot, avoided: Collection[str]) -> frozenset[str]:
        """Peer ids of servers with other weights than those in use; servers in `avoided` don't vote."""
        self._read(snapshot)
        if self._all_agree and not contradicts(self._together, self._kept):
            return frozenset()
        met = self._verified.confirmed(snapshot.online())
        chosen = agreed_digests([server for server in met if server.peer_id not in avoided], self._kept)
        return frozenset(peer_id for peer_id, digests in self._digests.items() if contradicts(digests, chosen))

    def keep(self, route: Iterable[RouteHop]) -> None:
        """From now on, use only the weights of the servers of `route` that have been verified."""
        for server in self._verified.confirmed(hop.server for hop in route):
            for block, digest in server.digests().items():
                self._kept.setdefault(block, digest)

    def forget(self) -> None:
        """Choose anew, because no route is left with these weights."""
        self._kept.clear()

    def _read(self, snapshot: SwarmSnapshot) -> None:
        if snapshot is self._snapshot:
            return
        self._snapshot = snapshot
        self._digests = {server.peer_id: server.digests() for server in snapshot.online()}
        self._together, self._all_agree = {}, True
        for digests in self._digests.values():
            self._all_agree = self._all_agree and not contradicts(digests, self._together)
            self._together.update(digests)
        lines = [] if self._all_agree else describe_different_weights(snapshot)
        for line in lines:
            if line not in self._told:
                logger.warning("%s", line)
        self._told = lines


class ActiveAdapter:
    """The version of the servers' adapter that this client uses; once chosen, it stays."""

    def __init__(self, wanted: str | None) -> None:
        is_directory = os.path.isdir(wanted or "")  # noqa: PTH112 - Path fails if the name is too long for a file
        self.wanted = Path(wanted).resolve().name if wanted and is_directory else wanted
        self.version: str | None = None
        """`name@digest` as servers announce it; None: no adapter is wanted, or no route has been found yet."""

    def choose(self, snapshot: SwarmSnapshot) -> str | None:
        """The version in use, or else the version that serves most blocks; None if there is none."""
        if self.version is not None or self.wanted is None:
            return self.version
        blocks: dict[str, set[int]] = {}
        for server in snapshot.online():
            for name in server.adapters:
                if self.wanted in (name, name.rpartition("@")[0]):
                    blocks.setdefault(name, set()).update(server.span)
        return max(sorted(blocks), key=lambda name: len(blocks[name]), default=None)

    def lacked_by(self, snapshot: SwarmSnapshot) -> frozenset[str]:
        """Peer ids of servers without the adapter."""
        if self.wanted is None:
            return frozenset()
        version = self.choose(snapshot)
        return frozenset(server.peer_id for server in snapshot.servers if version not in server.adapters)

    def keep(self, snapshot: SwarmSnapshot) -> None:
        """Use only this version from now on, because a route has been found."""
        self.version = self.choose(snapshot)


def honest_error(server: ServerInfo) -> float:
    """The largest relative error of an honest server with this dtype and quantization; infinite if unknown."""
    by_dtype = BY_DTYPE.get(server.dtype, math.inf)
    by_activations = BY_ACTIVATIONS.get(server.activations, math.inf)
    return max(by_dtype, by_activations, BY_QUANT_TYPE.get(server.quant_type, math.inf))


def is_checkable(server: ServerInfo, config: ClientConfig) -> bool:
    """True if an honest server of this kind is always within the client's tolerance.

    A server's announcement decides whether it is used, never how large its errors may be: otherwise liars would
    announce the coarsest quantization.
    """
    return honest_error(server) <= config.verify_tolerance
