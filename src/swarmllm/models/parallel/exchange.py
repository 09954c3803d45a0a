"""The protocol between the server's process and its followers: how they find each other, and how tensors pass.

Commands go through a pipe and tensors through a process group of torch: gloo between processors, over the loopback
interface alone; nccl between GPUs (which has never run). The group has a timeout of its own, and torch's global one
stays free.

`Plain` is a weight as it is. `shared` makes it; the server's process and followers multiply by it.
"""

import dataclasses
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import distributed_c10d

from swarmllm.models.quantization.packed import Packed

TIMEOUT_S = 30.0
"""Most seconds for one tensor to pass. Assumed: all compute equally long, so a later process is frozen or gone."""
LOOPBACK = "127.0.0.1"
OK, FAILED = 0, 1
"""The last byte of a follower's answer: was the command obeyed? If not, the reason comes through its pipe."""


class SharedPart(NamedTuple):
    """A matrix, or one of its experts."""

    number: int
    expert: int | None = None


class GroupCommand(NamedTuple):
    """A command for a follower, with everything that it doesn't know yet."""

    kind: Literal["keep", "multiply", "multiply_transposed", "dequantize"]
    parts: tuple[SharedPart, ...]
    rows: int = 0
    """Number of inputs, or of gradients."""
    dtype: torch.dtype = torch.float32
    is_new: bool = True
    """True if the inputs are sent; False if they are those of the last product."""
    is_biased: bool = False
    """True if the matrices' biases are added."""
    recipe: "WeightRecipe | None" = None
    """The weight to keep."""


class WeightRecipe(NamedTuple):
    """The way to put a packed weight together from its tensors, which come one after the other."""

    form: type[Packed]
    dtype: torch.dtype
    tensors: tuple[tuple[str, tuple[int, ...], torch.dtype, bool], ...]
    """(name, shape, dtype, are its last two dimensions swapped) of each."""
    bias: tuple[int, torch.dtype] | None


def connected(rank: int, size: int, directory: str, device: torch.device, timeout_s: float) -> Any:
    """The group of all processes that call this with the same directory.

    Raises:
        RuntimeError: some of them don't come.
    """
    store = torch._C._distributed_c10d.FileStore(f"{directory}/group", size)
    timeout = timedelta(seconds=timeout_s)
    store.set_timeout(timeout)
    backend: Any = distributed_c10d.ProcessGroupNCCL if device.type == "cuda" else distributed_c10d.ProcessGroupGloo
    if device.type == "cuda":
        torch.cuda.set_device(device)
        options = backend.Options()
    else:
        options = backend._Options()
        options._devices = [backend.create_device(hostname=LOOPBACK)]
    options._timeout = timeout
    return backend(store, rank, size, options)


def as_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a tensor. Any group can pass them, for every dtype."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def send(group: Any, tensor: Tensor, to: int) -> None:
    """Send a tensor."""
    if tensor.numel():
        group.send([as_bytes(tensor)], to, 0).wait()


def receive(group: Any, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, sender: int) -> Tensor:
    """Receive a tensor from `send`."""
    tensor = torch.empty(shape, dtype=dtype, device=device)
    if tensor.numel():
        group.recv([tensor.view(-1).view(torch.uint8)], sender, 0).wait()
    return tensor


def weight_recipe(packed: Packed, bias: Tensor | None) -> WeightRecipe:
    """The recipe for a weight from `send_weight`."""
    tensors = tuple(
        (name, tuple((tensor.mT if _is_flipped(tensor) else tensor).shape), tensor.dtype, _is_flipped(tensor))
        for name, tensor in packed.tensors().items()
    )
    return WeightRecipe(type(packed), packed.dtype, tensors, None if bias is None else (len(bias), bias.dtype))


def send_weight(group: Any, packed: Packed, bias: Tensor | None, to: int) -> None:
    """Send rows of a matrix, or of several, and of its bias."""
    for tensor in packed.tensors().values():
        send(group, tensor.mT if _is_flipped(tensor) else tensor, to)
    if bias is not None:
        send(group, bias, to)


def receive_weight(group: Any, recipe: WeightRecipe, device: torch.device) -> tuple[Packed, Tensor | None]:
    """Receive a weight from `send_weight`."""
    tensors: dict[str, Any] = {}
    for name, shape, dtype, is_flipped in recipe.tensors:
        tensor = receive(group, shape, dtype, device, 0)
        tensors[name] = tensor.mT if is_flipped else tensor
    names = {field.name for field in dataclasses.fields(recipe.form) if field.init}
    if "dtype" in names:
        tensors["dtype"] = recipe.dtype
    bias = None if recipe.bias is None else receive(group, (recipe.bias[0],), recipe.bias[1], device, 0)
    return recipe.form(**tensors), bias


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
