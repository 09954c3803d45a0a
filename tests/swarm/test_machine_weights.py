"""Machines take weights from each other, over real peers."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from machines import PIECE_BYTES, Machines
from pytest_asyncio import fixture as in_loop
from tests.left_tasks import no_task_left_behind
from tests.numerics.tiny_models import save_tiny

from swarmllm.data_structures import Span
from swarmllm.machines.downloads import Progress
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
