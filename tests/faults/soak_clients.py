"""Honest clients beside hostile peers: each generates one text after the other, and compares it with the local model's.

Run by `soak_run` in some processes of several clients each. What they report: when each token came, and after how long.
"""

import multiprocessing
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from swarmllm import AutoDistributedModel, ClientConfig
from swarmllm.errors import SwarmError


@dataclass(frozen=True)
class Token:
    """One that a client got."""

    client: int
    at: float
    """Times of `time.monotonic()`, which all processes of a machine share."""
    seconds: float
    """Since the one before; of a text's first one, since the client asked."""
    is_first: bool


@dataclass(frozen=True)
class Ended:
    """One text of a client."""

    client: int
    at: float
    is_right: bool
    error: str = ""
    counts: Mapping[str, int] | None = None
    """The counts of its client so far (`SwarmView.counts`)."""


class _Tokens(BaseStreamer):
    def __init__(self, client: int) -> None:
        self.tokens: list[Token] = []
        self._client, self._since = client, time.monotonic()
        self._prompt_seen = False

    def put(self, value: Tensor) -> None:
        if self._prompt_seen:
            now = time.monotonic()
            self.tokens.append(Token(self._client, now, now - self._since, not self.tokens))
            self._since = now
        self._prompt_seen = True

    def end(self) -> None:
        pass


def run_clients(
    model: Path,
    initial_peers: Sequence[str],
    clients: Mapping[int, Mapping[str, Any]],
    texts: Sequence[tuple[list[int], list[int]]],
    ready: Any,
    reports: Any,
    end: Event,
    pause_s: float,
) -> None:
    """The clients of one process, by number, with their settings, until `end` is set or who started it has ended.

    `texts`: prompts and answers. After each text a client pauses.
    """
    torch.set_num_threads(1)
    threading.Thread(target=_end_with_parent, daemon=True).start()

    def run(number: int, config: Mapping[str, Any]) -> None:
        with AutoDistributedModel.from_pretrained(
            str(model), initial_peers=initial_peers, client_config=ClientConfig(**config)
        ) as swarm_model:
            _generate(swarm_model, number, texts, ready, reports, end, pause_s)

    threads = [threading.Thread(target=run, args=one, name=f"client {one[0]}") for one in clients.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _end_with_parent() -> None:
    """At once: a parent that was killed has set no event, and takes no reports."""
    if parent := multiprocessing.parent_process():
        parent.join()
        os._exit(1)


def _generate(
    model: Any,
    number: int,
    texts: Sequence[tuple[list[int], list[int]]],
    ready: Any,
    reports: Any,
    end: Event,
    pause_s: float,
) -> None:
    turn = number
    while not end.is_set():
        prompt, expected = texts[turn % len(texts)]
        ids = torch.tensor([prompt])
        turn += 1
        streamer, error, got = _Tokens(number), "", list[int]()
        try:
            new_tokens = len(expected) - len(prompt)
            got = model.generate(ids, max_new_tokens=new_tokens, do_sample=False, streamer=streamer)[0].tolist()
        except SwarmError as failed:
            error = f"{failed.code}: {failed}"
        counts = dict(model.swarm.counts)
        reports.put((streamer.tokens, Ended(number, time.monotonic(), got == expected, error, counts)))
        if turn == number + 2:
            ready.release()
        end.wait(pause_s)
