"""One stream to one server: requests and their answers, matched by id.

A session has its own connection to each server of its chain. All sessionless requests to a server share one. Everything
runs in the client's event loop. The functions at the end are for inner states, that is outputs and attention weights of
single blocks (`boundary/inner_states`): they write the request into a header, and store the answer.
"""

import asyncio
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from swarmllm.data_structures import BlockTraits, PeerModel, ServerInfo, Span
from swarmllm.errors import (
    LocalProtocolError,
    PeerError,
    PeerTimeoutError,
    PeerUnreachableError,
    RemoteProtocolError,
    SwarmError,
    error_from_code,
)
from swarmllm.models.boundary.block_inputs import BlockInputs
from swarmllm.models.boundary.inner_states import ANSWER_BYTES, InnerStates
from swarmllm.network.wire.compression import Outgoing, compressed
from swarmllm.network.wire.messages import ErrorHeader, ResultHeader, WantedInner, parse
from swarmllm.network.wire.protocol import FrameStream, Message, MessageType
from swarmllm.network.wire.tensor_codec import decode_tensors, encode_tensors

_ids = itertools.count(1)


def new_request_id() -> int:
    """Return an id, unique in this process: an answer may come on another connection than its request."""
    return next(_ids)


class Result:
    """A successful answer (a RESULT message): its header, and its tensors, which are decoded on demand."""

    def __init__(self, header: ResultHeader, message: Message, peer_id: str) -> None:
        self.header = header
        self.peer_id = peer_id
        self._message = message
        self._tensors: dict[str, Tensor] | None = None

    def tensors(self) -> dict[str, Tensor]:
        """Decode the tensors, once.

        Raises:
            RemoteProtocolError: they are not what the header says.
        """
        if self._tensors is None:
            payload = self._message.payload
            try:
                self._tensors = decode_tensors(self.header.tensors, payload, max_bytes=len(payload))
            except RemoteProtocolError as error:
                raise RemoteProtocolError(str(error), self.peer_id) from None
        return self._tensors


USUAL_WAIT_S = 0.4
"""Seconds that a caller waits for an answer before its servers are pinged more often (`attended`)."""


OnAnswer = Callable[["Connection", "Result | SwarmError", int | None], None]
"""Called with (connection, answer or error, request id). The id is None if the error isn't about one request."""


@dataclass(frozen=True, eq=False)
class _Request:
    """A call of `Connection.request` that waits for its answer."""

    answer: "asyncio.Future[Result]"
    may_accuse: str | None
    """Peer id of the one other server that the answer may blame; None = none."""


