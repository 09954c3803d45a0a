"""Whether this machine could hold the model itself, how fast it would be then, and what a client computes itself.

Called by `view/swarm_view` for explained routes. A decode step at batch 1 reads each weight once and does little else,
so what counts is how fast a matrix can be multiplied with a vector, which is measured once per process.
"""

import time
from functools import cache

import torch
from torch import Tensor

from swarmllm.machine_memory import available_memory_bytes

MEMORY_SHARE = 0.8
"""Share of the free memory that blocks may take. Assumed: the rest is cache, activations and what else runs here."""
ROWS, COLUMNS = 8192, 4096
"""64 MB in bfloat16: more than caches hold."""
REPEATS = 3


def decode_ms(num_bytes: int) -> float | None:
    """Milliseconds, about, that one token would take with blocks of this many bytes; None if they don't fit.

    Too many for a mixture of experts, which reads only some of its weights.
    """
    if num_bytes > MEMORY_SHARE * available_memory_bytes():
        return None
    return 1e3 * num_bytes / _bytes_per_s()


@cache
def _bytes_per_s() -> float:
    matrix = torch.ones(ROWS, COLUMNS, dtype=torch.bfloat16)
    return 1e3 * matrix.nbytes / product_ms(matrix)


@torch.inference_mode()
def product_ms(matrix: Tensor) -> float:
    """Milliseconds of a product with one vector, on the matrix's device: most of what the head of a model takes."""
    vector = torch.ones(matrix.shape[1], dtype=matrix.dtype, device=matrix.device)
    elapsed_s = []
    for _ in range(1 + REPEATS):
        started = time.perf_counter()
        torch.mv(matrix, vector)
        if matrix.device.type != "cpu":
            torch.accelerator.synchronize(matrix.device)
        elapsed_s.append(time.perf_counter() - started)
    return 1e3 * min(elapsed_s[1:])  # the first one waits for threads and pages
