"""The machine that fetches a piece from the hub, of several that want it; and how bytes are spread over time."""

import asyncio
from collections.abc import Container

import numpy as np
import pytest

from swarmllm.errors import RemoteProtocolError
from swarmllm.machines import downloads
from swarmllm.machines.downloads import Board
from swarmllm.machines.weights import Pace
from swarmllm.models.checkpoint.manifest import Manifest, ManifestFile

NAMES = ("first", "second", "third")
MANIFEST = Manifest(
    name="owner/model",
    piece_bytes=1 << 20,
    files=(ManifestFile(name="a", size=2000 << 20),),
    commit="c" * 40,
    repository="owner/model",
)


def boards() -> dict[str, Board]:
    """Those of three machines, each of which wants all pieces and has heard so of the others."""
    found = {name: Board(MANIFEST) for name in NAMES}
    for name, board in found.items():
        board.wants = ~MANIFEST.none()
        for other in {*NAMES} - {name}:
            board.wants_of(other, ~MANIFEST.none())
    return found


@pytest.mark.asyncio
async def test_each_piece_is_fetched_by_one_machine() -> None:
    parts = {name: board.from_hub(name, ~MANIFEST.none(), 0.0) for name, board in boards().items()}
    assert (sum(part.astype(int) for part in parts.values()) == 1).all()
    assert all(part.sum() > 200 for part in parts.values())
    neighbours = parts["first"].reshape(-1, downloads.HUB_BYTES >> 20)
    assert (neighbours.all(1) | ~neighbours.any(1)).all()


@pytest.mark.asyncio
async def test_pieces_that_others_have_or_fetch_are_left_to_them() -> None:
    board, none = boards()["first"], MANIFEST.none()
    own = board.from_hub("first", ~none, 0.0)
    first_half = none.copy()
    first_half[:1000] = True
    board.told("second", first_half, none, none)
    assert np.array_equal(board.from_hub("first", ~none, 0.0), board.from_hub("first", ~first_half, 0.0))
    assert not board.from_hub("first", ~none, 0.0)[:1000].any()
    board.told("second", none, first_half, none)
    assert not board.from_hub("first", ~none, 0.0)[:1000].any()
    for other in ("second", "third"):
        board.told(other, none, none, none)  # an answer may be older than the question before it
    assert np.array_equal(board.from_hub("first", ~none, 0.0), own)
    for other in ("second", "third"):
        board.wants_of(other, none)
    assert board.from_hub("first", ~none, 0.0).all()
    assert not own.all()


@pytest.mark.asyncio
async def test_machines_that_stand_still_are_not_waited_for() -> None:
    board = boards()["first"]
    moved_at = max(peer.moved_at for peer in board.peers.values())
    assert not board.from_hub("first", ~MANIFEST.none(), moved_at + downloads.STALLED_S / 2).all()
    assert board.from_hub("first", ~MANIFEST.none(), moved_at + downloads.STALLED_S + 1).all()


@pytest.mark.asyncio
async def test_a_taker_that_leaves_is_forgotten() -> None:
    board = Board(MANIFEST)
    for _ in range(2):
        board.joined("second")
        board.wants_of("second", ~MANIFEST.none())
    board.left("second")
    assert board.peers["second"].asked_for.all()
    board.left("second")
    assert not board.peers


@pytest.mark.asyncio
async def test_bits_of_another_number_of_pieces_are_refused() -> None:
    board = Board(MANIFEST)
    pieces = np.random.default_rng(0).random(MANIFEST.num_pieces) < 0.5
    assert all(np.array_equal(one, pieces) for one in board.unpacked(board.packed(pieces, pieces), "x", 2))
    for data in (b"", board.packed(pieces) + b"x", board.packed(pieces, pieces)):
        with pytest.raises(RemoteProtocolError, match="another number of pieces"):
            board.unpacked(data, "x")


class Clock(asyncio.SelectorEventLoop):
    """A loop whose time passes only when everybody waits."""

    now = 0.0

    def time(self) -> float:
        return self.now

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:  # type: ignore[attr-defined]
            self.now = max(self.now, self._scheduled[0]._when)  # type: ignore[attr-defined]
        super()._run_once()  # type: ignore[misc]


async def sent_at(pace: Pace, *sizes: int, gone: Container[int] = ()) -> list[float]:
    """The times at which takers that came together got their bytes; those in `gone` go at once."""
    loop, times = asyncio.get_running_loop(), []

    async def take(number: int, size: int) -> None:
        left: asyncio.Future[None] = loop.create_future()
        if number in gone:
            loop.call_soon(left.set_result, None)
        await pace.wait(size, left)
        times.append(round(loop.time(), 3))

    await asyncio.gather(*(take(number, size) for number, size in enumerate(sizes)))
    return times


def test_all_takers_share_the_upload() -> None:
    """8 Mbit/s are a megabyte a second."""
    with asyncio.Runner(loop_factory=Clock) as runner:
        assert runner.run(sent_at(Pace(8.0), *[1_000_000] * 4)) == [0, 1, 2, 3]
        assert len(set(runner.run(sent_at(Pace(None), *[1_000_000] * 4)))) == 1


def test_a_taker_that_goes_takes_no_share_of_the_upload() -> None:
    with asyncio.Runner(loop_factory=Clock) as runner:
        pace = Pace(8.0)
        runner.run(sent_at(pace, 1_000_000, 500_000_000, gone={1}))
        start = runner.get_loop().time()
        assert runner.run(sent_at(pace, 1_000_000))[0] - start <= 1
