"""Hostile peers beside a real swarm: one of each kind, each with an id and a daemon of its own, at a bounded rate.

    python hostile_peers.py '{"servers": [[PEER_ID, [MADDR, …]], …], "name": …, "fingerprint": …, "num_blocks": 8,
                              "hidden_size": 512}'

They are at it from the line `on` on standard input (or `on KIND KIND …`, for some of them) to the line `off`, which is
answered by a line of JSON: how often each kind has done what it does. The program ends with its input. `soak_run`
starts it, for benchmarks/hostile_soak.py.
"""

import asyncio
import json
import os
import queue
import secrets
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
import torch

from swarmllm.data_structures import ModelRecord, ServerInfo
from swarmllm.errors import SwarmError
from swarmllm.network.p2p import dht_protocol
from swarmllm.network.p2p.block_directory import BlockDirectory, servers_key
from swarmllm.network.p2p.identity import SIGNATURE_BYTES, Identity
from swarmllm.network.p2p.peer import Peer
from swarmllm.network.p2p.records import RecordValidator, key_digest
from swarmllm.network.wire.frames import FORMAT, MAGIC, PREFIX, MessageType
from swarmllm.network.wire.protocol import FrameStream, hello, welcome
from swarmllm.network.wire.tensor_codec import encode_tensors

sys.path.append(str(Path(__file__).parents[2]))  # a program of its own, which pytest hasn't told where `tests` is
from fuzzed_messages import Conversation, wire
from hostile import stop_reading, write_bytes

BOAST = {"throughput": 1e8, "decode_ms_per_block": 0.001, "cache_tokens_left": 1 << 40}
NICE = 10
"""In earnest they would not share these cores. At 19, or scheduled as idle, starting and stopping took minutes."""
LEAVING_S = 30.0
"""For attacks to take back what they have announced, after which the next phase begins in any case."""
MAX_LENGTH = 128
"""Tokens of each session of a flood: 256 of them take half of a server's cache. Longer ones would take all of it, which
docs/security.md says."""
DEEP: Any = {"id": 1, "x": {}}
for _ in range(400):
    DEEP = {"id": 1, "x": DEEP}
WIDE = {"id": 1, "x": [{}] * 30_000}


def _dht_node(peer: Any) -> Any:
    """hivemind's node. `raw_peer` has the same, but isn't importable in a program of its own."""
    return peer._dht._node


@dataclass(frozen=True)
class Swarm:
    """The swarm that is attacked."""

    servers: list[tuple[str, list[str]]]
    name: str
    fingerprint: str
    num_blocks: int
    hidden_size: int


class Mallory:
    """One hostile peer."""

    def __init__(self, swarm: Swarm, peer: Peer) -> None:
        self.swarm, self.peer = swarm, peer
        self.count = 0
        self._streams: set[FrameStream] = set()
        self._readers: set[asyncio.Task[None]] = set()

    async def open(self, number: int, *, greet: bool = True, reads: bool = True) -> FrameStream:
        """A stream to that server."""
        peer_id, maddrs = self.swarm.servers[number % len(self.swarm.servers)]
        stream = await self.peer.open_stream(peer_id, [maddr.partition("/p2p/")[0] for maddr in maddrs])
        self._streams.add(stream)
        stream.gone.add_done_callback(lambda _: self._streams.discard(stream))
        if greet:
            await hello(stream, fingerprint=self.swarm.fingerprint)
        if not reads:
            if not stream.closed:
                stop_reading(stream)
            return stream
        task = asyncio.create_task(swallow(stream))
        self._readers.add(task)
        task.add_done_callback(self._readers.discard)
        return stream

    async def to_each(self) -> AsyncIterator[int]:
        """One server after the other, for ever."""
        while True:
            for number in range(len(self.swarm.servers)):
                yield number

    async def did(self, times_per_s: float) -> None:
        """Count an action, and wait: so many of them a second at most."""
        self.count += 1
        await asyncio.sleep(1 / times_per_s)

    async def leave(self) -> None:
        for stream in tuple(self._streams):
            stream.abort()
        await asyncio.gather(*self._readers)


