"""Doing several things at once, and none of them any more after the first has failed."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


async def gather(jobs: Sequence[Callable[[], Awaitable[T]]], limit: asyncio.Semaphore | None = None) -> list[T]:
    """The values of all jobs, in order, of which `limit` run at a time; the first error cancels the others.

    asyncio.gather would let the others run on.
    """

    async def run(job: Callable[[], Awaitable[T]]) -> T:
        if limit is None:
            return await job()
        async with limit:
            return await job()

    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(run(job)) for job in jobs]
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from None
    return [task.result() for task in running]
