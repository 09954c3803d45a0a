"""What servers shall compute with besides their weights, as it is in a client's hollow blocks at a forward.

That is: what peft has put there, parameters of the blocks that are trained here (biases), deep prompts, dropout in
train mode, and autocast. `stack_forward` asks `BlockAdapters.collect` for all of it at each forward.
"""

import math
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator
from functools import reduce
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from swarmllm.data_structures import Patch
from swarmllm.errors import ConfigurationError
from swarmllm.models.adapters.block_adapter import AUTOCAST, BlockAdapter
from swarmllm.models.shell import tuner_layers
from swarmllm.models.shell.hollow_blocks import HollowBlocks
from swarmllm.models.shell.hollow_modules import HollowModule, ModulePlace, close_hooks, is_row_hook, own_parameter

_versions = count(1)
_Found = list[tuple[Patch, list[Tensor]]]

INITS = ("gaussian", "orthogonal")
"""Values of `init_lora_weights`, besides True and False, that leave base weights alone."""


class BlockAdapters:
    """Reads what is in the hollow blocks; one object per model."""

    def __init__(self, blocks: HollowBlocks) -> None:
        self.blocks = blocks
        self._last: BlockAdapter | None = None
        self._known: weakref.WeakKeyDictionary[BlockAdapter, Tensor] = weakref.WeakKeyDictionary()
        """The values, in one dimension, of adapters that somebody still uses: the last forward, or sessions."""
        self._finding = threading.Lock()
        self._lora: nn.Module | None = None
        """Any layer of LoRA's, on which peft hangs the names of adapters for rows."""
        self._modules = [
            (block_idx, path, module)
            for block_idx, block in blocks.hollow.items()
            for path, module in block.named_modules()
        ]
        """The blocks' own, whatever peft puts around them."""
        self.rates = _dropout(blocks)
        """The blocks' own dropout above 0, by the names of modules and attributes."""
        self._dropouts = [
            (block_idx, path, module, module.p)
            for block_idx, block in blocks.hollow.items()
            for path, module in block.named_modules()
            if isinstance(module, nn.Dropout) and module.p
        ]

    def collect(
        self, peft_configs: dict[str, Any], deep_prompts: Iterable[tuple[Patch, list[Tensor]]] = (), device: str = "cpu"
    ) -> tuple[BlockAdapter | None, tuple[Tensor, ...]]:
        """The adapter for a forward, and the tensors whose values its own are, in their order, in autograd's graph.

        Equal values are the same object with the same version: nothing travels twice, and sessions go on.

        Args:
            device: the type of that which the caller's part of the model is on.

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

    def _with_values(self, patches: tuple[Patch, ...], flat: Tensor) -> BlockAdapter:
        for known, values in self._known.items():
            if known.patches == patches and values.dtype == flat.dtype and torch.equal(values, flat):
                return known
        if not bool(flat.isfinite().all()):
            raise ConfigurationError(
                "the adapter's values are NaN or infinite, so its training has diverged: load an earlier one"
            )
        parts = iter(torch.split_with_sizes(flat, [math.prod(shape) for patch in patches for shape in patch.shapes]))
        of_patches = tuple(tuple(next(parts).view(shape) for shape in patch.shapes) for patch in patches)
        adapter = BlockAdapter(patches, of_patches, version=next(_versions))
        self._known[adapter] = flat
        return adapter

    def check(self, peft_configs: dict[str, Any]) -> None:
        """Make what peft has just put into the blocks work, or refuse it at once if servers can't compute it.

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
        hooks: Iterable[Any] = () if self._lora is None else reversed(self._lora._forward_pre_hooks.values())
        return next((list(hook.keywords["adapter_names"]) for hook in hooks if is_row_hook(hook)), None)  # the last

    def numbers(self, batch_size: int, seq_len: int) -> Tensor | None:
        """`[batch, seq]`: which adapter each token has, while peft wants several in one batch.

        Raises:
            ValueError: there are more or fewer names than rows, as peft says it.
        """
        names = self.row_names()
        if names is None:
            return None
        layer: Any = self._lora
        layer._check_forward_args(range(batch_size), adapter_names=names)
        numbers = tuner_layers.numbers_of(names)
        return torch.tensor([numbers.get(name, 0) for name in names])[:, None].expand(batch_size, seq_len).contiguous()

    def _of_tuners(self, peft_configs: dict[str, Any], begins: bool = False) -> _Found:
        """`begins`: whether it will be trained is not known yet."""
        found: _Found = []
        self._lora = None
        if not peft_configs or "peft" not in sys.modules:
            return found
        for config in peft_configs.values():
            _check_config(config)
        lora = tuner_layers.of_peft("tuners.lora", "LoraLayer")
        tuners: list[tuple[int, str, nn.Module]] = []
        for block_idx, block in self.blocks.hollow.items():
            close_hooks(block, ModulePlace(f"block {block_idx}"))  # of what peft has put there since
            for path, module in block.named_modules():
                if tuner_layers.is_tuner(module) or tuner_layers.is_copied(module):
                    tuners.append((self.blocks.first + block_idx, path, module))
                    if self._lora is None and isinstance(module, lora):
                        self._lora = module
        names = self.row_names()
        for block_idx, path, module in tuners:
            if tuner_layers.is_copied(module):
                found += tuner_layers.whole_patches(block_idx, path, module)
            else:
                found += tuner_layers.patches_of(block_idx, path, module, names, begins)
        return found

    def _take_biases(self, *, trained: bool) -> None:
        """Have all biases of the blocks as parameters here, where peft would have those of local blocks trained."""
        for block in self.blocks.hollow.values():
            for module in list(block.modules()):
                tensors = module.hollow_tensors() if isinstance(module, HollowModule) else {}
                for name in [name for name, tensor in tensors.items() if "bias" in name and tensor.is_parameter]:
                    own_parameter(module, name, trained)

    def _own_parameters(self) -> Iterator[tuple[Patch, list[Tensor]]]:
        """Those of blocks that are kept here: in place of the servers'."""
        for block_idx, path, module in self._modules:
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    full, shapes = f"{path}.{name}".strip("."), (tuple(parameter.shape),)
                    yield (
                        Patch(block=self.blocks.first + block_idx, path=full, kind="tensor", shapes=shapes),
                        [parameter],
                    )

    def _in_training(self) -> Iterator[tuple[Patch, list[Tensor]]]:
        """The blocks' own dropout, in train mode."""
        if not self.rates:
            return
        first = self.blocks.first
        training = {block_idx for block_idx, block in self.blocks.hollow.items() if block.training}
        for block_idx in sorted(training):
            yield Patch(block=first + block_idx, path="", kind="dropout", shapes=()), []
        for block_idx, path, module, rate in self._dropouts:
            now = module.p if module.training else 0.0
            if block_idx in training and now != rate:
                yield Patch(block=first + block_idx, path=path, kind="dropout", shapes=(), dropout=now), []

    def _under_autocast(self, device: str) -> _Found:
        """All blocks, where the caller's own are under autocast."""
        name = str(torch.get_autocast_dtype(device)).removeprefix("torch.")
        if not torch.is_autocast_enabled(device) or name not in AUTOCAST:
            return []
        blocks = range(self.blocks.first, self.blocks.first + len(self.blocks.blocks()))
        return [(Patch(block=block_idx, path=name, kind="autocast", shapes=()), []) for block_idx in blocks]


def _of_one_dtype(found: _Found, *, mixed: bool) -> list[Tensor]:
    """The tensors of all patches; parameters of the model's own dtype as precisely as adapters are.

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


def _check_config(config: Any) -> None:
    init = getattr(config, "init_lora_weights", True)
    if init not in (True, False, *INITS):
        raise ConfigurationError(
            f"init_lora_weights={init!r} reads base weights and changes them, which only servers have: use True or "
            "'gaussian'"
        )
    if parameters := getattr(config, "target_parameters", None):
        raise ConfigurationError(
            f"target_parameters={list(parameters)} can't be adapted, because servers apply adapters to linear modules: "
            "use target_modules"
        )


def _dropout(blocks: HollowBlocks) -> dict[str, float]:
    """The rates above 0."""
    found: dict[str, float] = {}
    for path, module in blocks.named_modules():
        if isinstance(module, nn.Dropout):
            found[path.rpartition(".")[2]] = module.p
        found |= {name: rate for name, rate in vars(module).items() if "drop" in name and isinstance(rate, float)}
    return {name: rate for name, rate in found.items() if rate > 0}
