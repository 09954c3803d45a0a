"""Pages of prompts: found by prefix, dropped by age, shared only between equal inputs, whatever the steps' lengths."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.numerics.tiny_models import save_tiny

from swarmllm.data_structures import Span
from swarmllm.models.boundary.block_inputs import BlockInputs
from swarmllm.models.checkpoint.checkpoint import open_checkpoint
from swarmllm.models.span.block_span import BlockSpan
from swarmllm.models.span.loading import load_block_span
from swarmllm.models.span.span_cache import SpanCache
from swarmllm.server.sessions.prefix_cache import PAGE_TOKENS, Page, PrefixCache, SharedPrefix


def page() -> Page:
    keys = torch.zeros(1, 2, PAGE_TOKENS, 4)
    return Page(((keys, keys.clone()), None), torch.zeros(1, PAGE_TOKENS, 8))


DIGESTS = [bytes([number]) for number in range(8)]


def test_finds_the_pages_before_the_first_missing_one() -> None:
    cache = PrefixCache(10 * page().num_bytes)
    pages = [page() for _ in range(4)]
    cache.keep([(DIGESTS[idx], pages[idx]) for idx in (0, 1, 3)])
    assert cache.find(DIGESTS[:4]) == pages[:2]
    assert cache.find(DIGESTS[4:]) == []


def test_the_least_recently_used_go_first_and_ends_before_beginnings() -> None:
    cache = PrefixCache(4 * page().num_bytes)
    cache.keep([(digest, page()) for digest in DIGESTS[:2]])
    cache.keep([(digest, page()) for digest in DIGESTS[2:4]])
    cache.find(DIGESTS[:2])
    cache.keep([(DIGESTS[4], page())])
    assert [digest in cache for digest in DIGESTS[:5]] == [True, True, True, False, True]
    assert cache.num_bytes == cache.capacity_bytes


def test_pages_larger_than_the_budget_are_not_kept() -> None:
    cache = PrefixCache(page().num_bytes - 1)
    cache.keep([(DIGESTS[0], page())])
    assert len(cache) == cache.num_bytes == 0


# ---------------------------------------------------------------- sessions on real blocks

LENGTH = 3 * PAGE_TOKENS + 10


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> BlockSpan:
    directory = tmp_path_factory.mktemp("llama")
    save_tiny("llama", directory)
    return load_block_span(open_checkpoint(str(directory)), Span(0, 4), progress=False)


def prompt(blocks: BlockSpan, seed: int = 0) -> BlockInputs:
    hidden = torch.randn(1, LENGTH, blocks.embedding_dim, generator=torch.Generator().manual_seed(seed))
    return BlockInputs(hidden_states=hidden, batch_size=1, seq_len=LENGTH)


def run(
    blocks: BlockSpan, pages: PrefixCache, inputs: BlockInputs, cuts: tuple[int, ...] = (), span: Span | None = None
) -> tuple[torch.Tensor, SpanCache, int]:
    """A session's prompt in steps that end at `cuts`; returns outputs, cache, and how many positions were reused."""
    span = span or blocks.span
    prefix, cache = SharedPrefix(pages, blocks, span), blocks.new_cache(span)
    before, outputs = pages.num_reused_tokens, []
    for start, end in zip((0, *cuts), (*cuts, inputs.seq_len), strict=True):
        step = inputs.columns(start, end, start, blocks.traits)
        if not prefix.fits(start, step, cache):
            outputs.append(blocks.forward(step, span, cache))
            continue
        reused = prefix.reuse(cache) if prefix.read(start, step) else None
        done = 0 if reused is None else reused.shape[1]
        parts = [] if reused is None else [reused]
        if done < step.seq_len:
            parts.append(blocks.forward(step.columns(done, step.seq_len, start, blocks.traits), span, cache))
        outputs.append(torch.cat(parts, dim=1))
        prefix.keep(cache, outputs[-1])
    assert cache.length == inputs.seq_len
    return torch.cat(outputs, dim=1), cache, pages.num_reused_tokens - before


@pytest.mark.parametrize("first_cuts", [(), (100,), (PAGE_TOKENS,), (30, 90, 150)])
@pytest.mark.parametrize("second_cuts", [(), (100,), (20, 180)])
def test_equal_prompts_share_all_whole_pages(
    blocks: BlockSpan, first_cuts: tuple[int, ...], second_cuts: tuple[int, ...]
) -> None:
    pages = PrefixCache(10**9)
    inputs = prompt(blocks)
    first, first_cache, reused = run(blocks, pages, inputs, first_cuts)
    assert reused == 0
    second, second_cache, reused = run(blocks, pages, inputs, second_cuts)
    partly = sum(cut % PAGE_TOKENS for cut in second_cuts)  # computed, since the step ended within the page
    assert reused == 3 * PAGE_TOKENS - partly
    torch.testing.assert_close(second, first)
    token = replace(prompt(blocks, seed=9).columns(0, 1, 0, blocks.traits))
    torch.testing.assert_close(blocks.forward(token, None, second_cache), blocks.forward(token, None, first_cache))


