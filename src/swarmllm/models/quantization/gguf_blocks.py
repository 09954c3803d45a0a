"""Packed weights as GGUF files hold them: blocks of 32 or 256 neighbours of a row, each with its own scales.

They stay as they are on disk, byte for byte. Few inputs multiply by `gguf_blocks.h`, which has the kinds in `KERNELS`;
the other kinds, which are rare, and those on CUDA are dequantized by torch. But for CUDA, Q4_0 and Q8_0 become codes
and scales, the same numbers in as many bytes. Made by `models/published_formats/gguf`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor
from transformers.integrations.gguf import dequant

from swarmllm.models.quantization import kernels
from swarmllm.models.quantization.codes import pairs
from swarmllm.models.quantization.decoded import Decoded
from swarmllm.models.quantization.packed import Packed
from swarmllm.models.quantization.published import Int4, Published

WHOLE = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}
"""Kinds of tensors that hold numbers, as `enum ggml_type` counts them."""


def _q5(blocks: Tensor, start: int) -> Tensor:
    """Codes of 5 bits `[blocks, 32]`: the fifth ones in 4 bytes, then the others."""
    high = (blocks[:, start : start + 4, None] >> torch.arange(8, dtype=torch.uint8, device=blocks.device)) & 1
    low = blocks[:, start + 4 :]
    return torch.cat([low & 15, low >> 4], 1) | (high.flatten(1) << 4)


def _q5_0(blocks: Tensor) -> Tensor:
    return blocks[:, :2].view(torch.float16).float() * (_q5(blocks, 2).float() - 16)


def _q5_1(blocks: Tensor) -> Tensor:
    scale, minimum = (blocks[:, at : at + 2].view(torch.float16).float() for at in (0, 2))
    return scale * _q5(blocks, 4).float() + minimum


_OWN: dict[int, tuple[str, int, int, Callable[[Tensor], Tensor]]] = {
    6: ("Q5_0", 32, 22, _q5_0),
    7: ("Q5_1", 32, 24, _q5_1),
}
"""Kinds that transformers lacks: number → (name, weights of a block, its bytes, what they are)."""
KINDS: dict[int, tuple[str, int, int]] = {
    **{number: (dequant.GGML_NAME[number], *sizes) for number, sizes in dequant.GGML_BLOCK.items()},
    **{number: own[:3] for number, own in _OWN.items()},
}
"""Number of a kind → (its name, weights of a block, its bytes)."""
Q4_0, Q8_0 = 2, 8
KERNELS = frozenset({2, 3, 6, 7, 8, 10, 11, 12, 13, 14, 20, 23})
"""Kinds that `gguf_blocks.h` knows: Q4_0 to Q8_0, Q2_K to Q6_K, IQ4_NL and IQ4_XS."""


def dequantize(kind: int, codes: Tensor) -> Tensor:
    """Bytes of whole blocks `[…, bytes]` → weights `[…, in]` in float32, bit for bit those of package gguf."""
    _, _, size = KINDS[kind]
    blocks = codes.reshape(-1, size)
    weights: Tensor = _OWN[kind][3](blocks) if kind in _OWN else dequant.dequantize(blocks, kind, torch.float32)
    return weights.reshape(*codes.shape[:-1], -1)


@dataclass(frozen=True, eq=False)
class GgufBlocks(Decoded):
    """Codes `[…, out, bytes of a row]`, uint8, with everything that belongs to them."""

    kind: ClassVar[int]
    scale: None = field(init=False, default=None)  # type: ignore[assignment]

    @property
    def shape(self) -> torch.Size:
        _, weights, size = KINDS[self.kind]
        return torch.Size((*self.codes.shape[:-1], self.codes.shape[-1] // size * weights))

    def tensors(self) -> dict[str, Tensor]:
        return {"codes": self.codes}

    def for_device(self, device: torch.device) -> Packed:
        if device.type != "cuda" or self.kind not in (Q4_0, Q8_0):
            return self
        size = KINDS[self.kind][2]
        blocks = self.codes.view(*self.codes.shape[:-1], -1, size)
        scale, codes = blocks[..., :2].contiguous().view(torch.float16).squeeze(-1), blocks[..., 2:]
        if self.kind == Q8_0:
            return Published(codes.contiguous().view(torch.int8).flatten(-2), scale, self.dtype)
        # Of a block's 32 weights, the first half lies below.
        return Int4(pairs(torch.cat([codes & 15, codes >> 4], -1).flatten(-2)), scale, self.dtype)

    @property
    def _in_kernels(self) -> bool:
        return self.kind in KERNELS

    def _decoded(self, rows: dict[str, Tensor]) -> Tensor:
        return dequantize(self.kind, rows["codes"])

    def _matrix(self) -> kernels.Matrix:
        return kernels.Matrix(self.codes, gguf=(self.kind, self.shape[1]))


FORMS: dict[int, type[GgufBlocks]] = {
    number: type(f"Gguf{name}", (GgufBlocks,), {"kind": number, "__module__": __name__})
    for number, (name, *_) in KINDS.items()
}
"""A class for each kind, so that only weights of one kind are joined."""
