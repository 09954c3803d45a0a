"""Plans of how far to run ahead of the known text: pure decisions from measured acceptance, round trips and computing.

Guesses travel in chunks. A chunk is one step through the servers; at most `depth` chunks are under way. A longer chunk
costs computing. A deeper pipeline costs waste when a guess is wrong: servers still compute useless chunks while the
next step waits behind them. Both cost nothing while the network is the slowest part. So the best plan lies between one
token at a time and a full pipe. `speculation/sampling_loop` reports its measurements; a plan is the fastest of a few
dozen under the model of `seconds_per_token`.

There is no clock and no randomness here; times are passed in.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

CHUNKS = (1, 2, 4, 8, 16, 32)
DEPTHS = (1, 2, 3, 4, 6, 8)
HORIZON_TOKENS = 128
"""Guesses beyond this count as wrong: no text is copied forever."""
NEVER = 1e-3
MIN_GAIN = 1.05
"""Assumed: a smaller gain is not worth the servers' work."""
RECENT_STEPS = 32
"""Latency is the minimum over this many steps: all but the network only makes a step longer. On a busy machine many in
a row are longer (with 8, loopback was taken for a slow network at a load of 20 on two cores)."""
MIN_STEPS = 2
"""Plain steps that must have been seen before the first plan."""
AVERAGED_STEPS = 16
"""Computing times are averaged over about this many steps."""
FURTHER_TOKEN_SHARE = 0.25
"""Cost of a further token of a step, as a share of the first. Assumed until measured; 0.01 to 0.3 on CPUs."""
PRIOR_WEIGHT = 2.0
"""Assumed: a prior counts as much as this many guesses."""
MEMORY_TOKENS = 64.0
"""Assumed: acceptance is estimated from about this many of the last guesses of a kind."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Guesses per step, and steps under way. Without guesses there is one token per round trip."""

    chunk: int = 0
    depth: int = 0

    def __bool__(self) -> bool:
        return self.chunk > 0


PLAIN = Plan()


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds that steps take."""

    round_trip_s: float
    """A step of one token while nothing else is under way, with the client's own time."""
    token_s: float
    """Added by each further token, over all servers."""
    stage_s: float
    """A step of one token on the busiest server, or on the client: the minimum between two steps."""
    stage_token_s: float
    """Added by each further token."""
    draft_s: float = 0.0
    """A guess of one token."""

    def step_s(self, num_tokens: int) -> float:
        """Time from sending a step of `num_tokens` tokens to its result."""
        return self.round_trip_s + (num_tokens - 1) * self.token_s

    def spacing_s(self, num_tokens: int) -> float:
        """The minimum between two such steps."""
        return max(self.stage_s + (num_tokens - 1) * self.stage_token_s, num_tokens * self.draft_s)


def survival(acceptance: Sequence[float]) -> list[float]:
    """Probabilities that the first 1, 2, … `HORIZON_TOKENS` guesses are all right.

    Args:
        acceptance: probabilities that each guess is right if all before it are; the last one repeats.
    """
    alive, result = 1.0, []
    for idx in range(HORIZON_TOKENS):
        alive *= acceptance[min(idx, len(acceptance) - 1)]
        result.append(alive)
    return result


def seconds_per_token(plan: Plan, alive: Sequence[float], costs: Costs) -> float:
    """Expected seconds per token of a run: from the first guess after a known token to the first wrong guess.

    Args:
        alive: as from `survival`.
    """
    if not plan:
        return costs.step_s(1)
    chunk, depth = plan.chunk, plan.depth
    first_s = costs.step_s(1 + chunk) + chunk * costs.draft_s
    spacing_s = costs.spacing_s(chunk)
    lap_s = max(first_s, depth * spacing_s)
    # Steps under way when a guess turns out wrong keep the busiest server from the next run's first step.
    wasted_s = max(0.0, depth * spacing_s - first_s)
    seconds, before, verdict_s = 0.0, 1.0, first_s
    for idx, end in enumerate(range(chunk, len(alive) + 1, chunk)):
        verdict_s = first_s + idx // depth * lap_s + idx % depth * spacing_s
        after = alive[end - 1]
        seconds += (before - after) * (verdict_s + wasted_s)
        before = after
        if after < NEVER:
            break
    return (seconds + before * verdict_s) / (1.0 + sum(alive))


def best_plan(acceptance: Sequence[float], costs: Costs, *, max_tokens: int = HORIZON_TOKENS) -> Plan:
    """The fastest plan for at most `max_tokens` guesses; `PLAIN` unless it is faster by `MIN_GAIN`."""
    alive = survival(acceptance)[:max_tokens]
    best, best_s = PLAIN, costs.step_s(1) / MIN_GAIN
    for chunk in CHUNKS:
        for depth in DEPTHS:
            if chunk * depth > max(max_tokens, chunk):
                break
            plan = Plan(min(chunk, max_tokens), depth)
            plan_s = seconds_per_token(plan, alive, costs)
            if plan_s < best_s:
                best, best_s = plan, plan_s
        if chunk >= max_tokens:
            break
    return best


@dataclass(slots=True)
class _Average:
    """The average of about the last `AVERAGED_STEPS` values; exact for fewer."""

    value: float = 0.0
    count: int = 0

    def add(self, value: float) -> None:
        self.count = min(self.count + 1, AVERAGED_STEPS)
        self.value += (value - self.value) / self.count


