"""A swarm with honest clients, with and without one hostile peer of each kind beside them, in turns in one run.

Servers, clients and hostile peers are processes of their own. In earnest the hostile ones would not share these cores:
so they run at a lower priority, and clients pause between texts, so that enough is left for them. What each kind of
process takes of the cores is measured. Before each hostile phase two servers join that boast: one computes NaN, which
everybody notices, and one lies plausibly, which only the client with `verify_fraction` can notice: the others block it,
or allow the honest ones alone. Called by benchmarks/hostile_soak.py and `test_hostile_soak`.
"""

import json
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty
from subprocess import PIPE
from typing import Any, Self

import psutil
import torch
from faulty_server import Fault, program
from hostile_peers import CLIENTS, MEMBERS
from soak_clients import Ended, Token, run_clients
from swarm_models import VOCABULARY, generate_seeded, load_local, save_llama
from tests import forked

from swarmllm import LocalSwarm
from swarmllm.demo.local_swarm import LocalServer
from swarmllm.models.checkpoint.checkpoint import open_checkpoint
from swarmllm.models.checkpoint.fingerprint import fingerprint
from swarmllm.network.p2p.identity import Identity

NUM_BLOCKS = 8
SPANS = [(0, 4), (4, 8), (0, 4), (4, 8)]
NUM_CLIENTS, CLIENTS_PER_PROCESS = 8, 4
TEXTS, PROMPT_TOKENS, NEW_TOKENS = 12, 24, 24
SETTLE_S = 3.0
"""After a hostile phase, before what is measured counts as undisturbed."""
LOOK_S = 1.0
PAUSE_S = 1.5
"""Pause of a client after each text, so that two cores are not always busy: each text takes half a second of one."""
LIARS = "liars"
ALL = (*(attack.__name__ for attack in CLIENTS + MEMBERS), LIARS)
"""Kinds of hostile peers."""
START_S = END_S = 240.0


@dataclass
class Phase:
    """With hostile peers, or without."""

    kinds: tuple[str, ...]
    """Kinds of hostile peers."""
    began_at: float
    ended_at: float = 0.0
    cpu_s: dict[str, float] = field(default_factory=dict)
    """Seconds of processor time by kind of process."""
    load: float = 0.0
    """Load of the machine at its end: processes that wait for a core, over the last minute."""

    @property
    def hostile(self) -> bool:
        return bool(self.kinds)

    def has(self, at: float) -> bool:
        return self.began_at <= at < self.ended_at


@dataclass
class Figures:
    """The results of a run."""

    phases: list[Phase] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)
    texts: list[Ended] = field(default_factory=list)
    did: Counter[str] = field(default_factory=Counter)
    """How often each kind of hostile peer did what it does."""
    memory: dict[str, list[float]] = field(default_factory=dict)
    """Megabytes of each server and of its p2pd, look by look."""
    logged: list[str] = field(default_factory=list)
    """Lines that honest servers logged as mistakes."""
    died: list[str] = field(default_factory=list)
    """Honest servers that have ended."""

    @property
    def wrong(self) -> list[Ended]:
        """Texts that are not the local model's, and ended without an error."""
        return [text for text in self.texts if not text.is_right and not text.error]

    @property
    def failed(self) -> list[Ended]:
        """Texts that ended with an error."""
        return [text for text in self.texts if text.error]

    def seconds(self, *, hostile: bool) -> list[float]:
        """Times of all tokens of phases of that kind, sorted."""
        phases = [phase for phase in self.phases if phase.hostile is hostile]
        return sorted(token.seconds for token in self.tokens if any(phase.has(token.at) for phase in phases))


def share(ascending: Sequence[float], part: float) -> float:
    """The value below which this part of them lies."""
    return ascending[min(len(ascending) - 1, int(part * len(ascending)))] if ascending else float("nan")


