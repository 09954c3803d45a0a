"""The abilities of a machine: its memory and speed, measured once, and the round trips to other machines.

Used by the agent, for its record.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from swarmllm.errors import ConfigurationError
from swarmllm.machines.catalogue import this_machine
from swarmllm.machines.settings import MachineConfig
from swarmllm.machines.state import StateDirectory
from swarmllm.network.p2p.peer import Peer
from swarmllm.network.relay.service import Caller
from swarmllm.network.wire.stream import abort_transport
from swarmllm.version import __version__

LEAST_BYTES = 1 << 20
"""Least memory to offer. Assumed: no block of any use is smaller, so less is a slip of the pen."""
ECHO_S = 30.0
"""Seconds between two rounds of measuring round trips, and the longest time of one."""
ECHO_PROTOCOL = "/swarmllm/echo/1"
"""libp2p's name for streams that answer with the bytes that came."""


@dataclass(frozen=True)
class Offer:
    """Memory and speed that this machine offers."""

    memory_bytes: int
    bytes_per_s: float
    ms_per_block: float
    format_bytes_per_s: tuple[tuple[str, float], ...]
    num_devices: int = 1
    device_bytes: int = 1 << 50
    """All memory of the smallest device."""


def require_offer(config: MachineConfig) -> None:
    """Raise ConfigurationError if a device can't be used, or has less memory than `max_memory`. Measures nothing."""
    from swarmllm.server.device.device import resolve_device, usable_bytes

    for name in _device_names(config):
        offered = usable_bytes(resolve_device(name), config.max_memory)
        if config.max_memory is not None and offered < LEAST_BYTES:
            raise ConfigurationError(
                f"max_memory {config.max_memory!r} is {offered / 1e6:.2g} MB, too little for any block: give it in GB, "
                "like 12, or as a share, like 50%"
            )


def _device_names(config: MachineConfig) -> tuple[str, ...]:
    import torch

    if config.device != ("auto",):
        return config.device
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return tuple(f"cuda:{index}" for index in range(count)) or ("cpu",)


def measure_offer(config: MachineConfig, state: StateDirectory) -> Offer:
    """The memory that is free now, and the speed of the devices, which is measured once and noted.

    Raises:
        ConfigurationError: a device can't be used, or has less memory than `max_memory`.
    """
    from swarmllm.server.device.device import hardware_name, resolve_device, total_bytes

    names = _device_names(config)
    hardware = ", ".join(hardware_name(resolve_device(name)) for name in names)
    noted = state.read("speeds.json", {})
    is_known = noted.get("hardware") == hardware and noted.get("version") == __version__
    machines = this_machine(config.max_memory, names, noted["formats"] if is_known else None).machines
    slowest = min(machines, key=lambda one: one.bytes_per_s)  # a token passes all devices, one after the other
    if not is_known:
        formats = dict(slowest.format_bytes_per_s)
        state.keep("speeds.json", {"hardware": hardware, "version": __version__, "formats": formats})
    return Offer(
        min(one.memory_bytes for one in machines) * len(machines),  # servers share blocks evenly
        slowest.bytes_per_s,
        slowest.ms_per_block,
        tuple(slowest.format_bytes_per_s.items()),
        len(machines),
        min(total_bytes(resolve_device(name)) for name in names),
    )


async def answer_echoes(caller: Caller, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer a stream that measures a round trip: two bytes, one after the other."""
    async with asyncio.timeout(ECHO_S):
        for _ in range(2):
            writer.write(await reader.readexactly(1))
            await writer.drain()


async def measure_round_trip_ms(peer: Peer, peer_id: str, addrs: Sequence[str]) -> float:
    """The milliseconds of a round trip, in three digits. The first byte waits until the stream is open."""
    async with asyncio.timeout(ECHO_S):
        reader, writer = await peer.open_protocol(ECHO_PROTOCOL, peer_id, addrs)
        try:
            for _ in range(2):
                began_at = time.monotonic()
                writer.write(b"?")
                await reader.readexactly(1)
            return float(f"{1e3 * (time.monotonic() - began_at):.2g}")
        finally:
            abort_transport(writer.transport)
