"""Memory that has been freed, but not given back to the operating system or to the GPU's other users.

Used where much of it is left: when blocks are loaded, after measurements, when many sessions have ended, when memory
has run out.
"""

import contextlib
import ctypes
from collections.abc import Iterator

import torch

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # mallopt(3)
WHILE_LOADING_BYTES = 256 << 10
AFTERWARDS_BYTES = 32 << 20
"""The limit that glibc's own, moving threshold ends at: activations are then reused from the heap instead of faulted in
anew."""


@contextlib.contextmanager
def separate_weights() -> Iterator[None]:
    """Within, each weight gets pages of its own, which leave with it, instead of a place on the heap.

    Measured: on the heap, a model of 41 MB would take 113, in holes that weights in full precision have left between
    packed ones.
    """
    _allocate_pages_from(WHILE_LOADING_BYTES)
    try:
        yield
    finally:
        _allocate_pages_from(AFTERWARDS_BYTES)
        return_free_memory()


def return_free_memory() -> None:
    """Give back freed memory of the heap, and memory of a GPU that torch keeps for its next tensors."""
    trim_heap()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()


def trim_heap() -> None:
    """The heap's share of it alone: after each weight, where a GPU would have to allocate anew for the next one."""
    with contextlib.suppress(AttributeError, OSError):  # only glibc can and needs to
        ctypes.CDLL(None).malloc_trim(0)


def _allocate_pages_from(num_bytes: int) -> None:
    with contextlib.suppress(AttributeError, OSError):
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_THRESHOLD, num_bytes)
        libc.mallopt(M_TRIM_THRESHOLD, 2 * num_bytes)
