"""Entering a swarm of machines: invites, JOIN, the state directory; and all that is refused."""

import asyncio
import ipaddress
import json
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from swarmllm.errors import ConfigurationError, PeerError
from swarmllm.invite import Invite, read_invite
from swarmllm.machines import membership
from swarmllm.machines.membership import (
    Doorkeeper,
    Membership,
    ask_to_join,
    find_membership,
    is_of_own_network,
    join_open_swarm,
    note_membership,
    read_membership,
)
from swarmllm.machines.records import Command, Wanted, sign_command
from swarmllm.machines.state import NUM_KEPT_COMMANDS, StateDirectory
from swarmllm.network.p2p.discovery import FoundPeer
from swarmllm.network.p2p.identity import Identity
from swarmllm.network.p2p.peer import Peer
from swarmllm.network.relay.service import Caller

KEY, OTHER_KEY, MEMBER = Identity.generate(), Identity.generate(), Identity.generate()
OPEN = Membership(KEY, "home", is_open=True)
ADDRESS = f"/ip4/192.168.1.2/tcp/4000/p2p/{MEMBER.peer_id}"
HOME = [ipaddress.ip_network("192.168.1.0/24"), ipaddress.ip_network("127.0.0.0/8")]
NEIGHBOUR = Caller(MEMBER.peer_id, "192.168.1.7", through_relay=False)


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "own_networks", lambda: HOME)


class Line:
    """The other end of a stream: has sent a line, and keeps the answer."""

    def __init__(self, sent: bytes) -> None:
        self.reader, self.answer = asyncio.StreamReader(), b""
        self.reader.feed_data(sent)
        self.reader.feed_eof()

    def write(self, data: bytes) -> None:
        self.answer += data

    async def drain(self) -> None:
        pass


async def asked(swarm: Membership, caller: Caller, sent: bytes) -> dict[str, Any]:
    line = Line(sent)
    await Doorkeeper(swarm).serve(caller, line.reader, cast(asyncio.StreamWriter, line))
    return dict(json.loads(line.answer)) if line.answer else {}


JOIN = json.dumps({"swarm": KEY.peer_id, "name": "b"}).encode() + b"\n"


async def test_a_neighbour_becomes_a_member_of_an_open_swarm() -> None:
    answer = await asked(OPEN, NEIGHBOUR, JOIN)
    assert membership.key_of_hex(answer["member_key"]).peer_id == KEY.peer_id


@pytest.mark.parametrize(
    ("swarm", "caller", "reason"),
    [
        (replace(OPEN, is_open=False), NEIGHBOUR, "private"),
        (OPEN, replace(NEIGHBOUR, through_relay=True), "local network"),
        (OPEN, replace(NEIGHBOUR, host="8.8.8.8"), "local network"),
        (OPEN, replace(NEIGHBOUR, host="10.1.2.3"), "local network"),
        (OPEN, replace(NEIGHBOUR, host="192.168.1.7.evil"), "local network"),
        (OPEN, replace(NEIGHBOUR, host=""), "local network"),
        (Membership(OTHER_KEY, "x", is_open=True), NEIGHBOUR, "another swarm"),
    ],
)
async def test_nobody_else_gets_the_key(swarm: Membership, caller: Caller, reason: str) -> None:
    answer = await asked(swarm, caller, JOIN)
    assert reason in answer["refused"]
    assert "member_key" not in answer


@pytest.mark.parametrize(
    "sent",
    [
        *(b"", b"{}", b"[]\n", b"\xff\n", b"[" * 4000 + b"\n", b"x" * 10000),
        pytest.param(JOIN[:-1], id="half of it"),  # its own id would be another one in each worker
    ],
)
async def test_nonsense_gets_no_answer_and_no_key(sent: bytes) -> None:
    assert "member_key" not in await asked(OPEN, NEIGHBOUR, sent)


