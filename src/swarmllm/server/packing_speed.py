"""Which of the right ways to compute several sessions' steps is fastest here, measured once after loading.

Called by `server/throughput`, whose cache keeps the answer; `models/packing` says what the ways are. What is measured
are decode steps of sessions that exist only for it, in as many blocks as time allows. Contexts are filled with random
keys and values where the cache is made of nothing else: to compute them would take longer than all the rest.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from transformers.cache_utils import DynamicSlidingWindowLayer

from swarmllm.data_structures import Span
from swarmllm.models.block_span import BlockSpan
from swarmllm.models.growing_layer import GrowingLayer
from swarmllm.models.packing import Packing, SessionCall
from swarmllm.models.span_cache import SpanCache
from swarmllm.server.dummy_inputs import dummy_inputs

logger = logging.getLogger(__name__)

CONTEXTS = (40, 250, 16, 400, 130, 60, 300, 90)
"""Tokens in the caches of so many sessions; the first four of them make a smaller group."""
SMALL_GROUP = 4
COMPUTED_SHARE = 4
"""Where contexts have to be computed they are so many times shorter."""
ROUND_S = 0.1
"""Of one round: so many blocks take part. Assumed; where one block takes longer, the small group must do."""
BUDGET_S = 0.5
"""No round begins after this."""
ROUNDS = 5
"""The fastest counts: what disturbs a measurement only ever makes it slower."""
MOST_STEPS = ROUNDS * len(Packing) * 2
"""That one session takes part in: each way in both groups."""
HOPELESS = 2.0
"""A way that took so many times as long as another in the first round isn't measured again."""
WORTH_A_CHANGE = 0.9
"""Of the time: a way that usually is slower must be this much faster."""
SHORT, LONG = 64, 1024
"""Contexts of a session alone. Measured (hidden 2048, 32 heads on 8, bfloat16): equal at 64, and at 1000 a fifth of the
block's whole time apart."""
WORTH_A_DETOUR = 0.95
"""Of the time, as above, for a session alone."""


def fastest(seconds: Mapping[Packing, float], ways: Sequence[Packing]) -> Packing:
    """Of `ways`, the best first: a later one only if it is clearly faster; what wasn't measured isn't chosen."""
    best = ways[0]
    for way in ways[1:]:
        if way in seconds and best in seconds and seconds[way] < WORTH_A_CHANGE * seconds[best]:
            best = way
    return best


def choose_packing(
    ways: Sequence[Packing], measure: Callable[[Packing], float], now: Callable[[], float] = time.perf_counter
) -> Packing:
    """The fastest of the right `ways`, by what `measure` gives for each of them, in seconds."""
    deadline = now() + BUDGET_S
    seconds: dict[Packing, float] = {}
    left = list(ways) if len(ways) > 1 else []
    for _ in range(ROUNDS):
        for way in left:
            seconds[way] = min(measure(way), seconds.get(way, float("inf")))
        left = [way for way in left if seconds[way] < HOPELESS * min(seconds.values())]
        if len(left) < 2 or now() > deadline:
            break
    if seconds:
        logger.debug("steps of some sessions: %s", ", ".join(f"{s * 1e3:.1f} ms {w.value}" for w, s in seconds.items()))
    return fastest(seconds, ways)


def gains_from(usual_s: tuple[float, float], ragged_s: tuple[float, float]) -> int:
    """The context from which a session alone gains by the ragged way (0: none), by the times at SHORT and LONG."""
    short_s, long_s = (WORTH_A_DETOUR * usual - ragged for usual, ragged in zip(usual_s, ragged_s, strict=True))
    if long_s <= 0:
        return 0
    return SHORT if short_s >= 0 else round(SHORT + (LONG - SHORT) * short_s / (short_s - long_s))


