"""Which servers hold the same weights."""

from typing import Any

import pytest
from pydantic import ValidationError

from swarmllm.data_structures import DIGEST_CHARS, MAX_BLOCKS, MAX_DIGESTS, ServerInfo, SwarmSnapshot
from swarmllm.swarm.block_map import describe_different_weights
from swarmllm.swarm.claims import agreed_digests, contradicts


def server(name: str, start: int, weights: str | None, end: int | None = None) -> ServerInfo:
    """`weights`: a letter per block."""
    text = "".join(letter * DIGEST_CHARS for letter in weights or "")
    return ServerInfo(peer_id=name * 44, start=start, end=end or start + len(weights or ""), weights=text)


def left_out(*servers: ServerInfo, kept: str = "") -> str:
    chosen = agreed_digests(servers, {block: letter * DIGEST_CHARS for block, letter in enumerate(kept)})
    return "".join(server.peer_id[0] for server in servers if contradicts(server.digests(), chosen))


def test_nobody_differs() -> None:
    assert left_out(server("a", 0, "xxxx"), server("b", 2, "xxyy"), server("c", 0, None, end=8)) == ""


def test_most_servers_count_not_most_blocks() -> None:
    assert left_out(server("a", 0, "xx"), server("b", 1, "xx"), server("c", 0, "yyyy")) == "c"


def test_one_model_is_not_made_of_two() -> None:
    """Block by block, y had the majority in the first half and x in the second."""
    x, y = server("a", 0, "xxxxxxxx"), [server(name, 0, "yyyy") for name in "bc"]
    assert left_out(x, *y) == "a"
    assert left_out(x, server("d", 4, "xxxx"), server("e", 2, "xxxxxx"), *y) == "bc"


def test_the_longest_span_decides_between_two() -> None:
    assert left_out(server("a", 0, "yyyy"), server("b", 0, "xxxxxx")) == "a"


def test_what_is_in_use_stays() -> None:
    servers = server("a", 0, "xxxx"), server("b", 0, "xxxx"), server("c", 0, "yyyy")
    assert left_out(*servers) == "c"
    assert left_out(*servers, kept="yy") == "ab"


def test_a_part_may_differ() -> None:
    """A damaged file: all but one block are the same."""
    assert left_out(server("a", 0, "xxxx"), server("b", 0, "xxyx"), server("c", 2, "xx")) == "b"


def test_a_server_that_differs_is_told() -> None:
    snapshot = SwarmSnapshot(4, (server("a", 0, "xxxx"), server("b", 0, "xyyx"), server("c", 1, "xx")))
    (line,) = describe_different_weights(snapshot)
    assert line.startswith("weights differ: …bbbbbb made blocks 1:3 of other files")
    assert describe_different_weights(SwarmSnapshot(4, snapshot.servers[::2])) == []


@pytest.mark.parametrize("weights", ["", "xxxx", "x" * 17, "x" * 4 * MAX_DIGESTS])
def test_texts_of_another_length_say_nothing(weights: str) -> None:
    assert ServerInfo(peer_id="a" * 44, start=0, end=4, weights=weights).digests() == {}
    assert ServerInfo(peer_id="a" * 44, start=0, end=MAX_BLOCKS, weights=weights).digests() == {}


@pytest.mark.parametrize("weights", ["x" * (4 * MAX_DIGESTS + 4), "\x1b[2J", "ab\ncd", 7, None])
def test_other_texts_are_refused(weights: Any) -> None:
    with pytest.raises(ValidationError):
        ServerInfo(peer_id="a" * 44, start=0, end=4, weights=weights)
