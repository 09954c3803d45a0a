"""The frame decoder refuses what breaks the protocol, before it stores anything."""

import msgpack
import pytest

from swarmllm.errors import LocalProtocolError, RemoteProtocolError
from swarmllm.network.wire.frames import (
    CHUNK_BYTES,
    FORMAT,
    MAGIC,
    MAX_FRAME_BYTES,
    MAX_HEADER_BYTES,
    OPTIONAL,
    PREFIX,
    SMALL_BYTES,
    FrameDecoder,
    MessageType,
    encode_message,
)

STEP = int(MessageType.STEP)
CONTINUE = int(MessageType.CONTINUE)
EMPTY = msgpack.packb({})


def frame(
    kind: int,
    part: bytes = b"",
    *,
    header: bytes = EMPTY,
    total: int | None = None,
    magic: bytes = MAGIC,
    layout: int = FORMAT,
    flags: int = 0,
) -> bytes:
    prefix = PREFIX.pack(magic, layout, kind, flags, len(header), len(part), len(part) if total is None else total)
    return prefix + header + part


def test_a_small_message_is_one_frame_and_a_large_one_several() -> None:
    assert len(list(encode_message(MessageType.STEP, {"id": 1}, [bytes(CHUNK_BYTES)]))) == 1
    assert len(list(encode_message(MessageType.STEP, {"id": 1}, [bytes(CHUNK_BYTES), b"x"]))) == 2


def test_control_messages_come_between_the_frames_of_another_message() -> None:
    payload = bytes(range(256)) * 4096
    first, *rest = encode_message(MessageType.RESULT, {"id": 1}, [payload])
    (ping,) = encode_message(MessageType.PING, {"n": 7})
    (error,) = encode_message(MessageType.ERROR, {"code": "overloaded", "message": "busy"})
    data = first + ping + rest[0] + error + b"".join(rest[1:])
    messages = list(FrameDecoder().feed(data))
    assert [message.type for message in messages] == [MessageType.PING, MessageType.ERROR, MessageType.RESULT]
    assert messages[0].header == {"n": 7}
    assert messages[2].payload == payload


def test_lists_arrive_as_tuples_which_strict_headers_need() -> None:
    (data,) = encode_message(MessageType.STEP, {"tensors": [["x", "bool", [1], 1]]})
    (message,) = FrameDecoder().feed(data)
    assert message.header == {"tensors": (("x", "bool", (1,), 1),)}


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"GET / HTTP/1.1\r\nHost: here\r\n", "one must begin"),
        (frame(STEP, layout=2), "format 2"),
        (frame(STEP, flags=2), "flags"),
        (frame(99), "type 99"),
        (frame(STEP, header=b"\x81"), "msgpack"),
        (frame(STEP, header=b"\xc1"), "msgpack"),
        (frame(STEP, header=b"\x91" * 5000), "msgpack"),
        (frame(STEP, header=msgpack.packb([1])), "map"),
        (frame(STEP, header=msgpack.packb({b"id": 1})), "map"),
        (frame(STEP, header=EMPTY + EMPTY), "msgpack"),
        (frame(STEP, total=5), "begins without it"),
        (frame(STEP, b"123", total=2), "cap"),
        (frame(CONTINUE, b"1", header=b""), "never began"),
        (frame(STEP, b"1", total=3) + frame(STEP, b"1"), "within another"),
        (frame(STEP, b"1", total=3) + frame(CONTINUE, b"1", header=b"", total=4), "contradicts"),
        (frame(STEP, b"1", total=3) + frame(CONTINUE, b"1", total=3), "contradicts"),
        (frame(STEP, b"1", total=3) + frame(CONTINUE, b"", header=b"", total=3), "contradicts"),
        (frame(STEP, b"1", total=3) + frame(CONTINUE, b"123", header=b"", total=3), "longer"),
        (frame(MessageType.PING, b"1"), "control"),
        (PREFIX.pack(MAGIC, FORMAT, MessageType.PING, 0, SMALL_BYTES + 1, 0, 0), "cap"),
        (PREFIX.pack(MAGIC, FORMAT, STEP, 0, MAX_HEADER_BYTES + 1, 0, 0), "cap"),
        (PREFIX.pack(MAGIC, FORMAT, STEP, 0, 1, MAX_FRAME_BYTES + 1, MAX_FRAME_BYTES + 1), "cap"),
        (PREFIX.pack(MAGIC, FORMAT, STEP, 0, 1, 10, (256 << 20) + 1), "cap"),
        (PREFIX.pack(MAGIC, FORMAT, STEP, 0, 1, 10, 2**32 - 1), "cap"),
    ],
)
def test_nonsense_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(RemoteProtocolError, match=reason) as caught:
        list(FrameDecoder(peer_id="somebody").feed(data))
    assert caught.value.peer_id == "somebody"


def test_messages_before_the_fault_are_given() -> None:
    messages = FrameDecoder().feed(frame(STEP, b"good") + b"garbage" * 10)
    assert next(messages).payload == b"good"
    with pytest.raises(RemoteProtocolError):
        next(messages)


def test_an_unknown_type_marked_optional_is_skipped_with_its_payload() -> None:
    unknown = frame(99, b"12", total=3, flags=OPTIONAL) + frame(CONTINUE, b"3", header=b"", total=3)
    decoder = FrameDecoder()
    messages = list(decoder.feed(unknown + frame(STEP, b"next")))
    assert [bytes(message.payload) for message in messages] == [b"next"]
    assert not decoder.unfinished


def test_a_claimed_size_costs_no_memory() -> None:
    decoder = FrameDecoder()
    assert list(decoder.feed(frame(STEP, b"1" * 10, total=256 << 20))) == []
    assert decoder.unfinished
    assert len(decoder._unfinished_message().payload) == 10


def test_what_cannot_be_sent_is_our_own_error() -> None:
    with pytest.raises(LocalProtocolError, match="cap"):
        list(encode_message(MessageType.STEP, {}, [bytes(11)], max_message_bytes=10))
    with pytest.raises(LocalProtocolError, match="cap"):
        list(encode_message(MessageType.STEP, {"x": bytes(MAX_HEADER_BYTES)}))
    with pytest.raises(LocalProtocolError, match="packed"):
        list(encode_message(MessageType.STEP, {"x": object()}))
    with pytest.raises(LocalProtocolError, match="plain bytes"):
        list(encode_message(MessageType.STEP, {}, [memoryview(bytes(8)).cast("I")]))
