"""The libp2p daemon of this process, p2pd: start it, call it, end it.

hivemind attaches itself to the daemon with one connection for the DHT's calls. Each stream to another peer is a
connection of its own. The daemon runs in its own process session, so that Ctrl-C, Ctrl-\\ or a hang-up of the terminal
ends this process in order, and not the daemon under it. It dies with this process, however that ends, because
hivemind's connection ends then (measured: within 1 ms of a SIGKILL).

A thread waits for the daemon's end. Event loops learn of it by SIGCHLD, but only while no other code in the process
handles that signal, and torch's DataLoader does from its first worker on.
"""

import asyncio
import json
import logging
import os
import re
import resource
import subprocess
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from swarmllm.errors import ConfigurationError, PeerTimeoutError, PeerUnreachableError
from swarmllm.files import PrivateDirectory
from swarmllm.network.p2p._hivemind import (
    P2P,
    Multiaddr,
    P2PDaemonError,
    p2pd_path,
    p2pd_pb2,
    read_pbmsg_safe,
    write_pbmsg,
)
from swarmllm.network.p2p.addresses import best_addrs, is_loopback
from swarmllm.network.p2p.identity import Identity
from swarmllm.network.relay.messages import came_from

logger = logging.getLogger(__name__)

STARTUP_TIMEOUT_S = 60.0
"""Longest start of p2pd. It takes a tenth of a second; at low priority on a busy machine (load 25) more than 15 s."""
EXIT_TIMEOUT_S = 2.0
"""Longest end of p2pd. It takes about 10 ms; a stopped one (SIGSTOP) must be killed."""
UNIX_PATH_LENGTH = 90
"""Most systems allow 104 to 108 bytes for a socket's path."""
READY = "Peer ID:"
"""The beginning of the line that p2pd prints when it is ready."""
ATTACH_TIMEOUT_S = 30
"""p2pd ends itself if nobody attaches to it in this time."""
LINE_BYTES = 1 << 20
"""Longest line that it may print."""
MAX_CONNECTIONS = 4096
"""Most connections with other peers. p2pd closes the least used ones beyond, whatever they carry; its own limit is
512."""
CALL_BYTES = 4 << 20
"""Most bytes of one DHT call: hivemind's default."""
STREAM_BUFFER_BYTES = 64 << 10
"""Reading pauses while twice as much waits: asyncio's default."""

DIALLED = re.compile(r"\* \[(\S+)\] (?:dial \S+ \S+: (?:connect: )?)?(.+?)(?= \* \[|$)")
"""p2pd's message about each address: `* [/ip4/…/tcp/…] dial tcp4 …: connect: connection refused`."""
BACKOFF = "dial backoff"
"""Its message for an address that failed some seconds ago and isn't dialled now."""
FAILED_BEFORE = "failed a moment ago"
"""Our message for it."""


