"""The headers of the protocol's messages between clients and servers, checked field by field.

A stream begins with HELLO and WELCOME (`wire/protocol`). Then either side may send:

    request            answer             meaning
    OPEN               RESULT | ERROR     client → server: lease KV cache for a session on blocks [start, end)
    LINK               RESULT | ERROR     client → server: send this session's outputs to that peer (or to me)
    STEP               RESULT | ERROR     client or predecessor → server: run the session's blocks on hidden states;
                                          the last server of the chain answers, on its own stream
    REPLAY             RESULT | ERROR     client → server: send this session's kept outputs again, to its successor
    ATTACH             RESULT | ERROR     server → successor: steps of that session will come on this stream
    FORWARD, BACKWARD  RESULT | ERROR     client → server: a request without a session or KV cache
    PUSH               –                  server → server: the tensors that a FORWARD or BACKWARD there waits for;
                                          client → server: don't wait for them any more
    ADAPTER            RESULT | ERROR     client → server: keep these trained tensors; requests name them by a handle
    WEIGHTS            RESULT | ERROR     machine → machine: give me a piece of a model's files (`machines/weights`)

    between homes that train together (`training/rounds` has the headers)
    MEMBER             –                  the first message of both: I am a member of this run, under these rules
    POSITION           –                  my state has this digest, and was made from these differences
    DIFFERENCE         –                  my difference for this round
    VOTE               –                  the differences that I have for this round
    WANT               DIFFERENCE | STATE send me a difference, or a piece of your state

A session ends with the stream on which it was opened. Every request carries an `id` that its answer repeats. Tensors
may be compressed if the peer supports it (`wire/compression`). Unknown fields are ignored, so that newer peers can add
some. `wire/frames` has the numbers and largest sizes of the messages. `streams/connection` receives them on a server.
"""

from typing import Annotated, Literal, TypeVar

from pydantic import Field, ValidationError

from swarmllm.data_structures import MAX_ADDRS, MAX_BLOCKS, Patch, PeerModel, PeerText
from swarmllm.errors import RemoteProtocolError, SwarmError

MAX_POSITION = 1 << 24
MAX_BATCH = 1 << 16
SESSION_ID_LENGTH = 32
MAX_PATCHES = 4096
"""Most modules of one server's blocks that an adapter may change. A header of 512 KiB holds about as many."""
MAX_ERROR_LENGTH = 2000
MAX_PIECES = 1024
"""Most pieces of a step that a RESULT tells of, of all servers together."""
MAX_CUTS = 4096
MAX_PLACE = 15
"""Values that a block may return besides its hidden states. Attention weights are looked for among them."""

Header = TypeVar("Header", bound=PeerModel)

RequestId = Annotated[int, Field(ge=0, lt=1 << 63)]
SessionId = Annotated[str, Field(min_length=SESSION_ID_LENGTH, max_length=SESSION_ID_LENGTH)]
Token = SessionId
PeerId = Annotated[PeerText, Field(min_length=40, max_length=64)]
Position = Annotated[int, Field(ge=0, le=MAX_POSITION)]
BlockIndex = Annotated[int, Field(ge=0, le=MAX_BLOCKS)]
BatchSize = Annotated[int, Field(ge=1, le=MAX_BATCH)]
SeqLen = Annotated[int, Field(ge=1, le=MAX_POSITION)]
AdapterName = Annotated[str | None, Field(max_length=128)]
# Stop at the first wrong element of a sequence: an error for each would take seconds to write.
BatchIndex = (
    Annotated[tuple[Annotated[int, Field(ge=0, lt=MAX_BATCH)], ...], Field(max_length=MAX_BATCH, fail_fast=True)] | None
)
NumChoices = Annotated[int, Field(ge=0, lt=1 << 63, alias="rows")]
"""Number of earlier choices of rows (beam search). `rows` is its name on the wire."""
Shape = Annotated[tuple[int, ...], Field(fail_fast=True)]
Descriptors = Annotated[tuple[tuple[str, str, Shape, int], ...], Field(max_length=32, fail_fast=True)]
"""Descriptors for `tensor_codec.decode_tensors`, which checks the values."""
Compression = Annotated[str, Field(max_length=16)]
"""Compression that the client wants from servers: "none", "int8", or "auto" for the server's own choice."""
Timings = Annotated[tuple[tuple[int, int, int], ...], Field(max_length=MAX_BLOCKS, fail_fast=True)]
"""For each server that the step passed: first block, microseconds in the queue, microseconds of computing."""

Pieces = Annotated[
    tuple[
        tuple[BlockIndex, BlockIndex, Annotated[tuple[SeqLen, ...], Field(max_length=MAX_PIECES, fail_fast=True)]], ...
    ],
    Field(max_length=MAX_BLOCKS, fail_fast=True),
]
"""For each server that computed the step in pieces: its first block, the block behind its last, and the lengths of the
pieces."""

