"""How busy a server says that it is."""

import asyncio
from typing import Any

import pytest

from swarmllm.server.device.calls import Call
from swarmllm.server.device.load_meter import FORGET_QUEUE_S, LAST_STEPS, SMOOTHING, LoadMeter
from swarmllm.server.device.scheduler import Priority


def waiting(queued_at: float, num_tokens: int = 0) -> Call:
    future: Any = asyncio.Future
    return Call(num_tokens=num_tokens, granule=1, priority=Priority.DECODE, queued_at=queued_at, future=future)


def test_steps_count_when_they_are_whole_tokens_when_they_are_computed() -> None:
    meter = LoadMeter()
    meter.count([(waiting(0.0), 1), (waiting(0.0, num_tokens=30), 70)], now=1.0, since=0.0, ended_at=1.2)
    load = meter.load(1.0)
    assert (load.num_steps, load.num_tokens, load.num_forwards, load.batch_size) == (1, 71, 1, 2)


def test_a_queue_is_smoothed_and_forgotten_while_nobody_comes() -> None:
    meter = LoadMeter()
    meter.count([(waiting(0.0), 1), (waiting(0.5), 1)], now=1.0, since=0.0, ended_at=1.2)
    assert meter.load(1.0).queue_ms == pytest.approx(SMOOTHING * 750)
    assert meter.load(1.0 + FORGET_QUEUE_S).queue_ms == pytest.approx(SMOOTHING * 375)


def test_pauses_for_others_are_no_queue() -> None:
    meter = LoadMeter()
    meter.count([(waiting(0.0), 1)], now=1.0, since=0.9, ended_at=1.2)
    assert meter.load(1.0).queue_ms == pytest.approx(SMOOTHING * 100)


def test_what_95_of_100_steps_were_ready_within() -> None:
    meter = LoadMeter()
    assert meter.step_ms_p95() == 0
    for step in range(LAST_STEPS + 100):  # those of the beginning, which took a second more, are forgotten
        began_at = 10.0 * step
        meter.count([(waiting(began_at), 1)], began_at, 0.0, ended_at=began_at + (1.0 if step < 100 else step / 1e4))
    assert meter.step_ms_p95() == pytest.approx((100 + int(0.95 * (LAST_STEPS - 1))) / 10)
