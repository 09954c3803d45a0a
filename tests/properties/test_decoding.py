"""Ways to choose tokens, each against its formula, written again here for one row in plain numpy."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from transformers import (
    EtaLogitsWarper,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TypicalLogitsWarper,
)

from swarmllm.decoding.methods import (
    Dry,
    ExcludeTopChoices,
    FrustratinglySimple,
    Mirostat,
    RandomSteps,
    TailFree,
    TopNSigma,
    repeated_lengths,
)
from swarmllm.decoding.options import ADDED, DEFAULTS, DecodingOptions
from swarmllm.errors import ConfigurationError

Row = NDArray[np.float64]


@st.composite
def score_rows(draw: st.DrawFn) -> torch.Tensor:
    """`[rows, vocabulary]`, some of them at -inf as other processors leave them."""
    rows, size = draw(st.integers(1, 3)), draw(st.integers(1, 40))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 30)))
    scores = torch.randn(rows, size, generator=generator) * draw(st.sampled_from((0.0, 0.3, 3.0, 20.0)))
    hidden = torch.rand(rows, size, generator=generator) < draw(st.sampled_from((0.0, 0.4)))
    hidden[:, draw(st.integers(0, size - 1))] = False
    return scores.masked_fill(hidden, -torch.inf)


def softmax(row: Row) -> Row:
    powers = np.exp(row - row.max())
    return powers / powers.sum()


def kept(scores: torch.Tensor) -> list[set[int]]:
    return [set(row.isfinite().nonzero()[:, 0].tolist()) for row in scores]


NO_IDS = torch.zeros(3, 4, dtype=torch.long)


@given(score_rows(), st.floats(0, 1))
def test_tail_free(scores: torch.Tensor, z: float) -> None:
    changed = TailFree(z)(NO_IDS, scores)
    for row, result, stay in zip(scores, changed, kept(changed), strict=True):
        p = np.sort(softmax(row.double().numpy()))[::-1]
        count = len(p)
        if len(p) >= 3:
            curve = np.abs(np.diff(np.diff(p)))
            cumulated = np.concatenate([[0.0], np.cumsum(curve)])  # before token 1, before token 2 …
            before = [0.0, *cumulated[1:], cumulated[-1]]
            if min(abs(c - z * cumulated[-1]) for c in before[1:]) < 1e-9:
                continue  # a draw, which rounding decides
            count = sum(c <= z * cumulated[-1] for c in before)
        best = np.argsort(-row.numpy(), kind="stable")[:count]
        finite = {int(token) for token in best if math.isfinite(row[token])}
        assert sorted(row[list(stay)].tolist()) == sorted(row[list(finite)].tolist())
        assert torch.equal(result[list(stay)], row[list(stay)])
        assert int(row.argmax()) in stay or float(row.max()) in row[list(stay)].tolist()


@given(score_rows(), st.floats(0.01, 5), st.floats(0.2, 4))
def test_top_n_sigma(scores: torch.Tensor, n: float, temperature: float) -> None:
    stays = kept(TopNSigma(n)(NO_IDS, scores))
    for row, stay in zip(scores.double().numpy(), stays, strict=True):
        finite = row[np.isfinite(row)]
        limit = row.max() - n * finite.std()
        if np.abs(finite - limit).min() > 1e-4:
            assert stay == {i for i, score in enumerate(row) if score >= limit}
            assert kept(TopNSigma(n)(NO_IDS, torch.tensor(row[None] / temperature))) == [stay]


@given(score_rows(), st.floats(0, 1), st.sampled_from((0.0, 0.5, 1.0)), st.integers(0, 1 << 30))
def test_exclude_top_choices(scores: torch.Tensor, threshold: float, probability: float, seed: int) -> None:
    processor = ExcludeTopChoices(probability, threshold, torch.Generator().manual_seed(seed))
    changed = processor(NO_IDS, scores)
    coins = torch.rand(len(scores), generator=torch.Generator().manual_seed(seed))
    for row, result, coin in zip(scores, changed, coins.tolist(), strict=True):
        p = softmax(row.double().numpy())
        if np.abs(p - threshold).min() < 1e-6:
            continue
        likely = sorted((i for i in range(len(p)) if p[i] >= threshold and p[i] > 0), key=lambda i: -float(row[i]))
        gone = likely[:-1] if coin < probability else []
        left = sorted(row[[i for i in range(len(p)) if i not in gone]].tolist())
        assert sorted(result[result.isfinite()].tolist()) == [score for score in left if math.isfinite(score)]


def mirostat_kept(row: Row, mu: float, mode: int) -> list[int]:
    order = np.argsort(-row, kind="stable")
    p = softmax(row)[order]
    with np.errstate(divide="ignore"):
        if mode == 2:
            count = max(1, int((-np.log2(p) <= mu).sum()))
        else:
            top = min(100, len(p)) - 1
            t = [math.log((i + 2) / (i + 1)) for i in range(top)]
            b = [math.log(p[i] / p[i + 1]) if p[i + 1] > 0 else 0.0 for i in range(top)]
            s = max(1e-3, sum(x * y for x, y in zip(t, b, strict=True)) / sum(x * x for x in t)) if top else 1.0
            size, e = max(len(p), 2), s - 1
            factor = 1 / math.log(size) if abs(e) < 1e-9 else e / (1 - size**-e)
            try:
                count = round((factor * 2**mu) ** (1 / s))
            except OverflowError:
                count = len(p)
            count = min(max(1, count), len(p))
    return [int(token) for token in order[:count] if p[list(order).index(token)] > 0]


@given(
    score_rows(),
    st.sampled_from((1, 2)),
    st.floats(0.2, 6),
    st.floats(0.01, 1),
    st.integers(2, 8),
    st.integers(0, 1 << 30),
)
def test_mirostat(scores: torch.Tensor, mode: int, tau: float, eta: float, steps: int, seed: int) -> None:
    """Over several tokens, drawn from what it leaves; what is asked about guesses that are dropped changes nothing."""
    generator = torch.Generator().manual_seed(seed)
    rows, size = scores.shape
    ids = torch.zeros(rows, 2, dtype=torch.long)
    processor = Mirostat(mode, tau, eta, start=2)
    mu = [2 * tau] * rows
    for _ in range(steps):
        here = scores + torch.rand(rows, size, generator=generator)
        changed = processor(ids, here)
        stays = [mirostat_kept(row, mu[i], mode) for i, row in enumerate(here.double().numpy())]
        ours = kept(changed)
        if any(len(stay) != len(our) for stay, our in zip(stays, ours, strict=True)):
            # At the border of a token only: float32 beside double.
            lower = [mirostat_kept(row, mu[i] - 1e-3, mode) for i, row in enumerate(here.double().numpy())]
            upper = [mirostat_kept(row, mu[i] + 1e-3, mode) for i, row in enumerate(here.double().numpy())]
            assert all(len(a) <= len(b) <= len(c) for a, b, c in zip(lower, ours, upper, strict=True))
            return
        assert [set(stay) for stay in stays] == ours
        # A guess and what follows it, asked about and dropped.
        guess = torch.randint(size, (rows, 1), generator=generator)
        processor(torch.cat([ids, guess], 1), torch.randn(rows, size, generator=generator))
        processor(torch.cat([ids, guess, guess], 1), torch.randn(rows, size, generator=generator))
        token = torch.multinomial(changed.softmax(-1), 1, generator=generator)
        for i, row in enumerate(here.double().numpy()):
            among = softmax(row[stays[i]])
            mu[i] -= eta * (-math.log2(among[stays[i].index(int(token[i]))]) - tau)
        processor(ids, here)  # as whoever checks guesses does: the same position once more
        ids = torch.cat([ids, token], 1)


def test_mirostat_is_as_surprising_as_wanted() -> None:
    generator = torch.Generator().manual_seed(1)
    scores = -1.1 * torch.arange(1, 2001).float().log()[None]
    for mode in (1, 2):
        for tau in (2.0, 5.0):
            processor, ids, bits = Mirostat(mode, tau, 0.1, start=1), torch.zeros(1, 1, dtype=torch.long), []
            for _ in range(400):
                left = processor(ids, scores).log_softmax(-1)
                token = torch.multinomial(left.exp(), 1, generator=generator)
                bits.append(-float(left[0, token]) / math.log(2))
                ids = torch.cat([ids, token], 1)
            assert abs(sum(bits[100:]) / 300 - tau) < 0.35


TEXTS = st.lists(st.integers(0, 4), max_size=40)


def repeated(text: Sequence[int], breakers: set[int]) -> dict[int, int]:
    """By definition, in cubic time."""
    found: dict[int, int] = {}
    for place in range(1, len(text)):
        for length in range(1, place + 1):
            piece = text[place - length : place]
            if list(piece) == list(text[len(text) - length :]) and not breakers & {*piece, text[place]}:
                found[text[place]] = max(found.get(text[place], 0), length)
    return found


@given(TEXTS, st.sets(st.integers(0, 4), max_size=2))
def test_repetitions(text: list[int], breakers: set[int]) -> None:
    assert repeated_lengths(text, breakers) == repeated(text, breakers)


@given(
    TEXTS.filter(bool),
    st.sets(st.integers(0, 4), max_size=1),
    st.floats(0, 4),
    st.floats(1, 3),
    st.integers(1, 4),
    st.integers(-1, 30),
    st.integers(0, 3),
)
def test_dry(
    text: list[int], breakers: set[int], multiplier: float, base: float, allowed: int, last_n: int, padding: int
) -> None:
    window = text if last_n < 0 else text[max(0, len(text) - last_n) :]
    expected = np.zeros(6)
    for token, length in repeated(window, breakers).items():
        if length >= allowed:
            expected[token] -= multiplier * base ** (length - allowed)
    ids = torch.tensor([[0] * padding + text])
    result = Dry(multiplier, base, allowed, last_n, breakers, [padding])(ids, torch.zeros(1, 6))
    np.testing.assert_allclose(result[0].numpy(), expected, rtol=1e-5, atol=1e-30)  # float32 knows none as small


def test_dry_stays_finite_however_long_the_repetition() -> None:
    result = Dry(2.0, 3.0, 2, -1, ())(torch.zeros(1, 5000, dtype=torch.long), torch.zeros(1, 3))
    assert result.isfinite().all()
    assert result[0, 0] < -1e20


def foretold(text: Sequence[int], n: int, beta: float, size: int) -> Row:
    share, left = np.zeros(size), 1.0
    for length in range(n - 1, -1, -1):
        if length >= len(text):
            continue
        context = list(text[len(text) - length :]) if length else []
        after = [text[i + length] for i in range(len(text) - length) if list(text[i : i + length]) == context]
        if after:
            weight = left * (beta if length else 1)
            for token in after:
                share[token] += weight / len(after)
            left -= weight
    return share


@given(
    st.lists(st.integers(0, 7), min_size=1, max_size=30),
    st.floats(0, 1),
    st.integers(1, 9),
    st.integers(1, 4),
    st.floats(0, 1),
    st.integers(0, 2),
    st.integers(0, 1 << 30),
)
def test_frustratingly_simple(
    text: list[int], alpha: float, k: int, n: int, beta: float, padding: int, seed: int
) -> None:
    scores = 3 * torch.randn(1, 8, generator=torch.Generator().manual_seed(seed))
    result = FrustratinglySimple(alpha, k, n, beta, padding=[padding])(torch.tensor([[0] * padding + text]), scores)
    (chosen,) = kept(result)[0]
    p = softmax(scores[0].double().numpy())
    value = (1 - alpha) * p - alpha * foretold(text, n, beta, 8)
    candidates = np.argsort(-p)[:k]
    assert chosen in candidates
    assert value[chosen] >= value[candidates].max() - 1e-5


def test_the_randomized_form_draws_in_its_first_steps_only() -> None:
    scores = torch.randn(400, 5, generator=torch.Generator().manual_seed(0))
    random = RandomSteps(3, 2, 0.25, torch.Generator().manual_seed(1))
    processor = FrustratinglySimple(0.5, 5, 2, 0.9, random=random)
    for length, least, most in ((3, 70, 130), (4, 70, 130), (5, 0, 0), (9, 0, 0)):
        result = processor(torch.ones(400, length, dtype=torch.long), scores)
        drawn = sum(torch.equal(new, old) for new, old in zip(result, scores, strict=True))
        assert least <= drawn <= most


def test_what_transformers_does_behind_it_leaves_the_one_token() -> None:
    """FSD stands before temperature and its kin."""
    one = torch.full((1, 9), -torch.inf)
    one[0, 4] = 0.0
    warpers = (
        TemperatureLogitsWarper(0.3), TopKLogitsWarper(2), MinPLogitsWarper(0.5), TypicalLogitsWarper(0.5),
        EtaLogitsWarper(0.1),
    )  # fmt: skip
    for warper in (*warpers, TailFree(0.5), TopNSigma(1.0), ExcludeTopChoices(1.0, 0.1)):
        assert kept(warper(NO_IDS, one.clone())) == [{4}]


@given(
    st.sampled_from(sorted(DEFAULTS)),
    st.one_of(st.text(max_size=3), st.booleans(), st.just(float("nan")), st.just([1])),
)
def test_a_value_of_another_kind_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ConfigurationError, match=name):
        DecodingOptions(**{"mirostat_mode": 1, "fsd_alpha": 0.0, "dry_multiplier": 1.0, name: value})


@pytest.mark.parametrize(
    ("given_options", "words"),
    [
        ({"mirostat_mode": 3}, "mirostat_mode must be at least 0 and at most 2, not 3"),
        ({"mirostat_mode": 1.5}, "mirostat_mode must be a whole number"),
        ({"mirostat_mode": 2, "mirostat_tau": 0}, "mirostat_tau must be above 0, not 0"),
        ({"tfs_z": 1.1}, "tfs_z must be"),
        ({"fsd_alpha": -0.1}, "fsd_alpha must be"),
        ({"dry_base": 2}, "dry_base has no effect without dry_multiplier: give dry_multiplier, too"),
        ({"fsd_alpha": 0.5, "mirostat_mode": 2}, "fsd_alpha and mirostat_mode both choose the token"),
        ({"dry_multiplier": 1, "dry_sequence_breakers": "\n"}, "dry_sequence_breakers must be a list of strings"),
    ],
)
def test_what_says_nothing_or_too_much_is_refused(given_options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        DecodingOptions(**given_options)


def test_all_off_is_nothing_at_all() -> None:
    """Many clients send all they know."""
    options = DecodingOptions(**DEFAULTS)
    assert not options.drawing()
    assert not any(map(options.is_on, (name for name in ADDED if name not in ("fsd_k",))))
    options.require_fitting(do_sample=False, num_beams=4)
