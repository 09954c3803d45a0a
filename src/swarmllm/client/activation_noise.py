"""Noise on the hidden states that leave this machine, if the client wants some (`ClientConfig.activation_noise`).

Called by `remote_blocks` for batches and by `session/legs` for texts, once for whatever a server is given: repairs
replay the same noisy values. What it is good for, docs/security.md says with figures. (HearthNet, section 5.9, names it
as a mitigation to be researched.)
"""

import secrets
import threading

import torch

from swarmllm.config import ClientConfig
from swarmllm.data_structures import BlockTraits
from swarmllm.errors import ConfigurationError
from swarmllm.models.boundary.block_inputs import BlockInputs


class ActivationNoise:
    """Normal noise, whose deviation at each position is `scale` times the root mean square of its hidden states."""

    def __init__(self, scale: float) -> None:
        self._scale = scale
        self._lock = threading.Lock()
        # Of its own: sampled texts depend on torch's, and nobody shall guess what was added.
        self._generator = torch.Generator().manual_seed(secrets.randbits(63))

    def __call__(self, inputs: BlockInputs) -> BlockInputs:
        """The inputs with noise on their hidden states; gradients flow as without."""
        if not self._scale:
            return inputs
        hidden = inputs.hidden_states
        with self._lock:
            noise = torch.randn(hidden.shape, generator=self._generator)
        size = hidden.detach().float().square().mean(dim=-1, keepdim=True).sqrt()
        return inputs.with_hidden(hidden + (noise.to(hidden.device) * size * self._scale).to(hidden.dtype))


def noise_for(config: ClientConfig, traits: BlockTraits) -> ActivationNoise:
    """The noise that the client wants for blocks of these traits.

    Raises:
        ConfigurationError: they are given more than hidden states, and so the text itself.
    """
    if config.activation_noise and traits.extra_inputs:
        raise ConfigurationError(
            f"the blocks of this model are given {' and '.join(traits.extra_inputs)} as well, which activation_noise "
            "doesn't hide: leave it out"
        )
    return ActivationNoise(config.activation_noise)
