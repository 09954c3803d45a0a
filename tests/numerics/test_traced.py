"""Steps as lines of operations: as the model's own code computes them, and the same in any company."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.numerics.sessions_together import RELATIVE, Sessions, packer_of, relative_error, some_inputs
from tests.numerics.tiny_models import NUM_BLOCKS, save_tiny
from torch import Tensor
from torch.nn import functional

from swarmllm.data_structures import Span
from swarmllm.models.checkpoint.checkpoint import open_checkpoint
from swarmllm.models.quantization import Quantization, QuantizedWeight, kernels, line
from swarmllm.models.quantization.line import Line, Rows
from swarmllm.models.quantization.packed import InStrips
from swarmllm.models.quantization.step import DIMS, Kind, Operation, Recorded, View, simplified
from swarmllm.models.span import step_recorder, traced_step
from swarmllm.models.span.block_span import BlockSpan
from swarmllm.models.span.loading import load_block_span
from swarmllm.models.span.packing import Packer, Packing, SessionCall
from swarmllm.models.span.packing_probe import right_ways
from swarmllm.models.span.trials import random_inputs
from swarmllm.server.device import throughput

pytestmark = pytest.mark.skipif(bool(line.why_no_steps()), reason="needs the compiled kernels")

LEVELS = [1, 3, 4]
"""Kinds of processors for which the kernels are compiled."""


def load(
    model_type: str,
    directory: Path,
    dtype: torch.dtype = torch.float32,
    quant_type: str = "int8",
    activations: str = "none",
) -> BlockSpan:
    if not (directory / "config.json").exists():
        save_tiny(model_type, directory)
    quantization = Quantization(quant_type, smallest=1)  # type: ignore[arg-type]
    checkpoint = open_checkpoint(str(directory))
    span = Span(0, NUM_BLOCKS)
    return load_block_span(
        checkpoint, span, dtype=dtype, quantization=quantization, activations=activations, progress=False
    )


@contextmanager
def lines_counted() -> Iterator[list[int]]:
    """The number of rows of each line that runs."""
    rows: list[int] = []
    run = Line.run

    def counting(self: Line, given: Rows, start: int, end: int) -> Tensor:
        rows.append(len(given.positions))
        return run(self, given, start, end)

    Line.run = counting  # type: ignore[method-assign]
    try:
        yield rows
    finally:
        Line.run = run  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> BlockSpan:
    return load("llama", tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize(
    "model_type", ["llama", "qwen3", "gemma", "olmo2", "granite", "gpt_neox", "cohere", "glm4", "gpt2", "gemma3_text"]
)
def test_sessions_together_as_by_the_models_code(model_type: str, tmp_path: Path) -> None:
    sessions = Sessions(load(model_type, tmp_path))
    assert sessions.packer.traces
    with lines_counted() as rows:
        steps = ((4, 3, 11, 20), (1, 1, 2, 5), (1, 1, 1, 1), (3, 1, 17, 1))
        errors = [sessions.step(lengths) for lengths in steps]
    assert max(errors) <= RELATIVE, errors
    assert rows == [1 + 2 + 2 + 5, 1 + 2 + 1 + 1, 3 + 2 + 1], "all but prompts"


@pytest.mark.parametrize("model_type", ["llama", "mistral"])
def test_rollback_and_reordered_rows(model_type: str, tmp_path: Path) -> None:
    sessions = Sessions(load(model_type, tmp_path), rows=(1, 2, 1))
    assert sessions.packer.traces
    for cache in (*sessions.packed, *sessions.alone):
        cache.record_past()
    sessions.step((130, 2, 4))
    sessions.step((1, 1, 1))
    for caches in (sessions.packed, sessions.alone):
        caches[0].rollback(126)
        caches[1].select_batch([1, 0])
    assert max(sessions.step((1, 1, 1)), sessions.step((2, 1, 1)), sessions.step((1, 1, 1))) <= RELATIVE


def test_parts_of_the_span(llama: BlockSpan) -> None:
    packer_of(llama).trace()
    for span in (Span(0, 2), Span(1, 4), Span(2, 3), Span(3, 4)):
        sessions = Sessions(llama, rows=(1, 1), span=span)
        sessions.step((4, 3))
        with lines_counted() as rows:
            assert sessions.step((1, 2)) <= RELATIVE
        assert rows == [3]


def test_positions_that_clients_send(llama: BlockSpan) -> None:
    given = replace(random_inputs(llama, 1), position_ids=torch.tensor([[40]]))
    outputs = []
    for _ in range(2):
        cache = llama.new_cache()
        llama.forward(random_inputs(llama, 5), None, cache)
        outputs.append(cache)
    (traced,) = packer_of(llama).run_calls([SessionCall(given, llama.span, outputs[0])])
    assert relative_error(traced, llama.forward(given, None, outputs[1])) <= RELATIVE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("activations", ["none", "int8"])
def test_a_row_is_the_same_in_any_company(dtype: torch.dtype, activations: str, tmp_path: Path) -> None:
    blocks = load("qwen2", tmp_path, dtype, activations=activations)
    packer, random = packer_of(blocks), torch.Generator().manual_seed(1)
    together, alone = ([blocks.new_cache() for _ in range(5)] for _ in range(2))
    for idx, caches in enumerate(zip(together, alone, strict=True)):
        for cache in caches:
            blocks.forward(random_inputs(blocks, 3 + 20 * idx), None, cache)
    for lengths in ((1, 2, 1, 3, 1), (1, 1, 1, 1, 1)):
        inputs = [
            random_inputs(blocks, length).with_hidden(torch.randn(1, length, 64, generator=random).to(dtype))
            for length in lengths
        ]
        both = packer.run_calls([SessionCall(*one) for one in zip(inputs, [blocks.span] * 5, together, strict=True)])
        for call, cache, got in zip(inputs, alone, both, strict=True):
            hidden = call.hidden_states.split(1, 1)  # guessed tokens are as if each came alone
            each = [packer.run_calls([SessionCall(random_inputs(blocks, 1).with_hidden(one), blocks.span, cache)])[0]
                    for one in hidden]  # fmt: skip
            assert isinstance(got, Tensor)
            assert torch.equal(got, torch.cat(each, 1))  # type: ignore[arg-type]


def test_lines_round_their_inputs_as_the_models_code_does(tmp_path: Path) -> None:
    blocks, exact = (load("llama", tmp_path, activations=one) for one in ("int8", "none"))
    packer, given = packer_of(blocks), random_inputs(blocks, 1)
    assert packer.traces
    outputs = []
    for span, run in ((blocks, None), (blocks, packer), (exact, None)):
        cache = span.new_cache()
        span.forward(random_inputs(blocks, 5), None, cache)
        with lines_counted() as rows:
            if run is None:
                outputs.append(span.forward(given, None, cache))
            else:
                outputs += run.run_calls([SessionCall(given, span.span, cache)])
                assert rows == [1]
    own, traced, unrounded = outputs
    assert relative_error(traced, own) <= relative_error(unrounded, own) / 3
    assert relative_error(unrounded, own) > 1e-3


@pytest.mark.parametrize("quant_type", ["int8", "int4", "q4_k", "q8_0", "int3"])
def test_in_half_precision_as_exact_as_the_models_code(quant_type: str, tmp_path: Path) -> None:
    short, exact = (load("llama", tmp_path, dtype, quant_type) for dtype in (torch.bfloat16, torch.float32))
    packer = packer_of(short)
    assert packer.traces
    caches = [short.new_cache(), short.new_cache(), exact.new_cache()]
    prompt = random_inputs(short, 30)
    for blocks, cache in zip((short, short, exact), caches, strict=True):
        blocks.forward(prompt.to(torch.device("cpu"), blocks.dtype), None, cache)
    errors = []
    for seed in range(8):
        hidden = torch.randn(1, 1, 64, generator=torch.Generator().manual_seed(seed)).bfloat16()
        token = random_inputs(short, 1).with_hidden(hidden)
        (got,) = packer.run_calls([SessionCall(token, short.span, caches[0])])
        usual = short.forward(token, None, caches[1])
        want = exact.forward(token.with_hidden(hidden.float()), None, caches[2])
        assert isinstance(got, Tensor)
        assert got.dtype == torch.bfloat16
        errors.append([float((one - want).square().mean()) for one in (got, usual)])
    traced, usual_error = map(sum, zip(*errors, strict=True))
    assert traced <= 1.5 * usual_error


@pytest.mark.parametrize("level", LEVELS)
def test_on_other_processors(level: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if level > kernels.level():
        pytest.skip("this processor lacks the instructions")
    monkeypatch.setattr(kernels, "level", lambda: level)
    blocks = load("llama", tmp_path)
    weights = [one.packed for one in blocks.slots.modules() if isinstance(one, QuantizedWeight)]
    assert {isinstance(one, InStrips) for one in weights} == {kernels.has_strips()}
    sessions = Sessions(blocks)
    sessions.step((40, 3, 11, 2))
    with lines_counted() as rows:
        assert sessions.step((1, 1, 1, 1)) <= RELATIVE
    assert rows == [5]


@pytest.mark.parametrize("name", ["silu", "rsqrt", "neg", "cos"])
def test_a_wrong_operation_is_found(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(step_recorder._SIMPLE, name, Kind.TANH)
    assert Packing.TRACED not in right_ways(load("llama", tmp_path))


@pytest.mark.parametrize("model_type", ["bloom", "mixtral"])
def test_other_steps_are_run_by_the_models_code(model_type: str, tmp_path: Path) -> None:
    blocks = load(model_type, tmp_path)
    assert Packing.TRACED not in right_ways(blocks)


def test_many_rows_are_left_to_torch(llama: BlockSpan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "most_inputs", lambda _, in_strips: kernels.AT_A_TIME)
    sessions = Sessions(llama, rows=(9, 8))
    sessions.step((2, 2))
    with lines_counted() as rows:
        assert sessions.step((1, 1)) <= RELATIVE
    assert not rows


@pytest.mark.parametrize(("faster", "rows_of_lines"), [(throughput.MANY_SESSIONS, [20]), (16, [10, 10]), (0, [])])
def test_many_sessions_run_in_the_way_that_is_faster(
    faster: int, rows_of_lines: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def chosen(ways: Sequence[int], measure: Callable[[int], float]) -> int:
        assert min(map(measure, ways)) > 0, "all of them can be measured"
        assert faster in ways
        return faster

    monkeypatch.setattr(kernels, "most_inputs", lambda _, in_strips: kernels.AT_A_TIME)
    monkeypatch.setattr(throughput, "choose_packing", chosen)
    sessions = Sessions(load("llama", tmp_path), rows=(1,) * 20)
    throughput.measure_lines(sessions.packer, decode_ms_per_block=0.1)
    sessions.step((2,) * 20)
    with lines_counted() as rows:
        assert sessions.step((1,) * 20) <= RELATIVE
        assert sessions.step((2,) * 20) <= RELATIVE
    assert rows == rows_of_lines, "with one new position each, as measured"


@pytest.mark.parametrize("limit", ["max_positions", "time"])
def test_what_cannot_be_measured_in_time_stays_as_it_is(
    limit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "most_inputs", lambda _, in_strips: kernels.AT_A_TIME)
    monkeypatch.setattr(throughput, "choose_packing", lambda ways, _: ways[0])
    blocks = load("llama", tmp_path)
    packer = Packer(blocks, right_ways(blocks))
    if limit == "max_positions":
        monkeypatch.setattr(blocks, "max_positions", 3)
    assert packer.traces
    throughput.measure_lines(packer, decode_ms_per_block=0.1 if limit == "max_positions" else 10)
    assert packer.traced_at_once == 0


def test_many_sessions_with_rounded_inputs_run_traced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "most_inputs", lambda _, in_strips: kernels.AT_A_TIME)
    blocks = load("llama", tmp_path, activations="int8")
    sessions = Sessions(blocks, rows=(1,) * 20)
    sessions.step((2,) * 20)
    with lines_counted() as rows:
        sessions.step((1,) * 20)
    assert rows == [20]


@pytest.mark.parametrize(
    ("rows", "rows_of_lines"),
    [((9, 7), [16]), ((9, 8, 4), [9, 12]), ((4, 9, 8), [13, 8]), ((17, 3), [3]), ((1,) * 33, [11, 11, 11])],
)
def test_company_never_changes_how_rounded_inputs_are_multiplied(
    rows: tuple[int, ...], rows_of_lines: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call that runs as a line alone does so beside any others: the last bits of other ways round other inputs."""
    monkeypatch.setattr(traced_step, "MOST_ROWS", 16)
    blocks = load("llama", tmp_path, activations="int8")
    packer, span = packer_of(blocks), blocks.span
    together, alone = ([blocks.new_cache() for _ in rows] for _ in range(2))
    random = torch.Generator().manual_seed(len(rows))
    for count, *caches in zip(rows, together, alone, strict=True):
        begin = some_inputs(blocks, count, 5, random)
        for cache in caches:
            blocks.forward(begin, cache=cache)
    for _ in range(2):
        steps = [some_inputs(blocks, count, 1, random) for count in rows]
        with lines_counted() as counted:
            got = packer.run_calls([SessionCall(*one) for one in zip(steps, [span] * len(rows), together, strict=True)])
        assert counted == rows_of_lines
        for step, cache, output in zip(steps, alone, got, strict=True):
            (expected,) = packer.run_calls([SessionCall(step, span, cache)])
            assert isinstance(output, Tensor)
            assert torch.equal(output, expected)


