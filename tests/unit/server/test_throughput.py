"""Measurements of throughput: their share of the time, and the use of their figures."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from swarmllm.data_structures import Span
from swarmllm.models.quantization.rules import StoredType
from swarmllm.models.span.packing import Packing
from swarmllm.server.device import throughput
from swarmllm.server.device.throughput import Throughput, measure_throughput, prefill_tokens_beside_decode

HOSTED = Span(8, 48)
STALL_S = 0.6
SLOW = Throughput(forward_tokens_per_s=100.0, decode_ms_per_block=2.0)


class Clock:
    """Blocks of which each takes some time for each token, on a clock that stands still otherwise."""

    def __init__(self, block_s: float) -> None:
        self.block_s, self.now = block_s, 0.0
        self.ran: list[Span] = []
        self.stalled = -1
        """The run during which something else takes the machine."""

    def forward(self, inputs: int, span: Span, _: object = None) -> None:
        self.now += STALL_S if len(self.ran) == self.stalled else 0.0
        self.ran.append(span)
        self.now += self.block_s * inputs * len(span)

    def packer(self) -> Any:
        blocks = SimpleNamespace(
            span=HOSTED,
            device=torch.device("cpu"),
            keeps_cache=True,
            max_positions=None,
            pool=None,
            traits=SimpleNamespace(forbidden_cuts=(9, 10)),
            new_cache=lambda _: SimpleNamespace(position=0),
            forward=self.forward,
        )
        return SimpleNamespace(
            blocks=blocks, use=lambda _: None, way=Packing.RAGGED, run_calls=self.run_calls, has_own_step=False
        )

    def run_calls(self, calls: Sequence[Any]) -> list[None]:
        for call in calls:
            self.forward(call.inputs, call.span, call.cache)
        return [None for _ in calls]


@pytest.fixture
def clock(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock(request.param)
    monkeypatch.setattr(throughput, "random_inputs", lambda _, seq_len, batch=1: seq_len * batch)
    monkeypatch.setattr(throughput, "seconds", lambda _, run: -clock.now + (run(), clock.now)[1])
    monkeypatch.setattr(throughput, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    monkeypatch.setattr(throughput, "measure_packing", lambda *_: Packing.RAGGED)
    monkeypatch.setattr(throughput, "measure_lines", lambda *_: None)
    return clock


@pytest.mark.parametrize("clock", [1e-7, 1e-5, 1e-4, 1e-3], indirect=True, ids="{} s".format)
def test_a_start_takes_a_second_or_two_more_however_many_blocks_there_are(clock: Clock) -> None:
    measured = measure_throughput(clock.packer())
    assert measured.decode_ms_per_block == pytest.approx(clock.block_s * 1e3)
    assert measured.forward_tokens_per_s == pytest.approx(1 / clock.block_s / len(HOSTED)), "through all of them"
    of_one_forward_s = 3 * throughput.FORWARD_TOKENS * clock.block_s  # of as many as can't be cut
    assert clock.now < throughput.BUDGET_S + throughput.CONTEXT_BUDGET_S + 5 * max(
        throughput.MEASURED_S, of_one_forward_s
    )
    assert min(map(len, clock.ran)) == 3, "cut where the model can be"


@pytest.mark.parametrize("clock", [1e-7], indirect=True)
def test_fast_blocks_are_all_measured(clock: Clock) -> None:
    measure_throughput(clock.packer())
    assert HOSTED in clock.ran


@pytest.mark.parametrize("clock", [1e-4], indirect=True)
def test_recorded_steps_are_measured_through_all_blocks(clock: Clock) -> None:
    """Steps through some of them are launched kernel by kernel: 5 times as slow on an H200."""
    packer = clock.packer()
    packer.has_own_step = True
    measure_throughput(packer)
    assert set(clock.ran[throughput.REPEATS + 1 :]) == {HOSTED}


@pytest.mark.parametrize("clock", [1e-7, 1e-2], indirect=True, ids="{} s".format)
def test_threads_are_tried_however_slow_one_thread_is(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    threads, alone_s = [16], clock.block_s

    def use(number: int) -> None:
        threads.append(number)
        clock.block_s = alone_s / number

    monkeypatch.setattr(torch, "get_num_threads", lambda: threads[-1])
    monkeypatch.setattr(torch, "set_num_threads", use)
    measured = measure_throughput(clock.packer(), choose_threads=True)
    assert measured.num_threads == threads[-1] >= 8
    assert measured.decode_ms_per_block == pytest.approx(alone_s * 1e3 / measured.num_threads)


@pytest.mark.parametrize("clock", [1e-7], indirect=True)
def test_long_forwards_are_not_measured_with_threads_that_make_steps_slow(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads, usual, ran = [4], clock.forward, []

    def forward(inputs: int, span: Span, _: object = None) -> None:
        clock.now += 0.0 if threads[-1] == 1 else 1.0
        ran.append((threads[-1], inputs))
        usual(inputs, span)

    monkeypatch.setattr(torch, "get_num_threads", lambda: threads[-1])
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    monkeypatch.setattr(clock, "forward", forward)
    assert measure_throughput(clock.packer(), choose_threads=True).num_threads == threads[-1] == 1
    assert (1, throughput.FORWARD_TOKENS) in ran
    assert (2, 1) in ran
    assert (2, throughput.FORWARD_TOKENS) not in ran


@pytest.mark.parametrize("clock", [1e-5, 1e-3], indirect=True, ids="{} s".format)
def test_no_stall_of_the_machine_makes_blocks_look_slow(clock: Clock) -> None:
    measure_throughput(clock.packer())
    for stalled in range(len(clock.ran)):
        clock.ran, clock.stalled = [], stalled
        measured = measure_throughput(clock.packer())
        assert measured.decode_ms_per_block == pytest.approx(clock.block_s * 1e3)
        assert measured.forward_tokens_per_s == pytest.approx(1 / clock.block_s / len(HOSTED))


def test_missing_measurements_are_not_logged() -> None:
    words = throughput._in_words(replace(SLOW, num_threads=1))
    assert words == "100 tokens/s in batches; a decode step takes 2.00 ms per block, with 1 thread"
    words = throughput._in_words(
        replace(SLOW, decode_ms_per_block_batch8=3.0, context_ms_per_block_per_1k=0.5, num_threads=2)
    )
    assert words.endswith("2.00 ms per block, 3.00 for 8 rows, 0.500 more per 1000 tokens of context, with 2 threads")


def test_a_prompt_gets_a_share_of_the_time_of_a_decode_step() -> None:
    step_s = 4 * 2.0 / 1e3
    fast = Throughput(forward_tokens_per_s=50_000.0, decode_ms_per_block=2.0)
    tokens = prefill_tokens_beside_decode(fast, num_blocks=4)
    assert tokens / fast.forward_tokens_per_s == pytest.approx(throughput.PREFILL_SHARE * step_s)
    assert prefill_tokens_beside_decode(SLOW, num_blocks=4) == throughput.MIN_PREFILL_TOKENS


@pytest.mark.parametrize(
    ("decode_ms", "piece_ms", "expected"),
    [
        (0.6, {64: 0.6, 256: 0.62, 1024: 0.8}, 1024),  # launches take the time, of a decode step as well
        (0.1, {64: 0.6, 256: 0.62, 1024: 0.8}, 1024),  # a decode step is one launch
        (0.1, {64: 0.6, 256: 0.7, 1024: 2.0}, 256),
        (0.1, {64: 0.6, 256: 2.0, 1024: 8.0}, 64),  # computing takes the time from the first on
        (0.5, {64: 0.55, 256: 2.0}, 64),
        (0.1, {64: 0.6}, 8),  # nothing to compare with
        (2.0, {}, 8),
    ],
)
def test_prompts_are_not_cut_into_pieces_that_launches_take_as_long_for(
    decode_ms: float, piece_ms: dict[int, float], expected: int
) -> None:
    measured = Throughput(forward_tokens_per_s=1.0, decode_ms_per_block=decode_ms, piece_ms_per_block=piece_ms)
    assert prefill_tokens_beside_decode(measured, num_blocks=4) == expected


@pytest.mark.parametrize("clock", [1e-7], indirect=True)
@pytest.mark.parametrize(("device", "sizes"), [("cpu", ()), ("cuda", throughput.PIECES)])
def test_pieces_are_measured_where_a_device_computes_beside_its_thread(
    clock: Clock, device: str, sizes: tuple[int, ...]
) -> None:
    packer = clock.packer()
    packer.blocks.device = torch.device(device)
    measured = measure_throughput(packer)
    expected = {tokens: pytest.approx(tokens * clock.block_s * 1e3) for tokens in sizes}
    assert measured.piece_ms_per_block == expected
    assert measured.batch_ms_per_block == expected


@pytest.mark.parametrize("clock", [1e-7], indirect=True)
def test_a_slow_start_leaves_out_no_pieces(clock: Clock) -> None:
    """The first forward on a GPU loads libraries. Without these figures, clients would send few tokens at a time."""
    packer = clock.packer()
    packer.blocks.device = torch.device("cuda")
    clock.stalled = 0
    assert STALL_S > throughput.BUDGET_S
    measured = measure_throughput(packer)
    assert tuple(measured.piece_ms_per_block) == tuple(measured.batch_ms_per_block) == throughput.PIECES


@pytest.mark.parametrize("clock", [3e-5], indirect=True)
def test_slow_pieces_are_the_last(clock: Clock) -> None:
    packer = clock.packer()
    packer.blocks.device = torch.device("cuda")
    packer.has_own_step = True
    assert 64 * clock.block_s * len(HOSTED) < throughput.SLOW_S < 256 * clock.block_s * len(HOSTED)
    assert tuple(measure_throughput(packer).piece_ms_per_block) == (64, 256)


@pytest.mark.parametrize("quant_type", ["int8", "q4_k"])
def test_reading_weights_is_measured_without_a_checkpoint(
    quant_type: StoredType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(throughput, "WEIGHTS_SHAPE", (32, 256))
    monkeypatch.setattr(throughput, "WEIGHTS_BYTES", 10_000)
    monkeypatch.setattr(throughput, "time", SimpleNamespace(perf_counter=iter(range(100)).__next__))  # a second a round
    num_bytes = {"int8": 32 * (256 + 2), "q4_k": 32 * 144}[quant_type]
    assert throughput.measure_weights(torch.device("cpu"), quant_type) == -(-10_000 // num_bytes) * num_bytes
