"""Ctrl-C in a real terminal, which sends it to every process of the foreground; and what else terminals send."""

import json
import os
import shutil
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from commands import TAKE_TERMINAL, Terminal

from swarmllm import LocalSwarm, embedded_model_path

MODEL = embedded_model_path()
LOCAL_HOST = "/ip4/127.0.0.1/tcp/0"
CTRL_C = "\x03"
LONG = ("--model", MODEL, "--max_new_tokens", 1900, "--temperature", 2.0)
UNWANTED = ("Traceback", "[ERROR]", "ERROR", "died", "Aborted", "never awaited", "Exception")

PROGRAM = f"""{TAKE_TERMINAL}
import torch
from swarmllm import AutoDistributedModel
with AutoDistributedModel.from_pretrained({str(MODEL)!r}, initial_peers=sys.argv[2:], dtype="float32") as model:
    ids = torch.tensor([[1, 5, 9]])
    class Told:
        def put(self, value):
            print("token", flush=True)
        def end(self):
            pass
    expected = model.generate(ids, max_new_tokens=8, do_sample=False).tolist()
    for turn in range(3):
        try:
            model.generate(ids, max_new_tokens=1900, min_new_tokens=1900, do_sample=False, streamer=Told())
        except KeyboardInterrupt:
            print("interrupted", flush=True)
        assert model.generate(ids, max_new_tokens=8, do_sample=False).tolist() == expected
        print("usable", flush=True)
"""


@pytest.fixture(scope="module")
def swarm() -> Iterator[LocalSwarm]:
    """Two servers that nobody interrupts."""
    with LocalSwarm(MODEL, spans=[(0, 4), (4, 8)], num_threads=1, dtype="float32", quant_type="none") as swarm:
        yield swarm


def server_of(swarm: LocalSwarm) -> Terminal:
    """A third one, at a terminal."""
    flags = ("--model", MODEL, "--block_indices", "2:4", "--num_threads", 1, "--host_maddrs", LOCAL_HOST)
    return Terminal("server", *flags, "--initial_peers", *swarm.initial_peers)


def assert_tidy(terminal: Terminal) -> None:
    for word in UNWANTED:
        assert word not in terminal.seen, terminal.seen


@pytest.mark.parametrize("presses", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_servers_leave_politely(swarm: LocalSwarm, presses: int) -> None:
    with server_of(swarm) as terminal:
        terminal.wait_for("join with")
        terminal.type(CTRL_C)
        terminal.wait_for("leaving")
        terminal.type(CTRL_C * (presses - 1))
        assert terminal.wait() == 0
        assert_tidy(terminal)


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_servers_leave_when_their_group_is_told_to(swarm: LocalSwarm, signum: int) -> None:
    with server_of(swarm) as terminal:
        terminal.wait_for("join with")
        os.killpg(terminal.process.pid, signum)
        terminal.wait_for("leaving")
        assert terminal.wait() == 0
        assert_tidy(terminal)


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["importing PyTorch", "has 8 blocks", "comparing products", "measuring how fast"])
def test_servers_that_are_stopped_while_they_start(stage: str) -> None:
    """Also where a thread computes, which can't be interrupted."""
    flags = ("--model", MODEL, "--host_maddrs", LOCAL_HOST, "--new_swarm", "--no_lan_discovery")
    with Terminal("server", *flags, from_nothing=True) as terminal:
        terminal.wait_for(stage)
        os.kill(terminal.process.pid, signal.SIGTERM)
        assert terminal.wait() == 0, terminal.seen
        assert_tidy(terminal)


@pytest.mark.slow
def test_a_server_whose_terminal_is_closed_leaves_nothing_behind(swarm: LocalSwarm) -> None:
    with server_of(swarm) as terminal:
        terminal.wait_for("join with")
        daemons = psutil.Process(terminal.process.pid).children(recursive=True)
        assert daemons
        terminal.close()
        assert terminal.process.wait() == 0
        psutil.wait_procs(daemons)


