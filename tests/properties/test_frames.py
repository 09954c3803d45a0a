"""The decoder returns the encoded messages, however their bytes are cut; noise only raises errors."""

from itertools import pairwise

import msgpack
from hypothesis import given
from hypothesis import strategies as st

from swarmllm.errors import RemoteProtocolError
from swarmllm.network.wire.frames import (
    CHUNK_BYTES,
    CONTROL_TYPES,
    FORMAT,
    LARGE_TYPES,
    MAGIC,
    PREFIX,
    SMALL_BYTES,
    FrameDecoder,
    Message,
    MessageType,
    encode_message,
)

plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4).map(tuple) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=8,
)
headers = st.dictionaries(st.text(max_size=8), plain, max_size=6)
kinds = st.sampled_from([kind for kind in MessageType if kind >= MessageType.HELLO and kind not in CONTROL_TYPES])
sizes = st.one_of(
    st.integers(0, 300), st.sampled_from([CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 2 * CHUNK_BYTES, 700_001])
)


@st.composite
def messages(draw: st.DrawFn) -> Message:
    kind = draw(kinds)
    size = draw(sizes if kind in LARGE_TYPES else st.sampled_from([0, 1, 300, SMALL_BYTES]))
    seed = draw(st.binary(min_size=1, max_size=9))
    return Message(kind, draw(headers), bytearray((seed * (size // len(seed) + 1))[:size]))


def chunked(payload: bytearray, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(cut % (len(payload) + 1) for cut in cuts), len(payload)]
    return [bytes(payload[start:end]) for start, end in pairwise(edges)]


@given(st.lists(messages(), max_size=4), st.lists(st.integers(0, 1 << 20), max_size=5), st.data())
def test_what_was_encoded_comes_back(sent: list[Message], cuts: list[int], data: st.DataObject) -> None:
    wire = b"".join(
        frame
        for message in sent
        for frame in encode_message(message.type, message.header, chunked(message.payload, cuts))
    )
    decoder = FrameDecoder()
    received: list[Message] = []
    rest = memoryview(wire)
    while rest:
        size = data.draw(st.sampled_from([1, 2, 17, 18, 19, 100, 65536, 1 << 30])) if len(rest) < 2000 else 50_000
        received += decoder.feed(rest[:size])
        rest = rest[size:]
    assert received == sent
    assert not decoder.unfinished


@given(st.lists(st.binary(max_size=200), max_size=5))
def test_noise_raises_nothing_but_a_protocol_error(pieces: list[bytes]) -> None:
    feed_all(pieces)


@given(
    st.lists(
        st.tuples(
            st.integers(0, 30), st.integers(0, 3), st.binary(max_size=30), st.binary(max_size=30), st.integers(0, 60)
        ),
        max_size=6,
    )
)
def test_frames_of_nonsense_raise_nothing_but_a_protocol_error(
    frames: list[tuple[int, int, bytes, bytes, int]],
) -> None:
    feed_all(
        PREFIX.pack(MAGIC, FORMAT, kind, flags, len(header), len(part), total) + header + part
        for kind, flags, header, part, total in frames
    )


@given(headers, st.binary(max_size=100), st.integers(0, 10**6), st.integers(0, 255))
def test_a_damaged_byte_raises_nothing_but_a_protocol_error(
    header: dict[str, object], payload: bytes, where: int, value: int
) -> None:
    (frame,) = encode_message(MessageType.STEP, header, [payload])
    damaged = bytearray(frame)
    damaged[where % len(damaged)] = value
    feed_all([bytes(damaged), msgpack.packb(0) * 50])


def feed_all(pieces) -> None:
    decoder = FrameDecoder(max_message_bytes=1 << 20)
    try:
        for piece in pieces:
            for message in decoder.feed(piece):
                assert isinstance(message.header, dict)
    except RemoteProtocolError:
        pass
