"""Peers that were met, kept on disk: where to join a swarm whose initial peers are all gone.

People know a swarm by its initial peers, so who was met there is kept under their ids. An entry counts as much as an
initial peer that somebody named: it is dialled, and proves its id. `p2p/dht_node` asks it when nobody else answers.
"""

import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from swarmllm.errors import ConfigurationError
from swarmllm.files import replace_file
from swarmllm.network.p2p.addresses import split_initial_peer
from swarmllm.network.relay.wire import is_circuit

logger = logging.getLogger(__name__)

MAX_SWARMS = 32
MAX_PEERS = 16
"""Peers of a swarm that are kept: the ones that were met last."""
MAX_ADDRS = 3
MAX_AGE_S = 30 * 86400.0
MAX_BYTES = 1 << 20
"""A larger file isn't one of these."""
RENEWAL_S = 600.0
"""Seconds until it is written again, though nobody new was met."""


class AddressBook:
    """The file's part about one swarm. Any number of processes share the file; who writes last is right."""

    def __init__(self, path: Path, initial_peers: Iterable[str], clock: Callable[[], float] = time.time) -> None:
        """`initial_peers` are peer ids."""
        self.path = path
        self._swarms = tuple(dict.fromkeys(initial_peers))
        self._clock = clock
        self._met: dict[str, tuple[float, list[str]]] = {}
        self._written_at = 0.0
        self._writing = threading.Lock()

    def note(self, peer_id: str, addrs: Sequence[str]) -> bool:
        """This peer was reached, and says that it has these addresses. Returns whether it is time to `write()`."""
        direct = [addr for addr in addrs if not is_circuit(addr)][:MAX_ADDRS]
        if not self._swarms or not direct or peer_id in self._swarms:
            return False
        now, is_new = self._clock(), peer_id not in self._met
        self._met[peer_id] = now, direct
        self._met = _newest(self._met, MAX_PEERS, now)
        if not is_new and now - self._written_at < RENEWAL_S:
            return False
        self._written_at = now
        return True

    def peers(self) -> list[tuple[str, str]]:
        """Peer ids and addresses, the last met first."""
        found: dict[str, tuple[float, list[str]]] = {}
        for swarm in self._swarms:
            found.update(self._read().get(swarm, {}))
        found = _newest({**found, **self._met}, MAX_PEERS, self._clock())
        return [(peer_id, addr) for peer_id, (_, addrs) in found.items() for addr in addrs]

    def write(self) -> None:
        """Add what was noted. Blocks; what fails is logged."""
        with self._writing:
            kept, now = self._read(), self._clock()
            for swarm in self._swarms:
                kept[swarm] = _newest({**kept.get(swarm, {}), **self._met}, MAX_PEERS, now)
            last = {swarm: max((at for at, _ in peers.values()), default=0.0) for swarm, peers in kept.items()}
            swarms = sorted((swarm for swarm in kept if kept[swarm]), key=lambda swarm: -last[swarm])[:MAX_SWARMS]
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                replace_file(self.path, json.dumps({swarm: kept[swarm] for swarm in swarms}), durable=False)
            except OSError as error:
                logger.warning("peers that were met can't be kept: %s", error)

    def _read(self) -> dict[str, dict[str, tuple[float, list[str]]]]:
        """What the file says, but for what makes no sense."""
        try:
            if self.path.stat().st_size > MAX_BYTES:
                raise ValueError("it is too large")
            swarms = json.loads(self.path.read_text())
            return {
                str(swarm): {peer_id: entry for peer_id, said in peers.items() if (entry := _entry(peer_id, said))}
                for swarm, peers in swarms.items()
            }
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, AttributeError, RecursionError) as error:
            logger.warning("%s is not read: %s", self.path, error)
            return {}


def _entry(peer_id: str, said: Any) -> tuple[float, list[str]] | None:
    try:
        met_at, addrs = said
        for addr in addrs:
            split_initial_peer(f"{addr}/p2p/{peer_id}")
        return float(met_at), [str(addr) for addr in addrs[:MAX_ADDRS]]
    except (ConfigurationError, OverflowError, TypeError, ValueError):
        return None


def _newest(peers: dict[str, tuple[float, list[str]]], number: int, now: float) -> dict[str, tuple[float, list[str]]]:
    fresh = [(at, peer_id) for peer_id, (at, _) in peers.items() if now - MAX_AGE_S < at <= now]
    return {peer_id: peers[peer_id] for _, peer_id in sorted(fresh, reverse=True)[:number]}