async def swallow(stream: FrameStream) -> None:
    with suppress(SwarmError):
        while True:
            await stream.receive()


def open_header(session: str, end: int, **fields: Any) -> dict[str, Any]:
    header = {"id": 1, "session": session, "token": session, "start": 0, "end": end, "batch_size": 1}
    return {**header, "max_length": MAX_LENGTH, **fields}


def claim(kind: MessageType, header: bytes, num_bytes: int, total_bytes: int) -> bytes:
    """The begin of a message that is said to be that long."""
    return PREFIX.pack(MAGIC, FORMAT, kind, 0, len(header), num_bytes, total_bytes) + header


# ---------------------------------------------------------------------- as clients


async def floods_with_streams(mallory: Mallory) -> None:
    async for number in mallory.to_each():
        for _ in range(80):
            await mallory.open(number)
            await mallory.did(40)
        if mallory.peer.num_streams > 1000:
            await mallory.leave()


async def floods_with_sessions(mallory: Mallory) -> None:
    async for number in mallory.to_each():
        stream = await mallory.open(number)
        for _ in range(260):
            end = mallory.swarm.num_blocks // 2
            start = (number % 2) * end
            header = open_header(secrets.token_hex(16), start + end, start=start)
            await stream.send(MessageType.OPEN, header)
            await mallory.did(50)
        stream.abort()


async def sends_byte_by_byte(mallory: Mallory) -> None:
    streams: list[FrameStream] = []
    async for number in mallory.to_each():
        if len(streams) < 64:
            streams.append(await mallory.open(number))
            write_bytes(streams[-1], claim(MessageType.FORWARD, b"\x80", 100_000, 100_000))
        for stream in streams:
            with suppress(SwarmError):
                write_bytes(stream, b"x")
        await mallory.did(4)


async def sends_large_headers(mallory: Mallory) -> None:
    async for number in mallory.to_each():
        stream = await mallory.open(number)
        for header in (DEEP, WIDE):
            write_bytes(stream, wire(MessageType.STEP, header))
            await mallory.did(4)


async def claims_large_messages(mallory: Mallory) -> None:
    async for number in mallory.to_each():
        stream = await mallory.open(number, greet=mallory.count % 2 == 0)
        write_bytes(stream, claim(MessageType.FORWARD, b"\x80", 1 << 18, 1 << 30))
        await mallory.did(10)


async def leaves_messages_unfinished(mallory: Mallory) -> None:
    async for number in mallory.to_each():
        stream = await mallory.open(number)
        write_bytes(stream, claim(MessageType.FORWARD, b"\x80", 1 << 20, 8 << 20) + bytes(1 << 20))
        for _ in range(4):
            write_bytes(stream, claim(MessageType.CONTINUE, b"", 1 << 20, 8 << 20) + bytes(1 << 20))
            await mallory.did(4)


async def queues_steps(mallory: Mallory) -> None:
    async for number in mallory.to_each():
        stream, half = await mallory.open(number), mallory.swarm.num_blocks // 2
        session, start = secrets.token_hex(16), (number % 2) * half
        await stream.send(MessageType.OPEN, open_header(session, start + half, start=start))
        hidden = torch.zeros(1, 64, mallory.swarm.hidden_size)
        descriptors, chunks = encode_tensors({"hidden_states": hidden})
        header = {"id": 1, "session": session, "epoch": 0, "position": 0, "batch_size": 1, "seq_len": 64}
        for _ in range(20):
            await stream.send(MessageType.STEP, header | {"tensors": descriptors}, chunks)
            await mallory.did(20)
        stream.abort()


async def has_addresses_dialled(mallory: Mallory) -> None:
    async for number in mallory.to_each():
        stream, half = await mallory.open(number), mallory.swarm.num_blocks // 2
        session, start = secrets.token_hex(16), (number % 2) * half
        await stream.send(MessageType.OPEN, open_header(session, start + half, start=start))
        for port in range(20):
            successor = {"peer_id": Identity.generate().peer_id, "session": session, "token": session}
            successor["addrs"] = [f"/ip4/127.0.0.1/tcp/{8000 + port}"]
            header = {"id": port, "session": session, "epoch": 0, "successor": successor}
            await stream.send(MessageType.LINK, header)
            await mallory.did(10)
        stream.abort()


