"""Sessions on pages of a GPU, steps as CUDA graphs, and fused steps: as the model's own code one by one."""

import logging
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

from swarmllm.data_structures import Span
from swarmllm.models.boundary.block_inputs import BlockInputs
from swarmllm.models.checkpoint.checkpoint import open_checkpoint
from swarmllm.models.span.block_span import BlockSpan
from swarmllm.models.span.loading import load_block_span
from swarmllm.models.span.packing import Packer, Packing, SessionCall
from swarmllm.models.span.packing_probe import right_ways
from swarmllm.models.span.span_cache import SpanCache

sys.path.append(str(Path(__file__).parents[2]))

pytestmark = pytest.mark.lane("gpu")

DEVICE, HIDDEN, NUM_BLOCKS = "cuda", 256, 3
SIZES = {
    "vocab_size": 64,
    "hidden_size": HIDDEN,
    "intermediate_size": 512,
    "num_hidden_layers": NUM_BLOCKS,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "mistral": MistralConfig(**SIZES, sliding_window=40),
    "qwen2": Qwen2Config(**{name: size for name, size in SIZES.items() if name != "head_dim"}),
    "qwen3": Qwen3Config(**SIZES),
}
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
"""Relative error through three blocks. Assumed."""
ROUNDING = 1.15
"""How much further from float32 than alone a step on pages may be, as it rounds elsewhere. Assumed."""
LENGTHS = (5, 100, 17, 64, 300)
SHAPES = ((2, 1, 16, 16, 0), (2, 4, 64, 64, 0), (2, 3, 24, 16, 7), (1, 2, 80, 80, 100), (4, 1, 128, 128, 0),
          (2, 8, 128, 128, 0), (1, 4, 256, 256, 70))  # fmt: skip
"""Heads of keys, queries to each, sizes of keys and values, window."""


@pytest.fixture(scope="module", params=list(CONFIGS))
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gpu") / request.param
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(CONFIGS[request.param]).to(torch.bfloat16).float().save_pretrained(path)
    return path


def load(directory: Path, dtype: torch.dtype) -> BlockSpan:
    span = Span(0, NUM_BLOCKS)
    return load_block_span(open_checkpoint(str(directory)), span, dtype=dtype, device=DEVICE, progress=False)


def inputs(blocks: BlockSpan, seq_len: int, seed: int, rows: int = 1) -> BlockInputs:
    hidden = torch.randn(rows, seq_len, HIDDEN, generator=torch.Generator().manual_seed(seed))
    return BlockInputs(hidden_states=hidden.to(DEVICE, blocks.dtype), batch_size=rows, seq_len=seq_len)


class Sessions:
    """The same sessions on pages and alone."""

    def __init__(self, blocks: BlockSpan, way: str) -> None:
        self.blocks, self.seed = blocks, 0
        blocks.pool = None
        self.alone = [blocks.new_cache(record_past=True) for _ in LENGTHS]
        blocks.pool = blocks.new_pool(200)
        assert Packing.PAGED in right_ways(blocks)
        self.packer = Packer(blocks, [Packing.PAGED])
        if way != "paged":
            self.packer.record((1, 2, 8), fused=way == "fused")
            assert self.packer.forward.graphs is not None
            assert self.packer.forward.graphs.sizes == (1, 2, 8)
        self.packed = [blocks.new_cache(record_past=True) for _ in LENGTHS]
        self.failures: list[Exception] = []
        """Packed steps, which a packer tries again one by one."""
        self._run = self.packer.forward.run_packed
        self.packer.forward.run_packed = self._noted  # type: ignore[method-assign]

    def _noted(self, calls: Sequence[SessionCall], way: Packing) -> list[Tensor]:
        try:
            return self._run(calls, way)
        except Exception as error:
            self.failures.append(error)
            raise

    def step(self, lengths: Sequence[int]) -> float:
        """The largest relative error of the next positions of each session."""
        calls, wanted = [], []
        for length, packed, alone in zip(lengths, self.packed, self.alone, strict=True):
            self.seed += 1
            if length:
                given = inputs(self.blocks, length, self.seed)
                wanted.append(self.blocks.forward(given, cache=alone))
                calls.append(SessionCall(given, self.blocks.span, packed))
        errors = []
        outcomes = self.packer.run_calls(calls)
        assert not self.failures
        for got, want in zip(outcomes, wanted, strict=True):
            if isinstance(got, Exception):
                raise got
            assert got.shape == want.shape
            errors.append(float((got.float() - want.float()).norm() / want.float().norm()))
        return max(errors)


