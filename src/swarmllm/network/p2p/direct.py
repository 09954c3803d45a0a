"""Direct connections: streams leave p2pd when they are used, if the other side is near and can be dialled.

A stream through two daemons costs half a millisecond and two more copies on each way. So a server has a `Door`: a TCP
port of its own, and a socket for programs of the same user on the same machine. Its greeting, which libp2p encrypts and
authenticates, offers the door and a ticket for this very stream. The side that opened the stream dials while the stream
is in use (`dial`), and then the stream moves (`wire/stream`). If anything fails, it stays where it is.

    dialler → door   MAGIC and the ticket's name (a hash), at most 2 s after connecting; anything else is hung up on
    both             TLS 1.3; the dialler checks the certificate against the hash in the offer. Not on the same machine,
                     where the file system proves the user
    dialler → door   the ticket
    door → dialler   ACCEPTED
    dialler → server MOVED on the old connection, which the server answers there

Nobody without a ticket, and so without a stream that the server has accepted, gets any answer or any cryptography. A
ticket works once (`Door._knocked` takes it), and only while its stream lives (`Door.offer`). So all rules for a stream
(its peer id, lists, limits) hold for its direct connection, and the door needs no rules of its own about peers.
"""

import asyncio
import errno
import hashlib
import hmac
import logging
import os
import re
import secrets
import socket
import ssl
import stat
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from swarmllm.errors import ConfigurationError
from swarmllm.files import PREFIX, create_private_file
from swarmllm.network.relay.service import ByteStream, Caller, Places
from swarmllm.network.wire.messages import TICKET_BYTES, DirectOffer
from swarmllm.network.wire.stream import FrameStream

logger = logging.getLogger(__name__)

MAGIC = b"swarmllm direct\n"
NAME_BYTES = 16
ACCEPTED = b"\x01"
SOCKET = "direct.sock"
"""The door's socket in the private directory of its process."""

NEAR_S = 0.02
"""Longest round trip to a peer that is dialled. On a longer way the daemons cost next to nothing, and their connection
knows the network's speed already, whereas a new one begins slowly. Assumed."""
KNOCK_S = 2.0
"""Most seconds for the first bytes of a connection. The dialler sends them as soon as TCP has connected."""
HANDSHAKE_S = 5.0
"""Most seconds for TLS, the ticket and the answer."""
MOVE_S = 30.0
"""After the ticket, until the peer must have moved. Later the connection has no place any more: it counts with its
stream, which can have no third one."""
REST_S = 0.002
"""Least time between two connections that are accepted, so that a flood takes some percent of the event loop's time.
The rest of it waits in the kernel."""
OUT_OF_FILES_S = 1.0
"""The same after the operating system had no room for one."""
NO_ROOM = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
"""Errors of this machine. All others belong to one dialler, who must not keep the door closed for the rest."""
MAX_UNPROVEN = 128
"""Most connections to which no stream has moved yet. The door hangs up on any more."""
MAX_UNPROVEN_PER_HOST = 64
RETRY_S = 60.0
"""Seconds until a peer is dialled directly again after a failure."""
MAX_FAILED = 1024
"""Most peers with failures to remember."""
PORT_TRIES = 10
BACKLOG = 100
BUFFER_BYTES = 16 << 10


