"""Messages of homes about their training, and the result of a round: the same bits on every machine. Pure.

A *difference* is the shared values minus a home's own, after some steps of training. It travels in 8 bits: one scale
for each block of values. All homes get the same bytes, and each computes the next shared values from them. So nobody
has to be believed about the result, and homes compare only its digest.

The same inputs give the same bits on all machines. Therefore only elementwise operations of IEEE 754 are used, one at a
time (`numpy` fuses none), and sums over members run in the order of their peer ids. Norms are sums of squares of whole
numbers, which are exact, times squares of scales, added by `math.fsum`, which rounds once.

    what a member sends      what becomes of it
    NaN, infinity            refused: `unpack` raises
    another size             refused
    1000 times too much      shortened to the median norm of all (of two in the middle, the smaller one)
    a wrong direction        counts like any other; with `trim`, extremes of each value are left out
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from swarmllm.errors import RemoteProtocolError

Floats = NDArray[np.float32]

BLOCK = 256
"""Values with a common scale. Assumed: 4 bytes more for 256, and outliers spoil few others."""
LARGEST = 127
CHUNK = 1 << 20
"""Values that are averaged at a time. It bounds memory."""
MAX_SCALE = 1e30
"""Larger scales are refused: squares of values must be finite."""
MAX_HEAD_BYTES = 1 << 20
"""Most bytes of a state besides values and momentum. Enough for 10,000 members, one after the other."""
MAX_PAST = 32
"""States before it that a state names. Homes that were apart for more rounds can't see where they parted. Assumed."""


@dataclass(frozen=True)
class Difference:
    """A difference in 8 bits."""

    codes: NDArray[np.int8]
    """`[num_blocks, BLOCK]`; the last block ends with zeros."""
    scales: Floats
    """`[num_blocks]`"""
    size: int
    """Number of values."""

    def values(self) -> Floats:
        """The values, `[size]`."""
        return (self.codes.astype(np.float32) * self.scales[:, None]).reshape(-1)[: self.size]

    def norm(self) -> float:
        """The Euclidean norm, to the last bit the same on all machines."""
        squares = np.square(self.codes.astype(np.int32)).sum(axis=1, dtype=np.int64).astype(np.float64)
        return math.sqrt(math.fsum((squares * np.square(self.scales.astype(np.float64))).tolist()))

    def packed(self) -> bytes:
        """The bytes that travel: scales, then codes."""
        return self.scales.astype("<f4").tobytes() + self.codes.tobytes()


