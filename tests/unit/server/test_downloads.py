"""Calls beside the event loop for which nobody waits at the end."""

import asyncio
import threading
from contextlib import suppress

import pytest

from swarmllm.server.downloads import in_background


async def test_its_value_or_its_exception() -> None:
    assert await in_background(lambda: 7) == 7
    with pytest.raises(OSError, match="full"):
        await in_background(fail)


def fail() -> None:
    raise OSError("the disk is full")


def test_the_loop_ends_without_it() -> None:
    waited_for = threading.Event()

    async def leave() -> None:
        waiting = asyncio.create_task(in_background(waited_for.wait))
        await asyncio.sleep(0.01)
        waiting.cancel()
        with suppress(asyncio.CancelledError):
            await waiting

    asyncio.run(leave())
    assert [thread.name for thread in threading.enumerate() if thread.name == "swarmllm-background"]
    waited_for.set()
