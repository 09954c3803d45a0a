"""A server that misbehaves on purpose: `python faulty_server.py FAULT TRIGGER [flags of swarmllm.server]`.

FAULT says how (see `Fault`), TRIGGER is a file: as long as it doesn't exist, the server is honest, so that a test can
choose the moment. Everything else is the real server.
"""

import os
import signal
import sys
import threading
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Any

import torch

import swarmllm.server.span_loader as span_loader
from swarmllm.models.boundary.block_inputs import BlockInputs
from swarmllm.models.span.block_span import BlockSpan
from swarmllm.models.span.packing import PackedForward, Packing, SessionCall
from swarmllm.server.__main__ import main
from swarmllm.server.device.forward_backward import Graph
from swarmllm.server.device.scheduler import Scheduler, Work
from swarmllm.server.device.throughput import Throughput
from swarmllm.server.streams.serving import Serving


class Fault(Enum):
    """The server's behaviour in each computation, as soon as the trigger exists."""

    MODEST = "modest"  # nothing wrong, but it says that it is slow: routes lead to the boasters
    CRASH = "crash"  # SIGKILL in the middle of the computation
    FREEZE = "freeze"  # SIGSTOP
    NO_DAEMON = "no_daemon"  # its p2pd dies
    CORRUPT = "corrupt"  # NaN in what it returns
    LIE = "lie"  # plausible, but wrong
    PRYING = "prying"  # it says that its blocks need the text; always, as traits are told in greetings
    STALL = "stall"  # answers pings, but never the request
    OUT_OF_MEMORY = "out_of_memory"  # the machine has no more, for whatever it computes
    DEAD_THREAD = "dead_thread"  # a mistake of ours ends the device thread


def misbehave(fault: Fault, trigger: Path) -> None:
    """Patch the three places through which every computation goes, and boast, so that routes lead here."""
    # Far more than pings on a busy machine differ by, although real steps correct what is announced, by 100 at most.
    ms_per_block = 1e4 if fault is Fault.MODEST else 1e-3
    claimed = Throughput(forward_tokens_per_s=1e3 / ms_per_block, decode_ms_per_block=ms_per_block)
    span_loader.measure_throughput = lambda *_, **__: claimed  # type: ignore[attr-defined]
    honest_forward, honest_gradients, honest_steps = BlockSpan.forward, Graph.gradients, PackedForward.run_packed

    def run_packed(self: PackedForward, calls: Sequence[SessionCall], way: Packing) -> list[torch.Tensor]:
        return [after(outputs) for outputs in honest_steps(self, calls, way)]

    def forward(self: BlockSpan, inputs: BlockInputs, *args: object, **kwargs: object) -> torch.Tensor:
        return after(honest_forward(self, inputs, *args, **kwargs))  # type: ignore[arg-type]

    def gradients(self: Graph, grad_outputs: torch.Tensor) -> dict[str, torch.Tensor]:
        return {name: after(gradient) for name, gradient in honest_gradients(self, grad_outputs).items()}

    def after(outputs: torch.Tensor) -> torch.Tensor:
        if threading.current_thread().name != "swarmllm-device" or not trigger.exists():
            return outputs
        match fault:
            case Fault.CRASH:
                os.kill(os.getpid(), signal.SIGKILL)
            case Fault.FREEZE:
                os.kill(os.getpid(), signal.SIGSTOP)
            case Fault.NO_DAEMON:
                children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
                for child in children:
                    os.kill(int(child), signal.SIGKILL)
            case Fault.STALL:
                threading.Event().wait()
            case Fault.OUT_OF_MEMORY:
                torch.empty(1 << 48)
            case Fault.CORRUPT:
                return outputs * float("nan")
            case Fault.LIE:
                return outputs * 1.5
        return outputs

    if fault is Fault.PRYING:
        traits: Any = Serving.traits
        asks = {"extra_inputs": ("input_ids", "inputs_embeds")}
        Serving.traits = property(lambda one: traits.fget(one).model_copy(update=asks))  # type: ignore[assignment]

    honest_next = Scheduler.next

    def choose(self: Scheduler[Work], now: float) -> list[tuple[Work, int]]:
        if fault is Fault.DEAD_THREAD and trigger.exists():  # with work at hand, which is lost
            raise RuntimeError("a mistake of ours")
        return honest_next(self, now)

    Scheduler.next = choose  # type: ignore[method-assign]
    BlockSpan.forward = forward  # type: ignore[method-assign,assignment]
    PackedForward.run_packed = run_packed  # type: ignore[method-assign]
    Graph.gradients = gradients  # type: ignore[method-assign]


def program(fault: Fault, trigger: str | Path = "never") -> list[str]:
    """The command line for `LocalSwarm`'s option of that name."""
    return [sys.executable, __file__, fault.value, str(trigger)]


if __name__ == "__main__":
    misbehave(Fault(sys.argv[1]), Path(sys.argv[2]))
    sys.exit(main(sys.argv[3:]))
