"""Many requests at once: worker threads, a bounded queue, and a refusal for all others.

Routes call `start` in the event loop. Each prompt is a `Generation` on a thread of its own, because transformers'
`generate()` is synchronous. Servers compute the steps of these sessions together.
"""

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from swarmllm.gateway.engine.generation import Generation, GenerationOptions
from swarmllm.gateway.engine.language_model import LanguageModel
from swarmllm.gateway.engine.vision import free_memory
from swarmllm.gateway.errors import RETRY_AFTER_S, ApiError
from swarmllm.gateway.metrics import GatewayMetrics
from swarmllm.gateway.text import Ended, Event

Result = TypeVar("Result")
PATIENCE_S = 60.0
"""A reader looks again after this time, even if nothing wakes it."""

CROWD = 4
GATHER_S = 0.01
"""With more than `CROWD` prompts under way, readers are woken at most this often. Each wake-up takes the
interpreter lock from the threads that make tokens, and finds cold caches. Measured with 16 streams whose tokens
come 40 ms apart."""


class Engine:
    """Runs generations. It belongs to the web server's event loop."""

    def __init__(self, metrics: GatewayMetrics, *, max_concurrent: int, max_waiting: int) -> None:
        self._metrics = metrics
        self._threads = ThreadPoolExecutor(max_concurrent, thread_name_prefix="generate")
        self._max_concurrent = max_concurrent
        self._capacity = max_concurrent + max_waiting
        self._under_way: dict[Generation, int] = {}
        """Each generation, in the order of their turns, with the place in the queue that it was told last; 0: it
        runs."""
        self._computing = 0
        """Requests under way that write no text."""
        self._closing = False
        self._bell = _Bell(lambda: len(self._under_way) > CROWD)

    def start(self, model: LanguageModel, prompts: Sequence[list[int]], options: GenerationOptions) -> "Answering":
        """Begin to answer each prompt with this model.

        Raises:
            ApiError: the queue is full.
        """
        self._require_room(len(prompts))
        answering = Answering(self._bell)
        for number, prompt_ids in enumerate(prompts):
            generation = Generation(
                model,
                self._metrics,
                prompt_ids,
                options,
                answering.take,
                first_index=number * options.n,
            )
            answering.generations.append(generation)
        for generation in answering.generations:
            self._under_way[generation] = 0
            model.begin_use()
            self._threads.submit(self._run, generation, model, asyncio.get_running_loop())
        answering.place = self._tell_places().get(answering.generations[0], 0)
        self._show_load()
        return answering

    async def compute(self, function: Callable[[], Result]) -> Result:
        """Run a function in a worker thread, as one more prompt, and return its result.

        Raises:
            ApiError: the queue is full; and errors of the function.
        """
        self._require_room(1)
        self._computing += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, function)
        finally:
            self._computing -= 1

    def check_open(self) -> None:
        """For long functions of `compute`. Raises: ApiError: the gateway shuts down."""
        if self._closing:
            raise _going_away()

    def count_prompt(self, num_tokens: int) -> None:
        """Count a prompt's tokens in the metrics. From any thread."""
        self._metrics.prompt_tokens.inc(num_tokens)

    def count_written(self, num_tokens: int) -> None:
        """Count written tokens in the metrics. From any thread."""
        self._metrics.tokens.inc(num_tokens)

    def _require_room(self, num_prompts: int) -> None:
        self.check_open()
        if self.num_under_way + num_prompts > self._capacity:
            raise queue_full(self._max_concurrent)

    @property
    def num_under_way(self) -> int:
        """Prompts that run or wait."""
        return len(self._under_way) + self._computing

    async def close(self) -> None:
        """Cancel all generations, and end the threads."""
        self._closing = True
        for generation in list(self._under_way):
            generation.cancel(_going_away())
        await asyncio.to_thread(self._threads.shutdown)

    def _run(self, generation: Generation, model: LanguageModel, loop: asyncio.AbstractEventLoop) -> None:
        """Run in a worker thread."""
        generation.run()
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(self._ended, generation, model)

    def _ended(self, generation: Generation, model: LanguageModel) -> None:
        self._under_way.pop(generation, None)
        model.end_use()
        free_memory([generation.prompt_ids])
        self._tell_places()
        self._show_load()

    def _tell_places(self) -> dict[Generation, int]:
        """Tell generations their places in the queue where these have changed; return all places."""
        for number, (generation, told) in enumerate(self._under_way.items()):
            place = max(0, number - self._max_concurrent + 1)
            if place != told:
                self._under_way[generation] = place
                generation.on_place(place)
        return self._under_way

    def _show_load(self) -> None:
        running = min(len(self._under_way), self._max_concurrent)
        self._metrics.running.set(running)
        self._metrics.waiting.set(len(self._under_way) - running)


