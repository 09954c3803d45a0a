"""The flags of the commands: both spellings, settings from a file, prompts, and what is said about unusable ones."""

import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import tomllib
from argparse import SUPPRESS
from contextlib import suppress
from dataclasses import MISSING, fields, replace
from importlib import import_module
from pathlib import Path

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from swarmllm.__main__ import COMMANDS, help_text, main
from swarmllm.client.text_generation import TextConfig
from swarmllm.command_line import Parser, docstrings, is_in_file, one_line, run_program
from swarmllm.commands.adapters import Search
from swarmllm.commands.calibrate import Calibrate
from swarmllm.commands.chat import ChatConfig
from swarmllm.commands.dht import DhtConfig
from swarmllm.commands.doctor_findings import DoctorConfig
from swarmllm.commands.generate import build_parser as generate_parser
from swarmllm.commands.generate import parse_prompt
from swarmllm.commands.models import ModelsConfig
from swarmllm.commands.runs import RunsConfig
from swarmllm.commands.status import StatusConfig
from swarmllm.commands.status import build_parser as status_parser
from swarmllm.commands.up import UpConfig
from swarmllm.commands.use import UseConfig
from swarmllm.config import ClientConfig
from swarmllm.demo.__main__ import DemoConfig
from swarmllm.demo.local_swarm import embedded_model_path
from swarmllm.errors import ConfigurationError, PeerUnreachableError
from swarmllm.gateway.__main__ import build_parser as gateway_parser
from swarmllm.gateway.settings import GatewayConfig
from swarmllm.server.__main__ import parse_config
from swarmllm.server.settings import ServerConfig

PEER = "/ip4/127.0.0.1/tcp/4000/p2p/12D3KooWFfoRMzqUD91vDKX6igC7p7M2G2EMN2SZG28GBvt4SvGU"
OTHER = PEER.replace("4000", "4001")


@pytest.fixture
def parser() -> Parser:
    parser = Parser(prog="swarmllm test", description="A test.")
    parser.add_argument("--num_blocks", type=int)
    parser.add_argument("--public_name")
    parser.add_argument("--initial_peers", nargs="+", action="extend")
    parser.add_argument("--new_swarm", action="store_true")
    return parser


@pytest.mark.parametrize("flag", ["--num_blocks", "--num-blocks"])
def test_flags_have_two_spellings(parser: Parser, flag: str) -> None:
    assert parser.parse_settings([flag, "3"]) == {"num_blocks": 3}
    assert parser.parse_settings([f"{flag}=3"]) == {"num_blocks": 3}


def test_values_keep_their_dashes(parser: Parser) -> None:
    assert parser.parse_settings(["--public-name", "my-server"]) == {"public_name": "my-server"}
    assert parser.parse_settings(["--public-name=my-server"]) == {"public_name": "my-server"}


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_help_fits_a_screen_and_shows_examples(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser: Parser = import_module(COMMANDS[name].module).build_parser()
    screen = parser.format_help()
    lines = screen.splitlines()
    assert len(lines) <= 60
    assert sum(line.startswith("  --") for line in lines) <= 20
    assert max(map(len, lines)) <= 80
    assert "example" in screen
    assert f"swarmllm {name}" in screen
    with pytest.raises(SystemExit) as stopped:
        parser.parse_settings(["--help-all"])
    assert stopped.value.code == 0
    everything = capsys.readouterr().out
    assert "more flags" not in everything
    in_file = {action.dest for action, _, one in parser.settings if is_in_file(one)}
    for action in parser._actions:
        if action.dest in in_file:
            assert f"\n  {action.dest} " in everything
            assert not re.search(rf"^  --(no_)?{action.dest} ", everything, re.MULTILINE)
        else:
            assert action.help == SUPPRESS or all(flag in everything for flag in action.option_strings)


def test_commands_have_no_more_flags_than_people_can_learn() -> None:
    parsers = [import_module(command.module).build_parser() for command in COMMANDS.values()]
    flags = {
        action.dest
        for parser in parsers
        for action in parser._actions
        if action.dest not in {setting.dest for setting, _, one in parser.settings if is_in_file(one)}
    }
    assert 40 < len(flags) <= 80


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (["--ban_s", "15"], "ban_s = 15"),
        (["--ban-s=15"], "ban_s = 15"),
        (["--no_push"], "push = false"),
        (["--compute_padding"], "compute_padding = true"),
        (["--blocked_servers", "a", "b"], 'blocked_servers = ["a", "b"]'),
        (["--head", "int8"], 'head = "int8"'),
        (["--dry_sequence_breakers", "a", "b", "--seed", "1"], 'dry_sequence_breakers = ["a", "b"]'),
        (["--verify_fraction"], "verify_fraction = …"),
    ],
)
def test_a_flag_that_went_names_its_line_in_the_file(
    given: list[str], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["generate", "--model", "m", *given, "--", "hello"])
    assert stopped.value.code == 2
    assert capsys.readouterr().err.endswith(f" moved to the file of --config: {line} (see --help)\n")
    if "…" not in line:
        file = tmp_path / "settings.toml"
        file.write_text(line)
        settings = generate_parser().parse_settings(["--model", "m", "--config", str(file), "--", "hello"])
        name, value = next(iter(tomllib.loads(line).items()))
        assert settings[name] == value