def test_addresses_of_the_own_network() -> None:
    assert is_of_own_network("192.168.1.9", HOME)
    assert is_of_own_network("::ffff:192.168.1.9", HOME)
    assert not is_of_own_network("192.168.2.9", HOME)
    assert not is_of_own_network("8.8.8.8", [ipaddress.ip_network("8.8.8.0/24")])  # a public network is nobody's own
    assert membership.own_networks()


class Door:
    """A peer whose `open_protocol` leads to an answer."""

    def __init__(self, answer: bytes) -> None:
        self._answer = answer

    async def open_protocol(self, *_: Any) -> tuple[asyncio.StreamReader, Any]:
        line = Line(self._answer)
        line.transport = type("Transport", (), {"abort": lambda _: None})()  # type: ignore[attr-defined]
        return line.reader, line


async def answered(**fields: str) -> tuple[Identity, str] | None:
    door = Door(json.dumps(fields).encode() + b"\n")
    return await ask_to_join(cast(Peer, door), MEMBER.peer_id, [], KEY.peer_id, "b")


async def test_answers_to_join_are_checked() -> None:
    raw = KEY.key.private_bytes_raw().hex()
    joined = await answered(member_key=raw, name="ho\x1bme")
    assert joined is not None
    assert (joined[0].peer_id, joined[1]) == (KEY.peer_id, "ho?me")
    assert await answered(wait=KEY.peer_id) is None
    with pytest.raises(ConfigurationError, match="not today"):
        await answered(refused="not today")
    with pytest.raises(PeerError, match="no swarm key"):
        await answered(member_key="zz")
    with pytest.raises(PeerError, match="another swarm"):
        await answered(member_key=OTHER_KEY.key.private_bytes_raw().hex())


async def test_of_several_swarms_the_smallest_id_counts_and_liars_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = sorted([KEY, OTHER_KEY], key=lambda key: key.peer_id)
    found = [FoundPeer(MEMBER.peer_id, (ADDRESS,), "machines", key.peer_id, machines=True) for key in (second, first)]

    async def find(*_: Any, **__: Any) -> Sequence[FoundPeer]:
        return found

    asked_for: list[str] = []

    async def ask(peer: Any, member: str, addrs: Any, swarm_id: str, name: str) -> tuple[Identity, str]:
        asked_for.append(swarm_id)
        if len(asked_for) == 1:
            raise PeerError("it lies", member)
        return {one.peer_id: one for one in (first, second)}[swarm_id], "home"

    monkeypatch.setattr(membership, "find_machines", find)
    monkeypatch.setattr(membership, "ask_to_join", ask)

    def peer() -> Any:
        return nullcontext(None)

    joined = await join_open_swarm(peer, "b")
    assert asked_for == [first.peer_id, second.peer_id]
    assert joined is not None
    assert joined.swarm_id == second.peer_id
    assert await join_open_swarm(peer, "b", below=first.peer_id) is None  # this machine's own swarm is the smallest


async def test_a_founder_lets_nobody_in_until_it_has_looked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    doorkeeper = Doorkeeper(OPEN)
    doorkeeper.is_settled = False
    line = Line(JOIN)
    await doorkeeper.serve(NEIGHBOUR, line.reader, cast(asyncio.StreamWriter, line))
    assert json.loads(line.answer) == {"wait": KEY.peer_id}
    member = FoundPeer(MEMBER.peer_id, (ADDRESS,), "machines", KEY.peer_id, machines=True)
    answers = [None, None, (KEY, "home")]

    async def find(*_: Any, **__: Any) -> Sequence[FoundPeer]:
        return [member]

    async def ask(*_: Any) -> tuple[Identity, str] | None:
        return answers.pop(0)

    monkeypatch.setattr(membership, "find_machines", find)
    monkeypatch.setattr(membership, "ask_to_join", ask)
    monkeypatch.setattr(membership, "WAIT_S", 0.0)
    joined = await join_open_swarm(lambda: cast(Any, nullcontext(None)), "b")
    assert joined is not None
    assert (joined.swarm_id, joined.initial_peers, answers) == (KEY.peer_id, (ADDRESS,), [])


