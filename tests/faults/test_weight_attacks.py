"""Machines that give wrong bytes or none, takers that flood or do not read, strangers, full disks, kills.

Each test ends with the model's right bytes on the taker, or with one clear error.
"""

import asyncio
import errno
import hashlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from machines import PIECE_BYTES, SWARM, Machines
from pytest_asyncio import fixture as in_loop
from tests.direct_streams import wait_until
from tests.left_tasks import no_task_left_behind
from tests.numerics.tiny_models import save_tiny

from swarmllm.data_structures import Span
from swarmllm.errors import BlocksNotServedError, PeerError, PeerUnreachableError, SwarmError, WeightsError
from swarmllm.machines import downloads, holdings, weights
from swarmllm.machines.downloads import Progress
from swarmllm.machines.holdings import PartialModel
from swarmllm.machines.records import membership
from swarmllm.machines.weights import WeightStore
from swarmllm.models.checkpoint.manifest import Manifest
from swarmllm.network.p2p.identity import Identity
from swarmllm.network.wire.protocol import FrameStream, MessageType, hello, welcome

in_module_loop = pytest.mark.asyncio(loop_scope="module")
_no_task_left_behind = in_loop(no_task_left_behind, loop_scope="module")

HONEST, HOSTILE, TAKER = range(3)
EVERYTHING = Span(0, 4)


@in_loop(scope="module", loop_scope="module")
async def machines() -> AsyncIterator[Machines]:
    async with AsyncExitStack() as open_:
        yield await Machines.start(3, open_)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "tiny"
    save_tiny("llama", directory)
    return directory


@in_loop(loop_scope="module")
async def honest(machines: Machines, model: Path, tmp_path: Path) -> AsyncIterator[WeightStore]:
    """It has the whole model."""
    store = await machines.store(HONEST, tmp_path)
    await store.add_local(model, piece_bytes=PIECE_BYTES)
    yield store
    for peer in machines.peers:
        peer.abort_streams()


@in_loop(loop_scope="module")
async def taker(machines: Machines, honest: WeightStore, tmp_path: Path) -> WeightStore:
    return await machines.store(TAKER, tmp_path)


@pytest.fixture
def manifest(honest: WeightStore) -> Manifest:
    (digest,) = honest.gives()
    return honest._models[digest].manifest


def assert_whole(path: Path, model: Path) -> None:
    for file in model.iterdir():
        assert (path / file.name).read_bytes() == file.read_bytes()


async def take(machines: Machines, taker: WeightStore, manifest: Manifest, *givers: int) -> tuple[Path, Progress]:
    told: list[Progress] = []
    path = await taker.fetch(manifest, EVERYTHING, client=True, givers=machines.givers(*givers), progress=told.append)
    await taker.close()
    return path, told[-1]