@pytest.mark.skipif(kernels.strips_version() != kernels.BY_TILES, reason="this processor has no AMX")
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("quant_type", ["int8", "q8_0"])
def test_many_rows_by_tiles(quant_type: str, threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by the model's own code but for roundings, and a row is the same in any company of 17 or more."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(kernels, "WORTH_A_THREAD", 1)
    blocks = load("llama", tmp_path, torch.bfloat16, quant_type)
    packer, random, num_rows = packer_of(blocks), torch.Generator().manual_seed(3), 40
    assert packer.traces
    begin, step = (some_inputs(blocks, 1, length, random) for length in (3, 1))
    hidden = [torch.randn(1, 1, 64, generator=random).bfloat16() for _ in range(num_rows)]

    def outputs(of: Sequence[int]) -> list[Tensor]:
        caches = [blocks.new_cache() for _ in of]
        for cache in caches:
            blocks.forward(begin, None, cache)
        calls = [SessionCall(step.with_hidden(hidden[i]), blocks.span, c) for i, c in zip(of, caches, strict=True)]
        with lines_counted() as rows:
            found = packer.run_calls(calls)
        assert rows == [len(of)]
        return found  # type: ignore[return-value]

    expected = outputs(range(num_rows))
    for of in (range(17), range(39, 6, -1), range(8, 40, 1)):
        for idx, output in zip(of, outputs(of), strict=True):
            assert torch.equal(output, expected[idx])
    for idx in (0, 16, 39):
        cache = blocks.new_cache()
        blocks.forward(begin, None, cache)
        assert relative_error(expected[idx], blocks.forward(step.with_hidden(hidden[idx]), None, cache)) <= 0.02


def run_operation(operation: Operation, sizes: Sequence[int], hidden: Tensor, stored: Sequence[int] = ()) -> Tensor:
    """The output of one operation on a row; value 0 is the row, value 1 the output of the same size."""
    whole = [View(value, 0, (0, 0, 0, 1)) for value in range(2)]
    recorded = Recorded([operation], dict(enumerate(sizes)), {0: (0, whole[0]), 1: (1, whole[1])}, None)
    line = Line(recorded, hidden.dtype, hidden.shape[-1])
    return line.run(Rows(hidden[None], [0], stored or (0,) * 5, 1000), 0, 1)[0]


def test_a_copy_of_what_changes_stays_a_copy() -> None:
    view = [View(value, 0, (0, 0, 0, 1)) for value in range(3)]
    sizes = (1, 1, 1, 8)
    operations = [
        Operation(Kind.COPY, sizes, view[1], view[0]),
        Operation(Kind.ADD, sizes, view[0], view[0], view[0], number=1.0),
        Operation(Kind.ADD, sizes, view[2], view[1], view[0], number=1.0),
    ]
    entries = {0: (0, view[0]), 1: (3, view[2])}
    line = Line(simplified(Recorded(operations, dict.fromkeys(range(3), 8), entries, None)), torch.float32, 8)
    hidden = torch.arange(8.0)[None]
    assert torch.equal(line.run(Rows(hidden, [0], (0,) * 5, 1), 0, 1), 3 * hidden)


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 3), st.integers(1, 6), st.sampled_from([5, 8, 16, 24, 64, 80, 128, 144]), st.integers(1, 70),
    st.integers(0, 40), st.sampled_from([torch.float32, torch.bfloat16]), st.sampled_from(LEVELS),
    st.integers(0, 1 << 30),
)  # fmt: skip
def test_attention(
    key_heads: int, shared: int, size: int, count: int, window: int, dtype: torch.dtype, level: int, seed: int
) -> None:
    random = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(key_heads, count + 3, size, generator=random).to(dtype) for _ in range(2))
    query = torch.randn(key_heads * shared * size, generator=random).to(dtype)
    operation = Operation(
        Kind.ATTEND, (key_heads, shared, size, size), View(1, 0, (0, 0, 0, 1)), View(0, 0, (0, size, 1, 0)),
        rounds=dtype == torch.bfloat16, number=0.3, window=window,
    )  # fmt: skip
    stored = (keys.data_ptr(), values.data_ptr(), count + 3, count + 3, count - 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "level", lambda: min(level, kernels.library().swarmllm_level()))
        got = run_operation(operation, (len(query),) * 2, query, stored).view(key_heads * shared, 1, size)
    first = max(0, count - window) if window else 0
    seen = (one[:, first:count].double().repeat_interleave(shared, 0) for one in (keys, values))
    wanted = functional.scaled_dot_product_attention(query.double().view(-1, 1, size), *seen, scale=0.3)
    assert (got - wanted).abs().max() <= 16 * torch.finfo(dtype).eps * wanted.abs().max().clamp_min(1)


