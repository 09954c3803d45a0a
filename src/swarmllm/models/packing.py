"""Calls of several sessions, run together: which of them can be, and that each gets its own result.

    ragged      one row of all new positions, nothing padded (`packed_attention`); mixes prompts and single tokens
    padded      calls of equally many new positions as one batch (`padded_cache`)
    one by one  the others

Which ways give the right results for a span is found out when it is loaded (`packing_probe`). The first of them is used
until somebody has measured which is fastest (`server/packing_speed`). Used by `BlockSpan.forward_many`, for the
server's scheduler. Knows no queue and no clock: who runs with whom is decided there.
"""

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from swarmllm.data_structures import Span
from swarmllm.errors import LocalProtocolError
from swarmllm.models.architecture import text_config
from swarmllm.models.block_inputs import BlockInputs
from swarmllm.models.packed_attention import (
    MAX_SHARED_POSITIONS,
    PackingUnsupportedError,
    RaggedAttention,
    Segment,
)
from swarmllm.models.padded_cache import PaddedCache
from swarmllm.models.span_cache import SpanCache

if TYPE_CHECKING:
    from swarmllm.models.block_span import BlockSpan

MAX_PADDED_TOKENS = 16
"""New positions of one call that may be padded: for more, reading the weights no longer outweighs copying the caches.
Assumed."""


NEVER = float("inf")


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
    """Among the hosted blocks; `cache` was made for it."""
    cache: SpanCache

    @property
    def end_position(self) -> int:
        return self.cache.length + self.inputs.seq_len


Outcome = Tensor | Exception
"""Hidden states, or why there are none."""