def queue_full(max_concurrent: int) -> ApiError:
    return ApiError(
        429,
        f"the gateway answers {max_concurrent} prompts at a time, and its queue is full: try again later",
        code="queue_full",
        retry_after_s=RETRY_AFTER_S,
    )


def _going_away() -> ApiError:
    return ApiError(503, "the gateway is shutting down", code="shutting_down", retry_after_s=RETRY_AFTER_S)


class Waiter:
    """A request that waits for a function of `Engine.compute`. The function calls `go_on` now and then, in its
    thread."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._gone = threading.Event()

    def cancel(self) -> None:
        """The client has gone."""
        self._gone.set()

    def go_on(self) -> None:
        """Raises: ApiError: the client has gone, or the gateway shuts down."""
        self._engine.check_open()
        if self._gone.is_set():
            raise ApiError(499, "the client has gone")


class _Bell:
    """Wakes readers in the event loop; in a crowd, all of the last `GATHER_S` together."""

    def __init__(self, is_crowded: Callable[[], bool]) -> None:
        self._is_crowded = is_crowded
        self._rung_for: deque[asyncio.Event] = deque()
        self._answered = False
        """A call of `_wake` is due."""

    def ring(self, reader: asyncio.Event, loop: asyncio.AbstractEventLoop) -> None:
        """Wake a reader soon. From any thread."""
        self._rung_for.append(reader)
        if not self._answered:
            self._answered = True
            with contextlib.suppress(RuntimeError):  # the loop has ended, and all readers with it
                loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        self._answered = in_a_crowd = bool(self._rung_for) and self._is_crowded()
        if in_a_crowd:
            asyncio.get_running_loop().call_later(GATHER_S, self._wake)
        while self._rung_for:  # only now: a later reader is woken here, or schedules `_wake` itself
            self._rung_for.popleft().set()


class Answering:
    """The generations of one request. Iterate over their events until all have ended."""

    def __init__(self, bell: _Bell) -> None:
        self.generations: list[Generation] = []
        self._loop = asyncio.get_running_loop()
        self._bell = bell
        self._events: deque[Event] = deque()  # bounded by the request's max_tokens
        self._arrived = asyncio.Event()
        self._num_ended = 0
        self.place = 0
        """Place in the queue at the start; 0: it ran at once."""

    def take(self, event: Event) -> None:
        """Add an event, from any thread. A reader gets all events that came before it woke up."""
        self._events.append(event)
        self._bell.ring(self._arrived, self._loop)

    def cancel(self) -> None:
        """Cancel all generations. Does nothing if they have ended."""
        for generation in self.generations:
            generation.cancel()

    async def some(self, timeout_s: float) -> list[Event]:
        """Events since the last call; empty after the timeout, or when all has ended."""
        if self._num_ended == len(self.generations):
            return []
        patience = self._loop.call_later(timeout_s, self._arrived.set)
        try:
            await self._arrived.wait()
        finally:
            patience.cancel()
        self._arrived.clear()  # before reading: an event that comes now wakes the reader again
        events = [self._events.popleft() for _ in range(len(self._events))]
        self._num_ended += sum(isinstance(event, Ended) for event in events)
        return events

    @property
    def has_ended(self) -> bool:
        """All events have been read."""
        return self._num_ended == len(self.generations)

    async def __aiter__(self) -> AsyncIterator[Event]:
        while not self.has_ended:
            for event in await self.some(PATIENCE_S):
                yield event
