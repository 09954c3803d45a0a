"""Inputs for measurements (`server/throughput`, `packing_speed`), and to see what blocks take (`input_checks`)."""

import torch

from swarmllm.models.block_inputs import BlockInputs
from swarmllm.models.block_span import BlockSpan


def dummy_inputs(blocks: BlockSpan, seq_len: int, batch_size: int = 1) -> BlockInputs:
    """Random inputs `[batch_size, seq_len, …]` in the form that these blocks take."""
    random = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random).to(blocks.device, blocks.dtype)

    embeds = normal(batch_size, seq_len, blocks.embedding_dim)
    ids = torch.ones(batch_size, seq_len, dtype=torch.int64, device=blocks.device)
    extra = blocks.traits.extra_inputs
    inputs = BlockInputs(
        hidden_states=embeds,
        batch_size=batch_size,
        seq_len=seq_len,
        input_ids=ids if "input_ids" in extra else None,
        inputs_embeds=embeds if "inputs_embeds" in extra else None,
    )
    return inputs.with_hidden(normal(*blocks.preamble(inputs).shape))
