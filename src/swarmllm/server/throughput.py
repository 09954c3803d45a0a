"""How fast this server's blocks are, measured once after loading, for the announcement.

Called by `server/server` in the device thread. A rough estimate: routing and placement only need the ratios
between servers. What matters most is measured first; when time is up, the rest is left out.
"""

import logging
import statistics
import time
from collections.abc import Callable

import torch

from swarmllm.models.block_inputs import BlockInputs
from swarmllm.models.block_span import BlockSpan
from swarmllm.models.packing import NEVER, Packing
from swarmllm.models.quantization.heap import return_free_memory
from swarmllm.server.dummy_inputs import dummy_inputs
from swarmllm.server.packing_speed import measure_packing
from swarmllm.server.throughput_cache import Throughput, ThroughputCache

__all__ = ["Throughput", "ThroughputCache", "measure_throughput", "prefill_tokens_beside_decode"]

logger = logging.getLogger(__name__)

FORWARD_TOKENS = 128
REPEATS = 3
BATCH = 8
BUDGET_S = 1.5
"""Nobody begins another measurement after this. A server of a small model is done in a tenth of it."""
SLOW_S = 0.25
"""What takes so long is measured only once."""
CONTEXT_TOKENS = 1024
CONTEXT_BUDGET_S = 0.4
"""For filling the cache; where blocks are slower than that, a shorter context must do."""
WORTH_A_THREAD = 0.9
"""More threads must be this much faster: they take the cores from somebody else, and oversubscribed cores are 5 to 20
times slower (measured with two servers on two cores)."""
PREFILL_SHARE = 0.3
"""Of the time of one session's decode step, for the prompt's tokens that are computed beside it. Measured with 4
sessions, hidden 512, 2 servers: with 8 tokens the 95th percentile of their time between tokens grows 1.5- to 1.7-fold
beside a prompt of 2000; with 13 to 16 1.8- to 2.2-fold, with 32 2.1, with 64 3.2. With half of the time it was 8 tokens
on one machine and 13 on another."""
MIN_PREFILL_TOKENS = 8
"""Fewer take as long on every CPU."""
BUSY_SHARE = 0.7
"""A measurement that got less of the processor than this was disturbed, and isn't kept."""


def measure_throughput(blocks: BlockSpan, cache: ThroughputCache | None = None) -> Throughput:
    """What the cache knows of such blocks, else what is measured now.

    Sets the number of threads if it is free, and how the blocks run several sessions.
    """
    known = None if cache is None else cache.load(blocks)
    if known is None:
        began_at, cpu_began_at = time.perf_counter(), time.process_time()
        choose_threads = cache is not None and cache.num_threads is None and blocks.device.type == "cpu"
        with torch.inference_mode():
            known = _measure(blocks, choose_threads=choose_threads)
        took_s = time.perf_counter() - began_at
        undisturbed = blocks.device.type != "cpu" or time.process_time() - cpu_began_at > BUSY_SHARE * took_s
        logger.info("measured in %.1f s: %s", took_s, _in_words(known))
        return_free_memory()  # of the forwards: 40 to 50 MB (measured, hidden 2048)
        if cache is not None and undisturbed:
            cache.save(blocks, known)
    else:
        logger.info("measured at an earlier start: %s", _in_words(known))
    if known.num_threads:
        torch.set_num_threads(known.num_threads)
    blocks.packer.use(Packing(known.packing), ragged_alone_from=known.ragged_alone_from or NEVER)
    return known


def prefill_tokens_beside_decode(throughput: Throughput, num_blocks: int) -> int:
    """Tokens of somebody's prompt that such a server computes in one forward with others' decode steps."""
    decode_s = throughput.decode_ms_per_block * num_blocks / 1e3
    return max(MIN_PREFILL_TOKENS, round(PREFILL_SHARE * decode_s * throughput.forward_tokens_per_s))


def _measure(blocks: BlockSpan, *, choose_threads: bool) -> Throughput:
    deadline = time.perf_counter() + BUDGET_S
    num_blocks = len(blocks.span)
    positions = blocks.max_positions or CONTEXT_TOKENS + REPEATS + 1
    forward_tokens = min(FORWARD_TOKENS, positions)
    batch, token = dummy_inputs(blocks, forward_tokens), dummy_inputs(blocks, 1)

    def decode_s_of(step: BlockInputs) -> float:
        cache = blocks.new_cache() if blocks.keeps_cache else None

        def decode() -> None:
            nonlocal cache
            if cache is not None and cache.position >= positions:
                cache = blocks.new_cache()
            blocks.forward(step, cache=cache)

        return _median_s(decode)

    def decode_and_forward_s() -> tuple[float, float]:
        return decode_s_of(token), _median_s(lambda: blocks.forward(batch))

    logger.info("measuring how fast blocks %s are here", blocks.span)
    most = torch.get_num_threads()
    if choose_threads:
        torch.set_num_threads(1)  # begin with what is never slow beyond measure
    decode_s, forward_s = decode_and_forward_s()
    num_threads = 0
    if choose_threads:
        num_threads = 1
        for candidate in sorted({max(2, most // 2), most} - {1}):
            if candidate > most or time.perf_counter() > deadline:
                break
            torch.set_num_threads(candidate)
            with_more = decode_and_forward_s()
            if with_more[0] * with_more[1] < WORTH_A_THREAD * decode_s * forward_s:
                num_threads, (decode_s, forward_s) = candidate, with_more
        torch.set_num_threads(num_threads)
    batch8_s = context_ms = 0.0
    if blocks.keeps_cache and time.perf_counter() < deadline:
        batch8_s = decode_s_of(dummy_inputs(blocks, 1, BATCH))
    if blocks.keeps_cache and time.perf_counter() < deadline:
        room = positions - REPEATS - 1  # the steps that follow need some
        context_tokens = int(min(CONTEXT_TOKENS, room, forward_tokens * CONTEXT_BUDGET_S / forward_s))
        if context_tokens >= FORWARD_TOKENS:
            full = blocks.new_cache()
            blocks.forward(dummy_inputs(blocks, context_tokens), cache=full)
            added_s = max(0.0, _median_s(lambda: blocks.forward(token, cache=full)) - decode_s)
            context_ms = added_s * 1e3 / num_blocks * 1000 / context_tokens
    packing, ragged_alone_from = measure_packing(blocks, decode_s * 1e3 / num_blocks)
    return Throughput(
        forward_tokens_per_s=forward_tokens / forward_s,
        decode_ms_per_block=decode_s * 1e3 / num_blocks,
        decode_ms_per_block_batch8=batch8_s * 1e3 / num_blocks,
        context_ms_per_block_per_1k=context_ms,
        num_threads=num_threads,
        packing=packing.value,
        ragged_alone_from=ragged_alone_from,
    )


def _in_words(throughput: Throughput) -> str:
    threads = f", with {throughput.num_threads} threads" if throughput.num_threads else ""
    alone = f" (alone from {throughput.ragged_alone_from} tokens)" if throughput.ragged_alone_from else ""
    return (
        f"{throughput.forward_tokens_per_s:.0f} tokens/s in batches; a decode step takes "
        f"{throughput.decode_ms_per_block:.2f} ms per block, {throughput.decode_ms_per_block_batch8:.2f} for 8 rows, "
        f"{throughput.context_ms_per_block_per_1k:.3f} more per 1000 tokens of context{threads}; "
        f"sessions run {throughput.packing}{alone}"
    )


def _median_s(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    first_s = time.perf_counter() - started
    if first_s > SLOW_S:
        return first_s  # warming up makes no difference there
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return statistics.median(times)
