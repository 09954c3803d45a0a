"""How busy a server says that it is."""

import asyncio
from typing import Any

import pytest

from swarmllm.server.device.device_thread import FORGET_QUEUE_S, LAST_STEPS, SMOOTHING, Call, DecodeTimes, LoadMeter
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


class Step:
    """One decode step of a row with 1000 tokens in its cache."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks, self.num_tokens, self.context_tokens = num_blocks, 1, 1000


def decoding(num_blocks: int = 4) -> tuple[Call, int]:
    call = waiting(0.0)
    call.step = Step(num_blocks)  # type: ignore[assignment]
    return call, 1


def test_what_steps_take_is_compared_with_what_was_measured() -> None:
    meter = LoadMeter()
    meter.count([decoding()], now=0.0, since=0.0, ended_at=9.0)
    assert meter.pace == 1
    meter.expect(DecodeTimes(1.0, 8.0, 0.5))
    two_rows_s = 4 * (1 + 1 + 0.5 * 2) / 1e3
    for _ in range(100):
        meter.count([decoding(), decoding()], now=0.0, since=0.0, ended_at=3.5 * two_rows_s)
    assert meter.pace == pytest.approx(3.5, rel=1e-3)
    meter.count([decoding()], now=0.0, since=0.0, ended_at=4 * 1.5 / 1e3)
    assert meter.pace == pytest.approx(3.5 - SMOOTHING * 2.5, rel=1e-3)
    meter.expect(DecodeTimes(3.0))
    assert meter.pace == 1


def test_steps_beside_prompts_or_of_unlike_spans_tell_nothing() -> None:
    meter = LoadMeter()
    meter.expect(DecodeTimes(1.0))
    prompt = waiting(0.0)
    prompt.priority, prompt.step = Priority.PREFILL, Step(4)  # type: ignore[assignment]
    for beside in ((prompt, 100), decoding(num_blocks=2)):
        meter.count([decoding(), beside], now=0.0, since=0.0, ended_at=9.0)
    assert meter.pace == 1
