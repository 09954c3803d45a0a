"""This process in the swarm: a libp2p daemon, a node of the DHT on it, and streams to other peers.

Servers, clients and bootstrap peers each make one `Peer`, which relays for others if asked to. Errors of hivemind, of
the daemon and of the operating system are translated in this room (in `daemon` and `dht_node`, too) and nowhere else.
`wire/protocol` defines what a stream carries, `p2p/block_directory` what the DHT holds, `relay/service` what a relay
does.

`Dialler` opens streams. libp2p's daemon dials all addresses of a peer, those through relays half a second later, and
uses its connection for all further streams. It takes half a minute to notice that a circuit through a frozen relay is
dead, so a peer behind a silent relay is dialled again. `Incoming` accepts streams that other peers open at one
protocol, each in its own task. A peer has one for messages and one for the relay. Streams for messages leave the daemon
when they are used, if `p2p/direct` can take them over.
"""

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path

from swarmllm.errors import PeerTimeoutError, PeerUnreachableError, SwarmError
from swarmllm.network.p2p._hivemind import P2PDaemonError, PeerID, p2pd_pb2, read_pbmsg_safe, write_pbmsg
from swarmllm.network.p2p.addresses import check_addresses, hosts_of, is_loopback, pack_addrs
from swarmllm.network.p2p.daemon import Daemon, reason_of
from swarmllm.network.p2p.dht_node import Dht
from swarmllm.network.p2p.direct import DirectDialler, Door
from swarmllm.network.p2p.identity import Identity, is_peer_id, lock_identity
from swarmllm.network.p2p.reachability import Reachability, RelayPeer
from swarmllm.network.relay.messages import HOP, STOP, came_from, is_circuit
from swarmllm.network.relay.service import BUFFER_BYTES, ByteStream, Caller, RelayRules, RelayService
from swarmllm.network.wire.frames import MAX_MESSAGE_BYTES
from swarmllm.network.wire.stream import FrameStream, abort_transport

logger = logging.getLogger(__name__)

STREAM_PROTOCOL = "/swarmllm/stream/1"
"""libp2p's name for our streams. HELLO agrees on versions, so this name stays."""
STREAM_SOCKET = "streams.sock"
"""The socket on which p2pd hands over streams that others open."""
CONNECT_TIMEOUT_S = 5.0
END_TIMEOUT_S = 5.0
"""Longest wait for tasks and streams when a peer is closed. Assumed: they are cancelled, and end in milliseconds."""

StreamHandler = Callable[[FrameStream], Awaitable[None]]

CIRCUIT_S = 3.0
"""More time if the peer may be behind a relay: the relay is dialled first, and then asks the peer. Assumed."""
MAX_SILENT = 1024
"""Most peers behind silent relays to remember."""

HAND_OVER_S = 5.0
"""For the daemon to take over the protocol, and to say whose stream one is."""