@pytest.mark.parametrize("rounds_inputs", [False, True])
@pytest.mark.parametrize("num_rows", [1, 3])
def test_several_threads_compute_what_one_does(num_rows: int, rounds_inputs: bool) -> None:
    random = torch.Generator().manual_seed(num_rows)
    matrix = kernels.Matrix(
        torch.randint(-127, 127, (2100, 1024), dtype=torch.int8, generator=random), torch.rand(2100, 1) / 1024
    )
    matrix._weight.rounds_inputs = rounds_inputs
    last, count = (0, 0, 0, 1), 700
    keys, values = (torch.randn(num_rows, 4, count, 64, generator=random) for _ in range(2))
    operations = [
        Operation(Kind.PRODUCT, (1, 1, 1, 2100), View(1, 0, last), View(0, 0, last), matrix=matrix, rounds=True),
        Operation(Kind.ATTEND, (4, 2, 64, 64), View(2, 0, last), View(1, 0, (0, 64, 1, 0)), number=0.1),
        Operation(Kind.ADD, (1, 1, 1, 512), View(3, 0, last), View(2, 0, last), View(0, 0, last), number=1.0),
        Operation(Kind.COPY, (1, 1, 1, 512), View(3, 512, last), View(1, 0, last)),
    ]
    sizes = {0: 1024, 1: 2100, 2: 512, 3: 1024}
    entries = {0: (0, View(0, 0, last)), 1: (len(operations), View(3, 0, last))}
    line = Line(Recorded(operations, sizes, entries, None), torch.float32, 1024)
    hidden = torch.randn(num_rows, 1024, generator=random)
    of_rows = [(keys[row].data_ptr(), values[row].data_ptr(), count, count, count - 1) for row in range(num_rows)]
    rows = Rows(hidden, range(num_rows), [number for row in of_rows for number in row], count)
    before, outputs = torch.get_num_threads(), []
    try:
        for num_threads in (1, 2, 4):
            torch.set_num_threads(num_threads)
            outputs += [line.run(rows, 0, 1) for _ in range(5)]
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, outputs[0]) for one in outputs)
    wanted = functional.linear(hidden, matrix.dequantize(0, 2100))
    assert (outputs[0][:, 512:] - wanted[:, :512]).abs().max() <= 2**-6 * wanted.abs().max()


