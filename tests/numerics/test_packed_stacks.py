"""Several sessions of a decoder with an encoder in one forward: each attends to its own source, as it does alone."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.numerics.test_encoder_decoders import EXACT
from tests.numerics.test_packing import RELATIVE, packer_of, packs_counted, relative_error
from tests.numerics.tiny_encoder_decoders import save_tiny_model, tiny_model
from tests.numerics.tiny_hearing_models import save_tiny_model as save_hearing_model
from tests.selection import sampled

from swarmllm.models.architecture import HEARING, stacks
from swarmllm.models.boundary.block_inputs import BlockInputs
from swarmllm.models.checkpoint.checkpoint import open_checkpoint
from swarmllm.models.quantization.rules import FULL_PRECISION, Quantization
from swarmllm.models.span.block_span import BlockSpan
from swarmllm.models.span.loading import load_block_span
from swarmllm.models.span.packing import Packing, SessionCall
from swarmllm.server.device.throughput import measure_packing

PADDED = {
    "longt5",  # looks up keys in its cache by a way of its own
    "longt5_global",
    "mvp",  # looks into its masks
    "seamless_m4t",
    "seamless_m4t_v2",
    "switch_transformers",
    "t5gemma2",  # attends to text and source at once
}
"""Types whose sessions are padded; those of all others run as one row."""
ALONE = {"led", "nllb-moe"}
"""LED's attention asks its mask for sizes, which that of a row of several sessions hasn't, and its padded rows gave
other numbers; NLLB-MoE's router takes the last columns of the mask for the batch's tokens."""


def decoder_of(path: Path, quantization: Quantization = FULL_PRECISION) -> BlockSpan:
    checkpoint = open_checkpoint(str(path))
    span = stacks(checkpoint.config)[-1].span
    return load_block_span(checkpoint, span, quantization=quantization, progress=False)


def inputs_of(blocks: BlockSpan, rows: int, seq_len: int, random: torch.Generator, source_len: int = 0) -> BlockInputs:
    """Random ones, perhaps with a source, whose rows end one position earlier each if its length is odd."""

    def normal(length: int, width: int) -> torch.Tensor:
        return torch.randn(rows, length, width, generator=random).to(blocks.dtype)

    inputs = BlockInputs(hidden_states=normal(seq_len, blocks.embedding_dim), batch_size=rows, seq_len=seq_len)
    if blocks.traits.extra_inputs:
        inputs = replace(inputs, input_ids=torch.randint(3, 100, (rows, seq_len), generator=random))
    if not source_len:
        return inputs
    lengths = source_len - torch.arange(rows)[:, None]
    mask = (torch.arange(source_len) < lengths.clamp(min=1)).long() if source_len % 2 and blocks.masks_source else None
    return replace(inputs, encoder_hidden_states=normal(source_len, blocks.source_dim), encoder_attention_mask=mask)


class Sessions:
    """The same sessions twice: run by a packer, and alone; each with a source of its own."""

    def __init__(self, blocks: BlockSpan, rows: Sequence[int], sources: Sequence[int]) -> None:
        self.blocks, self.rows, self.sources = blocks, rows, sources
        self.packer, self.random = packer_of(blocks), torch.Generator().manual_seed(1)
        self.packed, self.alone = ([blocks.new_cache() for _ in rows] for _ in range(2))

    def step(self, lengths: Sequence[int]) -> float:
        """Everybody's next positions, and before the first of them its source; the largest relative error."""
        calls, wanted = [], []
        for idx, length in enumerate(lengths):
            if not length:
                continue
            source_len = 0 if self.alone[idx].length else self.sources[idx]
            inputs = inputs_of(self.blocks, self.rows[idx], length, self.random, source_len)
            wanted.append(self.blocks.forward(inputs, None, self.alone[idx]))
            calls.append(SessionCall(inputs, self.blocks.span, self.packed[idx]))
        return max(map(relative_error, self.packer.run(calls), wanted))


