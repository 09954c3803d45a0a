"""Several devices of one machine: a server process for each, or for each few, started, watched and ended together.

Called by `server/__main__`, which runs in each process as well. The processes start one after the other: each chooses
blocks, and counts free memory, after the previous ones have taken theirs. `machines/hosting` starts single servers by
`run_server_process`.
"""

import asyncio
import itertools
import json
import logging
import os
import re
import signal
import sys
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace

from swarmllm.command_line import first_error, stop_event, unless_stopped
from swarmllm.config import FROM_STDIN
from swarmllm.errors import ConfigurationError, SwarmError
from swarmllm.files import existing_path, user_path
from swarmllm.network.p2p.identity import Identity
from swarmllm.server.settings import ServerConfig

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 10.0
"""A server must be gone within this time after SIGTERM (contract)."""
MAX_WAIT_S = 60.0
"""Longest pause between attempts to start a server again. Assumed: a device that has gone may come back."""
ANY_PORT = "/tcp/0"

JOIN_LINE = re.compile(r"^swarmllm: join with --initial_peers (.+)$")


def all_devices(config: ServerConfig) -> tuple[str, ...]:
    """List the devices to serve with; `auto` = all GPUs if there are several, but no more than blocks are asked for.

    With `tensor_parallel`, the devices of each server come one after the other.

    Raises:
        ConfigurationError: they can't be divided into groups of that size.
    """
    together = config.tensor_parallel
    if config.device_map:
        return tuple(name for name, _ in config.blocks_by_device)
    if config.device == ("cpu",):
        return config.device * together
    if config.device != ("auto",):
        if len(config.device) % together:
            raise ConfigurationError(
                f"{len(config.device)} devices can't be divided into groups of {together}: name some for each "
                "--tensor_parallel, or cpu once"
            )
        return config.device
    import torch  # not needed if devices are named

    num_gpus = torch.cuda.device_count()
    start, end = config.block_indices or (0, config.num_blocks or num_gpus)
    count = min(num_gpus // together, end - start) * together
    if together > 1 and not count:
        if num_gpus:
            raise ConfigurationError(
                f"--tensor_parallel {together} needs {together} GPUs, but this machine has {num_gpus}"
            )
        return ("cpu",) * together
    return config.device if count < 2 else tuple(f"cuda:{index}" for index in range(count))


def groups_of(devices: Sequence[str], together: int) -> list[tuple[str, ...]]:
    """Group the devices by server."""
    return [tuple(devices[start : start + together]) for start in range(0, len(devices), together)]


def of_each_device(config: ServerConfig, devices: Sequence[str]) -> list[ServerConfig]:
    """Make the settings of each server: its device or devices, its share of the blocks, its own identity and ports.

    Shares are even, or those of `device_map`.

    Raises:
        ConfigurationError: there are too few blocks, or a setting can't be for several servers.
    """
    groups = groups_of(devices, config.tensor_parallel)
    count, num_blocks = len(groups), config.total_blocks
    if num_blocks is not None and num_blocks < count:
        raise ConfigurationError(f"{num_blocks} blocks can't be split between {count} devices: name fewer")
    if config.announce_maddrs and count > 1:
        raise ConfigurationError(
            "announce_maddrs can't belong to several servers: name one --device, and start a server for each"
        )
    if not all(maddr.endswith(ANY_PORT) for maddr in config.host_maddrs) and count > 1:
        raise ConfigurationError(
            f"each device needs a port of its own: end --host_maddrs in {ANY_PORT}, and give the first one's by --port"
        )
    ports = sorted(port for port in (config.port, config.direct_port, config.metrics_port) if port)
    if any(later - port < count for port, later in itertools.pairwise(ports)):
        raise ConfigurationError("the ports of the devices overlap (port, direct_port, metrics_port): choose others")
    shares = [share for _, share in config.blocks_by_device] or _even_shares(num_blocks or 0, count)
    ends = list(itertools.accumulate(shares, initial=config.block_indices[0] if config.block_indices else 0))
    machine = uuid.uuid4().hex[:16]
    return [
        replace(
            config,
            device=group,
            device_map=(),
            num_blocks=shares[index] if num_blocks and config.block_indices is None else None,
            block_indices=None if config.block_indices is None else (ends[index], ends[index + 1]),
            port=config.port + index if config.port else config.port,
            direct_port=config.direct_port + index if config.direct_port else config.direct_port,
            metrics_port=config.metrics_port + index if config.metrics_port else config.metrics_port,
            identity_path=_identity_path(config.identity_path, index),
            machine=machine,
            stop_on_stdin_eof=True,
        )
        for index, group in enumerate(groups)
    ]


def _even_shares(total: int, count: int) -> list[int]:
    return [(index + 1) * total // count - index * total // count for index in range(count)]


def _identity_path(path: str | None, index: int) -> str | None:
    """Return the identity file of device `index`; identities after the first one are derived from it."""
    if path is None or index == 0:
        return path
    derived, own = Identity.load_or_create(path).derived(f"device {index}"), user_path(f"{path}.{index}")
    if existing_path(own) is None:
        derived.write(own)
    elif Identity.load(own).peer_id != derived.peer_id:
        raise ConfigurationError(f"{own} doesn't come from the identity {path}: remove it, or name another file")
    return str(own)


async def serve_devices(config: ServerConfig, devices: Sequence[str]) -> None:
    """Run a server for each device until SIGINT, SIGTERM, or (if asked for) the end of standard input.

    A server that ends is started again if it was ready before.

    Raises:
        SwarmError: one can't start; all others have ended, too.
    """
    stop = stop_event(stop_on_stdin_eof=config.stop_on_stdin_eof)
    groups = ["+".join(group) for group in groups_of(devices, config.tensor_parallel)]
    names = [f"{name}#{index}" if groups.count(name) > 1 else name for index, name in enumerate(groups)]
    servers: list[_DeviceServer] = []
    for name, one in zip(names, of_each_device(config, devices), strict=True):
        servers.append(_DeviceServer(name, one, servers))
    logger.info("%d devices, %d servers: %s", len(devices), len(names), ", ".join(names))

    async def run() -> None:
        async with asyncio.TaskGroup() as tasks:
            for server in servers:
                tasks.create_task(server.keep_running(), name=f"server of {server.name}")
                await server.ready.wait()

    try:
        await unless_stopped(stop, run())
    except BaseExceptionGroup as group:
        raise first_error(group) from None


class _DeviceServer:
    """The server process of one device, or of some that compute together; it is started again and again."""

    def __init__(self, name: str, config: ServerConfig, servers: "Sequence[_DeviceServer]") -> None:
        """`servers` are the servers of all devices."""
        self.name = name
        self.maddrs: tuple[str, ...] = ()
        """Addresses at which it can be joined, while it is ready."""
        self.ready = asyncio.Event()
        """Set when it has been ready."""
        self._config, self._servers = config, servers

    async def keep_running(self) -> None:
        """Start the process, and start it again when it ends.

        Raises:
            SwarmError: it ended before it was ready for the first time.
        """
        wait_s = 1.0
        while True:
            code = await self._run_once()
            if not self.ready.is_set():
                kind = ConfigurationError if code == 2 else SwarmError
                raise kind(f"the server of {self.name} ended before it was ready (exit code {code}): see its log")
            wait_s = 1.0 if self.maddrs else min(2 * wait_s, MAX_WAIT_S)
            self.maddrs = ()
            logger.warning("the server of %s ended (exit code %d): it starts again in %.0f s", self.name, code, wait_s)
            await asyncio.sleep(wait_s)

    async def _settings(self) -> ServerConfig:
        """The settings, with the other ready servers as initial peers."""
        peers = tuple(maddr for server in self._servers for maddr in server.maddrs)
        if not peers:
            return self._config
        named = self._config.initial_peers
        return replace(self._config, initial_peers=(*named, *peers), peers_beside=not named, new_swarm=False)

    async def _run_once(self) -> int:
        return await run_server_process(self._settings, self._on_output, self._on_log)

    def _on_output(self, line: str) -> None:
        print(line, flush=True)
        if match := JOIN_LINE.match(line):
            self.maddrs = tuple(match[1].split())
            self.ready.set()

    def _on_log(self, line: str) -> None:
        print(f"[{self.name}] {line}", file=sys.stderr, flush=True)


async def run_server_process(
    settings: Callable[[], Awaitable[ServerConfig]],
    on_output: Callable[[str], None],
    on_log: Callable[[str], None],
    spare: "SpareProcess | None" = None,
) -> int:
    """Run a server process once, and return its exit code; end it if cancelled. `on_…` get its lines.

    It is the spare process, if there is one. Otherwise it imports what it needs while `settings` are being made.
    """
    starting = asyncio.create_task(_start() if spare is None else spare.take())
    try:
        process = await asyncio.shield(starting)
    except asyncio.CancelledError:  # asyncio would wait for all processes that hold its pipes
        process = await starting
        await _end(process)
        _close_pipes(process)
        raise
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    reading = asyncio.gather(_pass_on(process.stdout, on_output), _pass_on(process.stderr, on_log))
    try:
        config = await settings()
        process.stdin.write(json.dumps(asdict(config)).encode() + b"\n")  # secrets stay between the two processes
        await asyncio.shield(reading)
    finally:
        await _end(process)
        await asyncio.wait({reading}, timeout=1.0)  # its last lines
        reading.cancel()
        _close_pipes(process)
    return await process.wait()


class SpareProcess:
    """A server process that has imported what it needs, and waits for its settings."""

    def __init__(self) -> None:
        self._starting: asyncio.Task[asyncio.subprocess.Process] | None = None

    def prepare(self) -> None:
        """Start it in the background, if there is none."""
        if self._starting is None:
            self._starting = asyncio.get_running_loop().create_task(_start(), name="start a spare server process")

    async def take(self) -> asyncio.subprocess.Process:
        """This process; or a new one, if there is none or it has ended."""
        starting, self._starting = self._starting, None
        if starting is not None:
            with suppress(OSError):  # it could not be started
                process = await starting
                if process.returncode is None:
                    return process
                _close_pipes(process)
        return await _start()

    async def close(self) -> None:
        """End it, if there is one."""
        starting, self._starting = self._starting, None
        if starting is not None:
            with suppress(OSError):  # it could not be started
                process = await starting
                await _end(process)
                _close_pipes(process)


async def _pass_on(stream: asyncio.StreamReader, tell: Callable[[str], None]) -> None:
    async for line in _lines(stream):
        tell(line)


async def _start() -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "swarmllm.server", FROM_STDIN),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,  # Ctrl-C in the terminal reaches this process, which ends the others
    )


async def _end(process: asyncio.subprocess.Process) -> None:
    """Ask the process to leave, and kill it if it doesn't."""
    with suppress(ProcessLookupError):
        if process.returncode is None:
            # `terminate` would look whether it has ended, and take the exit code from the loop, which then gives 255.
            os.kill(process.pid, signal.SIGTERM)
    try:
        async with asyncio.timeout(STOP_TIMEOUT_S):
            await process.wait()
    except TimeoutError:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its group: `wait` lasts while a process holds the pipes
        await process.wait()


def _close_pipes(process: asyncio.subprocess.Process) -> None:
    """Close the pipes: other processes may still hold their ends. asyncio has no public name for this."""
    process._transport.close()  # type: ignore[attr-defined]


async def _lines(stream: asyncio.StreamReader) -> AsyncIterator[str]:
    """Read lines of any length."""
    rest = b""
    while chunk := await stream.read(1 << 16):
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line.decode(errors="replace")
    if rest:
        yield rest.decode(errors="replace")