def test_help_shows_what_a_first_server_needs() -> None:
    screen = import_module(COMMANDS["server"].module).build_parser().format_help()
    assert all(f"--{name} " in screen for name in ("port", "max_memory", "nice"))
    assert not any(f"--{name} " in screen for name in ("balance_quality", "update_period", "relay_mbps"))
    assert "ADDRESS is what a server prints" in screen


STOP_AT_IMPORTS = """
import os, runpy, sys
class Heavy:
    def find_spec(self, name, path=None, target=None):
        if name in ("torch", "transformers", "hivemind"):
            os._exit(42)  # whatever was said, was said before it
sys.meta_path.insert(0, Heavy())
sys.argv[0] = "swarmllm"
runpy.run_module("swarmllm", run_name="__main__")
"""


@pytest.mark.parametrize("name", ["server", "chat", "generate", "gateway", "status", "dht"])
def test_imports_that_take_seconds_are_announced(name: str) -> None:
    model = [] if name in ("status", "dht") else ["--model", "org/model"]
    peers = ["--initial_peers", "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWQHAay4rUrNPWzH1SE8FBHCvfAXpoPKiVvEmsBTKUngUE"]
    port = {"gateway": ["--port", "0"], "generate": ["--", "Hello"]}.get(name, [])
    line = [sys.executable, "-c", STOP_AT_IMPORTS, name, *model, *peers, *port]
    done = subprocess.run(line, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    assert done.returncode == 42, done.stderr
    assert "importing" in done.stderr.splitlines()[0]


CONFIGS = {
    "up": UpConfig,
    "use": UseConfig,
    "server": ServerConfig,
    "dht": DhtConfig,
    "generate": TextConfig,
    "chat": ChatConfig,
    "status": StatusConfig,
    "gateway": GatewayConfig,
    "models": ModelsConfig,
    "runs": RunsConfig,
    "adapters": Search,
    "calibrate": Calibrate,
    "doctor": DoctorConfig,
    "demo": DemoConfig,
}
NOT_SETTINGS = {"help", "config"}
POSITIONAL = {"generate": "prompt", "runs": "output", "up": "invite", "use": "model"}
WITHOUT_FLAG = {"swarm_name", "machine", "peers_beside"}
"""Only an invite brings the first, and whoever starts a server for each device the others."""
NOT_ASKED = {
    "dht": {"lan_discovery"},
    "status": {"identity_path"},
    "models": {"identity_path", "lan_discovery"},
    "doctor": {"stop_on_stdin_eof"},
}
"""Shared fields of which a command makes no use."""


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_flags_are_the_fields_and_say_what_their_docstrings_say(name: str) -> None:
    config, parser = CONFIGS[name], import_module(COMMANDS[name].module).build_parser()
    parser.format_help()
    explained = {key: text for owner in reversed(config.__mro__[:-1]) for key, text in docstrings(owner).items()}
    actions = {action.dest: action for action in parser._actions if action.dest not in NOT_SETTINGS}
    if name in POSITIONAL:
        del actions[POSITIONAL[name]]
    wanted = {one.name: one for one in fields(config) if one.name not in WITHOUT_FLAG | NOT_ASKED.get(name, set())}
    assert actions.keys() == wanted.keys()
    for key, one in wanted.items():
        action = actions[key]
        assert action.default == SUPPRESS  # so that the field's own counts
        assert action.required == (one.default is MISSING and one.default_factory is MISSING)
        if action.help != SUPPRESS and action.option_strings:
            first = explained[key].split(". ")[0].rstrip(".").split("; None")[0]
            assert first[1:] in (action.help or "")


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["--num_blocks", "two"], "give a whole number or auto, not 'two'"),
        (["--update_period", "1h"], "give a number, not '1h'"),
        (["--block_indices", "3"], "START < END"),
        (["--block_indices", "-1:2"], "0 <= START < END, like 0:4, not '-1:2'"),
        (["--block_indices", "-h"], "expected one argument"),
        (["--block_indices", "--port"], "expected one argument"),
        (["--config", "a", "--config=b"], "--config takes one file, not a and b: write all settings in one of them"),
        (["--num_blocks"], "expected one argument"),
        (["--no_such_flag"], "no_such_flag"),
    ],
)
def test_what_cannot_be_read_is_one_sentence(
    argv: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse_config(["--model", "m", "--new_swarm", *argv])
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert complaint in said
    assert said.count("\n") == 1


def test_auto_is_what_no_flag_is() -> None:
    argv = ["--model", "m", "--new_swarm"]
    assert parse_config([*argv, "--throughput", "auto", "--num_blocks=auto"]) == parse_config(argv)


def test_help_needs_no_source(monkeypatch: pytest.MonkeyPatch) -> None:
    docstrings.cache_clear()
    monkeypatch.setattr("linecache.getlines", lambda *_: [])
    try:
        assert "--num_blocks N" in import_module(COMMANDS["server"].module).build_parser().format_help()
    finally:
        docstrings.cache_clear()


def test_only_what_is_given_is_reported(parser: Parser) -> None:
    assert parser.parse_settings([]) == {}


def test_flags_win_over_the_file(parser: Parser, tmp_path: Path) -> None:
    path = tmp_path / "settings.toml"
    path.write_text('num-blocks = 3\npublic_name = "me"\nnew_swarm = true\ninitial_peers = ["/a", "/b"]\n')
    assert parser.parse_settings(["--config", str(path), "--num_blocks", "4"]) == {
        "num_blocks": 4,
        "public_name": "me",
        "new_swarm": True,
        "initial_peers": ["/a", "/b"],
    }


def test_lists_may_come_in_several_flags(tmp_path: Path) -> None:
    flags = ["--model", "m", "n", "--initial_peers", "/a", "/b", "--initial-peers", "/c", "--initial_peers=/d"]
    given = {"model": ["m", "n"], "initial_peers": ["/a", "/b", "/c", "/d"]}
    assert gateway_parser().parse_settings(flags) == given
    path = tmp_path / "settings.toml"
    path.write_text('initial-peers = ["/x"]\nmodel = "o"\nport = 1\n')
    assert gateway_parser().parse_settings(["--config", str(path), *flags]) == {**given, "port": 1}


def test_the_file_may_stand_behind_an_equals_sign(parser: Parser, tmp_path: Path) -> None:
    path = tmp_path / "settings.toml"
    path.write_text("num_blocks = 3\n")
    assert parser.parse_settings([f"--config={path}"]) == {"num_blocks": 3}


def test_false_in_the_file_is_a_flag_left_out(parser: Parser, tmp_path: Path) -> None:
    path = tmp_path / "settings.toml"
    path.write_text("new_swarm = false\n")
    assert parser.parse_settings(["--config", str(path)]) == {}


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("relay = false", {"relay": False}),
        ("no_relay = true", {"relay": False}),
        ("relay = true", {}),
        ("no_relay = false", {}),
        ("lan_discovery = false\nrelay = false", {"lan_discovery": False, "relay": False}),
    ],
)
def test_a_file_turns_off_what_is_on_without_a_flag(text: str, wanted: dict[str, bool], tmp_path: Path) -> None:
    path = tmp_path / "flags.toml"
    path.write_text(text)
    given = ["--model", "m", "--new_swarm"]
    assert parse_config([*given, "--config", str(path)]) == replace(parse_config(given), **wanted)  # type: ignore[arg-type]
    if wanted:
        assert parse_config([*given, "--config", str(path)]) != parse_config(given)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("num_blocks = ", "can't read --config"),
        ("no_such_flag = 3", "no_such_flag"),
        ("no_such_flag = false", "no_such_flag"),
        (None, "can't read --config"),
    ],
)
def test_a_bad_file_is_one_sentence(
    parser: Parser, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, complaint: str
) -> None:
    path = tmp_path / "settings.toml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SystemExit) as stopped:
        parser.parse_settings(["--config", str(path)])
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert complaint in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('push = "no"', "push in .* must be true or false, not 'no'"),
        ('compute_padding = "no"', "compute_padding in .* must be true or false, not 'no'"),
        ("lenient = 3", "lenient in .* must be true or false, not 3"),
        ('lan_discovery = "no"', "lan_discovery in .* must be true or false, not 'no'"),
        ("max_retries = false", "max_retries in .* can't be false: give a value"),
        ("port = true", "port in .* can't be true: give a value"),
        ("port = [1, 2]", r"port in .*settings\.toml takes one value, not the list \[1, 2\]"),
        ("lenient = [true]", r"lenient in .* must be true or false, not \[True\]"),
        ("model = []", "model in .* is an empty list: give values, or leave it out"),
        ('model = ["m", ["n"]]', "model in .* must be a list of texts or numbers"),
        ("[server]\nport = 1", r"\[server\] in .*settings\.toml is a table, and settings are in none"),
        ("port.number = 1", r"\[port\] in .* is a table"),
        ("[[model]]\nname = 1", "model in .* must be a list of texts or numbers"),
        ('config = "other.toml"', r"config in .*settings\.toml can't name another file"),
        ("num_blocks = 1", r"num_blocks in .*settings\.toml is no setting of this command"),
        ("max_retry = 1", "max_retry in .* is no setting of this command: did you mean max_retries?"),
        ("'a key' = 1", "a key in .* is no setting of this command"),
        ("'' = 1", " in .* is no setting of this command"),
    ],
)
def test_a_file_holds_settings_with_values_of_their_kind(
    text: str, complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "settings.toml"
    path.write_text(text)
    with pytest.raises(SystemExit, match="2"):
        gateway_parser().parse_settings(["--model", "m", "--config", str(path)])
    said = capsys.readouterr().err
    assert re.search(complaint, said)
    assert said.count("\n") == 1


def test_values_may_begin_with_a_dash(parser: Parser) -> None:
    argv = ["--public-name", "-me", "--num_blocks", "-3", "--initial_peers", "a"]
    assert parser.parse_settings(argv) == {"public_name": "-me", "num_blocks": -3, "initial_peers": ["a"]}


def test_values_in_a_file_may_begin_with_dashes(parser: Parser, tmp_path: Path) -> None:
    path = tmp_path / "settings.toml"
    path.write_text('public_name = "--me"\ninitial_peers = ["-a", "--num_blocks=3"]\n')
    settings = {"public_name": "--me", "initial_peers": ["-a", "--num_blocks=3"]}
    assert parser.parse_settings(["--config", str(path)]) == settings


def test_the_prompt_may_follow_the_addresses() -> None:
    for argv in (
        ["--model", "m", "--initial-peers", PEER, OTHER, "Once upon"],
        ["Once upon", "--model", "m", "--initial_peers", PEER, OTHER],
        ["--initial_peers", PEER, OTHER, "--model", "m", "Once upon"],
        ["--model", "m", "--initial-peers", PEER, OTHER, "--", "Once upon"],
    ):
        config, prompt = parse_prompt(argv)
        assert (config.initial_peers, prompt) == ((PEER, OTHER), "Once upon")


def test_a_prompt_behind_two_dashes_is_left_as_it_is() -> None:
    assert parse_prompt(["--model", "m", "--", "--so-he said: --no-way"])[1] == "--so-he said: --no-way"


def test_bytes_of_a_prompt_that_are_no_text_are_marked() -> None:
    given = os.fsdecode(b"one \xff two")
    assert parse_prompt(["--model", "m", given])[1] == "one \N{REPLACEMENT CHARACTER} two"


def test_without_a_prompt_all_are_addresses() -> None:
    config, prompt = parse_prompt(["--model", "m", "--initial-peers", PEER, OTHER])
    assert (config.initial_peers, prompt) == ((PEER, OTHER), None)
    peer_id = PEER.rpartition("/")[2]
    config, prompt = parse_prompt(["--model", "m", "--allowed_servers", peer_id, peer_id, "Once"])
    assert (config.allowed_servers, prompt) == ((peer_id, peer_id), "Once")
    config, prompt = parse_prompt(["--model", "m", "--allowed_servers", peer_id, peer_id])
    assert (config.allowed_servers, prompt) == ((peer_id, peer_id), None)


def test_the_environment_names_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWARMLLM_INITIAL_PEERS", f"{PEER}, {OTHER}")
    assert TextConfig(model="m").initial_peers == (PEER, OTHER)
    assert TextConfig(model="m", initial_peers=("/x",)).initial_peers == ("/x",)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"do_sample": False}),
        ({"temperature": 0.5, "top_k": 3}, {"do_sample": True, "temperature": 0.5, "top_k": 3}),
        ({"seed": 1}, {"do_sample": True}),
    ],
)
def test_sampling_when_it_is_asked_for(options: dict[str, float], expected: dict[str, object]) -> None:
    assert TextConfig(model="m", **options).generation_options() == {"max_new_tokens": 128, **expected}


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": 0.0},
        {"temperature": 1e-40},
        {"temperature": math.nan},
        {"top_p": 1.5},
        {"top_k": 0},
        {"max_new_tokens": 0},
        {"seed": 1 << 64},
    ],
    ids=str,
)
def test_options_that_cannot_work(bad: dict[str, float]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(bad))):
        TextConfig(model="m", **bad)


