"""Room for what requests take: never more than there is, everybody has a turn, and all comes back."""

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmllm.gateway.engine.vision import Room, Taken
from swarmllm.gateway.errors import ApiError

ACTIONS = st.lists(
    st.tuples(st.sampled_from(["take", "free", "shrink", "cancel"]), st.integers(0, 3), st.integers(1, 10)), max_size=60
)


class Players:
    """Take and free by turns, and look whether the room holds."""

    def __init__(self, room: Room) -> None:
        self.room = room
        self.asked: list[tuple[str, int, asyncio.Task[Taken]]] = []

    async def play(self, action: str, who: int, amount: int) -> None:
        have = [one for one in self.asked if one[2].done() and not one[2].cancelled() and one[2].result().amount]
        if action == "take":
            task = asyncio.ensure_future(self.room.take(amount, str(who)))
            self.asked.append((str(who), amount, task))
        elif action == "cancel":
            for _, _, task in self.asked[-1:]:
                task.cancel()
        elif have:
            taken = have[who % len(have)][2].result()
            taken.free() if action == "free" else taken.shrink(amount)
        for _ in range(3):
            await asyncio.sleep(0)

    def held(self, who: str | None = None) -> int:
        done = [(name, task) for name, _, task in self.asked if task.done() and not task.cancelled()]
        return sum(task.result().amount for name, task in done if who in (None, name))

    def waiting(self) -> list[tuple[str, int]]:
        return [(name, amount) for name, amount, task in self.asked if not task.done()]


@given(ACTIONS)
def test_amounts_always_add_up(actions: list[tuple[str, int, int]]) -> None:
    async def play() -> None:
        room = Room(10, of_one=7, most=1000)
        players = Players(room)
        for action in actions:
            await players.play(*action)
            assert players.held() + room.left == 10
            assert room.left >= 0
            for name, amount in players.waiting():  # somebody ahead of it, or too little for it
                fits = amount <= room.left and players.held(name) + amount <= 7
                assert not fits or len(players.waiting()) > 1
        while players.waiting() or players.held():
            before = players.held(), len(players.waiting())
            for _ in range(4):
                await players.play("free", 0, 1)
            assert (players.held(), len(players.waiting())) != before, "somebody waits for ever"
        assert room.left == 10

    asyncio.run(play())


def test_callers_in_turn() -> None:
    async def play() -> None:
        room = Room(2, most=100)
        first = await room.take(2, "flood")
        order: list[str] = []

        async def go(name: str) -> None:
            taken = await room.take(2, name)
            order.append(name)
            taken.free()

        tasks = [asyncio.ensure_future(go("flood")) for _ in range(5)]
        await asyncio.sleep(0)
        tasks.append(asyncio.ensure_future(go("me")))
        await asyncio.sleep(0)
        first.free()
        await asyncio.gather(*tasks)
        assert order.index("me") <= 1

    asyncio.run(play())


def test_the_line_is_bounded() -> None:
    async def play(most: int) -> None:
        room = Room(1, most=most)
        taken = await room.take(1, "a")
        waiting = [asyncio.ensure_future(room.take(1, "b")) for _ in range(most)]
        await asyncio.sleep(0)
        with pytest.raises(ApiError, match="wait already: try again later") as refused:
            await room.take(1, "c")
        assert refused.value.status == 429
        taken.free()
        for one in waiting:
            (await one).free()
        assert room.left == 1

    for most in (0, 2):
        asyncio.run(play(most))


def test_a_request_that_is_cancelled_at_its_turn_gives_it_on() -> None:
    async def play() -> None:
        room = Room(1, most=9)
        taken = await room.take(1, "a")
        second, third = (asyncio.ensure_future(room.take(1, "b")) for _ in range(2))
        await asyncio.sleep(0)
        taken.free()
        second.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await second
        assert (await third).amount == 1

    coroutine: Coroutine[Any, Any, None] = play()
    asyncio.run(coroutine)
