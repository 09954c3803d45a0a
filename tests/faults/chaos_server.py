"""A server for chaos: `python chaos_server.py MS_PER_BLOCK FAILURES [flags of swarmllm.server]`.

It says that a block takes it MS_PER_BLOCK milliseconds, so that layouts have routes of all shapes. FAILURES is a file:
as long as it holds a number above 0, memory runs out in each computation, which counts it down.
"""

import os
import sys
import threading
from pathlib import Path
from typing import Any

import swarmllm.server.span_loader as span_loader
from swarmllm.models.span.block_span import BlockSpan
from swarmllm.models.span.packing import PackedForward
from swarmllm.server.__main__ import main
from swarmllm.server.device.forward_backward import Graph
from swarmllm.server.device.throughput import Throughput

OUT_OF_MEMORY = (
    "[enforce fail at alloc_cpu.cpp:116] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "8589934592 bytes. Error code 12 (Cannot allocate memory)"
)
"""As torch says it, in a plain RuntimeError."""


def misbehave(ms_per_block: float, failures: Path) -> None:
    """Patch the measurement, and the three places through which every computation goes."""
    claimed = Throughput(forward_tokens_per_s=1e3 / ms_per_block, decode_ms_per_block=ms_per_block)
    span_loader.measure_throughput = lambda *_, **__: claimed  # type: ignore[attr-defined]
    honest_forward, honest_gradients, honest_steps = BlockSpan.forward, Graph.gradients, PackedForward.run_packed

    def forward(self: BlockSpan, *args: Any, **kwargs: Any) -> Any:
        allocate()
        return honest_forward(self, *args, **kwargs)

    def run_packed(self: PackedForward, *args: Any, **kwargs: Any) -> Any:
        if fails():
            raise RuntimeError(OUT_OF_MEMORY)  # then each session of the step runs alone, and fails there
        return honest_steps(self, *args, **kwargs)

    def gradients(self: Graph, *args: Any, **kwargs: Any) -> Any:
        allocate()
        return honest_gradients(self, *args, **kwargs)

    def allocate() -> None:
        if left := fails():
            write_failures(failures, left - 1)
            raise RuntimeError(OUT_OF_MEMORY)

    def fails() -> int:
        if threading.current_thread().name != "swarmllm-device" or not failures.exists():
            return 0
        return int(failures.read_text())

    BlockSpan.forward = forward  # type: ignore[method-assign]
    PackedForward.run_packed = run_packed  # type: ignore[method-assign]
    Graph.gradients = gradients  # type: ignore[method-assign]


def write_failures(failures: Path, number: int) -> None:
    """At once, for whoever reads it meanwhile: the file is never empty."""
    new = failures.with_suffix(f".{os.getpid()}")
    new.write_text(str(number))
    new.rename(failures)


def program(ms_per_block: float, failures: Path) -> list[str]:
    """The command line for `LocalSwarm`'s option of that name."""
    return [sys.executable, __file__, str(ms_per_block), str(failures)]


if __name__ == "__main__":
    misbehave(float(sys.argv[1]), Path(sys.argv[2]))
    sys.exit(main(sys.argv[3:]))
