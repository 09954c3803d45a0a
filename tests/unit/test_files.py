"""Files that users saved with any editor, homes that nobody knows, and files that a crash leaves whole."""

import errno
import io
import json
import os
import pwd
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import pytest

from swarmllm import files
from swarmllm.command_line import Parser, read_stdin
from swarmllm.commands import use
from swarmllm.commands.chat import _lines
from swarmllm.config import SwarmConfig, default_cache_dir, own_cache_dir, require_model_place
from swarmllm.errors import ConfigurationError
from swarmllm.files import existing_path, user_path
from swarmllm.gateway.settings import GatewayConfig
from swarmllm.invite import Invite, read_invite
from swarmllm.machines.models import place_of
from swarmllm.machines.state import StateDirectory
from swarmllm.models.checkpoint.checkpoint import open_checkpoint
from swarmllm.network.p2p.identity import Identity
from swarmllm.server.settings import ServerConfig

PEER = "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWBAwnHm453KpXMfsLQJ2JViwTQqoZBw7s1jDys9rVxmuf"
ENCODINGS = ("utf-8", "utf-8-sig", "utf-16", "utf-16-be", "utf-32")
"""As editors and shells write them; the one without a mark of its own gets one."""


def saved(path: Path, text: str, encoding: str) -> Path:
    mark = "\ufeff" if encoding == "utf-16-be" else ""
    path.write_bytes((mark + text).replace("\n", "\r\n").encode(encoding))
    return path


@pytest.mark.parametrize("words", ["x" * 300, "a/" * 3000, "zero\0byte", "half \ud800 character"])
def test_words_that_are_no_path(words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWARMLLM_STATE_DIR", str(tmp_path))
    StateDirectory(tmp_path).write("page.json", {"url": "http://127.0.0.1:9/", "key": "k"})
    for use_it in (user_path, existing_path, require_model_place, place_of, open_checkpoint, read_invite):
        with pytest.raises(ConfigurationError, match="path or a name"):
            use_it(words)
    assert use.main([words]) == 2


def test_links_that_lead_nowhere_are_one_sentence(tmp_path: Path) -> None:
    circle, lost, whole = tmp_path / "circle", tmp_path / "lost", tmp_path / "whole"
    circle.symlink_to(circle)
    lost.symlink_to(tmp_path / "gone")
    whole.symlink_to(tmp_path)
    assert existing_path(whole) == whole
    uses: list[Callable[[Path], object]] = [
        existing_path,
        lambda path: require_model_place(str(path)),
        lambda path: open_checkpoint(str(path)),
        Identity.load_or_create,
        lambda path: SwarmConfig(identity_path=str(path)),
    ]
    for use_it in uses:
        with pytest.raises(ConfigurationError, match=f"{circle} leads through links in a circle: mend them"):
            use_it(circle)
        with pytest.raises(ConfigurationError, match=f"{lost} is a link to {tmp_path}/gone, which does not exist"):
            use_it(lost)


def test_a_path_where_this_user_may_not_look(monkeypatch: pytest.MonkeyPatch) -> None:
    def stat(*_: object, **__: object) -> NoReturn:
        raise PermissionError(errno.EACCES, "Permission denied")

    assert existing_path("/nowhere/model") is None
    monkeypatch.setattr(Path, "stat", stat)
    with pytest.raises(ConfigurationError, match="/root/model can't be looked at: Permission denied"):
        existing_path("/root/model")


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_keys(tmp_path: Path, encoding: str) -> None:
    path = saved(tmp_path / "keys", "secret-1\n  # old: secret-2\n\n\t#\n secret-ü \n", encoding)
    assert GatewayConfig(model=("m",), api_keys_file=str(path)).api_keys() == {"secret-1", "secret-ü"}


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_invites(tmp_path: Path, encoding: str) -> None:
    invite = Invite(initial_peers=(PEER,))
    assert read_invite(str(saved(tmp_path / "a.swarm", f"{invite}\n", encoding))) == invite


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_settings(tmp_path: Path, encoding: str) -> None:
    path = saved(tmp_path / "settings.toml", 'public_name = "Büro"\n  # a comment\nport = 31337\n', encoding)
    parser = Parser(prog="swarmllm server", description="")
    parser.add_settings(ServerConfig, [ServerConfig])
    parser.add_argument("--port", type=int)
    assert parser.parse_settings(["--config", str(path)]) == {"public_name": "Büro", "port": 31337}


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_prompts(monkeypatch: pytest.MonkeyPatch, encoding: str, tmp_path: Path) -> None:
    path = saved(tmp_path / "prompt", "Es war einmal\nein Bär", encoding)
    with path.open(encoding="utf-8") as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        assert read_stdin() == "Es war einmal\nein Bär"


def test_a_prompt_in_the_terminals_own_encoding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("Bär".encode("latin-1")), encoding="latin-1"))
    assert read_stdin() == "Bär"


def test_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("\ufeffWho?\r\nWhy?\r\n"))
    assert [*_lines(interactive=False)] == ["Who?", "Why?"]


