"""Kernels on the CPU, with TRITON_INTERPRET set before Triton is imported; `test_paged_kernels` runs this file."""

import sys
import tempfile
from pathlib import Path

import torch
from tests.numerics.sessions_together import load

from swarmllm.models.span import page_pool
from swarmllm.models.span.page_pool import PageTable, Placed
from swarmllm.models.span.paged_attention import SHORT_TOKENS, PagedAttention

LENGTHS, NEW = (0, 5, 63, 64, 300), (20, 1, 3, 40, 1)
"""Positions of each session before, and new ones: short calls and tiles, within pages and across their borders."""
SHAPES = ((2, 1, 16, 16, 0), (2, 4, 64, 64, 0), (2, 3, 24, 16, 7), (1, 2, 80, 80, 100))
"""Heads of keys, queries to each, sizes of keys and values, window."""
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3}


def compare_attention(device: str, dtype: torch.dtype, shape: tuple[int, ...], page_tokens: int = 64) -> float:
    """The largest difference from float64 of the attention by kernels; what is written must be the same."""
    heads, shared, key_dim, value_dim, window = shape
    random = torch.Generator().manual_seed(0)
    width = -(-max(map(sum, zip(LENGTHS, NEW, strict=True))) // page_tokens)
    num_pages = len(LENGTHS) * width

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=random).to(device, dtype)

    keys, values = (normal(num_pages + 1, heads, page_tokens, size) for size in (key_dim, value_dim))
    tables = torch.zeros(len(LENGTHS) + 1, width, dtype=torch.int32)
    tables[1:] = (1 + torch.randperm(num_pages, generator=random)).view(len(LENGTHS), width)
    tables = tables.to(device)
    pairs: list[tuple[int, int]] = []
    long_calls: list[tuple[int, int]] = []
    num_short = 0
    for idx in sorted(range(len(NEW)), key=lambda idx: NEW[idx] > 16):
        if NEW[idx] > 16:
            long_calls.append((len(pairs), NEW[idx]))
        else:
            num_short += NEW[idx]
        pairs += [(idx + 1, LENGTHS[idx] + step) for step in range(NEW[idx])]
    placed = Placed.of(pairs, torch.device(device), num_short, tuple(long_calls))
    query = normal(1, len(pairs), heads * shared, key_dim).transpose(1, 2)
    new_keys = normal(1, len(pairs), heads, key_dim).transpose(1, 2)
    new_values = normal(1, len(pairs), heads, value_dim).transpose(1, 2)
    exact = [tensor.double().cpu() for tensor in (keys, values)]
    on_cpu = Placed.of(pairs, torch.device("cpu"), num_short, tuple(long_calls))
    page_pool.write_in_torch(*exact, tables.cpu(), on_cpu, new_keys.double().cpu(), new_values.double().cpu())
    page_pool.write_pages(keys, values, tables, placed, new_keys, new_values)
    for got, expected in zip((keys, values), exact, strict=True):
        assert torch.equal(got.double().cpu(), expected), "what is written"
    expected = page_pool.attend_in_torch(query.double().cpu(), *exact, tables.cpu(), on_cpu, 0.2, window)
    got = page_pool.attend_pages(query, keys, values, tables, placed, 0.2, window)
    return float((got.double().cpu() - expected).abs().max())


def check_attention() -> None:
    for shape in SHAPES:
        for dtype, tolerance in TOLERANCE.items():
            difference = compare_attention("cpu", dtype, shape)
            print(shape, dtype, difference)
            assert difference <= tolerance, (shape, dtype, difference)


def check_fused() -> None:
    from swarmllm.models.span import fused_step

    cases = [
        (model_type, "none", model_type != "gemma2") for model_type in ("llama", "qwen2", "qwen3", "mistral", "gemma2")
    ]
    for model_type, quant_type, fits in (*cases, ("qwen2", "int8", True), ("llama", "nf4", True)):
        with tempfile.TemporaryDirectory() as directory:
            blocks = load(model_type, Path(directory), quant_type=quant_type)
            blocks.pool = blocks.new_pool(16)
            paged = PagedAttention(blocks)
            step = fused_step.find_fused(paged)
            assert (step is not None) == fits, model_type
            if step is None:
                continue
            table = PageTable(blocks.pool)
            table.prepare(1, 27)
            for size, start in ((4, 0), (1, 4), (2, 5), (20, 7)):
                hidden = torch.randn(1, size, 64)
                pairs = [(table.rows[0], start + idx) for idx in range(size)]
                placed = Placed.of(pairs, torch.device("cpu"))
                if size > SHORT_TOKENS:
                    placed = Placed.of(pairs, torch.device("cpu"), 0, ((0, size),))
                expected = paged.step(hidden, placed, placed.positions[None]).clone()
                got = step(hidden, placed, placed.positions[None])
                difference = float((got - expected).norm() / expected.norm())
                print(model_type, size, difference)
                assert difference < 1e-6


if __name__ == "__main__":
    page_pool._interprets = True
    {"attention": check_attention, "fused": check_fused}[sys.argv[1]]()
