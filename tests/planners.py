"""Planners of guesses for tests: one notes what becomes of guesses, one also runs ahead however near all is."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from swarmllm.speculation.planner import PLAIN, Plan, Planner


class NotedPlanner(Planner):
    """Counts guesses by their kind: those that were judged, and those that were right."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.judged: Counter[int] = Counter()
        self.right: Counter[int] = Counter()

    def saw_verdict(self, kind: int, right: int, wrong: int) -> None:
        super().saw_verdict(kind, right, wrong)
        self.judged[kind] += right + wrong
        self.right[kind] += right


class FixedPlanner(NotedPlanner):
    """The same plan whatever was seen."""

    latency_pays = True

    def __init__(self, fixed: Plan | None = None) -> None:
        super().__init__()
        self.fixed = fixed or Plan(2, 4)

    def plan(self, acceptance: Sequence[float], max_tokens: int) -> Plan:
        return Plan(min(self.fixed.chunk, max_tokens), self.fixed.depth) if max_tokens > 0 else PLAIN
