"""Measure how fast this server's blocks are, once after loading, for the announcement.

Called by `span_loader` in the device thread, at each start: the same blocks are faster or slower on another machine,
or beside other programs. A rough estimate is enough: routing and placement only need the ratios between servers. The
figures that matter most are measured first; when time is up, the rest is left out. On other devices than CPUs, prompts
and batches of several sizes come before that time begins, and recorded steps run through all blocks. Measured as well:
the fastest of the right ways to compute steps of several sessions (`span/packing` lists them), on decode steps of some
of the blocks.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import TypeVar

import torch

from swarmllm.data_structures import Span
from swarmllm.machine_memory import into_huge_pages, return_free_memory
from swarmllm.models.boundary.block_inputs import BlockInputs
from swarmllm.models.quantization.loading import pack
from swarmllm.models.quantization.rules import StoredType
from swarmllm.models.span.block_span import BlockSpan
from swarmllm.models.span.packing import Packer, Packing, SessionCall
from swarmllm.models.span.page_pool import PAGE_TOKENS
from swarmllm.models.span.span_cache import SpanCache
from swarmllm.models.span.trials import random_inputs

logger = logging.getLogger(__name__)

T = TypeVar("T")

PACKING_CONTEXTS = (20, 120, 8, 60)
"""Tokens in the caches of the measured sessions."""
PACKING_STEPS_S = 0.02
"""Time of one step of each session, one by one; as many blocks as that are measured, one at least. Assumed."""
PACKING_BUDGET_S = 0.15
"""Seconds after which no further round begins."""
PACKING_ROUNDS = 6
"""At most; the fastest counts, as disturbances only ever make a measurement slower. With 3 rounds and a
second program on the same cores, 2 of 12 choices were wrong."""
MANY_SESSIONS = 32
"""Number of sessions that try whether recorded lines are faster than the chosen way. With twice as many, torch's
products are as fast as ours (bfloat16, hidden 512), and servers seldom have so many at once."""
MANY_S = 0.2
"""Seconds of decode steps of so many sessions, one by one, in a block. Larger blocks aren't tried, as the server would
start seconds later, and they gain least."""
WORTH_A_CHANGE = 0.9
"""A usually slower way must take less than this share of the time."""

FORWARD_TOKENS = 128
REPEATS = 3
BATCH = 8
MEASURED_S = 0.03
"""Time of a forward over the measured blocks; at least one is measured. Assumed, with the two below, so that a server
starts at most a second later, however many blocks it has, unless one block takes longer. Real steps correct the figures
(`LoadMeter`)."""
BUDGET_S = 0.5
"""Seconds after which no further measurement begins."""
SLOW_S = 0.25
"""Calls that take longer are measured only twice: warming up makes no difference there."""
CONTEXT_TOKENS = 1024
CONTEXT_BUDGET_S = 0.15
"""Seconds for filling the cache; slower blocks are measured with a shorter context."""
WORTH_A_THREAD = 0.9
"""More threads must take less than this share of the time: they take cores from other programs, and oversubscribed
cores are 5 to 20 times slower (measured with two servers on two cores)."""
PREFILL_SHARE = 0.3
"""Share of a decode step's time, for a prompt's tokens in the same forward. Measured with 4 sessions, hidden 512, 2
servers, a prompt of 2000: the 95th percentile of their time between tokens grows 1.5- to 1.7-fold with 8 tokens, 1.8-
to 2.2-fold with 13 to 16, 2.1-fold with 32, 3.2-fold with 64. Half of the time was 8 tokens on one machine and 13 on
another."""
MIN_PREFILL_TOKENS = 8
"""Fewer tokens take as long, on every CPU."""
PIECES = (64, 256, 1024)
"""Lengths of prompts that are measured on devices that compute asynchronously."""
WEIGHTS_SHAPE, PACKED_ROWS = (1024, 4096), 32
"""Shape of the matrices of `measure_weights`, and rows that are really packed, as 4 bits take seconds."""
WEIGHTS_BYTES = 96 << 20
"""Bytes of all of them together: more than the caches of usual processors hold, so that memory is measured."""
WEIGHTS_BUDGET_S = 0.4
"""Seconds of rounds over all of them, at least one for each number of threads; the fastest counts."""
COMPUTING = 2.0
"""A forward of four times as many tokens takes at least this many times as long, if its time is computing and not
launching. Assumed: halfway between 1 and 4."""


def first_blocks(blocks: BlockSpan, num_blocks: int) -> Span:
    """Return the first of the blocks, at least one; more than `num_blocks` if the model can't be cut there."""
    end = min(blocks.span.start + max(1, num_blocks), blocks.span.end)
    while end in blocks.traits.forbidden_cuts:
        end += 1
    return Span(blocks.span.start, end)


