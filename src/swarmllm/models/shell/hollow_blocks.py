"""The blocks of a client's model as others see them: modules with names and shapes, whose weights take no memory.

peft finds its targets by walking modules, so the client's block list registers the real block classes, hollowed out by
`hollow_modules`; their weights are no parameters, so that no optimizer, state dict or `.to()` ever meets them. What
peft puts into the blocks is owned and trained here. To the model's own forward the list has one entry, the proxy that
runs all blocks. Made by `loading`; `stack_forward` asks `BlockAdapters.collect` at each forward what has to travel.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from importlib import import_module
from itertools import count
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from swarmllm.data_structures import Patch
from swarmllm.errors import ConfigurationError
from swarmllm.models.adapters.block_adapter import BlockAdapter
from swarmllm.models.architecture import Stack, find_blocks
from swarmllm.models.checkpoint.skeleton import on_meta
from swarmllm.models.shell.blocks_proxy import current_call, is_detoured
from swarmllm.models.shell.hollow_modules import ModulePlace, close_hooks, fix_children, hollow_out, refuse_change
from swarmllm.models.shell.playback import playback

_versions = count(1)


class _Frozen(nn.Parameter):
    """A parameter that stays frozen, whatever is done to all: it would count as trained, and get no gradient."""

    requires_grad = property(lambda self: False, lambda self, value: None)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        return self


class HollowBlocks(nn.ModuleList):
    """Registers the blocks under their indices, and presents only the proxy to a forward."""

    hollow: dict[int, nn.Module]
    """Those that are on servers."""
    here: dict[int, nn.Module]
    """The others: what is done to them is done."""

    def __init__(self, blocks: nn.ModuleList, proxy: nn.Module, here: Mapping[int, nn.Module], first: int = 0) -> None:
        """`first` is the number that the first of these blocks has in the whole model."""
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
        # peft counts parameters that are elsewhere by the name under which DeepSpeed says how many they are.
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
        """The proxy alone; to a forward that wants to see what passes between blocks, a stand-in for each; and to all
        others the blocks, whose weights are elsewhere."""
        call = current_call()
        if call is None and not is_detoured():
            return self.blocks()
        return (self.__dict__["proxy"],) if call is None or call.inner is None else self._played_back

    @cached_property
    def _played_back(self) -> tuple[nn.Module, ...]:
        blocks = self.blocks()
        return tuple(playback(self.__dict__["proxy"], idx, block, len(blocks)) for idx, block in enumerate(blocks))

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """Of those that are shown: transformers looks for blocks to put its hooks on."""
        shown = self._shown
        return super().named_children() if len(shown) == 1 else zip(map(str, count()), shown)  # noqa: B905

    def __getitem__(self, index: Any) -> Any:
        return list(self._shown)[index]

    def __setitem__(self, index: Any, module: nn.Module) -> None:
        refuse_change(f"block {index}")

    def __delitem__(self, index: Any) -> None:
        refuse_change(f"block {index}")

    def blocks(self) -> list[nn.Module]:
        """The blocks themselves."""
        return list(filter(None, self._modules.values()))

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
    proxy: nn.Module,
    here: Mapping[int, nn.Module],
    stack: Stack,
) -> HollowBlocks:
    """The block list of a model of class `cls` with the config of `model`; costs neither memory nor reading.

    Blocks that are `here` are what they are; the others are hollow.
    """
    found = find_blocks(on_meta(cls, model.config), stack).blocks
    blocks = HollowBlocks(found, proxy, here, stack.span.start).train(model.training)
    for block_idx, block in blocks.hollow.items():
        hollow_out(block, f"block {blocks.first + block_idx}", model.dtype)
    return blocks


class BlockAdapters:
    """Reads what peft has put into hollow blocks; one object per model."""

    def __init__(self, blocks: HollowBlocks) -> None:
        self.blocks = blocks
        self.last: BlockAdapter | None = None
        """The adapter that the last forward used."""
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

    def check(self, peft_configs: dict[str, Any]) -> None:
        """Refuse at once what peft has just put into the blocks, if servers can't compute it.

        Raises:
            ConfigurationError: they can't.
        """
        self._of_tuners(peft_configs, begins=True)

    def _of_tuners(self, peft_configs: dict[str, Any], begins: bool = False) -> list[tuple[Patch, list[Tensor]]]:
        """`begins`: whether it will be trained is not known yet."""
        found: list[tuple[Patch, list[Tensor]]] = []
        if not peft_configs or "peft" not in sys.modules:
            return found
        for config in peft_configs.values():
            _check_config(config)
        for block_idx, block in self.blocks.hollow.items():
            close_hooks(block, ModulePlace(f"block {block_idx}"))  # of what peft has put there since
            for path, module in block.named_modules():
                if _is_tuner(module):
                    found += _patches(self.blocks.first + block_idx, path, module, begins)
        return found


def _is_tuner(module: nn.Module) -> bool:
    return bool(isinstance(module, _of_peft("tuners.tuners_utils", "BaseTunerLayer")))


def _of_peft(module: str, name: str) -> Any:
    """A class of peft, which the user has imported: swarmllm doesn't need it otherwise."""
    return getattr(import_module(f"peft.{module}"), name)


