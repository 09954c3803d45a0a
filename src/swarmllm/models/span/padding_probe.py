"""On which sides a batch's padding can be left out, so that what is computed of the texts stays the same.

Looked at in one part of each kind: three texts of different lengths as one padded batch, with random values for
padding, and the two shorter ones cut to the longer of them. Causal attention never sees what comes later; what comes
before a text, the mask must hide, and positions must be taken as they are given. Convolutions that look ahead see
padding whatever the mask says, and some encoders sum up stretches of a batch. Called by `probes`.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from math import inf
from typing import Literal

import torch
from torch import Tensor

from swarmllm.data_structures import Span
from swarmllm.models.boundary.block_inputs import BlockInputs
from swarmllm.models.span.block_kinds import parts_of_each_kind
from swarmllm.models.span.block_span import BlockSpan
from swarmllm.models.span.cache_probe import STRICT, in_float32, rms

Side = Literal["left", "right"]
SIDES: tuple[Side, ...] = ("left", "right")


def skippable_sides(span: BlockSpan, inputs: BlockInputs) -> tuple[Side, ...]:
    """The sides on which padding makes no difference; `inputs` are 3 random rows, as long as `probes` takes them."""
    if inputs.seq_len < 6 or span.traits.even_length < inf:  # the latter choose frequencies by the longest row
        return ()
    if any("Indexer" in type(module).__name__ for module in span.slots.modules()):
        return ()  # they attend to the best keys, and which of equally good ones depends on the width of the batch
    parts = parts_of_each_kind(span)
    return tuple(side for side in SIDES if all(_makes_no_difference(span, part, inputs, side) for part in parts))


def _makes_no_difference(span: BlockSpan, part: Span, inputs: BlockInputs, side: Side) -> bool:
    with suppress(Exception), in_float32(span, part):  # model code that takes no such mask, or no such positions
        inputs = inputs.with_hidden(inputs.hidden_states.float())
        return _PaddedTexts(span, part, inputs, side).are_the_same_alone()
    return False


class _PaddedTexts:
    """Three texts, padded to the length of the first on one side."""

    def __init__(self, span: BlockSpan, part: Span, inputs: BlockInputs, side: Side) -> None:
        length = inputs.seq_len
        texts = torch.tensor([length, 2 * length // 3, length // 2], device=inputs.hidden_states.device)[:, None]
        places = torch.arange(length, device=texts.device)
        mask = places >= length - texts if side == "left" else places < texts
        self.inputs = replace(inputs, attention_mask=mask.long(), position_ids=None)
        second = int(texts[1])
        self.columns = (length - second, length) if side == "left" else (0, second)
        self.run: Callable[[BlockInputs], Tensor] = lambda inputs: span.run(inputs, part)
        self.traits = span.traits

    def are_the_same_alone(self) -> bool:
        """Whether the two shorter texts come out as in the batch of three, up to rounding."""
        (first, end), axis = self.columns, self.traits.batch_axis
        whole = self.run(self.inputs)
        cut = self.inputs.rows(1, 3, self.traits).cut_to(first, end, self.traits)
        shown = cut.attention_mask != 0
        hidden = cut.hidden_states.movedim((axis, axis + 1), (0, 1)).clone()
        hidden[~shown] = 0.0
        cut = cut.with_hidden(hidden.movedim((0, 1), (axis, axis + 1)))
        want = whole.narrow(axis, 1, 2).narrow(axis + 1, first, end - first)
        got, want = (one.movedim((axis, axis + 1), (0, 1))[shown] for one in (self.run(cut), want))
        error = rms(got - want)
        return error <= STRICT * self._visible(whole) or error <= 4 * torch.finfo(want.dtype).eps * rms(want)

    def _visible(self, whole: Tensor) -> float:
        """How much of a result comes from other positions."""
        last, axis = self.inputs.seq_len - 1, self.traits.batch_axis
        alone = self.inputs.rows(0, 1, self.traits).columns(last, last + 1, 0, self.traits)
        return rms(self.run(replace(alone, attention_mask=None)) - whole.narrow(axis, 0, 1).narrow(axis + 1, last, 1))
