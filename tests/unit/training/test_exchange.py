"""Bytes that members ask each other for, without a network."""

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest

from swarmllm.errors import RemoteProtocolError
from swarmllm.network.wire.frames import MessageType
from swarmllm.training import exchange as exchange_module
from swarmllm.training.differences import SharedState, most_packed_bytes, quantize
from swarmllm.training.exchange import MAX_REPEATS, MAX_WAITING, Counts, Exchange
from swarmllm.training.rounds import Offer, WantHeader

DIFFERENCE = quantize(np.ones(8, np.float32))
ENTRY = "1" * 52, "a" * 64, "b" * 64
STATE = SharedState.initial(np.arange(20.0))


def with_threads(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run the test in a loop that ends its threads, too."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


class Stream:
    """To another exchange, or to nobody. Notes what is sent."""

    def __init__(self, peer_id: str = "asks", answer: Callable[[WantHeader], bytes] | None = None) -> None:
        self.peer_id, self._answer = peer_id, answer
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.sent: list[tuple[MessageType, bytes]] = []
        self.wanted: list[WantHeader] = []
        self.asker: Exchange | None = None
        self.opened = asyncio.Event()
        self.opened.set()

    async def send(self, kind: MessageType, header: dict[str, Any], chunks: Any = ()) -> None:
        await self.opened.wait()
        if kind is MessageType.WANT:
            want = WantHeader.model_validate(header)
            self.wanted.append(want)
            assert self.asker is not None
            assert self._answer is not None
            self.asker.take_answer(self.peer_id, want, self._answer(want))
        else:
            self.sent.append((kind, b"".join(map(bytes, chunks))))


def here(*, states: int = 1) -> Exchange:
    """One that has a difference and a state."""
    found = Exchange({}, Counts(), b'["common"]')
    found.differences[ENTRY] = (
        Offer(run="2" * 52, peer_id=ENTRY[0], round=0, base=ENTRY[1], sha256=ENTRY[2]),
        DIFFERENCE,
    )
    for number in range(states):
        found.begin_round(f"{number:064x}", STATE, {ENTRY})
    return found


@with_threads
async def test_the_same_question_is_answered_some_times_in_a_round() -> None:
    """A member that asks without end gets no more bytes, and an answer that says so."""
    one, stream = here(), Stream()
    difference, state = WantHeader(difference=ENTRY), WantHeader(state=f"{0:064x}")
    for want, expected in (
        (difference, (MessageType.DIFFERENCE, DIFFERENCE.packed())),
        (state, (MessageType.STATE, STATE.packed())),
    ):
        stream.sent.clear()
        for _ in range(MAX_REPEATS + 3):
            await one.take_question(stream, want)  # type: ignore[arg-type]
        assert stream.sent == [expected] * MAX_REPEATS + [(MessageType.STATE, b"")] * 3
    one.begin_round(f"{1:064x}", STATE, {ENTRY})
    await one.take_question(stream, difference)  # type: ignore[arg-type]
    assert stream.sent[-1][0] is MessageType.DIFFERENCE


@pytest.mark.parametrize(
    "want",
    [
        WantHeader(),
        WantHeader(difference=("3" * 52, *ENTRY[1:])),
        WantHeader(state="c" * 64),
        WantHeader(state=f"{0:064x}", offset=1),
        WantHeader(state=f"{0:064x}", offset=exchange_module.PIECE_BYTES),
    ],
    ids=["nothing", "another home", "another state", "within a piece", "behind the end"],
)
@with_threads
async def test_invented_questions_bring_nothing_and_leave_nothing(want: WantHeader) -> None:
    one, stream = here(), Stream()
    await one.take_question(stream, want)  # type: ignore[arg-type]
    assert stream.sent == [(MessageType.STATE, b"")]
    assert not one._sent


@with_threads
async def test_a_member_that_asks_and_never_reads_is_refused() -> None:
    one, stream, other = here(), Stream(), Stream("another")
    stream.opened.clear()
    want = WantHeader(difference=ENTRY)
    tasks = [asyncio.create_task(one.take_question(stream, want)) for _ in range(MAX_WAITING)]  # type: ignore[arg-type]
    with pytest.raises(RemoteProtocolError, match="more than a round has"):
        one.take_question(stream, want)  # type: ignore[arg-type]
    await one.take_question(other, want)  # type: ignore[arg-type]
    assert other.sent == [(MessageType.DIFFERENCE, DIFFERENCE.packed())]
    stream.opened.set()
    await asyncio.gather(*tasks)
    assert len(stream.sent) == MAX_WAITING
    await one.take_question(stream, want)  # type: ignore[arg-type]


def asking(answer: Callable[[WantHeader], bytes]) -> tuple[Exchange, Stream]:
    stream = Stream("holder", answer)
    stream.asker = Exchange({"holder": stream}, Counts(), b"")  # type: ignore[dict-item]
    return stream.asker, stream


WHOLE = STATE.packed()
DIVISOR = next(size for size in range(2, len(WHOLE) + 1) if len(WHOLE) % size == 0)


@pytest.mark.parametrize("size", [7, DIVISOR, len(WHOLE), len(WHOLE) + 1])
@with_threads
async def test_states_come_in_pieces_of_any_length(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Also if the last piece is as long as the others."""
    monkeypatch.setattr(exchange_module, "PIECE_BYTES", size)
    one, stream = asking(lambda want: WHOLE[want.offset : want.offset + size])
    found = await one.state_of("holder", STATE.digest(), STATE.values.size)
    assert found is not None
    assert found.digest() == STATE.digest()
    assert len(stream.wanted) == len(WHOLE) // size + 1


@with_threads
async def test_a_holder_without_end_or_with_another_state_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange_module, "PIECE_BYTES", 1 << 18)
    one, stream = asking(lambda _: bytes(1 << 18))
    assert await one.state_of("holder", STATE.digest(), STATE.values.size) is None
    assert len(stream.wanted) * (1 << 18) < most_packed_bytes(STATE.values.size) + (1 << 18)
    for data in (b"", b"x", STATE.packed()):
        one, _ = asking(lambda _, data=data: data)  # type: ignore[misc]
        assert await one.state_of("holder", "d" * 64, STATE.values.size) is None
    assert await one.state_of("nobody", STATE.digest(), STATE.values.size) is None


@with_threads
async def test_common_texts_are_those_of_the_digest() -> None:
    texts = b'["one","two"]'
    one, _ = asking(lambda _: texts)
    digest = exchange_module.common_texts.digest(texts)
    assert digest is not None
    assert await one.texts_of("holder", digest) == texts
    assert await one.texts_of("holder", "d" * 64) is None
