"""The node that a batch is in autograd's graph."""

from typing import Any

import pytest
import torch
from torch import Tensor

from swarmllm.client.batches.batch_runner import RemoteCall
from swarmllm.data_structures import Span
from swarmllm.errors import ConfigurationError
from swarmllm.models.boundary.block_inputs import BESIDE, BlockInputs


class Squaring:
    """Blocks that square their inputs."""

    def forward(self, inputs: BlockInputs, span: Span, *, keep: bool) -> tuple[Tensor, Any]:
        return inputs.hidden_states**2, inputs

    def backward(self, stages: Any, grad_outputs: Tensor) -> dict[str, Tensor]:
        return {"hidden_states": grad_outputs * 2 * stages.hidden_states}


def call(hidden: Tensor) -> Any:
    inputs = BlockInputs(hidden_states=hidden, batch_size=1, seq_len=2)
    return RemoteCall.apply(Squaring(), inputs, Span(0, 1), True, hidden, *[None] * len(BESIDE))


def test_gradients() -> None:
    hidden = torch.ones(1, 2, 3, requires_grad=True)
    call(hidden).sum().backward()
    assert torch.equal(hidden.grad, torch.full((1, 2, 3), 2.0))


def test_gradients_of_gradients_are_refused() -> None:
    hidden = torch.ones(1, 2, 3, requires_grad=True)
    loss = call(hidden).square().sum()
    with pytest.raises(ConfigurationError, match="without create_graph=True"):
        torch.autograd.grad(loss, hidden, create_graph=True)
    (grad,) = torch.autograd.grad(call(hidden).square().sum(), hidden)
    assert not grad.requires_grad


def test_what_changes_after_the_forward_changes_no_gradient() -> None:
    """Where a caller's buffers are used again, or weights have made a step meanwhile."""
    hidden = torch.ones(1, 2, 3, requires_grad=True)
    loss = call(hidden).sum()
    with torch.no_grad():
        hidden.add_(1)
    loss.backward()
    assert torch.equal(hidden.grad, torch.full((1, 2, 3), 2.0))
