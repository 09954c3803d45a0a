"""The libp2p daemon of this process, p2pd: starting it, asking it things, ending it.

hivemind starts it and keeps one connection for the DHT's calls; each stream to another peer is a connection of its own.
The daemon dies with this process, however that ends: measured, within 1 ms of a SIGKILL.
"""

import asyncio
import logging
import shutil
import socket
import tempfile
from collections.abc import Iterable, Sequence
from os import fsencode
from pathlib import Path
from typing import Any

from swarmllm.errors import ConfigurationError, PeerTimeoutError, PeerUnreachableError
from swarmllm.network._hivemind import (
    P2P,
    DaemonConnector,
    Multiaddr,
    P2PDaemonError,
    p2pd_pb2,
    read_pbmsg_safe,
    write_pbmsg,
)
from swarmllm.network.identity import Identity

logger = logging.getLogger(__name__)

EXIT_TIMEOUT_S = 2.0
"""p2pd exits in about 10 ms; one that is stopped (SIGSTOP) has to be killed."""
UNIX_PATH_LENGTH = 90
"""Most systems allow 104 to 108 bytes for a socket's path."""


class Daemon:
    """One p2pd. Make it with `Daemon.start`, end it with `end()`."""

    def __init__(self, p2p: Any, directory: Path) -> None:
        self.p2p = p2p
        """hivemind's P2P, for its DHT."""
        self.directory = directory
        """Private to this user, removed by `end`."""
        self._connector = DaemonConnector(control_maddr=p2p.daemon_listen_maddr) if p2p.daemon_listen_maddr else None

    @classmethod
    async def start(
        cls,
        identity: Identity,
        *,
        host_maddrs: Sequence[str],
        announce_maddrs: Sequence[str] | None,
        listen: bool,
        timeout_s: float,
    ) -> "Daemon":
        """Start p2pd with this identity.

        Raises:
            ConfigurationError: p2pd refuses an address.
            PeerTimeoutError: it did not start in time.
        """
        directory = _private_directory()
        identity_file = directory / "identity"
        identity.write(identity_file)

        made: list[Any] = []

        class Owned(P2P):
            """Shows itself before `create` returns: if that fails or is cancelled, hivemind leaves p2pd behind."""

            def __init__(self) -> None:
                super().__init__()
                self._daemon_listen_maddr = self._client_listen_maddr = None
                made.append(self)

        try:
            async with asyncio.timeout(timeout_s):
                p2p = await Owned.create(
                    identity_path=str(identity_file),
                    check_if_identity_free=False,
                    host_maddrs=list(host_maddrs),
                    announce_maddrs=list(announce_maddrs) if announce_maddrs else None,
                    dht_mode="server" if listen else "client",
                    no_listen=not listen,
                    nat_port_map=False,
                    auto_nat=False,
                    startup_timeout=timeout_s,
                )
        except BaseException as error:
            await cls(made[0] if made else Owned(), directory).end()
            if isinstance(error, TimeoutError):
                raise PeerTimeoutError(f"p2pd did not start in {timeout_s:g} s", identity.peer_id) from None
            if isinstance(error, (P2PDaemonError, ValueError)):
                raise ConfigurationError(f"p2pd does not start with these settings: {error}") from None
            raise
        identity_file.unlink()
        return cls(p2p, directory)

    @property
    def addrs(self) -> tuple[str, ...]:
        """Where others reach this daemon, without the `/p2p/...` part."""
        return tuple(str(maddr) for maddr in self.p2p._visible_maddrs)

    @property
    def pid(self) -> int:
        return int(self.p2p._child.pid)

    @property
    def has_exited(self) -> bool:
        return self.p2p._child.returncode is not None

    async def exited(self) -> None:
        """Return when the process has exited."""
        await self.p2p._child.wait()

    async def connect(self, peer: bytes, maddrs: Iterable[Any]) -> None:
        """Dial a peer at these addresses; nothing happens if there is a connection already.

        Raises:
            P2PDaemonError: it can't be reached.
            PeerUnreachableError: this daemon is dead.
        """
        request = p2pd_pb2.Request(
            type=p2pd_pb2.Request.CONNECT,
            connect=p2pd_pb2.ConnectRequest(peer=peer, addrs=[maddr.to_bytes() for maddr in maddrs]),
        )
        _, writer = await self._ask(request)
        writer.close()

    async def open_stream(self, peer: bytes, protocol: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A new stream to a peer. Raises as `connect` does."""
        request = p2pd_pb2.Request(
            type=p2pd_pb2.Request.STREAM_OPEN, streamOpen=p2pd_pb2.StreamOpenRequest(peer=peer, proto=[protocol])
        )
        return await self._ask(request)

    async def take_streams(self, socket_path: Path, protocol: str) -> None:
        """Let the daemon connect to this socket for each stream that another peer opens. Raises as `connect` does."""
        request = p2pd_pb2.Request(
            type=p2pd_pb2.Request.STREAM_HANDLER,
            streamHandler=p2pd_pb2.StreamHandlerRequest(
                addr=Multiaddr(f"/unix{socket_path}").to_bytes(), proto=[protocol], balanced=False
            ),
        )
        _, writer = await self._ask(request)
        writer.close()

    async def _ask(self, request: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Put a request on a new connection, which is returned if the answer is OK.

        hivemind's own functions for that leave the connection open when they fail or are cancelled.
        """
        if self._connector is None:
            raise PeerUnreachableError("p2pd has not been started")
        try:
            reader, writer = await self._connector.open_connection()
        except OSError as error:
            raise PeerUnreachableError(f"this peer's p2pd is gone: {error}") from None
        response = p2pd_pb2.Response()
        try:
            await write_pbmsg(writer, request)
            await read_pbmsg_safe(reader, response)
            if response.type == p2pd_pb2.Response.ERROR:
                raise P2PDaemonError(response.error.msg)
        except (OSError, EOFError) as error:
            writer.transport.abort()
            raise PeerUnreachableError(f"this peer's p2pd hung up: {error}") from None
        except BaseException:
            writer.transport.abort()
            raise
        return reader, writer

    async def end(self) -> None:
        """End the process and hivemind's tasks around it, and remove the files."""
        p2p = self.p2p
        internal = [p2p._reader_task]
        if p2p._client is not None:
            control = p2p._client.control
            internal += [control._read_task, control._write_task, *control._handler_tasks.values()]
        if p2p._reader_task is not None:
            p2p._reader_task.cancel()  # p2pd logs it as an error that its socket is closed, which is what we want
        p2p._terminate()
        if p2p._child is not None:
            try:
                async with asyncio.timeout(EXIT_TIMEOUT_S):
                    await p2p._child.wait()
            except TimeoutError:
                p2p._child.kill()
                await p2p._child.wait()
        tasks = [task for task in internal if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        shutil.rmtree(self.directory, ignore_errors=True)


def _private_directory() -> Path:
    path = Path(tempfile.mkdtemp(prefix="swarmllm-"))
    if len(fsencode(path)) <= UNIX_PATH_LENGTH:
        return path
    path.rmdir()
    return Path(tempfile.mkdtemp(prefix="swarmllm-", dir="/tmp"))


def parse_known_good(addrs: Iterable[str]) -> list[Any]:
    """The addresses that make sense; they come from other peers."""
    maddrs = []
    for addr in addrs:
        try:
            maddrs.append(Multiaddr(addr.partition("/p2p/")[0]))
        except ValueError:
            logger.debug("skipped the address %r", addr)
    return maddrs


def check_tcp_maddr(maddr: str) -> None:
    """Raises ConfigurationError unless this is an address of TCP."""
    try:
        parsed = Multiaddr(maddr)
        is_tcp = "tcp" in parsed and "udp" not in parsed
    except ValueError as error:
        raise ConfigurationError(f"the address {maddr!r} is wrong: {error}") from None
    if not is_tcp:  # libp2p would prefer QUIC where both are offered; it measured slower
        raise ConfigurationError(f"the address {maddr!r} must be one of TCP, like /ip4/0.0.0.0/tcp/31337")


def check_port_is_free(maddr: str) -> None:
    """Raises ConfigurationError if something listens there: p2pd would start, and share the port by SO_REUSEPORT."""
    parts = maddr.split("/")
    family = {"ip4": socket.AF_INET, "ip6": socket.AF_INET6}.get(parts[1])
    if family is None or parts[3:4] != ["tcp"] or parts[4] == "0":
        return
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((parts[2], int(parts[4])))
        except OSError as error:
            raise ConfigurationError(f"can't listen on {maddr}: {error.strerror}; choose another port") from None