def _check_config(config: Any) -> None:
    init = getattr(config, "init_lora_weights", True)
    if init not in (True, False, "gaussian", "orthogonal"):
        raise ConfigurationError(
            f"init_lora_weights={init!r} reads base weights, which only servers have: use True or 'gaussian'"
        )
    if (bias := getattr(config, "bias", "none")) != "none":
        raise ConfigurationError(f"bias={bias!r} trains biases of blocks, which servers keep as they are: use 'none'")
    if parameters := getattr(config, "target_parameters", None):
        raise ConfigurationError(
            f"target_parameters={list(parameters)} can't be adapted, because servers apply adapters to linear modules: "
            "use target_modules"
        )


def _patches(block_idx: int, path: str, tuner: nn.Module, begins: bool) -> Iterator[tuple[Patch, list[Tensor]]]:
    """A patch, and its parameters, for each active adapter of a tuner layer."""
    module: Any = tuner
    if module.disable_adapters:
        return
    where = f"{path} of block {block_idx}"
    if module.merged:
        raise ConfigurationError(f"the adapter of {where} was merged, but the weights are the servers': unmerge it")
    if path.endswith(".base_layer"):
        raise ConfigurationError(
            f"{where.replace('.base_layer', '')} has adapters of two methods (mixed=True), of which servers apply one: "
            "use several adapters of one method"
        )
    for name in module.active_adapters:
        if (adapter := _read(module, name, begins, where)) is not None:
            kind, scale, values = adapter
            dropout = module.lora_dropout[name] if kind == "lora" else None
            shapes = tuple((value.numel(),) if "ia3" in kind else tuple(value.shape) for value in values)
            fields: dict[str, Any] = {"block": block_idx, "path": path, "kind": kind, "shapes": shapes}
            rate = getattr(dropout, "p", 0.0) if dropout is not None and dropout.training else 0.0
            yield Patch(**fields, scale=float(scale), dropout=rate), values


def _read(module: Any, name: str, begins: bool, where: str) -> tuple[str, float, list[Tensor]] | None:
    """The kind, scale and parameters of the adapter of that name; None if the layer has none."""
    if isinstance(module, _of_peft("tuners.lora", "Linear")):
        if name not in module.lora_A:
            return None
        if module.lora_bias.get(name):
            raise ConfigurationError(f"{where}: lora_bias=True adds a bias, which servers don't know: leave it out")
        if name in module.lora_variant:
            raise ConfigurationError(f"{where}: DoRA and other variants of LoRA read base weights; use plain LoRA")
        return "lora", module.scaling[name], [module.lora_A[name].weight, module.lora_B[name].weight]
    if isinstance(module, _of_peft("tuners.ia3", "IA3Layer")):
        kind = "ia3_in" if module.is_feedforward else "ia3_out"
        return (kind, 1.0, [module.ia3_l[name]]) if name in module.ia3_l else None
    if isinstance(module, _of_peft("tuners.loha", "LoHaLayer")) and name not in module.hada_t1:
        if name not in module.hada_w1_a:
            return None
        if module.training and not begins and (module.rank_dropout[name] or module.module_dropout[name]):
            raise ConfigurationError(
                f"rank_dropout and module_dropout of {where} can't be computed by servers: set them to 0"
            )
        sources = (module.hada_w1_a, module.hada_w1_b, module.hada_w2_a, module.hada_w2_b)
        return "loha", module.scaling[name], [source[name] for source in sources]
    raise ConfigurationError(
        f"{type(module).__module__}.{type(module).__name__} ({where}) can't run on servers: "
        "use LoRA, IA3 or LoHa on linear modules, or prompts"
    )
