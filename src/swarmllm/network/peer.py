"""This process in the swarm: a libp2p daemon, a node of the DHT on it, and streams to other peers.

Server, client and bootstrap peer each make one `Peer`. Errors of hivemind, of the daemon and of the operating system
are translated in this room (here, `network/daemon`, `network/dht`) and nowhere else; what a stream carries is
`network/protocol`, what the DHT holds `network/block_directory`.
"""

import asyncio
import fcntl
import logging
import os
import re
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from swarmllm.errors import ConfigurationError, PeerTimeoutError, PeerUnreachableError, SwarmError
from swarmllm.network._hivemind import P2PDaemonError, PeerID, p2pd_pb2, read_pbmsg_safe, write_pbmsg
from swarmllm.network.daemon import Daemon, check_port_is_free, check_tcp_maddr, parse_known_good
from swarmllm.network.dht import Dht, split_initial_peer
from swarmllm.network.frames import MAX_MESSAGE_BYTES
from swarmllm.network.identity import Identity, is_peer_id
from swarmllm.network.stream import FrameStream

logger = logging.getLogger(__name__)

STREAM_PROTOCOL = "/swarmllm/stream/1"
"""libp2p's name for our streams. Versions are agreed in HELLO, so this one stays."""
CONNECT_TIMEOUT_S = 5.0
STARTUP_TIMEOUT_S = 60.0
"""p2pd starts in a tenth of a second; as a polite process beside many busy ones it took more than 15 s (load 25)."""

DIALLED = re.compile(r"\* \[(\S+)\] (?:dial \S+ \S+: (?:connect: )?)?(.+?)(?= \* \[|$)")
"""What p2pd says of each address: `* [/ip4/…/tcp/…] dial tcp4 …: connect: connection refused`."""
BACKOFF = "dial backoff"
"""Its words for an address that it doesn't dial now, as that failed some seconds ago."""

StreamHandler = Callable[[FrameStream], Awaitable[None]]


