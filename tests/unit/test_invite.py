"""Invites: what goes in comes out, wherever initial peers go, and damaged ones are refused in one sentence."""

import base64
import json
import logging
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmllm.command_line import Parser
from swarmllm.commands.dht import parse_dht, relay_rules
from swarmllm.commands.generate import parse_prompt
from swarmllm.config import ClientConfig
from swarmllm.errors import ConfigurationError
from swarmllm.invite import MAX_ENTRIES, PREFIX, Invite, names_invite, read_invite, unpack_invites
from swarmllm.network.relay.service import RelayRules
from swarmllm.server.__main__ import parse_config
from swarmllm.server.settings import ServerConfig

PEERS = (
    "/ip4/10.0.0.1/tcp/31337/p2p/12D3KooWBAwnHm453KpXMfsLQJ2JViwTQqoZBw7s1jDys9rVxmuf",
    "/ip4/10.0.0.2/tcp/31337/p2p/12D3KooWCJpnhEWDwhydvDx45sX6wfumYVb1tBX8mfF7g4j1B4xo",
)
S1, S2, C1, C2, MINE = (f"12D3KooW{name}".ljust(52, "x") for name in ("S1", "S2", "C1", "C2", "mine"))
PRIVATE = Invite(initial_peers=PEERS, model="some/model", allowed_servers=(S1, S2), allowed_clients=(C1,))
ENTRIES = st.text(st.characters(categories=("L", "N", "P")), min_size=1, max_size=60).filter(
    lambda text: not text.startswith(PREFIX) and not text.endswith(".swarm")
)
LISTS = st.lists(ENTRIES, max_size=5).map(tuple)
PEER_IDS = st.lists(st.sampled_from((S1, S2, C1, C2, MINE)), max_size=5).map(tuple)


@settings(max_examples=40)
@given(LISTS, st.none() | ENTRIES, st.none() | PEER_IDS, st.none() | PEER_IDS, st.none() | ENTRIES)
def test_what_goes_in_comes_out(
    peers: tuple[str, ...],
    model: str | None,
    servers: tuple[str, ...] | None,
    clients: tuple[str, ...] | None,
    name: str | None,
) -> None:
    invite = Invite(initial_peers=peers, model=model, allowed_servers=servers, allowed_clients=clients, swarm_name=name)
    assert read_invite(str(invite)) == invite


