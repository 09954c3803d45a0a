"""The headers of the protocol's messages: what clients and servers say to each other, checked field by field.

A stream begins with HELLO and WELCOME (`wire/protocol`). Then either side may send:

    request            answer             meaning
    OPEN               RESULT | ERROR     client → server: lease KV cache for a session on blocks [start, end)
    LINK               RESULT | ERROR     client → server: pass this session's outputs on to that peer (or to me)
    STEP               RESULT | ERROR     client or predecessor → server: run the session's blocks on hidden states;
                                          the answer comes from the last server of the chain, on its own stream
    REPLAY             RESULT | ERROR     client → server: send the kept outputs of this session again, to its successor
    ATTACH             RESULT | ERROR     server → successor: steps of that session will come on this stream
    FORWARD, BACKWARD  RESULT | ERROR     client → server: a batch without a KV cache
    PUSH               –                  server → server: what a FORWARD or BACKWARD there waits for;
                                          client → server: that it shall not wait for it any more
    ADAPTER            RESULT | ERROR     client → server: keep these trained tensors; requests name them by a handle

A session ends with the stream on which it was opened. Every request carries an `id` that its answer repeats. Tensors of
a peer that can read them may be packed (`wire/compression`). Unknown fields are ignored, so newer peers can add some.
Numbers and largest sizes of the messages are in `wire/frames`; `streams/connection` takes them in on a server.
"""

from typing import Annotated, TypeVar

from pydantic import Field, ValidationError

from swarmllm.data_structures import MAX_ADDRS, MAX_BLOCKS, Patch, PeerModel, PeerText
from swarmllm.errors import RemoteProtocolError, SwarmError

MAX_POSITION = 1 << 24
MAX_BATCH = 1 << 16
SESSION_ID_LENGTH = 32
MAX_PATCHES = 4096
"""Modules of one server's blocks that an adapter may change; a header of 512 KiB holds about as many."""
MAX_ERROR_LENGTH = 2000
MAX_PLACE = 15
"""Values that a block returns beside its hidden states, among which attention weights are looked for."""

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
# The first wrong element of a sequence is enough: an error for each would take seconds to write.
BatchIndex = (
    Annotated[tuple[Annotated[int, Field(ge=0, lt=MAX_BATCH)], ...], Field(max_length=MAX_BATCH, fail_fast=True)] | None
)
NumChoices = Annotated[int, Field(ge=0, lt=1 << 63, alias="rows")]
"""Number of times that the batch's rows were chosen anew (beam search) before this; `rows` is its name on the wire."""
Shape = Annotated[tuple[int, ...], Field(fail_fast=True)]
Descriptors = Annotated[tuple[tuple[str, str, Shape, int], ...], Field(max_length=32, fail_fast=True)]
"""The descriptors for `tensor_codec.decode_tensors`, which checks the values."""
Compression = Annotated[str, Field(max_length=16)]
"""The client's wish for tensors that servers send: "none", "int8", or "auto" for what the server finds best."""
Timings = Annotated[tuple[tuple[int, int, int], ...], Field(max_length=MAX_BLOCKS, fail_fast=True)]
"""Per server that the step went through: first block, microseconds in the queue, microseconds of computing."""


AttentionShape = Annotated[
    tuple[Annotated[int, Field(ge=1, le=MAX_POSITION)], ...], Field(min_length=4, max_length=4, fail_fast=True)
]
Attentions = Annotated[
    tuple[tuple[BlockIndex, Annotated[int, Field(ge=0, le=MAX_PLACE)], AttentionShape], ...],
    Field(max_length=MAX_BLOCKS, fail_fast=True),
]
"""Per tensor of attention weights: block, place, shape `[batch, heads, seq, past + seq]` (`boundary/inner_states`)."""


class WantedInner(PeerModel):
    """What shall be answered besides the result: for those who want to see it, and by servers that know this field."""

    outputs: Annotated[tuple[BlockIndex, ...], Field(max_length=MAX_BLOCKS, fail_fast=True)] = ()
    """Blocks whose outputs are wanted, of this server or of others."""
    attentions: bool = False
    """Whether the attention weights of all blocks are wanted."""


class Target(PeerModel):
    """A server to which another one passes something on, and the secret by which it takes it."""

    peer_id: PeerId
    addrs: Annotated[tuple[Annotated[PeerText, Field(max_length=256)], ...], Field(max_length=MAX_ADDRS)] = ()
    token: Token


class Successor(Target):
    """The next server of a chain, and the session that the client has opened there."""

    session: SessionId


class Predecessor(PeerModel):
    """The other end: who passes something on, and by which secret it is known."""

    peer_id: PeerId
    token: Token


class OpenHeader(PeerModel):
    """OPEN: a session's KV cache on blocks [start, end) of the server."""

    id: RequestId
    session: SessionId
    token: SessionId
    """Secret that the predecessor must show in ATTACH: the session's id alone gives no right to write to it."""
    start: BlockIndex
    end: BlockIndex
    batch_size: BatchSize
    max_length: SeqLen
    epoch: RequestId = 0
    adapter: RequestId | None = None
    """Handle of an ADAPTER that the session's steps run with."""
    served_adapter: AdapterName = None
    """Instead of it: the name of one that the server announces."""
    compression: Compression = "auto"
    source_length: Position = 0
    """Positions of an encoder's outputs that come with the first step, for blocks of a decoder."""
    record_past: bool = False
    """Whether rollbacks are to be expected, for caches that must keep more for them."""


