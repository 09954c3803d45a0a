"""Start the services of container and service files without containers: the same commands, on 127.0.0.1.

    python .ci/without_containers.py                            # examples/monitoring/compose.yaml
    python .ci/without_containers.py docs/deployment.md         # its systemd units, and its manifest for Kubernetes

Each command comes from the file, or from the Dockerfile's entry point. Words that depend on a container are replaced:
the volume by a temporary directory, ports by free ones, addresses by loopback. Then the script waits for the health
checks, asks the gateway for a token, and stops everything. Images of other projects are left out. Used by hand, and by
tests/swarm/test_deployments.py.
"""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from swarmllm.demo.local_swarm import embedded_model_path

ROOT = Path(__file__).resolve().parent.parent
COMPOSE = ROOT / "examples" / "monitoring" / "compose.yaml"
IMAGE = "swarmllm"
WAIT_S = 300.0
"""Seconds for a service to start on a busy machine."""
STOP_S = 60.0
VARIABLE = re.compile(r"\$\$|\$\{(\w+)(?::-([^}]*))?\}")
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


@dataclass
class Service:
    """One command, the services that it waits for, and its health check."""

    name: str
    argv: list[str]
    after: list[str] = field(default_factory=list)
    health: list[str] | None = None
    volume: str = "shared"
    """Services with the same volume share a directory."""

    @property
    def kind(self) -> str:
        """`server`, `gateway` or `dht`: the command of swarmllm."""
        words = " ".join(self.argv).split()
        return words[words.index("swarmllm") + 1]


def interpolated(value: Any, environment: Mapping[str, str]) -> Any:
    """Replace `${NAME:-default}` and `$$` as compose does."""
    if isinstance(value, str):
        return VARIABLE.sub(lambda one: environment.get(one[1]) or one[2] or "" if one[1] else "$", value)
    if isinstance(value, list):
        return [interpolated(one, environment) for one in value]
    return {k: interpolated(v, environment) for k, v in value.items()} if isinstance(value, dict) else value


