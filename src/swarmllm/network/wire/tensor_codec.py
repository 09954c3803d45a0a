"""Tensors as raw bytes: exact, and without a copy where the memory layout allows.

Client and server use it for the payload of messages. The message's header has a descriptor of each tensor: `[name,
dtype, shape, num_bytes]`. The payload holds the bytes of the tensors in the same order; each begins at a multiple of
`ALIGNMENT`. Numbers are little-endian, as on every machine that PyTorch runs on today. A compressed tensor
(`wire/compression`) has a dtype like `int8/bfloat16`, and its bytes are those of its four tensors, without gaps.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from swarmllm.errors import LocalProtocolError, RemoteProtocolError
from swarmllm.network.wire.compression import (
    BLOCK,
    COMPRESSIBLE_DTYPES,
    ENCODING,
    CompressedTensor,
    compressed_bytes,
    part_shapes,
)
from swarmllm.network.wire.frames import ByteChunk

MAX_TENSORS = 32
MAX_NAME_LENGTH = 64
MAX_DIMENSIONS = 8
MAX_ELEMENTS = 1 << 40
"""Largest product of the sizes in a shape, so that strides can't overflow. A size of 0 counts as 1, because strides
grow with the other sizes all the same."""
ALIGNMENT = 16
"""Bytes. Vector instructions read aligned tensors fast. The padding costs less than a descriptor."""
DECOMPRESSED_FACTOR = 4
"""Decompressing multiplies the bytes of a tensor by less than this. A value takes more than 1 byte before, and at most
4 bytes (float32) afterwards."""

DTYPES: dict[str, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
    "int64": torch.int64,
    "int32": torch.int32,
    "int16": torch.int16,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "bool": torch.bool,
}
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_COMPRESSED = {f"{ENCODING}/{_DTYPE_NAMES[dtype]}": dtype for dtype in COMPRESSIBLE_DTYPES}
"""Names like `int8/bfloat16`, with the dtype after decompression."""

Descriptor = tuple[str, str, tuple[int, ...], int]
"""(name, dtype, shape, number of bytes) of a tensor in the payload."""


def encode_tensors(tensors: Mapping[str, Tensor | CompressedTensor]) -> tuple[list[Descriptor], list[ByteChunk]]:
    """Encode tensors as descriptors and payload chunks.

    The chunks share the tensors' memory where possible: don't change the tensors before the chunks are sent.

    Raises:
        LocalProtocolError: too many tensors, or a dtype that the format doesn't know.
    """
    if len(tensors) > MAX_TENSORS:
        raise LocalProtocolError(f"{len(tensors)} tensors in one message; at most {MAX_TENSORS} fit")
    descriptors: list[Descriptor] = []
    chunks: list[ByteChunk] = []
    for name, tensor in tensors.items():
        dtype = _DTYPE_NAMES.get(tensor.dtype)
        if dtype is None:
            raise LocalProtocolError(f"tensors of {tensor.dtype} can't be sent")
        parts: tuple[Tensor, ...] = (tensor,) if isinstance(tensor, Tensor) else tensor.parts
        num_bytes = sum(part.nbytes for part in parts)
        encoding = "" if isinstance(tensor, Tensor) else f"{ENCODING}/"
        descriptors.append((name, encoding + dtype, tuple(tensor.shape), num_bytes))
        if num_bytes:
            chunks.extend(map(_bytes_of, parts))
            if padding := -num_bytes % ALIGNMENT:
                chunks.append(bytes(padding))
    return descriptors, chunks


def _bytes_of(tensor: Tensor) -> memoryview:
    """The tensor's memory, copied only if it isn't contiguous or isn't on the CPU."""
    if tensor.device.type != "cpu" or tensor.requires_grad:
        tensor = tensor.detach().cpu()
    if not tensor.is_contiguous():
        tensor = tensor.contiguous()
    if tensor.dtype is torch.bfloat16:  # numpy has no bfloat16
        tensor = tensor.view(torch.int16)
    return memoryview(tensor.numpy()).cast("B")  # type: ignore[arg-type]  # numpy's stubs lack __buffer__ here


def decode_tensors(
    descriptors: Sequence[Any], payload: ByteChunk, *, max_bytes: int, peer_id: str | None = None
) -> dict[str, Tensor]:
    """Decode what `encode_tensors` encoded. The tensors share the payload's memory if it is writable.

    `max_bytes` limits the payload. `peer_id` is the sender, for the error.

    Raises:
        RemoteProtocolError: descriptors and payload disagree, or are too large.
    """
    try:
        if len(payload) > max_bytes:
            raise RemoteProtocolError(f"{len(payload)} bytes are over the cap of {max_bytes}")
        if not isinstance(descriptors, (list, tuple)) or len(descriptors) > MAX_TENSORS:
            raise RemoteProtocolError(f"the descriptors are not a list of at most {MAX_TENSORS} tensors")
        layout: dict[str, _Place] = {}
        end = 0
        for descriptor in descriptors:
            place = _checked(descriptor, end)
            if place.name in layout:
                raise RemoteProtocolError(f"the name {place.name!r} comes twice")
            layout[place.name] = place
            end = place.start + place.num_bytes + -place.num_bytes % ALIGNMENT
        if end != len(payload):
            raise RemoteProtocolError(f"the descriptors describe {end} bytes, {len(payload)} came")
        buffer = bytearray(payload) if memoryview(payload).readonly else payload
        return {name: place.tensor(buffer) for name, place in layout.items()}
    except RemoteProtocolError as error:
        raise RemoteProtocolError(f"tensors can't be decoded: {error}", peer_id) from None


