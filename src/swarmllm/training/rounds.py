"""When a round ends, and whose differences count. Pure: the time is an argument, and `members` moves the bytes.

A round begins with the first difference. Each member sends its own one to all others. Its states, at each member:

    state     on                                                                  →
    collect   differences of all members that are there, or patience is over      vote: tell all which ones are here
    vote      the votes of all who are there, or too long; or somebody is done    decide
    decide    differences that others voted for have come, or don't come          apply their mean; tell the digest

The *union* of all votes counts. So a member that lies can leave nobody out, and a difference that reached one member
counts for all, because they ask that one for it. A member that sends two different differences is left out.

Members may hear different votes if somebody dies in the middle, or lose each other for a while. Then the run splits:
their states have different digests, and none comes from the other (each names the states before it). When the groups
meet, the one with more homes counts, of equal ones the one at the higher round, then the smaller digest. The others
take its state, and say so. A member that comes, or was frozen, takes the state of at least half. Nobody waits for
members that are silent.

Each difference is asked for once in a round. If it doesn't come, it doesn't count here.
"""

import json
from dataclasses import dataclass, field
from typing import Annotated, NamedTuple

from pydantic import Field

from swarmllm.data_structures import MAX_ADDRS, PeerModel, PeerText
from swarmllm.network.p2p.identity import Identity, verify
from swarmllm.training.differences import MAX_PAST, Rules

MAX_MEMBERS = 16
"""Each member sends its difference to each other one, so the bytes grow with their square."""
MAX_ROUND = 1 << 40
MAX_KEPT = 4
"""Differences of one member to keep: of this round and the next one, and a second one of each, which proves a lie."""

MAX_CHOSEN = (MAX_KEPT + 1) * MAX_MEMBERS
"""Most differences of a round that are told and counted: those of members that are there, and `MAX_MEMBERS` of others
that have left, or that a member has invented."""
MAX_LOSS = 1e6

PeerId = Annotated[str, Field(min_length=40, max_length=64)]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Signature = Annotated[str, Field(pattern=r"^[0-9a-f]{128}$")]
Loss = Annotated[float, Field(ge=-MAX_LOSS, le=MAX_LOSS, allow_inf_nan=False)]
TrainedText = Annotated[PeerText, Field(max_length=256)]
RoundNumber = Annotated[int, Field(ge=0, le=MAX_ROUND)]
Entry = tuple[PeerId, Digest, Digest]
"""A difference: the peer id of its home, the digest of the state that it belongs to, and the SHA-256 of its bytes. Two
homes may have the same bytes, and so may two rounds of one home."""
Choice = Annotated[tuple[tuple[PeerId, Digest], ...], Field(max_length=MAX_CHOSEN)]
"""Differences: the peer id of each, and the SHA-256 of its bytes."""

_MEMBER, _OFFER = b"swarmllm member of a run 1\x00", b"swarmllm difference 1\x00"


class MemberHeader(PeerModel):
    """MEMBER: both sides' first message after the greeting."""

    member: Signature
    """The run key's signature of the sender's peer id."""
    size: Annotated[int, Field(ge=1, le=1 << 40)]
    """Number of trained values."""
    shapes: Digest
    """A digest of the shapes of the trained tensors."""
    trained: Annotated[
        dict[Annotated[PeerText, Field(max_length=64)], TrainedText], Field(max_length=80, default_factory=dict)
    ]
    """Names of parameters, base model and adapter, as far as the sender knows them (`trained.description`)."""
    outer_lr: Annotated[float, Field(ge=0, le=1e6)]
    outer_momentum: Annotated[float, Field(ge=0, le=1)]
    trim: Annotated[float, Field(ge=0, le=0.5)]
    common: Digest | None = None
    """A digest of the common texts (`common_texts.digest`). None: the sender has none."""
    addrs: Annotated[tuple[Annotated[PeerText, Field(max_length=256)], ...], Field(max_length=MAX_ADDRS)] = ()
    """Addresses at which the sender can be dialled."""
    has_state: bool = True
    """False: the sender is just joining. True: its POSITION follows."""
    is_new: bool = False
    """True: the sender has been in no round yet."""
    name: Annotated[PeerText, Field(max_length=64)] = ""

    @property
    def rules(self) -> Rules:
        return Rules(self.outer_lr, self.outer_momentum, self.trim)


