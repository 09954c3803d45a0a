"""Messages as bytes, without I/O, for `wire/stream`: their kinds, their layout, their largest sizes.

A message is a type, a small header (a msgpack map) and a payload of raw bytes. It travels in frames:

    frame    = prefix, header, payload chunk
    prefix   = magic (2 bytes), format (1), type (1), flags (1), pad (1), three unsigned 32-bit numbers, big-endian:
               bytes of the header, bytes of this frame's payload chunk, bytes of the whole message's payload

The first frame holds the header and at most `CHUNK_BYTES` of payload. Frames of type CONTINUE hold the rest. A control
message (PING, PONG, ERROR, MOVED) has no payload and may come between the frames of another message, so that a transfer
of many megabytes delays no sign of life. The decoder's states:

    state              on                                  →
    idle               first frame of a whole message      idle, message
    idle               first frame of a longer message     unfinished
    unfinished         CONTINUE, message still incomplete   unfinished
    unfinished         CONTINUE, message complete           idle, message
    either             control frame                        the same, message
    any                anything else                        RemoteProtocolError; the decoder can't be used any more

Sizes are checked before anything is stored. Memory grows only as bytes arrive, so a claimed size alone costs nothing.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from struct import Struct
from typing import Any

import msgpack

from swarmllm.errors import LocalProtocolError, RemoteProtocolError

CHUNK_BYTES = 256 << 10
"""Payload per frame. Measured: the best size for streams through p2pd. One frame delays a PING by about 1 ms."""
MAX_FRAME_BYTES = 1 << 20
"""Most payload bytes to accept in one frame."""
MAX_HEADER_BYTES = 512 << 10
"""Most bytes of any header: an ADAPTER that names 4096 modules."""
MAX_MESSAGE_BYTES = 256 << 20
"""Most payload bytes of a message, unless the stream sets another limit."""
SMALL_BYTES = 16 << 10
"""Most bytes of the header, and of the payload, of small messages. A message is small by its type or on its stream."""
MAX_CONTAINERS = 1 << 15
"""Most maps and arrays in one large header: an ADAPTER has five for each of its 4096 modules. msgpack's C code holds
Python's lock while it unpacks a header, so it would stop the event loop from a thread as well. 512 KiB of empty maps
take 140 ms; up to this limit the worst headers take 9 to 18 ms (measured on a busy machine)."""

MAGIC = b"sL"
FORMAT = 1
"""Version of this frame layout. The meaning of messages has its own version, agreed by HELLO and WELCOME."""
OPTIONAL = 1
"""Flag: skip this message if its type is unknown."""
FILLER = 255
"""Type of messages without a meaning, to measure a connection. No version knows it, so all peers skip it."""
PREFIX = Struct(">2sBBBxIII")
PREFIX_BYTES = PREFIX.size

ByteChunk = bytes | bytearray | memoryview


class MessageType(IntEnum):
    """Kinds of messages. `wire/messages` defines their headers."""

    CONTINUE = 0
    """Not a message: the next chunk of one."""
    PING = 1
    PONG = 2
    ERROR = 3
    HELLO = 4
    WELCOME = 5
    OPEN = 16
    LINK = 17
    STEP = 18
    REPLAY = 19
    ATTACH = 20
    FORWARD = 21
    BACKWARD = 22
    RESULT = 23
    ADAPTER = 25
    PUSH = 27
    MOVED = 28
    """The sender's last frame on this connection. It goes on with the next frame on the other one (`wire/stream`)."""
    WEIGHTS = 29
    # 24 and 26 were used until 2026-11-23.
    MEMBER = 40
    """40 to 45: between homes that train together (`training/rounds`)."""
    POSITION = 41
    DIFFERENCE = 42
    VOTE = 43
    WANT = 44
    STATE = 45


CONTROL_TYPES = frozenset((MessageType.PING, MessageType.PONG, MessageType.ERROR, MessageType.MOVED))
LARGE_TYPES = frozenset(
    (
        MessageType.STEP,
        MessageType.FORWARD,
        MessageType.BACKWARD,
        MessageType.RESULT,
        MessageType.ADAPTER,
        MessageType.PUSH,
        MessageType.WEIGHTS,
    )
)
"""Types whose payload may be larger than SMALL_BYTES."""
LARGE_RUN_TYPES = frozenset((MessageType.DIFFERENCE, MessageType.STATE))
"""The same between homes that train together. Servers don't expect them."""
HEADER_BYTES = {
    MessageType.STEP: 320 << 10,
    MessageType.REPLAY: 256 << 10,
    MessageType.RESULT: 128 << 10,
    MessageType.ADAPTER: MAX_HEADER_BYTES,
}
"""Most bytes of larger headers: the choice of 65536 rows has 3 bytes each, the timings of 4096 servers 15 each."""
_TYPES: dict[int, MessageType] = {int(kind): kind for kind in MessageType}


