"""The agent without a network: whose records count, which command it follows, what survives a restart."""

import asyncio
import itertools
from pathlib import Path
from typing import Any, cast

import pytest

from swarmllm.errors import ConfigurationError
from swarmllm.machines import agent as agent_module
from swarmllm.machines.agent import Agent, Offer
from swarmllm.machines.membership import Membership, find_membership, key_of_hex
from swarmllm.machines.records import (
    MAX_WANTED,
    Command,
    Hosted,
    MachineRecord,
    Wanted,
    membership,
    sign_command,
)
from swarmllm.machines.settings import MachineConfig
from swarmllm.machines.state import StateDirectory
from swarmllm.network.p2p.identity import Identity
from swarmllm.network.p2p.peer import Peer
from swarmllm.swarm.planning import PlannedModel

SWARM, OWN, MEMBER, STRANGER = (Identity.generate() for _ in range(4))


class FakePeer:
    peer_id = OWN.peer_id
    addrs = ("/ip4/127.0.0.1/tcp/4000",)
    join_maddrs = (f"/ip4/127.0.0.1/tcp/4000/p2p/{OWN.peer_id}",)


class FakeRegister:
    """The DHT: what others say, and what this machine has said."""

    def __init__(self) -> None:
        self.others: dict[str, MachineRecord] = {}
        self.own: list[MachineRecord | None] = []

    async def read(self) -> dict[str, MachineRecord]:
        return dict(self.others)

    async def publish(self, record: MachineRecord | None, ttl_s: float) -> bool:
        if record is not None and len(record.model_dump_json(exclude_defaults=True).encode()) > 7936:
            raise ConfigurationError("the record is too long for the DHT")
        self.own.append(record)
        return True


@pytest.fixture
def register() -> FakeRegister:
    return FakeRegister()


@pytest.fixture
def agent(tmp_path: Path, register: FakeRegister) -> Agent:
    return made(tmp_path, register)


def made(directory: Path, register: FakeRegister) -> Agent:
    swarm = Membership(SWARM, "home", is_open=True)
    config = MachineConfig(public_name="own", lan_discovery=False)
    found = Agent(config, StateDirectory(directory), swarm, cast(Peer, FakePeer()), OWN)
    found._register = register  # type: ignore[assignment]
    found.offer = Offer(100, 1e9, 0.1, ())
    return found


def wanted(*names: str) -> tuple[Wanted, ...]:
    return tuple(Wanted(name=name, manifest=name.encode().hex().ljust(64, "0")) for name in names)


def command(
    number: int, *names: str, swarm: Identity = SWARM, own: Identity = MEMBER, by: Identity = MEMBER
) -> Command:
    given = Command(number=number, given_at=0.0, given_by=by.peer_id, wanted=wanted(*names), what=f"use {names}")
    return sign_command(given, swarm, own)


def record(of: Identity = MEMBER, swarm: Identity = SWARM, **changes: Any) -> MachineRecord:
    return MachineRecord(peer_id=of.peer_id, member=membership(of.peer_id, swarm), name="other", **changes)


async def looked(agent: Agent, now: float = 0.0) -> tuple[str, ...]:
    await agent._look_once(now)
    names = tuple(one.name for one in agent.wanted)
    for model in agent._models:
        assert model.learning is not None
        model.learning.cancel()
    await asyncio.sleep(0)
    return names


async def test_a_machine_that_cannot_start_stays_in_its_swarm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def no_peer(*_: Any) -> Peer:
        raise ConfigurationError("no such port")

    monkeypatch.setattr(agent_module, "_member_peer", no_peer)
    state = StateDirectory(tmp_path)
    state.enter_swarm(SWARM, name="home", is_open=True)
    invite = Membership(STRANGER, "", is_open=False).invite(FakePeer.join_maddrs)
    with pytest.raises(ConfigurationError, match="no such port"):
        await Agent.start(MachineConfig(), state, invite=invite)
    kept = state.swarm_key()
    assert kept is not None
    assert kept.peer_id == SWARM.peer_id


