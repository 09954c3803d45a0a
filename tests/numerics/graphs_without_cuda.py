"""CUDA graphs on machines without CUDA: a step is run again where a graph would be replayed."""

from typing import Any

from torch import Tensor

from swarmllm.models.span.decode_graphs import DecodeGraphs


class RepeatedStep:
    """In place of a CUDA graph."""

    def __init__(self, step: Any, arguments: Any, output: Tensor) -> None:
        self.step, self.arguments, self.output = step, arguments, output

    def replay(self) -> None:
        self.output.copy_(self.step(*self.arguments))


class GraphsWithoutCuda(DecodeGraphs):
    """Records steps as functions."""

    def capture(self, arguments: Any) -> Any:
        output = self.step(*arguments).clone()
        return RepeatedStep(self.step, arguments, output), output
