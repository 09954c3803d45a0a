"""Matrices whose parts are spread over processes, in the place of a block's weights; and the group of these processes.

`span/loading` calls `share`. The server's device thread starts the followers, asks them, watches and ends them, as a
`Group`. There are two ways to multiply:

    by command   this process runs the model. Each product takes a message with the inputs, and an answer of each
                 follower, while this process computes its own part. Models multiply the same inputs by several matrices
                 (queries, keys and values; gate and up). The group learns which ones, and asks for all of them at once
                 the next time.
    in a step    all processes run the same blocks (`span/together`). A product by a matrix that is cut by columns, or
                 by one that has no pair, ends with an exchange.

A pair is the matrices at both ends of half a block: each process has some output features of the first ones (for
attention: whole heads), and computes with these alone until it multiplies by its columns of the last one. So half a
block takes one exchange.

A process that fails without reporting an error ends the whole group: `lost` says why, and every later call raises it.
"""

import itertools
import os
import socket
import subprocess
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
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
    TIMEOUT_S,
    Abandon,
    Call,
    Cut,
    Dequantize,
    Done,
    Failure,
    Held,
    Keep,
    Link,
    MatrixName,
    Multiply,
    MultiplyTransposed,
    Plain,
    SharedPart,
    added,
    are_mutual,
    as_bytes,
    connected,
    multiplied,
    own_copy,
)
from swarmllm.models.quantization.kernels import STRIP
from swarmllm.models.quantization.loading import Whole
from swarmllm.models.quantization.nf4 import TiledNf4
from swarmllm.models.quantization.packed import TILE, InStrips, Packed
from swarmllm.models.quantization.rules import is_transposed, may_be_packed
from swarmllm.models.quantization.weight import QuantizedWeight

T = TypeVar("T")


