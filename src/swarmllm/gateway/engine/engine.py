"""Many requests at once: some worker threads, a few that may wait, the others are turned away.

The routes call `start`, in the event loop; every prompt is one `Generation` on a thread of its own, because
transformers' `generate()` is synchronous. Servers see sessions that step at the same time and batch them.
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
"""A reader that nobody wakes looks again after that."""

CROWD = 4
GATHER_S = 0.01
"""With more prompts than `CROWD` under way, readers are woken so often at most: each waking takes the interpreter lock
from the threads that make tokens, and finds cold caches. Measured with 16 streams, whose tokens come 40 ms apart."""


class Engine:
    """Lives in the event loop of the web server."""

    def __init__(self, metrics: GatewayMetrics, *, max_concurrent: int, max_waiting: int) -> None:
        self._metrics = metrics
        self._threads = ThreadPoolExecutor(max_concurrent, thread_name_prefix="generate")
        self._max_concurrent = max_concurrent
        self._capacity = max_concurrent + max_waiting
        self._under_way: dict[Generation, int] = {}
        """In the order in which they have their turn, with the place in the queue that each was told; 0: it runs."""
        self._computing = 0
        """Requests that write nothing, under way."""
        self._closing = False
        self._bell = _Bell(lambda: len(self._under_way) > CROWD)

    def start(self, model: LanguageModel, prompts: Sequence[list[int]], options: GenerationOptions) -> "Answering":
        """Begin to answer each prompt by this model.

        Raises:
            ApiError: there is no room for them now.
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
            self._threads.submit(self._run, generation, asyncio.get_running_loop())
        answering.place = self._tell_places().get(answering.generations[0], 0)
        self._show_load()
        return answering

    async def compute(self, function: Callable[[], Result]) -> Result:
        """What a function returns that runs in a worker thread, as one more prompt.

        Raises:
            ApiError: there is no room for it now; and what the function raises.
        """
        self._require_room(1)
        self._computing += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, function)
        finally:
            self._computing -= 1

    def check_open(self) -> None:
        """For functions of `compute` that take long. Raises: ApiError: the gateway is going away."""
        if self._closing:
            raise _going_away()

    def count_prompt(self, num_tokens: int) -> None:
        """Have the metrics know of a prompt; from any thread."""
        self._metrics.prompt_tokens.inc(num_tokens)

    def count_written(self, num_tokens: int) -> None:
        """The same of tokens that functions of `compute` have had written."""
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
        """Give up what is under way, and end the threads."""
        self._closing = True
        for generation in list(self._under_way):
            generation.cancel(_going_away())
        await asyncio.to_thread(self._threads.shutdown)

    def _run(self, generation: Generation, loop: asyncio.AbstractEventLoop) -> None:
        """In a worker thread."""
        generation.run()
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(self._ended, generation)

    def _ended(self, generation: Generation) -> None:
        self._under_way.pop(generation, None)
        free_memory([generation.prompt_ids])
        self._tell_places()
        self._show_load()

    def _tell_places(self) -> dict[Generation, int]:
        """To those whose place in the queue has changed; returns all places."""
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
    return ApiError(503, "the gateway is going away", code="shutting_down", retry_after_s=RETRY_AFTER_S)


class Waiter:
    """Who waits for what a function of `Engine.compute` makes; the function asks for it by `go_on`, in its thread."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._gone = threading.Event()

    def cancel(self) -> None:
        """Nobody waits any more."""
        self._gone.set()

    def go_on(self) -> None:
        """Raises: ApiError: nobody waits any more, or the gateway is going away."""
        self._engine.check_open()
        if self._gone.is_set():
            raise ApiError(499, "nobody waits for this any more")


class _Bell:
    """Wakes readers in the event loop, in a crowd those of the last `GATHER_S` together."""

    def __init__(self, is_crowded: Callable[[], bool]) -> None:
        self._is_crowded = is_crowded
        self._rung_for: deque[asyncio.Event] = deque()
        self._answered = False
        """Whether `_wake` is going to be called."""

    def ring(self, reader: asyncio.Event, loop: asyncio.AbstractEventLoop) -> None:
        """From any thread."""
        self._rung_for.append(reader)
        if not self._answered:
            self._answered = True
            with contextlib.suppress(RuntimeError):  # the loop has ended: nobody listens any more
                loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        self._answered = in_a_crowd = bool(self._rung_for) and self._is_crowded()
        if in_a_crowd:
            asyncio.get_running_loop().call_later(GATHER_S, self._wake)
        while self._rung_for:  # after saying whether we come again: whoever rings now is seen here, or rings again
            self._rung_for.popleft().set()


class Answering:
    """The generations of one request; iterate over their events until all have ended."""

    def __init__(self, bell: _Bell) -> None:
        self.generations: list[Generation] = []
        self._loop = asyncio.get_running_loop()
        self._bell = bell
        self._events: deque[Event] = deque()  # bounded by the request's max_tokens
        self._arrived = asyncio.Event()
        self._num_ended = 0
        self.place = 0
        """In the queue, when it began; 0: it had its turn at once."""

    def take(self, event: Event) -> None:
        """From any thread. Events that come while the reader is still to wake up are read together."""
        self._events.append(event)
        self._bell.ring(self._arrived, self._loop)

    def cancel(self) -> None:
        """Nobody listens any more. Harmless when all have ended."""
        for generation in self.generations:
            generation.cancel()

    async def some(self, timeout_s: float) -> list[Event]:
        """What has happened since the last call; nothing after the timeout, or when all has ended."""
        if self._num_ended == len(self.generations):
            return []
        patience = self._loop.call_later(timeout_s, self._arrived.set)
        try:
            await self._arrived.wait()
        finally:
            patience.cancel()
        self._arrived.clear()  # before looking: what comes now wakes us again
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
