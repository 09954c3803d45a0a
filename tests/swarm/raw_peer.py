"""A peer that speaks the protocol by hand, to say what no client would say."""

import secrets
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import torch
from torch import Tensor

from swarmllm.demo.local_swarm import LocalServer
from swarmllm.network.p2p.peer import Peer
from swarmllm.network.wire.messages import ErrorHeader, parse
from swarmllm.network.wire.protocol import FrameStream, Message, MessageType, hello
from swarmllm.network.wire.tensor_codec import encode_tensors

HIDDEN = 64


class RawPeer:
    """One stream to one server; `say` and `answer` are all that there is."""

    def __init__(self, stream: FrameStream) -> None:
        self.stream = stream
        self._id = 0
        self.instead: dict[str, Any] = {}
        """Header fields to send in place of the right ones."""

    async def say(self, kind: MessageType, tensors: Mapping[str, Tensor] | None = None, **header: Any) -> int:
        """The id of the request."""
        descriptors, chunks = encode_tensors(dict(tensors or {}))
        self._id += 1
        fields = {"id": self._id, "tensors": descriptors, **header}
        await self.stream.send(kind, fields | self.instead, chunks)
        return self._id

    async def answer(self) -> Message:
        return await self.stream.receive()

    async def error(self) -> str:
        """The code of the error that comes next."""
        message = await self.answer()
        assert message.type is MessageType.ERROR, message
        header = parse(ErrorHeader, message.header, None)
        assert len(header.message) > 10
        return header.code

    async def open(self, **fields: Any) -> str:
        """Open a session on all blocks; returns its id."""
        session = secrets.token_hex(16)
        header = {"session": session, "token": session, "start": 0, "end": 3, "batch_size": 1, "max_length": 32}
        await self.say(MessageType.OPEN, **header | fields)
        return session

    async def step(self, session: str, hidden: Tensor | None = None, **fields: Any) -> None:
        hidden = torch.zeros(1, 4, HIDDEN) if hidden is None else hidden
        header = {"session": session, "epoch": 0, "position": 0, "batch_size": 1, "seq_len": 4, **fields}
        await self.say(MessageType.STEP, {"hidden_states": hidden}, **header)

    def write(self, data: bytes) -> None:
        """Bytes, as they are."""
        self.stream._transport.write(data)

    def stop_reading(self) -> None:
        """Not one answer is read any more."""
        self.stream._transport.pause_reading()


class RawPeers:
    """Streams of one peer id."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self.opened: list[RawPeer] = []

    async def open_stream(self, server: LocalServer, *, greet: bool = True) -> RawPeer:
        addrs = [maddr.partition("/p2p/")[0] for maddr in server.maddrs]
        stream = await self._peer.open_stream(server.peer_id, addrs)
        if greet:
            await hello(stream)
        self.opened.append(RawPeer(stream))
        return self.opened[-1]

    @classmethod
    @asynccontextmanager
    async def join(cls, server: LocalServer) -> AsyncIterator["RawPeers"]:
        async with await Peer.create(initial_peers=server.maddrs, client_mode=True) as peer:
            yield cls(peer)


def dht_node(peer: Peer) -> Any:
    """hivemind's node, by which a hostile peer says what ours never would."""
    assert peer._dht is not None
    return peer._dht._node
