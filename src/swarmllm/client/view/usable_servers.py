"""The servers that a client may use: by their claims, weights and adapters, and by how much they may differ.

Greetings are compared with the traits that this client has found out itself (`check_claims`, for every greeting):

    trait                      whose word counts
    batch_axis, block_output   the client's: a server that claims another value is left out
    takes_source, encoder      the same
    extra_inputs               the client's: a server that asks for more is left out, one that asks for less is used
    forbidden_cuts             the client's where the client cuts; each server's for its own blocks, in routes
    skips_padding, length_borders, own_length_beyond
                               the client's: servers have no say
    chunked_prefill, rollback  the client's; a server that claims less is used only if nobody else serves its blocks,
                               and then its word counts from the beginning. Other code, as some accelerators run it,
                               may be able to do less than what the client has tried

A model that can't be tried here (`models/span/small_copy`): servers are believed if the user has named them in
`allowed_servers`, and nobody otherwise. So no server is sent what the model doesn't need. A trait that is added to
`BlockTraits` belongs into one of the tuples below, or into a function of its own here.

Where servers hold different weights for the same blocks, a client uses one kind (`AgreedWeights`): a session's caches
were computed with it. Only servers that have been met have a say, and none that is avoided. A server that says a false
digest can win all the same; then it is used, as if it had said what the others say, until it fails or is caught, and
the choice is forgotten.

Servers announce adapters as `name@digest`. A client uses one version of `ClientConfig.active_adapter` for as long as
it lives (`ActiveAdapter`), for the same reason.

Honest servers differ a little, by dtype and quantization. Spot checks forgive that (`honest_error`), and a server
whose honest error is above the client's tolerance can't be checked and isn't used (`is_checkable`).
"""

import logging
import math
import os
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from swarmllm.config import ClientConfig
from swarmllm.data_structures import BlockTraits, RouteHop, ServedBlocks, ServerInfo, Span, StackTraits, SwarmSnapshot
from swarmllm.errors import RemoteProtocolError
from swarmllm.network.p2p.verified_peers import VerifiedPeers
from swarmllm.swarm.block_map import describe_different_weights
from swarmllm.swarm.claims import agreed_digests, contradicts
from swarmllm.swarm.stacks import describe_span

logger = logging.getLogger(__name__)

SAME = ("batch_axis", "block_output")
"""Traits that are the same in all blocks of a stack."""
ABILITIES = ("chunked_prefill", "rollback")
"""Traits that are true of blocks which can do something."""

BY_DTYPE = {"float64": 1e-3, "float32": 1e-3, "float16": 0.05, "bfloat16": 0.1}
"""Relative error of one position's hidden states. Assumed: ten times what other batch shapes and threads change."""
BY_QUANT_TYPE = {
    "none": 0.0, "int8": 0.15, "llm_int8": 0.3, "int6": 0.3, "int5": 0.4, "int4": 0.5, "nf4": 0.5, "q3.5": 0.7,
    "int3": 0.8, "int2": 2.0,
}  # fmt: skip
"""The difference between a server that quantizes and one that doesn't. Measured through all blocks of the embedded
model, the largest error of each of 2400 positions in 20 texts: int8 0.029, llm_int8 0.081, int6 0.078, int5 0.17, int4
0.27, nf4 0.41, q3.5 0.43, int3 0.46, int2 1.23; bfloat16, which comes on top, 0.092 alone. On single tokens an earlier
measurement gave up to 0.05 for int8 and 0.29 for nf4. Deeper models add up more. No tolerance of a client lets int2
in."""
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
    """What the model's blocks can do and this server's can't, as it says."""
    return tuple(
        trait
        for own_stack, claimed, _ in _stacks(served, own, encoder)
        for trait in ABILITIES
        if getattr(own_stack, trait) and not getattr(claimed, trait)
    )


def check_abilities(peer_id: str, served: ServedBlocks, agreed: BlockTraits, encoder: Span | None) -> None:
    """Raises RemoteProtocolError if the server says that its blocks can do less than what this client builds on."""
    for trait in lacking_abilities(served, agreed, encoder):
        raise _contradiction(peer_id, f"its blocks lack {trait}")


def with_abilities_of(own: BlockTraits, greetings: Iterable[ServedBlocks], encoder: Span | None) -> BlockTraits:
    """The traits that hold for all these servers, of which some may be able to do less."""
    lacking = {trait for served in greetings for trait in lacking_abilities(served, own, encoder)}
    return own.model_copy(update=dict.fromkeys(lacking, False))


