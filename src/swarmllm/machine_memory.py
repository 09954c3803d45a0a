"""Memory: how much this process may use, and giving back what was freed.

The main memory is the machine's, or less if a cgroup limits it.

Containers, systemd units with `MemoryMax=` and batch systems limit memory by cgroups of version 1 or 2. Every level
above the process's own group counts as well. psutil sees the whole machine. All rooms that size something by memory use
this module.

Freed memory isn't always given back to the operating system, or to other users of the GPU. `return_free_memory` does it
where much was freed: after loading and measurements, after many sessions, and when memory has run out.

`into_huge_pages` is for quantized weights, which are read from end to end for each token: with pages of 4 KB, a
processor may spend a third of that time on looking up where they are.
"""

import contextlib
import ctypes
import mmap
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:  # commands without a model use this module, too
    from torch import Tensor

PROC = Path("/proc/self")
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # mallopt(3)
WHILE_LOADING_BYTES = 256 << 10
AFTERWARDS_BYTES = 32 << 20
"""The limit at which glibc's own, moving threshold ends: then the heap keeps the memory of activations for reuse."""
HUGE_PAGE_BYTES = 2 << 20
CHUNK_BYTES = 32 * HUGE_PAGE_BYTES
"""Tensors share as much as this, one after the other: few of a model's are a multiple of a huge page."""
WORTH_MOVING_BYTES = 64 << 10
"""Assumed: smaller tensors are no part of a step that shows."""
TENSOR_ALIGNMENT = 64
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


OUT_OF_MEMORY = ("DefaultCPUAllocator", "bad_alloc", "out of memory", "ALLOC_FAILED", "Cannot allocate memory")
"""Words in plain RuntimeErrors of torch and its libraries that mean that memory ran out, mostly on CPUs."""


def memory_ran_out(error: BaseException) -> bool:
    """True if an error of Python, torch or its libraries means that; torch's own class is a RuntimeError, too."""
    is_said = isinstance(error, RuntimeError) and any(words in str(error) for words in OUT_OF_MEMORY)
    return is_said or isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"


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


class _HugePages:
    """Memory for which the system is asked for huge pages. A chunk is given back when none of its tensors is left."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._chunk: weakref.ref[mmap.mmap] | None = None
        self._next = 0

    def take(self, num_bytes: int) -> tuple[mmap.mmap, int]:
        """Memory of this size: where it is, and at what offset."""
        if num_bytes > CHUNK_BYTES // 2:
            return _new_chunk(num_bytes)
        with self._lock:
            chunk = None if self._chunk is None else self._chunk()
            if chunk is None or self._next + num_bytes > len(chunk):
                chunk, self._next = _new_chunk(CHUNK_BYTES)
                self._chunk = weakref.ref(chunk)
            offset = self._next
            self._next += -(-num_bytes // TENSOR_ALIGNMENT) * TENSOR_ALIGNMENT
            return chunk, offset


_huge_pages = _HugePages()


def _new_chunk(num_bytes: int) -> tuple[mmap.mmap, int]:
    """New memory, and the offset of its first huge page. Huge pages that aren't written to take no memory."""
    import torch

    made = mmap.mmap(-1, num_bytes + HUGE_PAGE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # the kernel was built without them
        made.madvise(mmap.MADV_HUGEPAGE)
    return made, -torch.frombuffer(made, dtype=torch.uint8).data_ptr() % HUGE_PAGE_BYTES


def _has_huge_pages() -> bool:
    try:
        return "[never]" not in HUGE_PAGES.read_text()
    except OSError:  # not Linux, or without them
        return False


def into_huge_pages(tensor: "Tensor", *, same_place: bool = False) -> "Tensor":
    """A copy in huge pages, or the tensor itself: on other devices, where there are no huge pages, and if it is small.

    What was a part of a file, which processes share, becomes memory of this process. `same_place`: the copy begins at
    the same byte of a line of the processor's caches.

    Measured (Zen 4, a virtual machine, one thread): 178 MB are read at 21 GB/s from pages of 4 KB, at 35 from these.
    """
    import torch

    if tensor.nbytes < WORTH_MOVING_BYTES or not tensor.is_cpu or not tensor.is_contiguous():
        return tensor
    if not _has_huge_pages():
        return tensor
    place = tensor.data_ptr() % TENSOR_ALIGNMENT if same_place else 0
    chunk, offset = _huge_pages.take(tensor.nbytes + place)
    copy = torch.frombuffer(chunk, dtype=torch.uint8, count=tensor.nbytes, offset=offset + place)
    return copy.view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())


def return_free_memory() -> None:
    """Give back freed memory of the heap, and memory of a GPU that torch keeps for its next tensors."""
    import torch

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
