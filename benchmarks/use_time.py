"""How long people wait from `swarmllm use` to the first token, where reading the weights takes time.

python benchmarks/use_time.py [--shape 2048x8] [--max_memory 0.26GB] [--machines 3] [--keep DIRECTORY]

Three `swarmllm up` processes with directories of their own, on loopback. The first one has the model, the others take
their blocks from it. Beside it: the time of reading all weights from the disk, of hashing them, and of one server that
loads all blocks. All share the cores of this machine, so processor time is printed, too.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
from common import save_results, table
from startup import SHAPES, online, save_blocks, seconds_of_import

from swarmllm import embedded_model_path

SETTINGS = """
host_maddrs = ["/ip4/127.0.0.1/tcp/0"]
lan_discovery = false
"""
LOOK_S = 0.5
IDLE_LOOK_S, IDLE_SHARE = 3.0, 0.3
"""Machines that wait use less than this share of a core, together."""


class Machine:
    """One `swarmllm up`. To be used by `with`."""

    def __init__(self, directory: Path, number: int, max_memory: str, invite: str) -> None:
        self.directory, self.number = directory / f"machine{number}", number
        self._max_memory, self._invite = max_memory, invite
        self.url = self.key = ""

    def __enter__(self) -> "Machine":
        self.directory.mkdir()
        settings = self.directory / "settings.toml"
        settings.write_text(SETTINGS)
        self.variables = os.environ | {
            "SWARMLLM_STATE_DIR": str(self.directory / "state"),
            "SWARMLLM_CACHE": str(self.directory / "cache"),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",  # threads of several servers would wait for each other's cores
        }
        line = [sys.executable, "-m", "swarmllm", "up", "--config", str(settings), "--port", "0"]
        line += ["--public_name", f"m{self.number}", "--max_memory", self._max_memory]
        with (self.directory / "log").open("w") as log:
            self.process = subprocess.Popen(
                [*line, *([self._invite] if self._invite else [])],
                env=self.variables,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        return self

    def wait(self) -> "Machine":
        """Until its page is there."""
        if self.url:
            return self
        assert self.process.stdout is not None
        for said in self.process.stdout:
            if said.startswith("swarmllm: open "):
                self.url, _, self.key = said.split()[2].partition("#key=")
                return self
        raise SystemExit((self.directory / "log").read_text())

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait()

    def get(self, path: str) -> Any:
        """The JSON at a path of its page."""
        asked = urllib.request.Request(self.url.rstrip("/") + path, headers={"Authorization": f"Bearer {self.key}"})
        with urllib.request.urlopen(asked) as answer:
            return json.load(answer)

    def cpu_s(self) -> float:
        """Processor time of all its processes until now."""
        own = psutil.Process(self.process.pid)
        return sum(sum(one.cpu_times()[:2]) for one in (own, *own.children(recursive=True)))


def wait_until_idle(machines: list[Machine]) -> None:
    """Until nobody imports anything any more."""
    before = 0.0
    while (now := sum(one.cpu_s() for one in machines)) - before > IDLE_SHARE * IDLE_LOOK_S:
        before = now
        time.sleep(IDLE_LOOK_S)


def watched_use(machines: list[Machine], model: str) -> dict[str, float]:
    """Run `swarmllm use`, and note when each part was done."""
    before = sum(one.cpu_s() for one in machines)
    began_at = time.perf_counter()
    line = [sys.executable, "-m", "swarmllm", "use", model]
    with subprocess.Popen(line, env=machines[0].variables, stdout=subprocess.DEVNULL) as use:
        done: dict[str, float] = {}
        while use.poll() is None:
            picture, now = machines[0].get("/api/machines"), time.perf_counter() - began_at
            hosted = [one for machine in picture["machines"] for one in machine["hosted"]]
            states = {one["state"] for one in hosted}
            events = {
                "command": bool(picture["commands"]),
                "first blocks chosen": bool(hosted),
                "all blocks chosen": len(hosted) == len(machines),
                "last weights here": len(hosted) == len(machines) and not states & {"waiting", "fetching"},
                "first server online": "online" in states,
                "model ready": any(one["state"] == "ready" for one in picture["models"]),
            }
            for event, is_so in events.items():
                if is_so:
                    done.setdefault(event, now)
            time.sleep(LOOK_S)
    if use.returncode:
        raise SystemExit((machines[0].directory / "log").read_text())
    done["first token"] = time.perf_counter() - began_at
    return done | {"processor time": sum(one.cpu_s() for one in machines) - before}


def forget(path: Path) -> None:
    """Drop the files from the page cache."""
    for file in path.iterdir():
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def seconds_of_reading(path: Path) -> tuple[float, float]:
    """Seconds of reading all files from the disk, and of hashing them once they are in the page cache."""
    forget(path)
    times = []
    for digest in (None, hashlib.sha256()):
        began_at = time.perf_counter()
        for file in sorted(path.iterdir()):
            with file.open("rb", buffering=0) as opened:
                while data := opened.read(1 << 20):
                    if digest is not None:
                        digest.update(data)
        times.append(time.perf_counter() - began_at)
    return times[0], times[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="2048x8")
    parser.add_argument("--max_memory", default="0.26GB", help="of each machine: less than the whole model needs")
    parser.add_argument("--machines", type=int, default=3)
    parser.add_argument("--keep", help="directory of the model and of all machines' files; it stays")
    args = parser.parse_args()
    with ExitStack() as stack:
        directory = Path(args.keep or stack.enter_context(tempfile.TemporaryDirectory()))
        path = directory / args.shape
        if not path.exists():
            directory.mkdir(exist_ok=True)
            save_blocks(args.shape, directory)
            for file in Path(embedded_model_path()).glob("tokenizer*"):
                shutil.copy(file, path)
        num_bytes = sum(file.stat().st_size for file in path.iterdir())
        read_s, hash_s = seconds_of_reading(path)
        import_s = seconds_of_import()
        shutil.rmtree(directory / "cache of one server", ignore_errors=True)
        os.environ["SWARMLLM_CACHE"] = str(directory / "cache of one server")
        alone = online(path, SHAPES[args.shape]["blocks"], "int8", 1)
        forget(path)
        load = os.getloadavg()[0]
        machines: list[Machine] = []
        for number in range(args.machines):
            shutil.rmtree(directory / f"machine{number}", ignore_errors=True)
            invite = machines[0].wait().get("/api/machines/invite")["invite"] if machines else ""
            machines.append(stack.enter_context(Machine(directory, number, args.max_memory, invite)))
        for machine in machines[1:]:
            machine.wait()
        while any(
            len([one for one in machine.get("/api/machines")["machines"] if one["memory_bytes"]]) < args.machines
            for machine in machines
        ):
            time.sleep(1.0)
        wait_until_idle(machines)
        forget(path)
        done = watched_use(machines, str(path))
        hosted = [(one["name"], each) for one in machines[0].get("/api/machines")["machines"] for each in one["hosted"]]
        for machine in machines:
            print((machine.directory / "log").read_text(), file=sys.stderr)
    facts = {
        "GB": num_bytes / 1e9,
        "read from the disk, s": read_s,
        "hash, s": hash_s,
        "import, s": import_s,
        "one server of all blocks online, s": alone["online"],
        "  of which reading and rounding, s": alone["reading"],
        "  of which probes, s": alone["probing"],
        "goal: 1.5 × reading + start, s": 1.5 * (read_s + alone["reading"]) + alone["online"] - alone["reading"],
        **{f"{event}, after s": at for event, at in done.items()},
        "load before, after": f"{load:.1f}, {os.getloadavg()[0]:.1f}",
    }
    print(table(["", ""], [[name, value] for name, value in facts.items()]))
    for name, one in hosted:
        print(f"{name}: {one['start']}:{one['end']} {one['quant_type']}, {one['bytes_from_machines'] / 1e9:.2f} GB")
    print(f"written to {save_results('use_time', facts)}")


if __name__ == "__main__":
    main()
