"""A word now and then while something takes long, for whoever looks at a terminal. Used by `demo`."""

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

EVERY_S = 4.0
"""Assumed: somebody who sees nothing for 5 seconds begins to doubt."""


class Patience:
    """While inside, says what is waited for whenever nothing else was said for a while."""

    def __init__(self, say: Callable[[str], None], every_s: float = EVERY_S) -> None:
        self._say, self._every_s = say, every_s
        self._waiting_for: Callable[[], str] | None = None
        self._began_at = self._said_at = time.monotonic()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="patience", daemon=True)

    def wait_for(self, what: Callable[[], str] | None) -> None:
        """From now on it is this; None: nothing, others are speaking."""
        self._waiting_for, self._said_at = what, time.monotonic()

    @property
    def elapsed_s(self) -> float:
        """Since it was made."""
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
