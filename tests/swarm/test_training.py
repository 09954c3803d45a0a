"""Forward and backward through real servers: losses and gradients are those of the local model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from swarm_models import NUM_BLOCKS, VOCABULARY, connected, prompt
from torch import Tensor
from transformers import PreTrainedModel

from swarmllm import LocalSwarm
from swarmllm.errors import ConfigurationError
from swarmllm.network.wire.protocol import MessageType


def gradients(model: Any, ids: Tensor, **inputs: Any) -> tuple[Tensor, Tensor]:
    """The loss on `ids`, and its gradient with respect to their embeddings."""
    embeds = model.get_input_embeddings()(ids).detach().requires_grad_()
    loss = model(inputs_embeds=embeds, labels=ids, **inputs).loss
    loss.backward()
    return loss.detach(), embeds.grad


def assert_same_gradients(model: Any, local: PreTrainedModel, ids: Tensor, **inputs: Any) -> None:
    for got, expected in zip(gradients(model, ids, **inputs), gradients(local, ids, **inputs), strict=True):
        torch.testing.assert_close(got, expected)


def test_gradients_of_a_batch(model: Any, local: PreTrainedModel) -> None:
    assert_same_gradients(model, local, prompt(4, 12))


def test_gradients_of_a_padded_batch(model: Any, local: PreTrainedModel) -> None:
    mask = torch.ones(3, 8, dtype=torch.int64)
    mask[0, :3] = 0
    mask[2, :5] = 0

    assert_same_gradients(model, local, prompt(3, 8), attention_mask=mask)


def test_micro_batches_change_nothing(llama: Path, swarm: LocalSwarm, local: PreTrainedModel) -> None:
    with connected(llama, swarm.initial_peers, max_batch_tokens=24) as model:
        assert_same_gradients(model, local, prompt(7, 12))


@pytest.mark.parametrize("forgotten", [False, True])
def test_a_backward_uses_the_forward_that_its_server_kept(
    llama: Path, swarm: LocalSwarm, local: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, forgotten: bool
) -> None:
    with connected(llama, swarm.initial_peers, push=False) as model:
        requests = model.remote_blocks.batches.requests
        request, sent = requests.send, []

        async def noted(kind: MessageType, *args: Any, forward: int | None = None, **options: Any) -> Any:
            if forward is not None and forgotten:
                forward += 1 << 40
            sent.append((kind, forward is not None))
            return await request(kind, *args, forward=forward, **options)

        monkeypatch.setattr(requests, "send", noted)
        with torch.no_grad():
            model(prompt(), use_cache=False)
        assert_same_gradients(model, local, prompt(1, 12))
    of_kept, anew = (sent.count((MessageType.BACKWARD, kept)) for kept in (True, False))
    assert (of_kept, anew) == (2, 2 if forgotten else 0)


def test_slices_are_modules_that_compose(model: Any) -> None:
    hidden = torch.randn(2, 6, 64, generator=torch.Generator().manual_seed(1))
    weights = torch.randn(2, 6, 64, generator=torch.Generator().manual_seed(2))

    def run(*parts: torch.nn.Module) -> tuple[Tensor, Tensor]:
        inputs = hidden.clone().requires_grad_()
        outputs = torch.nn.Sequential(*parts)(inputs)
        (outputs * weights).sum().backward()
        return outputs.detach(), inputs.grad

    whole = run(model.remote_blocks)
    blocks = model.remote_blocks
    for parts in ((blocks[:2], blocks[2:]), (blocks[0], blocks[1:-1], blocks[-1])):
        assert sum(len(part) for part in parts) == NUM_BLOCKS
        for got, expected in zip(run(*parts), whole, strict=True):
            torch.testing.assert_close(got, expected)
    assert str(blocks[2:6][1:3]) == "RemoteBlocks(blocks 3:5)"
    with pytest.raises(ConfigurationError, match="contiguous"):
        blocks[::2]


def test_blocks_hold_no_parameters(model: Any) -> None:
    assert not list(model.remote_blocks.parameters())
    assert sorted(model.state_dict()) == ["lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"]


def test_no_gradient_is_asked_for_nothing_is_kept(model: Any, local: PreTrainedModel) -> None:
    with torch.no_grad():
        logits = model(prompt(2), use_cache=False).logits
        assert not logits.requires_grad
        assert logits.shape == (2, 9, VOCABULARY)
        torch.testing.assert_close(logits, local(prompt(2), use_cache=False).logits)
