"""How tests kill servers at an exact moment: never after some time, always when something has happened."""

import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil
import torch
from swarm_models import OPTIONS, TIMEOUT_S, wait_until
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from swarmllm import LocalSwarm
from swarmllm.data_structures import Span
from swarmllm.demo.local_swarm import LocalServer

SPANS = [(0, 2), (2, 4), (4, 6)]
PLACES = {"first": 0, "middle": 2, "last": 5}
"""A block of each: a route may cut a span between its two servers, where measurements on a busy machine say so."""


class Faulty:
    """Servers of these spans, by default two of each of three; `mend()` replaces the dead ones."""

    running: "Faulty | None" = None

    def __init__(self, model: Path, spans: Sequence[tuple[int, int]] = SPANS * 2) -> None:
        self._spans = Counter(spans)
        # Short periods: the records of the dead go soon.
        self._swarm = LocalSwarm(model, spans=spans, update_period=2, **OPTIONS)

    @property
    def initial_peers(self) -> list[str]:
        return self._swarm.initial_peers

    @property
    def living(self) -> list[LocalServer]:
        return [server for server in self._swarm.servers if server.alive]

    def mend(self) -> None:
        """Start servers until each span has as many as at the begin."""
        for span in (self._spans - Counter((s.span.start, s.span.end) for s in self.living)).elements():
            self._swarm.add_server(span)

    def add(self, span: Span) -> LocalServer:
        """One more server for a span."""
        return self._swarm.add_server((span.start, span.end))

    def server(self, peer_id: str) -> LocalServer:
        return next(server for server in self._swarm.servers if server.peer_id == peer_id)

    def on_route(self, route: list[Any], place: str) -> LocalServer:
        """The first, a middle or the last server of a route."""
        (peer_id,) = [hop.server.peer_id for hop in route if PLACES[place] in hop.span]
        return self.server(peer_id)

    def twin(self, server: LocalServer) -> LocalServer:
        """The other server of the same span."""
        (twin,) = [other for other in self.living if other.span == server.span and other is not server]
        return twin

    def __enter__(self) -> Self:
        self._swarm.start()
        Faulty.running = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        Faulty.running = None
        self._swarm.stop()


class AtToken(LogitsProcessor):
    """Calls `action` when generate() has the scores of its token number `token`; changes no scores."""

    def __init__(self, token: int, action: Callable[[], object]) -> None:
        self._left, self._action = token, action

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self._left -= 1
        if self._left == 0:
            self._action()
        return scores


def at_token(token: int, action: Callable[[], object]) -> LogitsProcessorList:
    return LogitsProcessorList([AtToken(token, action)])


def freeze(server: LocalServer) -> None:
    """SIGSTOP: whatever it is sent from now on stays unanswered. Its p2pd goes on."""
    os.kill(server.pid, signal.SIGSTOP)
    wait_until(lambda: psutil.Process(server.pid).status() == psutil.STATUS_STOPPED, "the stop")


class Doom:
    """Kills servers in the midst of what they do: each is frozen first, so that it can't be done too soon."""

    def __init__(self) -> None:
        self._threads: list[tuple[threading.Thread, LocalServer]] = []

    def __call__(self, server: LocalServer, under_way: Callable[[], object]) -> None:
        """Freeze the server now, and kill it as soon as `under_way()`."""
        freeze(server)

        def kill() -> None:
            try:
                wait_until(under_way, "a request to the frozen server")
            finally:
                server.kill()

        thread = threading.Thread(target=kill, name="doom")
        thread.start()
        self._threads.append((thread, server))

    def fulfil(self) -> None:
        """All that were to die have died, before anything timed out."""
        for thread, server in self._threads:
            thread.join(TIMEOUT_S)
            assert not thread.is_alive()
            assert not server.alive


def gradients(model: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
    embeds = model.get_input_embeddings()(ids).detach().requires_grad_()
    loss = model(inputs_embeds=embeds, labels=ids).loss
    loss.backward()
    return loss.detach(), embeds.grad


def assert_all_close(got: Any, expected: Any) -> None:
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other)
