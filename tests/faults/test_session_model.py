"""The server's sessions against a plain model of them: whatever clients do, in any order, nothing is lost or leaked.

A machine of hypothesis plays several clients of one server: they open sessions, step, roll back, choose rows, replay,
link one session to another, run out of memory, send what is wrong, close, or leave in the midst of a step. What they
get is compared with a forward of all that they have sent, and what is leased with what the sessions may have.
"""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest
import torch
from hostile import (
    SERVER,
    Server,
    answer,
    ask,
    error_code,
    hang_up,
    held_bytes,
    load_blocks,
    open_header,
    result,
    send,
    step_header,
)
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from swarm_models import save_llama
from torch import Tensor

from swarmllm.data_structures import Span
from swarmllm.models.boundary.block_inputs import BlockInputs
from swarmllm.models.span.block_span import BlockSpan
from swarmllm.network.wire.protocol import FrameStream, Message, MessageType
from swarmllm.server.sessions.kv_cache import BESIDE_BYTES, INPUTS_FACTOR
from swarmllm.server.sessions.prefix_cache import PrefixCache

T = TypeVar("T")

HIDDEN = 16
LONGEST = 160
CACHE_TOKENS = 600
"""Tokens in the server's cache: room for some sessions of the longest text, not for all."""
PEERS = [f"12D3KooW{number:044d}" for number in range(3)]
SPANS = [Span(0, 2), Span(0, 1), Span(1, 2)]
PEER, WHICH = st.integers(0, 2), st.integers(0, 50)
ROWS = st.sampled_from([1, 1, 1, 2, 3])
SELDOM = st.sampled_from([False, False, False, True])
STEP = st.tuples(
    st.sampled_from([0, 0, 0, 0, 1, 30, LONGEST]),  # positions to roll back
    st.sampled_from([1, 2, 17, 40, 64]),  # new ones
    st.integers(0, 1),  # of this text
    st.none() | st.none() | st.lists(st.integers(0, 3), max_size=3),  # rows that are chosen
    st.sampled_from([None, 1, 1, 2, 3]),  # rows of a text that begins
)
STEPS = st.lists(STEP, min_size=1, max_size=8)
LENGTHS = [1, 40, LONGEST, LONGEST, 10_000]


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> BlockSpan:
    """Two blocks of three, so that sessions keep what they send on."""
    torch.set_num_threads(1)
    directory = tmp_path_factory.mktemp("sessions") / "checkpoint"
    return load_blocks(save_llama(directory, num_blocks=3, hidden_size=HIDDEN, intermediate_size=HIDDEN), Span(0, 2))


@dataclass(eq=False)
class Known:
    """A session as its client knows it."""

    id: str
    peer: int
    stream: FrameStream
    span: Span
    num_rows: int
    max_length: int
    seen: Tensor = field(default_factory=lambda: torch.zeros(1, 0, HIDDEN))
    """Inputs that were sent and answered, `[rows, positions, hidden]`."""
    rows: int = 0
    """How often rows have been chosen."""
    next: "Known | None" = None
    """To which it is linked."""
    is_next: bool = False

    @property
    def length(self) -> int:
        return self.seen.shape[1]


