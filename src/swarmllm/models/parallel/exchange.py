"""The protocol between the server's process and its followers: messages, and weights as they are.

A `Link` passes objects over a socket: first the pickled object, then the bytes of its tensors. Between GPUs, tensors
pass through a process group of torch (nccl, which has never run). The other end is a process of this server, so pickle
is safe. Measured under load 7: 16 KB there and back take 13 µs; torch's gloo, which has threads of its own, 4 ms.

`Plain` is a weight as it is. `shared` makes it; the server's process and followers multiply by it.
"""

import io
import pickle
import socket
import struct
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import distributed_c10d

from swarmllm.models.quantization.decoded import FORMS, STRIPS, GgufBlocks, GgufStrips
from swarmllm.models.quantization.packed import Packed

TIMEOUT_S = 30.0
"""Most seconds for one tensor to pass. Assumed: all compute equally long, so a process this late is frozen or gone."""
BUFFER_BYTES = 1 << 20
"""Size of a socket's buffers: with large ones, a sender waits less often. Systems may give less than this."""
MUTUAL_BYTES = 32 << 10
"""Two processes send each other at most this much at the same time: it has to fit into a socket's buffer."""
_LENGTH = struct.Struct("<Q")


class SharedPart(NamedTuple):
    """A matrix, or one of its experts."""

    number: int
    expert: int | None = None


class Keep(NamedTuple):
    """Keep a part of a matrix, or of each matrix of a stack of experts."""

    number: int
    packed: Packed
    bias: Tensor | None
    columns: tuple[int, int] | None
    """These columns of the whole matrix; None: some rows."""


class Multiply(NamedTuple):
    """Multiply the same inputs by each of these matrices; the answer is a tuple of tensors."""

    parts: tuple[SharedPart, ...]
    inputs: Tensor | None
    """`[tokens, in]`; None: those of the last product."""
    is_biased: bool
    """True if the matrices' biases are added."""


class MultiplyTransposed(NamedTuple):
    """Multiply gradients by a transposed matrix."""

    part: SharedPart
    grads: Tensor


class Dequantize(NamedTuple):
    """Send a matrix as it is multiplied."""

    part: SharedPart


class Call(NamedTuple):
    """Call a method of an object, perhaps of one that followers hold."""

    target: Any
    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: int | None = None
    """The number under which they hold the result."""
    is_step: bool = False
    """True if it is a forward of blocks, in which everybody takes part (`Group.step`)."""
    answers: bool = False
    """True if the result is the answer; for results that followers hold, the answer is `Done`."""
    dropped: tuple[int, ...] = ()
    """Numbers of objects that are not held any longer."""


class Failure(NamedTuple):
    """The answer of a process that couldn't do what it was told."""

    reason: str


class Done(NamedTuple):
    """The end of a follower's part of a step, or of another call."""


class Abandon(NamedTuple):
    """The end of a step that failed elsewhere."""


class Held(NamedTuple):
    """Stands in a message for an object that followers hold."""

    number: int


Cut = Literal["rows", "columns"]
"""The axis along which processes have parts of a matrix: its output or its input features."""


class MatrixName(NamedTuple):
    """Stands for a `shared.SharedMatrix` in a message."""

    dtype: torch.dtype
    part: SharedPart
    sizes: tuple[int, ...]
    cut: Cut
    is_paired: bool