def seconds(blocks: BlockSpan, run: Callable[[], object]) -> float:
    """Seconds of `run`, until the device of `blocks` has done its work."""
    started = time.perf_counter()
    run()
    if blocks.device.type != "cpu":
        torch.accelerator.synchronize(blocks.device)  # until here it has only been launched
    return time.perf_counter() - started


def choose_packing(ways: Sequence[T], measure: Callable[[T], float], now: Callable[[], float] = time.perf_counter) -> T:
    """Choose the fastest of `ways` (the usually best first), by the seconds that `measure` gives for each of them."""
    deadline = now() + PACKING_BUDGET_S
    least = dict.fromkeys(ways, float("inf"))
    for _ in range(PACKING_ROUNDS):
        least = {way: min(before, measure(way)) for way, before in least.items()}
        if now() > deadline:
            break
    best = ways[0]
    for way in ways[1:]:
        if least[way] < WORTH_A_CHANGE * least[best]:
            best = way
    return best


@torch.inference_mode()
def measure_packing(packer: Packer, decode_ms_per_block: float) -> Packing:
    """Measure which of the right ways is fastest for the packer's blocks."""
    blocks, ways = packer.blocks, [way for way in packer.ways if way != Packing.TRACED]
    most_steps = PACKING_ROUNDS * len(ways)  # of one session
    longest = (
        int(min(blocks.max_positions or max(PACKING_CONTEXTS) + most_steps, blocks.traits.even_length)) - most_steps
    )
    if len(ways) == 1 or longest < 1 or ways[0] == Packing.PAGED:  # its steps are recorded for all blocks only
        return ways[0]
    span = first_blocks(blocks, int(PACKING_STEPS_S / (decode_ms_per_block / 1e3 * len(PACKING_CONTEXTS))))
    calls = []
    for context in PACKING_CONTEXTS:
        cache = blocks.new_cache(span)
        blocks.forward(random_inputs(blocks, min(context, longest)), span, cache)
        calls.append(SessionCall(random_inputs(blocks, 1), span, cache))
    return choose_packing(ways, lambda way: seconds(blocks, partial(packer.run_calls, calls, way)))


@torch.inference_mode()
def measure_lines(packer: Packer, decode_ms_per_block: float) -> None:
    """Let many sessions run traced, as few do, all at once or some at a time, unless the packer's way is faster."""
    blocks, steps = packer.blocks, 1 + 3 * PACKING_ROUNDS
    if not packer.traces or packer.forward.traced.most_rows >= MANY_SESSIONS:
        return
    if decode_ms_per_block / 1e3 * MANY_SESSIONS > MANY_S or (blocks.max_positions or steps) < steps:
        return
    span = first_blocks(blocks, 1)
    calls = [SessionCall(random_inputs(blocks, 1), span, blocks.new_cache(span)) for _ in range(MANY_SESSIONS)]
    packer.run_calls(calls, packer.way)  # lines need a position before

    def step_s(at_once: int) -> float:
        packer.traced_at_once = at_once
        return seconds(blocks, partial(packer.run_calls, calls))

    packer.traced_at_once = choose_packing((packer.forward.traced.most_rows, MANY_SESSIONS, 0), step_s)


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """Speed through the whole span."""

    forward_tokens_per_s: float
    decode_ms_per_block: float
    decode_ms_per_block_batch8: float = 0.0
    """0 = not measured, here and below."""
    piece_ms_per_block: Mapping[int, float] = field(default_factory=dict)
    """Time of a prompt of a session, by its number of tokens: those of `PIECES` that were measured."""
    batch_ms_per_block: Mapping[int, float] = field(default_factory=dict)
    """The same of forwards without a session, which the model's own code computes."""
    context_ms_per_block_per_1k: float = 0.0
    num_threads: int = 0
    """The best number of threads; 0 = not chosen by measurement."""

    def step_ms(self, num_blocks: int, num_rows: int, context_tokens: int) -> float:
        """Expected time of a decode step of these rows, with so many tokens in the caches of all rows together."""
        per_row = max(0.0, self.decode_ms_per_block_batch8 - self.decode_ms_per_block) / (BATCH - 1)
        ms = (
            self.decode_ms_per_block
            + per_row * (num_rows - 1)
            + self.context_ms_per_block_per_1k * context_tokens / 1e3
        )
        return num_blocks * ms

    def forward_ms(self, all_blocks: int, num_blocks: int, num_tokens: int) -> float:
        """Expected time of a forward of these tokens through `num_blocks` of the span's blocks."""
        return num_tokens * 1e3 / self.forward_tokens_per_s * num_blocks / all_blocks


