"""Joining a swarm by IPv4 or IPv6, and through any initial peer that is left."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from commands import Running, command
from networks import has_ipv6
from swarm_models import EVERYTHING, OPTIONS, assert_same_tokens, connected, prompt
from transformers import PreTrainedModel

from swarmllm import LocalSwarm

pytestmark = pytest.mark.rotates(6, whole_file=True)

LOOPBACK = ("--host_maddrs", "/ip4/127.0.0.1/tcp/0")


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
def test_a_server_that_listens_on_both_is_joined_and_used_by_either(llama: Path, local: PreTrainedModel) -> None:
    both = ["/ip4/127.0.0.1/tcp/0", "/ip6/::1/tcp/0"]
    with LocalSwarm(llama, spans=[EVERYTHING], host_maddrs=both, **OPTIONS) as swarm:
        kinds = {
            kind: [addr for addr in swarm.initial_peers if addr.startswith(f"/{kind}/")] for kind in ("ip4", "ip6")
        }
        assert all(kinds.values())
        for addrs in kinds.values():
            with connected(llama, addrs) as model:
                assert_same_tokens(model, local, prompt(), max_new_tokens=4)
        only_ip6 = swarm.add_server(EVERYTHING, host_maddrs="/ip6/::1/tcp/0")
        with connected(llama, kinds["ip4"], allowed_servers=(only_ip6.peer_id,)) as model:
            assert_same_tokens(model, local, prompt(), max_new_tokens=4)


@contextmanager
def frozen(pid: int) -> Iterator[None]:
    """A process and its children take connections, as the kernel does that for them, and say nothing."""
    pids = [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    for one in pids:
        os.kill(one, signal.SIGSTOP)
    try:
        yield
    finally:
        for one in pids:
            os.kill(one, signal.SIGCONT)


def test_all_initial_peers_but_one_are_gone(
    llama: Path, local: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of three initial peers was killed and one hangs: servers, clients and `status` join by the third."""
    monkeypatch.setenv("SWARMLLM_CACHE", str(tmp_path / "cache"))
    options = [part for name, value in OPTIONS.items() for part in (f"--{name}", str(value))]
    with (
        Running("dht", *LOOPBACK, log=tmp_path / "killed.log") as killed,
        Running("dht", *LOOPBACK, "--initial_peers", *(first := killed.maddrs()), log=tmp_path / "hangs.log") as hangs,
        Running("dht", *LOOPBACK, "--initial_peers", *first, log=tmp_path / "left.log") as left,
    ):
        joins = ("--initial_peers", *first, *hangs.maddrs(), *left.maddrs())
        killed.stop(signal.SIGKILL)
        with (
            frozen(hangs.process.pid),
            Running("server", "--model", llama, *LOOPBACK, *options, *joins, log=tmp_path / "server.log") as server,
        ):
            server.lines_until_join()
            with connected(llama, list(joins[1:])) as model:
                assert_same_tokens(model, local, prompt(), max_new_tokens=4)
            assert command("status", *joins).stdout.count("online") == 1
            assert server.stop(signal.SIGINT) == 0
