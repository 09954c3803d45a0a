"""Blocks that are in memory only while they compute give the very bits of those that always are."""

import gc
import itertools
import os
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.numerics.tiny_models import save_tiny
from tests.selection import COMMIT, sampled, turn_of
from torch import Tensor

from swarmllm.data_structures import Patch, Span
from swarmllm.errors import ConfigurationError, ServerOverloadedError
from swarmllm.models.adapters.block_adapter import BlockAdapter, checked
from swarmllm.models.boundary.block_inputs import BlockInputs
from swarmllm.models.checkpoint.checkpoint import open_checkpoint
from swarmllm.models.quantization import QUANT_TYPES, Quantization
from swarmllm.models.span import offload
from swarmllm.models.span.block_span import BlockSpan
from swarmllm.models.span.loading import load_block_span
from swarmllm.models.span.offload import OffloadedBlocks, num_slots, spread
from swarmllm.models.span.packing import Packer, Packing, SessionCall
from swarmllm.models.span.packing_probe import right_ways
from swarmllm.server.device.device import num_blocks_that_fit, num_to_offload
from swarmllm.server.device.forward_backward import Graph

NUM_BLOCKS, HIDDEN = 4, 64
WHOLE = Span(0, NUM_BLOCKS)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("offload")
    save_tiny("llama", path)
    return path


def load(directory: Path, num_offloaded: int, span: Span = WHOLE, **options: Any) -> BlockSpan:
    options = {"progress": False, "offload_dir": directory / "offloaded", **options}
    return load_block_span(open_checkpoint(str(directory)), span, num_offloaded=num_offloaded, **options)


@pytest.fixture(scope="module")
def resident(directory: Path) -> BlockSpan:
    return load(directory, 0)


@pytest.fixture(scope="module", params=[2, 3, 4])
def offloaded(directory: Path, request: pytest.FixtureRequest) -> BlockSpan:
    return load(directory, request.param)


def test_blocks_turn_off_the_attention_that_plans_for_each_length(directory: Path) -> None:
    """cuDNN's, in the processes of servers and of clients with blocks alike."""
    torch.backends.cuda.enable_cudnn_sdp(True)
    load(directory, 0)
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert torch.backends.cuda.flash_sdp_enabled()


def some_inputs(seed: int, rows: int = 2, length: int = 5, adapter: BlockAdapter | None = None) -> BlockInputs:
    hidden = torch.randn(rows, length, HIDDEN, generator=torch.Generator().manual_seed(seed))
    return BlockInputs(hidden_states=hidden, batch_size=rows, seq_len=length, adapter=adapter)


def trained(blocks: BlockSpan) -> BlockAdapter:
    patches = [
        Patch(block=block_idx, path="self_attn.q_proj", kind="lora", shapes=((4, HIDDEN), (HIDDEN, 4)))
        for block_idx in range(NUM_BLOCKS)
    ]
    count = NUM_BLOCKS * 2 * 4 * HIDDEN
    return checked(patches, torch.randn(count, generator=torch.Generator().manual_seed(3)), blocks.slots)


