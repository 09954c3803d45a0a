"""The network probe: measured over real streams, and what it says while nothing is known."""

import asyncio

import pytest

from swarmllm.data_structures import ServerInfo, SwarmSnapshot
from swarmllm.errors import PeerUnreachableError
from swarmllm.network.frames import MessageType
from swarmllm.network.stream import FrameStream
from swarmllm.server.network_speed import PROBE_BYTES, NetworkSpeed, measure_mbps

PEER = "a" * 46
OTHER = ServerInfo(peer_id="b" * 46, start=0, end=2)


async def test_a_probe_is_one_message_and_gives_a_speed(streams: tuple[FrameStream, FrameStream]) -> None:
    client, server = streams
    assert await measure_mbps(client) > 0
    message = await server.receive()
    assert (message.type, len(message.payload)) == (MessageType.PROBE, PROBE_BYTES)


async def test_measured_with_another_server_and_never_with_itself(streams: tuple[FrameStream, FrameStream]) -> None:
    asked: list[str] = []

    async def look() -> SwarmSnapshot:
        return SwarmSnapshot(4, (ServerInfo(peer_id=PEER, start=0, end=2), OTHER))

    async def open_stream(server: ServerInfo) -> FrameStream:
        asked.append(server.peer_id)
        return streams[0]

    network = NetworkSpeed(PEER, look, open_stream, period_s=0.0)
    assert network.tokens_per_s(4096) == float("inf")
    running = asyncio.create_task(network.run())
    async with asyncio.timeout(120):
        while not network.mbps:  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0)
    running.cancel()
    assert set(asked) == {OTHER.peer_id}
    assert network.tokens_per_s(4096) == pytest.approx(network.mbps * 1e6 / 8 / 4096)
    assert streams[0].closed


async def test_a_server_that_cannot_be_reached_is_tried_again() -> None:
    tries = 0

    async def look() -> SwarmSnapshot:
        return SwarmSnapshot(4, (OTHER,))

    async def open_stream(server: ServerInfo) -> FrameStream:
        nonlocal tries
        tries += 1
        raise PeerUnreachableError("gone", server.peer_id)

    network = NetworkSpeed(PEER, look, open_stream, period_s=0.0)
    running = asyncio.create_task(network.run())
    async with asyncio.timeout(120):
        while tries < 3:  # noqa: ASYNC110
            await asyncio.sleep(0)
    running.cancel()
    assert network.mbps == 0.0
