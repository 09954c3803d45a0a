"""Several sessions in one forward: each gets what it gets alone, whatever the others do."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from tests.numerics.test_sweep import ARCHITECTURES
from tests.numerics.tiny_models import NUM_BLOCKS, VARIANTS, save_tiny
from tests.selection import sampled
from torch import Tensor

from swarmllm.data_structures import Span
from swarmllm.errors import UnsupportedModelError
from swarmllm.models.boundary.block_inputs import BlockInputs
from swarmllm.models.checkpoint.checkpoint import open_checkpoint
from swarmllm.models.span.block_span import BlockSpan
from swarmllm.models.span.loading import load_block_span
from swarmllm.models.span.packing import Packer, Packing, SessionCall
from swarmllm.models.span.packing_probe import right_ways
from swarmllm.models.span.span_cache import SpanCache
from swarmllm.server.device.throughput import measure_packing

RELATIVE = 1e-5
"""Largest error in float32, relative to the largest output."""
FALL_BACK = {
    "bamba": "its decoding of a batch isn't that of its rows",
    "deepseek_v4": "compresses its past into cache layers of its own",
    "llama4_text": "scales queries by the length of the cache",
    "qwen4_exp_text": "cache layers of its own",
}
"""Run one by one, with the reason."""
ROWS = (1, 2, 1, 1)
STEPS = ((4, 3, 11, 0), (1, 1, 2, 5), (1, 1, 1, 1), (1, 1, 1, 1))
"""New positions of each session: prompts of different lengths, a prompt beside tokens, tokens."""


def load(model_type: str, directory: Path, dtype: torch.dtype | None = None) -> BlockSpan:
    if not (directory / "config.json").exists():
        save_tiny(model_type, directory)
    return load_block_span(open_checkpoint(str(directory)), Span(0, NUM_BLOCKS), dtype=dtype, progress=False)


@lru_cache(4)
def packer_of(blocks: BlockSpan) -> Packer:
    return Packer(blocks, right_ways(blocks))


def some_inputs(blocks: BlockSpan, rows: int, seq_len: int, random: torch.Generator) -> BlockInputs:
    """Random ones, whatever the blocks need."""
    ids = torch.randint(3, 100, (rows, seq_len), generator=random)
    embeds = torch.randn(rows, seq_len, blocks.embedding_dim, generator=random).to(blocks.dtype)
    inputs = BlockInputs(hidden_states=embeds, batch_size=rows, seq_len=seq_len, input_ids=ids, inputs_embeds=embeds)
    with torch.no_grad():  # what enters the first block may have more axes than embeddings
        inputs = inputs.with_hidden(blocks.preamble(inputs).clone())
    unneeded = {name: None for name in ("input_ids", "inputs_embeds") if name not in blocks.traits.extra_inputs}
    return replace(inputs, **unneeded)


class Sessions:
    """The same sessions twice: run by a packer, and alone."""

    def __init__(self, blocks: BlockSpan, rows: Sequence[int] = ROWS, span: Span | None = None) -> None:
        self.blocks, self.rows, self.span = blocks, rows, span or blocks.span
        self.packer = packer_of(blocks)
        self.random = torch.Generator().manual_seed(1)
        self.packed = [blocks.new_cache(self.span) for _ in rows]
        self.alone = [blocks.new_cache(self.span) for _ in rows]

    def step(self, lengths: Sequence[int]) -> float:
        """Everybody's next positions; the largest relative error."""
        calls, wanted = [], []
        for rows, length, packed, alone in zip(self.rows, lengths, self.packed, self.alone, strict=True):
            if length:
                inputs = some_inputs(self.blocks, rows, length, self.random)
                wanted.append(self.blocks.forward(inputs, self.span, alone))
                calls.append(SessionCall(inputs, self.span, packed))
        return max(map(relative_error, self.packer.run(calls), wanted))


def relative_error(got: Tensor | Exception, want: Tensor) -> float:
    if isinstance(got, Exception):
        raise got
    assert got.shape == want.shape
    assert bool(got.isfinite().all())
    return float((got - want).abs().max() / want.abs().max())


@contextmanager
def packs_counted(packer: Packer) -> Iterator[list[int]]:
    """How many calls ran together each time."""
    sizes: list[int] = []
    run = packer.forward.run

    def counting(calls: Sequence[SessionCall], way: Packing) -> list[Tensor]:
        outputs = run(calls, way)
        sizes.append(len(calls))
        return outputs

    packer.forward.run = counting  # type: ignore[method-assign]
    try:
        yield sizes
    finally:
        del packer.forward.run  # type: ignore[method-assign]


