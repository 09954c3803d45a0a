"""Files with sound: from what somebody has sent to the samples that a model's feature extractor takes.

WAV is read here; all other formats by the program ffmpeg, where that is installed. Sounds come from anybody: they are
bounded before memory is spent on them. Called by `hearing_model`, in a worker thread.
"""

import io
import math
import shutil
import struct
import subprocess
import warnings
from functools import cache
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from swarmllm.gateway.errors import ApiError

Samples = NDArray[np.float32]
"""`[samples]`, of one channel, mostly between -1 and 1."""
RATES = (4000, 192_000)
"""Samples per second that a WAV may have: those of telephones to those of studios. How long the filter gets that brings
them to the model's rate depends on it."""
FORMATS = ("wav", "mp3", "flac", "ogg", "mov", "matroska", "aac", "mpeg")
"""ffmpeg's names of what it may take the file for: OpenAI's list (m4a and mp4 are `mov`, webm is `matroska`). Others,
as playlists, can name further files."""
LOUDEST = 1e6
"""A sample far beyond 1: some programs write 16 bits as floats of up to 32768. Models make no numbers of 1e20."""
FFMPEG_TIMEOUT_S = 120.0
"""Assumed: an hour of mp3 takes some seconds of one core."""


BYTES_PER_SAMPLE = 44
"""Of the model's rate, while its feature extractor works: 700 kB for a second of 16 kHz (measured with Whisper's)."""
KEPT_BYTES_PER_SAMPLE = 12
"""Afterwards: the samples, and the features twice."""
BYTES_PER_FILE_BYTE = 6
"""Of a file while it is read: its own bytes twice, and floats of four bytes for samples of one."""


def unpacked_bytes(file: IO[bytes], rate: int, longest_s: float) -> int:
    """Memory that a file's sound takes until its features are there. What isn't WAV counts as the longest sound."""
    file.seek(0, io.SEEK_END)
    num_bytes = file.tell()
    seconds = min(longest_s, _wav_seconds(file, num_bytes) or longest_s)
    return BYTES_PER_FILE_BYTE * num_bytes + int(seconds * rate * BYTES_PER_SAMPLE)


def checked_bytes(samples: Samples, taken: int) -> int:
    """The same, once the samples are known.

    Raises:
        ApiError: more than `taken`, by what the file said.
    """
    needed = BYTES_PER_SAMPLE * len(samples)
    if needed > taken:
        raise _bad("the WAV file is damaged: it says two things about its samples")
    return needed


def kept_bytes(samples: Samples) -> int:
    """What it takes when its features are there."""
    return KEPT_BYTES_PER_SAMPLE * len(samples)


def _wav_seconds(file: IO[bytes], num_bytes: int) -> float | None:
    """At most so long is it, if all of the file is samples; None: its head doesn't begin with what says so."""
    file.seek(0)
    head = file.read(36)
    if len(head) < 36 or head[8:16] != b"WAVEfmt " or head[:4] not in (b"RIFF", b"RIFX", b"RF64"):
        return None
    order = ">" if head[:4] == b"RIFX" else "<"
    rate, _, frame_bytes = struct.unpack(f"{order}IIH", head[24:34])
    return num_bytes / (rate * frame_bytes) if rate and frame_bytes else None


def read_sound(file: IO[bytes], rate: int, longest_s: float) -> Samples:
    """The samples in a file, `rate` of them per second.

    Raises:
        ApiError: it holds no sound that can be read here, or one that is longer.
    """
    file.seek(0)
    head = file.read(12)
    file.seek(0)
    if not head:
        raise _bad("the file is empty")
    known_wav = head[:4] in (b"RIFF", b"RIFX", b"RF64") and head[8:] == b"WAVE"
    samples = _read_wav(file, rate, longest_s) if known_wav else None
    if samples is None:
        samples = _read_by_ffmpeg(file, rate, longest_s, "a WAV of this kind" if known_wav else "what is no WAV")
    if not len(samples):
        raise _bad("the file holds no sound: it has 0 samples")
    if len(samples) > longest_s * rate:
        raise _too_long(longest_s)
    if not np.abs(samples).max() <= LOUDEST:
        raise _bad(
            f"the file has samples that are no numbers, or beyond {LOUDEST:g}, where those of a sound are below 1"
        )
    return samples


def _read_wav(file: IO[bytes], rate: int, longest_s: float) -> Samples | None:
    """None: it is written in a way that isn't known here."""
    try:
        found_rate, data = _wav_reader()(io.BytesIO(file.read()))
    except ValueError as error:
        if str(error).startswith(("Unknown wave file format", "Unsupported bit depth")):
            return None
        raise _bad("the WAV file is damaged") from None
    except (struct.error, ArithmeticError, LookupError, NameError, OSError, TypeError, MemoryError):  # scipy's
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

    warnings.filterwarnings("ignore", category=wavfile.WavFileWarning)  # its end is missing: what is there counts
    return wavfile.read


def _as_floats(data: NDArray[np.generic]) -> Samples:
    """Whole numbers of any width to those between -1 and 1."""
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
        raise _bad(f"this gateway can't read {what}: send a WAV (PCM or float), or have ffmpeg installed beside it")
    file.seek(0)
    # From a pipe, as transformers' `ffmpeg_read` has it, so that samples are the same; the file itself where the index
    # is at its end, as in most m4a.
    ways: list[tuple[str, dict[str, Any]]] = [("pipe", {"input": file.read()}), ("file", {"stdin": file.fileno()})]
    for protocol, given in ways:
        found = _answer_of_ffmpeg(program, protocol, given, rate, longest_s)
        if whole := len(found) // 4 * 4:
            return np.frombuffer(found[:whole], dtype="<f4").astype(np.float32)
    raise _bad("ffmpeg finds no sound in the file: send flac, mp3, mp4, mpeg, mpga, m4a, ogg, wav or webm")


def _answer_of_ffmpeg(program: str, protocol: str, given: dict[str, Any], rate: int, longest_s: float) -> bytes:
    """What it makes of its standard input; by that protocol, and in these formats, it can open nothing else."""
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
        raise _bad(f"ffmpeg can't be run beside this gateway: {error.strerror}") from None
    return done.stdout


def _too_long(longest_s: float) -> ApiError:
    return _bad(
        f"the sound is longer than {longest_s:g} s: send it in parts, or raise max_audio_s",
        "audio_too_long",
    )


def _bad(message: str, code: str = "invalid_audio") -> ApiError:
    return ApiError(400, message, param="file", code=code)