class Position(PeerModel):
    """POSITION: the state that a member has. It also counts as its last vote of the round before."""

    round: RoundNumber
    digest: Digest
    chosen: Choice = ()
    """The differences from which this state was made, if the member has made it itself."""
    past: Annotated[tuple[Digest, ...], Field(max_length=MAX_PAST)] = ()
    """Digests of the states before it, the newest last."""

    @property
    def key(self) -> tuple[int, str]:
        return self.round, self.digest

    def is_before(self, other: "Position") -> bool:
        """True if the other state has come from this one."""
        back = other.round - self.round
        return 0 < back <= len(other.past) and other.past[-back] == self.digest

    def is_on_the_way_of(self, other: "Position") -> bool:
        """True if they are the same, or one has come from the other. Otherwise the run has split between them."""
        return self.key == other.key or self.is_before(other) or other.is_before(self)

    def common_round(self, other: "Position") -> int | None:
        """The last round in which both had the same state; None: it is too long ago."""
        ways = [dict(enumerate([*one.past, one.digest], one.round - len(one.past))) for one in (self, other)]
        return max((number for number in ways[0] if ways[1].get(number) == ways[0][number]), default=None)


class Offer(PeerModel):
    """DIFFERENCE: whose it is, and to which state it belongs. The payload is `Difference.packed`."""

    run: PeerId
    """The run's public key."""
    peer_id: PeerId
    round: RoundNumber
    base: Digest
    """Digest of the state that it was computed from."""
    sha256: Digest
    """A digest of the payload."""
    tokens: Annotated[int, Field(ge=0, le=1 << 40)] = 0
    """Tokens of training since the last one, as its sender says."""
    loss: Loss | None = None
    """Mean loss of these steps, as its sender says."""
    own_loss: Loss | None = None
    """Loss of the sender's own values on the common texts, after these steps, as it says."""
    shared_loss: Loss | None = None
    """Loss of the shared values of `base` on the common texts, as its sender says."""
    name: Annotated[PeerText, Field(max_length=64)] = ""
    signature: Signature = "0" * 128
    """By the key of `peer_id`."""

    @property
    def entry(self) -> "Entry":
        return self.peer_id, self.base, self.sha256

    def signed_bytes(self) -> bytes:
        return _OFFER + canonical(self.model_dump(mode="json", exclude={"signature"}))

    def signed(self, identity: Identity) -> "Offer":
        return self.model_copy(update={"signature": identity.sign(self.signed_bytes()).hex()})

    def is_genuine(self, run: str) -> bool:
        """True if it belongs to this run, and its sender has signed it."""
        return self.run == run and verify(self.peer_id, bytes.fromhex(self.signature), self.signed_bytes())


class VoteHeader(PeerModel):
    """VOTE: the differences that a member has for this round."""

    round: RoundNumber
    base: Digest
    have: Choice


class WantHeader(PeerModel):
    """WANT: send me this difference, or the bytes with this digest (a state, or the common texts) from an offset on."""

    difference: Entry | None = None
    state: Digest | None = None
    offset: Annotated[int, Field(ge=0, le=1 << 40)] = 0


class StateHeader(PeerModel):
    """STATE: an answer to WANT, with its fields: bytes from an offset on. `total` 0: it isn't here any more."""

    difference: Entry | None = None
    digest: Digest | None = None
    offset: Annotated[int, Field(ge=0, le=1 << 40)] = 0
    total: Annotated[int, Field(ge=0, le=1 << 40)]


