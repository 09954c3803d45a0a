"""Reading one block of the checkpoint, for who looks at the weights of a hollow one.

Servers keep the blocks; their values are needed here only now and then: where training begins with them (a bias, a norm
that is trained whole, the magnitudes of DoRA). Made by `loading`, called by `hollow_modules`.
"""

import torch
from torch import nn

from swarmllm.data_structures import Span
from swarmllm.models.architecture import blocks_class, find_blocks
from swarmllm.models.block_slots import BlockSlots
from swarmllm.models.checkpoint.checkpoint import Checkpoint
from swarmllm.models.checkpoint.skeleton import load_pruned, prune_to_span, pruned


class BlockReader:
    """Blocks by their indices; the last one stays in memory, because its modules are asked for one after the other."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype) -> None:
        self._checkpoint, self._dtype = checkpoint, dtype
        self._last: tuple[int, nn.Module] | None = None

    def __call__(self, block_idx: int) -> nn.Module:
        """The block with its weights, of which files of the hub are downloaded first.

        Raises:
            WeightsError: its files are missing or damaged.
        """
        if self._last is None or self._last[0] != block_idx:
            self._last = None
            cls = pruned(blocks_class(self._checkpoint.config), prune_to_span(Span(block_idx, block_idx + 1), ()))
            model = load_pruned(cls, self._checkpoint, dtype=self._dtype, progress=False)
            slots = find_blocks(model).blocks
            assert isinstance(slots, BlockSlots)
            self._last = block_idx, slots.block(block_idx).requires_grad_(False)
        return self._last[1]

    def forget(self) -> None:
        """Free its memory."""
        self._last = None
