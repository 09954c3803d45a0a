"""Rounds of several homes in one process, with messages that take their time: whose differences count, and for whom."""

import numpy as np
import pytest
from tests.town import RUN, SIZE, Town, keep_training

from swarmllm.network.p2p.identity import Identity
from swarmllm.training.differences import SharedState, quantize
from swarmllm.training.rounds import MAX_MEMBERS, Offer, VoteHeader, is_member, membership


@pytest.mark.parametrize("count", [1, 2, 3, 7, 16])
def test_all_homes_have_the_same_after_each_round(count: int) -> None:
    town = Town(count, seed=count)
    for number, home in enumerate(list(town.homes.values())):
        keep_training(town, home, 1.0 + 0.1 * number, 2, value=1.0 + number)
    town.run(lambda: town.all_at(2)() and town.agree())
    for home in town.homes.values():
        assert all(len(names) == count for names in home.applied.values())


@pytest.mark.parametrize("seed", range(4))
def test_a_home_that_is_killed_in_a_round_costs_the_others_nothing(seed: int) -> None:
    town = Town(4, seed)
    homes = list(town.homes.values())
    for home in homes:
        keep_training(town, home, 1.0, 6)
    town.run(town.all_at(1))
    town.later(town.random.uniform(0, 2), lambda: town.kill(homes[2]))
    town.run(lambda: town.all_at(6)() and town.agree())


@pytest.mark.parametrize("seed", range(4))
def test_a_frozen_home_is_left_out_and_comes_back(seed: int) -> None:
    town = Town(3, seed)
    homes = list(town.homes.values())
    for home in homes:
        keep_training(town, home, 1.0, 30)
    town.run(town.all_at(2))
    town.freeze(homes[1])
    town.run(town.all_at(6))
    assert homes[1].state.round < 6
    town.thaw(homes[1])
    town.run(lambda: town.all_at(10)() and town.agree())
    assert "home-01" in homes[0].applied[9]


def test_a_round_waits_no_longer_than_its_patience() -> None:
    town = Town(3, patience_s=20.0)
    quick, other, slow = town.homes.values()
    for home in (quick, other):
        keep_training(town, home, 1.0, 3)
    town.run(town.all_at(1))
    assert town.now >= 20
    assert slow.state.round == 1  # it heard the others, and computed the same
    assert quick.applied[0] == ("home-00", "home-01")
    town.train(slow)
    town.run(town.all_at(2))
    assert quick.applied[1] == ("home-00", "home-01", "home-02")


def test_who_comes_late_takes_the_state_of_the_others() -> None:
    town = Town(3)
    for home in list(town.homes.values()):
        keep_training(town, home, 1.0, 8)
    town.run(town.all_at(3))
    late = town.settle(None)
    keep_training(town, late, 1.0, 8)
    town.run(lambda: town.all_at(8)() and town.agree())
    assert 0 not in late.applied
    assert all(len(names) == 4 for number, names in late.applied.items() if number > 5)


def test_homes_that_begin_at_once_agree_on_one_beginning() -> None:
    town = Town(0)
    for value in (1.0, 2.0, 3.0):
        town.settle(np.full(SIZE, value, np.float32))
    town.run(town.agree)


def test_who_leaves_is_not_waited_for() -> None:
    town = Town(3)
    homes = list(town.homes.values())
    for home in homes[:2]:
        keep_training(town, home, 1.0, 4)
    keep_training(town, homes[2], 1.0, 2)
    town.run(town.all_at(2))
    town.kill(homes[2])
    began = town.now
    town.run(lambda: town.all_at(4)() and town.agree())
    assert town.now - began < 30


def test_a_difference_that_reached_one_home_counts_for_all() -> None:
    town = Town(3)
    one, other, dying = town.homes.values()
    dying.own = town.offer(dying, quantize(np.full(SIZE, 5.0, np.float32)))
    town.hear_offer(one, dying.own, dying)  # and it dies before the other one hears it
    town.kill(dying)
    town.run(lambda: dying.name not in one.rounds.others and dying.name not in other.rounds.others)
    for home in (one, other):
        town.train(home)
    town.run(town.all_at(1))
    assert town.agree()
    assert one.applied[0] == other.applied[0] == ("home-00", "home-01", "home-02")


def test_two_different_differences_of_one_home_count_for_nobody() -> None:
    town = Town(3)
    one, other, liar = town.homes.values()
    for home, value in ((one, 5.0), (other, -5.0)):
        town.hear_offer(home, town.offer(liar, quantize(np.full(SIZE, value, np.float32))), liar)
    liar.rounds.trains = False
    for home in (one, other):
        town.train(home)
    town.run(town.all_at(1))
    assert one.applied[0] == other.applied[0] == ("home-00", "home-01")