Reader = Callable[[Path], Any]
READERS: dict[str, Reader] = {
    "keys": lambda path: GatewayConfig(model=("m",), api_keys_file=str(path)).api_keys(),
    "an invite": lambda path: read_invite(str(path)),
}


@pytest.mark.parametrize("reader", READERS.values(), ids=[*READERS])
def test_another_encoding_is_one_sentence(tmp_path: Path, reader: Reader) -> None:
    path = tmp_path / "büro.swarm"
    path.write_bytes("first\nBüro".encode("latin-1"))
    with pytest.raises(ConfigurationError, match=r"it is not in UTF-8 \(line 2\), so save it as UTF-8"):
        reader(path)


@pytest.mark.parametrize("reader", READERS.values(), ids=[*READERS])
def test_what_is_no_file_is_one_sentence(tmp_path: Path, reader: Reader) -> None:
    for path, reason in ((tmp_path / "none.swarm", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(ConfigurationError, match=reason):
            reader(path) if path.suffix or reader is READERS["keys"] else files.read_text(path)


def test_settings_in_another_encoding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "settings.toml"
    path.write_bytes('public_name = "Büro"\n'.encode("latin-1"))
    with pytest.raises(SystemExit):
        Parser(prog="swarmllm server", description="").parse_settings(["--config", str(path)])
    assert "it is not in UTF-8 (line 1), so save it as UTF-8" in capsys.readouterr().err


# Without a home


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As in a container that runs as a number without a user."""

    def nobody(uid: int) -> NoReturn:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    for name in ("HOME", "USER", "LOGNAME", "XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE", "SWARMLLM_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


@pytest.mark.usefixtures("homeless")
def test_caches_are_among_temporary_files(tmp_path: Path) -> None:
    assert own_cache_dir().is_relative_to(tmp_path)
    assert Path(str(default_cache_dir())).is_relative_to(tmp_path)
    (made,) = tmp_path.iterdir()
    assert made.stat().st_mode & 0o777 == 0o700


@pytest.mark.usefixtures("homeless")
def test_what_was_said_of_the_cache_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", "/models")
    assert default_cache_dir() is None
    monkeypatch.setenv("SWARMLLM_CACHE", "/mine")
    assert default_cache_dir() == "/mine"


@pytest.mark.usefixtures("homeless")
def test_no_cache_that_another_user_has_put_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = os.getuid() + 1
    (tmp_path / f"cache-{other}").mkdir()
    monkeypatch.setattr("os.getuid", lambda: other)
    with pytest.raises(ConfigurationError, match="another user's: set SWARMLLM_CACHE"):
        own_cache_dir()


@pytest.mark.parametrize(
    "use",
    [
        lambda: open_checkpoint("~no-such-user/model"),
        lambda: Identity.load_or_create("~no-such-user/key"),
        lambda: GatewayConfig(model=("m",), api_keys_file="~no-such-user/keys").api_keys(),
        lambda: SwarmConfig(initial_peers=("~no-such-user/a.swarm",)),
    ],
    ids=["model", "identity", "keys", "invite"],
)
def test_the_home_of_nobody_is_one_sentence(use: Callable[[], Any]) -> None:
    with pytest.raises(ConfigurationError, match="no home directory is known for it, so give the whole path"):
        use()


# Whole, or as it was


def test_a_file_is_replaced_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "kept.json"
    path.write_text("old")
    with files.replaced(path) as beside:
        beside.write_text("half of the n")
        assert path.read_text() == "old"
        beside.write_text("new")
    assert path.read_text() == "new"
    assert [*tmp_path.iterdir()] == [path]


def test_what_fails_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "kept.json"
    path.write_text("old")
    with suppress(KeyboardInterrupt), files.replaced(path) as beside:
        beside.write_text("half of the n")
        raise KeyboardInterrupt
    assert path.read_text() == "old"
    assert [*tmp_path.iterdir()] == [path]


@pytest.mark.parametrize("links", [True, False], ids=["", "without links"])
def test_an_identity_is_whole_private_and_nobody_elses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    def refuse(*_: Any) -> NoReturn:
        raise PermissionError(1, "Operation not permitted")

    if not links:
        monkeypatch.setattr("os.link", refuse)
    path = tmp_path / "key"
    identity = Identity.generate()
    identity.write(path)
    assert Identity.load(path).peer_id == identity.peer_id
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(ConfigurationError, match="can't be written: File exists"):
        Identity.generate().write(path)
    assert Identity.load(path).peer_id == identity.peer_id
    assert [*tmp_path.iterdir()] == [path]


def test_a_disk_that_is_full_leaves_no_half_of_an_identity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> NoReturn:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(ConfigurationError, match="No space left"):
        Identity.generate().write(tmp_path / "key")
    assert not [*tmp_path.iterdir()]
    with pytest.raises(OSError, match="No space left"):
        files.replace_file(tmp_path / "index.json", json.dumps({}))
    assert not [*tmp_path.iterdir()]


def test_no_room_for_temporary_files_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", None)
    files.require_temporary_directory()

    def full(*_: Any, **__: Any) -> NoReturn:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr("tempfile._os.open", full)
    with pytest.raises(ConfigurationError, match=r"make room on the disk, or set TMPDIR"):
        files.require_temporary_directory()
