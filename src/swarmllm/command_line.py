"""What all commands share: flags in both spellings, settings from a file, logging, exit codes.

Exit codes: 0 done, 1 a failure, 2 unusable arguments, 130 interrupted. Errors of swarmllm are one sentence on standard
error; anything else is a bug and shows its traceback.
"""

import argparse
import asyncio
import io
import itertools
import logging
import os
import signal
import sys
import tomllib
import warnings
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import Any, NoReturn, TypeVar, get_args, get_type_hints

from swarmllm.config import ClientConfig, default_initial_peers, default_log_level
from swarmllm.errors import ConfigurationError, SwarmError
from swarmllm.invite import is_invite, unpack_invites

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

CLIENT_FLAGS = {
    "allowed_servers": ("PEER_ID", "use these servers only"),
    "blocked_servers": ("PEER_ID", "never use these servers"),
    "verify_fraction": ("P", "share of steps that others compute again, to find liars; 0 to 1"),
    "verify_tolerance": ("E", "relative error that this forgives; 0.5 lets servers with nf4 in"),
    "speculation": ("HOW", "auto, off, ngram, or a small model that guesses the next tokens"),
    "compression": ("HOW", "of hidden states on their way: auto, none or int8"),
}
"""Fields of ClientConfig for which every command with a client has flags: what stands for the value, what it does."""

HELP_COLUMNS = 100
HELP_LINES = 40
"""So big a screen `--help` may fill; what doesn't fit is behind `--help_all`."""


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Screens of one width, whatever the terminal's; flags with long names don't break their lines."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34, width=HELP_COLUMNS)


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that takes `--num-blocks` for `--num_blocks`, and only reports the flags that were given."""

    def __init__(self, *, prog: str, description: str, epilog: str = "") -> None:
        super().__init__(
            prog=prog,
            usage=f"{prog} [OPTIONS]",
            description=description,
            epilog=epilog,
            formatter_class=_HelpFormatter,
            argument_default=argparse.SUPPRESS,
            allow_abbrev=False,
        )
        self.add_argument("--config", metavar="FILE", help="TOML file with flags as keys; flags given here win")

    def format_help(self) -> str:
        """The screen of `--help`: without the last groups of flags if it would be too long with them."""
        groups, hidden = list(self._action_groups), 0
        while len((text := self._format_groups(groups, hidden)).splitlines()) > HELP_LINES and hidden < len(groups) - 2:
            hidden += 1
        return text

    def _format_groups(self, groups: list[Any], hidden: int) -> str:
        """The screen without the last `hidden` groups, which are named instead."""
        shown = groups[: len(groups) - hidden]
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
        formatter.add_text(self.description)
        for group in shown:
            formatter.start_section(group.title)
            formatter.add_text(group.description)
            formatter.add_arguments(group._group_actions)
            formatter.end_section()
        if hidden:
            titles = ", ".join(group.title for group in groups[len(shown) :])
            formatter.add_text(f"further flags, shown by --help_all: {titles}")
        formatter.add_text(self.epilog)
        return formatter.format_help()

    def error(self, message: str) -> NoReturn:
        """One sentence, exit code 2."""
        print(f"{self.prog}: {message} (see --help)", file=sys.stderr)
        sys.exit(2)

    def parse_settings(self, argv: Sequence[str]) -> dict[str, Any]:
        """The flags that were given, on top of those in `--config FILE`."""
        argv = [_underscored(arg) for arg in argv]
        from_file: list[str] = []
        for flag, path in itertools.pairwise(argv):
            if flag == "--config":
                from_file = self._flags_of(path)
        if "--help_all" in argv:
            print(self._format_groups(list(self._action_groups), 0), end="")
            sys.exit(0)
        flags = [*from_file, *argv]
        settings = vars(self.parse_args([*self._model_of_invite(flags), *flags]))
        settings.pop("config", None)
        return settings

    def _model_of_invite(self, flags: Sequence[str]) -> list[str]:
        """`--model` as an invite among the initial peers says, if the command needs one; the flags given win."""
        if not any(action.dest == "model" and action.required for action in self._actions):
            return []
        words = [flag.partition("=")[2] if flag.startswith("--initial_peers=") else flag for flag in flags]
        candidates = words if "--initial_peers" in flags or words != list(flags) else default_initial_peers()
        _, invites = unpack_invites(filter(is_invite, candidates))
        models = {invite.model: None for invite in invites if invite.model is not None}
        given = [value for flag, value in itertools.pairwise(flags) if flag == "--model"]
        given += [flag.partition("=")[2] for flag in flags if flag.startswith("--model=")]
        for model in models:
            if given and PurePath(given[-1]).name != PurePath(model).name:
                logger.warning("the invite is for %s, but --model says %s", model, given[-1])
        return ["--model", next(iter(models))] if models and not given else []

    def _flags_of(self, path: str) -> list[str]:
        try:
            with Path(path).open("rb") as file:
                table = tomllib.load(file)
        except (OSError, tomllib.TOMLDecodeError) as error:
            self.error(f"can't read --config {path}: {error}")
        flags: list[str] = []
        for key, value in table.items():
            if value is False:
                continue
            flags.append(_underscored(f"--{key}"))
            if value is not True:
                flags.extend(str(item) for item in (value if isinstance(value, list) else [value]))
        return flags


def _underscored(arg: str) -> str:
    if not arg.startswith("--"):
        return arg
    name, equals, value = arg.partition("=")
    return "--" + name[2:].replace("-", "_") + equals + value


def set_up_logging(default_level: str = "INFO") -> None:
    """Log to standard error, ours at `SWARMLLM_LOG_LEVEL`, others' warnings only."""
    name = default_log_level(default_level)
    if name not in logging.getLevelNamesMapping():
        raise ConfigurationError(f"SWARMLLM_LOG_LEVEL={name} is no log level; use DEBUG, INFO, WARNING or ERROR")
    logging.basicConfig(
        level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S", stream=sys.stderr
    )
    logging.getLogger("swarmllm").setLevel(name)
    if name == "WARNING" and default_level == "WARNING":
        # Who waits for seconds wants to know for what, in commands that say nothing else as well.
        logging.getLogger("swarmllm.network.discovery").setLevel(logging.INFO)
    if name != "DEBUG":
        warnings.simplefilter("ignore")  # third parties' warnings mean nothing to whoever runs a command


