"""The plain values that every room shares: spans of blocks, what a server announces, and a snapshot of a swarm.

Pydantic models here are what peers send: strict, frozen, bounded, and unknown (newer) fields are ignored.
"""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from math import inf
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

MAX_BLOCKS = 4096
"""Assumed: no model of today has more than a few hundred blocks."""
MAX_ADDRS = 16
"""Addresses that one server announces; a record has room for about this many."""
MAX_TTL_S = 15 * 60.0
"""No record may outlive its owner for longer."""


@dataclass(frozen=True, order=True, slots=True)
class Span:
    """Blocks `[start, end)`."""

    start: int
    end: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.end:
            raise ValueError(f"a span needs 0 <= start < end, got {self.start}:{self.end}")

    def __len__(self) -> int:
        return self.end - self.start

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, self.end))

    def __contains__(self, item: object) -> bool:
        """True for a block index inside, and for a span that lies wholly inside."""
        if isinstance(item, Span):
            return self.start <= item.start and item.end <= self.end
        return isinstance(item, int) and self.start <= item < self.end

    def __str__(self) -> str:
        """As people write it, and as `--block_indices` takes it."""
        return f"{self.start}:{self.end}"


class ServerState(IntEnum):
    """The life of a server, as it announces it."""

    JOINING = 0
    """Loading its blocks: counts for placement, not for routing."""
    ONLINE = 1
    LEAVING = 2
    """Finishes its sessions, takes no new ones."""


class PeerModel(BaseModel):
    """Base of everything that remote peers send."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", validate_by_name=True, serialize_by_alias=True)


def printable(text: str) -> str:
    """Without control characters: a stranger's text shall not steer terminals, logs or the direction of writing."""
    return "".join(char if char.isprintable() else " " if char.isspace() else "?" for char in text)


PeerText = Annotated[str, AfterValidator(printable)]
"""What a peer says in words, for people to read."""


Length = Annotated[int, Field(ge=1, le=1 << 24)]


class StackTraits(PeerModel):
    """What a server found out about its blocks when it loaded them, so that clients need no guess."""

    block_output: Annotated[int, Field(ge=0, le=8)] = 0
    """What a block returns: 0 = a tensor, k = a tuple of k values, the hidden states first."""
    extra_inputs: tuple[Literal["input_ids", "inputs_embeds"], ...] = ()
    """Tensors besides the hidden states that these blocks need."""
    forbidden_cuts: Annotated[tuple[int, ...], Field(max_length=MAX_BLOCKS)] = ()
    """Block indices inside the span at which a route may not enter or leave it."""
    batch_axis: Annotated[int, Field(ge=0, le=3)] = 0
    """Axis of the batch in the hidden states; the sequence is the next one ([batch, seq, hidden] = 0)."""
    chunked_prefill: bool = True
    """Whether a prompt may be processed in several steps."""
    rollback: bool = True
    """Whether the cache can be cropped; otherwise a rollback replays the inputs."""
    skips_padding: Annotated[tuple[Literal["left", "right"], ...], Field(max_length=2)] = ()
    """Sides of a text on which padding may be left out of a batch: what is computed of the text stays the same."""
    length_borders: Annotated[tuple[Length, ...], Field(max_length=16)] = ()
    """Lengths in ascending order; calls that are longer compute all of their positions otherwise. LongRoPE has one: it
    has other frequencies for longer calls."""
    own_length_beyond: Length | None = None
    """Positions beyond which calls of each length have frequencies of their own (dynamic NTK); None: there is no such
    length."""
    takes_source: bool | None = None
    """Whether the blocks attend to an encoder's outputs, which a session is given with its first step; None takes
    no room in a record: they don't. A server of a version without encoder-decoders never says so."""

    @property
    def even_length(self) -> float:
        """Positions up to which calls of all lengths compute alike."""
        return min((*self.length_borders, self.own_length_beyond or inf), default=inf)

    def arithmetic(self, length: int) -> int:
        """Equal for lengths of calls that compute alike; the length is the largest position and 1."""
        if self.own_length_beyond is not None and length > self.own_length_beyond:
            return length
        return -bisect_left(self.length_borders, length)

    def last_alike(self, length: int) -> float:
        """The largest length of calls that compute as those of this one."""
        if self.own_length_beyond is not None and length > self.own_length_beyond:
            return length
        longer = (*self.length_borders, self.own_length_beyond or inf)
        return min((border for border in longer if border >= length), default=inf)


class BlockTraits(StackTraits):
    """The traits of all blocks of a server."""

    encoder: StackTraits | None = None
    """Those of its encoder's blocks, in a model that has an encoder and a decoder: the others are the decoder's then,
    but for `forbidden_cuts`, which are all."""

    @property
    def of_encoder(self) -> "BlockTraits":
        """Those of the encoder's blocks alone."""
        return BlockTraits() if self.encoder is None else BlockTraits(**self.encoder.model_dump(exclude={"encoder"}))


