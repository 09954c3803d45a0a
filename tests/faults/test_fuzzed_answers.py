"""Answers of hostile servers, by the hundred thousand messages: to clients, and to servers that they pass on to.

Each game has a client whose ways lead through hostile servers: first, last, alone, or beside honest ones. What these
would say is changed in fields, types, tensors, ids, bytes and order, left out, repeated, or comes after things that
nobody has asked for. The client's calls must end in an answer of the right shape or in a SwarmError; after each game
nothing of it may be left anywhere, nothing may have been logged as a mistake, and a client that uses the honest servers
alone gets right answers all the time. (Wrong numbers of the right shape are what spot checks are for: `test_lies`.)
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from random import Random
from typing import Any

import pytest
import torch
from fuzzed_messages import ODD_VALUES, Conversation, wire
from hostile import held_bytes, num_awaited
from mistakes import logged_mistakes
from swarm_in_process import Blocks, InProcessSwarm, Reference, Server, server_id

from swarmllm import ClientConfig
from swarmllm.client.batches.batch_runner import BatchRunner
from swarmllm.client.session.inference_session import InferenceSession
from swarmllm.client.view import routes
from swarmllm.client.view.swarm_view import SwarmView
from swarmllm.data_structures import Patch
from swarmllm.errors import SwarmError
from swarmllm.models.adapters.block_adapter import BlockAdapter
from swarmllm.models.boundary.block_inputs import BlockInputs
from swarmllm.network.wire import stream as stream_module
from swarmllm.network.wire.frames import FORMAT, MAGIC, PREFIX, MessageType
from swarmllm.network.wire.protocol import FrameStream, Message
from swarmllm.network.wire.tensor_codec import decode_tensors
from swarmllm.swarm import retry

HIDDEN = 64
SPANS = [(0, 3), (3, 6), (0, 3), (3, 6), (0, 6)]
HONEST, ALL = (0, 1), (0, 1, 2, 3, 4)
WAYS = ((2, 1), (0, 3), (2, 3), (4,), ALL)
"""Spans that the client of a game may use: servers 2, 3 and 4 are hostile."""
END_S = 120.0
Said = tuple[MessageType, dict[str, Any], bytes]


def all_codes(error: type[SwarmError] = SwarmError) -> list[str]:
    return [error.code, *(code for kind in error.__subclasses__() for code in all_codes(kind))]


class HostileSwarm(InProcessSwarm):
    """Two honest servers, and three whose words are changed while `random` is set."""

    def __init__(self, blocks: Blocks) -> None:
        super().__init__(blocks, SPANS, allowed_servers=[server_id(number) for number in HONEST])
        self.random: Random | None = None
        self.count = 0
        """Messages of hostile servers that somebody has taken."""

    def begin(self, seed: int) -> None:
        """Another game."""
        self.random, self._changes = Random(seed), Conversation(seed, [])

    def is_hostile(self, peer_id: str) -> bool:
        return any(self.servers[number].peer_id == peer_id for number in ALL if number not in HONEST)

    def new_ends(self, server: Server, caller: str) -> tuple[FrameStream, FrameStream]:
        if self.is_hostile(server.peer_id):
            return _Hostile(self, caller), _Counting(self, server.peer_id)
        if self.is_hostile(caller):
            return _Counting(self, caller), _Hostile(self, server.peer_id)
        return super().new_ends(server, caller)

    # ------------------------------------------------------------------ what hostile servers say

    def instead_of(self, kind: MessageType, header: dict[str, Any], payload: bytes) -> Iterator[bytes]:
        """The bytes written in place of this message."""
        random = self.random
        if random is None:
            yield wire(kind, header, payload)
            return
        is_greeting = kind in (MessageType.HELLO, MessageType.WELCOME)
        if is_greeting and random.random() < 0.9:  # all others need one
            yield wire(kind, header, payload)
            return
        for _ in range(random.choice((0, 0, 0, 0, 1, 2, 10, 40))):
            yield wire(*self._unasked(header))
        if random.random() < (0.3 if header.get("tensors") else 0.1):
            kind, header, payload = self._changed(kind, header, payload)
        data = wire(kind, header, payload)
        match random.randrange(100):
            case 0:
                return
            case 1 | 2:
                yield data[: random.randrange(len(data))]
            case 3 | 4:
                yield data * random.choice((2, 2, 5))
            case 5 | 6:
                changed = bytearray(data)
                changed[random.randrange(min(len(changed), 60))] ^= 1 << random.randrange(8)
                yield bytes(changed)
            case 7 if len(payload) > 1:
                cut, packed = random.randrange(1, len(payload)), wire(kind, header)[PREFIX.size :]
                yield PREFIX.pack(MAGIC, FORMAT, kind, 0, len(packed), cut, len(payload)) + packed + payload[:cut]
                yield wire(*self._unasked(header))
                rest = len(payload) - cut
                yield PREFIX.pack(MAGIC, FORMAT, MessageType.CONTINUE, 0, 0, rest, len(payload)) + payload[cut:]
            case _:
                yield data

    def _changed(self, kind: MessageType, header: dict[str, Any], payload: bytes) -> Said:
        try:
            tensors = decode_tensors(header.pop("tensors", ()), bytearray(payload), max_bytes=len(payload))
        except SwarmError:
            tensors = {}
        return self._changes.encode(*self._changes.wrong(kind, header, tensors))

    def _unasked(self, header: Mapping[str, Any]) -> Said:
        """Something about what is under way, or about nothing."""
        random = self.random
        assert random is not None
        number = header.get("id")
        ids = [number + random.choice((-2, -1, 1, 1, 2, 3, 0))] * 3 if type(number) is int else []
        about: dict[str, Any] = {"id": random.choice([*ids, 0, 1 << 62])}
        if random.random() < 0.3:
            about["session"] = random.choice([header.get("session"), "x" * 32, None])
        match random.randrange(100):
            case n if n < 10:
                said = {"code": random.choice(all_codes()), "message": "no", **about}
                if random.random() < 0.5:
                    said["peer_id"] = random.choice(self.servers).peer_id
                if random.random() < 0.1:  # of the whole session
                    said.pop("id")
                return MessageType.ERROR, said, b""
            case n if n < 98:
                said = {"position": random.choice((0, 1, 5, 64)), "end": random.choice((0, 3, 6)), **about}
                tensor = torch.zeros(1, random.randint(0, 3), random.choice((HIDDEN, HIDDEN - 1)))
                tensors = {"hidden_states": tensor} if random.random() < 0.5 else {}
                return self._changes.encode(MessageType.RESULT, said, tensors)
            case 98:
                return MessageType.PING, {"n": random.choice(ODD_VALUES)}, b""
            case _:
                return random.choice(list(MessageType)[1:]), {"token": "x" * 32, **about}, b""


class _Hostile(FrameStream):
    """A hostile server's end of a stream."""

    def __init__(self, swarm: HostileSwarm, peer_id: str) -> None:
        super().__init__(peer_id)
        self._swarm = swarm

    async def send(
        self, kind: MessageType, header: Mapping[str, Any], payload_chunks: Sequence[Any] = (), *, flags: int = 0
    ) -> None:
        for data in self._swarm.instead_of(kind, dict(header), b"".join(payload_chunks)):
            self._write(data)


