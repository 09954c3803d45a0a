"""Checks of activations that other peers computed; outputs and attention weights of the blocks of a call.

Servers are not trusted. `checked` finds values that are grossly wrong, not values that are slightly wrong: to find
those, the same blocks must run on another server. Clients check the answers of sessions and batches, servers check
hidden states that the server before them pushes.

Transformers calls inner states `hidden_states` and `attentions`. A client asks for them with the inputs
(`BlockInputs.inner`), and the results are put into the same object: by `models/span` on a server, and on a client from
the servers' answers. Code that cuts inputs into pieces joins the results of the pieces.
"""

import math
from collections.abc import Collection, Sequence
from typing import Self

import torch
from torch import Tensor

from swarmllm.data_structures import Span
from swarmllm.errors import ConfigurationError, CorruptActivationsError

MAX_ABS = 1e6
"""Largest magnitude of a hidden state. Assumed: "massive activations" of today's models reach some ten thousand."""

ANSWER_BYTES = 32 << 20
"""Bytes that a client asks for at a time, if it can ask in pieces. Assumed: much larger than a message's overhead, and
small enough for a server that answers several clients."""
MAX_ANSWER_BYTES = 128 << 20
"""Most bytes of a server's answer to one request: a quarter of the bytes that one peer may have under way there."""
MAX_HEADS = 4096
MAX_PLACE = 15
"""As in `wire/messages`."""

Map = tuple[int, int, Tensor]
"""Block, place, weights `[batch, heads, seq, past + seq]`. Place 0: found inside the block. Place k: the k-th value
that the block returns after its hidden states; transformers' older models look for weights there."""
Described = tuple[tuple[int, int, tuple[int, ...]], ...]
"""(block, place, shape) of each tensor of weights."""


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
    """True if all values at positions that are not padding are numbers of at most `max_abs`."""
    return _bounded(values, max_abs) or (
        attention_mask is not None
        and attention_mask.ndim == 2
        and _bounded(_shown(values, attention_mask, batch_axis), max_abs)
    )


def are_finite(values: Tensor) -> bool:
    """True if there is no NaN and nothing infinite. On a CPU it takes a twentieth of the time of `isfinite().all()`."""
    if values.numel() == 0:
        return True
    low, high = torch.aminmax(values.detach())
    return math.isfinite(low.item()) and math.isfinite(high.item())


def _bounded(values: Tensor, max_abs: float) -> bool:
    if values.numel() == 0:
        return True
    low, high = torch.aminmax(values.detach())  # NaN comes out of it as NaN, which compares as False
    return low.item() >= -max_abs and high.item() <= max_abs


def _shown(values: Tensor, attention_mask: Tensor, batch_axis: int) -> Tensor:
    """The values at positions that are not padding."""
    seq_len = values.shape[batch_axis + 1]
    return values.movedim((batch_axis, batch_axis + 1), (0, 1))[attention_mask[:, -seq_len:].bool()]


