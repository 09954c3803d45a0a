"""The servers of one layout, what disturbs them, and how they are mended afterwards. Used by `chaos_run`."""

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import psutil
import torch
from chaos_plan import Blocks, Disturbance, covers
from chaos_server import program, write_failures

from swarmllm import AutoDistributedModel, ClientConfig, LocalSwarm, SwarmError, embedded_model_path
from swarmllm.data_structures import ServerState
from swarmllm.demo.local_swarm import LocalServer
from swarmllm.swarm.retry import MOST_REFUSALS

QUANT_TYPE = os.environ.get("CHAOS_QUANT_TYPE", "none")
"""Format of the servers' weights."""
OPTIONS = {"quant_type": QUANT_TYPE, "dtype": "float32", "num_threads": 1}
ROUTE_TIMEOUT_S = 10.0
"""For texts whose blocks nobody serves any more. While a p2pd is frozen, others take 5 s to say that a dead server
can't be reached (they ask it where that is), and two such may come before the one that lives."""
SEEN_S = 30.0
FAILURES = MOST_REFUSALS - 1
"""Computations for which memory runs out, at most. A client believes an only server after one more."""
GUEST_TOKENS = (4, 400)
"""Rows and columns of a step that takes a second or so."""


class DefectError(Exception):
    """Something is broken that is no matter of one text."""


def connect(initial_peers: Sequence[str]) -> Any:
    """A client."""
    config = ClientConfig(initial_peers=tuple(initial_peers), update_period_s=2, route_timeout_s=ROUTE_TIMEOUT_S)
    return AutoDistributedModel.from_pretrained(embedded_model_path(), client_config=config, dtype="float32")


class ChaosSwarm:
    """Servers of these spans; `mend()` brings back what a disturbance took."""

    def __init__(self, layout: Sequence[Blocks], seed: int) -> None:
        self._choice = random.Random(f"swarm {seed}")
        self._layout = layout
        self._stack = ExitStack()
        self._servers: list[LocalServer] = []
        """The servers, in the order of the layout's spans."""
        self._failures: dict[str, Path] = {}
        self._frozen: list[psutil.Process] = []
        self._doomed: list[LocalServer] = []
        self.failed_starts: list[str] = []

    def __enter__(self) -> Self:
        with self._stack as stack:
            self._directory = Path(stack.enter_context(TemporaryDirectory(prefix="swarmllm-chaos-")))
            first = self._program()
            swarm = LocalSwarm(embedded_model_path(), spans=self._layout[:1], program=first[0], **OPTIONS)
            self._swarm = stack.enter_context(swarm)
            self._servers = [swarm.servers[0]]
            self._failures[swarm.servers[0].peer_id] = first[1]
            self._servers += self._start(self._layout[1:])
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._thaw()
        self._stack.close()

    @property
    def initial_peers(self) -> list[str]:
        return self._swarm.initial_peers

    def _program(self) -> tuple[list[str], Path]:
        failures = self._directory / f"failures-{self._choice.randrange(1 << 60)}"
        return program(self._choice.choice([2.0, 3.0, 5.0]), failures), failures

    def _start(self, spans: Sequence[Blocks]) -> list[LocalServer]:
        """All at the same time."""

        def start(span: Blocks, how: tuple[list[str], Path]) -> LocalServer:
            try:
                server = self._swarm.add_server(span, program=how[0])
            except SwarmError as error:  # p2pd must be up within 15 s, and a dozen of them may start at once
                self.failed_starts.append(f"a server was started again: {error}")
                server = self._swarm.add_server(span, program=how[0])
            self._failures[server.peer_id] = how[1]
            return server

        with ThreadPoolExecutor(max(1, len(spans))) as threads:
            return list(threads.map(start, spans, [self._program() for _ in spans]))

    # ------------------------------------------------------------------ disturbances

    def strike(self, disturbance: Disturbance, route: Sequence[str], choice: random.Random) -> tuple[list[int], bool]:
        """Disturb servers of a route, given by their peer ids; which they are, and whether the others cover the model.

        `Disturbance.CLIENT_LEAVES` is a `Guest`'s business.
        """
        used = [server for server in self._servers if server.peer_id in route and server.alive] or self._servers
        victims = [choice.choice(used)]
        if disturbance is Disturbance.TWO_KILLS:
            victims.append(choice.choice([server for server in self._servers if server is not victims[0]]))
        spared = disturbance.spares_servers
        rest = [s for s in self._servers if s.alive and (spared or s not in victims)]
        for victim in victims:
            self._strike(disturbance, victim)
        spans = [(server.span.start, server.span.end) for server in rest if server.span]
        return [self._servers.index(victim) for victim in victims], covers(spans)

    def _strike(self, disturbance: Disturbance, victim: LocalServer) -> None:
        match disturbance:
            case Disturbance.KILL | Disturbance.TWO_KILLS:
                self._doomed.append(victim)
                victim.process.kill()
            case Disturbance.TERM:
                self._doomed.append(victim)
                victim.process.terminate()
            case Disturbance.STOP:
                self._freeze(psutil.Process(victim.pid))
            case Disturbance.DAEMON_KILL:
                self._doomed.append(victim)
                daemon_of(victim.pid).kill()
            case Disturbance.DAEMON_STOP:
                self._doomed.append(victim)  # it may notice, and leave
                self._freeze(daemon_of(victim.pid))
            case Disturbance.OUT_OF_MEMORY:
                write_failures(self._failures[victim.peer_id], FAILURES)

    def _freeze(self, process: psutil.Process) -> None:
        self._frozen.append(process)
        process.send_signal(signal.SIGSTOP)

    def _thaw(self) -> None:
        for process in self._frozen:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGCONT)
        self._frozen.clear()

    # ------------------------------------------------------------------ afterwards

    def mend(self, model: Any, disturbance: Disturbance) -> None:
        """Make the layout whole again, and wait until this client sees it.

        Raises:
            DefectError: a server ended that should not have, or otherwise than it should have.
        """
        self._thaw()
        for failures in self._failures.values():
            failures.unlink(missing_ok=True)
        wrong = []
        for victim in self._doomed:
            if disturbance is not Disturbance.DAEMON_STOP:
                code = victim.wait()
                expected = {Disturbance.TERM: 0, Disturbance.DAEMON_KILL: 1}.get(disturbance, -signal.SIGKILL)
                if code != expected:
                    wrong.append(f"exit code {code} instead of {expected}: {last_lines(victim)}")
        dead = [index for index, server in enumerate(self._servers) if not server.alive]
        wrong += [f"ended: {last_lines(s)}" for s in map(self._servers.__getitem__, dead) if s not in self._doomed]
        self._doomed.clear()
        for index, server in zip(dead, self._start([self._layout[index] for index in dead]), strict=True):
            self._servers[index] = server
        self.wait_until_seen(model)
        if wrong:
            raise DefectError("; ".join(wrong))

    def wait_until_seen(self, model: Any) -> None:
        """Wait until this client knows all servers."""
        wanted = {server.peer_id for server in self._servers}
        wait(lambda: wanted <= {s.peer_id for s in model.swarm.servers() if s.state == ServerState.ONLINE}, "seen")


