"""Chat templates, rendered in separate processes. A process that computes too long or grows too large is killed.

A template is a program from a checkpoint, and a request may make its text long. `language_model` renders through
`ChatTemplates`. `main` is the other side: a process that reads lines of JSON and answers each with a line.
transformers' own code renders, so texts are the same.
"""

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any

from swarmllm.api import ConfigurationError

LIMIT_S = 2.0
"""Seconds of computing that a template may take. Assumed: a conversation of 4096 messages takes some tenths."""
LIMIT_BYTES = 1 << 29
"""Memory that it may take in addition to the process's own. Assumed, as is `MAX_CHARS`."""
MAX_CHARS = 1 << 23
"""Characters of its text: twice as many as 1 MiB of messages and tools can make when all of it is escaped."""
MAX_LINE = 6 * MAX_CHARS + 64
"""Bytes of an answer: a character takes at most six."""
NUM_PROCESSES = 2
"""Processes of one model. Assumed: rendering takes about a millisecond, so one is enough as long as nothing is slow."""


class ChatTemplates:
    """The processes of one model, and threads that prepare its chats. The first chat starts them."""

    def __init__(self, limit_s: float = LIMIT_S) -> None:
        self._limit_s = limit_s
        self.threads = ThreadPoolExecutor(NUM_PROCESSES, thread_name_prefix="prepare chats")
        self.processes: set[subprocess.Popen[bytes]] = set()
        self._idle: list[subprocess.Popen[bytes]] = []
        self._lock = threading.Lock()
        self._closed = False

    def start(self) -> None:
        """Start a process for the first chat; returns at once."""
        self._give_back(self._process())

    def render(
        self,
        template: str,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        *,
        given: Mapping[str, Any],
        own: Mapping[str, Any],
        go_on: bool,
    ) -> str:
        """The text of a conversation. `given` and `own` are variables of the template; it must know the given ones.

        Raises:
            ConfigurationError: the template refuses these messages, doesn't know a variable, or takes too much.
        """
        asked = {"template": template, "messages": messages, "tools": tools or None, "given": given, "own": own}
        try:
            line = json.dumps({**asked, "go_on": go_on}).encode() + b"\n"
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigurationError(f"the model's chat template can't take these messages: {error}") from None
        process = self._process()
        answer = _answer(process, line)
        if answer is None:
            self._end(process)
            raise ConfigurationError(
                f"the model's chat template computed for more than {self._limit_s:g} s with these messages, or took "
                f"more than {LIMIT_BYTES >> 20} MiB of memory: send a shorter conversation, or use /v1/completions"
            )
        self._give_back(process)
        if "unknown" in answer:
            known = f": this model's template knows {', '.join(answer['known'])}" if answer["known"] else ""
            raise ConfigurationError(f"chat_template_kwargs can't hold {answer['unknown']}{known or ': leave it out'}")
        if "error" in answer:
            raise ConfigurationError(f"the model's chat template can't take these messages: {answer['error']}")
        return str(answer["text"])

    def close(self) -> None:
        """End all processes and threads."""
        with self._lock:
            self._closed = True
            left = list(self.processes)
        for process in left:
            self._end(process)
        self.threads.shutdown()

    def _process(self) -> subprocess.Popen[bytes]:
        """An idle process, or a new one."""
        with self._lock:
            while self._idle:
                process = self._idle.pop()
                if process.poll() is None:
                    return process
            if self._closed:
                raise ConfigurationError("the gateway is shutting down")
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, str(self._limit_s)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                process_group=0,  # Ctrl-C is for the gateway, which then closes the pipe
            )
            self.processes.add(process)
            return process

    def _give_back(self, process: subprocess.Popen[bytes]) -> None:
        with self._lock:
            self._idle.append(process)

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):  # the rest of the question stays unwritten
                pipe.close()  # type: ignore[union-attr]
        with self._lock:
            self.processes.discard(process)


def _answer(process: subprocess.Popen[bytes], line: bytes) -> dict[str, Any] | None:
    """Send a question and read the answer; None: the process has ended."""
    questions, answers = process.stdin, process.stdout
    assert questions is not None
    assert answers is not None
    try:
        questions.write(line)
        questions.flush()
        answer = answers.readline(MAX_LINE)
    except OSError:
        return None
    return json.loads(answer) if answer.endswith(b"\n") else None


# ---------------------------------------------------------------------- the other side


def main(limit_s: float) -> None:
    """Answer each line of standard input with a line on standard output, until input ends."""
    questions, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    from transformers.utils import chat_template_utils  # noqa: F401  half a second, before the clock runs

    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    limit = pages * resource.getpagesize() + LIMIT_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    for line in questions:
        signal.setitimer(signal.ITIMER_PROF, limit_s)  # its signal has no handler, so it ends the process
        try:
            answer = _rendered(json.loads(line))
        except MemoryError:
            return
        except Exception as error:  # noqa: BLE001  a template can raise anything
            answer = {"error": str(error) or type(error).__name__}
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()
        signal.setitimer(signal.ITIMER_PROF, 0)


def _rendered(asked: dict[str, Any]) -> dict[str, Any]:
    from transformers.utils.chat_template_utils import render_jinja_template

    template, given = asked["template"], asked["given"]
    if given:
        known = _variables(template) - asked["own"].keys()
        if unknown := sorted(given.keys() - known):
            return {"unknown": unknown[0][:64], "known": sorted(known)[:32]}
    (text,), _ = render_jinja_template(
        [asked["messages"]],
        tools=asked["tools"],
        chat_template=template,
        continue_final_message=asked["go_on"],
        add_generation_prompt=not asked["go_on"],
        **{**asked["own"], **given},
    )
    if len(text) > MAX_CHARS:
        return {"error": f"they make a text of more than {MAX_CHARS} characters"}
    return {"text": text}


@lru_cache
def _variables(template: str) -> frozenset[str]:
    """Variables that a template can be given besides messages and tools: all that it reads or tests for being
    defined."""
    import inspect

    from jinja2 import meta, nodes
    from transformers.utils.chat_template_utils import _compile_jinja_template, render_jinja_template

    environment = _compile_jinja_template(template).environment
    tree = environment.parse(template)
    asked = [test.node for test in tree.find_all(nodes.Test) if test.name in ("defined", "undefined")]
    asked += [one.node for one in tree.find_all(nodes.Filter) if one.name in ("default", "d")]
    found = {node.name for node in asked if isinstance(node, nodes.Name)}
    taken = {"messages", *environment.globals, *inspect.signature(render_jinja_template).parameters}
    return frozenset((found | meta.find_undeclared_variables(tree)) - taken)


if __name__ == "__main__":
    main(float(sys.argv[1]))
