"""The command `swarmllm X`, the same as `python -m swarmllm X`, and the screen that lists all commands.

It imports only the module of the command, so that no command waits for the dependencies of others. A command's module
has `main(argv) -> int`, which returns the exit status.
"""

import difflib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module

from swarmllm.process_end import USUAL, end_by_signal, end_process, serves, take_signals
from swarmllm.version import __version__


@dataclass(frozen=True)
class Command:
    """One line of the help screen."""

    module: str
    does: str
    example: str


COMMANDS = {
    "up": Command(
        "swarmllm.commands.up",
        "offer this machine to the swarm of the network, or begin it",
        "swarmllm up",
    ),
    "use": Command(
        "swarmllm.commands.use",
        "let the machines load a model together, and chat",
        "swarmllm use MODEL",
    ),
    "server": Command(
        "swarmllm.server.__main__",
        "serve some blocks of a model",
        "swarmllm server --model M --num_blocks 8 --initial_peers ADDRESS",
    ),
    "dht": Command(
        "swarmllm.commands.dht",
        "a bootstrap peer: others join through it; it serves no blocks",
        "swarmllm dht --host_maddrs /ip4/0.0.0.0/tcp/31337",
    ),
    "generate": Command(
        "swarmllm.commands.generate",
        "print text from a swarm while it is generated",
        'swarmllm generate --model M --initial_peers ADDRESS "A tale"',
    ),
    "chat": Command(
        "swarmllm.commands.chat",
        "chat with a model of the swarm",
        "swarmllm chat --model M --initial_peers ADDRESS",
    ),
    "status": Command(
        "swarmllm.commands.status",
        "the servers of a swarm, their blocks, and missing blocks",
        "swarmllm status --initial_peers ADDRESS",
    ),
    "gateway": Command(
        "swarmllm.gateway.__main__",
        "an OpenAI-compatible web API, a chat page, a page of the swarm",
        "swarmllm gateway --model M --initial_peers ADDRESS",
    ),
    "models": Command(
        "swarmllm.commands.models",
        "models that fit this machine or a swarm's, and how fast",
        "swarmllm models --model ~/models",
    ),
    "adapters": Command(
        "swarmllm.commands.adapters",
        "adapters and heads that others have shared on the hub",
        "swarmllm adapters --base HUB_ID --task text-classification",
    ),
    "runs": Command(
        "swarmllm.commands.runs",
        "trainings that several homes share: who, tokens, losses",
        "swarmllm runs",
    ),
    "calibrate": Command(
        "swarmllm.commands.calibrate",
        "note how large the inputs of weights are, for servers in few bits",
        "swarmllm calibrate --model M --text FILE --output FILE",
    ),
    "doctor": Command(
        "swarmllm.commands.doctor",
        "check this machine and network, and name what to mend",
        "swarmllm doctor --model M --initial_peers ADDRESS",
    ),
    "demo": Command(
        "swarmllm.demo.__main__",
        "a chat with a swarm on this machine; one of its servers is killed",
        "swarmllm demo",
    ),
}


def help_text() -> str:
    """The screen of `swarmllm --help`."""
    lines = [
        "usage: swarmllm COMMAND [OPTIONS]    (COMMAND --help lists its options)",
        "",
        "Run large language models together: each server holds some blocks of the model.",
        "",
    ]
    for name, command in COMMANDS.items():
        lines += [f"  {name:<10}{command.does}", f"  {'':<10}$ {command.example}"]
    lines += [
        "",
        "ADDRESS is what a server prints behind --initial_peers when it starts.",
        "",
        "  --version   the version of swarmllm",
        "  --help      this screen",
    ]
    return "\n".join(lines)


def _run(arguments: list[str]) -> int:
    name = arguments[0] if arguments else "--help"
    if name in ("--help", "-h", "help"):
        print(help_text())
        return 0
    if name in ("--version", "-V"):
        print(f"swarmllm {__version__}")
        return 0
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"choose one of {', '.join(COMMANDS)}."
        print(f"swarmllm: there is no command {name!r}; {hint}", file=sys.stderr)
        return 2
    try:
        status: int = import_module(COMMANDS[name].module).main(arguments[1:])
    except KeyboardInterrupt:  # during the import; later the command itself handles Ctrl-C
        return 130
    return status


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that `argv` names and return its exit status.

    Without `argv`, the command line names it, and the process is the command's own: if it serves, this ends it.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    ends_here = argv is None and serves(arguments)
    if ends_here:
        take_signals(end_by_signal, *USUAL)
    status = _run_and_flush(arguments)
    if ends_here:
        end_process(status)
    return status


def _run_and_flush(arguments: list[str]) -> int:
    try:
        try:
            return _run(arguments)
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # also after a help screen, where the parser ends the program
    except BrokenPipeError:
        # `swarmllm --help | head`: the reader has closed the pipe. Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


if __name__ == "__main__":
    sys.exit(main())