class Shared(Protocol):
    """A matrix with some rows, or columns, in each process."""

    @property
    def part(self) -> SharedPart: ...

    @property
    def own(self) -> Packed:
        """This process's part."""

    @property
    def own_bias(self) -> Tensor | None: ...

    @property
    def sizes(self) -> tuple[int, ...]:
        """Rows or columns of each process."""

    @property
    def cut(self) -> Cut: ...


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
        self.rank = 0
        self.lost = ""
        """The reason why nothing can be computed any more; "": none."""
        self.num_bytes = [0] * self.size
        """Memory of each process's parts."""
        self.is_stepping = False
        """True while all processes run the same blocks."""
        self._names: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        """Numbers of objects that followers hold copies of."""
        self._num_objects = 0
        self._dropped: deque[int] = deque()
        """Numbers of objects that are gone here; the next call has followers free theirs. Any thread may add some."""
        self._ended: set[int] = set()
        """Followers that have failed in this step."""
        self._num_weights = 0
        self._sent: Tensor | None = None
        """The inputs that followers have."""
        self._leader = SharedPart(-1)
        """The matrix that they were first multiplied by."""
        self._ready: dict[SharedPart, Tensor] = {}
        """Products of the present inputs that have been computed ahead."""
        self._together: dict[SharedPart, list[Shared]] = {}
        """More matrices for the same inputs, by the matrix that is multiplied first."""
        self._followers: list[_Process] = []
        with PrivateDirectory() as private:
            for rank, device in enumerate(devices[1:], 1):
                self._followers.append(_Process(rank, self.size, str(private.path), device, num_threads, timeout_s))
            weakref.finalize(self, _end, list(self._followers))
            with self._failures_translated("didn't start"):
                for follower in self._followers:
                    follower.link.receive(is_idle=True)
                group = connected(0, self.size, str(private.path), self.device, timeout_s)
                for follower in self._followers:  # they read that directory until they are connected
                    follower.link.receive()
                    follower.link.group, follower.link.name = group, self.name

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

    def keep(self, packed: Packed, sizes: Sequence[int], bias: Tensor | None, cut: Cut = "rows") -> SharedPart:
        """Give each follower its part of a matrix (or of each matrix of a stack of experts), and of its bias."""
        part = SharedPart(self._num_weights)
        self._num_weights += 1
        for rank in range(self.size):
            own, of_bias, columns = part_of(packed, sizes, rank, cut), None, None
            start = sum(sizes[:rank])
            if cut == "columns":
                columns = start, start + sizes[rank]
            elif bias is not None:
                of_bias = bias[start : start + sizes[rank]]
            self.num_bytes[rank] += sum(tensor.nbytes for tensor in own.tensors().values())
            if rank:
                with self._failures_translated():
                    self._followers[rank - 1].link.send(Keep(part.number, own, of_bias, columns))
        return part

    def multiply(self, matrix: Shared, inputs: Tensor, *, is_biased: bool) -> Tensor:
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

    def multiply_transposed(self, matrix: Shared, grads: Tensor) -> Tensor:
        """`[tokens, out]` → `[tokens, in]`."""
        self._forget(None)
        grads = grads.detach()
        parts = [grads] * self.size
        if matrix.cut == "rows":
            parts = [part.contiguous() for part in torch.split_with_sizes(grads, list(matrix.sizes), dim=-1)]
        with self._failures_translated():
            for follower, part in zip(self._followers, parts[1:], strict=True):
                follower.link.send(MultiplyTransposed(matrix.part, part))
        own, theirs = self._answers(lambda: matrix.own.multiply_transposed(parts[0]))
        return torch.cat([own, *theirs], dim=-1) if matrix.cut == "columns" else _total([own, *theirs])

    def dequantize(self, matrix: Shared, dtype: torch.dtype) -> Tensor:
        """The whole matrix, here."""
        self._tell(Dequantize(matrix.part))
        own, parts = self._answers(matrix.own.dequantize)
        return torch.cat([own, *parts], dim=-1 if matrix.cut == "columns" else -2).to(dtype)

    # ------------------------------------------------------------------ objects that followers hold, and steps

    def hold(self, value: Any, target: Any, method: str, *args: Any, **kwargs: Any) -> None:
        """Have followers call a method of `target`; the result stands for `value` there until `value` is gone here.

        Raises:
            RuntimeError: a follower can't make it.
        """
        number = self._num_objects
        self._num_objects += 1
        self._tell(Call(target, method, args, kwargs, number, answers=True, dropped=self._dropped_numbers()))
        self._replies()
        self._names[value] = number
        weakref.finalize(value, self._dropped.append, number).atexit = False

    def is_held(self, value: Any) -> bool:
        """True if followers have something that stands for this object."""
        return value in self._names

    def call(self, target: Any, method: str, *args: Any) -> None:
        """Have followers call a method of an object that they hold."""
        self._tell(Call(target, method, args, {}, dropped=self._dropped_numbers()))

    def call_each(self, target: Any, method: str, arguments: Sequence[tuple[Any, ...]]) -> None:
        """The same with other arguments for each follower."""
        dropped = self._dropped_numbers()
        with self._failures_translated():
            for follower, args in zip(self._followers, arguments, strict=True):
                follower.link.send(Call(target, method, args, {}, dropped=dropped))

    def ask(self, target: Any, method: str, *args: Any) -> list[Any]:
        """Return each follower's result of such a call.

        Raises:
            RuntimeError: a follower has failed.
        """
        self._tell(Call(target, method, args, {}, answers=True, dropped=self._dropped_numbers()))
        return self._replies()

    @contextmanager
    def step(self, target: Any, method: str, *args: Any) -> Iterator[None]:
        """Within: followers run this method, the caller runs the same one here, and products are exchanged.

        Raises:
            RuntimeError: a follower has failed. What the step has changed is in an undefined state, as if it had failed
            here.
        """
        self._tell(Call(target, method, args, {}, is_step=True, dropped=self._dropped_numbers()))
        self.is_stepping, self._ended = True, set()
        try:
            yield
        except BaseException:
            if not self.lost:
                self._tell(Abandon())
                self._end_step()
            raise
        else:
            if failures := self._end_step():
                raise RuntimeError("; ".join(failures))
        finally:
            self.is_stepping = False

    def exchanged(self, own: Tensor, most_bytes: int, combine: Callable[[Sequence[Tensor]], Tensor]) -> Tensor:
        """Combine the products of all processes, which are of at most so many bytes, and give each the result."""
        is_mutual = are_mutual(self.size, own, most_bytes)
        if is_mutual:
            self._tell(own)
        parts = [own]
        for follower in self._followers:
            with self._failures_translated():
                part = follower.link.receive()
            if isinstance(part, Failure):
                self._ended.add(follower.rank)
                raise RuntimeError(f"follower {follower.rank}: {part.reason}")
            parts.append(part)
        whole = combine(parts)
        if not is_mutual:
            self._tell(whole)
        return whole

    def _end_step(self) -> list[str]:
        """Wait until followers have ended the step, whatever they send before; their reasons for failing."""
        failures = []
        with self._failures_translated():
            for follower in self._followers:
                answer: Any = None if follower.rank not in self._ended else Done()
                while not isinstance(answer, Done | Failure):
                    answer = follower.link.receive()
                if isinstance(answer, Failure):
                    failures.append(f"follower {follower.rank}: {answer.reason}")
        return failures

    def _dropped_numbers(self) -> tuple[int, ...]:
        return tuple(self._dropped.popleft() for _ in range(len(self._dropped)))

    def name(self, value: Any) -> Any:
        """The object that stands for this one in messages; None: it is sent itself."""
        if isinstance(value, SharedMatrix):
            return MatrixName(value.dtype, value.part, value.sizes, value.cut, value.is_paired)
        try:
            number = self._names.get(value)
        except TypeError:  # it has no hash, or can't be referred to weakly
            return None
        return None if number is None else Held(number)

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

    def _products(self, matrices: Sequence[Shared], inputs: Tensor, *, is_new: bool, is_biased: bool) -> list[Tensor]:
        parts = tuple(matrix.part for matrix in matrices)
        self._tell(Multiply(parts, inputs if is_new else None, is_biased))

        def compute() -> list[Tensor]:
            return [
                multiplied(
                    one.own,
                    one.own_bias if is_biased else None,
                    inputs if one.cut == "rows" else inputs[:, : one.sizes[0]].contiguous(),
                )
                for one in matrices
            ]

        own, answers = self._answers(compute)
        products = zip(own, *answers, strict=True)
        return [combined(matrix.cut, parts) for matrix, parts in zip(matrices, products, strict=True)]

    def _replies(self) -> list[Any]:
        """Each follower's answer.

        Raises:
            RuntimeError: some have failed.
        """
        with self._failures_translated():
            answers = [follower.link.receive() for follower in self._followers]
        failures = [f"follower {rank}: {one.reason}" for rank, one in enumerate(answers, 1) if isinstance(one, Failure)]
        if failures:
            raise RuntimeError("; ".join(failures))
        return answers

    def _answers(self, compute: Callable[[], T]) -> tuple[T, list[Any]]:
        """The results of this process, and the answers of all followers; it waits for the answers in any case."""
        answers: list[Any] = []
        try:
            with torch.inference_mode(False), torch.no_grad():
                own = compute()
        finally:
            try:
                answers += self._replies()
            except RuntimeError:
                self._forget(None)
                raise
        return own, answers

    def _tell(self, message: object) -> None:
        with self._failures_translated():
            for follower in self._followers:
                follower.link.send(message)

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
        here, there = socket.socketpair()
        with there:
            arguments = (os.getpid(), rank, size, Path(directory), device, num_threads, timeout_s)
            self.process: subprocess.Popen[bytes] = subprocess.Popen(
                [sys.executable, "-m", "swarmllm.models.parallel.follower", *map(str, arguments)],
                stdin=there.fileno(),
                start_new_session=True,  # Ctrl-C is for the server; the server ends its followers
            )
        self.link = Link(here, rank, device, timeout_s=timeout_s)


