"""Sounds for tests, and WAV files of them, written byte by byte: nothing here is what the gateway reads them with."""

import struct

import numpy as np
from numpy.typing import NDArray

RATE = 16_000
PCM, FLOAT, MULAW, EXTENSIBLE = 1, 3, 7, 0xFFFE


def noise(seconds: float, seed: int = 1, rate: int = RATE) -> NDArray[np.float32]:
    """Noise of about half the possible loudness, in steps of 16 bits."""
    random = np.random.default_rng(seed)
    whole = np.clip(random.normal(0, 0.2, round(seconds * rate)), -0.99, 0.99) * 32768
    return whole.round().astype(np.float32) / np.float32(32768)


def packed(samples: NDArray[np.float32], bits: int, kind: int = PCM) -> bytes:
    """`[samples]` or `[samples, channels]` as a WAV has them."""
    flat = samples.reshape(-1)
    if kind == FLOAT:
        return flat.astype(f"<f{bits // 8}").tobytes()
    if bits == 8:
        return (flat * 128 + 128).round().astype("u1").tobytes()
    whole = (flat.astype(np.float64) * (1 << (bits - 1))).round().astype("<i8")
    return np.frombuffer(whole.tobytes(), "u1").reshape(-1, 8)[:, : bits // 8].tobytes()


def wav(
    samples: NDArray[np.float32],
    *,
    rate: int = RATE,
    bits: int = 16,
    kind: int = PCM,
    extensible: bool = False,
    data: bytes | None = None,
) -> bytes:
    """The bytes of a file; `data` in the place of the samples' own."""
    channels = 1 if samples.ndim == 1 else samples.shape[1]
    found = packed(samples, bits, kind) if data is None else data
    block = channels * bits // 8
    tag = EXTENSIBLE if extensible else kind
    about = struct.pack("<HHIIHH", tag, channels, rate, rate * block, block, bits)
    if extensible:
        guid = struct.pack("<I", kind) + bytes.fromhex("0000100080 0000aa00389b71".replace(" ", ""))
        about += struct.pack("<HHI", 22, bits, 0) + guid
    chunks = b"fmt " + struct.pack("<I", len(about)) + about
    chunks += b"LIST" + struct.pack("<I", 4) + b"INFO"
    chunks += b"data" + struct.pack("<I", len(found)) + found + bytes(len(found) % 2)
    return b"RIFF" + struct.pack("<I", 4 + len(chunks)) + b"WAVE" + chunks
