"""Matrices whose rows are spread over processes, in the place of a block's weights; and the group of these processes.

`span/loading` calls `share`. The server's device thread starts the followers, asks them to multiply, watches and ends
them, as a `Group`. Each product takes one command, one broadcast of the inputs and one answer of each follower, while
this process computes its own rows. Models multiply the same inputs by several matrices (queries, keys and values; gate
and up). The group learns which ones, and asks for all of them at once the next time.

A process that fails without reporting an error ends the whole group: `lost` says why, and every later call raises it.
"""

import itertools
import os
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from swarmllm.errors import GroupLostError
from swarmllm.files import PrivateDirectory
from swarmllm.models.architecture import find_blocks
from swarmllm.models.parallel.exchange import (
    FAILED,
    TIMEOUT_S,
    GroupCommand,
    Plain,
    SharedPart,
    as_bytes,
    connected,
    own_copy,
    send,
    send_weight,
    weight_recipe,
)
from swarmllm.models.parallel.follower import multiplied
from swarmllm.models.quantization.loading import Whole
from swarmllm.models.quantization.nf4 import TiledNf4
from swarmllm.models.quantization.packed import TILE, Packed
from swarmllm.models.quantization.rules import is_transposed, may_be_packed
from swarmllm.models.quantization.weight import QuantizedWeight

T = TypeVar("T")


class Rows(Protocol):
    """A matrix with some rows in each process."""

    @property
    def part(self) -> SharedPart: ...

    @property
    def own(self) -> Packed:
        """This process's rows."""

    @property
    def own_bias(self) -> Tensor | None: ...

    @property
    def sizes(self) -> tuple[int, ...]:
        """Rows of each process."""