class Peer:
    """One member of the swarm. Make it with `Peer.create`, end it with `close()` or `async with`."""

    def __init__(self, identity: Identity) -> None:
        self.peer_id = identity.peer_id
        self._identity = identity
        self._identity_lock: int | None = None
        self._daemon: Daemon | None = None
        self._dht: Dht | None = None
        self._listener: asyncio.Server | None = None
        self._handler: StreamHandler | None = None
        self._streams: set[FrameStream] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    @classmethod
    async def create(
        cls,
        *,
        initial_peers: Sequence[str] = (),
        host_maddrs: Sequence[str] = ("/ip4/127.0.0.1/tcp/0",),
        announce_maddrs: Sequence[str] | None = None,
        identity_path: str | os.PathLike[str] | None = None,
        client_mode: bool = False,
        startup_timeout_s: float = STARTUP_TIMEOUT_S,
    ) -> "Peer":
        """Start the daemon and join the swarm of `initial_peers`, or begin a new one if there are none.

        In client mode the peer listens nowhere and stores nothing for others; it can open streams and read the DHT.
        `announce_maddrs` are the addresses that others shall use, where they differ (NAT, proxies). Without
        `identity_path` the peer id is a new one each time.

        Raises:
            ConfigurationError: an address, the identity file or this machine's clock won't do.
            PeerUnreachableError: none of the initial peers answered.
            PeerTimeoutError: the daemon did not start in time.
        """
        for maddr in initial_peers:
            split_initial_peer(maddr)
        for maddr in host_maddrs:
            check_tcp_maddr(maddr)
        for maddr in announce_maddrs or ():
            check_tcp_maddr(maddr, announced=True)
        if not client_mode:
            for maddr in host_maddrs:
                check_port_is_free(maddr)
        if not logger.isEnabledFor(logging.DEBUG):
            logging.getLogger("hivemind").setLevel(logging.WARNING)

        identity = Identity.load_or_create(identity_path) if identity_path else Identity.generate()
        peer = cls(identity)
        try:
            if identity_path:
                peer._lock_identity(identity_path)
            peer._daemon = await Daemon.start(
                identity,
                host_maddrs=host_maddrs,
                announce_maddrs=announce_maddrs,
                listen=not client_mode,
                timeout_s=startup_timeout_s,
            )
            peer._dht = Dht(peer._daemon, identity, initial_peers, client_mode=client_mode)
            await peer._dht.start()
        except BaseException:
            await peer.close()
            raise
        return peer

    async def __aenter__(self) -> "Peer":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # What this peer is

    @property
    def addrs(self) -> tuple[str, ...]:
        """Where others reach this peer, without the `/p2p/...` part; empty in client mode."""
        return self._running_daemon().addrs

    @property
    def join_maddrs(self) -> tuple[str, ...]:
        """What others give as initial peers to join through this one."""
        return tuple(f"{addr}/p2p/{self.peer_id}" for addr in self.addrs)

    @property
    def daemon_pid(self) -> int:
        """Process id of p2pd."""
        return self._running_daemon().pid

    async def daemon_exited(self) -> None:
        """Return when p2pd has exited, for whatever reason; without it this peer is of no use."""
        if self._daemon is not None:
            await self._daemon.exited()

    def sign(self, data: bytes) -> bytes:
        """This peer's signature; `network/identity.verify` checks it."""
        return self._identity.sign(data)

    # Streams

    async def open_stream(
        self,
        peer_id: str,
        addrs: Sequence[str] = (),
        *,
        timeout_s: float = CONNECT_TIMEOUT_S,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
    ) -> FrameStream:
        """A new stream to that peer, which may be this one, with keepalive.

        Without addresses the swarm is asked for them.

        Raises:
            PeerUnreachableError: the peer can't be dialled, or serves no streams; or this peer's daemon died.
            PeerTimeoutError: it did not answer in time.
        """
        daemon = self._running_daemon()
        if not is_peer_id(peer_id):
            raise PeerUnreachableError(f"{peer_id!r} is no peer id", peer_id)
        target = PeerID.from_base58(peer_id).to_bytes()
        try:
            async with asyncio.timeout(timeout_s):
                if peer_id == self.peer_id:
                    reader, writer = await self._dial_self()
                else:
                    if maddrs := parse_known_good(addrs):
                        await daemon.connect(target, maddrs)
                    reader, writer = await daemon.open_stream(target, STREAM_PROTOCOL)
        except P2PDaemonError as error:
            raise PeerUnreachableError(f"the peer {peer_id} can't be reached: {_reason(error)}", peer_id) from None
        except TimeoutError:
            raise PeerTimeoutError(f"the peer {peer_id} did not answer in {timeout_s:g} s", peer_id) from None
        return self._adopt(peer_id, reader, writer, max_message_bytes)

    async def _dial_self(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """libp2p refuses it, but one server may run two parts of a route: so we come to ourselves as p2pd would."""
        if self._listener is None:
            raise PeerUnreachableError("this peer serves no streams", self.peer_id)
        caller = PeerID.from_base58(self.peer_id).to_bytes()
        try:
            reader, writer = await asyncio.open_unix_connection(self._streams_path)
            await write_pbmsg(writer, p2pd_pb2.StreamInfo(peer=caller, addr=b"", proto=STREAM_PROTOCOL))
        except OSError as error:
            raise PeerUnreachableError(f"this peer can't open a stream to itself: {error}", self.peer_id) from None
        return reader, writer

    async def serve_streams(self, handler: StreamHandler) -> None:
        """Call `handler` for each stream that others open, each in its own task; returns when that is in place.

        A stream is closed when its handler ends. A handler's exception is logged and harms no other stream.

        Raises:
            PeerUnreachableError: the daemon died.
        """
        daemon = self._running_daemon()
        self._handler = handler
        if self._listener is not None:
            return
        path = self._streams_path
        self._listener = await asyncio.start_unix_server(self._accept, path)
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await daemon.take_streams(path, STREAM_PROTOCOL)
        except (P2PDaemonError, TimeoutError) as error:
            raise PeerUnreachableError(f"this peer's p2pd takes no streams: {error}", self.peer_id) from None

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._closed:
            writer.transport.abort()
            return
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        caller = p2pd_pb2.StreamInfo()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await read_pbmsg_safe(reader, caller)
        except (OSError, EOFError, TimeoutError, ValueError) as error:
            logger.debug("a stream ended before it began: %r", error)
            writer.transport.abort()
            return
        except asyncio.CancelledError:
            writer.transport.abort()
            raise
        peer_id = PeerID(caller.peer).to_base58()
        stream = self._adopt(peer_id, reader, writer, MAX_MESSAGE_BYTES)
        handler = self._handler
        try:
            if handler is not None:
                await handler(stream)
        except SwarmError as error:
            logger.info("the stream of %s ended: %s", peer_id, error)
        except Exception:
            logger.exception("a stream of %s failed; the others go on", peer_id)
        finally:
            await stream.close()

    def _adopt(
        self, peer_id: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, max_message_bytes: int
    ) -> FrameStream:
        stream = FrameStream.over(peer_id, reader, writer, max_message_bytes=max_message_bytes)
        self._streams.add(stream)
        stream.gone.add_done_callback(lambda _: self._streams.discard(stream))
        stream.start_keepalive()
        return stream

    # The DHT, for network/block_directory

    async def dht_store(self, texts: dict[str, str], expiration: float) -> bool:
        """Store one text of this peer under each key. True if every key was taken by some node.

        Raises:
            PeerUnreachableError: this peer is closed, or its daemon died.
        """
        return await self._running_dht().store(texts, expiration)

    async def dht_read(self, key: str) -> dict[str, str]:
        """The texts under this key, by the peer id of their owner.

        Raises:
            PeerUnreachableError: this peer is closed, or its daemon died.
        """
        texts = await self._running_dht().read(key)
        self._running_daemon()  # an answer from a dying daemon is no answer
        return texts

    def is_neighbour(self, peer_id: str) -> bool:
        """Whether this is a node of the DHT that was met lately, which nobody can invent."""
        return self._dht is not None and self._dht.knows(peer_id)

    def prefer_records(self, prefers: Callable[[str], bool]) -> None:
        """Keep the records of these peers before those of others, when there are too many."""
        self._running_dht().prefers = prefers

    @property
    def _streams_path(self) -> Path:
        """Where p2pd hands us the streams that others open."""
        return self._running_daemon().directory / "streams.sock"

    def _running_daemon(self) -> Daemon:
        if self._daemon is None or self._closed:
            raise PeerUnreachableError("this peer is closed", self.peer_id)
        if self._daemon.has_exited:
            raise PeerUnreachableError("this peer's p2pd has exited", self.peer_id)
        return self._daemon

    def _running_dht(self) -> Dht:
        self._running_daemon()
        if self._dht is None:
            raise PeerUnreachableError("this peer has not joined yet", self.peer_id)
        return self._dht

    # Start and end

    def _lock_identity(self, path: str | os.PathLike[str]) -> None:
        """Two daemons of one peer id take each other's connections, with errors that nobody understands."""
        self._identity_lock = os.open(Path(path).expanduser(), os.O_RDONLY)
        try:
            fcntl.flock(self._identity_lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigurationError(
                f"the identity {path} is in use by another process; give each server a file of its own"
            ) from None

    async def close(self) -> None:
        """Close all streams and end the daemon. Returns within a few seconds; may be repeated."""
        if self._closed:
            return
        self._closed = True
        if self._listener is not None:
            self._listener.close()
        for stream in tuple(self._streams):
            stream.abort()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(stream.gone for stream in tuple(self._streams)))
        if self._dht is not None:
            await self._dht.close()
        if self._daemon is not None:
            await self._daemon.end()
        if self._identity_lock is not None:
            os.close(self._identity_lock)


def _reason(error: P2PDaemonError) -> str:
    """What p2pd says, without its preambles: address by address if it has dialled some."""
    said = " ".join(str(error).split())
    dialled = [f"{addr}: {'failed a moment ago' if why == BACKOFF else why}" for addr, why in DIALLED.findall(said)]
    return ", ".join(dialled) or said
