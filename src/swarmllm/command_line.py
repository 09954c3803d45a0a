"""Common parts of all commands: flags from settings, settings from a file, logging, signals, exit codes.

Exit codes: 0 done, 1 failure, 2 unusable arguments, 130 interrupted; 0 for a command that serves until it is stopped
(`process_end`). A SwarmError is printed as one sentence on standard error. Any other exception is a bug and shows its
traceback.

Each field of a settings dataclass becomes a flag (`argparse_options`). The metadata of a field changes that: `alias` is
a second name of the flag; `hidden` keeps it off the help screens; `in_file` makes it a key of the file of `--config`,
without a flag; `flag` = False gives neither flag nor key.

`require_free_ports` runs before anything heavy is imported, so that a taken port is reported at once.
"""

import argparse
import ast
import asyncio
import difflib
import errno
import gc
import io
import itertools
import json
import linecache
import logging
import os
import re
import signal
import socket
import sys
import threading
import time
import tomllib
import warnings
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import MISSING, Field, fields
from functools import cache
from pathlib import PurePath
from types import NoneType, TracebackType, UnionType
from typing import Any, NoReturn, Self, TypeVar, get_args, get_type_hints

from swarmllm.config import ClientModelConfig, default_initial_peers, default_log_level, parse_block_indices
from swarmllm.errors import ConfigurationError, SwarmError
from swarmllm.files import decoded, read_text, require_temporary_directory
from swarmllm.invite import is_invite, unpack_invites
from swarmllm.process_end import USUAL, end_by_signal, take_signals

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

STDERR = 2
"""The last file descriptor that every process should have."""