@pytest.fixture(autouse=True)
def told(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Why a step was not recorded or not fused is in the log."""
    caplog.set_level(logging.INFO, "swarmllm")
    yield
    print(caplog.text)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernels(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    from tests.numerics.interpreted_kernels import compare_attention

    tolerance = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}[dtype]
    assert compare_attention(DEVICE, dtype, shape) <= tolerance


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("way", ["paged", "graph", "fused"])
def test_together_as_alone(directory: Path, way: str, dtype: torch.dtype) -> None:
    """Prompts beside tokens, single tokens, several tokens, rollback and chosen rows."""
    sessions = Sessions(load(directory, dtype), way)
    steps = (LENGTHS, (1,) * 5, (1, 1, 0, 0, 0), (1, 0, 0, 0, 0), (2, 1, 1, 3, 1), (1, 30, 1, 70, 1), (1,) * 5)
    errors = [sessions.step(lengths) for lengths in steps]
    for caches in (sessions.packed, sessions.alone):
        caches[1].rollback(20)
        caches[4].select_batch([0])
    errors += [sessions.step(lengths) for lengths in ((1,) * 5, (0, 0, 1, 0, 1))]
    assert max(errors) <= TOLERANCE[dtype], errors


@pytest.mark.parametrize("way", ["paged", "graph", "fused"])
def test_neighbours_change_nothing(directory: Path, way: str) -> None:
    """To the last bit, among equally many rows."""
    outputs = []
    for neighbours in ((30, 7), (200, 90)):
        blocks = load(directory, torch.bfloat16)
        sessions = Sessions(blocks, way)
        caches: list[SpanCache] = [blocks.new_cache() for _ in range(3)]
        for length, cache, seed in zip((50, *neighbours), caches, (1, *neighbours), strict=True):
            blocks.forward(inputs(blocks, length, seed), cache=cache)
        found = []
        for step in range(4):
            seeds = (100 + step, *(one + step for one in neighbours))
            calls = [
                SessionCall(inputs(blocks, 1, seed), blocks.span, cache)
                for seed, cache in zip(seeds, caches, strict=True)
            ]
            first = sessions.packer.run_calls(calls)[0]
            assert isinstance(first, Tensor)
            assert not sessions.failures
            found.append(first)
        outputs.append(torch.cat(found))
    assert torch.equal(*outputs)


@pytest.mark.parametrize("way", ["paged", "graph", "fused"])
def test_bfloat16_is_no_further_from_float32_than_alone(directory: Path, way: str) -> None:
    """The weights are the same numbers, so what differs is rounding, of inputs to products and of results."""
    exact, blocks = load(directory, torch.float32), load(directory, torch.bfloat16)
    sessions = Sessions(blocks, way)
    truths = [exact.new_cache() for _ in LENGTHS]
    wanted, alone, packed = [], [], []
    for step, lengths in enumerate((LENGTHS, *[(1,) * len(LENGTHS)] * 8)):
        given = [inputs(blocks, length, 100 * step + idx) for idx, length in enumerate(lengths)]
        for one, cache in zip(given, truths, strict=True):
            wanted.append(exact.forward(replace(one, hidden_states=one.hidden_states.float()), cache=cache))
        alone += [blocks.forward(one, cache=cache) for one, cache in zip(given, sessions.alone, strict=True)]
        calls = [SessionCall(one, blocks.span, cache) for one, cache in zip(given, sessions.packed, strict=True)]
        packed += sessions.packer.run_calls(calls)
        assert not sessions.failures
    truth = torch.cat([one.flatten() for one in wanted[len(LENGTHS) :]])
    errors = [
        float((torch.cat([one.flatten() for one in found[len(LENGTHS) :]]).float() - truth).norm() / truth.norm())
        for found in (packed, alone)
    ]
    print(f"from float32: packed {errors[0]:.2e}, alone {errors[1]:.2e}")
    assert errors[0] <= ROUNDING * errors[1]


def test_blocks_whose_steps_are_fused_still_give_gradients(directory: Path) -> None:
    """Their weights were joined, and training's forwards read them."""
    blocks = load(directory, torch.float32)
    blocks.pool = blocks.new_pool(200)
    with torch.inference_mode():
        Packer(blocks, [Packing.PAGED]).record((1, 2), fused=True)
    given = inputs(blocks, 5, 0)
    given.hidden_states.requires_grad_()
    blocks.forward(given, blocks.span).square().sum().backward()
    assert given.hidden_states.grad is not None
    assert given.hidden_states.grad.isfinite().all()
