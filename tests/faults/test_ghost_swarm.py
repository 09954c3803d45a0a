"""A real peer that announces what it doesn't serve, among real servers."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from swarm_models import OPTIONS, connected, prompt
from transformers import PreTrainedModel

from swarmllm import LocalSwarm
from swarmllm.data_structures import ModelRecord, ServerInfo, ServerState, Span
from swarmllm.models.checkpoint.checkpoint import open_checkpoint
from swarmllm.models.checkpoint.fingerprint import fingerprint
from swarmllm.network.p2p.block_directory import BlockDirectory
from swarmllm.network.p2p.peer import Peer


@contextmanager
def ghost(checkpoint: Path, initial_peers: list[str], **announced: Any) -> Iterator[None]:
    """A member of the DHT that says it serves everything, and serves no streams; in a thread of its own."""
    opened = open_checkpoint(str(checkpoint))
    record = ModelRecord(name=opened.public_name, fingerprint=fingerprint(opened), num_blocks=opened.num_blocks)
    ready, leave = threading.Event(), threading.Event()

    async def haunt() -> None:
        async with await Peer.create(initial_peers=initial_peers) as peer:
            info = ServerInfo(peer_id=peer.peer_id, addrs=peer.addrs, state=ServerState.ONLINE, **announced)
            assert await BlockDirectory(peer).announce(record, info, ttl_s=600)
            ready.set()
            await asyncio.to_thread(leave.wait)

    thread = threading.Thread(target=lambda: asyncio.run(haunt()), name="ghost")
    thread.start()
    try:
        assert ready.wait(120)
        yield
    finally:
        leave.set()
        thread.join()


@pytest.mark.rotates(3)
def test_ghost_placement(llama: Path, local: PreTrainedModel) -> None:
    """Its record fills a gap with a throughput of 1e8: a new server comes to where no honest one is all the same."""
    boast = {"throughput": 1e8, "decode_ms_per_block": 0.001, "cache_tokens_left": 1 << 40}
    with (
        LocalSwarm(llama, spans=[(0, 3)], **OPTIONS) as swarm,
        ghost(llama, swarm.initial_peers, start=3, end=6, **boast),
    ):
        assert swarm.add_server(num_blocks=3).span == Span(3, 6)
        with connected(llama, swarm.initial_peers) as model:
            given = prompt()
            expected = local.generate(given, max_new_tokens=8, do_sample=False).tolist()
            assert model.generate(given, max_new_tokens=8, do_sample=False).tolist() == expected
            assert not model.swarm.counts["repairs"]