class HostilePeers:
    """The process of `hostile_peers`."""

    def __init__(self, model: Path, servers: Sequence[LocalServer], hidden_size: int) -> None:
        opened = open_checkpoint(str(model))
        about = {
            "servers": [[server.peer_id, server.maddrs] for server in servers],
            "name": opened.public_name,
            "fingerprint": fingerprint(opened),
            "num_blocks": opened.num_blocks,
            "hidden_size": hidden_size,
        }
        script = Path(__file__).parent / "hostile_peers.py"
        self._process = forked.popen([sys.executable, str(script), json.dumps(about)], stdout=PIPE, stderr=2, text=True)

    @property
    def pid(self) -> int:
        return int(self._process.pid)

    def __enter__(self) -> Self:
        if self._answer() != "ready":
            self.__exit__()
            raise RuntimeError("the hostile peers did not start")
        return self

    def __exit__(self, *_: object) -> None:
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def begin(self, kinds: Sequence[str]) -> None:
        self._tell(" ".join(["on", *kinds]))

    def stop(self) -> Counter[str]:
        """The number of their actions."""
        self._tell("off")
        return Counter(json.loads(self._answer()))

    def _tell(self, line: str) -> None:
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def _answer(self) -> str:
        return str(self._process.stdout.readline()).strip()


