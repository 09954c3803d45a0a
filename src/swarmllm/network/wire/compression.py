"""Compress hidden states and gradients to about half their bytes: 8 bits a value, outliers apart.

The values of a token are cut into blocks of 64. A block has one step, a power of two. Its values are whole multiples of
the step from -127 to 127. In language models a few channels are some dozen times as large as the rest (Dettmers et al.
2022, LLM.int8, section 3), and the largest value would set the step for all. So the step follows the second largest
value. If the largest needs a coarser step, it is sent separately, unchanged. The microscaling formats share powers of
two in the same way (Rouhani et al. 2023).

    bytes per block of 64   64 codes, exponent, place, a value of its dtype: 68 of 128 (bfloat16), 70 of 256 (float32)
    error of a value        at most 1/127 of the second largest of its block; none for a largest sent separately

Such multiples are exact in bfloat16 and float16 as well, so rounding twice is the same as rounding once: decompressed
values can be compressed again without a change. So only the server that computes hidden states rounds them, and it
keeps them as its successor receives them. Replays and relays send the same numbers, compressed or not.

Used by all senders of tensors, and by `wire/tensor_codec`, which defines the bytes of compressed tensors.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from swarmllm.network.wire.liveness import MEASURED_BYTES
from swarmllm.network.wire.stream import FrameStream

BLOCK = 64
"""Values that share a step. Measured in benchmarks/compression: 128 saves 3 % of the bytes at 7 to 39 % more error."""
ENCODING = "int8"
"""Name of the encoding in greetings, settings and descriptors."""
COMPRESSIBLE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
COMPRESSIBLE = frozenset(("hidden_states", "inputs_embeds", "grad_outputs"))
"""Tensors with a vector per token. Masks and positions must be exact, adapters are small."""
AUTO_BELOW_MBPS = 150.0
"""Connections slower than this are compressed by "auto". Measured: both ways take 5 ns a value, as long as the saved
bytes take at 1.5 Gbit/s. This limit is far below, so that a busy machine isn't taken for a slow connection."""
THREAD_BYTES = 1 << 20
"""Messages from this size on are compressed in a thread: about 3 ms would block the event loop too long."""

_MAX_CODE = 127


@dataclass(frozen=True, eq=False, slots=True)
class CompressedTensor:
    """A tensor of `[…, width]` as rows of blocks; see `compress`."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    beside: Tensor
    """`[rows, blocks]` of `dtype`: the largest value of each block."""
    codes: Tensor
    """`[rows, width]` of int8."""
    exponents: Tensor
    """`[rows, blocks]` of int8: the step is 2 to this power."""
    places: Tensor
    """`[rows, blocks]` of uint8: position of the largest value in its block."""

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """The four tensors in the order in which they are sent."""
        return self.beside, self.codes, self.exponents, self.places

    def decompress(self) -> Tensor:
        """Restore the (rounded) tensor."""
        rows, width = self.codes.shape
        codes = F.pad(self.codes, (0, -width % BLOCK)) if width % BLOCK else self.codes
        steps = _power_of_two(self.exponents).to(self.dtype)
        values = codes.view(rows, -1, BLOCK).to(self.dtype).mul_(steps[..., None])
        limit = torch.finfo(self.dtype).max
        values.clamp_(-limit, limit)  # the largest number of a dtype is rounded up
        values.scatter_(-1, self.places[..., None].long(), self.beside[..., None])
        return values.view(rows, -1)[:, :width].reshape(self.shape)


def part_shapes(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """(rows, width, blocks per row) of a tensor of this shape, which has at least one axis and no empty one."""
    width, num_elements = shape[-1], torch.Size(shape).numel()
    return num_elements // width, width, -(-width // BLOCK)


def compressed_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Bytes of a compressed tensor."""
    rows, width, blocks = part_shapes(shape)
    return rows * (width + blocks * (2 + dtype.itemsize))


