"""Files on this machine: text of users, files that survive crashes, temporary directories.

Every room resolves users' paths with `user_path`, reads settings, keys, invites and lists with `read_text`, and writes
important files with `replace_file`. Users may save text with any editor. `models/checkpoint` reads the JSON of
checkpoints, as transformers does.

A `PrivateDirectory` doesn't outlive its process, even if that is killed. It is locked while the process lives, and each
process that makes one removes all that nobody has locked. Used for the socket of p2pd, the logs of a LocalSwarm and
the meeting place of a tensor-parallel group.
"""

import codecs
import errno
import fcntl
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from swarmllm.errors import ConfigurationError

MAX_TEXT_BYTES = 16 << 20
"""Assumed: nobody writes more by hand."""
_MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),  # before UTF-16, because its mark begins with that of UTF-16
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
"""Byte order marks. Notepad writes UTF-8's, and PowerShell's `>` UTF-16's."""

PREFIX = "swarmllm-"
LOCK = ".lock"


def user_path(path: str | os.PathLike[str]) -> Path:
    """Replace ~ by the home directory.

    Raises:
        ConfigurationError: the path begins with ~, and there is no home directory; or there can be no such path.
    """
    try:
        found = Path(path).expanduser()
        found.lstat()
    except RuntimeError:
        raise ConfigurationError(f"{path}: no home directory is known for it, so give the whole path") from None
    except ValueError:  # zero bytes, half characters
        raise ConfigurationError(f"{str(path)[:80]!r} can't be a path or a name") from None
    except OSError as error:  # most paths are looked at later, by programs that can do without
        if error.errno == errno.ENAMETOOLONG:
            raise ConfigurationError(f"{str(path)[:40]!r}… is too long for a path or a name") from None
    return found


def existing_path(path: str | os.PathLike[str]) -> Path | None:
    """`user_path` if something is there, else None.

    Raises:
        ConfigurationError: this user may not look; or a link leads nowhere.
    """
    found = user_path(path)
    try:
        found.stat()
    except (FileNotFoundError, NotADirectoryError):
        if found.is_symlink():
            raise ConfigurationError(
                f"{found} is a link to {found.readlink()}, which does not exist: mend the link, or name another path"
            ) from None
        return None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ConfigurationError(
                f"{found} leads through links in a circle: mend them, or name another path"
            ) from None
        raise ConfigurationError(f"{found} can't be looked at: {error.strerror}") from None
    return found


def has_home() -> bool:
    """True if this user has a home directory. A container may run as a number without a user."""
    try:
        Path("~").expanduser()
    except RuntimeError:
        return False
    return True


def require_temporary_directory() -> None:
    """Check that temporary files can be written. PyTorch and others fail without a word that helps.

    Raises:
        ConfigurationError: they can't, for example because the disk is full.
    """
    try:
        tempfile.gettempdir()
    except FileNotFoundError:
        raise ConfigurationError(
            "no file can be written in any directory for temporary files (/tmp and others): make room on the disk, or "
            "set TMPDIR to a directory where there is some"
        ) from None


def user_cache_dir() -> Path:
    """The directory for files that programs can make again. Without a home, it is among temporary files.

    Raises:
        ConfigurationError: the directory belongs to another user.
    """
    if users := os.environ.get("XDG_CACHE_HOME"):
        return user_path(users)
    if has_home():
        return user_path("~/.cache")
    directory = Path(tempfile.gettempdir(), f"cache-{os.getuid()}")
    with suppress(OSError):  # writing there will report it
        directory.mkdir(mode=0o700, exist_ok=True)
    if directory.exists() and directory.stat().st_uid != os.getuid():
        raise ConfigurationError(f"{directory} is another user's: set SWARMLLM_CACHE to a directory of your own")
    return directory


def read_text(path: str | os.PathLike[str]) -> str:
    """Read a text file. Drop the byte order mark, and end all lines with `\\n`.

    Raises:
        ConfigurationError: it can't be read, is too large, or has an unknown encoding.
    """
    path = user_path(path)
    try:
        with path.open("rb") as file:
            data = file.read(MAX_TEXT_BYTES + 1)
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror}") from None
    if len(data) > MAX_TEXT_BYTES:
        raise ConfigurationError(f"{path}: it has more than {MAX_TEXT_BYTES >> 20} MiB, so it is another file")
    try:
        return decoded(data, "utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigurationError(
            f"{path}: it is not in UTF-8 (line {line}), so save it as UTF-8 in your editor"
        ) from None


def decoded(data: bytes, encoding: str, errors: str = "strict") -> str:
    """Decode bytes by their byte order mark or in this encoding, and end all lines with `\\n`.

    Raises:
        UnicodeDecodeError: they are in another encoding.
    """
    for mark, marked in _MARKS:
        if data.startswith(mark):
            data, encoding = data[len(mark) :], marked
            break
    return data.decode(encoding, errors).replace("\r\n", "\n")


def entries_of(text: str) -> list[str]:
    """The lines without surrounding spaces, empty lines and comments (#)."""
    stripped = (line.strip() for line in text.splitlines())
    return [line for line in stripped if line and not line.startswith("#")]


@contextmanager
def replaced(path: str | os.PathLike[str], *, durable: bool = True) -> Iterator[Path]:
    """Yield a temporary name; the file written there replaces `path` at the end.

    Readers see the old file or the new one, also after a crash. Unless `durable`, there may be neither after a power
    cut. That is enough for files that can be made again.

    Raises:
        OSError: it can't be written; the old file is unchanged.
    """
    path = Path(path)
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        yield beside
        if durable:
            with beside.open("rb") as file:
                os.fsync(file.fileno())
        beside.replace(path)
    finally:
        with suppress(OSError):
            beside.unlink()


def replace_file(path: str | os.PathLike[str], text: str, *, durable: bool = True) -> None:
    """Replace the contents of a file by a text, in the same way.

    Raises:
        OSError: it can't be written; the old file is unchanged.
    """
    with replaced(path, durable=durable) as beside:
        beside.write_text(text, encoding="utf-8")


def create_private_file(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a new file that only this user can read, whole or not at all.

    Raises:
        FileExistsError: there is one already.
        OSError: it can't be written.
    """
    path = Path(path)
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(beside, path)  # unlike a rename, it never replaces another file
        except FileExistsError:
            raise
        except OSError:  # a file system without links
            if path.exists():
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from None
            beside.replace(path)
    finally:
        with suppress(OSError):
            beside.unlink()


class PrivateDirectory:
    """A new directory that only this user can read, until `remove()`. Also a context manager.

    `max_path_bytes`: use /tmp if the path in the user's temporary directory would be too long for a socket.
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
        new.rename(self.path / LOCK)  # locked before it gets this name, so that nobody sees it free

    def remove(self) -> None:
        """Remove the directory. Harmless if called twice."""
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
    """Remove directories whose process was killed. Those of other users and of processes still making theirs stay."""
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
