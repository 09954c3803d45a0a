"""Decode steps as CUDA graphs: all kernels of a step launched at once, with no Python between them.

A step of a fixed number of positions is recorded at load for each of SIZES, by the model's own code (or by
`fused_step`), on tensors that stay at their addresses. Unused positions of a size are written to a page that belongs to
nobody. A step's result depends on these tensors alone: code that reads them on the host can't be recorded, and a graph
whose result differs from the step's is not used. Used by `packing`.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from swarmllm.errors import CacheFullError
from swarmllm.models.span.page_pool import PagePool, PageTable, Placed

logger = logging.getLogger(__name__)

SIZES = (1, 2, 4, 8, 16, 32, 64)
"""Positions of the steps that are recorded."""
WARM_UPS = 2
"""Runs before a recording: kernels are compiled and chosen in the first."""
START = 5
"""The first position of the trial step."""

DecodeStep = Callable[[Tensor, Placed, Tensor], Tensor]
"""A function of hidden states `[1, total, hidden]`, their places, and position ids `[1, total]`; returns hidden
states."""


@dataclass(frozen=True, eq=False)
class _Recorded:
    """The graph of one size, and its output tensor."""

    graph: Any
    output: Tensor


class StaticInputs:
    """The inputs of a step, in tensors that stay at their addresses, with room for the largest size."""

    def __init__(self, hidden_size: int, dtype: torch.dtype, device: torch.device, size: int = SIZES[-1]) -> None:
        self.hidden = torch.zeros(1, size, hidden_size, dtype=dtype, device=device)
        self._integers = {
            each: torch.zeros(3, each, dtype=torch.int64, device=device) for each in SIZES if each <= size
        }

    def of(self, size: int) -> tuple[Tensor, Placed, Tensor]:
        """The arguments of a `DecodeStep`."""
        rows, positions, position_ids = self._integers[size]
        return self.hidden[:, :size], Placed(rows, positions, size), position_ids[None]

    def fill(
        self,
        size: int,
        hidden: Sequence[Tensor],
        pairs: Sequence[tuple[int, int]],
        position_ids: Tensor | None = None,
    ) -> None:
        """Copy hidden states `[batch, seq, hidden]` of calls, and the (row, position) of each; the rest belongs to
        nobody.

        `position_ids` `[1, number of pairs]` are given if they differ from the positions.
        """
        rows, positions = zip(*pairs, strict=True)
        unused = (0,) * (size - len(pairs))
        host = torch.tensor([rows + unused, positions + unused, positions + unused])
        self._integers[size].copy_(host, non_blocking=True)
        if position_ids is not None:
            self._integers[size][2, : len(pairs)].copy_(position_ids[0], non_blocking=True)
        if any(len(one) > 1 for one in hidden):  # several rows in one call
            hidden = [one.reshape(1, -1, one.shape[-1]) for one in hidden]
        torch.cat(list(hidden), dim=1, out=self.hidden[:, : len(pairs)])


class DecodeGraphs:
    """The recorded steps of one span."""

    def __init__(self, step: DecodeStep, pool: PagePool, inputs: StaticInputs) -> None:
        self.step, self.pool, self.inputs = step, pool, inputs
        self._recorded: dict[int, _Recorded] = {}
        self._memory = torch.cuda.graph_pool_handle() if pool.device.type == "cuda" else None
        """All graphs use the same memory, as no two run at a time."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes that can be run."""
        return tuple(sorted(self._recorded))

    def size_for(self, num_positions: int) -> int | None:
        """The smallest size with room for so many positions; None: there is none."""
        return next((size for size in self.sizes if size >= num_positions), None)

    def replay(
        self, size: int, hidden: Sequence[Tensor], pairs: Sequence[tuple[int, int]], position_ids: Tensor | None = None
    ) -> Tensor:
        """Run a step of `size` on these; returns `[number of pairs, hidden]`, a tensor of its own."""
        self.inputs.fill(size, hidden, pairs, position_ids)
        recorded = self._recorded[size]
        recorded.graph.replay()
        return recorded.output[0, : len(pairs)].clone()

    def record(self, sizes: Sequence[int] = SIZES) -> None:
        """Record these sizes, the largest first. After one fails, smaller ones are left out, with a line in the log."""
        started = time.perf_counter()
        for size in sorted(sizes, reverse=True):
            try:
                self._record(size)
            except (RuntimeError, CacheFullError) as error:
                logger.warning(
                    "decode steps of %d and fewer positions aren't recorded: %s", size, str(error).split("\n")[0]
                )
                break
        took_s = time.perf_counter() - started
        logger.info("recorded steps of %s positions in %.1f s", ", ".join(map(str, self.sizes)) or "no", took_s)

    def _record(self, size: int) -> None:
        table = self._fill_for_trial(size)
        arguments = self.inputs.of(size)
        expected = self.step(*arguments).clone()
        graph, output = self.capture(arguments)
        graph.replay()
        if not is_close(output, expected):
            raise RuntimeError("it computes something else than without a graph")
        self._recorded[size] = _Recorded(graph, output)
        del table

    def capture(self, arguments: tuple[Tensor, Placed, Tensor]) -> tuple[Any, Tensor]:
        """A graph of the step on these arguments, and its output tensor."""
        side = torch.cuda.Stream(self.pool.device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(self.pool.device))
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                self.step(*arguments)
        torch.cuda.current_stream(self.pool.device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            output = self.step(*arguments)
        return graph, output

    def _fill_for_trial(self, size: int) -> PageTable:
        """Fill in a trial step: neighbouring positions of a session that exists as long as the returned table."""
        table = PageTable(self.pool)
        table.prepare(1, START + size)
        random = torch.Generator().manual_seed(size)
        hidden = torch.randn(size, self.inputs.hidden.shape[-1], generator=random)
        pairs = [(table.rows[0], START + idx) for idx in range(size)]
        self.inputs.fill(size, [hidden.to(self.inputs.hidden)[None]], pairs)
        return table


def trace(step: DecodeStep, inputs: StaticInputs, size: int) -> None:
    """Run a step on tensors without values.

    Raises:
        Exception: it reads values on the host, so that it can't be recorded.
    """
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        hidden, placed, position_ids = inputs.of(size)
        rows, positions = (mode.from_tensor(tensor) for tensor in (placed.rows, placed.positions))
        step(mode.from_tensor(hidden), Placed(rows, positions, size), mode.from_tensor(position_ids))


def is_close(got: Tensor, expected: Tensor) -> bool:
    """True if both are equal but for the order of sums."""
    error, size = (got.float() - expected.float()).square().mean(), expected.float().square().mean()
    return bool(error <= (4 * torch.finfo(expected.dtype).eps) ** 2 * size)
