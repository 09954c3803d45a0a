"""Noise is as large as was asked for, at each position, and changes nothing else."""

import pytest
import torch

from swarmllm import ClientConfig
from swarmllm.client.session.chain import ActivationNoise, noise_for
from swarmllm.data_structures import BlockTraits
from swarmllm.errors import ConfigurationError
from swarmllm.models.boundary.block_inputs import BlockInputs


def inputs(dtype: torch.dtype = torch.float32) -> BlockInputs:
    """Positions of very different sizes."""
    hidden = torch.randn(2, 3, 4096, generator=torch.Generator().manual_seed(0))
    hidden = hidden * torch.tensor([0.01, 1.0, 300.0])[None, :, None]
    return BlockInputs(hidden_states=hidden.to(dtype), batch_size=2, seq_len=3)


def test_none_is_none() -> None:
    given = inputs()
    assert ActivationNoise(0.0)(given) is given


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_its_size_is_a_share_of_each_position(dtype: torch.dtype) -> None:
    given = inputs(dtype)
    noise = ActivationNoise(0.5)(given).hidden_states.float() - given.hidden_states.float()
    size = given.hidden_states.float().square().mean(-1).sqrt()
    torch.testing.assert_close(noise.square().mean(-1).sqrt() / size, torch.full((2, 3), 0.5), rtol=0.1, atol=0)
    assert float(noise.mean(-1).abs().max() / size.max()) < 0.05


def test_it_is_new_each_time_and_leaves_torch_alone() -> None:
    noise, given, state = ActivationNoise(0.1), inputs(), torch.get_rng_state()
    first, second, others = (one(given).hidden_states for one in (noise, noise, ActivationNoise(0.1)))
    assert not torch.equal(first, second)
    assert not torch.equal(first, others)
    assert torch.equal(torch.get_rng_state(), state)


def test_gradients_flow_as_without() -> None:
    given = inputs()
    given.hidden_states.requires_grad_()
    ActivationNoise(0.5)(given).hidden_states.sum().backward()
    assert torch.equal(given.hidden_states.grad, torch.ones(2, 3, 4096))


def test_blocks_that_are_given_the_text_itself() -> None:
    traits = BlockTraits(extra_inputs=("input_ids",))
    assert noise_for(ClientConfig(), traits)(given := inputs()) is given
    with pytest.raises(ConfigurationError, match="given input_ids as well"):
        noise_for(ClientConfig(activation_noise=0.1), traits)
