"""Commands as users start them: processes, their lines and their exit codes.

They are forked (`tests/forked.py`), but for those that are to begin from nothing.
"""

import os
import pty
import re
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile

import pytest
from tests import forked

TAKE_TERMINAL = """
import fcntl, runpy, signal, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # so that Ctrl-C becomes a signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored, where pytest was started in the background
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored, where pytest was started by nohup
"""
COMMAND = (
    TAKE_TERMINAL
    + """
runpy.run_module("swarmllm", run_name="__main__")
"""
)
JOIN = re.compile(r"^swarmllm: join with --initial_peers (.+)$")


def command(name: str, *args: object, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run `python -m swarmllm NAME ARGS…` to its end."""
    line = [sys.executable, "-m", "swarmllm", name, *map(str, args)]
    with TemporaryFile() as said:
        process = forked.popen(line, stderr=said, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        with suppress(BrokenPipeError), process.stdin:  # it may have ended before it asked
            process.stdin.write(stdin)
        with process.stdout:
            output = process.stdout.read()
        code = process.wait()
        said.seek(0)
        return subprocess.CompletedProcess(line, code, output, said.read().decode())


class Running:
    """A command that runs until it is told to stop. To be used by `with`, which kills it if it still runs."""

    def __init__(
        self, name: str, *args: object, log: Path, from_nothing: bool = False, within: Sequence[str] = ()
    ) -> None:
        """`within` begins the line, as of a command that enters a network namespace."""
        self.log = log
        with log.open("w") as file:
            line = [*within, sys.executable, "-m", "swarmllm", name, *map(str, args)]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": file, "text": True}
            begin = subprocess.Popen if from_nothing or within else forked.popen
            self.process = begin(line, **pipes)

    def lines_until_join(self) -> list[str]:
        """All lines up to and including the one that says how to join. pytest's timeout bounds the wait."""
        assert self.process.stdout is not None
        lines: list[str] = []
        for line in self.process.stdout:
            lines.append(line.rstrip("\n"))
            if JOIN.match(lines[-1]):
                return lines
        raise AssertionError(f"it ended: {self.log.read_text()}")

    def maddrs(self) -> list[str]:
        """Its addresses, from the line that it prints."""
        match = JOIN.match(self.lines_until_join()[-1])
        assert match is not None
        return match[1].split()

    def tell(self, line: str) -> None:
        """A line on its standard input."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def stop(self, signum: int, timeout_s: float = 120) -> int:
        """Send a signal; the exit code."""
        self.process.send_signal(signum)
        return self.process.wait(timeout_s)

    def __enter__(self) -> "Running":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


def sentence(stderr: str) -> str:
    """The one line that was said; fails if it was more or less than one."""
    lines: Sequence[str] = stderr.strip().split("\n")
    assert len(lines) == 1, stderr
    assert "Traceback" not in stderr
    return lines[0]


class Terminal:
    """A command at a terminal of its own, at which somebody types. To be used by `with`."""

    def __init__(
        self,
        name: str,
        *args: object,
        program: str = COMMAND,
        directory: Path | None = None,
        from_nothing: bool = False,
    ) -> None:
        self.seen = ""
        """All that was on the screen. `directory` is for the command's temporary files."""
        self._read_to = 0
        self._screen, line = pty.openpty()
        streams = {"stdin": line, "stdout": line, "stderr": line, "start_new_session": True}
        begin = subprocess.Popen if from_nothing else forked.popen
        with pytest.MonkeyPatch.context() as environment:
            if directory is not None:
                environment.setenv("TMPDIR", str(directory))
            self.process = begin([sys.executable, "-c", program, name, *map(str, args)], **streams)
        os.close(line)

    def type(self, keys: str) -> None:
        """Press keys; \\x03 is Ctrl-C, which all processes of the foreground get."""
        os.write(self._screen, keys.encode())

    def wait_for(self, text: str) -> None:
        """Until it is on the screen, behind what was waited for before. pytest's timeout bounds the wait."""
        while (found := self.seen.find(text, self._read_to)) < 0:
            assert self._read(), f"it ended without {text!r}: {self.seen}"
        self._read_to = found + len(text)

    def wait(self) -> int:
        """Until the command has ended; its exit code."""
        while self._read():
            pass
        return self.process.wait()

    def close(self) -> None:
        """As when the window is closed: a hang-up."""
        os.close(self._screen)
        self._screen = -1

    def _read(self) -> bool:
        try:
            self.seen += os.read(self._screen, 4096).decode(errors="replace")
        except OSError:  # so Linux says that nobody holds the other end any more
            return False
        return True

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        if self._screen >= 0:
            self.close()
