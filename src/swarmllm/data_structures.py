"""Plain values that every room shares: spans of blocks, announcements of servers, snapshots of a swarm.

Pydantic models here are sent by peers: strict, frozen, bounded. Unknown fields, of newer peers, are ignored.
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
"""Most addresses that one server announces. A record has room for about this many."""
MAX_TTL_S = 15 * 60.0
"""Longest lifetime of a record."""


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
        """True if a block index, or a whole span, lies inside."""
        if isinstance(item, Span):
            return self.start <= item.start and item.end <= self.end
        return isinstance(item, int) and self.start <= item < self.end

    def __str__(self) -> str:
        """The notation of `--block_indices`."""
        return f"{self.start}:{self.end}"


class ServerState(IntEnum):
    """The state that a server announces."""

    JOINING = 0
    """Loads its blocks: counts for placement, not for routing."""
    ONLINE = 1
    LEAVING = 2
    """Finishes its sessions and takes no new ones."""


class PeerModel(BaseModel):
    """Base of everything that remote peers send."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", validate_by_name=True, serialize_by_alias=True)


def printable(text: str) -> str:
    """Remove control characters: a stranger's text must not control terminals, logs or the writing direction."""
    return "".join(char if char.isprintable() else " " if char.isspace() else "?" for char in text)


PeerText = Annotated[str, AfterValidator(printable)]
"""A peer's text for people to read."""


Length = Annotated[int, Field(ge=1, le=1 << 24)]


class StackTraits(PeerModel):
    """Properties of blocks that a server observed when it loaded them."""

    block_output: Annotated[int, Field(ge=0, le=8)] = 0
    """Form of a block's result: 0 = a tensor, k = a tuple of k values with the hidden states first."""
    extra_inputs: tuple[Literal["input_ids", "inputs_embeds"], ...] = ()
    """Tensors besides the hidden states that these blocks need."""
    forbidden_cuts: Annotated[tuple[int, ...], Field(max_length=MAX_BLOCKS)] = ()
    """Block indices inside the span at which a route may not enter or leave it."""
    batch_axis: Annotated[int, Field(ge=0, le=3)] = 0
    """Axis of the batch in the hidden states; the sequence axis is the next one ([batch, seq, hidden] = 0)."""
    chunked_prefill: bool = True
    """True if a prompt may be processed in several steps."""
    rollback: bool = True
    """True if the cache can be cropped. Otherwise a rollback replays the inputs."""
    skips_padding: Annotated[tuple[Literal["left", "right"], ...], Field(max_length=2)] = ()
    """Sides of a text on which padding can be dropped without changing the outputs of the text."""
    length_borders: Annotated[tuple[Length, ...], Field(max_length=16)] = ()
    """Lengths in ascending order. A call longer than one of them computes all its positions differently. LongRoPE has
    one, because longer calls have other frequencies."""
    own_length_beyond: Length | None = None
    """Beyond this number of positions, each length of a call has frequencies of its own (dynamic NTK). None: there is
    no such number."""
    takes_source: bool | None = None
    """True if the blocks attend to an encoder's outputs, which a session gets with its first step. None, which takes no
    room in a record: they don't. Servers of versions without encoder-decoders never send it."""

    @property
    def even_length(self) -> float:
        """Number of positions up to which calls of all lengths compute alike."""
        return min((*self.length_borders, self.own_length_beyond or inf), default=inf)

    def arithmetic(self, length: int) -> int:
        """A number that is equal for lengths that compute alike. The length is the largest position plus 1."""
        if self.own_length_beyond is not None and length > self.own_length_beyond:
            return length
        return -bisect_left(self.length_borders, length)

    def last_alike(self, length: int) -> float:
        """The largest length whose calls compute like those of this length."""
        if self.own_length_beyond is not None and length > self.own_length_beyond:
            return length
        longer = (*self.length_borders, self.own_length_beyond or inf)
        return min((border for border in longer if border >= length), default=inf)


class BlockTraits(StackTraits):
    """The properties of all blocks of a server."""

    encoder: StackTraits | None = None
    """Properties of the encoder's blocks, in a model with an encoder and a decoder. The other fields are the decoder's
    then, except `forbidden_cuts`, which holds all."""

    @property
    def of_encoder(self) -> "BlockTraits":
        """The properties of the encoder's blocks alone."""
        return BlockTraits() if self.encoder is None else BlockTraits(**self.encoder.model_dump(exclude={"encoder"}))


BlockIndex = Annotated[int, Field(ge=0, le=MAX_BLOCKS)]
Milliseconds = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]
DIGEST_CHARS = 4
"""Characters of the digest of one block's weights: 24 bits, so 320 bytes for a server of 80 blocks. Two different
blocks look the same once in 16 million cases."""
MAX_DIGESTS = 512
"""Most blocks of a server that announces their digests: 2 KB of a record that may have 8. Larger servers announce
none."""
MAX_ROUND_TRIPS = 16
"""Most round trips that one server announces: 1 KB of a record that may have 8."""


