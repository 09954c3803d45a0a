"""Sessions whose tokens have positions of several axes, as those of pictures have, in one forward: each as alone."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.numerics.test_packing import RELATIVE, packer_of, packs_counted, relative_error, some_inputs
from tests.numerics.tiny_vision_models import save_tiny_model

from swarmllm.data_structures import Span
from swarmllm.models.boundary.block_inputs import BlockInputs
from swarmllm.models.checkpoint.checkpoint import open_checkpoint
from swarmllm.models.span.block_span import BlockSpan
from swarmllm.models.span.loading import load_block_span
from swarmllm.models.span.packing import Packing, SessionCall

SEVERAL_AXES = (
    *(
        "cohere_compass",
        "cosmos3_edge",
        "ernie4_5_vl_moe",
        "glm46v",
        "glm4v",
        "glm4v_moe",
        "glm_ocr",
        "paddleocr_vl",
        "qwen2_5_vl",
    ),
    *("qwen2_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe"),
)
ROWS = (1, 2, 1, 1, 1, 1, 2)
AXES = (3, 3, 3, 0, 1, 4, 4)
"""Of each session's positions; 0: it sends none, 1: as texts have them, 4: those of the text before the others."""
STEPS = ((4, 3, 11, 5, 2, 3, 6), (1, 1, 2, 1, 1, 1, 1), (1, 1, 1, 1, 1, 1, 1), (1, 1, 1, 1, 1, 1, 1))


def inputs_with(
    blocks: BlockSpan, rows: int, axes: int, past: int, length: int, random: torch.Generator
) -> BlockInputs:
    inputs = some_inputs(blocks, rows, length, random)
    if axes == 0:
        return inputs
    positions = torch.arange(past, past + length).expand(rows, length)
    if axes > 1:  # of each axis others, and not in order, as in pictures
        text, positions = positions, torch.randint(0, past + length + 3, (axes, rows, length), generator=random)
        positions[: axes - 3] = text
    return replace(inputs, position_ids=positions)


@pytest.mark.parametrize("name", SEVERAL_AXES)
def test_together_as_alone(name: str, tmp_path: Path) -> None:
    save_tiny_model(name, tmp_path)
    blocks = load_block_span(open_checkpoint(str(tmp_path)), Span(0, 4), progress=False)
    packer, random = packer_of(blocks), torch.Generator().manual_seed(1)
    packed, alone = ([blocks.new_cache(blocks.span) for _ in ROWS] for _ in range(2))
    errors = []
    with packs_counted(packer) as sizes:
        for lengths in STEPS:
            calls, wanted = [], []
            for rows, axes, length, mine, other in zip(ROWS, AXES, lengths, packed, alone, strict=True):
                inputs = inputs_with(blocks, rows, axes, mine.length, length, random)
                wanted.append(blocks.forward(inputs, blocks.span, other))
                calls.append(SessionCall(inputs, blocks.span, mine))
            errors += map(relative_error, packer.run(calls), wanted)
    assert max(errors) <= RELATIVE, errors
    together = {Packing.RAGGED: [3, 2, 2] * 4, Packing.PADDED: [2, 2, 2, 3, 2, 2, 3, 2, 2]}
    assert sizes == together[packer.way], "those with as many axes ran together"
    plain = replace(inputs_with(blocks, 1, 3, 0, 9, random), position_ids=None)
    given = replace(plain, position_ids=torch.randint(0, 12, (3, 1, 9), generator=random))
    apart = relative_error(*(blocks.forward(one, blocks.span, blocks.new_cache(blocks.span)) for one in (plain, given)))
    assert apart > 1000 * RELATIVE, "positions matter"
