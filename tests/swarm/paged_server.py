"""A server on a CPU with its sessions in pages, as others have them on GPUs: `python paged_server.py [flags]`.

Pages are read by plain torch, and decode steps are "recorded" without CUDA.
"""

import sys
from pathlib import Path

from swarmllm.models.span import packing
from swarmllm.server import span_loader
from swarmllm.server.__main__ import main

PROGRAM = [sys.executable, __file__]
"""The command line for `LocalSwarm`'s option of that name."""

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[2]))
    from tests.numerics.graphs_without_cuda import GraphsWithoutCuda

    span_loader.why_no_kernels = packing.why_no_kernels = lambda device: ""  # type: ignore[attr-defined]
    packing.DecodeGraphs = GraphsWithoutCuda  # type: ignore[misc]
    packing.Packer.use = lambda self, way: None  # type: ignore[method-assign]  # whatever is fastest on a CPU
    packing._fused_step = lambda forward: None  # its kernels are Triton's
    sys.exit(main(sys.argv[1:]))
