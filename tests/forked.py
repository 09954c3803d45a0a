"""Python programs for tests without their imports: forked from one process that has imported everything once.

What a server imports costs it 5 s of a core, and tests start hundreds. So `popen`, which the rooms with servers put in
the place of `subprocess.Popen`, asks a warm process to fork instead: measured, 0.7 s of a core and 37 MB for a
server, instead of 6.9 s and 290 MB. What it forks is a process like any other: a pid to send signals to, pipes or a
terminal, a session and children of its own, and an exit code. But servers claim a usual speed and don't measure, which
would take half a second of a core each. `python -m swarmllm.server` itself is what some tests of commands, of the demo
and of the examples start.

The warm process is this file, run as a program. It computes nothing and has one thread, so forking it is safe. It ends
when the pytest process does, however that ends; servers notice that themselves, by the end of their standard input.
"""

import gc
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from io import FileIO, TextIOWrapper
from pathlib import Path
from subprocess import PIPE
from types import ModuleType
from typing import IO, Any

IMPORTED = ("swarmllm.server.server", "transformers.models.llama.modeling_llama", "uvloop")
REQUEST_BYTES = 1 << 16
READ_BY_IMPORTS = ("HF_", "LD_", "MKL_", "OMP_", "PYTHON", "TORCH", "TRANSFORMERS_")
"""Variables that begin like this are read once: who needs others than the warm process had can't be forked from it."""
HIGHEST_FD = os.sysconf("SC_OPEN_MAX")


class Forked:
    """A forked program, with the face of `subprocess.Popen` as far as tests look at it."""

    def __init__(self, request: dict[str, Any], log: int, terminal: int | None) -> None:
        """Standard error goes to the file `log`, the others through pipes, or all to the terminal."""
        self.returncode: int | None = None
        self._ended = threading.Event()
        status, report = socket.socketpair()
        handed_over, standard = [report.detach()], [terminal, terminal]
        if terminal is None:
            stdin, to_stdin = os.pipe()
            from_stdout, stdout = os.pipe()
            handed_over += (standard := [stdin, stdout])
            self.stdin, self.stdout = os.fdopen(to_stdin, "w"), os.fdopen(from_stdout)
        try:
            fds = [handed_over[0], *standard, log]
            socket.send_fds(_warm_process().requests, [json.dumps(request).encode()], fds)
        finally:
            for fd in handed_over:
                os.close(fd)
        self.pid = int(status.recv(REQUEST_BYTES))
        threading.Thread(target=self._watch, args=[status], name=f"exit code of {self.pid}", daemon=True).start()

    def poll(self) -> int | None:
        """The exit code, None while it runs."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, when it has ended."""
        if not self._ended.wait(timeout) or self.returncode is None:
            raise subprocess.TimeoutExpired("a forked program", timeout or 0.0)
        return self.returncode

    def send_signal(self, signum: int) -> None:
        """Nothing happens to one that has ended."""
        if self.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signum)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _watch(self, status: socket.socket) -> None:
        with status:
            self.returncode = int(status.recv(REQUEST_BYTES) or 1)  # nothing: the warm process was killed
        self._ended.set()


def popen(
    command: Sequence[str], *, stderr: IO[Any] | int, start_new_session: bool = False, stdin: int = PIPE, **pipes: Any
) -> Any:
    """`subprocess.Popen` of a Python program, forked if what the warm process has imported fits to it.

    A `stdin` that is a terminal is its standard output as well.
    """
    python, *arguments = command
    pipes["stdin"] = stdin
    if python != sys.executable or not hasattr(os, "pidfd_open") or any(map(is_read_by_imports, _changed_variables())):
        return subprocess.Popen(command, stderr=stderr, start_new_session=start_new_session, **pipes)
    request = {"arguments": arguments, "cwd": str(Path.cwd()), "session": start_new_session}
    log = stderr if isinstance(stderr, int) else stderr.fileno()
    return Forked({**request, "variables": _changed_variables()}, log, None if stdin == PIPE else stdin)


def is_read_by_imports(variable: str) -> bool:
    return variable.startswith(READ_BY_IMPORTS)


def _changed_variables() -> dict[str, str | None]:
    """Variables that changed since the warm process began; None: no longer set."""
    before, now = _warm_process().environment, dict(os.environ)
    return {name: now.get(name) for name in before.keys() | now.keys() if before.get(name) != now.get(name)}


