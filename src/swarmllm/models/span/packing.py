"""Calls of several sessions, run together: which of them can be, and that each gets its own result.

`packed_forward` runs those that fit together, the others run one by one. Which ways give the right results for a span
is found out when it is loaded (`packing_probe`). The first of them is used until somebody has measured which is fastest
(`measuring/packing_speed`). Used by the server's device thread. Knows no queue and no clock: who runs with whom is
decided there.
"""

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from swarmllm.errors import LocalProtocolError
from swarmllm.models.boundary.block_inputs import arithmetic
from swarmllm.models.span.block_span import BlockSpan
from swarmllm.models.span.decode_graphs import SIZES, DecodeGraphs, DecodeStep, StaticInputs
from swarmllm.models.span.packed_forward import PackedForward, Packing, SessionCall
from swarmllm.models.span.page_access import why_no_kernels
from swarmllm.models.span.paged_attention import SHORT_TOKENS, PagedAttention
from swarmllm.models.span.random_inputs import random_inputs

logger = logging.getLogger(__name__)

MAX_PADDED_TOKENS = 16
"""New positions of one call that may be padded: for more, reading the weights no longer outweighs copying the caches.
Assumed."""

OutputOrError = Tensor | Exception
"""Hidden states, or why there are none."""


class Packer:
    """Runs calls of several sessions on one `BlockSpan`."""

    def __init__(self, blocks: BlockSpan, ways: Sequence[Packing]) -> None:
        """`ways` are those that give the right results for these blocks, the usually best first."""
        self.blocks = blocks
        self.ways = tuple(ways)
        self.way = self.ways[0]
        """The one that is used."""
        self.forward = PackedForward(blocks)
        self._failed: set[Packing] = set()
        """Ways with a failed step in the log."""

    def use(self, way: Packing) -> None:
        """Use what was measured to be fastest, as far as it is right for these blocks."""
        if way in self.ways:
            self.way = way

    @torch.inference_mode()
    def record(self, sizes: Sequence[int] = SIZES, *, fused: bool = True) -> None:
        """Record decode steps of all hosted blocks, if they run on pages of a CUDA device.

        With `fused`, in few kernels, if blocks are of the kind that this is known of.
        """
        blocks, forward = self.blocks, self.forward
        forward.graphs = None
        if self.way != Packing.PAGED or blocks.pool is None or why_no_kernels(blocks.pool.device):
            logger.info("decode steps aren't recorded: sessions aren't on pages of a GPU")
            return
        hidden = random_inputs(blocks, 1).hidden_states
        if hidden.ndim != 3 or blocks.traits.batch_axis or blocks.traits.extra_inputs:
            logger.info("decode steps aren't recorded: the blocks take more than hidden states")
            return
        step = _fused_step(forward.paged) if fused else None
        graphs = DecodeGraphs(
            step or forward.paged.step, blocks.pool, StaticInputs(hidden.shape[-1], blocks.dtype, blocks.device)
        )
        graphs.record(sizes)
        forward.graphs = graphs if graphs.sizes else None

    def run(self, calls: Sequence[SessionCall], way: Packing | None = None) -> list[OutputOrError]:
        """What `BlockSpan.forward` returns for each call, in order; for a call that fails, its exception.

        The cache of a call that fails is in an undefined state then, the others are untouched by it. Each cache may
        occur once. `way` None = the one in use.
        """
        way = way or self.way
        outcomes: dict[int, OutputOrError] = {}
        for group, fits in self._groups(calls, way):
            members = [calls[idx] for idx in group]
            run = self._run_group(members, way) if fits else self._one_by_one(members)
            outcomes.update(zip(group, run, strict=True))
        return [outcomes[idx] for idx in range(len(calls))]

    def _run_group(self, calls: Sequence[SessionCall], way: Packing) -> list[OutputOrError]:
        is_short = calls[0].inputs.seq_len <= SHORT_TOKENS
        if len(calls) == 1 and not (way == Packing.PAGED and is_short):  # a prompt has kernels of its own
            return self._one_by_one(calls)
        undo = [call.cache.keep_state() for call in calls]
        try:
            return list(self.forward.run(calls, way))
        except Exception as error:  # noqa: BLE001 - one call is to blame, perhaps; only alone it shows which
            if way not in self._failed:
                self._failed.add(way)
                said = f"{type(error).__name__}: {error}"
                logger.warning("a step of %d sessions failed %s; each runs alone: %s", len(calls), way.value, said)
            for restore in undo:
                restore()
            return self._one_by_one(calls)

    def _one_by_one(self, calls: Sequence[SessionCall]) -> list[OutputOrError]:
        outcomes: list[OutputOrError] = []
        for call in calls:
            try:
                outcomes.append(self.blocks.forward(call.inputs, call.span, call.cache))
            except Exception as error:  # noqa: BLE001 - model code on a stranger's inputs: it ends this session alone
                outcomes.append(error)
        return outcomes

    # ------------------------------------------------------------------ who runs with whom

    def _groups(self, calls: Sequence[SessionCall], way: Packing) -> list[tuple[list[int], bool]]:
        """Indices of calls, and whether they fit the way."""
        groups: dict[tuple[Any, ...], tuple[list[int], bool]] = {}
        seen: set[int] = set()
        for idx, call in enumerate(calls):
            if id(call.cache) in seen:
                raise LocalProtocolError("two calls of one session can't run together")
            seen.add(id(call.cache))
            key = self._key(call, way)
            groups.setdefault(key or (idx,), ([], key is not None))[0].append(idx)
        return list(groups.values())

    def _key(self, call: SessionCall, way: Packing) -> tuple[Any, ...] | None:
        """Equal for calls that fit together; None for one that has to run alone."""
        inputs, blocks = call.inputs, self.blocks
        if way == Packing.ONE_BY_ONE or not self._is_plain(call):
            return None
        axis = blocks.traits.batch_axis
        shape = list(inputs.hidden_states.shape)
        if shape[axis : axis + 2] != [inputs.batch_size, inputs.seq_len]:
            return None
        shape[axis : axis + 2] = []
        # An adapter is applied to a whole forward, so calls with different ones take turns.
        # Positions on one axis aren't always those on three with equal values: models may count a fourth, the text's.
        how = arithmetic(inputs, call.cache.position, blocks.traits)
        same = call.span, inputs.adapter, _num_axes(inputs.position_ids), how, *shape
        if way == Packing.PAGED and call.cache.table is None:
            return None
        if way in (Packing.PAGED, Packing.RAGGED):
            return same
        if inputs.seq_len > MAX_PADDED_TOKENS:
            return None
        return inputs.seq_len, call.cache.records_past, call.cache.length > 0, *same

    def _is_plain(self, call: SessionCall) -> bool:
        """Whether nothing about the call is unusual: no padding of its own, no special positions."""
        inputs, traits = call.inputs, self.blocks.traits
        if inputs.inner is not None:
            return False  # `BlockSpan.forward` records it
        if inputs.adapter is not None and inputs.adapter.num_prompts > call.cache.position:
            return False
        if inputs.dropout_seeds is not None or inputs.adapter_numbers is not None:
            return False  # an adapter is applied to a whole forward with one call's
        if inputs.deepstack is not None or inputs.per_layer_inputs is not None or self.forward.lacks_source(call):
            return False
        if inputs.num_prefix != call.cache.num_prefix:
            return False  # alone, `BlockSpan.forward` begins with it
        if call.span not in self.blocks.span or {call.span.start, call.span.end} & set(traits.forbidden_cuts):
            return False
        if any(getattr(inputs, name) is None for name in traits.extra_inputs) or inputs.token_type_ids is not None:
            return False
        if inputs.hidden_states.dtype != self.blocks.dtype:
            return False
        if inputs.position_ids is not None and not self.forward.takes_positions:
            return False
        mask = inputs.attention_mask
        return mask is None or (
            mask.shape == (inputs.batch_size, call.end_position - call.cache.num_prefix) and bool(mask.all())
        )


def _fused_step(paged: PagedAttention) -> DecodeStep | None:
    from swarmllm.models.span.fused_step import find_fused

    return find_fused(paged)


def _num_axes(positions: Tensor | None) -> int:
    """How many positions each token has where it may have several (`[axes, batch, seq]`); 0: where it has one."""
    return positions.shape[0] if positions is not None and positions.ndim > 2 else 0
