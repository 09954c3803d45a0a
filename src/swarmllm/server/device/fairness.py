"""Whose turn it is, where several clients want the device: deficit round robin in seconds of it.

Pure; `scheduler` asks whom to take first, and says what it has cost. After Shreedhar and Varghese (1995), with what a
forward costs charged when it has run, since nobody knows it before.
"""

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass

SMOOTHING = 0.1


@dataclass(frozen=True, slots=True)
class Account:
    """On whom the device's time is spent."""

    name: str
    """A client's peer id; of clients of somebody who serves, the id of that server: all of them have one turn."""
    comes_first: bool = False
    """Whether it may take most of the device from those who don't."""


HOUSE = Account("")
"""What a server does for itself."""


class RoundRobin:
    """Accounts in turns, each with the seconds that it may still take, or owes."""

    def __init__(self) -> None:
        self._balances: OrderedDict[str, float] = OrderedDict()  # whose turn is next, first
        self._quantum_s = 0.02
        """What an account gets with each turn: what it took at a time, smoothed; before that a guess."""

    def __len__(self) -> int:
        return len(self._balances)

    def order(self, waiting: Collection[str]) -> list[str]:
        """Those who wait, whose turn is first to last; whoever owes seconds comes after the others, until turns have
        repaid them."""
        for name in waiting:
            self._balances.setdefault(name, 0.0)
        if waiting and (least_debt := min(-self._balances[name] for name in waiting)) > 0:
            for name in self._balances:  # the turns until one of them owes nothing, at once
                self._balances[name] += least_debt
        for name in [name for name, balance in self._balances.items() if balance >= 0 and name not in waiting]:
            del self._balances[name]  # nobody saves turns up
        while waiting and (first := next(iter(self._balances.items())))[1] < 0:
            self._balances[first[0]] += self._quantum_s
            self._balances.move_to_end(first[0])
        in_turns = [name for name in self._balances if name in waiting]
        return sorted(in_turns, key=lambda name: self._balances[name] < 0)

    def charge(self, name: str, seconds: float) -> None:
        """Note what it has taken."""
        self._quantum_s += SMOOTHING * (seconds - self._quantum_s)
        if name in self._balances:
            self._balances[name] -= seconds
