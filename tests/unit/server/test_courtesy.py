"""Giving way: when it begins, when it becomes a pause, and when it ends."""

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from swarmllm.data_structures import ServerInfo
from swarmllm.server import machine_load
from swarmllm.server.courtesy import MIN_SHARE, PAUSED_AFTER_S, PAUSED_QUEUE_MS, Courtesy
from swarmllm.server.executor import Executor, Priority
from swarmllm.server.machine_load import MachineLoad, give_way

MEASURED = ServerInfo(
    peer_id="a" * 46, start=0, end=2, throughput=100.0, decode_ms_per_block=2.0, context_ms_per_block_per_1k=1.0
)


def test_half_of_the_cores_gone_is_half_of_the_speed() -> None:
    courtesy = Courtesy()
    courtesy.look(2.0, 4, 4, now=0.0)
    told = courtesy.announced(MEASURED)
    assert (told.throughput, told.decode_ms_per_block, told.context_ms_per_block_per_1k) == (50.0, 4.0, 2.0)
    assert (told.speed_share, told.queue_ms) == (0.5, 0.0)
    assert told.decode_ms_per_block_batch8 == 0.0, "what was not measured stays unknown"
    courtesy.ran(0.1, 0.15, now=7.0)
    assert courtesy.pause_s(7.0) == pytest.approx(0.05), "what the others had meanwhile counts"
    courtesy.ran(0.1, 0.3, now=7.0)
    assert courtesy.pause_s(7.0) == 0.0
    courtesy.ran(0.1, 0.1, now=7.0)
    assert courtesy.pause_s(7.0) == pytest.approx(0.1)
    assert courtesy.pause_s(7.2) == 0.0


def test_a_little_work_of_others_begins_nothing_but_keeps_it_going() -> None:
    courtesy = Courtesy()
    courtesy.look(0.6, 4, 4, now=0.0)
    assert courtesy.share == 1.0
    courtesy.look(2.0, 4, 4, now=3.0)
    courtesy.look(0.6, 4, 4, now=6.0)
    assert courtesy.share == pytest.approx(0.85)
    courtesy.look(0.2, 4, 4, now=9.0)
    assert courtesy.share == 1.0


def test_a_long_want_of_everything_is_a_pause_until_something_is_left() -> None:
    courtesy = Courtesy()
    courtesy.look(4.0, 4, 4, now=0.0)
    assert not courtesy.paused
    courtesy.look(4.0, 4, 4, now=PAUSED_AFTER_S)
    told = courtesy.announced(MEASURED)
    assert (told.speed_share, told.queue_ms) == (0.0, PAUSED_QUEUE_MS)
    assert told.throughput == pytest.approx(MIN_SHARE * MEASURED.throughput), "it still computes"
    courtesy.look(3.4, 4, 4, now=PAUSED_AFTER_S + 3)
    assert courtesy.paused
    courtesy.look(2.0, 4, 4, now=PAUSED_AFTER_S + 6)
    assert not courtesy.paused
    courtesy.look(4.0, 4, 4, now=PAUSED_AFTER_S + 9)
    assert not courtesy.paused, "the time counts from the last moment at which something was left"


class Machine:
    """Stands for psutil: counters that a test advances."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.machine = dict.fromkeys(("user", "nice", "system", "idle", "iowait"), 50.0)
        self.own = {"user": 5.0, "system": 5.0}
        this = SimpleNamespace(
            cpu_times=lambda: SimpleNamespace(**self.own), children=lambda recursive: [SimpleNamespace(cpu_times=ended)]
        )
        monkeypatch.setattr(machine_load.psutil, "Process", lambda: this)
        monkeypatch.setattr(machine_load.psutil, "cpu_times", lambda: SimpleNamespace(**self.machine))
        monkeypatch.setattr(machine_load.psutil, "cpu_count", lambda: 4)
        monkeypatch.setattr(machine_load, "time", SimpleNamespace(monotonic=lambda: self.now))


def ended() -> Any:
    raise psutil.NoSuchProcess(1)


def test_only_other_programs_of_usual_priority_count(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    load = MachineLoad()
    machine.now += 10
    machine.machine["user"] += 12  # others
    machine.machine["nice"] += 20  # this program, and another polite one
    machine.machine["system"] += 5  # of it 2 for this program
    machine.machine["iowait"] += 3
    machine.own["user"] += 15
    machine.own["system"] += 2
    assert load.others_cores() == pytest.approx(1.5)
    machine.now += 10
    assert load.others_cores() == 0.0


def test_a_system_that_does_not_count_polite_programs_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    del machine.machine["nice"]
    load = MachineLoad()
    machine.now += 10
    machine.machine["user"] += 30
    machine.own["user"] += 20
    assert load.others_cores() == pytest.approx(1.0)


async def test_the_log_says_when_it_begins_and_ends(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    readings = iter([0.0, 4.0, 4.0, 4.0, 0.0, 0.0])
    courtesy, ended = Courtesy(), asyncio.Event()

    def others_cores() -> float:
        reading = next(readings, None)
        if reading is None:
            ended.set()
        return reading or 0.0

    monkeypatch.setattr(machine_load, "MachineLoad", lambda: SimpleNamespace(num_cores=4, others_cores=others_cores))
    with caplog.at_level("INFO"):
        watching = asyncio.create_task(give_way(courtesy, lambda: 4, 0.0))
        await ended.wait()
        watching.cancel()
    await asyncio.get_running_loop().shutdown_default_executor()
    assert [record.getMessage() for record in caplog.records] == [
        "other programs keep 4.0 of 4 cores busy: giving way, computing 10 % of the time or less",
        "other programs keep 0.0 of 4 cores busy: computing at full speed again",
    ]


async def test_the_device_pauses_after_each_call_and_what_waits_meanwhile_is_not_lost() -> None:
    class Strict(Courtesy):
        pauses = 0

        def pause_s(self, now: float) -> float:
            self.pauses += 1
            return 0.0 if self.pauses % 3 == 0 else 1e-3

    courtesy = Strict()
    executor = Executor(courtesy=courtesy)
    try:
        names: list[str] = []
        await asyncio.gather(
            *(executor.run(lambda: names.append(threading.current_thread().name), Priority.DECODE) for _ in range(5))
        )
        assert len(names) == 5
        assert courtesy.pauses >= 5
    finally:
        await executor.close()
        await asyncio.get_running_loop().shutdown_default_executor()