class Packer:
    """Runs calls of several sessions on one `BlockSpan`."""

    def __init__(self, blocks: "BlockSpan", stack: PreTrainedModel) -> None:
        self._blocks = blocks
        self._takes_positions = "position_ids" in inspect.signature(stack.forward).parameters
        self.max_equal_length = _length_of_equal_rotation(text_config(stack.config))
        """Calls that end beyond this position depend on whom they run with, so they run alone."""
        self._padded = PaddedCache(stack.config)
        self.ways: tuple[Packing, ...] = (Packing.PADDED, Packing.ONE_BY_ONE)
        """Those worth trying, and once they have been tried, those that give the right results for this span."""
        try:
            self._ragged = RaggedAttention(stack)
            self.ways = (Packing.RAGGED, *self.ways)
        except PackingUnsupportedError:
            pass
        self.way = Packing.ONE_BY_ONE
        """The one that is used."""
        self.exact_alone = blocks.dtype == torch.float32 or not blocks.is_quantized
        """Whether a session alone runs as transformers runs it, whatever is faster: with weights as they are stored its
        tokens are those of the local model, and in short floats another order of adding up could change one."""
        self.ragged_alone_from = NEVER
        """Length of a session from which its steps run ragged even without company."""

    def found(self, ways: Sequence[Packing]) -> None:
        """These give the right results, the last of them being one by one; the first is used from now on."""
        self.ways, self.way = tuple(ways), ways[0]

    def use(self, way: Packing, *, ragged_alone_from: float = NEVER) -> None:
        """Use what was measured to be fastest, as far as it is right for these blocks."""
        if way in self.ways:
            self.way = way
            self.ragged_alone_from = NEVER if self.exact_alone or way != Packing.RAGGED else ragged_alone_from

    def run(self, calls: Sequence[SessionCall], way: Packing | None = None) -> list[Outcome]:
        """See `BlockSpan.forward_many`; `way` None = the one in use."""
        way = way or self.way
        outcomes: dict[int, Outcome] = {}
        for group in self._groups(calls, way):
            members = [calls[idx] for idx in group]
            outcomes.update(zip(group, self._run_group(members, way), strict=True))
        return [outcomes[idx] for idx in range(len(calls))]

    def run_packed(self, calls: Sequence[SessionCall], way: Packing) -> list[Tensor]:
        """Run calls that fit together.

        Raises:
            Exception: whatever the model's code raises; the caches are in an undefined state then.
        """
        past = min(call.cache.position for call in calls)
        with torch.inference_mode(), self._blocks.adapted(calls[0].inputs, calls[0].span, past):
            outputs = self._run_ragged(calls) if way == Packing.RAGGED else self._run_padded(calls)
            for call in calls:
                call.cache.advance(call.inputs.seq_len)
        return outputs

    def _run_group(self, calls: Sequence[SessionCall], way: Packing) -> list[Outcome]:
        if len(calls) == 1 and not self._gains_alone(calls[0], way):
            return self._one_by_one(calls)
        undo = [call.cache.keep_state() for call in calls]
        try:
            return list(self.run_packed(calls, way))
        except Exception:  # noqa: BLE001 - one call is to blame, perhaps; only alone it shows which
            for restore in undo:
                restore()
            return self._one_by_one(calls)

    def _one_by_one(self, calls: Sequence[SessionCall]) -> list[Outcome]:
        outcomes: list[Outcome] = []
        for call in calls:
            try:
                outcomes.append(self._blocks.forward(call.inputs, call.span, call.cache))
            except Exception as error:  # noqa: BLE001 - model code on a stranger's inputs: it ends this session alone
                outcomes.append(error)
        return outcomes

    def _gains_alone(self, call: SessionCall, way: Packing) -> bool:
        """Whether attention over a long past is worth the detour (`RaggedAttention.attend`)."""
        return (
            way == Packing.RAGGED
            and call.end_position >= self.ragged_alone_from
            and call.inputs.seq_len <= MAX_SHARED_POSITIONS
            and self._key(call, way) is not None
        )

    # ------------------------------------------------------------------ who runs with whom

    def _groups(self, calls: Sequence[SessionCall], way: Packing) -> list[list[int]]:
        groups: dict[tuple[Any, ...], list[int]] = {}
        seen: set[int] = set()
        for idx, call in enumerate(calls):
            if id(call.cache) in seen:
                raise LocalProtocolError("two calls of one session can't run together")
            seen.add(id(call.cache))
            groups.setdefault(self._key(call, way) or (idx,), []).append(idx)
        return list(groups.values())

    def _key(self, call: SessionCall, way: Packing) -> tuple[Any, ...] | None:
        """Equal for calls that fit together; None for one that has to run alone."""
        inputs, blocks = call.inputs, self._blocks
        if way == Packing.ONE_BY_ONE or not self._is_plain(call):
            return None
        axis = blocks.traits.batch_axis
        shape = list(inputs.hidden_states.shape)
        if shape[axis : axis + 2] != [inputs.batch_size, inputs.seq_len]:
            return None
        shape[axis : axis + 2] = []
        # An adapter is applied to a whole forward, so calls with different ones take turns.
        same = call.span, inputs.adapter, *shape
        if way == Packing.RAGGED:
            return same
        if inputs.seq_len > MAX_PADDED_TOKENS:
            return None
        return inputs.seq_len, call.cache.records_past, call.cache.length > 0, *same

    def _is_plain(self, call: SessionCall) -> bool:
        """Whether nothing about the call is unusual: no padding of its own, no special positions."""
        inputs, traits = call.inputs, self._blocks.traits
        if inputs.adapter is not None and inputs.adapter.num_prompts > call.cache.position:
            return False
        if inputs.num_prefix != call.cache.num_prefix:
            return False  # alone, `BlockSpan.forward` begins with it
        if call.span not in self._blocks.span or {call.span.start, call.span.end} & set(traits.forbidden_cuts):
            return False
        if any(getattr(inputs, name) is None for name in traits.extra_inputs) or inputs.token_type_ids is not None:
            return False
        if inputs.hidden_states.dtype != self._blocks.dtype or call.end_position > self.max_equal_length:
            return False
        positions = inputs.position_ids
        if positions is not None and (positions.ndim != 2 or not self._takes_positions):
            return False
        mask = inputs.attention_mask
        return mask is None or (
            mask.shape == (inputs.batch_size, call.end_position - call.cache.num_prefix) and bool(mask.all())
        )

    # ------------------------------------------------------------------ the two ways

    def _run_ragged(self, calls: Sequence[SessionCall]) -> list[Tensor]:
        segments: list[Segment] = []
        start = 0
        for call in calls:
            segments.append(Segment(call.cache, call.inputs.batch_size, call.inputs.seq_len, start))
            start += segments[-1].length
        axis = self._blocks.traits.batch_axis
        inputs = replace(
            calls[0].inputs,
            hidden_states=_in_one_row([call.inputs.hidden_states for call in calls], axis),
            batch_size=1,
            seq_len=start,
            attention_mask=None,
            position_ids=_in_one_row(map(_positions, calls), 0).to(self._blocks.device),
            **self._extra_inputs(calls, lambda tensors: _in_one_row(tensors, 0)),
        )
        with self._ragged.running(segments) as cache:
            output = self._blocks.run(inputs, calls[0].span, cache)
        # Copies: a view would keep the whole row in memory for as long as one session needs its part.
        return [
            torch.unflatten(
                output.squeeze(axis).narrow(axis, segment.start, segment.length), axis, (segment.rows, segment.seq_len)
            ).clone()
            for segment in segments
        ]

    def _run_padded(self, calls: Sequence[SessionCall]) -> list[Tensor]:
        rows, seq_len = [call.inputs.batch_size for call in calls], calls[0].inputs.seq_len
        axis, cache, device = self._blocks.traits.batch_axis, self._padded, self._blocks.device
        cache.begin([call.cache for call in calls], rows)
        try:
            inputs = replace(
                calls[0].inputs,
                hidden_states=torch.cat([call.inputs.hidden_states for call in calls], dim=axis),
                batch_size=sum(rows),
                seq_len=seq_len,
                attention_mask=cache.attention_mask(seq_len, device) if cache.has_attention else None,
                position_ids=torch.cat([*map(_positions, calls)]).to(device) if self._takes_positions else None,
                **self._extra_inputs(calls, torch.cat),
            )
            output = self._blocks.run(inputs, calls[0].span, cache)
            cache.finish()
        finally:
            cache.begin((), [])
        return [part.clone() for part in torch.split_with_sizes(output, rows, dim=axis)]

    def _extra_inputs(self, calls: Sequence[SessionCall], join: Callable[[list[Tensor]], Tensor]) -> dict[str, Any]:
        needed = self._blocks.traits.extra_inputs
        return {
            name: join([getattr(call.inputs, name) for call in calls]) if name in needed else None
            for name in ("input_ids", "inputs_embeds")
        }