def trusted_traits(greetings: Sequence[ServedBlocks], encoder: Span | None) -> BlockTraits:
    """The traits that all these servers together claim, which the user trusts."""
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
    """(own traits, claimed ones, what they are of) for each stack that the server has blocks of."""
    claimed = served.traits or own
    if encoder is None:
        return [(own, claimed, "blocks")]
    found = [(own, claimed, "decoder's blocks")] if served.end > encoder.end else []
    if served.start < encoder.end:
        found.append((own.of_encoder, claimed.of_encoder, "encoder's blocks"))
    return found


def _check_stacks(peer_id: str, served: ServedBlocks, encoder: Span | None) -> None:
    """A server of an older version doesn't know of the two stacks that its blocks are of."""
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
    """The choice, by what servers announce of their blocks."""

    def __init__(self, verified: VerifiedPeers) -> None:
        self._verified = verified
        self._kept: dict[int, str] = {}
        self._snapshot: SwarmSnapshot | None = None
        self._digests: dict[str, dict[int, str]] = {}
        self._together: dict[int, str] = {}
        """What all say, if they agree."""
        self._all_agree = True
        self._told: list[str] = []

    def is_open(self, snapshot: SwarmSnapshot) -> bool:
        """Whether there is something to choose, and nothing has been chosen."""
        self._read(snapshot)
        return not self._all_agree and not self._kept

    def differing(self, snapshot: SwarmSnapshot, avoided: Collection[str]) -> frozenset[str]:
        """Peer ids of servers with other weights than those in use; of the others, those `avoided` have no say."""
        self._read(snapshot)
        if self._all_agree and not contradicts(self._together, self._kept):
            return frozenset()
        met = self._verified.confirmed(snapshot.online())
        chosen = agreed_digests([server for server in met if server.peer_id not in avoided], self._kept)
        return frozenset(peer_id for peer_id, digests in self._digests.items() if contradicts(digests, chosen))

    def keep(self, route: Iterable[RouteHop]) -> None:
        """A route has been found: from now on the weights of those of its servers that were met, and no others."""
        for server in self._verified.confirmed(hop.server for hop in route):
            for block, digest in server.digests().items():
                self._kept.setdefault(block, digest)

    def forget(self) -> None:
        """No route is left with these weights, so what begins from now on may have others."""
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
    """The choice, once made, stays."""

    def __init__(self, wanted: str | None) -> None:
        is_directory = os.path.isdir(wanted or "")  # noqa: PTH112 - Path fails if the name is too long for a file
        self.wanted = Path(wanted).resolve().name if wanted and is_directory else wanted
        self.version: str | None = None
        """The version as servers announce it; None: no adapter is wanted, or no route has been found yet."""

    def choose(self, snapshot: SwarmSnapshot) -> str | None:
        """The version in use, or else the one that most blocks are served with; None if there is none."""
        if self.version is not None or self.wanted is None:
            return self.version
        blocks: dict[str, set[int]] = {}
        for server in snapshot.online():
            for name in server.adapters:
                if self.wanted in (name, name.rpartition("@")[0]):
                    blocks.setdefault(name, set()).update(server.span)
        return max(sorted(blocks), key=lambda name: len(blocks[name]), default=None)

    def lacked_by(self, snapshot: SwarmSnapshot) -> frozenset[str]:
        """Peer ids of servers that are of no use."""
        if self.wanted is None:
            return frozenset()
        version = self.choose(snapshot)
        return frozenset(server.peer_id for server in snapshot.servers if version not in server.adapters)

    def keep(self, snapshot: SwarmSnapshot) -> None:
        """A route has been found: from now on this version and no other."""
        self.version = self.choose(snapshot)


def honest_error(server: ServerInfo) -> float:
    """The largest error of an honest server of that kind; infinite if nobody knows."""
    by_dtype = BY_DTYPE.get(server.dtype, math.inf)
    return max(by_dtype, BY_QUANT_TYPE.get(server.quant_type, math.inf))


def is_checkable(server: ServerInfo, config: ClientConfig) -> bool:
    """Whether an honest server of that kind is always within the client's tolerance.

    What a server announces decides whether it is used, never how much it may be wrong by: otherwise a liar would
    announce the coarsest kind of weights, and be forgiven everything.
    """
    return honest_error(server) <= config.verify_tolerance
