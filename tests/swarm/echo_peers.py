"""Peers whose streams return what they are sent, and what they announce."""

from collections.abc import Awaitable

from swarmllm.data_structures import ModelRecord, ServerInfo
from swarmllm.network.p2p.peer import Peer
from swarmllm.network.wire.protocol import FrameStream, hello, welcome

FINGERPRINT = "abcdefgh"
MODEL = ModelRecord(name="tiny", fingerprint=FINGERPRINT, num_blocks=4)


async def echo(stream: FrameStream) -> None:
    while True:
        message = await stream.receive()
        await stream.send(message.type, message.header, [message.payload])


async def polite_echo(stream: FrameStream) -> None:
    """Takes large messages, as after any greeting."""
    await welcome(stream)
    await echo(stream)


async def greeted(opening: Awaitable[FrameStream]) -> FrameStream:
    stream = await opening
    await hello(stream)
    return stream


def info(peer: Peer) -> ServerInfo:
    return ServerInfo(peer_id=peer.peer_id, addrs=peer.addrs, start=0, end=4)