COMMANDS_WITH_A_CLIENT = ["generate", "chat", "gateway"]


@pytest.mark.parametrize("name", COMMANDS_WITH_A_CLIENT)
def test_every_command_can_set_what_a_client_has(name: str, tmp_path: Path) -> None:
    parser: Parser = import_module(COMMANDS[name].module).build_parser()
    given = {
        "allowed_servers": [PEER.rpartition("/")[2], OTHER.rpartition("/")[2]],
        "blocked_servers": [PEER.rpartition("/")[2]],
        "verify_fraction": 0.25,
        "verify_tolerance": 0.5,
        "speculation": "off",
        "local_blocks": "0:2,6:8",
        "activation_noise": 0.25,
        "compression": "int8",
    }
    file = tmp_path / "settings.toml"
    file.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in given.items()))
    settings = parser.parse_settings(["--model", "m", "--config", str(file)])
    config_type = GatewayConfig if name == "gateway" else TextConfig
    client = ClientConfig(**config_type(**settings).client_settings())
    for field, value in given.items():
        assert settings[field] == value
        assert getattr(client, field) == (tuple(value) if isinstance(value, list) else value)


def test_what_is_not_given_is_as_clients_have_it() -> None:
    assert ClientConfig(**TextConfig(model="m").client_settings()) == ClientConfig()
    # who asks a gateway is told soon what is missing, and asks again
    assert ClientConfig(**GatewayConfig(model="m").client_settings()) == ClientConfig(
        route_timeout_s=5.0, start_timeout_s=0.0
    )
    with pytest.raises(ConfigurationError, match="verify_fraction"):
        GatewayConfig(model="m", verify_fraction=2.0)