def canonical(fields: dict[str, object]) -> bytes:
    """The bytes under signatures."""
    return json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()


def membership(peer_id: str, run_key: Identity) -> str:
    """The signature that makes this peer a member."""
    return run_key.sign(_MEMBER + peer_id.encode()).hex()


def is_member(peer_id: str, signature: str, run: str) -> bool:
    """True if somebody with the run's key made this signature."""
    return verify(run, bytes.fromhex(signature), _MEMBER + peer_id.encode())


class SendVote(NamedTuple):
    """Tell all others which differences are here."""

    vote: VoteHeader


class Fetch(NamedTuple):
    """Ask these members for the difference. `take_offer` if it comes."""

    peer_id: str
    sha256: str
    holders: tuple[str, ...]


class Apply(NamedTuple):
    """Compute the next state from these differences; then `advance`."""

    offers: tuple[Offer, ...]


class Adopt(NamedTuple):
    """Take the state of these members; then `advance` or `give_up_state`."""

    position: Position
    holders: tuple[str, ...]
    parts_at: int | None = None
    """If the run has split: the last round that both states have in common, or -1 if it is unknown."""


Action = SendVote | Fetch | Apply | Adopt
Key = tuple[int, str]


@dataclass
class _Round:
    """The round of one state."""

    began_at: float
    first_vote_at: float | None = None
    voted_at: float | None = None
    offers: dict[tuple[str, str], Offer] = field(default_factory=dict)
    votes: dict[str, Choice] = field(default_factory=dict)
    asked: set[tuple[str, str]] = field(default_factory=set)
    """Differences that others were asked for."""
    refused: set[str] = field(default_factory=set)
    """Members whose difference makes no sense."""


