"""Decode steps on CPUs as straight lines: the model's own operations, recorded once, run without the model.

The model's own code runs a step of one new position, and `step_recorder` records each operation of torch on its
numbers. The cache reports keys, values and attention (`_RecordedCache`). `quantization/line` runs the line for any
number of rows, each a new position of some session. So this works for all architectures whose steps consist of known
operations, and knows none of the architectures. If a step has other operations, or its Python code reads a number out
of a tensor, the model's own code runs it. `packing_probe` compares lines with the model's own code.

Blocks that aren't quantized must compute exactly what the local model computes. In their lines, torch computes whatever
depends on the order of additions (`exact_recorder`); such a step must give the very bits of the model's own code.
"""

import math
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from swarmllm.data_structures import Span
from swarmllm.models.boundary.block_inputs import BlockInputs
from swarmllm.models.quantization import QuantizedWeight, kernels, whole
from swarmllm.models.quantization.line import Line, why_no_steps
from swarmllm.models.quantization.loading import Whole
from swarmllm.models.quantization.packed import InStrips
from swarmllm.models.quantization.step import DTYPES, Recorded, needed, simplified
from swarmllm.models.span.block_span import BlockSpan
from swarmllm.models.span.exact_recorder import ExactRecorder
from swarmllm.models.span.packed_caches import PackingUnsupportedError
from swarmllm.models.span.paged_attention import Asked, PagedAttention, PagedBatch
from swarmllm.models.span.step_recorder import StepRecorder, UnsupportedStepError
from swarmllm.models.span.trials import random_inputs

MOST_ROWS = 256
"""Most rows of a line. Assumed: steps seldom have more. Their values take some 50 MB, which isn't counted."""
POSITION = 3
"""The position of the recorded step. Any other would do: a step whose Python code reads the position is refused."""


class _RecordedCache(PagedBatch):
    """The model's cache while its step is recorded."""

    recorder: StepRecorder
    kept: dict[int, int]
    """Positions that each block's cache keeps; 0: all."""
    _shapes: tuple[int, int, int]

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Record that keys and values `[1, heads, 1, head]` are appended."""
        self.block_idx = layer_idx + self._first
        self._shapes = key_states.shape[1], key_states.shape[3], value_states.shape[3]
        self.recorder.record_append(self.block_idx, key_states, value_states)
        self.keys = key_states
        return key_states, value_states

    def attend(self, asked: Asked) -> Tensor:
        """Record the attention to the block that was updated last."""
        return self.recorder.record_attention(asked, self._shapes, self.block_idx, self.kept[self.block_idx])


class TracedSteps:
    """The lines of one span, recorded when they are first needed."""

    def __init__(self, paged: PagedAttention) -> None:
        self._paged = paged
        self._lines: dict[tuple[Span, torch.dtype], Line] = {}
        self._most_rows: dict[int, int] = {}
        """By torch's number of threads, on which its order of additions may depend."""

    @cached_property
    def is_exact(self) -> bool:
        """True if steps of one position must have the bits of the model's own code."""
        return self._paged.blocks.is_exact

    @property
    def are_split(self) -> bool:
        """True if more rows than `most_rows` run as several lines: torch isn't faster, or would round other inputs."""
        return not self.is_exact and (self._rounds_inputs or self.most_rows == MOST_ROWS)

    @cached_property
    def _rounds_inputs(self) -> bool:
        return self._paged.blocks.rounds_inputs

    def takes(self, seq_len: int) -> bool:
        """True if lines can run steps of so many new positions: exact ones have one, because the model's own code
        multiplies several at once, which gives them other bits."""
        return seq_len == 1 or not self.is_exact

    @property
    def most_rows(self) -> int:
        """Rows up to which products are faster by our kernels, as lines have them, than by torch with decoded weights.

        Rounded inputs are always multiplied by our kernels. At most `MOST_ROWS`. For weights that aren't quantized,
        more sessions are measured (`device/throughput`), and our kernels may not know the order of torch's additions.
        """
        num_threads = torch.get_num_threads()
        if num_threads not in self._most_rows:
            self._most_rows[num_threads] = self._find_most_rows()
        return self._most_rows[num_threads]

    def _find_most_rows(self) -> int:
        blocks = self._paged.blocks
        weights = [one.packed for one in blocks.slots.modules() if isinstance(one, QuantizedWeight)]
        if self.is_exact:
            limits = [one.most_inputs() for one in weights if isinstance(one, Whole)]
            if not limits or any(isinstance(one, whole.Linear) for one in blocks.slots.modules()):
                limits.append(whole.most_inputs(blocks.slots.modules()))
            return min(MOST_ROWS, *limits)
        forms = {isinstance(one, InStrips) for one in weights if not one.rounds_inputs}
        faster = min([MOST_ROWS, *(kernels.most_rows(blocks.dtype, in_strips=one) for one in forms)])
        return max(kernels.AT_A_TIME, faster)

    def line(self, span: Span, dtype: torch.dtype) -> Line:
        """A line that can run the blocks of `span`, for hidden states of this dtype.

        Raises:
            PackingUnsupportedError: a step can't be a straight line.
        """
        all_blocks = self._lines.get((self._paged.blocks.span, dtype))  # it can begin and end at any block
        if all_blocks is not None:
            return all_blocks
        if (span, dtype) not in self._lines:
            self._lines[span, dtype] = _record(self._paged, span, dtype)
        return self._lines[span, dtype]


def why_not_traced(blocks: BlockSpan) -> str:
    """The reason why steps of these blocks aren't straight lines; "" if they may be."""
    if blocks.device.type != "cpu" or blocks.pool is not None:
        return "they run on another device"
    if blocks.offloaded is not None or blocks.group is not None:
        return "their weights aren't all here"
    if blocks.source_dim or blocks.traits.even_length != math.inf:
        return "a step depends on more than its own session's keys"
    return why_no_steps()


@torch.inference_mode(False)
@torch.no_grad()
def _record(paged: PagedAttention, span: Span, dtype: torch.dtype) -> Line:
    blocks = paged.blocks
    recorder = ExactRecorder(paged.usual) if blocks.is_exact else StepRecorder()
    hidden = random_inputs(blocks, 1).hidden_states.to(dtype)
    if hidden.ndim != 3 or blocks.traits.batch_axis or blocks.traits.extra_inputs or dtype not in DTYPES:
        raise PackingUnsupportedError("the blocks take more than hidden states")
    position = torch.full((1, 1), POSITION)
    for tensor in (hidden, position):
        recorder.new_value(tensor)
    cache = _RecordedCache(blocks.stack.config, blocks.slots.first)
    cache.recorder, cache.kept = recorder, blocks.new_cache(span).windows
    inputs = BlockInputs(hidden_states=hidden, batch_size=1, seq_len=1, position_ids=position)
    try:
        with paged.attending(cache), kernels.products_recorded(recorder.record_product), recorder:
            output = blocks.run_blocks(inputs, span, cache, observer=recorder.enter_block)
        recorder.enter_block(span.end, output)
        at_position = recorder.whole(position, 1)
    except UnsupportedStepError as error:
        raise PackingUnsupportedError(str(error)) from None
    recorded = needed(Recorded(recorder.operations, recorder.sizes, recorder.entries, at_position))
    problems = {one.problem for one in recorded.operations if one.problem}
    if problems:
        raise PackingUnsupportedError(", ".join(sorted(problems)))
    return Line(simplified(recorded), dtype, math.prod(hidden.shape))
