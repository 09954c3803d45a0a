"""Machines take weights from each other, over real peers."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
from gguf_writer import write_gguf
from hub_stub import HubStub, Repository, running_hub, use_hub
from machines import PIECE_BYTES, Machines
from pytest_asyncio import fixture as in_loop
from tests.left_tasks import no_task_left_behind
from tests.numerics.tiny_models import save_tiny

from swarmllm.data_structures import Span
from swarmllm.errors import ConfigurationError, CorruptWeightsError
from swarmllm.machines import downloads
from swarmllm.machines import hub as hub_module
from swarmllm.machines.downloads import Progress
from swarmllm.machines.hub import Hub
from swarmllm.models.checkpoint.checkpoint import open_checkpoint
from swarmllm.models.checkpoint.fingerprint import fingerprint
from swarmllm.models.checkpoint.manifest import Manifest
from swarmllm.network.wire.protocol import FrameStream, MessageType, welcome

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
        files["README.md"] = b"About it"
        hub.repositories["me/tiny"] = Repository(files, commit="c" * 40)
        yield hub


@pytest.fixture
def fresh_hub(hub: HubStub, monkeypatch: pytest.MonkeyPatch) -> HubStub:
    """The same, which has sent nothing yet. Neighbours in small ranges come from one machine. Nothing is read twice."""
    hub.sent.clear()
    hub.spoil = lambda _, data: data
    monkeypatch.setattr(downloads, "HUB_BYTES", 8 * PIECE_BYTES)
    monkeypatch.setattr(hub_module, "CHECKED_SHARE", 0.0)
    monkeypatch.setattr(downloads, "GREETED_S", 120.0)  # on a busy machine, neither is true of machines that are there
    monkeypatch.setattr(downloads, "STALLED_S", 120.0)
    monkeypatch.setattr(downloads, "SLOW_S", 120.0)
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


async def test_a_machine_downloads_the_ranges_of_its_blocks(
    machines: Machines, fresh_hub: HubStub, tmp_path: Path
) -> None:
    store = await machines.store(0, tmp_path, hub=Hub())
    manifest = await store.add_from_hub("me/tiny", piece_bytes=512)
    fresh_hub.sent.clear()
    told: list[Progress] = []
    path = await store.fetch(manifest, Span(1, 2), client=False, givers=list, progress=told.append)
    assert fresh_hub.sent.total() == told[-1].bytes_from_hub == told[-1].total_bytes
    assert told[-1].total_bytes < manifest.num_bytes(~manifest.none()) / 2
    assert await store.fetch(manifest, Span(1, 2), client=False, givers=list) == path
    assert fresh_hub.sent.total() == told[-1].bytes_from_hub
    again = await machines.store(0, tmp_path, hub=Hub())
    assert again.gives() == (manifest.digest,)
    opened = open_checkpoint(str(path))
    opened.opened_files.samples()
    await again.fetch(manifest, Span(2, 3), client=False, givers=list, progress=told.append)
    assert fresh_hub.sent.total() <= told[-1].total_bytes + told[-1].bytes_from_hub
    assert opened.opened_files.changed() == []  # a server must not think that somebody changed its files


async def test_a_hub_that_fails_is_tried_again(
    machines: Machines, fresh_hub: HubStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(downloads, "AGAIN_S", 0.01)
    store = await machines.store(0, tmp_path, hub=Hub())
    manifest = await store.add_from_hub("me/tiny", piece_bytes=PIECE_BYTES)
    problems: list[str] = []

    def progress(told: Progress) -> None:
        if told.problem:
            problems.append(told.problem)
        if len(problems) > 2:
            fresh_hub.spoil = lambda _, data: data

    fresh_hub.spoil = lambda _, data: data[: len(data) // 2]
    path = await store.fetch(manifest, Span(0, 4), client=True, givers=list, progress=progress)
    assert all("can't be read from the hub" in problem or "sends only" in problem for problem in problems)
    for name, data in fresh_hub.repositories["me/tiny"].files.items():
        assert (path / name).read_bytes() == data


async def test_files_that_are_not_what_the_hub_says_are_fetched_again(
    machines: Machines, fresh_hub: HubStub, tmp_path: Path
) -> None:
    """Nobody knows digests of their pieces, but the hub tells one of the whole file."""
    liar, store = [await machines.store(number, tmp_path, hub=Hub()) for number in range(2)]
    manifest = await liar.add_from_hub("me/tiny", piece_bytes=PIECE_BYTES)
    await liar.fetch(manifest, Span(0, 4), client=True, givers=list)
    holding = liar._models[manifest.digest]
    holding.read = lambda piece: (  # type: ignore[method-assign]
        bytes(place.num_bytes)
        if (place := manifest.place(piece)).file.name.endswith(".safetensors") and place.start
        else type(holding).read(holding, piece)
    )
    told: list[Progress] = []
    path = await store.fetch(manifest, Span(0, 4), client=True, givers=machines.givers(0), progress=told.append)
    assert told[-1].bytes_from_machines
    assert told[-1].bytes_from_hub
    assert store._members.is_banned(machines.peers[0].peer_id)
    for name, data in fresh_hub.repositories["me/tiny"].files.items():
        assert (path / name).read_bytes() == data


async def test_pieces_of_parts_of_files_are_compared_with_the_hub(
    machines: Machines, fresh_hub: HubStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The taker has no file of weights whole, so only bytes of the hub tell it that its giver lies."""
    monkeypatch.setattr(hub_module, "CHECKED_SHARE", 1 / 4)
    liar, store = [await machines.store(number, tmp_path, hub=Hub()) for number in range(2)]
    manifest = await liar.add_from_hub("me/tiny", piece_bytes=512)
    await liar.fetch(manifest, Span(0, 4), client=True, givers=list)
    fresh_hub.sent.clear()
    honest = await store.fetch(manifest, Span(1, 2), client=False, givers=machines.givers(0))
    assert not store._members.is_banned(machines.peers[0].peer_id)
    assert 0 < fresh_hub.sent.total() < manifest.num_bytes(store._models[manifest.digest].held) / 2
    holding = liar._models[manifest.digest]
    holding.read = lambda piece: bytes(manifest.place(piece).num_bytes)  # type: ignore[method-assign]
    other = await machines.store(2, tmp_path, hub=Hub())
    told: list[Progress] = []
    path = await other.fetch(manifest, Span(1, 2), client=False, givers=machines.givers(0), progress=told.append)
    assert other._members.is_banned(machines.peers[0].peer_id)
    assert told[-1].bytes_from_hub >= told[-1].total_bytes
    for file in path.iterdir():
        assert file.name.startswith(".") or file.read_bytes() == (honest / file.name).read_bytes()


