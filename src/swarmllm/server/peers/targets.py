"""Whom this server dials because a client says so: servers of the swarm, where they say themselves that they are.

A client names the next server of its chain (LINK, FORWARD, BACKWARD). Dialled is nobody but a server that is in the
directory, at the addresses of its own signed record and no others; what failed is said in one sentence, whatever it
was. So nobody can have this server look at addresses and ports for him. Called by `peers/links`.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable

from swarmllm.data_structures import ServerInfo, SwarmSnapshot
from swarmllm.errors import PeerUnreachableError, SwarmError
from swarmllm.network.wire.messages import Target
from swarmllm.network.wire.protocol import FrameStream

logger = logging.getLogger(__name__)

REFUSAL = "the next server can't be reached from here"
"""The same for one that is unknown, refuses, doesn't answer or serves another checkpoint."""
FRESH_S = 300.0
"""How long a record is taken for where its server is, unless a dial fails. Not shorter: repairs wait for the answer,
and a look takes seconds when it asks the very node whose freezing made the repair necessary."""
LOOK_AGAIN_S = 1.0
"""Seconds between two looks into the directory for somebody who isn't known; clients can name as many as they like."""
TIMEOUT_S = 7.0
"""Seconds for all of it; below the 8 s of those who ask, so that they say the same of one that never answers."""
FAILURES_PER_MINUTE = 60
"""Dials that may fail; then nobody is dialled for clients until the minute is over, and they relay. Assumed: more than
die in a minute of those to whom one server passes on."""


class Targets:
    """`look` gives the swarm as it is now, `open_stream` dials."""

    def __init__(
        self,
        look: Callable[[], Awaitable[SwarmSnapshot]],
        open_stream: Callable[[ServerInfo], Awaitable[FrameStream]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._look = look
        self._open_stream = open_stream
        self._clock = clock
        self._seen: dict[str, tuple[ServerInfo, float]] = {}
        """Servers, and when they were read of."""
        self._looked_at = float("-inf")
        self._looking = asyncio.Lock()
        self._failed_at: deque[float] = deque(maxlen=FAILURES_PER_MINUTE)

    def see(self, servers: Iterable[ServerInfo]) -> None:
        """Take note of records that were read, by whomever: a repair then finds its servers without a look."""
        now = self._clock()
        self._seen |= {server.peer_id: (server, now) for server in servers}
        self._seen = {peer_id: seen for peer_id, seen in self._seen.items() if now - seen[1] < FRESH_S}

    async def open(self, target: Target) -> FrameStream:
        """A stream to that server, after the greetings.

        Raises:
            PeerUnreachableError: there is none to be had, for whatever reason.
        """
        try:
            async with asyncio.timeout(TIMEOUT_S):
                server = await self._find(target.peer_id)
                if server is not None and not self._has_failed_often():
                    return await self._dial(server)
        except (SwarmError, TimeoutError):
            pass
        raise PeerUnreachableError(REFUSAL, target.peer_id)

    def _has_failed_often(self) -> bool:
        return len(self._failed_at) == FAILURES_PER_MINUTE and self._clock() - self._failed_at[0] < 60

    async def _dial(self, server: ServerInfo) -> FrameStream:
        try:
            return await self._open_stream(server)
        except BaseException as error:  # also if whoever waits has lost patience
            self._failed_at.append(self._clock())
            self._seen.pop(server.peer_id, None)  # it may be somewhere else by now
            logger.info("%s, whom a client has named, can't be reached: %s", server.peer_id, str(error) or "no answer")
            raise

    async def _find(self, peer_id: str) -> ServerInfo | None:
        asked_at = self._clock()
        if (known := self._known(peer_id)) is not None:
            return known
        async with self._looking:
            if self._looked_at < asked_at:
                await asyncio.sleep(self._looked_at + LOOK_AGAIN_S - self._clock())
                looked_at = self._clock()
                self.see((await self._look()).servers)
                self._looked_at = looked_at
        return self._known(peer_id)

    def _known(self, peer_id: str) -> ServerInfo | None:
        server, seen_at = self._seen.get(peer_id, (None, 0.0))
        return server if self._clock() - seen_at < FRESH_S else None