async def never_reads(mallory: Mallory) -> None:
    async for number in mallory.to_each():
        stream = await mallory.open(number, reads=False)
        for _ in range(50):
            write_bytes(stream, wire(MessageType.OPEN, {"id": 1, "surprise": "x" * 100}) * 10)
            await mallory.did(50)


async def talks_nonsense(mallory: Mallory) -> None:
    async for number in mallory.to_each():
        stream = await mallory.open(number)
        for message in Conversation(mallory.count, [], mallory.swarm.hidden_size).messages():
            write_bytes(stream, wire(*message))
            await mallory.did(50)


# ---------------------------------------------------------------------- in the DHT


async def floods_a_key(mallory: Mallory) -> None:
    """With records of invented identities, and with megabytes of one."""
    key = servers_key(mallory.swarm.fingerprint)
    small = [record(key, Identity.generate(), 500) for _ in range(256)]
    one = Identity.generate()
    large = [record(servers_key(f"{number:08}"), one, 8000) for number in range(128)]
    node = _dht_node(mallory.peer)
    while True:
        await asyncio.sleep(0.1)  # there may be nobody in the table, if all were too busy to answer
        for target in list(node.protocol.routing_table.peer_id_to_uid):
            for some in (small, large):
                await node.protocol.call_store(
                    target,
                    [dht_protocol.DHTID.from_bytes(one.key) for one in some],
                    [one.value for one in some],
                    [one.expiration_time for one in some],
                    [msgpack.unpackb(one.subkey) for one in some],
                )
                await mallory.did(4)


def record(key: str, identity: Identity, num_bytes: int) -> Any:
    owner, expiration = msgpack.packb(identity.peer_id), time.time() + 800
    padding = "x" * max(0, num_bytes - SIGNATURE_BYTES - len(key) - 16)
    unsigned = dht_protocol.SentRecord(key_digest(key), owner, msgpack.packb([key, padding]), expiration)
    return dht_protocol.SentRecord(unsigned.key, owner, RecordValidator(identity).sign_value(unsigned), expiration)


# ---------------------------------------------------------------------- as servers


@asynccontextmanager
async def announced(mallory: Mallory, start: int, end: int, **fields: Any) -> AsyncIterator[None]:
    swarm, peer = mallory.swarm, mallory.peer
    directory = BlockDirectory(peer)
    model = ModelRecord(name=swarm.name, fingerprint=swarm.fingerprint, num_blocks=swarm.num_blocks)
    info = ServerInfo(peer_id=peer.peer_id, addrs=peer.addrs, start=start, end=end, **BOAST, **fields)
    await directory.announce(model, info, ttl_s=60)
    try:
        yield
    finally:
        await directory.withdraw(model)


async def is_a_ghost(mallory: Mallory) -> None:
    async with announced(mallory, 0, mallory.swarm.num_blocks):
        while True:
            await mallory.did(0.2)


async def is_silent_after_greeting(mallory: Mallory) -> None:
    traits = await traits_of(mallory, 0)

    async def serve(stream: FrameStream) -> None:
        await welcome(stream, info={"start": 0, "end": mallory.swarm.num_blocks, "traits": traits})
        while True:
            await stream.receive()
            mallory.count += 1

    await serve_announced(mallory, 0, mallory.swarm.num_blocks, serve)


async def accuses_others(mallory: Mallory) -> None:
    """Takes sessions, and says of each step that its predecessor has sent something absurd."""
    half, end = mallory.swarm.num_blocks // 2, mallory.swarm.num_blocks
    traits, owners = await traits_of(mallory, 1), dict[str, FrameStream]()

    async def serve(stream: FrameStream) -> None:
        await welcome(stream, info={"start": half, "end": end, "traits": traits})
        while True:
            message = await stream.receive()
            number, session = message.header.get("id"), message.header.get("session")
            if message.type is MessageType.OPEN:
                owners[session] = stream
            if message.type in (MessageType.OPEN, MessageType.LINK, MessageType.ATTACH):
                await stream.send(MessageType.RESULT, {"id": number})
            elif message.type is MessageType.STEP and session in owners:
                said = {"code": "corrupt_activations", "message": "absurd values", "id": number, "session": session}
                said["peer_id"] = mallory.swarm.servers[0][0] if owners[session] is stream else stream.peer_id
                mallory.count += 1
                with suppress(SwarmError):
                    await owners[session].send(MessageType.ERROR, said)

    await serve_announced(mallory, half, end, serve)