class Soak:
    """One run; `run` plays its phases."""

    def __init__(self, directory: Path, *, hidden_size: int = 512, num_clients: int = NUM_CLIENTS) -> None:
        self._directory = directory
        self._hidden_size = hidden_size
        self._num_clients = num_clients
        # The one that everybody notices comes last, when the phase begins.
        self._liars = {fault: directory / f"{fault.value}.identity" for fault in (Fault.LIE, Fault.CORRUPT)}
        self._model = save_llama(
            directory / "checkpoint", num_blocks=NUM_BLOCKS, hidden_size=hidden_size, intermediate_size=2 * hidden_size
        )
        self.figures = Figures()

    def run(self, num_pairs: int, phase_s: float, kinds: Sequence[Sequence[str]] = [ALL]) -> Figures:
        """`num_pairs` phases without hostile peers, and after each one with them: of these kinds, in turns."""
        texts = self._texts()
        with (
            LocalSwarm(self._model, spans=SPANS, num_threads=1, quant_type="none") as swarm,
            HostilePeers(self._model, swarm.servers, self._hidden_size) as peers,
        ):
            honest = list(swarm.servers)
            with self._clients(swarm, texts) as (reports, clients):
                groups = {
                    "servers": [server.pid for server in honest],
                    "clients": clients,
                    "hostile peers": [peers.pid],
                }
                for pair in range(num_pairs):
                    self._phase((), honest, groups, phase_s)
                    self._hostile_phase(tuple(kinds[pair % len(kinds)]), swarm, honest, groups, peers, phase_s)
                    self._take(reports)
                    time.sleep(SETTLE_S)
            self._take(reports)
            self.figures.died = [server.peer_id for server in honest if not server.alive]
            self.figures.logged = [line for server in honest for line in _mistakes(server)]
        return self.figures

    def _hostile_phase(
        self,
        kinds: tuple[str, ...],
        swarm: LocalSwarm,
        honest: Sequence[LocalServer],
        groups: Mapping[str, Sequence[int]],
        peers: HostilePeers,
        phase_s: float,
    ) -> None:
        liars: list[LocalServer] = []
        if LIARS in kinds:
            for fault, path in self._liars.items():  # their starting is no part of the phase
                options = {"program": program(fault, self._directory), "identity_path": path, "num_threads": 1}
                liars.append(swarm.add_server((0, NUM_BLOCKS), **options))
        if others := [kind for kind in kinds if kind != LIARS]:
            peers.begin(others)
        self._phase(kinds, honest, {**groups, LIARS: [liar.pid for liar in liars]}, phase_s)
        if others:
            self.figures.did += peers.stop()
        self.figures.did[LIARS] += len(liars)
        for liar in liars:
            liar.stop()

    def _phase(
        self,
        kinds: tuple[str, ...],
        honest: Sequence[LocalServer],
        groups: Mapping[str, Sequence[int]],
        phase_s: float,
    ) -> None:
        before = _cpu_s(groups)
        phase = Phase(kinds, time.monotonic())
        while (left_s := phase.began_at + phase_s - time.monotonic()) > 0:
            self._look_at_memory(honest)
            time.sleep(min(LOOK_S, left_s))
        phase.ended_at, phase.load = time.monotonic(), os.getloadavg()[0]
        phase.cpu_s = {name: seconds - before[name] for name, seconds in _cpu_s(groups).items()}
        self.figures.phases.append(phase)
        named = "none" if not kinds else "all" if kinds == ALL else ", ".join(kinds)
        print(f"{phase.ended_at - phase.began_at:.0f} s, hostile peers: {named}, load {phase.load:.1f}", flush=True)

    def _look_at_memory(self, honest: Sequence[LocalServer]) -> None:
        for number, server in enumerate(honest):
            with suppress(psutil.NoSuchProcess):
                process = psutil.Process(server.pid)
                held = {f"server {number}": [process], f"p2pd of server {number}": process.children()}
                for name, processes in held.items():
                    megabytes = sum(one.memory_info().rss for one in processes) / 1e6
                    self.figures.memory.setdefault(name, []).append(megabytes)

    @contextmanager
    def _clients(self, swarm: LocalSwarm, texts: Sequence[tuple[list[int], list[int]]]) -> Iterator[Any]:
        """The queue of their reports, and their processes; on entry each has generated two texts."""
        context = multiprocessing.get_context("spawn")
        ready, reports, end = context.Semaphore(0), context.Queue(), context.Event()
        settings = self._settings([server.peer_id for server in swarm.servers])
        groups = [
            {number: settings[number] for number in range(first, min(first + CLIENTS_PER_PROCESS, self._num_clients))}
            for first in range(0, self._num_clients, CLIENTS_PER_PROCESS)
        ]
        processes = [
            context.Process(
                target=run_clients,
                args=(self._model, swarm.initial_peers, group, texts, ready, reports, end, PAUSE_S),
            )
            for group in groups
        ]
        try:
            for process in processes:
                process.start()
            for _ in range(self._num_clients):
                if not ready.acquire(timeout=START_S):
                    raise RuntimeError("a client did not start")
            yield reports, [process.pid for process in processes]
        finally:
            end.set()
            deadline = time.monotonic() + END_S
            while any(process.is_alive() for process in processes) and time.monotonic() < deadline:
                self._take(reports)  # a process ends only when its reports have been taken
                time.sleep(0.05)
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()

    def _settings(self, honest: Sequence[str]) -> list[dict[str, Any]]:
        """Settings of each client: most block the liar, one allows the honest alone, one checks every step."""
        liar = Identity.load_or_create(self._liars[Fault.LIE]).peer_id
        settings: list[dict[str, Any]] = [{"blocked_servers": (liar,)} for _ in range(self._num_clients)]
        settings[-1] = {"verify_fraction": 1.0}
        settings[-2] = {"allowed_servers": tuple(honest)}
        return [{"speculation": "off", **one} for one in settings]  # guesses come several at a time

    def _take(self, reports: Any) -> None:
        for _ in range(max(1, reports.qsize())):  # more come all the time
            try:
                tokens, ended = reports.get(timeout=0.05)
            except Empty:
                return
            self.figures.tokens += tokens
            self.figures.texts.append(ended)

    def _texts(self) -> list[tuple[list[int], list[int]]]:
        local = load_local(self._model)
        prompts = [
            torch.randint(3, VOCABULARY, (1, PROMPT_TOKENS), generator=torch.Generator().manual_seed(number))
            for number in range(TEXTS)
        ]
        answers = [generate_seeded(local, one, max_new_tokens=NEW_TOKENS)[0].tolist() for one in prompts]
        return [(one[0].tolist(), answer) for one, answer in zip(prompts, answers, strict=True)]


def _with_children(pids: Iterable[int]) -> list[psutil.Process]:
    found = list[psutil.Process]()
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            found += [process, *process.children(recursive=True)]
    return found


def _cpu_s(groups: Mapping[str, Sequence[int]]) -> dict[str, float]:
    """Seconds of a core that each group has taken so far, its p2pd apart; and all processes of the machine."""
    took = dict.fromkeys((f"{name}{part}" for name in groups for part in ("", "' p2pd")), 0.0)
    for name, pids in groups.items():
        for process in _with_children(pids):
            with suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                took[name + ("' p2pd" if "p2pd" in process.name() else "")] += times.user + times.system
    all_of_them = psutil.cpu_times()
    return {**took, "all of the machine": all_of_them.user + all_of_them.nice + all_of_them.system}


def _mistakes(server: LocalServer) -> list[str]:
    """Lines of its log that say that something unforeseen has happened."""
    lines = server.log_path.read_text(errors="replace").splitlines()
    return [line for line in lines if "Traceback" in line or "ERROR" in line or "CRITICAL" in line]
