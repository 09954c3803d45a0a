"""Temporary directories that don't outlive their processes, even if these are killed.

A directory is locked while its process lives. Whenever a process makes one, it removes those that nobody holds.
Used for the socket of p2pd, the logs of a LocalSwarm and the meeting place of a tensor-parallel group.
"""

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

PREFIX = "swarmllm-"
LOCK = ".lock"


class PrivateDirectory:
    """A new directory that only this user can read, until `remove()`. Also a context manager.

    `max_path_bytes`: where the user's temporary directory has too long a name for a socket, /tmp is taken.
    """

    def __init__(self, *, max_path_bytes: int | None = None) -> None:
        parent = Path(tempfile.gettempdir())
        if max_path_bytes is not None and len(os.fsencode(parent / f"{PREFIX}{'x' * 8}")) > max_path_bytes:
            parent = Path("/tmp")
        _remove_abandoned(parent)
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        new = self.path / f"{LOCK}.new"
        self._lock = os.open(new, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        new.rename(self.path / LOCK)  # so that it never has this name and is free, while somebody means to hold it

    def remove(self) -> None:
        """Harmless when done twice."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


def _remove_abandoned(parent: Path) -> None:
    """Directories whose process was killed. Those of other users, and of processes that still make theirs, stay."""
    for lock in parent.glob(f"{PREFIX}*/{LOCK}"):
        with suppress(OSError):
            if lock.parent.lstat().st_uid != os.getuid():
                continue
            descriptor = os.open(lock, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent, ignore_errors=True)
            finally:
                os.close(descriptor)
