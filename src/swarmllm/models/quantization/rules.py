"""The choice of weights to quantize: decided from names and shapes, before anything is loaded."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, cast, get_args

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from swarmllm.errors import ConfigurationError

QuantType = Literal[
    "none", "int8", "q8_0", "q6_k", "q5_k", "q4_k", "nf4", "llm_int8", "int2", "int3", "q3.5", "int4", "int5", "int6"
]  # fmt: skip
StoredType = QuantType | Literal["q5_0", "q5_1"]
"""How a weight is stored: the chosen type, or the one for rows of other lengths."""
QUANT_TYPES: tuple[str, ...] = get_args(QuantType)
BITS: dict[str, float] = {"int2": 2, "int3": 3, "q3.5": 3.5, "int4": 4, "int5": 5, "int6": 6}
"""Bits of each type that `decoded.KBit` packs."""
OF_WHOLE_ROWS = ("int8", "llm_int8")
"""Types with one scale for each row."""
BLOCKS: dict[str, tuple[int, int, int]] = {
    "q8_0": (8, 32, 34), "q6_k": (14, 256, 210), "q5_1": (7, 32, 24), "q5_k": (13, 256, 176), "q5_0": (6, 32, 22),
    "q4_k": (12, 256, 144),
}  # fmt: skip
"""llama.cpp's types: the number of the kind in `decoded.KINDS`, weights of a block, bytes of a block."""
FOR_OTHER_ROWS: dict[str, StoredType] = {"q6_k": "q8_0", "q5_k": "q5_1", "q4_k": "q5_0"}
"""The type for rows that are no multiple of 256, as in llama.cpp: it has more bits."""
GROUP = 64
"""Weights of a row that share one scale, with all other types; as in QLoRA (section 3) and Inferflow (table 3)."""
SCALE_DTYPE = torch.bfloat16
"""The dtype of scales and minima of these types."""
SMALLEST = 1 << 14
"""Elements. Assumed: below, a kernel's start costs more than the memory is worth."""
_ROUTERS = frozenset({"gate", "router", "shared_expert_gate"})
"""Names of modules that choose experts: tiny, and a changed choice changes everything after it."""
_TRANSPOSED_EXPERTS = frozenset({"Llama4TextExperts"})
"""Experts stored as `[experts, in, out]` that don't say so in `is_transposed`."""


@dataclass(frozen=True)
class Quantization:
    """The types in which the weights of blocks are stored."""

    quant_type: QuantType = "none"
    smallest: int = SMALLEST
    """Weights with fewer elements than this (of one expert) stay in full precision."""
    calibration: Mapping[str, Tensor] | None = field(default=None, compare=False, repr=False)
    """Mean squares of the inputs of each weight, `[…, in]`, by its name in the model: they weight the search."""

    def format_of(self, model: PreTrainedModel, name: str) -> StoredType:
        """The type in which a parameter of the model is stored: `none` for everything but large matrices of linear
        maps."""
        if self.quant_type == "none" or not may_be_packed(model, name):
            return "none"
        path, _, leaf = name.rpartition(".")
        module: nn.Module = model.get_submodule(path)
        rows, columns = packed_shape(module, module.get_parameter(leaf))[-2:]
        if rows * columns < self.smallest:
            return "none"
        return _for_rows(self.quant_type, columns)

    def require_calibration(self, model: PreTrainedModel, prefix: str) -> None:
        """Check that the calibration has all weights of blocks, whose names begin with `prefix`, that will be rounded.

        Raises:
            ConfigurationError: it is of another model.
        """
        for name, weight in model.named_parameters() if self.calibration is not None else ():
            if not name.startswith(prefix) or self.format_of(model, name) not in BLOCKS:
                continue
            *experts, _, columns = packed_shape(model.get_submodule(name.rpartition(".")[0]), weight)
            found = self.importance_of(name)
            if found is None or found.shape != (*experts, columns):
                raise ConfigurationError(
                    f"the calibration is of another model: it has no inputs of {name}; make one of this model with "
                    "swarmllm calibrate"
                )

    def importance_of(self, name: str) -> Tensor | None:
        """The mean squares of the inputs of a weight, if they are known."""
        return None if self.calibration is None else self.calibration.get(name)


