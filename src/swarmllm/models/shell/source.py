"""What a decoder attends to besides its text: the outputs of an encoder. Checked here, and sent once per session.

Called by `stack_forward` for models with an encoder.
"""

from typing import Any

import torch
from torch import Tensor

from swarmllm.errors import ConfigurationError
from swarmllm.models.boundary.block_inputs import SOURCE
from swarmllm.models.shell.remote_cache import RemoteCache


def source_of_call(kwargs: dict[str, Any], batch_size: int, cache: RemoteCache | None) -> dict[str, Tensor]:
    """The tensors of `SOURCE` that have to travel with a forward of the decoder: none if its session has them.

    Raises:
        ConfigurationError: they are missing, of another shape, or not those of the session.
    """
    hidden, mask = (kwargs.get(name) for name in SOURCE)
    if not isinstance(hidden, Tensor) or hidden.ndim != 3 or hidden.shape[0] != batch_size or not hidden.shape[1]:
        found = list(hidden.shape) if isinstance(hidden, Tensor) else hidden
        raise ConfigurationError(
            f"the decoder needs the encoder's outputs [{batch_size}, source, hidden], not {found}: give the model "
            "input_ids or encoder_outputs"
        )
    if mask is not None and (not isinstance(mask, Tensor) or mask.shape != hidden.shape[:2]):
        found = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise ConfigurationError(f"attention_mask of the source must be {list(hidden.shape[:2])}, not {found}")
    if cache is None or not cache.session.position:
        if cache is not None:
            cache.source_mask = mask
        return {name: tensor for name, tensor in zip(SOURCE, (hidden, mask), strict=True) if tensor is not None}
    known = cache.source_mask
    if mask is not known and not (mask is not None and known is not None and torch.equal(mask, known)):
        raise ConfigurationError(
            "the attention_mask of the source has changed since the text began: begin it anew, without past_key_values"
        )
    return {}
