"""Tensors as raw bytes: exact, and without a copy where the memory layout allows.

Called by client and server for the payload of a message. Each tensor is described by `[name, dtype, shape, num_bytes]`
in the message's header; their bytes follow one another in the payload, each begun at a multiple of `ALIGNMENT`.
Numbers are little-endian, as on every machine that PyTorch runs on today. A tensor that was packed
(`network/compression`) has a dtype like `int8/bfloat16`, and its four parts follow one another.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from swarmllm.errors import LocalProtocolError, RemoteProtocolError
from swarmllm.network.compression import BLOCK, ENCODING, PACKABLE, PackedTensor, packed_bytes, part_shapes
from swarmllm.network.frames import ByteChunk

MAX_TENSORS = 32
MAX_NAME_LENGTH = 64
MAX_DIMENSIONS = 8
MAX_ELEMENTS = 1 << 40
"""Bounds the product of the dimensions even where one of them is 0, so that strides can't overflow."""
ALIGNMENT = 16
"""Bytes; vector instructions like it, and the padding is never more than a descriptor costs."""
UNPACKED_FACTOR = 4
"""A packed tensor of the widest type becomes at most so many times as large: a byte a value, and some beside."""

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
_PACKED = {f"{ENCODING}/{_DTYPE_NAMES[dtype]}": dtype for dtype in PACKABLE}

Descriptor = tuple[str, str, tuple[int, ...], int]