class Group:
    """All processes that multiply together; this one is the first. One thread alone may call it."""

    def __init__(
        self,
        devices: Sequence[torch.device],
        *,
        num_threads: int = 1,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """`devices` are those of all processes, this one's first; `num_threads` is for each follower on a processor.

        Raises:
            GroupLostError: a follower can't start.
        """
        self.size = len(devices)
        self.device = devices[0]
        self.lost = ""
        """Why nothing can be computed any more."""
        self.num_bytes = [0] * self.size
        """Memory of each process's rows."""
        self._num_weights = 0
        self._sent: Tensor | None = None
        """The inputs that followers have."""
        self._leader = SharedPart(-1)
        """The matrix that they were first multiplied by."""
        self._ready: dict[SharedPart, Tensor] = {}
        """Products of the present inputs that have been computed ahead."""
        self._together: dict[SharedPart, list[Rows]] = {}
        """More matrices for the same inputs, by the matrix that is multiplied first."""
        self._followers: list[_Process] = []
        with PrivateDirectory() as private:
            for rank, device in enumerate(devices[1:], 1):
                self._followers.append(_Process(rank, self.size, str(private.path), device, num_threads, timeout_s))
            weakref.finalize(self, _end, list(self._followers))
            with self._failures_translated("didn't start"):
                for follower in self._followers:
                    follower.reports.recv()
                self._group = connected(0, self.size, str(private.path), self.device, timeout_s)
                for follower in self._followers:  # they read that directory until they are connected
                    follower.reports.recv()

    @property
    def process_ids(self) -> list[int]:
        """The process ids of the followers."""
        return [follower.process.pid for follower in self._followers]

    def close(self) -> None:
        """End the followers; this also happens when the group is dropped."""
        self.lost = self.lost or "the group has been closed"
        _end(self._followers)

    def check(self) -> None:
        """Check that all followers run.

        Raises:
            GroupLostError: one has ended.
        """
        for follower in self._followers:
            if (code := follower.process.poll()) is not None:
                self._lose(f"ended (exit code {code})", follower)

    # ------------------------------------------------------------------ what is asked

    def keep(self, packed: Packed, sizes: Sequence[int], bias: Tensor | None) -> SharedPart:
        """Give each follower its rows of a matrix, or of each of several, and of its bias."""
        part = SharedPart(self._num_weights)
        self._num_weights += 1
        start = 0
        for rank, size in enumerate(sizes):
            rows, of_bias = packed.rows(start, start + size), None if bias is None else bias[start : start + size]
            start += size
            self.num_bytes[rank] += sum(tensor.nbytes for tensor in rows.tensors().values())
            if rank:
                with self._failures_translated():
                    self._followers[rank - 1].commands.send(
                        GroupCommand("keep", (part,), recipe=weight_recipe(rows, of_bias))
                    )
                    send_weight(self._group, rows, of_bias, rank)
        return part

    def multiply(self, matrix: Rows, inputs: Tensor, *, is_biased: bool) -> Tensor:
        """`[tokens, in]` → `[tokens, out]`."""
        inputs = inputs.detach().contiguous()
        is_new = not self._has(inputs)
        if not is_biased:
            return self._products([matrix], inputs, is_new=is_new, is_biased=False)[0]
        if is_new:
            self._forget(inputs)
            self._leader = matrix.part
            matrices = [matrix, *self._together.get(matrix.part, ())]
        elif (ready := self._ready.pop(matrix.part, None)) is not None:
            return ready
        else:
            matrices = [matrix]
            if matrix.part != self._leader:
                self._together.setdefault(self._leader, []).append(matrix)
        first, *others = self._products(matrices, inputs, is_new=is_new, is_biased=True)
        self._ready |= {one.part: product for one, product in zip(matrices[1:], others, strict=True)}
        return first

    def multiply_transposed(self, matrix: Rows, grads: Tensor) -> Tensor:
        """`[tokens, out]` → `[tokens, in]`."""
        self._forget(None)
        own, *theirs = torch.split_with_sizes(grads.detach(), list(matrix.sizes), dim=-1)
        rows, columns = len(grads), matrix.own.shape[-1]
        with self._failures_translated():
            self._tell(GroupCommand("multiply_transposed", (matrix.part,), rows, grads.dtype))
            for rank, part in enumerate(theirs, 1):
                send(self._group, part, rank)
        shapes = [(rows, columns)] * len(theirs)
        total, parts = self._answers(shapes, grads.dtype, lambda: matrix.own.multiply_transposed(own.contiguous()))
        for part in parts:
            total = total + part
        return total

    def dequantize(self, matrix: Rows, dtype: torch.dtype) -> Tensor:
        """The whole matrix, here."""
        with self._failures_translated():
            self._tell(GroupCommand("dequantize", (matrix.part,)))
        shapes = [(size, matrix.own.shape[-1]) for size in matrix.sizes[1:]]
        own, parts = self._answers(shapes, matrix.own.dtype, matrix.own.dequantize)
        return torch.cat([own, *parts]).to(dtype)

    # ------------------------------------------------------------------ how

    def _has(self, inputs: Tensor) -> bool:
        """True if followers have exactly these bits: a tensor's identity and address prove nothing."""
        sent = self._sent
        return (
            sent is not None
            and sent.shape == inputs.shape
            and sent.dtype == inputs.dtype
            and torch.equal(as_bytes(sent), as_bytes(inputs))
        )

    def _forget(self, inputs: Tensor | None) -> None:
        """Forget the products that were computed ahead for the last inputs, and didn't get used."""
        if self._ready:
            kept = [one for one in self._together[self._leader] if one.part not in self._ready]
            self._together[self._leader] = kept
            self._ready = {}
        self._sent = None if inputs is None else inputs.clone()

    def _products(self, matrices: Sequence[Rows], inputs: Tensor, *, is_new: bool, is_biased: bool) -> list[Tensor]:
        rows = len(inputs)
        with self._failures_translated():
            parts = tuple(matrix.part for matrix in matrices)
            self._tell(GroupCommand("multiply", parts, rows, inputs.dtype, is_new, is_biased))
            if is_new:
                self._group.broadcast(as_bytes(inputs), 0).wait()
        widths = [[matrix.sizes[rank] for matrix in matrices] for rank in range(self.size)]

        def compute() -> list[Tensor]:
            return [multiplied(one.own, one.own_bias if is_biased else None, inputs) for one in matrices]

        own, answers = self._answers([(rows, sum(width)) for width in widths[1:]], inputs.dtype, compute)
        theirs = [
            torch.split_with_sizes(answer, width, dim=-1) for answer, width in zip(answers, widths[1:], strict=True)
        ]
        return [torch.cat([product, *others], dim=-1) for product, *others in zip(own, *theirs, strict=True)]

    def _answers(
        self, shapes: Sequence[tuple[int, int]], dtype: torch.dtype, compute: Callable[[], T]
    ) -> tuple[T, list[Tensor]]:
        """The results of this process, and the answers of all followers; it waits for the answers in any case."""
        failures = []
        try:
            with torch.inference_mode(False), torch.no_grad():
                own = compute()
        finally:
            answers = []
            for rank, shape in enumerate(shapes, 1):
                num_bytes = torch.Size(shape).numel() * dtype.itemsize
                with torch.inference_mode(False):
                    answer = torch.empty(num_bytes + 1, dtype=torch.uint8, device=self.device)
                with self._failures_translated():
                    self._group.recv([answer], rank, 0).wait()
                    if answer[-1] == FAILED:
                        failures.append(f"follower {rank}: {self._followers[rank - 1].reports.recv()}")
                answers.append(answer[:-1].view(dtype).view(shape))
        if failures:
            self._forget(None)
            raise RuntimeError("; ".join(failures))
        return own, answers

    def _tell(self, command: GroupCommand) -> None:
        for follower in self._followers:
            follower.commands.send(command)

    @contextmanager
    def _failures_translated(self, what: str = "is gone or frozen") -> Iterator[None]:
        """Raise GroupLostError for all errors between processes."""
        if self.lost:
            raise GroupLostError(self.lost)
        try:
            yield
        except (RuntimeError, OSError, EOFError) as error:
            reason = f"{what} ({str(error).strip().split(chr(10))[0][:200] or type(error).__name__})"
            self._lose(reason, next((one for one in self._followers if one.process.poll() is not None), None), error)

    def _lose(self, reason: str, follower: "_Process | None", error: BaseException | None = None) -> None:
        who = "a follower" if follower is None else f"follower {follower.rank}"
        self.lost = f"{who}, which has a part of this server's matrices, {reason}"
        _end(self._followers)
        raise GroupLostError(self.lost) from error


class _Process:
    """One follower."""

    def __init__(
        self, rank: int, size: int, directory: str, device: torch.device, num_threads: int, timeout_s: float
    ) -> None:
        self.rank = rank
        arguments = (os.getpid(), rank, size, Path(directory), device, num_threads, timeout_s)
        self.process: subprocess.Popen[bytes] = subprocess.Popen(
            [sys.executable, "-m", "swarmllm.models.parallel.follower", *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the server; the server ends its followers
        )
        self.commands, self.reports = _Pipe(self.process.stdin), _Pipe(self.process.stdout)


def _Pipe(stream: Any) -> Connection:  # noqa: N802
    return Connection(os.dup(stream.fileno()))


def _end(followers: Sequence[_Process]) -> None:
    for follower in followers:
        follower.process.kill()  # also one that is frozen
        follower.process.wait()
        for end in (follower.process.stdin, follower.process.stdout, follower.commands, follower.reports):
            with suppress(OSError):
                end.close()  # type: ignore[union-attr]


@dataclass(frozen=True, eq=False)
class SharedMatrix(Packed):
    """A matrix `[…, out, in]` with its first rows in this process."""

    codes: None = field(init=False, default=None)  # type: ignore[assignment]
    scale: None = field(init=False, default=None)  # type: ignore[assignment]
    dtype: torch.dtype
    part: SharedPart
    own: Packed
    own_bias: Tensor | None
    sizes: tuple[int, ...]
    bias: Tensor | None
    """The whole bias that followers have, too."""
    group: Group

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.own.shape[:-2], sum(self.sizes), self.own.shape[-1]))

    @property
    def device(self) -> torch.device:
        return self.own.device

    def tensors(self) -> dict[str, Tensor]:
        raise RuntimeError("the tensors of this matrix are in several processes")

    def __getitem__(self, index: int) -> "SharedMatrix":
        return replace(self, part=SharedPart(self.part.number, range(self.shape[0])[index]), own=self.own[index])

    def split(self, rows: int) -> Packed:  # type: ignore[override]
        return Plain(self.dequantize(), self.dtype).split(rows)

    def linear(self, inputs: Tensor, bias: Tensor | None = None) -> Tensor:
        if inputs.shape[-1] != self.shape[-1]:
            raise RuntimeError(f"inputs {list(inputs.shape)} don't fit a matrix {list(self.shape)}")
        flat = inputs.reshape(-1, inputs.shape[-1])
        is_biased = bias is not None and bias is self.bias
        if torch.is_grad_enabled() and flat.requires_grad:
            outputs: Tensor = _Product.apply(flat, self, is_biased)  # type: ignore[no-untyped-call]
        else:
            outputs = self.multiply(flat, is_biased)
        outputs = outputs.view(*inputs.shape[:-1], outputs.shape[-1])
        return outputs if bias is None or is_biased else outputs + bias

    def multiply(self, inputs: Tensor, is_biased: bool = False) -> Tensor:
        if len(inputs) == 0:
            return inputs.new_zeros(0, self.shape[-2])
        return self.group.multiply(self, inputs, is_biased=is_biased or self.bias is None)

    def multiply_transposed(self, grads: Tensor) -> Tensor:
        return self.group.multiply_transposed(self, grads) if len(grads) else grads.new_zeros(0, self.shape[-1])

    def dequantize(self) -> Tensor:
        if len(self.shape) > 2:
            return torch.stack([self[index].dequantize() for index in range(self.shape[0])])
        return self.group.dequantize(self, self.dtype)

    def _rows(self, start: int, end: int, dtype: torch.dtype) -> Tensor:
        return self.dequantize()[start:end].to(dtype)

    def _output_scale(self) -> None:
        return None

    def _kernel_takes(self, inputs: Tensor) -> bool:
        return False

    def _multiply_by_kernel(self, inputs: Tensor) -> Tensor:
        return self.multiply(inputs)