async def test_a_poisoned_manifest_of_a_model_of_the_hub_is_refused(
    machines: Machines, fresh_hub: HubStub, model: Path, tmp_path: Path
) -> None:
    liar, store = [await machines.store(number, tmp_path, hub=Hub()) for number in range(2)]
    true = await liar.add_from_hub("me/tiny", piece_bytes=PIECE_BYTES)
    weights = next(file for file in true.files if file.sha256)
    for change in ({"sha256": "0" * 64}, {"size": weights.size + 1}, {"name": "other.safetensors"}):
        files = tuple(file.model_copy(update=change) if file is weights else file for file in true.files)
        with pytest.raises(
            CorruptWeightsError, match=r"of me/tiny isn't the hub's .* the machine that chose the model"
        ):
            await store.fetch(Manifest(**(dict(true) | {"files": files})), None, client=True, givers=list)
    # One with digests, as of a machine that has the model, but of other bytes.
    cache = tmp_path / "cache" / true.directory
    cache.mkdir(parents=True)
    for name, data in fresh_hub.repositories["me/tiny"].files.items():
        (cache / name).write_bytes(data[:-1] + b"x" if name == weights.name else data)
    poisoned = await liar.add_local(cache, piece_bytes=PIECE_BYTES)
    assert poisoned.commit == true.commit
    with pytest.raises(CorruptWeightsError, match="isn't what the hub says: its list of pieces is wrong"):
        await store.fetch(poisoned, Span(0, 4), client=True, givers=machines.givers(0))