class Connection:
    """One stream to one server.

    `request()` returns its own answer. All other answers and errors go to `on_answer`.

    A server may answer that another server has failed. Such an error is marked (`PeerError.is_hearsay`). The answer to
    `request()` may blame only the server `may_accuse`. If it blames a third one, the error blames the sender instead.
    """

    def __init__(
        self, stream: FrameStream, server: ServerInfo, on_answer: OnAnswer | None = None, *, compression: str = "none"
    ) -> None:
        self.server = server
        self.asleep = False
        """True if the server's greeting said that its blocks aren't in memory and must be loaded first."""
        self.compression = compression
        """`ClientConfig.compression`: "none", "int8" or "auto"."""
        self._stream = stream
        self._on_answer = on_answer
        self._pending: dict[int, _Request] = {}
        self._needed_for: set[asyncio.Future[Result]] = set()
        """Answers awaited from other servers that need this server, too. They fail if this stream breaks."""
        self.error: PeerError | None = None
        """The reason why the stream ended; None while it works."""

    @property
    def peer_id(self) -> str:
        return self.server.peer_id

    @property
    def round_trip_s(self) -> float | None:
        """Smoothed over the last pings; None before the first one."""
        return self._stream.liveness.round_trip_s

    async def ping(self) -> float:
        """Seconds of one round trip, measured now.

        Raises:
            PeerError: the stream is broken.
        """
        return await self._stream.ping()

    async def compressed(self, tensors: Mapping[str, Tensor], *, exactly: bool = False) -> Outgoing:
        """Compress the tensors if that saves time on this stream. `exactly`: not if it would change their values."""
        return await compressed(tensors, self._stream, self.compression, exactly=exactly)

    async def send(self, message_type: MessageType, header: PeerModel, tensors: Outgoing | None = None) -> None:
        """Send without waiting for an answer.

        Raises:
            PeerError: the stream is broken.
        """
        if self.error is not None:
            raise self.error
        fields = header.model_dump()
        if tensors:
            descriptors, chunks = encode_tensors(tensors)
            fields["tensors"] = descriptors
            await self._stream.send(message_type, fields, chunks)
        else:
            await self._stream.send(message_type, fields)

    async def request(
        self,
        message_type: MessageType,
        header: PeerModel,
        tensors: Outgoing | None = None,
        *,
        timeout_s: float,
        others: Sequence["Connection"] = (),
        may_accuse: str | None = None,
    ) -> Result:
        """Send a message and wait for the answer with the same id as `header`.

        `others`: connections to servers that this server needs for its answer. If one of them breaks, the request fails
        at once. `may_accuse`: the one other server that the answer may blame.

        Raises:
            SwarmError: the server answered with an error, or its stream or one of `others` broke.
            PeerTimeoutError: no answer came in time.
        """
        request_id: int = header.id  # type: ignore[attr-defined]
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._pending[request_id] = _Request(future, may_accuse)
        try:
            for other in others:
                if other.error is not None:
                    raise other.error
                other._needed_for.add(future)
            async with asyncio.timeout(timeout_s):
                await self.send(message_type, header, tensors)
                with attended([self, *others]):
                    return await future
        except TimeoutError as error:
            if isinstance(error, SwarmError):
                raise
            raise PeerTimeoutError(f"no answer to {message_type.name} within {timeout_s:.0f} s", self.peer_id) from None
        finally:
            self._pending.pop(request_id, None)
            for other in others:
                other._needed_for.discard(future)

    async def read(self) -> None:
        """Receive answers until the stream ends, then fail everything that waits. Runs as a task of the event loop."""
        try:
            while True:
                self._take(await self._stream.receive())
        except PeerError as error:
            self.error = error
        except SwarmError:
            pass  # closed by this side
        finally:
            self.error = self.error or PeerUnreachableError("the connection was closed", self.peer_id)
            self._stream.abort()
            for future in (*(request.answer for request in self._pending.values()), *self._needed_for):
                if not future.done():
                    future.set_exception(self.error)
            if self._on_answer is not None:
                self._on_answer(self, self.error, None)

    def close(self) -> None:
        """Close the stream, which ends the reader's task."""
        self._stream.abort()

    def _take(self, message: Message) -> None:
        """Turn a message of the server into a result or an error, and hand it over."""
        if message.type == MessageType.RESULT:
            header = parse(ResultHeader, message.header, self.peer_id)
            self._settle(Result(header, message, self.peer_id), header.id)
        elif message.type == MessageType.ERROR:
            refusal = parse(ErrorHeader, message.header, self.peer_id)
            self._settle(self._error(refusal), refusal.id)
        else:
            raise RemoteProtocolError(f"a client doesn't take {message.type.name} messages", self.peer_id)

    def _error(self, refusal: ErrorHeader) -> SwarmError:
        """Turn an ERROR of the server into an exception that blames the right peer."""
        accused = refusal.peer_id
        # Without an accused peer, the server complains about our message; else about its neighbour's.
        if refusal.code == RemoteProtocolError.code and accused is None:
            error: SwarmError = LocalProtocolError(f"server {self.peer_id} doesn't understand us: {refusal.message}")
        else:
            error = error_from_code(refusal.code, refusal.message, accused or self.peer_id)
        if not isinstance(error, PeerError):
            error.said_by = self.peer_id
        if isinstance(error, PeerError) and accused is not None:
            error.accused_by = self.peer_id
            request = None if refusal.id is None else self._pending.get(refusal.id)
            if error.is_hearsay and request is not None and request.may_accuse != accused:
                return baseless(error)
        return error

    def _settle(self, answer: Result | SwarmError, request_id: int | None) -> None:
        """Give an answer or an error to the request that waits for it, or to `on_answer`."""
        request = None if request_id is None else self._pending.get(request_id)
        future = None if request is None else request.answer
        if future is None:
            if self._on_answer is not None:
                self._on_answer(self, answer, request_id)
        elif not future.done():
            future.set_exception(answer) if isinstance(answer, SwarmError) else future.set_result(answer)


