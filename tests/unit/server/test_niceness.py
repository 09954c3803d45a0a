"""Giving way: when it begins, when it becomes a pause, and when it ends."""

import asyncio
import threading

import pytest

from swarmllm.data_structures import ServerInfo
from swarmllm.server.device import niceness as niceness_module
from swarmllm.server.device.device_thread import DeviceThread
from swarmllm.server.device.niceness import (
    MIN_SHARE,
    PAUSED_AFTER_S,
    PAUSED_QUEUE_MS,
    Niceness,
    cores_of_others,
    give_way,
)
from swarmllm.server.device.scheduler import Priority

MEASURED = ServerInfo(
    peer_id="a" * 46, start=0, end=2, throughput=100.0, decode_ms_per_block=2.0, context_ms_per_block_per_1k=1.0
)


def test_half_of_the_cores_gone_is_half_of_the_speed() -> None:
    niceness = Niceness()
    niceness.look(2.0, 4, 4, now=0.0)
    told = niceness.announced(MEASURED)
    assert (told.throughput, told.decode_ms_per_block, told.context_ms_per_block_per_1k) == (50.0, 4.0, 2.0)
    assert (told.speed_share, told.queue_ms) == (0.5, 0.0)
    assert told.decode_ms_per_block_batch8 == 0.0, "what was not measured stays unknown"
    niceness.ran(0.1, 0.15, now=7.0)
    assert niceness.pause_s(7.0) == pytest.approx(0.05), "what the others had meanwhile counts"
    niceness.ran(0.1, 0.3, now=8.0)
    assert niceness.pause_s(8.0) == 0.0
    assert niceness.resumes_at == pytest.approx(7.05), "a forward without a pause is no end of one"
    niceness.ran(0.1, 0.1, now=9.0)
    assert niceness.pause_s(9.0) == pytest.approx(0.1)
    assert niceness.pause_s(9.2) == 0.0


def test_a_little_work_of_others_begins_nothing_but_keeps_it_going() -> None:
    niceness = Niceness()
    niceness.look(0.6, 4, 4, now=0.0)
    assert niceness.share == 1.0
    niceness.look(2.0, 4, 4, now=3.0)
    niceness.look(0.6, 4, 4, now=6.0)
    assert niceness.share == pytest.approx(0.85)
    niceness.look(0.2, 4, 4, now=9.0)
    assert niceness.share == 1.0


def test_a_long_want_of_everything_is_a_pause_until_something_is_left() -> None:
    niceness = Niceness()
    niceness.look(4.0, 4, 4, now=0.0)
    assert not niceness.paused
    niceness.look(4.0, 4, 4, now=PAUSED_AFTER_S)
    told = niceness.announced(MEASURED)
    assert (told.speed_share, told.queue_ms) == (0.0, PAUSED_QUEUE_MS)
    assert told.throughput == pytest.approx(MIN_SHARE * MEASURED.throughput), "it still computes"
    niceness.look(2.0, 4, 4, now=PAUSED_AFTER_S + 6)
    assert not niceness.paused
    niceness.look(4.0, 4, 4, now=PAUSED_AFTER_S + 9)
    assert not niceness.paused, "the time counts from the last moment at which something was left"


def test_only_other_programs_of_usual_priority_count() -> None:
    before = (100.0, 50.0, 50.0, 5.0)
    assert cores_of_others(before, (110.0, 65.0, 70.0, 20.0)) == pytest.approx(1.5), "our own 15 s are among the nice"
    assert cores_of_others(before, (110.0, 80.0, 50.0, 25.0)) == pytest.approx(1.0), "no system tells them apart there"
    assert cores_of_others(before, before) == 0.0


async def test_the_log_says_when_it_begins_and_ends(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    readings = iter([0.0, 4.0, 4.0, 4.0, 0.0, 0.0])
    niceness, ended = Niceness(), asyncio.Event()

    def others_cores(*_: object) -> float:
        reading = next(readings, None)
        if reading is None:
            ended.set()
        return reading or 0.0

    monkeypatch.setattr(niceness_module, "cores_of_others", others_cores)
    monkeypatch.setattr(niceness_module.psutil, "cpu_count", lambda: 4)
    with caplog.at_level("INFO"):
        watching = asyncio.create_task(give_way(niceness, lambda: 4, 0.0))
        await ended.wait()
        watching.cancel()
    await asyncio.get_running_loop().shutdown_default_executor()
    assert [record.getMessage() for record in caplog.records] == [
        "other programs keep 4.0 of 4 cores busy: giving way, computing less",
        "other programs keep 0.0 of 4 cores busy: computing at full speed again",
    ]


async def test_the_device_pauses_after_each_call_and_waiting_calls_are_not_lost() -> None:
    class Strict(Niceness):
        pauses = 0

        def pause_s(self, now: float) -> float:
            self.pauses += 1
            return 0.0 if self.pauses % 3 == 0 else 1e-3

    niceness = Strict()
    thread = DeviceThread(niceness=niceness)
    try:
        names: list[str] = []
        await asyncio.gather(
            *(thread.run_call(lambda: names.append(threading.current_thread().name), Priority.DECODE) for _ in range(5))
        )
        assert len(names) == 5
        assert niceness.pauses >= 5
    finally:
        await thread.close()
        await asyncio.get_running_loop().shutdown_default_executor()