@dataclass(slots=True)
class Message:
    """A received message."""

    type: MessageType
    header: dict[str, Any]
    payload: bytearray = field(default_factory=bytearray)
    header_bytes: int = field(default=0, compare=False)
    """Size of the packed header."""


def encode_message(
    kind: MessageType,
    header: Mapping[str, Any],
    payload_chunks: Sequence[ByteChunk] = (),
    *,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
    flags: int = 0,
) -> Iterator[bytes]:
    """Encode a message as frames, to be written in this order. Only control frames may come between them.

    Raises:
        LocalProtocolError: the header or the payload is too large, or the header is not plain data.
    """
    try:
        packed: bytes = msgpack.packb(header)
    except (TypeError, ValueError, OverflowError) as error:
        raise LocalProtocolError(f"the header of {kind.name} can't be packed: {error}") from error
    views = [memoryview(chunk) for chunk in payload_chunks]
    if not all(view.format == "B" and view.ndim == 1 and view.contiguous for view in views):
        raise LocalProtocolError("payload chunks must be plain bytes")
    total = sum(map(len, views))
    max_header_bytes = HEADER_BYTES.get(kind, SMALL_BYTES)
    if kind not in LARGE_TYPES | LARGE_RUN_TYPES:
        max_message_bytes = min(SMALL_BYTES, max_message_bytes)
    if len(packed) > max_header_bytes or total > max_message_bytes:
        raise LocalProtocolError(
            f"a {kind.name} of {len(packed)} + {total} bytes is over the cap: {max_header_bytes} + {max_message_bytes}"
        )
    if total <= CHUNK_BYTES:
        yield b"".join((PREFIX.pack(MAGIC, FORMAT, kind, flags, len(packed), total, total), packed, *views))
        return
    first = True
    for parts in _cut(views, CHUNK_BYTES):
        size = sum(map(len, parts))
        if first:
            yield b"".join((PREFIX.pack(MAGIC, FORMAT, kind, flags, len(packed), size, total), packed, *parts))
        else:
            yield b"".join((PREFIX.pack(MAGIC, FORMAT, MessageType.CONTINUE, 0, 0, size, total), *parts))
        first = False


def filler(num_bytes: int) -> Iterator[bytes]:
    """Encode messages of so many bytes that every peer skips."""
    header = msgpack.packb({})
    for start in range(0, num_bytes, SMALL_BYTES):
        size = min(SMALL_BYTES, num_bytes - start)
        yield PREFIX.pack(MAGIC, FORMAT, FILLER, OPTIONAL, len(header), size, size) + header + bytes(size)


def _cut(views: Iterable[memoryview], size: int) -> Iterator[list[memoryview]]:
    """Regroup the bytes into pieces of `size`, the last one shorter, without copying."""
    parts: list[memoryview] = []
    room = size
    for view in views:
        rest = view
        while len(rest) >= room:
            parts.append(rest[:room])
            yield parts
            rest, parts, room = rest[room:], [], size
        if len(rest):
            parts.append(rest)
            room -= len(rest)
    if parts:
        yield parts