FUNCTIONS = {
    Kind.EXPONENTIAL: torch.exp, Kind.SIGMOID: torch.sigmoid, Kind.SILU: functional.silu, Kind.GELU: functional.gelu,
    Kind.GELU_TANH: lambda x: functional.gelu(x, approximate="tanh"), Kind.TANH: torch.tanh, Kind.COSINE: torch.cos,
    Kind.SINE: torch.sin, Kind.NEGATE: torch.neg, Kind.ABSOLUTE: torch.abs, Kind.COPY: torch.clone,
}  # fmt: skip


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", list(FUNCTIONS), ids=lambda kind: kind.name)
def test_functions(kind: Kind, level: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "level", lambda: min(level, kernels.library().swarmllm_level()))
    numbers = torch.cat([torch.linspace(-20, 20, 1001), torch.tensor([0.0, -0.0, 1e-6, -80.0, 80.0])])
    sizes, view = (1, 1, 1, len(numbers)), (0, 0, 0, 1)
    operation = Operation(kind, sizes, View(1, 0, view), View(0, 0, view))
    assert len(sizes) == DIMS
    got = run_operation(operation, (len(numbers),) * 2, numbers)
    wanted = FUNCTIONS[kind](numbers.double())
    assert ((got - wanted).abs() <= 4e-7 * wanted.abs() + 2e-7).all()
    rounded = run_operation(Operation(kind, sizes, View(1, 0, view), View(0, 0, view), rounds=True),
                            (len(numbers),) * 2, numbers)  # fmt: skip
    assert torch.equal(rounded, got.bfloat16().float())
