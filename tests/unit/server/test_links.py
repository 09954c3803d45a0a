"""Links: what a successor says about things that make no sense ends nothing; how fast they are."""

import asyncio
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest

from swarmllm.errors import PeerError, SessionClosedError
from swarmllm.network.wire.messages import Target
from swarmllm.network.wire.protocol import Message, MessageType
from swarmllm.server.peers import links as links_module
from swarmllm.server.peers.links import Link, Links

PEER = "12D3KooW".ljust(52, "x")
DEEP: Any = msgpack.unpackb(b"\x91" * 1000 + b"\x01", use_list=False)


class Stream:
    """A successor's, which says `messages` and hangs up."""

    peer_id = PEER

    def __init__(self, messages: list[Message]) -> None:
        self._messages = messages

    def expect(self, large_types: frozenset[MessageType]) -> None:
        pass

    def start_keepalive(self) -> None:
        pass

    def abort(self) -> None:
        pass

    async def receive(self) -> Message:
        if not self._messages:
            raise SessionClosedError("the end")
        return self._messages.pop(0)


@pytest.mark.parametrize("value", [DEEP, None, 1, {"a": 1}, "x" * 5000])
@pytest.mark.parametrize("kind", list(MessageType))
async def test_no_answer_of_a_successor_ends_more_than_its_link(kind: MessageType, value: Any) -> None:
    header = {"code": "x", "message": "y"}
    messages = [Message(kind, {**header, name: value}) for name in ("session", "id", "code", "message", "tensors")]

    async def open_stream(_: Target) -> Any:
        return Stream(messages)

    async with asyncio.TaskGroup() as tasks:
        links = Links(open_stream, tasks)
        link = await links.get(Target(peer_id=PEER, token="t" * 32))
        while len(links):  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0)
    assert isinstance(link.error, PeerError)
    assert not messages


async def test_the_network_speed_is_that_of_the_fastest_link_to_another_server() -> None:
    links = Links(asyncio.Future, None)  # type: ignore[arg-type]
    assert links.mbps(PEER) is None
    rates = {"a": 90.0, "b": None, "c": 40.0, PEER: 5000.0}
    links._links = {
        peer: SimpleNamespace(stream=SimpleNamespace(link_rate=SimpleNamespace(mbps=rate)))
        for peer, rate in rates.items()
    }  # type: ignore[misc]
    assert links.mbps(PEER) == 90.0
    links._links.clear()
    assert links.mbps(PEER) == 90.0, "as last seen"


async def test_a_successor_is_watched_closely_as_long_as_something_was_sent_to_it_lately(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(links_module, "WATCHED_S", 0.01)
    stream = Watched()
    link = Link(stream)  # type: ignore[arg-type]
    for _ in range(3):
        await link.send(MessageType.STEP, {})
    assert stream.num_attended == 1
    while stream.liveness.num_relaxed < 1:  # noqa: ASYNC110 - nothing tells
        await asyncio.sleep(0.001)
    await link.send(MessageType.STEP, {})
    assert stream.num_attended == 2
    await link.read()
    assert link._watching is None or link._watching.cancelled()


class Watched(Stream):
    """Counts how often somebody begins to wait for the peer, and ceases to."""

    def __init__(self) -> None:
        super().__init__([])
        self.num_attended = 0
        self.liveness = self
        self.num_relaxed = 0

    async def send(self, *_: Any) -> None:
        pass

    def attend(self) -> None:
        self.num_attended += 1

    def relax(self) -> None:
        self.num_relaxed += 1
