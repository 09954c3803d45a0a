"""A model test of the client's core: sessions, repairs, moves, links and hostile answers in any order, against what
all blocks give in one place. In process.

Some servers are hostile: now and then they answer nonsense or accuse others. Any server may die, and any stream break,
as long as honest servers that live hold all blocks. Then every step has to be right, nothing may fail that nobody
handles, and when the last session is closed no server holds a byte for any.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from mistakes import logged_mistakes
from swarm_in_process import Blocks, InProcessSwarm, Server
from torch import Tensor

from swarmllm.client.session.inference_session import InferenceSession
from swarmllm.client.view import routes
from swarmllm.errors import (
    CorruptActivationsError,
    PeerUnreachableError,
    RemoteProtocolError,
    ServerOverloadedError,
    SessionLostError,
    SwarmError,
    error_from_code,
)
from swarmllm.models.boundary.block_inputs import BlockInputs
from swarmllm.network.wire.protocol import FrameStream, Message, MessageType, send_error
from swarmllm.network.wire.tensor_codec import encode_tensors
from swarmllm.swarm import retry

NUM_BLOCKS = 6
MAX_LENGTH = 64
MAX_SESSIONS = 3
MAX_SERVERS = 10
END_S = 60.0
HONEST = [(0, 3), (3, 6), (0, 2), (2, 6)]
"""Whatever else there is, and whoever of the others dies: two ways through all blocks."""

spans = st.tuples(st.integers(0, NUM_BLOCKS - 1), st.integers(1, NUM_BLOCKS)).map(lambda ends: (min(ends), max(ends)))
spans = spans.filter(lambda ends: ends[0] < ends[1])
server_numbers = st.integers(0, MAX_SERVERS - 1)
numbers = st.sampled_from([-1, 0, 1, 3, 6, 7, 1 << 24, 1 << 62])
codes = st.sampled_from(
    [
        error.code
        for error in (
            CorruptActivationsError,
            PeerUnreachableError,
            RemoteProtocolError,
            ServerOverloadedError,
            SessionLostError,
        )
    ]
)
nonsense = st.one_of(
    st.fixed_dictionaries({"position": numbers}),
    st.fixed_dictionaries({"end": numbers}),
    st.fixed_dictionaries({"tensors": st.sampled_from([(), 5, [["hidden_states", "float32", [1], 4]], "no"])}),
    st.fixed_dictionaries({"timings": st.sampled_from([0, 1, 5000]).map(lambda count: [[-1, -1, -1]] * count)}),
    st.fixed_dictionaries({"timings": st.sampled_from([5, [[0]]])}),
    st.fixed_dictionaries({"id": st.sampled_from(["one", None, -5])}),
)
false_tensors = st.sampled_from(
    [torch.zeros(0), torch.zeros(1, 1, 63), torch.zeros(1, 1, dtype=torch.int64), torch.full((1, 1, 64), float("nan"))]
)


class Text:
    """A session, and what it was given so far: the plain reference computes all of it anew each time."""

    def __init__(self, swarm: InProcessSwarm, batch_size: int) -> None:
        self.session: InferenceSession = swarm.session(max_length=MAX_LENGTH, batch_size=batch_size)
        self.given = torch.zeros(batch_size, 0, swarm.blocks.all.embedding_dim)
        self._blocks = swarm.blocks.all

    def step(self, length: int) -> None:
        given = torch.randn(self.given.shape[0], length, self.given.shape[2])
        self.given = torch.cat([self.given, given], dim=1)
        torch.testing.assert_close(self.session.step(given), whole(self._blocks, self.given)[:, -length:])
        assert self.session.position == self.given.shape[1]

    def roll_back(self, position: int) -> None:
        self.session.position = position
        self.given = self.given[:, :position]

    def select(self, rows: list[int]) -> None:
        self.session.select_batch(rows)
        self.given = self.given[rows]


def whole(blocks: Any, given: Tensor) -> Tensor:
    batch_size, seq_len, _ = given.shape
    return blocks.forward(BlockInputs(hidden_states=given, batch_size=batch_size, seq_len=seq_len))


async def said(stream: FrameStream, error: SwarmError, **about: Any) -> None:
    with suppress(SwarmError):  # nobody listens any more
        await send_error(stream, error, **about)


class ClientModel(RuleBasedStateMachine):
    """Its attributes that a test sets: `blocks`, and what was logged as a mistake."""

    blocks: Blocks
    mistakes: list[str]
    texts: "Bundle[Text]" = Bundle("texts")

    @initialize(
        target=texts,
        others=st.lists(spans, min_size=1, max_size=4),
        hostile=st.lists(st.sampled_from([True, True, False]), min_size=4, max_size=4),
        push=st.booleans(),
        chunk_tokens=st.sampled_from([3, 1024]),
        verify_fraction=st.sampled_from([0.0, 0.0, 0.5]),
        batch_size=st.integers(1, 3),
    )
    def begin(self, others: list[Any], hostile: list[bool], batch_size: int, **config: Any) -> Text:
        config = {"prefill_chunk_tokens": config.pop("chunk_tokens"), **config}
        layout = [*HONEST, *others]
        self.swarm = InProcessSwarm(
            self.blocks,
            layout,
            announced=[{"decode_ms_per_block": 2.0}] * len(HONEST) + [{"decode_ms_per_block": 1.0}] * len(others),
            max_retries=50,
            step_timeout_s=5,
            ban_s=0.05,
            **config,
        )
        self.swarm.__enter__()
        self.hostile = {
            server for server, lies in zip(self.swarm.servers[len(HONEST) :], hostile, strict=False) if lies
        }
        self.at_step: list[Callable[[Server, Message], None]] = []
        """Events at the next step that any server takes, one at a time, in order."""
        self.slanders: list[Callable[[Server, Message], None]] = []
        """Answers of a hostile server to its next steps, in the same way."""
        self.lies: list[Callable[[Any], Any]] = []
        """Changes of the next results of a hostile server, one at a time, in order."""
        self.swarm.on_message, self.swarm.on_send = self._on_message, self._on_send
        self.open_texts: list[Text] = []
        text = self.open_session(batch_size)
        text.step(4)
        return text

    def _go_on(self) -> None:
        """Step in all texts: a failure of a server shows when a client asks it for something."""
        for text in self.open_texts:
            self.step(text, 1)

    def _on_message(self, server: Server, message: Message) -> None:
        if message.type is MessageType.STEP and self.at_step:
            self.at_step.pop(0)(server, message)
        if message.type is MessageType.STEP and server in self.hostile and self.slanders:
            self.slanders.pop(0)(server, message)

    def _on_send(self, server: Server, kind: MessageType, header: dict[str, Any], chunks: Any) -> Any:
        if server in self.hostile and kind is MessageType.RESULT and header.get("tensors") and self.lies:
            return self.lies.pop(0)((kind, header, chunks))
        return kind, header, chunks

    def _server(self, number: int) -> Server:
        return self.swarm.servers[number % len(self.swarm.servers)]

    def _may_die(self, server: Server) -> bool:
        honest = [one for one in self.swarm.servers if one.alive and one is not server and one not in self.hostile]
        return server.alive and self.swarm.covers(honest)

    # ------------------------------------------------------------------ what a client does

    @precondition(lambda self: len(self.open_texts) < MAX_SESSIONS)
    @rule(target=texts, batch_size=st.integers(1, 3))
    def open_session(self, batch_size: int) -> Text:
        self.open_texts.append(text := Text(self.swarm, batch_size))
        return text

    @rule(text=texts, length=st.integers(1, 7))
    def step(self, text: Text, length: int) -> None:
        if text.given.shape[1] + length <= MAX_LENGTH:
            text.step(length)

    @rule(text=texts, length=st.integers(1, 7))
    def step_again(self, text: Text, length: int) -> None:
        """A step, the most usual action of a client."""
        self.step(text, length)

    @rule(text=texts, share=st.floats(0, 1))
    def roll_back(self, text: Text, share: float) -> None:
        text.roll_back(int(share * text.given.shape[1]))

    @rule(text=texts, rows=st.lists(st.integers(0, 2), min_size=1, max_size=3))
    def select_rows(self, text: Text, rows: list[int]) -> None:
        if text.given.shape[1]:
            text.select([row % text.given.shape[0] for row in rows])

    @rule(text=texts, choices=st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=3), min_size=1, max_size=2))
    def search_beams(self, text: Text, choices: list[list[int]]) -> None:
        """Rows chosen anew before each step, once or twice."""
        for _ in range(2):
            self.step(text, 1)
            for rows in choices:
                self.select_rows(text, rows)
        self.step(text, 1)

    @rule(text=consumes(texts))
    def close_session(self, text: Text) -> None:
        self.open_texts.remove(text)
        text.session.close()

    @rule(length=st.integers(1, 7), batch_size=st.integers(1, 3))
    def batch(self, length: int, batch_size: int) -> None:
        given = torch.randn(batch_size, length, self.blocks.all.embedding_dim)
        inputs = BlockInputs(hidden_states=given, batch_size=batch_size, seq_len=length)
        torch.testing.assert_close(self.swarm.batches(inputs, self.blocks.all.span), whole(self.blocks.all, given))

    # ------------------------------------------------------------------ what happens to servers

    @rule(number=server_numbers, later=st.booleans(), goes_on=st.booleans())
    def die(self, number: int, later: bool, goes_on: bool) -> None:
        server = self._server(number)
        if later:
            self.at_step.append(lambda *_: server.die() if self._may_die(server) else None)
        elif self._may_die(server):
            self.swarm.kill(server)
        if goes_on:
            self._go_on()

    @precondition(lambda self: len(self.swarm.servers) < MAX_SERVERS)
    @rule(span=spans, lies=st.booleans(), speed=st.sampled_from([0.2, 1.0, 2.0]))
    def join(self, span: tuple[int, int], lies: bool, speed: float) -> None:
        async def join() -> None:
            server = self.swarm.join(span, decode_ms_per_block=speed)
            if lies:
                self.hostile.add(server)
            await self.swarm.view.look_ups.refresh()

        self.blocks.loop.run_coroutine(join())

    @rule(number=server_numbers, speed=st.sampled_from([0.01, 1.0, 100.0]))
    def change_speed(self, number: int, speed: float) -> None:
        """Sessions may move then."""
        server = self._server(number)
        server.info = server.info.model_copy(update={"decode_ms_per_block": speed})
        self.blocks.loop.run_coroutine(self.swarm.view.look_ups.refresh())
        self._go_on()

    @rule(number=server_numbers, stream=st.integers(0, 20), later=st.booleans(), goes_on=st.booleans())
    def cut_stream(self, number: int, stream: int, later: bool, goes_on: bool) -> None:
        """Cut a stream to a client or to another server."""
        server = self._server(number)

        def cut(*_: Any) -> None:
            streams = sorted(server.streams, key=id)
            if streams:
                streams[stream % len(streams)].abort()

        async def cut_now() -> None:
            cut()

        if later:
            self.at_step.append(cut)
        else:
            self.blocks.loop.run_coroutine(cut_now())
        if goes_on:
            self._go_on()

    # ------------------------------------------------------------------ what hostile servers say

    @rule(header=nonsense, goes_on=st.booleans())
    def answer_nonsense(self, header: dict[str, Any], goes_on: bool) -> None:
        self.lies.append(lambda said: (said[0], said[1] | header, said[2]))
        if goes_on:
            self._go_on()

    @rule(tensor=false_tensors, goes_on=st.booleans())
    def answer_other_tensors(self, tensor: Tensor, goes_on: bool) -> None:
        def lie(said: Any) -> Any:
            descriptors, chunks = encode_tensors({"hidden_states": tensor})
            return said[0], said[1] | {"tensors": descriptors}, chunks

        self.lies.append(lie)
        if goes_on:
            self._go_on()

    @rule(code=codes, number=server_numbers)
    def blame_another(self, code: str, number: int) -> None:
        named = self._server(number).peer_id
        self.lies.append(
            lambda said: (
                MessageType.ERROR,
                {"code": code, "message": "no", "id": said[1]["id"], "peer_id": named},
                (),
            )
        )

    @rule(code=codes, number=server_numbers, names_step=st.booleans())
    def blame_another_unasked(self, code: str, number: int, names_step: bool) -> None:
        named = self._server(number).peer_id

        def say(server: Server, message: Message) -> None:
            for session in server.sessions:
                about = {"id": message.header["id"]} if names_step else {}
                error = error_from_code(code, "no", named)
                self.swarm.create_task(said(session.owner, error, peer_id=named, **about), name="slander")

        self.slanders.append(say)

    # ------------------------------------------------------------------ what has to hold

    @invariant()
    def nothing_is_a_mistake_of_ours(self) -> None:
        assert not self.mistakes

    @invariant()
    def nobody_honest_is_quarantined(self) -> None:
        assert self.swarm.view.health.quarantined <= {server.peer_id for server in self.hostile}

    def teardown(self) -> None:
        if not hasattr(self, "swarm"):
            return
        try:
            self.at_step.clear()
            self.slanders.clear()
            self.lies.clear()
            for text in self.open_texts:
                text.session.close()
            deadline = time.monotonic() + END_S
            while any(server.sessions.budget.leased_bytes or len(server.sessions) for server in self.swarm.servers):
                assert time.monotonic() < deadline, "a closed session is still held"
                time.sleep(0.001)
        finally:
            self.swarm.__exit__(None, None, None)
        assert not self.mistakes


@pytest.fixture
def model(blocks: Blocks, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[ClientModel]]:
    monkeypatch.setattr(routes, "RETRY_LOOKUP_S", 0.01)
    monkeypatch.setattr(retry, "LOOK_AGAIN_S", 0.01)
    monkeypatch.setattr(retry, "MAX_BACKOFF_S", 0.01)
    monkeypatch.setattr(retry, "FULL_SERVER_PAUSE_S", 0.05)

    class Model(ClientModel):
        pass

    with logged_mistakes() as mistakes:
        Model.blocks, Model.mistakes = blocks, mistakes
        yield Model


HEALTH = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]


def test_some_steps(model: type[ClientModel]) -> None:
    run_state_machine_as_test(
        model, settings=settings(max_examples=10, stateful_step_count=30, suppress_health_check=HEALTH)
    )


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_10000_steps(model: type[ClientModel]) -> None:
    run_state_machine_as_test(
        model,
        settings=settings(
            max_examples=300,  # some are shorter
            stateful_step_count=50,
            suppress_health_check=HEALTH,
            phases=set(Phase) - {Phase.shrink},  # shrinking would repeat it for hours; the first failure says enough
        ),
    )