def warm_pid() -> int | None:
    """The warm process, if it has been started."""
    return None if _WarmProcess.running is None else _WarmProcess.running.process.pid


def stop_warm_process() -> None:
    """To be called at the end of the session."""
    if _WarmProcess.running is not None:
        _WarmProcess.running.stop()


class _WarmProcess:
    """The pytest process's end of it."""

    running: "_WarmProcess | None" = None
    starting = threading.Lock()

    def __init__(self) -> None:
        self.environment = dict(os.environ)
        self.requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is for pytest, which tears its servers down
            )

    def stop(self) -> None:
        self.requests.close()
        self.process.wait()


def _warm_process() -> _WarmProcess:
    with _WarmProcess.starting:
        if _WarmProcess.running is None:
            _WarmProcess.running = _WarmProcess()
        return _WarmProcess.running


def make_what_is_made_at_first_use() -> None:
    """By libraries, for the whole process: half of what the start of a server costs."""
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    from swarmllm.network.p2p.addresses import pack_addrs

    get_checkpoint_conversion_mapping("llama")
    pack_addrs(["/ip4/127.0.0.1/tcp/1"])


def claim_a_usual_speed() -> None:
    from swarmllm.server import span_loader
    from swarmllm.server.device.throughput import Throughput

    usual = Throughput(forward_tokens_per_s=2000.0, decode_ms_per_block=1.0, decode_ms_per_block_batch8=1.5)
    span_loader.measure_throughput = lambda *_, **__: usual  # type: ignore[attr-defined]


def fork_on_request(requests: socket.socket) -> list[str]:
    """Fork for whoever asks and report how the forked processes ended. Returns in these: what they are to run."""
    selector = selectors.DefaultSelector()
    selector.register(requests, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fileobj is not requests:
                selector.unregister(key.fileobj)
                _report_end(key.fd, *key.data)
                continue
            message, fds, _, _ = socket.recv_fds(requests, REQUEST_BYTES, 4)
            if not message:
                sys.exit()
            request, (report, *standard) = json.loads(message), fds
            if not (pid := os.fork()):
                selector.close()
                requests.close()
                _become(request, standard)
                return list(request["arguments"])
            for fd in standard:
                os.close(fd)
            _tell(report, pid)
            selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, report))


def _report_end(pidfd: int, pid: int, report: int) -> None:
    _, status = os.waitpid(pid, 0)
    _tell(report, os.waitstatus_to_exitcode(status))
    os.close(report)
    os.close(pidfd)


def _tell(report: int, number: int) -> None:
    with suppress(BrokenPipeError):  # whoever asked has ended
        os.write(report, str(number).encode())


def _become(request: dict[str, Any], standard: list[int]) -> None:
    """Take over what is the new process's own."""
    if request["session"]:
        os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored, where pytest was started in the background
    os.chdir(request["cwd"])
    tempfile.tempdir = None  # it was looked up for the warm process
    for name, value in request["variables"].items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    for number, fd in enumerate(standard):
        os.dup2(fd, number)
    os.closerange(len(standard), HIGHEST_FD)  # the warm process's own, among them other processes' reports
    # New objects: Python asks only once whether it may seek.
    sys.stdin, sys.stdout = os.fdopen(0), os.fdopen(1, "w")
    # Keeps nothing back: what a terminal that is gone didn't take would be tried again at the end, for exit code 120.
    sys.stderr = TextIOWrapper(FileIO(2, "w"), errors="backslashreplace", write_through=True)


def run(arguments: list[str]) -> None:
    """Run as `python ARGUMENTS…` does."""
    if arguments[0] == "-c":
        sys.path[0] = ""
        sys.argv = ["-c", *arguments[2:]]
        sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(arguments[1], "<string>", "exec"), vars(sys.modules["__main__"]))  # noqa: S102
    elif arguments[0] == "-m":
        sys.path[0] = ""
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(arguments[0]).parent)
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    for module in IMPORTED:
        import_module(module)
    make_what_is_made_at_first_use()
    claim_a_usual_speed()
    assert threading.active_count() == 1
    gc.freeze()  # the pages stay shared with what is forked
    run(fork_on_request(socket.socket(fileno=int(sys.argv[1]))))
