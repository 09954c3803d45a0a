from hypothesis import given
from hypothesis import strategies as st

from swarmllm.data_structures import Span
from swarmllm.swarm.stacks import command_to_serve, describe_blocks, describe_span, how_to_serve, stack_spans


def test_blocks_of_one_stack_have_no_name() -> None:
    assert describe_span(4, 8) == "4:8"
    assert describe_blocks([3, 4, 5, 9]) == "blocks 3:6, 9:10"
    assert stack_spans(8, 0) == [("", Span(0, 8))]


def test_each_stack_counts_from_0() -> None:
    assert describe_span(0, 6, 6) == "encoder 0:6"
    assert describe_span(6, 18, 6) == "decoder 0:12"
    assert describe_span(4, 8, 6) == "encoder 4:6, decoder 0:2"
    assert describe_blocks([5], 6) == "blocks 5:6 (encoder 5:6)"
    assert describe_blocks([5, 6, 9], 6) == "blocks 5:7, 9:10 (encoder 5:6, decoder 0:1, decoder 3:4)"


@given(st.integers(1, 30), st.integers(0, 40), st.data())
def test_every_block_is_named_once(num_blocks: int, encoder_blocks: int, data: st.DataObject) -> None:
    stacks = stack_spans(num_blocks, encoder_blocks)
    assert [block for _, span in stacks for block in span] == list(range(num_blocks))
    if len(stacks) == 1:
        return
    start = data.draw(st.integers(0, num_blocks - 1))
    end = data.draw(st.integers(start + 1, num_blocks))
    first = {name: span.start for name, span in stacks}
    named = []
    for part in describe_span(start, end, encoder_blocks).split(", "):
        name, blocks = part.split(" ")
        named += [first[name] + block for block in range(*map(int, blocks.split(":")))]
    assert named == list(range(start, end))


def test_the_command_that_serves_missing_blocks() -> None:
    """A directory's own name says not where it is; an address alone leads a server out of a private swarm."""
    peers = ["/ip4/1.2.3.4/tcp/5/p2p/12D3"]
    command = command_to_serve([4, 5, 9], "org/model", peers)
    assert command == f"swarmllm server --model org/model --block_indices 4:6 --initial_peers {peers[0]}"
    assert command_to_serve([9], "embedded") == "swarmllm server --model /path/to/embedded --block_indices 9:10"
    assert command_to_serve([9], "org/model", peers, is_private=True).endswith("--initial_peers INVITE")


def test_missing_blocks_of_machines_are_no_matter_of_servers() -> None:
    machines = "12D3KooW".ljust(52, "x")
    assert how_to_serve([9], "org/model", (), machines).endswith("`swarmllm up` adds a machine")
    for name in (None, "home", machines[:-1]):
        assert "start a server of them, swarmllm server --model org/model" in how_to_serve([9], "org/model", (), name)
