"""NVIDIA's ModelOpt: FP8 with scales per tensor or row; NVFP4 with 8-bit scales per 16 and one of the tensor.

Weights that were smoothed (AWQ) expect inputs multiplied by `pre_quant_scale`: it is multiplied into them here.
"""

import torch
from torch import Tensor

from swarmllm.models.published_formats.fp8 import Fp8
from swarmllm.models.published_formats.stored_format import Parts
from swarmllm.models.quantization.codes import E2M1, scaled, values_of_pairs
from swarmllm.models.quantization.packed import Packed
from swarmllm.models.quantization.published import Nvfp4

ALGORITHMS = frozenset(
    {
        "FP8",
        "FP8_PER_CHANNEL_PER_TOKEN",
        "MIXED_PRECISION",
        "NVFP4",
        "NVFP4_AWQ",
        "W4A16_NVFP4",
    }
)
"""What ModelOpt calls what is read here (0.47, torch/export/convert_hf_config.py)."""


class ModelOpt(Fp8):
    """Weights of which there is a `weight_scale_2` are NVFP4: bytes `[out, in/2]`, scales `[out, in/16]`."""

    parts = (".weight_scale_2", ".k_scale", ".v_scale", ".pre_quant_scale", *Fp8.parts)

    def unread(self) -> str | None:
        """A checkpoint of several algorithms says which one each of its linear maps has."""
        layers = self.settings.get("quantized_layers") or {}
        for found in (self.settings, *layers.values()):
            algorithm = str(found.get("quant_algo") or "FP8").upper()
            if algorithm not in ALGORITHMS:
                return f"ModelOpt's {algorithm}"
        return None

    def dequantize(self, parts: Parts) -> Tensor:
        if ".weight_scale_2" not in parts:
            weight = super().dequantize(parts)
        else:
            scale = parts[".weight_scale"].float() * parts[".weight_scale_2"].float()
            weight = scaled(values_of_pairs(parts[".weight"], E2M1), scale)
        smoothed = parts.get(".pre_quant_scale")
        return weight if smoothed is None else weight * smoothed.float()

    def kept_bits(self) -> float:
        return 4 + 8 / 16 if "NVFP4" in str(self.settings).upper() else super().kept_bits()

    def keep(self, parts: Parts, dtype: torch.dtype) -> Packed | None:
        if ".pre_quant_scale" in parts:
            return None
        if ".weight_scale_2" not in parts:
            return super().keep(parts, dtype)
        codes = parts[".weight"]
        factor = parts[".weight_scale_2"].float().reshape(1).expand(len(codes)).contiguous()
        return Nvfp4(codes, parts[".weight_scale"], dtype, factor)
