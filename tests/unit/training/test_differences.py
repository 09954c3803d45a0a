"""Differences in 8 bits, their robust mean, and the outer optimizer: against torch, and against liars."""

import hashlib

import numpy as np
import pytest
import torch

from swarmllm.errors import RemoteProtocolError
from swarmllm.training.differences import (
    BLOCK,
    Difference,
    Floats,
    Rules,
    SharedState,
    limits,
    packed_bytes,
    quantize,
    robust_mean,
    unpack,
)


def numbers(size: int, seed: int = 0, scale: float = 1.0) -> Floats:
    return (np.random.default_rng(seed).standard_normal(size) * scale).astype(np.float32)


def of(**values: Floats) -> dict[str, Difference]:
    return {name: quantize(one) for name, one in values.items()}


@pytest.mark.parametrize("size", [1, BLOCK - 1, BLOCK, BLOCK + 1, 10 * BLOCK + 7])
def test_rounding_to_8_bits(size: int) -> None:
    values = numbers(size)
    difference = quantize(values)
    assert difference.values().shape == values.shape
    assert np.abs(difference.values() - values).max() <= np.abs(values).max() / 254 * 1.001
    data = difference.packed()
    assert len(data) == packed_bytes(size) <= size * 1.02 + BLOCK + 4
    again = unpack(data, size)
    assert np.array_equal(again.values(), difference.values())
    assert again.norm() == difference.norm() == pytest.approx(np.linalg.norm(difference.values()))


def test_zeros_and_tiny_values_stay_finite() -> None:
    values = np.zeros(3 * BLOCK, np.float32)
    values[BLOCK : 2 * BLOCK] = 1e-44
    assert np.isfinite(quantize(values).values()).all()
    assert quantize(np.zeros(5, np.float32)).norm() == 0


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_home_sends_no_nan(bad: float) -> None:
    values = numbers(300)
    values[299] = bad
    with pytest.raises(ValueError, match="not a finite number"):
        quantize(values)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -1.0, 1e38])
def test_nan_of_others_is_refused(bad: float) -> None:
    difference = quantize(numbers(600))
    scales = difference.scales.copy()
    scales[1] = bad
    with pytest.raises(RemoteProtocolError, match="no finite numbers"):
        unpack(Difference(difference.codes, scales, 600).packed(), 600, "liar")


def test_other_sizes_are_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="bytes instead of"):
        unpack(quantize(numbers(600)).packed(), 300)


def test_the_mean_of_equals_is_their_mean() -> None:
    rows = [numbers(700, seed) for seed in range(4)]
    rows = [row / np.float32(np.linalg.norm(row)) for row in rows]
    mean = robust_mean(of(**{str(number): row for number, row in enumerate(rows)}))
    assert np.abs(mean - np.mean(rows, axis=0)).max() < 1e-3


def test_a_thousand_times_too_much_counts_as_one() -> None:
    honest, other = numbers(600, 1), numbers(600, 2)
    with_liar = robust_mean(of(a=honest, b=other, c=numbers(600, 3, 1000.0)))
    assert np.linalg.norm(with_liar) < 1.1 * max(np.linalg.norm(honest), np.linalg.norm(other))
    alone_with_liar = robust_mean(of(a=honest, b=numbers(600, 3, 1000.0)))
    assert np.linalg.norm(alone_with_liar) <= 1.01 * np.linalg.norm(honest)


def test_a_home_that_has_learned_nothing_silences_nobody() -> None:
    assert limits({"a": 2.0, "b": 0.0, "c": 0.0}) == {"a": 1.0, "b": 1.0, "c": 1.0}
    assert limits({"a": 2.0, "b": 4.0}) == {"a": 1.0, "b": 0.5}
    assert limits({"a": 0.0}) == {"a": 1.0}


def test_trimmed_means_leave_out_extremes_of_each_value() -> None:
    rows = {
        name: np.full(BLOCK, value, np.float32) for name, value in {"a": 1.0, "b": 1.0, "c": -1.0, "d": 1.0}.items()
    }
    assert robust_mean(of(**rows), trim=0.25)[0] == pytest.approx(1.0)
    assert robust_mean(of(**rows))[0] == pytest.approx(0.5)
    assert robust_mean(of(a=rows["a"], c=rows["c"]), trim=0.4)[0] == 0  # two are too few to leave one out


def test_the_order_of_arrival_changes_no_bit() -> None:
    rows = {str(number): numbers(3 * BLOCK + 1, number, 10.0**number) for number in range(5)}
    forwards, backwards = of(**rows), of(**dict(reversed(rows.items())))
    for trim in (0.0, 0.2):
        assert robust_mean(forwards, trim).tobytes() == robust_mean(backwards, trim).tobytes()


def test_bits_are_those_of_every_machine() -> None:
    """The digest was computed on one machine with AVX-512. Others compare with it."""
    values = (np.arange(1000, dtype=np.float32) - 500) / np.float32(7)
    state = SharedState.initial(values)
    for number in range(3):
        state = state.after(
            of(a=values * np.float32(0.01), b=-values[::-1] * np.float32(3 + number)), 10, Rules(0.7, 0.9, 0.4)
        )
    assert hashlib.sha256(state.values.tobytes()).hexdigest()[:16] == "ac147667c99a5fec"


def test_outer_steps_are_those_of_nesterov_sgd() -> None:
    values = numbers(500)
    parameter = torch.nn.Parameter(torch.from_numpy(values.copy()))
    optimizer = torch.optim.SGD([parameter], lr=0.7, momentum=0.9, nesterov=True)
    state = SharedState.initial(values)
    for seed in range(4):
        difference = quantize(numbers(500, seed + 10, 0.1))
        parameter.grad = torch.from_numpy(difference.values())
        optimizer.step()
        state = state.after({"a": difference}, 5, Rules(0.7, 0.9))
    assert np.allclose(state.values, parameter.detach().numpy(), atol=1e-5)
    assert (state.round, state.tokens, state.counted) == (4, 20, {"a": 3})


def test_states_travel_whole() -> None:
    state = SharedState.initial(numbers(300)).after(of(a=numbers(300, 2), b=numbers(300, 3)), 7, Rules())
    again = SharedState.unpack(state.packed(), 300)
    assert again.digest() == state.digest() != SharedState.initial(numbers(300)).digest()
    assert again.counted == {"a": 0, "b": 0}


@pytest.mark.parametrize("cut", [0, 3, 10, 100, -4])
def test_half_a_state_is_refused(cut: int) -> None:
    with pytest.raises(RemoteProtocolError, match="makes no sense"):
        SharedState.unpack(SharedState.initial(numbers(300)).packed()[:cut], 300)


def test_a_state_with_nan_is_refused() -> None:
    values = numbers(300)
    values[3] = np.nan
    with pytest.raises(RemoteProtocolError, match="no finite numbers"):
        SharedState.unpack(SharedState.initial(values).packed(), 300)