def test_where_only_an_invite_or_a_name_can_stand_any_file_is_an_invite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mistyped path would found a run of that name, and nobody would come."""
    monkeypatch.chdir(tmp_path)
    Path("invite.txt").write_text(f"join us: {PRIVATE}\n")
    Path("ours").mkdir()
    Path("poems").write_text("Roses are red.")
    Path("picture").write_bytes(b"\xff\xd8\xff")
    assert all(map(names_invite, (str(PRIVATE), "nosuch.swarm", "invite.txt")))
    assert read_invite("invite.txt") == PRIVATE
    names = "ours", "poems", "picture", "invite", "invite.tx", "ours of 2026", "me/poet", "x" * 5000
    assert not any(map(names_invite, names))
    for missing in ("./invite.tx", "/nowhere/invite", "../nosuch", "invit.txt"):
        with pytest.raises(ConfigurationError, match=f"there is no file {missing}, and an invite begins with swarm:"):
            names_invite(missing)
    with pytest.raises(ConfigurationError, match=r"\./poems must hold one invite"):
        names_invite("./poems")


def test_an_invite_is_one_word_for_any_shell() -> None:
    assert all(letter.isalnum() or letter in ":-_" for letter in str(PRIVATE))


@settings(max_examples=40)
@given(st.text(max_size=200) | st.binary(max_size=200).map(lambda data: base64.urlsafe_b64encode(data).decode()))
def test_any_other_text_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="invite"):
        read_invite(PREFIX + text)


@pytest.mark.parametrize(
    ("word", "reason"),
    [("abc", "letters are missing or changed"), ("a", "letters are missing"), ("", "nothing follows the colon")],
)
def test_a_damaged_word_is_told_in_plain_words(word: str, reason: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"is damaged \({reason}"):
        read_invite(PREFIX + word)


@pytest.mark.parametrize(
    "fields",
    [
        [],
        {"initial_peers": "no list"},
        {"initial_peers": [1]},
        {"initial_peers": ["x"] * (MAX_ENTRIES + 1)},
        {"initial_peers": ["x" * 300]},
        {"initial_peers": [str(PRIVATE)[:200]]},
        {"model": 3},
        {"model": "\x1b[2J"},
        {"allowed_clients": [None]},
        {"swarm_name": ["a"]},
        {"swarm_name": ""},
    ],
    ids=str,
)
def test_fields_that_make_no_sense_are_refused(fields: object) -> None:
    word = PREFIX + base64.urlsafe_b64encode(json.dumps(fields).encode()).decode()
    with pytest.raises(ConfigurationError, match="damaged"):
        read_invite(word)


@pytest.mark.parametrize("name", ["allowed_servers", "allowed_clients"])
def test_peers_that_cannot_exist_are_refused(name: str) -> None:
    word = PREFIX + base64.urlsafe_b64encode(json.dumps({name: [S1, "bogus"]}).encode()).decode()
    with pytest.raises(ConfigurationError, match=f"new invite .*{name}: 'bogus' is no peer id.* has 5 characters"):
        read_invite(word)
    with pytest.raises(ConfigurationError, match=f"^{name}: 'bogus' is no peer id, which looks like 12D3KooW"):
        parse_dht(["--invite", f"--{name}", C1, "bogus"])


def test_newer_fields_are_ignored() -> None:
    word = PREFIX + base64.urlsafe_b64encode(b'{"initial_peers": ["/a"], "colour": "blue"}').decode()
    assert read_invite(word) == Invite(initial_peers=("/a",))


def test_a_file_holds_one(tmp_path: Path) -> None:
    path = tmp_path / "friends.swarm"
    path.write_text(f"# for friends\n{PRIVATE}\n")
    assert unpack_invites(["/ip4/1", str(path), PEERS[0]]) == (("/ip4/1", *PEERS), (PRIVATE,))
    for text in ("", f"{PRIVATE} {PRIVATE}"):
        path.write_text(text)
        with pytest.raises(ConfigurationError, match="one invite"):
            read_invite(str(path))
    with pytest.raises(ConfigurationError, match="No such file"):
        read_invite(str(tmp_path / "none.swarm"))


def test_settings_follow_it_unless_they_say_otherwise() -> None:
    client = ClientConfig(initial_peers=str(PRIVATE))
    assert (client.initial_peers, client.allowed_servers) == (PEERS, (S1, S2))
    assert ClientConfig(initial_peers=[str(PRIVATE)], allowed_servers=[MINE]).allowed_servers == (MINE,)
    server = ServerConfig(model="m", initial_peers=(str(PRIVATE),))
    assert (server.initial_peers, server.allowed_clients, server.allowed_servers) == (PEERS, (C1,), (S1, S2))
    assert ServerConfig(model="m", initial_peers=PEERS).allowed_clients is None
    own = ServerConfig(model="m", initial_peers=[str(PRIVATE)], allowed_servers=[MINE])
    assert own.allowed_servers == (MINE,)


def test_the_environment_may_hold_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWARMLLM_INITIAL_PEERS", str(PRIVATE))
    assert ClientConfig().initial_peers == PEERS
    assert parse_prompt(["hello"])[0].model == "some/model"


@pytest.mark.parametrize(
    "argv", [["--initial_peers", str(PRIVATE)], [f"--initial-peers={PRIVATE}"]], ids=["two", "one"]
)
def test_commands_take_the_model_from_it(argv: list[str]) -> None:
    assert parse_config(argv).model == "some/model"
    assert parse_config(["--model", "copies/model", *argv]).model == "copies/model"
    config, prompt = parse_prompt(["hello", *argv])
    assert (config.model, prompt) == ("some/model", "hello")
    assert config.allowed_servers == (S1, S2)


def test_another_model_is_not_used_silently(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        parse_config(["--model", "another", "--initial_peers", str(PRIVATE)])
    assert "some/model" in caplog.text
    assert "another" in caplog.text


def test_a_command_without_a_model_ignores_that_of_the_invite() -> None:
    parser = Parser(prog="swarmllm test", description="A test.")
    parser.add_argument("--initial_peers", nargs="+")
    assert parser.parse_settings(["--initial_peers", str(PRIVATE)]) == {"initial_peers": [str(PRIVATE)]}


def test_the_name_of_a_private_swarm_comes_from_the_invite() -> None:
    named, other = (str(Invite(initial_peers=PEERS[:1], swarm_name=name)) for name in ("ours", "theirs"))
    for read in (
        lambda *peers: ClientConfig(initial_peers=peers),
        lambda *peers: ServerConfig(model="m", initial_peers=peers),
    ):
        assert read(named).swarm_name == "ours"
        assert read(named, str(PRIVATE), named).swarm_name == "ours"
        assert read(*PEERS).swarm_name is None
        with pytest.raises(ConfigurationError, match="different private swarms"):
            read(named, other)
        assert "ours" not in repr(read(named))
    config, invite = parse_dht(["--invite", "--initial_peers", named])
    assert invite is not None
    assert invite.swarm_name == config.swarm_name == "ours"
    with pytest.raises(ConfigurationError, match="give --invite too"):
        parse_dht(["--private"])


def test_a_bootstrap_peer_knows_the_peers_of_its_invite(tmp_path: Path) -> None:
    (tmp_path / "dht.toml").write_text("relay_mbps = 7")
    config, invite = parse_dht(["--initial_peers", str(PRIVATE)])
    assert invite is None
    assert relay_rules(config) == RelayRules(servers=(S1, S2), clients=(C1,))
    config, invite = parse_dht(
        ["--initial_peers", str(PRIVATE), "--invite", "--config", str(tmp_path / "dht.toml"), "--allowed_clients", C2]
    )
    assert invite == Invite(initial_peers=PEERS, allowed_servers=(S1, S2), allowed_clients=(C2,))
    assert relay_rules(config) == RelayRules(mbps=7.0, servers=(S1, S2), clients=(C2,))
    assert relay_rules(parse_dht(["--no_relay"])[0]) is None


def test_dht_makes_them() -> None:
    config, invite = parse_dht(["--invite", "--model", "m", "--allowed_clients", C1, C2, "--initial_peers", *PEERS])
    assert config.initial_peers == PEERS
    assert invite == Invite(initial_peers=PEERS, model="m", allowed_clients=(C1, C2))
    assert parse_dht([])[1] is None
    with pytest.raises(ConfigurationError, match="--invite"):
        parse_dht(["--model", "m"])
