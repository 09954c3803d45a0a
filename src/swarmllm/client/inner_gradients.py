"""Gradients through hidden states between blocks: a batch that wants them runs piece by piece.

Servers answer what they have seen between their blocks as mere numbers. Where a loss may reach it, the client asks for
the blocks up to each wanted place instead, and so has it in autograd's graph like any other result. Called by
`remote_blocks`.
"""

from itertools import pairwise

import torch

from swarmllm.client.local_blocks import LocalBlocks
from swarmllm.data_structures import BlockTraits, Span
from swarmllm.errors import ConfigurationError
from swarmllm.models.boundary.block_inputs import BESIDE, BlockInputs


def pieces_with_gradient(inputs: BlockInputs, part: Span, local: LocalBlocks, traits: BlockTraits) -> list[Span]:
    """`part` itself if nothing between its blocks is wanted, or nothing has gradients; else in pieces.

    Raises:
        ConfigurationError: attention weights are wanted, or outputs at which the model can't be cut.
    """
    inner = inputs.inner
    if inner is None or not inner.wants(part) or not _has_gradients(inputs, local):
        return [part]
    if inner.attentions:
        raise ConfigurationError(
            "attention weights come from servers without a gradient: call the model within torch.no_grad() for them"
        )
    ends = [block_idx + 1 for block_idx in inner.within(part) if block_idx + 1 < part.end]
    for cut in traits.forbidden_cuts:
        if cut in ends:
            raise ConfigurationError(
                f"hidden states before block {cut} of this model have no gradient, because it can't be cut there: call "
                "the model within torch.no_grad() for them"
            )
    bounds = [part.start, *ends, part.end]
    return [Span(start, end) for start, end in pairwise(bounds)]


def _has_gradients(inputs: BlockInputs, local: LocalBlocks) -> bool:
    given = [inputs.hidden_states, *(getattr(inputs, name) for name in BESIDE), *inputs.trained]
    trained = (parameter for block in local.modules().values() for parameter in block.parameters())
    return torch.is_grad_enabled() and (
        any(tensor is not None and tensor.requires_grad for tensor in given)
        or any(parameter.requires_grad for parameter in trained)
    )