class DirectDialler:
    """Moves streams that this peer has opened to direct connections."""

    def __init__(self) -> None:
        self._failed_at: dict[str, float] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def take_offer(self, stream: FrameStream, host: str, offer: DirectOffer) -> bool:
        """Dial the peer of this stream, in the background. `host`: the other end of the present connection.

        Returns False if it should be asked again later: the peer is far away, or could not be dialled in `RETRY_S`.
        """
        loop, round_trip_s = asyncio.get_running_loop(), stream.liveness.least_round_trip_s
        if round_trip_s is None or round_trip_s > NEAR_S:
            return False
        if loop.time() - self._failed_at.get(stream.peer_id, -RETRY_S) < RETRY_S:
            return False
        task = loop.create_task(self._move(stream, host, offer), name="dial a direct connection")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        stream.gone.add_done_callback(lambda _: task.cancel())
        return True

    async def _move(self, stream: FrameStream, host: str, offer: DirectOffer) -> None:
        try:
            reader, writer = await dial(host, offer)
        except (OSError, EOFError, TimeoutError) as error:
            if not stream.closed:
                logger.debug("%s can't be reached directly: %r", stream.peer_id, error)
                self._note_failure(stream.peer_id)
            return
        stream.on_silence = partial(self._note_failure, stream.peer_id)
        stream.move(reader, writer, first=True)

    def _note_failure(self, peer_id: str) -> None:
        """Use p2pd alone for a while: a firewall may be in the way, also of a connection that it let begin."""
        self._failed_at.pop(peer_id, None)
        self._failed_at[peer_id] = asyncio.get_running_loop().time()
        if len(self._failed_at) > MAX_FAILED:
            del self._failed_at[next(iter(self._failed_at))]

    async def close(self) -> None:
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class Door:
    """Accepts direct connections. Make it with `Door.open`, end it with `close()`."""

    def __init__(self, directory: Path, listeners: Sequence[socket.socket], port: int) -> None:
        """`directory` is private to this user."""
        self.port = port
        self._directory = directory
        self._listeners = listeners
        self._tls, self._certificate = _server_tls(directory)
        self._tickets: dict[bytes, tuple[bytes, FrameStream]] = {}
        self._places = Places(MAX_UNPROVEN, MAX_UNPROVEN_PER_HOST, MAX_UNPROVEN)
        self._tasks: set[asyncio.Task[None]] = set()
        self._resting: dict[socket.socket, asyncio.TimerHandle] = {}
        for listener in listeners:
            self._listen(listener)

    @classmethod
    def open(cls, directory: Path, hosts: Sequence[str], port: int) -> "Door":
        """Listen at these addresses of this machine, on this port (0: any free one), and on a socket in `directory`.

        Raises:
            ConfigurationError: that isn't possible.
        """
        try:
            listeners = _listen(hosts, port)
        except OSError as error:
            raise ConfigurationError(
                f"can't listen for direct connections at {', '.join(hosts)}, port {port}: {error.strerror}; "
                "choose another --direct_port, or 0 for none"
            ) from None
        port = listeners[0].getsockname()[1]
        beside = socket.socket(socket.AF_UNIX)
        beside.bind(os.fspath(directory / SOCKET))
        for listener in (*listeners, beside):
            listener.listen(BACKLOG)
            listener.setblocking(False)
        return cls(directory, (*listeners, beside), port)

    def offer(self, stream: FrameStream) -> DirectOffer:
        """Make the offer that the greeting of one stream carries. Its ticket ends when used, or with the stream."""
        ticket = secrets.token_bytes(TICKET_BYTES)
        name = _name_of(ticket)
        self._tickets[name] = ticket, stream
        stream.gone.add_done_callback(lambda _: self._tickets.pop(name, None))
        return DirectOffer(port=self.port, directory=self._directory.name, certificate=self._certificate, ticket=ticket)

    async def close(self) -> None:
        """Accept no more connections. Streams that have moved go on."""
        for listener in self._listeners:
            asyncio.get_running_loop().remove_reader(listener)
            if (timer := self._resting.pop(listener, None)) is not None:
                timer.cancel()
            listener.close()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _listen(self, listener: socket.socket) -> None:
        self._resting.pop(listener, None)
        asyncio.get_running_loop().add_reader(listener, self._accept, listener)

    def _accept(self, listener: socket.socket) -> None:
        loop, rest_s = asyncio.get_running_loop(), REST_S
        try:
            sock, address = listener.accept()
        except BlockingIOError:
            return  # the dialler has left again
        except OSError as error:
            logger.debug("can't accept a direct connection: %s", error)
            if error.errno in NO_ROOM:
                rest_s = OUT_OF_FILES_S
        else:
            sock.setblocking(False)
            caller = Caller("", address[0] if address else "", through_relay=False)
            if self._places.take(caller):
                task = loop.create_task(self._serve(sock, caller), name="a direct connection")
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            else:
                sock.close()
        loop.remove_reader(listener)
        self._resting[listener] = loop.call_later(rest_s, self._listen, listener)

    async def _serve(self, sock: socket.socket, caller: Caller) -> None:
        unproven: asyncio.StreamWriter | None = None
        try:
            ticket, stream = await self._knocked(sock)
            async with asyncio.timeout(HANDSHAKE_S):
                reader, writer = await _streams(
                    sock, None if sock.family == socket.AF_UNIX else self._tls, server_side=True
                )
                unproven = writer
                if not hmac.compare_digest(await reader.readexactly(TICKET_BYTES), ticket):
                    raise EOFError("the ticket is another one")
            unproven = None
            moved = stream.move(reader, writer, first=False)
            writer.write(ACCEPTED)
            await asyncio.wait({moved}, timeout=MOVE_S)  # until then, the stream has two connections
        except (OSError, EOFError, TimeoutError) as error:
            logger.debug("a direct connection from %s failed: %r", caller.host or "this machine", error)
        finally:
            if unproven is not None:
                unproven.transport.abort()
            self._places.leave(caller)

    async def _knocked(self, sock: socket.socket) -> tuple[bytes, FrameStream]:
        """Read the name of a ticket from a new connection, and take the ticket.

        Raises:
            OSError, EOFError, TimeoutError: it has none. Then the connection is closed.
        """
        said, loop = b"", asyncio.get_running_loop()
        try:
            async with asyncio.timeout(KNOCK_S):
                while len(said) < len(MAGIC) + NAME_BYTES:
                    more = await loop.sock_recv(sock, len(MAGIC) + NAME_BYTES - len(said))
                    said += more
                    if not more or not said.startswith(MAGIC[: len(said)]):
                        raise EOFError("it is something else")
            if (taken := self._tickets.pop(said[len(MAGIC) :], None)) is None:
                raise EOFError("there is no such ticket")
        except BaseException:
            sock.close()
            raise
        return taken


