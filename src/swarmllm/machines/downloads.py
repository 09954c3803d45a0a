"""Take the missing pieces of a model from several machines at once, and from the hub. Called by `WeightStore`.

Each giver has one stream, on which some pieces are asked for ahead; it answers in their order. A piece that comes late
is asked for elsewhere as well. A giver of wrong bytes is told so and banned.

Several machines may want the same piece, and only the hub has it. Then one of them fetches it, and the others take it
from there. They need no leader: each machine tells the others which pieces it wants from the hub, and of those that
want a piece, the one with the lowest hash of (piece, peer id) fetches it. A machine first tells all others, and hears
what they have begun (`claims`), before it begins. One that makes no progress for `STALLED_S` doesn't count any more.
"""

import asyncio
import hashlib
import logging
from collections import deque
from collections.abc import Callable, Container, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from swarmllm.errors import (
    ConfigurationError,
    CorruptWeightsError,
    PeerTimeoutError,
    RemoteProtocolError,
    SwarmError,
    WeightsError,
)
from swarmllm.machines.holdings import PartialModel
from swarmllm.machines.hub import Hub
from swarmllm.models.checkpoint.manifest import MAX_MANIFEST_BYTES, MAX_PIECE_BYTES, Manifest, Pieces
from swarmllm.network.p2p.peer import Peer
from swarmllm.network.wire.messages import WeightsHeader, WeightsResult, parse
from swarmllm.network.wire.protocol import FrameStream, MessageType, hello, raise_error, send_error
from swarmllm.network.wire.stream import Intake
from swarmllm.server.downloads import in_background
from swarmllm.version import __version__

logger = logging.getLogger(__name__)

AHEAD = 4
"""Pieces that are asked for ahead of one giver. Assumed: 4 MiB keep 1 Gbit/s busy at a round trip of 30 ms."""
ANSWER_S = 60.0
"""A giver that answers nothing for so long is left. It may be slow on purpose: `--upload_mbps`."""
LATE_S = 15.0
"""A piece that is under way for so long is asked for elsewhere as well, if nothing else is left to do."""
BAN_S = 600.0
"""A giver of wrong bytes gets no requests for so long."""
AGAIN_S, MOST_AGAIN_S = 5.0, 60.0
"""Seconds until a giver, or the hub, is tried again after it has failed. The hub's double each time."""
LOOK_S = 0.5
"""Seconds between looks at who gives pieces."""
STATE_S = 2.0
"""Seconds between questions about which pieces another machine has."""
IDLE_STATE_S, STATE_S_PER_PIECE = 0.3, 5e-6
"""The same while it has nothing that is wanted; longer for a model of many pieces, as an answer has bits of each."""
STALLED_S = 30.0
"""A machine that has taken nothing from the hub for so long isn't waited for. If nothing at all has come for so long,
no machine is."""
GREETED_S = 10.0
"""Longest wait for the answers of all others before the hub is asked."""
SLOW_S, SLOW_BYTES_PER_S = 20.0, 1e6
"""If machines together give less than that for so long, the hub helps them, also with pieces that they have."""
HUB_READS = 4
"""Requests to the hub at a time. Assumed."""
HUB_BYTES = 16 << 20
"""Bytes of one request to the hub. The machine that fetches a piece also fetches its neighbours in this range."""
MANIFEST_S = 120.0
MAX_SCORES = 64
"""Machines whose hashes are remembered."""


@dataclass(frozen=True)
class Giver:
    """A machine that gives pieces of a model."""

    peer_id: str
    addrs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Progress:
    """How far a fetch is."""

    done_bytes: int
    """Bytes that are here, of those that are needed."""
    total_bytes: int
    bytes_from_machines: int = 0
    bytes_from_hub: int = 0
    problem: str = ""
    """Why nothing comes at present, for people; empty: it goes on."""


class Counted:
    """Counts the bytes of one fetch, and tells its progress."""

    def __init__(self, tell: Callable[[Progress], None]) -> None:
        self._tell = tell
        self.from_machines = self.from_hub = 0

    def tell(self, manifest: Manifest, wanted: Pieces, held: Pieces, problem: str = "") -> None:
        """Tell how many of the wanted pieces are here."""
        done, total = manifest.num_bytes(wanted & held), manifest.num_bytes(wanted)
        self._tell(Progress(done, total, self.from_machines, self.from_hub, problem))


