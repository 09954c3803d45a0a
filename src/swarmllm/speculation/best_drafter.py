"""The drafter that is expected to be the fastest, of several: chosen anew wherever a guess begins.

What is expected, `speculation/planner` says, from how often guesses of each kind were right and what guessing cost. So
where the text repeats itself, n-grams guess, and elsewhere the model's own head does.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from swarmllm.speculation.drafters import MAX_MATCH, Drafter
from swarmllm.speculation.planner import Planner


class BestDrafter:
    """One text's guesses, each by one of its drafters."""

    def __init__(self, drafters: Sequence[Drafter], planner: Planner) -> None:
        self._drafters = drafters
        self._planner = planner
        self._chosen = drafters[0]

    @property
    def name(self) -> str:
        return self._chosen.name

    @contextmanager
    def following(self, model: Any) -> Iterator[None]:
        with ExitStack() as stack:
            for drafter in self._drafters:
                stack.enter_context(drafter.following(model))
            yield

    def extend(self, tokens: Sequence[int]) -> None:
        for drafter in self._drafters:
            drafter.extend(tokens)

    def begin(self) -> bool:
        ready = [drafter for drafter in self._drafters if drafter.begin()]
        if ready:
            self._chosen = min(ready, key=self._seconds_per_token)
        return bool(ready)

    def more(self, count: int) -> list[int]:
        return self._chosen.more(count)

    def kinds(self, count: int) -> list[tuple[int, float]]:
        return self._chosen.kinds(count)

    def _seconds_per_token(self, drafter: Drafter) -> float:
        kinds = drafter.kinds(MAX_MATCH + 1)
        return self._planner.seconds_per_token([self._planner.acceptance(*kind) for kind in kinds], drafter.name)