def baseless(accusation: PeerError) -> RemoteProtocolError:
    """Return an error that blames the accuser, for an accusation of a server with which it has nothing to do."""
    return RemoteProtocolError(
        f"server {accusation.accused_by} blames {accusation.peer_id}, which has no part in this: {accusation}",
        accusation.accused_by,
    )


@contextmanager
def attended(connections: Iterable[Connection], *, usual_wait_s: float = USUAL_WAIT_S) -> Iterator[None]:
    """Ping these servers more often while an answer needs them, so that a frozen one is noticed sooner.

    This begins after `usual_wait_s`: most answers come before that.
    """
    streams: list[FrameStream] = []

    def attend() -> None:
        for connection in connections:
            connection._stream.attend()
            streams.append(connection._stream)

    timer = asyncio.get_running_loop().call_later(usual_wait_s, attend)
    try:
        yield
    finally:
        timer.cancel()
        for stream in streams:
            stream.liveness.relax()


def wanted_header(inputs: BlockInputs, span: Span | None = None) -> WantedInner | None:
    """Return the header field that asks for inner states of the blocks of `span` (default: all); None if `inputs` asks
    for none."""
    inner = inputs.inner
    if inner is None:
        return None
    outputs = sorted(inner.outputs) if span is None else inner.within(span)
    return WantedInner(outputs=tuple(outputs), attentions=inner.attentions)


def take_inner(answer: Result, span: Span, inputs: BlockInputs, traits: BlockTraits, past: int = 0) -> None:
    """Put a server's inner states into `inputs.inner`, if `inputs` asked for them. `past`: positions before the call.

    Raises:
        RemoteProtocolError: they can't be read.
        CorruptActivationsError: their values are impossible, such as NaN.
    """
    if inputs.inner is not None and inputs.inner.wants(span):
        inputs.inner.take(
            answer.header.blocks,
            answer.header.attentions,
            answer.tensors(),
            span=span,
            like=inputs.hidden_states,
            batch_axis=traits.batch_axis,
            end=past + inputs.seq_len + inputs.num_prefix,
            mask=inputs.attention_mask,
            peer_id=answer.peer_id,
        )


def position_bytes(inputs: BlockInputs) -> int:
    """Bytes of the hidden states of one position if a server answers in float32, its widest dtype."""
    return 4 * inputs.hidden_states.numel() // (inputs.batch_size * inputs.seq_len)


def tokens_at_once(inner: InnerStates, inputs: BlockInputs, span: Span) -> int:
    """Number of positions of a step whose answer, with inner states, has about `ANSWER_BYTES`; at least 1."""
    return max(1, ANSWER_BYTES // max(1, len(inner.within(span)) * position_bytes(inputs)))


def parts_at_once(inputs: BlockInputs, span: Span, traits: BlockTraits) -> Iterator[Span]:
    """Cut `span` into pieces whose inner states fit into one answer. Usually one piece is enough."""
    inner, start = inputs.inner, span.start
    if inner is not None and inner.wants(span):
        for end in range(span.start + 1, span.end):
            num_bytes = inner.num_bytes(
                Span(start, end + 1), inputs.batch_size, inputs.seq_len, inputs.num_prefix, position_bytes(inputs)
            )
            if num_bytes > ANSWER_BYTES and end not in traits.forbidden_cuts:
                yield Span(start, end)
                start = end
    yield Span(start, span.end)