async def traits_of(mallory: Mallory, number: int) -> Any:
    """The traits that an honest server announces in its greeting."""
    peer_id, maddrs = mallory.swarm.servers[number]
    stream = await mallory.peer.open_stream(peer_id, [maddr.partition("/p2p/")[0] for maddr in maddrs])
    try:
        return (await hello(stream)).info["traits"]
    finally:
        stream.abort()


async def serve_announced(
    mallory: Mallory, start: int, end: int, serve: Callable[[FrameStream], Awaitable[None]]
) -> None:
    await mallory.peer.serve_streams(serve)
    async with announced(mallory, start, end):
        try:
            await asyncio.Event().wait()
        finally:
            mallory.peer.abort_streams()


CLIENTS = (
    floods_with_streams,
    floods_with_sessions,
    sends_byte_by_byte,
    sends_large_headers,
    claims_large_messages,
    leaves_messages_unfinished,
    queues_steps,
    has_addresses_dialled,
    never_reads,
    talks_nonsense,
)
MEMBERS = (floods_a_key, is_a_ghost, is_silent_after_greeting, accuses_others)
"""They listen and take part in the DHT, which clients only read."""


async def keep_at_it(mallory: Mallory, attack: Callable[[Mallory], Awaitable[None]]) -> None:
    """Whatever the servers do about it."""
    task = asyncio.current_task()
    try:
        while task is None or not task.cancelling():  # an error on the way out hides that somebody cancelled
            with suppress(SwarmError, OSError):
                await attack(mallory)
            await asyncio.sleep(0.5)
    finally:
        await mallory.leave()


async def main(swarm: Swarm, lines: "queue.SimpleQueue[str]") -> None:
    maddrs = [maddr for _, maddrs in swarm.servers for maddr in maddrs]
    mallories = {
        attack: Mallory(swarm, await Peer.create(initial_peers=maddrs, client_mode=attack in CLIENTS))
        for attack in CLIENTS + MEMBERS
    }
    running, before = list[asyncio.Task[None]](), Counter[str]()
    print("ready", flush=True)
    while True:
        line, *kinds = (await asyncio.to_thread(lines.get)).split()
        if line == "on":
            chosen = {attack: one for attack, one in mallories.items() if not kinds or attack.__name__ in kinds}
            running = [asyncio.create_task(keep_at_it(one, attack)) for attack, one in chosen.items()]
        else:
            for task in running:
                task.cancel()
            await asyncio.wait(running, timeout=LEAVING_S)
            counts = Counter({attack.__name__: one.count for attack, one in mallories.items()})
            print(json.dumps(counts - before), flush=True)
            before = counts


def listen(lines: "queue.SimpleQueue[str]", directory: str) -> None:
    """To standard input, and end the program with it, whatever that is at, or waits for.

    An orderly end would leave 14 swarms. Where the servers have gone, and these cores are busy with others, that took
    longer than anybody waits, and whoever started this may have been killed. The daemons end with their connections.
    """
    for line in sys.stdin:
        lines.put(line)
    shutil.rmtree(directory, ignore_errors=True)
    os._exit(0)


if __name__ == "__main__":
    os.nice(NICE)
    torch.set_num_threads(1)
    tempfile.tempdir = tempfile.mkdtemp(prefix="hostile-")  # of the daemons, too
    told: "queue.SimpleQueue[str]" = queue.SimpleQueue()
    threading.Thread(target=listen, args=[told, tempfile.tempdir], daemon=True).start()
    asyncio.run(main(Swarm(**json.loads(sys.argv[1])), told))
