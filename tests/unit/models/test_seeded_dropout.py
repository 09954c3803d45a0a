"""Dropout by seeds: at the asked rate, without a pattern, and the same however a batch is cut."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from swarmllm.errors import RemoteProtocolError
from swarmllm.models.adapters.block_adapter import dropout_key
from swarmllm.models.adapters.dropout import SEEDS, draw_seeds, drop_out, keep_mask

KEY = dropout_key(3, "self_attn.q_proj", 0)


def reference(seed: int, feature: int, key: int) -> int:
    """31 bits, in Python's unbounded numbers."""

    def mixed(bits: int) -> int:
        bits = (bits ^ (bits >> 16)) * 0x7FEB352D % 2**32
        bits = (bits ^ (bits >> 15)) * 0x846CA68B % 2**32
        return bits ^ (bits >> 16)

    return mixed(mixed(seed ^ key) ^ mixed(feature)) % 2**31


@given(
    st.lists(st.integers(0, SEEDS - 1), min_size=1, max_size=6),
    st.integers(1, 40),
    st.integers(0, SEEDS - 1),
    st.floats(0, 0.99),
)
def test_the_same_as_in_other_words(seeds: list[int], features: int, key: int, rate: float) -> None:
    expected = [[reference(seed, feature, key) >= int(rate * SEEDS) for feature in range(features)] for seed in seeds]
    assert keep_mask(torch.tensor(seeds), features, key, rate).tolist() == expected


def likeness(kept: Tensor) -> list[float]:
    """The largest covariance of two tokens, and of two features, among 512."""
    noise = (kept - kept.mean()) / kept.std()
    found = []
    for rows in (noise, noise.T):
        covariance = rows[:512] @ rows[:512].T / rows.shape[1]
        found.append(covariance.fill_diagonal_(0).abs().max().item())
    return found


@pytest.mark.parametrize("rate", [0.05, 0.1, 0.5, 0.9])
def test_as_often_as_asked_for_and_as_independently_as_torchs(rate: float) -> None:
    torch.manual_seed(0)
    seeds = draw_seeds(64, 32)
    kept = keep_mask(seeds, 512, KEY, rate).double().view(-1, 512)
    assert abs(kept.mean().item() - (1 - rate)) < 5 * math.sqrt(rate * (1 - rate) / kept.numel())
    for ours, torchs in zip(likeness(kept), likeness(torch.full_like(kept, 1 - rate).bernoulli()), strict=True):
        assert ours < 1.4 * torchs
    other = keep_mask(seeds, 512, dropout_key(4, "self_attn.q_proj", 0), rate).double().view(-1, 512)
    assert abs(((other - (1 - rate)) * (kept - (1 - rate))).mean()) < 5 * rate * (1 - rate) / math.sqrt(kept.numel())


def test_modules_and_adapters_leave_out_others() -> None:
    keys = [
        dropout_key(block, path, number)
        for block in range(200)
        for path in ("q_proj", "v_proj", "mlp.down_proj")
        for number in range(3)
    ]
    assert len({*keys}) == len(keys)
    assert all(0 <= key < SEEDS for key in keys)


@given(st.integers(1, 5), st.integers(1, 7), st.data())
def test_rows_and_columns_keep_theirs(batch: int, seq: int, data: st.DataObject) -> None:
    seeds = draw_seeds(batch, seq)
    values = torch.randn(batch, seq, 16)
    whole = drop_out(values, seeds, KEY, 0.3)
    rows = slice(data.draw(st.integers(0, batch - 1)), batch)
    columns = slice(data.draw(st.integers(0, seq - 1)), seq)
    assert torch.equal(drop_out(values[rows, columns], seeds[rows, columns], KEY, 0.3), whole[rows, columns])
    assert torch.equal(drop_out(values.flatten(0, 1), seeds, KEY, 0.3), whole.flatten(0, 1))
    kept = keep_mask(seeds, 16, KEY, 0.3)
    torch.testing.assert_close(whole, torch.where(kept, values / 0.7, 0.0))


def test_other_places_are_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="leave it out of target_modules, or set the dropout to 0"):
        drop_out(torch.ones(2, 7, 4), draw_seeds(2, 3), KEY, 0.1)


def test_torch_makes_the_seeds_again() -> None:
    torch.manual_seed(5)
    first = draw_seeds(2, 3)
    torch.manual_seed(5)
    assert torch.equal(draw_seeds(2, 3), first)
