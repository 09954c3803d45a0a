"""Names of dtypes, as users give them."""

import torch

from swarmllm.errors import ConfigurationError
from swarmllm.models.checkpoint.checkpoint import Checkpoint

_NAMES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


def resolve_dtype(checkpoint: Checkpoint, dtype: str | torch.dtype) -> torch.dtype:
    """`"auto"` = as the checkpoint is stored, `"bfloat16"`, `"torch.bfloat16"`, or a dtype.

    Raises:
        ConfigurationError: no floating-point dtype of this name is supported.
    """
    if isinstance(dtype, torch.dtype):
        dtype = str(dtype)
    if dtype == "auto":
        return checkpoint.stored_dtype()
    name = dtype.removeprefix("torch.")
    if name not in _NAMES:
        raise ConfigurationError(f"dtype {dtype!r} is not supported; use auto, {', '.join(_NAMES)}")
    return _NAMES[name]