class _Place(NamedTuple):
    """The position of a tensor in the payload, and how to read it; made from a checked descriptor."""

    name: str
    dtype: torch.dtype
    is_compressed: bool
    shape: tuple[int, ...]
    start: int
    num_bytes: int

    def tensor(self, buffer: Any) -> Tensor:
        """Read the tensor from `buffer`, the whole payload. It shares the buffer's memory where possible."""
        if self.is_compressed:
            return self._compressed(buffer).decompress()
        if self.num_bytes == 0:
            return torch.empty(self.shape, dtype=self.dtype)
        if self.dtype == torch.bool:  # any byte may come, but only 0 and 1 are valid bools
            values = torch.frombuffer(buffer, dtype=torch.uint8, count=self.num_bytes, offset=self.start)
            return values.ne(0).view(self.shape)
        count = self.num_bytes // self.dtype.itemsize
        return torch.frombuffer(buffer, dtype=self.dtype, count=count, offset=self.start).view(self.shape)

    def _compressed(self, buffer: Any) -> CompressedTensor:
        rows, width, blocks = part_shapes(self.shape)
        parts: list[Tensor] = []
        start = self.start
        for dtype, columns in ((self.dtype, blocks), (torch.int8, width), (torch.int8, blocks), (torch.uint8, blocks)):
            count = rows * columns
            parts.append(torch.frombuffer(buffer, dtype=dtype, count=count, offset=start).view(rows, columns))
            start += count * dtype.itemsize
        outliers, codes, exponents, places = parts
        if int(places.max()) >= BLOCK:
            raise RemoteProtocolError(f"{self.name!r} has outliers that lie in no block of {BLOCK} values")
        return CompressedTensor(self.dtype, self.shape, outliers, codes, exponents, places)


def _checked(descriptor: Any, start: int) -> _Place:
    """Check a descriptor and return the place of its tensor. `start`: where the tensor's bytes begin in the payload.

    Raises:
        RemoteProtocolError: the descriptor is invalid.
    """
    if not isinstance(descriptor, (list, tuple)) or len(descriptor) != 4:
        raise RemoteProtocolError("a descriptor is not [name, dtype, shape, num_bytes]")
    name, dtype_name, shape, num_bytes = descriptor
    if not isinstance(name, str) or len(name) > MAX_NAME_LENGTH:
        raise RemoteProtocolError(f"a name is not text of at most {MAX_NAME_LENGTH} characters")
    dtype = (DTYPES.get(dtype_name) or _COMPRESSED.get(dtype_name)) if isinstance(dtype_name, str) else None
    if dtype is None:
        raise RemoteProtocolError(f"{name!r} has an unknown dtype")
    if not isinstance(shape, (list, tuple)) or len(shape) > MAX_DIMENSIONS:
        raise RemoteProtocolError(f"the shape of {name!r} is not a list of at most {MAX_DIMENSIONS} sizes")
    extent = num_elements = 1
    for size in shape:
        if type(size) is not int or size < 0:
            raise RemoteProtocolError(f"the shape of {name!r} has a size that is not a whole number")
        extent *= max(size, 1)
        num_elements *= size
        if extent > MAX_ELEMENTS:
            raise RemoteProtocolError(f"{name!r} is too large")
    is_compressed = dtype_name in _COMPRESSED
    if is_compressed and not (shape and num_elements):
        raise RemoteProtocolError(f"{name!r} is compressed, but its shape leaves nothing to compress")
    expected = compressed_bytes(tuple(shape), dtype) if is_compressed else num_elements * dtype.itemsize
    if type(num_bytes) is not int or num_bytes != expected:
        raise RemoteProtocolError(f"the size of {name!r} doesn't fit its shape")
    return _Place(name, dtype, is_compressed, tuple(shape), start, num_bytes)


def decompressed_bytes(descriptors: Any, num_payload_bytes: int) -> int:
    """Bytes of memory that `decode_tensors` takes besides the payload, for tensors that can't share its memory.

    The descriptors needn't be valid: the result is between 0 and `DECOMPRESSED_FACTOR` times the payload.
    """
    num_bytes = 0
    for descriptor in descriptors if isinstance(descriptors, (list, tuple)) else ():
        match descriptor:
            case (str(), "bool", _, int(size)):
                num_bytes += size
            case (str(), str(dtype), _, int(size)) if dtype in _COMPRESSED:
                num_bytes += DECOMPRESSED_FACTOR * size
    return max(0, min(num_bytes, DECOMPRESSED_FACTOR * num_payload_bytes))
