"""A form with a file, taken in as it comes. The file goes to the disk; a form that is too large or too slow is refused.

Routes that take files call `read_form`. python-multipart reads `multipart/form-data` (RFC 7578), as it does for
Starlette. Starlette's own forms are read whole before anything could refuse them.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from tempfile import SpooledTemporaryFile
from typing import IO, Any

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request

from swarmllm.gateway.errors import ApiError

MAX_HEADERS, MAX_HEADER_BYTES = 16, 1 << 12
"""Of a part. Assumed: two lines of some hundred bytes."""
MAX_BOUNDARY_CHARS = 70
"""As RFC 2046 has it."""

MAX_FIELDS = 64
MAX_FIELD_BYTES = 1 << 16
"""Of all fields together, the file apart. Assumed: a prompt is some hundred words."""
IN_MEMORY_BYTES = 1 << 16
"""Of a file; what is larger is on the disk."""
PATIENCE_S = 60.0
"""For each `PATIENT_BYTES`, as for the bodies of other requests. Assumed: the slowest line that people use."""
PATIENT_BYTES = 1 << 20


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


@dataclass
class Form:
    """What came; `close` frees the file."""

    file_field: str
    """The name of the field that is the file."""
    file: IO[bytes] = field(default_factory=lambda: SpooledTemporaryFile(IN_MEMORY_BYTES))  # noqa: SIM115  `close`
    fields: dict[str, Any] = field(default_factory=dict)
    """Texts by name; lists of them, of names that end with [] (or [key]) or came several times."""

    def close(self) -> None:
        self.file.close()


class _Taken:
    """Fills a form from what a reader finds."""

    def __init__(self, form: Form, max_file_bytes: int) -> None:
        self._form, self._max_file_bytes = form, max_file_bytes
        self._name = ""
        self._text = bytearray()
        self._num_fields = self._num_text = self._num_file = 0

    def take(self, event: Part | Data) -> None:
        """Raises: ApiError, MalformedError: there is too much of it."""
        if isinstance(event, Part):
            self.end_field()
            self._begin(event.name)
        elif self._name == self._form.file_field:
            self._num_file += len(event.data)
            if self._num_file > self._max_file_bytes:
                raise too_large(self._max_file_bytes)
            self._form.file.write(event.data)
        else:
            self._num_text += len(event.data)
            if self._num_text > MAX_FIELD_BYTES:
                raise ApiError(413, f"the fields are larger than {MAX_FIELD_BYTES} bytes", code="body_too_large")
            self._text += event.data

    def _begin(self, name: str) -> None:
        self._name = name
        self._num_fields += 1
        if self._num_fields > MAX_FIELDS:
            raise MalformedError(f"a form has at most {MAX_FIELDS} fields")
        if name == self._form.file_field:
            if name in self._form.fields:
                raise MalformedError(f"there are two fields {name}: give one")
            self._form.fields[name] = ""  # that it is there

    def end_field(self) -> None:
        """What has come of the field that began last is all of it."""
        name, is_file = self._name, self._name == self._form.file_field
        if name and not is_file:
            try:
                text = self._text.decode()
            except UnicodeDecodeError:
                raise MalformedError("the fields of a form are texts in UTF-8") from None
            self._add(name, text)
        self._name = ""
        self._text.clear()

    def _add(self, name: str, text: str) -> None:
        fields = self._form.fields
        base = name.partition("[")[0] if name.endswith("]") else name
        if base != name or base in fields:
            before = fields.get(base, [])
            fields[base] = [*(before if isinstance(before, list) else [before]), text]
        else:
            fields[name] = text


async def read_form(request: Request, file_field: str, max_file_bytes: int) -> Form:
    """A form whose field of that name is a file. The caller closes it.

    Raises:
        ApiError: it is none, or too large, or doesn't come.
    """
    claimed = request.headers.get("content-length", "")
    if claimed.isdecimal() and int(claimed) > max_file_bytes + PATIENT_BYTES:  # what is beside the file is far less
        raise too_large(max_file_bytes)
    form = Form(file_field)
    try:
        reader, taken = FormReader(boundary_of(request.headers.get("content-type", ""))), _Taken(form, max_file_bytes)
        async for chunk in patiently(request.stream()):
            for event in reader.feed(chunk):
                taken.take(event)
        reader.finish()
        taken.end_field()
    except MalformedError as error:
        form.close()
        raise ApiError(400, str(error), code="invalid_form") from None
    except BaseException:
        form.close()
        raise
    return form


async def patiently(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The same, as long as they come with some speed.

    Raises:
        ApiError: they don't.
    """
    loop, size = asyncio.get_running_loop(), 0
    began_at = loop.time()
    while True:
        deadline = began_at + PATIENCE_S * (1 + size // PATIENT_BYTES)
        try:
            async with asyncio.timeout_at(deadline):
                chunk = await anext(chunks, None)
        except TimeoutError:
            raise ApiError(408, "the file did not come fast enough", code="timeout") from None
        if chunk is None:
            return
        size += len(chunk)
        yield chunk


def too_large(max_bytes: int) -> ApiError:
    return ApiError(413, f"the file is larger than {max_bytes} bytes", param="file", code="body_too_large")
