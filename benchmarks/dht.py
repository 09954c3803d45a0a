"""The DHT with many real nodes on one machine: look-ups, announcements, and what they cost.

    python benchmarks/dht.py [--nodes 100] [--blocks 126] [--reads 40]

Every node is a peer as servers have it, with a libp2p daemon of its own; all announce spans of one model. Then a third
of the daemons is killed at once, and look-ups go on. Bytes are those of the loopback device, CPU seconds those of this
process and of all daemons; one announcement or look-up after the other, so times are those of a quiet swarm.
"""

import argparse
import asyncio
import os
import random
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
from common import median, save_results, table

from swarmllm.data_structures import ModelRecord, ServerInfo
from swarmllm.network.p2p.block_directory import BlockDirectory
from swarmllm.network.p2p.peer import Peer

FINGERPRINT = "0123456789abcdef0123456789abcdef"
AT_ONCE = 8
"""Peers that start at a time."""
SPAN = 12


def loopback_bytes() -> int:
    lines = Path("/proc/net/dev").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.strip().startswith("lo:"))


def cpu_s(peers: Sequence[Peer]) -> float:
    daemons = (psutil.Process(peer.daemon_pid).cpu_times() for peer in peers)
    return time.process_time() + sum(times.user + times.system for times in daemons)


async def measured(
    peers: Sequence[Peer], calls: Sequence[Callable[[], Awaitable[Any]]]
) -> tuple[dict[str, float], list[Any]]:
    """Times, bytes and CPU time of one call, and what they returned."""
    bytes_before, cpu_before = loopback_bytes(), cpu_s(peers)
    times, results = [], []
    for call in calls:
        began_at = time.perf_counter()
        results.append(await call())
        times.append((time.perf_counter() - began_at) * 1e3)
    number = len(calls)
    return {
        "ms": median(times),
        "p95_ms": sorted(times)[int(0.95 * number)],
        "kb": (loopback_bytes() - bytes_before) / number / 1e3,
        "cpu_ms": (cpu_s(peers) - cpu_before) / number * 1e3,
    }, results


async def run(args: argparse.Namespace) -> dict[str, Any]:
    random.seed(0)
    record = ModelRecord(name="model", fingerprint=FINGERPRINT, num_blocks=args.blocks)
    peers = [await Peer.create()]
    try:
        for number in range(1, args.nodes, AT_ONCE):
            joins = random.sample(peers, min(3, len(peers)))
            maddrs = [peer.join_maddrs[0] for peer in joins]
            some = range(min(AT_ONCE, args.nodes - number))
            peers += await asyncio.gather(*(Peer.create(initial_peers=maddrs) for _ in some))
        found: dict[str, Any] = {}

        def announcing(peer: Peer) -> Callable[[], Awaitable[bool]]:
            start = random.randrange(args.blocks - SPAN)
            info = ServerInfo(peer_id=peer.peer_id, addrs=peer.addrs, start=start, end=start + SPAN)
            return lambda: BlockDirectory(peer).announce(record, info, ttl_s=900)

        def reading(peer: Peer) -> Callable[[], Awaitable[tuple[ServerInfo, ...]]]:
            return lambda: BlockDirectory(peer).servers(FINGERPRINT)

        found["announcement"], taken = await measured(peers, [announcing(peer) for peer in peers])
        found["refused announcements"] = taken.count(False)
        readers = random.sample(peers, min(args.reads, len(peers)))
        found["look-up"], seen = await measured(peers, [reading(peer) for peer in readers])
        found["fewest seen"] = min(map(len, seen))
        client = await Peer.create(initial_peers=[peers[0].join_maddrs[0]], client_mode=True)
        found["look-up of a new client"], seen = await measured(peers, [reading(client)] * 10)
        found["fewest seen by it"] = min(map(len, seen))
        dead = set(random.sample(range(1, len(peers)), len(peers) // 3))
        for number in dead:
            os.kill(peers[number].daemon_pid, signal.SIGKILL)
        alive = [peer for number, peer in enumerate(peers) if number not in dead]
        await asyncio.sleep(1)
        readers = random.sample(alive, min(args.reads, len(alive)))
        found["look-up, a third dead"], seen = await measured(alive, [reading(peer) for peer in readers])
        living = {peer.peer_id for peer in alive}
        found["fewest living seen"] = min(sum(info.peer_id in living for info in infos) for infos in seen)
        found["look-up after that"], _ = await measured(alive, [reading(peer) for peer in readers])
        found["announcement after that"], taken = await measured(alive, [announcing(peer) for peer in alive])
        found["refused after that"] = taken.count(False)
        found["living"] = len(alive)
        await client.close()
        return found
    finally:
        await asyncio.gather(*(peer.close() for peer in peers), return_exceptions=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--nodes", type=int, default=100)
    parser.add_argument("--blocks", type=int, default=126)
    parser.add_argument("--reads", type=int, default=40)
    args = parser.parse_args()
    found = asyncio.run(run(args))
    rows = [[name, *one.values()] for name, one in found.items() if isinstance(one, dict)]
    print(table(["one", "ms, median", "ms, p95", "kB on the wire", "CPU ms, all nodes"], rows))
    print({name: one for name, one in found.items() if not isinstance(one, dict)})
    print(f"written to {save_results('dht', found)}")


if __name__ == "__main__":
    main()
