"""Machines take weights from each other, over real peers."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from hub_stub import HubStub, Repository, running_hub, use_hub
from machines import PIECE_BYTES, Machines
from pytest_asyncio import fixture as in_loop
from tests.left_tasks import no_task_left_behind
from tests.numerics.tiny_models import save_tiny

from swarmllm.data_structures import Span
from swarmllm.machines import downloads
from swarmllm.machines.downloads import Hub, Progress
from swarmllm.models.checkpoint.checkpoint import open_checkpoint
from swarmllm.models.checkpoint.fingerprint import fingerprint

pytestmark = pytest.mark.asyncio(loop_scope="module")
_no_task_left_behind = in_loop(no_task_left_behind, loop_scope="module")


@in_loop(scope="module", loop_scope="module")
async def machines() -> AsyncIterator[Machines]:
    async with AsyncExitStack() as open_:
        yield await Machines.start(4, open_)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "tiny"
    save_tiny("llama", directory)
    return directory


async def test_a_machine_takes_its_blocks_and_a_second_one_takes_from_both(
    machines: Machines, model: Path, tmp_path: Path
) -> None:
    first, second, third = [await machines.store(number, tmp_path) for number in range(3)]
    digest = (await first.add_local(model, piece_bytes=PIECE_BYTES)).digest
    assert first.gives() == (digest,)
    manifest = await second.manifest(digest, machines.givers(0)())
    told: list[Progress] = []
    path = await second.fetch(manifest, Span(0, 2), client=False, givers=machines.givers(0), progress=told.append)
    assert fingerprint(open_checkpoint(str(path))) == fingerprint(open_checkpoint(str(model)))
    assert (
        told[-1].done_bytes
        == told[-1].total_bytes
        == told[-1].bytes_from_machines
        < manifest.num_bytes(~manifest.none())
    )
    assert second.gives() == (digest,)

    told.clear()
    await third.fetch(manifest, Span(0, 4), client=True, givers=machines.givers(0, 1), progress=told.append)
    assert told[-1].done_bytes == told[-1].bytes_from_machines
    assert await first.fetch(manifest, Span(0, 1), client=True, givers=list) == model


@pytest.fixture(scope="module")
def hub(model: Path) -> Iterator[HubStub]:
    """A hub with the model, and nothing else that answers for it."""
    with running_hub() as hub, pytest.MonkeyPatch.context() as monkeypatch:
        use_hub(hub, monkeypatch)
        files = {path.name: path.read_bytes() for path in model.iterdir()}
        hub.repositories["me/tiny"] = Repository(files, commit="c" * 40)
        yield hub


@pytest.fixture
def fresh_hub(hub: HubStub, monkeypatch: pytest.MonkeyPatch) -> HubStub:
    """The same, which has sent nothing yet. Neighbours in small ranges come from one machine."""
    hub.sent.clear()
    hub.spoil = lambda _, data: data
    monkeypatch.setattr(downloads, "HUB_BYTES", 8 * PIECE_BYTES)
    return hub


async def test_three_machines_download_a_model_once(machines: Machines, fresh_hub: HubStub, tmp_path: Path) -> None:
    stores = [await machines.store(number, tmp_path, hub=Hub()) for number in range(3)]
    manifest = await stores[0].add_from_hub("me/tiny", piece_bytes=PIECE_BYTES)
    looked_at = fresh_hub.sent.total()
    total = manifest.num_bytes(~manifest.none())
    assert looked_at < total / 2
    last: dict[int, Progress] = {}

    async def take(number: int) -> Path:
        givers = machines.givers(*{0, 1, 2} - {number})
        assert await stores[number].manifest(manifest.digest, givers()) == manifest
        return await stores[number].fetch(
            manifest, Span(0, 4), client=True, givers=givers, progress=lambda told: last.update({number: told})
        )

    paths = await asyncio.gather(*map(take, range(3)))
    assert fresh_hub.sent.total() - looked_at == total
    assert sum(told.bytes_from_hub for told in last.values()) == total
    assert all(told.bytes_from_machines + told.bytes_from_hub == told.done_bytes == total for told in last.values())
    for path in paths:
        checkpoint = open_checkpoint(str(path))
        assert (checkpoint.public_name, checkpoint.revision) == ("me/tiny", "c" * 40)
        assert len({fingerprint(checkpoint), fingerprint(open_checkpoint(str(paths[0])))}) == 1
        for name, data in fresh_hub.repositories["me/tiny"].files.items():
            assert (path / name).read_bytes() == data