def quantize(values: Floats) -> Difference:
    """Round to 8 bits.

    Raises:
        ValueError: a value is NaN or infinite.
    """
    if not np.isfinite(values).all():
        raise ValueError("a trained value is not a finite number")
    blocks = np.zeros((-(-values.size // BLOCK), BLOCK), np.float32)
    blocks.reshape(-1)[: values.size] = values
    scales = (np.abs(blocks).max(axis=1) / LARGEST).astype(np.float32)
    inverse = np.divide(1.0, scales, out=np.zeros_like(scales), where=scales >= np.finfo(np.float32).tiny)
    codes = np.clip(np.rint(blocks * inverse[:, None]), -LARGEST, LARGEST).astype(np.int8)
    return Difference(codes, scales, values.size)


def packed_bytes(size: int) -> int:
    """Bytes of a packed difference of so many values."""
    return -(-size // BLOCK) * (BLOCK + 4)


def unpack(data: bytes | bytearray | memoryview, size: int, peer_id: str | None = None) -> Difference:
    """Read a difference of `size` values.

    Raises:
        RemoteProtocolError: it has another size, or not only finite values.
    """
    if len(data) != packed_bytes(size):
        raise RemoteProtocolError(f"a difference has {len(data)} bytes instead of {packed_bytes(size)}", peer_id)
    num_blocks = -(-size // BLOCK)
    scales = np.frombuffer(data, "<f4", num_blocks)
    if not (np.isfinite(scales).all() and (scales >= 0).all() and (scales <= MAX_SCALE).all()):
        raise RemoteProtocolError("a difference holds values that are no finite numbers", peer_id)
    codes = np.frombuffer(data, np.int8, num_blocks * BLOCK, offset=4 * num_blocks).reshape(num_blocks, BLOCK)
    return Difference(codes, scales.astype(np.float32), size)


def limits(norms: Mapping[str, float]) -> dict[str, float]:
    """The factor for each member's difference: at most the median norm remains. Empty differences don't vote."""
    counted = sorted(norm for norm in norms.values() if norm > 0)
    if not counted:
        return dict.fromkeys(norms, 1.0)
    median = counted[(len(counted) - 1) // 2]
    return {peer_id: min(1.0, median / norm) if norm > 0 else 1.0 for peer_id, norm in norms.items()}


def robust_mean(differences: Mapping[str, Difference], trim: float = 0.0) -> Floats:
    """The mean of the differences, each with at most the median norm.

    `trim`: this share of the largest and of the smallest of each value is left out, if there are enough members.
    """
    factors = limits({peer_id: one.norm() for peer_id, one in differences.items()})
    members = sorted(differences)
    size = differences[members[0]].size
    cut = min(int(trim * len(members)), (len(members) - 1) // 2)
    mean = np.empty(-(-size // BLOCK) * BLOCK, np.float32)
    step = CHUNK // BLOCK
    for start in range(0, mean.size // BLOCK, step):
        rows = []
        for peer_id in members:
            one = differences[peer_id]
            scales = one.scales[start : start + step] * np.float32(factors[peer_id])
            rows.append((one.codes[start : start + step].astype(np.float32) * scales[:, None]).reshape(-1))
        mean[start * BLOCK : (start + step) * BLOCK] = _mean(rows, cut)
    return mean[:size]


def _mean(rows: Sequence[Floats], cut: int) -> Floats:
    if cut:
        rows = list(np.sort(np.stack(rows), axis=0)[cut : len(rows) - cut])
    total = rows[0].copy()
    for row in rows[1:]:
        total += row
    return total / np.float32(len(rows))


@dataclass(frozen=True)
class Rules:
    """Rules of a run. All members must have the same."""

    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    trim: float = 0.0


@dataclass(frozen=True)
class SharedState:
    """The values that all members have in common after a round."""

    round: int
    values: Floats
    momentum: Floats
    counted: Mapping[str, int] = field(default_factory=dict)
    """The last round in which each member's difference counted, by peer id."""
    tokens: int = 0
    """Tokens of all members so far, as they said."""
    past: tuple[str, ...] = ()
    """Digests of the states before this one, the newest last. They show if another state comes before it."""

    @classmethod
    def initial(cls, values: Floats) -> "SharedState":
        return cls(0, values.astype(np.float32), np.zeros(values.size, np.float32))

    def after(self, differences: Mapping[str, Difference], tokens: int, rules: Rules) -> "SharedState":
        """The next state: a step of SGD with Nesterov momentum, in which the mean difference is the gradient.

        Without differences only the number of the round changes.
        """
        values, momentum = self.values, self.momentum
        if differences:
            mean = robust_mean(differences, rules.trim)
            momentum = np.float32(rules.outer_momentum) * momentum
            momentum += mean
            step = np.float32(rules.outer_momentum) * momentum
            step += mean
            step *= np.float32(rules.outer_lr)
            values = values - step
        counted = {**self.counted, **dict.fromkeys(differences, self.round)}
        past = (*self.past, self.digest())[-MAX_PAST:]
        return SharedState(self.round + 1, values, momentum, counted, self.tokens + tokens, past)

    def packed(self) -> bytes:
        """All of it as bytes; at most `most_packed_bytes`."""
        counted, past = dict(sorted(self.counted.items())), list(self.past)
        fields = {"counted": counted, "past": past, "round": self.round, "tokens": self.tokens}
        head = json.dumps(fields, separators=(",", ":")).encode()
        parts = (len(head).to_bytes(4, "big"), head, self.values.astype("<f4"), self.momentum.astype("<f4"))
        return b"".join(part if isinstance(part, bytes) else part.tobytes() for part in parts)

    @classmethod
    def unpack(cls, data: bytes | bytearray, size: int, peer_id: str | None = None) -> "SharedState":
        """Read a state of `size` values.

        Raises:
            RemoteProtocolError: it has another size, or makes no sense.
        """
        try:
            start = 4 + int.from_bytes(data[:4], "big")
            head = json.loads(bytes(data[4:start]))
            counted = {str(peer_id): int(number) for peer_id, number in head["counted"].items()}
            values, momentum = np.frombuffer(data, "<f4", offset=start).astype(np.float32).reshape(2, size)
            past = tuple(bytes.fromhex(digest).hex() for digest in head.get("past", ()))
            state = cls(int(head["round"]), values, momentum, counted, int(head["tokens"]), past)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise RemoteProtocolError("a shared state makes no sense", peer_id) from None
        if not (np.isfinite(values).all() and np.isfinite(momentum).all()):
            raise RemoteProtocolError("a shared state holds values that are no finite numbers", peer_id)
        if len(past) > MAX_PAST or any(len(digest) != 64 for digest in past):
            raise RemoteProtocolError("a shared state names states before it that make no sense", peer_id)
        return state

    def digest(self) -> str:
        """SHA-256 of all of it, in hex."""
        return self._digest

    @cached_property
    def _digest(self) -> str:
        return hashlib.sha256(self.packed()).hexdigest()


def most_packed_bytes(size: int) -> int:
    """Most bytes of a packed state of so many values."""
    return MAX_HEAD_BYTES + 2 * 4 * size
