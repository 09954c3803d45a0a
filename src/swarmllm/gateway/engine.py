"""Many requests at once on one model: so many worker threads, so many that may wait, the others are turned away.

The routes call `start`, in the event loop; every prompt is one `Generation` on a thread of its own, because
transformers' `generate()` is synchronous. Servers see sessions that step at the same time and batch them.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from swarmllm.gateway.errors import RETRY_AFTER_S, ApiError
from swarmllm.gateway.events import Ended, Event
from swarmllm.gateway.generation import Generation, GenerationOptions
from swarmllm.gateway.language_model import LanguageModel
from swarmllm.gateway.metrics import GatewayMetrics

PATIENCE_S = 60.0
"""A reader that nobody wakes looks again after that."""


class Engine:
    """Lives in the event loop of the web server."""

    def __init__(self, model: LanguageModel, metrics: GatewayMetrics, *, max_concurrent: int, max_waiting: int) -> None:
        self.model = model
        self._metrics = metrics
        self._threads = ThreadPoolExecutor(max_concurrent, thread_name_prefix="generate")
        self._max_concurrent = max_concurrent
        self._capacity = max_concurrent + max_waiting
        self._under_way: set[Generation] = set()
        self._closing = False

    def start(self, prompts: Sequence[list[int]], options: GenerationOptions) -> "Answering":
        """Begin to answer each prompt.

        Raises:
            ApiError: there is no room for them now.
        """
        if self._closing:
            raise _going_away()
        if len(self._under_way) + len(prompts) > self._capacity:
            raise ApiError(
                429,
                f"the gateway answers {self._max_concurrent} prompts at a time, and its queue is full: try again later",
                code="queue_full",
                retry_after_s=RETRY_AFTER_S,
            )
        answering = Answering()
        for number, prompt_ids in enumerate(prompts):
            generation = Generation(
                self.model,
                self._metrics,
                prompt_ids,
                options,
                answering.take,
                first_index=number * options.n,
            )
            answering.generations.append(generation)
        for generation in answering.generations:
            self._under_way.add(generation)
            self._threads.submit(self._run, generation, asyncio.get_running_loop())
        self._show_load()
        return answering

    @property
    def num_under_way(self) -> int:
        """Prompts that run or wait."""
        return len(self._under_way)

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
        self._under_way.discard(generation)
        self._show_load()

    def _show_load(self) -> None:
        running = min(len(self._under_way), self._max_concurrent)
        self._metrics.running.set(running)
        self._metrics.waiting.set(len(self._under_way) - running)


def _going_away() -> ApiError:
    return ApiError(503, "the gateway is going away", code="shutting_down", retry_after_s=RETRY_AFTER_S)


class Answering:
    """The generations of one request; iterate over their events until all have ended."""

    def __init__(self) -> None:
        self.generations: list[Generation] = []
        self._loop = asyncio.get_running_loop()
        self._events: deque[Event] = deque()  # bounded by the request's max_tokens
        self._arrived = asyncio.Event()
        self._woken = False
        self._num_ended = 0

    def take(self, event: Event) -> None:
        """From any thread. Events that come while the reader is still to wake up are read together."""
        self._events.append(event)
        if not self._woken:
            self._woken = True
            with contextlib.suppress(RuntimeError):  # the loop has ended: nobody listens any more
                self._loop.call_soon_threadsafe(self._arrived.set)

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
        self._arrived.clear()
        self._woken = False  # before looking: what comes now wakes us again
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