def entry_point() -> list[str]:
    """The image's entry point."""
    (line,) = re.findall(r"^ENTRYPOINT (\[.*\])$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    return list(json.loads(line))


def of_compose(path: Path, environment: Mapping[str, str]) -> list[Service]:
    """The services of our image, each after those that it waits for."""
    described = interpolated(yaml.safe_load(path.read_text())["services"], environment)
    ours = {name: one for name, one in described.items() if one["image"] == IMAGE}
    found: list[Service] = []
    while len(found) < len(ours):
        ready = {service.name for service in found}
        for name, one in ours.items():
            after = [*one.get("depends_on", {})]
            if name not in ready and ready.issuperset(after):
                argv = [*one.get("entrypoint", entry_point()), *one.get("command", ())]
                health = one.get("healthcheck", {}).get("test", ["CMD"])[1:] or None
                found.append(Service(name, argv, after, health))
    return found


def of_document(path: Path, initial_peer: str) -> Iterator[Service]:
    """The commands of its systemd units and of its manifests for Kubernetes, with model and peer filled in."""
    words = {"M": os.fspath(embedded_model_path()), "ADDRESS": initial_peer}
    for kind, text in BLOCK.findall(path.read_text()):
        if kind == "yaml":
            (container,) = yaml.safe_load(text)["spec"]["template"]["spec"]["containers"]
            argv = [*container.get("command", entry_point()), *container["args"]]
            yield Service(
                f"kubernetes {container['name']}", [words.get(word, word) for word in argv], volume=container["name"]
            )
        for line in re.findall(r"^ExecStart=(.+)$", text, re.MULTILINE):
            argv = [words.get(word, word) for word in shlex.split(line)]
            argv[0] = Path(argv[0]).name
            yield Service(f"systemd {argv[1]}", argv, volume=f"systemd-{argv[1]}")


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Machine:
    """The place of the services: a directory instead of their volume, free ports instead of theirs."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.processes: dict[str, subprocess.Popen[str]] = {}
        self.urls: dict[str, str] = {}
        """Ports of gateways, by name."""
        tools = directory / "bin"
        tools.mkdir()
        command = tools / "swarmllm"
        command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m swarmllm "$@"\n')
        command.chmod(0o755)
        self._environment = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "SWARMLLM_CACHE": str(directory)}

    def log(self, name: str) -> Path:
        """The output of a service."""
        return self.directory / f"{name}.log"

    def volume(self, service: Service) -> Path:
        """The directory that replaces its volume."""
        path = self.directory / service.volume
        path.mkdir(exist_ok=True)
        return path

    def localized(self, service: Service) -> list[str]:
        """The command with the values that its own container would have."""
        ports: dict[str, str] = {}

        def local(word: str) -> str:
            word = re.sub(r"(?<![\w.])/(cache|var/lib/swarmllm)(?=/|$)", str(self.volume(service)), word)
            word = word.replace("0.0.0.0", "127.0.0.1")
            return re.sub(r"(?<=port=)\d+|(?<=/tcp/)\d+$", lambda one: ports.setdefault(one[0], str(free_port())), word)

        argv = [local(word) for word in service.argv]
        for place, word in enumerate(argv[:-1]):
            if word == "--port":
                argv[place + 1] = str(free_port())
        words = " ".join(argv)
        if service.kind == "gateway":
            if "--port" not in words:
                argv.append(f"--port={free_port()}")
            (port,) = re.findall(r"--port[= ](\d+)", " ".join(argv))
            self.urls[service.name] = f"http://127.0.0.1:{port}"
        elif "--host_maddrs" not in words:
            argv.append("--host_maddrs=/ip4/127.0.0.1/tcp/0")
        return argv

    def start(self, service: Service) -> None:
        """Start a service. Returns when its health check, /health or its output says that it is up."""
        with self.log(service.name).open("w") as log:
            self.processes[service.name] = subprocess.Popen(
                self.localized(service), env=self._environment, stdout=log, stderr=subprocess.STDOUT, text=True
            )
        deadline = time.monotonic() + WAIT_S
        while not self._is_up(service):
            if self.processes[service.name].poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{service.name} did not come up:\n{self.log(service.name).read_text()}")
            time.sleep(0.2)

    def _is_up(self, service: Service) -> bool:
        if service.kind == "gateway":
            try:
                with urllib.request.urlopen(f"{self.urls[service.name]}/health") as answer:
                    return bool(answer.status == 200)
            except urllib.error.URLError:  # not there yet, or 503
                return False
        if service.health is not None:
            check = [word.replace("/cache", str(self.volume(service))) for word in service.health]
            return subprocess.run(check, stderr=subprocess.DEVNULL, check=False).returncode == 0
        return "join with --initial_peers" in self.log(service.name).read_text()

    def address(self, name: str) -> str:
        """The address for joining through that service."""
        return self.log(name).read_text().partition("--initial_peers ")[2].split()[0]

    def ask(self, name: str) -> str:
        """Ask a gateway for a token."""
        body = json.dumps({"prompt": "Once upon a time", "max_tokens": 1, "temperature": 0}).encode()
        request = urllib.request.Request(
            f"{self.urls[name]}/v1/completions", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as answer:
            return str(json.load(answer)["choices"][0]["text"])

    def stop(self) -> dict[str, int]:
        """Stop all of them, the last one first; return their exit codes."""
        codes = {}
        for name, process in reversed(self.processes.items()):
            process.send_signal(signal.SIGTERM)
            try:
                codes[name] = process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                codes[name] = process.wait()
        self.processes.clear()
        return codes


@contextmanager
def machine() -> Iterator[Machine]:
    """A temporary directory and its processes, both gone at the end."""
    with tempfile.TemporaryDirectory(prefix="swarmllm-") as directory:
        here = Machine(Path(directory))
        try:
            yield here
        finally:
            here.stop()


def run(path: Path) -> Iterator[str]:
    """Start the services of a file; yield a line for each success.

    Raises:
        RuntimeError: a service doesn't start, writes nothing, or doesn't end in order.
    """
    with machine() as here:
        if path.suffix == ".md":
            model = ["--model", os.fspath(embedded_model_path()), "--quant_type", "none"]
            here.start(Service("somebody", ["swarmllm", "server", "--new_swarm", *model]))
            services = list(of_document(path, here.address("somebody")))
        else:
            services = of_compose(path, {**os.environ, "MODEL": os.fspath(embedded_model_path())})
        for service in services:
            here.start(service)
            yield f"{service.name} is up: {' '.join(service.argv)}"
        for name in here.urls:
            text = here.ask(name)
            if not text:
                raise RuntimeError(f"{name} wrote nothing")
            yield f"{name} writes {text!r}"
        codes = here.stop()
        if any(codes.values()):
            raise RuntimeError(f"exit codes: {codes}")
        yield f"all of them ended in order: {', '.join(codes)}"


def main(arguments: Sequence[str]) -> int:
    """Run the files that are named, or the compose file."""
    for path in map(Path, arguments or [os.fspath(COMPOSE)]):
        print(path)
        for line in run(path):
            print(f"  {line}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
