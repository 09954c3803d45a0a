"""The device thread: what waits goes together, the urgent first, nothing that nobody wants, and each fails alone."""

import asyncio
import gc
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Generator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from swarmllm.data_structures import BlockTraits
from swarmllm.errors import BlocksNotServedError, LocalProtocolError, ServerOutOfMemoryError, SessionLostError
from swarmllm.models.span.packing import SessionCall
from swarmllm.server.device import device, device_thread
from swarmllm.server.device.device import block_errors_translated, memory_errors_translated
from swarmllm.server.device.device_thread import COUNTED_AFTER_S, DeviceThread, SessionStep
from swarmllm.server.device.scheduler import Account, Priority


@pytest.fixture
async def helpers() -> AsyncIterator[None]:
    """Ends the threads of asyncio.to_thread, which otherwise live as long as the loop."""
    yield
    await asyncio.get_running_loop().shutdown_default_executor()


@pytest.fixture
async def thread(helpers: None) -> AsyncIterator[DeviceThread]:
    thread = DeviceThread()
    yield thread
    await thread.close()


class Gate:
    """A call that waits in the device thread until it is opened."""

    def __init__(self) -> None:
        self.entered, self.opened = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.entered.set()
        self.opened.wait()


async def blocked(thread: DeviceThread) -> tuple[Gate, asyncio.Task[object]]:
    gate = Gate()
    task = asyncio.create_task(thread.run_call(gate, Priority.DECODE))
    await asyncio.to_thread(gate.entered.wait)
    return gate, task


async def test_urgent_calls_overtake_and_equal_ones_keep_their_order(thread: DeviceThread) -> None:
    order: list[str] = []

    def call(name: str) -> Callable[[], None]:
        return lambda: order.append(name)

    gate, first = await blocked(thread)
    wanted = [
        ("b1", Priority.SESSIONLESS),
        ("p1", Priority.PREFILL),
        ("d1", Priority.DECODE),
        ("b2", Priority.SESSIONLESS),
    ]
    wanted += [("d2", Priority.DECODE), ("p2", Priority.PREFILL)]
    tasks = [asyncio.create_task(thread.run_call(call(name), priority)) for name, priority in wanted]
    await asyncio.sleep(0)
    assert thread.num_calls == 7
    gate.opened.set()
    await asyncio.gather(first, *tasks)

    assert order == ["d1", "d2", "p1", "p2", "b1", "b2"]
    assert thread.num_calls == 0


