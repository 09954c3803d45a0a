"""Several sessions in one forward: each gets what it gets alone. `test_architectures` has all architectures."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.numerics.sessions_together import (
    RELATIVE,
    STEPS,
    Sessions,
    SessionsWithSources,
    check_together_as_alone,
    load,
    packer_of,
    packs_counted,
    relative_error,
    some_inputs,
)
from tests.numerics.tiny_encoder_decoders import save_tiny_model, tiny_model
from tests.numerics.tiny_models import NUM_BLOCKS, save_tiny
from tests.selection import sampled
from torch import Tensor

from swarmllm.data_structures import Span
from swarmllm.models.architecture import stacks
from swarmllm.models.boundary import block_inputs
from swarmllm.models.boundary.block_inputs import BlockInputs, all_on_device
from swarmllm.models.boundary.device_copies import copies_on
from swarmllm.models.checkpoint.checkpoint import open_checkpoint
from swarmllm.models.quantization.rules import FULL_PRECISION, Quantization
from swarmllm.models.span import packing
from swarmllm.models.span.block_span import BlockSpan
from swarmllm.models.span.loading import load_block_span
from swarmllm.models.span.packing import Packing, SessionCall
from swarmllm.models.span.span_cache import SpanCache
from swarmllm.server.device.throughput import measure_packing


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
    assert check_together_as_alone(load(model_type, tmp_path)) == way


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
        outputs = packer_of(llama).run_calls([SessionCall(inputs, span, llama.new_cache(span)) for span in spans])
    assert sizes == [2, 2]
    for span, output in zip(spans, outputs, strict=True):
        assert relative_error(output, llama.forward(inputs, span, llama.new_cache(span))) <= RELATIVE


def test_inputs_come_from_other_memory(llama: BlockSpan, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: calls that are packed are copied together and without their masks, one that runs alone with it."""
    moved: list[list[frozenset[str]]] = []

    def copied(calls: Sequence[BlockInputs], device: torch.device) -> list[BlockInputs]:
        moved.append([frozenset(call.tensors()) for call in calls])
        return all_on_device(calls, device)

    packer, random = packer_of(llama), torch.Generator().manual_seed(4)
    monkeypatch.setattr(packing, "all_on_device", copied)
    monkeypatch.setattr(block_inputs, "on_device", copies_on)
    monkeypatch.setattr(packer, "moves_inputs", True)
    many = [
        replace(some_inputs(llama, 2, 4, random), attention_mask=torch.tensor(mask))
        for mask in ([[1, 1, 1, 1]] * 2, [[1, 1, 1, 1]] * 2, [[0, 0, 1, 1], [1, 1, 1, 1]])
    ]
    outcomes = packer.run_calls([SessionCall(inputs, llama.span, llama.new_cache()) for inputs in many])
    alone = frozenset({"hidden_states"})
    assert moved == [[alone, alone], [alone | {"attention_mask"}]]
    for inputs, outcome in zip(many, outcomes, strict=True):
        assert relative_error(outcome, llama.forward(inputs, None, llama.new_cache())) <= RELATIVE


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
    outcomes = packer_of(blocks).run_calls(
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

    cache.layers[block_idx].update = cache.layers[block_idx].extend = fail


def test_unusual_calls_run_alone_beside_the_others(llama: BlockSpan) -> None:
    random = torch.Generator().manual_seed(3)
    plain = [some_inputs(llama, 1, 4, random) for _ in range(2)]
    left_padded = replace(some_inputs(llama, 2, 4, random), attention_mask=torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]]))
    shifted = replace(plain[0], position_ids=torch.tensor([[7, 8, 9, 30]]))
    many = [*plain, left_padded, shifted]
    with packs_counted(packer_of(llama)) as sizes:
        outcomes = packer_of(llama).run_calls([SessionCall(inputs, llama.span, llama.new_cache()) for inputs in many])
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
    for output in packer_of(llama).run_calls(calls):
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


# ---------------------------------------------------------------------- decoders that have an encoder


