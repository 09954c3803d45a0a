"""The device thread on a device that computes when it likes: one that these tests tell when.

What such a device gives isn't there when a call returns. None of this needs a GPU, and on none of these tests does a
thread that takes outputs as they come pass.
"""

import asyncio
import queue
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Generator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from swarmllm.models.span.packing import SessionCall
from swarmllm.server.device.device import accelerator_of
from swarmllm.server.device.device_thread import DeviceThread, SessionStep
from swarmllm.server.device.scheduler import Account, Priority

COMPUTE_S = 0.05


class Device:
    """Does one thing after the other, in a thread of its own, and never before the gate is open."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.error: RuntimeError | None = None
        self.memory: weakref.WeakSet[Tensor] = weakref.WeakSet()
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def launch(self, value: Tensor, compute_s: float = 0.0) -> Tensor:
        """A tensor in the device's memory, which is `value` when the device has come so far."""
        result = torch.full_like(value, float("nan"))
        self.memory.add(result)

        def compute() -> None:
            self.gate.wait()
            time.sleep(compute_s)
            result.copy_(value)

        self._queue.put(compute)
        return result

    def fetch(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        done = threading.Event()
        self._queue.put(done.set)
        done.wait()
        if self.error is not None:
            raise self.error
        return [tensor.clone() for tensor in tensors]

    def end(self) -> None:
        self.gate.set()
        self._queue.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (work := self._queue.get()) is not None:
            work()


class Blocks:
    """Computes on the device; stands for a `Packer`."""

    def __init__(self, device: Device, compute_s: float = 0.0) -> None:
        self._device, self._compute_s = device, compute_s
        self.blocks = self
        self.traits = type("", (), {"batch_axis": 0})()

    def run_calls(self, calls: Sequence[SessionCall]) -> list[Tensor]:
        return [self._device.launch(call.inputs + 1, self._compute_s) for call in calls]  # type: ignore[operator]


class Step(SessionStep):
    """A step of some positions."""

    def __init__(self, blocks: Any, session: str, num_tokens: int = 1, granule: int = 1) -> None:
        super().__init__(
            session=session,
            packer=blocks,
            num_tokens=num_tokens,
            granule=granule,
            account=Account("a client"),
            priority=Priority.DECODE if num_tokens == 1 else Priority.PREFILL,
        )
        self._taken = 0

    def take(self, num_tokens: int) -> SessionCall:
        inputs: Any = torch.arange(self._taken, self._taken + num_tokens, dtype=torch.float32).view(1, -1, 1)
        self._taken += num_tokens
        return SessionCall(inputs, None, None)  # type: ignore[arg-type]


@pytest.fixture
async def device() -> AsyncIterator[Device]:
    device = Device()
    yield device
    device.end()


@pytest.fixture
async def thread(device: Device) -> AsyncIterator[DeviceThread]:
    thread = DeviceThread()
    thread.accelerator = device
    yield thread
    device.gate.set()
    await thread.close()
    await asyncio.get_running_loop().shutdown_default_executor()


@pytest.mark.parametrize("num_tokens", [1, 5, 700])
async def test_outputs_are_there_when_they_are_told(thread: DeviceThread, device: Device, num_tokens: int) -> None:
    """Whole steps and such as go in pieces; and what the device had of them is free again."""
    blocks = Blocks(device, compute_s=0.002)
    steps = [Step(blocks, name, num_tokens) for name in "abc"]
    for timed in await asyncio.gather(*(thread.run_step(step) for step in steps)):
        assert timed.value.flatten().tolist() == list(range(1, num_tokens + 1))
    assert len(device.memory) == 0


async def test_batches_are_there_when_they_are_told(thread: DeviceThread, device: Device) -> None:
    kept = object()

    def turns() -> Generator[None, None, Any]:
        first = device.launch(torch.ones(3), COMPUTE_S)
        yield
        return kept, {"hidden_states": device.launch(torch.full((2,), 2.0), COMPUTE_S), "same": first}

    timed = await thread.run_in_turns(turns(), Priority.SESSIONLESS)
    assert timed.value[0] is kept
    assert timed.value[1]["hidden_states"].tolist() == [2, 2]
    assert timed.value[1]["same"].tolist() == [1, 1, 1]
    assert timed.compute_us >= 2 * COMPUTE_S * 1e6, "both turns count, also the one that gives nothing yet"


async def test_the_time_of_the_device_is_measured(thread: DeviceThread, device: Device) -> None:
    """By the meter, by the answer, and by the account: fairness and training's share are of seconds of the device."""
    timed = await thread.run_step(Step(Blocks(device, COMPUTE_S), "a"))
    assert timed.compute_us >= COMPUTE_S * 1e6
    await thread.run_call(int, Priority.DECODE)  # a forward is counted before the next one
    assert thread.step_ms_p95 >= COMPUTE_S * 1e3


async def test_the_event_loop_does_not_wait_for_the_device(thread: DeviceThread, device: Device) -> None:
    device.gate.clear()
    task = asyncio.create_task(thread.run_step(Step(Blocks(device), "a")))
    for _ in range(20):
        await asyncio.sleep(0.005)
    assert not task.done()
    device.gate.set()
    timed = await task
    assert timed.value.tolist() == [[[1.0]]]
    assert (timed.value + 1).tolist() == [[[2.0]]], "without a word to the device"


async def test_a_failure_of_the_device_fails_its_calls(thread: DeviceThread, device: Device) -> None:
    blocks = Blocks(device)
    device.error = RuntimeError("an illegal instruction was encountered")
    for outcome in await asyncio.gather(
        *(thread.run_step(Step(blocks, name)) for name in "ab"), return_exceptions=True
    ):
        assert isinstance(outcome, RuntimeError)
    device.error = None
    assert (await thread.run_step(Step(blocks, "a"))).value.tolist() == [[[1.0]]]


def test_a_processor_is_none() -> None:
    assert accelerator_of(torch.device("cpu")) is None
    assert accelerator_of(torch.device("cuda:1")) is not None
