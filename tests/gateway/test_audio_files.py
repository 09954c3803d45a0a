"""Files with sound: what is in them comes out whatever the file is like; what is no sound is refused in a sentence."""

import io
import shutil
import struct
import sys
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from recordings import FLOAT, MULAW, RATE, noise, wav

from swarmllm.gateway.apis.audio_files import FORMATS, read_sound
from swarmllm.gateway.errors import ApiError

LONGEST_S = 20.0
pytestmark = pytest.mark.filterwarnings("ignore::scipy.io.wavfile.WavFileWarning")  # of files that end too early


def read(data: bytes, longest_s: float = LONGEST_S) -> Any:
    with TemporaryFile() as file:
        file.write(data)
        return read_sound(file, RATE, longest_s)


@pytest.mark.parametrize("extensible", [False, True])
@pytest.mark.parametrize(("bits", "kind"), [(16, 1), (24, 1), (32, 1), (32, FLOAT), (64, FLOAT)])
def test_samples_are_those_of_the_file(bits: int, kind: int, extensible: bool) -> None:
    samples = noise(0.7)
    found = read(wav(samples, bits=bits, kind=kind, extensible=extensible))
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, samples)


def test_eight_bits() -> None:
    samples = noise(0.5)
    np.testing.assert_allclose(read(wav(samples, bits=8)), samples, atol=0.5 / 128)


@pytest.mark.parametrize("bits", [16, 24])
def test_two_channels_become_their_mean(bits: int) -> None:
    both = np.stack([noise(0.5, seed=1), noise(0.5, seed=2)], axis=1)
    np.testing.assert_allclose(read(wav(both, bits=bits)), both.mean(axis=1), atol=1e-7)


@pytest.mark.parametrize("rate", [4000, 8000, 11_025, 22_050, 44_100, 48_000, 96_000, 44_099])
def test_other_rates(rate: int) -> None:
    """A tone is the same tone, as far as the rate of the file goes."""
    seconds, hertz = 0.5, 440
    tone = 0.5 * np.sin(2 * np.pi * hertz * np.arange(round(rate * seconds)) / rate).astype(np.float32)
    found = read(wav(tone, rate=rate, kind=FLOAT, bits=32))
    assert abs(len(found) - RATE * seconds) <= 1
    expected = 0.5 * np.sin(2 * np.pi * hertz * np.arange(len(found)) / RATE)
    np.testing.assert_allclose(found[500:-500], expected[500:-500], atol=2e-3)


def test_a_header_with_an_unknown_length() -> None:
    """As programs write it that don't know yet how long it will be."""
    samples = noise(0.3)
    data = bytearray(wav(samples))
    data[4:8] = data[data.index(b"data") + 4 : data.index(b"data") + 8] = b"\xff\xff\xff\xff"
    np.testing.assert_array_equal(read(bytes(data)), samples)


def _header_only() -> bytes:
    return wav(noise(0))