class Link:
    """One end of a connection between the server's process and a follower.

    `timeout_s`: most seconds for one tensor to pass; None: the end of the other process is the end of all waiting.
    `name` may return a stand-in that is sent in place of an object; at the other end, `find` returns the object for it.
    """

    def __init__(
        self,
        connection: socket.socket,
        peer: int,
        device: torch.device,
        *,
        timeout_s: float | None = None,
        name: Callable[[Any], Any] = lambda _: None,
        find: Callable[[Any], Any] = lambda found: found,
    ) -> None:
        self._socket, self._peer, self._device, self._timeout_s = connection, peer, device, timeout_s
        self.name, self.find = name, find
        self.group: Any = None
        """The process group through which tensors of GPUs pass."""
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            connection.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)
        connection.settimeout(timeout_s)

    def send(self, message: object) -> None:
        """Send an object with its tensors.

        Raises:
            OSError: the other process has gone, or doesn't receive.
            Exception: the object can't be sent; nothing was sent then.
        """
        buffer, tensors = io.BytesIO(), []  # type: ignore[var-annotated]
        buffer.write(_LENGTH.pack(0))
        _Pickler(buffer, tensors, self.name).dump(message)
        data = buffer.getbuffer()
        _LENGTH.pack_into(data, 0, len(data) - _LENGTH.size)
        self._socket.sendall(data)
        for tensor in tensors:
            self._send_bytes(as_bytes(tensor))

    def receive(self, *, is_idle: bool = False) -> Any:
        """Receive an object; if `is_idle`, wait for it as long as it takes.

        Raises:
            OSError, EOFError: the other process has gone, or doesn't send.
        """
        header = bytearray(_LENGTH.size)
        if is_idle:
            self._socket.settimeout(None)
        try:
            self._fill(memoryview(header))
        finally:
            self._socket.settimeout(self._timeout_s)
        data = bytearray(_LENGTH.unpack(header)[0])
        self._fill(memoryview(data))
        return _Unpickler(io.BytesIO(data), self._tensor, self.find).load()

    def close(self) -> None:
        """Close this end; the other one notices."""
        self._socket.close()

    def _send_bytes(self, data: Tensor) -> None:
        if data.is_cuda:
            self.group.send([data], self._peer, 0).wait()
        elif len(data):
            self._socket.sendall(memoryview(data.numpy()))  # type: ignore[arg-type]

    def _tensor(self, shape: Sequence[int], dtype: torch.dtype, kind: str) -> Tensor:
        with torch.inference_mode(False):
            if kind == "meta":
                return torch.empty(shape, dtype=dtype, device="meta")
            tensor = torch.empty(shape, dtype=dtype, device=self._device if kind == "cuda" else "cpu")
        data = tensor.view(-1).view(torch.uint8)
        if tensor.is_cuda:
            self.group.recv([data], self._peer, 0).wait()
        else:
            self._fill(memoryview(data.numpy()))  # type: ignore[arg-type]
        return tensor

    def _fill(self, view: memoryview) -> None:
        while len(view):
            count = self._socket.recv_into(view)
            if not count:
                raise EOFError("the other process has closed its end")
            view = view[count:]


class _Pickler(pickle.Pickler):
    """Leaves out tensors, which are sent after the object, and sends stand-ins for the objects that `name` knows."""

    def __init__(self, file: io.BytesIO, tensors: list[Tensor], name: Callable[[Any], Any]) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._tensors, self._name = tensors, name

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return self._name(value)
        is_flipped, tensor = _is_flipped(value), value.detach()
        tensor = tensor.mT if is_flipped else tensor
        if tensor.device.type != "meta":
            self._tensors.append(tensor)
        is_parameter = isinstance(value, nn.Parameter)
        return "tensor", tuple(tensor.shape), tensor.dtype, tensor.device.type, is_flipped, is_parameter

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, type):
            if issubclass(value, GgufBlocks):
                return _form, (value.kind, issubclass(value, GgufStrips))
            if getattr(sys.modules[value.__module__], value.__name__, value) is not value:  # made by `skeleton.pruned`
                return _itself, (getattr(sys.modules[value.__module__], value.__name__),)
        return NotImplemented


def _form(kind: int, in_strips: bool) -> type[GgufBlocks]:
    return STRIPS[kind] if in_strips else FORMS[kind]


def _itself(value: Any) -> Any:
    return value


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, receive: Callable[..., Tensor], find: Callable[[Any], Any]) -> None:
        super().__init__(file)
        self._receive, self._find = receive, find

    def persistent_load(self, given: Any) -> Any:
        if given[0] != "tensor":
            return self._find(given)
        _, shape, dtype, kind, is_flipped, is_parameter = given
        tensor = self._receive(shape, dtype, kind)
        tensor = tensor.mT if is_flipped else tensor
        return nn.Parameter(tensor, requires_grad=False) if is_parameter else tensor