class LinkHeader(PeerModel):
    """LINK: from now on outputs go to `successor`, or back to the client when there is none."""

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
    """STEP: `seq_len` positions of the session from `position` on; a lower position than the cache's rolls it back."""

    id: RequestId
    session: SessionId
    epoch: RequestId
    """Raised by the client at each repair; steps of an older epoch are dropped."""
    position: Position
    batch_size: BatchSize
    seq_len: SeqLen
    tensors: Descriptors
    num_choices: NumChoices = 0
    batch_index: BatchIndex = None
    """The last choice of rows, for caches that have not made it yet: rows to keep, in their new order."""
    ones_mask: bool = False
    """The attention mask is all ones [batch, position + seq_len], so it isn't sent."""
    replay_hops: Annotated[int, Field(ge=0, le=MAX_BLOCKS)] = 0
    """> 0: this step rebuilds caches; that many servers, this one included, are to run it, and none answers tensors."""
    timings: Timings = ()
    inner: WantedInner | None = None
    """Each server answers its part of it in a RESULT of its own, on the stream that has opened its session."""


class ReplayHeader(PeerModel):
    """REPLAY: send the kept outputs for positions [0, length) to the successor, for `replay_hops` servers."""

    id: RequestId
    session: SessionId
    epoch: RequestId
    length: Position
    replay_hops: Annotated[int, Field(ge=1, le=MAX_BLOCKS)]
    num_choices: NumChoices = 0
    batch_index: BatchIndex = None


class BatchHeader(PeerModel):
    """FORWARD or BACKWARD of blocks [start, end) on a batch. BACKWARD brings the inputs and the outputs' gradient, or
    that gradient alone and the name of its `forward`."""

    id: RequestId
    start: BlockIndex
    end: BlockIndex
    batch_size: BatchSize
    seq_len: SeqLen
    tensors: Descriptors
    ones_mask: bool = False
    adapter: RequestId | None = None
    """Handle of an ADAPTER; BACKWARD then answers the gradients of its values, too."""
    served_adapter: AdapterName = None
    """Instead of it: the name of one that the server announces."""
    keep: bool = False
    """FORWARD: its BACKWARD will come soon, so what it computes should be kept."""
    forward: RequestId | None = None
    """BACKWARD: the id of the FORWARD that was to be kept."""
    source: Predecessor | None = None
    """The server that pushes the hidden states (BACKWARD: the outputs' gradient): they are not among `tensors`."""
    target: Target | None = None
    """The server to which the outputs (BACKWARD: the hidden states' gradient) are pushed."""
    without_pushed: Annotated[bool, Field(alias="lean")] = False
    """Whether outputs that were pushed need not be answered as well."""
    compression: Compression = "auto"
    inner: WantedInner | None = None
    """FORWARD: answered with the result."""


class PushHeader(PeerModel):
    """PUSH: `hidden_states` or `grad_outputs` for the request that named this token; no tensors: they won't come."""

    token: Token
    tensors: Descriptors = ()


class AdapterHeader(PeerModel):
    """ADAPTER: the tensor `values` holds what `patches` need, flattened and in their order."""

    id: RequestId
    handle: RequestId
    """Chosen by the client; another client's handles are other ones."""
    patches: Annotated[tuple[Patch, ...], Field(min_length=1, max_length=MAX_PATCHES, fail_fast=True)]
    tensors: Descriptors


class ResultHeader(PeerModel):
    """RESULT of any request."""

    id: RequestId
    tensors: Descriptors = ()
    end: BlockIndex = 0
    """STEP: the blocks up to here are done; less than the route's end when the client has to relay."""
    position: Position = 0
    """STEP: where its outputs begin; LINK: the position up to which the session has sent its outputs."""
    timings: Timings = ()
    pushed: bool = False
    """FORWARD, BACKWARD: its `target` has been sent what it waits for."""
    shows: bool = False
    """STEP: this is the `inner` that was wanted, and not the end of the step."""
    blocks: Annotated[tuple[BlockIndex, ...], Field(max_length=MAX_BLOCKS, fail_fast=True)] = ()
    """Blocks whose outputs the tensor `block_outputs` brings, `[blocks, …]`."""
    attentions: Attentions = ()
    """The parts of the flat tensor `attentions`."""


class ErrorHeader(PeerModel):
    """ERROR: a request failed, or (id None) the session or stream did."""

    code: Annotated[PeerText, Field(max_length=64)]
    message: Annotated[PeerText, Field(max_length=MAX_ERROR_LENGTH)]
    id: RequestId | None = None
    session: SessionId | None = None
    peer_id: Annotated[PeerText | None, Field(max_length=64)] = None
    """The peer at fault when it is not the sender: a successor that can't be reached."""


def error_header(error: SwarmError, **ids: object) -> dict[str, object]:
    """The header of an error: a code and a message; `ids` say which request or session it is about."""
    return {"code": error.code, "message": str(error)[:MAX_ERROR_LENGTH], **ids}


def parse(header_type: type[Header], fields: dict[str, object], peer_id: str | None) -> Header:
    """The typed header of a message.

    Raises:
        RemoteProtocolError: a field is missing, or not of its type or range.
    """
    try:
        return header_type.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise RemoteProtocolError(f"{header_type.__name__} is not valid: {where}: {first['msg']}", peer_id) from None
