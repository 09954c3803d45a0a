"""Bad messages through real daemons: each is refused or ends its own stream, and others are served as before.

`tests/faults/test_hostile_streams.py`, `test_hostile_sessions.py` and `test_hostile_requests.py` have all others.
"""

import socket
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import torch
from pytest_asyncio import fixture as in_loop
from raw_peer import HIDDEN, RawPeer, RawPeers
from swarm_models import generate_seeded, prompt
from tests.left_tasks import no_task_left_behind
from transformers import PreTrainedModel

from swarmllm import LocalSwarm
from swarmllm.demo.local_swarm import LocalServer
from swarmllm.network.p2p.identity import Identity
from swarmllm.network.wire.protocol import MessageType

pytestmark = pytest.mark.asyncio(loop_scope="module")
_no_task_left_behind = in_loop(no_task_left_behind, loop_scope="module")


@pytest.fixture(scope="module")
def server(swarm: LocalSwarm) -> LocalServer:
    """It holds blocks [0, 3)."""
    return swarm.servers[0]


@pytest.fixture(scope="module")
def expected(local: PreTrainedModel) -> list[list[int]]:
    tokens: list[list[int]] = generate_seeded(local, prompt(), max_new_tokens=3).tolist()
    return tokens


@pytest.fixture(autouse=True)
def _others_are_served(model: Any, expected: list[list[int]]) -> Iterator[None]:
    with model.inference_session(max_length=32) as session:
        session.step(model.embed(prompt(1, 4)))  # open before, and in use after
        yield
        session.position = 0
        assert generate_seeded(model, prompt(), max_new_tokens=3).tolist() == expected
        assert session.num_repairs == 0, "the session must not have noticed anything"


@in_loop(scope="module", loop_scope="module")
async def peers(server: LocalServer) -> AsyncIterator[RawPeers]:
    """Streams of one peer for all tests."""
    async with RawPeers.join(server) as peers:
        yield peers


@in_loop(loop_scope="module")
async def raw(peers: RawPeers, server: LocalServer) -> AsyncIterator[RawPeer]:
    raw = await peers.open_stream(server)
    yield raw
    raw.stream.abort()


async def test_port_scan(raw: RawPeer, server: LocalServer) -> None:
    """A server looks at no address that a client names, and says the same of open ports, closed ones and names."""
    session = await raw.open()
    await raw.answer()
    said = set()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        port = listener.getsockname()[1]
        for number, addr in enumerate(
            (f"/ip4/127.0.0.1/tcp/{port}", f"/dns4/localhost/tcp/{port}", "/ip4/127.0.0.1/tcp/1")
        ):
            nobody = {"peer_id": Identity.generate().peer_id, "addrs": [addr], "token": "0" * 32}
            await raw.say(MessageType.LINK, session=session, epoch=number, successor=nobody | {"session": "0" * 32})
            message = await raw.answer()
            assert message.header.pop("peer_id") == nobody["peer_id"]
            said.add((message.header["code"], message.header["message"]))
            batch = {"start": 0, "end": 3, "batch_size": 1, "seq_len": 4}
            await raw.say(MessageType.FORWARD, {"hidden_states": torch.zeros(1, 4, HIDDEN)}, target=nobody, **batch)
            assert (await raw.answer()).header["pushed"] is False
        assert len(said) == 1
        assert {code for code, _ in said} == {"unreachable"}
        # One that is a server is dialled where it says that it is: this one, itself, which refuses for another reason.
        known = {"peer_id": server.peer_id, "addrs": [f"/ip4/127.0.0.1/tcp/{port}"], "token": "0" * 32}
        await raw.say(MessageType.LINK, session=session, epoch=9, successor=known | {"session": "0" * 32})
        assert await raw.error() == "session_lost"
        with pytest.raises(BlockingIOError):
            listener.accept()


async def test_too_many_requests_at_once(raw: RawPeer) -> None:
    codes = []
    header = {"start": 0, "end": 3, "batch_size": 1, "seq_len": 512}
    for _ in range(200):
        await raw.say(MessageType.FORWARD, {"hidden_states": torch.zeros(1, 512, HIDDEN)}, **header)
    for _ in range(200):
        message = await raw.answer()
        codes.append(message.header["code"] if message.type is MessageType.ERROR else None)
    assert set(codes) <= {None, "overloaded"}
    assert None in codes