def _end(followers: Sequence[_Process]) -> None:
    for follower in followers:
        follower.process.kill()  # also one that is frozen
        follower.process.wait()
        with suppress(OSError):
            follower.link.close()


def combined(cut: Cut, parts: Sequence[Tensor]) -> Tensor:
    """A whole product, of the products of all processes."""
    return torch.cat(list(parts), dim=-1) if cut == "rows" else added(parts)


def _total(parts: Sequence[Tensor]) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


class Member(Protocol):
    """This process's place among the processes that multiply together: a `Group`, or a follower."""

    rank: int
    is_stepping: bool

    def exchanged(self, own: Tensor, most_bytes: int, combine: Callable[[Sequence[Tensor]], Tensor]) -> Tensor: ...


@dataclass(frozen=True, eq=False)
class SharedMatrix(Packed):
    """A matrix `[…, out, in]` with some of its rows, or of its columns, in this process."""

    codes: None = field(init=False, default=None)  # type: ignore[assignment]
    scale: None = field(init=False, default=None)  # type: ignore[assignment]
    dtype: torch.dtype
    part: SharedPart
    own: Packed
    own_bias: Tensor | None
    sizes: tuple[int, ...]
    bias: Tensor | None
    """The whole bias that followers have, too."""
    group: Any
    """A `Group`; in a follower, a `Member`."""
    cut: Cut = "rows"
    is_paired: bool = False
    """True for rows if each process goes on with its own outputs in a step."""

    @property
    def shape(self) -> torch.Size:
        *experts, rows, columns = self.own.shape
        whole = sum(self.sizes)
        return torch.Size((*experts, whole, columns) if self.cut == "rows" else (*experts, rows, whole))

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
        width = self.own.shape[-1] if self.group.is_stepping else self.shape[-1]
        if inputs.shape[-1] != width:
            raise RuntimeError(f"inputs {list(inputs.shape)} don't fit a matrix {list(self.shape)}")
        flat = inputs.reshape(-1, width)
        is_biased = bias is not None and bias is self.bias
        if self.group.is_stepping:
            outputs, is_biased = self._multiply_in_step(flat, bias), True
        elif torch.is_grad_enabled() and flat.requires_grad:
            outputs = _Product.apply(flat, self, is_biased)  # type: ignore[no-untyped-call]
        else:
            outputs = self.multiply(flat, is_biased)
        outputs = outputs.view(*inputs.shape[:-1], outputs.shape[-1])
        return outputs if bias is None or is_biased else outputs + bias

    def multiply(self, inputs: Tensor, is_biased: bool = False) -> Tensor:
        if self.group.is_stepping:
            return self._multiply_in_step(inputs, self.own_bias if is_biased else None)
        if len(inputs) == 0:
            return inputs.new_zeros(0, self.shape[-2])
        product: Tensor = self.group.multiply(self, inputs, is_biased=is_biased or self.bias is None)
        return product

    def _multiply_in_step(self, inputs: Tensor, bias: Tensor | None) -> Tensor:
        """The whole product; if others have its pairs, this process's part."""
        rank, size = self.group.rank, self.sizes[self.group.rank]
        if self.cut == "rows" and bias is not None and len(bias) != size:
            bias = bias.narrow(0, sum(self.sizes[:rank]), size)
        widest = max(self.sizes) if self.cut == "rows" else self.own.shape[-2]
        most_bytes = len(inputs) * widest * inputs.dtype.itemsize
        if self.cut == "columns":
            whole: Tensor = self.group.exchanged(self._own_product(inputs, None), most_bytes, added)
            return whole if bias is None else whole + bias
        product = self._own_product(inputs, bias)
        return product if self.is_paired else self.group.exchanged(product, most_bytes, _beside)

    def _own_product(self, inputs: Tensor, bias: Tensor | None) -> Tensor:
        if len(inputs) == 0:
            return inputs.new_zeros(0, self.own.shape[-2])
        product = multiplied(self.own, bias, inputs)
        return product if bias is None or isinstance(self.own, Plain) else product + bias

    def multiply_transposed(self, grads: Tensor) -> Tensor:
        if len(grads) == 0:
            return grads.new_zeros(0, self.shape[-1])
        product: Tensor = self.group.multiply_transposed(self, grads)
        return product

    def dequantize(self) -> Tensor:
        if self.group.is_stepping:
            raise RuntimeError("in a step, nobody has the whole matrix")
        if len(self.shape) > 2:
            return torch.stack([self[index].dequantize() for index in range(self.shape[0])])
        whole: Tensor = self.group.dequantize(self, self.dtype)
        return whole

    def _rows(self, start: int, end: int, dtype: torch.dtype) -> Tensor:
        return self.dequantize()[start:end].to(dtype)

    def _output_scale(self) -> None:
        return None

    def _kernel_takes(self, inputs: Tensor) -> bool:
        return False

    def _multiply_by_kernel(self, inputs: Tensor) -> Tensor:
        return self.multiply(inputs)