class Rounds:
    """The rounds as one member sees them. Call `step` after each event and at `wakes_at`, and do what it returns."""

    def __init__(self, own: str, *, patience_s: float, vote_s: float) -> None:
        self._own, self._patience_s, self._vote_s = own, patience_s, vote_s
        self.position: Position | None = None
        """The own state; None: it must still come from others."""
        self.trains = False
        """True while the own difference is waited for."""
        self.others: dict[str, Position | None] = {}
        """Members that are there, and their positions."""
        self.wakes_at: float | None = None
        self._rounds: dict[Key, _Round] = {}
        self._refused: dict[str, float] = {}
        """Digests of states that couldn't be had, and until when not to ask again."""

    # Events

    def meet(self, peer_id: str) -> None:
        """A member is there."""
        self.others.setdefault(peer_id, None)

    def leave(self, peer_id: str) -> None:
        """A member is silent or gone. Its difference counts all the same if it has come."""
        self.others.pop(peer_id, None)

    def take_position(self, peer_id: str, position: Position, now: float) -> None:
        self.others[peer_id] = position
        if position.chosen and position.past:
            self._take_vote(peer_id, (position.round - 1, position.past[-1]), position.chosen, now)

    def take_vote(self, peer_id: str, vote: VoteHeader, now: float) -> None:
        self._take_vote(peer_id, (vote.round, vote.base), vote.have, now)

    def _take_vote(self, peer_id: str, key: Key, have: Choice, now: float) -> None:
        if (one := self._round(key, now)) is not None:
            one.votes[peer_id] = tuple(dict.fromkeys([*one.votes.get(peer_id, ()), *have]))[:MAX_CHOSEN]
            one.first_vote_at = now if one.first_vote_at is None else one.first_vote_at

    def take_offer(self, offer: Offer, now: float) -> bool:
        """Note a difference whose signature and payload are right. False: it isn't needed."""
        kept = [one for one in self._rounds.values() for peer_id, _ in one.offers if peer_id == offer.peer_id]
        one = self._round((offer.round, offer.base), now)
        if one is None or (len(kept) >= MAX_KEPT and offer.peer_id != self._own):
            return False
        known = self.others.keys() | {self._own}
        if offer.peer_id not in known and sum(peer_id not in known for peer_id, _ in one.offers) >= MAX_MEMBERS:
            return False
        one.offers[offer.peer_id, offer.sha256] = offer
        return True

    def refuse(self, peer_id: str, offer: Offer, now: float) -> None:
        """The difference that this member sent makes no sense, so it isn't waited for."""
        if (one := self._round((offer.round, offer.base), now)) is not None:
            one.refused.add(peer_id)

    def give_up_state(self, digest: str, until: float) -> None:
        """Nobody sends this state."""
        self._refused[digest] = until

    def advance(self, position: Position) -> None:
        """The own state is another one."""
        self.position = position
        self._rounds = {key: one for key, one in self._rounds.items() if key[0] >= position.round}

    def offered(self) -> bool:
        """True if the own difference of this round is there."""
        one = None if self.position is None else self._rounds.get(self.position.key)
        return one is not None and any(peer_id == self._own for peer_id, _ in one.offers)

    def needed(self) -> set[Entry]:
        """All differences that may still count."""
        return {offer.entry for one in self._rounds.values() for offer in one.offers.values()}

    def _round(self, key: Key, now: float) -> _Round | None:
        """The round of this state, if it is the own one, or may be it soon."""
        own = (0, "") if self.position is None else self.position.key
        is_known = key in self._rounds or key == own
        if not is_known and (not own[0] <= key[0] <= own[0] + 1 or len(self._rounds) >= 2 * MAX_MEMBERS):
            return None
        return self._rounds.setdefault(key, _Round(now))

    # Decisions

    def step(self, now: float) -> list[Action]:
        """The work that is to be done now. All of it must be done, and told, before the next call."""
        self.wakes_at = None
        if (adopt := self._adopt(now)) is not None:
            return [adopt]
        if self.position is None or (one := self._rounds.get(self.position.key)) is None:
            return []
        if one.voted_at is None:
            if not self._is_collected(one, now):
                return []
            one.voted_at = now
            one.votes[self._own] = have = tuple(sorted(one.offers))
            return [SendVote(VoteHeader(round=self.position.round, base=self.position.digest, have=have))]
        if not self._is_voted(one, now):
            return []
        chosen = self._chosen(one)
        if missing := sorted(chosen - one.offers.keys()):
            one.asked.update(missing)
            return [Fetch(*entry, self._holders(one, entry)) for entry in missing]
        return [Apply(tuple(one.offers[entry] for entry in sorted(chosen)))]

    @staticmethod
    def _holders(one: _Round, entry: tuple[str, str]) -> tuple[str, ...]:
        """Members that have voted for it, its own home first."""
        voters = [voter for voter, have in one.votes.items() if entry in have]
        return tuple(sorted(voters, key=lambda voter: (voter != entry[0], voter)))

    def _is_collected(self, one: _Round, now: float) -> bool:
        if not one.offers:
            return bool(one.votes) and self._is_over(now, (one.first_vote_at or now) + self._vote_s / 2)
        told = {peer_id for have in one.votes.values() for peer_id, _ in have}  # they come when they are asked for
        here = {peer_id for peer_id, _ in one.offers} | one.refused | told
        if here >= self._expected():
            return True
        ends_at = one.began_at + self._patience_s
        if one.first_vote_at is not None:
            ends_at = min(ends_at, one.first_vote_at + self._vote_s / 2)
        return self._is_over(now, ends_at)

    def _is_voted(self, one: _Round, now: float) -> bool:
        waited_for = {peer_id for peer_id, theirs in self.others.items() if theirs and self._is_with(theirs)}
        if self._somebody_is_done() or one.votes.keys() >= waited_for:
            return True
        return self._is_over(now, (one.voted_at or now) + self._vote_s)

    def _is_over(self, now: float, at: float) -> bool:
        self.wakes_at = at
        return now >= at

    def _is_with(self, theirs: Position) -> bool:
        return self.position is not None and theirs.key == self.position.key

    def _somebody_is_done(self) -> bool:
        """True if a member has ended this round."""
        own = self.position
        return own is not None and any(theirs is not None and own.is_before(theirs) for theirs in self.others.values())

    def _expected(self) -> set[str]:
        """Members whose difference is waited for: those at the same state, or just before it."""
        own = self.position
        assert own is not None
        theirs = {
            peer_id
            for peer_id, position in self.others.items()
            if position is not None
            and (self._is_with(position) or (position.round == own.round - 1 and position.is_before(own)))
        }
        return theirs | {self._own} if self.trains else theirs

    def _chosen(self, one: _Round) -> set[tuple[str, str]]:
        """The union of the votes, without members that sent two differences, and without those that nobody sends."""
        lost = one.asked - one.offers.keys()
        entries = {entry for have in one.votes.values() for entry in have} - lost
        senders = [peer_id for peer_id, _ in entries]
        single = {(peer_id, sha256) for peer_id, sha256 in entries if senders.count(peer_id) == 1}
        return set(sorted(single)[:MAX_CHOSEN])

    def _adopt(self, now: float) -> Adopt | None:
        """The state to take from others, if theirs counts more."""
        theirs = {peer_id: one for peer_id, one in self.others.items() if one is not None}
        groups: dict[Key, list[str]] = {}
        for peer_id, position in theirs.items():
            if self._refused.get(position.digest, now) <= now:
                groups.setdefault(position.key, []).append(peer_id)
        own = self.position
        if own is not None:
            groups = {key: one for key, one in groups.items() if self._counts_more(theirs[one[0]], [*theirs.values()])}
        if not groups:
            return None
        best = max(groups, key=lambda key: (len(groups[key]), key[0], _reversed(key[1])))
        position = theirs[groups[best][0]]
        parts_at = None
        if own is not None and not own.is_on_the_way_of(position):
            common = own.common_round(position)
            parts_at = -1 if common is None else common
        return Adopt(position, tuple(sorted(groups[best])), parts_at)

    def is_outvoted(self, now: float) -> bool:
        """True if others have a state that counts more."""
        return self._adopt(now) is not None

    def split_off(self) -> set[str]:
        """Members on another way: their state isn't before or after the own one."""
        own = self.position
        return {
            peer_id
            for peer_id, theirs in self.others.items()
            if own is not None and theirs is not None and not theirs.is_on_the_way_of(own)
        }

    def missing(self) -> set[str]:
        """Members whose difference this round waits for."""
        one = None if self.position is None else self._rounds.get(self.position.key)
        if one is None or one.voted_at is not None:
            return set()
        return self._expected() - {peer_id for peer_id, _ in one.offers} - one.refused - {self._own}

    def _counts_more(self, position: Position, theirs: list[Position]) -> bool:
        """True if this state of others is to be taken."""
        own = self.position
        assert own is not None
        if position.key == own.key or position.is_before(own):
            return False
        if own.is_before(position):
            if position.round == own.round + 1 and self._can_end_itself():
                return False
            ahead = sum(one.key == position.key or position.is_before(one) for one in theirs)
            return 2 * ahead >= len(theirs) + 1
        sides = [(one.is_on_the_way_of(position), one.is_on_the_way_of(own)) for one in theirs]
        for_them, for_own, undecided = (
            sides.count((True, False)),
            1 + sides.count((False, True)),
            sides.count((True, True)),
        )
        if for_them > for_own + undecided:
            return True
        count_them = for_them, position.round, _reversed(position.digest)
        return not undecided and count_them > (for_own, own.round, _reversed(own.digest))

    def _can_end_itself(self) -> bool:
        """True if the own round isn't over, and others have told what they chose: then `step` ends it."""
        one = None if self.position is None else self._rounds.get(self.position.key)
        return one is not None and bool(one.votes)


def _reversed(digest: str) -> int:
    return -int(digest, 16)