def _in_one_row(tensors: Iterable[Tensor], axis: int) -> Tensor:
    """Concatenates `[…, batch, seq, …]` of several sessions, row after row: `[…, 1, total, …]`."""
    return torch.cat([tensor.flatten(axis, axis + 1) for tensor in tensors], dim=axis).unsqueeze(axis)


def _positions(call: SessionCall) -> Tensor:
    """`[batch, seq]`."""
    inputs, given = call.inputs, call.inputs.position_ids
    if given is None:
        given = torch.arange(call.cache.length, call.end_position)[None]
    return given.expand(inputs.batch_size, inputs.seq_len)


def _length_of_equal_rotation(config: PreTrainedConfig) -> float:
    """Positions up to which a rotary embedding rotates each position alike, whatever else is in the batch.

    Two kinds look at the largest position of a batch and choose their frequencies by it (Phi-3 128k, dynamic NTK).
    """

    def limits(settings: object) -> Iterable[float]:
        if isinstance(settings, dict):
            if settings.get("rope_type", settings.get("type")) in ("dynamic", "longrope"):
                original = settings.get("original_max_position_embeddings")
                yield original or getattr(config, "original_max_position_embeddings", None) or length
            for value in settings.values():
                yield from limits(value)

    length: float = getattr(config, "max_position_embeddings", 0)
    found = (getattr(config, name, None) for name in ("rope_parameters", "rope_scaling"))
    return min((limit for settings in found for limit in limits(settings)), default=float("inf"))
