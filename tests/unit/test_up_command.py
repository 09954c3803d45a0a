"""`swarmllm up` and `swarmllm use` without machines: what they read, the systemd unit, and what they print."""

import asyncio
import json
import os
import re
import socket
import stat
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from swarmllm.commands import up, use
from swarmllm.commands.up import UpConfig, parse_up, unit_path, unit_text
from swarmllm.commands.use import Page, Screen, machine_lines, model_line
from swarmllm.errors import ConfigurationError, CorruptWeightsError
from swarmllm.gateway.settings import GatewayConfig
from swarmllm.invite import Invite
from swarmllm.machines.membership import Membership
from swarmllm.machines.state import StateDirectory
from swarmllm.network.p2p.identity import Identity

KEY = Identity.generate()
INVITE = str(Membership(KEY, "", is_open=True).invite([f"/ip4/192.168.1.2/tcp/4000/p2p/{Identity.generate().peer_id}"]))
SYSTEMCTL = """#!/bin/sh
echo "$(basename $0) $*" >> "$CALLS"
if [ "$2" = "$FAILS" ]; then echo "Failed to $2" >&2; exit 1; fi
"""


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A systemd that notes what it is asked."""
    for name in ("systemctl", "loginctl"):
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(SYSTEMCTL)
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("SWARMLLM_STATE_DIR", str(tmp_path / "state"))
    return tmp_path / "calls"


@pytest.mark.parametrize(
    "settings", [{"upload_mbps": "x"}, {"device": 1}, {"public_name": True}, {"host_maddrs": None}]
)
def test_settings_have_the_types_that_they_declare(settings: dict[str, Any]) -> None:
    (name,) = settings
    with pytest.raises(ConfigurationError, match=f"^{name} must be"):
        UpConfig(**settings)


@pytest.mark.parametrize("host", ["", " "])
def test_an_empty_address_is_no_default(host: str) -> None:
    for config in (partial(UpConfig), partial(GatewayConfig, model=("m",))):
        with pytest.raises(ConfigurationError, match="host is empty: give an address"):
            config(host=host)


def test_install_and_uninstall(calls: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert up.main(["--install", "--max_memory", "50%", "--nice", "--no_lan_discovery", INVITE]) == 0
    assert "installed" in capsys.readouterr().out
    assert calls.read_text().splitlines() == [
        "systemctl --user show-environment",
        "systemctl --user daemon-reload",
        "systemctl --user enable swarmllm.service",
        "systemctl --user restart swarmllm.service",
        "loginctl enable-linger",
    ]
    unit = unit_path().read_text()
    started = f'ExecStart="{sys.executable}" "-m" "swarmllm" "up"'
    assert f'{started} "--max_memory" "50%%" "--nice" "--no_lan_discovery"\n' in unit
    assert f'Environment="SWARMLLM_STATE_DIR={os.environ["SWARMLLM_STATE_DIR"]}"' in unit
    assert KEY.key.private_bytes_raw().hex() not in unit
    assert INVITE not in unit
    assert stat.S_IMODE(unit_path().stat().st_mode) == 0o600
    state = StateDirectory(Path(os.environ["SWARMLLM_STATE_DIR"]))
    found = state.swarm_key()
    assert found is not None
    assert found.peer_id == KEY.peer_id
    assert len(state.read("peers.json", [])) == 1
    assert up.main(["--uninstall"]) == 0
    assert not unit_path().exists()
    assert calls.read_text().splitlines()[5:] == [
        "systemctl --user show-environment",
        "systemctl --user disable --now swarmllm.service",
        "systemctl --user daemon-reload",
    ]
    assert state.swarm_key() is not None
    assert up.main(["--uninstall"]) == 2
    assert "nothing is installed" in capsys.readouterr().err


def test_settings_without_a_flag_are_installed_in_a_file(calls: Path) -> None:
    config = UpConfig(allowed_hosts=("box.fritz.box", "bücher"), cors_origins=["https://example.org"], port=0)
    words = ["--install", "--port", "0", "--config", str(calls.parent / "given.toml")]
    (calls.parent / "given.toml").write_text(up.settings_text(config))
    assert up.main(words) == 0
    assert f'"up" "--port" "0" "--config" "{up.settings_path()}"\n' in unit_path().read_text()
    assert parse_up(["--port", "0", "--config", str(up.settings_path())]) == (config, None)
    page, sockets = up._bound_page(config, "127.0.0.1")
    for one in sockets:
        one.close()
    assert page.allowed_hosts == config.allowed_hosts
    assert page.cors_origins == ("https://example.org",)


def contents(directory: Path) -> dict[str, bytes]:
    return {one.name: one.read_bytes() for one in directory.iterdir()}


def test_what_is_refused_leaves_the_machine_in_its_swarm(calls: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = StateDirectory(Path(os.environ["SWARMLLM_STATE_DIR"]))
    state.enter_swarm(Identity.generate(), name="home", is_open=True)
    Identity.generate().write(state.identity_path)
    state.write("command.json", [])
    with state.locked():
        before = contents(state.path)
        for flags in ([], ["--install"]):
            assert up.main([*flags, INVITE]) == 2
            assert "`swarmllm up` runs on this machine already" in capsys.readouterr().err
        assert up.main(["--install"]) == 2
    assert up.main(["--private", "--install"]) == 2
    assert "in the swarm home already" in capsys.readouterr().err
    assert contents(state.path) == before
    assert not unit_path().exists()


def test_the_unit_starts_the_same_settings_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", 'a"b\\c%d$e')
    config = UpConfig(public_name='my "big" box', device=("cuda:0", "cuda:1"), upload_mbps=5, share_weights=False)
    text = unit_text(config)
    assert 'Environment="HF_TOKEN=a\\"b\\\\c%%d$$e"' in text
    (line,) = [one for one in text.splitlines() if one.startswith("ExecStart=")]
    words = json.loads("[" + line.partition("=")[2].replace('" "', '", "') + "]")
    assert parse_up(words[4:]) == (config, None)
    unit = tmp_path / "swarmllm.service"
    unit.write_text(text)
    try:
        checked = subprocess.run(["systemd-analyze", "verify", "--user", str(unit)], capture_output=True, text=True)
    except FileNotFoundError:
        return  # this machine has no systemd
    assert "swarmllm.service:" not in checked.stderr


def test_a_systemd_that_refuses_or_is_missing(
    calls: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for fails, said in (
        ("enable", "`systemctl --user enable swarmllm.service` failed: Failed to enable"),
        ("show-environment", "no session of systemd here (`systemctl --user show-environment` failed: Failed to show-"),
    ):
        monkeypatch.setenv("FAILS", fails)
        assert up.main(["--install"]) == 2
        assert said in capsys.readouterr().err
        assert not unit_path().exists()
    monkeypatch.setenv("FAILS", "")
    for fails, path in (("show-environment", os.environ["PATH"]), ("", "/nowhere")):
        assert up.main(["--install"]) == 0
        link = unit_path().parent / "default.target.wants" / unit_path().name
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(unit_path())
        with monkeypatch.context() as later:  # the session has gone, as after su
            later.setenv("FAILS", fails)
            later.setenv("PATH", path)
            assert up.main(["--uninstall"]) == 0
            assert not unit_path().exists()
            assert not link.is_symlink()
    monkeypatch.setenv("PATH", "/nowhere")
    assert up.main(["--install"]) == 2
    assert "has no systemd" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["hello"], "'hello' is no invite and no file that holds one"),
        (["x" * 5000], "is no invite and no file that holds one"),
        (["/no/such/invite.txt"], "there is no file /no/such/invite.txt"),
        ([__file__], "must hold one invite"),
        (["swarm:e30"], "makes no machine a member"),
        (["--install", "--uninstall"], "not both"),
        (["--private", INVITE], "leave the invite out"),
        (["--max_memory", "lots"], "max_memory must be in GB"),
        (["--device", "tpu"], "'tpu' can't be used"),
        (["--upload_mbps", "0"], "upload_mbps must be greater than 0"),
        (["--public_name", "x" * 65], "public_name must have 1 to 64 characters"),
    ],
)
def test_what_cannot_work_is_one_sentence(
    argv: list[str], complaint: str, calls: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert up.main([*argv, *(["--install"] if "swarm:e30" in argv else [])]) == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--max_memory", "99999"], "is more than the"),
        (["--max_memory", "0.0001"], "'0.0001' is 0.1 MB, too little for any block"),
        (["--device", "cuda:77"], "can't be used here"),
        (["--host", "192.0.2.77"], "can't listen on 192.0.2.77 \\(Cannot assign"),
    ],
)
@pytest.mark.parametrize("way", [[], ["--install"]])
def test_what_this_machine_cannot_do_is_refused_before_it_joins(
    flags: list[str], complaint: str, way: list[str], calls: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert up.main([*way, *flags, INVITE]) == 2
    said = capsys.readouterr()
    assert re.search(complaint, said.err)
    assert not said.out
    assert StateDirectory(Path(os.environ["SWARMLLM_STATE_DIR"])).swarm_key() is None
    assert not unit_path().exists()


def test_only_ports_that_are_taken_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    taken, tries = socket.create_server(("127.0.0.1", 0)), []
    free = socket.create_server(("127.0.0.1", 0))
    port = free.getsockname()[1]
    free.close()
    with taken:
        page, sockets = up._bound_page(UpConfig(), "127.0.0.1", (taken.getsockname()[1], port))
    assert page.port == port
    for one in sockets:
        one.close()

    def unknown(host: str, port: int, **_: Any) -> Any:
        tries.append(port)
        raise socket.gaierror(socket.EAI_AGAIN, "no name server")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(ConfigurationError, match=r"can't listen on elsewhere \(no name server\)"):
        up._bound_page(UpConfig(), "elsewhere")
    assert len(tries) == 1


def test_an_invite_to_a_model_is_refused(calls: Path, capsys: pytest.CaptureFixture[str]) -> None:
    word = str(Invite(initial_peers=(), model="m"))
    assert up.main(["--install", word]) == 2
    assert "makes no machine a member" in capsys.readouterr().err


# --- use


def hosted(**changes: Any) -> dict[str, Any]:
    usual = {
        "model": "m", "start": 0, "end": 4, "quant_type": "int8", "state": "online", "done_bytes": 0, "total_bytes": 0,
        "bytes_from_machines": 0, "bytes_from_hub": 0, "problem": "",
    }  # fmt: skip
    return usual | changes


def machine(name: str, *held: dict[str, Any], is_here: bool = False) -> dict[str, Any]:
    return {"name": name, "is_here": is_here, "memory_bytes": 2e9, "hosted": list(held)}


PICTURE = {
    "machines": [
        machine("a\x1b[2J"),
        machine("here", hosted(state="fetching", done_bytes=250e6, total_bytes=1e9), is_here=True),
        machine("c", hosted(bytes_from_machines=1e9, bytes_from_hub=2e9), hosted(state="failed", problem="no memory")),
    ]
}


def test_a_line_for_each_machine() -> None:
    lines = machine_lines(PICTURE)
    assert lines == [
        "  here   m 0:4 fetching [#####...............] 0.25 GB of 1.00 GB",
        "  a?[2J  offers 2.00 GB",
        "  c      m 0:4 online, 1.00 GB came from machines, 2.00 GB from the hub",
        "  c      m failed: no memory",
    ]
    assert machine_lines(PICTURE, bars=False)[0] == "  here   m 0:4 fetching 20 % of 1.00 GB"


def test_a_line_for_the_model() -> None:
    model = {
        "name": "m", "state": "does not fit", "missing_bytes": 3e9, "quant_type": "q4_k", "one_tokens_per_s": None,
        "problem": "",
    }  # fmt: skip
    assert model_line(model) == "m: does not fit, 3.00 GB of memory are missing"
    found = model_line({**model, "state": "ready", "one_tokens_per_s": 12.345})
    assert found == "m: ready, q4_k, about 12.3 tokens/s expected"


def test_elsewhere_than_on_a_terminal_each_line_is_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen()
    screen.show(["bar 1"], ["a", "b"])
    screen.show(["bar 2"], ["a", "c"])
    assert capsys.readouterr().out == "a\nb\nc\n"


def test_use_without_an_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SWARMLLM_STATE_DIR", str(tmp_path))
    assert use.main(["m"]) == 2
    assert "start `swarmllm up` first" in capsys.readouterr().err
    StateDirectory(tmp_path).write("page.json", {"url": "http://127.0.0.1:9/", "key": "k"})
    assert use.main(["m"]) == 1
    assert "doesn't answer at http://127.0.0.1:9/, because it has ended: start `swarmllm up`" in capsys.readouterr().err
    for argv in (["m", "--drop", "n"], ["--add"], [""], [" "], ["https://example.org/m"]):
        assert use.main(argv) == 2
    capsys.readouterr()
    for address in ("https://huggingface.co/org/name", "hf.co/org/name/tree/main?x=1", "HTTPS://HF.co/org/name/x.gguf"):
        assert use.main([address]) == 2
        assert "give the hub id, org/name\n" in capsys.readouterr().err


class FakePage(Page):
    """An agent that answers as it is told."""

    def __init__(self, pictures: list[dict[str, Any]], answers: list[int]) -> None:
        super().__init__("http://here/", "k")
        self._pictures, self._answers = pictures, answers
        self.asked: list[Any] = []

    code = "model_opening"
    """Why the model doesn't answer."""

    async def ask(self, path: str, body: dict[str, Any] | None = None) -> tuple[int, bytes]:
        if body is not None:
            self.asked.append((path, body))
        if path == "/v1/completions":
            return self._answers.pop(0), json.dumps({"error": {"message": "not yet", "code": self.code}}).encode()
        if path == "/api/machines":
            return 200, json.dumps(self._pictures.pop(0) if len(self._pictures) > 1 else self._pictures[0]).encode()
        return 200, json.dumps({"number": 3, "what": "use m", "wanted": [{"name": "m", "manifest": "f"}]}).encode()


