"""Files with sound in requests: read from forms as they arrive, and decoded to samples.

`audio` calls `read_form` in the event loop, then `read_sound` in a worker thread. Both read bytes of strangers: a form
that is too large or too slow is refused, and a file's size is checked before memory is spent on it. python-multipart
reads `multipart/form-data` (RFC 7578), as it does for Starlette; Starlette itself reads a whole form before anything
could refuse it. WAV is decoded here, all other formats by the program ffmpeg if it is installed.
"""

import asyncio
import io
import math
import shutil
import struct
import subprocess
import warnings
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from functools import cache
from tempfile import SpooledTemporaryFile
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request

from swarmllm.gateway.apis.responder import claimed_bytes
from swarmllm.gateway.engine.audio_model import Samples
from swarmllm.gateway.errors import ApiError

MAX_HEADERS, MAX_HEADER_BYTES = 16, 1 << 12
"""Headers of one form field. Assumed: two lines of some hundred bytes."""
MAX_BOUNDARY_CHARS = 70
"""The limit of RFC 2046."""

MAX_FIELDS = 64
MAX_FIELD_BYTES = 1 << 16
"""Bytes of all fields together, without the file. Assumed: a prompt is some hundred words."""
IN_MEMORY_BYTES = 1 << 16
"""A larger file is on the disk."""
PATIENCE_S = 60.0
"""Seconds for each `PATIENT_BYTES`, as for the bodies of other requests. Assumed: the slowest line in use."""
PATIENT_BYTES = 1 << 20


class MalformedError(ValueError):
    """The bytes are no form; the message says why."""


@dataclass(frozen=True)
class Part:
    """A form field begins; its `Data` follow."""

    name: str


@dataclass(frozen=True)
class Data:
    """Some bytes of the form field that began last."""

    data: bytes


def boundary_of(content_type: str) -> bytes:
    """The boundary of a form. Raises: MalformedError: the content type is no form's."""
    kind, options = parse_options_header(content_type.encode("latin-1", "replace"))
    boundary = options.get(b"boundary")
    if kind.lower() != b"multipart/form-data" or boundary is None:
        raise MalformedError("the body must be multipart/form-data, with a boundary in its Content-Type")
    if not 0 < len(boundary) <= MAX_BOUNDARY_CHARS or not boundary.isascii():
        raise MalformedError(f"the boundary of a form has 1 to {MAX_BOUNDARY_CHARS} ASCII characters")
    return boundary


class FormReader:
    """Parses a form: `feed` it each chunk, then call `finish`."""

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
        """The events in the next chunk. Raises: MalformedError: it breaks the form."""
        if not self._has_ended:  # bytes after the end mean nothing
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
    """The name of a form field. Raises: MalformedError: its headers have none."""
    kind, options = parse_options_header(headers.get(b"content-disposition"))
    if kind.lower() != b"form-data" or not options.get(b"name"):
        raise MalformedError("each form field needs a Content-Disposition: form-data with a name")
    if headers.get(b"content-transfer-encoding", b"binary").lower() not in (b"binary", b"7bit", b"8bit"):
        raise MalformedError("form fields can't have a Content-Transfer-Encoding")
    return options[b"name"].decode("utf-8", "replace")


@dataclass
class Form:
    """A form; `close` frees the file."""

    file_field: str
    """Name of the field with the file."""
    file: IO[bytes] = field(default_factory=lambda: SpooledTemporaryFile(IN_MEMORY_BYTES))  # noqa: SIM115  `close`
    fields: dict[str, Any] = field(default_factory=dict)
    """Texts by name. A name that comes several times, or ends with [] or [key], has a list of them."""

    def close(self) -> None:
        self.file.close()