def test_a_full_disk_costs_no_swarm_its_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    state = StateDirectory(tmp_path)
    state.enter_swarm(SWARM, name="home", is_open=True)
    state.write("command.json", ["a command"])
    with monkeypatch.context() as patched:
        patched.setattr("os.fsync", full)
        with pytest.raises(ConfigurationError, match="No space left"):
            state.enter_swarm(STRANGER, name="other", is_open=True)
    for key in (SWARM, STRANGER):
        kept = state.swarm_key()
        assert kept is not None
        assert (kept.peer_id, state.read("command.json", [])) == (key.peer_id, ["a command"] if key is SWARM else [])
        state.enter_swarm(STRANGER, name="other", is_open=True)
    assert state.swarm_key_path.stat().st_mode & 0o777 == 0o600
    assert not [*tmp_path.glob("*.new")]
    state.swarm_key_path.unlink()
    state.swarm_key_path.symlink_to(tmp_path / "a disk that is not there")
    with pytest.raises(ConfigurationError, match="which does not exist: mend the link"):
        state.swarm_key()  # rather than another swarm


async def test_a_full_disk_keeps_no_machine_from_its_swarm(
    agent: Agent, register: FakeRegister, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its record would expire, and the others would load its blocks."""

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("os.fsync", full)
        for number in (1, 2):
            given = command(number, f"model {number}")
            addrs = (f"/ip4/1.2.3.{number}/tcp/4",)
            register.others = {MEMBER.peer_id: record(command=given, addrs=addrs)}
            assert await looked(agent, 100.0 * number) == (f"model {number}",)
            said = register.own[-1]
            assert said is not None
            assert said.command == given
    told = [one.getMessage() for one in caplog.records if "No space left" in one.getMessage()]
    assert len(told) == 3  # once for each file: of commands, addresses, and programs here
    assert agent._state.commands() == []
    register.others = {MEMBER.peer_id: record(command=command(3, "model 3"))}
    assert await looked(agent, 300.0) == ("model 3",)
    assert [one.number for one in agent._state.commands()] == [3]


async def test_only_members_count(agent: Agent, register: FakeRegister) -> None:
    register.others = {
        MEMBER.peer_id: record(),
        STRANGER.peer_id: record(STRANGER, STRANGER, command=command(9, "evil")),  # no member
        "somebody": record(),  # another one's record
    }
    assert await looked(agent) == ()
    assert agent.records.keys() == {MEMBER.peer_id}
    register.others = {MEMBER.peer_id: record().model_copy(update={"member": "0" * 128})}
    await looked(agent, 100.0)
    assert agent.records == {}


async def test_a_clock_that_was_set_back_leaves_no_command_of_the_future(
    tmp_path: Path, register: FakeRegister, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody else would follow it, and this machine would follow nobody else, until that time has come."""
    now = 7200.0
    monkeypatch.setattr(agent_module.time, "time", lambda: now)
    agent = made(tmp_path, register)
    await agent._give(wanted("a"), "use a")
    for restarted in (False, True):
        now = 3600.0 if not restarted else 0.0
        agent = made(tmp_path, register) if restarted else agent
        register.own.clear()
        assert await looked(agent) == ("a",)
        said = register.own[-1]
        assert said is not None
        assert said.command is not None
        assert (said.command.given_at, said.command.what) == (now, "use a")
        assert said.command.is_valid(SWARM.peer_id)
    register.others = {MEMBER.peer_id: record(command=command(1, "b"))}
    now = 10.0
    await agent._give(wanted("c"), "use c")
    assert await looked(agent) == ("c",)


async def test_commands_of_strangers_and_changed_ones_are_ignored(agent: Agent, register: FakeRegister) -> None:
    changed = command(5, "a").model_copy(update={"wanted": wanted("evil")})
    for bad in (
        command(5, "evil", swarm=STRANGER),
        command(5, "evil", own=STRANGER),
        command(5, "evil", by=STRANGER),
        changed,
    ):
        register.others = {MEMBER.peer_id: record(command=bad)}
        assert await looked(agent) == ()
    assert agent.picture()["commands"] == []


async def test_replayed_and_reordered_commands_change_nothing(agent: Agent, register: FakeRegister) -> None:
    for number, name in ((1, "a"), (3, "c"), (2, "b"), (1, "a"), (3, "c")):
        register.others = {MEMBER.peer_id: record(command=command(number, name))}
        await looked(agent)
    assert [one.name for one in agent.wanted] == ["c"]
    assert [one["number"] for one in agent.picture()["commands"]] == [1, 3]
    await agent._publish(0.0)
    assert register.own[-1] is not None
    assert register.own[-1].command == command(3, "c")  # so that others hear it, too


async def test_few_commands_are_kept_and_old_ones_stay_old(
    agent: Agent, register: FakeRegister, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_module, "NUM_KEPT_COMMANDS", 2)
    for number in (1, 2, 3, 4, 1, 2, 4, 3):
        register.others = {MEMBER.peer_id: record(command=command(number, f"m{number}"))}
        await looked(agent)
    assert [one.number for one in agent._commands] == [3, 4]
    assert [one.name for one in agent.wanted] == ["m4"]


async def test_a_machine_that_cannot_have_a_model_says_so(agent: Agent, register: FakeRegister) -> None:
    register.others = {MEMBER.peer_id: record(command=command(1, "a"))}
    await looked(agent)
    (model,) = agent._models.wanted.values()
    model.problem, model.is_failure = "the disk is full", True
    (hosted,) = agent.record().hosted
    assert (hosted.manifest, hosted.state, hosted.problem) == (model.wanted.manifest, "failed", "the disk is full")
    assert agent.picture()["models"][0]["problem"] == "the disk is full"


async def test_of_two_commands_at_once_all_choose_the_same(tmp_path: Path) -> None:
    both = command(1, "a"), command(1, "b", by=STRANGER, own=STRANGER)
    ends = set()
    for number, order in enumerate(itertools.permutations(both)):
        register = FakeRegister()
        one = made(tmp_path / str(number), register)
        for given in order:
            register.others = {MEMBER.peer_id: record(command=given)}
            await looked(one)
        ends.add(one.wanted)
    assert len(ends) == 1


async def test_a_restart_goes_on_with_the_command_and_the_blocks(tmp_path: Path, register: FakeRegister) -> None:
    first = made(tmp_path, register)
    register.others = {MEMBER.peer_id: record(command=command(4, "a"))}
    await looked(first)
    manifest = first.wanted[0].manifest
    noted = {"manifest": manifest, "start": 2, "end": 5, "quant_type": "int8"}
    first._state.write("hosted.json", [noted, {**noted, "manifest": "f" * 64}, {"start": "x"}, 7])
    register.others = {}
    again = made(tmp_path, register)
    assert [one.name for one in again.wanted] == ["a"]
    (hosted,) = again.record().hosted
    assert (hosted.manifest, hosted.start, hosted.end, hosted.state) == (manifest, 2, 5, "waiting")


async def test_programs_on_this_machine_are_told_how_to_reach_the_swarm(agent: Agent, register: FakeRegister) -> None:
    register.others = {MEMBER.peer_id: record(command=command(1, "a", "b"))}
    await looked(agent)
    agent._models.wanted[wanted("a")[0].manifest].fingerprint = "f" * 64
    agent._tell_programs_here()
    told = agent._state.read("here.json", {})
    assert told == {
        "name": "home", "swarm_name": SWARM.peer_id, "initial_peers": list(FakePeer.join_maddrs),
        "models": {"f" * 64: "a"}, "places": ["", ""],
    }  # fmt: skip
    agent._models.wanted[wanted("b")[0].manifest].place = Path("/models/b")
    agent._tell_programs_here()
    assert agent._state.read("here.json", {})["places"] == ["", "/models/b"]


async def test_addresses_that_a_member_claims_are_checked_before_they_are_kept(
    agent: Agent, register: FakeRegister
) -> None:
    """A hidden machine's addresses lead through a relay, by which nobody can join."""
    circuit, direct = f"/ip4/45.1.1.1/tcp/1/p2p/{OWN.peer_id}/p2p-circuit", "/ip4/45.1.1.1/tcp/2"
    register.others = {MEMBER.peer_id: record(addrs=(circuit, "nonsense", "/ip4/1.1.1.1/tcp/x", direct))}
    await looked(agent)
    assert agent._state.read("peers.json", []) == [f"{direct}/p2p/{MEMBER.peer_id}"]
    assert agent.invite()
    register.others, before = {}, agent.records
    agent._reunion.note(before, {}, 0.0)
    assert [addresses for addresses, _ in agent._reunion.lost.values()] == [[f"{direct}/p2p/{MEMBER.peer_id}"]]
    agent._state.enter_swarm(SWARM, name="home", is_open=True)
    agent._state.write("peers.json", [f"{circuit}/p2p/{MEMBER.peer_id}", 3, f"{direct}/p2p/{MEMBER.peer_id}"])

    async def join() -> None:
        raise AssertionError("it is in a swarm already")

    swarm = await find_membership(agent._state, join, invite=None, private=False, name="own")
    assert swarm.initial_peers == (f"{direct}/p2p/{MEMBER.peer_id}",)


async def test_a_record_that_a_look_misses_counts_for_a_while(agent: Agent, register: FakeRegister) -> None:
    register.others = {MEMBER.peer_id: record()}
    await looked(agent, 0.0)
    register.others = {}
    await looked(agent, agent_module.FORGET_S - 0.1)
    assert agent.records.keys() == {MEMBER.peer_id}
    await looked(agent, agent_module.FORGET_S + 0.1)
    assert agent.records == {}


async def test_a_machine_that_does_not_know_its_memory_says_nothing(agent: Agent, register: FakeRegister) -> None:
    """Else the others would take its blocks."""
    agent.offer = None
    await agent._publish(0.0)
    assert register.own == []


async def test_a_long_record_loses_round_trips_first(agent: Agent, register: FakeRegister) -> None:
    long = tuple(Wanted(name="n" * 200, manifest=f"{number:064}") for number in range(MAX_WANTED))
    agent._command = sign_command(command(1).model_copy(update={"wanted": long, "what": "w" * 200}), SWARM, MEMBER)
    agent._round_trips = {Identity.generate().peer_id: 1.0 for _ in range(16)}
    hosted = Hosted(manifest="a" * 64, start=0, end=1, problem="\N{GRINNING FACE}" * 200)
    agent._hostings.hosted = lambda now: (hosted,) * 8  # type: ignore[method-assign]
    await agent._publish(0.0)
    assert register.own[-1] is not None
    assert register.own[-1].round_trips == ()
    assert [len(one.problem) for one in register.own[-1].hosted] == [40] * 8


async def test_the_memory_that_others_use_is_counted_from_their_records(agent: Agent, register: FakeRegister) -> None:
    (a,) = wanted("a")
    lies = (
        Hosted(manifest=a.manifest, start=0, end=2, quant_type="int8", state="online"),
        Hosted(manifest=a.manifest, start=0, end=99, quant_type="int8", state="online"),
        Hosted(manifest=a.manifest, start=3, end=3, quant_type="int8", state="online"),
        Hosted(manifest=a.manifest, start=0, end=2, quant_type="none", state="online"),
    )
    register.others = {MEMBER.peer_id: record(command=command(1, "a"), hosted=lies)}
    await looked(agent)
    sizes = PlannedModel(block_bytes={"int8": [10] * 4})
    agent._models.wanted[a.manifest].entry = agent_module.Entry("a", True, sizes)
    (other,) = [one for one in agent.picture()["machines"] if not one["is_here"]]
    assert other["used_bytes"] == 20


async def test_the_invite_holds_the_key_and_addresses(agent: Agent, register: FakeRegister) -> None:
    from swarmllm.invite import read_invite

    register.others = {MEMBER.peer_id: record(addrs=("/ip4/192.168.1.3/tcp/5000",))}
    await looked(agent)
    invite = read_invite(agent.invite())
    assert invite.member_key is not None
    assert key_of_hex(invite.member_key).peer_id == SWARM.peer_id
    # Without this machine's own 127.0.0.1, where other machines would call themselves.
    assert invite.initial_peers == (f"/ip4/192.168.1.3/tcp/5000/p2p/{MEMBER.peer_id}",)


async def test_dropping_what_is_not_served_is_refused(agent: Agent) -> None:
    with pytest.raises(ConfigurationError, match="doesn't serve 'x'; it serves nothing"):
        await agent.drop("x")
