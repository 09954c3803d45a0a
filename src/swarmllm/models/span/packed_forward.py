"""Calls of several sessions as one forward.

    ragged      one row of all new positions, nothing padded (`packed_attention`); mixes prompts and single tokens
    padded      calls of equally many new positions as one batch (`padded_cache`)

Used by `packing`, which says which calls fit together, and by `packing_probe`, which looks whether that is right.
"""

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from swarmllm.data_structures import Span
from swarmllm.models.boundary.block_inputs import BlockInputs
from swarmllm.models.span.block_span import BlockSpan
from swarmllm.models.span.packed_attention import PackingUnsupportedError, RaggedAttention, Segment
from swarmllm.models.span.padded_cache import PaddedCache
from swarmllm.models.span.span_cache import SpanCache


class Packing(Enum):
    """A way to run several calls; in most measurements the fastest first (docs/benchmarks.md)."""

    RAGGED = "ragged"
    PADDED = "padded"
    ONE_BY_ONE = "one by one"


@dataclass(frozen=True, eq=False, slots=True)
class SessionCall:
    """One session's next positions: some of its prompt, or a token."""

    inputs: BlockInputs
    span: Span
    """Some of the hosted blocks; `cache` was made for them."""
    cache: SpanCache

    @property
    def end_position(self) -> int:
        return self.cache.length + self.inputs.seq_len


class PackedForward:
    """Runs calls that fit together on one `BlockSpan`."""

    def __init__(self, blocks: BlockSpan) -> None:
        self.blocks = blocks
        self.takes_positions = "position_ids" in inspect.signature(blocks.stack.forward).parameters
        self._padded = PaddedCache(blocks.stack.config)

    @cached_property
    def _ragged(self) -> RaggedAttention:
        return RaggedAttention(self.blocks.stack)

    def lacks_source(self, call: SessionCall) -> bool:
        """Whether it is the first call of its session, which has to compute keys and values of its source, alone."""
        return self.blocks.source_dim > 0 and not call.cache.source

    def run(self, calls: Sequence[SessionCall], way: Packing) -> list[Tensor]:
        """The outputs of each call.

        Raises:
            PackingUnsupportedError: the blocks can't run this way.
            Exception: whatever the model's code raises; the caches are in an undefined state then.
        """
        past = min(call.cache.position for call in calls)
        with torch.inference_mode(), self.blocks.adapted(calls[0].inputs, calls[0].span, past):
            outputs = self._run_ragged(calls) if way == Packing.RAGGED else self._run_padded(calls)
            for call in calls:
                call.cache.advance(call.inputs.seq_len)
        return outputs

    def _run_ragged(self, calls: Sequence[SessionCall]) -> list[Tensor]:
        segments: list[Segment] = []
        start = 0
        for call in calls:
            segments.append(Segment(call.cache, call.inputs.batch_size, call.inputs.seq_len, start))
            start += segments[-1].length
        self._check_positions(calls, start)
        axis = self.blocks.traits.batch_axis
        inputs = replace(
            calls[0].inputs,
            hidden_states=_in_one_row([call.inputs.hidden_states for call in calls], axis),
            batch_size=1,
            seq_len=start,
            attention_mask=None,
            position_ids=_in_one_row(map(_positions, calls), -2).to(self.blocks.device),
            **self._extra_inputs(calls, lambda tensors: _in_one_row(tensors, 0)),
        )
        with self._ragged.running(segments) as cache:
            output = self.blocks.run(inputs, calls[0].span, cache)
        # Copies: a view would keep the whole row in memory for as long as one session needs its part.
        return [
            torch.unflatten(
                output.squeeze(axis).narrow(axis, segment.start, segment.length), axis, (segment.rows, segment.seq_len)
            ).clone()
            for segment in segments
        ]

    def _check_positions(self, calls: Sequence[SessionCall], total: int) -> None:
        """Before its blocks, a decoder with an encoder looks up positions that it counts itself, along the row."""
        longest = self.blocks.longest_text if self.blocks.source_dim else None
        if longest is not None and max(call.cache.length for call in calls) + total > longest:
            raise PackingUnsupportedError("the row would be longer than the model's table of positions")

    def _run_padded(self, calls: Sequence[SessionCall]) -> list[Tensor]:
        rows, seq_len = [call.inputs.batch_size for call in calls], calls[0].inputs.seq_len
        axis, cache, device = self.blocks.traits.batch_axis, self._padded, self.blocks.device
        cache.begin([call.cache for call in calls], rows)
        try:
            inputs = replace(
                calls[0].inputs,
                hidden_states=torch.cat([call.inputs.hidden_states for call in calls], dim=axis),
                batch_size=sum(rows),
                seq_len=seq_len,
                attention_mask=cache.attention_mask(seq_len, device) if cache.has_attention else None,
                position_ids=torch.cat([*map(_positions, calls)], -2).to(device) if self.takes_positions else None,
                **self._extra_inputs(calls, torch.cat),
            )
            output = self.blocks.run(inputs, calls[0].span, cache)
            cache.finish()
        finally:
            cache.begin((), [])
        return [part.clone() for part in torch.split_with_sizes(output, rows, dim=axis)]

    def _extra_inputs(self, calls: Sequence[SessionCall], join: Callable[[list[Tensor]], Tensor]) -> dict[str, Any]:
        needed = self.blocks.traits.extra_inputs
        return {
            name: join([getattr(call.inputs, name) for call in calls]) if name in needed else None
            for name in ("input_ids", "inputs_embeds")
        }


def _in_one_row(tensors: Iterable[Tensor], axis: int) -> Tensor:
    """Concatenates `[…, batch, seq, …]` of several sessions, row after row: `[…, 1, total, …]`."""
    flat = [tensor.flatten(axis, axis + 1) for tensor in tensors]
    axis %= flat[0].ndim + 1
    return torch.cat(flat, dim=axis).unsqueeze(axis)


def _positions(call: SessionCall) -> Tensor:
    """The positions of a call: `[batch, seq]`, or `[axes, batch, seq]` where pictures have more than one."""
    inputs, given = call.inputs, call.inputs.position_ids
    if given is None:
        given = torch.arange(call.cache.length, call.end_position)[None]
    return given.expand(*given.shape[:-2], inputs.batch_size, inputs.seq_len)
