"""Homes of a run in one process, with a clock and a post in which messages take their time, get lost, and overtake."""

import hashlib
import heapq
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import numpy as np

from swarmllm.training.differences import Difference, Rules, SharedState, quantize
from swarmllm.training.rounds import Adopt, Apply, Choice, Entry, Fetch, Offer, Position, Rounds, SendVote, VoteHeader

SIZE = 8
RUN = "r" * 52


@dataclass
class Home:
    """A member, its states, and what it knows."""

    name: str
    rounds: Rounds
    state: SharedState
    states: dict[str, SharedState] = field(default_factory=dict)
    differences: dict[Entry, tuple[Offer, Difference]] = field(default_factory=dict)
    own: Offer | None = None
    vote: VoteHeader | None = None
    frozen: bool = False
    waiting: list[Callable[[], None]] = field(default_factory=list)
    applied: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """Whose differences counted, by round."""
    fetches: Counter[Entry] = field(default_factory=Counter)
    splits: int = 0
    """Times that it took the values of the other side of a split."""

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
            if there.vote is not None:
                self.send(there, here.name, lambda h=here, t=there, v=there.vote: self.hear_vote(h, t.name, v))

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
        sha256 = hashlib.sha256(difference.packed()).hexdigest()
        offer = Offer(run=RUN, peer_id=home.name, round=position.round, base=position.digest, sha256=sha256)
        home.differences[offer.entry] = offer, difference
        return offer

    def hear_offer(self, home: Home, offer: Offer, holder: Home) -> None:
        if home.rounds.take_offer(offer, self.now):
            home.differences[offer.entry] = holder.differences[offer.entry]

    def hear_vote(self, home: Home, sender: str, vote: VoteHeader) -> None:
        if sender in home.rounds.others:
            home.rounds.take_vote(sender, vote, self.now)

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
            self.tell(home, lambda other: self.hear_vote(other, home.name, vote))
        elif isinstance(action, Fetch):
            assert home.rounds.position is not None
            entry = action.peer_id, home.rounds.position.digest, action.sha256
            home.fetches[entry] += 1
            for holder in action.holders:
                there = self.homes.get(holder)
                is_there = there is not None and not there.frozen and holder in home.rounds.others
                if there is not None and is_there and entry in there.differences:
                    self.hear_offer(home, there.differences[entry][0], there)
                    if entry in home.differences:
                        return
        elif isinstance(action, Apply):
            differences = {offer.peer_id: home.differences[offer.entry][1] for offer in action.offers}
            home.applied[home.state.round] = tuple(sorted(name[:7] for name in differences))
            chosen = tuple((offer.peer_id, offer.sha256) for offer in action.offers)
            self.move(home, home.state.after(differences, 1, Rules()), chosen)
        else:
            for holder in action.holders:
                there = self.homes.get(holder)
                state = None if there is None or there.frozen else there.states.get(action.position.digest)
                if state is not None and holder in home.rounds.others:
                    home.splits += action.parts_at is not None
                    self.move(home, state, ())
                    return
            home.rounds.give_up_state(action.position.digest, self.now + 5)

    def move(self, home: Home, state: SharedState, chosen: Choice) -> None:
        home.state = home.states[state.digest()] = state
        position = Position(round=state.round, digest=state.digest(), chosen=chosen, past=state.past)
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

    def cut(self, one: Home, other: Home) -> None:
        """The stream between these homes is lost. Each sees it after a while."""
        for here, there in ((one, other), (other, one)):
            self.later(self.random.uniform(0, 1), lambda h=here, t=there: (h.rounds.leave(t.name), self.act(h)))

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