@pytest.mark.parametrize("name", sampled(EXACT, 4, always=["t5"]))
def test_together_as_alone(name: str, tmp_path: Path) -> None:
    blocks = decoder_of(save_tiny_model(name, tmp_path))
    sessions = Sessions(blocks, rows=(1, 2, 1, 3), sources=(9, 4, 17, 1))
    usual = Packing.PADDED if name in PADDED else Packing.RAGGED
    assert sessions.packer.way == (Packing.ONE_BY_ONE if name in ALONE else usual)
    with packs_counted(sessions.packer) as sizes:
        errors = [sessions.step(lengths) for lengths in ((1, 3, 1, 0), (1, 1, 1, 1), (1, 1, 1, 1), (1, 1, 1, 1))]
        sessions.packed[3].select_batch([2, 2])
        sessions.alone[3].select_batch([2, 2])
        sessions.rows = (1, 2, 1, 2)
        errors.append(sessions.step((1, 1, 1, 1)))
    assert max(errors) <= RELATIVE, errors
    assert sizes == ([] if name in ALONE else [3, 4, 4, 4]), "what had begun ran together"
    assert measure_packing(sessions.packer, decode_ms_per_block=0.5) in sessions.packer.ways


@pytest.mark.parametrize("name", sorted(HEARING))
def test_those_that_hear_together_as_alone(name: str, tmp_path: Path) -> None:
    """Whisper sees all of its source, and makes no mask for it."""
    blocks = decoder_of(save_hearing_model(name, tmp_path))
    sessions = Sessions(blocks, rows=(1, 2, 1, 3), sources=(9, 4, 17, 1))
    assert sessions.packer.way == Packing.RAGGED
    with packs_counted(sessions.packer) as sizes:
        errors = [sessions.step(lengths) for lengths in ((1, 3, 1, 0), (1, 1, 1, 1), (1, 1, 1, 1))]
    assert max(errors) <= RELATIVE, errors
    assert sizes == [3, 4], "what had begun ran together"


@pytest.fixture(scope="module", params=["t5", "bart", "switch_transformers"])
def blocks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> BlockSpan:
    """A bias of distances, learned positions, and a type that is padded."""
    return decoder_of(save_tiny_model(request.param, tmp_path_factory.mktemp("blocks")))


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_lengths_and_batch_sizes(blocks: BlockSpan, data: st.DataObject) -> None:
    count = data.draw(st.integers(2, 6))
    numbers = [data.draw(st.lists(st.integers(1, most), min_size=count, max_size=count)) for most in (3, 20, 9)]
    sessions = Sessions(blocks, rows=numbers[0], sources=numbers[1])
    steps = [numbers[2], [1] * count, data.draw(st.lists(st.integers(0, 4), min_size=count, max_size=count))]
    with packs_counted(sessions.packer) as sizes:
        errors = [sessions.step(lengths) for lengths in steps if any(lengths)]
    assert max(errors) <= RELATIVE, errors
    assert sizes[0] == count


def test_alone_they_attend_with_the_very_same_bits(tmp_path: Path) -> None:
    """In a row, all that differs from a call alone is how many rows the matrices multiply: here, none do."""
    blocks = decoder_of(save_tiny_model("t5", tmp_path))
    sessions = Sessions(blocks, rows=(2,), sources=(5,))
    assert [sessions.step([length]) for length in (3, 1, 2)] == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_quantized_in_short_floats(name: str, tmp_path: Path) -> None:
    tiny_model(name).bfloat16().save_pretrained(tmp_path)
    blocks = decoder_of(tmp_path, Quantization("int8", smallest=0))
    assert blocks.shares_keys
    assert packer_of(blocks).way == Packing.RAGGED
    sessions = Sessions(blocks, rows=(1, 2, 1), sources=(9, 4, 17))
    errors = [sessions.step(lengths) for lengths in ((1, 3, 1), (1, 1, 1), (1, 1, 1))]
    assert max(errors) <= 16 * torch.finfo(torch.bfloat16).eps


def test_a_row_longer_than_the_table_of_positions_is_not_tried(tmp_path: Path) -> None:
    """Before its blocks, BART looks up as many positions as the row has, on a server those of nobody."""
    blocks = decoder_of(save_tiny_model("bart", tmp_path))
    assert blocks.longest_text == 128
    sessions = Sessions(blocks, rows=(1, 1, 1), sources=(3, 4, 5))
    sessions.step((125, 4, 2))
    with packs_counted(sessions.packer) as sizes:
        assert sessions.step((1, 1, 1)) <= RELATIVE
        assert sessions.step((1, 1, 1)) <= RELATIVE
    assert sizes == [3]
