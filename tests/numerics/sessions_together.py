"""Several sessions twice: in one forward, as a server packs them, and each alone. Shared by the tests of packing."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import torch
from tests.numerics.tiny_models import NUM_BLOCKS, save_tiny
from torch import Tensor

from swarmllm.data_structures import Span
from swarmllm.models.boundary.block_inputs import BlockInputs
from swarmllm.models.checkpoint.checkpoint import open_checkpoint
from swarmllm.models.quantization import Quantization
from swarmllm.models.quantization.rules import QuantType
from swarmllm.models.span.block_span import BlockSpan
from swarmllm.models.span.loading import load_block_span
from swarmllm.models.span.packing import Packer, Packing, SessionCall
from swarmllm.models.span.packing_probe import right_ways

RELATIVE = 2e-5
"""Largest error in float32, relative to the largest output: 1.1e-5 was seen (T5, whose scores are large)."""
ROWS = (1, 2, 1, 1)
STEPS = ((4, 3, 11, 0), (1, 1, 2, 5), (1, 1, 1, 1), (1, 1, 1, 1))
"""New positions of each session: prompts of different lengths, a prompt beside tokens, tokens."""


def load(
    model_type: str, directory: Path, dtype: torch.dtype | None = None, quant_type: QuantType = "none"
) -> BlockSpan:
    if not (directory / "config.json").exists():
        save_tiny(model_type, directory)
    checkpoint, span = open_checkpoint(str(directory)), Span(0, NUM_BLOCKS)
    quantization = Quantization(quant_type, smallest=0)
    return load_block_span(checkpoint, span, dtype=dtype, quantization=quantization, progress=False)


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
        """Run the next positions of all sessions; the largest relative error."""
        calls, wanted = [], []
        for idx, length in enumerate(lengths):
            if length:
                inputs = self.inputs(idx, length)
                wanted.append(self.blocks.forward(inputs, self.span, self.alone[idx]))
                calls.append(SessionCall(inputs, self.span, self.packed[idx]))
        return max(map(relative_error, self.packer.run_calls(calls), wanted))

    def inputs(self, idx: int, length: int) -> BlockInputs:
        """The next inputs of one session."""
        return some_inputs(self.blocks, self.rows[idx], length, self.random)


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
    run = packer.forward.run_packed

    def counting(calls: Sequence[SessionCall], way: Packing) -> list[Tensor]:
        outputs = run(calls, way)
        sizes.append(len(calls))
        return outputs

    packer.forward.run_packed = counting  # type: ignore[method-assign]
    try:
        yield sizes
    finally:
        del packer.forward.run_packed  # type: ignore[method-assign]


def check_together_as_alone(blocks: BlockSpan) -> Packing:
    """Run some steps; each session gets what it gets alone. Returns the way that the span has chosen."""
    sessions = Sessions(blocks)
    sessions.packer.traces = False  # lines are a way besides
    with packs_counted(sessions.packer) as sizes:
        errors = [sessions.step(lengths) for lengths in STEPS]
    assert max(errors) <= RELATIVE, errors
    expected = {Packing.RAGGED: [3, 4, 4, 4], Packing.PADDED: [2, 4, 4], Packing.ONE_BY_ONE: []}
    assert sizes == expected[sessions.packer.way], "what could run together did"
    return sessions.packer.way


class PagedSessions(Sessions):
    """The same sessions on pages, and alone with tensors of their own."""

    STEPS = ((4, 3, 70, 0), (1, 1, 2, 300), (20, 1, 1, 1), (1, 1, 1, 1), (1, 2, 1, 17))
    """Prompts longer than a page, prompts beside tokens, several tokens at once."""

    def __init__(self, blocks: BlockSpan, rows: Sequence[int] = ROWS) -> None:
        pool, blocks.pool = blocks.pool, None
        super().__init__(blocks, rows)  # none of them has pages
        blocks.pool = pool
        self.packed = [blocks.new_cache() for _ in rows]
        self.packer = Packer(blocks, [Packing.PAGED])


class SessionsWithSources(Sessions):
    """Sessions of a decoder; the first step of each brings encoder outputs of its own, of length `sources`."""

    def __init__(self, blocks: BlockSpan, rows: Sequence[int], sources: Sequence[int]) -> None:
        super().__init__(blocks, rows)
        self.sources = sources

    def inputs(self, idx: int, length: int) -> BlockInputs:
        blocks, rows = self.blocks, self.rows[idx]

        def normal(positions: int, width: int) -> Tensor:
            return torch.randn(rows, positions, width, generator=self.random).to(blocks.dtype)

        inputs = BlockInputs(hidden_states=normal(length, blocks.embedding_dim), batch_size=rows, seq_len=length)
        if blocks.traits.extra_inputs:
            inputs = replace(inputs, input_ids=torch.randint(3, 100, (rows, length), generator=self.random))
        if self.alone[idx].length:
            return inputs
        source = self.sources[idx]
        mask = None
        if source % 2 and blocks.masks_source:  # rows end one position earlier each
            mask = (torch.arange(source) < (source - torch.arange(rows)[:, None]).clamp(min=1)).long()
        states = normal(source, blocks.source_dim)
        return replace(inputs, encoder_hidden_states=states, encoder_attention_mask=mask)


class SessionsWithAxes(Sessions):
    """Sessions whose positions have several axes, as those of pictures.

    `axes` of each session: 0 sends no positions, 1 those of a text, 4 those of the text before three others.
    """

    def __init__(self, blocks: BlockSpan, rows: Sequence[int], axes: Sequence[int]) -> None:
        super().__init__(blocks, rows)
        self.axes = axes

    def inputs(self, idx: int, length: int) -> BlockInputs:
        rows, axes, past = self.rows[idx], self.axes[idx], self.alone[idx].length
        inputs = super().inputs(idx, length)
        if axes == 0:
            return inputs
        positions = torch.arange(past, past + length).expand(rows, length)
        if axes > 1:  # each axis has other positions, and not in order
            text, positions = (
                positions,
                torch.randint(0, past + length + 3, (axes, rows, length), generator=self.random),
            )
            positions[: axes - 3] = text
        return replace(inputs, position_ids=positions)

    def check_that_positions_matter(self) -> None:
        plain = some_inputs(self.blocks, 1, 9, self.random)
        given = replace(plain, position_ids=torch.randint(0, 12, (3, 1, 9), generator=self.random))
        outputs = (self.blocks.forward(one, self.blocks.span, self.blocks.new_cache()) for one in (plain, given))
        assert relative_error(*outputs) > 1000 * RELATIVE
