"""A server whose blocks take a stated time, as if it had a device of its own: many of them fit on one machine's cores.

    LocalSwarm(model, ..., program=[sys.executable, "benchmarks/paced_server.py", "0.04"])

The number is milliseconds per token and block of a forward; a backward takes twice as long. What remains to be measured
is all the rest: network, queues, and how well a client keeps the servers busy.
"""

import sys
import threading
import time
from typing import Any

from swarmllm.models.span.block_span import BlockSpan
from swarmllm.server.__main__ import main
from swarmllm.server.device.forward_backward import Graph


def pace(ms: float) -> None:
    """Let the device thread sleep for that time per token and block, in place of computing for it."""
    forward, gradients = BlockSpan.forward, Graph.gradients

    def paced_forward(self: BlockSpan, inputs: Any, span: Any = None, *args: Any, **kwargs: Any) -> Any:
        if threading.current_thread().name == "swarmllm-device":
            time.sleep(ms * inputs.batch_size * inputs.seq_len * len(span or self.span) / 1e3)
        return forward(self, inputs, span, *args, **kwargs)

    def paced_gradients(self: Graph, *args: Any) -> Any:
        time.sleep(2 * ms * self.num_tokens * len(self.span) / 1e3)
        return gradients(self, *args)

    BlockSpan.forward = paced_forward  # type: ignore[method-assign]
    Graph.gradients = paced_gradients  # type: ignore[method-assign]


if __name__ == "__main__":
    pace(float(sys.argv[1]))
    sys.exit(main(sys.argv[2:]))
