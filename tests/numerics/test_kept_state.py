"""Servers' modules serve all sessions: no call depends on what other clients have run before or between."""

from pathlib import Path

import pytest
import torch
from tests.numerics.rope_models import BORDER, KINDS, NUM_BLOCKS, UNEVEN, load_rope, save_rope
from tests.numerics.server_properties import Client, check_interleavings

from swarmllm.data_structures import Span
from swarmllm.models.checkpoint.checkpoint import open_checkpoint
from swarmllm.models.span.loading import load_block_span

LENGTHS = ((5, 1, 1), (BORDER - 1, 2, 1), (BORDER + 9, 1, 1))
"""The steps of three clients: one stays short, one passes the border, one begins beyond it."""


@pytest.mark.parametrize("kind", [pytest.param(k, marks=() if k in UNEVEN else pytest.mark.slow) for k in KINDS])
def test_nothing_is_left_of_others_calls(kind: str, tmp_path: Path) -> None:
    blocks = load_rope(kind, tmp_path)
    reference = Client(load_block_span(open_checkpoint(str(tmp_path)), blocks.span, progress=False), 1, LENGTHS[1])
    for _ in LENGTHS[1]:
        reference.step()
    check_interleavings(blocks, LENGTHS)
    after_others = Client(blocks, 1, LENGTHS[1])
    for want in reference.outputs:
        after_others.step()
        assert torch.equal(after_others.outputs[-1], want)


def test_what_modules_keep_is_known_at_the_next_start(tmp_path: Path) -> None:
    save_rope("dynamic", tmp_path / "model")
    checkpoint, span = open_checkpoint(str(tmp_path / "model")), Span(0, NUM_BLOCKS)
    first, second = (
        load_block_span(checkpoint, span, progress=False, probes_dir=tmp_path / "probes") for _ in range(2)
    )
    assert second.kept_state.names == first.kept_state.names != ()
    assert second.traits == first.traits
    check_interleavings(second, LENGTHS, count=0)


def test_offloaded_blocks_are_left_alone(tmp_path: Path) -> None:
    """Their buffers share memory, which holds another block's by the time that somebody compares."""
    save_rope("dynamic", tmp_path)
    options = {"dtype": torch.float32, "progress": False, "num_offloaded": 2}
    blocks = load_block_span(open_checkpoint(str(tmp_path)), Span(0, NUM_BLOCKS), **options)  # type: ignore[arg-type]
    assert all(name.startswith("rotary_emb.") for name in blocks.kept_state.names)
    check_interleavings(blocks, LENGTHS, count=0)