AttentionShape = Annotated[
    tuple[Annotated[int, Field(ge=1, le=MAX_POSITION)], ...], Field(min_length=4, max_length=4, fail_fast=True)
]
Attentions = Annotated[
    tuple[tuple[BlockIndex, Annotated[int, Field(ge=0, le=MAX_PLACE)], AttentionShape], ...],
    Field(max_length=MAX_BLOCKS, fail_fast=True),
]
"""For each tensor of attention weights: block, place, shape `[batch, heads, seq, past + seq]`
(`boundary/inner_states`)."""


TICKET_BYTES = 32


class DirectOffer(PeerModel):
    """A server's offer to move the stream to a connection without p2pd (`p2p/direct`)."""

    port: Annotated[int, Field(ge=1, lt=1 << 16)]
    directory: Annotated[PeerText, Field(max_length=64)] = ""
    """Name of the directory of its socket for programs on the same machine."""
    certificate: Annotated[bytes, Field(min_length=32, max_length=32)]
    """SHA-256 of its TLS certificate."""
    ticket: Annotated[bytes, Field(min_length=TICKET_BYTES, max_length=TICKET_BYTES)]
    """Proves that the connection belongs to this stream."""


class WantedInner(PeerModel):
    """Values between blocks that the client wants to see as well. Only servers that know this field answer it."""

    outputs: Annotated[tuple[BlockIndex, ...], Field(max_length=MAX_BLOCKS, fail_fast=True)] = ()
    """Blocks whose outputs are wanted, of this server or of others."""
    attentions: bool = False
    """True if the attention weights of all blocks are wanted."""


class Target(PeerModel):
    """A server that receives pushed tensors, and the secret by which it accepts them."""

    peer_id: PeerId
    addrs: Annotated[tuple[Annotated[PeerText, Field(max_length=256)], ...], Field(max_length=MAX_ADDRS)] = ()
    token: Token


class Successor(Target):
    """The next server of a chain, and the client's session there."""

    session: SessionId


class Predecessor(PeerModel):
    """The server that pushes tensors, and the secret by which it is known."""

    peer_id: PeerId
    token: Token


class OpenHeader(PeerModel):
    """OPEN: lease a session's KV cache for blocks [start, end)."""

    id: RequestId
    session: SessionId
    token: SessionId
    """Secret that the predecessor shows in ATTACH. The session's id alone gives no right to write to it."""
    start: BlockIndex
    end: BlockIndex
    batch_size: BatchSize
    max_length: SeqLen
    epoch: RequestId = 0
    adapter: RequestId | None = None
    """Handle of the ADAPTER that the session uses."""
    served_adapter: AdapterName = None
    """Or the name of an adapter that the server announces."""
    compression: Compression = "auto"
    source_length: Position = 0
    """Positions of the encoder's outputs that come with the first step, for blocks of a decoder."""
    record_past: bool = False
    """True if rollbacks may follow. Some caches must keep more for them."""


class LinkHeader(PeerModel):
    """LINK: send outputs to `successor` from now on, or to the client if there is none."""

    id: RequestId
    session: SessionId
    epoch: RequestId
    successor: Successor | None = None


class AttachHeader(PeerModel):
    """ATTACH: the sender will push steps of this session on this stream."""

    id: RequestId
    session: SessionId
    token: SessionId


class StepHeader(PeerModel):
    """STEP: `seq_len` positions of the session from `position` on. A position below the cache's end rolls it back."""

    id: RequestId
    session: SessionId
    epoch: RequestId
    """The chain's version: the client raises it at each repair. Steps of an older version are dropped."""
    position: Position
    batch_size: BatchSize
    seq_len: SeqLen
    tensors: Descriptors
    num_choices: NumChoices = 0
    batch_index: BatchIndex = None
    """The last choice of rows, if caches have not applied it yet: rows to keep, in their new order."""
    ones_mask: bool = False
    """True: the attention mask is all ones, `[batch, position + seq_len]`, and isn't sent."""
    replay_hops: Annotated[int, Field(ge=0, le=MAX_BLOCKS)] = 0
    """Above 0: this step rebuilds caches. This many servers run it, this one included, and none answers tensors."""
    whole: bool = False
    """True: compute it in one piece if it is of usual length, without shared pages, because it rebuilds caches as they
    were. Servers of versions without it may cut it."""
    timings: Timings = ()
    pieces: Pieces = ()
    inner: WantedInner | None = None
    """Values between blocks that the client wants. Each server answers its own in a RESULT, on the stream that opened
    its session."""


class ReplayHeader(PeerModel):
    """REPLAY: send the kept outputs of positions [0, length) to the successor, for `replay_hops` servers."""

    id: RequestId
    session: SessionId
    epoch: RequestId
    length: Position
    replay_hops: Annotated[int, Field(ge=1, le=MAX_BLOCKS)]
    num_choices: NumChoices = 0
    batch_index: BatchIndex = None
    steps: tuple[Position, Position] | None = None
    """Send the steps that began at these positions [start, end), one by one as they were computed. None: send all
    positions, joined to long steps, as servers of versions without this field do
    (`ServerInfo.replays_steps`)."""
    cuts: Annotated[tuple[Position, ...], Field(max_length=MAX_CUTS, fail_fast=True)] = ()
    """Positions at which the successor computed these steps in pieces."""


