"""Changes that servers compute with besides their weights, read from a client's hollow blocks at each forward.

These are: adapters of peft, parameters of the blocks that are trained here (biases, norms), deep prompts, dropout in
train mode, and autocast. `stack_forward` asks `BlockAdapters.collect` for all of them.
"""

import math
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

INITS = (True, False, "gaussian", "orthogonal")
"""Values of `init_lora_weights` that leave base weights alone."""


class BlockAdapters:
    """Reads the hollow blocks of one stack."""

    def __init__(self, blocks: HollowBlocks) -> None:
        self.blocks = blocks
        self._last: BlockAdapter | None = None
        self._known: weakref.WeakKeyDictionary[BlockAdapter, Tensor] = weakref.WeakKeyDictionary()
        """The values, in one dimension, of adapters that the last forward or a session still uses."""
        self._finding = threading.Lock()
        self._lora: nn.Module | None = None
        """Any layer of LoRA's: peft hangs the adapters of rows on all of them."""
        self._modules = [
            (idx, path, one) for idx, block in blocks.hollow.items() for path, one in block.named_modules()
        ]
        """The blocks' own modules, whatever peft puts around them."""
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

    def _with_values(self, patches: tuple[Patch, ...], flat: Tensor) -> BlockAdapter:
        for known, values in self._known.items():
            if known.patches == patches and values.dtype == flat.dtype and torch.equal(values, flat):
                return known
        if not bool(flat.isfinite().all()):
            raise ConfigurationError(
                "the adapter's values are NaN or infinite, so its training has diverged: load an earlier one"
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
        hooks: Iterable[Any] = () if self._lora is None else reversed(self._lora._forward_pre_hooks.values())
        return next((list(hook.keywords["adapter_names"]) for hook in hooks if is_row_hook(hook)), None)  # the last

    def numbers(self, batch_size: int, seq_len: int) -> Tensor | None:
        """`[batch, seq]`: the number of each token's adapter, while peft wants several in one batch.

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
        """Adapters of peft; `begins`: they have just been added."""
        self._lora = None
        if not peft_configs:
            return []
        for config in peft_configs.values():
            _check_config(config)
        modules: list[tuple[int, str, nn.Module]] = []
        for block_idx, block in self.blocks.hollow.items():
            close_hooks(block, ModulePlace(f"block {block_idx}"))  # of modules that peft has added
            modules += [(self.blocks.first + block_idx, path, one) for path, one in block.named_modules()]
        self._lora = next((one for _, _, one in modules if tuner_layers.is_lora(one)), None)
        names = self.row_names()
        return [found for one in modules for found in tuner_layers.patches_of(*one, names, begins)]

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


def _check_config(config: Any) -> None:
    init = getattr(config, "init_lora_weights", True)
    if init not in INITS:
        raise ConfigurationError(
            f"init_lora_weights={init!r} reads base weights and changes them, which only servers have: use True or "
            "'gaussian'"
        )
    if parameters := getattr(config, "target_parameters", None):
        raise ConfigurationError(
            f"target_parameters={list(parameters)} can't be adapted, because servers apply adapters to linear modules: "
            "use target_modules"
        )