def test_a_lie_about_the_state_convinces_nobody_but_the_liar() -> None:
    town = Town(3, patience_s=20.0)
    one, other, liar = town.homes.values()
    wrong = SharedState(1, np.full(SIZE, 99.0, np.float32), np.zeros(SIZE, np.float32))
    for home in (one, other):
        town.train(home)
    town.move(liar, wrong, ())
    town.run(lambda: town.all_at(1)() and one.state.round == 1)
    town.run(lambda: not town._post or town.now > 30, at_most_s=100)
    assert one.digest() == other.digest() != wrong.digest()
    far = SharedState(1000, np.full(SIZE, 99.0, np.float32), np.zeros(SIZE, np.float32))
    town.move(liar, far, ())
    for home in (one, other):
        town.train(home)
    town.run(lambda: all(home.state.round >= 2 for home in (one, other)))
    assert one.digest() == other.digest()
    assert one.state.round == 2


@pytest.mark.parametrize("seed", range(4))
def test_votes_that_only_some_have_heard_are_mended(seed: int) -> None:
    """The states of a divided round differ; afterwards all have the same again, and nobody has stopped."""
    town = Town(5, seed, slowest_s=3.0)
    for number, home in enumerate(list(town.homes.values())):
        keep_training(town, home, 1.0, 12, value=1.0 + number)
    homes = list(town.homes.values())
    town.run(town.all_at(2))
    town.later(town.random.uniform(0, 6), lambda: town.kill(homes[0]))
    town.later(town.random.uniform(0, 6), lambda: town.kill(homes[1]))
    town.run(lambda: town.all_at(12)() and town.agree())


def test_floods_of_differences_are_not_kept() -> None:
    town = Town(2)
    home, liar = town.homes.values()
    for number in range(100):
        town.hear_offer(home, town.offer(liar, quantize(np.full(SIZE, number, np.float32))), liar)
    assert len(home.rounds.needed()) <= 4
    far = Offer(run=RUN, peer_id=liar.name, round=77, base="0" * 64, sha256="0" * 64)
    assert not home.rounds.take_offer(far, 0.0)


def test_invented_homes_end_no_rounds() -> None:
    town = Town(2)
    home, liar = town.homes.values()
    difference = quantize(np.ones(SIZE, np.float32))
    for number in range(200):
        offer = town.offer(liar, difference).model_copy(update={"peer_id": f"nobody-{number:03d}".ljust(52, "x")})
        liar.differences[offer.entry] = offer, difference
        town.hear_offer(home, offer, liar)
    assert len(home.rounds.needed()) == MAX_MEMBERS
    for one in (home, liar):
        town.train(one)
    town.run(town.all_at(1))


def test_members_have_the_run_s_signature() -> None:
    run, own, stranger = Identity.generate(), Identity.generate(), Identity.generate()
    assert is_member(own.peer_id, membership(own.peer_id, run), run.peer_id)
    assert not is_member(stranger.peer_id, membership(own.peer_id, run), run.peer_id)
    assert not is_member(own.peer_id, membership(own.peer_id, stranger), run.peer_id)


def test_differences_are_signed_by_their_homes() -> None:
    run, own = Identity.generate(), Identity.generate()
    fields = {"run": run.peer_id, "peer_id": own.peer_id, "round": 1, "base": "a" * 64, "sha256": "b" * 64}
    offer = Offer(**fields, tokens=5, loss=1.25).signed(own)
    assert offer.is_genuine(run.peer_id)
    assert not offer.is_genuine(own.peer_id)
    assert not offer.model_copy(update={"tokens": 6}).is_genuine(run.peer_id)
    assert not offer.model_copy(update={"round": 2}).is_genuine(run.peer_id)


@pytest.mark.parametrize("votes", [1, 5])
def test_a_difference_that_does_not_come_is_asked_for_once(votes: int) -> None:
    """A member votes for differences of two homes with the same bytes, again and again, and sends neither."""
    town = Town(2)
    home, liar = town.homes.values()
    assert home.rounds.position is not None
    town.train(home)
    invented = tuple((name.ljust(52, "x"), "f" * 64) for name in ("one", "two"))
    vote = VoteHeader(round=0, base=home.rounds.position.digest, have=invented)
    for _ in range(votes):
        town.hear_vote(home, liar.name, vote)
    liar.rounds.trains = False
    town.act(home)
    town.run(lambda: home.state.round == 1)
    assert [*home.fetches.values()] == [1, 1]
    assert home.applied[0] == ("home-00",)


def test_votes_for_invented_states_end_no_rounds() -> None:
    town = Town(2)
    home, liar = town.homes.values()
    for number in range(200):
        town.hear_vote(home, liar.name, VoteHeader(round=0, base=f"{number:064x}", have=()))
    for one in (home, liar):
        town.train(one)
    town.run(town.all_at(1))
