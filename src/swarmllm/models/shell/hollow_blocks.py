"""The block list of a client's model, as others see it: the real block classes, whose weights are on servers.

peft finds its targets by walking modules, so the list registers the architecture's own blocks, made hollow by
`hollow_modules`. Their weights are no parameters: no optimizer, state dict or `.to()` ever meets them. What peft puts
into the blocks is owned and trained here. To the model's own forward the list has one entry, the proxy that runs all
blocks. `loading` makes it.

`BlockAdapters` reads the changes that servers compute with besides their weights, at each forward: adapters of peft,
parameters of the blocks that are trained here (biases, norms), deep prompts, dropout in train mode, and autocast.

`BlockReader` reads one block of the checkpoint if values of a hollow weight are needed: because training begins with
them (a bias, a norm that is trained whole, the magnitudes of DoRA), or because a user looks at them.
"""

import math
import threading
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property, partial, reduce
from itertools import count
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from swarmllm.data_structures import BlockTraits, Patch, Span
from swarmllm.errors import ConfigurationError
from swarmllm.models.adapters import peft_layers
from swarmllm.models.adapters.block_adapter import AUTOCAST, BlockAdapter
from swarmllm.models.architecture import Stack, blocks_class, find_blocks
from swarmllm.models.block_slots import BlockSlots
from swarmllm.models.checkpoint.checkpoint import Checkpoint
from swarmllm.models.checkpoint.skeleton import load_pruned, on_meta, prune_to_span, pruned
from swarmllm.models.shell.blocks_proxy import BlocksProxy, current_call
from swarmllm.models.shell.hollow_modules import (
    HollowModule,
    ModulePlace,
    close_hooks,
    fix_children,
    hollow_out,
    own_parameter,
    refuse_change,
    row_names,
)
from swarmllm.models.shell.playback import open_to_hooks, playback


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
        self.num_hooks: Counter[int] = Counter()
        """Hooks of users by the block before which they cut the model (`playback`)."""
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
    def _shown(self) -> list[nn.Module] | tuple[nn.Module, ...]:
        """The modules that the list shows: the blocks, as a list, except in a forward.

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
        shown = self._shown
        if isinstance(index, slice) and isinstance(shown, list):  # a user's, outside of forwards: a module, as of torch
            return nn.ModuleList(shown[index])
        return shown[index]

    def __setitem__(self, index: Any, module: nn.Module) -> None:
        refuse_change(f"block {index}")

    def __delitem__(self, index: Any) -> None:
        refuse_change(f"block {index}")

    def hooked(self) -> frozenset[int]:
        """The places where users have hooks now: `i` is before block `i` of these, `i + 1` behind it."""
        return frozenset(cut - self.first for cut, num_used in self.num_hooks.items() if num_used)

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
        number, forbidden = blocks.first + block_idx, traits.forbidden_cuts
        open_to_hooks(block, ModulePlace(name), number, stack.span.end, forbidden, blocks.num_hooks)
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


# ---------------------------------------------------------------------- changes that travel

_versions = count(1)
_Found = list[tuple[Patch, list[Tensor]]]


_SWITCHES = ("_disable_adapters", "_active_adapter", "merged_adapters", "scaling")
"""Attributes of peft's layers that change what they compute."""


def stamp_of(modules: Iterable[nn.Module]) -> object:
    """Changes when torch writes to a tensor of these modules, or peft switches an adapter; not by writes to `.data`."""
    modules = list(modules)
    layers = [attributes for one in modules if "_active_adapter" in (attributes := one.__dict__)]
    states = [[attributes.get(name) for name in _SWITCHES] for attributes in layers]
    return versions_of(one for module in modules for one in module._parameters.values() if one is not None), str(states)


def versions_of(tensors: Iterable[Tensor]) -> list[tuple[int, int]]:
    """Where the tensors are, and how often torch has written to them."""
    return [(one.data_ptr(), 0 if one.is_inference() else one._version) for one in tensors]


