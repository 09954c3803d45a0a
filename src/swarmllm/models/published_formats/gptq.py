"""GPTQ: 2, 4 or 8 bits in words along the inputs; a scale and a zero per group of inputs."""

import torch
from torch import Tensor

from swarmllm.models.published_formats.stored_format import Parts, StoredFormat
from swarmllm.models.quantization.codes import pairs, words
from swarmllm.models.quantization.packed import Packed
from swarmllm.models.quantization.published import Uint4, ZeroedBytes


class Gptq(StoredFormat):
    """qweight `[in·bits/32, out]`, qzeros `[groups, out·bits/32]`, scales `[groups, out]`, g_idx `[in]`.

    Format 1 stores zeros less 1. g_idx says which group an input belongs to: neighbours are together unless the
    checkpoint was made with `desc_act`.
    """

    parts = (".qweight", ".qzeros", ".scales", ".g_idx")
    main = (".qweight",)

    def unread(self) -> str | None:
        bits = self.settings.get("bits")
        return None if bits in (2, 4, 8) else f"GPTQ with {bits} bits"

    def dequantize(self, parts: Parts) -> Tensor:
        codes, scale, zero = self._unpacked(parts)
        group = self._groups(parts, codes.shape[1], scale.shape[1])
        return (codes - zero[:, group]).float() * scale.float()[:, group]

    def keep(self, parts: Parts, dtype: torch.dtype) -> Packed | None:
        codes, scale, zero = self._unpacked(parts)
        num_inputs, num_groups = codes.shape[1], scale.shape[1]
        in_order = torch.arange(num_inputs) * num_groups // num_inputs
        if not torch.equal(self._groups(parts, num_inputs, num_groups), in_order):
            return None
        if self.settings["bits"] == 8:
            return ZeroedBytes(codes.to(torch.uint8), scale, dtype, zero.bfloat16())
        return Uint4(pairs(codes), scale, dtype, zero.to(torch.uint8))

    def kept_bits(self) -> float | None:
        """The codes of 2 bits are kept in 4."""
        if self.settings.get("desc_act"):
            return None
        codes, zero = (8, 16) if self.settings["bits"] == 8 else (4, 8)
        group = self.settings.get("group_size", 128)
        return codes + (16 + zero) / group if group > 0 else float(codes)

    def _unpacked(self, parts: Parts) -> tuple[Tensor, Tensor, Tensor]:
        """Codes `[out, in]`, scales and zeros `[out, groups]`."""
        bits: int = self.settings["bits"]
        codes, scale = words(parts[".qweight"], bits, 0), parts[".scales"]
        zero = words(parts[".qzeros"], bits, 1)[:, : scale.shape[1]]
        if self.settings.get("checkpoint_format", "gptq") != "gptq_v2":
            zero = (zero + 1) & ((1 << bits) - 1)
        return codes.T.contiguous(), scale.T.contiguous(), zero.T.contiguous()

    def _groups(self, parts: Parts, num_inputs: int, num_groups: int) -> Tensor:
        """Which group each input belongs to."""
        if ".g_idx" in parts:
            return parts[".g_idx"].long()
        return torch.arange(num_inputs) * num_groups // num_inputs
