"""Steps of blocks that aren't quantized as lines of operations: the very bits of the model's own code."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.numerics.sessions_together import RELATIVE, Sessions, packer_of
from tests.numerics.test_traced import lines_counted, load
from tests.numerics.tiny_models import tiny_config
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, DynamicCache

from swarmllm.data_structures import Span
from swarmllm.models.boundary.block_inputs import BlockInputs
from swarmllm.models.quantization import QuantizedWeight, kernels, line, whole
from swarmllm.models.quantization.line import Line, Rows
from swarmllm.models.quantization.step import Kind, Operation, Recorded, View
from swarmllm.models.span import exact_recorder
from swarmllm.models.span.block_span import BlockSpan
from swarmllm.models.span.packing import Packer, Packing, SessionCall
from swarmllm.models.span.packing_probe import right_ways
from swarmllm.models.span.span_cache import SpanCache
from swarmllm.models.span.trials import random_inputs

pytestmark = pytest.mark.skipif(bool(line.why_no_steps()), reason="needs the compiled kernels")

DTYPES = [torch.float32, torch.bfloat16]
MODELS = [
    "llama", "qwen2", "qwen3", "gemma", "gemma3_text", "mistral", "olmo2", "granite", "gpt_neox", "gpt2", "cohere2",
    "glm4", "phi3", "stablelm", "starcoder2", "opt",
]  # fmt: skip
"""Among them are windows (of 5 positions), biases, matrices the other way round, and norms of several kinds."""


class Pair:
    """A session twice: by lines, and by the model's own code."""

    def __init__(self, blocks: BlockSpan, span: Span | None = None, rows: int = 1) -> None:
        self.blocks, self.span, self.rows = blocks, span or blocks.span, rows
        self.packer = packer_of(blocks)
        if self.packer.traces:
            self.packer.trace()
        self.random = torch.Generator().manual_seed(1)
        self.caches: tuple[SpanCache, SpanCache] = (blocks.new_cache(self.span), blocks.new_cache(self.span))

    def step(self, seq_len: int) -> tuple[Tensor, Tensor]:
        given = random_inputs(self.blocks, seq_len, self.rows)
        hidden = torch.randn(given.hidden_states.shape, generator=self.random).to(self.blocks.dtype)
        return self.run(given.with_hidden(hidden))

    def run(self, inputs: BlockInputs) -> tuple[Tensor, Tensor]:
        (got,) = self.packer.run_calls([SessionCall(inputs, self.span, self.caches[0])])
        if isinstance(got, Exception):
            raise got
        return got, self.blocks.forward(inputs, self.span, self.caches[1])

    def check(self, seq_len: int) -> None:
        got, expected = self.step(seq_len)
        assert torch.equal(got, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("model_type", MODELS)
def test_bits_of_the_models_own_code(model_type: str, dtype: torch.dtype, tmp_path: Path) -> None:
    blocks = load(model_type, tmp_path, dtype, "none")
    for num_rows in (1, 3):
        pair = Pair(blocks, rows=num_rows)
        assert pair.packer.traces
        pair.check(3)
        with lines_counted() as rows:
            for _ in range(12):
                pair.check(1)
        assert rows == [num_rows] * 12


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("size", "num_rows", "num_threads"), [(65, 1, 1), (100, 2, 1), (11008, 7, 3)])
def test_the_rest_of_torchs_loops(
    size: int, num_rows: int, num_threads: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    """What doesn't fill a vector is computed by another library; each thread has such a rest."""
    config = tiny_config("llama")
    config.intermediate_size = size
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    blocks = load("llama", tmp_path, dtype, "none")
    with threads(num_threads):
        pair = Pair(blocks, rows=num_rows)
        assert pair.packer.traces
        pair.check(3)
        for _ in range(20):
            pair.check(1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("start", [0, 3, 8])
def test_a_slice_that_is_multiplied(start: int, dtype: torch.dtype, tmp_path: Path) -> None:
    blocks = load("llama", tmp_path, dtype, "none")
    for block_idx in blocks.span:
        mlp: Any = blocks.slots.block(block_idx).mlp
        width = mlp.down_proj.in_features
        mlp.down_proj.bias = nn.Parameter(torch.randn(mlp.down_proj.out_features).to(dtype), requires_grad=False)

        def forward(hidden: Tensor, mlp: Any = mlp, width: int = width) -> Tensor:
            both = torch.cat([mlp.gate_proj(hidden), mlp.up_proj(hidden)], -1)
            return mlp.down_proj(both[..., start : start + width])

        mlp.forward = forward
    for num_rows in (1, 2, 5):
        pair = Pair(blocks, rows=num_rows)
        assert pair.packer.traces
        pair.check(3)
        for _ in range(6):
            pair.check(1)


def test_an_error_in_the_middle_of_a_step(llama: BlockSpan, monkeypatch: pytest.MonkeyPatch) -> None:
    """The session goes on by the model's own code, and then by lines again."""
    pair = Pair(llama)
    pair.check(5)
    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "copy_", failing_at(Tensor.copy_, 6))
        pair.check(1)
    with lines_counted() as rows:
        pair.check(1)
    assert rows == [1]


def failing_at(function: Callable[..., Any], number: int) -> Callable[..., Any]:
    calls = itertools.count(1)

    def fail(*args: Any) -> Any:
        if next(calls) == number:
            raise RuntimeError("as a test wants it")
        return function(*args)

    return fail


def test_chosen_rows_and_positions_that_clients_send(llama: BlockSpan) -> None:
    pair = Pair(llama, rows=2)
    pair.check(4)
    for cache in pair.caches:
        cache.select_batch([1, 1, 0])
    pair.rows = 3
    pair.check(1)
    for position in (0, 40, 1 << 24):
        given = replace(random_inputs(llama, 1, 3), position_ids=torch.full((3, 1), position))
        (got,) = pair.packer.run_calls([SessionCall(given, pair.span, pair.caches[0])])
        assert torch.equal(got, llama.forward(given, pair.span, pair.caches[1]))  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("model_type", ["llama", "qwen2", "gpt_neox"])
def test_products_by_our_kernels(
    model_type: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However small they are; and torch's, where its order isn't known."""
    monkeypatch.setattr(whole, "SMALLEST", 1)
    monkeypatch.setattr(whole, "_is_faster", lambda *_: True)
    monkeypatch.setattr(whole, "_found", {})
    monkeypatch.setattr(whole, "_known", {})
    blocks = load(model_type, tmp_path, dtype, "none")
    for num_threads in (1, 2):
        for num_rows in (1, 2, 5, whole.MOST_INPUTS, whole.MOST_INPUTS + 1):
            pair = Pair(blocks, rows=num_rows)
            pair.check(3)
            with threads(num_threads):
                for _ in range(3):
                    pair.check(1)
    (line,) = pair.packer.forward.traced._lines.values()
    known = {key.num_inputs for key, how in whole._found.items() if how is not None}
    assert {whole._like(rows, dtype) for (rows, *_), plan in line._plans.items() if plan.in_c} <= known
    if kernels.level() == 4 and dtype == torch.bfloat16 and known:
        assert any(plan.in_c for plan in line._plans.values())


@contextmanager
def threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("kind", [Kind.SILU, Kind.SIGMOID])
def test_functions_are_torchs_for_bfloat16s(kind: Kind) -> None:
    if not exact_recorder._is_torchs(kind):
        pytest.skip("torch computes them otherwise here")
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    numbers = bits[bits.isfinite()].float()
    size = len(numbers)
    assert size % exact_recorder.AT_ONCE == 0
    view = [View(value, 0, (0, 0, 0, 1)) for value in range(2)]
    recorded = Recorded([Operation(kind, (1, 1, 1, size), view[1], view[0])], {0: size, 1: size}, {}, None)
    recorded = replace(recorded, entries={0: (0, view[0]), 1: (1, view[1])})
    got = Line(recorded, torch.float32, size).run(Rows(numbers[None], [0], (), 1), 0, 1)[0]
    assert torch.equal(got, functional.silu(numbers) if kind == Kind.SILU else functional.sigmoid(numbers))


@given(st.one_of(st.integers(1, 80), st.integers(1, exact_recorder.GRAIN - 1)), st.integers(0, 1 << 30))
def test_means_are_torchs(size: int, seed: int) -> None:
    """torch's own order, since some version; a new one may have another, and then torch computes them."""
    if not exact_recorder._is_torchs(Kind.SUM, 512):
        pytest.skip("torch adds in another order here")
    numbers = torch.randn(1, size, generator=torch.Generator().manual_seed(seed)) * 1000
    view = [View(value, 0, (0, 0, 0, 1)) for value in range(2)]
    operation = Operation(Kind.SUM, (1, 1, 1, size), view[1], view[0], number=float(size))
    recorded = Recorded([operation], {0: size, 1: size}, {0: (0, view[0]), 1: (1, view[1])}, None)
    got = Line(recorded, torch.float32, size).run(Rows(numbers, [0], (), 1), 0, 1)[0, 0]
    assert torch.equal(got, numbers.mean(-1)[0])


@pytest.fixture(scope="module", params=DTYPES, ids=str)
def llama(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> BlockSpan:
    return load("llama", tmp_path_factory.mktemp("llama"), request.param, "none")


@pytest.fixture(scope="module", params=["mistral", "gemma3_text"])
def with_windows(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> BlockSpan:
    return load(request.param, tmp_path_factory.mktemp("windows"), torch.float32, "none")


@settings(max_examples=15, deadline=None)
@given(
    st.integers(1, 3), st.lists(st.sampled_from([1, 1, 1, 2, 7]), min_size=1, max_size=12), st.integers(1, 140),
    st.tuples(st.integers(0, 3), st.integers(1, 4)),
)  # fmt: skip
def test_any_steps(llama: BlockSpan, rows: int, lengths: list[int], prompt: int, ends: tuple[int, int]) -> None:
    start, end = ends
    pair = Pair(llama, Span(start, max(end, start + 1)), rows)
    pair.check(prompt)
    with lines_counted() as counted:
        for length in lengths:
            pair.check(length)
    assert counted == [rows] * lengths.count(1), "several positions are multiplied at once"


@pytest.mark.parametrize("record_past", [False, True])
def test_windows_and_rollbacks(with_windows: BlockSpan, record_past: bool) -> None:
    pair = Pair(with_windows)
    if record_past:
        for cache in pair.caches:
            cache.record_past()
    for length in (2, 1, 1, 1, 1, 3, 1):
        pair.check(length)
    if record_past:
        for cache in pair.caches:
            cache.rollback(4)
    with lines_counted() as counted:
        for _ in range(8):
            pair.check(1)
    assert counted == [1] * 8


def test_sessions_together(tmp_path: Path) -> None:
    sessions = Sessions(load("llama", tmp_path, quant_type="none"))
    assert sessions.packer.traces
    with lines_counted() as counted:
        steps = ((4, 3, 11, 20), (1, 1, 2, 5), (1, 1, 1, 1), (3, 1, 17, 1))
        errors = [sessions.step(lengths) for lengths in steps]
    assert max(errors) <= RELATIVE, errors
    assert counted == [1 + 2 + 1 + 1], "where all have one new position: else weights would be read twice"


@pytest.mark.parametrize("name", ["gelu", "native_layer_norm", "bmm"])
def test_other_bits_are_found(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact_recorder, "_ONE_RESULT", exact_recorder._ONE_RESULT | {name})
    blocks = load("gpt_neox", tmp_path, quant_type="none")
    packer = Packer(blocks, right_ways(blocks))
    packer.trace()
    assert packer.traces == (name == "bmm"), "products of two numbers have one right result"


def test_attention_of_another_kind_is_left_to_the_model(tmp_path: Path) -> None:
    blocks = load("llama", tmp_path, quant_type="none")
    blocks.stack.config._attn_implementation = "eager"
    assert Packing.TRACED not in right_ways(blocks)


def test_a_trial_that_fails_ends_no_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = load("llama", tmp_path, quant_type="none")
    packer = Packer(blocks, right_ways(blocks))
    assert packer.traces
    monkeypatch.setattr(line.Line, "run", failing_at(line.Line.run, 2))
    packer.trace()
    assert not packer.traces


def test_random_operations_are_left_to_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = load("llama", tmp_path, quant_type="none")
    monkeypatch.setattr(blocks.slots.block(0).mlp, "act_fn", nn.Dropout(0.1).train())
    assert Packing.TRACED not in right_ways(blocks)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("model_type", ["llama", "qwen2", "gemma3_text", "mistral", "qwen3"])
def test_sessions_have_the_bits_of_transformers(model_type: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """By lines and by the blocks' own code, beside the whole model with a cache of its own."""
    config = tiny_config(model_type)
    if model_type in ("llama", "qwen2"):  # heads of a usual size, three of which share keys
        config.hidden_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim = 96, 6, 2, 64
    config.max_position_embeddings = 2048
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    local = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype).eval()
    pair = Pair(load(model_type, tmp_path, dtype, "none"), rows=2)
    held = [one.packed for one in pair.blocks.slots.modules() if isinstance(one, QuantizedWeight)]
    if any(one.most_inputs() != kernels.NO_LIMIT for one in held):
        pytest.skip("torch adds in another order here")
    expected: list[Tensor] = []
    local.model.layers[-1].register_forward_hook(lambda *given: expected.append(given[2]))
    cache = DynamicCache(config=local.config)
    with torch.inference_mode():
        for seq_len in (40, 1, 1, 7, 1, 300, 1, 1, 250, 1, 1):
            ids = torch.randint(0, config.vocab_size, (2, seq_len), generator=pair.random)
            local(input_ids=ids, past_key_values=cache)
            for got in pair.run(random_inputs(pair.blocks, seq_len, 2).with_hidden(local.model.embed_tokens(ids))):
                assert torch.equal(got, expected[-1]), seq_len