BlockIndex = Annotated[int, Field(ge=0, le=MAX_BLOCKS)]
Milliseconds = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]
DIGEST_CHARS = 4
"""Characters that tell the weights of one block: 24 bits, 320 bytes for a server of 80 blocks. Two that differ look the
same once in 16 million times."""
MAX_DIGESTS = 512
"""Blocks of one server whose weights it announces: 2 KB of a record that may have 8; servers of more announce none."""
MAX_ROUND_TRIPS = 16
"""That one server announces: 1 KB of a record that may have 8."""


class ServerInfo(PeerModel):
    """What one server announces."""

    peer_id: Annotated[str, Field(min_length=40, max_length=64)]
    addrs: Annotated[tuple[Annotated[PeerText, Field(max_length=256)], ...], Field(max_length=MAX_ADDRS)] = ()
    """Multiaddresses without the `/p2p/…` part."""
    start: Annotated[int, Field(ge=0, le=MAX_BLOCKS)]
    end: Annotated[int, Field(ge=1, le=MAX_BLOCKS)]
    state: Annotated[int, Field(ge=0, le=255)] = ServerState.ONLINE
    throughput: Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)] = 0.0
    """Tokens per second through the whole span, forward batches: what it computes, or what its links to other servers
    were seen to carry, whichever is less."""
    decode_ms_per_block: Milliseconds = 1.0
    """Milliseconds that one decode step spends per block at batch 1."""
    decode_ms_per_block_batch8: Milliseconds = 0.0
    """The same for a batch of 8 rows; 0 = not measured."""
    context_ms_per_block_per_1k: Milliseconds = 0.0
    """What 1000 tokens in the KV cache add to a decode step, per block."""
    queue_ms: Milliseconds = 0.0
    """How long a step waits for its turn at present."""
    wake_s: Annotated[float, Field(ge=0, le=3600, allow_inf_nan=False)] = 0.0
    """What loading the blocks is going to take, which nobody has used for long; `queue_ms` has it already. 0 = they are
    loaded."""
    step_ms_p95: Milliseconds = 0.0
    """The time within which 95 in 100 of the last decode steps were ready, waiting included; 0 = none yet."""
    tokens_served: Annotated[int, Field(ge=0, le=1 << 53)] = 0
    """Positions computed in sessions since the server began."""
    failures_seen: Annotated[int, Field(ge=0, le=1 << 53)] = 0
    """Steps and batches that failed here since then, whoever's fault it was."""
    speed_share: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 1.0
    """What a server with `--nice` leaves itself of its speed while its owner's programs need the machine; the speeds
    above are what is left. 0 = paused: to be used only if nobody else serves these blocks."""
    round_trips: Annotated[
        tuple[tuple[Annotated[str, Field(max_length=64)], Milliseconds], ...], Field(max_length=MAX_ROUND_TRIPS)
    ] = ()
    """(peer id, ms) of servers that hold the blocks after these: likely successors in a route. Clients estimate the
    others."""
    cache_tokens_left: Annotated[int, Field(ge=0, le=1 << 53)] = 0
    """KV cache left, in tokens through the whole span."""
    max_batch_tokens: Annotated[int, Field(ge=1, le=1 << 30)] = 8192
    """Most tokens of one forward or backward request."""
    batch_tokens: Annotated[int, Field(ge=0, le=1 << 30)] = 0
    """Tokens of a forward below which fewer take hardly less time; 0 = not told, as by processors, where it is few."""
    dtype: Annotated[PeerText, Field(max_length=32)] = "float32"
    quant_type: Annotated[PeerText, Field(max_length=32)] = "none"
    version: Annotated[PeerText, Field(max_length=32)] = ""
    public_name: Annotated[PeerText, Field(max_length=64)] = ""
    hardware: Annotated[PeerText, Field(max_length=64)] = ""
    """What computes, by name; empty: not told. For people to read only."""
    memory_left_bytes: Annotated[int, Field(ge=0, le=1 << 53)] = 0
    """What no program uses of the memory in which the blocks are; 0 = not told. For people to read only."""
    num_sessions: Annotated[int, Field(ge=0, le=1 << 20)] = 0
    """Texts that are under way here at present."""
    machine: Annotated[str, Field(max_length=16, pattern=r"^[0-9a-f]*$")] = ""
    """The same for servers that were started together, for several devices of a machine. Anybody could say so, so it is
    for people to read only."""
    adapters: Annotated[tuple[Annotated[PeerText, Field(max_length=128)], ...], Field(max_length=64)] = ()
    traits: BlockTraits = BlockTraits()
    weights: Annotated[str, Field(max_length=DIGEST_CHARS * MAX_DIGESTS, pattern=r"^[0-9A-Za-z_-]*$")] = ""
    """What of the checkpoint its blocks are made of: `DIGEST_CHARS` characters for each; empty: not told."""
    instance: Annotated[str, Field(max_length=16, pattern=r"^[0-9a-f]*$")] = ""
    """Another one whenever the server begins; empty: not told."""
    identity_shared: bool = False
    """Whether it has seen another process with its peer id: then it isn't known which of them is reached."""
    relays_for: Annotated[int, Field(ge=0, le=1 << 20)] = 0
    """Peers that are reached through this server at present, as nobody can dial them."""
    inner_states: bool = False
    """Whether it answers what passes between its blocks, for clients that ask."""
    claim: tuple[BlockIndex, BlockIndex] | None = None
    """Blocks [start, end) that this server is about to move to; announced before it moves, so that only one does."""

    @model_validator(mode="after")
    def _span_is_not_empty(self) -> "ServerInfo":
        for start, end in ((self.start, self.end), self.claim or (0, 1)):
            if start >= end:
                raise ValueError(f"empty span {start}:{end}")
        return self

    @property
    def span(self) -> Span:
        return Span(self.start, self.end)

    @property
    def relayed(self) -> bool:
        """Whether others can't dial this server, but only reach it through relays."""
        return bool(self.addrs) and "/p2p-circuit" in self.addrs[0]

    def digests(self) -> dict[int, str]:
        """Block → what it is made of, as far as it is told."""
        if len(self.weights) != DIGEST_CHARS * len(self.span):
            return {}
        return {block: self.weights[DIGEST_CHARS * index :][:DIGEST_CHARS] for index, block in enumerate(self.span)}