EVERY_S = 4.0
"""Assumed: a user who sees nothing for 5 seconds begins to doubt."""
HELP_COLUMNS = 80
ADDRESS = """
ADDRESS is what a server prints behind --initial_peers when it starts; a client
or server on the same local network finds the swarm without it.
"""


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Formats screens of one width on every terminal, and flags with long names on one line."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30, width=HELP_COLUMNS)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        values = f"{action.metavar} …" if action.nargs == "+" else self._format_args(action, action.dest.upper())
        return f"{', '.join(action.option_strings)} {values}"


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that accepts `--num-blocks` for `--num_blocks`, and returns only the flags that were given.

    `common` names the settings that `--help` shows, in this order; `--help_all` shows the others too. None: all.
    """

    def __init__(self, *, prog: str, description: str, epilog: str = "", common: Sequence[str] | None = None) -> None:
        super().__init__(
            prog=prog,
            usage=f"{prog} [OPTIONS]",
            description=description,
            epilog=epilog + ADDRESS if "ADDRESS" in epilog else epilog,
            formatter_class=_HelpFormatter,
            argument_default=argparse.SUPPRESS,
            allow_abbrev=False,
        )
        self.add_argument("--config", metavar="FILE", help="TOML file with flags as keys; flags given here win")
        self.settings: list[tuple[argparse.Action, type, Field[Any]]] = []
        """Each flag or key of the file, with the class and the field that it comes from."""
        self._common = common

    def add_settings(
        self, config_type: type, classes: Sequence[type], *groups: type, without: Sequence[str] = ()
    ) -> None:
        """Add a flag for each field of `config_type` except `without`. Name, type and help are the field's own.

        `classes` and `groups` are the classes that declare the fields, in the order of the help screen. Each class in
        `groups` gets a heading, its docstring.
        """
        known, hints = {one.name: one for one in fields(config_type)}, get_type_hints(config_type)
        done = set(without)
        for owner in (*classes, *groups):
            title = (owner.__doc__ or "").partition(".")[0]
            group = self.add_argument_group(title[:1].lower() + title[1:]) if owner in groups else self
            for name in owner.__annotations__:
                one = known.get(name)
                if one is None or name in done or one.metadata.get("flag") is False:
                    continue
                done.add(name)
                action = group.add_argument(*flag_names(one), dest=name, **argparse_options(one, hints[name]))
                self.settings.append((action, owner, one))

    def flag_text(self, action: argparse.Action) -> str:
        """The text of a flag and its value, as help screens show it."""
        return self._get_formatter()._format_action_invocation(action)

    def format_help(self) -> str:
        """The screen of `--help`: the common flags, each with one sentence."""
        self._explain(at_length=False)
        if self._common is None:
            return self.format_all()
        of_settings = {action.dest: action for action, _, one in self.settings if not is_in_file(one)}
        others = [action for action in self._actions if action.dest not in of_settings]
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
        formatter.add_text(self.description)
        formatter.start_section("options")
        formatter.add_arguments([*others, *(of_settings[name] for name in self._common)])
        formatter.end_section()
        hidden = sum(action.help != argparse.SUPPRESS for action in of_settings.values()) - len(self._common)
        formatter.add_text(f"{hidden} more flags, and more about these: --help_all")
        formatter.add_text(self.epilog)
        return formatter.format_help()

    def _explain(self, *, at_length: bool) -> None:
        for action, owner, one in self.settings:
            action.help = argparse.SUPPRESS if is_in_file(one) else flag_help(one, owner, at_length=at_length)

    def format_all(self, *, at_length: bool = False) -> str:
        """A screen with all flags in their groups, and the keys that only a file may hold.

        `at_length`: with their whole docstrings.
        """
        self._explain(at_length=at_length)
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
        formatter.add_text(self.description)
        for group in self._action_groups:
            formatter.start_section(group.title)
            formatter.add_text(group.description)
            formatter.add_arguments(group._group_actions)
            formatter.end_section()
        formatter.start_section("settings without a flag: keys of the TOML file of --config")
        formatter.add_arguments(
            argparse.Action([], one.name, metavar=one.name, help=flag_help(one, owner, at_length=at_length))
            for _, owner, one in self.settings
            if is_in_file(one)
        )
        formatter.end_section()
        formatter.add_text(self.epilog)
        return formatter.format_help()

    def error(self, message: str) -> NoReturn:
        """Print one sentence and exit with code 2."""
        unexpected = message.removeprefix("unrecognized arguments: ")
        if unexpected != message:
            message = f"there is no place for {unexpected!r}: is it part of a text that needs quotes?"
        print(f"{self.prog}: {message} (see --help)", file=sys.stderr)
        sys.exit(2)

    def parse_settings(self, argv: Sequence[str] | None) -> dict[str, Any]:
        """The settings from `--config FILE` and from these flags (None: the command line). Flags win."""
        argv = list(sys.argv[1:] if argv is None else argv)
        end = argv.index("--") if "--" in argv else len(argv)  # text follows, whatever it begins with
        argv = [*self._with_values(list(map(_underscored, argv[:end]))), *argv[end:]]
        end = argv.index("--") if "--" in argv else len(argv)
        self._refuse_keys_of_the_file(argv[:end])
        given = {arg.partition("=")[0] for arg in argv}
        files = _values_of("--config", argv[:end])
        if len(files) > 1:
            self.error(f"--config takes one file, not {' and '.join(files)}: write all settings in one of them")
        from_file = self._flags_of(files[0], given) if files else []
        if "--help_all" in argv:
            print(self.format_all(at_length=True), end="")
            sys.exit(0)
        flags = [*from_file, *argv]
        self._refuse_unknown(argv[:end])
        settings = vars(self.parse_args([*self._model_of_invite(flags), *flags]))
        settings.pop("config", None)
        return settings

    def _with_values(self, flags: Sequence[str]) -> list[str]:
        """Put `=` between a flag that takes one value and a value that begins with a dash, like -1:2.

        argparse would take it for a flag, and say that the value is missing.
        """
        known = {name: action for action in self._actions for name in action.option_strings}
        takes_one = {name for name, action in known.items() if action.nargs is None}
        joined: list[str] = []
        for flag in flags:
            is_value = len(flag) > 1 and flag[0] == "-" and flag[1] != "-" and flag not in known
            if is_value and joined and joined[-1] in takes_one:
                joined[-1] += f"={flag}"
            else:
                joined.append(flag)
        return joined

    def _refuse_keys_of_the_file(self, flags: Sequence[str]) -> None:
        """Exit if a flag is a setting that only the file of `--config` may hold."""
        in_file = {
            name: action for action, _, one in self.settings if is_in_file(one) for name in action.option_strings
        }
        for index, flag in enumerate(flags):
            name, equals, value = flag.partition("=")
            if name in in_file:
                values = (
                    [value] if equals else itertools.takewhile(lambda one: not one.startswith("--"), flags[index + 1 :])
                )
                self.error(f"{name} moved to the file of --config: {_toml_line(in_file[name], list(values))}")

    def _refuse_unknown(self, flags: Sequence[str]) -> None:
        """Exit at the first unknown flag, before argparse reports missing flags."""
        known = {name: action for action in self._actions for name in action.option_strings}
        in_file = {action.dest for action, _, one in self.settings if is_in_file(one)}
        shown = [name for name, action in known.items() if action.dest not in in_file]
        for flag in flags:
            name = flag.partition("=")[0]
            if name.startswith("--") and len(name) > 2 and name not in known and " " not in name:
                self._refuse(name, name, f"there is no flag {name}", shown)

    def _refuse(self, name: str, told: str, problem: str, known: Sequence[str]) -> NoReturn:
        """Exit because of an unknown name, which the user is `told` so, and say which known one is most similar."""
        if name in {f"--{one.name}" for one in fields(ClientModelConfig) if one.metadata.get("flag") is not False}:
            self.error(f"{told} is a setting of clients, like swarmllm generate: leave it out here")
        near = [one for one in known if one.startswith(f"{name}_")] or difflib.get_close_matches(name, known, n=1)
        self.error(problem + (f": did you mean {near[0] if told == name else near[0][2:]}?" if near else ""))

    def _model_of_invite(self, flags: Sequence[str]) -> list[str]:
        """`--model` from an invite among the initial peers, if the command needs a model and none is given."""
        if not any(action.dest == "model" and action.required for action in self._actions):
            return []
        words = [flag.partition("=")[2] if flag.startswith("--initial_peers=") else flag for flag in flags]
        candidates = words if "--initial_peers" in flags or words != list(flags) else default_initial_peers()
        _, invites = unpack_invites(filter(is_invite, candidates))
        models = {invite.model: None for invite in invites if invite.model is not None}
        given = _values_of("--model", flags)
        for model in models:
            if given and PurePath(given[-1]).name != PurePath(model).name:
                logger.warning("the invite is for %s, but --model says %s", model, given[-1])
        return ["--model", next(iter(models))] if models and not given else []

    def _flags_of(self, path: str, given: Collection[str]) -> list[str]:
        """The settings of a file as flags, except those `given`: flags win, also where argparse would join several
        values."""
        try:
            table = tomllib.loads(read_text(path))
        except ConfigurationError as error:
            self.error(f"can't read --config {error}")
        except (tomllib.TOMLDecodeError, RecursionError) as error:
            self.error(f"can't read --config {path}: {error}")
        flags = [flag for key, value in table.items() for flag in self._flags_of_key(key, value, path)]
        return [flag for flag in flags if flag.partition("=")[0] not in given]

    def _flags_of_key(self, key: str, value: Any, path: str) -> list[str]:
        """One setting of a file as flags, each with its value behind `=`: the value may begin with a dash."""
        name, place = _underscored(f"--{key}"), f"{key} in {path}"
        actions = {
            flag: one
            for one in self._actions
            for flag in one.option_strings and (f"--{one.dest}", *one.option_strings)
            if flag.startswith("--") and one.dest not in ("help", "help_all", "version")
        }
        if name == "--config":
            self.error(f"{place} can't name another file: write the settings of that file here")
        if isinstance(value, dict):
            self.error(f"[{key}] in {path} is a table, and settings are in none: write its keys at the top of the file")
        if (action := actions.get(name)) is None:
            self._refuse(name, place, f"{place} is no setting of this command", [*actions])
        flag = name if name in action.option_strings else action.option_strings[0]
        if action.nargs == 0:
            if not isinstance(value, bool):
                self.error(f"{place} must be true or false, not {value!r}")
            return [flag] if value == (flag == name) else []  # a setting that is on by default has a flag for off only
        if isinstance(value, bool):
            self.error(f"{place} can't be {str(value).lower()}: give a value, or leave it out")
        values = value if isinstance(value, list) else [value]
        if isinstance(value, list) and action.nargs != "+":
            self.error(f"{place} takes one value, not the list {value!r}")
        if not values:
            self.error(f"{place} is an empty list: give values, or leave it out")
        if any(isinstance(one, (bool, list, dict)) for one in values):
            self.error(f"{place} must be a list of texts or numbers, not {value!r}")
        return [f"{flag}={one}" for one in values]


def is_in_file(one: Field[Any]) -> bool:
    """True if a setting has no flag, only a key in the file of `--config`."""
    return bool(one.metadata.get("in_file"))


def _toml_line(action: argparse.Action, values: Sequence[str]) -> str:
    """The line of a TOML file that says the same as a flag with these values."""
    if action.nargs == 0:
        return f"{action.dest} = {str(action.const).lower()}"
    as_toml = [json.dumps(value) if action.type is None else value for value in values] or ["…"]
    return f"{action.dest} = " + (f"[{', '.join(as_toml)}]" if action.nargs == "+" else as_toml[0])


def _values_of(name: str, flags: Sequence[str]) -> list[str]:
    """All values given for a flag, as the next word or behind `=`."""
    given = [value for flag, value in itertools.pairwise(flags) if flag == name]
    return given + [flag.partition("=")[2] for flag in flags if flag.startswith(f"{name}=")]


def _underscored(arg: str) -> str:
    if not arg.startswith("--"):
        return arg
    name, equals, value = arg.partition("=")
    return "--" + name[2:].replace("-", "_") + equals + value


def set_up_logging(default_level: str = "INFO") -> None:
    """Log to standard error: our messages at `SWARMLLM_LOG_LEVEL`, those of libraries from WARNING on."""
    name = default_log_level(default_level)
    if name not in logging.getLevelNamesMapping():
        raise ConfigurationError(f"SWARMLLM_LOG_LEVEL={name} is not a log level; use DEBUG, INFO, WARNING or ERROR")
    logging.basicConfig(
        level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S", stream=sys.stderr
    )
    logging.getLogger("swarmllm").setLevel(name)
    if name == "WARNING" and default_level == "WARNING":
        # Commands that print nothing else still say what takes seconds.
        for waiting in ("swarmllm.network.p2p.discovery", __name__):
            logging.getLogger(waiting).setLevel(logging.INFO)
    if name != "DEBUG":
        warnings.simplefilter("ignore")  # users of commands can't do anything about warnings of libraries


class Patience:
    """A context manager that says what the program waits for, whenever nothing else was printed for a while."""

    def __init__(self, say: Callable[[str], None], every_s: float | None = None) -> None:
        """`every_s` None: `EVERY_S`."""
        self._say, self._every_s = say, EVERY_S if every_s is None else every_s
        self._waiting_for: Callable[[], str] | None = None
        self._began_at = self._said_at = time.monotonic()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="patience", daemon=True)

    def wait_for(self, what: Callable[[], str] | None) -> None:
        """Say this from now on. None: nothing, something else prints."""
        self._waiting_for, self._said_at = what, time.monotonic()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._began_at

    def _run(self) -> None:
        while not self._over.wait(max(0.0, self._said_at + self._every_s - time.monotonic())):
            what, now = self._waiting_for, time.monotonic()
            if now - self._said_at < self._every_s:
                continue
            self._said_at = now
            if what is not None:
                self._say(f"  … {self.elapsed_s:.0f} s: {what()}")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()


@contextmanager
def announced_imports(*, torch: bool = True) -> Iterator[None]:
    """While imports run, say so now and every few seconds. Silent if they are done already.

    Enter it after the flags were checked. Garbage is not collected meanwhile, and never looked for among what was
    imported: imports leave a million objects and no garbage, and each scan of them takes some tenths of a second.
    Ctrl-C ends them at once, although an event loop that couldn't hear it meanwhile may have begun.

    Raises:
        ConfigurationError: there is no room for temporary files, which the imports need.
    """
    if ("torch" if torch else "hivemind") in sys.modules:
        yield
        return
    require_temporary_directory()
    what = "importing PyTorch and transformers" if torch else "importing the peer-to-peer library"
    logger.info("%s …", what)
    with Patience(logger.info) as patience:
        patience.wait_for(lambda: f"still {what}, from a slow disk or beside other programs")
        gc.disable()
        heard = signal.getsignal(signal.SIGINT)
        is_main = threading.current_thread() is threading.main_thread()
        may_interrupt = is_main and callable(heard) and heard is not end_by_signal
        if may_interrupt:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            yield
        finally:
            if may_interrupt:
                signal.signal(signal.SIGINT, heard)
            gc.freeze()
            gc.enable()


def run_program(program: Callable[[], int | None], *, default_log_level: str = "INFO", serves: bool = False) -> int:
    """Run a synchronous command and return the exit code. With `serves`, it is 0 after signals: they are its usual
    end."""
    try:
        _open_standard_streams()
        set_up_logging(default_log_level)
        for stream in (sys.stdin, sys.stdout):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(
                    errors="replace"
                )  # users type any bytes, models write any characters, and terminals differ
        with _ended_by_signals() if serves else _ended_in_order():
            code = program() or 0
            sys.stdout.flush()  # while a failure can still be reported
            return code
    except SwarmError as error:
        print(f"swarmllm: {one_line(error)}", file=sys.stderr)
        return 2 if isinstance(error, ConfigurationError) else 1
    except KeyboardInterrupt:
        if sys.stderr.isatty():
            print(file=sys.stderr)  # so that the shell's prompt doesn't stand behind ^C
        return 0 if serves else 130
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ENOSPC):
            raise
        if error.errno == errno.ENOSPC:
            print(f"swarmllm: can't write {error.filename or 'the output'}: {error.strerror}", file=sys.stderr)
        # `swarmllm generate … | head`: the reader has closed the pipe. Python would complain again when it flushes at
        # exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def read_stdin() -> str:
    """All of standard input, decoded by its byte order mark or in the terminal's encoding."""
    if not isinstance(sys.stdin, io.TextIOWrapper):
        return sys.stdin.read()
    return decoded(sys.stdin.buffer.read(), sys.stdin.encoding, "replace")