BAD = {
    "nothing": (b"", "the file is empty"),
    "no samples": (_header_only(), "holds no sound: it has 0 samples"),
    "a header alone": (_header_only()[:-8], "the WAV file is damaged"),
    "a bit of a header": (_header_only()[:30], "the WAV file is damaged"),
    "no channels": (wav(noise(0.1)).replace(struct.pack("<HH", 1, 1), struct.pack("<HH", 1, 0), 1), "damaged"),
    "six channels": (wav(np.zeros((100, 6), np.float32)), "has 6 channels: mix it down"),
    "a slow one": (wav(noise(0.01), rate=1), "4000 to 192000 samples per second, not 1"),
    "a fast one": (wav(noise(0.01), rate=4_000_000), "not 4000000"),
    "no numbers": (wav(np.full(100, np.nan, np.float32), bits=32, kind=FLOAT), "samples that are no numbers"),
    "numbers of no sound": (wav(np.full(100, 1e20, np.float32), bits=32, kind=FLOAT), "or beyond 1e"),
    "a long one": (wav(noise(LONGEST_S + 1, rate=4000), rate=4000), "longer than 20 s"),
    "an odd end": (wav(noise(0.1), data=bytes(1001))[:-301], "damaged"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_refused(name: str) -> None:
    data, words = BAD[name]
    with pytest.raises(ApiError, match=words) as refused:
        read(data)
    assert (refused.value.status, refused.value.param) == (400, "file")


@given(st.binary(max_size=80), st.integers(0, 60), st.integers(0, 80))
def test_damaged_files_are_refused(garbage: bytes, place: int, end: int) -> None:
    whole = wav(noise(0.01))
    data = whole[:12] + (whole[12:place] + garbage + whole[place + len(garbage) : len(whole) - end])
    try:
        found = read(data)
    except ApiError:  # and nothing else
        return
    assert np.isfinite(found).all()


@pytest.mark.parametrize("data", [wav(noise(0.1), kind=MULAW, bits=8), b"ID3\x04 an mp3", b"once upon a time"])
def test_without_ffmpeg_the_error_names_the_mend(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ApiError, match=r"send a WAV \(PCM or float\), or install ffmpeg"):
        read(data)


FAKE = """#!{python}
import os, sys
arguments = sys.argv[1:]
with open({log!r}, "w") as file:
    print(*arguments, sep="\\n", file=file)
data = sys.stdin.buffer.read()
sys.stdout.buffer.write(data[4:])
"""


def fake_ffmpeg(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program of that name which takes what follows four bytes for samples; returns where it writes its arguments."""
    log = directory / "arguments"
    program = directory / "ffmpeg"
    program.write_text(FAKE.format(python=sys.executable, log=str(log)))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(directory))
    return log


def test_arguments_of_ffmpeg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may take the file for sound alone, open nothing else, and gives no more than is allowed."""
    log, samples = fake_ffmpeg(tmp_path, monkeypatch), noise(0.5)
    np.testing.assert_array_equal(read(b"OggS" + samples.astype("<f4").tobytes()), samples)
    arguments = log.read_text().splitlines()
    given = dict(pairwise(arguments))
    assert (given["-i"], given["-protocol_whitelist"]) == ("pipe:0", "pipe")
    assert given["-format_whitelist"] == ",".join(FORMATS)
    assert (given["-t"], given["-ar"], given["-ac"], given["-f"]) == ("21.0", "16000", "1", "f32le")
    with pytest.raises(ApiError, match="longer than 20 s"):
        read(b"OggS" + bytes(4 * round(RATE * 20.5)))
    for empty in (b"OggS", b"OggS12"):
        with pytest.raises(ApiError, match="finds no sound in the file"):
            read(empty)
    arguments = log.read_text().splitlines()  # of the second try
    assert arguments[arguments.index("-protocol_whitelist") :][1] == "file"
    assert arguments[arguments.index("-i") :][1] == "file:/dev/stdin"


@pytest.mark.skipif(shutil.which("ffmpeg") is None, reason="needs ffmpeg")
@pytest.mark.parametrize("suffix", ["flac", "mp3", "ogg", "webm", "m4a", "mp4"])
def test_formats_that_ffmpeg_writes(suffix: str, tmp_path: Path) -> None:
    """As transformers' own `ffmpeg_read` has them, which can't read an m4a whose index is at its end."""
    import subprocess

    from transformers.pipelines.audio_utils import ffmpeg_read

    source, target = tmp_path / "source.wav", tmp_path / f"target.{suffix}"
    source.write_bytes(wav(noise(1.0)))
    subprocess.run(["ffmpeg", "-loglevel", "error", "-i", str(source), str(target)], check=True)
    found = read(target.read_bytes())
    assert abs(len(found) - RATE) < RATE / 10
    if suffix not in ("m4a", "mp4"):
        np.testing.assert_array_equal(found, ffmpeg_read(target.read_bytes(), RATE))


@pytest.mark.skipif(shutil.which("ffmpeg") is None, reason="needs ffmpeg")
def test_ffmpeg_opens_no_other_files(tmp_path: Path) -> None:
    """A playlist is text that names files; so is a script of the demuxer `concat`."""
    other = tmp_path / "other.wav"
    other.write_bytes(wav(noise(1.0)))
    playlist = f"#EXTM3U\n#EXT-X-TARGETDURATION:10\n#EXTINF:1.0,\nfile:{other}\n#EXT-X-ENDLIST\n"
    for text in (playlist, f"ffconcat version 1.0\nfile '{other}'\n"):
        with pytest.raises(ApiError, match="finds no sound in the file"):
            read(text.encode())


def test_a_closed_pipe_is_no_file() -> None:
    with pytest.raises(ApiError, match="the file is empty"):
        read_sound(io.BytesIO(), RATE, 1.0)
