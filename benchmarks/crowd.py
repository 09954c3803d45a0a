"""Hundreds of clients on one server: connections, memory, and the time of their steps.

    python benchmarks/crowd.py [--clients 1 50 250 500] [--per_peer 1] [--think 5] [--seconds 30]

Every client is a peer with its own libp2p daemon, as in reality. It has one session, and sends a step of one token
`--think` seconds after the last answer, like a user who reads. The model is so small that computing hardly counts. All
share one machine; on a small one they, not the server, are the busy ones. A daemon takes 62 MB; if that is too much for
500, let several clients share a peer: `--per_peer 2`.
"""

import argparse
import asyncio
import random
import secrets
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
import transformers
from common import SHAPES, median, save_random_model, save_results, table

from swarmllm import LocalSwarm
from swarmllm.demo.local_swarm import LocalServer
from swarmllm.network.p2p.peer import Peer
from swarmllm.network.wire.protocol import FrameStream, MessageType, hello
from swarmllm.network.wire.tensor_codec import encode_tensors

SHAPE = "64x8"
AT_ONCE = 8
"""Clients that start at a time."""
MAX_LENGTH = 1024
ANSWER_TIMEOUT_S = 120.0


class Client:
    """One stream to a server, with one session."""

    def __init__(self, stream: FrameStream) -> None:
        self._stream = stream
        self._session = secrets.token_hex(16)
        self._num_messages = self._position = 0
        self.steps_s: list[float] = []

    @classmethod
    async def join(cls, peer: Peer, server: LocalServer) -> "Client":
        stream = await peer.open_stream(server.peer_id, [maddr.partition("/p2p/")[0] for maddr in server.maddrs])
        await hello(stream)
        stream.start_keepalive()
        client = cls(stream)
        span = {"start": 0, "end": SHAPES[SHAPE]["blocks"]}
        await client._ask(MessageType.OPEN, {**span, "token": client._session, "max_length": MAX_LENGTH})
        return client

    async def _ask(self, kind: MessageType, header: dict[str, Any], **tensors: torch.Tensor) -> None:
        self._num_messages += 1
        descriptors, chunks = encode_tensors(tensors)
        fields = {"id": self._num_messages, "session": self._session, "batch_size": 1, "tensors": descriptors}
        await self._stream.send(kind, fields | header, chunks)
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            answer = await self._stream.receive()
        if answer.type is not MessageType.RESULT:
            raise SystemExit(f"the server refuses: {answer.header}")

    async def read(self, think_s: float, until: float) -> None:
        """One token after the other, with pauses of `think_s` on average."""
        while (pause_s := random.expovariate(1 / think_s)) < until - time.perf_counter():
            await asyncio.sleep(pause_s)
            began_at = time.perf_counter()
            step = {"epoch": 0, "position": self._position, "seq_len": 1}
            await self._ask(MessageType.STEP, step, hidden_states=torch.randn(1, 1, SHAPES[SHAPE]["hidden"]))
            self._position += 1
            self.steps_s.append(time.perf_counter() - began_at)


def of_server(pid: int) -> dict[str, float]:
    """Memory and connections of a server and its daemon, and the processor time that they have taken."""
    server = psutil.Process(pid)
    daemon = next(child for child in server.children() if "p2pd" in child.name())
    times = [process.cpu_times() for process in (server, daemon)]
    return {
        "connections": sum(one.status == psutil.CONN_ESTABLISHED for one in daemon.net_connections("tcp")),
        "server_mb": server.memory_info().rss / 1e6,
        "p2pd_mb": daemon.memory_info().rss / 1e6,
        "cpu_s": sum(one.user + one.system for one in times),
    }


async def measured(clients: Sequence[Client], pid: int, args: argparse.Namespace) -> dict[str, float]:
    """The results of so many clients, and their cost."""
    before, began_at = of_server(pid), time.perf_counter()
    for client in clients:
        client.steps_s.clear()
    await asyncio.gather(*(client.read(args.think, began_at + args.seconds) for client in clients))
    took_s, after = time.perf_counter() - began_at, of_server(pid)
    steps = sorted(step_s for client in clients for step_s in client.steps_s)
    return {
        "clients": len(clients),
        "connections": after["connections"],
        "steps_per_s": round(len(steps) / took_s, 1),
        "median_ms": round(median(steps) * 1e3, 1),
        "p95_ms": round(steps[int(0.95 * len(steps))] * 1e3, 1),
        "server_mb": round(after["server_mb"]),
        "p2pd_mb": round(after["p2pd_mb"]),
        "server_cores": round((after["cpu_s"] - before["cpu_s"]) / took_s, 2),
    }


async def run(server: LocalServer, args: argparse.Namespace) -> list[dict[str, float]]:
    peers: list[Peer] = []
    clients: list[Client] = []
    results = []

    async def one_more_peer() -> None:
        peer = await Peer.create(initial_peers=server.maddrs, client_mode=True)
        peers.append(peer)
        clients.extend([await Client.join(peer, server) for _ in range(args.per_peer)])

    try:
        for number in sorted(args.clients):
            while len(clients) < number:
                some = min(AT_ONCE, -(-(number - len(clients)) // args.per_peer))
                await asyncio.gather(*(one_more_peer() for _ in range(some)))
            results.append(await measured(clients, server.pid, args))
            print(results[-1], flush=True)
        return results
    finally:
        await asyncio.gather(*(peer.close() for peer in peers), return_exceptions=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--clients", nargs="+", type=int, default=[1, 50, 250, 500])
    parser.add_argument("--per_peer", type=int, default=1, help="clients that share a peer")
    parser.add_argument("--think", type=float, default=5.0, help="seconds between an answer and the next step")
    parser.add_argument("--seconds", type=float, default=30.0)
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    random.seed(0)
    with tempfile.TemporaryDirectory() as directory:
        path = save_random_model(SHAPE, Path(directory))
        spans = [(0, SHAPES[SHAPE]["blocks"])]
        options = {"quant_type": "none", "num_threads": 1, "attn_cache_tokens": max(args.clients) * MAX_LENGTH}
        with LocalSwarm(path, spans, **options) as swarm:
            results = asyncio.run(run(swarm.servers[0], args))
    print(table(list(results[0]), [list(result.values()) for result in results]))
    print(f"written to {save_results('crowd', results)}")


if __name__ == "__main__":
    main()