class InnerStates:
    """The request for inner states of one call, and the found ones."""

    def __init__(self, outputs: Collection[int], *, attentions: bool = False, num_heads: int = 1) -> None:
        self.outputs = frozenset(outputs)
        """Blocks whose outputs are requested."""
        self.attentions = attentions
        """True if the attention weights of all blocks are requested."""
        self.num_heads = num_heads
        """Heads of one block, to estimate sizes."""
        self.found: dict[int, Tensor] = {}
        """Outputs by block: hidden states as the block has returned them."""
        self.maps: dict[int, list[Map]] = {}
        """Attention weights by block, in the order in which they were computed."""

    def fresh(self) -> Self:
        """The same wish for a piece of the call."""
        return type(self)(self.outputs, attentions=self.attentions, num_heads=self.num_heads)

    def within(self, span: Span) -> list[int]:
        """Blocks of `span` whose outputs are requested."""
        return [block_idx for block_idx in span if block_idx in self.outputs]

    def wants(self, span: Span) -> bool:
        """True if anything is requested of these blocks."""
        return self.attentions or bool(self.within(span))

    def num_bytes(self, span: Span, batch_size: int, seq_len: int, past: int, position_bytes: int) -> int:
        """Memory of everything requested of these blocks; their hidden states take `position_bytes` for each
        position."""
        of_outputs = len(self.within(span)) * batch_size * seq_len * position_bytes
        if not self.attentions:
            return of_outputs
        return of_outputs + len(span) * batch_size * self.num_heads * seq_len * (past + seq_len) * 4

    def join(self, parts: Sequence["InnerStates | None"], axis: int) -> None:
        """Join the states that the pieces of this call have found; `axis` is the axis of hidden states that was cut.

        Attention weights can only be cut along the batch.
        """
        found = [part for part in parts if part is not None and part is not self]
        if not found:
            return
        for block_idx in found[0].found:
            self.found[block_idx] = _joined([part.found[block_idx] for part in found], axis)
        for block_idx, maps in found[0].maps.items():
            of_parts = zip(*(part.maps[block_idx] for part in found), strict=True)
            self.maps[block_idx] = [
                (block_idx, place, _joined([one[2] for one in same], 0))
                for (_, place, _), same in zip(maps, of_parts, strict=True)
            ]

    def move(self, device: torch.device) -> None:
        """Put all that was found on that device."""
        self.found = {block_idx: output.to(device) for block_idx, output in self.found.items()}
        for block_idx, maps in self.maps.items():
            self.maps[block_idx] = [(idx, place, one.to(device)) for idx, place, one in maps]

    def copy(self, span: Span, like: Tensor) -> None:
        """Copy the states found in these blocks to the device and dtype of `like`."""
        device, dtype = like.device, like.dtype
        for block_idx in self.within(span):
            self.found[block_idx] = self.found[block_idx].clone().to(device, dtype)
        for block_idx in self.maps.keys() & set(span):
            maps = self.maps[block_idx]
            self.maps[block_idx] = [(idx, place, one.clone().to(device, dtype)) for idx, place, one in maps]

    # ------------------------------------------------------------------ as an answer

    def as_answer(self, span: Span) -> tuple[tuple[int, ...], Described, dict[str, Tensor]]:
        """The states found in these blocks: (blocks with outputs, descriptions of attention weights, tensors).

        Raises:
            ConfigurationError: outputs of these blocks don't fit into one tensor.
        """
        blocks = tuple(self.within(span))
        outputs = [self.found[block_idx] for block_idx in blocks]
        if len({(output.shape, output.dtype) for output in outputs}) > 1:
            raise ConfigurationError("this model's blocks return hidden states of several shapes: leave them out")
        tensors = {"block_outputs": torch.stack(outputs)} if outputs else {}
        maps = [one for block_idx in span for one in self.maps.get(block_idx, ())]
        if maps:
            tensors["attentions"] = torch.cat([weights.flatten() for _, _, weights in maps])
        return blocks, tuple((block_idx, place, tuple(weights.shape)) for block_idx, place, weights in maps), tensors

    def take(
        self,
        blocks: tuple[int, ...],
        described: Described,
        tensors: dict[str, Tensor],
        *,
        span: Span,
        like: Tensor,
        batch_axis: int,
        end: int,
        mask: Tensor | None,
        peer_id: str,
    ) -> None:
        """Check a server's answer about its blocks, and put it into this object.

        Args:
            like: hidden states of this call.
            end: positions that attention can have seen, a prefix included.

        Raises:
            CorruptActivationsError: it can't be right.
        """
        if blocks != tuple(self.within(span)):
            raise CorruptActivationsError(f"outputs of blocks {blocks} were answered, others were wanted", peer_id)
        outputs = tensors.get("block_outputs")
        if blocks and (outputs is None or outputs.shape != (len(blocks), *like.shape)):
            raise CorruptActivationsError("the outputs of blocks are missing or of another shape", peer_id)
        found = {
            block_idx: checked(output, like, peer_id=peer_id, batch_axis=batch_axis, attention_mask=mask)
            for block_idx, output in zip(blocks, () if outputs is None else outputs, strict=True)
        }
        maps = _unpacked(described if self.attentions else (), tensors.get("attentions"), peer_id)
        batch_size, seq_len = like.shape[batch_axis : batch_axis + 2]
        for block_idx, _, weights in maps:
            fits = fits_attention(weights, batch_size, seq_len, end) and block_idx in span
            if not fits or not plausible(weights.movedim(1, 2), 0, mask):
                raise CorruptActivationsError("attention weights of another shape, or no numbers, came", peer_id)
        self.found |= found
        for block_idx in span if self.attentions else ():
            self.maps[block_idx] = [(one[0], one[1], one[2].to(like)) for one in maps if one[0] == block_idx]


def fits_attention(weights: Tensor, batch_size: int, seq_len: int, end: int) -> bool:
    """True if these can be attention weights `[batch, heads, seq, up to end]`."""
    if weights.ndim != 4 or not weights.is_floating_point():
        return False
    rows, heads, queries, keys = weights.shape
    return rows == batch_size and 1 <= heads <= MAX_HEADS and queries == seq_len and 1 <= keys <= end


def _unpacked(described: Described, flat: Tensor | None, peer_id: str) -> list[Map]:
    if not described:
        return []
    sizes = [math.prod(shape) for _, _, shape in described]
    if flat is None or flat.ndim != 1 or sum(sizes) != len(flat):
        raise CorruptActivationsError("attention weights are missing, or aren't what their shapes say", peer_id)
    parts = torch.split_with_sizes(flat, sizes)
    return [(one[0], one[1], part.view(one[2])) for one, part in zip(described, parts, strict=True)]


def _joined(tensors: Sequence[Tensor], axis: int) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors), dim=axis)
