"""`multipart/form-data` (RFC 7578), read as it comes by python-multipart, as Starlette does. Used by `uploads`.

Starlette's own forms are read whole before anybody could refuse what is too large or too slow.
"""

from dataclasses import dataclass

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

MAX_HEADERS, MAX_HEADER_BYTES = 16, 1 << 12
"""Of a part. Assumed: two lines of some hundred bytes."""
MAX_BOUNDARY_CHARS = 70
"""As RFC 2046 has it."""


class MalformedError(ValueError):
    """What came is no form; the message says why."""


@dataclass(frozen=True)
class Part:
    """A field begins; `Data` of it follows."""

    name: str


@dataclass(frozen=True)
class Data:
    """Some bytes of the part that began last."""

    data: bytes


def boundary_of(content_type: str) -> bytes:
    """Raises: MalformedError: it is no form's."""
    kind, options = parse_options_header(content_type.encode("latin-1", "replace"))
    boundary = options.get(b"boundary")
    if kind != b"multipart/form-data" or boundary is None:
        raise MalformedError("the body must be multipart/form-data, with a boundary in its Content-Type")
    if not 0 < len(boundary) <= MAX_BOUNDARY_CHARS or not boundary.isascii():
        raise MalformedError(f"the boundary of a form has 1 to {MAX_BOUNDARY_CHARS} ASCII characters")
    return boundary


class FormReader:
    """`feed` it what comes; `finish` when all has come."""

    def __init__(self, boundary: bytes) -> None:
        self._events: list[Part | Data] = []
        self._headers: dict[bytes, bytes] = {}
        self._field, self._value = bytearray(), bytearray()
        self._has_ended = False
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._headers.clear,
                "on_header_field": lambda data, start, end: self._field.extend(data[start:end]),
                "on_header_value": lambda data, start, end: self._value.extend(data[start:end]),
                "on_header_end": self._on_header_end,
                "on_headers_finished": lambda: self._events.append(Part(_name(self._headers))),
                "on_part_data": lambda data, start, end: self._events.append(Data(data[start:end])),
                "on_end": self._on_end,
            },
            max_header_count=MAX_HEADERS,
            max_header_size=MAX_HEADER_BYTES,
        )

    def feed(self, data: bytes) -> list[Part | Data]:
        """What these bytes bring. Raises: MalformedError: they are no form."""
        if not self._has_ended:  # what follows the end has no meaning
            try:
                self._parser.write(data)
            except FormParserError as error:
                raise MalformedError(f"the form can't be read: {error}") from None
        events, self._events = self._events, []
        return events

    def finish(self) -> None:
        """Raises: MalformedError: the end is missing."""
        if not self._has_ended:
            raise MalformedError("the form ends too early: its last boundary is missing")

    def _on_header_end(self) -> None:
        self._headers[bytes(self._field).lower()] = bytes(self._value)
        self._field.clear()
        self._value.clear()

    def _on_end(self) -> None:
        self._has_ended = True


def _name(headers: dict[bytes, bytes]) -> str:
    """Raises: MalformedError: the headers give none."""
    kind, options = parse_options_header(headers.get(b"content-disposition"))
    if kind != b"form-data" or not options.get(b"name"):
        raise MalformedError("a part of a form has a Content-Disposition: form-data with a name")
    if headers.get(b"content-transfer-encoding", b"binary").lower() not in (b"binary", b"7bit", b"8bit"):
        raise MalformedError("the parts of a form come as they are, without a Content-Transfer-Encoding")
    return options[b"name"].decode("utf-8", "replace")
