"""Several jobs at once: in which order they begin, and whose values come out."""

import asyncio
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmllm.client.view.event_loop import in_turns


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 7)), max_size=5))
def test_values_come_in_order_and_no_group_has_more_under_way_than_it_may(groups: list[tuple[int, int]]) -> None:
    under_way, most = [0] * len(groups), [0] * len(groups)

    async def job(group: int, place: int) -> tuple[int, int]:
        under_way[group] += 1
        most[group] = max(most[group], under_way[group])
        await asyncio.sleep(0)
        under_way[group] -= 1
        return group, place

    jobs = [(limit, [partial(job, group, place) for place in range(n)]) for group, (limit, n) in enumerate(groups)]
    found = asyncio.run(in_turns(jobs))
    assert found == [(group, place) for group, (_, n) in enumerate(groups) for place in range(n)]
    assert most == [min(limit, n) for limit, n in groups]


async def test_groups_begin_in_turns() -> None:
    began: list[str] = []

    async def job(name: str) -> None:
        began.append(name)
        await asyncio.sleep(0)

    await in_turns([(9, [partial(job, f"a{i}") for i in range(4)]), (9, [partial(job, f"b{i}") for i in range(2)])])
    assert began == ["a0", "b0", "a1", "a2", "b1", "a3"]


async def test_the_first_error_ends_all() -> None:
    cancelled: list[bool] = []

    async def fails() -> None:
        raise ValueError("no")

    async def waits() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    with pytest.raises(ValueError, match="no"):
        await in_turns([(1, [waits]), (1, [fails])])
    assert cancelled == [True]