class Sessions(RuleBasedStateMachine):
    """One server and its clients."""

    blocks: BlockSpan

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.loop = self.runner.get_loop()
        self.unhandled: list[dict[str, Any]] = []
        self.loop.set_exception_handler(lambda _, context: self.unhandled.append(context))
        self.tasks: set[asyncio.Task[Any]] = set()
        self.pages = PrefixCache(1 << 22)
        self.server: Server = self.run(self._start())
        self.streams: dict[int, FrameStream] = {}
        self.alive: list[Known] = []
        self.epoch = self.num_opened = 0

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(asyncio.wait_for(work, 120))

    async def _start(self) -> Server:
        return Server(self.blocks, self, cache_tokens=CACHE_TOKENS, pages=self.pages)  # type: ignore[arg-type]

    def create_task(self, work: Coroutine[Any, Any, Any], name: str | None = None) -> asyncio.Task[Any]:
        """As a TaskGroup does, for the server."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    # ------------------------------------------------------------------ what clients do

    @rule(peer=PEER, span=st.sampled_from(SPANS), rows=ROWS, max_length=st.sampled_from(LENGTHS), steps=STEPS)
    def open(self, peer: int, span: Span, rows: int, max_length: int, steps: list[Any]) -> None:
        if one := self.run(self._open(peer, span, rows, max_length, None)):
            self._steps(one, steps)

    @rule(peer=PEER, rows=ROWS, steps=STEPS)
    def open_two_and_link(self, peer: int, rows: int, steps: list[Any]) -> None:
        first = self.run(self._open(peer, Span(0, 1), rows, LONGEST, None))
        second = self.run(self._open(peer, Span(1, 2), rows, LONGEST, None))
        if first and second:
            self.run(self._link(first, second))
            self._steps(first, steps)

    @precondition(lambda self: self.alive)
    @rule(peer=PEER, which=WHICH)
    def open_what_is_open(self, peer: int, which: int) -> None:
        self.run(self._open(peer, Span(0, 2), 1, 1, self._one(which).id))

    def _one(self, which: int) -> "Known":
        return self.alive[which % len(self.alive)]

    def _first(self, which: int) -> "Known | None":
        """One that clients send steps to, and that passes them on to nobody."""
        found = [one for one in self.alive if one.next is None and not one.is_next]
        return found[which % len(found)] if found else None

    async def _open(self, peer: int, span: Span, rows: int, max_length: int, taken: str | None) -> "Known | None":
        stream = await self._stream(peer)
        self.num_opened += 1
        session = taken or f"{self.num_opened:032x}"
        row_bytes = self._row_bytes(span, max_length)
        fits = rows * row_bytes <= self.server.budget.left_bytes
        header = open_header(session, span, batch_size=rows, max_length=max_length, epoch=self.epoch)
        message = await ask(stream, MessageType.OPEN, header)
        if message.type is MessageType.ERROR:
            assert (error_code(message), bool(taken), fits) in (
                ("remote_protocol", True, fits),
                ("cache_full", False, False),
                ("session_too_large", False, False),
            )
            return None
        assert fits
        assert taken is None
        self.alive.append(Known(session, peer, stream, span, rows, max_length))
        return self.alive[-1]

    def _row_bytes(self, span: Span, max_length: int) -> int:
        cache = -(-self.blocks.cache_sizes.bytes_per_token * len(span) // len(self.blocks.span))
        return (cache + 4 * HIDDEN) * max_length + self.blocks.cache_sizes.bytes_per_session

    @precondition(lambda self: self.alive)
    @rule(which=WHICH, steps=STEPS)
    def steps(self, which: int, steps: list[Any]) -> None:
        self._steps(self._one(which), steps)

    @precondition(lambda self: self.alive)
    @rule(steps=st.lists(st.tuples(WHICH, STEPS), min_size=2, max_size=4))
    def steps_in_turns(self, steps: list[Any]) -> None:
        for which, of_one in steps:
            self._steps(self._one(which), of_one)

    def _steps(self, one: "Known", steps: list[Any]) -> None:
        for back, length, text, chosen, rows in steps:
            if one.is_next:
                continue
            start, alone = max(0, one.length - back), one.next is None  # the rows of two are both servers' affair
            self.run(
                self._step(
                    one, start, length, text, chosen if alone and start else None, rows if alone and not start else None
                )
            )

    async def _step(
        self, one: Known, start: int, length: int, text: int, chosen: list[int] | None, rows: int | None
    ) -> None:
        good = chosen is None or (bool(chosen) and max(chosen) < one.num_rows)
        seen = one.seen
        if chosen is not None and good:
            seen, rows = one.seen[chosen], len(chosen)
        rows = rows or (len(chosen) if chosen else one.num_rows)
        hidden = self._text(text, rows)[:, start : start + length]
        if hidden.shape[1] == 0:
            return
        fields: dict[str, Any] = {"rows": one.rows + (chosen is not None), "batch_index": chosen}
        header = step_header(one.id, start, hidden, epoch=self.epoch, **fields)
        leased = self._leases(one)
        before = self.server.budget.left_bytes
        message = await ask(one.stream, MessageType.STEP, header, hidden_states=hidden)
        end = start + hidden.shape[1]
        if message.type is MessageType.ERROR:
            more = self._row_bytes(one.span, one.max_length) * rows - leased
            # A step that takes more than its session's inputs may is leased, too, for as long as it waits.
            free = INPUTS_FACTOR * (4 * HIDDEN + BESIDE_BYTES) * one.max_length * one.num_rows
            self._went_wrong(one, message, end, good, max(more, hidden.nbytes + 40 * len(chosen or ()) - free), before)
            return
        assert good
        assert end <= one.max_length
        one.rows, one.num_rows = fields["rows"], rows
        one.seen = torch.cat([seen[:, :start] if start else hidden[:, :0], hidden], dim=1)
        outputs = self._forward(one.span, one.seen)
        if one.next is not None:
            one.next.seen, one.next.num_rows = outputs, rows
            outputs = self._forward(one.next.span, outputs)
        torch.testing.assert_close(result(message), outputs[:, start:], rtol=1e-3, atol=1e-4)

    def _went_wrong(self, one: Known, message: Message, end: int, good: bool, more: int, left: int) -> None:
        self.epoch += 1
        code = error_code(message)
        if code == "length_exceeded":
            assert end > one.max_length
        elif code in ("cache_full", "session_too_large"):
            assert more > left
        else:
            assert (code, good) == ("remote_protocol", False), message.header

    def _leases(self, one: Known) -> int:
        return self.server.sessions.get(one.id).runner.lease.num_bytes

    @rule(which=WHICH, kind=st.sampled_from(["position", "shape", "mask", "session", "rows"]))
    def step_wrongly(self, which: int, kind: str) -> None:
        if one := self._first(which):
            self.run(self._step_wrongly(one, kind))

    async def _step_wrongly(self, one: Known, kind: str) -> None:
        hidden = self._text(0, one.num_rows)[:, :2]
        header, extra = step_header(one.id, one.length, hidden, epoch=self.epoch, rows=one.rows), {}
        match kind:
            case "position":
                header["position"] += 1
            case "shape":
                hidden = hidden[:, :1]
            case "mask":
                extra = {"attention_mask": torch.ones(one.num_rows, one.length + 1)}
            case "session":
                header["session"] = "f" * 32
            case "rows":
                header["rows"] += 2
        message = await ask(one.stream, MessageType.STEP, header, hidden_states=hidden, **extra)
        self.epoch += 1
        if kind == "rows" and not one.length:  # a cache that is empty has no rows to choose from
            if message.type is MessageType.RESULT:
                one.rows, one.seen = header["rows"], hidden
            return
        assert error_code(message) in ("remote_protocol", "session_lost", "length_exceeded")

    @rule(which=WHICH, back=st.integers(0, 5))
    def replay(self, which: int, back: int) -> None:
        if (one := self._first(which)) and one.length > back:
            self.run(self._replay(one, one.length - back))

    async def _replay(self, one: Known, length: int) -> None:
        """The session sends again what it sent; then its cache is as long as what it has kept, or the next step is."""
        header = {"id": 1, "session": one.id, "epoch": self.epoch, "length": length, "replay_hops": 2, "rows": one.rows}
        await one.stream.send(MessageType.REPLAY, header)
        expected, parts = self._forward(one.span, one.seen[:, :length]), []
        while sum(part.shape[1] for part in parts) < length:
            parts.append(result(await answer(one.stream)))
        torch.testing.assert_close(torch.cat(parts, dim=1), expected, rtol=1e-3, atol=1e-4)
        one.seen = one.seen[:, :length]

    async def _link(self, first: Known, second: Known) -> None:
        successor = {"peer_id": SERVER, "session": second.id, "token": second.id[::-1]}
        header = {"id": 1, "session": first.id, "epoch": self.epoch, "successor": successor}
        assert (await ask(first.stream, MessageType.LINK, header)).type is MessageType.RESULT
        first.next, second.is_next = second, True

    @rule(which=WHICH, seldom=SELDOM)
    def run_out_of_memory(self, which: int, seldom: bool) -> None:
        if seldom and (one := self._first(which)) and one.length < min(one.max_length, LONGEST):
            self.run(self._run_out_of_memory(one))

    async def _run_out_of_memory(self, one: Known) -> None:
        """In the midst of a step: its cache is gone, and nothing of any other session."""

        def lacks(*_: object) -> Any:
            raise MemoryError

        hidden = self._text(0, one.num_rows)[:, one.length : one.length + 1]
        header = step_header(one.id, one.length, hidden, epoch=self.epoch, rows=one.rows)
        self.server.packer.run_calls = lacks  # type: ignore[method-assign]
        try:
            message = await ask(one.stream, MessageType.STEP, header, hidden_states=hidden)
        finally:
            del self.server.packer.run_calls  # type: ignore[method-assign]
        self.epoch += 1
        assert error_code(message) == "out_of_memory"
        one.seen = hidden[:, :0]

    # ------------------------------------------------------------------ how they end

    @rule(peer=PEER, seldom=SELDOM, midst=st.booleans())
    def leave(self, peer: int, seldom: bool, midst: bool) -> None:
        if seldom and peer in self.streams:
            self.run(self._leave(peer, midst))

    async def _leave(self, peer: int, midst: bool = False) -> None:
        for one in self.alive:
            if midst and one.peer == peer and not one.is_next:
                await self._send_step(one)
        stream = self.streams.pop(peer)
        if midst:
            stream.abort()
        else:
            await hang_up(stream)
        await self.server.ended(stream)
        self.alive = [one for one in self.alive if one.peer != peer]

    async def _send_step(self, one: Known) -> None:
        hidden = self._text(0, one.num_rows)[:, one.length : one.length + 17]
        if hidden.shape[1]:
            header = step_header(one.id, one.length, hidden, epoch=self.epoch, rows=one.rows)
            await send(one.stream, MessageType.STEP, header, hidden_states=hidden)

    @rule(seldom=SELDOM, very=SELDOM)
    def hand_over(self, seldom: bool, very: bool) -> None:
        if seldom and very:
            self.run(self._hand_over())

    async def _hand_over(self) -> None:
        await self.server.sessions.hand_over(0.0)
        for peer in {one.peer for one in self.alive}:
            stream = self.streams.pop(peer)
            await self.server.ended(stream)
            stream.abort()
            self.alive = [one for one in self.alive if one.peer != peer]

    # ------------------------------------------------------------------ what is true all the time

    @invariant()
    def nothing_is_lost_or_leaked(self) -> None:
        self.run(self._check())

    async def _check(self) -> None:
        server = self.server
        await self._until(lambda: not held_bytes(server))
        sessions = {session.id: session for session in server.sessions}
        assert sessions.keys() == {one.id for one in self.alive}
        for one in self.alive:
            runner = sessions[one.id].runner
            # After a replay the cache may be longer; the next step rolls it back.
            assert min(runner.cache.position, runner.log.length) == one.length
            assert runner.lease.num_bytes >= self._row_bytes(one.span, one.max_length) * runner.batch_size
            assert runner.cache.num_bytes <= runner.lease.num_bytes + 2 * 128 * 2 * runner.cache.used_bytes()[0]
        assert server.budget.leased_bytes == sum(session.runner.lease.num_bytes for session in sessions.values())
        assert not server.failures
        assert not self.unhandled

    def teardown(self) -> None:
        try:
            self.run(self._teardown())
        finally:
            self.runner.close()

    async def _teardown(self) -> None:
        for peer in tuple(self.streams):
            await self._leave(peer)
        assert len(self.server.sessions) == self.server.budget.leased_bytes == 0
        await self.server.links.close()
        await self._until(lambda: not self.tasks)
        assert not held_bytes(self.server)
        await self._until(lambda: not self.server.access.limits.num_streams())
        assert self.server.handler.num_untaken_bytes == 0
        await self.server.close()
        assert not self.server.failures
        assert not self.unhandled

    # ------------------------------------------------------------------

    async def _stream(self, peer: int) -> FrameStream:
        if peer not in self.streams:
            self.streams[peer] = await self.server.connect(PEERS[peer])
        return self.streams[peer]

    def _text(self, text: int, rows: int) -> Tensor:
        """The same ones again and again, so that sessions find each other's pages."""
        one = torch.randn(1, LONGEST, HIDDEN, generator=torch.Generator().manual_seed(text))
        return one.expand(rows, -1, -1) * torch.arange(1, rows + 1)[:, None, None]

    def _forward(self, span: Span, hidden: Tensor) -> Tensor:
        inputs = BlockInputs(hidden_states=hidden, batch_size=hidden.shape[0], seq_len=hidden.shape[1])
        return self.blocks.forward(inputs, span, self.blocks.new_cache(span))

    async def _until(self, condition: Callable[[], object]) -> None:
        while not condition():  # noqa: ASYNC110 - nobody tells of these states
            await asyncio.sleep(0.001)


def play(blocks: BlockSpan, num_games: int, num_steps: int) -> None:
    machine = type("SessionsOfBlocks", (Sessions,), {"blocks": blocks})
    options = settings(
        max_examples=num_games,
        stateful_step_count=num_steps,
        deadline=None,
        derandomize=True,  # a failure is found again
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(machine, settings=options)


def test_sessions_are_as_their_model(blocks: BlockSpan) -> None:
    play(blocks, num_games=6, num_steps=25)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_sessions_are_as_their_model_for_long(blocks: BlockSpan) -> None:
    """10 000 rounds, most of them of several steps."""
    play(blocks, num_games=200, num_steps=50)
