"""Steps in flight: a failure fails all steps that wait, and later ones of the same chain version."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from swarmllm.client.session.in_flight import InFlight
from swarmllm.client.session.session_text import SessionText, TextRoom
from swarmllm.data_structures import BlockTraits
from swarmllm.errors import PeerUnreachableError, SwarmError
from swarmllm.models.boundary.block_inputs import BlockInputs

INPUTS = BlockInputs(hidden_states=torch.zeros(1, 1, 1), batch_size=1, seq_len=1)


class OneHop(list[Any]):
    """A route of one server, which believes whatever is said of it."""

    def __init__(self) -> None:
        self.connection = SimpleNamespace(error=None)
        super().__init__([SimpleNamespace(peer_id="peer", connection=self.connection, lost=False)])

    def hop_of(self, connection: object) -> Any:
        return self[0] if connection is self.connection else None

    def judged(self, hop: object, error: SwarmError) -> SwarmError:
        return error


@pytest.fixture
def hops() -> OneHop:
    return OneHop()


@pytest.fixture
def reported() -> list[SwarmError]:
    return []


@pytest.fixture
def in_flight(hops: OneHop, reported: list[SwarmError]) -> InFlight:
    view: Any = SimpleNamespace(report=reported.append)
    in_flight = InFlight(view, SessionText(BlockTraits(), TextRoom(10)), hops, asyncio.Lock())  # type: ignore[arg-type]
    in_flight.begin_version()
    return in_flight


async def fail(in_flight: InFlight, hops: OneHop, request: int | None = None) -> SwarmError:
    error = PeerUnreachableError("gone", "peer")
    in_flight.on_answer(hops.connection, error, request)  # type: ignore[arg-type]
    await asyncio.sleep(0)
    return error


async def test_a_broken_connection_fails_all_steps_and_those_that_come_later(
    in_flight: InFlight, hops: OneHop, reported: list[SwarmError]
) -> None:
    waiting = in_flight.add(INPUTS, 0)
    error = await fail(in_flight, hops)
    late = in_flight.add(INPUTS, 1)
    assert waiting.done.exception() is late.done.exception() is error
    assert reported == [error], "nobody else takes note between two steps"
    in_flight.begin_version()
    fresh = in_flight.add(INPUTS, 1)
    assert not fresh.done.done()
    for step in (waiting, late, fresh):
        in_flight.remove(step)
    assert not in_flight


async def test_what_belongs_to_an_earlier_version_is_ignored(in_flight: InFlight, hops: OneHop) -> None:
    old = in_flight.add(INPUTS, 0)
    in_flight.remove(old)
    in_flight.begin_version()
    step = in_flight.add(INPUTS, 0)
    await fail(in_flight, hops, old.request)
    assert not step.done.done()
    in_flight.remove(step)


async def test_an_abandoned_step_that_fails_takes_those_behind_it_along(in_flight: InFlight, hops: OneHop) -> None:
    abandoned, wanted = in_flight.add(INPUTS, 0), in_flight.add(INPUTS, 0)
    in_flight.abandon(abandoned)
    error = await fail(in_flight, hops, abandoned.request)
    assert wanted.done.exception() is error
    in_flight.remove(wanted)
    assert not in_flight, "the abandoned one is forgotten by itself"


async def test_abandoned_steps_are_forgotten_when_nobody_will_answer_them(in_flight: InFlight) -> None:
    first, second, wanted = (in_flight.add(INPUTS, 0) for _ in range(3))
    for step in (first, second):
        in_flight.abandon(step)
    in_flight.forget_abandoned(before=second.request)
    assert len(in_flight) == 2
    in_flight.begin_version()
    await asyncio.sleep(0)
    assert len(in_flight) == 1
    assert not wanted.done.done()
    in_flight.remove(wanted)
