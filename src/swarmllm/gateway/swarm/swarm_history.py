"""The last hour of a swarm, by the minute, and what goes through it now. No I/O.

`swarm_picture` feeds it with looks and shows what comes out. Servers announce now and then how many tokens they have
computed; what was done between two announcements counts as done evenly. What a block has done is what all its servers
have, and what the swarm has is what its least block has: a token passes all of them, so a server that boasts changes
little.
"""

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from swarmllm.data_structures import ServerInfo, Span

MINUTE_S = 60.0
NUM_MINUTES = 60
QUIET_S = 45.0
"""Without news of its count, a server does nothing: three times as long as it takes to announce itself, as usual."""


@dataclass
class _Minute:
    """What is known of one."""

    number: int
    """Minutes since 1970."""
    blocks: int
    """Blocks that were served all the time."""
    events: Counter[str] = field(default_factory=Counter)
    tokens: dict[int, float] = field(default_factory=dict)
    """By block."""


@dataclass
class _Count:
    """How many tokens a server had computed when it last said so, and how fast it was until then."""

    tokens: int
    at: float
    per_s: float | None = None


class SwarmHistory:
    """What has happened since the gateway began to look, at most an hour."""

    def __init__(self, needed: Sequence[Span]) -> None:
        """`needed`: the blocks that servers have to run."""
        self._needed = [block for span in needed for block in span]
        self._minutes: deque[_Minute] = deque(maxlen=NUM_MINUTES)
        self._counts: dict[str, _Count] = {}
        self._now: float | None = None

    def take(self, servers: Iterable[ServerInfo], missing: Sequence[int], kinds: Iterable[str], at: float) -> None:
        """One look at that time (Unix seconds): who is there, which blocks are missing, kinds of what has happened."""
        minute = self._minute(at, len(self._needed) - len(missing))
        minute.events.update(kinds)
        servers = tuple(servers)
        known = self._counts
        self._counts = {server.peer_id: self._counted(server, known.get(server.peer_id), at) for server in servers}
        by_block: dict[int, float] = {}
        for server in servers:
            _add(by_block, server.span, self._counts[server.peer_id].per_s or 0.0)
        self._now = self._through_all(by_block)

    def _minute(self, at: float, served: int) -> _Minute:
        number = int(at // MINUTE_S)
        if not self._minutes or self._minutes[-1].number < number:
            first = self._minutes[-1].number + 1 if self._minutes else number
            for one in range(max(first, number - NUM_MINUTES + 1), number + 1):
                self._minutes.append(_Minute(one, served))
        self._minutes[-1].blocks = min(self._minutes[-1].blocks, served)
        return self._minutes[-1]

    def _counted(self, server: ServerInfo, known: _Count | None, at: float) -> _Count:
        if known is None or server.tokens_served < known.tokens:  # new, or begun anew
            return _Count(server.tokens_served, at)
        if server.tokens_served > known.tokens and at > known.at:
            per_s = (server.tokens_served - known.tokens) / (at - known.at)
            for minute in self._minutes:
                begin = MINUTE_S * minute.number
                within_s = min(at, begin + MINUTE_S) - max(known.at, begin)
                if within_s > 0:
                    _add(minute.tokens, server.span, per_s * within_s)
            return _Count(server.tokens_served, at, per_s)
        if at - known.at > QUIET_S:
            known.per_s = 0.0
        return known

    def _through_all(self, by_block: dict[int, float]) -> float:
        """Blocks that none has passed are left out: an encoder's aren't run in sessions, which is what is counted."""
        return min((by_block[block] for block in self._needed if by_block.get(block)), default=0.0)

    def tokens_per_s(self, peer_id: str) -> float | None:
        """What this server does now; None if that isn't known yet."""
        count = self._counts.get(peer_id)
        return None if count is None or count.per_s is None else round(count.per_s, 1)

    @property
    def tokens_per_s_now(self) -> float | None:
        """What goes through all blocks now; None before two announcements."""
        known = any(count.per_s is not None for count in self._counts.values())
        return None if self._now is None or not known else round(self._now, 1)

    def as_json(self) -> list[dict[str, Any]]:
        """The minutes, oldest first; of the last one, which isn't over, what is done now."""
        shown = [
            {
                "at": int(MINUTE_S * minute.number),
                "blocks": minute.blocks,
                "tokens_per_s": round(self._through_all(minute.tokens) / MINUTE_S, 1),
                **{kind: minute.events[kind] for kind in ("joined", "left", "lost")},
            }
            for minute in self._minutes
        ]
        if shown:
            shown[-1]["tokens_per_s"] = self.tokens_per_s_now or 0.0
        return shown


def _add(by_block: dict[int, float], span: Span, amount: float) -> None:
    for block in span:
        by_block[block] = by_block.get(block, 0.0) + amount
