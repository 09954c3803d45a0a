"""Random inputs for blocks that have been probed: for measurements, and for looking whether packing is right."""

import torch

from swarmllm.models.boundary.block_inputs import BlockInputs
from swarmllm.models.span.block_span import BlockSpan

SOURCE_LEN = 7
"""Positions of what a decoder with an encoder attends to; unlikely to be the size of other axes."""


def random_inputs(blocks: BlockSpan, seq_len: int, batch_size: int = 1) -> BlockInputs:
    """Random inputs `[batch_size, seq_len, …]` in the form that these blocks take; longer where they pad a text."""
    random = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random).to(blocks.device, blocks.dtype)

    embeds = normal(batch_size, seq_len, blocks.embedding_dim)
    ids = torch.randint(blocks.vocab_size, (batch_size, seq_len), generator=random).to(blocks.device)
    extra = blocks.traits.extra_inputs
    inputs = BlockInputs(
        hidden_states=embeds,
        batch_size=batch_size,
        seq_len=seq_len,
        input_ids=ids if "input_ids" in extra else None,
        inputs_embeds=embeds if "inputs_embeds" in extra else None,
        encoder_hidden_states=normal(batch_size, SOURCE_LEN, blocks.source_dim) if blocks.source_dim else None,
    )
    arriving = blocks.preamble(inputs)
    if blocks.is_of_encoder and arriving.shape[1] > seq_len:
        return random_inputs(blocks, arriving.shape[1], batch_size)
    return inputs.with_hidden(normal(*arriving.shape))
