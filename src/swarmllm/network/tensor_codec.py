"""Tensors as raw bytes: exact, and without a copy where the memory layout allows.

Called by client and server for the payload of a message. Each tensor is described by `[name, dtype, shape, num_bytes]`
in the message's header; their bytes follow one another in the payload, each begun at a multiple of `ALIGNMENT`.
Numbers are little-endian, as on every machine that PyTorch runs on today.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from swarmllm.errors import LocalProtocolError, RemoteProtocolError
from swarmllm.network.frames import ByteChunk

MAX_TENSORS = 32
MAX_NAME_LENGTH = 64
MAX_DIMENSIONS = 8
MAX_ELEMENTS = 1 << 40
"""Bounds the product of the dimensions even where one of them is 0, so that strides can't overflow."""
ALIGNMENT = 16
"""Bytes; vector instructions like it, and the padding is never more than a descriptor costs."""

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

Descriptor = tuple[str, str, tuple[int, ...], int]


def encode_tensors(tensors: Mapping[str, Tensor]) -> tuple[list[Descriptor], list[ByteChunk]]:
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
        num_bytes = tensor.numel() * tensor.element_size()
        descriptors.append((name, dtype, tuple(tensor.shape), num_bytes))
        if num_bytes:
            chunks.append(_bytes_of(tensor))
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
    layout: dict[str, tuple[torch.dtype, tuple[int, ...], int, int]] = {}
    offset = 0
    for descriptor in descriptors:
        if not isinstance(descriptor, (list, tuple)) or len(descriptor) != 4:
            raise refuse("a descriptor is not [name, dtype, shape, num_bytes]")
        name, dtype_name, shape, num_bytes = descriptor
        if not isinstance(name, str) or len(name) > MAX_NAME_LENGTH or name in layout:
            raise refuse("a name is too long or comes twice")
        dtype = DTYPES.get(dtype_name) if isinstance(dtype_name, str) else None
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
        if type(num_bytes) is not int or num_bytes != num_elements * dtype.itemsize:
            raise refuse(f"the size of {name!r} doesn't fit its shape")
        layout[name] = (dtype, tuple(shape), offset, num_bytes)
        offset += num_bytes + -num_bytes % ALIGNMENT
    if offset != len(payload):
        raise refuse(f"the descriptors name {offset} bytes, {len(payload)} came")

    buffer = bytearray(payload) if memoryview(payload).readonly else payload
    tensors: dict[str, Tensor] = {}
    for name, (dtype, shape, start, num_bytes) in layout.items():
        if num_bytes == 0:
            tensors[name] = torch.empty(shape, dtype=dtype)
        elif dtype == torch.bool:  # any byte may come, but only 0 and 1 are defined as bool
            tensors[name] = torch.frombuffer(buffer, dtype=torch.uint8, count=num_bytes, offset=start).ne(0).view(shape)
        else:
            count = num_bytes // dtype.itemsize
            tensors[name] = torch.frombuffer(buffer, dtype=dtype, count=count, offset=start).view(shape)
    return tensors