def compress(tensor: Tensor) -> CompressedTensor | None:
    """Compress to 8 bits a value. None if that is impossible: an empty tensor, another dtype, or values that aren't
    finite."""
    if tensor.dtype not in COMPRESSIBLE_DTYPES or not tensor.dim() or not tensor.numel():
        return None
    rows, width, blocks = part_shapes(tuple(tensor.shape))
    values = tensor.detach().reshape(rows, width).float()
    if width % BLOCK:
        values = F.pad(values, (0, -width % BLOCK))
    values = values.view(rows, blocks, BLOCK)
    magnitudes = values.abs()
    largest, places = magnitudes.max(dim=-1)
    if not bool(largest.isfinite().all()):
        return None
    second = magnitudes.scatter_(-1, places[..., None], 0.0).amax(dim=-1)
    exponents = _exponents(second, tensor.dtype)
    stands_beside = exponents < _exponents(largest, tensor.dtype)
    codes = torch.mul(values, _power_of_two(-exponents)[..., None], out=magnitudes)
    codes = codes.round_().clamp_(-_MAX_CODE, _MAX_CODE).to(torch.int8)
    small = CompressedTensor(
        dtype=tensor.dtype,
        shape=tuple(tensor.shape),
        beside=values.gather(-1, places[..., None])[..., 0].to(tensor.dtype),
        codes=codes.view(rows, -1)[:, :width],
        exponents=exponents.to(torch.int8),
        places=places.to(torch.uint8),
    )
    return small if bool(stands_beside.all()) else _with_rounded(small, codes, stands_beside)


def _with_rounded(small: CompressedTensor, codes: Tensor, stands_beside: Tensor) -> CompressedTensor:
    """Round the largest value like the others if it needs no coarser step. Otherwise rounding twice would change it."""
    code = codes.gather(-1, small.places[..., None].long())[..., 0]
    rounded = code.float() * _power_of_two(small.exponents)
    limit = torch.finfo(small.dtype).max
    beside = torch.where(stands_beside, small.beside, rounded.clamp(-limit, limit).to(small.dtype))
    return CompressedTensor(small.dtype, small.shape, beside, small.codes, small.exponents, small.places)


def _exponents(largest: Tensor, dtype: torch.dtype) -> Tensor:
    """The smallest powers of two whose 127-fold is at least `largest` and whose multiples `dtype` can hold."""
    lowest = -24 if dtype is torch.float16 else -126
    mantissas, exponents = torch.frexp(largest)
    exponents = exponents - 7 + (mantissas > _MAX_CODE / 128)
    return torch.where(largest > 0, exponents, lowest).clamp_(min=lowest)


def _power_of_two(exponents: Tensor) -> Tensor:
    """2 to these powers, exactly, as float32; 2 to the power of -126 for smaller ones."""
    return (exponents.int().clamp(min=-126) + 127 << 23).view(torch.float32)


# ---------------------------------------------------------------------- when to compress

Outgoing = dict[str, Tensor | CompressedTensor]
"""Tensors of a message by name."""


def pays(setting: str, num_bytes: int, mbps: float | None) -> bool:
    """True if a message of `num_bytes` over a connection of `mbps` (None: not measured) is worth compressing.

    Unknown settings, of newer peers, compress nothing.
    """
    if setting == "auto":
        return mbps is not None and mbps < AUTO_BELOW_MBPS and num_bytes >= MEASURED_BYTES
    return setting == ENCODING


async def compressed(
    tensors: Mapping[str, Tensor], stream: FrameStream, setting: str, *, exactly: bool = False
) -> Outgoing:
    """Compress tensors for sending, if the peer supports it and it pays. `exactly`: only where that changes nothing.

    A sender that keeps what it sends must keep `as_received` of the result.
    """
    num_bytes = sum(tensor.nbytes for name, tensor in tensors.items() if name in COMPRESSIBLE)
    if ENCODING not in stream.encodings or not pays(setting, num_bytes, stream.link_rate.mbps):
        return dict(tensors)
    if num_bytes < THREAD_BYTES:
        return _compress_all(tensors, exactly)
    return await asyncio.to_thread(_compress_all, tensors, exactly)


def _compress_all(tensors: Mapping[str, Tensor], exactly: bool) -> Outgoing:
    outgoing: Outgoing = dict(tensors)
    for name in COMPRESSIBLE & tensors.keys():
        small = compress(tensors[name])
        if small is not None and not (exactly and not torch.equal(small.decompress(), tensors[name])):
            outgoing[name] = small
    return outgoing


def as_received(tensors: Mapping[str, Tensor | CompressedTensor]) -> dict[str, Tensor]:
    """The tensors as the receiver will see them."""
    return {
        name: tensor.decompress() if isinstance(tensor, CompressedTensor) else tensor
        for name, tensor in tensors.items()
    }
