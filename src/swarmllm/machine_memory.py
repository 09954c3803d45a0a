"""Memory: how much this process may use, and giving back what was freed.

The main memory is the machine's, or less if a cgroup limits it.

Containers, systemd units with `MemoryMax=` and batch systems limit memory by cgroups of version 1 or 2. Every level
above the process's own group counts as well. psutil sees the whole machine. All rooms that size something by memory use
this module.

Freed memory isn't always given back to the operating system, or to other users of the GPU. `return_free_memory` does it
where much was freed: after loading and measurements, after many sessions, and when memory has run out.
"""

import contextlib
import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

PROC = Path("/proc/self")
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # mallopt(3)
WHILE_LOADING_BYTES = 256 << 10
AFTERWARDS_BYTES = 32 << 20
"""The limit at which glibc's own, moving threshold ends: then the heap keeps the memory of activations for reuse."""
_in_use: list[int] = []
"""The limits of the contexts that have been entered."""


@dataclass(frozen=True)
class _Version:
    """Names of a cgroup's files."""

    limits: tuple[str, ...]
    usage: str
    cache: tuple[str, ...]
    """Entries of memory.stat that the kernel frees before it refuses memory."""


_VERSIONS = {
    "cgroup": _Version(
        ("memory.limit_in_bytes",), "memory.usage_in_bytes", ("total_active_file", "total_inactive_file")
    ),
    "cgroup2": _Version(("memory.max", "memory.high"), "memory.current", ("active_file", "inactive_file")),
}
"""File system → names. Above `memory.high`, the kernel slows a process down until it stands still."""


@dataclass(frozen=True)
class _Group:
    """A cgroup between the process's own and the top."""

    directory: Path
    version: _Version

    def limit(self) -> int | None:
        return min((found for name in self.version.limits if (found := self._number(name)) is not None), default=None)

    def used(self) -> int:
        """Without the cache of files, which the kernel frees on demand."""
        try:
            lines = (line.split() for line in (self.directory / "memory.stat").read_text().splitlines())
            cached = sum(int(number) for name, number in lines if name in self.version.cache)
        except (OSError, ValueError):
            cached = 0
        return max(0, (self._number(self.version.usage) or 0) - cached)

    def _number(self, name: str) -> int | None:
        try:
            return int((self.directory / name).read_text())
        except (OSError, ValueError):  # missing, or "max"
            return None


def available_memory_bytes() -> int:
    """Memory that this process can take now without another process giving any back."""
    left = (limit - group.used() for group in _groups(PROC) if (limit := group.limit()) is not None)
    return max(0, min((int(psutil.virtual_memory().available), *left)))


def total_memory_bytes() -> int:
    """Memory that this process could have if no other process used any."""
    limits = (limit for group in _groups(PROC) if (limit := group.limit()) is not None)
    return min((int(psutil.virtual_memory().total), *limits))


def _groups(proc: Path) -> Iterator[_Group]:
    """The cgroups that may limit the process's memory, from its own to the top of the visible tree."""
    try:
        mounts = [line.split() for line in (proc / "mountinfo").read_text().splitlines()]
        own = [line.split(":", 2) for line in (proc / "cgroup").read_text().splitlines()]
    except OSError:  # not Linux
        return
    for mount in mounts:
        kind, _, options = mount[mount.index("-") + 1 :][:3]
        if kind not in _VERSIONS or (kind == "cgroup" and "memory" not in options.split(",")):
            continue
        # https://man7.org/linux/man-pages/man7/cgroups.7.html: the line of version 2 names no controller
        wanted = "memory" if kind == "cgroup" else ""
        path = next((Path(path) for _, controllers, path in own if wanted in controllers.split(",")), Path("/"))
        root, top = Path(mount[3]), Path(mount[4])
        # A container may see its own subtree as the top, although the path is the machine's.
        below = path.relative_to(root) if path.is_relative_to(root) and ".." not in path.parts else Path()
        directory = top / below
        for level in (directory, *directory.parents):
            yield _Group(level, _VERSIONS[kind])
            if level == top:
                break


@contextlib.contextmanager
def separate_weights() -> Iterator[None]:
    """Within, each weight gets pages of its own instead of a place on the heap, so that its memory is given back.

    Measured: on the heap, a model of 41 MB would take 113, in holes that weights in full precision have left between
    packed ones.
    """
    with _allocating_pages_from(WHILE_LOADING_BYTES):
        yield
    return_free_memory()


@contextlib.contextmanager
def reused_heap() -> Iterator[None]:
    """Within, tensors that are soon freed get the same memory again, also inside of `separate_weights`.

    Otherwise the system would have to provide new pages for each. Measured (one thread, a million weights): rounding to
    q4_k takes 200 ms, and 53 ms in here. Allocate what stays before.
    """
    if not _in_use:  # glibc's own, moving limit counts
        yield
        return
    with _allocating_pages_from(AFTERWARDS_BYTES):
        yield


@contextlib.contextmanager
def _allocating_pages_from(num_bytes: int) -> Iterator[None]:
    _in_use.append(num_bytes)
    _allocate_pages_from(num_bytes)
    try:
        yield
    finally:
        _in_use.pop()
        _allocate_pages_from(_in_use[-1] if _in_use else AFTERWARDS_BYTES)


def return_free_memory() -> None:
    """Give back freed memory of the heap, and memory of a GPU that torch keeps for its next tensors."""
    import torch  # not at the top: commands without a model use this module, too

    trim_heap()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()


def trim_heap() -> None:
    """Give back memory of the heap alone. After each weight, a GPU's would have to be allocated again for the next."""
    with contextlib.suppress(AttributeError, OSError):  # only glibc can and needs to
        ctypes.CDLL(None).malloc_trim(0)


def _allocate_pages_from(num_bytes: int) -> None:
    with contextlib.suppress(AttributeError, OSError):
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_THRESHOLD, num_bytes)
        libc.mallopt(M_TRIM_THRESHOLD, 2 * num_bytes)