def measure_throughput(packer: Packer, *, choose_threads: bool = False) -> Throughput:
    """Measure the blocks, and set how `packer` runs several sessions; `choose_threads` sets the number of threads
    too."""
    blocks, began_at = packer.blocks, time.perf_counter()
    with torch.inference_mode():
        measured = _measure(packer, choose_threads=choose_threads and blocks.device.type == "cpu")
        way = measure_packing(packer, measured.decode_ms_per_block)
    packer.use(way)
    measure_lines(packer, measured.decode_ms_per_block)
    took_s = time.perf_counter() - began_at
    logger.info("measured in %.1f s: %s; sessions run %s", took_s, _in_words(measured), way.value)
    return_free_memory()  # that the forwards took: 40 to 50 MB (measured, hidden 2048)
    return measured


def doubling_tokens(throughput: Throughput, num_blocks: int) -> int:
    """Number of tokens that the server computes, without a session, in the time of one decode step."""
    return round(throughput.decode_ms_per_block * num_blocks / 1e3 * throughput.forward_tokens_per_s)


def prefill_tokens_beside_decode(throughput: Throughput, num_blocks: int) -> int:
    """Number of a prompt's tokens in one forward with decode steps of other sessions.

    They take a share of a step's time, but are never so few that launching the forward takes longer than computing it:
    more pieces would only make all clients wait more often.
    """
    piece_ms = throughput.piece_ms_per_block
    in_time_ms = (1 + PREFILL_SHARE) * throughput.decode_ms_per_block
    in_time = max((tokens for tokens, ms in piece_ms.items() if ms <= in_time_ms), default=0)
    share = round(PREFILL_SHARE * doubling_tokens(throughput, num_blocks))
    return max(MIN_PREFILL_TOKENS, share, in_time, least_worth_asking_for(piece_ms))


def least_worth_asking_for(piece_ms: Mapping[int, float]) -> int:
    """Smallest of these numbers of tokens whose forward is bound by computing; 0 if there is nothing to compare."""
    sizes = sorted(piece_ms)
    for size, larger in pairwise(sizes):
        if piece_ms[larger] >= COMPUTING * piece_ms[size]:
            return size
    return sizes[-1] if len(sizes) > 1 else 0


