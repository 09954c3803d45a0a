from typing import Any

import pytest

from swarmllm.client.view.servers import (
    check_abilities,
    check_claims,
    lacking_abilities,
    trusted_traits,
    with_abilities_of,
)
from swarmllm.data_structures import BlockTraits, ServedBlocks, Span, StackTraits
from swarmllm.errors import RemoteProtocolError

ENCODER = BlockTraits(encoder=StackTraits())
DECODER = BlockTraits(takes_source=True)
BOTH = BlockTraits(encoder=StackTraits(), takes_source=True)


def served(start: int = 0, end: int = 4, **traits: Any) -> ServedBlocks:
    return ServedBlocks(start=start, end=end, traits=BlockTraits(**traits))


LIES: list[tuple[dict[str, Any], str]] = [
    ({"extra_inputs": ("input_ids",)}, "its blocks need input_ids"),
    ({"extra_inputs": ("input_ids", "inputs_embeds")}, "its blocks need input_ids and inputs_embeds"),
    ({"batch_axis": 1}, "the batch_axis of its blocks is 1"),
    ({"block_output": 3}, "the block_output of its blocks is 3"),
    ({"takes_source": True}, "takes_source of its blocks is True"),
]


@pytest.mark.parametrize(("lie", "said"), LIES)
def test_a_claim_that_is_not_so(lie: dict[str, Any], said: str) -> None:
    with pytest.raises(RemoteProtocolError, match=f"peer says that {said}, which is not so"):
        check_claims("peer", served(**lie), BlockTraits(), None)


def test_claims_in_which_servers_may_differ() -> None:
    """They have some of the blocks only, or other code; a cut that they don't have costs only themselves something."""
    own = BlockTraits(extra_inputs=("input_ids", "inputs_embeds"), skips_padding=("left",), takes_source=None)
    check_claims("peer", served(extra_inputs=("inputs_embeds",)), own, None)
    check_claims("peer", served(forbidden_cuts=(1, 2), skips_padding=("left", "right"), takes_source=False), own, None)
    check_claims("peer", served(chunked_prefill=False, rollback=False), BlockTraits(), None)
    check_claims("peer", ServedBlocks(start=0, end=4), own, None)  # it is still loading


def test_what_the_blocks_can_do() -> None:
    weak, usual = served(rollback=False), served()
    assert lacking_abilities(weak, BlockTraits(), None) == ("rollback",)
    assert lacking_abilities(usual, BlockTraits(rollback=False), None) == ()
    assert with_abilities_of(BlockTraits(), [usual, weak], None) == BlockTraits(rollback=False)
    check_abilities("peer", weak, BlockTraits(rollback=False), None)
    with pytest.raises(RemoteProtocolError, match="its blocks lack rollback"):
        check_abilities("peer", weak, BlockTraits(), None)


def test_the_two_stacks_are_compared_apart() -> None:
    """Traits of an encoder of 4 blocks and a decoder of 3."""
    own, encoder = BlockTraits(encoder=StackTraits(block_output=1), takes_source=True), Span(0, 4)
    check_claims("peer", served(0, 4, encoder=StackTraits(block_output=1)), own, encoder)
    check_claims("peer", served(4, 7, takes_source=True), own, encoder)
    for lie in (
        served(0, 4, encoder=StackTraits()),
        served(0, 4, encoder=StackTraits(block_output=1, extra_inputs=("input_ids",))),
        served(4, 7, takes_source=True, block_output=1),
        served(2, 6, takes_source=True, encoder=StackTraits(block_output=1), extra_inputs=("inputs_embeds",)),
    ):
        with pytest.raises(RemoteProtocolError, match="which is not so"):
            check_claims("peer", lie, own, encoder)


def test_servers_that_the_user_trusts_are_believed_together() -> None:
    one = served(0, 2, extra_inputs=("input_ids",), forbidden_cuts=(1,), skips_padding=("left", "right"))
    two = served(2, 4, extra_inputs=("inputs_embeds",), skips_padding=("right",), rollback=False)
    assert trusted_traits([one, two], None) == BlockTraits(
        extra_inputs=("input_ids", "inputs_embeds"), forbidden_cuts=(1,), skips_padding=("right",), rollback=False
    )
    parts = [served(0, 4, encoder=StackTraits(block_output=1)), served(4, 7, takes_source=True)]
    assert trusted_traits(parts, Span(0, 4)) == BlockTraits(takes_source=True, encoder=StackTraits(block_output=1))


@pytest.mark.parametrize(("start", "end", "traits"), [(0, 4, ENCODER), (2, 5, BOTH), (4, 7, DECODER)])
def test_a_server_of_a_version_without_encoders_is_refused(start: int, end: int, traits: BlockTraits) -> None:
    """Claims about an encoder of 4 blocks and a decoder of 3; an older server says nothing of either."""
    encoder = Span(0, 4)
    check_claims("peer", ServedBlocks(start=start, end=end, traits=traits), BOTH, encoder)
    check_claims("peer", ServedBlocks(start=start, end=end), BOTH, encoder)  # it is still loading
    old = ServedBlocks(start=start, end=end, traits=BlockTraits())
    check_claims("peer", old, BlockTraits(), None)
    with pytest.raises(RemoteProtocolError, match="serves no models with an encoder and a decoder: update swarmllm"):
        check_claims("peer", old, BOTH, encoder)


@pytest.mark.parametrize("traits", [ENCODER, DECODER])
def test_it_has_to_know_of_both_stacks_that_it_has_blocks_of(traits: BlockTraits) -> None:
    with pytest.raises(RemoteProtocolError, match="offers encoder 2:4, decoder 0:1, but"):
        check_claims("peer", ServedBlocks(start=2, end=5, traits=traits), BOTH, Span(0, 4))
