"""Peers that were met: kept within bounds, by any number of processes, and read whatever the file says."""

import json
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from swarmllm.network.p2p import dht_node as module
from swarmllm.network.p2p.dht_node import MAX_AGE_S, MAX_KEPT_PEERS, MAX_SWARMS, RENEWAL_S, AddressBook
from swarmllm.network.p2p.identity import Identity

IDS = [Identity.generate().peer_id for _ in range(MAX_SWARMS + 10)]
FOUNDER, *OTHERS = IDS
ADDR = "/ip4/45.1.1.1/tcp/31337"


class Clock:
    now = 1e9

    def __call__(self) -> float:
        return self.now


def test_another_process_finds_peers_that_were_met(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "peers.json"
    book = AddressBook(path, [FOUNDER])
    assert book.note(OTHERS[0], [ADDR])
    book.write()
    assert AddressBook(path, [FOUNDER]).peers() == [(OTHERS[0], ADDR)]
    assert AddressBook(path, [OTHERS[5], FOUNDER]).peers() == [(OTHERS[0], ADDR)]
    assert AddressBook(path, [OTHERS[5]]).peers() == []


def test_what_is_no_use_is_not_kept(tmp_path: Path) -> None:
    book = AddressBook(tmp_path / "peers.json", [FOUNDER])
    assert not book.note(FOUNDER, [ADDR])
    assert not book.note(OTHERS[0], [])
    assert not book.note(OTHERS[0], [f"{ADDR}/p2p/{OTHERS[1]}/p2p-circuit"]), "hidden peers can't be joined through"
    assert not AddressBook(tmp_path / "peers.json", []).note(OTHERS[0], [ADDR]), "nobody would look for it"
    assert book.peers() == []


def test_it_is_written_when_somebody_is_new_and_now_and_then(tmp_path: Path) -> None:
    clock = Clock()
    book = AddressBook(tmp_path / "peers.json", [FOUNDER], clock)
    assert [book.note(OTHERS[0], [ADDR]), book.note(OTHERS[0], [ADDR]), book.note(OTHERS[1], [ADDR])] == [
        True,
        False,
        True,
    ]
    clock.now += RENEWAL_S
    assert book.note(OTHERS[0], [ADDR])


def test_old_entries_end_and_the_newest_stay(tmp_path: Path) -> None:
    clock = Clock()
    for number, peer_id in enumerate(OTHERS[: MAX_KEPT_PEERS + 5]):
        clock.now = 1e9 + number
        book = AddressBook(tmp_path / "peers.json", [FOUNDER], clock)  # each a process of its own
        book.note(peer_id, [ADDR] * 9)
        book.write()
    found = AddressBook(tmp_path / "peers.json", [FOUNDER], clock).peers()
    assert list(dict.fromkeys(peer_id for peer_id, _ in found)) == OTHERS[5 : MAX_KEPT_PEERS + 5][::-1]
    assert len(found) == MAX_KEPT_PEERS * module.MAX_KEPT_ADDRS
    clock.now += MAX_AGE_S
    assert AddressBook(tmp_path / "peers.json", [FOUNDER], clock).peers() == []


def test_swarms_are_bounded(tmp_path: Path) -> None:
    clock = Clock()
    for peer_id in IDS:
        clock.now += 1
        book = AddressBook(tmp_path / "peers.json", [peer_id], clock)
        book.note(IDS[0] if peer_id != IDS[0] else IDS[1], [ADDR])
        book.write()
    assert list(json.loads((tmp_path / "peers.json").read_text())) == IDS[::-1][:MAX_SWARMS]


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.floats()
    | st.sampled_from([0, 1, -1, 10**400])
    | st.text(max_size=5)
    | st.sampled_from([FOUNDER, OTHERS[0], ADDR]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from([FOUNDER, OTHERS[0], OTHERS[1], "x"]), inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=300)
@example(json.dumps({FOUNDER: {OTHERS[0]: [10**400, [ADDR]]}}).encode())
@given(st.one_of(JSON.map(json.dumps).map(str.encode), st.binary(max_size=40)))
def test_whatever_stands_there(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.mktemp("book") / "peers.json"
    path.write_bytes(content)
    book = AddressBook(path, [FOUNDER])
    for peer_id, addr in book.peers():
        assert peer_id in IDS
        assert addr.startswith("/")
    book.note(OTHERS[2], [ADDR])
    book.write()
    assert (OTHERS[2], ADDR) in AddressBook(path, [FOUNDER]).peers()


def test_a_file_that_is_too_large_or_a_disk_that_is_full(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "peers.json"
    path.write_bytes(b"[" * (module.MAX_BYTES + 1))
    assert AddressBook(path, [FOUNDER]).peers() == []
    assert "too large" in caplog.text
    book = AddressBook(tmp_path / "peers.json" / "no directory", [FOUNDER])
    book.note(OTHERS[0], [ADDR])
    book.write()
    assert "can't save the known peers" in caplog.text