def _open_standard_streams() -> None:
    """Open /dev/null for standard streams that are closed. libuv ends the process if other files get their numbers."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= STDERR:
        os.set_inheritable(fd, True)
    os.close(fd)
    sys.stdin = sys.stdin or os.fdopen(0, closefd=False)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


@contextmanager
def _ended_in_order() -> Iterator[None]:
    """While entered, SIGTERM and a closed terminal raise SystemExit, so that nothing is left behind."""

    def end(signum: int, frame: object) -> NoReturn:
        sys.exit(128 + signum)

    with _signals_for(end, signal.SIGTERM, signal.SIGHUP):
        yield


def _ended_by_signals() -> AbstractContextManager[None]:
    """While entered, signals end the process with 0, until an event loop listens to them."""
    return _signals_for(end_by_signal, *USUAL)


@contextmanager
def _signals_for(handler: Callable[[int, object], NoReturn], *signums: signal.Signals) -> Iterator[None]:
    before = take_signals(handler, *signums)
    try:
        yield
    finally:
        for signum, usual in before.items():
            signal.signal(signum, usual)


def one_line(error: SwarmError) -> str:
    """The error's message on one line. Messages of libraries may have several."""
    return " ".join(str(error).split())


def run_command(
    command: Callable[[], Awaitable[int | None]], *, default_log_level: str = "INFO", serves: bool = False
) -> int:
    """`run_program` of an asynchronous command, in an event loop."""

    def program() -> int | None:
        import uvloop

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_as_coroutine(command))

    return run_program(program, default_log_level=default_log_level, serves=serves)