def test_block_indices_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_config(["--model", "m", "--new_swarm", "--block_indices", "4:2"])
    assert "START < END" in capsys.readouterr().err


def test_status_takes_no_prompt() -> None:
    with pytest.raises(SystemExit):
        status_parser().parse_settings(["--model", "m", "hello"])


@pytest.mark.parametrize(
    ("error", "code"),
    [(ConfigurationError("no"), 2), (PeerUnreachableError("no\n  * really"), 1), (KeyboardInterrupt(), 130)],
)
def test_exit_codes(error: BaseException, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    def program() -> None:
        raise error

    assert run_program(program) == code
    assert capsys.readouterr().err.count("\n") <= 1


def test_a_program_has_its_own_exit_code() -> None:
    assert run_program(lambda: 7) == 7
    assert run_program(lambda: None) == 0


def test_bugs_show_their_traceback() -> None:
    def program() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_program(program)


PROGRAM = "import socket, sys; from swarmllm.command_line import run_program; sys.exit(run_program(lambda: {}))"


SIGNALS = {signal.SIGTERM: 143, signal.SIGHUP: 129, signal.SIGINT: 130}


def hears(signum: int, program: str) -> int:
    """Exit code of a Python program in which `kill` sends it a signal."""
    usual = "signal.signal(signal.SIGINT, signal.default_int_handler); signal.signal(signal.SIGHUP, signal.SIG_DFL)"
    kill = f"kill = lambda *_: signal.raise_signal({int(signum)})"
    lines = ["import asyncio, atexit, os, signal, sys", usual, kill, program]
    return subprocess.run([sys.executable, "-c", "\n".join(lines)], check=False, stderr=subprocess.DEVNULL).returncode


@pytest.mark.parametrize("signum", SIGNALS)
def test_a_signal_is_the_usual_end_of_a_command_that_serves(signum: int) -> None:
    """Also within a library that catches everything while it is imported. After the import, the event loop listens."""
    catches = """
from swarmllm.command_line import announced_imports, run_command, run_program
def program():
    with announced_imports():
        try:
            kill()
        except Exception:
            pass
async def command():
    program()
"""
    assert hears(signum, f"{catches}sys.exit(run_program(program, serves=True) or 5)") == 0
    assert hears(signum, f"{catches}sys.exit(run_command(command, serves=True) or 5)") == 0
    assert hears(signum, f"{catches}sys.exit(run_program(program))") == SIGNALS[signal.Signals(signum)]


AS_COMMAND = """
import swarmllm.__main__ as commands
class Imported:
    def main(argv):
        return 7
commands.import_module = {}
sys.argv = ["swarmllm", *"{}".split()]
atexit.register(os._exit, 5)
sys.exit(commands.main())
"""


@pytest.mark.parametrize("name", ["server", "dht", "gateway", "up"])
def test_a_signal_during_the_import_of_a_command_that_serves(name: str) -> None:
    assert hears(signal.SIGTERM, AS_COMMAND.format("kill", name)) == 0


@pytest.mark.parametrize(("name", "code"), [("server", 7), ("up", 7), ("up --install", 5), ("generate", 5)])
def test_a_process_that_serves_ends_whatever_its_threads_do(name: str, code: int) -> None:
    """Python's usual end would end a thread within torch, which aborts. So this end isn't the usual one."""
    assert hears(signal.SIGTERM, AS_COMMAND.format("lambda name: Imported", name)) == code


def run_in_shell(program: str, redirection: str) -> subprocess.CompletedProcess[str]:
    """The output of run_program with other standard streams than a terminal's."""
    return subprocess.run(
        ["sh", "-c", f'exec "$0" -c "$1" {redirection}', sys.executable, PROGRAM.format(program)],
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("closed", ["<&-", ">&-", "<&- >&-"])
def test_nothing_takes_the_number_of_a_stream_that_is_closed(closed: str) -> None:
    ended = run_in_shell("print(sys.stdin.read(0)) or 3 + socket.socket().fileno()", closed)
    assert (ended.stderr, ended.returncode > 5) == ("", True)


@pytest.mark.parametrize("program", ["print('text')", "print('text', flush=True)"])
def test_no_room_for_the_output_is_one_sentence(program: str) -> None:
    ended = run_in_shell(program, ">/dev/full")
    assert (ended.stderr, ended.returncode) == ("swarmllm: can't write the output: No space left on device\n", 1)


def test_standard_input_may_hold_bytes_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "said").write_bytes(b"a\xff")
    ended = run_in_shell("2 * (sys.stdin.read() == 'a' + chr(0xFFFD))", f"<{tmp_path}/said")
    assert (ended.stderr, ended.returncode) == ("", 2)


def test_one_line() -> None:
    assert one_line(PeerUnreachableError("all dials failed\n  * refused")) == "all dials failed * refused"


@pytest.mark.parametrize(
    ("argv", "hint"),
    [
        (["--modle", "x"], "there is no flag --modle: did you mean --model?"),
        (["--model", "M", "--quant-typ=int8"], "there is no flag --quant_typ: did you mean --quant_type?"),
        (["--model", "M", "--host", "127.0.0.1"], "there is no flag --host: did you mean --host_maddrs?"),
        (["--model", "M", "--announce=x"], "there is no flag --announce: did you mean --announce_maddrs?"),
        (["--zzzz"], "there is no flag --zzzz (see --help)"),
    ],
)
def test_a_mistyped_flag_is_named_with_the_nearest(
    argv: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where another one is missing."""
    with pytest.raises(SystemExit) as ended:
        parse_config(argv)
    assert ended.value.code == 2
    assert hint in capsys.readouterr().err


def test_a_mistyped_flag_in_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "server.toml"
    file.write_text('modle = "M"\n')
    with pytest.raises(SystemExit):
        parse_config(["--config", str(file)])
    assert "server.toml is no setting of this command: did you mean model?" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["server", "generate", "chat"])
def test_a_directory_that_is_not_there_is_told_before_torch_is_imported(name: str) -> None:
    line = [sys.executable, "-X", "importtime", "-m", "swarmllm", name, "--model", "/nowhere/at-all", "--new_swarm"]
    if name != "server":
        line[-1:] = ["--initial_peers", "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWFfoRMzqUD91vDKX6igC7p7M2G2EMN2SZG28GBvt4SvGU"]
    ended = subprocess.run(
        [*line, *(["hello"] if name == "generate" else [])], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 2
    assert "swarmllm: the directory '/nowhere/at-all' does not exist" in ended.stderr
    assert "| torch\n" not in ended.stderr
    assert "| transformers\n" not in ended.stderr


def test_the_list_of_commands_fits_80_columns() -> None:
    assert max(map(len, help_text().splitlines())) <= 80


@pytest.mark.parametrize("arguments", [["--help"], ["server", "--help_all"], ["--version"]])
def test_a_reader_who_has_had_enough_is_no_error(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """As of `swarmllm … | head -1`."""
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as nobody:
        monkeypatch.setattr(sys, "stdout", nobody)
        with suppress(SystemExit):
            assert main(arguments) == 1


def test_a_text_without_quotes_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["generate", "--model", "M", "A", "dog"])
    assert "there is no place for 'dog': is it part of a text that needs quotes?" in capsys.readouterr().err
    for peers, said in ((PEER, "there is no place for 'time': is"), ("1.2.3.4:80", "'1.2.3.4:80' must look like")):
        assert (
            main(["generate", "--model", "M", "--initial_peers", peers, *(["a"] if peers == PEER else []), "time"]) == 2
        )
        assert said in capsys.readouterr().err


PEER_ID = "12D3KooWGRYpkGaDx4gAX4e8D3GUdVyM6z9ejguV9e6RigTPvRch"


@pytest.mark.parametrize(
    ("address", "problem"),
    [
        ("10.0.0.7:8000", "must look like /ip4/"),
        ("/ip4/10.0.0.7/tcp/8000", "must look like /ip4/"),
        (__file__, "or an invite in a file whose name ends in .swarm"),
        (f"/ip4/10.0.0.7/tcp/8000/p2p/{PEER_ID[:-3]}", "is not a whole address: what follows /p2p/ has 49 characters"),
        (f"/ip4/10.0.0.7/tcp/8000/p2p/{PEER_ID}/", "is not a whole address: what follows /p2p/ holds '/'"),
        (f"/ip4/10.0.0.7/tcp/8000/p2p/{PEER_ID[3:]}123", "doesn't begin with 12D3KooW"),
    ],
)
@pytest.mark.parametrize("name", ["server", "generate", "chat", "gateway", "status", "dht"])
def test_an_address_that_is_none_is_told_before_torch_is_imported(
    name: str, address: str, problem: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    model = [] if name in ("status", "dht") else ["--model", embedded_model_path()]
    assert import_module(COMMANDS[name].module).main([*model, "--initial_peers", address]) == 2
    said = capsys.readouterr().err
    assert f"the initial peer '{address}' " in said
    assert problem in said


@pytest.mark.parametrize("name", ["server", "gateway", "dht"])
def test_a_port_in_use_is_told_before_torch_is_imported(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        place = [] if name == "gateway" else ["--host_maddrs", "/ip4/127.0.0.1/tcp/0"]
        model = [] if name == "dht" else ["--model", embedded_model_path()]
        model += ["--new_swarm"] if name == "server" else []
        assert import_module(COMMANDS[name].module).main([*model, *place, "--port", port]) == 2
    said = capsys.readouterr().err
    assert "can't listen on" in said
    assert "Address already in use; choose another" in said


@pytest.mark.parametrize(
    ("flag", "mend"),
    [
        ("--direct_port", "choose another --direct_port, or 0 for none"),
        ("--metrics_port", "choose another --metrics_port"),
    ],
)
def test_another_port_in_use_is_told_with_its_flag(
    flag: str, mend: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with socket.create_server(("127.0.0.1", 0)) as other:
        place = ["--host_maddrs", "/ip4/127.0.0.1/tcp/0", flag, str(other.getsockname()[1])]
        assert (
            import_module(COMMANDS["server"].module).main(["--model", embedded_model_path(), "--new_swarm", *place])
            == 2
        )
    assert f"Address already in use; {mend}" in capsys.readouterr().err


def test_a_port_of_a_machine_in_use_is_told_before_torch_is_imported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setenv("SWARMLLM_STATE_DIR", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert import_module(COMMANDS["up"].module).main(["--port", str(port)]) == 2
        (tmp_path / "up.toml").write_text(f'host_maddrs = "/ip4/127.0.0.1/tcp/{port}"\n')
        assert import_module(COMMANDS["up"].module).main(["--config", str(tmp_path / "up.toml")]) == 2
    page, machine = capsys.readouterr().err.splitlines()
    assert "Address already in use; choose another --port" in page
    assert f"can't listen on /ip4/127.0.0.1/tcp/{port}: Address already in use" in machine


@pytest.mark.parametrize("model", ["/nope", "/nope:adapter"])
def test_a_directory_that_is_missing_is_told_before_the_port_and_before_torch_is_imported(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        assert import_module(COMMANDS["gateway"].module).main(["--model", model, "--port", port]) == 2
    assert "the directory '/nope' does not exist" in capsys.readouterr().err


def test_a_hub_that_cannot_be_reached_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what has been downloaded is used without asking it."""
    from huggingface_hub import constants

    from swarmllm.models.checkpoint import sources

    with socket.create_server(("127.0.0.1", 0)) as one:
        port = one.getsockname()[1]
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{port}")
        monkeypatch.setattr(sources, "getproxies", dict)
        assert sources._hub_is_there()
    monkeypatch.setattr(sources, "is_offline_mode", lambda: False)
    asked: list[object] = []

    def download(*_: object, **options: object) -> str:
        asked.append(options["local_files_only"])
        raise LocalEntryNotFoundError("not here")

    monkeypatch.setattr(sources, "hf_hub_download", download)
    source = sources.find_source("some/model", revision=None, token=None, cache_dir=None)
    with pytest.raises(ConfigurationError, match="and the hub can't be reached to look for a model of that name"):
        source.path("config.json", required=True)
    assert asked == [True]