class _Product(torch.autograd.Function):
    """Neither the weight nor its bias has a gradient."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, matrix: SharedMatrix, is_biased: bool) -> Tensor:
        ctx.matrix = matrix
        return matrix.multiply(inputs, is_biased)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.matrix.multiply_transposed(grads[0]), None, None


class SharedWeight(QuantizedWeight):
    """A `SharedMatrix` that a module registers in place of a parameter."""

    def __init__(self, matrix: SharedMatrix, *, transposed: bool) -> None:
        nn.Module.__init__(self)
        self._matrix, self._dtype = matrix, matrix.dtype
        self.transposed = transposed

    @property
    def packed(self) -> Packed:  # type: ignore[override]
        return self._matrix if self._dtype == self._matrix.dtype else replace(self._matrix, dtype=self._dtype)


def is_rounded(packed: Packed) -> bool:
    """True if a weight was rounded to fewer bits, when it was loaded or before."""
    return not isinstance(packed.own if isinstance(packed, SharedMatrix) else packed, Whole | Plain)


@torch.no_grad()
def share(model: PreTrainedModel, group: Group) -> None:
    """Spread the rows of all large matrices of the blocks; the followers' leave this process.

    Raises:
        GroupLostError: a follower has gone.
    """
    blocks = find_blocks(model).blocks
    prefix = next(f"{name}." for name, module in model.named_modules() if module is blocks)
    for path, module in list(model.named_modules()):
        if not f"{path}.".startswith(prefix):
            continue
        for leaf, weight in [*module._parameters.items()]:
            if weight is not None and may_be_packed(model, f"{path}.{leaf}"):
                transposed = is_transposed(module)
                whole = Plain(weight.data.mT if transposed else weight.data, weight.dtype)
                _install(module, leaf, whole, group, transposed=transposed)
        for leaf, part in [*module._modules.items()]:
            if isinstance(part, QuantizedWeight) and not isinstance(part, SharedWeight):
                _install(module, leaf, part.packed, group, transposed=part.transposed)


def _install(module: nn.Module, leaf: str, packed: Packed, group: Group, *, transposed: bool) -> None:
    if not all(_sizes(packed, group.size)):
        return
    bias = module._parameters.get("bias") if isinstance(module, nn.Linear | Conv1D) else None
    if not isinstance(packed, Plain):
        bias = None  # it is added to the product, here as in one process
    matrix = spread(packed, bias, group)
    module._parameters.pop(leaf, None)
    module._modules.pop(leaf, None)
    module.add_module(leaf, SharedWeight(matrix, transposed=transposed))


def spread(packed: Packed, bias: Tensor | None, group: Group) -> SharedMatrix:
    """The same matrix with some rows in each process of the group.

    Raises:
        GroupLostError: a follower has gone.
    """
    sizes = _sizes(packed, group.size)
    part = group.keep(packed, sizes, None if bias is None else bias.detach())
    own = packed.rows(0, sizes[0])
    own = type(own)(**{name: own_copy(tensor) for name, tensor in own.tensors().items()}, dtype=own.dtype)
    own_bias = None if bias is None else bias.detach()[: sizes[0]].clone()
    return SharedMatrix(packed.dtype, part, own, own_bias, sizes, bias, group)


def _sizes(packed: Packed, num_processes: int) -> tuple[int, ...]:
    """Rows of each process: as equal as can be, in whole tiles where kernels want them."""
    rows = packed.shape[-2]
    unit = TILE if isinstance(packed, TiledNf4) or (rows % TILE == 0 and rows >= TILE * num_processes) else 1
    return tuple(_counts(rows // unit, num_processes, unit))


def _counts(units: int, num_processes: int, unit: int) -> Sequence[int]:
    ends = [rank * units // num_processes for rank in range(num_processes + 1)]
    return [(end - start) * unit for start, end in itertools.pairwise(ends)]