async def _as_coroutine(command: Callable[[], Awaitable[int | None]]) -> int | None:
    return await command()


def first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error to report: a SwarmError if the group holds one, else its first error."""
    errors = group.subgroup(SwarmError) or group
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def stop_event(*, stop_on_stdin_eof: bool = False) -> asyncio.Event:
    """An event that is set by SIGINT, SIGTERM, a closed terminal and, if asked for, the end of standard input.

    Call it in the event loop.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signum != signal.SIGHUP or signal.getsignal(signum) is not signal.SIG_IGN:  # nohup asks for that
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
    """Wait for `work` and return its result. If `stop` is set first, cancel it and return None."""
    working = asyncio.create_task(work, name="what may be stopped")
    stopped = asyncio.create_task(stop.wait(), name="wait for a signal")
    try:
        await asyncio.wait({working, stopped}, return_when=asyncio.FIRST_COMPLETED)
        return await working if working.done() else None
    finally:
        for task in (working, stopped):
            task.cancel()
        await asyncio.gather(working, stopped, return_exceptions=True)


def flag_names(field: Field[Any]) -> list[str]:
    """`--name`, or `--no_name` for a setting that is on by default, and the alias if there is one."""
    first = f"--no_{field.name}" if field.default is True else f"--{field.name}"
    return [first, *(f"--{field.metadata[key]}" for key in ("alias",) if key in field.metadata)]