class _Counting(FrameStream):
    """The other end."""

    def __init__(self, swarm: HostileSwarm, peer_id: str) -> None:
        super().__init__(peer_id)
        self._swarm = swarm

    async def receive(self) -> Message:
        message = await super().receive()
        self._swarm.count += 1
        return message


# ---------------------------------------------------------------------- who listens to them


class Victim:
    """The client of one game."""

    def __init__(self, swarm: HostileSwarm, seed: int) -> None:
        self._random = Random(seed)
        self._swarm = swarm
        way = [swarm.servers[number].peer_id for number in self._random.choice(WAYS)]
        swarm._config = ClientConfig(
            allowed_servers=way,
            max_retries=2,
            route_timeout_s=0.05,
            step_timeout_s=0.2,
            connect_timeout_s=0.2,
            ban_s=0.01,
            prefill_chunk_tokens=self._random.choice((3, 128)),
            push=self._random.random() < 0.7,
            verify_fraction=self._random.choice((0.0, 0.0, 0.5)),
        )
        self._loop = swarm.blocks.loop
        self._view: SwarmView = self._loop.run_coroutine(swarm.new_view())
        self._batches = BatchRunner(self._view, swarm.traits)
        self._session: InferenceSession | None = None
        self._version = 0

    def play(self) -> None:
        calls = (self._traits, self._step, self._step, self._step, self._ahead, self._back, self._batch, self._train)
        for _ in range(8):
            with suppress(SwarmError):
                self._random.choice(calls)()

    def close(self) -> None:
        if self._session is not None:
            self._session.close()
        self._loop.run_coroutine(self._close())

    async def _close(self) -> None:
        self._batches.close()
        await self._view.look_ups.verified.close()

    def _open(self) -> InferenceSession:
        if self._session is None or self._random.random() < 0.1:
            if self._session is not None:
                self._session.close()
            self._session = InferenceSession(
                self._view, self._swarm.traits, self._batches.spot_checks, max_length=64, batch_size=1
            )
        return self._session

    def _given(self) -> torch.Tensor:
        return torch.randn(1, self._random.choice((1, 1, 1, 4, 9)), HIDDEN)

    def _traits(self) -> None:
        self._loop.run_coroutine(self._view.traits())

    def _step(self) -> None:
        given = self._given()
        assert self._open().step(given).shape == given.shape

    def _ahead(self) -> None:
        """Several steps at once, as guesses are sent."""
        session, given = self._open(), [torch.randn(1, 1, HIDDEN) for _ in range(3)]
        try:
            for number, one in enumerate(given):
                session.send(inputs_of(one), session.position + number)
            for one in given:
                assert session.receive().shape == one.shape
        finally:
            session.abandon()

    def _back(self) -> None:
        session = self._open()
        session.position = self._random.randint(0, session.position)
        if session.position:
            session.select_batch([0])

    def _batch(self) -> None:
        given = torch.randn(2, 3, HIDDEN)
        inputs = inputs_of(given, adapter=self._adapter() if self._random.random() < 0.3 else None)
        assert self._batches(inputs, self._swarm.blocks.all.span).shape == given.shape

    def _adapter(self) -> BlockAdapter:
        patch = Patch(block=self._random.randrange(6), path="self_attn.q_proj", kind="ia3_out", shapes=((HIDDEN,),))
        self._version += 1
        return BlockAdapter((patch,), ((torch.ones(HIDDEN),),), version=self._version)

    def _train(self) -> None:
        given = torch.randn(2, 3, HIDDEN, requires_grad=True)
        self._batches(inputs_of(given), self._swarm.blocks.all.span).sum().backward()
        assert given.grad is not None
        assert given.grad.shape == given.shape


