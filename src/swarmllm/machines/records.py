"""Records and commands that machines of a swarm tell each other. Pure.

A swarm of machines has an Ed25519 key, the *swarm key*. Members have its private half, which is in the invite. The
public half is the swarm's name in the DHT, so strangers who know it can look, and change nothing: a `MachineRecord`
counts only with the swarm key's signature of its peer id, and a `Command` only with one of the command.

A command doesn't say what to change. It lists all models that the swarm should serve from now on. So a command that
comes twice, late or out of order harms nothing: each machine follows the newest one that it has seen, and passes it on
in its own record. The time at which it was given decides, and all machines choose the same one of two at once.
"""

import hashlib
import json
from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import Field

from swarmllm.data_structures import MAX_ADDRS, MAX_BLOCKS, Milliseconds, PeerModel, PeerText
from swarmllm.network.p2p.addresses import usable_peers
from swarmllm.network.p2p.identity import Identity, verify

MAX_WANTED = 4
"""Most models that a swarm serves at a time. A command must fit into a record of the DHT."""
LAST_NUMBER = 1 << 53
MOST_AHEAD_S = 60.0
"""Most seconds that a command may be ahead of this machine's clock. The DHT refuses clocks that differ by 3 s."""
MAX_HOSTED = 8
MAX_GIVEN = 16

PeerId = Annotated[str, Field(min_length=40, max_length=64)]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Signature = Annotated[str, Field(pattern=r"^[0-9a-f]{128}$")]
Bytes = Annotated[int, Field(ge=0, le=1 << 53)]
Speed = Annotated[float, Field(ge=0, le=1e15, allow_inf_nan=False)]
_MEMBER, _COMMAND = b"swarmllm member of a swarm 1\x00", b"swarmllm command 1\x00"


class Wanted(PeerModel):
    """A model that the swarm should serve."""

    name: Annotated[PeerText, Field(min_length=1, max_length=200)]
    """For people and APIs: a hub id, or the name of a file or directory."""
    manifest: Digest
    """SHA-256 of the model's manifest, which lists its files and the digests of their pieces."""
    quant_type: Annotated[PeerText, Field(max_length=16)] = "auto"
    """Format of the blocks; auto: the plan chooses."""


class Command(PeerModel):
    """All models that the swarm should serve from now on, and who said so."""

    number: Annotated[int, Field(ge=1, le=LAST_NUMBER)]
    """One more than that of the command before; for people."""
    given_at: Annotated[float, Field(ge=0, le=1e11, allow_inf_nan=False)]
    """Seconds since 1970 by the clock of the machine that gave it, but later than the command before."""
    given_by: PeerId
    wanted: Annotated[tuple[Wanted, ...], Field(max_length=MAX_WANTED)]
    what: Annotated[PeerText, Field(max_length=200)] = ""
    """For people: what was asked for."""
    member: Signature = "0" * 128
    """Signature by the swarm key: the giver is a member."""
    giver: Signature = "0" * 128
    """Signature by the giver's own key: nobody else gave it."""

    def signed_bytes(self) -> bytes:
        """The bytes under both signatures."""
        fields = self.model_dump(mode="json", exclude={"member", "giver"})
        return _COMMAND + json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()

    def is_valid(self, swarm_id: str) -> bool:
        """True if a member of the swarm gave it. `swarm_id` is the swarm key's peer id."""
        signed = self.signed_bytes()
        return verify(swarm_id, bytes.fromhex(self.member), signed) and verify(
            self.given_by, bytes.fromhex(self.giver), signed
        )

    def may_be_given_by(self, now: float) -> bool:
        """False if it is of the future, by more than clocks differ. `now`: seconds since 1970."""
        return self.given_at <= now + MOST_AHEAD_S

    def rank(self) -> tuple[float, int, bytes]:
        """Order of commands, the newest last; the same on all machines."""
        return self.given_at, self.number, hashlib.sha256(self.signed_bytes()).digest()


