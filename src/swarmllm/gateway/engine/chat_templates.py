"""Turn conversations into text by a model's chat template, in separate processes with limits on time and memory.

A template is a program that comes with the checkpoint, and a request can make it compute for long. So a process that
computes too long or takes too much memory is killed, and the gateway goes on. `language_model` calls `ChatTemplates`,
which sends each conversation to a process as a line of JSON. `main` is the program of these processes, and answers with
a line of JSON. It calls transformers' own code, so the texts are those of `apply_chat_template`.
"""

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any

from swarmllm.api import ConfigurationError

LIMIT_S = 2.0
"""Most seconds of CPU time for one conversation. Assumed: one of 4096 messages takes some tenths of a second."""
LIMIT_BYTES = 1 << 29
"""Most bytes of memory that a process may take in addition to what it has before its first conversation. Assumed."""
MAX_CHARS = 1 << 23
"""Most characters of a rendered text. Assumed: twice as many as 1 MiB of messages and tools with every character
escaped."""
MAX_LINE = 6 * MAX_CHARS + 64
"""Most bytes of an answer: JSON writes a character as at most six bytes."""
NUM_PROCESSES = 2
"""Most processes of one model. Assumed: rendering takes about a millisecond, so the second one is needed only while the
first has a slow conversation."""


SYSTEM, LATER, RESULT, CALLS = "system", "later system", "tool", "tool_calls"
NO_PLACE = {
    SYSTEM: "a system prompt: put its text into the user's message",
    LATER: "system messages after the first message: put their text into the user's message",
    RESULT: "results of tools: put their text into the user's message",
    CALLS: "earlier calls of tools: leave them out of the assistant's messages",
}
"""What a chat template may have no place for, and what to do then."""
_SAID = {"role": "system", "content": "-"}


class ChatTemplates:
    """The rendering processes of one model. A process is started when a chat needs one and none is idle."""

    def __init__(self, limit_s: float = LIMIT_S) -> None:
        self._limit_s = limit_s
        # Callers render in these threads. Their number limits that of the processes.
        self.threads = ThreadPoolExecutor(NUM_PROCESSES, thread_name_prefix="prepare chats")
        self.processes: set[subprocess.Popen[bytes]] = set()
        self._idle: list[subprocess.Popen[bytes]] = []
        self._lock = threading.Lock()
        self._closed = False
        self._places: set[tuple[str, str]] = set()  # (template, kind of what it has a place for), as far as known

    def start(self) -> None:
        """Start a process before the first chat comes; returns at once."""
        self._give_back(self._take_process())

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
        """Render a conversation; returns its text.

        `given`: variables of the template from the request (`chat_template_kwargs`), refused if the template doesn't
        use them. `own`: its variables from the tokenizer. `go_on`: the text ends within the last message, so that the
        model continues it; otherwise it ends where a new answer begins.

        Raises:
            ConfigurationError: the template refuses these messages, doesn't know a variable, or takes too much.
        """
        asked = {"template": template, "messages": messages, "tools": tools or None, "given": given, "own": own}
        try:
            line = json.dumps({**asked, "go_on": go_on}).encode() + b"\n"
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigurationError(f"the model's chat template can't take these messages: {error}") from None
        process = self._take_process()
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

    def without_place(
        self, template: str, messages: Sequence[Mapping[str, Any]], text: str, render: Callable[..., str]
    ) -> str | None:
        """What of these messages leaves no trace in their rendered text, as words that say what to do; None: nothing.

        `render` makes the text of messages like these. Templates trim, escape and merge messages, so what counts is
        whether the text changes with the message. Each kind is tried only until its place is known. A template that
        puts the system prompt into the last turn of the user has none for it in some conversations (Mistral 7B v0.3,
        while tools answer), so a conversation of nothing else is tried, too.
        """
        for kind, changed in _changed(messages).items():
            if (template, kind) in self._places:
                continue
            try:
                has_place = render(changed) != text
                if has_place and render(messages) != text:
                    continue  # the text has the time in it, or random numbers
                if not has_place and kind == SYSTEM:
                    plain = [_SAID, {"role": "user", "content": "-"}]
                    has_place = render(plain) != render([_more(_SAID), *plain[1:]])
            except ConfigurationError:
                has_place = True  # the template has looked at it
            if not has_place:
                return NO_PLACE[kind]
            self._places.add((template, kind))
        return None

    def close(self) -> None:
        """End all processes and threads."""
        with self._lock:
            self._closed = True
            left = list(self.processes)
        for process in left:
            self._end(process)
        self.threads.shutdown()

    def _take_process(self) -> subprocess.Popen[bytes]:
        """Take an idle process, or start a new one."""
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
                process_group=0,  # Ctrl-C must reach only the gateway, which ends the process by closing its input
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
            with contextlib.suppress(OSError):  # unsent bytes of the conversation can't be written any more
                pipe.close()  # type: ignore[union-attr]
        with self._lock:
            self.processes.discard(process)


def _changed(messages: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """These messages, with one change in the last thing of each kind that templates may leave out.

    Some shorten earlier results of tools. An empty message needs no place. A system message in the middle is of another
    kind than one at the start.
    """
    found: dict[str, list[Mapping[str, Any]]] = {}
    for place, one in enumerate(messages):
        if one["role"] == "system":
            kind, changed = LATER if place else SYSTEM, _more(one)
        elif one["role"] == "tool":
            kind, changed = RESULT, _more(one)
        elif one.get("tool_calls"):
            kind, changed = CALLS, {name: value for name, value in one.items() if name != "tool_calls"}
        else:
            continue
        content = one["content"]
        is_empty = not content.strip() if isinstance(content, str) else not content
        if kind == CALLS or not is_empty:
            found[kind] = [*messages[:place], changed, *messages[place + 1 :]]
    return found


def _more(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message with one more word."""
    content = message["content"]
    more = f"{content} x" if isinstance(content, str) else [*content, {"type": "text", "text": " x"}]
    return {**message, "content": more}


def _answer(process: subprocess.Popen[bytes], line: bytes) -> dict[str, Any] | None:
    """Send a conversation and read the answer; None if the process has ended."""
    requests, answers = process.stdin, process.stdout
    assert requests is not None
    assert answers is not None
    try:
        requests.write(line)
        requests.flush()
        answer = answers.readline(MAX_LINE)
    except OSError:
        return None
    return json.loads(answer) if answer.endswith(b"\n") else None


# ---------------------------------------------------------------------- the program of the processes


def main(limit_s: float) -> None:
    """Answer each line of standard input with a line on standard output, until input ends."""
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print goes to standard error, not between the answers
    from transformers.utils import chat_template_utils  # noqa: F401  takes half a second: not within the time limit

    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    limit = pages * resource.getpagesize() + LIMIT_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    for line in requests:
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
    """Render a request of `ChatTemplates.render`: `{"text"}`, `{"error"}`, or `{"unknown", "known"}` variables."""
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
    """Names of the variables that a template uses, except for messages, tools and what transformers itself passes.

    A variable counts if the template reads it, gives it a default, or tests if it is defined.
    """
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