@torch.inference_mode()
def measure_packing(blocks: BlockSpan, decode_ms_per_block: float) -> tuple[Packing, int]:
    """(the way to use, the context from which a session alone runs ragged, 0 = never)."""
    ways, decode_s = blocks.packer.ways, max(decode_ms_per_block / 1e3, 1e-6)
    if not blocks.keeps_cache:
        return Packing.ONE_BY_ONE, 0
    if _longest(blocks) < 1:
        return ways[0], 0
    part = _part(blocks, int(ROUND_S / (decode_s * (len(CONTEXTS) + SMALL_GROUP))))
    groups = (SMALL_GROUP,) if len(CONTEXTS) * decode_s > ROUND_S else (SMALL_GROUP, len(CONTEXTS))
    calls = [_session(blocks, part, context) for context in CONTEXTS[: groups[-1]]] if len(ways) > 1 else []

    def run_s(way: Packing) -> float:
        return sum(_seconds(partial(blocks.packer.run, calls[:size], way)) for size in groups)

    way = choose_packing(ways, run_s)
    return way, _ragged_alone_from(blocks) if way == Packing.RAGGED else 0


def _ragged_alone_from(blocks: BlockSpan) -> int:
    if blocks.device.type != "cpu" or blocks.packer.exact_alone:
        return 0
    part = _part(blocks, 1)
    if _longest(blocks) < LONG or not _can_be_filled(blocks.new_cache(part), part):
        return 0
    usual_s, ragged_s = [], []
    for context in (SHORT, LONG):
        call = _session(blocks, part, context)
        pairs = [
            (
                _seconds(partial(blocks.packer.run, [call], Packing.ONE_BY_ONE)),
                _seconds(partial(blocks.packer.run_packed, [call], Packing.RAGGED)),
            )
            for _ in range(ROUNDS)
        ]
        usual_s.append(min(usual for usual, _ in pairs))
        ragged_s.append(min(ragged for _, ragged in pairs))
    return gains_from((usual_s[0], usual_s[1]), (ragged_s[0], ragged_s[1]))


def _part(blocks: BlockSpan, num_blocks: int) -> Span:
    """The first blocks, so many or a few more: as many as can run alone."""
    hosted = blocks.span
    end = min(hosted.start + max(1, num_blocks), hosted.end)
    while end in blocks.traits.forbidden_cuts:
        end += 1
    return Span(hosted.start, end)


def _session(blocks: BlockSpan, part: Span, context: int) -> SessionCall:
    """The next token of a session that has seen `context` tokens; may run several times, its cache grows then."""
    cache = blocks.new_cache(part)
    context = min(context, _longest(blocks))
    if _can_be_filled(cache, part):
        blocks.forward(dummy_inputs(blocks, 1), part, cache)
        _fill(cache, part, context - 1)
    else:
        blocks.forward(dummy_inputs(blocks, -(-context // COMPUTED_SHARE)), part, cache)
    return SessionCall(dummy_inputs(blocks, 1), part, cache)


def _longest(blocks: BlockSpan) -> int:
    """Context that leaves room for the steps; below 1 = there is none."""
    limit = min(blocks.max_positions or LONG * 2, blocks.packer.max_equal_length)
    return int(min(limit, LONG * 2)) - MOST_STEPS


def _can_be_filled(cache: SpanCache, part: Span) -> bool:
    return all(isinstance(cache.layers[idx], GrowingLayer | DynamicSlidingWindowLayer) for idx in part)


def _fill(cache: SpanCache, part: Span, num_tokens: int) -> None:
    """Append random keys and values, in the form of the first position's."""

    def some(like: Tensor) -> Tensor:
        shape = (*like.shape[:-2], num_tokens, like.shape[-1])
        return torch.randn(shape, device=like.device).to(like.dtype)

    for layer in (cache.layers[idx] for idx in part):
        if num_tokens and layer.is_initialized:  # some blocks use the keys of others
            layer.update(some(layer.keys), some(layer.values))
    cache.advance(num_tokens)


def _seconds(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started
