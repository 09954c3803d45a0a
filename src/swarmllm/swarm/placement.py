"""The blocks that a server should hold, when it joins and while it serves (Petals paper, section 3.2).

Used by the server, and by `benchmarks/swarm_simulator.py`. Pure: it only looks at a snapshot. The caller puts its own
current record into the snapshot, because the DHT may still hold an older one.

How an ONLINE server moves, and its record meanwhile:

    record                 what happens next
    ONLINE                 once per update period, at a random phase: `plan_move` → announce the target as `claim`
    ONLINE + claim         wait twice as long as an announcement takes to be seen, look again: `claim_stands`?
                             no → ONLINE without claim, until the next period;  yes → drain
    LEAVING + claim        sessions end or are handed over, no new ones come
    JOINING at the target  loads the new blocks, then ONLINE

"Better" has one meaning here: the blocks' throughputs, sorted from the weakest up, compare greater. Every move makes an
otherwise unchanged swarm better, so moves come to an end.

Why wait twice as long: if the claims of two servers depend on each other, the server that looks later then sees that
the other's claim stood. With a shorter wait, both could leave blocks that only the two of them hold.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from swarmllm.config import BALANCE_QUALITY
from swarmllm.data_structures import ServerInfo, ServerState, Span, SwarmSnapshot

ASSUMED_THROUGHPUT = 1.0
"""Tokens per second of servers that announced none. They still count as holders of their blocks."""
UNITS_PER_TOKEN = 1000
"""Throughputs are added as whole thousandths. Their sums are equal in any order, so no rounding error causes a move."""


def block_throughputs(snapshot: SwarmSnapshot) -> list[float]:
    """Tokens per second that the swarm offers at each block.

    Loading servers count, leaving ones don't. A server with a claim that helps the swarm counts at its target.
    """
    return [total / UNITS_PER_TOKEN for total in _Swarm.of(snapshot).totals]


def choose_span(snapshot: SwarmSnapshot, num_blocks: int) -> Span:
    """The `num_blocks` contiguous blocks for a joining server: the worst served ones, the first of equals.

    Comparing sorted lists, weakest block first, prefers the window that lifts the bottleneck. The smallest total would
    not always do that.
    """
    num_blocks = min(num_blocks, snapshot.num_blocks)
    starts = range(snapshot.num_blocks - num_blocks + 1)
    return weakest_window(_Swarm.of(snapshot).totals, [Span(start, start + num_blocks) for start in starts])


def weakest_window(totals: Sequence[float], spans: Iterable[Span]) -> Span:
    """The span with the lowest throughputs, compared from the weakest block up; the first of equals."""
    return min(spans, key=lambda span: (sorted(totals[span.start : span.end]), span))


def describe_choice(snapshot: SwarmSnapshot, span: Span) -> str:
    """Say in words how well the swarm serves the blocks that a joining server has chosen."""
    number = len(snapshot.servers)
    servers = f"{number} other server{'' if number == 1 else 's'}"
    missing = set(snapshot.missing_blocks()).intersection(span)
    if len(missing) == len(span):
        return f"nobody serves them yet ({servers})"
    if missing:
        return f"nobody serves {len(missing)} of them yet ({servers})"
    if len(span) == snapshot.num_blocks:
        return f"the whole model, which {servers} can run already"
    return f"all blocks are served ({servers}), these at the least speed"


def plan_move(snapshot: SwarmSnapshot, peer_id: str, *, balance_quality: float = BALANCE_QUALITY) -> Span | None:
    """The blocks, as many as now, that the server `peer_id` should claim and move to; None = stay.

    It stays unless all of this holds:

    - it is ONLINE and has no claim yet;
    - another ONLINE server that doesn't move holds each of its blocks. If the swarm has a gap, nobody can generate
      anyway: then blocks that it also holds at the target need no other server;
    - the move makes the swarm better;
    - the swarm has a gap (a block with throughput 0), or the bottleneck is below `balance_quality` times its value
      after this server moves and all others settle as well. One server of a thousand never lifts a bottleneck by
      much: what counts is whether moving at all pays.
    """
    view = _View.of(snapshot, peer_id, heeds=_everybody)
    if view is None or view.claim is not None or not view.is_unbalanced(balance_quality):
        return None
    target = view.best_target()
    return target if target is not None and view.pays(target, balance_quality) else None


def claim_stands(snapshot: SwarmSnapshot, peer_id: str, *, balance_quality: float = BALANCE_QUALITY) -> bool:
    """True if the server may follow its claim, now that it sees the claims of others.

    Claims are applied in the order of peer ids, so that servers that see the same decide alike. Claims of smaller ids
    count as done if they still make the swarm better after those before them. Claims of greater ids don't count. A
    server on its way counts at its target already. If several claim the same gap, exactly one claim stands.
    """
    view = _View.of(snapshot, peer_id, heeds=lambda other: other.peer_id < peer_id)
    if view is None or (target := view.claim) is None:
        return False
    return view.allows(target) and view.improves(target) and view.pays(target, balance_quality)


def _everybody(_: ServerInfo) -> bool:
    return True


class _Place(NamedTuple):
    """One server at the blocks where it counts for placement."""

    start: int
    end: int
    units: int
    """Its throughput."""
    server: ServerInfo
    stays: bool
    """ONLINE, and not about to move."""


@dataclass(frozen=True)
class _Swarm:
    """The servers of a snapshot at the blocks where they count, and the resulting throughput of each block."""

    places: list[_Place]
    totals: list[int]

    @classmethod
    def of(cls, snapshot: SwarmSnapshot, heeds: Callable[[ServerInfo], bool] = _everybody) -> "_Swarm":
        """Moving servers count at their targets. So do servers with a claim, if `heeds` accepts it and it helps."""
        places: list[_Place] = []
        claims: list[tuple[str, int, Span]] = []
        steps = [0] * (snapshot.num_blocks + 1)
        num_blocks, joining, online = snapshot.num_blocks, ServerState.JOINING, ServerState.ONLINE
        for server in snapshot.servers:
            start, end, claim, stays = server.start, server.end, server.claim, server.state == online
            if not stays and server.state != joining:
                if claim is None:
                    continue
                start, end = claim
            end = min(end, num_blocks)
            if start >= end:
                continue
            if stays and claim is not None and claim[1] <= num_blocks and heeds(server):
                stays = False
                claims.append((server.peer_id, len(places), Span(*claim)))
            units = int((server.throughput or ASSUMED_THROUGHPUT) * UNITS_PER_TOKEN) or 1
            places.append(_Place(start, end, units, server, stays))
            steps[start] += units
            steps[end] -= units
        totals = list(accumulate(steps))[:-1]
        for _, index, target in sorted(claims):
            place = places[index]
            after = _moved(totals, place, target)
            if _is_better(after, totals):
                totals = after
                places[index] = place._replace(start=target.start, end=target.end)
        return cls(places, totals)


def _moved(totals: list[int], place: _Place, target: Span) -> list[int]:
    """The totals after the server leaves its place for `target`."""
    totals = totals.copy()
    for block in range(place.start, place.end):
        totals[block] -= place.units
    for block in target:
        totals[block] += place.units
    return totals


def _is_better(totals: list[int], than: list[int]) -> bool:
    """The order of all comparisons here: the weakest block first, then the second weakest, and so on."""
    return sorted(totals) > sorted(than)


@dataclass(frozen=True)
class _View:
    """The swarm as seen by one server that could move."""

    place: _Place
    totals: list[int]
    """Throughputs with this server where it is now."""
    others: list[_Place]
    """Other servers that could move."""

    @classmethod
    def of(cls, snapshot: SwarmSnapshot, peer_id: str, heeds: Callable[[ServerInfo], bool]) -> "_View | None":
        """None if the server couldn't move."""
        swarm = _Swarm.of(snapshot, lambda server: server.peer_id != peer_id and heeds(server))
        own = next((place for place in swarm.places if place.server.peer_id == peer_id), None)
        if own is None or not own.stays:
            return None
        others = [place for place in swarm.places if place.stays and place is not own]
        return cls(place=own, totals=swarm.totals, others=others)

    @property
    def claim(self) -> Span | None:
        return None if self.place.server.claim is None else Span(*self.place.server.claim)

    @cached_property
    def unshared(self) -> set[int]:
        """Its blocks that no other server is sure to serve while it moves."""
        start, end = self.place.start, self.place.end
        left = set(range(start, end))
        for place in self.others:
            if place.start < end and place.end > start:
                left.difference_update(range(place.start, place.end))
                if not left:
                    break
        return left

    def allows(self, target: Span) -> bool:
        """True if moving there leaves no usable block unserved."""
        start, end = self.place.start, self.place.end
        fits = target.start != start and len(target) == end - start and target.end <= len(self.totals)
        return fits and (
            not self.unshared or (min(self.totals) == 0 and all(block in target for block in self.unshared))
        )

    def improves(self, target: Span) -> bool:
        return _is_better(_moved(self.totals, self.place, target), self.totals)

    def best_target(self) -> Span | None:
        """The span that makes the swarm best. Of equals, the one that shares fewest blocks with the present one."""
        num_blocks = self.place.end - self.place.start
        starts = range(len(self.totals) - num_blocks + 1)
        targets = [span for start in starts if self.allows(span := Span(start, start + num_blocks))]
        if not targets:
            return None
        best = max(
            targets,
            key=lambda span: (
                sorted(_moved(self.totals, self.place, span)),
                abs(span.start - self.place.start),
                -span.start,
            ),
        )
        return best if self.improves(best) else None

    def is_unbalanced(self, balance_quality: float) -> bool:
        """True if the bottleneck is so low that a move could pay if all blocks were served alike in the end."""
        return min(self.totals) * len(self.totals) < sum(self.totals) * balance_quality or min(self.totals) == 0

    def pays(self, target: Span, balance_quality: float) -> bool:
        """True if moving there lifts the bottleneck enough after all others have settled; with a gap, always."""
        bottleneck = min(self.totals)
        if bottleneck == 0:
            return True
        totals = _moved(self.totals, self.place, target)
        return _settle(totals, self.others, lambda: min(totals) * balance_quality > bottleneck)


