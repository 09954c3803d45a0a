"""Streams that are opened to this server: greeted, counted, and served until they end.

Called by `p2p/peer` for each stream that a client or a predecessor opens.
"""

import logging
from collections.abc import Callable

from swarmllm.errors import ServerOverloadedError, SwarmError, WeightsMismatchError
from swarmllm.network.wire.protocol import FrameStream, HelloHeader, send_error, welcome
from swarmllm.network.wire.stream import Intake
from swarmllm.server.peers.links import Links
from swarmllm.server.streams.access import Access
from swarmllm.server.streams.dispatcher import Dispatcher
from swarmllm.version import __version__

logger = logging.getLogger(__name__)


class StreamHandler:
    """Serves streams; one object for the whole server."""

    def __init__(
        self,
        access: Access,
        links: Links,
        *,
        fingerprint: str,
        compression: str = "none",
        greeted: Callable[[HelloHeader, str], None] = lambda *_: None,
    ) -> None:
        """`greeted` is told what each client has said, and its peer id."""
        self.access, self._greeted = access, greeted
        self._links = links
        self._fingerprint = fingerprint
        self._compression = compression
        self._intake = Intake()

    async def __call__(self, stream: FrameStream) -> None:
        """Serve one stream until it ends."""
        peer_id, access = stream.peer_id, self.access
        try:
            access.limits.enter(peer_id)
        except ServerOverloadedError as error:
            await send_error(stream, error)
            return
        try:
            stream.count_in(self._intake)
            greeting = await welcome(stream, software=__version__, info=access.greeting(), accept=self._accept)
            access.limits.standing.note(peer_id, greeting.contribution)
            self._greeted(greeting, peer_id)
            stream.expect(access.large_messages_of(peer_id))
            await Dispatcher(stream, access, self._links, self._compression).serve()
        except SwarmError as error:
            logger.debug("stream of %s ended: %s", peer_id, error)
        finally:
            access.limits.leave(peer_id)

    def _accept(self, hello: HelloHeader) -> None:
        if hello.fingerprint and hello.fingerprint != self._fingerprint:
            raise WeightsMismatchError(
                f"this server holds another checkpoint (fingerprint {self._fingerprint[:12]}) than yours "
                f"({hello.fingerprint[:12]})"
            )
