"""Noise on the differences that a home sends, and the privacy budget that it leaves. Pure.

Each difference is shortened to `clip_norm`, and Gaussian noise of `noise_multiplier * clip_norm` is added to every
value before it is rounded and sent. The guarantee is for a whole home: if all of its data were other data, the
difference could change by at most twice `clip_norm`. No samples are drawn among homes, so the composition of Gaussian
mechanisms is exact (Dong, Roth, Su: Gaussian Differential Privacy, 2022, theorem 2.7 and corollary 3.3): all rounds
together are one Gaussian mechanism with mu = 2 sqrt(`spent`), where a round spends 1 / noise_multiplier^2.

The noise comes from numpy's generator in 32 bits. As in other libraries without a secure mode, attacks on the rounding
of floating-point noise are not excluded.
"""

import math

import numpy as np

from swarmllm.training.differences import Floats


def with_noise(values: Floats, clip_norm: float, noise_multiplier: float, generator: np.random.Generator) -> Floats:
    """Shorten the difference to `clip_norm`, and add noise."""
    norm = float(np.sqrt(np.square(values, dtype=np.float64).sum()))
    shortened = values * np.float32(min(1.0, clip_norm / norm) if norm > 0 else 1.0)
    noise = generator.standard_normal(values.size, np.float32) * np.float32(noise_multiplier * clip_norm)
    return np.asarray(shortened + noise, np.float32)


def homes_needed(size: int, noise_multiplier: float) -> float:
    """Homes whose mean difference has no more noise than signal, if all differences are equal and of `clip_norm`.

    A home's noise has the norm `noise_multiplier * clip_norm * sqrt(size)`, and that of the mean of independent ones
    falls with the square root of their number.
    """
    return noise_multiplier**2 * size


def delta_of(epsilon: float, spent: float) -> float:
    """The smallest delta for this epsilon."""
    if not spent:
        return 0.0
    mu = 2 * math.sqrt(spent)
    far = -epsilon / mu - mu / 2
    return max(0.0, _phi(-epsilon / mu + mu / 2) - math.exp(epsilon + _log_phi(far)))


def epsilon_of(delta: float, spent: float) -> float:
    """The smallest epsilon for this delta."""
    if not spent or math.isinf(spent):
        return spent
    low, high = 0.0, 1.0
    while delta_of(high, spent) > delta:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if delta_of(middle, spent) > delta else (low, middle)
    return high


def _phi(x: float) -> float:
    return math.erfc(-x / math.sqrt(2)) / 2


def _log_phi(x: float) -> float:
    """The logarithm of `_phi`, also where that is 0 in floating point (its asymptotic series)."""
    if x > -30:
        return math.log(_phi(x))
    return -x * x / 2 - math.log(-x * math.sqrt(2 * math.pi)) + math.log1p(-1 / (x * x))
