"""`python -m swarmllm.models.parallel.follower`: holds parts of matrices, and multiplies by them on command.

`shared` starts it. Standard input is a socket to the server. A follower ends when that socket closes, or on Linux when
its parent dies, so that no follower outlives its server.

It also holds objects that the server's process has created here: a copy of the blocks, and the sessions' caches for
its heads. It knows nothing about them: a `Call` names the object and the method. When the server's process has lost its
own object, the next `Call` names the number in `dropped`, and `Follower._call` frees the object here.
"""

import ctypes
import gc
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from swarmllm.models.parallel.exchange import (
    Abandon,
    Call,
    Dequantize,
    Done,
    Failure,
    Held,
    Keep,
    Link,
    MatrixName,
    Multiply,
    MultiplyTransposed,
    SharedPart,
    are_mutual,
    connected,
    multiplied,
)
from swarmllm.models.parallel.shared import SharedMatrix
from swarmllm.models.quantization.packed import Packed

PR_SET_PDEATHSIG = 1  # prctl(2)


class _AbandonedError(Exception):
    """The step has failed elsewhere."""


class Follower:
    """One follower, and all that it holds."""

    is_stepping = True
    """`shared.SharedMatrix` asks; a follower multiplies in steps only."""

    def __init__(self, link: Link, rank: int, size: int) -> None:
        self.rank = rank
        self._link, self._size = link, size
        link.find = self._find
        self._weights: dict[int, Keep] = {}
        self._inputs = torch.empty(0)
        self._objects: dict[int, Any] = {}

    def obey(self, command: object) -> None:
        """Obey a command.

        Raises:
            Exception: the server is gone; or a call without an answer failed, so that this process and the server's
                have different objects now. The follower ends then.
        """
        match command:
            case Keep():
                self._weights[command.number] = command
            case Multiply():
                self._answer(lambda: self._products(command))
            case MultiplyTransposed():
                self._answer(lambda: self._matrix(command.part)[0].multiply_transposed(command.grads))
            case Dequantize():
                self._answer(self._matrix(command.part)[0].dequantize)
            case Call():
                self._call(command)

    def exchanged(self, own: Tensor, most_bytes: int, combine: Callable[[Sequence[Tensor]], Tensor]) -> Tensor:
        """See `shared.Group.exchanged`: small products of two processes are combined in both, in the same order."""
        self._link.send(own)
        received = self._link.receive()
        if isinstance(received, Abandon):
            raise _AbandonedError
        assert isinstance(received, Tensor)
        return combine([received, own]) if are_mutual(self._size, own, most_bytes) else received

    def _call(self, call: Call) -> None:
        for number in call.dropped:
            self._objects.pop(number, None)
        method = call.target if call.method == "__call__" else getattr(call.target, call.method)
        if call.is_step:
            self._step(lambda: method(*call.args, **call.kwargs))
            return
        if call.answers:
            self._answer(lambda: self._result(call, method))
        else:
            self._result(call, method)

    def _result(self, call: Call, method: Callable[..., object]) -> object:
        result = method(*call.args, **call.kwargs)
        if call.result is None:
            return result
        self._objects[call.result] = result
        return Done()

    def _step(self, run: Callable[[], object]) -> None:
        try:
            run()
        except _AbandonedError:
            pass
        except (OSError, EOFError):
            raise
        except Exception as error:  # noqa: BLE001 - the server is told, and later calls are served
            self._link.send(_failure(error))
            return
        self._link.send(Done())

    def _answer(self, compute: Callable[[], object]) -> None:
        try:
            answer = compute()
        except Exception as error:  # noqa: BLE001 - the server is told, and later calls are served
            answer = _failure(error)
        self._link.send(answer)

    def _products(self, command: Multiply) -> tuple[Tensor, ...]:
        if command.inputs is not None:
            self._inputs = command.inputs
        products = []
        for part in command.parts:
            packed, bias, columns = self._matrix(part)
            inputs = self._inputs if columns is None else self._inputs[:, slice(*columns)].contiguous()
            products.append(multiplied(packed, bias if command.is_biased else None, inputs))
        return tuple(products)

    def _matrix(self, part: SharedPart) -> tuple[Packed, Tensor | None, tuple[int, int] | None]:
        _, packed, bias, columns = self._weights[part.number]
        return packed if part.expert is None else packed[part.expert], bias, columns

    def _find(self, given: Any) -> Any:
        """The object that stands here for one of the server's process."""
        if isinstance(given, Held):
            return self._objects[given.number]
        assert isinstance(given, MatrixName)
        own, bias, _ = self._matrix(given.part)
        return SharedMatrix(given.dtype, given.part, own, bias, given.sizes, None, self, given.cut, given.is_paired)


def _failure(error: Exception) -> Failure:
    return Failure(f"{type(error).__name__}: {str(error).strip()[:300]}")


def die_with(parent: int) -> None:
    """Have the system end this process with the one of that id, even if it is frozen then; where the system can."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def main(rank: int, size: int, directory: str, device_name: str, num_threads: int, timeout_s: float) -> None:
    """Obey until the server has gone."""
    device = torch.device(device_name)
    link = Link(socket.socket(fileno=os.dup(0)), 0, device)
    os.dup2(2, 1)  # prints of libraries are for the log
    if device.type == "cpu":
        torch.set_num_threads(num_threads)
    link.send("started")
    link.group = connected(rank, size, directory, device, timeout_s)
    follower = Follower(link, rank, size)
    link.send("connected")
    gc.freeze()
    with torch.inference_mode():
        while True:
            try:
                command = link.receive()
            except EOFError:
                return
            follower.obey(command)


if __name__ == "__main__":
    parent, rank, size, directory, device_name, num_threads, timeout_s = sys.argv[1:]
    die_with(int(parent))
    try:
        main(int(rank), int(size), directory, device_name, int(num_threads), float(timeout_s))
    except Exception as error:  # noqa: BLE001 - the end of this process tells the others
        sys.stderr.write(f"follower {rank} ends: {type(error).__name__}: {error}\n")
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)
