"""`swarmllm up` and `swarmllm use`: texts go on when a machine is killed, or another model is chosen."""

import json
import os
import shutil
import signal
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
from commands import Running, command
from running_machines import note_speeds
from safetensors.torch import load_file, save_file

from swarmllm import embedded_model_path

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PROMPT, NAME = "Once upon a time", "embedded"
BEGINNING = 40
"""Characters of a text that are there when something happens."""
THREE_BLOCKS = "0.0153GB"
"""Memory for three of the eight blocks of the embedded model with their caches."""


def another_model(directory: Path) -> Path:
    """The embedded model with other weights."""
    shutil.copytree(embedded_model_path(), directory)
    weights = directory / "model.safetensors"
    save_file({name: tensor * 1.01 for name, tensor in load_file(weights).items()}, weights, {"format": "pt"})
    return directory


class UpMachine:
    """A machine that `swarmllm up` runs on, with a state directory of its own."""

    def __init__(self, directory: Path, name: str, running: ExitStack) -> None:
        self.name, self.state, self._directory, self._running = name, directory / name, directory, running
        self._settings = directory / "up.toml"
        self._settings.write_text('host_maddrs = ["/ip4/127.0.0.1/tcp/0"]')
        note_speeds(self.state)

    def up(self, *invite: str) -> str:
        """Start it. Returns the address of its page, the only one that it prints."""
        log = self._directory / f"{self.name}.log"
        flags = ["--config", self._settings, "--public_name", self.name, "--max_memory", THREE_BLOCKS]
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("SWARMLLM_STATE_DIR", str(self.state))
            started = Running("up", *flags, "--no_lan_discovery", *invite, log=log)
        self.process = self._running.enter_context(started).process
        for line in self.process.stdout:
            if line.startswith("swarmllm: open "):
                self.url, _, self.key = line.split()[2].partition("#key=")
                return self.url
        raise AssertionError(log.read_text())

    def use(self, *arguments: str) -> str:
        """Run `swarmllm use` on this machine. Returns what it prints."""
        return self.run("use", *arguments)

    def run(self, *line: str) -> str:
        """Run a command on this machine. Returns what it prints."""
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("SWARMLLM_STATE_DIR", str(self.state))
            done = command(*line)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """Ask its page; returns the open answer."""
        headers = {"Authorization": f"Bearer {self.key}", "Content-Type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        return urllib.request.urlopen(urllib.request.Request(self.url + path, data, headers), timeout=600)

    def picture(self) -> dict[str, Any]:
        with self.ask("api/machines") as answer:
            found: dict[str, Any] = json.load(answer)
        return found

    def wait_for(self, condition: Callable[[dict[str, Any]], bool]) -> None:
        """Until its picture fulfils the condition. pytest's timeout bounds the wait."""
        while not condition(self.picture()):
            time.sleep(0.2)

    def write(self, tokens: int, meanwhile: Callable[[], None] | None = None) -> str:
        """Text that its page streams to its last token. `meanwhile` is called after some tokens."""
        body = {"model": NAME, "prompt": PROMPT, "max_tokens": tokens, "temperature": 0, "stream": True}
        text, count, reason = "", 0, None
        with self.ask("v1/completions", body) as answer:
            for line in answer:
                if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                    continue
                found = json.loads(line[6:])
                assert "error" not in found, found
                (choice,) = found["choices"]
                text += choice["text"]
                reason = choice["finish_reason"] or reason
                count += 1
                if count == 5 and meanwhile is not None:
                    meanwhile()
        assert reason in ("stop", "length")
        return text

    def kill(self) -> None:
        """As if the plug was pulled: nothing says goodbye."""
        processes = [psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children(recursive=True)]
        for one in processes:
            one.suspend()
        for one in processes:
            one.kill()
        self.process.wait()


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[list[UpMachine]]:
    with ExitStack() as running:
        yield [UpMachine(tmp_path, name, running) for name in "abcd"]


def test_two_commands_in_all(machines: list[UpMachine], tmp_path: Path) -> None:
    a, b, c, d = machines
    a.up()
    with a.ask("api/machines/invite") as answer:
        invite = json.load(answer)["invite"]
    for one in (b, c, d):
        one.up(invite)
    said = b.use(embedded_model_path())
    assert f"command 1: use {NAME}" in said
    assert f"{NAME} answers after " in said
    assert f"open {b.url}#key={b.key}" in said
    text = a.write(200)
    # Other commands find the swarm by the agent of their machine.
    assert "all 8 blocks are served" in d.run("status")
    story = d.run("generate", "--model", embedded_model_path(), "--max_new_tokens", "8", PROMPT)
    assert len(story.strip().removeprefix(PROMPT)) > 8
    # A machine is lost in the middle of a text: others load its blocks, and the text goes on. Weights in 8 bits may
    # choose another word where two are nearly alike, because other servers compute other numbers of tokens at once.
    assert a.write(200, c.kill)[:BEGINNING] == text[:BEGINNING]
    a.wait_for(lambda picture: {one["name"] for one in picture["machines"]} == {"a", "b", "d"})
    # It comes back with its command and its swarm.
    c.up()
    assert NAME in c.use()
    # Another model is chosen while somebody reads a text of the first one.
    other = another_model(tmp_path / "other")
    with ThreadPoolExecutor(1) as somebody:
        choosing: list[Future[str]] = []
        assert a.write(200, lambda: choosing.append(somebody.submit(d.use, str(other))))[:BEGINNING] == text[:BEGINNING]
        assert "other answers after " in choosing[0].result()
    with a.ask("v1/models") as answer:
        assert [one["id"] for one in json.load(answer)["data"]] == ["other"]
    assert [one["what"] for one in c.picture()["commands"]] == [f"use {NAME}", "use other"]
    for one in (a, b, c, d):
        os.kill(one.process.pid, signal.SIGTERM)
    assert [one.process.wait(120) for one in (a, b, c, d)] == [0] * 4
