"""Homes whose routers let nobody in, on an internet of network namespaces: nothing to configure, nothing to forward."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from commands import Running
from networks import Internet, missing
from swarm_models import NUM_BLOCKS, OPTIONS, connected, generate_seeded, load_local, prompt
from transformers import AutoTokenizer

from swarmllm import LocalSwarm, embedded_model_path

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing()), reason=missing()), pytest.mark.timeout(400)]

CLIENT = """
import sys, torch
from swarmllm import AutoDistributedModel, ClientConfig

class Printed:
    def put(self, value):
        print(*value.flatten().tolist(), flush=True)
    def end(self):
        pass

model, ids, num_tokens, *maddrs = sys.argv[1:]
config = ClientConfig(initial_peers=tuple(maddrs), speculation="off")
with AutoDistributedModel.from_pretrained(model, client_config=config) as swarm:
    print("connected", flush=True)
    ids = torch.tensor([list(map(int, ids.split()))])
    swarm.generate(ids, max_new_tokens=int(num_tokens), do_sample=False, streamer=Printed())
"""
NUM_TOKENS = 32


class Homes:
    """Two public peers that others join through, two homes with servers and one with a client."""

    def __init__(self, net: Internet, logs: Path, stack: ExitStack) -> None:
        self.net, self._logs, self._stack = net, logs, stack
        self.maddrs: list[str] = []
        self.relays: dict[str, Running] = {}
        for number, name in enumerate(("first", "second"), 1):
            address = net.add_public(name, number)
            joins = ("--initial_peers", *self.maddrs) if self.maddrs else ()
            self.relays[name] = self.run(name, "dht", *joins)
            self.maddrs += [maddr for maddr in self.relays[name].maddrs() if address in maddr]
        for number, name in enumerate(("home", "office", "cafe"), 11):
            net.add_home(name, number)

    def run(self, where: str, name: str, *args: object) -> Running:
        log = self._logs / f"{where}.log"
        return self._stack.enter_context(Running(name, *args, log=log, within=self.net.within(where)))

    def generate(self, model: Path, ids: list[int], at_token: Callable[[int], None]) -> tuple[list[int], float]:
        """New tokens of a client in the café, and its longest pause."""
        line = [sys.executable, "-c", CLIENT, str(model), " ".join(map(str, ids)), str(NUM_TOKENS), *self.maddrs]
        log = (self._logs / "client.log").open("w")
        with log, subprocess.Popen([*self.net.within("cafe"), *line], stdout=-1, stderr=log, text=True) as client:
            self._stack.callback(client.kill)
            assert client.stdout is not None
            lines = iter(client.stdout)
            assert next(lines, "") == "connected\n", (self._logs / "client.log").read_text()
            assert [int(one) for one in next(lines).split()] == ids  # `generate` streams the prompt first
            tokens, pause, last = [], 0.0, time.monotonic()
            for said in lines:
                tokens.append(int(said))
                pause, last = max(pause, time.monotonic() - last), time.monotonic()
                at_token(len(tokens))
        assert client.returncode == 0, (self._logs / "client.log").read_text()
        return tokens, pause


@pytest.fixture
def homes(tmp_path: Path) -> Iterator[Homes]:
    with Internet() as net, ExitStack() as stack:
        yield Homes(net, tmp_path, stack)


def test_servers_at_home_without_any_flag(homes: Homes) -> None:
    model = embedded_model_path()
    ids = AutoTokenizer.from_pretrained(model)("Once upon a time").input_ids
    started = time.monotonic()
    servers = [
        homes.run(name, "server", "--model", model, "--initial_peers", *homes.maddrs) for name in ("home", "office")
    ]
    for server in servers:
        server.lines_until_join()
        print(f"online after {time.monotonic() - started:.1f} s")
    status = subprocess.run(
        [*homes.net.within("cafe"), sys.executable, "-m", "swarmllm", "status", "--initial_peers", *homes.maddrs],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert status.stdout.count("online, relayed") == 2, status.stdout
    tokens, _ = homes.generate(model, ids, lambda _: None)
    with LocalSwarm(model, num_servers=1) as swarm, connected(model, swarm.initial_peers) as near:  # 8 bits, too
        expected = near.generate(torch.tensor([ids]), max_new_tokens=NUM_TOKENS, do_sample=False)
    assert tokens == expected[0, len(ids) :].tolist()


def test_a_relay_that_dies_in_mid_text(homes: Homes, llama: Path) -> None:
    half, options = NUM_BLOCKS // 2, [part for name, value in OPTIONS.items() for part in (f"--{name}", str(value))]
    for name, start in (("home", 0), ("office", half)):
        where = ("--block_indices", f"{start}:{start + half}", "--initial_peers", *homes.maddrs)
        homes.run(name, "server", "--model", llama, *where, *options).lines_until_join()
    before: dict[str, int] = {}
    killed: list[str] = []

    def strike(num_tokens: int) -> None:
        if num_tokens == 4:
            before.update((name, homes.net.bytes_sent(name)) for name in homes.relays)
        elif num_tokens == 12:  # the one through which most passes
            killed.append(max(homes.relays, key=lambda name: homes.net.bytes_sent(name) - before[name]))
            homes.relays[killed[0]].stop(signal.SIGKILL)

    ids = prompt()
    tokens, pause = homes.generate(llama, ids[0].tolist(), strike)
    print(f"killed {killed[0]}; longest pause {pause:.2f} s")
    assert tokens == generate_seeded(load_local(llama), ids, max_new_tokens=NUM_TOKENS)[0, ids.shape[1] :].tolist()
