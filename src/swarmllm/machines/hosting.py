"""The server processes of this machine: fetch their weights, start them, watch them, end them.

Used by the agent, which decides what to start and to end (`decisions.next_steps`). The life of one server:

    waiting    nobody gives its weights yet
    fetching   they are on their way
    loading    it reads them
    online     it serves; if the process ends by itself, it starts again
    failed     it ended before it was online; the machine says so for a while, and the others plan without it

A process starts with imports of some seconds. So a machine without servers keeps one process ready.
"""

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from swarmllm.data_structures import printable
from swarmllm.errors import SwarmError
from swarmllm.machines.decisions import Child, Target
from swarmllm.machines.records import Hosted
from swarmllm.machines.weights import Progress
from swarmllm.server.devices import JOIN_LINE, SpareProcess, run_server_process
from swarmllm.server.settings import ServerConfig

logger = logging.getLogger(__name__)

FAILED_S = 120.0
"""Seconds for which a machine says that it can't serve a model, before the swarm may plan with it again. Doubles with
each further failure."""
MOST_DOUBLINGS = 6
PAUSE_S = 2.0
"""Seconds before a server that ended by itself starts again."""
_SERVING = re.compile(r"^swarmllm: serving blocks \[\d+, \d+\) of .* as (\S+)$")
_LOG_LINE = re.compile(r"^\d\d:\d\d:\d\d \w+ ")


@dataclass
class Hosting:
    """One server, from the choice of its blocks until its end."""

    target: Target
    memory_bytes: int
    state: str = "waiting"
    done_bytes: int = 0
    total_bytes: int = 0
    bytes_from_machines: int = 0
    bytes_from_hub: int = 0
    problem: str = ""
    peer_id: str = ""
    """The peer id of the server, once it is online."""
    num_sessions: int | None = None
    """Sessions in progress; None: nobody knows."""
    idle_since: float | None = None
    leaving_since: float | None = None
    is_ending: bool = False
    task: "asyncio.Task[None] | None" = None

    @property
    def is_online(self) -> bool:
        return self.state == "online"

    def count_sessions(self, number: int | None, now: float) -> None:
        """Note the sessions in progress that the server announces."""
        self.num_sessions = number
        self.idle_since = None if number != 0 else now if self.idle_since is None else self.idle_since

    def note_leaving(self, is_leaving: bool, now: float) -> None:
        """Note if this server goes on only until it isn't needed any more."""
        self.leaving_since = None if not is_leaving else now if self.leaving_since is None else self.leaving_since

    def took(self, progress: Progress) -> None:
        """Note how many bytes of weights are here."""
        self.state = "waiting" if progress.problem else "fetching"
        self.done_bytes, self.total_bytes = progress.done_bytes, progress.total_bytes
        self.bytes_from_machines, self.bytes_from_hub = progress.bytes_from_machines, progress.bytes_from_hub
        self.problem = progress.problem

    def as_child(self, now: float) -> Child:
        idle_s = 0.0 if self.idle_since is None else now - self.idle_since
        return Child(
            target=self.target,
            memory_bytes=self.memory_bytes,
            is_online=self.is_online,
            is_ending=self.is_ending,
            idle_s=idle_s,
            leaving_s=0.0 if self.leaving_since is None else now - self.leaving_since,
        )

    def as_hosted(self) -> Hosted:
        """For the record of this machine."""
        span = self.target.span
        return Hosted(
            manifest=self.target.manifest,
            start=span.start,
            end=span.end,
            quant_type=self.target.quant_type,
            state="leaving" if self.leaving_since is not None or self.is_ending else self.state,  # type: ignore[arg-type]
            done_bytes=self.done_bytes,
            total_bytes=self.total_bytes,
            bytes_from_machines=self.bytes_from_machines,
            bytes_from_hub=self.bytes_from_hub,
            problem=self.problem[:200],
        )


@dataclass
class _Failure:
    hosted: Hosted
    until: float
    count: int


