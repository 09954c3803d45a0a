"""AWQ: 4 bits in words of 8 along the outputs, in an order of its own; a scale and a zero per group of inputs."""

import torch
from torch import Tensor

from swarmllm.models.published_formats.stored_format import Parts, StoredFormat
from swarmllm.models.quantization.codes import pairs, scaled, words
from swarmllm.models.quantization.packed import Packed
from swarmllm.models.quantization.published import Uint4

ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where the neighbours are in a word."""


class Awq(StoredFormat):
    """qweight `[in, out/8]`, qzeros `[groups, out/8]`, scales `[groups, out]`."""

    parts = (".qweight", ".qzeros", ".scales")
    main = (".qweight",)

    def unread(self) -> str | None:
        bits, version = self.settings.get("bits", 4), self.settings.get("version", "gemm")
        return None if bits == 4 and version.lower() == "gemm" else f"AWQ of version {version!r} with {bits} bits"

    def dequantize(self, parts: Parts) -> Tensor:
        return scaled(*_unpacked(parts))

    def keep(self, parts: Parts, dtype: torch.dtype) -> Packed:
        codes, scale, zero = _unpacked(parts)
        return Uint4(pairs(codes), scale, dtype, zero.to(torch.uint8))

    def kept_bits(self) -> float:
        return 4 + (16 + 8) / float(self.settings.get("group_size", 128))


def _unpacked(parts: Parts) -> tuple[Tensor, Tensor, Tensor]:
    """Codes `[out, in]`, scales and zeros `[out, groups]`."""

    def codes(packed: Tensor) -> Tensor:
        neighbours = words(packed, 4, 1).view(len(packed), -1, 8)[..., ORDER]
        return neighbours.flatten(-2).T.contiguous()

    return codes(parts[".qweight"]), parts[".scales"].T.contiguous(), codes(parts[".qzeros"])
