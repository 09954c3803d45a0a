"""Forms with a file, as any client writes them and in any pieces: the same comes out, and garbage is refused."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmllm.gateway.apis.audio_files import (
    MAX_HEADER_BYTES,
    Data,
    FormReader,
    MalformedError,
    Part,
    boundary_of,
)

BOUNDARY = b"some-Boundary_1"
NAMES = st.text("abcdefghijklmnop_[]", min_size=1, max_size=12)
# Made of what boundaries are made of, so that some nearly look like one.
CONTENT = st.lists(st.sampled_from([b"\r\n", b"--", b"-", b"\r", b"\n", BOUNDARY[:5], b"x", b"\x00\xff"])).map(b"".join)
PARTS = st.lists(st.tuples(NAMES, CONTENT.filter(lambda data: b"\r\n--" + BOUNDARY not in b"\r\n" + data)), max_size=4)


def written(parts: list[tuple[str, bytes]]) -> bytes:
    found = b"".join(
        b"--%s\r\nContent-Disposition: form-data; name=%s\r\n\r\n%s\r\n" % (BOUNDARY, f'"{name}"'.encode(), data)
        for name, data in parts
    )
    return found + b"--%s--\r\n" % BOUNDARY


def read(pieces: list[bytes]) -> list[tuple[str, bytes]]:
    reader, found = FormReader(BOUNDARY), []
    for piece in pieces:
        for event in reader.feed(piece):
            if isinstance(event, Part):
                found.append((event.name, b""))
            else:
                assert isinstance(event, Data)
                assert event.data
                found[-1] = (found[-1][0], found[-1][1] + event.data)
    reader.finish()
    return found


def cut(data: bytes, places: list[int]) -> list[bytes]:
    ends = sorted({place % (len(data) + 1) for place in places} | {0, len(data)})
    return [data[start:end] for start, end in pairwise(ends)]


@given(PARTS, st.lists(st.integers(0, 10_000), max_size=8), CONTENT)
def test_any_pieces_of_it_say_the_same(parts: list[tuple[str, bytes]], places: list[int], after: bytes) -> None:
    data = written(parts) + after
    assert read(cut(data, places)) == parts
    assert read([data[place : place + 1] for place in range(len(data))]) == parts


@given(PARTS.filter(bool), st.data())
def test_a_form_that_breaks_off_is_refused(parts: list[tuple[str, bytes]], data: Any) -> None:
    whole = written(parts)
    end = data.draw(st.integers(0, len(whole) - 5))
    with pytest.raises(MalformedError, match="ends too early"):
        read([whole[:end]])


@given(st.lists(CONTENT | st.binary(max_size=40), max_size=6))
def test_garbage_is_refused_or_holds_nothing(pieces: list[bytes]) -> None:
    try:
        found = read(pieces)
    except MalformedError:
        return
    assert all(isinstance(name, str) for name, _ in found)


@pytest.mark.parametrize(
    ("head", "words"),
    [
        (b"Content-Disposition: form-data", "with a name"),
        (b"Content-Disposition: attachment; name=a", "with a name"),
        (b"X: y", "with a name"),
        (
            b"Content-Disposition: form-data; name=a\r\nContent-Transfer-Encoding: base64",
            "can't have a Content-Transfer-Encoding",
        ),
        (b"X: " + b"x" * MAX_HEADER_BYTES, "header size"),
    ],
)
def test_headers_of_parts(head: bytes, words: str) -> None:
    with pytest.raises(MalformedError, match=words):
        read([b"--%s\r\n%s\r\n\r\nx\r\n--%s--" % (BOUNDARY, head, BOUNDARY)])


def test_headers_that_never_end_are_not_kept() -> None:
    reader = FormReader(BOUNDARY)
    assert not list(reader.feed(b"--" + BOUNDARY + b"\r\n"))
    with pytest.raises(MalformedError, match="header count"):
        any(list(reader.feed(b"a: b\r\n")) for _ in range(MAX_HEADER_BYTES))


@pytest.mark.parametrize(
    ("name", "quoted"),
    [("file", "file"), ("a b", '"a b"'), ("ü", '"ü"'), ("timestamp_granularities[]", '"timestamp_granularities[]"')],
)
def test_names(name: str, quoted: str) -> None:
    head = f'Content-Disposition: Form-Data; name={quoted}; filename="x; name=\\"y\\".wav"'.encode()
    assert read([b"--%s\r\n%s\r\n\r\nx\r\n--%s--" % (BOUNDARY, head, BOUNDARY)]) == [(name, b"x")]


def test_boundaries() -> None:
    assert boundary_of("multipart/form-data; boundary=abc") == b"abc"
    assert boundary_of('Multipart/Form-Data; charset=utf-8; boundary="a b:c"') == b"a b:c"
    for wrong in ("", "text/plain", "application/json", "multipart/form-data", "x/y;="):
        with pytest.raises(MalformedError, match="multipart/form-data"):
            boundary_of(wrong)
    for wrong in ("x" * 71, "", '""', "ü"):
        with pytest.raises(MalformedError, match=r"1 to 70|with a boundary"):
            boundary_of(f"multipart/form-data; boundary={wrong}")