def run_program(program: Callable[[], int | None], *, default_log_level: str = "INFO") -> int:
    """Run a synchronous command; the process's exit code."""
    try:
        set_up_logging(default_log_level)
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # whatever a model writes, on whatever terminal
        with _ended_in_order():
            return program() or 0
    except SwarmError as error:
        print(f"swarmllm: {one_line(error)}", file=sys.stderr)
        return 2 if isinstance(error, ConfigurationError) else 1
    except KeyboardInterrupt:
        if sys.stderr.isatty():
            print(file=sys.stderr)  # the shell's prompt begins a line of its own, not behind ^C
        return 130
    except BrokenPipeError:
        # `swarmllm generate … | head`: the reader has had enough. Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


@contextmanager
def _ended_in_order() -> Iterator[None]:
    """While entered, SIGTERM and a terminal that is closed end the program by SystemExit: nothing is left behind."""

    def end(signum: int, frame: object) -> NoReturn:
        sys.exit(128 + signum)

    # Those that are ignored stay so: that is what nohup does.
    signums = [signum for signum in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(signum) is signal.SIG_DFL]
    for signum in signums:
        signal.signal(signum, end)
    try:
        yield
    finally:
        for signum in signums:
            signal.signal(signum, signal.SIG_DFL)


def one_line(error: SwarmError) -> str:
    """The error's message; what libraries said inside it may have several lines."""
    return " ".join(str(error).split())


def run_command(command: Callable[[], Awaitable[int | None]], *, default_log_level: str = "INFO") -> int:
    """Run an asynchronous command in an event loop; the process's exit code."""

    def program() -> int | None:
        import uvloop

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_as_coroutine(command))

    return run_program(program, default_log_level=default_log_level)


async def _as_coroutine(command: Callable[[], Awaitable[int | None]]) -> int | None:
    return await command()


def stop_event(*, stop_on_stdin_eof: bool = False) -> asyncio.Event:
    """An event that SIGINT, SIGTERM, a terminal that is closed and, if asked for, the end of standard input set.

    Call it in the event loop.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signum != signal.SIGHUP or signal.getsignal(signum) is not signal.SIG_IGN:  # so nohup asks
            loop.add_signal_handler(signum, stop.set)
    if stop_on_stdin_eof:
        stdin = sys.stdin.fileno()

        def on_input() -> None:
            if not os.read(stdin, 4096):
                loop.remove_reader(stdin)
                stop.set()

        loop.add_reader(stdin, on_input)
    return stop


async def unless_stopped(stop: asyncio.Event, work: Coroutine[Any, Any, Result]) -> Result | None:
    """What `work` returns; None if `stop` is set before, and the work cancelled then."""
    working, stopped = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({working, stopped}, return_when=asyncio.FIRST_COMPLETED)
        return await working if working.done() else None
    finally:
        for task in (working, stopped):
            task.cancel()
        await asyncio.gather(working, stopped, return_exceptions=True)


def add_initial_peers_flags(parser: argparse._ActionsContainer, what: str = "any peers of the swarm") -> None:
    """How a command finds the swarm."""
    parser.add_argument(
        "--initial_peers", nargs="+", metavar="MADDR", help=f"{what}, or an invite; none: look on the LAN"
    )
    parser.add_argument(
        "--no_lan_discovery", dest="lan_discovery", action="store_false", help="neither look nor announce there"
    )


def add_client_flags(parser: argparse.ArgumentParser) -> None:
    """How a command uses servers: flags named and typed as the fields of ClientConfig, which give their defaults."""
    group, types = parser.add_argument_group("servers"), get_type_hints(ClientConfig)
    for name, (metavar, what) in CLIENT_FLAGS.items():
        takes_many = any("tuple" in str(kind) for kind in (types[name], *get_args(types[name])))
        options: dict[str, Any] = {"nargs": "+"} if takes_many else {"type": types[name]}
        group.add_argument(f"--{name}", metavar=metavar, help=what, **options)


def add_network_flags(parser: argparse._ActionsContainer) -> None:
    """The flags of every peer that others can reach, named as the fields of PeerConfig."""
    add = parser.add_argument
    add("--port", type=int, help="TCP port to listen on")
    add("--host_maddrs", nargs="+", metavar="MADDR", help="addresses to listen on")
    add("--announce_maddrs", nargs="+", metavar="MADDR", help="addresses to announce instead")
    add("--identity_path", metavar="FILE", help="key that is this peer's id; created if missing")
    add("--stop_on_stdin_eof", action="store_true", help=argparse.SUPPRESS)  # for programs that start peers