class Hostings:
    """All servers of this machine.

    Args:
        fetch: brings the weights of a target, and returns the place to open.
        settings: the settings of its server.
        changed: called at each change that people should see.
    """

    def __init__(
        self,
        fetch: Callable[[Hosting], Awaitable[Path]],
        settings: Callable[[Hosting, Path], ServerConfig],
        changed: Callable[[], None],
    ) -> None:
        self._fetch, self._settings, self._changed = fetch, settings, changed
        self.running: dict[Target, Hosting] = {}
        self._failures: dict[str, _Failure] = {}
        self._spare, self._keeps_spare = SpareProcess(), False

    def keep_one_ready(self) -> None:
        """From now on, have a process for the next server whenever this machine has no servers."""
        self._keeps_spare = True
        self._prepare()

    def _prepare(self) -> None:
        if self._keeps_spare and not self.running:
            self._spare.prepare()

    def start(self, target: Target, memory_bytes: int) -> None:
        """Begin to serve these blocks, in the background."""
        one = self.running[target] = Hosting(target, memory_bytes)
        one.task = asyncio.get_running_loop().create_task(self._run(one), name=f"serve {target.span}")
        self._changed()

    def end(self, target: Target) -> None:
        """End this server politely, in the background: its sessions go on elsewhere."""
        one = self.running[target]
        one.is_ending = True
        if one.task is not None:
            one.task.cancel()
        self._changed()

    def hosted(self, now: float) -> tuple[Hosted, ...]:
        """All blocks for the record, the newest choice last; and failures that still count."""
        for manifest in [manifest for manifest, one in self._failures.items() if one.until + FAILED_S < now]:
            del self._failures[manifest]
        failed = [one.hosted for one in self._failures.values() if now < one.until]
        return (*failed, *(one.as_hosted() for one in self.running.values()))

    async def close(self) -> None:
        """End all servers, and wait for their end."""
        self._keeps_spare = False
        tasks = [one.task for one in self.running.values() if one.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._spare.close()

    async def _run(self, one: Hosting) -> None:
        try:
            while True:
                lines = _LastLine()
                hear = partial(self._on_output, one)
                code = await run_server_process(partial(self._fetched, one), hear, lines.add, self._spare)
                if one.state != "online":
                    raise SwarmError(lines.text or f"its server ended with exit code {code}")
                logger.warning("the server of blocks %s ended (exit code %d): it starts again", one.target.span, code)
                await asyncio.sleep(PAUSE_S)
        except SwarmError as error:
            self._fail(one, printable(str(error)))
        finally:
            if self.running.get(one.target) is one:
                del self.running[one.target]
            self._prepare()
            self._changed()

    async def _fetched(self, one: Hosting) -> ServerConfig:
        """Bring the weights here; the process, which has started, gets these settings then."""
        place = await self._fetch(one)
        one.state, one.problem = "loading", ""
        self._changed()
        return self._settings(one, place)

    def _on_output(self, one: Hosting, line: str) -> None:
        if match := _SERVING.match(line):
            one.peer_id = match[1]
        if not JOIN_LINE.match(line):  # these addresses are of no use without the swarm's name
            logger.info("%s", line)
        else:
            one.state, one.problem = "online", ""
            one.done_bytes = one.total_bytes
            self._failures.pop(one.target.manifest, None)
            self._changed()

    def _fail(self, one: Hosting, problem: str) -> None:
        logger.error("this machine can't serve blocks %s: %s", one.target.span, problem)
        before = self._failures.get(one.target.manifest)
        count = 1 if before is None else before.count + 1
        one.state, one.problem = "failed", problem
        until = time.monotonic() + FAILED_S * 2 ** min(count - 1, MOST_DOUBLINGS)
        self._failures[one.target.manifest] = _Failure(one.as_hosted(), until, count)


class _LastLine:
    """Passes the log of a server on, and keeps the end of its last line, the reason if it fails."""

    def __init__(self) -> None:
        self.text = ""

    def add(self, line: str) -> None:
        logger.debug("server: %s", line)
        if line.strip():
            self.text = _LOG_LINE.sub("", line.removeprefix("swarmllm: "))[:200]
