"""How many may take part in something: of one peer, of one host and in all. Pure.

Peer ids cost nothing, addresses little: so the last number is what bounds memory, and those before it are what one
guest can't take away from all others.
"""

from collections import Counter
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Caller:
    """Who opened a stream, as this peer's daemon says."""

    peer_id: str
    host: str
    """Address of the machine, or of the router or relay before it; "": not told."""
    through_relay: bool


@dataclass(eq=False)
class Places:
    """Those that are left of a kind."""

    of_peer: int
    of_host: int
    in_all: int
    _taken: Counter[tuple[str, str]] = field(default_factory=Counter)

    def __len__(self) -> int:
        return self._taken["all", ""]

    def take(self, caller: Caller) -> bool:
        """Whether there is one for this caller; if so, it is taken until `leave`."""
        keys = self._keys(caller)
        if any(self._taken[key] >= most for key, most in zip(keys, self._limits(), strict=True)):
            return False
        self._taken.update(keys)
        return True

    def leave(self, caller: Caller) -> None:
        """Give back one that was taken."""
        self._taken.subtract(self._keys(caller))
        self._taken = +self._taken

    def _limits(self) -> tuple[int, int, int]:
        return self.of_peer, self.of_host, self.in_all

    def _keys(self, caller: Caller) -> tuple[tuple[str, str], ...]:
        return ("peer", caller.peer_id), ("host", caller.host), ("all", "")