class Guest:
    """Another client of the same servers, who leaves in the midst of a long step."""

    def __init__(self, initial_peers: Sequence[str]) -> None:
        self._model = connect(initial_peers)
        self._session = self._model.inference_session(max_length=GUEST_TOKENS[1], batch_size=GUEST_TOKENS[0])
        self._hidden = self._model.embed(torch.ones(GUEST_TOKENS, dtype=torch.long))
        self._thread = threading.Thread(target=self._step, name="guest")
        self._stray: BaseException | None = None

    def _step(self) -> None:
        try:
            self._session.step(self._hidden)
        except SwarmError:
            pass
        except BaseException as error:  # noqa: BLE001  told by `close`
            self._stray = error

    def leave(self, choice: random.Random) -> None:
        """Begin the step, and leave in its midst: the session, the model, or as a crash would."""
        self._thread.start()
        wait(lambda: self._session.num_under_way or not self._thread.is_alive(), "step")
        time.sleep(choice.uniform(0, 0.2))
        match choice.randrange(3):
            case 0:
                self._session.close()
            case 1:
                self._model.close()
            case _:
                daemon_pid = self._model.swarm.look_ups.peer.daemon_pid
                os.kill(daemon_pid, signal.SIGKILL)

    def close(self) -> None:
        self._model.close()
        if self._thread.ident is not None:
            self._thread.join(SEEN_S)
            if self._thread.is_alive():
                raise DefectError("the guest's step does not end although its model is closed")
        if self._stray is not None:
            raise DefectError(f"the guest's step ended in {self._stray!r}")


def daemon_of(pid: int) -> psutil.Process:
    """The p2pd of a server."""
    (daemon,) = (child for child in psutil.Process(pid).children() if child.name() == "p2pd")
    return daemon


def last_lines(server: LocalServer, num_lines: int = 3) -> str:
    """The last lines of its log."""
    return " | ".join(server.log_path.read_text(errors="replace").strip().splitlines()[-num_lines:])


def wait(happened: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + SEEN_S
    while not happened():
        if time.monotonic() > deadline:
            raise DefectError(f"not {what} within {SEEN_S:.0f} s")
        time.sleep(0.2)
