"""Doing several things at once, and none of them any more after the first has failed."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


Job = Callable[[], Awaitable[T]]


async def in_turns(groups: Sequence[tuple[int, Sequence[Job[T]]]]) -> list[T]:
    """The values of all jobs, group after group; of each a given number run at a time, and they begin in turns.

    So what all groups go through first soon has something for each of them.
    """

    def limited(job: Job[T], limit: asyncio.Semaphore) -> Job[T]:
        async def run() -> T:
            async with limit:
                return await job()

        return run

    jobs: list[tuple[float, Job[T]]] = []
    for most, of_group in groups:
        limit = asyncio.Semaphore(most)
        jobs += [(place / len(of_group), limited(job, limit)) for place, job in enumerate(of_group)]
    order = sorted(range(len(jobs)), key=lambda place: jobs[place][0])
    values = dict(zip(order, await gather([jobs[place][1] for place in order]), strict=True))
    return [values[place] for place in range(len(jobs))]


async def gather(jobs: Sequence[Job[T]]) -> list[T]:
    """The values of all jobs, in order; the first error cancels the others.

    asyncio.gather would let the others run on.
    """

    async def run(job: Job[T]) -> T:
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