def argparse_options(field: Field[Any], hint: Any) -> dict[str, Any]:
    """argparse's options for values of this type, with the placeholder that help screens show."""
    if hint is bool:
        return {"action": "store_false" if field.default is True else "store_true"}
    options: dict[str, Any] = {"required": field.default is MISSING and field.default_factory is MISSING}
    is_optional = isinstance(hint, UnionType)
    (kind,) = (kind for kind in (get_args(hint) if is_optional else (hint,)) if kind is not NoneType)
    metavar = field.name.rpartition("_")[2].upper()
    if kind == tuple[int, int]:
        return {**options, "type": _reader(parse_block_indices), "metavar": "A:B"}
    if kind == tuple[str, ...]:
        return {**options, "nargs": "+", "action": "extend", "metavar": metavar.removesuffix("S")}
    if kind is str:
        return {**options, "metavar": metavar}
    return {**options, "type": _reader(kind, is_optional=is_optional), "metavar": "N" if kind is int else "X"}


def _reader(parse: Callable[[str], Any], *, is_optional: bool = False) -> Callable[[str], Any]:
    """Wrap `parse` so that bad values get a clear sentence; `auto` means None where None is a value."""
    wanted = f"a {'whole ' if parse is int else ''}number{' or auto' if is_optional else ''}"

    def read(text: str) -> Any:
        try:
            return None if is_optional and text == "auto" else parse(text)
        except ConfigurationError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        except ValueError:
            raise argparse.ArgumentTypeError(f"give {wanted}, not {text!r}") from None

    return read


