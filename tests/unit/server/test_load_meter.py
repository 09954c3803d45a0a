"""The load that a server announces."""

from functools import partial
from typing import Any

import pytest

from swarmllm.server.device.device_thread import (
    FORGET_QUEUE_S,
    FORWARD_SMOOTHING,
    LAST_STEPS,
    LONG_FORWARD,
    SMOOTHING,
    Call,
    LoadMeter,
    SessionStep,
)
from swarmllm.server.device.scheduler import Priority
from swarmllm.server.device.throughput import Throughput


def waiting(queued_at: float, num_tokens: int = 0) -> Call:
    return Call(num_tokens=num_tokens, granule=1, priority=Priority.DECODE, queued_at=queued_at)


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


def test_the_95th_percentile_of_steps() -> None:
    meter = LoadMeter()
    assert meter.step_ms(0.95) == meter.step_ms(0.5) == 0
    for number in range(LAST_STEPS + 100):  # those of the beginning, which took a second more, are forgotten
        began_at = 10.0 * number
        meter.count(
            [(waiting(began_at), 1)], began_at, 0.0, ended_at=began_at + (1.0 if number < 100 else number / 1e4)
        )
    assert meter.step_ms(0.95) == pytest.approx((100 + int(0.95 * (LAST_STEPS - 1))) / 10)
    assert meter.step_ms(0.5) == pytest.approx((100 + int(0.5 * (LAST_STEPS - 1))) / 10)


def test_the_time_from_token_to_token_is_what_clients_wait_for() -> None:
    meter = LoadMeter()

    def came(at: float, position: int, session: str = "a", priority: Priority = Priority.DECODE) -> None:
        work = step(priority=priority)
        work.queued_at, work.session, work.num_rows, work.context_tokens = at, session, 2, 2 * position
        meter.count([(work, 2)], at, 0.0, ended_at=at + 0.01)

    came(0.0, 0, priority=Priority.PREFILL)
    came(5.0, 8)  # the first token after a prompt
    assert meter.token_ms() == 0
    came(5.2, 9)
    came(5.25, 100, session="b")  # another text
    assert meter.token_ms() == pytest.approx(200)
    for after in range(1, 10):
        came(5.2 + after * 0.9, 9 + 3 * after)  # three guesses were right each time
    assert meter.token_ms() == pytest.approx(300)
    came(90.0, 10)  # the text was cropped
    came(99.0, 50, priority=Priority.PREFILL)
    came(100.0, 60)
    meter.forget("b")
    came(999.0, 101, session="b")
    assert meter.token_ms() == pytest.approx(300)


def step(num_blocks: int = 4, priority: Priority = Priority.DECODE) -> SessionStep:
    """A step of a row with 1000 tokens in its cache."""
    packer: Any = None
    return SessionStep(
        num_tokens=0, granule=1, priority=priority, packer=packer, num_blocks=num_blocks, context_tokens=1000
    )


def measured(decode_ms: float, batch8_ms: float = 0.0, context_ms: float = 0.0) -> Throughput:
    return Throughput(
        forward_tokens_per_s=1.0,
        decode_ms_per_block=decode_ms,
        decode_ms_per_block_batch8=batch8_ms,
        context_ms_per_block_per_1k=context_ms,
    )


def test_the_time_of_steps_is_compared_with_the_measured_time() -> None:
    meter = LoadMeter()
    meter.count([(step(), 1)], now=0.0, since=0.0, ended_at=9.0)
    assert meter.pace == 1
    meter.expect(measured(1.0, 8.0, 0.5).step_ms)
    two_rows_s = 4 * (1 + 1 + 0.5 * 2) / 1e3
    for _ in range(100):
        meter.count([(step(), 1), (step(), 1)], now=0.0, since=0.0, ended_at=3.5 * two_rows_s)
    assert meter.pace == pytest.approx(3.5, rel=1e-3)
    meter.count([(step(), 1)], now=0.0, since=0.0, ended_at=4 * 1.5 / 1e3)
    assert meter.pace == pytest.approx(3.5 - SMOOTHING * 2.5, rel=1e-3)
    meter.expect(measured(3.0).step_ms)
    assert meter.pace == 1


def test_the_time_of_long_forwards_is_compared_with_the_measured_speed() -> None:
    meter, all_blocks = LoadMeter(), 8
    measured_speed = Throughput(forward_tokens_per_s=100.0, decode_ms_per_block=1.0)
    meter.expect(measured_speed.step_ms, partial(measured_speed.forward_ms, all_blocks))
    prompt = step(num_blocks=4, priority=Priority.PREFILL)
    for _ in range(60):  # half of the blocks: 200 tokens/s
        meter.count([(prompt, LONG_FORWARD)], now=0.0, since=0.0, ended_at=3 * LONG_FORWARD / 200)
    assert meter.forward_pace == pytest.approx(3, rel=1e-3)
    meter.count([(prompt, LONG_FORWARD - 1)], now=0.0, since=0.0, ended_at=99.0)  # short
    meter.count([(prompt, LONG_FORWARD), (step(), 1)], now=0.0, since=0.0, ended_at=99.0)  # beside a decode step
    assert meter.forward_pace == pytest.approx(3, rel=1e-3)
    meter.compare_forward(all_blocks, 1000, took_ms=10_000)  # without a session, at the measured speed
    assert meter.forward_pace == pytest.approx(3 - FORWARD_SMOOTHING * 2, rel=1e-3)
    assert meter.pace == 1
    meter.expect(measured(3.0).step_ms)
    assert meter.forward_pace == 1


def test_steps_beside_prompts_or_of_unlike_spans_tell_nothing() -> None:
    meter = LoadMeter()
    meter.expect(measured(1.0).step_ms)
    for beside in ((step(priority=Priority.PREFILL), 100), (step(num_blocks=2), 1)):
        meter.count([(step(), 1), beside], now=0.0, since=0.0, ended_at=9.0)
    assert meter.pace == 1