class Members:
    """Opens streams to other machines of the swarm, and remembers those that gave wrong bytes."""

    def __init__(self, peer: Peer, member: str) -> None:
        self.peer_id = peer.peer_id
        self._peer, self._member = peer, member
        self._intake = Intake(MAX_MANIFEST_BYTES + 4 * MAX_PIECE_BYTES)
        self._banned_until: dict[str, float] = {}

    def is_banned(self, peer_id: str) -> bool:
        """True if this machine gave wrong bytes not long ago."""
        return self._banned_until.get(peer_id, 0.0) > asyncio.get_running_loop().time()

    def ban(self, peer_id: str, reason: str) -> None:
        """Take nothing from this machine for some time."""
        logger.warning("%s gave wrong bytes, and is not asked for %.0f s: %s", peer_id, BAN_S, reason)
        self._banned_until[peer_id] = asyncio.get_running_loop().time() + BAN_S

    async def open(self, giver: Giver, max_message_bytes: int) -> FrameStream:
        """A stream to a machine that knows this one as a member.

        Raises:
            SwarmError: it can't be reached, or gives nothing.
        """
        stream = await self._peer.open_stream(giver.peer_id, giver.addrs, max_message_bytes=max_message_bytes)
        stream.count_in(self._intake)
        try:
            await hello(stream, software=__version__, member=self._member)
        except BaseException:
            stream.abort()
            raise
        stream.expect(frozenset({MessageType.RESULT}))
        return stream


async def ask_manifest(members: Members, giver: Giver, digest: str) -> Manifest:
    """Take a manifest from one machine.

    Raises:
        CorruptWeightsError: it gives another one.
        SwarmError: it gives none.
    """
    stream = await members.open(giver, MAX_MANIFEST_BYTES)
    try:
        header = WeightsHeader(id=0, manifest=digest, wants="manifest")
        await stream.send(MessageType.WEIGHTS, header.model_dump())
        _, data = await _answer(stream, 0, MANIFEST_S)
        return await in_background(partial(Manifest.from_bytes, bytes(data), digest))
    finally:
        stream.abort()


async def _answer(stream: FrameStream, number: int, timeout_s: float) -> tuple[WeightsResult, bytearray]:
    """The answer to the request of this number, which must be the next one.

    Raises:
        PeerTimeoutError: it takes too long.
        SwarmError: there is none.
    """
    try:
        async with asyncio.timeout(timeout_s):
            message = await stream.receive()
    except PeerTimeoutError:
        raise
    except TimeoutError:
        raise PeerTimeoutError(f"{stream.peer_id} gave nothing for {timeout_s:g} s", stream.peer_id) from None
    if message.type is MessageType.ERROR:
        raise_error(message.header, stream.peer_id)
    result = parse(WeightsResult, message.header, stream.peer_id)
    if message.type is not MessageType.RESULT or result.id != number:
        raise RemoteProtocolError("an answer to another question", stream.peer_id)
    return result, message.payload


# --- which machine has and wants what


@dataclass
class PeerPieces:
    """The pieces of one other machine, as it has told."""

    has: Pieces
    claims: Pieces
    wants: Pieces
    """Pieces that it wants from the hub, by its answers."""
    asked_for: Pieces
    """The same by its own questions. Answers and questions come on two streams, so either may be older."""
    moved_at: float
    """Time at which `has` or `claims` changed."""
    joined_at: float = 0.0
    """Time at which it came as a taker."""
    is_linked: bool = False
    """True if this machine has a stream to it."""
    num_streams: int = 0