class BlockAdapters:
    """Reads the hollow blocks of one stack."""

    def __init__(self, blocks: HollowBlocks) -> None:
        self.blocks = blocks
        self._last: BlockAdapter | None = None
        self._known: weakref.WeakKeyDictionary[BlockAdapter, Tensor] = weakref.WeakKeyDictionary()
        """The values, in one dimension, of adapters that the last forward or a session still uses."""
        self._finding = threading.Lock()
        self._with_rows: nn.Module | None = None
        """Any module of peft's that it tells the adapters of rows: it hangs them on all of these."""
        self._modules = [
            (idx, path, one) for idx, block in blocks.hollow.items() for path, one in block.named_modules()
        ]
        """The blocks' own modules, whatever peft puts around them."""
        self._tuned: list[nn.Module] = []
        """Those and peft's, since its adapters were last read; empty if there are none."""
        self._places: list[tuple[nn.Module, str, nn.Module]] = []
        """(parent, name, layer) of each layer of peft's."""
        self._dropouts = [(*one, one[2].p) for one in self._modules if isinstance(one[2], nn.Dropout) and one[2].p]
        # rates that attention modules have as plain attributes
        rates = (vars(one).items() for _, _, one in self._modules)
        self._drops = bool(self._dropouts) or any(
            "drop" in name and isinstance(rate, float) and rate > 0 for items in rates for name, rate in items
        )

    def collect(
        self, peft_configs: dict[str, Any], deep_prompts: Iterable[tuple[Patch, list[Tensor]]] = (), device: str = "cpu"
    ) -> tuple[BlockAdapter | None, tuple[Tensor, ...]]:
        """The adapter for a forward, and the tensors with its values, in their order, in autograd's graph.

        Equal values are the same object with the same version: nothing travels twice, and sessions go on.

        Args:
            device: the type of the device that the caller's part of the model is on.

        Raises:
            ConfigurationError: something has been put into the blocks that servers can't compute.
        """
        found = [*deep_prompts, *self._own_parameters(), *self._of_tuners(peft_configs), *self._in_training()]
        found += (cast := self._under_autocast(device))
        if not found:
            self._last = None
            return None, ()
        trained = _of_one_dtype(found, mixed=bool(cast))
        patches = tuple(patch for patch, _ in found)
        flat = torch.cat([torch.empty(0), *(one.detach().flatten().cpu() for one in trained)])
        with self._finding:
            self._last = self._with_values(patches, flat)
            return self._last, tuple(trained)

    def stamp(self, prompts: Iterable[Tensor], device: str) -> object:
        """Changes when an adapter is switched, or written to by torch. Reading all values, as `collect` does, takes ten
        times as long (LoRA in 32 blocks: 30 ms).

        Args:
            prompts: tensors that `collect` gets besides.
        """
        are_there = all(parent._modules.get(name) is layer for parent, name, layer in self._places)
        autocast = torch.is_autocast_enabled(device) and str(torch.get_autocast_dtype(device))
        modules = self._tuned or [one for _, _, one in self._modules]
        return stamp_of(modules), versions_of(prompts), are_there, self.row_names(), autocast

    def _with_values(self, patches: tuple[Patch, ...], flat: Tensor) -> BlockAdapter:
        for known, values in self._known.items():
            if known.patches == patches and values.dtype == flat.dtype and torch.equal(values, flat):
                return known
        if not bool(flat.isfinite().all()):
            raise ConfigurationError(
                "the values of the adapter or prompts are NaN or infinite, so its training has diverged: load an "
                "earlier one"
            )
        chunks = iter(torch.split_with_sizes(flat, [math.prod(shape) for patch in patches for shape in patch.shapes]))
        of_patches = tuple(tuple(next(chunks).view(shape) for shape in patch.shapes) for patch in patches)
        adapter = BlockAdapter(patches, of_patches, version=next(_versions))
        self._known[adapter] = flat
        return adapter

    def check(self, peft_configs: dict[str, Any]) -> None:
        """Make the adapters that peft has just put into the blocks work, or refuse them if servers can't compute them.

        Raises:
            ConfigurationError: they can't.
        """
        self._of_tuners(peft_configs, begins=True)
        for config in peft_configs.values():
            if getattr(config, "bias", "none") == "all":
                self._take_biases(trained=not config.inference_mode)
        self.blocks.forget_read()

    def row_names(self) -> list[str] | None:
        """The adapter of each row, while peft wants several in one batch."""
        return row_names(self._with_rows)

    def numbers(self, batch_size: int, seq_len: int) -> Tensor | None:
        """`[batch, seq]`: the number of each token's adapter, while peft wants several in one batch.

        Raises:
            ValueError: there are more or fewer names than rows, as peft says it.
        """
        names = self.row_names()
        if names is None:
            return None
        layer: Any = self._with_rows
        layer._check_forward_args(range(batch_size), adapter_names=names)
        numbers = peft_layers.numbers_of(names)
        return torch.tensor([numbers.get(name, 0) for name in names])[:, None].expand(batch_size, seq_len).contiguous()

    def _of_tuners(self, peft_configs: dict[str, Any], begins: bool = False) -> _Found:
        """Adapters of peft; `begins`: they have just been added."""
        self._with_rows, self._tuned, self._places = None, [], []
        if not peft_configs:
            return []
        for config in peft_configs.values():
            peft_layers.check_config(config)
        modules: list[tuple[int, str, nn.Module]] = []
        for block_idx, block in self.blocks.hollow.items():
            close_hooks(block, ModulePlace(f"block {block_idx}"))  # of modules that peft has added
            modules += [(self.blocks.first + block_idx, path, one) for path, one in block.named_modules()]
        self._tuned = [one for _, _, one in modules if one._parameters or "_active_adapter" in vars(one)]
        children = [(parent, name, one) for _, _, parent in modules for name, one in parent._modules.items()]
        self._places = [
            (parent, name, one) for parent, name, one in children if one is not None and "_active_adapter" in vars(one)
        ]
        self._with_rows = next((one for _, _, one in modules if peft_layers.takes_rows(one)), None)
        names = self.row_names()
        return [found for one in modules for found in peft_layers.patches_of(*one, names, begins)]

    def _take_biases(self, *, trained: bool) -> None:
        """Make all biases of the blocks parameters here, where peft would train those of local blocks."""
        for module in [one for block in self.blocks.hollow.values() for one in block.modules()]:
            tensors = module.hollow_tensors() if isinstance(module, HollowModule) else {}
            for name, tensor in tensors.items():
                if "bias" in name and tensor.is_parameter:
                    own_parameter(module, name, trained)

    def _own_parameters(self) -> Iterator[tuple[Patch, list[Tensor]]]:
        """Parameters of blocks that are kept here, in place of the servers'."""
        for block_idx, path, module in self._modules:
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    block, full = self.blocks.first + block_idx, f"{path}.{name}".strip(".")
                    yield Patch(block=block, path=full, kind="tensor", shapes=(tuple(parameter.shape),)), [parameter]

    def _in_training(self) -> Iterator[tuple[Patch, list[Tensor]]]:
        """The blocks' own dropout, in train mode."""
        hollow = self.blocks.hollow.items() if self._drops else ()
        training = [block_idx for block_idx, block in hollow if block.training]
        for block_idx in training:
            yield Patch(block=self.blocks.first + block_idx, path="", kind="dropout", shapes=()), []
        for block_idx, path, module, rate in self._dropouts:
            now = module.p if module.training else 0.0
            if block_idx in training and now != rate:
                block = self.blocks.first + block_idx
                yield Patch(block=block, path=path, kind="dropout", shapes=(), dropout=now), []

    def _under_autocast(self, device: str) -> _Found:
        """All blocks, where the caller's own code is under autocast."""
        name = str(torch.get_autocast_dtype(device)).removeprefix("torch.")
        if not torch.is_autocast_enabled(device) or name not in AUTOCAST:
            return []
        blocks = range(self.blocks.first, self.blocks.first + len(self.blocks.blocks()))
        return [(Patch(block=block_idx, path=name, kind="autocast", shapes=()), []) for block_idx in blocks]


def _of_one_dtype(found: _Found, *, mixed: bool) -> list[Tensor]:
    """The tensors of all patches; parameters of the model's own dtype are cast to that of the adapters.

    `mixed`: they may differ, because autocast says what matrices are multiplied in.
    """
    tensors = [(patch.kind, value) for patch, values in found for value in values]
    dtypes = {value.dtype for kind, value in tensors if kind != "tensor"} or {value.dtype for _, value in tensors}
    if len(dtypes) > 1 and not mixed:
        raise ConfigurationError("all adapters inside the blocks must have the same dtype")
    widest = reduce(torch.promote_types, dtypes) if dtypes else torch.float32
    if any(torch.promote_types(value.dtype, widest) != widest for _, value in tensors):
        raise ConfigurationError("parameters of blocks that are trained here must not be finer than the adapters")
    return [value.to(widest) for _, value in tensors]
