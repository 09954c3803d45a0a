"""The blocks of a client's model as others see them: modules with names and shapes, whose weights take no memory.

peft finds its targets by walking modules, so the client's block list registers the real block classes; each weight is
one number, stretched over its shape, and no parameter, so that no optimizer, state dict or `.to()` ever meets it. What
peft puts into the blocks is owned and trained here. Iterating or indexing the list gives the one proxy that runs all
blocks. Called by `client_shell`, which asks `BlockAdapters.collect` at each forward what has to travel.
"""

import sys
from collections.abc import Iterable, Iterator
from functools import cache
from importlib import import_module
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import PreTrainedModel

from swarmllm.data_structures import Patch
from swarmllm.errors import ConfigurationError
from swarmllm.models.adapters import BlockAdapter
from swarmllm.models.architecture import find_blocks
from swarmllm.models.skeleton import on_meta

_versions = count(1)


class HollowBlocks(nn.ModuleList):
    """Registers the hollow blocks under their indices, and presents only the proxy."""

    def __init__(self, blocks: nn.ModuleList, proxy: nn.Module) -> None:
        super().__init__()
        self.__dict__["proxy"] = proxy
        for block_idx, block in enumerate(blocks):
            self.add_module(str(block_idx), block)

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[nn.Module]:
        return iter((self.__dict__["proxy"],))

    def __getitem__(self, index: Any) -> Any:
        return [self.__dict__["proxy"]][index]

    def blocks(self) -> list[nn.Module]:
        """The hollow blocks themselves."""
        return list(self.children())


def hollow_blocks(cls: type[PreTrainedModel], model: PreTrainedModel, proxy: nn.Module) -> HollowBlocks:
    """The block list of a model of class `cls` with the config of `model`; costs neither memory nor reading."""
    blocks = find_blocks(on_meta(cls, model.config)).blocks
    for module in blocks.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in list(tensors.items()):
                if tensor is None:
                    continue
                del tensors[name]
                module.__dict__[name] = _stretched(tensor, model.dtype)
    return HollowBlocks(blocks, proxy).train(model.training)


@cache
def watch_optimizers() -> None:
    """Have every optimizer of this process refuse a step over hollow weights, which would silently train nothing.

    Nobody finds such weights by `parameters()`, but who names one by hand should hear of it.
    """
    register_optimizer_step_pre_hook(_refuse_hollow)


