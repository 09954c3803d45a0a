"""Quantizes each weight as soon as transformers has read it, through transformers' own extension point for quantizers.

So at most one weight is in memory in full precision, also where several tensors of a checkpoint become one parameter
(fused experts). Used by `skeleton.load_pruned`.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import ConversionOps
from transformers.quantizers import HfQuantizer
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from swarmllm.models.architecture import find_blocks
from swarmllm.models.free_memory import trim_heap
from swarmllm.models.quantization.kbit import KBit
from swarmllm.models.quantization.llm_int8 import LlmInt8
from swarmllm.models.quantization.nf4 import Nf4
from swarmllm.models.quantization.packed import Int8, Packed
from swarmllm.models.quantization.published import Nf4Pairs
from swarmllm.models.quantization.rules import (
    BITS,
    OF_WHOLE_ROWS,
    Quantization,
    QuantType,
    is_transposed,
    may_be_packed,
)
from swarmllm.models.quantization.weight import PackedView, QuantizedWeight

METHOD = "swarmllm"


@register_quantization_config(METHOD)
class LoadingConfig(QuantizationConfigMixin):
    """What `from_pretrained` is given as `quantization_config`."""

    def __init__(self, quantization: Quantization, device: torch.device, comes_packed: bool = False) -> None:
        self.quant_method = METHOD
        self.quantization = quantization
        self.device = device
        """Where the weights are going to be: the layout depends on it."""
        self.comes_packed = comes_packed
        """Whether the checkpoint has weights in few bits, which stay as they are."""

    def to_dict(self) -> dict[str, Any]:
        return {"quant_method": METHOD, "quant_type": self.quantization.quant_type}


@register_quantizer(METHOD)
class _Quantizer(HfQuantizer):
    quantization_config: LoadingConfig

    def __init__(self, quantization_config: LoadingConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.misshapen: set[str] = set()
        self._blocks = ""
        """Where the blocks are in the model; what lies around them stays as it is."""

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **_: Any) -> PreTrainedModel:
        blocks = find_blocks(model).blocks
        self._blocks = next(f"{name}." for name, module in model.named_modules() if module is blocks)
        return model

    def form_of(self, model: PreTrainedModel, name: str) -> QuantType:
        """`Quantization.format_of` a parameter of the blocks."""
        if name in self.misshapen or not name.startswith(self._blocks):
            return "none"
        return self.quantization_config.quantization.format_of(model, name)

    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **_: Any) -> bool:
        """Whether `_Quantize` has to see it: any matrix of the blocks, which may come packed."""
        if param_name in self.misshapen or not param_name.startswith(self._blocks):
            return False
        return self.quantization_config.comes_packed or self.form_of(model, param_name) != "none"

    def get_quantize_ops(self) -> ConversionOps:
        return _Quantize(self)

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **_: Any) -> PreTrainedModel:
        self.remove_quantization_config(model)  # its config says what the checkpoint is, as ever
        return model

    def is_serializable(self) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return True


class _Quantize(ConversionOps):
    """Puts a `QuantizedWeight` in place of a parameter; returns what transformers has to put in place itself."""

    def __init__(self, quantizer: _Quantizer) -> None:
        self._quantizer = quantizer

    def convert(
        self,
        input_dict: dict[str, Any],
        *,
        model: PreTrainedModel,
        missing_keys: set[str] | None = None,
        **_context: Any,
    ) -> dict[str, Tensor]:
        device = self._quantizer.quantization_config.device
        rest: dict[str, Tensor] = {}
        for name in list(input_dict):
            value = input_dict.pop(name)
            weight = value[0] if isinstance(value, list) else value
            path, _, leaf = name.rpartition(".")
            module = model.get_submodule(path)
            if weight.shape != (module._parameters.get(leaf, module._buffers.get(leaf))).shape:
                self._quantizer.misshapen.add(name)
            form = self._quantizer.form_of(model, name)
            if isinstance(weight, PackedView) and not (
                may_be_packed(model, name) and weight.transposed == is_transposed(module)
            ):
                weight = weight.dequantize()
            if form == "none" and not isinstance(weight, PackedView):
                rest[name] = weight
                continue
            install(module, leaf, weight, form, device)
            if missing_keys is not None:
                missing_keys.discard(name)
        return rest


def install(module: nn.Module, leaf: str, weight: Tensor | PackedView, form: QuantType, device: torch.device) -> None:
    """Replace the parameter `leaf` of a module by the quantized `weight`, which may be so already."""
    transposed = is_transposed(module)
    packed = (
        weight.packed if isinstance(weight, PackedView) else pack(weight.mT if transposed else weight, form, device)
    )
    quantized = QuantizedWeight(packed.for_device(device), transposed=transposed)
    del module._parameters[leaf]
    module.add_module(leaf, quantized)
    trim_heap()
    for loaded in (module, quantized):
        loaded._is_hf_initialized = True  # type: ignore[assignment]  # or transformers would initialize it


@torch.no_grad()
def pack(weight: Tensor, form: QuantType, device: torch.device) -> Packed:
    """Quantize `[…, out, in]` for use on `device`: there, if it is a GPU, or else where the weight is.

    Measured (16 blocks of 7B, 16 cores): CPUs take 5 s to int8 and 18 s to nf4.
    """
    if device.type == "cuda":
        weight = weight.to(device)
    if form in OF_WHOLE_ROWS:
        return (Int8 if form == "int8" else LlmInt8).quantize(weight)
    if form in BITS:
        return KBit.quantize(weight, BITS[form])
    packed = Nf4.quantize(weight, tiled=None if device.type == "cpu" else False)
    if device.type == "cpu" and type(packed) is Nf4:  # bitsandbytes has no kernel for this processor, or this shape
        codes = (packed.codes >> 4) | (packed.codes << 4)
        return Nf4Pairs(codes, packed.scale, packed.dtype)
    return packed