class Daemon:
    """One p2pd. Make it with `Daemon.start`, end it with `end()`."""

    def __init__(self, process: subprocess.Popen[bytes], private: PrivateDirectory) -> None:
        self.p2p: Any = None
        """hivemind's P2P, for its DHT."""
        self._private = private
        self.directory = private.path
        """A directory private to this user. `end` removes it."""
        self._process = process
        self._socket = self.directory / "p2pd.sock"
        self._output = asyncio.StreamReader(limit=LINE_BYTES)
        self._pipe: asyncio.ReadTransport | None = None
        self._logging: asyncio.Task[None] | None = None
        self._exited = asyncio.Event()
        loop = asyncio.get_running_loop()
        self._waiter = threading.Thread(target=self._wait, args=[loop], name=f"end of p2pd {process.pid}", daemon=True)
        self._waiter.start()

    @classmethod
    async def start(
        cls,
        identity: Identity,
        *,
        host_maddrs: Sequence[str],
        announce_maddrs: Sequence[str] | None,
        listen: bool,
        hidden: bool = False,
    ) -> "Daemon":
        """Start p2pd with this identity. `hidden`: nobody can dial it, so others shouldn't look for records there.

        Raises:
            ConfigurationError: p2pd refuses an address.
            PeerTimeoutError: it did not start in time.
        """
        private = PrivateDirectory(max_path_bytes=UNIX_PATH_LENGTH)
        identity_file = private.path / "identity"
        daemon: Daemon | None = None
        try:
            identity.write(identity_file)
            options = _options(host_maddrs, announce_maddrs or (), listen, hidden)
            daemon = cls(_spawn(private.path, identity_file, options), private)
            async with asyncio.timeout(STARTUP_TIMEOUT_S):
                await daemon._attach()
        except BaseException as error:
            if daemon is None:
                private.remove()
            else:
                await daemon.end()
            if isinstance(error, TimeoutError):
                raise PeerTimeoutError(f"p2pd did not start in {STARTUP_TIMEOUT_S:g} s", identity.peer_id) from None
            raise
        identity_file.unlink()
        return daemon

    async def _attach(self) -> None:
        """Wait until the daemon is ready, and let hivemind connect to it."""
        last_words = ""
        protocol = asyncio.StreamReaderProtocol(self._output)
        # If it were cancelled, uvloop would close the pipe by its number, and `end` again: another file's by then.
        opening = asyncio.ensure_future(
            asyncio.get_running_loop().connect_read_pipe(lambda: protocol, self._process.stdout)
        )
        try:
            await asyncio.shield(opening)
        finally:
            self._pipe, _ = await opening
        async for line in self._lines():
            if line.startswith(READY):
                break
            last_words = line
        else:
            raise ConfigurationError(f"p2pd does not start with these settings: {last_words or 'it printed nothing'}")
        self._logging = asyncio.create_task(self._log(), name="log of p2pd")
        try:
            self.p2p = await P2P.replicate(Multiaddr(f"/unix{self._socket}"))
        except (P2PDaemonError, OSError, EOFError) as error:
            raise PeerUnreachableError(f"p2pd died while it started: {error}") from None
        self.p2p._client.control.persistent_conn_max_msg_size = CALL_BYTES

    def _wait(self, loop: asyncio.AbstractEventLoop) -> None:
        """Runs in a thread."""
        self._process.wait()
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(self._exited.set)

    async def _lines(self) -> AsyncIterator[str]:
        while line := await self._output.readline():
            yield line.decode(errors="replace").strip()

    async def _log(self) -> None:
        async for line in self._lines():
            logger.log(logging.WARNING if _is_error(line) else logging.DEBUG, "p2pd: %s", line)

    @property
    def addrs(self) -> tuple[str, ...]:
        """Addresses of this daemon, without the `/p2p/...` end, the best ones first. As many as fit a record."""
        return best_addrs(str(maddr) for maddr in self.p2p._visible_maddrs)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_exited(self) -> bool:
        return self._process.returncode is not None

    async def exited(self) -> None:
        """Return when the process has exited."""
        await self._exited.wait()

    async def connect(self, peer: bytes, addrs: Sequence[bytes]) -> None:
        """Dial a peer at these addresses. Does nothing if there is a connection already.

        Raises:
            P2PDaemonError: it can't be reached.
            PeerUnreachableError: this daemon is dead.
        """
        request = p2pd_pb2.Request(
            type=p2pd_pb2.Request.CONNECT,
            connect=p2pd_pb2.ConnectRequest(peer=peer, addrs=addrs),
        )
        _, _, writer = await self._ask(request)
        writer.close()

    async def disconnect(self, peer: bytes) -> None:
        """Close all connections with a peer. Raises as `connect` does."""
        request = p2pd_pb2.Request(type=p2pd_pb2.Request.DISCONNECT, disconnect=p2pd_pb2.DisconnectRequest(peer=peer))
        _, _, writer = await self._ask(request)
        writer.close()

    async def read_addrs(self) -> None:
        """Ask the daemon for its addresses again. They change with networks, and when a router has mapped a port.

        Raises as `connect` does.
        """
        said, _, writer = await self._ask(p2pd_pb2.Request(type=p2pd_pb2.Request.IDENTIFY))
        writer.close()
        self.p2p._visible_maddrs = [Multiaddr(addr) for addr in said.identify.addrs if not came_from(addr)[1]]

    async def open_stream(
        self, peer: bytes, protocol: str, buffer_bytes: int = STREAM_BUFFER_BYTES
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Open a stream to a peer. Raises as `connect` does."""
        reader, writer, _ = await self.open_stream_told(peer, protocol, buffer_bytes)
        return reader, writer

    async def open_stream_told(
        self, peer: bytes, protocol: str, buffer_bytes: int = STREAM_BUFFER_BYTES
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, bytes]:
        """Open a stream to a peer; also return the address at its other end. Raises as `connect` does."""
        request = p2pd_pb2.Request(
            type=p2pd_pb2.Request.STREAM_OPEN, streamOpen=p2pd_pb2.StreamOpenRequest(peer=peer, proto=[protocol])
        )
        said, reader, writer = await self._ask(request, buffer_bytes)
        return reader, writer, said.streamInfo.addr

    async def take_streams(self, socket_path: Path, protocol: str) -> None:
        """Let the daemon connect to this socket for each stream that another peer opens. Raises as `connect` does."""
        request = p2pd_pb2.Request(
            type=p2pd_pb2.Request.STREAM_HANDLER,
            streamHandler=p2pd_pb2.StreamHandlerRequest(
                addr=Multiaddr(f"/unix{socket_path}").to_bytes(), proto=[protocol], balanced=False
            ),
        )
        _, _, writer = await self._ask(request)
        writer.close()

    async def _ask(
        self, request: Any, buffer_bytes: int = STREAM_BUFFER_BYTES
    ) -> tuple[Any, asyncio.StreamReader, asyncio.StreamWriter]:
        """Send a request on a new connection. Returns the connection and the answer if it is OK.

        hivemind's own functions leave the connection open when they fail or are cancelled.
        """
        try:
            reader, writer = await asyncio.open_unix_connection(self._socket, limit=buffer_bytes)
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
        return response, reader, writer

    async def end(self) -> None:
        """End the process and hivemind's tasks around it, and remove the files."""
        tasks = [self._logging]  # p2pd will complain that its connections end, and that is intended
        if self.p2p is not None:
            control = self.p2p._client.control
            tasks += [control._read_task, control._write_task, *control._handler_tasks.values()]
        ending = [task for task in tasks if task is not None]
        for task in ending:
            task.cancel()
        if not await self._ends_by(self._process.terminate) and not await self._ends_by(self._process.kill):
            logger.warning("p2pd (process %d) was killed, but still runs", self.pid)
        if ending:
            await asyncio.wait(ending, timeout=EXIT_TIMEOUT_S)
        # Not both: the loop closes the pipe in a later turn, by its number, which may be another file's by then.
        pipe = self._pipe or self._process.stdout
        if pipe is not None:
            pipe.close()
        self._private.remove()

    async def _ends_by(self, end: Callable[[], None]) -> bool:
        end()  # does nothing to a process that has exited
        with suppress(TimeoutError):
            async with asyncio.timeout(EXIT_TIMEOUT_S):
                await self._exited.wait()
            self._waiter.join()
        return self._exited.is_set()


def _options(host_maddrs: Sequence[str], announce_maddrs: Sequence[str], listen: bool, hidden: bool) -> tuple[str, ...]:
    return (
        f"-hostAddrs={','.join(host_maddrs)}",
        f"-announceAddrs={','.join(announce_maddrs)}",
        "-dhtServer" if listen and not hidden else "-dhtClient",
        f"-natPortMap={int(listen and not announce_maddrs and not all(map(is_loopback, host_maddrs)))}",
        f"-autonat={int(listen and not hidden)}",
        f"-noListenAddrs={int(not listen)}",
    )


def _spawn(directory: Path, identity_file: Path, options: Iterable[str]) -> subprocess.Popen[bytes]:
    arguments = (
        f"-id={identity_file}",
        f"-listen=/unix{directory / 'p2pd.sock'}",
        *options,
        "-connManager",
        "-relayService=0",  # our relay replaces it; otherwise p2pd takes it back when it finds itself public
        f"-connHi={_max_connections()}",
        f"-connLo={_max_connections() * 3 // 4}",
        f"-idleTimeout={ATTACH_TIMEOUT_S}s",
        f"-persistentConnMaxMsgSize={CALL_BYTES}",
    )
    return subprocess.Popen(
        [p2pd_path(), *arguments],
        bufsize=0,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={"GOLOG_LOG_LEVEL": "error", **os.environ, "GOLOG_LOG_FMT": "json"},
        start_new_session=True,
    )


def _max_connections() -> int:
    """Connections that this machine lets a process have. A quarter of its files is left for streams and the rest."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)  # Go programs raise their own limit to the hard limit
    return MAX_CONNECTIONS if most == resource.RLIM_INFINITY else max(1, min(MAX_CONNECTIONS, most * 3 // 4))


def _is_error(line: str) -> bool:
    """True if p2pd reports an error. Its own messages are JSON; libraries may print anything."""
    try:
        return bool(json.loads(line)["level"] == "error")
    except (ValueError, TypeError, KeyError):
        return False


def reason_of(error: P2PDaemonError) -> str:
    """p2pd's error without its preambles: the dialled addresses, grouped by their problem."""
    said = " ".join(str(error).split())
    dialled: dict[str, list[str]] = {}
    for addr, why in DIALLED.findall(said):
        dialled.setdefault(FAILED_BEFORE if why == BACKOFF else why, []).append(addr)
    return "; ".join(f"{', '.join(addrs)}: {why}" for why, addrs in dialled.items()) or said