def picture(state: str) -> dict[str, Any]:
    model = {
        "name": "m", "manifest": "f", "state": state, "missing_bytes": 3e9, "quant_type": "q4_k",
        "one_tokens_per_s": None, "problem": "",
    }  # fmt: skip
    return {**PICTURE, "models": [model]}


def test_use_shows_the_machines_until_the_model_answers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(use, "LOOK_S", 0.001)
    page = FakePage([picture("loading"), picture("loading"), picture("ready")], [503, 200])
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    asyncio.run(use.use(page, "model", add=True))
    assert page.asked[0] == ("/api/machines/use", {"model": str(tmp_path / "model"), "add": True})
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "swarmllm: command 3: use m"
    assert lines[1] == "m: loading"
    assert lines.count("m: loading") == 1
    assert "m answers after " in lines[-2]
    assert lines[-1] == "swarmllm: open http://here/#key=k"


def test_use_ends_where_a_model_does_not_fit_or_another_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(use, "LOOK_S", 0.001)
    monkeypatch.setattr(use, "PATIENCE_S", 0.0)
    for end, said in (
        (picture("does not fit"), "3.00 GB of memory are missing"),
        ({**PICTURE, "models": []}, "another"),
    ):
        with pytest.raises(use.SwarmError, match=said):
            asyncio.run(use.use(FakePage([picture("loading"), end], []), "m", add=False))
    with pytest.raises(ConfigurationError, match="not yet"):
        use._accepted(400, b'{"error": {"message": "not yet"}}')


