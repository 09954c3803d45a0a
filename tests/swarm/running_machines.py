"""Machines of `machine_process` for tests: started, told, watched, killed."""

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any

from tests import forked

PROGRAM = Path(__file__).with_name("machine_process.py")
CONFIG = {"host_maddrs": ["/ip4/127.0.0.1/tcp/0"], "lan_discovery": False, "device": ["cpu"]}
SPEEDS = {"int8": 1e10, "q4_k": 1e10}


def note_speeds(state: Path) -> None:
    """So that a machine needn't measure, and all are alike."""
    import torch

    from swarmllm.server.device.device import hardware_name
    from swarmllm.version import __version__

    state.mkdir(exist_ok=True)
    known = {"hardware": hardware_name(torch.device("cpu")), "version": __version__, "formats": SPEEDS}
    (state / "speeds.json").write_text(json.dumps(known))


class Machine:
    """One machine with a state directory of its own. To be used by `with`, which kills it if it still runs."""

    def __init__(self, directory: Path, name: str, *, invite: str = "", **config: Any) -> None:
        self.name, self.state = name, directory / name
        self._settings = {
            "state": str(self.state),
            "invite": invite or None,
            "config": {**CONFIG, "public_name": name, **config},
        }
        self.log = directory / f"{name}.log"
        self.picture: dict[str, Any] = {}
        self.start()

    def start(self) -> None:
        """Start the process, also again."""
        note_speeds(self.state)
        with self.log.open("a") as log:
            line = [sys.executable, str(PROGRAM), json.dumps(self._settings)]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            self.process = forked.popen(line, stderr=log, start_new_session=True, **pipes)
        self.picture = {}
        # Nobody looks at a machine while the test waits for another one. Its agent would stand still at a full pipe.
        self._lines: SimpleQueue[str] = SimpleQueue()
        self._reader = threading.Thread(target=self._keep_lines, args=(self.process.stdout, self._lines), daemon=True)
        self._reader.start()

    @staticmethod
    def _keep_lines(output: IO[str], lines: "SimpleQueue[str]") -> None:
        for line in output:
            lines.put(line)
        lines.put("")

    def _write(self, content: Any) -> None:
        self.process.stdin.write(json.dumps(content) + "\n")
        self.process.stdin.flush()

    def _read(self) -> dict[str, Any]:
        line = self._lines.get()
        assert line, f"{self.name} ended: {self.log.read_text()[-3000:]}"
        found: dict[str, Any] = json.loads(line)
        self.picture = found.get("picture", self.picture)
        return found

    def tell(self, **order: Any) -> Any:
        """Give an order, and return the answer."""
        self._write(order)
        while "answer" not in (found := self._read()):
            assert "error" not in found, found
        return found["answer"]

    def wait_for(self, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Until the picture fulfils the condition. pytest's timeout bounds the wait."""
        while not self.picture or not condition(self.picture):
            self._read()
        return self.picture

    def kill(self) -> None:
        """A crash."""
        self.process.kill()
        self.process.wait()
        self._close_pipes()

    def stop(self) -> int:
        """A polite end."""
        self.process.stdin.close()
        code: int = self.process.wait(60)
        self._close_pipes()
        return code

    def _close_pipes(self) -> None:
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        self._reader.join()
        self.process.stdout.close()

    def __enter__(self) -> "Machine":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.stop()


def online(picture: dict[str, Any], model: str) -> dict[str, tuple[int, int]]:
    """The blocks of a model that are online, by the name of the machine."""
    return {
        machine["name"]: (one["start"], one["end"])
        for machine in picture["machines"]
        for one in machine["hosted"]
        if one["model"] == model and one["state"] == "online"
    }


def is_ready(picture: dict[str, Any], model: str) -> bool:
    return any(one["name"] == model and one["state"] == "ready" for one in picture["models"])
