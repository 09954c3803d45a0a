"""Sessions on pages: each gets what it gets alone, whatever the others do, and a step asks nothing of the host.

Here the pages are read by plain torch. The kernels that read them on CUDA are compared with float64 in
`tests/gpu/test_paged.py`, or by Triton's interpreter in `test_paged_kernels`.
"""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.numerics.graphs_without_cuda import GraphsWithoutCuda
from tests.numerics.sessions_together import RELATIVE, PagedSessions, load, some_inputs
from tests.selection import sampled
from torch import Tensor

from swarmllm.errors import CacheFullError
from swarmllm.models.quantization.rules import QuantType
from swarmllm.models.span.block_span import BlockSpan
from swarmllm.models.span.decode_graphs import SIZES, StaticInputs, trace
from swarmllm.models.span.packed_caches import PackingUnsupportedError
from swarmllm.models.span.packing import Packer, Packing, SessionCall
from swarmllm.models.span.packing_probe import right_ways
from swarmllm.models.span.page_pool import PAGE_TOKENS
from swarmllm.models.span.paged_attention import PagedAttention, window_of
from swarmllm.server.device.throughput import measure_throughput

NUM_PAGES = 64


def paged(
    model_type: str, directory: Path, dtype: torch.dtype | None = None, quant_type: QuantType = "none"
) -> BlockSpan:
    blocks = load(model_type, directory, dtype, quant_type)
    blocks.pool = blocks.new_pool(NUM_PAGES)
    return blocks


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> BlockSpan:
    return paged("llama", tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("model_type", sampled(["llama", "mistral", "gemma3_text"], 3, always=["llama"]))
def test_together_as_alone(model_type: str, tmp_path: Path) -> None:
    """Grouped queries, sliding windows, norms of heads."""
    sessions = PagedSessions(paged(model_type, tmp_path))
    assert Packing.PAGED in right_ways(sessions.blocks)
    assert max(sessions.step(lengths) for lengths in PagedSessions.STEPS) <= RELATIVE


def test_the_model_s_own_attention_finds_what_is_in_pages(llama: BlockSpan) -> None:
    """Steps that have to run alone, before and after packed ones."""
    sessions = PagedSessions(llama)
    for way, lengths in zip(
        (Packing.ONE_BY_ONE, Packing.PAGED, Packing.RAGGED, Packing.ONE_BY_ONE), PagedSessions.STEPS, strict=False
    ):
        sessions.packer.way = way
        assert sessions.step(lengths) <= RELATIVE


@pytest.mark.parametrize("model_type", sampled(["llama", "mistral"], 2, always=["llama"]))
def test_rollback_and_chosen_rows(model_type: str, tmp_path: Path) -> None:
    """Pages that rows share are copied before one of them goes on; a window forgets nothing."""
    sessions = PagedSessions(paged(model_type, tmp_path), rows=(1, 3))
    for cache in sessions.alone:
        cache.record_past()
    assert sessions.step((70, 70)) <= RELATIVE
    for caches in (sessions.packed, sessions.alone):
        caches[0].rollback(30)
        caches[1].select_batch([2, 0, 0])
        caches[1].rollback(66)
    assert sessions.step((1, 1)) <= RELATIVE
    for caches in (sessions.packed, sessions.alone):
        caches[1].select_batch([1])
    sessions.rows = (1, 1)
    assert sessions.step((40, 1)) <= RELATIVE
    for caches in (sessions.packed, sessions.alone):
        caches[1].rollback(0)
    sessions.rows = (1, 2)
    assert sessions.step((1, 5)) <= RELATIVE


def test_a_row_s_result_doesn_t_depend_on_its_neighbours(llama: BlockSpan) -> None:
    outputs = []
    for neighbour in (3, 90):
        caches = [llama.new_cache() for _ in range(2)]
        random = torch.Generator().manual_seed(1)
        first = [some_inputs(llama, 1, length, random) for length in (20, 1)]
        other = [some_inputs(llama, 1, length, torch.Generator().manual_seed(neighbour)) for length in (neighbour, 1)]
        packer = Packer(llama, [Packing.PAGED])
        for one, two in zip(first, other, strict=True):
            result = packer.run_calls(
                [SessionCall(one, llama.span, caches[0]), SessionCall(two, llama.span, caches[1])]
            )[0]
        assert isinstance(result, Tensor)
        outputs.append(result)
    torch.testing.assert_close(*outputs)


def test_pages_come_back(llama: BlockSpan) -> None:
    """When a session ends, rolls back, or drops rows."""
    assert llama.pool is not None
    before = llama.pool.num_free
    cache = llama.new_cache()
    random = torch.Generator().manual_seed(1)
    llama.forward(some_inputs(llama, 2, PAGE_TOKENS + 1, random), cache=cache)
    assert before - llama.pool.num_free == 4
    cache.rollback(PAGE_TOKENS)
    assert before - llama.pool.num_free == 2
    cache.select_batch([1, 1, 1])
    assert before - llama.pool.num_free == 1, "rows share a page until one of them writes to it"
    assert cache.num_bytes == llama.page_bytes
    llama.forward(some_inputs(llama, 3, 1, random), cache=cache)
    assert before - llama.pool.num_free == 4
    del cache
    assert llama.pool.num_free == before


def test_a_pool_without_room_refuses_one_session_alone(llama: BlockSpan, caplog: pytest.LogCaptureFixture) -> None:
    caches = [llama.new_cache() for _ in range(2)]
    lengths = (5, (NUM_PAGES + 1) * PAGE_TOKENS)
    random = torch.Generator().manual_seed(1)
    calls = [
        SessionCall(some_inputs(llama, 1, length, random), llama.span, cache)
        for length, cache in zip(lengths, caches, strict=True)
    ]
    packer = Packer(llama, [Packing.PAGED])
    outcomes = packer.run_calls(calls)
    assert isinstance(outcomes[0], Tensor)
    assert isinstance(outcomes[1], CacheFullError)
    assert not packer._failed
    assert "failed paged" not in caplog.text


def test_pages_are_shared_by_reference(llama: BlockSpan) -> None:
    """Two sessions with one prompt; each goes on by itself."""
    assert llama.pool is not None
    random = torch.Generator().manual_seed(1)
    prompt, token = some_inputs(llama, 1, 2 * PAGE_TOKENS, random), some_inputs(llama, 1, 1, random)
    first, second = llama.new_cache(), llama.new_cache()
    llama.forward(prompt, cache=first)
    pages = [first.page(start, start + PAGE_TOKENS) for start in (0, PAGE_TOKENS)]
    free = llama.pool.num_free
    for page in pages:
        second.append_page(page)
    assert llama.pool.num_free == free
    results = [llama.forward(token, cache=cache) for cache in (first, second)]
    assert torch.equal(*results)
    second.rollback(PAGE_TOKENS + 3)
    llama.forward(some_inputs(llama, 1, 1, random), cache=second)
    first.rollback(2 * PAGE_TOKENS)
    assert torch.equal(llama.forward(token, cache=first), results[0])


@pytest.mark.parametrize("num_pages", [2, 3, 9, 20])
def test_blocks_with_few_pages_are_measured(num_pages: int, tmp_path: Path) -> None:
    """Or a server with a small `--attn_cache_tokens` wouldn't start. Page 0 is nobody's."""
    blocks = load("llama", tmp_path)
    blocks.pool = blocks.new_pool(num_pages)
    measured = measure_throughput(Packer(blocks, [Packing.PAGED]))
    assert measured.decode_ms_per_block > 0
    assert (measured.decode_ms_per_block_batch8 > 0) == (num_pages > 8)
    assert blocks.pool.num_free == num_pages - 1


def test_recorded_steps(llama: BlockSpan) -> None:
    """Fewer positions than the size, several of one session, and after larger ones: what is not used is nobody's."""
    assert llama.pool is not None
    sessions = PagedSessions(llama)
    forward = sessions.packer.forward
    forward.graphs = GraphsWithoutCuda(forward.paged.step, llama.pool, StaticInputs(64, llama.dtype, llama.device, 8))
    forward.graphs.record((4, 8))
    assert forward.graphs.sizes == (4, 8)
    sizes: list[int] = []
    run = forward.graphs.replay
    forward.graphs.replay = lambda size, *rest: (sizes.append(size), run(size, *rest))[1]  # type: ignore[method-assign]
    assert max(sessions.step(lengths) for lengths in (*PagedSessions.STEPS, (2, 2, 1, 0), (1, 1, 0, 0))) <= RELATIVE
    assert sizes == [8, 8, 4]  # of 5 and 7 rows, and of 3; prompts are not recorded


def test_traces_find_what_reads_on_the_host(llama: BlockSpan) -> None:
    step = PagedAttention(llama).step

    def reading(hidden: Tensor, *rest: Any) -> Tensor:
        return step(hidden, *rest) if bool(hidden.sum() >= 0) else hidden

    inputs = StaticInputs(64, llama.dtype, llama.device, 8)
    trace(step, inputs, 8)
    with pytest.raises(RuntimeError):
        trace(reading, inputs, 8)


def test_windows_of_masks() -> None:
    """Causal, sliding, and what is neither."""
    from transformers import masking_utils as masks

    assert window_of(masks.causal_mask_function) == 0
    assert window_of(masks.sliding_window_causal_mask_function(7)) == 7
    assert window_of(masks.sliding_window_causal_mask_function(4096)) == 4096
    for other in (
        masks.bidirectional_mask_function,
        masks.chunked_causal_mask_function(8, torch.zeros(1, dtype=torch.int64)),
        masks.and_masks(masks.causal_mask_function, masks.padding_mask_function(torch.ones(1, 9))),
    ):
        with pytest.raises(PackingUnsupportedError):
            window_of(other)


def test_sizes_are_those_promised() -> None:
    assert SIZES == (1, 2, 4, 8, 16, 32, 64)


def test_what_is_not_used_is_in_the_log(llama: BlockSpan, caplog: pytest.LogCaptureFixture) -> None:
    """Once: no graph on a CPU, a graph that can't be made, and steps that fail."""
    caplog.set_level(logging.INFO, "swarmllm")
    packer = Packer(llama, [Packing.PAGED])
    packer.record()
    assert "decode steps aren't recorded: sessions aren't on pages of a GPU" in caplog.text

    def fail(*_: Any) -> Tensor:
        raise RuntimeError("no such kernel")

    assert llama.pool is not None
    graphs = GraphsWithoutCuda(fail, llama.pool, StaticInputs(64, llama.dtype, llama.device, 8))
    graphs.record((4, 8))
    assert "decode steps of 8 and fewer positions aren't recorded: no such kernel" in caplog.text
    packer.forward.run_packed = fail  # type: ignore[method-assign]
    for _ in range(2):
        given = some_inputs(llama, 1, 1, torch.Generator().manual_seed(1))
        calls = [SessionCall(given, llama.span, llama.new_cache()) for _ in range(2)]
        assert all(isinstance(output, Tensor) for output in packer.run_calls(calls))
    assert caplog.text.count("a step of 2 sessions failed paged; each runs alone: RuntimeError: no such kernel") == 1


@pytest.mark.lane("triton")
def test_fused_kernels_that_fail_are_in_the_log(
    llama: BlockSpan, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from swarmllm.models.span import fused_step

    def fail(*_: Any) -> Tensor:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(fused_step, "run_fused", fail)
    assert fused_step.find_fused(PagedAttention(llama)) is None
    assert "decode steps are run by the model's own kernels, as fused ones fail: RuntimeError" in caplog.text
