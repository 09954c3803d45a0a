"""Checks of what users hand to a session or to `remote_blocks`, here, where a mistake costs no round trip.

Called by `session/inference_session` and `client/remote_blocks`.
"""

from torch import Tensor

from swarmllm.data_structures import BlockTraits
from swarmllm.errors import ConfigurationError
from swarmllm.models.boundary.block_inputs import BlockInputs, check_mask


def note_position(hidden_states: Tensor, position: int) -> None:
    """Note for which position they were embedded: at another one they would be wrong."""
    hidden_states.swarm_position = position  # type: ignore[attr-defined]


def check_position(hidden_states: Tensor, position: int) -> None:
    """Raises ConfigurationError if they were embedded for another position."""
    embedded_at = getattr(hidden_states, "swarm_position", position)
    if embedded_at != position:
        raise ConfigurationError(
            f"these hidden states were embedded for position {embedded_at}, but the session stands at {position}: call "
            "embed() within the session's with block, in the same thread or task, or give it position_ids"
        )


def block_inputs(
    traits: BlockTraits,
    hidden_size: int | None,
    hidden_states: Tensor,
    *,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    input_ids: Tensor | None = None,
    inputs_embeds: Tensor | None = None,
    past: int = 0,
) -> BlockInputs:
    """The inputs of the blocks; what they don't need is left out.

    Args:
        hidden_size: the model's, if it is known.
        past: positions before those of the hidden states.

    Raises:
        ConfigurationError: something has the wrong shape, or is missing.
    """
    _check_shape(traits, hidden_size, hidden_states)
    axis, shape = traits.batch_axis, hidden_states.shape
    extra = {"input_ids": input_ids, "inputs_embeds": inputs_embeds}
    for name in traits.extra_inputs:
        if extra[name] is None:
            raise ConfigurationError(f"the blocks of this model also need {name}: pass {name}=…")
    if attention_mask is not None:
        check_mask(attention_mask, shape[axis], shape[axis + 1], past)
    return BlockInputs(
        hidden_states=hidden_states,
        batch_size=shape[axis],
        seq_len=shape[axis + 1],
        attention_mask=attention_mask,
        position_ids=position_ids,
        input_ids=input_ids if "input_ids" in traits.extra_inputs else None,
        inputs_embeds=inputs_embeds if "inputs_embeds" in traits.extra_inputs else None,
    )


def _check_shape(traits: BlockTraits, hidden_size: int | None, hidden_states: Tensor) -> None:
    shape = list(hidden_states.shape)
    if hidden_states.ndim < traits.batch_axis + 3:
        raise ConfigurationError(f"hidden_states must be [batch, seq, hidden], as from model.embed(), not {shape}")
    if hidden_size is not None and shape[-1] != hidden_size:
        raise ConfigurationError(
            f"hidden_states of this model are {hidden_size} wide, as from model.embed(), not {shape[-1]}"
        )
    if 0 in shape:
        raise ConfigurationError(f"hidden_states are empty: {shape}")
