"""The libp2p daemon of this process, p2pd: starting it, asking it things, ending it.

It is started here, and hivemind attaches itself to it with one connection for the DHT's calls; each stream to another
peer is a connection of its own. It has a session of its own, so that what a terminal sends to its foreground processes
(Ctrl-C, Ctrl-\\, a hang-up) ends this process in its own way, and not the daemon under its feet. And it dies with this
process, however that ends, because hivemind's connection ends then: measured, within 1 ms of a SIGKILL.
"""

import asyncio
import ipaddress
import json
import logging
import os
import resource
import shutil
import socket
import tempfile
from collections.abc import AsyncIterator, Iterable, Sequence
from pathlib import Path
from typing import Any, cast

from swarmllm.data_structures import MAX_ADDRS
from swarmllm.errors import ConfigurationError, PeerTimeoutError, PeerUnreachableError
from swarmllm.network._hivemind import (
    P2P,
    DaemonConnector,
    Multiaddr,
    P2PDaemonError,
    p2pd_path,
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
MAX_ADDR_LENGTH = 256
MAX_ADDRS_LENGTH = 2048
"""Characters of all addresses together: a quarter of a record."""
DOCKER_NETWORKS = ipaddress.ip_network("172.16.0.0/12")
"""From which Docker takes its networks first. A home or an office seldom does."""
READY = "Peer ID:"
"""Begins the line that p2pd says when it can be asked things."""
ATTACH_TIMEOUT_S = 30
"""p2pd ends itself if nobody attaches himself to it in this time."""
LINE_BYTES = 1 << 20
"""Longest line that it may say."""
MAX_CONNECTIONS = 4096
"""With other peers. Beyond, p2pd closes those that are used least, whatever they carry; its own limit would be 512."""
CALL_BYTES = 4 << 20
"""Most that one call of the DHT may carry: hivemind's default."""


class Daemon:
    """One p2pd. Make it with `Daemon.start`, end it with `end()`."""

    def __init__(self, process: asyncio.subprocess.Process, directory: Path) -> None:
        self.p2p: Any = None
        """hivemind's P2P, for its DHT."""
        self.directory = directory
        """Private to this user, removed by `end`."""
        self._process = process
        self._maddr = Multiaddr(f"/unix{directory / 'p2pd.sock'}")
        self._connector = DaemonConnector(control_maddr=self._maddr)
        self._logging: asyncio.Task[None] | None = None

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
        daemon: Daemon | None = None
        try:
            identity.write(identity_file)
            process = await asyncio.create_subprocess_exec(
                p2pd_path(),
                f"-id={identity_file}",
                f"-listen=/unix{directory / 'p2pd.sock'}",
                f"-hostAddrs={','.join(host_maddrs)}",
                f"-announceAddrs={','.join(announce_maddrs or ())}",
                "-dhtServer" if listen else "-dhtClient",
                f"-noListenAddrs={int(not listen)}",
                "-connManager",
                f"-connHi={_max_connections()}",
                f"-connLo={_max_connections() * 3 // 4}",
                f"-idleTimeout={ATTACH_TIMEOUT_S}s",
                f"-persistentConnMaxMsgSize={CALL_BYTES}",
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                limit=LINE_BYTES,
                env={"GOLOG_LOG_LEVEL": "error", **os.environ, "GOLOG_LOG_FMT": "json"},
                start_new_session=True,
            )
            daemon = cls(process, directory)
            async with asyncio.timeout(timeout_s):
                await daemon._attach()
        except BaseException as error:
            if daemon is None:
                shutil.rmtree(directory, ignore_errors=True)
            else:
                await daemon.end()
            if isinstance(error, TimeoutError):
                raise PeerTimeoutError(f"p2pd did not start in {timeout_s:g} s", identity.peer_id) from None
            raise
        identity_file.unlink()
        return daemon

    async def _attach(self) -> None:
        """Wait until the daemon is ready, and let hivemind connect to it."""
        last_words = ""
        async for line in self._output():
            if line.startswith(READY):
                break
            last_words = line
        else:
            raise ConfigurationError(f"p2pd does not start with these settings: {last_words or 'it said nothing'}")
        self._logging = asyncio.create_task(self._log(), name="log of p2pd")
        try:
            self.p2p = await P2P.replicate(self._maddr)
        except (P2PDaemonError, OSError, EOFError) as error:
            raise PeerUnreachableError(f"p2pd died while it started: {error}") from None
        self.p2p._client.control.persistent_conn_max_msg_size = CALL_BYTES

    async def _output(self) -> AsyncIterator[str]:
        output = cast(asyncio.StreamReader, self._process.stdout)
        while line := await output.readline():
            yield line.decode(errors="replace").strip()

    async def _log(self) -> None:
        async for line in self._output():
            logger.log(logging.WARNING if _is_error(line) else logging.DEBUG, "p2pd: %s", line)

    @property
    def addrs(self) -> tuple[str, ...]:
        """Where others reach this daemon, without the `/p2p/...` part; as many as fit a record, the best ones first."""
        return best_addrs(str(maddr) for maddr in self.p2p._visible_maddrs)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_exited(self) -> bool:
        return self._process.returncode is not None

    async def exited(self) -> None:
        """Return when the process has exited."""
        await self._process.wait()

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
        tasks = [self._logging]  # from now on p2pd complains that its connections end, which is what we want
        if self.p2p is not None:
            control = self.p2p._client.control
            tasks += [control._read_task, control._write_task, *control._handler_tasks.values()]
        ending = [task for task in tasks if task is not None]
        for task in ending:
            task.cancel()
        if not self.has_exited:
            self._process.terminate()
        try:
            async with asyncio.timeout(EXIT_TIMEOUT_S):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        await asyncio.gather(*ending, return_exceptions=True)
        shutil.rmtree(self.directory, ignore_errors=True)


def _max_connections() -> int:
    """As many as this machine lets a process have, with a quarter of its files left for streams and whatever else."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)  # Go programs take all that they may have
    return MAX_CONNECTIONS if most == resource.RLIM_INFINITY else max(1, min(MAX_CONNECTIONS, most * 3 // 4))


def _private_directory() -> Path:
    path = Path(tempfile.mkdtemp(prefix="swarmllm-"))
    if len(os.fsencode(path)) <= UNIX_PATH_LENGTH:
        return path
    path.rmdir()
    return Path(tempfile.mkdtemp(prefix="swarmllm-", dir="/tmp"))


def _is_error(line: str) -> bool:
    """Whether p2pd says that it is one: its messages are JSON, what libraries print may be anything."""
    try:
        return bool(json.loads(line)["level"] == "error")
    except (ValueError, TypeError, KeyError):
        return False


def parse_known_good(addrs: Iterable[str]) -> list[Any]:
    """The addresses that make sense; they come from other peers."""
    maddrs = []
    for addr in addrs:
        try:
            maddrs.append(Multiaddr(addr.partition("/p2p/")[0]))
        except ValueError:
            logger.debug("skipped the address %r", addr)
    return maddrs


def best_addrs(addrs: Iterable[str]) -> tuple[str, ...]:
    """As many as a server may announce: those first by which most others reach it.

    A host with containers or virtual machines has an address in each of their networks, where nobody else is.
    """
    found, length = [], 0
    for addr in sorted(addrs, key=_reach):
        length += len(addr)
        if len(addr) <= MAX_ADDR_LENGTH and length <= MAX_ADDRS_LENGTH:
            found.append(addr)
    return tuple(found[:MAX_ADDRS])


def _reach(addr: str) -> int:
    """0 from everywhere, 1 from the own network, 2 (perhaps) from containers, 3 from this machine, 4 hardly at all."""
    try:
        ip = ipaddress.ip_address(addr.split("/")[2])
    except (IndexError, ValueError):
        return 0  # a name: somebody has given it
    if ip.is_loopback:
        return 3
    if ip.is_link_local:
        return 4
    if not ip.is_private:
        return 0
    return 2 if ip in DOCKER_NETWORKS else 1


def check_tcp_maddr(maddr: str, *, announced: bool = False) -> None:
    """Raises ConfigurationError unless this is an address of TCP; one that is announced must name its port."""
    try:
        parsed = Multiaddr(maddr)
        is_tcp = "tcp" in parsed and "udp" not in parsed
    except ValueError as error:
        raise ConfigurationError(f"the address {maddr!r} is wrong: {error}") from None
    if not is_tcp:  # libp2p would prefer QUIC where both are offered; it measured slower
        raise ConfigurationError(f"the address {maddr!r} must be one of TCP, like /ip4/0.0.0.0/tcp/31337")
    if announced and parsed["tcp"] == "0":
        raise ConfigurationError(
            f"the address {maddr!r} is to be announced, so it needs a port other than 0: port 0 is none"
        )


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
