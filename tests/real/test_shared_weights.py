"""SmolLM2 from one machine to others: two servers and a client with the pieces that they need, and nothing else."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import torch
from hub_stub import Repository, running_hub, use_hub
from machines import Machines
from swarm_models import OPTIONS, assert_same_tokens
from tests.real.conftest import Served
from tests.real.real_models import SMOLLM2

from swarmllm import AutoDistributedModel, LocalSwarm
from swarmllm.data_structures import Span
from swarmllm.machines.downloads import Progress
from swarmllm.machines.hub import Hub
from swarmllm.models.checkpoint.checkpoint import load_tokenizer, open_checkpoint
from swarmllm.models.span.loading import load_block_span

pytestmark = pytest.mark.slow
SPANS = (Span(0, 11), Span(11, 30))


async def fetched(place: Path, directory: Path) -> tuple[list[Path], list[Progress], int]:
    """The places of both servers' parts and of the client's, how much came, and the size of the model."""
    async with AsyncExitStack() as open_:
        machines = await Machines.start(4, open_)
        stores = [await machines.store(number, directory) for number in range(4)]
        manifest = await stores[0].add_local(place)
        last: dict[int, Progress] = {}

        async def take(number: int, span: Span | None) -> Path:
            others = machines.givers(*{0, 1, 2, 3} - {number})
            assert await stores[number].manifest(manifest.digest, machines.givers(0)()) == manifest
            return await stores[number].fetch(
                manifest, span, client=span is None, givers=others, progress=lambda told: last.update({number: told})
            )

        places = await asyncio.gather(*(take(number, span) for number, span in enumerate((*SPANS, None), 1)))
        return places, [last[number] for number in (1, 2, 3)], manifest.num_bytes(~manifest.none())


def test_smollm2_from_a_neighbour(smollm2: Served, tmp_path: Path) -> None:
    places, progress, total = asyncio.run(fetched(smollm2.path, tmp_path))
    assert all(one.done_bytes == one.total_bytes == one.bytes_from_machines < 0.7 * total for one in progress)
    assert sum(one.bytes_from_machines for one in progress) < 1.2 * total
    options = {"dtype": "float32", **OPTIONS}
    with LocalSwarm(places[0], spans=[(0, 11)], **options) as swarm:
        swarm.add_server((11, 30), model=places[1])
        with AutoDistributedModel.from_pretrained(
            str(places[2]), initial_peers=swarm.initial_peers, dtype="float32", progress=False
        ) as model:
            chat = [{"role": "user", "content": "What is the capital of France?"}]
            tokenizer = load_tokenizer(str(places[2]))
            ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt").input_ids
            assert torch.equal(ids, smollm2.ids(tokenizer.decode(ids[0])))
            assert_same_tokens(model, smollm2.local, ids, max_new_tokens=12)
            with torch.no_grad():
                found, wanted = (one(ids).logits for one in (model, smollm2.local))
            torch.testing.assert_close(found, wanted, rtol=1e-3, atol=2e-3)


@pytest.mark.skipif(not SMOLLM2.is_here, reason=SMOLLM2.missing)
def test_smollm2_from_the_hub_by_ranges(tmp_path: Path) -> None:
    """One file in a folder; a machine reads the header and its blocks."""
    path, span = SMOLLM2.file(tmp_path), SPANS[0]
    name, data = path.name, path.read_bytes()

    async def fetch() -> Path:
        async with AsyncExitStack() as open_:
            machines = await Machines.start(1, open_)
            store = await machines.store(0, tmp_path, hub=Hub())
            manifest = await store.add_from_hub("me/smollm2:Q4_1")
            return await store.fetch(manifest, span, client=False, givers=list)

    with running_hub() as hub, pytest.MonkeyPatch.context() as monkeypatch:
        use_hub(hub, monkeypatch)
        hub.repositories["me/smollm2"] = Repository({f"gguf/{name}": data, "README.md": b"x"}, commit="a" * 40)
        place = asyncio.run(fetch())
        assert 0 < hub.sent[name] < 0.45 * len(data)
    assert place.parts[-5:] == ("models--me--smollm2", "snapshots", "a" * 40, "gguf", name)
    found, whole = (open_checkpoint(str(one)) for one in (place, path))
    assert found.public_name == f"me/smollm2/gguf/{name}"
    read = [load_block_span(one, span, dtype=torch.float32, progress=False).digests for one in (found, whole)]
    assert read[0] == read[1]