class ServerInfo(PeerModel):
    """The announcement of one server."""

    peer_id: Annotated[str, Field(min_length=40, max_length=64)]
    addrs: Annotated[tuple[Annotated[PeerText, Field(max_length=256)], ...], Field(max_length=MAX_ADDRS)] = ()
    """Multiaddresses without the `/p2p/…` end."""
    start: Annotated[int, Field(ge=0, le=MAX_BLOCKS)]
    end: Annotated[int, Field(ge=1, le=MAX_BLOCKS)]
    state: Annotated[int, Field(ge=0, le=255)] = ServerState.ONLINE
    throughput: Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)] = 0.0
    """Tokens per second of forwards through the whole span: computing speed, or the observed speed of its network,
    whichever is less."""
    decode_ms_per_block: Milliseconds = 1.0
    """Milliseconds that one decode step of one session takes per block."""
    decode_ms_per_block_batch8: Milliseconds = 0.0
    """The same for 8 sessions computed together; 0 = not measured."""
    context_ms_per_block_per_1k: Milliseconds = 0.0
    """Milliseconds that 1000 tokens in the KV cache add to a decode step, per block."""
    queue_ms: Milliseconds = 0.0
    """Milliseconds that a step waits for its turn at present."""
    wake_s: Annotated[float, Field(ge=0, le=3600, allow_inf_nan=False)] = 0.0
    """Seconds to load the blocks again, which were unloaded because nobody used them; `queue_ms` includes them. 0 = the
    blocks are loaded."""
    step_ms_p50: Milliseconds = 0.0
    """Median of the time of recent decode steps, waiting included; 0 = none yet. For people to read, as the two
    below."""
    step_ms_p95: Milliseconds = 0.0
    """95th percentile of the same."""
    token_ms: Milliseconds = 0.0
    """Median of the time from token to token of recent texts, as this server saw their steps come: with the other
    servers, the network and the client's own work. 0 = none yet."""
    tokens_served: Annotated[int, Field(ge=0, le=1 << 53)] = 0
    """Positions computed in sessions since the start."""
    failures_seen: Annotated[int, Field(ge=0, le=1 << 53)] = 0
    """Failed steps and forwards since the start, also failures that a client caused."""
    speed_share: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 1.0
    """Share of its speed that a server with `--nice` has left while its owner's programs need the machine. The speeds
    above include it. 0 = paused: used only if nobody else serves these blocks."""
    round_trips: Annotated[
        tuple[tuple[Annotated[str, Field(max_length=64)], Milliseconds], ...], Field(max_length=MAX_ROUND_TRIPS)
    ] = ()
    """(peer id, ms) of servers that hold the next blocks: likely successors in a route. Clients estimate the others."""
    cache_tokens_left: Annotated[int, Field(ge=0, le=1 << 53)] = 0
    """Free KV cache, in tokens through the whole span."""
    max_batch_tokens: Annotated[int, Field(ge=1, le=1 << 30)] = 8192
    """Most tokens of one forward or backward request."""
    batch_tokens: Annotated[int, Field(ge=0, le=1 << 30)] = 0
    """Number of tokens below which a forward hardly gets faster; 0 = not told. CPUs don't tell, because the number is
    small there."""
    dtype: Annotated[PeerText, Field(max_length=32)] = "float32"
    quant_type: Annotated[PeerText, Field(max_length=32)] = "none"
    activations: Annotated[PeerText, Field(max_length=32)] = "none"
    """How inputs of quantized weights are rounded in sessions: "int8" those of all weights that can do so, "auto" those
    of some."""
    version: Annotated[PeerText, Field(max_length=32)] = ""
    public_name: Annotated[PeerText, Field(max_length=64)] = ""
    hardware: Annotated[PeerText, Field(max_length=64)] = ""
    """Name of the processor or GPU; empty: not told. For people to read only."""
    memory_left_bytes: Annotated[int, Field(ge=0, le=1 << 53)] = 0
    """Free memory of the device that holds the blocks; 0 = not told. For people to read only."""
    num_sessions: Annotated[int, Field(ge=0, le=1 << 20)] = 0
    """Sessions in progress at present."""
    machine: Annotated[str, Field(max_length=16, pattern=r"^[0-9a-f]*$")] = ""
    """A common name of servers that were started together for several devices of a machine. Anybody could claim it, so
    it is for people to read only."""
    adapters: Annotated[tuple[Annotated[PeerText, Field(max_length=128)], ...], Field(max_length=64)] = ()
    traits: BlockTraits = BlockTraits()
    weights: Annotated[str, Field(max_length=DIGEST_CHARS * MAX_DIGESTS, pattern=r"^[0-9A-Za-z_-]*$")] = ""
    """Digests of the checkpoint's weights, `DIGEST_CHARS` characters for each block; empty: not told."""
    instance: Annotated[str, Field(max_length=16, pattern=r"^[0-9a-f]*$")] = ""
    """A value that changes at each start of the server; empty: not told."""
    identity_shared: bool = False
    """True if the server has seen another process with its peer id. Then nobody knows which of them is reached."""
    relays_for: Annotated[int, Field(ge=0, le=1 << 20)] = 0
    """Peers behind NAT that are reached through this server at present."""
    inner_states: bool = False
    """True if the server returns values between its blocks to clients that ask."""
    replays_steps: bool = False
    """True if the server can replay kept outputs in the steps in which they were computed."""
    claim: tuple[BlockIndex, BlockIndex] | None = None
    """Blocks [start, end) that this server is about to move to. Announced before the move, so that only one server
    moves there."""

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
    def rounding(self) -> tuple[str, str, str]:
        """How its numbers are rounded. Servers that round alike compute the same tokens."""
        return self.dtype, self.quant_type, self.activations

    @property
    def rounds_finely(self) -> bool:
        """True if calls of different lengths differ by a millionth only, so that a text needn't be computed in the same
        calls again."""
        # With quant_type "none" as well: a checkpoint that comes packed stays so.
        return self.dtype in ("float32", "float64") and self.activations == "none"

    @property
    def relayed(self) -> bool:
        """True if this server can be reached only through relays."""
        return bool(self.addrs) and "/p2p-circuit" in self.addrs[0]

    def digests(self) -> dict[int, str]:
        """Digest of each block, if the server announces digests."""
        if len(self.weights) != DIGEST_CHARS * len(self.span):
            return {}
        return {block: self.weights[DIGEST_CHARS * index :][:DIGEST_CHARS] for index, block in enumerate(self.span)}


