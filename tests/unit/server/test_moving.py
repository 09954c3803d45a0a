"""A server that is to move leaves its blocks only for others that it can load, and goes back if that fails."""

import asyncio
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest

from swarmllm import embedded_model_path
from swarmllm.data_structures import ServerInfo, Span, SwarmSnapshot
from swarmllm.errors import CorruptWeightsError
from swarmllm.models.checkpoint.checkpoint import open_checkpoint
from swarmllm.server import span_life
from swarmllm.server.announcer import OwnRecord
from swarmllm.server.device.device_thread import DeviceThread
from swarmllm.server.peers.peer_limits import PeerLimits
from swarmllm.server.settings import ServerConfig
from swarmllm.server.span_life import Rebalancer, SpanLife
from swarmllm.server.span_loader import SpanLoader
from swarmllm.server.streams.serving import Access

OLD, NEW = Span(0, 2), Span(4, 6)
FAILURES = [
    CorruptWeightsError("damaged"),
    MemoryError(),
    OSError(5, "Input/output error"),
    RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes."),
]


class Peer:
    """A member of the swarm that everybody believes."""

    peer_id = "12D3KooWFfoRMzqUD91vDKX6igC7p7M2G2EMN2SZG28GBvt4SvGU"
    addrs = ()

    async def dht_store(self, texts: dict[str, str], expiration: float) -> bool:
        return True


@pytest.fixture
async def thread() -> AsyncIterator[DeviceThread]:
    thread = DeviceThread()
    yield thread
    await thread.close()
    await asyncio.get_running_loop().shutdown_default_executor()


def loader_of(model: Path | str, thread: DeviceThread) -> SpanLoader:
    return SpanLoader(ServerConfig(model=str(model), new_swarm=True), open_checkpoint(str(model)), thread, PeerLimits())


@pytest.mark.parametrize("failure", FAILURES, ids=repr)
async def test_it_goes_back_to_its_blocks(
    thread: DeviceThread, failure: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[Span] = []

    def load(loader: object, span: Span) -> object:
        asked.append(span)
        if span == NEW:
            raise failure
        return SimpleNamespace(blocks=SimpleNamespace(span=span))

    monkeypatch.setattr(SpanLoader, "_load", load)
    nothing: Any = SimpleNamespace()
    config, loader = ServerConfig(model="m", new_swarm=True), loader_of(embedded_model_path(), thread)
    record = OwnRecord(config, Peer(), loader, Access(None), nothing, nothing, OLD)  # type: ignore[arg-type]
    life = SpanLife(record, AsyncMock(), nothing, lambda: None)
    assert await life._move(NEW, asyncio.Event())
    assert asked == [NEW, OLD]
    assert record.span == record.access.served().blocks.span == OLD
    assert life._rebalancer.failed_moves == 1
    assert [told.message for told in caplog.records if "going back to blocks 0:2" in told.message]


async def test_it_looks_whether_the_files_are_there_and_whole(thread: DeviceThread, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(embedded_model_path(), model)
    loader = loader_of(model, thread)
    assert await loader.can_load(NEW)
    os.truncate(model / "model.safetensors", 1000)
    assert not await loader.can_load(NEW)
    shutil.rmtree(model)
    assert not await loader.can_load(NEW)


async def test_it_waits_longer_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(span_life.asyncio, "sleep", sleep)
    info = ServerInfo(peer_id=Peer.peer_id, start=0, end=2)
    claims: list[Span | None] = []
    answers = [False] * 8 + [True]
    generator: Any = SimpleNamespace(uniform=lambda *_: 1.0)

    async def look() -> SwarmSnapshot:
        return SwarmSnapshot(num_blocks=2, servers=(info,))

    async def claim(span: Span | None) -> None:
        claims.append(span)

    async def can_load(span: Span) -> bool:
        return answers.pop(0)

    monkeypatch.setattr(span_life, "plan_move", lambda *_, **__: NEW)
    monkeypatch.setattr(span_life, "claim_stands", lambda *_, **__: True)
    rebalancer = Rebalancer(Peer.peer_id, 0.9, 10.0, generator)
    assert await rebalancer.wait_for_move(look, claim, can_load) == NEW
    assert slept[::2] == [10.0 * min(2**failed, span_life.MOST_PATIENCE) for failed in range(9)]
    assert claims == [NEW, None] * 8 + [NEW]
