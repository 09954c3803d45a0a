import pytest

from swarmllm.client.view.agreed_traits import agreed_traits, check_stacks
from swarmllm.data_structures import BlockTraits, ServedBlocks, Span, StackTraits
from swarmllm.errors import RemoteProtocolError


def test_padding_is_left_out_only_where_all_servers_say_so() -> None:
    said = [("a", BlockTraits(skips_padding=("left", "right"))), ("b", BlockTraits(skips_padding=("right",)))]
    assert agreed_traits(said).skips_padding == ("right",)
    assert agreed_traits(said[:1]).skips_padding == ("left", "right")
    assert agreed_traits([*said, ("old", BlockTraits())]).skips_padding == ()


ENCODER = BlockTraits(encoder=StackTraits())
DECODER = BlockTraits(takes_source=True)
BOTH = BlockTraits(encoder=StackTraits(), takes_source=True)


@pytest.mark.parametrize(("start", "end", "traits"), [(0, 4, ENCODER), (2, 5, BOTH), (4, 7, DECODER)])
def test_a_server_of_a_version_without_encoders_is_refused(start: int, end: int, traits: BlockTraits) -> None:
    """Of an encoder of 4 blocks and a decoder of 3; an older server says nothing of either."""
    encoder = Span(0, 4)
    check_stacks("peer", ServedBlocks(start=start, end=end, traits=traits), encoder)
    check_stacks("peer", ServedBlocks(start=start, end=end), encoder)  # it is still loading
    old = ServedBlocks(start=start, end=end, traits=BlockTraits())
    check_stacks("peer", old, None)
    with pytest.raises(RemoteProtocolError, match="serves no models with an encoder and a decoder: update swarmllm"):
        check_stacks("peer", old, encoder)


@pytest.mark.parametrize("traits", [ENCODER, DECODER])
def test_it_has_to_know_of_both_stacks_that_it_has_blocks_of(traits: BlockTraits) -> None:
    with pytest.raises(RemoteProtocolError, match="offers encoder 2:4, decoder 0:1, but"):
        check_stacks("peer", ServedBlocks(start=2, end=5, traits=traits), Span(0, 4))