class ServedBlocks(PeerModel):
    """What a server says of itself when it is greeted; its record may be anybody's invention."""

    start: Annotated[int, Field(ge=0, le=MAX_BLOCKS)]
    end: Annotated[int, Field(ge=1, le=MAX_BLOCKS)]
    traits: BlockTraits | None = None
    """None: the blocks are still loading."""
    asleep: bool = False
    """Whether they have to be loaded again before a request is answered, since nobody has used them for long."""

    def confirms(self, server: ServerInfo) -> bool:
        """Whether this is what was announced."""
        loaded = self.traits is not None or server.state != ServerState.ONLINE
        return loaded and (self.start, self.end) == (server.start, server.end)


Size = Annotated[int, Field(ge=1, le=1 << 24)]


class Patch(PeerModel):
    """One change that an adapter makes to one module of a block; `adapters/block_adapter` says what the kinds do."""

    block: Annotated[int, Field(ge=0, lt=MAX_BLOCKS)]
    path: Annotated[str, Field(max_length=128)]
    """The path of the module inside its block."""
    kind: Literal[
        "lora",
        "row_lora",
        "dora",
        "ia3_in",
        "ia3_out",
        "loha",
        "kron",
        "rotate",
        "tensor",
        "dropout",
        "autocast",
        "prompt",
        "prefix",
    ]
    shapes: Annotated[tuple[Annotated[tuple[Size, ...], Field(min_length=1, max_length=3)], ...], Field(max_length=4)]
    scale: Annotated[float, Field(ge=-1e6, le=1e6, allow_inf_nan=False)] = 1.0
    dropout: Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)] = 0.0
    """Share of a LoRA's inputs that is left out. Calls come with a seed for each token then, from which it follows
    which."""
    number: Annotated[int, Field(ge=0, lt=1 << 16)] = 0
    """A `row_lora` is for those tokens alone for which calls say this number (`adapter_numbers`). Servers that
    know no numbers refuse that kind."""


class ModelRecord(PeerModel):
    """One line of the swarm's register of models: which checkpoint a server serves."""

    name: Annotated[PeerText, Field(max_length=256)]
    fingerprint: Annotated[PeerText, Field(min_length=8, max_length=128)]
    num_blocks: Annotated[int, Field(ge=1, le=MAX_BLOCKS)]
    encoder_blocks: Annotated[int, Field(ge=0, le=MAX_BLOCKS)] = 0
    """How many of them, the first ones, are an encoder's; 0: all are of one stack."""
    block_bytes: Annotated[int, Field(ge=0, le=1 << 50)] = 0
    """Memory that the largest block takes with the default `quant_type`; 0 = not told."""


@dataclass(frozen=True)
class SwarmSnapshot:
    """The servers of one model, as one look into the DHT showed them."""

    num_blocks: int
    servers: tuple[ServerInfo, ...] = ()
    encoder_blocks: int = 0
    """How many blocks, the first ones, are an encoder's; 0: all are of one stack."""
    taken_at: float = field(default=0.0, compare=False)
    """Monotonic clock of the reader, seconds."""

    def online(self) -> tuple[ServerInfo, ...]:
        return tuple(server for server in self.servers if server.state == ServerState.ONLINE)

    def cache_room(self) -> int:
        """The longest text, in tokens, for which some server of each block has cache left; 0: not known."""
        room = [0] * self.num_blocks
        for server in self.online():
            for block in server.span:
                room[block] = max(room[block], server.cache_tokens_left)
        return min(room, default=0)

    def missing_blocks(self) -> tuple[int, ...]:
        """Blocks that no server which is online holds."""
        held = {block for server in self.online() for block in server.span}
        return tuple(block for block in range(self.num_blocks) if block not in held)


@dataclass(frozen=True)
class RouteHop:
    """One server of a route and the blocks that it runs for it (a sub-range of what it holds)."""

    server: ServerInfo
    span: Span

    def __str__(self) -> str:
        return f"{self.span}@{self.server.peer_id[-6:]}"


def size_in_words(num_bytes: float) -> str:
    """Bytes in GB, or in MB where GB would be 0.00 or little more."""
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.1f} MB"
