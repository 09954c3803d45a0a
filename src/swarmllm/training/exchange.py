"""Bytes that members ask each other for: differences that didn't reach all, shared states, the common texts.

Nobody can make a member work or remember without bounds by asking: it answers one question of each member after the
other, has few of them waiting, and sends the same bytes a few times in a round.
"""

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from swarmllm.errors import RemoteProtocolError, SwarmError
from swarmllm.network.wire.frames import MessageType
from swarmllm.network.wire.protocol import FrameStream
from swarmllm.training import common_texts
from swarmllm.training.differences import Difference, SharedState, most_packed_bytes
from swarmllm.training.rounds import MAX_CHOSEN, Entry, Offer, StateHeader, WantHeader

logger = logging.getLogger(__name__)

FETCH_S = 60.0
"""Longest wait for a difference, or for a piece of a state. Assumed: a home's uplink of 10 Mbit/s sends 75 MB in it."""
PIECE_BYTES = 16 << 20
MAX_REPEATS = 4
"""Most times that a member gets the same bytes in one round: streams may be lost, but a flood gets no answer."""
MAX_WAITING = MAX_CHOSEN + 1
"""Most questions of a member that wait: one for each difference of a round, and one for a state."""


@dataclass
class Counts:
    """Bytes of differences and states so far, and rounds."""

    sent_bytes: int = 0
    received_bytes: int = 0
    rounds: int = 0
    refused: list[str] = field(default_factory=list)
    """Members whose difference was refused since the last round."""


class Exchange:
    """What is here for others, and questions to them."""

    def __init__(self, streams: Mapping[str, FrameStream], counts: Counts, texts: bytes) -> None:
        self._streams, self._counts = streams, counts
        self.texts = texts
        """The common texts; empty until others have sent them."""
        self.differences: dict[Entry, tuple[Offer, Difference]] = {}
        self._states: dict[str, SharedState] = {}
        """The newest states by digest: the own one and the one before."""
        self._packed: tuple[str, bytes] = "", b""
        """The bytes of the state that was asked for last."""
        self._waiting: Counter[str] = Counter()
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._sent: Counter[tuple[str, WantHeader]] = Counter()
        """Answers in this round."""
        self._answers: dict[tuple[str, WantHeader], asyncio.Future[bytes]] = {}
        """Questions to members that wait for an answer."""

    def begin_round(self, digest: str, state: SharedState, needed: Iterable[Entry]) -> None:
        """Keep this state, which is the own one now, and the needed differences."""
        self._states = dict([*self._states.items(), (digest, state)][-2:])
        kept = set(needed)
        self.differences = {entry: one for entry, one in self.differences.items() if entry in kept}
        self._sent.clear()

    # Answers

    def take_question(self, stream: FrameStream, want: WantHeader) -> Coroutine[Any, Any, None]:
        """Note a question. The coroutine, which must be run, sends what is wanted, or that it isn't here.

        Raises:
            RemoteProtocolError: too many questions of this member wait.
        """
        if self._waiting[stream.peer_id] >= MAX_WAITING:
            raise RemoteProtocolError("a member asks for more than a round has", stream.peer_id)
        self._waiting[stream.peer_id] += 1
        return self._in_turn(stream, want)

    async def _in_turn(self, stream: FrameStream, want: WantHeader) -> None:
        try:
            async with self._turns[stream.peer_id]:
                await self._answer(stream, want)
        finally:
            self._waiting[stream.peer_id] -= 1

    async def _answer(self, stream: FrameStream, want: WantHeader) -> None:
        whole = b""
        if want.difference is None and want.state is not None and want.offset % PIECE_BYTES == 0:
            whole = await self._bytes_of(want.state)
        is_here = want.difference in self.differences or want.offset < len(whole)
        if is_here:  # only these are counted: no member can invent endless others
            self._sent[stream.peer_id, want] += 1
        if not is_here or self._sent[stream.peer_id, want] > MAX_REPEATS:
            await self._send_bytes(stream, want, b"")
        elif want.difference is not None:
            await self.send_difference(stream, want.difference)
        else:
            await self._send_bytes(stream, want, whole)

    async def _bytes_of(self, digest: str) -> bytes:
        """A state, or the common texts; empty if they aren't here."""
        if digest == common_texts.digest(self.texts):
            return self.texts
        state = self._states.get(digest)
        if state is not None and self._packed[0] != digest:
            self._packed = digest, await asyncio.to_thread(state.packed)
        return self._packed[1] if self._packed[0] == digest else b""

    async def _send_bytes(self, stream: FrameStream, want: WantHeader, whole: bytes) -> None:
        piece = memoryview(whole)[want.offset : want.offset + PIECE_BYTES]
        header = StateHeader(difference=want.difference, digest=want.state, offset=want.offset, total=len(whole))
        self._counts.sent_bytes += len(piece)
        await stream.send(MessageType.STATE, header.model_dump(), [piece])

    async def send_difference(self, stream: FrameStream, entry: Entry) -> None:
        """Send it, if it is here."""
        if (kept := self.differences.get(entry)) is not None:
            payload = await asyncio.to_thread(kept[1].packed)
            self._counts.sent_bytes += len(payload)
            await stream.send(MessageType.DIFFERENCE, kept[0].model_dump(), [payload])

    # Questions

    async def ask(self, holder: str, want: WantHeader) -> bytes | None:
        """Send a question, and wait for its answer; None: it doesn't come."""
        stream = self._streams.get(holder)
        if stream is None:
            return None
        answer = self._answers[holder, want] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(FETCH_S):
                await stream.send(MessageType.WANT, want.model_dump())
                await asyncio.wait([answer, stream.gone], return_when=asyncio.FIRST_COMPLETED)
                return answer.result() if answer.done() else None
        except (SwarmError, TimeoutError) as error:
            logger.info("%s didn't send what was asked for: %s", holder, error)
            return None
        finally:
            self._answers.pop((holder, want), None)

    async def state_of(self, holder: str, digest: str, size: int) -> SharedState | None:
        """Ask for the state with this digest, of `size` values, piece by piece; None: this member doesn't send it."""
        data = bytearray()
        while len(data) < most_packed_bytes(size):
            piece = await self.ask(holder, WantHeader(state=digest, offset=len(data))) or b""
            data += piece
            if len(piece) != PIECE_BYTES:
                break
        try:
            state = await asyncio.to_thread(SharedState.unpack, data, size, holder)
        except RemoteProtocolError:
            return None
        return state if await asyncio.to_thread(state.digest) == digest else None

    async def texts_of(self, holder: str, digest: str) -> bytes | None:
        """Ask for the common texts with this digest; None: this member doesn't send them."""
        data = await self.ask(holder, WantHeader(state=digest)) or b""
        try:
            common_texts.unpacked(data, digest, holder)
        except RemoteProtocolError:
            return None
        return data

    def take_answer(self, holder: str, want: WantHeader, data: bytes = b"") -> None:
        """Give an answer to the question that waits for it."""
        future = self._answers.pop((holder, want), None)
        if future is not None and not future.done():
            future.set_result(data)