def gradients(graph: Graph) -> dict[str, Tensor]:
    return graph.gradients(torch.randn(graph.outputs.shape, generator=torch.Generator().manual_seed(9)))


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_what_is_announced_is_the_same(resident: BlockSpan, offloaded: BlockSpan) -> None:
    assert offloaded.traits == resident.traits
    assert offloaded.digests == resident.digests
    assert offloaded.cache_sizes.bytes_per_token == resident.cache_sizes.bytes_per_token
    assert offloaded.offloaded is not None
    missing = len(offloaded.offloaded) - num_slots(len(offloaded.offloaded))
    per_block = resident.num_bytes / NUM_BLOCKS
    assert offloaded.num_bytes == pytest.approx(resident.num_bytes - missing * per_block, rel=0.02)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["forward", "record", "backward", "step", "rollback"]),
            st.sampled_from([Span(start, end) for start, end in itertools.combinations(range(NUM_BLOCKS + 1), 2)]),
            st.booleans(),
            st.integers(1, 9),
        ),
        max_size=12,
    )
)
@settings(max_examples=40, deadline=None)
def test_calls_in_any_order(
    resident: BlockSpan, offloaded: BlockSpan, calls: list[tuple[str, Span, bool, int]]
) -> None:
    """Batches and their gradients, of any part, between steps of a session; graphs are kept while others compute."""
    graphs: list[tuple[Graph, Graph]] = []
    spans = (resident, offloaded)
    caches = [blocks.new_cache(record_past=True) for blocks in spans]
    for seed, (call, part, is_adapted, length) in enumerate(calls):
        inputs = some_inputs(seed, length=length, adapter=trained(resident) if is_adapted else None)
        if call == "forward":
            with torch.no_grad():
                assert torch.equal(*(blocks.forward(inputs, part) for blocks in spans))
        elif call == "record":
            first, second = (
                Graph.record(blocks, inputs.with_hidden(inputs.hidden_states.clone()), part) for blocks in spans
            )
            assert torch.equal(first.outputs, second.outputs)
            graphs.append((first, second))
        elif call == "backward" and graphs:
            expected, found = (gradients(graph) for graph in graphs.pop(seed % len(graphs)))
            assert_equal(found, expected)
        elif call == "step":
            assert torch.equal(
                *(blocks.forward(inputs, cache=cache) for blocks, cache in zip(spans, caches, strict=True))
            )
        elif call == "rollback":
            for cache in caches:
                cache.rollback(min(length, cache.position))
    for first, second in graphs:
        assert_equal(gradients(second), gradients(first))


@pytest.mark.rotates(4)
@pytest.mark.parametrize("quant_type", sampled(list(QUANT_TYPES), 4))
@pytest.mark.parametrize("model_type", ["llama", "gpt2", "mixtral", "gpt_oss"])
def test_formats(model_type: str, quant_type: str, tmp_path: Path) -> None:
    """Packed weights, transposed ones, fused experts. Where blocks share weights, these are packed in a block alone."""
    save_tiny(model_type, tmp_path)
    dtype = [torch.float32, torch.bfloat16][turn_of(COMMIT, 2) - 1]
    options = {"quantization": Quantization(quant_type, smallest=0), "dtype": dtype}
    spans = [load(tmp_path, number, **options) for number in (0, 2, NUM_BLOCKS)]
    embeds = torch.randn(2, 6, spans[0].embedding_dim, generator=torch.Generator().manual_seed(1)).to(dtype)
    outcomes = []
    for blocks in spans:
        extras = {name: embeds.clone() for name in blocks.traits.extra_inputs}
        inputs = BlockInputs(hidden_states=embeds.clone(), batch_size=2, seq_len=6, **extras)
        with torch.inference_mode():
            session = blocks.forward(inputs, cache=blocks.new_cache())
        graph = Graph.record(blocks, inputs, blocks.span)
        blocks.forward(inputs.with_hidden(torch.randn(2, 6, blocks.embedding_dim).to(dtype)), cache=blocks.new_cache())
        outcomes.append({"session": session, "outputs": graph.outputs, **gradients(graph)})
    for found in outcomes[1:]:
        assert_equal(found, outcomes[0])


def test_sessions_that_run_together(resident: BlockSpan, offloaded: BlockSpan) -> None:
    """In the same way: other ways of packing add in other orders."""
    answers, ways = [], right_ways(offloaded)
    assert ways[0] == Packing.RAGGED
    for blocks in (resident, offloaded):
        packer = Packer(blocks, ways)
        caches = [blocks.new_cache() for _ in range(4)]
        for length in (3, 1, 1):
            calls = [
                SessionCall(some_inputs(10 * row + length, 1, length + row * (length > 1)), blocks.span, cache)
                for row, cache in enumerate(caches)
            ]
            answers.append(packer.run_calls(calls))
    half = len(answers) // 2
    for expected, found in zip(answers[:half], answers[half:], strict=True):
        for one, other in zip(expected, found, strict=True):
            assert isinstance(one, Tensor)
            assert isinstance(other, Tensor)
            assert torch.equal(one, other)


