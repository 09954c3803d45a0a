"""Rounds of several homes in one process, with messages that take their time: whose differences count, and for whom."""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import numpy as np
import pytest

from swarmllm.network.p2p.identity import Identity
from swarmllm.training.differences import Difference, Rules, SharedState, quantize
from swarmllm.training.rounds import (
    MAX_MEMBERS,
    Adopt,
    Apply,
    Choice,
    Fetch,
    Offer,
    Position,
    Rounds,
    SendVote,
    VoteHeader,
    is_member,
    membership,
)

SIZE = 8
RUN = "r" * 52


@dataclass
class Home:
    """A member, its states, and what it knows."""

    name: str
    rounds: Rounds
    state: SharedState
    states: dict[str, SharedState] = field(default_factory=dict)
    differences: dict[str, tuple[Offer, Difference]] = field(default_factory=dict)
    own: Offer | None = None
    vote: VoteHeader | None = None
    frozen: bool = False
    waiting: list[Callable[[], None]] = field(default_factory=list)
    applied: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """Whose differences counted, by round."""

    def digest(self) -> str:
        return self.state.digest()


class Town:
    """Homes, a clock, and a post."""

    def __init__(self, count: int, seed: int = 0, *, patience_s: float = 60.0, slowest_s: float = 0.5) -> None:
        self.now, self.random, self.slowest_s, self.patience_s = 0.0, Random(seed), slowest_s, patience_s
        self.homes: dict[str, Home] = {}
        self._post: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0
        for _ in range(count):
            self.settle(np.zeros(SIZE, np.float32))
        self.run(lambda: all(None not in home.rounds.others.values() for home in self.homes.values()))

    def settle(self, values: np.ndarray | None) -> Home:
        """A new home; without values it takes the others' state."""
        name = f"home-{len(self.homes):02d}".ljust(52, "x")
        rounds = Rounds(name, patience_s=self.patience_s, vote_s=5.0)
        state = SharedState.initial(np.zeros(SIZE, np.float32) if values is None else values)
        home = self.homes[name] = Home(name, rounds, state)
        for other in self.homes.values():
            if other is not home:
                self.connect(home, other)
        rounds.trains = True
        if values is not None:
            self.move(home, state, ())
        return home

    def connect(self, one: Home, other: Home) -> None:
        for here, there in ((one, other), (other, one)):
            here.rounds.meet(there.name)
            if there.rounds.position is not None:
                self.send(there, here.name, lambda h=here, t=there: self.hear_position(h, t.name, t.rounds.position))
            if there.own is not None:
                self.send(there, here.name, lambda h=here, t=there, o=there.own: self.hear_offer(h, o, t))

    # The post

    def later(self, seconds: float, call: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._post, (self.now + seconds, self._number, call))

    def send(self, sender: Home, to: str, call: Callable[[], None]) -> None:
        def arrive() -> None:
            home = self.homes.get(to)
            if home is None or to not in sender.rounds.others:
                return
            if home.frozen:
                home.waiting.append(arrive)
                return
            call()
            self.act(home)

        self.later(self.random.uniform(0, self.slowest_s), arrive)

    def tell(self, sender: Home, call: Callable[[Home], None]) -> None:
        for name in list(sender.rounds.others):
            self.send(sender, name, lambda name=name: call(self.homes[name]))

    def run(self, until: Callable[[], bool], *, at_most_s: float = 1000.0) -> None:
        end = self.now + at_most_s
        while not until():
            assert self._post, "nothing happens any more"
            self.now, _, call = heapq.heappop(self._post)
            assert self.now <= end, {home.name[:7]: home.rounds.position for home in self.homes.values()}
            call()

    # Homes

    def train(self, home: Home, value: float = 1.0) -> None:
        """Offer a difference to the state that the home has."""
        if home.rounds.position is None or home.rounds.offered():
            return
        difference = quantize(np.full(SIZE, value, np.float32))
        home.own = self.offer(home, difference)
        self.hear_offer(home, home.own, home)
        self.tell(home, lambda other, offer=home.own: self.hear_offer(other, offer, home))
        self.act(home)

    def offer(self, home: Home, difference: Difference) -> Offer:
        position = home.rounds.position
        assert position is not None
        sha256 = f"{self.random.getrandbits(256):064x}"
        offer = Offer(run=RUN, peer_id=home.name, round=position.round, base=position.digest, sha256=sha256)
        home.differences[sha256] = offer, difference
        return offer

    def hear_offer(self, home: Home, offer: Offer, holder: Home) -> None:
        if home.rounds.take_offer(offer, self.now):
            home.differences[offer.sha256] = holder.differences[offer.sha256]

    def hear_position(self, home: Home, sender: str, position: Position | None) -> None:
        if position is not None and sender in home.rounds.others:
            home.rounds.take_position(sender, position, self.now)

    def act(self, home: Home) -> None:
        while not home.frozen and (actions := home.rounds.step(self.now)):
            for action in actions:
                self.do(home, action)
        if home.rounds.wakes_at is not None:
            self.later(max(0.0, home.rounds.wakes_at - self.now), lambda: None if home.frozen else self.act(home))

    def do(self, home: Home, action: SendVote | Fetch | Apply | Adopt) -> None:
        if isinstance(action, SendVote):
            vote = home.vote = action.vote
            self.tell(home, lambda other: other.rounds.take_vote(home.name, vote, self.now))
        elif isinstance(action, Fetch):
            for holder in action.holders:
                there = self.homes.get(holder)
                if there is not None and not there.frozen and action.sha256 in there.differences:
                    self.hear_offer(home, there.differences[action.sha256][0], there)
                    if action.sha256 in home.differences:
                        return
            home.rounds.give_up(action.peer_id, action.sha256)
        elif isinstance(action, Apply):
            differences = {offer.peer_id: home.differences[offer.sha256][1] for offer in action.offers}
            home.applied[home.state.round] = tuple(sorted(name[:7] for name in differences))
            chosen = tuple((offer.peer_id, offer.sha256) for offer in action.offers)
            self.move(home, home.state.after(differences, 1, Rules()), chosen)
        else:
            for holder in action.holders:
                there = self.homes.get(holder)
                state = None if there is None or there.frozen else there.states.get(action.position.digest)
                if state is not None:
                    self.move(home, state, ())
                    return
            home.rounds.give_up_state(action.position.digest, self.now + 5)

    def move(self, home: Home, state: SharedState, chosen: Choice) -> None:
        home.state = home.states[state.digest()] = state
        position = Position(round=state.round, digest=state.digest(), chosen=chosen)
        home.rounds.advance(position)
        self.tell(home, lambda other: self.hear_position(other, home.name, position))

    def kill(self, home: Home) -> None:
        del self.homes[home.name]
        home.frozen = True
        for other in list(self.homes.values()):
            self.later(self.random.uniform(0, 1), lambda other=other: (other.rounds.leave(home.name), self.act(other)))

    def freeze(self, home: Home) -> None:
        home.frozen = True
        for other in self.homes.values():
            if other is not home:
                self.later(8.0, lambda other=other: (other.rounds.leave(home.name), self.act(other)))

    def thaw(self, home: Home) -> None:
        home.frozen = False
        for name in list(home.rounds.others):
            home.rounds.leave(name)
        for call in home.waiting:
            call()
        for other in self.homes.values():
            if other is not home:
                self.connect(home, other)
        self.act(home)

    # What is seen

    def all_at(self, number: int) -> Callable[[], bool]:
        return lambda: all(one.frozen or one.state.round >= number for one in self.homes.values())

    def agree(self) -> bool:
        living = [one for one in self.homes.values() if not one.frozen]
        return len({one.digest() for one in living}) == 1


def keep_training(town: Town, home: Home, every_s: float, until: int, value: float = 1.0) -> None:
    def train() -> None:
        if home.name not in town.homes or home.state.round >= until:
            return
        if not home.frozen:
            town.train(home, value)
        town.later(every_s, train)

    town.later(every_s, train)


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
    for _ in range(100):
        town.hear_offer(home, town.offer(liar, quantize(np.ones(SIZE, np.float32))), liar)
    assert len(home.rounds.needed()) <= 4
    far = Offer(run=RUN, peer_id=liar.name, round=77, base="0" * 64, sha256="0" * 64)
    assert not home.rounds.take_offer(far, 0.0)


def test_invented_homes_end_no_rounds() -> None:
    town = Town(2)
    home, liar = town.homes.values()
    difference = quantize(np.ones(SIZE, np.float32))
    for number in range(200):
        offer = town.offer(liar, difference).model_copy(update={"peer_id": f"nobody-{number:03d}".ljust(52, "x")})
        liar.differences[offer.sha256] = offer, difference
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
