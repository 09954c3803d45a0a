"""Swarms of servers that nobody can dial: `--reachability private` on 127.0.0.1 stands for a NAT."""

import asyncio
import json
import os
import signal
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

from commands import Running, command
from swarm_models import OPTIONS

from swarmllm.network.p2p.peer import Peer
from swarmllm.network.relay.service import RelayRules

Result = TypeVar("Result")


class Relays:
    """Relays of this process, in a thread of their own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="relays")
        self._thread.start()
        self.peers: list[Peer] = []
        self._frozen: set[int] = set()

    def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def add(self, **options: Any) -> Peer:
        self.peers.append(self.run(Peer.create(initial_peers=self.maddrs, relay=RelayRules(**options))))
        return self.peers[-1]

    @property
    def maddrs(self) -> list[str]:
        """Addresses of the peers that work."""
        return [maddr for peer in self.working for maddr in peer.join_maddrs]

    @property
    def working(self) -> list[Peer]:
        return [peer for peer in self.peers if not peer._daemon.has_exited and peer.daemon_pid not in self._frozen]

    def strike(self, signum: signal.Signals) -> None:
        """Kill or freeze the daemon of the one through which most passes."""
        victim = max(self.working, key=lambda peer: (peer.relay.num_circuits, peer.relay.num_bytes))
        if signum == signal.SIGSTOP:
            self._frozen.add(victim.daemon_pid)
        os.kill(victim.daemon_pid, signum)

    def close(self) -> None:
        for pid in self._frozen:
            os.kill(pid, signal.SIGCONT)
        for peer in reversed(self.peers):
            self.run(peer.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class Homes:
    """Two relays, and servers that only they reach."""

    def __init__(self, model: Path, logs: Path) -> None:
        self._model, self._logs = model, logs
        self.relays = Relays()
        self.servers: list[Running] = []

    def add_server(self, start: int, end: int, *flags: str) -> Running:
        options = [part for name, value in OPTIONS.items() for part in (f"--{name}", str(value))]
        where = ("--block_indices", f"{start}:{end}", "--initial_peers", *self.relays.maddrs)
        listen = ("--host_maddrs", "/ip4/127.0.0.1/tcp/0")
        log = self._logs / f"server-{len(self.servers)}.log"
        server = Running("server", "--model", self._model, *listen, *where, *options, *flags, log=log)
        self.servers.append(server)
        return server

    def status(self) -> list[dict[str, Any]]:
        """Announced servers, in the order of their blocks."""
        (model,) = json.loads(command("status", "--initial_peers", *self.relays.maddrs, "--json").stdout)["models"]
        return sorted(model["servers"], key=lambda server: server["start"])

    def close(self) -> None:
        for running in self.servers:
            if running.process.poll() is None:
                running.stop(signal.SIGTERM)
            running.__exit__(None, None, None)
        self.relays.close()
