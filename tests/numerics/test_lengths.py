"""Arithmetic that depends on the length of a call: what servers find out about it, and who may cut or pack calls."""

from pathlib import Path

import pytest
import torch
from tests.numerics.rope_models import BORDER, KINDS, UNEVEN, load_rope
from tests.numerics.server_properties import Client
from tests.numerics.test_kept_state import LENGTHS
from torch import Tensor

from swarmllm.data_structures import BlockTraits
from swarmllm.models.boundary.block_inputs import BlockInputs, decisive_rows, pieces, uncut
from swarmllm.models.span.packing import Packer
from swarmllm.models.span.packing_probe import right_ways

FOUND = {
    "dynamic": ((), BORDER),
    "longrope": ((BORDER,), None),
    "phi3": ((BORDER,), None),
    "phimoe": ((BORDER,), None),
    "gemma3": ((BORDER,), BORDER + 6),
}
LONG_ROPE, DYNAMIC = BlockTraits(length_borders=(24,)), BlockTraits(own_length_beyond=24)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        *((kind, torch.float32) for kind in KINDS),
        ("dynamic", torch.bfloat16),
        *(pytest.param(kind, torch.bfloat16, marks=pytest.mark.slow) for kind in KINDS if kind != "dynamic"),
    ],
)
def test_the_lengths_that_matter_are_found(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    traits = load_rope(kind, tmp_path, dtype).traits
    assert (traits.length_borders, traits.own_length_beyond) == FOUND.get(kind, ((), None))
    assert traits.even_length == (BORDER if kind in UNEVEN else float("inf"))


def call(seq_len: int, position_ids: Tensor | None = None, batch_size: int = 1) -> BlockInputs:
    hidden = torch.zeros(batch_size, seq_len, 2)
    return BlockInputs(hidden_states=hidden, batch_size=batch_size, seq_len=seq_len, position_ids=position_ids)


@pytest.mark.parametrize(
    ("traits", "past", "seq_len", "wanted"),
    [
        (BlockTraits(), 0, 40, [(0, 8), (8, 16), (16, 24), (24, 32), (32, 40)]),
        (LONG_ROPE, 0, 24, [(0, 8), (8, 16), (16, 24)]),
        (LONG_ROPE, 0, 40, [(0, 25), (25, 33), (33, 40)]),
        (LONG_ROPE, 20, 12, [(0, 8), (8, 12)]),
        (LONG_ROPE, 10, 16, [(0, 15), (15, 16)]),
        (LONG_ROPE, 24, 16, [(0, 8), (8, 16)]),
        (DYNAMIC, 0, 24, [(0, 8), (8, 16), (16, 24)]),
        (DYNAMIC, 0, 25, [(0, 25)]),
        (DYNAMIC, 30, 9, [(0, 9)]),
    ],
)
def test_pieces(traits: BlockTraits, past: int, seq_len: int, wanted: list[tuple[int, int]]) -> None:
    assert list(pieces(call(seq_len), past, traits, 8)) == wanted


def test_given_positions_count() -> None:
    """Positions of padding and of texts that begin anew count, too."""
    anew = torch.cat([torch.arange(30), torch.arange(5)])[None]
    assert uncut(call(35, anew), 0, LONG_ROPE) == 35, "the last piece alone would be short"
    padded = torch.stack([torch.arange(30), (torch.arange(30) - 20).clamp(min=0)])
    assert decisive_rows(call(30, padded, 2), LONG_ROPE) == decisive_rows(call(30, padded, 2), DYNAMIC) == [0]
    assert decisive_rows(call(30, padded[1:].expand(2, -1), 2), LONG_ROPE) is None
    assert decisive_rows(call(30, padded, 2), BlockTraits()) is None
    assert decisive_rows(call(30, batch_size=2), LONG_ROPE) is None


@pytest.mark.parametrize("kind", UNEVEN)
def test_packs_share_no_table_of_another_length(kind: str, tmp_path: Path) -> None:
    blocks = load_rope(kind, tmp_path)
    packer = Packer(blocks, right_ways(blocks))
    packed, alone = ([Client(blocks, number, steps) for number, steps in enumerate(LENGTHS)] for _ in range(2))
    for _ in LENGTHS[0]:
        outputs = packer.run_calls([client.next for client in packed])
        for client, output, want in zip(packed, outputs, alone, strict=True):
            want.step()
            assert isinstance(output, Tensor)
            torch.testing.assert_close(output, want.outputs[-1])
            client.outputs.append(output)
    far = [Client(blocks, number, (2,)) for number in range(2)]  # a picture's or a user's own positions
    far[1].inputs[0].position_ids = torch.tensor([[3 * BORDER, 3 * BORDER + 1]])
    outputs = packer.run_calls([client.next for client in far])
    for client, output in zip([Client(blocks, number, (2,)) for number in range(2)], outputs, strict=True):
        client.inputs[0].position_ids = far[1].inputs[0].position_ids if output is outputs[1] else None
        client.step()
        torch.testing.assert_close(output, client.outputs[-1])
