"""Whether hidden states or gradients that another peer computed can be right at all. Servers are not trusted.

Used by clients for the answers of sessions and batches, and by servers for what their predecessors push. Finds what is
grossly wrong, not what is slightly wrong: that takes running the same blocks somewhere else.
"""

import torch
from torch import Tensor

from swarmllm.errors import CorruptActivationsError

MAX_ABS = 1e6
"""Largest magnitude of a hidden state. Assumed: "massive activations" of today's models reach some ten thousand."""


def checked(
    tensor: Tensor | None,
    like: Tensor,
    *,
    peer_id: str,
    batch_axis: int,
    attention_mask: Tensor | None = None,
    max_abs: float = MAX_ABS,
) -> Tensor:
    """`tensor` in the dtype and on the device of `like`, after making sure that it can be an answer to `like`.

    Positions that `attention_mask` `[batch, …seq]` hides may hold anything. If `like` itself isn't finite, neither need
    the answer be.

    Raises:
        CorruptActivationsError: wrong shape or type, NaN, infinite or absurdly large values.
    """
    if tensor is None or tensor.shape != like.shape or not tensor.is_floating_point():
        found = "nothing" if tensor is None else f"{list(tensor.shape)} of {tensor.dtype}"
        raise CorruptActivationsError(f"floats of shape {list(like.shape)} were expected, got {found}", peer_id)
    if not plausible(tensor, batch_axis, attention_mask, max_abs) and plausible(
        like, batch_axis, attention_mask, max_abs
    ):
        raise CorruptActivationsError("the server returned NaN, infinite or absurdly large values", peer_id)
    return tensor.to(dtype=like.dtype, device=like.device)


def plausible(values: Tensor, batch_axis: int, attention_mask: Tensor | None = None, max_abs: float = MAX_ABS) -> bool:
    """Whether all values at positions that are not padding are numbers of at most `max_abs`."""
    return _bounded(values, max_abs) or (
        attention_mask is not None
        and attention_mask.ndim == 2
        and _bounded(_shown(values, attention_mask, batch_axis), max_abs)
    )


def _bounded(values: Tensor, max_abs: float) -> bool:
    if values.numel() == 0:
        return True
    low, high = torch.aminmax(values.detach())  # NaN comes out of it as NaN, which compares as False
    return bool(low >= -max_abs) and bool(high <= max_abs)


def _shown(values: Tensor, attention_mask: Tensor, batch_axis: int) -> Tensor:
    """The values at positions that are not padding."""
    seq_len = values.shape[batch_axis + 1]
    return values.movedim((batch_axis, batch_axis + 1), (0, 1))[attention_mask[:, -seq_len:].bool()]