class _Taken:
    """Fills a form with the events of a reader."""

    def __init__(self, form: Form, max_file_bytes: int) -> None:
        self._form, self._max_file_bytes = form, max_file_bytes
        self._name = ""
        self._text = bytearray()
        self._num_fields = self._num_text = self._num_file = 0

    def take(self, event: Part | Data) -> None:
        """Take an event. Raises: ApiError, MalformedError: the form is too large."""
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
            self._form.fields[name] = ""  # marks that it came

    def end_field(self) -> None:
        """End the field that began last."""
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
    """Read a form with a file in the field of that name. The caller closes it.

    Raises:
        ApiError: it is no form, is too large, or comes too slowly.
    """
    if claimed_bytes(request) > max_file_bytes + PATIENT_BYTES:  # the other fields are far smaller
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
    """The same chunks, as long as they come fast enough.

    Raises:
        ApiError: they are too slow.
    """
    loop, size = asyncio.get_running_loop(), 0
    began_at = loop.time()
    while True:
        deadline = began_at + PATIENCE_S * (1 + size // PATIENT_BYTES)
        try:
            async with asyncio.timeout_at(deadline):
                chunk = await anext(chunks, None)
        except TimeoutError:
            raise ApiError(408, "the file came too slowly", code="timeout") from None
        if chunk is None:
            return
        size += len(chunk)
        yield chunk


def too_large(max_bytes: int) -> ApiError:
    return ApiError(413, f"the file is larger than {max_bytes} bytes", param="file", code="body_too_large")


RATES = (4000, 192_000)
"""Samples per second that a WAV may have, from telephones to studios. The length of the filter that converts them to
the model's rate depends on it."""
FORMATS = ("wav", "mp3", "flac", "ogg", "mov", "matroska", "aac", "mpeg")
"""Formats that ffmpeg may try, by its own names: OpenAI's list (m4a and mp4 are `mov`, webm is `matroska`). Others,
such as playlists, can name further files."""
LOUDEST = 1e6
"""Largest sample. Some programs write 16 bits as floats of up to 32768; models make no numbers of 1e20."""
FFMPEG_TIMEOUT_S = 120.0
"""Assumed: an hour of mp3 takes some seconds of one core."""


BYTES_PER_SAMPLE = 44
"""Bytes per sample (at the model's rate) while features are extracted: 700 kB per second of 16 kHz (measured with
Whisper's extractor)."""
KEPT_BYTES_PER_SAMPLE = 12
"""Bytes per sample afterwards: the samples, and the features twice."""
BYTES_PER_FILE_BYTE = 6
"""Bytes per byte of a file while it is read: the file twice, and a float of four bytes for a sample of one byte."""


def unpacked_bytes(file: IO[bytes], rate: int, longest_s: float) -> int:
    """Memory that a file needs until its features exist. A file that is no WAV counts as the longest sound."""
    file.seek(0, io.SEEK_END)
    num_bytes = file.tell()
    seconds = min(longest_s, _wav_seconds(file, num_bytes) or longest_s)
    return BYTES_PER_FILE_BYTE * num_bytes + int(seconds * rate * BYTES_PER_SAMPLE)


def checked_bytes(samples: Samples, taken: int) -> int:
    """The same, when the samples are known.

    Raises:
        ApiError: they need more than `taken`, so the file's header was wrong.
    """
    needed = BYTES_PER_SAMPLE * len(samples)
    if needed > taken:
        raise _bad("the WAV file is damaged: it contradicts itself about its samples")
    return needed


def kept_bytes(samples: Samples) -> int:
    """Memory that a sound needs once its features exist."""
    return KEPT_BYTES_PER_SAMPLE * len(samples)


def _wav_seconds(file: IO[bytes], num_bytes: int) -> float | None:
    """Longest duration that the file can have by its header; None: the header doesn't begin with a format."""
    file.seek(0)
    head = file.read(36)
    if len(head) < 36 or head[8:16] != b"WAVEfmt " or head[:4] not in (b"RIFF", b"RIFX", b"RF64"):
        return None
    order = ">" if head[:4] == b"RIFX" else "<"
    rate, _, frame_bytes = struct.unpack(f"{order}IIH", head[24:34])
    return num_bytes / (rate * frame_bytes) if rate and frame_bytes else None


def read_sound(file: IO[bytes], rate: int, longest_s: float) -> Samples:
    """Decode a file to `rate` samples per second.

    Raises:
        ApiError: it holds no sound that can be read here, or the sound is too long.
    """
    file.seek(0)
    head = file.read(12)
    file.seek(0)
    if not head:
        raise _bad("the file is empty")
    known_wav = head[:4] in (b"RIFF", b"RIFX", b"RF64") and head[8:] == b"WAVE"
    samples = _read_wav(file, rate, longest_s) if known_wav else None
    if samples is None:
        samples = _read_by_ffmpeg(file, rate, longest_s, "a WAV of this kind" if known_wav else "a file that is no WAV")
    if not len(samples):
        raise _bad("the file holds no sound: it has 0 samples")
    if len(samples) > longest_s * rate:
        raise _too_long(longest_s)
    if not np.abs(samples).max() <= LOUDEST:
        raise _bad(
            f"the file has samples that are no numbers, or beyond {LOUDEST:g}, but the samples of a sound are below 1"
        )
    return samples


def _read_wav(file: IO[bytes], rate: int, longest_s: float) -> Samples | None:
    """Decode a WAV; None: its encoding is not known here."""
    try:
        found_rate, data = _wav_reader()(io.BytesIO(file.read()))
    except ValueError as error:
        if str(error).startswith(("Unknown wave file format", "Unsupported bit depth")):
            return None
        raise _bad("the WAV file is damaged") from None
    except (
        struct.error,
        ArithmeticError,
        LookupError,
        NameError,
        OSError,
        TypeError,
        MemoryError,
    ):  # scipy raises these
        raise _bad("the WAV file is damaged") from None
    if not RATES[0] <= found_rate <= RATES[1]:
        raise _bad(f"a WAV may have {RATES[0]} to {RATES[1]} samples per second, not {found_rate}")
    if data.ndim > 1 and data.shape[1] > 2:
        raise _bad(f"the WAV has {data.shape[1]} channels: mix it down to one or two")
    if len(data) > longest_s * found_rate:
        raise _too_long(longest_s)
    samples = _as_floats(data)
    if samples.ndim > 1:
        samples = samples.mean(axis=1)
    return _resampled(samples, found_rate, rate)


@cache
def _wav_reader() -> Any:
    from scipy.io import wavfile

    warnings.filterwarnings(
        "ignore", category=wavfile.WavFileWarning
    )  # a file with a missing end counts as far as it goes
    return wavfile.read


def _as_floats(data: NDArray[np.generic]) -> Samples:
    """Convert integers of any width to floats between -1 and 1."""
    if data.dtype.kind == "f":
        return data.astype(np.float32)
    half = 2.0 ** (8 * data.dtype.itemsize - 1)
    return (data.astype(np.float32) - (half if data.dtype.kind == "u" else 0)) / np.float32(half)


def _resampled(samples: Samples, found_rate: int, rate: int) -> Samples:
    if found_rate == rate or not len(samples):
        return samples
    from scipy.signal import resample_poly

    common = math.gcd(rate, found_rate)
    return np.asarray(resample_poly(samples, rate // common, found_rate // common), dtype=np.float32)


def _read_by_ffmpeg(file: IO[bytes], rate: int, longest_s: float, what: str) -> Samples:
    program = shutil.which("ffmpeg")
    if program is None:
        raise _bad(
            f"this gateway can't read {what}: send a WAV (PCM or float), or install ffmpeg on the gateway's machine"
        )
    file.seek(0)
    # First through a pipe, as in transformers' `ffmpeg_read`, for equal samples. Then as a file, for an index
    # at the end, as in most m4a.
    ways: list[tuple[str, dict[str, Any]]] = [("pipe", {"input": file.read()}), ("file", {"stdin": file.fileno()})]
    for protocol, given in ways:
        found = _answer_of_ffmpeg(program, protocol, given, rate, longest_s)
        if whole := len(found) // 4 * 4:
            return np.frombuffer(found[:whole], dtype="<f4").astype(np.float32)
    raise _bad("ffmpeg finds no sound in the file: send flac, mp3, mp4, mpeg, mpga, m4a, ogg, wav or webm")


def _answer_of_ffmpeg(program: str, protocol: str, given: dict[str, Any], rate: int, longest_s: float) -> bytes:
    """ffmpeg's answer to its standard input. With this protocol and these formats it can open nothing else."""
    source = {"pipe": "pipe:0", "file": "file:/dev/stdin"}[protocol]
    arguments = [
        *("-nostdin", "-hide_banner", "-loglevel", "quiet"),
        *("-protocol_whitelist", protocol, "-format_whitelist", ",".join(FORMATS), "-i", source),
        *("-map", "0:a:0", "-t", str(longest_s + 1), "-ac", "1", "-ar", str(rate), "-f", "f32le", "pipe:1"),
    ]
    try:
        done: subprocess.CompletedProcess[bytes] = subprocess.run(
            [program, *arguments],
            **given,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=FFMPEG_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise _bad(f"ffmpeg has not read the file within {FFMPEG_TIMEOUT_S:g} s") from None
    except OSError as error:
        raise _bad(f"ffmpeg can't be run here: {error.strerror}") from None
    return done.stdout


def _too_long(longest_s: float) -> ApiError:
    return _bad(f"the sound is longer than {longest_s:g} s: send it in parts, or raise max_audio_s", "audio_too_long")


def _bad(message: str, code: str = "invalid_audio") -> ApiError:
    return ApiError(400, message, param="file", code=code)