@pytest.mark.slow
@pytest.mark.parametrize("presses", [1, 2])
def test_bootstrap_peers_and_gateways(swarm: LocalSwarm, presses: int) -> None:
    gateway = ("--model", MODEL, "--port", 0, "--initial_peers", *swarm.initial_peers)
    with Terminal("dht", "--host_maddrs", LOCAL_HOST) as dht, Terminal("gateway", *gateway) as web:
        for terminal, ready in ((dht, "join with"), (web, "http://")):
            terminal.wait_for(ready)
            terminal.type(CTRL_C * presses)
        for terminal in (dht, web):
            assert terminal.wait() == 0, terminal.seen
            assert_tidy(terminal)


def test_chat_goes_on(swarm: LocalSwarm, tmp_path: Path) -> None:
    model = shutil.copytree(MODEL, tmp_path / "talkative")  # an answer of one word would end before Ctrl-C
    told = json.loads((model / "generation_config.json").read_text())
    (model / "generation_config.json").write_text(json.dumps({**told, "min_new_tokens": 1000}))
    with Terminal("chat", "--model", model, *LONG[2:], "--initial_peers", *swarm.initial_peers) as terminal:
        terminal.wait_for("> ")
        for question in ("Tell me a story.", "And now?", "Is there more?"):
            terminal.type(f"{question}\n")
            terminal.wait_for(f"{question}\r\n")
            terminal.wait_for(" ")  # behind the first word
            terminal.type(CTRL_C)
            terminal.wait_for("\n> ")
        terminal.type("/exit\n")
        assert terminal.wait() == 0
        assert "forgets" not in terminal.seen  # no error was shown
        assert_tidy(terminal)


@pytest.mark.parametrize("presses", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_generate(swarm: LocalSwarm, presses: int) -> None:
    with Terminal("generate", *LONG, "--initial_peers", *swarm.initial_peers, "Once upon a time") as terminal:
        terminal.wait_for("Once upon a time")
        terminal.wait_for(" ")
        terminal.type(CTRL_C * presses)
        assert terminal.wait() == 130
        assert_tidy(terminal)


def test_a_python_program_goes_on(swarm: LocalSwarm) -> None:
    with Terminal("-", *swarm.initial_peers, program=PROGRAM) as terminal:
        for _ in range(3):
            for _ in range(5):
                terminal.wait_for("token")
            terminal.type(CTRL_C)
            terminal.wait_for("interrupted")
            terminal.wait_for("usable")
        assert terminal.wait() == 0
        assert_tidy(terminal)


WAITING = {
    "status": ((), 130),
    "doctor": ((), 130),
    "generate": (("--model", MODEL, "Once"), 130),
    "chat": (("--model", MODEL), 130),
    "server": (("--model", MODEL, "--host_maddrs", LOCAL_HOST), 0),
    "dht": (("--host_maddrs", LOCAL_HOST), 0),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WAITING)
def test_commands_that_wait_for_a_peer_which_does_not_answer(name: str) -> None:
    flags, code = WAITING[name]
    with socket.create_server(("127.0.0.1", 0)) as silent:
        peer = f"/ip4/127.0.0.1/tcp/{silent.getsockname()[1]}/p2p/12D3KooWFfoRMzqUD91vDKX6igC7p7M2G2EMN2SZG28GBvt4SvGU"
        with Terminal(name, *flags, "--initial_peers", peer) as terminal, silent.accept()[0]:
            terminal.type(CTRL_C)
            assert terminal.wait() == code, terminal.seen
            assert_tidy(terminal)


@pytest.mark.slow
def test_a_demo_takes_its_servers_along() -> None:
    with Terminal("demo", "--embedded", from_nothing=True) as terminal:
        terminal.wait_for("The fox")
        started = psutil.Process(terminal.process.pid).children(recursive=True)
        assert len(started) > 3
        terminal.type(CTRL_C)
        assert terminal.wait() == 130
        psutil.wait_procs(started)
        assert_tidy(terminal)


@pytest.mark.slow
def test_nothing_is_left_of_a_generate_whose_terminal_is_closed(swarm: LocalSwarm, tmp_path: Path) -> None:
    with Terminal("generate", *LONG, "--initial_peers", *swarm.initial_peers, "Once", directory=tmp_path) as terminal:
        terminal.wait_for("Once")
        assert list(tmp_path.iterdir())
        terminal.close()
        assert terminal.process.wait() == 128 + signal.SIGHUP
    assert not list(tmp_path.iterdir())