async def test_values_times_and_errors_come_back(thread: DeviceThread) -> None:
    timed = await thread.run_call(lambda: threading.current_thread().name, Priority.DECODE)
    assert timed.value == "swarmllm-device"
    assert timed.queue_us >= 0
    assert timed.compute_us >= 0
    with pytest.raises(ZeroDivisionError):
        await thread.run_call(lambda: 1 // 0, Priority.DECODE)
    assert (await thread.run_call(lambda: 5, Priority.DECODE)).value == 5


async def test_a_call_that_is_cancelled_before_its_turn_is_not_run(thread: DeviceThread) -> None:
    ran: list[int] = []
    gate, first = await blocked(thread)
    second = asyncio.create_task(thread.run_call(lambda: ran.append(2), Priority.DECODE))
    await asyncio.sleep(0)
    second.cancel()
    gate.opened.set()
    await first
    await thread.run_call(lambda: ran.append(3), Priority.DECODE)
    assert ran == [3]


async def test_work_in_turns_lets_the_urgent_pass_and_nobody_else(thread: DeviceThread) -> None:
    order: list[str] = []

    def turns(name: str) -> Generator[None, None, str]:
        for turn in range(3):
            order.append(f"{name}{turn}")
            if name == "a" and turn == 0:
                first.entered.set()
                first.opened.wait()
            if turn < 2:
                yield
        return name

    first = Gate()
    tasks = [asyncio.create_task(thread.run_in_turns(turns(name), Priority.SESSIONLESS)) for name in "ab"]
    await asyncio.to_thread(first.entered.wait)
    urgent = asyncio.create_task(thread.run_call(lambda: order.append("urgent"), Priority.DECODE))
    await asyncio.sleep(0)
    first.opened.set()
    assert [(await task).value for task in tasks] == ["a", "b"]
    await urgent
    assert order == ["a0", "urgent", "a1", "a2", "b0", "b1", "b2"]


async def test_work_in_turns_ends_with_its_error_or_when_nobody_wants_it(thread: DeviceThread) -> None:
    gate = Gate()
    ran: list[int] = []

    def turns(end: Callable[[], object]) -> Generator[None, None, None]:
        yield
        ran.append(1)
        end()
        yield
        ran.append(2)

    with pytest.raises(ZeroDivisionError):
        await thread.run_in_turns(turns(lambda: 1 // 0), Priority.SESSIONLESS)
    task = asyncio.create_task(thread.run_in_turns(turns(gate), Priority.SESSIONLESS))
    await asyncio.to_thread(gate.entered.wait)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    gate.opened.set()
    assert (await thread.run_call(lambda: 5, Priority.SESSIONLESS)).value == 5
    assert ran == [1, 1]
    assert thread.num_calls == 0


async def test_waiting_until_idle(thread: DeviceThread) -> None:
    await thread.wait_until_idle()
    gate, first = await blocked(thread)
    idle = asyncio.create_task(thread.wait_until_idle())
    await asyncio.sleep(0)
    assert not idle.done()
    gate.opened.set()
    await first
    await idle


@pytest.mark.usefixtures("helpers")
async def test_closing_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_thread, "CLOSE_TIMEOUT_S", 0.02)
    thread = DeviceThread()
    gate, first = await blocked(thread)
    await thread.close()
    gate.opened.set()
    await first


class Blocks:
    """Adds one; fails where the inputs are negative. Remembers which positions of how many sessions went together."""

    def __init__(self) -> None:
        self.blocks, self.traits = self, BlockTraits()
        self.forwards: list[list[int]] = []

    def run_calls(self, calls: Sequence[SessionCall]) -> list[Tensor | Exception]:
        hidden: list[Any] = [call.inputs for call in calls]
        self.forwards.append([tensor.shape[1] for tensor in hidden])
        return [ArithmeticError("negative") if (tensor < 0).any() else tensor + 1 for tensor in hidden]


class Step(SessionStep):
    """A step of some positions; `value` None: it can't even begin."""

    def __init__(self, blocks: Any, session: str, value: float | None, num_tokens: int = 1) -> None:
        super().__init__(
            session=session,
            packer=blocks,
            num_tokens=num_tokens,
            granule=1,
            account=Account("a client"),
            priority=Priority.DECODE if num_tokens == 1 else Priority.PREFILL,
        )
        self.value = value
        self.taken: list[int] = []

    def take(self, num_tokens: int) -> SessionCall:
        if self.value is None:
            raise SessionLostError("nothing to build on")
        self.taken.append(num_tokens)
        inputs: Any = torch.full((1, num_tokens, 2), self.value)
        return SessionCall(inputs, None, None)  # type: ignore[arg-type]


async def test_steps_that_wait_go_together_and_each_fails_alone(thread: DeviceThread) -> None:
    blocks, others = Blocks(), Blocks()
    gate, first = await blocked(thread)
    steps = [Step(blocks, "a", 1), Step(blocks, "b", -1), Step(blocks, "c", None), Step(others, "d", 2)]
    steps += [Step(blocks, "e", 3), Step(blocks, "e", 4)]
    tasks = [asyncio.create_task(thread.run_step(step)) for step in steps]
    await asyncio.sleep(0)
    gate.opened.set()
    await first
    a, b, c, d, e, f = await asyncio.gather(*tasks, return_exceptions=True)

    assert blocks.forwards == [[1, 1, 1], [1]]  # two steps of one session are two forwards
    assert others.forwards == [[1]]
    assert [timed.value[0, 0, 0] for timed in (a, d, e, f)] == [2, 3, 4, 5]
    assert isinstance(b, ArithmeticError)
    assert isinstance(c, SessionLostError)
    await thread.run_call(int, Priority.DECODE)  # a forward is counted before the next one
    load = thread.load
    assert (load.num_steps, load.num_tokens, load.num_forwards) == (6, 6, 2)
    assert 1 < load.batch_size < 5


async def test_a_long_step_is_computed_in_pieces_beside_others(thread: DeviceThread) -> None:
    blocks = Blocks()
    long = Step(blocks, "a", 1, num_tokens=100)
    await thread.run_call(lambda: thread.adopt(doubling_tokens=24, beside_decode=24), Priority.SESSIONLESS)
    gate, first = await blocked(thread)
    prefill = asyncio.create_task(thread.run_step(long))
    decode = asyncio.create_task(thread.run_step(Step(blocks, "b", 1)))
    await asyncio.sleep(0)
    gate.opened.set()
    await first
    await decode
    outputs = (await prefill).value
    assert outputs.shape == (1, 100, 2)
    assert (outputs == 2).all()
    assert len(long.taken) > 1
    assert blocks.forwards[0] == [1, 24]


async def test_outputs_that_do_not_fit_together_fail_their_own_step_alone(thread: DeviceThread) -> None:
    class Uneven(Blocks):
        def run_calls(self, calls: Sequence[SessionCall]) -> list[Any]:
            self.forwards.append([])
            return [torch.zeros(1, 1, len(self.forwards)) for _ in calls]

    blocks = Blocks()
    await thread.run_call(lambda: thread.adopt(doubling_tokens=24, beside_decode=24), Priority.SESSIONLESS)
    gate, first = await blocked(thread)
    uneven = asyncio.create_task(thread.run_step(Step(Uneven(), "a", 1, num_tokens=100)))
    others = [asyncio.create_task(thread.run_step(Step(blocks, name, 1))) for name in "bc"]
    await asyncio.sleep(0)
    gate.opened.set()
    with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
        await uneven
    await asyncio.gather(first, *others)
    assert (await thread.run_step(Step(blocks, "a", 1))).value[0, 0, 0] == 2


async def test_a_call_may_raise_whatever_it_likes(thread: DeviceThread) -> None:
    def raises(error: BaseException) -> None:
        raise error

    calls = [
        thread.run_call(partial(raises, error), Priority.DECODE) for error in (StopIteration(3), KeyError(), OSError())
    ]
    kinds = [type(error) for error in await asyncio.gather(*calls, return_exceptions=True)]
    assert kinds == [RuntimeError, KeyError, OSError]
    assert (await thread.run_call(lambda: 5, Priority.DECODE)).value == 5


@pytest.mark.parametrize("place", ["next", "ran", "add", "decoding"])
async def test_a_mistake_in_the_thread_itself_fails_all_calls_and_is_reported(
    thread: DeviceThread, place: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def mistake(*_: object) -> None:
        raise ZeroDivisionError("nobody thought of this")

    gate, first = await blocked(thread)
    monkeypatch.setattr(thread._scheduler, place, mistake)
    watching = asyncio.create_task(thread.watch())
    waiting = [asyncio.create_task(thread.run_step(Step(Blocks(), name, 1))) for name in "abc"]
    await asyncio.sleep(0)
    gate.opened.set()
    results = await asyncio.gather(first, *waiting, return_exceptions=True)
    assert [type(result) for result in results[1:]] == [BlocksNotServedError] * 3
    with pytest.raises(LocalProtocolError, match=r"ZeroDivisionError: nobody thought of this.*start the server again"):
        await watching
    with pytest.raises(BlocksNotServedError, match="can't compute any more"):
        await thread.run_call(lambda: 5, Priority.DECODE)
    await thread.wait_until_idle()
    assert "the device thread ended" in caplog.text


@pytest.mark.parametrize("lost", [True, False])
async def test_a_cuda_context_that_is_lost_ends_the_thread(
    thread: DeviceThread, lost: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Every later call would fail, for everybody; so the process ends with one sentence. Others fail alone."""

    def synchronize() -> None:
        if lost:
            raise RuntimeError("CUDA error: device-side assert triggered\nCompile with `TORCH_USE_CUDA_DSA`")

    def fails() -> None:
        raise RuntimeError("CUDA error: device-side assert triggered" if lost else "CUDA error: invalid argument")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    watching = asyncio.create_task(thread.watch())
    with pytest.raises(BlocksNotServedError if lost else RuntimeError, match="CUDA error"):
        await thread.run_call(fails, Priority.DECODE)
    if not lost:
        assert (await thread.run_call(lambda: 5, Priority.DECODE)).value == 5
        watching.cancel()
        return
    with pytest.raises(
        LocalProtocolError, match=r"device can't be used .*\(CUDA error: device-side assert triggered\)"
    ):
        await watching
    assert "the device thread ended" not in caplog.text, "no traceback beside the sentence"
    with pytest.raises(BlocksNotServedError, match="can't compute any more"):
        await thread.run_call(lambda: 5, Priority.DECODE)


async def test_a_step_that_is_cancelled_before_its_turn_is_not_run(thread: DeviceThread) -> None:
    blocks = Blocks()
    gate, first = await blocked(thread)
    steps = [Step(blocks, "a", 1), Step(blocks, "b", 1)]
    tasks = [asyncio.create_task(thread.run_step(step)) for step in steps]
    await asyncio.sleep(0)
    tasks[0].cancel()
    gate.opened.set()
    await first
    await tasks[1]
    assert steps[0].taken == []
    assert blocks.forwards == [[1]]
    await thread.wait_until_idle()


async def test_a_step_that_was_cancelled_while_it_ran_is_let_go_at_once(thread: DeviceThread) -> None:
    """It holds a session's cache, and the next call may come tomorrow."""
    gate = Gate()

    class Slow(Blocks):
        def run_calls(self, calls: Sequence[SessionCall]) -> list[Any]:
            gate()
            return super().run_calls(calls)

    step = Step(Slow(), "a", 1)
    running = asyncio.create_task(thread.run_step(step))
    await asyncio.to_thread(gate.entered.wait)
    running.cancel()
    await asyncio.wait([running])
    gate.opened.set()
    found = weakref.ref(step)
    del step, running
    gc.disable()
    try:
        async with asyncio.timeout(60):
            while found() is not None:  # noqa: ASYNC110 - nobody is told of it
                await asyncio.sleep(0)
    finally:
        gc.enable()


LACKS = [
    MemoryError(),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory"),
    RuntimeError("std::bad_alloc"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"),
]


@pytest.mark.parametrize("lack", LACKS, ids=str)
async def test_lack_of_memory_is_an_error_of_its_own_and_makes_room(
    thread: DeviceThread, lack: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    def fails() -> None:
        raise lack

    class Lacking(Blocks):
        def run_calls(self, calls: Sequence[SessionCall]) -> list[Any]:
            return [lack for _ in calls]

    rooms: list[str] = []
    thread.on_out_of_memory = lambda: rooms.append(threading.current_thread().name)
    for failing in (thread.run_call(fails, Priority.SESSIONLESS), thread.run_step(Step(Lacking(), "a", 1))):
        with pytest.raises(ServerOutOfMemoryError, match="use another one"):
            await failing
    assert rooms == ["swarmllm-device"] * 2
    said = [record.getMessage() for record in caplog.records if record.name == device.logger.name]
    assert [line.startswith("memory ran out") and type(lack).__name__ in line for line in said] == [True] * 2
    with pytest.raises(ArithmeticError):
        await thread.run_step(Step(Blocks(), "a", -1))
    assert len(rooms) == 2


def test_each_lack_of_memory_is_one_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    def fails() -> None:
        raise MemoryError("no room\nat all")

    lack = MemoryError("of one forward")
    device.log_out_of_memory([lack, lack, ArithmeticError(), None, torch.zeros(1)])
    with pytest.raises(ServerOutOfMemoryError) as caught, memory_errors_translated(), block_errors_translated():
        fails()
    device.log_out_of_memory([caught.value])
    lines = [record.getMessage() for record in caplog.records]
    assert [line.partition(": ")[2] for line in lines] == ["MemoryError of one forward", "MemoryError no room"]


async def test_lack_of_memory_when_outputs_are_joined(thread: DeviceThread, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        torch.empty(1 << 48)

    monkeypatch.setattr(device_thread, "joined", fails)
    with pytest.raises(ServerOutOfMemoryError):
        await thread.run_step(Step(Blocks(), "a", 1))


async def test_a_forward_is_counted_soon_although_nothing_comes(thread: DeviceThread) -> None:
    await thread.run_step(Step(Blocks(), "a", 1))
    for _ in range(1000):
        if not thread.load.num_forwards:
            await asyncio.sleep(COUNTED_AFTER_S)
    assert (thread.load.num_steps, thread.load.num_tokens, thread.load.num_failures) == (1, 1, 0)
    with pytest.raises(ArithmeticError):
        await thread.run_step(Step(Blocks(), "b", -1))
    await thread.run_call(int, Priority.DECODE)
    assert thread.load.num_failures == 1