@dataclass(slots=True)
class _Acceptance:
    """Right guesses of one kind; newer ones count more."""

    right: float = 0.0
    total: float = 0.0

    def add(self, right: int, wrong: int) -> None:
        keep = max(0.0, 1 - (right + wrong) / MEMORY_TOKENS)
        self.right = self.right * keep + right
        self.total = self.total * keep + right + wrong

    def estimate(self, prior: float) -> float:
        return (self.right + PRIOR_WEIGHT * prior) / (self.total + PRIOR_WEIGHT)


@dataclass
class Planner:
    """Plans for one swarm, from measurements of it and of its texts."""

    min_latency_s: float = 0.0
    """Run ahead only if a round trip takes at least this much longer than its computing."""
    drafter: str = ""
    """The name of the drafter that guesses now."""
    _latencies_s: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))
    _compute_s: _Average = field(default_factory=_Average)
    _busiest_s: _Average = field(default_factory=_Average)
    _further_s: _Average = field(default_factory=_Average)
    _further_busiest_s: _Average = field(default_factory=_Average)
    _client_s: _Average = field(default_factory=_Average)
    _draft_s: dict[str, _Average] = field(default_factory=dict)
    """By the name of the drafter."""
    _accepted: dict[int, _Acceptance] = field(default_factory=dict)

    # ------------------------------------------------------------------ measurements

    def new_text(self) -> None:
        """Begin a text: acceptance in the last one counts half."""
        for acceptance in self._accepted.values():
            acceptance.right /= 2
            acceptance.total /= 2

    def saw_step(
        self,
        num_tokens: int,
        computes_s: Sequence[float],
        *,
        took_s: float | None = None,
        client_s: float | None = None,
    ) -> None:
        """Note a step that has come back.

        Args:
            computes_s: computing of each server.
            took_s: time from its sending to its result, if nothing else was under way.
            client_s: time on the client, before and after that.
        """
        total_s, busiest_s = sum(computes_s), max(computes_s, default=0.0)
        if took_s is not None:
            self._latencies_s.append(max(0.0, took_s - total_s))
        if client_s is not None:
            self._client_s.add(client_s)
        if num_tokens == 1:
            self._compute_s.add(total_s)
            self._busiest_s.add(busiest_s)
        elif self._compute_s.count:
            self._further_s.add(max(0.0, total_s - self._compute_s.value) / (num_tokens - 1))
            self._further_busiest_s.add(max(0.0, busiest_s - self._busiest_s.value) / (num_tokens - 1))

    def saw_draft(self, num_tokens: int, took_s: float) -> None:
        """Note that this many tokens were guessed in this time."""
        self._draft_s.setdefault(self.drafter, _Average()).add(took_s / num_tokens)

    def saw_verdict(self, kind: int, right: int, wrong: int) -> None:
        """Count right and wrong guesses of this kind; guesses after the first wrong one don't count."""
        self._accepted.setdefault(kind, _Acceptance()).add(right, wrong)

    # ------------------------------------------------------------------ decisions

    @property
    def costs(self) -> Costs | None:
        """The costs of steps; None before enough has been measured."""
        if self._compute_s.count < MIN_STEPS or not self._latencies_s:
            return None
        compute_s, busiest_s = self._compute_s.value, self._busiest_s.value
        further_s, further_busiest_s = FURTHER_TOKEN_SHARE * compute_s, FURTHER_TOKEN_SHARE * busiest_s
        if self._further_s.count:
            further_s, further_busiest_s = self._further_s.value, self._further_busiest_s.value
        return Costs(
            round_trip_s=min(self._latencies_s) + compute_s + self._client_s.value,
            token_s=further_s,
            stage_s=max(busiest_s, self._client_s.value),
            stage_token_s=further_busiest_s,
            draft_s=self._draft_s.get(self.drafter, _Average()).value,
        )

    @property
    def latency_pays(self) -> bool:
        """True if the swarm is known to be far enough away."""
        return self.costs is not None and min(self._latencies_s) >= self.min_latency_s

    def acceptance(self, kind: int, prior: float) -> float:
        """The share of right guesses of this kind; `prior` is assumed before any was seen."""
        return self._accepted.get(kind, _Acceptance()).estimate(prior)

    def seconds_per_token(self, acceptance: Sequence[float], drafter: str) -> float:
        """Expected time with this drafter's guesses under the best plan, given the probabilities that they are right.

        Before the costs of steps are known, it is the share of wrong guesses: the surest drafter is best.
        """
        costs = self.costs
        if costs is None:
            return 1 - acceptance[0]
        costs = replace(costs, draft_s=self._draft_s.get(drafter, _Average()).value)
        return seconds_per_token(best_plan(acceptance, costs), survival(acceptance), costs)

    def plan(self, acceptance: Sequence[float], max_tokens: int) -> Plan:
        """Plan at most `max_tokens` guesses now, given the probabilities that the next ones are right."""
        costs = self.costs
        if costs is None or not self.latency_pays or max_tokens < 1 or not acceptance:
            return PLAIN
        return best_plan(acceptance, costs, max_tokens=min(max_tokens, HORIZON_TOKENS))