def decoder_of(path: Path, quantization: Quantization = FULL_PRECISION) -> BlockSpan:
    checkpoint = open_checkpoint(str(path))
    span = stacks(checkpoint.config)[-1].span
    return load_block_span(checkpoint, span, quantization=quantization, progress=False)


@pytest.fixture(scope="module", params=["t5", "bart", "switch_transformers"])
def decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> BlockSpan:
    """A bias of distances, learned positions, and a type that is padded."""
    return decoder_of(save_tiny_model(request.param, tmp_path_factory.mktemp("blocks")))


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_lengths_and_sizes_with_encoder_outputs(decoder: BlockSpan, data: st.DataObject) -> None:
    count = data.draw(st.integers(2, 6))
    numbers = [data.draw(st.lists(st.integers(1, most), min_size=count, max_size=count)) for most in (3, 20, 9)]
    sessions = SessionsWithSources(decoder, rows=numbers[0], sources=numbers[1])
    steps = [numbers[2], [1] * count, data.draw(st.lists(st.integers(0, 4), min_size=count, max_size=count))]
    with packs_counted(sessions.packer) as sizes:
        errors = [sessions.step(lengths) for lengths in steps if any(lengths)]
    assert max(errors) <= RELATIVE, errors
    assert sizes[0] == count


def test_a_decoder_alone_attends_with_the_same_bits(tmp_path: Path) -> None:
    """In a row, all that differs from a call alone is how many rows the matrices multiply: here, none do."""
    blocks = decoder_of(save_tiny_model("t5", tmp_path))
    sessions = SessionsWithSources(blocks, rows=(2,), sources=(5,))
    assert [sessions.step([length]) for length in (3, 1, 2)] == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_a_quantized_decoder_in_short_floats(name: str, tmp_path: Path) -> None:
    tiny_model(name).bfloat16().save_pretrained(tmp_path)
    blocks = decoder_of(tmp_path, Quantization("int8", smallest=0))
    assert blocks.shares_keys
    assert packer_of(blocks).way == Packing.RAGGED
    sessions = SessionsWithSources(blocks, rows=(1, 2, 1), sources=(9, 4, 17))
    errors = [sessions.step(lengths) for lengths in ((1, 3, 1), (1, 1, 1), (1, 1, 1))]
    assert max(errors) <= 16 * torch.finfo(torch.bfloat16).eps


def test_a_row_longer_than_the_table_of_positions_is_not_tried(tmp_path: Path) -> None:
    """Before its blocks, BART looks up as many positions as the row has, on a server those of nobody."""
    blocks = decoder_of(save_tiny_model("bart", tmp_path))
    assert blocks.longest_text == 128
    sessions = SessionsWithSources(blocks, rows=(1, 1, 1), sources=(3, 4, 5))
    sessions.step((125, 4, 2))
    with packs_counted(sessions.packer) as sizes:
        assert sessions.step((1, 1, 1)) <= RELATIVE
        assert sessions.step((1, 1, 1)) <= RELATIVE
    assert sizes == [3]


@pytest.mark.parametrize("model_type", ["llama", "mistral", "gemma3_text", "qwen3"])
def test_what_a_session_s_cache_takes_is_measured(model_type: str, tmp_path: Path) -> None:
    """Servers lease memory by it: keys and values of full attention and of windows, whoever writes them."""
    blocks = load(model_type, tmp_path)
    sizes = blocks.cache_sizes
    numbers = sum(heads * head_dim for pair in sizes.key_value_shapes.values() for heads, head_dim in pair)
    assert sizes.bytes_per_token == numbers * blocks.dtype.itemsize > 0
    sessions = Sessions(blocks, rows=(1,))
    for length in (5, 1, 1):
        sessions.step((length,))
    for cache in (*sessions.packed, *sessions.alone):
        growing, fixed = cache.used_bytes()
        assert fixed == 0
        assert 0 < growing <= 7 * sizes.bytes_per_token, "windows drop what nobody sees any more"
        assert growing == 7 * sizes.bytes_per_token or model_type in ("mistral", "gemma3_text")
        assert cache.num_bytes >= growing