def test_a_block_that_cannot_be_read_fails_one_call(
    directory: Path, resident: BlockSpan, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = load(directory, 4)
    read = os.preadv

    def fail(*_: Any) -> int:
        raise OSError(5, "Input/output error")

    inputs = some_inputs(0)
    with torch.no_grad():
        blocks.forward(inputs, Span(0, 1))  # blocks 0 and 1 are there
        for failing, words in [(fail, "Input/output error"), (lambda *_: 0, "the file ends too early")]:
            monkeypatch.setattr(os, "preadv", failing)
            with pytest.raises(ServerOverloadedError, match=f"{words}.: use another one"):
                blocks.forward(inputs)
        monkeypatch.setattr(os, "preadv", read)
        for _ in range(3):
            outcomes = [blocks.forward(inputs), resident.forward(inputs)]
            if torch.equal(*outcomes):
                break
        assert torch.equal(*outcomes)


def test_nothing_is_left_behind(directory: Path) -> None:
    blocks = load(directory, 4)
    place = directory / "offloaded"
    assert place.is_dir()
    assert not list(place.iterdir()), "the file has no name, so it goes with the process however that ends"
    weights = weakref.ref(blocks.offloaded)
    del blocks
    gc.collect()
    assert weights() is None


def test_what_cannot_be_offloaded_is_refused(directory: Path) -> None:
    for num_offloaded in (1, 5):
        with pytest.raises(ConfigurationError, match="of 4 blocks, 2 to 4 can be offloaded"):
            load(directory, num_offloaded)
    with pytest.raises(ConfigurationError, match="a single block can't be offloaded"):
        load(directory, 2, Span(1, 2))


def test_a_full_disk_is_told(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        def close(self) -> None:
            pass

        def seek(self, *_: int) -> int:
            return 0

        def write(self, _: object) -> int:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(offload.tempfile, "TemporaryFile", lambda **_: Full())
    with pytest.raises(ConfigurationError, match=r"No space left on device\): make room there, or .* SWARMLLM_CACHE"):
        load(directory, 2)


def test_a_directory_that_cannot_be_made_is_told(directory: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"Not a directory.: make room there, or .* SWARMLLM_CACHE"):
        load(directory, 2, offload_dir=directory / "config.json" / "offloaded")


def test_other_devices_are_refused(directory: Path) -> None:
    with pytest.raises(ConfigurationError, match="not for meta: leave it out"):
        OffloadedBlocks(torch.device("meta"), directory)


@given(num_blocks=st.integers(2, 200), data=st.data())
def test_they_are_spread(num_blocks: int, data: st.DataObject) -> None:
    number = data.draw(st.integers(2, num_blocks))
    chosen = spread(Span(0, num_blocks), number)
    assert len({*chosen}) == number
    assert chosen[0] >= 0
    assert chosen[-1] == num_blocks - 1
    gaps = [after - before for before, after in itertools.pairwise(chosen)]
    assert max(gaps) - min(gaps) <= 1


@given(
    sizes=st.lists(st.integers(1, 1000), min_size=2, max_size=40),
    cache=st.integers(0, 500),
    usable=st.integers(0, 40_000),
)
def test_as_few_as_are_needed(sizes: list[int], cache: int, usable: int) -> None:
    number = num_to_offload(sizes, cache, usable)
    assert number == 0 or 2 <= number <= len(sizes)
    if 0 < number < len(sizes):
        assert num_blocks_that_fit(sizes, cache, usable, number) == len(sizes)
        in_memory = len(sizes) - number + num_slots(number)
        assert in_memory * max(sizes) + len(sizes) * cache <= usable
    if number > 2:
        assert num_blocks_that_fit(sizes, cache, usable, number - 1) < len(sizes)


@pytest.mark.parametrize("num_offloaded", [2, 4])
def test_offloaded_blocks_round_their_inputs(directory: Path, num_offloaded: int) -> None:
    options = {"quantization": Quantization("int8", smallest=0), "activations": "int8"}
    resident, offloaded = load(directory, 0, **options), load(directory, num_offloaded, **options)
    assert resident.rounds_inputs
    inputs = BlockInputs(hidden_states=torch.randn(1, 5, HIDDEN), batch_size=1, seq_len=5)
    expected = resident.forward(inputs, cache=resident.new_cache())
    assert torch.equal(offloaded.forward(inputs, cache=offloaded.new_cache()), expected)
    assert not torch.equal(resident.forward(inputs), expected)
