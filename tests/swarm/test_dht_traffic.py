"""Traffic between nodes of the DHT: records to readers, and only nodes to servers that announce."""

from typing import Any

import pytest
from echo_peers import FINGERPRINT, MODEL, info
from hop_streams import NewPeer, made_peers
from pytest_asyncio import fixture as in_loop

from swarmllm.network.p2p.block_directory import BlockDirectory
from swarmllm.network.p2p.dht_protocol import Storage

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.rotates(3)]
new_peer = in_loop(made_peers, loop_scope="module")


async def test_a_server_that_announces_is_sent_no_records(new_peer: NewPeer, monkeypatch: pytest.MonkeyPatch) -> None:
    answered = Storage.get
    with_records: list[bool] = []

    def get(self: Storage, key: Any) -> Any:
        found = answered(self, key)
        with_records.append(found is not None)
        return found

    monkeypatch.setattr(Storage, "get", get)
    peers = [await new_peer()]
    for _ in range(4):
        peers.append(await new_peer(peers[0]))
    for _ in range(2):  # the second time, there are records everywhere
        with_records.clear()
        for peer in peers:
            assert await BlockDirectory(peer).announce(MODEL, info(peer))
        assert with_records
        assert not any(with_records)
    for peer in peers:
        with_records.clear()
        assert {one.peer_id for one in await BlockDirectory(peer).servers(FINGERPRINT)} == {
            one.peer_id for one in peers
        }
        assert any(with_records)