def test_an_invite_makes_a_member() -> None:
    invite = read_invite(str(OPEN.invite([ADDRESS])))
    joined = read_membership(invite)
    assert (joined.swarm_id, joined.is_open, joined.initial_peers) == (KEY.peer_id, False, (ADDRESS,))
    assert KEY.key.private_bytes_raw().hex() not in repr(invite)
    with pytest.raises(ConfigurationError, match="makes no machine a member"):
        read_membership(Invite(initial_peers=(ADDRESS,)))
    with pytest.raises(ConfigurationError, match="another swarm"):
        read_membership(replace(invite, swarm_name=OTHER_KEY.peer_id))
    with pytest.raises(ConfigurationError, match="64 hexadecimal digits"):
        read_invite(str(replace(invite, member_key="AB" * 32)))


async def nobody() -> None:
    return None


async def entered(
    state: StateDirectory, *, name: str = "home", private: bool = False, invite: Invite | None = None
) -> Membership:
    found = await find_membership(state, nobody, invite=invite, private=private, name=name)
    note_membership(state, found)
    return found


async def test_a_machine_stays_in_its_swarm(tmp_path: Path) -> None:
    state = StateDirectory(tmp_path / "state")
    founded = await entered(state)
    assert founded.is_open
    assert founded.name == "home"
    state.write("peers.json", [ADDRESS, 3])
    again = await entered(state, name="other")
    assert (again.swarm_id, again.name, again.is_open) == (founded.swarm_id, "home", True)
    assert again.initial_peers == (ADDRESS,)
    assert (state.path / "swarm.key").stat().st_mode & 0o777 == 0o600
    state.note_command(command(1))
    # Another swarm: what was known about the first one is forgotten.
    moved = await entered(state, invite=OPEN.invite([ADDRESS]))
    assert moved.swarm_id == KEY.peer_id
    assert not state.commands()
    assert not (await entered(StateDirectory(tmp_path / "private"), private=True)).is_open


async def test_a_machine_of_a_swarm_of_others_founds_no_private_one(tmp_path: Path) -> None:
    state = StateDirectory(tmp_path)

    open_swarm = await entered(state)
    with pytest.raises(ConfigurationError, match=f"in the swarm home already.*{state.swarm_key_path}"):
        await entered(state, private=True)
    assert (await entered(state)).is_open
    # A guest doesn't know if others may join.
    await entered(state, invite=OPEN.invite([ADDRESS]))
    with pytest.raises(ConfigurationError, match=f"in the swarm {KEY.peer_id[-8:]} already"):
        await entered(state, private=True)
    state.note_command(command(1))
    state.swarm_key_path.unlink()  # as the message says
    founded = await entered(state, private=True)
    assert founded.swarm_id not in (open_swarm.swarm_id, KEY.peer_id)
    assert not founded.is_open
    assert not state.commands()
    assert (
        await entered(state, private=True)
    ).swarm_id == founded.swarm_id  # its founder starts it again in the same way


def command(number: int) -> Command:
    given = Command(number=number, given_at=0.0, given_by=MEMBER.peer_id, wanted=(Wanted(name="m", manifest="0" * 64),))
    return sign_command(given, KEY, MEMBER)


def test_commands_survive_and_damaged_files_count_as_missing(tmp_path: Path) -> None:
    state = StateDirectory(tmp_path)
    for number in range(1, NUM_KEPT_COMMANDS + 3):
        state.note_command(command(number))
    kept = state.commands()
    assert len(kept) == NUM_KEPT_COMMANDS
    assert kept[-1].is_valid(KEY.peer_id)
    for text in ("", "[", "{}", '[{"number": 1}]', "null", "[" * 5000):
        (tmp_path / "command.json").write_text(text)
        assert state.commands() == []
    state.write("page.json", {"key": "secret"}, secret=True)
    assert (tmp_path / "page.json").stat().st_mode & 0o777 == 0o600


def test_a_place_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="SWARMLLM_STATE_DIR"):
        StateDirectory(tmp_path / "file" / "state")
