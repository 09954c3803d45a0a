"""Addresses as text: whatever other peers claim, and whatever a file kept."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmllm.network.p2p.addresses import port_of, split_initial_peer, usable_peers
from swarmllm.network.p2p.identity import Identity

ONE, RELAY = Identity.generate().peer_id, Identity.generate().peer_id
DIRECT = f"/ip4/45.1.1.1/tcp/31337/p2p/{ONE}"
NONSENSE = (
    "", "x", "/p2p/", f"nonsense/p2p/{ONE}", f"/ip4/45.1.1.1/tcp/x/p2p/{ONE}", f"/ip4/45.1.1.1/tcp/1/p2p/{ONE}x",
    f"/ip4/45.1.1.1/tcp/31337/p2p/{RELAY}/p2p-circuit/p2p/{ONE}", f"/ip4/1.2.3.4/tcp/1/p2p/{RELAY}/p2p/{ONE}",
)  # fmt: skip


def test_what_can_not_be_an_initial_peer_is_left_out() -> None:
    assert usable_peers([*NONSENSE, DIRECT, *NONSENSE]) == [DIRECT]


@given(
    st.lists(st.text(max_size=40) | st.sampled_from([*NONSENSE, DIRECT]) | st.text().map(lambda t: f"{t}/p2p/{ONE}"))
)
def test_what_is_left_can_be_used(claimed: list[str]) -> None:
    for maddr in usable_peers(claimed):
        assert split_initial_peer(maddr)[0] == ONE


@pytest.mark.parametrize(
    ("addrs", "port"),
    [
        ((), None),
        (("/ip4/127.0.0.1/tcp/4000",), 4000),
        ((f"/ip4/203.0.113.7/tcp/31337/p2p/{RELAY}/p2p-circuit", "/ip4/192.168.1.5/tcp/45123"), 45123),
        ((f"/ip4/192.168.1.7/tcp/31337/p2p/{RELAY}/p2p-circuit",), None),
        (("/ip4/45.1.1.1/tcp/5000", "/ip4/192.168.1.5/tcp/45123"), 45123),
        (("/dns4/example.org/tcp/5000",), 5000),
        (("x", "/ip4/45.1.1.1/udp/1"), None),
    ],
)
def test_the_port_is_that_on_which_the_peer_listens(addrs: tuple[str, ...], port: int | None) -> None:
    assert port_of(addrs) == port
