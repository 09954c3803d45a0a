import pytest
import torch

from swarmllm.data_structures import BlockTraits
from swarmllm.models.boundary.block_inputs import BlockInputs

BATCH, SEQ, HIDDEN, PAST = 3, 5, 4, 2


def _inputs(batch_axis: int = 0) -> BlockInputs:
    hidden = torch.arange(BATCH * SEQ * HIDDEN, dtype=torch.float32).view(BATCH, SEQ, HIDDEN)
    for _ in range(batch_axis):
        hidden = hidden.expand(2, *hidden.shape)
    return BlockInputs(
        hidden_states=hidden,
        batch_size=BATCH,
        seq_len=SEQ,
        attention_mask=torch.ones(BATCH, PAST + SEQ, dtype=torch.long),
        position_ids=torch.arange(PAST, PAST + SEQ)[None],
        token_type_ids=torch.zeros(BATCH, SEQ, dtype=torch.long),
        input_ids=torch.arange(BATCH * SEQ).view(BATCH, SEQ),
        inputs_embeds=torch.randn(BATCH, SEQ, HIDDEN),
    )


def test_survives_the_wire() -> None:
    inputs = _inputs()
    again = BlockInputs.from_tensors(
        {**inputs.tensors(), "of_a_newer_peer": torch.ones(1)}, batch_size=BATCH, seq_len=SEQ
    )
    assert again.tensors().keys() == inputs.tensors().keys()
    assert all(torch.equal(again.tensors()[name], tensor) for name, tensor in inputs.tensors().items())


@pytest.mark.parametrize("batch_axis", [0, 1])
def test_rows(batch_axis: int) -> None:
    traits = BlockTraits(batch_axis=batch_axis)
    inputs = _inputs(batch_axis)
    part = inputs.rows(1, 3, traits)
    assert part.batch_size == 2
    assert torch.equal(part.hidden_states, inputs.hidden_states.narrow(batch_axis, 1, 2))
    assert part.attention_mask is not None
    assert part.attention_mask.shape == (2, PAST + SEQ)
    assert part.position_ids is not None
    assert part.position_ids.shape == (1, SEQ), "the same positions for all rows stay as they are"
    assert part.input_ids is not None
    assert part.input_ids[0, 0] == SEQ


@pytest.mark.parametrize("batch_axis", [0, 1])
def test_columns_after_a_past(batch_axis: int) -> None:
    traits = BlockTraits(batch_axis=batch_axis)
    inputs = _inputs(batch_axis)
    part = inputs.columns(1, 3, PAST, traits)
    assert part.seq_len == 2
    assert torch.equal(part.hidden_states, inputs.hidden_states.narrow(batch_axis + 1, 1, 2))
    assert part.attention_mask is not None
    assert part.attention_mask.shape == (BATCH, PAST + 3), "the mask also covers what came before"
    assert part.position_ids is not None
    assert part.position_ids.tolist() == [[PAST + 1, PAST + 2]]


def test_columns_of_a_four_dimensional_mask() -> None:
    mask = torch.randn(BATCH, 1, SEQ, PAST + SEQ)
    inputs = BlockInputs(
        hidden_states=torch.zeros(BATCH, SEQ, HIDDEN), batch_size=BATCH, seq_len=SEQ, attention_mask=mask
    )
    part = inputs.columns(2, 4, PAST, BlockTraits())
    assert part.attention_mask is not None
    assert torch.equal(part.attention_mask, mask[:, :, 2:4, : PAST + 4])


def test_columns_of_three_kinds_of_positions() -> None:
    positions = torch.arange(3 * BATCH * SEQ).view(3, BATCH, SEQ)
    inputs = BlockInputs(
        hidden_states=torch.zeros(BATCH, SEQ, HIDDEN), batch_size=BATCH, seq_len=SEQ, position_ids=positions
    )
    part = inputs.rows(0, 1, BlockTraits()).columns(1, 2, 0, BlockTraits())
    assert part.position_ids is not None
    assert torch.equal(part.position_ids, positions[:, :1, 1:2])