class BatchHeader(PeerModel):
    """FORWARD or BACKWARD of blocks [start, end), without a session. BACKWARD brings the inputs and the gradient of the
    outputs, or that gradient alone and the name of its `forward`."""

    id: RequestId
    start: BlockIndex
    end: BlockIndex
    batch_size: BatchSize
    seq_len: SeqLen
    tensors: Descriptors
    ones_mask: bool = False
    adapter: RequestId | None = None
    """Handle of an ADAPTER. BACKWARD then answers the gradients of its values, too."""
    served_adapter: AdapterName = None
    """Or the name of an adapter that the server announces."""
    keep: bool = False
    """FORWARD: keep the result for a BACKWARD that follows soon."""
    forward: RequestId | None = None
    """BACKWARD: the id of the FORWARD whose result was kept."""
    source: Predecessor | None = None
    """The server that pushes the hidden states (BACKWARD: the gradient of the outputs). They are not among
    `tensors`."""
    target: Target | None = None
    """The server to which the outputs (BACKWARD: the gradient of the hidden states) are pushed."""
    without_pushed: Annotated[bool, Field(alias="lean")] = False
    """True if pushed outputs need not be answered as well."""
    compression: Compression = "auto"
    inner: WantedInner | None = None
    """FORWARD: values to answer with the result."""


class PushHeader(PeerModel):
    """PUSH: `hidden_states` or `grad_outputs` for the request that named this token. Without tensors: they won't
    come."""

    token: Token
    tensors: Descriptors = ()


class AdapterHeader(PeerModel):
    """ADAPTER: the tensor `values` holds the values of `patches`, flattened and in their order."""

    id: RequestId
    handle: RequestId
    """Chosen by the client. Each client has its own handles."""
    patches: Annotated[tuple[Patch, ...], Field(min_length=1, max_length=MAX_PATCHES, fail_fast=True)]
    tensors: Descriptors


class WeightsHeader(PeerModel):
    """WEIGHTS: a member of a swarm of machines asks another one about a model."""

    id: RequestId
    manifest: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    """SHA-256 of the model's manifest."""
    wants: Literal["manifest", "state", "piece"]
    """The manifest itself; the pieces that the other machine has, or fetches; or one piece. With "state", the payload
    tells which pieces the sender wants to fetch from the hub, one bit each."""
    piece: Annotated[int, Field(ge=0, lt=1 << 32)] = 0


class WeightsResult(PeerModel):
    """RESULT of a WEIGHTS. The payload is what was asked for; of "state" three bits for each piece: first those of
    pieces that are here, then those of pieces that come from the hub now, then those of pieces that are wanted from
    there."""

    id: RequestId
    is_here: bool = True
    """False if the piece isn't here."""


class ResultHeader(PeerModel):
    """RESULT of any request."""

    id: RequestId
    tensors: Descriptors = ()
    end: BlockIndex = 0
    """STEP: the end of the blocks that are done. It is below the route's end if the client must relay."""
    position: Position = 0
    """STEP: where its outputs begin. LINK: the position up to which the session has sent its outputs."""
    timings: Timings = ()
    pieces: Pieces = ()
    pushed: bool = False
    """FORWARD, BACKWARD: the tensors were pushed to `target`."""
    shows: bool = False
    """STEP: this RESULT holds the wanted `inner` values. It isn't the end of the step."""
    blocks: Annotated[tuple[BlockIndex, ...], Field(max_length=MAX_BLOCKS, fail_fast=True)] = ()
    """Blocks whose outputs are in the tensor `block_outputs`, `[blocks, …]`."""
    attentions: Attentions = ()
    """The pieces of the flat tensor `attentions`."""


class ErrorHeader(PeerModel):
    """ERROR: a request failed, or (id None) the session or stream did."""

    code: Annotated[PeerText, Field(max_length=64)]
    message: Annotated[PeerText, Field(max_length=MAX_ERROR_LENGTH)]
    id: RequestId | None = None
    session: SessionId | None = None
    peer_id: Annotated[PeerText | None, Field(max_length=64)] = None
    """The peer at fault if it isn't the sender, for example a successor that can't be reached."""


def error_header(error: SwarmError, **ids: object) -> dict[str, object]:
    """The header of an error. `ids` name the request or session."""
    return {"code": error.code, "message": str(error)[:MAX_ERROR_LENGTH], **ids}


def parse(header_type: type[Header], fields: dict[str, object], peer_id: str | None) -> Header:
    """Parse the header of a message.

    Raises:
        RemoteProtocolError: a field is missing, or has the wrong type or range.
    """
    try:
        return header_type.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise RemoteProtocolError(f"{header_type.__name__} is not valid: {where}: {first['msg']}", peer_id) from None
