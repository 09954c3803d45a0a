"""Streams that other peers open at one protocol: each is handed to a handler, in its own task.

`p2p/peer` has one of these for the streams of messages and one for those of the relay.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from swarmllm.errors import PeerUnreachableError, SwarmError
from swarmllm.network.p2p._hivemind import P2PDaemonError, PeerID, p2pd_pb2, read_pbmsg_safe
from swarmllm.network.p2p.daemon import Daemon
from swarmllm.network.relay.service import Caller
from swarmllm.network.relay.wire import came_from

logger = logging.getLogger(__name__)

HAND_OVER_S = 5.0
"""For the daemon to take the protocol over, and to say whose stream one is."""

Handler = Callable[[Caller, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Incoming:
    """The daemon connects to the socket `name` in its directory for each stream at `protocol`."""

    def __init__(self, daemon: Daemon, name: str, protocol: str, handler: Handler) -> None:
        self._daemon, self._protocol, self._handler = daemon, protocol, handler
        self.path = daemon.directory / name
        self._listener: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    async def start(self, *, buffer_bytes: int = 1 << 16) -> None:
        """Take the streams from now on, also those that the daemon itself took before.

        Raises:
            PeerUnreachableError: the daemon died, or refuses.
        """
        self._listener = await asyncio.start_unix_server(self._accept, self.path, limit=buffer_bytes)
        try:
            async with asyncio.timeout(HAND_OVER_S):
                await self._daemon.take_streams(self.path, self._protocol)
        except (P2PDaemonError, TimeoutError) as error:
            raise PeerUnreachableError(f"this peer's p2pd takes no streams: {error}") from None

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._closed:
            writer.transport.abort()
            return
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        said = p2pd_pb2.StreamInfo()
        try:
            async with asyncio.timeout(HAND_OVER_S):
                await read_pbmsg_safe(reader, said)
            await self._handler(other_end(PeerID(said.peer).to_base58(), said.addr), reader, writer)
        except SwarmError as error:
            logger.info("the stream of %s ended: %s", PeerID(said.peer).to_base58(), error)
        except (OSError, EOFError, TimeoutError) as error:
            logger.debug("a stream ended before it began: %r", error)
        except Exception:
            logger.exception("a stream of %s failed; the others go on", PeerID(said.peer).to_base58())
        finally:
            writer.transport.abort()

    async def close(self) -> None:
        """Take no more, and end the handlers."""
        self._closed = True
        if self._listener is not None:
            self._listener.close()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def other_end(peer_id: str, addr: bytes) -> Caller:
    """The peer there; one whose address makes no sense counts as one behind a relay, which may do less."""
    try:
        host, through_relay = came_from(addr)
    except ValueError:
        host, through_relay = "", True
    return Caller(peer_id, host, through_relay)