async def test_the_hub_helps_machines_that_give_nothing(
    machines: Machines, fresh_hub: HubStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One says that it has everything, and gives a piece an hour."""
    monkeypatch.setattr(downloads, "SLOW_S", 0.0)
    slow, store = [
        await machines.store(number, tmp_path, hub=Hub(), upload_mbps=1e-3 if number == 0 else None)
        for number in range(2)
    ]
    manifest = await slow.add_from_hub("me/tiny", piece_bytes=PIECE_BYTES)
    await slow.fetch(manifest, Span(0, 4), client=True, givers=list)
    fresh_hub.sent.clear()
    told: list[Progress] = []
    path = await store.fetch(manifest, Span(0, 4), client=True, givers=machines.givers(0), progress=told.append)
    assert told[-1].bytes_from_hub > 0.9 * told[-1].total_bytes
    for name, data in fresh_hub.repositories["me/tiny"].files.items():
        assert (path / name).read_bytes() == data


async def test_a_machine_that_claims_everything_holds_up_nobody(
    machines: Machines, fresh_hub: HubStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says again and again that it fetches other pieces from the hub, and gives none."""
    monkeypatch.setattr(downloads, "STALLED_S", 0.1)
    monkeypatch.setattr(downloads, "LOOK_S", 0.05)
    monkeypatch.setattr(downloads, "HUB_BYTES", 64 * PIECE_BYTES)
    store = await machines.store(0, tmp_path, hub=Hub())
    manifest = await store.add_from_hub("me/tiny", piece_bytes=PIECE_BYTES)
    num_asked = 0

    async def claim(stream: FrameStream) -> None:
        nonlocal num_asked
        await welcome(stream)
        while True:
            message = await stream.receive()
            num_asked += 1
            claims = ~manifest.none()
            claims[num_asked % len(claims)] = False
            has, claimed, wanted = (np.packbits(one).tobytes() for one in (~claims, claims, claims))
            await stream.send(
                MessageType.RESULT, {"id": message.header["id"], "is_here": False}, [has + claimed + wanted]
            )

    await machines.peers[1].serve_streams(claim)
    told: list[Progress] = []
    await store.fetch(manifest, Span(0, 4), client=True, givers=machines.givers(1), progress=told.append)
    assert told[-1].bytes_from_hub == told[-1].done_bytes
    assert num_asked


async def test_a_hub_with_wrong_bytes_is_one_error(machines: Machines, fresh_hub: HubStub, tmp_path: Path) -> None:
    store = await machines.store(0, tmp_path, hub=Hub())
    manifest = await store.add_from_hub("me/tiny", piece_bytes=PIECE_BYTES)
    fresh_hub.spoil = lambda name, data: data[:-1] + b"x" if name.startswith("model-00003") else data
    with pytest.raises(CorruptWeightsError, match=r"model-00003\S+ of me/tiny isn't what the hub says"):
        await store.fetch(manifest, Span(0, 4), client=True, givers=list)


async def test_a_model_of_the_hub_that_a_machine_has_comes_from_there(
    machines: Machines, fresh_hub: HubStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the hub's cache of its user, it needs no digests; others take it from there."""
    monkeypatch.setenv("SWARMLLM_CACHE", str(tmp_path / "cache"))
    first, second = [await machines.store(number, tmp_path, hub=Hub()) for number in range(2)]
    for name in fresh_hub.repositories["me/tiny"].files.keys() - {"README.md"}:
        snapshot = Path(huggingface_hub.hf_hub_download("me/tiny", name, cache_dir=tmp_path / "cache")).parent
    fresh_hub.sent.clear()
    manifest = await first.add_from_hub("me/tiny", piece_bytes=PIECE_BYTES)
    assert await first.fetch(manifest, Span(0, 4), client=True, givers=list) == snapshot
    again = await machines.store(0, tmp_path, hub=Hub())  # after a restart
    assert await again.manifest(manifest.digest, ()) == manifest
    assert await again.fetch(manifest, Span(0, 4), client=True, givers=list) == snapshot
    first = again
    looked_at = fresh_hub.sent.total()
    with_digests = await first.add_local(snapshot, piece_bytes=PIECE_BYTES)
    assert with_digests.commit == manifest.commit
    monkeypatch.setenv("SWARMLLM_CACHE", str(tmp_path / "another"))
    for one in (manifest, with_digests):
        path = await second.fetch(one, Span(0, 4), client=True, givers=machines.givers(0))
        for file in one.files:
            assert (path / file.name).read_bytes() == fresh_hub.repositories["me/tiny"].files[file.name]
    assert fresh_hub.sent.total() == looked_at + len(b"About it")  # which transformers doesn't download
    monkeypatch.setenv("SWARMLLM_CACHE", str(tmp_path / "cache"))
    third = await machines.store(2, tmp_path, hub=Hub())
    assert await third.fetch(with_digests, Span(0, 4), client=True, givers=list) == snapshot
    (snapshot / "config.json").unlink()
    assert await third.fetch(with_digests, Span(0, 4), client=True, givers=machines.givers(0)) != snapshot


async def test_without_a_hub(machines: Machines, fresh_hub: HubStub, tmp_path: Path) -> None:
    store = await machines.store(0, tmp_path, hub=Hub())
    with pytest.raises(ConfigurationError, match="'me/nothing' can't be found on the hub"):
        await store.add_from_hub("me/nothing")
    huggingface_hub.constants.HF_HUB_OFFLINE = True
    try:
        with pytest.raises(ConfigurationError, match="'me/tiny' isn't on this machine, and the hub can't be reached"):
            await store.add_from_hub("me/tiny")
    finally:
        huggingface_hub.constants.HF_HUB_OFFLINE = False
    store = await machines.store(0, tmp_path)
    with pytest.raises(ConfigurationError, match="this machine doesn't use the hub"):
        await store.add_from_hub("me/tiny")


async def test_gguf_from_the_hub(machines: Machines, fresh_hub: HubStub, tmp_path: Path) -> None:
    settings = {"general.architecture": "llama", "tokenizer.ggml.tokens": ["x" * 1000] * 3000}
    rows = np.arange(64 * 32, dtype=np.float32).reshape(64, 32)
    data = write_gguf(tmp_path / "m.gguf", settings, {"rope_freqs.weight": (0, rows[0]), "x": (0, rows)}).read_bytes()
    fresh_hub.repositories["me/gguf"] = Repository({"Q4/m.gguf": data, "README.md": b"x"}, commit="d" * 40)
    store = await machines.store(0, tmp_path, hub=Hub())
    manifest = await store.add_from_hub("me/gguf", piece_bytes=PIECE_BYTES)
    assert (manifest.gguf, manifest.folder, manifest.name) == ("m.gguf", "Q4", "me/gguf/m.gguf")
    (file,) = manifest.files
    assert file.size == len(data)
    assert len(data) - rows.nbytes - 200 < file.always[0][1] < len(data) - rows.nbytes
    start, end = file.always[1]
    assert data[start:end] == rows[0].tobytes()