class FrameDecoder:
    """Decodes bytes into messages. It can't be used after a RemoteProtocolError."""

    def __init__(self, *, max_message_bytes: int = MAX_MESSAGE_BYTES, peer_id: str | None = None) -> None:
        self._max_message_bytes = max_message_bytes
        self._peer_id = peer_id
        self._partial = bytearray()  # an unfinished prefix or header
        self._frame: tuple[int, int, int, int, int] | None = None  # type, flags, header, chunk and total bytes
        self._part_left = 0  # payload bytes of the current frame that are still missing
        self._message: Message | None = None  # unfinished; the type doesn't matter when it is skipped
        self._message_bytes = 0  # payload bytes that the unfinished message will have
        self._skip = False  # the unfinished message has an unknown, optional type
        self.large_types = LARGE_TYPES
        """Types that may be larger than SMALL_BYTES at present."""
        self.num_messages = 0
        """Complete messages so far, without control messages."""

    @property
    def unfinished(self) -> bool:
        """True if the bytes so far end within a frame or a message."""
        return bool(self._partial) or self._frame is not None or self._message is not None

    @property
    def unfinished_bytes(self) -> int:
        """Bytes so far of the unfinished message or header; 0 if there is none."""
        if not self.unfinished:
            return 0
        message = self._message
        return max(1, len(self._partial) + (0 if message is None else len(message.payload) + message.header_bytes))

    def feed(self, data: ByteChunk) -> Iterator[Message]:
        """Decode bytes; yield the messages that they complete.

        Raises:
            RemoteProtocolError: the bytes break the protocol. Messages before the fault were yielded.
        """
        view = memoryview(data)
        end = len(view)
        pos = 0
        while True:
            if self._part_left:
                if pos == end:
                    return
                message = self._unfinished_message()
                size = min(self._part_left, end - pos)
                message.payload += view[pos : pos + size]
                pos += size
                self._part_left -= size
                if self._part_left == 0 and (done := self._end_frame()) is not None:
                    yield done
                continue
            frame = self._frame
            wanted = PREFIX_BYTES if frame is None else frame[2]
            have = len(self._partial)
            if have == 0 and end - pos >= wanted:
                piece: ByteChunk = view[pos : pos + wanted]
                pos += wanted
            else:
                size = min(wanted - have, end - pos)
                self._partial += view[pos : pos + size]
                pos += size
                if have + size < wanted:
                    return
                piece = bytes(self._partial)
                self._partial.clear()
            if frame is None:
                self._frame = self._check_prefix(piece)
            elif (done := self._begin_payload(frame, piece)) is not None:
                yield done

    def _check_prefix(self, prefix: ByteChunk) -> tuple[int, int, int, int, int]:
        magic, layout, kind, flags, header_bytes, part_bytes, total_bytes = PREFIX.unpack(prefix)
        if magic != MAGIC:
            raise self._error("the stream has no frame where one must begin")
        if layout != FORMAT:
            raise self._error(f"frames of format {layout} are not known here; update the older side")
        if flags & ~OPTIONAL:
            raise self._error(f"unknown flags {flags:#x}")
        max_header_bytes, max_message_bytes = self._caps(kind)
        if total_bytes > max_message_bytes:
            raise self._error(f"a message of {total_bytes} bytes is over the cap of {max_message_bytes}")
        if header_bytes > max_header_bytes or part_bytes > min(MAX_FRAME_BYTES, total_bytes):
            raise self._error(f"a frame of {header_bytes} + {part_bytes} bytes is over the cap")
        if kind == MessageType.CONTINUE:
            message = self._message
            if message is None:
                raise self._error("a message continues that never began")
            if header_bytes or flags or not part_bytes or total_bytes != self._message_bytes:
                raise self._error("a continued message contradicts its beginning")
            if len(message.payload) + part_bytes > total_bytes:
                raise self._error("a message is longer than announced")
        elif kind in CONTROL_TYPES:
            if total_bytes:
                raise self._error("a control message is over its cap")
        else:
            if self._message is not None:
                raise self._error("a message begins within another one")
            if total_bytes and not part_bytes:
                raise self._error("a message with a payload begins without it")
            if kind not in _TYPES and not flags & OPTIONAL:
                raise self._error(f"message type {kind} is not known here; update the older side")
        return kind, flags, header_bytes, part_bytes, total_bytes

    def _caps(self, kind: int) -> tuple[int, int]:
        """Most bytes of the header and of the payload of a message of this type."""
        known = _TYPES.get(kind)
        if kind == MessageType.CONTINUE:
            return MAX_HEADER_BYTES, self._max_message_bytes  # the error is raised below
        if known is None or not self.large_types:
            return SMALL_BYTES, min(SMALL_BYTES, self._max_message_bytes)
        max_bytes = self._max_message_bytes if known in self.large_types else SMALL_BYTES
        return HEADER_BYTES.get(known, SMALL_BYTES), min(max_bytes, self._max_message_bytes)

    def _begin_payload(self, frame: tuple[int, int, int, int, int], packed: ByteChunk) -> Message | None:
        kind, _, _, part_bytes, total_bytes = frame
        if kind == MessageType.CONTINUE:
            self._part_left = part_bytes
            return None
        header = self._unpack(packed)
        known = _TYPES.get(kind)
        if known in CONTROL_TYPES:
            self._frame = None
            return Message(known, header, header_bytes=len(packed))
        self._message = Message(known or MessageType.CONTINUE, header, header_bytes=len(packed))
        self._skip = known is None
        self._message_bytes = total_bytes
        self._part_left = part_bytes
        return None if part_bytes else self._end_frame()

    def _unpack(self, packed: ByteChunk) -> dict[str, Any]:
        try:
            header = _unpack_large(packed) if len(packed) > SMALL_BYTES else msgpack.unpackb(packed, use_list=False)
        except Exception as error:  # noqa: BLE001 - msgpack documents no closed list for malformed input
            raise self._error(f"a header is not msgpack: {type(error).__name__}") from None
        if not isinstance(header, dict) or not all(isinstance(key, str) for key in header):
            raise self._error("a header is not a map from names")
        return header

    def _end_frame(self) -> Message | None:
        message = self._unfinished_message()
        self._frame = None
        if len(message.payload) < self._message_bytes:
            return None
        self._message = None
        self.num_messages += 1
        return None if self._skip else message

    def _unfinished_message(self) -> Message:
        if self._message is None:
            raise LocalProtocolError("the frame decoder lost its message")
        return self._message

    def _error(self, message: str) -> RemoteProtocolError:
        return RemoteProtocolError(message, self._peer_id)


def _unpack_large(packed: ByteChunk) -> Any:
    """Unpack with msgpack, with a limit on maps and arrays so that it doesn't take long."""
    left = MAX_CONTAINERS

    def count(container: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise ValueError
        return container

    return msgpack.unpackb(packed, use_list=False, object_hook=count, list_hook=count)
