"""Records of machines: who is believed, and which command all machines follow."""

import itertools

import pytest
from pydantic import ValidationError

from swarmllm.machines.records import LAST_NUMBER, Command, MachineRecord, Wanted, membership, newest, sign_command
from swarmllm.network.p2p.identity import Identity

NOW = 1e9
SWARM, MEMBER, STRANGER = Identity.generate(), Identity.generate(), Identity.generate()


def command(number: int, *names: str, swarm: Identity = SWARM, own: Identity = MEMBER) -> Command:
    wanted = tuple(Wanted(name=name, manifest="0" * 64) for name in names)
    given = Command(number=number, given_at=1.0, given_by=MEMBER.peer_id, wanted=wanted)
    return sign_command(given, swarm, own)


def test_only_a_members_own_commands_count() -> None:
    assert command(1, "a").is_valid(SWARM.peer_id)
    for swarm, own in ((STRANGER, MEMBER), (SWARM, STRANGER), (STRANGER, STRANGER)):
        assert not command(1, "a", swarm=swarm, own=own).is_valid(SWARM.peer_id)
    changed = command(1, "a").model_copy(update={"number": 9})
    assert not changed.is_valid(SWARM.peer_id)
    assert newest([changed, None, command(2, "b", swarm=STRANGER)], SWARM.peer_id, NOW) is None


def test_all_orders_and_repetitions_lead_to_the_same_command() -> None:
    given = [command(1, "a"), command(2, "b"), command(2, "c"), command(2)]
    ends = {newest(order, SWARM.peer_id, NOW) for order in itertools.permutations([*given, given[0]])}
    assert len(ends) == 1
    assert ends.pop() in given[1:]


def test_no_command_stops_all_later_ones() -> None:
    """A member may give the last number, or a time in the future."""
    fields = dict(command(1, "a")) | {"number": LAST_NUMBER, "given_at": NOW + 1}
    last = sign_command(Command(**fields), SWARM, MEMBER)
    later = sign_command(Command(**(fields | {"number": 2, "given_at": NOW + 2})), SWARM, MEMBER)
    future = sign_command(Command(**(fields | {"given_at": 1e11})), SWARM, MEMBER)
    assert newest([future, later, last], SWARM.peer_id, NOW) == later


def test_records_go_through_json_unchanged() -> None:
    record = MachineRecord(
        peer_id=MEMBER.peer_id, member=membership(MEMBER.peer_id, SWARM), command=command(3, "ü"), name="a\x1bb"
    )
    again = MachineRecord.model_validate_json(record.model_dump_json(exclude_defaults=True))
    assert again == record
    assert again.name == "a?b"
    assert again.command is not None
    assert again.command.is_valid(SWARM.peer_id)
    assert again.is_member(SWARM.peer_id)
    assert not again.is_member(STRANGER.peer_id)
    with pytest.raises(ValidationError):
        MachineRecord.model_validate_json(record.model_dump_json().replace(record.member, "x" * 128))
