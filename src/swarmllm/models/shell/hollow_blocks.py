"""The block list of a client's model, as others see it: the real block classes, whose weights are on servers.

peft finds its targets by walking modules, so the list registers the architecture's own blocks, made hollow by
`hollow_modules`. Their weights are no parameters: no optimizer, state dict or `.to()` ever meets them. What peft puts
into the blocks is owned and trained here. To the model's own forward the list has one entry, the proxy that runs all
blocks. `loading` makes it; `hollow_adapters` reads from it what has to travel at a forward.

`BlockReader` reads one block of the checkpoint if values of a hollow weight are needed: because training begins with
them (a bias, a norm that is trained whole, the magnitudes of DoRA), or because a user looks at them.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import count
from typing import Any, Self

import torch
from torch import nn
from transformers import PreTrainedModel

from swarmllm.data_structures import BlockTraits, Span
from swarmllm.models.architecture import Stack, blocks_class, find_blocks
from swarmllm.models.block_slots import BlockSlots
from swarmllm.models.checkpoint.checkpoint import Checkpoint
from swarmllm.models.checkpoint.skeleton import load_pruned, on_meta, prune_to_span, pruned
from swarmllm.models.shell.blocks_proxy import BlocksProxy, current_call
from swarmllm.models.shell.hollow_modules import (
    ModulePlace,
    close_hooks,
    fix_children,
    hollow_out,
    refuse_change,
)
from swarmllm.models.shell.playback import hooked_bounds, open_to_hooks, playback


class _Frozen(nn.Parameter):
    """A parameter that stays frozen: it would count as trained, and get no gradient."""

    requires_grad = property(lambda self: False, lambda self, value: None)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        return self


class HollowBlocks(nn.ModuleList):
    """Registers the blocks under their indices, and shows only the proxy to a forward."""

    hollow: dict[int, nn.Module]
    """Blocks on servers, by index."""
    here: dict[int, nn.Module]
    """Blocks that run here, by index: real modules, which can be changed."""

    def __init__(
        self, blocks: nn.ModuleList, proxy: BlocksProxy, here: Mapping[int, nn.Module], first: int = 0
    ) -> None:
        """`first`: the number of the first of these blocks in the whole model."""
        super().__init__()
        self.first = first
        self.__dict__["proxy"] = proxy
        self.__dict__["here"] = dict(here)
        self.__dict__["hollow"] = {idx: block for idx, block in enumerate(blocks) if idx not in here}
        for block_idx, block in enumerate(blocks):
            self.add_module(str(block_idx), here.get(block_idx, block))
        elsewhere = nn.ModuleList(self.hollow.values())
        self.num_tensors = len(list(elsewhere.parameters()))
        embeddings = [module.weight.numel() for module in elsewhere.modules() if isinstance(module, nn.Embedding)]
        self._num_parameters = sum(parameter.numel() for parameter in elsewhere.parameters()), sum(embeddings)
        # peft counts parameters that are elsewhere by this name, which is DeepSpeed's.
        self.on_servers = _Frozen(torch.empty(0), requires_grad=False)
        self.on_servers.ds_numel = self.num_parameters()  # type: ignore[attr-defined]
        fix_children(self, ModulePlace("the list of blocks"))
        close_hooks(proxy, ModulePlace("the blocks"))

    def __len__(self) -> int:
        return len(self._shown)

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self._shown)

    @property
    def _shown(self) -> Sequence[nn.Module]:
        """The modules that the list shows: the blocks, except in a forward.

        A forward gets the proxy alone, or a stand-in for each block if hidden states between blocks are wanted.
        """
        call = current_call()
        if call.inputs is None and call.instead is None:
            return self.blocks()
        return self._played_back if call.is_played else (self.__dict__["proxy"],)

    @cached_property
    def _played_back(self) -> tuple[nn.Module, ...]:
        blocks = self.blocks()
        return tuple(
            playback(self.__dict__["proxy"], idx, block, len(blocks), self.first) for idx, block in enumerate(blocks)
        )

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """The children that are shown: transformers puts its hooks on them."""
        shown = self._shown
        return super().named_children() if len(shown) == 1 else zip(map(str, count()), shown)  # noqa: B905

    def __getitem__(self, index: Any) -> Any:
        return list(self._shown)[index]

    def __setitem__(self, index: Any, module: nn.Module) -> None:
        refuse_change(f"block {index}")

    def __delitem__(self, index: Any) -> None:
        refuse_change(f"block {index}")

    def hooked(self) -> frozenset[int]:
        """The places where users have hooks now: `i` is before block `i` of these, `i + 1` behind it."""
        return frozenset(hooked_bounds(self.hollow))

    def blocks(self) -> list[nn.Module]:
        """The blocks themselves."""
        return list(filter(None, self._modules.values()))

    def forget_read(self) -> None:
        """Free the memory of a block that was read."""
        if isinstance(reader := self.__dict__.get("read_block"), BlockReader):
            reader.forget()

    def num_parameters(self, exclude_embeddings: bool = False) -> int:
        """Parameters as transformers counts them, shared ones once."""
        count, of_embeddings = self._num_parameters
        return count - of_embeddings * exclude_embeddings

    def _save_to_state_dict(self, *_: Any) -> None:
        """`on_servers` is no weight."""

    def _load_from_state_dict(self, *_: Any) -> None:
        """`on_servers` is no weight."""


def hollow_blocks(
    cls: type[PreTrainedModel],
    model: PreTrainedModel,
    proxy: BlocksProxy,
    here: Mapping[int, nn.Module],
    stack: Stack,
    read_block: "BlockReader | None" = None,
) -> HollowBlocks:
    """Make the block list for a model of class `cls` with the config of `model`, without memory and without reading.

    Blocks that are `here` stay real. The others are hollow; `read_block` reads them if their values are needed.
    """
    found = find_blocks(on_meta(cls, model.config), stack).blocks
    blocks = HollowBlocks(found, proxy, here, stack.span.start).train(model.training)
    blocks.__dict__["read_block"] = read_block
    traits: BlockTraits = proxy.traits
    for block_idx, block in blocks.hollow.items():
        read = None if read_block is None else partial(read_block, block_idx)
        name = f"block {blocks.first + block_idx}"
        hollow_out(block, name, model.dtype, read)
        open_to_hooks(block, ModulePlace(name), blocks.first + block_idx, stack.span.end, traits.forbidden_cuts)
    return blocks


class BlockReader:
    """Reads blocks by index. The last one stays in memory, because its modules are read one after the other."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype) -> None:
        self._checkpoint, self._dtype = checkpoint, dtype
        self._last: tuple[int, nn.Module] | None = None

    def __call__(self, block_idx: int) -> nn.Module:
        """The block with its weights. Files of the hub are downloaded first.

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
