"""One hop between two processes: through libp2p's daemons, over TLS, and on one machine.

    python benchmarks/hops.py [--rounds 30] [--large_mb 64]

Messages go to a server process and come back. The three ways take turns. Processor time is that of both Pythons and
both daemons.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence

import psutil
import uvloop
from common import median, save_results, table

from swarmllm.network.p2p.peer import Peer
from swarmllm.network.wire.protocol import FrameStream, MessageType, hello, welcome

WAYS = ("daemons", "TLS", "one machine")
SMALL_BYTES = 16 << 10
SMALL_PER_ROUND = 100
LARGE_ROUNDS = 8
MOVE_TIMEOUT_S = 10.0


async def echo(stream: FrameStream) -> None:
    await welcome(stream)
    while True:
        message = await stream.receive()
        await stream.send(message.type, message.header, [message.payload])


async def serve() -> None:
    """Print how to join, and serve until standard input ends."""
    async with await Peer.create() as peer:
        await peer.serve_streams(echo)
        print(json.dumps([peer.peer_id, peer.join_maddrs, peer.daemon_pid]), flush=True)
        await asyncio.to_thread(sys.stdin.read)


async def opened(peer: Peer, peer_id: str, way: str) -> FrameStream:
    """A stream that goes this way."""
    stream = await peer.open_stream(peer_id)
    await hello(stream)
    if way == "daemons" or stream.offered is None:
        stream.offered = None
    elif way == "TLS":
        stream.offered = stream.offered.model_copy(update={"directory": ""})
    async with asyncio.timeout(MOVE_TIMEOUT_S):
        while way != "daemons" and not stream.is_moved:
            await there_and_back(stream, 1)
    return stream


async def there_and_back(stream: FrameStream, num_bytes: int) -> float:
    """Seconds of one message and its echo."""
    began_at = time.perf_counter()
    await stream.send(MessageType.STEP, {"id": 1}, [bytes(num_bytes)])
    await stream.receive()
    return time.perf_counter() - began_at


def processor_s(pids: Sequence[int]) -> float:
    return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids)


async def measure(maddrs: Sequence[str], peer_id: str, pids: Sequence[int], rounds: int, large: int) -> None:
    small: dict[str, list[float]] = {way: [] for way in WAYS}
    large_s: dict[str, list[float]] = {way: [] for way in WAYS}
    used_s, large_used_s = dict.fromkeys(WAYS, 0.0), dict.fromkeys(WAYS, 0.0)
    async with await Peer.create(initial_peers=maddrs, client_mode=True) as peer:
        streams = {way: await opened(peer, peer_id, way) for way in WAYS}
        pids = [os.getpid(), peer.daemon_pid, *pids]
        for _ in range(rounds):
            for way, stream in streams.items():
                before_s = processor_s(pids)
                small[way] += [await there_and_back(stream, SMALL_BYTES) for _ in range(SMALL_PER_ROUND)]
                used_s[way] += processor_s(pids) - before_s
        for _ in range(LARGE_ROUNDS):
            for way, stream in streams.items():
                before_s = processor_s(pids)
                large_s[way].append(await there_and_back(stream, large))
                large_used_s[way] += processor_s(pids) - before_s
    rows = [
        [
            way,
            median(small[way]) * 1e3,
            min(small[way]) * 1e3,
            used_s[way] / len(small[way]) * 1e3,
            2 * large / 1e6 / median(large_s[way]),
            2 * large / 1e6 / min(large_s[way]),
            large_used_s[way] / LARGE_ROUNDS / (2 * large / 1e6) * 1e3,
        ]
        for way in WAYS
    ]
    header = [
        "16 KB there and back",
        "median ms",
        "least ms",
        "processor ms",
        "large, MB/s",
        "at best",
        "processor ms per MB",
    ]
    print(table(header, rows))
    save_results("hops", [dict(zip(header, row, strict=True)) for row in rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--large_mb", type=int, default=64)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        uvloop.run(serve())
        return
    command = [sys.executable, __file__, "--serve"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        peer_id, maddrs, daemon_pid = json.loads(server.stdout.readline())
        uvloop.run(measure(maddrs, peer_id, (server.pid, daemon_pid), args.rounds, args.large_mb << 20))
        server.stdin.close()


if __name__ == "__main__":
    main()
