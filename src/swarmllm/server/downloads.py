"""What may take minutes beside the event loop, and keeps no process from ending: downloads and looks at files.

asyncio's own threads (`to_thread`) are waited for when the loop ends, so that Ctrl-C would wait for the hub.
"""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


async def in_background(call: Callable[[], T]) -> T:
    """The value of `call()`, run in a thread of its own; if this is cancelled, or the process ends, nobody waits."""
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
        except BaseException as error:  # noqa: BLE001  raised where it is waited for
            outcome = None, error
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(settle, *outcome)

    threading.Thread(target=run, name="swarmllm-background", daemon=True).start()
    return await done
