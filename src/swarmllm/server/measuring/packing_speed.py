"""Which of the right ways to compute several sessions' steps is fastest here, measured once after loading.

Called by `measuring/throughput`; `span/packing` says what the ways are. What is measured are decode steps of sessions
that exist only for it, in some of the blocks.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from swarmllm.models.span.packing import Packer, Packing, SessionCall
from swarmllm.models.span.trials import random_inputs
from swarmllm.server.measuring.timing import first_blocks, seconds

CONTEXTS = (20, 120, 8, 60)
"""Tokens in the caches of this many sessions."""
STEPS_S = 0.05
"""Time of a step of each, one by one: as many blocks take part, one at least. Assumed."""
BUDGET_S = 0.3
"""Seconds after which no round begins."""
ROUNDS = 3
"""Rounds, of which the fastest counts: what disturbs a measurement only ever makes it slower."""
WORTH_A_CHANGE = 0.9
"""Share of the time: a way that usually is slower must be this much faster."""


def choose_packing(
    ways: Sequence[Packing], measure: Callable[[Packing], float], now: Callable[[], float] = time.perf_counter
) -> Packing:
    """The fastest of `ways`, the usually best first, by what `measure` gives for each of them, in seconds."""
    deadline = now() + BUDGET_S
    least = dict.fromkeys(ways, float("inf"))
    for _ in range(ROUNDS):
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
    """The fastest of the ways that are right for the packer's blocks."""
    blocks, ways = packer.blocks, packer.ways
    most_steps = ROUNDS * len(ways)  # of one session
    longest = int(min(blocks.max_positions or max(CONTEXTS) + most_steps, blocks.traits.even_length)) - most_steps
    if len(ways) == 1 or longest < 1 or ways[0] == Packing.PAGED:  # whose steps are recorded for all blocks only
        return ways[0]
    part = first_blocks(blocks, int(STEPS_S / (decode_ms_per_block / 1e3 * len(CONTEXTS))))
    calls = []
    for context in CONTEXTS:
        cache = blocks.new_cache(part)
        blocks.forward(random_inputs(blocks, min(context, longest)), part, cache)
        calls.append(SessionCall(random_inputs(blocks, 1), part, cache))
    return choose_packing(ways, lambda way: seconds(blocks, partial(packer.run, calls, way)))
