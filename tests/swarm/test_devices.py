"""One command that serves with several devices: a process for each, which are started, watched and ended together."""

import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from commands import Running, Terminal, command, sentence
from swarm_models import NUM_BLOCKS, connected, generate_seeded, prompt
from transformers import PreTrainedModel

pytestmark = pytest.mark.rotates(5, whole_file=True)

FLAGS = ("--new_swarm", "--host_maddrs", "/ip4/127.0.0.1/tcp/0", "--num_threads", 1)
EXACT = ("--dtype", "float32", "--quant_type", "none", "--update_period", 2)
TWO = ("--device", "cpu", "cpu")


def served_by(pid: int) -> list[psutil.Process]:
    """The processes of the devices, in the order of their starts."""
    found = [child for child in psutil.Process(pid).children() if child.cmdline()[-2:] == ["swarmllm.server", "-"]]
    return sorted(found, key=lambda child: child.create_time())


@pytest.fixture
def server(llama: Path, tmp_path: Path) -> Iterator[Running]:
    flags = ("--model", llama, "--num_blocks", NUM_BLOCKS, "--identity_path", tmp_path / "key", *FLAGS, *EXACT)
    with Running("server", *flags, *TWO, log=tmp_path / "log") as server:
        yield server
        processes = psutil.Process(server.process.pid).children(recursive=True)
        assert server.stop(signal.SIGTERM) == 0
        assert not psutil.wait_procs(processes, timeout=10)[1]


def test_one_that_is_killed_comes_back(llama: Path, local: PreTrainedModel, server: Running, tmp_path: Path) -> None:
    """As the same peer, with the same blocks, while a client is in the middle of a text."""
    said = [server.lines_until_join(), server.lines_until_join()]
    half = NUM_BLOCKS // 2
    for (serving, _), span in zip(said, [f"[0, {half})", f"[{half}, {NUM_BLOCKS})"], strict=True):
        assert serving.startswith(f"swarmllm: serving blocks {span} of ")
    expected = generate_seeded(local, prompt(), max_new_tokens=12)
    for index in (0, 1):
        maddrs = said[1 - index][1].split()[4:]
        with connected(llama, maddrs, route_timeout_s=60) as model, model.inference_session(max_length=64):
            begun = generate_seeded(model, prompt(), max_new_tokens=4)
            served_by(server.process.pid)[0].kill()  # the other one is the younger afterwards
            assert generate_seeded(model, begun, max_new_tokens=8).tolist() == expected.tolist()
        before, said[index] = said[index], server.lines_until_join()
        assert said[index][0] == before[0]
    assert f"ended (exit code {-signal.SIGKILL})" in (tmp_path / "log").read_text()
    status = command("status", "--initial_peers", *said[1][1].split()[4:]).stdout
    assert f"one machine: {', '.join(f'…{serving[-6:]}' for serving, _ in said)}" in status


@pytest.mark.parametrize("asked", [(), ("--block_indices", f"0:{NUM_BLOCKS}")])
def test_each_has_the_blocks_that_the_map_says(
    llama: Path, local: PreTrainedModel, tmp_path: Path, asked: tuple[str, ...]
) -> None:
    """All but one on the first: the tokens of the local model, also when one is killed in mid-text."""
    device_map = ("--device_map", f"cpu={NUM_BLOCKS - 1}", "cpu=1")
    with Running("server", "--model", llama, *device_map, *asked, *FLAGS, *EXACT, log=tmp_path / "log") as server:
        (first, _), (second, joined) = server.lines_until_join(), server.lines_until_join()
        assert first.startswith(f"swarmllm: serving blocks [0, {NUM_BLOCKS - 1}) of ")
        assert second.startswith(f"swarmllm: serving blocks [{NUM_BLOCKS - 1}, {NUM_BLOCKS}) of ")
        expected = generate_seeded(local, prompt(), max_new_tokens=12)
        maddrs = joined.split()[4:]
        with connected(llama, maddrs, route_timeout_s=60) as model, model.inference_session(max_length=64):
            begun = generate_seeded(model, prompt(), max_new_tokens=4)
            served_by(server.process.pid)[0].kill()
            assert generate_seeded(model, begun, max_new_tokens=8).tolist() == expected.tolist()
        processes = psutil.Process(server.process.pid).children(recursive=True)
        assert server.stop(signal.SIGTERM) == 0
        assert not psutil.wait_procs(processes, timeout=10)[1]


@pytest.mark.parametrize("ready", [True, False])
def test_ctrl_c_ends_all(llama: Path, ready: bool) -> None:
    with Terminal("server", "--model", llama, "--num_blocks", 4, *FLAGS, *TWO) as terminal:
        terminal.wait_for("[cpu#0]")
        if ready:
            terminal.wait_for("join with")
            terminal.wait_for("join with")
        processes = psutil.Process(terminal.process.pid).children(recursive=True)
        terminal.type("\x03")
        assert terminal.wait() == 0
        assert not psutil.wait_procs(processes, timeout=10)[1]
        assert "Traceback" not in terminal.seen


def test_no_server_outlives_the_process_that_started_it(llama: Path, tmp_path: Path) -> None:
    with Running("server", "--model", llama, "--num_blocks", 4, *FLAGS, *TWO, log=tmp_path / "log") as server:
        server.lines_until_join()
        processes = psutil.Process(server.process.pid).children(recursive=True)
        server.process.kill()
        assert not psutil.wait_procs(processes, timeout=30)[1]


def test_all_end_when_nobody_reads_any_more(llama: Path, tmp_path: Path) -> None:
    """As behind `| head -2`."""
    with Running("server", "--model", llama, "--num_blocks", 4, *FLAGS, *TWO, log=tmp_path / "log") as server:
        server.lines_until_join()
        processes = psutil.Process(server.process.pid).children(recursive=True)
        assert server.process.stdout is not None
        server.process.stdout.close()
        assert server.process.wait(60) == 1
        assert not psutil.wait_procs(processes, timeout=30)[1]
        assert "Traceback" not in (tmp_path / "log").read_text()


def test_one_that_cannot_start_ends_all(llama: Path) -> None:
    """The line of the device's process, and its meaning."""
    ended = command("server", "--model", llama, "--num_blocks", 4, *FLAGS, "--device", "cpu", "cuda:99")
    assert ended.returncode == 2
    assert "[cuda:99] swarmllm: device 'cuda:99' can't be used here" in ended.stderr
    assert ended.stderr.splitlines()[-1].startswith("swarmllm: the server of cuda:99 ended before it was ready")
    assert "Traceback" not in ended.stderr


def test_settings_that_cannot_be_divided_are_refused(llama: Path) -> None:
    ended = command("server", "--model", llama, "--num_blocks", 1, *FLAGS, *TWO)
    assert ended.returncode == 2
    assert sentence(ended.stderr) == "swarmllm: 1 blocks can't be split between 2 devices: name fewer"