class ServedBlocks(PeerModel):
    """The blocks that a server names in its greeting. Its record in the DHT could be anybody's invention."""

    start: Annotated[int, Field(ge=0, le=MAX_BLOCKS)]
    end: Annotated[int, Field(ge=1, le=MAX_BLOCKS)]
    traits: BlockTraits | None = None
    """None: the blocks are still loading."""
    asleep: bool = False
    """True if the blocks must be loaded again before a request is answered, because nobody used them for long."""

    def confirms(self, server: ServerInfo) -> bool:
        """True if the greeting agrees with the announcement."""
        loaded = self.traits is not None or server.state != ServerState.ONLINE
        return loaded and (self.start, self.end) == (server.start, server.end)


Size = Annotated[int, Field(ge=1, le=1 << 24)]


MAX_WHOLE = 16 << 20
"""Most numbers of a module that is trained as a whole; they travel after each step. Assumed."""


class Patch(PeerModel):
    """One change that an adapter makes to one module of a block. `adapters/block_adapter` explains the kinds."""

    block: Annotated[int, Field(ge=0, lt=MAX_BLOCKS)]
    path: Annotated[str, Field(max_length=128)]
    """Path of the module inside its block."""
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
    """Dropout of a LoRA's inputs. Calls then carry a seed for each token, which decides what is dropped."""
    number: Annotated[int, Field(ge=0, lt=1 << 16)] = 0
    """Number of a `row_lora`: it applies to the tokens for which calls name this number (`adapter_numbers`). Servers of
    versions without numbers refuse that kind."""


class ModelRecord(PeerModel):
    """One entry of the swarm's register of models: the checkpoint that a server serves."""

    name: Annotated[PeerText, Field(max_length=256)]
    fingerprint: Annotated[PeerText, Field(min_length=8, max_length=128)]
    num_blocks: Annotated[int, Field(ge=1, le=MAX_BLOCKS)]
    encoder_blocks: Annotated[int, Field(ge=0, le=MAX_BLOCKS)] = 0
    """Number of the encoder's blocks, which come first; 0: there is one stack only."""
    block_bytes: Annotated[int, Field(ge=0, le=1 << 50)] = 0
    """Memory of the largest block with the default `quant_type`; 0 = not told."""


@dataclass(frozen=True)
class SwarmSnapshot:
    """The servers of one model, as read from the DHT at one time."""

    num_blocks: int
    servers: tuple[ServerInfo, ...] = ()
    encoder_blocks: int = 0
    """Number of the encoder's blocks, which come first; 0: there is one stack only."""
    taken_at: float = field(default=0.0, compare=False)
    """Monotonic clock of the reader, seconds."""

    def online(self) -> tuple[ServerInfo, ...]:
        return tuple(server for server in self.servers if server.state == ServerState.ONLINE)

    def cache_room(self) -> int:
        """The longest text, in tokens, for which every block has a server with enough free cache; 0: not known."""
        room = [0] * self.num_blocks
        for server in self.online():
            for block in server.span:
                room[block] = max(room[block], server.cache_tokens_left)
        return min(room, default=0)

    def missing_blocks(self) -> tuple[int, ...]:
        """Blocks that no server in state online holds."""
        held = {block for server in self.online() for block in server.span}
        return tuple(block for block in range(self.num_blocks) if block not in held)


@dataclass(frozen=True)
class RouteHop:
    """One server of a route and the blocks that it runs (a part of its span)."""

    server: ServerInfo
    span: Span

    def __str__(self) -> str:
        return f"{self.span}@{self.server.peer_id[-6:]}"


def size_in_words(num_bytes: float) -> str:
    """A number of bytes in GB, or in MB if it is small."""
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.1f} MB"