def _refuse_hollow(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    for group in optimizer.param_groups:
        for tensor in group["params"]:
            if tensor.is_meta or (tensor.numel() > 1 and not any(tensor.stride())):
                raise ConfigurationError(
                    f"the optimizer was given a weight {list(tensor.shape)} of a block, which is not here but on "
                    "servers: give it the parameters of model.parameters() that want gradients"
                )


def _stretched(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros((), dtype=dtype if tensor.is_floating_point() else tensor.dtype).expand(tensor.shape)


class BlockAdapters:
    """Reads what peft has put into hollow blocks; one object per model."""

    def __init__(self, blocks: HollowBlocks) -> None:
        self._blocks = blocks
        self.last: BlockAdapter | None = None
        """What the last forward used."""
        self._flat: Tensor | None = None

    def collect(
        self, peft_configs: dict[str, Any], deep_prompts: Iterable[tuple[Patch, list[Tensor]]] = ()
    ) -> tuple[BlockAdapter | None, tuple[Tensor, ...]]:
        """The adapter of the active tuners and the deep prompts, and the parameters in the order of its tensors.

        Equal values get the same version, so that nothing travels twice.

        Raises:
            ConfigurationError: something has been put into the blocks that servers can't compute.
        """
        found = [*deep_prompts, *self._of_tuners(peft_configs)]
        if not found:
            self.last = None
            return None, ()
        parameters = [value for _, values in found for value in values]
        if len({parameter.dtype for parameter in parameters}) > 1:
            raise ConfigurationError("all adapters inside the blocks must have the same dtype")
        patches = tuple(patch for patch, _ in found)
        flat = torch.cat([parameter.detach().flatten().cpu() for parameter in parameters])
        last = self.last
        if last is None or self._flat is None or last.patches != patches or not torch.equal(self._flat, flat):
            parts = iter(torch.split_with_sizes(flat, [parameter.numel() for parameter in parameters]))
            if not bool(flat.isfinite().all()):
                raise ConfigurationError(
                    "the adapter's values are NaN or infinite, so its training has diverged: load an earlier one"
                )
            values = tuple(tuple(next(parts).view(shape) for shape in patch.shapes) for patch in patches)
            self.last = last = BlockAdapter(patches, values, version=next(_versions))
            self._flat = flat
        return last, tuple(parameters)

    def _of_tuners(self, peft_configs: dict[str, Any]) -> list[tuple[Patch, list[Tensor]]]:
        found: list[tuple[Patch, list[Tensor]]] = []
        if not peft_configs or "peft" not in sys.modules:
            return found
        for config in peft_configs.values():
            _check_config(config)
        for block_idx, block in enumerate(self._blocks.blocks()):
            inside: set[str] = set()
            for path, module in block.named_modules():
                if _is_tuner(module):
                    inside.add(path)
                    found += _patches(block_idx, path, module)
                elif _keeps_a_copy(module) or (
                    any(True for _ in module.parameters(recurse=False))
                    and not any(path.startswith(f"{at}.") for at in inside)
                ):
                    raise ConfigurationError(
                        f"{path} of block {block_idx} shall be trained whole, but servers keep their blocks as they "
                        "are: train modules outside the blocks, or adapters of linear modules inside"
                    )
        return found


def _is_tuner(module: nn.Module) -> bool:
    return bool(isinstance(module, _of_peft("tuners.tuners_utils", "BaseTunerLayer")))


def _keeps_a_copy(module: nn.Module) -> bool:
    """`modules_to_save` or trainable tokens inside a block: a copy of weights that are not here."""
    return bool(isinstance(module, _of_peft("utils.other", "AuxiliaryTrainingWrapper")))


def _of_peft(module: str, name: str) -> Any:
    """A class of peft, which the user has imported: swarmllm doesn't need it otherwise."""
    return getattr(import_module(f"peft.{module}"), name)


def _check_config(config: Any) -> None:
    init = getattr(config, "init_lora_weights", True)
    if init not in (True, False, "gaussian", "orthogonal"):
        raise ConfigurationError(
            f"init_lora_weights={init!r} reads base weights, which only servers have: use True or 'gaussian'"
        )


def _patches(block_idx: int, path: str, tuner: nn.Module) -> Iterator[tuple[Patch, list[Tensor]]]:
    """One for each active adapter of a tuner layer."""
    module: Any = tuner
    if module.disable_adapters:
        return
    where = f"{path} of block {block_idx}"
    if module.merged:
        raise ConfigurationError(f"the adapter of {where} was merged, but the weights are the servers': unmerge it")
    kind: str
    values: list[Tensor]
    for name in module.active_adapters:
        scale = 1.0
        if isinstance(module, _of_peft("tuners.lora", "Linear")):
            if name not in module.lora_A:
                continue
            if name in module.lora_variant or module.lora_bias.get(name):
                raise ConfigurationError(f"{where}: DoRA and other variants of LoRA read base weights; use plain LoRA")
            _refuse_dropout(module.training, getattr(module.lora_dropout[name], "p", 0.0), where)
            kind, scale = "lora", module.scaling[name]
            values = [module.lora_A[name].weight, module.lora_B[name].weight]
        elif isinstance(module, _of_peft("tuners.ia3", "IA3Layer")):
            if name not in module.ia3_l:
                continue
            kind, values = "ia3_in" if module.is_feedforward else "ia3_out", [module.ia3_l[name]]
        elif isinstance(module, _of_peft("tuners.loha", "LoHaLayer")) and name not in module.hada_t1:
            if name not in module.hada_w1_a:
                continue
            _refuse_dropout(module.training, module.rank_dropout[name] or module.module_dropout[name], where)
            kind, scale = "loha", module.scaling[name]
            sources = (module.hada_w1_a, module.hada_w1_b, module.hada_w2_a, module.hada_w2_b)
            values = [source[name] for source in sources]
        else:
            raise ConfigurationError(
                f"{type(module).__module__}.{type(module).__name__} ({where}) can't run on servers: "
                "use LoRA, IA3 or LoHa on linear modules, or prompts"
            )
        shapes = tuple((value.numel(),) if "ia3" in kind else tuple(value.shape) for value in values)
        fields: dict[str, Any] = {"block": block_idx, "path": path, "kind": kind, "shapes": shapes}
        yield Patch(**fields, scale=float(scale)), values


def _refuse_dropout(training: bool, probability: float, where: str) -> None:
    if training and probability:
        raise ConfigurationError(f"dropout in the adapter of {where} can't be computed anew for gradients: set it to 0")
