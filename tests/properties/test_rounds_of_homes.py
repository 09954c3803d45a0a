"""Homes of a run, whatever happens to their streams: in the end all have the same values, and all take part."""

from itertools import combinations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.town import SIZE, Home, Town, keep_training

from swarmllm.training.differences import SharedState

SEEDS = st.integers(0, 1 << 32)
LAST = 400
"""Nobody gets to this round."""


def train_all(town: Town, values: list[float]) -> None:
    """All homes train, each at its own pace. Homes with equal values send equal differences."""
    for number, home in enumerate(list(town.homes.values())):
        keep_training(town, home, 1.0 + 0.1 * number, LAST, value=values[number % len(values)])


def all_take_part(town: Town) -> bool:
    """True if all have the same state, from a round in which all homes counted."""
    homes = list(town.homes.values())
    return (
        town.agree()
        and all(one.state.round > 0 and set(one.state.counted) >= set(town.homes) for one in homes)
        and all(one.state.counted[name] == one.state.round - 1 for one in homes for name in town.homes)
    )


def check_end(town: Town) -> None:
    town.run(lambda: all_take_part(town), at_most_s=300.0)
    for home in town.homes.values():
        assert all(times <= 2 for times in home.fetches.values())  # again only if it comes back to that round


def part(town: Town, one: list[Home], other: list[Home]) -> None:
    """These groups lose each other."""
    for a in one:
        for b in other:
            town.cut(a, b)


def meet(town: Town, one: list[Home], other: list[Home]) -> None:
    for a in one:
        for b in other:
            town.connect(a, b)


@settings(max_examples=25)
@given(SEEDS, st.integers(1, 4), st.integers(1, 6), st.lists(st.sampled_from((0.0, 1.0, 2.0)), min_size=1, max_size=4))
def test_homes_that_join_at_once_take_part(seed: int, count: int, joining: int, values: list[float]) -> None:
    town = Town(count, seed, slowest_s=1.0)
    train_all(town, values)
    town.run(town.all_at(2))
    late = [town.settle(None) for _ in range(joining)]
    for number, home in enumerate(late):
        keep_training(town, home, 1.0, LAST, value=values[number % len(values)])
    check_end(town)


@settings(max_examples=25)
@given(SEEDS, st.integers(2, 6), st.data())
def test_streams_that_are_lost_split_nothing_for_long(seed: int, count: int, data: st.DataObject) -> None:
    """Pairs lose their stream in the middle of rounds, and have another one some seconds later."""
    town = Town(count, seed, slowest_s=1.5)
    homes = list(town.homes.values())
    train_all(town, data.draw(st.lists(st.sampled_from((1.0, 2.0)), min_size=1, max_size=count)))
    town.run(town.all_at(1))
    pairs = st.lists(st.sampled_from(list(combinations(range(count), 2))), min_size=1, max_size=6)
    for a, b in data.draw(pairs):
        at = data.draw(st.floats(0, 10))
        town.later(at, lambda a=a, b=b: town.cut(homes[a], homes[b]))
        town.later(at + 5, lambda a=a, b=b: town.connect(homes[a], homes[b]))
    end = town.now + 16
    town.run(lambda: town.now > end)
    check_end(town)


@settings(max_examples=10)
@given(SEEDS, st.integers(1, 4), st.integers(1, 4), st.floats(0.5, 1), st.floats(30, 60))
def test_groups_that_were_apart_agree_by_the_rule(
    seed: int, count: int, other_count: int, pace: float, apart_s: float
) -> None:
    """More homes count, of equally many the higher round. The other side says so."""
    town = Town(count + other_count, seed, slowest_s=0.2)
    homes = list(town.homes.values())
    one, other = homes[:count], homes[count:]
    for home in one:
        keep_training(town, home, 1.0, LAST, value=1.0)
    for home in other:
        keep_training(town, home, pace, LAST, value=3.0)
    town.run(town.all_at(1))
    part(town, one, other)
    end = town.now + apart_s
    town.run(lambda: town.now > end and all(len({home.digest() for home in group}) == 1 for group in (one, other)))
    assert one[0].digest() != other[0].digest()
    wins, loses = (one, other) if count > other_count else (other, one)
    won, lost = ({home.digest() for home in group} for group in (wins, loses))
    for home in loses:
        home.splits = 0  # some may have heard other votes when they lost each other
    meet(town, one, other)
    check_end(town)
    if count != other_count:
        assert all(home.splits for home in loses)
        assert set(wins[0].state.past) & won
        assert not set(wins[0].state.past) & lost


@settings(max_examples=15)
@given(SEEDS, st.integers(2, 5))
def test_homes_that_begin_at_once_agree(seed: int, count: int) -> None:
    town = Town(0, seed)
    for number in range(count):
        keep_training(town, town.settle(np.full(SIZE, number, np.float32)), 1.0, LAST)
    check_end(town)


@settings(max_examples=15)
@given(SEEDS, st.integers(3, 6))
def test_a_liar_s_state_wins_no_majority(seed: int, count: int) -> None:
    """It claims to come from the others' state, many rounds later."""
    town = Town(count, seed)
    *honest, liar = town.homes.values()
    for home in honest:
        keep_training(town, home, 1.0, LAST)
    town.run(lambda: honest[0].state.round > 3)
    past = (*honest[0].state.past, honest[0].digest())
    wrong = SharedState(honest[0].state.round + 1, np.full(SIZE, 99, np.float32), np.zeros(SIZE, np.float32), past=past)
    town.move(liar, wrong, ())
    town.run(lambda: all(home.state.round > 8 for home in honest) and len({home.digest() for home in honest}) == 1)
    assert all(np.abs(home.state.values).max() < 90 for home in honest)