def flag_help(field: Field[Any], owner: type, *, at_length: bool) -> str:
    """The help of a flag: the docstring below its field or the first sentence of it, and the default."""
    if field.metadata.get("hidden"):
        return argparse.SUPPRESS
    text = (
        docstrings(owner).get(field.name, "").replace("; None = ", "; without it, ").replace("None = ", "Without it, ")
    )
    if not at_length:
        text = text.partition(". ")[0].removesuffix(".")
    if field.default is True and not is_in_file(field):
        text = f"Don't {text[:1].lower()}{text[1:]}"
    default = field.metadata.get("default", field.default)
    if isinstance(default, tuple):
        default = " ".join(value if value.strip() else repr(value) for value in default)
    if is_in_file(field) and isinstance(default, bool):
        text += f" (default: {str(default).lower()})"
    elif default not in (MISSING, None, "") and not isinstance(default, bool) and str(default) not in text:
        text += f" (default: {default})"
    return text.replace("%", "%%")


@cache
def docstrings(owner: type) -> dict[str, str]:
    """The docstrings below the fields of a class, by name. Empty if the source isn't available."""
    module = vars(sys.modules[owner.__module__])
    tree = ast.parse("".join(linecache.getlines(module["__file__"], module)))
    body = next((node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == owner.__name__), [])
    return {
        above.target.id: " ".join(str(below.value.value).split())
        for above, below in itertools.pairwise(body)
        if isinstance(above, ast.AnnAssign) and isinstance(above.target, ast.Name)
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
    }


def require_free_ports(maddrs: Sequence[str], mend: str = "choose another port") -> None:
    """Raise ConfigurationError if another program listens on one of these TCP multiaddresses.

    For commands: the import that would find out takes seconds.
    """
    for maddr in maddrs:
        if place := re.fullmatch(r"/ip[46]/([^/]+)/tcp/(\d+)", maddr):
            require_free_port(place[1], int(place[2]), f"can't listen on {maddr}", mend)


def require_free_port(host: str, port: int, problem: str, mend: str) -> None:
    """Raise ConfigurationError if another program listens there. Other errors are left to the real listener."""
    try:
        (family, kind, _, _, address), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        with socket.socket(family, kind) as one:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.bind(address)
    except OSError as error:
        if port and error.errno == errno.EADDRINUSE:
            raise ConfigurationError(f"{problem}: {os.strerror(error.errno)}; {mend}") from None
