"""A server that is to move leaves its blocks only for others that it can load, and goes back if that fails."""

import asyncio
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from swarmllm import embedded_model_path
from swarmllm.config import ServerConfig
from swarmllm.data_structures import ServerInfo, Span, SwarmSnapshot
from swarmllm.errors import CorruptWeightsError
from swarmllm.models.checkpoint import open_checkpoint
from swarmllm.server import rebalancer as rebalancer_module
from swarmllm.server import server as server_module
from swarmllm.server.executor import Executor
from swarmllm.server.rebalancer import Rebalancer

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
async def executor() -> AsyncIterator[Executor]:
    executor = Executor()
    yield executor
    await executor.close()
    await asyncio.get_running_loop().shutdown_default_executor()


def server_of(model: Path | str) -> Any:
    config = ServerConfig(model=str(model), new_swarm=True)
    server: Any = server_module._Server(config, open_checkpoint(str(model)), Peer(), SimpleNamespace())  # type: ignore[arg-type]
    server._span = OLD
    return server


@pytest.mark.parametrize("failure", FAILURES, ids=repr)
async def test_it_goes_back_to_its_blocks(
    executor: Executor, failure: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[Span] = []

    def load(checkpoint: object, span: Span, **_: object) -> object:
        asked.append(span)
        if span == NEW:
            raise failure
        return SimpleNamespace(span=span)

    monkeypatch.setattr(server_module, "load_block_span", load)
    monkeypatch.setattr(server_module, "measure_throughput", lambda *_: None)
    monkeypatch.setattr(server_module, "prefill_tokens_beside_decode", lambda *_: 8)
    server = server_of(embedded_model_path())
    assert await server._load_other(NEW, executor, asyncio.Event())
    assert asked == [NEW, OLD]
    assert server._span == server._blocks.span == OLD
    assert server._rebalancer.failed_moves == 1
    assert [record.message for record in caplog.records if "going back to blocks [0, 2)" in record.message]


async def test_it_looks_whether_the_files_are_there_and_whole(executor: Executor, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(embedded_model_path(), model)
    server = server_of(model)
    assert await server._can_load(NEW, executor)
    os.truncate(model / "model.safetensors", 1000)
    assert not await server._can_load(NEW, executor)
    shutil.rmtree(model)
    assert not await server._can_load(NEW, executor)


async def test_it_waits_longer_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(rebalancer_module.asyncio, "sleep", sleep)
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

    monkeypatch.setattr(rebalancer_module, "plan_move", lambda *_, **__: NEW)
    monkeypatch.setattr(rebalancer_module, "claim_stands", lambda *_, **__: True)
    rebalancer = Rebalancer(Peer.peer_id, 0.9, 10.0, generator)
    assert await rebalancer.wait_for_move(look, claim, can_load) == NEW
    assert slept[::2] == [10.0 * min(2**failed, rebalancer_module.MOST_PATIENCE) for failed in range(9)]
    assert claims == [NEW, None] * 8 + [NEW]