def _for_rows(quant_type: QuantType, columns: int) -> StoredType:
    """That type, or the one in its place if rows don't consist of its groups or blocks."""
    form: StoredType = quant_type
    if form in FOR_OTHER_ROWS and columns % BLOCKS[form][1]:
        form = FOR_OTHER_ROWS[form]
    size = BLOCKS[form][1] if form in BLOCKS else GROUP
    return form if form in OF_WHOLE_ROWS or columns % size == 0 else "int8"


FULL_PRECISION = Quantization()


def resolve_quantization(quant_type: str) -> Quantization:
    """The user's choice; auto is int8. Weights that a checkpoint stores in few bits stay as they are with all of them.

    Raises:
        ConfigurationError: there is no such type.
    """
    if quant_type == "auto":
        quant_type = "int8"
    if quant_type not in QUANT_TYPES:
        raise ConfigurationError(f"quant_type {quant_type!r} is not known; use one of {', '.join(QUANT_TYPES)}")
    return Quantization(cast(QuantType, quant_type))


def may_be_packed(model: PreTrainedModel, name: str) -> bool:
    """True if a parameter of the model is the matrix, or the matrices, of linear maps and nothing else."""
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    weight = module._parameters.get(leaf)
    if weight is None or not weight.is_floating_point() or name in _tied(model):
        return False
    return is_linear(name, module, weight)


def is_linear(name: str, module: nn.Module, weight: Tensor) -> bool:
    """True if a module's parameter is the matrix of a linear map, or those of experts; routers are none."""
    path, _, leaf = name.rpartition(".")
    if not _ROUTERS.isdisjoint(path.split(".")) or "Router" in type(module).__name__:
        return False
    if isinstance(module, nn.Linear | Conv1D):
        return leaf == "weight" and weight.ndim == 2
    # Fused experts are parameters of a module of their own, mostly [experts, out, in].
    return "Expert" in type(module).__name__ and weight.ndim >= 2 and "bias" not in leaf


def _tied(model: PreTrainedModel) -> set[str]:
    """Names of parameters that several modules share: tying them needs real ones."""
    ties = model.all_tied_weights_keys
    return {*ties.keys(), *ties.values()}


def is_transposed(module: nn.Module) -> bool:
    """True if the module stores its weights as `[…, in, out]` and multiplies `x @ weight`."""
    if isinstance(module, Conv1D) or type(module).__name__ in _TRANSPOSED_EXPERTS:
        return True
    return bool(getattr(module, "is_transposed", False))


def packed_shape(module: nn.Module, weight: Tensor) -> torch.Size:
    """`[…, out, in]`, as it is packed."""
    return weight.mT.shape if weight.ndim > 1 and is_transposed(module) else weight.shape


def stored_bytes(model: PreTrainedModel, name: str, dtype: torch.dtype, quantization: Quantization) -> int:
    """Bytes of a parameter of the model when it is stored that way and everything else in `dtype`."""
    path, _, leaf = name.rpartition(".")
    module: nn.Module = model.get_submodule(path)
    weight = module.get_parameter(leaf)
    count, columns = weight.numel(), packed_shape(module, weight)[-1]
    match quantization.format_of(model, name):
        case "none":
            return count * dtype.itemsize
        case "int8" | "llm_int8":
            return count + count // columns * dtype.itemsize
        case "nf4":
            return count // 2 + count // GROUP * dtype.itemsize
        case blocks if blocks in BLOCKS:
            _, weights, size = BLOCKS[blocks]
            return count // weights * size
        case k_bit:
            return count // GROUP * (int(GROUP * BITS[k_bit]) // 8 + 2 * SCALE_DTYPE.itemsize)