class Board:
    """The pieces of one model that other machines have and want, and those that this one takes from the hub."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self.peers: dict[str, PeerPieces] = {}
        self.claims, self.wants = manifest.none(), manifest.none()
        self._changed = asyncio.Event()
        self._groups = np.arange(manifest.num_pieces) * manifest.piece_bytes // HUB_BYTES
        self._scores: dict[str, npt.NDArray[np.uint64]] = {}

    def notify(self) -> None:
        """Wake all who wait for a change."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def change(self, timeout_s: float) -> None:
        """Wait for a change, not longer than this."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()

    def packed(self, *pieces: Pieces) -> bytes:
        """One bit for each piece."""
        return b"".join(np.packbits(one).tobytes() for one in pieces)

    def unpacked(self, data: bytes, peer_id: str, count: int = 1) -> list[Pieces]:
        """The same from a peer's bytes.

        Raises:
            RemoteProtocolError: there are more or fewer.
        """
        num_bytes = -(-self.manifest.num_pieces // 8)
        if len(data) != count * num_bytes:
            raise RemoteProtocolError("a machine tells of another number of pieces than the model has", peer_id)
        rows = np.unpackbits(np.frombuffer(data, np.uint8).reshape(count, num_bytes), axis=1)
        return [row.astype(np.bool_) for row in rows[:, : self.manifest.num_pieces]]

    def of(self, peer_id: str) -> PeerPieces:
        """The pieces of a machine, of which nothing may be known yet."""
        none = self.manifest.none
        if peer_id not in self.peers:
            now = asyncio.get_running_loop().time()
            self.peers[peer_id] = PeerPieces(none(), none(), none(), none(), now)
        return self.peers[peer_id]

    def wants_of(self, peer_id: str, wants: Pieces) -> None:
        """Note the pieces that a taker wants from the hub."""
        peer = self.of(peer_id)
        if not peer.asked_for.any():
            peer.moved_at = asyncio.get_running_loop().time()
        peer.asked_for = wants
        self.notify()

    def joined(self, peer_id: str) -> None:
        """Note a stream of a taker."""
        peer = self.of(peer_id)
        peer.num_streams += 1
        peer.joined_at = asyncio.get_running_loop().time()
        self.notify()

    def left(self, peer_id: str) -> None:
        """Note the end of such a stream."""
        peer = self.of(peer_id)
        peer.num_streams -= 1
        if peer.num_streams:
            return
        peer.asked_for = self.manifest.none()
        if not peer.is_linked:
            del self.peers[peer_id]
        self.notify()

    def told(self, peer_id: str, has: Pieces, claims: Pieces, wants: Pieces) -> None:
        """Note the answer of a giver."""
        peer = self.of(peer_id)
        if not (np.array_equal(peer.has, has) and np.array_equal(peer.claims, claims)):
            peer.moved_at = asyncio.get_running_loop().time()
        peer.has, peer.claims, peer.wants = has, claims, wants
        self.notify()

    def unlinked(self, peer_id: str) -> None:
        """Note that the stream to a giver has ended."""
        peer = self.peers.get(peer_id)
        if peer is None:
            return
        peer.is_linked, none = False, self.manifest.none
        peer.has, peer.claims, peer.wants = none(), none(), none()
        if not peer.num_streams:
            del self.peers[peer_id]
        self.notify()

    def from_hub(self, own_id: str, missing: Pieces, now: float, *, are_slow: bool = False) -> Pieces:
        """The missing pieces that this machine should fetch from the hub. `are_slow`: also pieces that others have."""
        found, own = missing.copy(), self._scores_of(own_id)
        for peer_id, peer in self.peers.items():
            if not are_slow:
                found &= ~peer.has
            if now - peer.moved_at < STALLED_S:
                wants = (peer.wants | peer.asked_for) & ~peer.has
                found &= ~(peer.claims | (wants & (self._scores_of(peer_id) < own)))
        return found

    def _scores_of(self, peer_id: str) -> npt.NDArray[np.uint64]:
        if peer_id not in self._scores:
            if len(self._scores) > MAX_SCORES:
                self._scores.clear()
            self._scores[peer_id] = _scores(peer_id, self._groups)
        return self._scores[peer_id]


def _scores(peer_id: str, groups: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """A hash of each (group of pieces, peer id): the machine with the lowest one fetches the group."""
    seed = np.uint64(int.from_bytes(hashlib.sha256(peer_id.encode()).digest()[:8], "little"))
    mixed = (groups.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) ^ seed
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)  # splitmix64 (Steele et al. 2014)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


# --- taking


class Download:
    """Takes the missing ones of some pieces of one model."""

    def __init__(
        self,
        model: PartialModel,
        wanted: Pieces,
        board: Board,
        members: Members,
        hub: Hub | None,
        counted: Counted,
    ) -> None:
        self._model, self._wanted, self._board, self._members = model, wanted, board, members
        self._hub = hub if model.manifest.commit else None
        self._counted = counted
        self._asked_at: dict[int, float] = {}
        """Piece under way from a machine → the time when it was asked for."""
        self._under_way = model.manifest.none()
        self._attention = asyncio.Event()
        self._failed_at: dict[str, float] = {}
        self._greeted: set[str] = set()
        self.given: dict[int, str] = {}
        """Piece → peer id of the machine that gave it."""
        self._writing = 0
        """Pieces, and runs of pieces of the hub, that are being written."""
        self._alone = self._ended = False
        self._failure: BaseException | None = None
        self._problem = ""
        self._looked_at = self._now(), counted.from_machines
        """The time, and the bytes from machines until then."""
        self._slow = False
        self._arrived_at = self._now()
        self._random = np.random.default_rng()

    @property
    def _missing(self) -> Pieces:
        return self._wanted & ~self._model.held

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    async def run(self, givers: Callable[[], Sequence[Giver]], *, alone: bool = False) -> None:
        """Return when all pieces are here. `alone`: take them from the hub only.

        Raises:
            WeightsError: the disk is full, or fails.
        """
        self._alone, self._ended = alone, False
        self._tell()
        if not self._missing.any():
            return
        if self._hub is not None:
            self._board.wants = self._missing
        tasks: dict[str, asyncio.Task[None]] = {}
        from_hub: list[asyncio.Task[None]] = []
        begin = self._now()
        try:
            while (self._missing.any() or self._writing) and self._failure is None:
                known = {giver.peer_id: giver for giver in givers()}
                known |= {peer_id: Giver(peer_id) for peer_id in self._board.peers if peer_id not in known}
                known.pop(self._members.peer_id, None)
                if alone:
                    known.clear()
                for peer_id, giver in known.items():
                    if (peer_id not in tasks or tasks[peer_id].done()) and self._may_ask(peer_id):
                        tasks[peer_id] = self._task(self._take_from(giver))
                all_greeted = self._greeted >= {peer_id for peer_id in known if self._may_ask(peer_id)}
                if self._hub is not None and not from_hub and (all_greeted or self._now() > begin + GREETED_S):
                    from_hub = [self._task(self._take_from_hub(self._hub)) for _ in range(HUB_READS)]
                self._say_if_alone(known)
                await self._look_again()
            if self._failure is not None:
                raise self._failure
        finally:
            self._ended = True
            self._board.wants = self._model.manifest.none()
            for task in (*tasks.values(), *from_hub):
                task.cancel()
            await asyncio.gather(*tasks.values(), *from_hub, return_exceptions=True)

    def _task(self, taking: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Begin to take; an error that is no peer's ends the download."""

        def ended(task: "asyncio.Task[None]") -> None:
            if not task.cancelled() and (error := task.exception()) is not None:
                self._failure = error
            self._attention.set()

        task = asyncio.create_task(taking)
        task.add_done_callback(ended)
        return task

    async def _look_again(self) -> None:
        """Wait until something needs attention, or for some time."""
        self._attention.clear()
        if self._failure is None and (self._missing.any() or self._writing):
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._attention.wait()

    def _say_if_alone(self, known: Mapping[str, Giver]) -> None:
        problem = "" if known or self._hub else f"no machine gives {self._model.manifest.name} at present"
        if not self._hub and problem != self._problem:
            self._problem = problem
            self._tell()

    def _may_ask(self, peer_id: str) -> bool:
        """False for a while after it has failed, unless it came here meanwhile."""
        if self._members.is_banned(peer_id):
            return False
        failed_at, peer = self._failed_at.get(peer_id), self._board.peers.get(peer_id)
        came = peer is not None and failed_at is not None and peer.joined_at > failed_at
        return failed_at is None or came or self._now() > failed_at + AGAIN_S

    def _tell(self) -> None:
        self._counted.tell(self._model.manifest, self._wanted, self._model.held, self._problem)

    async def _take_from(self, giver: Giver) -> None:
        """Take pieces from one machine until nothing is missing, or it fails."""
        peer_id = giver.peer_id
        try:
            stream = await self._members.open(giver, 2 * MAX_PIECE_BYTES)
            link = _Link(stream, self._board, self._model.manifest)
            try:
                await link.ask_state()
                self._board.of(peer_id).is_linked = True
                await self._use(link)
            except CorruptWeightsError as error:
                self._members.ban(peer_id, str(error))
                await send_error(stream, error)
                await stream.close()
            finally:
                stream.abort()
                for piece in link.pieces:
                    self._released(piece)
                self._board.unlinked(peer_id)
        except (SwarmError, OSError) as error:
            logger.info("%s gives no more pieces: %s", peer_id, error)
            self._failed_at[peer_id] = self._now()
        self._greeted.add(peer_id)

    async def _use(self, link: "_Link") -> None:
        """Ask for pieces ahead, and for the state now and then; take the answers in their order."""
        peer = self._board.of(link.peer_id)
        idle_s = IDLE_STATE_S + STATE_S_PER_PIECE * self._model.manifest.num_pieces
        while self._failure is None and self._missing.any():
            while len(link.pieces) < AHEAD and (piece := self._next(peer, link.pieces)) is not None:
                self._asked_at[piece], self._under_way[piece] = self._now(), True
                await link.ask("piece", piece)
            age = self._now() - link.asked_state_at
            if not link.awaits_state and age > (STATE_S if link.pieces else idle_s):
                await link.ask_state()
            if not link.awaited:
                await self._board.change(idle_s)
                continue
            piece, data = await link.answer()
            if piece is None:
                self._greeted.add(link.peer_id)
                self._attention.set()
            elif data is None:
                peer.has[piece] = False
                self._released(piece)
            elif not await self._arrived(piece, data, link.peer_id):
                raise CorruptWeightsError(f"piece {piece} of {self._model.manifest.name} isn't what its digest says")

    def _next(self, peer: PeerPieces, asked: Container[int]) -> int | None:
        """A missing piece that this machine has, and that isn't `asked` for yet there: any of them, so that machines
        which take the same ones have different ones to exchange."""
        wanted = self._missing & peer.has & ~self._board.claims
        free = np.flatnonzero(wanted & ~self._under_way)
        if len(free):
            return int(free[self._random.integers(len(free))])
        before = self._now() - LATE_S
        late = (piece for piece, at in self._asked_at.items() if at < before and wanted[piece] and piece not in asked)
        return next(late, None)

    def _released(self, piece: int) -> None:
        self._asked_at.pop(piece, None)
        self._under_way[piece] = False

    async def _arrived(self, piece: int, data: bytes | bytearray, giver: str) -> bool:
        """Verify, write and count a piece. False: it is wrong."""
        self._writing += 1
        was_missing = not self._model.held[piece]  # it may have come from elsewhere
        try:
            if not await in_background(partial(self._model.put, piece, data)):
                return False
        except WeightsError as error:
            self._failure = error  # of the disk, not of the giver
            return True
        finally:
            self._writing -= 1
            self._released(piece)
            self._board.notify()
            if self._failure is not None or not self._missing.any():
                self._attention.set()
        if was_missing:
            self._counted.from_machines += len(data)
            self.given[piece] = giver
        self._arrived_at, self._problem = self._now(), ""
        self._tell()
        return True

    async def _take_from_hub(self, hub: Hub) -> None:
        """Fetch pieces that no machine has, and that no other machine should fetch."""
        pause_s = AGAIN_S
        while self._failure is None and self._missing.any():
            run = self._claim()
            if not run:  # others fetch it, or give it
                await asyncio.sleep(LOOK_S)
                continue
            self._writing += 1
            try:
                await in_background(partial(self._read_from_hub, hub, run, asyncio.get_running_loop()))
                self._problem, self._board.wants, pause_s = "", self._missing, AGAIN_S
                continue
            except ConfigurationError as error:
                logger.warning("%s", error)
                self._problem, self._board.wants = str(error), self._model.manifest.none()  # others needn't wait
                self._tell()
            finally:
                self._writing -= 1
                self._board.claims[run] = False
                self._board.notify()
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MOST_AGAIN_S)

    def _read_from_hub(self, hub: Hub, run: Sequence[int], loop: asyncio.AbstractEventLoop) -> None:
        """Read, verify and write pieces, in a thread."""
        manifest = self._model.manifest
        place = manifest.place(run[0])
        num_bytes = sum(manifest.place(piece).num_bytes for piece in run)
        for piece, data in zip(run, hub.read(manifest, place.file.name, place.start, num_bytes), strict=True):
            if self._ended:
                return
            if not self._model.put(piece, data):
                raise ConfigurationError(f"the hub has other bytes of {manifest.name} than its manifest says")
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._came_from_hub, len(data))

    def _came_from_hub(self, num_bytes: int) -> None:
        self._counted.from_hub += num_bytes
        self._arrived_at = self._now()
        self._tell()
        self._board.notify()

    def _are_machines_slow(self) -> bool:
        """True if so little came from machines lately that the hub should help them."""
        now, num_bytes = self._now(), self._counted.from_machines
        since, before = self._looked_at
        if now - since >= SLOW_S:
            self._slow = num_bytes - before < SLOW_BYTES_PER_S * (now - since)
            self._looked_at = now, num_bytes
        return self._slow

    def _claim(self) -> list[int]:
        """Pieces one after the other in a file that this machine fetches now."""
        manifest = self._model.manifest
        wanted, slow = self._missing & ~self._board.claims, self._are_machines_slow()
        if not slow:
            wanted &= ~self._under_way
        is_stuck = self._now() - self._arrived_at > STALLED_S  # whatever others claim
        if not self._alone and not is_stuck:
            wanted = self._board.from_hub(self._members.peer_id, wanted, self._now(), are_slow=slow)
        found = np.flatnonzero(wanted)
        if not len(found):
            return []
        first = int(found[0])
        most = max(1, HUB_BYTES // manifest.piece_bytes)
        end = first + 1
        while (
            end < len(wanted)
            and wanted[end]
            and end - first < most
            and manifest.place(end).number == manifest.place(first).number
        ):
            end += 1
        self._board.claims[first:end] = True
        return list(range(first, end))


class _Link:
    """The stream to one giver, and the requests that it hasn't answered yet."""

    def __init__(self, stream: FrameStream, board: Board, manifest: Manifest) -> None:
        self.peer_id = stream.peer_id
        self._stream, self._board, self._manifest = stream, board, manifest
        self.awaited: deque[tuple[int, int | None]] = deque()
        """(number of the request, its piece; None: the state)."""
        self._number = 0
        self.asked_state_at = 0.0

    @property
    def pieces(self) -> list[int]:
        return [piece for _, piece in self.awaited if piece is not None]

    @property
    def awaits_state(self) -> bool:
        return any(piece is None for _, piece in self.awaited)

    async def ask_state(self) -> None:
        """Ask which pieces the machine has, and tell which ones are wanted from the hub."""
        self.asked_state_at = asyncio.get_running_loop().time()
        await self.ask("state", payload=self._board.packed(self._board.wants))

    async def ask(self, wants: str, piece: int | None = None, payload: bytes = b"") -> None:
        self._number += 1
        self.awaited.append((self._number, piece))
        header = {"id": self._number, "manifest": self._manifest.digest, "wants": wants, "piece": piece or 0}
        await self._stream.send(MessageType.WEIGHTS, header, [payload] if payload else [])

    async def answer(self) -> tuple[int | None, bytearray | None]:
        """The next answer: (piece, its bytes, or None if it isn't there); (None, None) for the state, which is noted.

        Raises:
            SwarmError: it is wrong, or takes too long.
        """
        number, piece = self.awaited[0]
        result, data = await _answer(self._stream, number, ANSWER_S)
        self.awaited.popleft()
        if piece is not None:
            return piece, data if result.is_here else None
        self._board.told(self.peer_id, *self._board.unpacked(bytes(data), self.peer_id, 3))
        return None, None