def check(model_type: str, directory: Path) -> Packing:
    """Run some steps; each session gets what it gets alone. Returns the way that the span has chosen."""
    blocks = load(model_type, directory)
    sessions = Sessions(blocks)
    with packs_counted(sessions.packer) as sizes:
        errors = [sessions.step(lengths) for lengths in STEPS]
    assert max(errors) <= RELATIVE, errors
    expected = {Packing.RAGGED: [3, 4, 4, 4], Packing.PADDED: [2, 4, 4], Packing.ONE_BY_ONE: []}
    assert sizes == expected[sessions.packer.way], "what could run together did"
    return sessions.packer.way


@pytest.mark.parametrize(
    ("model_type", "way"),
    [
        ("llama", Packing.RAGGED),
        ("mistral", Packing.RAGGED),
        ("gemma2", Packing.RAGGED),
        ("gemma3n_text", Packing.RAGGED),
        ("gpt_oss", Packing.RAGGED),
        ("deepseek_v3", Packing.PADDED),
        ("bloom", Packing.PADDED),
        ("qwen3_next", Packing.PADDED),
        ("mamba2", Packing.PADDED),
        ("llama4_text", Packing.ONE_BY_ONE),
    ],
)
def test_together_as_alone(model_type: str, way: Packing, tmp_path: Path) -> None:
    assert check(model_type, tmp_path) == way


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_architecture_together_as_alone(tmp_path: Path) -> None:
    """At least 118 of them batched, the others run one by one by themselves."""
    ways: dict[str, Packing] = {}
    for model_type in [*ARCHITECTURES, *VARIANTS]:
        directory = tmp_path / model_type
        try:
            blocks = load(model_type, directory)
            if blocks.keeps_cache:
                ways[model_type] = check(model_type, directory)
                assert measure_packing(packer_of(blocks), decode_ms_per_block=0.5) in packer_of(blocks).ways
        except UnsupportedModelError:
            continue  # what can't be split at all is the sweep's business
    assert {name for name, way in ways.items() if way == Packing.ONE_BY_ONE} == set(FALL_BACK)
    assert len(ways) - len(FALL_BACK) >= 118


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> BlockSpan:
    return load("llama", tmp_path_factory.mktemp("llama"))


def test_a_call_alone_is_computed_as_ever(llama: BlockSpan) -> None:
    sessions = Sessions(llama, rows=(2,))
    assert [sessions.step([length]) for length in (5, 1, 3)] == [0.0, 0.0, 0.0]


def test_parts_of_the_span_at_once(llama: BlockSpan) -> None:
    inputs = some_inputs(llama, 1, 3, torch.Generator().manual_seed(1))
    spans = [Span(0, 2), Span(1, 4), Span(0, 2), Span(1, 4), Span(2, 3)]
    with packs_counted(packer_of(llama)) as sizes:
        outputs = packer_of(llama).run([SessionCall(inputs, span, llama.new_cache(span)) for span in spans])
    assert sizes == [2, 2]
    for span, output in zip(spans, outputs, strict=True):
        assert relative_error(output, llama.forward(inputs, span, llama.new_cache(span))) <= RELATIVE


@pytest.mark.parametrize("model_type", ["mistral", "qwen2", "bloom"])
def test_rollback_and_reordered_rows_between_packed_steps(model_type: str, tmp_path: Path) -> None:
    sessions = Sessions(load(model_type, tmp_path), rows=(1, 2, 1))
    sessions.step((3, 2, 4))
    sessions.step((1, 1, 1))
    for caches in (sessions.packed, sessions.alone):
        caches[0].rollback(2)
        caches[1].select_batch([1, 0])
    assert max(sessions.step((1, 1, 1)), sessions.step((2, 1, 1))) <= RELATIVE


@pytest.mark.parametrize("model_type", ["llama", "mistral", "bloom", "qwen3_next"])
def test_one_bad_call_hurts_no_other(model_type: str, tmp_path: Path) -> None:
    blocks = load(model_type, tmp_path)
    random = torch.Generator().manual_seed(2)
    prompts = [some_inputs(blocks, 1, length, random) for length in (4, 7, 6)]
    tokens = [some_inputs(blocks, 1, 1, random) for _ in prompts]

    def run(token: BlockInputs, prompt: BlockInputs) -> Tensor:
        cache = blocks.new_cache()
        blocks.forward(prompt, None, cache)
        return blocks.forward(token, None, cache)

    wanted = list(map(run, tokens, prompts))
    caches = [blocks.new_cache() for _ in prompts]
    for prompt, cache in zip(prompts, caches, strict=True):
        blocks.forward(prompt, None, cache)
    spoil_block(caches[1], NUM_BLOCKS - 1)
    outcomes = packer_of(blocks).run(
        [SessionCall(token, blocks.span, cache) for token, cache in zip(tokens, caches, strict=True)]
    )
    assert isinstance(outcomes[1], Exception)
    for idx in (0, 2):
        assert relative_error(outcomes[idx], wanted[idx]) <= RELATIVE
        assert caches[idx].length == prompts[idx].seq_len + 1