def check_copyable(value: object, name: Callable[[Any], Any]) -> None:
    """Check that an object can be sent and received.

    Raises:
        Exception: its code doesn't allow it.
    """
    buffer, tensors = io.BytesIO(), []  # type: ignore[var-annotated]
    _Pickler(buffer, tensors, name).dump(value)
    waiting = iter(tensors)

    def tensor(shape: Sequence[int], dtype: torch.dtype, kind: str) -> Tensor:
        return next(waiting) if kind != "meta" else torch.empty(shape, dtype=dtype, device=kind)

    _Unpickler(io.BytesIO(buffer.getvalue()), tensor, lambda given: given).load()


def connected(rank: int, size: int, directory: str, device: torch.device, timeout_s: float) -> Any:
    """The group of all processes with GPUs that call this with the same directory; None for processors.

    Raises:
        RuntimeError: some of them don't come.
    """
    if device.type != "cuda":
        return None
    torch.cuda.set_device(device)
    store = torch._C._distributed_c10d.FileStore(f"{directory}/group", size)
    timeout = timedelta(seconds=timeout_s)
    store.set_timeout(timeout)
    options = distributed_c10d.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return distributed_c10d.ProcessGroupNCCL(store, rank, size, options)


def as_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a tensor."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def own_copy(tensor: Tensor) -> Tensor:
    """A copy with the same layout: other layouts may be added up in another order."""
    return tensor.mT.contiguous().mT if _is_flipped(tensor) else tensor.clone(memory_format=torch.contiguous_format)


def _is_flipped(tensor: Tensor) -> bool:
    return tensor.ndim > 1 and tensor.stride(-2) == 1 != tensor.stride(-1)


@dataclass(frozen=True, eq=False)
class Plain(Packed):
    """Weights `[…, out, in]`, multiplied by the very function that the model would call."""

    scale: None = field(init=False, default=None)  # type: ignore[assignment]

    def tensors(self) -> dict[str, Tensor]:
        return {"codes": self.codes}

    def multiply(self, inputs: Tensor, bias: Tensor | None = None) -> Tensor:
        """`bias` is added within the product, as the model does it: a later addition could be rounded differently."""
        return F.linear(inputs, self.codes.to(inputs.dtype), None if bias is None else bias.to(inputs.dtype))

    def multiply_transposed(self, grads: Tensor) -> Tensor:
        return grads @ self.codes.to(grads.dtype)

    def dequantize(self) -> Tensor:
        return self.codes.to(self.dtype)

    def _rows(self, start: int, end: int, dtype: torch.dtype) -> Tensor:
        return self.codes[start:end].to(dtype)

    def _output_scale(self) -> None:
        return None

    def _kernel_takes(self, inputs: Tensor) -> bool:
        return False

    def _multiply_by_kernel(self, inputs: Tensor) -> Tensor:
        raise NotImplementedError


def multiplied(packed: Packed, bias: Tensor | None, inputs: Tensor) -> Tensor:
    """`[tokens, in]` → `[tokens, some of out]`; a `bias` is for `Plain` weights."""
    return packed.multiply(inputs, bias) if isinstance(packed, Plain) else packed.multiply(inputs)


def are_mutual(num_processes: int, own: Tensor, most_bytes: int) -> bool:
    """True if both of two processes send their products and combine them, so that none waits for the other's result."""
    return num_processes == 2 and most_bytes <= MUTUAL_BYTES and own.device.type == "cpu"


def added(parts: Sequence[Tensor]) -> Tensor:
    """The sum of all processes' products, in their order, rounded once."""
    wide = torch.promote_types(parts[0].dtype, torch.float32)
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = total + part.to(wide)
    return total.to(parts[0].dtype)
