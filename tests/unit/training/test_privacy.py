"""The noise on differences, and the budget that it buys."""

import math

import numpy as np
import pytest
from scipy import integrate, stats

from swarmllm.training.privacy import delta_of, epsilon_of, homes_needed, with_noise


@pytest.mark.parametrize(("epsilon", "rounds", "noise"), [(1.0, 1, 2.0), (3.0, 10, 8.0), (0.5, 100, 60.0)])
def test_delta_is_what_two_gaussians_differ_by(epsilon: float, rounds: int, noise: float) -> None:
    """By definition: how much more likely any event may be, beyond a factor of e^epsilon."""
    mu = 2 * math.sqrt(rounds) / noise

    def excess(x: float) -> float:
        return max(0.0, stats.norm.pdf(x, mu) - math.exp(epsilon) * stats.norm.pdf(x))

    expected, _ = integrate.quad(excess, epsilon / mu + mu / 2, mu + 12)
    assert delta_of(epsilon, rounds / noise**2) == pytest.approx(expected, rel=1e-4)


def test_epsilon_belongs_to_its_delta() -> None:
    for rounds, noise in ((1, 1.0), (20, 5.0), (1000, 0.5)):
        epsilon = epsilon_of(1e-5, rounds / noise**2)
        assert delta_of(epsilon, rounds / noise**2) == pytest.approx(1e-5, rel=1e-3)


def test_more_rounds_cost_more_and_more_noise_costs_less() -> None:
    assert epsilon_of(1e-5, 10 / 25) < epsilon_of(1e-5, 20 / 25) < epsilon_of(1e-5, 20 / 16) < math.inf
    assert epsilon_of(1e-5, 0.0) == 0
    assert epsilon_of(1e-5, math.inf) == math.inf


def test_the_budget_is_no_smaller_than_that_of_renyi_accountants() -> None:
    """Opacus and others bound the same mechanism by Renyi divergences: a little more epsilon, never less."""
    rounds, noise, delta = 30, 20.0, 1e-5
    orders = np.linspace(1.01, 200, 4000)
    divergence = rounds * orders * 4 / (2 * noise**2)
    renyi = float((divergence + np.log1p(-1 / orders) - np.log(delta * orders) / (orders - 1)).min())
    exact = epsilon_of(delta, rounds / noise**2)
    assert 0.7 * renyi < exact <= renyi


def test_noise_is_what_was_asked_for() -> None:
    values = np.full(100_000, 1.0, np.float32)
    noisy = with_noise(values, 2.0, 0.5, np.random.default_rng(0))
    assert float(np.std(noisy)) == pytest.approx(1.0, rel=0.02)
    quiet = with_noise(values, 2.0, 0.0, np.random.default_rng(0))
    assert float(np.linalg.norm(quiet)) == pytest.approx(2.0, rel=1e-3)
    short = np.full(4, 0.1, np.float32)
    assert np.array_equal(with_noise(short, 2.0, 0.0, np.random.default_rng(0)), short)


def test_so_many_homes_have_as_much_signal_as_noise() -> None:
    size, noise = 1600, 0.2
    random = np.random.default_rng(0)
    homes = [
        with_noise(np.zeros(size, np.float32), 3.0, noise, random) for _ in range(round(homes_needed(size, noise)))
    ]
    assert len(homes) == 64
    assert np.linalg.norm(np.mean(homes, axis=0)) == pytest.approx(3.0, rel=0.1)