Handler = Callable[[Caller, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Peer:
    """One member of the swarm. Make it with `Peer.create`, end it with `close()` or `async with`."""

    def __init__(self, identity: Identity) -> None:
        self.peer_id = identity.peer_id
        self._identity = identity
        self._identity_lock: int | None = None
        self._daemon: Daemon | None = None
        self._dht: Dht | None = None
        self._reachability: Reachability | None = None
        self.relay: RelayService | None = None
        """Relays for peers that can't reach each other. Refuses everybody unless told to relay."""
        self._incoming: list[Incoming] = []
        self._handler: StreamHandler | None = None
        self._streams: set[FrameStream] = set()
        self._dialler: Dialler | None = None
        self._direct: DirectDialler | None = None
        self._door: Door | None = None
        self._door_place: tuple[tuple[str, ...], int] = (), 0
        """Where the door listens, and its port. Without an address there is none."""
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
        relay: RelayRules | None = None,
        reachability: str = "public",
        address_book: Path | None = None,
        direct_port: int | None = None,
    ) -> "Peer":
        """Start the daemon and join the swarm of `initial_peers`, or begin a new one without them.

        In client mode the peer listens nowhere and stores nothing for others. `announce_maddrs` are addresses for
        others, if they differ (NAT, proxies). Without `identity_path` the peer id is new each time. Without `relay`
        nobody is relayed. `reachability`: "public", "private", or "auto", which asks some peers. `address_book`: file
        of peers that were met, which are tried if no initial peer answers. `direct_port`: TCP port for direct
        connections. None: any free one, but none at all if `announce_maddrs` are given, because it isn't forwarded
        then. 0: no direct connections, also to others.

        Raises:
            ConfigurationError: an address, the identity file or this machine's clock is unusable.
            PeerUnreachableError: none of the initial peers answered.
            PeerTimeoutError: the daemon did not start in time.
        """
        check_addresses(initial_peers, host_maddrs, announce_maddrs or (), listens=not client_mode)
        peer = cls(Identity.load_or_create(identity_path) if identity_path else Identity.generate())
        if direct_port != 0:
            peer._direct = DirectDialler()
            if not client_mode and (direct_port or not announce_maddrs):
                peer._door_place = hosts_of(host_maddrs), direct_port or 0
        begin = partial(peer._begin, initial_peers, host_maddrs, announce_maddrs, client_mode, relay, address_book)
        looks = reachability == "auto" and not announce_maddrs and not all(map(is_loopback, host_maddrs))
        try:
            if identity_path:
                peer._identity_lock = lock_identity(identity_path)
            found = await begin(hidden=reachability == "private", looks=looks)
            if looks and await found.is_hidden():
                await peer._end()  # to become a client of both DHTs: p2pd can't change that while it runs
                found = await begin(hidden=True, looks=True)
            await found.start()
        except BaseException:
            await peer.close()
            raise
        return peer

    async def _begin(
        self,
        initial_peers: Sequence[str],
        host_maddrs: Sequence[str],
        announce_maddrs: Sequence[str] | None,
        client_mode: bool,
        relay: RelayRules | None,
        address_book: Path | None,
        *,
        hidden: bool,
        looks: bool,
    ) -> Reachability:
        if not logger.isEnabledFor(logging.DEBUG):
            logging.getLogger("hivemind").setLevel(logging.WARNING)
        self._daemon = await Daemon.start(
            self._identity,
            host_maddrs=host_maddrs,
            announce_maddrs=announce_maddrs,
            listen=not client_mode,
            hidden=hidden,
        )
        self._dialler = Dialler(self._daemon, STREAM_PROTOCOL)
        await self._start_relay(None if hidden else relay)
        asks_only, book = client_mode or hidden, address_book
        self._dht = Dht(self._daemon, self._identity, initial_peers, client_mode=asks_only, address_book=book)
        await self._dht.start(hidden=looks)
        self._reachability = Reachability(self._daemon, self._dht, self.peer_id, hidden=hidden, looks=looks)
        return self._reachability

    async def __aenter__(self) -> "Peer":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # Properties of this peer

    @property
    def addrs(self) -> tuple[str, ...]:
        """Addresses of this peer, without the `/p2p/...` end. Those through relays come first. Empty in client mode.

        They change with its relays and with this machine's networks.
        """
        daemon = self._running_daemon()
        return daemon.addrs if self._reachability is None else self._reachability.addrs

    @property
    def is_hidden(self) -> bool:
        """True if others can't dial this peer and reach it through relays only."""
        return self._reachability is not None and self._reachability.hidden

    @property
    def join_maddrs(self) -> tuple[str, ...]:
        """Addresses that others use as initial peers to join through this one, or through its own initial peers."""
        if self.is_hidden:
            return tuple(f"{addr}/p2p/{peer_id}" for peer_id, addr in self._running_dht().initial_peers)
        return tuple(f"{addr}/p2p/{self.peer_id}" for addr in self.addrs)

    def find_relays(self, find: Callable[[], Sequence[RelayPeer]]) -> None:
        """Ask these peers for a reservation as well, after the initial peers, if nobody can dial this peer."""
        if self._reachability is not None:
            self._reachability.find_relays = find

    @property
    def num_streams(self) -> int:
        """Open streams, to this peer and from it."""
        return len(self._streams)

    @property
    def num_relayed_streams(self) -> int:
        """Open streams that pass through a relay."""
        return sum(stream.through_relay for stream in self._streams)

    @property
    def num_direct_streams(self) -> int:
        """Open streams that don't pass through p2pd any more."""
        return sum(stream.is_moved for stream in self._streams)

    @property
    def daemon_pid(self) -> int:
        """Process id of p2pd."""
        return self._running_daemon().pid

    async def daemon_exited(self) -> None:
        """Return when p2pd has exited for any reason. Without it this peer is useless."""
        if self._daemon is not None:
            await self._daemon.exited()

    def sign(self, data: bytes) -> bytes:
        """Sign data as this peer. `p2p/identity.verify` checks it."""
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
        """Open a stream with keepalive to that peer, which may be this one.

        Without addresses the swarm is asked for them.

        Raises:
            PeerUnreachableError: the peer can't be dialled, or serves no streams; or this peer's daemon died.
            PeerTimeoutError: it did not answer in time.
        """
        self._running_daemon()
        if not is_peer_id(peer_id):
            raise PeerUnreachableError(f"{peer_id!r} is not a peer id", peer_id)
        if peer_id == self.peer_id or self._dialler is None:
            ends = Caller(peer_id, "", through_relay=False), *await self._dial_self()
        else:
            ends = await self._dialler.open(peer_id, addrs, timeout_s)
            if self._dht is not None:
                self._dht.met(peer_id, addrs)
        stream, caller = self._adopt(*ends, max_message_bytes), ends[0]
        if self._direct is not None and caller.host and not caller.through_relay:
            stream.take_offer = partial(self._direct.take_offer, stream, caller.host)
        return stream

    async def _dial_self(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """libp2p refuses to dial itself, but one server may run two pieces of a route: connect to ourselves as p2pd
        would."""
        if self._handler is None:
            raise PeerUnreachableError("this peer serves no streams", self.peer_id)
        caller = PeerID.from_base58(self.peer_id).to_bytes()
        try:
            reader, writer = await asyncio.open_unix_connection(self._running_daemon().directory / STREAM_SOCKET)
            await write_pbmsg(writer, p2pd_pb2.StreamInfo(peer=caller, addr=b"", proto=STREAM_PROTOCOL))
        except OSError as error:
            raise PeerUnreachableError(f"this peer can't open a stream to itself: {error}", self.peer_id) from None
        return reader, writer

    async def serve_streams(self, handler: StreamHandler) -> None:
        """Call `handler` for each stream that others open, each in its own task. Returns when that is in place.

        A stream is closed when its handler ends. A handler's exception is logged and harms no other stream.

        Raises:
            PeerUnreachableError: the daemon died.
            ConfigurationError: the port for direct connections is taken.
        """
        daemon = self._running_daemon()
        is_first, self._handler = self._handler is None, handler
        if is_first:
            hosts, port = self._door_place
            self._door = Door.open(daemon.directory, hosts, port) if hosts else None
            await self._take(Incoming(daemon, STREAM_SOCKET, STREAM_PROTOCOL, self._serve))

    async def serve_protocol(self, protocol: str, handler: Handler) -> None:
        """Call `handler` for each stream that others open at another protocol than that of messages.

        It gets the caller, with the address that it comes from, and plain bytes.

        Raises:
            PeerUnreachableError: the daemon died.
        """
        name = f"other{len(self._incoming)}.sock"
        await self._take(Incoming(self._running_daemon(), name, protocol, handler))

    async def open_protocol(
        self, protocol: str, peer_id: str, addrs: Sequence[str], *, timeout_s: float = CONNECT_TIMEOUT_S
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Open a stream of plain bytes at another protocol.

        Raises:
            PeerUnreachableError: the peer can't be dialled, or doesn't serve it; or this peer's daemon died.
            PeerTimeoutError: it did not answer in time.
        """
        _, reader, writer = await Dialler(self._running_daemon(), protocol).open(peer_id, addrs, timeout_s)
        return reader, writer

    async def _take(self, incoming: "Incoming", **options: int) -> None:
        self._incoming.append(incoming)
        await incoming.start(**options)

    async def _serve(self, caller: Caller, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        stream = self._adopt(caller, reader, writer, MAX_MESSAGE_BYTES)
        if self._door is not None and caller.host and not caller.through_relay:
            stream.make_offer = partial(self._door.offer, stream)
        try:
            if self._handler is not None:
                await self._handler(stream)
        finally:
            await stream.close()

    async def _start_relay(self, rules: RelayRules | None) -> None:
        """Replace p2pd's own relay, which would serve everybody. Do so even if this peer relays for nobody."""
        daemon = self._running_daemon()

        async def open_stop(peer_id: str) -> ByteStream:
            try:
                return await daemon.open_stream(PeerID.from_base58(peer_id).to_bytes(), STOP, BUFFER_BYTES)
            except P2PDaemonError as error:
                raise PeerUnreachableError(f"the peer {peer_id} can't be reached: {error}", peer_id) from None

        self.relay = RelayService(open_stop, rules)
        await self._take(Incoming(daemon, "hop.sock", HOP, self.relay.serve), buffer_bytes=BUFFER_BYTES)

    def _adopt(
        self, other: Caller, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, max_message_bytes: int
    ) -> FrameStream:
        stream = FrameStream.over(other.peer_id, reader, writer, max_message_bytes=max_message_bytes)
        stream.host = "" if other.through_relay else other.host
        if other.through_relay and self._dialler is not None:
            stream.through_relay = True
            stream.on_silence = partial(self._dialler.fell_silent, other.peer_id)
        self._streams.add(stream)
        stream.gone.add_done_callback(lambda _: self._streams.discard(stream))
        stream.start_keepalive()
        return stream

    # The DHT, for p2p/block_directory

    async def dht_store(self, texts: dict[str, str], expiration: float) -> bool:
        """Store one text of this peer under each key. True if some node took every key.

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
        self._running_daemon()  # an answer of a dying daemon doesn't count
        return texts

    def is_neighbour(self, peer_id: str) -> bool:
        """True if this is a node of the DHT that was met lately, which nobody can fake."""
        return self._dht is not None and self._dht.knows(peer_id)

    @property
    def is_alone(self) -> bool:
        """True if none of the swarm's nodes that were met answers any more."""
        return self._dht is None or self._dht.is_alone

    def join_by(self, initial_peers: Sequence[str]) -> None:
        """Use these as initial peers as well, the next time that this peer is alone."""
        self._running_dht().add_initial_peers(initial_peers)

    async def meet(self, maddrs: Sequence[str]) -> None:
        """Greet these peers, although others are known: they may know a part of the swarm that this peer doesn't.

        Raises:
            PeerUnreachableError: this peer is closed, or its daemon died.
        """
        await self._running_dht().meet(maddrs)

    def prefer_records(self, prefers: Callable[[str], bool]) -> None:
        """Keep the records of these peers before those of others when there are too many."""
        self._running_dht().prefers = prefers

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

    def abort_streams(self) -> None:
        """End all streams at once. The peer goes on, and new streams may come."""
        for stream in tuple(self._streams):
            stream.abort()

    async def close(self) -> None:
        """Close all streams and end the daemon. Takes a few seconds at most; may be repeated."""
        if self._closed:
            return
        self._closed = True
        self.abort_streams()
        await self._end()
        if self._identity_lock is not None:
            os.close(self._identity_lock)

    async def _end(self) -> None:
        """End everything that `_begin` began."""
        try:
            async with asyncio.timeout(END_TIMEOUT_S):
                await self._end_traffic()
        except TimeoutError:
            logger.warning("the tasks on p2pd did not end within %g s; stopping p2pd anyway", END_TIMEOUT_S)
        finally:
            if self._daemon is not None:
                await self._daemon.end()

    async def _end_traffic(self) -> None:
        if self._reachability is not None:
            await self._reachability.close()
        if self._direct is not None:
            await self._direct.close()
        if self._door is not None:
            await self._door.close()
        await asyncio.gather(*(incoming.close() for incoming in self._incoming))
        await asyncio.gather(*(stream.gone for stream in tuple(self._streams)))
        self._incoming.clear()
        if self._dht is not None:
            await self._dht.close()


class Dialler:
    """Opens streams at one protocol."""

    def __init__(self, daemon: Daemon, protocol: str) -> None:
        self._daemon, self._protocol = daemon, protocol
        self._silent: dict[str, None] = {}  # a set in the order of time

    def fell_silent(self, peer_id: str) -> None:
        """Note that a stream to this peer through a relay ended in silence. The relay may be frozen."""
        self._silent[peer_id] = None
        if len(self._silent) > MAX_SILENT:
            del self._silent[next(iter(self._silent))]

    async def open(
        self, peer_id: str, addrs: Sequence[str], timeout_s: float
    ) -> tuple[Caller, asyncio.StreamReader, asyncio.StreamWriter]:
        """Open a stream to that peer; also return how it is reached. Without addresses the swarm is asked for them.

        Raises:
            PeerUnreachableError: the peer can't be dialled, or serves no such streams; or this peer's daemon died.
            PeerTimeoutError: it did not answer in time.
        """
        target = PeerID.from_base58(peer_id).to_bytes()
        may_be_relayed = any(map(is_circuit, addrs))
        if may_be_relayed:
            timeout_s += CIRCUIT_S
        try:
            async with asyncio.timeout(timeout_s):
                if peer_id in self._silent:
                    del self._silent[peer_id]
                    await self._daemon.disconnect(target)
                if packed := pack_addrs(addrs):
                    await self._daemon.connect(target, packed)
                reader, writer, addr = await self._daemon.open_stream_told(target, self._protocol)
        except P2PDaemonError as error:
            raise PeerUnreachableError(f"the peer {peer_id} can't be reached: {reason_of(error)}", peer_id) from None
        except TimeoutError:
            if may_be_relayed:
                self.fell_silent(peer_id)
            raise PeerTimeoutError(f"the peer {peer_id} did not answer in {timeout_s:g} s", peer_id) from None
        return other_end(peer_id, addr), reader, writer


class Incoming:
    """Accepts streams at `protocol`. The daemon connects to the socket `name` in its directory for each."""

    def __init__(self, daemon: Daemon, name: str, protocol: str, handler: Handler) -> None:
        self._daemon, self._protocol, self._handler = daemon, protocol, handler
        self.path = daemon.directory / name
        self._listener: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    async def start(self, *, buffer_bytes: int = 1 << 16) -> None:
        """Accept streams from now on, also streams that the daemon took before.

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
            abort_transport(writer.transport)  # its stream may have left it

    async def close(self) -> None:
        """Accept no more streams, and end the handlers."""
        self._closed = True
        if self._listener is not None:
            self._listener.close()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def other_end(peer_id: str, addr: bytes) -> Caller:
    """The peer at the other end. If its address makes no sense, it counts as behind a relay, which has fewer rights."""
    try:
        host, through_relay = came_from(addr)
    except ValueError:
        host, through_relay = "", True
    return Caller(peer_id, host, through_relay)
