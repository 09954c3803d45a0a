"""Commands to a swarm of machines: one that was followed never comes back, however little a machine remembers."""

from hypothesis import given
from hypothesis import strategies as st

from swarmllm.machines.records import Command, newest, sign_command
from swarmllm.network.p2p.identity import Identity

SWARM, OWN = Identity.generate(), Identity.generate()
COMMANDS = [
    sign_command(Command(number=number // 2, given_at=number // 4, given_by=OWN.peer_id, wanted=()), SWARM, OWN)
    for number in range(2, 10)
]
"""Two of each number."""


@given(st.lists(st.sampled_from(COMMANDS), min_size=1, max_size=20))
def test_the_newest_command_wins_in_any_order(seen: list[Command]) -> None:
    """Each machine keeps only the command that it follows; the others are replayed at will."""
    followed: Command | None = None
    for command in seen:
        before, followed = followed, newest((followed, command), SWARM.peer_id, 100.0)
        assert followed is not None
        assert before is None or followed.rank() >= before.rank()
    assert followed == max(seen, key=Command.rank)