def sign_command(command: Command, swarm_key: Identity, own: Identity) -> Command:
    """The command with both signatures. `own` is the identity of `given_by`."""
    signed = command.signed_bytes()
    return command.model_copy(update={"member": swarm_key.sign(signed).hex(), "giver": own.sign(signed).hex()})


def newest(commands: Iterable[Command | None], swarm_id: str, now: float) -> Command | None:
    """The newest valid command; None: there is none. `now`: seconds since 1970.

    Commands of the future don't count, so no member can give one that all later ones come before.
    """
    valid = (
        command
        for command in commands
        if command is not None and command.may_be_given_by(now) and command.is_valid(swarm_id)
    )
    return max(valid, key=Command.rank, default=None)


class Hosted(PeerModel):
    """Blocks of a model on a machine, or on their way there."""

    manifest: Digest
    start: Annotated[int, Field(ge=0, le=MAX_BLOCKS)]
    end: Annotated[int, Field(ge=1, le=MAX_BLOCKS)]
    quant_type: Annotated[PeerText, Field(max_length=16)] = "auto"
    state: Literal["waiting", "fetching", "loading", "online", "leaving", "failed"] = "waiting"
    done_bytes: Bytes = 0
    """Bytes of weights that are here by now, of those that these blocks need."""
    total_bytes: Bytes = 0
    bytes_from_machines: Bytes = 0
    """Bytes that other machines gave."""
    bytes_from_hub: Bytes = 0
    problem: Annotated[PeerText, Field(max_length=200)] = ""
    """Why it can't go on, for people; empty: it can."""


class MachineRecord(PeerModel):
    """The announcement of a machine, every few seconds."""

    peer_id: PeerId
    member: Signature
    """The swarm key's signature of the peer id."""
    name: Annotated[PeerText, Field(max_length=64)] = ""
    """For people."""
    addrs: Annotated[tuple[Annotated[PeerText, Field(max_length=256)], ...], Field(max_length=MAX_ADDRS)] = ()
    """Multiaddresses without the `/p2p/…` end."""
    memory_bytes: Bytes = 0
    """Memory offered for blocks and caches, used or not."""
    disk_left_bytes: Bytes = 0
    kept_bytes: Bytes = 0
    """Bytes of weights on its disk that nobody needs at present. They go when their room is needed."""
    bytes_per_s: Speed = 0.0
    """Bytes of weights that a decode step of one text reads in a second."""
    format_bytes_per_s: Annotated[
        tuple[tuple[Annotated[PeerText, Field(max_length=16)], Speed], ...], Field(max_length=8)
    ] = ()
    ms_per_block: Milliseconds = 0.0
    round_trips: Annotated[tuple[tuple[PeerId, Milliseconds], ...], Field(max_length=16)] = ()
    """(peer id, ms) of other machines."""
    hosted: Annotated[tuple[Hosted, ...], Field(max_length=MAX_HOSTED)] = ()
    gives: Annotated[tuple[Digest, ...], Field(max_length=MAX_GIVEN)] = ()
    """Manifests of models of which this machine gives pieces to members."""
    command: Command | None = None
    """The newest command that the machine has seen."""
    page: Annotated[PeerText, Field(max_length=128)] = ""
    """Address of its page."""
    version: Annotated[PeerText, Field(max_length=32)] = ""

    @property
    def initial_peers(self) -> list[str]:
        """The addresses by which others can join through this machine."""
        return usable_peers(f"{addr}/p2p/{self.peer_id}" for addr in self.addrs)

    def is_member(self, swarm_id: str) -> bool:
        """True if a member of the swarm admitted this peer id. `swarm_id` is the swarm key's peer id."""
        return is_membership(self.member, self.peer_id, swarm_id)


def is_membership(signature: str, peer_id: str, swarm_id: str) -> bool:
    """True if this is the signature, in hex, that makes the peer a member."""
    return verify(swarm_id, bytes.fromhex(signature), _MEMBER + peer_id.encode())


def membership(peer_id: str, swarm_key: Identity) -> str:
    """The signature that makes this peer a member."""
    return swarm_key.sign(_MEMBER + peer_id.encode()).hex()