def spoil_block(cache: SpanCache, block_idx: int) -> None:
    """The last block of this session fails, after the others have been appended to."""

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("spoilt")

    cache.layers[block_idx].update = fail


def test_unusual_calls_run_alone_beside_the_others(llama: BlockSpan) -> None:
    random = torch.Generator().manual_seed(3)
    plain = [some_inputs(llama, 1, 4, random) for _ in range(2)]
    left_padded = replace(some_inputs(llama, 2, 4, random), attention_mask=torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]]))
    shifted = replace(plain[0], position_ids=torch.tensor([[7, 8, 9, 30]]))
    many = [*plain, left_padded, shifted]
    with packs_counted(packer_of(llama)) as sizes:
        outcomes = packer_of(llama).run([SessionCall(inputs, llama.span, llama.new_cache()) for inputs in many])
    assert sizes == [3], "positions of its own fit into a row, padding doesn't"
    for inputs, outcome in zip(many, outcomes, strict=True):
        assert relative_error(outcome, llama.forward(inputs, None, llama.new_cache())) <= RELATIVE


def test_gradients_and_single_calls_after_a_pack(llama: BlockSpan) -> None:
    inputs = some_inputs(llama, 1, 5, torch.Generator().manual_seed(4))

    def gradient() -> Tensor:
        hidden = inputs.hidden_states.detach().clone().requires_grad_()
        llama.forward(inputs.with_hidden(hidden)).square().sum().backward()
        assert hidden.grad is not None
        return hidden.grad

    before = gradient()
    Sessions(llama).step((2, 1, 3, 1))
    assert torch.equal(gradient(), before)


def test_outputs_own_their_memory(llama: BlockSpan) -> None:
    sessions = Sessions(llama)
    calls = [
        SessionCall(some_inputs(llama, rows, 2, sessions.random), llama.span, cache)
        for rows, cache in zip(sessions.rows, sessions.packed, strict=True)
    ]
    for output in packer_of(llama).run(calls):
        assert isinstance(output, Tensor)
        assert output.untyped_storage().nbytes() == output.nbytes


def test_frequencies_that_depend_on_the_batch_are_not_mixed(tmp_path: Path) -> None:
    """A rotary embedding that looks at the largest position would rotate short sessions as long ones."""
    local = save_tiny("llama", tmp_path)
    local.config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    local.config.max_position_embeddings = 8
    local.config.save_pretrained(tmp_path)
    blocks = load("llama", tmp_path)
    sessions = Sessions(blocks)
    with packs_counted(sessions.packer) as sizes:
        assert sessions.step((4, 3, 12, 2)) <= RELATIVE
    assert sizes == [3]


def test_short_floats(tmp_path: Path) -> None:
    """In bfloat16 the same up to rounding: 16 eps of the largest output."""
    sessions = Sessions(load("qwen2", tmp_path, torch.bfloat16))
    assert sessions.packer.way == Packing.RAGGED
    assert max(sessions.step(lengths) for lengths in STEPS) <= 16 * torch.finfo(torch.bfloat16).eps


def test_a_way_that_is_wrong_here_is_not_used_whatever_was_measured_elsewhere(tmp_path: Path) -> None:
    packer = packer_of(load("bloom", tmp_path))
    assert packer.ways == (Packing.PADDED, Packing.ONE_BY_ONE)
    packer.use(Packing.RAGGED)
    assert packer.way == Packing.PADDED
    packer.use(Packing.ONE_BY_ONE)
    assert packer.way == Packing.ONE_BY_ONE


@pytest.mark.parametrize(
    "model_type",
    sampled(["llama", "mistral", "gemma3n_text", "bloom", "qwen3_next", "mamba2", "bert"], 3, always=["llama"]),
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_measurement_runs_and_leaves_nothing_behind(model_type: str, dtype: torch.dtype, tmp_path: Path) -> None:
    blocks = load(model_type, tmp_path, dtype)
    assert measure_packing(packer_of(blocks), decode_ms_per_block=0.5) in packer_of(blocks).ways
    if blocks.keeps_cache:
        sessions = Sessions(blocks)
        limit = RELATIVE if dtype == torch.float32 else 16 * torch.finfo(dtype).eps
        assert max(sessions.step(lengths) for lengths in STEPS) <= limit
