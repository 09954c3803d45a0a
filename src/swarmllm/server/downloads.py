"""Run calls that may take minutes (downloads, looks at files) without blocking the event loop or the end of the
process.

asyncio waits for its own threads (`to_thread`) when the loop ends, so Ctrl-C would wait for the hub.
"""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


async def in_background(call: Callable[[], T]) -> T:
    """Run `call()` in a thread of its own, and return its value. If this is cancelled, the thread goes on alone."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(value: T | None, error: BaseException | None) -> None:
        if done.done():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(value)  # type: ignore[arg-type]

    def run() -> None:
        outcome: tuple[T | None, BaseException | None]
        try:
            outcome = call(), None
        except BaseException as error:  # noqa: BLE001  raised where it is awaited
            outcome = None, error
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(settle, *outcome)

    threading.Thread(target=run, name="swarmllm-background", daemon=True).start()
    return await done