def test_a_prompt_that_differs_somewhere_shares_the_pages_before(blocks: BlockSpan) -> None:
    pages = PrefixCache(10**9)
    inputs = prompt(blocks)
    run(blocks, pages, inputs)
    other = inputs.hidden_states.clone()
    other[0, PAGE_TOKENS + 3, 5] += 1e-6
    changed = inputs.with_hidden(other)
    outputs, _, reused = run(blocks, pages, changed)
    assert reused == PAGE_TOKENS
    torch.testing.assert_close(outputs, blocks.forward(changed, None, blocks.new_cache()))


def test_nothing_is_shared_between_spans_or_kinds_of_inputs(blocks: BlockSpan) -> None:
    pages = PrefixCache(10**9)
    inputs = prompt(blocks)
    run(blocks, pages, inputs)
    assert run(blocks, pages, inputs, span=Span(0, 3))[2] == 0
    positions = torch.arange(LENGTH)[None]
    assert run(blocks, pages, replace(inputs, position_ids=positions))[2] == 0
    assert run(blocks, pages, replace(inputs, position_ids=positions + 1))[2] == 0
    assert run(blocks, pages, inputs.with_hidden(inputs.hidden_states.double().float()))[2] == 3 * PAGE_TOKENS


def test_prompts_of_any_length_have_the_pages_of_a_longer_one(blocks: BlockSpan) -> None:
    """The piece behind the last whole page may be one position, whose strides torch calls contiguous."""
    longest = 1100
    hidden = torch.randn(1, longest, blocks.embedding_dim, generator=torch.Generator().manual_seed(0))
    known: list[tuple[int, bytes]] = []
    for length in range(longest, 0, -1):
        inputs = BlockInputs(
            hidden_states=hidden[:, :length],
            batch_size=1,
            seq_len=length,
            position_ids=torch.arange(length)[None],
        )
        prefix = SharedPrefix(PrefixCache(0), blocks, blocks.span)
        assert not prefix.read(0, inputs)
        known = known or prefix._new
        assert prefix._new == known[: length // PAGE_TOKENS]
    assert len({digest for _, digest in known}) == longest // PAGE_TOKENS


@given(data=st.data())
def test_the_layout_in_memory_makes_no_difference(blocks: BlockSpan, data: st.DataObject) -> None:
    axes = data.draw(st.permutations(range(3)))
    step, skipped = data.draw(st.integers(1, 3)), data.draw(st.integers(0, 2))
    length = data.draw(st.sampled_from([1, 17, 64, 65, 129, 130]))
    dtype = data.draw(st.sampled_from([torch.int64, torch.float32, torch.bfloat16]))
    plain = prompt(blocks).hidden_states[:, :length].to(dtype)
    room = torch.empty([size * step + skipped for size in plain.permute(axes).shape], dtype=dtype)
    elsewhere = room[(slice(skipped, None, step),) * 3].permute(*(axes.index(axis) for axis in range(3)))
    elsewhere.copy_(plain)

    def digests(hidden: torch.Tensor) -> list[tuple[int, bytes]]:
        prefix = SharedPrefix(PrefixCache(0), blocks, blocks.span)
        prefix.read(0, BlockInputs(hidden_states=hidden, batch_size=1, seq_len=length))
        return prefix._new

    assert digests(elsewhere) == digests(plain)


def test_padding_and_single_tokens_end_the_sharing(blocks: BlockSpan) -> None:
    pages = PrefixCache(10**9)
    padded = torch.ones(1, LENGTH, dtype=torch.int64)
    padded[0, :5] = 0
    run(blocks, pages, replace(prompt(blocks), attention_mask=padded))
    for odd in (torch.full_like(padded, 2), torch.full_like(padded, -1)):  # some models add them up
        run(blocks, pages, replace(prompt(blocks), attention_mask=odd))
    assert len(pages) == 0
    run(blocks, pages, prompt(blocks), (PAGE_TOKENS, PAGE_TOKENS + 1))
    assert len(pages) == 1


def test_pages_own_their_memory(blocks: BlockSpan) -> None:
    pages = PrefixCache(10**9)
    run(blocks, pages, prompt(blocks), (100,))
    for kept in pages._pages.values():
        pairs = [pair for pair in kept.keys_values if pair is not None]
        for tensor in (kept.outputs, *(tensor for pair in pairs for tensor in pair)):
            assert tensor.untyped_storage().nbytes() == tensor.nbytes