def _beside(parts: Sequence[Tensor]) -> Tensor:
    return combined("rows", parts)


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


@dataclass(frozen=True)
class Place:
    """The part of a matrix that each process has, if the matrix belongs to a pair."""

    sizes: tuple[int, ...]
    cut: Cut


@torch.no_grad()
def share(model: PreTrainedModel, group: Group, pairs: Mapping[str, Place] = {}) -> None:
    """Spread all large matrices of the blocks; the followers' parts leave this process.

    `pairs` names the modules whose matrices are cut otherwise than into about equally many rows.

    Raises:
        GroupLostError: a follower has gone.
    """
    blocks = find_blocks(model).blocks
    prefix = next(f"{name}." for name, module in model.named_modules() if module is blocks)
    for path, module in list(model.named_modules()):
        if not f"{path}.".startswith(prefix):
            continue
        for leaf, weight in matrices_of(model, path, module).items():
            _install(module, leaf, weight, group, pairs.get(path))


def matrices_of(model: PreTrainedModel, path: str, module: nn.Module) -> dict[str, QuantizedWeight]:
    """The large matrices that a module of the blocks multiplies by."""
    found = {}
    for leaf, weight in module._parameters.items():
        if weight is not None and may_be_packed(model, f"{path}.{leaf}"):
            transposed = is_transposed(module)
            whole = Plain(weight.data.mT if transposed else weight.data, weight.dtype)
            found[leaf] = QuantizedWeight(whole, transposed=transposed)
    packed = {leaf: part for leaf, part in module._modules.items() if isinstance(part, QuantizedWeight)}
    return found | {leaf: part for leaf, part in packed.items() if not isinstance(part, SharedWeight)}