def encode_tensors(tensors: Mapping[str, Tensor | PackedTensor]) -> tuple[list[Descriptor], list[ByteChunk]]:
    """Descriptors for the header, and the payload in chunks that share the tensors' memory: send before changing them.

    Raises:
        LocalProtocolError: more tensors, or another dtype, than the format knows.
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
        packed = "" if isinstance(tensor, Tensor) else f"{ENCODING}/"
        descriptors.append((name, packed + dtype, tuple(tensor.shape), num_bytes))
        if num_bytes:
            chunks.extend(map(_bytes_of, parts))
            if padding := -num_bytes % ALIGNMENT:
                chunks.append(bytes(padding))
    return descriptors, chunks


def _bytes_of(tensor: Tensor) -> memoryview:
    """The tensor's memory, copied only if it is not contiguous or not the CPU's."""
    if tensor.device.type != "cpu" or tensor.requires_grad:
        tensor = tensor.detach().cpu()
    if not tensor.is_contiguous():
        tensor = tensor.contiguous()
    if tensor.dtype is torch.bfloat16:  # numpy has none
        tensor = tensor.view(torch.int16)
    return memoryview(tensor.numpy()).cast("B")  # type: ignore[arg-type]  # numpy's stubs lack __buffer__ here


def decode_tensors(
    descriptors: Sequence[Any], payload: ByteChunk, *, max_bytes: int, peer_id: str | None = None
) -> dict[str, Tensor]:
    """The inverse of `encode_tensors`. The tensors share the payload's memory if it is writable.

    Raises:
        RemoteProtocolError: descriptors and payload disagree, or are over a cap.
    """

    def refuse(reason: str) -> RemoteProtocolError:
        return RemoteProtocolError(f"tensors can't be decoded: {reason}", peer_id)

    if len(payload) > max_bytes:
        raise refuse(f"{len(payload)} bytes are over the cap of {max_bytes}")
    if not isinstance(descriptors, (list, tuple)) or len(descriptors) > MAX_TENSORS:
        raise refuse(f"more than {MAX_TENSORS} descriptors, or none that can be read")
    layout: dict[str, tuple[torch.dtype, bool, tuple[int, ...], int, int]] = {}
    offset = 0
    for descriptor in descriptors:
        if not isinstance(descriptor, (list, tuple)) or len(descriptor) != 4:
            raise refuse("a descriptor is not [name, dtype, shape, num_bytes]")
        name, dtype_name, shape, num_bytes = descriptor
        if not isinstance(name, str) or len(name) > MAX_NAME_LENGTH or name in layout:
            raise refuse("a name is too long or comes twice")
        dtype = (DTYPES.get(dtype_name) or _PACKED.get(dtype_name)) if isinstance(dtype_name, str) else None
        if dtype is None:
            raise refuse(f"{name!r} has an unknown dtype")
        if not isinstance(shape, (list, tuple)) or len(shape) > MAX_DIMENSIONS:
            raise refuse(f"the shape of {name!r} is not a list of at most {MAX_DIMENSIONS} sizes")
        extent = num_elements = 1
        for size in shape:
            if type(size) is not int or size < 0:
                raise refuse(f"the shape of {name!r} has a size that is no count")
            extent *= max(size, 1)
            num_elements *= size
            if extent > MAX_ELEMENTS:
                raise refuse(f"{name!r} is too large")
        packed = dtype_name in _PACKED
        if packed and (not shape or not num_elements):
            raise refuse(f"{name!r} is packed, and there is nothing to pack in its shape")
        expected = packed_bytes(tuple(shape), dtype) if packed else num_elements * dtype.itemsize
        if type(num_bytes) is not int or num_bytes != expected:
            raise refuse(f"the size of {name!r} doesn't fit its shape")
        layout[name] = (dtype, packed, tuple(shape), offset, num_bytes)
        offset += num_bytes + -num_bytes % ALIGNMENT
    if offset != len(payload):
        raise refuse(f"the descriptors name {offset} bytes, {len(payload)} came")

    buffer = bytearray(payload) if memoryview(payload).readonly else payload
    tensors: dict[str, Tensor] = {}
    for name, (dtype, packed, shape, start, num_bytes) in layout.items():
        if packed:
            found = _packed_tensor(buffer, start, dtype, shape)
            if found is None:
                raise refuse(f"{name!r} has values beside that belong to no block")
            tensors[name] = found.unpack()
        elif num_bytes == 0:
            tensors[name] = torch.empty(shape, dtype=dtype)
        elif dtype == torch.bool:  # any byte may come, but only 0 and 1 are defined as bool
            tensors[name] = torch.frombuffer(buffer, dtype=torch.uint8, count=num_bytes, offset=start).ne(0).view(shape)
        else:
            count = num_bytes // dtype.itemsize
            tensors[name] = torch.frombuffer(buffer, dtype=dtype, count=count, offset=start).view(shape)
    return tensors


def unpacked_bytes(descriptors: Any, num_payload_bytes: int) -> int:
    """What `decode_tensors` takes beside a payload of that size: for tensors that don't share its memory.

    Of descriptors that it would refuse, some number that is no larger than for any that it takes.
    """
    num_bytes = 0
    for descriptor in descriptors if isinstance(descriptors, (list, tuple)) else ():
        match descriptor:
            case (str(), "bool", _, int(size)):
                num_bytes += size
            case (str(), str(dtype), _, int(size)) if dtype in _PACKED:
                num_bytes += UNPACKED_FACTOR * size
    return max(0, min(num_bytes, UNPACKED_FACTOR * num_payload_bytes))


def _packed_tensor(buffer: Any, start: int, dtype: torch.dtype, shape: tuple[int, ...]) -> PackedTensor | None:
    """The packed tensor whose bytes begin at `start`; None if its places are not within their blocks."""
    rows, width, blocks = part_shapes(shape)
    parts: list[Tensor] = []
    for of_part, columns in ((dtype, blocks), (torch.int8, width), (torch.int8, blocks), (torch.uint8, blocks)):
        count = rows * columns
        parts.append(torch.frombuffer(buffer, dtype=of_part, count=count, offset=start).view(rows, columns))
        start += count * of_part.itemsize
    beside, codes, exponents, places = parts
    return None if int(places.max()) >= BLOCK else PackedTensor(dtype, shape, beside, codes, exponents, places)
