"""Which weights a client uses where servers hold different ones, and who has a say."""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from swarmllm.client.view.servers import AgreedWeights
from swarmllm.data_structures import DIGEST_CHARS, RouteHop, ServerInfo, SwarmSnapshot


def server(name: str, start: int, weights: str) -> ServerInfo:
    text = "".join(letter * DIGEST_CHARS for letter in weights)
    return ServerInfo(peer_id=name * 44, start=start, end=start + len(weights), weights=text)


class Client:
    def __init__(self, met: str) -> None:
        self.met = met

        def confirmed(servers: Iterable[ServerInfo]) -> tuple[ServerInfo, ...]:
            return tuple(server for server in servers if server.peer_id[0] in self.met)

        verified: Any = SimpleNamespace(confirmed=confirmed)
        self.weights = AgreedWeights(verified)

    def left_out(self, *servers: ServerInfo, avoided: str = "") -> str:
        found = self.weights.differing(SwarmSnapshot(8, servers), {name * 44 for name in avoided})
        return "".join(sorted(peer_id[0] for peer_id in found))

    def use(self, *servers: ServerInfo) -> None:
        self.weights.keep([RouteHop(server, server.span) for server in servers])


A, B = server("a", 0, "xxxxxxxx"), server("b", 0, "yyyy")


def test_records_of_strangers_have_no_say() -> None:
    """They cost nothing, so a thousand of them must not leave out the one who is there."""
    ghosts = [server(name, 0, "zzzzzzzz") for name in "cdefghijklmnop"]
    assert Client("a").left_out(A, *ghosts) == "cdefghijklmnop"
    assert Client("").left_out(A, *ghosts) == ""


def test_an_avoided_server_has_no_say() -> None:
    client = Client("ab")
    assert client.left_out(A, B) == "b"
    assert client.left_out(A, B, avoided="a") == "a"


def test_what_was_used_stays_until_it_is_forgotten() -> None:
    client = Client("ab")
    client.use(B)
    assert client.left_out(A, B) == "a"
    assert client.left_out(A) == "a", "its blocks are missing now"
    client.weights.forget()
    assert client.left_out(A) == ""


def test_servers_that_were_not_met_bind_nobody() -> None:
    client = Client("a")
    client.use(B)
    assert client.left_out(A, B) == "b"


def test_whether_there_is_a_choice() -> None:
    client = Client("ab")
    assert not client.weights.is_open(SwarmSnapshot(8, (A,)))
    assert client.weights.is_open(SwarmSnapshot(8, (A, B)))
    client.use(A)
    assert not client.weights.is_open(SwarmSnapshot(8, (A, B)))


def test_a_difference_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    client = Client("ab")
    for _ in range(3):
        client.left_out(A, B)
    assert [record.message.split(":")[0] for record in caplog.records] == ["weights differ"]