def _install(module: nn.Module, leaf: str, weight: QuantizedWeight, group: Group, place: Place | None) -> None:
    packed = weight.packed
    if place is None and not all(_sizes(packed, group.size)):
        return
    bias = module._parameters.get("bias") if isinstance(module, nn.Linear | Conv1D) else None
    if not isinstance(packed, Plain):
        bias = None  # it is added to the product, here as in one process
    put(module, leaf, SharedWeight(spread(packed, bias, group, place), transposed=weight.transposed))


def put(module: nn.Module, leaf: str, weight: nn.Module) -> None:
    """Replace a module's parameter, or a weight in its place."""
    module._parameters.pop(leaf, None)
    module._modules.pop(leaf, None)
    module.add_module(leaf, weight)


def spread(packed: Packed, bias: Tensor | None, group: Group, place: Place | None = None) -> SharedMatrix:
    """The same matrix with a part in each process of the group.

    Raises:
        GroupLostError: a follower has gone.
    """
    is_paired = place is not None
    place = place or Place(_sizes(packed, group.size), "rows")
    sizes, cut = place.sizes, place.cut
    if cut == "columns":
        bias = None  # it is added to the sum
    part = group.keep(packed, sizes, None if bias is None else bias.detach(), cut)
    own_bias = None if bias is None else bias.detach()[: sizes[0]].clone()
    own = part_of(packed, sizes, 0, cut)
    return SharedMatrix(packed.dtype, part, own, own_bias, sizes, bias, group, cut, is_paired)


def part_of(packed: Packed, sizes: Sequence[int], rank: int, cut: Cut) -> Packed:
    """A process's part of a matrix, in memory of its own.

    Raises:
        ValueError: the weights of other columns belong to the same groups.
    """
    start = sum(sizes[:rank])
    take = packed.rows if cut == "rows" else packed.columns
    part = take(start, start + sizes[rank])
    return type(part)(**{name: own_copy(tensor) for name, tensor in part.tensors().items()}, dtype=part.dtype)


def _sizes(packed: Packed, num_processes: int) -> tuple[int, ...]:
    """Rows of each process: as equal as can be, in whole tiles where kernels want them."""
    rows = packed.shape[-2]
    unit = TILE if isinstance(packed, TiledNf4) or (rows % TILE == 0 and rows >= TILE * num_processes) else 1
    if unit == 1 and isinstance(packed, InStrips) and rows >= STRIP * num_processes:
        unit = STRIP
    return counts(rows // unit, num_processes, unit)


def counts(units: int, num_processes: int, unit: int) -> tuple[int, ...]:
    """Features of each process, in whole units of this many; as equal as can be."""
    ends = [rank * units // num_processes for rank in range(num_processes + 1)]
    return tuple((end - start) * unit for start, end in itertools.pairwise(ends))