@torch.inference_mode()
def measure_weights(device: torch.device, quant_type: StoredType) -> float:
    """Measure how many bytes of weights in this format a decode step reads in a second; needs no checkpoint."""
    columns = WEIGHTS_SHAPE[1]
    few = pack(torch.randn(PACKED_ROWS, columns, dtype=torch.bfloat16), quant_type, device)
    rows = {
        name: tensor.repeat_interleave(WEIGHTS_SHAPE[0] // PACKED_ROWS, 0) for name, tensor in few.tensors().items()
    }
    num_bytes = sum(tensor.nbytes for tensor in rows.values())
    weights = [
        type(few)(**{name: tensor.clone() for name, tensor in rows.items()}, dtype=few.dtype)
        .for_device(device)
        .mapped(into_huge_pages)
        for _ in range(-(-WEIGHTS_BYTES // num_bytes))
    ]
    inputs = torch.randn(1, columns, dtype=torch.bfloat16).to(device)
    weights[0].linear(inputs)  # compiles the kernel on a GPU
    most, fastest_s = torch.get_num_threads(), float("inf")
    for num_threads in sorted({1, most}) if device.type == "cpu" else [most]:  # more may be slower on a busy machine
        torch.set_num_threads(num_threads)
        left_s = WEIGHTS_BUDGET_S
        while left_s > 0:
            started = time.perf_counter()
            for weight in weights:
                weight.linear(inputs)
            if device.type != "cpu":
                torch.accelerator.synchronize(device)
            took_s = time.perf_counter() - started
            left_s, fastest_s = left_s - took_s, min(fastest_s, took_s)
    torch.set_num_threads(most)
    return len(weights) * num_bytes / fastest_s


def _measure(packer: Packer, *, choose_threads: bool) -> Throughput:
    blocks, deadline = packer.blocks, time.perf_counter() + BUDGET_S
    logger.info("measuring how fast blocks %s are here", blocks.span)
    most = torch.get_num_threads()
    if choose_threads:
        torch.set_num_threads(1)  # one thread is never slow beyond measure
    measured = _MeasuredBlocks(packer)
    pieces_s = batches_s = {}
    if blocks.device.type != "cpu" and blocks.keeps_cache:
        # First: without them, clients would send too few tokens at once. And the first forward loads libraries.
        batches_s, pieces_s = measured.batches_s(), measured.prompts_s()
        deadline = time.perf_counter() + BUDGET_S
    decode_s, forward_s = measured.decode_s(), measured.chosen_s or measured.forward_s()
    num_threads = 0
    if choose_threads:
        num_threads = 1
        for place, candidate in enumerate(sorted({max(2, most // 2), most} - {1})):
            # One is tried in any case: large blocks use up the time with one thread, and gain most by others.
            if candidate > most or (place and time.perf_counter() > deadline):
                break
            torch.set_num_threads(candidate)
            decode_more_s = measured.decode_s()
            if decode_more_s > WORTH_A_THREAD * decode_s * candidate:
                continue  # not even a forward that gains by each thread could make up for that
            forward_more_s = measured.forward_s()
            if decode_more_s * forward_more_s < WORTH_A_THREAD * decode_s * forward_s:
                num_threads, decode_s, forward_s = candidate, decode_more_s, forward_more_s
        torch.set_num_threads(num_threads)
    batch8_s = context_s = 0.0
    if blocks.keeps_cache and time.perf_counter() < deadline and measured.has_room_for_batch:
        batch8_s = measured.decode_s(BATCH)
    if blocks.keeps_cache and time.perf_counter() < deadline:
        context_s = measured.context_s_per_1k(decode_s, forward_s)
    num_measured = len(measured.span)
    # On a device a forward of `FORWARD_TOKENS` may take as long as launching it.
    tokens_per_s = max(tokens / s for tokens, s in ((measured.forward_tokens, forward_s), *batches_s.items()))
    return Throughput(
        forward_tokens_per_s=tokens_per_s * num_measured / len(blocks.span),
        decode_ms_per_block=decode_s * 1e3 / num_measured,
        decode_ms_per_block_batch8=batch8_s * 1e3 / num_measured,
        context_ms_per_block_per_1k=context_s * 1e3 / num_measured,
        piece_ms_per_block={tokens: piece_s * 1e3 / num_measured for tokens, piece_s in pieces_s.items()},
        batch_ms_per_block={tokens: batch_s * 1e3 / num_measured for tokens, batch_s in batches_s.items()},
        num_threads=num_threads,
    )


class _MeasuredBlocks:
    """The blocks that are measured."""

    def __init__(self, packer: Packer) -> None:
        self._packer, self._blocks = packer, packer.blocks
        blocks = self._blocks
        self._positions = blocks.max_positions or CONTEXT_TOKENS + REPEATS + 1
        num_pages = BATCH if blocks.pool is None else blocks.pool.num_free
        self.has_room_for_batch = num_pages >= BATCH
        self._room = self._positions if blocks.pool is None else min(self._positions, num_pages * PAGE_TOKENS)
        """The most positions of a session."""
        self.forward_tokens = min(FORWARD_TOKENS, self._positions)
        first = self.span = first_blocks(blocks, 1)
        first_s = self.forward_s()
        few = first_blocks(blocks, int(MEASURED_S / first_s * len(first)))
        self.span = blocks.span if packer.has_own_step else few
        self.chosen_s = first_s if self.span == first else None
        """Seconds of a forward through them, if it has shown that only one block can be measured: large blocks take a
        second each."""

    def forward_s(self) -> float:
        """Seconds of a forward of one row."""
        return self._batch_s(self.forward_tokens)

    def batches_s(self) -> dict[int, float]:
        """Seconds of forwards without a session, by their number of tokens."""
        return _by_size(self._batch_s, self._positions)

    def prompts_s(self) -> dict[int, float]:
        """Seconds of a new session's prompts, by their number of tokens."""
        return _by_size(self._prompt_s, self._room)

    def _batch_s(self, num_tokens: int) -> float:
        batch = random_inputs(self._blocks, num_tokens)
        return self._least_s(lambda: self._blocks.forward(batch, self.span))

    def _prompt_s(self, num_tokens: int) -> float:
        prompt = random_inputs(self._blocks, num_tokens)
        return self._least_s(lambda: self._step(prompt, self._new_cache()))

    def decode_s(self, num_rows: int = 1) -> float:
        """Seconds of a step of one new position in each row."""
        token = random_inputs(self._blocks, 1, num_rows)
        cache = self._new_cache()

        def decode() -> None:
            nonlocal cache
            if cache is not None and cache.position >= self._room:
                cache = self._new_cache()
            self._step(token, cache)

        return self._least_s(decode)

    def context_s_per_1k(self, decode_s: float, forward_s: float) -> float:
        """Seconds that 1000 positions in the cache add to a step; 0 = not measured."""
        room = self._room - REPEATS - 1  # the steps that follow need positions
        num_tokens = int(min(CONTEXT_TOKENS, room, self.forward_tokens * CONTEXT_BUDGET_S / forward_s))
        if num_tokens < FORWARD_TOKENS:
            return 0.0
        cache, token = self._new_cache(), random_inputs(self._blocks, 1)
        self._blocks.forward(random_inputs(self._blocks, num_tokens), self.span, cache)
        added_s = self._least_s(lambda: self._step(token, cache)) - decode_s
        return max(0.0, added_s) * 1000 / num_tokens

    def _step(self, inputs: BlockInputs, cache: SpanCache | None) -> None:
        """Run a step as the server will run it."""
        if cache is None:
            self._blocks.forward(inputs, self.span)
            return
        (outcome,) = self._packer.run_calls([SessionCall(inputs, self.span, cache)])
        if isinstance(outcome, Exception):
            raise outcome

    def _new_cache(self) -> SpanCache | None:
        return self._blocks.new_cache(self.span) if self._blocks.keeps_cache else None

    def _least_s(self, run: Callable[[], object]) -> float:
        """Seconds of the fastest run: disturbances only ever make a run slower.

        A difference of medians came out as 9.8 ms in place of 0.2 on a busy machine.
        """
        first_s = seconds(self._blocks, run)
        repeats = 1 if first_s > SLOW_S else REPEATS
        return min(first_s, *(seconds(self._blocks, run) for _ in range(repeats)))


def _by_size(measure: Callable[[int], float], most: int) -> dict[int, float]:
    """`measure` of those `PIECES` that have no more than `most` tokens; of none after a slow one."""
    found: dict[int, float] = {}
    for num_tokens in PIECES:
        if num_tokens <= most and max(found.values(), default=0.0) <= SLOW_S:
            found[num_tokens] = measure(num_tokens)
    return found


def _in_words(throughput: Throughput) -> str:
    """The measured figures in words."""
    batch8, context, threads = (
        throughput.decode_ms_per_block_batch8,
        throughput.context_ms_per_block_per_1k,
        throughput.num_threads,
    )
    return (
        f"{throughput.forward_tokens_per_s:.0f} tokens/s in batches; a decode step takes "
        f"{throughput.decode_ms_per_block:.2f} ms per block"
        + (f", {batch8:.2f} for {BATCH} rows" if batch8 else "")
        + (f", {context:.3f} more per 1000 tokens of context" if context else "")
        + (f", with {threads} thread{'s' if threads > 1 else ''}" if threads else "")
    )
