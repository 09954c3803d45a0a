"""Fails a coroutine test that leaves tasks behind, in its own event loop or in one that its module shares."""

import asyncio
from collections.abc import AsyncIterator

import pytest

GRACE_S = 60.0
"""Seconds that a thread, task or process may take to end after it was told to, on however busy a machine."""


async def no_task_left_behind() -> AsyncIterator[None]:
    """Fails a coroutine test whose tasks outlive it and its fixtures.

    To be made a fixture, `_no_task_left_behind`, by modules whose tests share a loop: of the loop that they run in.
    """
    before = asyncio.all_tasks()
    yield
    left = asyncio.all_tasks() - before - {asyncio.current_task()}
    if left:
        _, left = await asyncio.wait(left, timeout=GRACE_S)
    if left:
        pytest.fail(f"asyncio tasks left running: {left}", pytrace=False)
