"""The end of a process that serves until it is stopped: of `server`, `dht`, `gateway` and `up`.

A signal is the usual end of these commands, so its exit code is 0, at every stage:

    until the event loop listens   `end_by_signal` ends the process at once; there is nothing to leave in order yet
    while it serves                `command_line.stop_event` lets the command leave in order
    afterwards                     `end_process` ends the process, whatever its threads still do

`__main__` calls it before the command is imported, which takes some tenths of a second. So it imports nothing heavy.
"""

import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

SERVING = ("server", "dht", "gateway", "up")
INSTALLING = {"--install", "--uninstall"}
"""Flags of `up` that end by themselves. If they are interrupted, they haven't done their work."""
USUAL = {
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGHUP: signal.SIG_DFL,
    signal.SIGINT: signal.default_int_handler,
}
"""Handlers of signals in a process that nobody has told otherwise."""


def serves(arguments: Sequence[str]) -> bool:
    """True if a command line, which begins with the command's name, serves until it is stopped."""
    return any(name in SERVING for name in arguments[:1]) and not INSTALLING.intersection(arguments)


def take_signals(handler: Callable[[int, object], NoReturn], *signums: signal.Signals) -> dict[int, Any]:
    """Let `handler` hear these signals; return the handlers that it replaces.

    Signals that are ignored stay ignored: nohup does that. So do signals that the program listens to already.
    """
    before: dict[int, Any] = {signum: USUAL[signum] for signum in signums if signal.getsignal(signum) is USUAL[signum]}
    for signum in before:
        signal.signal(signum, handler)
    return before


def end_by_signal(signum: int, frame: object) -> NoReturn:
    """End the process at once, with 0.

    An exception isn't enough, because libraries catch some while they are imported.
    """
    os._exit(0)


def end_process(code: int) -> NoReturn:
    """End the process at once: everything has been closed, and unloading torch's modules would take another second.

    A thread may still compute, because it can't be interrupted. If Python ended in the usual way, it would end this
    thread within torch, and so abort the process.
    """
    logging.shutdown()
    sys.stdout.flush()
    os._exit(code)