def _settle(totals: list[int], places: list[_Place], is_enough: Callable[[], bool]) -> bool:
    """Move servers (in `totals`) to the weakest block as long as that helps. True once `is_enough`.

    Servers at the best served blocks go first. A fast approximation of what the servers will do.
    """
    places = list(places)
    moved = True
    while moved and not is_enough():
        moved = False
        weakest = min(totals)
        reserves = ((min(totals[place.start : place.end]) - place.units, i) for i, place in enumerate(places))
        for reserve, index in sorted((pair for pair in reserves if pair[0] > weakest), reverse=True):
            if reserve <= min(totals):
                break
            target = _step_in(totals, places[index])
            if target is None:
                continue
            place = places[index]
            places[index] = place._replace(start=target.start, end=target.end)
            moved = True
            if is_enough():
                return True
    return is_enough()


def _step_in(totals: list[int], place: _Place) -> Span | None:
    """Move one server (in `totals`) to a span around the weakest block if that lifts the bottleneck."""
    weakest = min(totals)
    block, length, units = totals.index(weakest), place.end - place.start, place.units
    if place.start <= block < place.end or min(totals[place.start : place.end]) - units <= weakest:
        return None
    starts = range(max(0, block - length + 1), min(block, len(totals) - length) + 1)
    start = min(starts, key=lambda first: sum(totals[first : first + length]))
    for left in range(place.start, place.end):
        totals[left] -= units
    for entered in range(start, start + length):
        totals[entered] += units
    return Span(start, start + length)
