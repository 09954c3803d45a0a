"""What the cache of some blocks can do: continue after several positions, or forget the last ones.

Some recurrent models ignore what they remember when more than one position comes at once; others can't go back. Both
show when the same positions run at once, in pieces, and without what came before. Called by `probes`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from swarmllm.data_structures import Span
from swarmllm.errors import UnsupportedModelError
from swarmllm.models.boundary.block_inputs import BlockInputs
from swarmllm.models.quantization import QuantizedWeight
from swarmllm.models.span.block_span import BlockSpan
from swarmllm.models.span.span_cache import RollbackUnsupportedError, SpanCache

STRICT = 1e-3
"""Measured: error relative to ignoring the past; right code is below 1e-5 in float32, wrong code above 1e-2."""
LENIENT = 0.25
"""The same for short floats, and where transformers' own steps and whole prompts differ a little (bamba)."""

NOTHING = 2e-6
"""Errors relative to the output up to which nothing is there: 5e-7 was measured of a block of experts in float32."""


class CacheProbe:
    """Blocks that can be cut off on both sides, run on the given inputs."""

    def __init__(self, span: BlockSpan, part: Span, inputs: BlockInputs) -> None:
        self.span, self.part, self.inputs = span, part, inputs

    def abilities(self) -> tuple[bool, bool]:
        """Whether a prompt may come in pieces, and whether the cache can be rolled back.

        Raises:
            UnsupportedModelError: not even single steps continue what the cache holds.
        """
        length = self.inputs.seq_len
        if length == 1:
            return True, True  # the model takes no second position, so there is nothing to continue
        if not self._try(lambda: self._continues(length - 1, LENIENT)):
            raise UnsupportedModelError(
                f"blocks {self.part} compute something else step by step than at once, so no cache fits them"
            )
        middle, given = length // 2, self.inputs
        try:
            with in_float32(self.span, self.part):  # short floats would hide whether a state was used
                self.inputs = given.with_hidden(given.hidden_states.float())
                return self._continues(middle, STRICT), self._rolls_back(middle, STRICT)
        except Exception:  # noqa: BLE001 - model code that can't do it at all, or not in mixed precision
            self.inputs = given
        if self.span.new_cache(self.part).is_recurrent:
            return False, False
        return self._try(lambda: self._continues(middle, LENIENT)), self._try(lambda: self._rolls_back(middle, LENIENT))

    def _try(self, probe: Callable[[], bool]) -> bool:
        try:
            return probe()
        except Exception:  # noqa: BLE001 - model code that expects whole prompts or single steps
            return False

    def _continues(self, position: int, limit: float) -> bool:
        """Whether the positions from `position` on come out right after the others have been cached."""
        cache = self.span.new_cache(self.part)
        self._step(cache, 0, position)
        return self._agrees(self._step(cache, position, self.inputs.seq_len), position, limit)

    def _rolls_back(self, position: int, limit: float) -> bool:
        """Whether the cache can forget the positions from `position` on, and then see them again."""
        cache = self.span.new_cache(self.part, record_past=True)
        self._step(cache, 0, self.inputs.seq_len)
        try:
            cache.rollback(position)
        except RollbackUnsupportedError:
            return False
        return self._agrees(self._step(cache, position, self.inputs.seq_len), position, limit)

    def _agrees(self, got: Tensor, position: int, limit: float) -> bool:
        """Whether `got` is right up to rounding, and clearly not what comes out when cached positions are ignored.

        Where these change nothing (experts without attention), both differ by how products of other rows add up.
        """
        axis = self.span.traits.batch_axis + 1
        at_once = self._step(self.span.new_cache(self.part), 0, self.inputs.seq_len)
        want = at_once.narrow(axis, position, self.inputs.seq_len - position)
        error = rms(got - want)
        ignoring = rms(self._step(self.span.new_cache(self.part), position, self.inputs.seq_len) - want)
        rounding = 4 * torch.finfo(got.dtype).eps * rms(want)
        return error <= max(limit * ignoring, rounding) or max(error, ignoring) <= NOTHING * rms(want)

    def _step(self, cache: SpanCache, start: int, end: int) -> Tensor:
        inputs = self.inputs.columns(start, end, start, self.span.traits)
        output = self.span.run(inputs, self.part, cache)
        cache.advance(inputs.seq_len)
        return output


def rms(tensor: Tensor) -> float:
    return float(tensor.float().square().mean().sqrt())


@contextmanager
def in_float32(span: BlockSpan, part: Span) -> Iterator[None]:
    """Run the blocks of `part` in float32 meanwhile; their own tensors come back unchanged."""
    blocks = [span.slots.block(block_idx) for block_idx in part]
    tensors = [
        tensor
        for block in blocks
        for tensor in (*block.parameters(), *block.buffers())
        if tensor.is_floating_point() and tensor.itemsize > 1  # codes and scales of 8 bits are what they are
    ]
    originals = [tensor.data for tensor in tensors]
    packed = [module for block in blocks for module in block.modules() if isinstance(module, QuantizedWeight)]
    dtypes = [weight.dtype for weight in packed]
    try:
        for tensor in tensors:
            tensor.data = tensor.data.float()
        for weight in packed:
            weight.stand_for(torch.float32)  # or experts would round what they are given
        yield
    finally:
        for tensor, original in zip(tensors, originals, strict=True):
            tensor.data = original
        for weight, dtype in zip(packed, dtypes, strict=True):
            weight.stand_for(dtype)