async def dial(host: str, offer: DirectOffer) -> ByteStream:
    """Connect to the door of a peer whose connection to this one comes from `host`.

    Raises:
        OSError, EOFError, TimeoutError: it can't be reached, or isn't that peer's.
    """
    if (path := _socket_beside(offer.directory)) is not None:
        try:
            return await _knock(socket.AF_UNIX, path, offer, None)
        except (OSError, EOFError, TimeoutError) as error:
            logger.debug("the direct connection on this machine failed: %r", error)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return await _knock(family, (host, offer.port), offer, _CLIENT_TLS)


async def _knock(
    family: int, address: str | tuple[str, int], offer: DirectOffer, tls: ssl.SSLContext | None
) -> ByteStream:
    loop, sock = asyncio.get_running_loop(), socket.socket(family)
    async with asyncio.timeout(HANDSHAKE_S):
        try:
            sock.setblocking(False)
            if tls is not None:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await loop.sock_connect(sock, address)
            await loop.sock_sendall(sock, MAGIC + _name_of(offer.ticket))
        except BaseException:
            sock.close()
            raise
        reader, writer = await _streams(sock, tls, server_side=False)
        try:
            if tls is not None:
                shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
                if hashlib.sha256(shown or b"").digest() != offer.certificate:
                    raise EOFError("it shows another certificate")
            writer.write(offer.ticket)
            if await reader.readexactly(len(ACCEPTED)) != ACCEPTED:
                raise EOFError("it speaks another protocol")
        except BaseException:
            writer.transport.abort()
            raise
        return reader, writer


async def _streams(sock: socket.socket, tls: ssl.SSLContext | None, *, server_side: bool) -> ByteStream:
    """Make this connected socket a stream. The socket is closed if that fails."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=BUFFER_BYTES, loop=loop)
    protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
    if server_side:
        transport, _ = await loop.connect_accepted_socket(lambda: protocol, sock, ssl=tls)
    else:
        name = None if tls is None else ""
        transport, _ = await loop.create_connection(lambda: protocol, sock=sock, ssl=tls, server_hostname=name)
    return reader, asyncio.StreamWriter(transport, protocol, reader, loop)


def _name_of(ticket: bytes) -> bytes:
    """The ticket's name, which everybody on the way may read. A hash, so that no server makes its client say bytes of
    its choice to another program."""
    return hashlib.sha256(b"name of a ticket" + ticket).digest()[:NAME_BYTES]


def _socket_beside(directory: str) -> str | None:
    """The door's socket if it is one of this user's processes on this machine, in a directory for this user alone."""
    if not re.fullmatch(re.escape(PREFIX) + r"\w{8}", directory):
        return None
    for parent in dict.fromkeys((tempfile.gettempdir(), "/tmp")):  # as `PrivateDirectory` chooses
        place = Path(parent, directory)
        try:
            found = place.lstat()
        except OSError:
            continue
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077:
            return os.fspath(place / SOCKET)
    return None


def _listen(hosts: Sequence[str], port: int) -> list[socket.socket]:
    """Bind the same port at each of these addresses.

    Raises:
        OSError: that isn't possible.
    """
    for tries_left in reversed(range(1 if port else PORT_TRIES)):
        bound: list[socket.socket] = []
        try:
            for host in hosts:
                bound.append(socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET))
                bound[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                bound[-1].setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # its connections inherit it
                if ":" in host:
                    bound[-1].setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                bound[-1].bind((host, port if len(bound) == 1 else bound[0].getsockname()[1]))
            break
        except OSError as error:
            for one in bound:
                one.close()
            if not tries_left or error.errno != errno.EADDRINUSE:
                raise
    return bound


def _client_tls() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # `_knock` compares the certificate with the offer's hash
    return context


_CLIENT_TLS = _client_tls()


def _server_tls(directory: Path) -> tuple[ssl.SSLContext, bytes]:
    """Make a key for this process; return its TLS settings and the SHA-256 of its certificate."""
    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([])
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(datetime(2000, 1, 1, tzinfo=UTC))
        .not_valid_after(datetime(9999, 1, 1, tzinfo=UTC))
        .sign(key, SHA256())
    )
    file = directory / "direct.pem"
    secret = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    create_private_file(file, secret + certificate.public_bytes(Encoding.PEM))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0  # every connection is the only one of its ticket
    try:
        context.load_cert_chain(file)
    finally:
        file.unlink()
    return context, hashlib.sha256(certificate.public_bytes(Encoding.DER)).digest()