@in_module_loop
async def test_a_giver_of_wrong_bytes_is_banned_and_told(
    machines: Machines,
    taker: WeightStore,
    manifest: Manifest,
    model: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    hostile = await machines.store(HOSTILE, tmp_path)
    await hostile.add_local(model, piece_bytes=PIECE_BYTES)
    holding, gave = hostile._models[manifest.digest], list[int]()

    def poisoned(piece: int) -> bytes:
        gave.append(piece)
        return bytes(manifest.place(piece).num_bytes)

    holding.read = poisoned  # type: ignore[method-assign]
    path, progress = await take(machines, taker, manifest, HONEST, HOSTILE)
    assert_whole(path, model)
    assert progress.done_bytes == progress.total_bytes == progress.bytes_from_machines
    assert 1 <= len(gave) <= 2 * downloads.AHEAD
    assert taker._members.is_banned(machines.peers[HOSTILE].peer_id)
    assert not taker._members.is_banned(machines.peers[HONEST].peer_id)
    assert "isn't what its digest says" in caplog.text


@in_module_loop
async def test_another_manifest_is_refused_and_its_giver_banned(
    machines: Machines, taker: WeightStore, manifest: Manifest, model: Path, tmp_path: Path
) -> None:
    hostile = await machines.store(HOSTILE, tmp_path)
    other = await hostile.add_local(model, piece_bytes=2 * PIECE_BYTES)
    hostile._models[manifest.digest] = hostile._models[other.digest]
    assert await taker.manifest(manifest.digest, machines.givers(HOSTILE, HONEST)()) == manifest
    assert taker._members.is_banned(machines.peers[HOSTILE].peer_id)
    with pytest.raises(PeerUnreachableError, match="no other machine has it"):
        await taker.manifest("0" * 64, machines.givers(HOSTILE)())
    with pytest.raises(PeerUnreachableError, match="has nothing of that model"):
        await taker.manifest("0" * 64, machines.givers(HONEST)())


Behaviour = Callable[[FrameStream, Manifest], Awaitable[None]]


async def stalls(stream: FrameStream, manifest: Manifest) -> None:
    """Has everything, and gives nothing."""
    while True:
        message = await stream.receive()
        if message.header.get("wants") == "state":
            bits = np.packbits(~manifest.none()).tobytes()
            payload = bits + 2 * bytes(len(bits))
            await stream.send(MessageType.RESULT, {"id": message.header["id"]}, [payload])


async def tells_too_little(stream: FrameStream, manifest: Manifest) -> None:
    message = await stream.receive()
    await stream.send(MessageType.RESULT, {"id": message.header["id"]}, [b"x"])
    await stream.receive()


async def answers_another_question(stream: FrameStream, manifest: Manifest) -> None:
    message = await stream.receive()
    await stream.send(MessageType.RESULT, {"id": message.header["id"] + 1}, [])
    await stream.receive()


async def says_other_things(stream: FrameStream, manifest: Manifest) -> None:
    await stream.receive()
    await stream.send(MessageType.STEP, {"id": 1}, [])
    await stream.receive()


async def gives_too_much(stream: FrameStream, manifest: Manifest) -> None:
    with suppress(SwarmError):
        while True:
            await stream.send(MessageType.RESULT, {"id": 0}, [bytes(1 << 20)])


async def hangs_up(stream: FrameStream, manifest: Manifest) -> None:
    await stream.receive()


@in_module_loop
@pytest.mark.parametrize(
    "behaviour",
    [stalls, tells_too_little, answers_another_question, says_other_things, gives_too_much, hangs_up],
)
async def test_machines_that_give_nothing_useful(
    behaviour: Behaviour,
    machines: Machines,
    taker: WeightStore,
    manifest: Manifest,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(downloads, "LATE_S", 0.1)

    async def serve(stream: FrameStream) -> None:
        await welcome(stream)
        await behaviour(stream, manifest)

    await machines.peers[HOSTILE].serve_streams(serve)
    path, progress = await take(machines, taker, manifest, HOSTILE, HONEST)
    assert_whole(path, model)
    assert progress.done_bytes == progress.bytes_from_machines


async def greeted(machines: Machines, member: str | None = None) -> FrameStream:
    peer, honest = machines.peers[TAKER], machines.peers[HONEST]
    stream = await peer.open_stream(honest.peer_id, honest.addrs)
    await hello(stream, member=membership(peer.peer_id, SWARM) if member is None else member)
    return stream


@in_module_loop
async def test_strangers_get_nothing(machines: Machines, manifest: Manifest, tmp_path: Path) -> None:
    peer = machines.peers[TAKER]
    others = (membership(peer.peer_id, Identity.generate()), membership(machines.peers[HONEST].peer_id, SWARM), "")
    for proof in others:
        stranger = await machines.store(TAKER, tmp_path / "stranger", member=proof)
        with pytest.raises(PeerUnreachableError, match="to members of its swarm only"):
            await stranger.manifest(manifest.digest, machines.givers(HONEST)())
        with pytest.raises(BlocksNotServedError, match="to members of its swarm only"):
            await greeted(machines, proof)


@in_module_loop
async def test_a_machine_that_keeps_its_files(
    machines: Machines, manifest: Manifest, model: Path, tmp_path: Path
) -> None:
    private = await machines.store(HOSTILE, tmp_path, shares=False)
    assert await private.add_local(model, piece_bytes=PIECE_BYTES) == manifest
    assert private.gives() == ()
    taker = await machines.store(TAKER, tmp_path)
    with pytest.raises(PeerUnreachableError, match="keeps its files"):
        await taker.manifest(manifest.digest, machines.givers(HOSTILE)())


@in_module_loop
async def test_a_member_that_floods_is_cut_off(
    machines: Machines, taker: WeightStore, manifest: Manifest, model: Path
) -> None:
    """It asks for all pieces again and again, and reads none of them."""
    stream = await greeted(machines)
    assert stream._transport is not None
    stream._transport.pause_reading()
    header = {"id": 0, "manifest": manifest.digest, "wants": "piece", "piece": 0}

    async def flood() -> None:
        while True:
            await stream.send(MessageType.WEIGHTS, header, [])

    with pytest.raises(PeerError):
        await flood()
    stream.abort()
    path, _ = await take(machines, taker, manifest, HONEST)
    assert_whole(path, model)


@in_module_loop
async def test_a_member_that_does_not_read_is_cut_off(
    machines: Machines, honest: WeightStore, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It shows that it is alive, and its requests wait for answers that it doesn't take."""
    monkeypatch.setattr(weights, "SEND_S", 0.1)
    stream = await greeted(machines)
    assert stream._transport is not None
    stream._transport.pause_reading()
    stream.start_keepalive(1e6)
    header = {"id": 0, "manifest": manifest.digest, "wants": "manifest"}
    for _ in range(1 + (8 << 20) // len(manifest.as_bytes())):
        await stream.send(MessageType.WEIGHTS, header, [])

    async def show_life() -> None:
        with suppress(SwarmError):
            while True:
                await stream.send(MessageType.PING, {"n": 1})
                await asyncio.sleep(0.05)

    alive = asyncio.create_task(show_life())
    await wait_until(lambda: not honest._takers.total())
    stream.abort()
    await alive


@in_module_loop
async def test_a_member_has_few_streams(machines: Machines, honest: WeightStore, manifest: Manifest) -> None:
    streams = [await greeted(machines) for _ in range(weights.MAX_STREAMS_PER_TAKER + 1)]
    message = await streams[-1].receive()
    assert (message.type, message.header["code"]) == (MessageType.ERROR, "overloaded")
    await streams[0].send(MessageType.WEIGHTS, {"id": 7, "manifest": manifest.digest, "wants": "manifest"}, [])
    assert bytes((await streams[0].receive()).payload) == manifest.as_bytes()
    for stream in streams:
        stream.abort()
    await wait_until(lambda: not honest._takers.total())


@in_module_loop
@pytest.mark.parametrize(
    "header",
    [{}, {"wants": "everything"}, {"piece": -1}, {"piece": 1 << 40}, {"manifest": "../../etc/passwd"}, {"id": "x"}],
)
async def test_bad_requests_end_the_stream(machines: Machines, manifest: Manifest, header: dict[str, Any]) -> None:
    stream = await greeted(machines)
    good = {"id": 1, "manifest": manifest.digest, "wants": "piece", "piece": manifest.num_pieces}
    await stream.send(MessageType.WEIGHTS, good, [])
    assert (await stream.receive()).header["is_here"] is False
    await stream.send(MessageType.WEIGHTS, good | header if header else {}, [])
    with pytest.raises(PeerError):
        await stream.receive()


@in_module_loop
async def test_a_full_disk_is_one_error_and_loading_goes_on_later(
    machines: Machines, taker: WeightStore, manifest: Manifest, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, left = holdings._write, [60]

    def full(path: Path, start: int, data: bytes) -> None:
        left[0] -= 1
        if left[0] < 0:
            write(path, start, data[: len(data) // 2])  # as a full disk does it
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(path, start, data)

    monkeypatch.setattr(holdings, "_write", full)
    with pytest.raises(WeightsError, match=r"is too full for tiny .* free some space, and loading goes on"):
        await take(machines, taker, manifest, HONEST)
    monkeypatch.undo()
    assert 30 <= taker._models[manifest.digest].held.sum() <= 60
    path, progress = await take(machines, taker, manifest, HONEST)
    assert_whole(path, model)
    assert progress.bytes_from_machines < progress.total_bytes


@in_module_loop
async def test_a_disk_with_too_little_room_is_told_before(
    machines: Machines, taker: WeightStore, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holdings, "LEFT_BYTES", 1 << 60)
    with pytest.raises(WeightsError, match="is too full for tiny"):
        await take(machines, taker, manifest, HONEST)


@in_module_loop
async def test_models_that_nobody_needs_go_when_their_room_is_needed(
    machines: Machines,
    honest: WeightStore,
    taker: WeightStore,
    manifest: Manifest,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path, _ = await take(machines, taker, manifest, HONEST)
    (path / "notes.txt").write_text("of the user")
    second = await honest.add_local(shutil.copytree(model, tmp_path / "second"), piece_bytes=PIECE_BYTES)
    await taker.need([manifest.digest])
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(
        holdings.shutil, "disk_usage", lambda _: usage._replace(free=0 if manifest.digest in taker.gives() else 1 << 60)
    )
    with pytest.raises(WeightsError, match="is too full for second"):
        await take(machines, taker, second, HONEST)
    monkeypatch.setattr(holdings, "LEFTOVERS_SHARE", 1.0)
    await taker.need([second.digest])
    assert taker.kept_bytes == manifest.num_bytes(~manifest.none())
    path_of_second, _ = await take(machines, taker, second, HONEST)
    assert_whole(path_of_second, model)
    assert (taker.kept_bytes, taker.gives()) == (0, (second.digest,))
    assert [file.name for file in path.iterdir()] == ["notes.txt"]
    monkeypatch.setattr(holdings, "LEFTOVERS_SHARE", 0.0)  # few are kept, even if there is room
    await taker.need([])
    assert taker.gives() == ()
    assert not path_of_second.parent.exists()
    monkeypatch.undo()
    path, _ = await take(machines, taker, manifest, HONEST)
    assert_whole(path, model)


@in_module_loop
async def test_goes_on_where_it_stopped(
    machines: Machines, taker: WeightStore, manifest: Manifest, model: Path, tmp_path: Path
) -> None:
    """Cancelled at half of it, then with a new store in the same directory, as after a restart."""
    told: list[Progress] = []
    half = asyncio.Event()

    def progress(one: Progress) -> None:
        told.append(one)
        if one.done_bytes > 300_000:
            half.set()

    fetching = asyncio.create_task(
        taker.fetch(manifest, EVERYTHING, client=True, givers=machines.givers(HONEST), progress=progress)
    )
    await half.wait()
    fetching.cancel()
    await asyncio.gather(fetching, return_exceptions=True)
    again = await machines.store(TAKER, tmp_path)
    assert again.gives() == (manifest.digest,)
    path, last = await take(machines, again, manifest, HONEST)
    assert_whole(path, model)
    assert (
        told[-1].bytes_from_machines + last.bytes_from_machines <= last.total_bytes + 2 * downloads.AHEAD * PIECE_BYTES
    )
    assert last.bytes_from_machines < last.total_bytes - 250_000


@in_module_loop
async def test_pieces_that_did_not_reach_the_disk_are_taken_again(
    machines: Machines, taker: WeightStore, manifest: Manifest, model: Path, tmp_path: Path
) -> None:
    path, _ = await take(machines, taker, manifest, HONEST)
    (path / ".swarmllm-synced").unlink()  # as if the power went
    weights_file = next(path.glob("*.safetensors"))
    weights_file.write_bytes(bytes(weights_file.stat().st_size))
    again = await machines.store(TAKER, tmp_path)
    other = await machines.store(HOSTILE, tmp_path)
    whole, _ = await take(machines, other, manifest, TAKER, HONEST)
    assert_whole(whole, model)
    assert not other._members.is_banned(machines.peers[TAKER].peer_id)
    path, last = await take(machines, again, manifest, HONEST)
    assert_whole(path, model)
    assert 0 < last.bytes_from_machines <= weights_file.stat().st_size


KILLED = """
import sys
from pathlib import Path
from swarmllm.machines.holdings import PartialModel, WholeModel
from swarmllm.models.checkpoint.pieces import describe

whole = WholeModel(describe(sys.argv[1], piece_bytes=4096))
target = PartialModel(whole.manifest, Path(sys.argv[2]))
print("ready", flush=True)
for piece in range(whole.manifest.num_pieces):
    target.put(piece, whole.read(piece))
    print(piece, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("pieces", [1, 17, 60])
def test_a_process_that_is_killed_has_marked_no_piece_that_is_not_there(
    pieces: int, manifest: Manifest, model: Path, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    writer = subprocess.Popen([sys.executable, "-c", KILLED, model, store], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    for line in writer.stdout:
        if line.strip() == str(pieces):
            break
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    writer.stdout.close()
    found = PartialModel(manifest, store)
    assert pieces < found.held.sum() < manifest.num_pieces
    for piece in np.flatnonzero(found.held).tolist():
        data = found.read(piece)
        assert data is not None
        assert hashlib.sha256(data).digest() == manifest.digest_of(piece)
    before = found.held.sum()
    found.recheck()
    assert found.held.sum() == before