@pytest.mark.parametrize(
    ("code", "kind"), [("configuration", ConfigurationError), ("weights_corrupt", CorruptWeightsError)]
)
def test_use_ends_where_a_model_cannot_be_opened(code: str, kind: type[Exception]) -> None:
    page = FakePage([picture("ready")], [503])
    page.code = code
    with pytest.raises(kind, match="not yet"):
        asyncio.run(use.use(page, "m", add=False))
    assert not page._answers


class SilentPage(Page):
    """An agent that owes an answer."""

    def __init__(self) -> None:
        super().__init__("http://here/", "k")
        self.may_answer, self.has_answered = threading.Event(), threading.Event()

    def _ask(self, path: str, body: dict[str, Any] | None) -> tuple[int, bytes]:
        self.may_answer.wait(20)
        self.has_answered.set()
        return 200, b"{}"


def test_the_end_of_use_does_not_wait_for_an_agent_that_does_not_answer() -> None:
    """Neither Ctrl-C nor SIGTERM would end the command otherwise, because asyncio waits for its own threads."""
    page = SilentPage()

    async def give_up() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await page.get("/api/machines")

    asyncio.run(give_up())
    assert not page.has_answered.is_set()
    page.may_answer.set()
    assert page.has_answered.wait(20)
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and thread.name == "swarmllm-background":
            thread.join()
