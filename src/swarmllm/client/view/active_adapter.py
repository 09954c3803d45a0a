"""The version that a client uses of the adapter in `ClientConfig.active_adapter`, and which servers lack it.

Servers announce adapters as `name@digest`, so that two versions of one are told apart. A client uses one version for as
long as it lives: what a session has in its caches was computed with it. Used by `view/routes`.
"""

import os
from pathlib import Path

from swarmllm.data_structures import SwarmSnapshot


class ActiveAdapter:
    """The choice, once made, stays."""

    def __init__(self, wanted: str | None) -> None:
        is_directory = os.path.isdir(wanted or "")  # noqa: PTH112 - Path fails if the name is too long for a file
        self.wanted = Path(wanted).resolve().name if wanted and is_directory else wanted
        self.version: str | None = None
        """The version as servers announce it; None: no adapter is wanted, or no route has been found yet."""

    def choose(self, snapshot: SwarmSnapshot) -> str | None:
        """The version in use, or else the one that most blocks are served with; None if there is none."""
        if self.version is not None or self.wanted is None:
            return self.version
        blocks: dict[str, set[int]] = {}
        for server in snapshot.online():
            for name in server.adapters:
                if self.wanted in (name, name.rpartition("@")[0]):
                    blocks.setdefault(name, set()).update(server.span)
        return max(sorted(blocks), key=lambda name: len(blocks[name]), default=None)

    def lacked_by(self, snapshot: SwarmSnapshot) -> frozenset[str]:
        """Peer ids of servers that are of no use."""
        if self.wanted is None:
            return frozenset()
        version = self.choose(snapshot)
        return frozenset(server.peer_id for server in snapshot.servers if version not in server.adapters)

    def keep(self, snapshot: SwarmSnapshot) -> None:
        """A route has been found: from now on this version and no other."""
        self.version = self.choose(snapshot)
