"""Which version of an adapter a client takes, and whom it leaves out."""

from swarmllm.client.view.servers import ActiveAdapter
from swarmllm.data_structures import ServerInfo, SwarmSnapshot


def server(name: str, start: int, end: int, *adapters: str) -> ServerInfo:
    return ServerInfo(peer_id=name * 44, start=start, end=end, adapters=adapters)


A, B = server("a", 0, 8, "poet@1"), server("b", 0, 3, "poet@2", "clerk@1")
C, D = server("c", 3, 8), server("d", 3, 8, "poet@2")


def lacking(wanted: str | None, *servers: ServerInfo) -> str:
    return "".join(sorted(peer[0] for peer in ActiveAdapter(wanted).lacked_by(SwarmSnapshot(8, servers))))


def test_without_an_adapter_nobody_is_left_out() -> None:
    assert lacking(None, A, B, C) == ""


def test_the_version_of_most_blocks_is_taken() -> None:
    assert lacking("poet", A, B, C) == "bc"
    assert lacking("poet", B, C, D) == "c"
    assert lacking("poet@2", A, B, C, D) == "ac"
    assert lacking("clerk", A, B) == "a"
    assert lacking("nobody's", A, B, C, D) == "abcd"
    for too_long in ("a" * 300, "a" * 100_000):
        assert lacking(too_long, A, B) == "ab"


def test_a_version_once_used_is_kept() -> None:
    adapter = ActiveAdapter("poet")
    adapter.keep(SwarmSnapshot(8, (B, D)))
    assert adapter.version == "poet@2"
    assert len(adapter.lacked_by(SwarmSnapshot(8, (A, B)))) == 1
    assert adapter.choose(SwarmSnapshot(8, (A,))) == "poet@2"
