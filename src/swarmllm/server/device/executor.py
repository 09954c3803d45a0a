"""The way to the device thread, the only place where blocks and caches are touched, and back to who waits for it.

Called by sessions and batch requests from the event loop; knows neither streams nor messages.
"""

import asyncio
import sys
import time
from collections.abc import Callable, Generator
from contextlib import suppress
from functools import partial
from typing import Never, TypeVar, cast

from torch import Tensor

from swarmllm.errors import BlocksNotServedError, LocalProtocolError
from swarmllm.server.device.calls import Call, SessionStep, Timed, described, next_turn
from swarmllm.server.device.device_thread import DeviceThread, LostContextError, Settled
from swarmllm.server.device.fairness import HOUSE, Account
from swarmllm.server.device.niceness import Niceness
from swarmllm.server.device.scheduler import Budget, Priority

T = TypeVar("T")

CLOSE_TIMEOUT_S = 2.0
"""A server must be gone within 10 s of SIGTERM, however long a block's load or a batch would still take."""


class Executor:
    """Runs calls in one thread of its own. `close()` ends the thread after the calls that are queued."""

    def __init__(
        self, budget: Budget | None = None, niceness: Niceness | None = None, *, name: str = "swarmllm-device"
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiting: set[asyncio.Future[Timed[object]]] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._death: asyncio.Future[BaseException] = self._loop.create_future()
        """What ended the thread, if that is a mistake."""
        self.thread = DeviceThread(
            budget or Budget(),
            niceness or Niceness(),
            name=name,
            on_settled=partial(self._tell_loop, _settle),
            on_death=partial(self._tell_loop, self._died),
        )

    @property
    def num_calls(self) -> int:
        """Calls that are queued or running."""
        return len(self._waiting)

    async def run(self, call: Callable[[], T], priority: Priority, account: Account = HOUSE) -> Timed[T]:
        """The value of `call()`, run in the device thread on its own, for `account`; its exceptions are raised here.

        A call that is cancelled before its turn is not run.
        """
        return cast(Timed[T], await self._result(priority, account, num_tokens=1, run=call))

    async def run_in_turns(
        self, turns: Generator[None, None, T], priority: Priority, account: Account = HOUSE
    ) -> Timed[T]:
        """The value of work that lets those pass who are more urgent, wherever it yields; otherwise as `run`.

        Once begun, it comes before all that waits and isn't more urgent. If it is cancelled, it isn't continued.
        """
        # How many turns it takes shows when it has ended.
        run = partial(next_turn, turns)
        return cast(Timed[T], await self._result(priority, account, num_tokens=sys.maxsize, run=run))

    async def step(self, step: SessionStep) -> Timed[Tensor]:
        """The step's outputs, computed in the device thread together with other sessions' steps; raises what fails it.

        A step that is cancelled before its turn is not run.
        """
        return cast(
            Timed[Tensor], await self._result(step.priority, step.account, step.num_tokens, step.granule, step=step)
        )

    async def _result(
        self,
        priority: Priority,
        account: Account,
        num_tokens: int,
        granule: int = 1,
        *,
        run: Callable[[], object] | None = None,
        step: SessionStep | None = None,
    ) -> Timed[object]:
        if self._death.done():
            raise _ended_here(self._death.result())
        call = Call(
            num_tokens=num_tokens,
            granule=granule,
            priority=priority,
            queued_at=time.perf_counter(),
            session=None if step is None else step.session,
            account=account,
            future=self._loop.create_future(),
            run=run,
            step=step,
        )
        self.thread.put(call)
        self._idle.clear()
        self._waiting.add(call.future)
        try:
            return await call.future
        except asyncio.CancelledError:
            self.thread.withdraw(call)
            raise
        finally:
            self._waiting.discard(call.future)
            if not self._waiting:
                self._idle.set()

    async def wait_until_idle(self) -> None:
        """Return when nothing is queued or running."""
        await self._idle.wait()

    async def watch(self) -> Never:
        """Wait until the thread ends without having been told to; everybody who waits for it is told as well.

        Raises:
            LocalProtocolError: it has ended, so this server can't compute any more.
        """
        error = await asyncio.shield(self._death)
        if isinstance(error, LostContextError):
            raise LocalProtocolError(
                f"this server's device can't be used by its process any more ({error}): start the server again, and if "
                "that happens more than once, look whether the device is in order"
            )
        raise LocalProtocolError(
            f"the device thread, which computes for this server, ended by a mistake of swarmllm ({described(error)}): "
            "start the server again, and please report it"
        )

    async def close(self) -> None:
        """Let what is queued finish, then end the thread; a call that takes longer ends with the process."""
        self.thread.stop()
        await asyncio.to_thread(self.thread.join, CLOSE_TIMEOUT_S)

    def _died(self, error: BaseException) -> None:
        self._death.set_result(error)
        for future in self._waiting:
            if not future.done():
                future.set_exception(_ended_here(error))

    def _tell_loop(self, tell: Callable[[T], None], what: T) -> None:
        """Called in the device thread."""
        with suppress(RuntimeError):  # the loop is closed: the server is gone and nobody waits
            self._loop.call_soon_threadsafe(tell, what)


def _settle(settled: Settled) -> None:
    for call, outcome in settled:
        call.settle(outcome)


def _ended_here(error: BaseException) -> BlocksNotServedError:
    reason = str(error) if isinstance(error, LostContextError) else described(error)
    return BlocksNotServedError(f"this server can't compute any more ({reason}); take another route")
