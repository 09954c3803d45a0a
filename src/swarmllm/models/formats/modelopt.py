"""NVIDIA's ModelOpt: FP8 with a scale per tensor, NVFP4 with 8-bit scales per 16 and one of the tensor."""

import torch
from torch import Tensor

from swarmllm.models.formats.fp8 import Fp8
from swarmllm.models.formats.stored_format import Parts
from swarmllm.models.quantization.codes import E2M1, scaled, values_of_pairs
from swarmllm.models.quantization.packed import Packed
from swarmllm.models.quantization.published import Nvfp4


class ModelOpt(Fp8):
    """Weights of which there is a `weight_scale_2` are NVFP4: bytes `[out, in/2]`, scales `[out, in/16]`."""

    parts = (".weight_scale_2", ".k_scale", ".v_scale", ".pre_quant_scale", *Fp8.parts)

    def dequantize(self, parts: Parts) -> Tensor:
        if ".weight_scale_2" not in parts:
            return super().dequantize(parts)
        scale = parts[".weight_scale"].float() * parts[".weight_scale_2"].float()
        return scaled(values_of_pairs(parts[".weight"], E2M1), scale)

    def kept_bits(self) -> float:
        return 4 + 8 / 16 if "NVFP4" in str(self.settings).upper() else super().kept_bits()

    def keep(self, parts: Parts, dtype: torch.dtype) -> Packed | None:
        if ".weight_scale_2" not in parts:
            return super().keep(parts, dtype)
        codes = parts[".weight"]
        factor = parts[".weight_scale_2"].float().reshape(1).expand(len(codes)).contiguous()
        return Nvfp4(codes, parts[".weight_scale"], dtype, factor)