def inputs_of(hidden: torch.Tensor, **options: Any) -> BlockInputs:
    batch_size, seq_len, _ = hidden.shape
    return BlockInputs(hidden_states=hidden, batch_size=batch_size, seq_len=seq_len, **options)


class Neighbour:
    """A client of the honest servers, whose session goes on beside all games."""

    LENGTH = 24

    def __init__(self, swarm: HostileSwarm) -> None:
        self._swarm = swarm
        self._session = swarm.session(max_length=self.LENGTH)
        self._reference = Reference(swarm.blocks.all)

    def step(self) -> None:
        if self._session.position == self.LENGTH:
            self._session.position, self._reference = 0, Reference(self._swarm.blocks.all)
        given = torch.randn(1, 1, HIDDEN)
        torch.testing.assert_close(self._session.step(given), self._reference.step(given), rtol=1e-4, atol=1e-4)
        assert self._session.num_repairs == 0

    def close(self) -> None:
        self._session.close()


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + END_S
    while not condition():
        assert time.monotonic() < deadline, "something of the game is left"
        time.sleep(0.001)


def fuzz(blocks: Blocks, count: int, seed: int, mistakes: list[str]) -> None:
    """At least that many messages of hostile servers, in as many games as it takes."""
    with HostileSwarm(blocks) as swarm:
        neighbour = Neighbour(swarm)
        neighbour.step()
        leased = [server.sessions.budget.leased_bytes for server in swarm.servers]
        num_tasks, games = len(blocks.loop._tasks), 0

        def nothing_is_left() -> bool:
            return (
                [server.sessions.budget.leased_bytes for server in swarm.servers] == leased
                and len(blocks.loop._tasks) <= num_tasks
                and not any(num_awaited(server) for server in swarm.servers)
                and not any(held_bytes(server) for server in swarm.servers)
                and not blocks.device_thread.num_calls
            )

        while swarm.count < count:
            games += 1
            swarm.begin(seed + games)
            try:
                victim = Victim(swarm, seed + games)
                try:
                    victim.play()
                    neighbour.step()
                finally:
                    victim.close()
                wait_for(nothing_is_left)
                assert not mistakes
            except BaseException as error:
                error.add_note(f"seed {seed + games}")
                raise
        neighbour.close()
        wait_for(lambda: not any(server.sessions.budget.leased_bytes for server in swarm.servers))
        swarm.random = None
    assert not mistakes


@pytest.fixture(autouse=True)
def mistakes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    monkeypatch.setattr(stream_module, "LINGER_S", 0.0)  # these streams are socket pairs, that nobody resets
    monkeypatch.setattr(routes, "RETRY_LOOKUP_S", 0.01)
    monkeypatch.setattr(routes, "FIRST_PINGS_TIMEOUT_S", 0.01)
    monkeypatch.setattr(retry, "LOOK_AGAIN_S", 0.01)
    monkeypatch.setattr(retry, "MAX_BACKOFF_S", 0.01)
    monkeypatch.setattr(retry, "FULL_SERVER_PAUSE_S", 0.01)
    with logged_mistakes() as mistakes:
        yield mistakes


def test_hostile_answers_hurt_nobody(blocks: Blocks, mistakes: list[str]) -> None:
    fuzz(blocks, 500, 0, mistakes)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_hundred_thousand_hostile_answers_hurt_nobody(blocks: Blocks, mistakes: list[str]) -> None:
    fuzz(blocks, 100_000, 1_000_000, mistakes)
