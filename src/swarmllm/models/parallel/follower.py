"""`python -m swarmllm.models.parallel.follower`: holds rows of matrices, and multiplies by them on command.

`shared` starts it. Standard input brings commands, standard output takes reports: pipes to the server. A follower ends
when they close, or on Linux when its parent dies, so that no follower outlives its server.
"""

import ctypes
import gc
import os
import signal
import sys
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from swarmllm.models.parallel.exchange import (
    FAILED,
    OK,
    GroupCommand,
    Plain,
    SharedPart,
    connected,
    receive,
    receive_weight,
)
from swarmllm.models.quantization.packed import Packed

PR_SET_PDEATHSIG = 1  # prctl(2)


class Follower:
    """One follower, and the rows that it holds."""

    def __init__(self, group: Any, device: torch.device, reports: Connection) -> None:
        self._group, self._device, self._reports = group, device, reports
        self._weights: dict[int, tuple[Packed, Tensor | None]] = {}
        self._inputs = torch.empty(0)

    def obey(self, command: GroupCommand) -> None:
        """Obey a command.

        Raises:
            Exception: there is no server any more to report an error to.
        """
        match command.kind:
            case "keep":
                assert command.recipe is not None
                self._weights[command.parts[0].number] = receive_weight(self._group, command.recipe, self._device)
                return
            case "multiply":
                shape, itemsize = self._take_inputs(command), command.dtype.itemsize
            case "multiply_transposed":
                packed = self._matrix(command.parts[0])
                self._inputs = receive(
                    self._group, (command.rows, packed.shape[0]), command.dtype, self._device, sender=0
                )
                shape, itemsize = (command.rows, packed.shape[1]), command.dtype.itemsize
            case "dequantize":
                packed = self._matrix(command.parts[0])
                shape, itemsize = tuple(packed.shape), packed.dtype.itemsize
        answer = torch.zeros(torch.Size(shape).numel() * itemsize + 1, dtype=torch.uint8, device=self._device)
        try:
            value = self._value(command)
            answer[:-1].view(value.dtype).view(shape).copy_(value)
            answer[-1] = OK
        except Exception as error:  # noqa: BLE001 - whoever asked is told, and the others who ask are served
            answer[-1] = FAILED
            self._reports.send(f"{type(error).__name__}: {str(error).strip()[:300]}")
        self._group.send([answer], 0, 0).wait()

    def _take_inputs(self, command: GroupCommand) -> tuple[int, ...]:
        matrices = [self._matrix(part) for part in command.parts]
        if command.is_new:
            self._inputs = torch.empty(command.rows, matrices[0].shape[1], dtype=command.dtype, device=self._device)
            self._group.broadcast(self._inputs.view(-1).view(torch.uint8), 0).wait()
        return command.rows, sum(matrix.shape[0] for matrix in matrices)

    def _value(self, command: GroupCommand) -> Tensor:
        if command.kind == "dequantize":
            return self._matrix(command.parts[0]).dequantize()
        if command.kind == "multiply_transposed":
            return self._matrix(command.parts[0]).multiply_transposed(self._inputs)
        products = [multiplied(self._matrix(part), self._bias(command, part), self._inputs) for part in command.parts]
        return products[0] if len(products) == 1 else torch.cat(products, dim=-1)

    def _matrix(self, part: SharedPart) -> Packed:
        packed = self._weights[part.number][0]
        return packed if part.expert is None else packed[part.expert]

    def _bias(self, command: GroupCommand, part: SharedPart) -> Tensor | None:
        return self._weights[part.number][1] if command.is_biased else None


def multiplied(packed: Packed, bias: Tensor | None, inputs: Tensor) -> Tensor:
    """`[tokens, in]` → `[tokens, some of out]`."""
    return packed.multiply(inputs, bias) if isinstance(packed, Plain) else packed.multiply(inputs)


def die_with(parent: int) -> None:
    """Have the system end this process with the one of that id, even if it is frozen then; where the system can."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def main(rank: int, size: int, directory: str, device_name: str, num_threads: int, timeout_s: float) -> None:
    """Obey until the server has gone."""
    commands, reports = Connection(os.dup(0), writable=False), Connection(os.dup(1), readable=False)
    os.dup2(2, 1)  # prints of libraries are no reports
    device = torch.device(device_name)
    if device.type == "cpu":
        torch.set_num_threads(num_threads)
    reports.send("started")
    follower = Follower(connected(rank, size, directory, device, timeout_s), device, reports)
    reports.send("connected")
    gc.freeze()
    with torch.inference_mode():
        while True:
            try:
                command = commands.recv()
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
