"""Everything that one forward call through some blocks needs, as it travels on the wire.

Made by the client shell, encoded by `network/`, used up by a server's `BlockSpan`.
"""

from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch
from torch import Tensor

from swarmllm.data_structures import BlockTraits
from swarmllm.errors import ConfigurationError
from swarmllm.models.adapters import BlockAdapter


@dataclass(kw_only=True, eq=False, slots=True)
class BlockInputs:
    """The inputs of one call; tensors that the caller didn't give are None.

    Nobody changes one that exists. It isn't frozen, because that would cost every hop of every token 10 µs.
    """

    hidden_states: Tensor
    """Opaque: `[batch, seq, hidden]` for most models, other axes around (batch, seq) for some (`batch_axis`)."""
    batch_size: int
    seq_len: int
    attention_mask: Tensor | None = None
    """`[batch, past + seq]` of 0 and 1, or `[batch, 1, seq, past + seq]`, as the caller gave it."""
    position_ids: Tensor | None = None
    """`[batch or 1, seq]`, or `[kinds, batch or 1, seq]`."""
    token_type_ids: Tensor | None = None
    """`[batch, seq]`."""
    input_ids: Tensor | None = None
    """`[batch, seq]`; only if the blocks need it (`BlockTraits.extra_inputs`)."""
    inputs_embeds: Tensor | None = None
    """`[batch, seq, embedding]`; only if the blocks need it."""
    adapter: BlockAdapter | None = None
    """What the blocks shall compute with besides their weights; travels apart, by handle."""
    trained: tuple[Tensor, ...] = ()
    """On a client: the parameters that `adapter.tensors()` are copies of, in their order; gradients go to them."""

    @property
    def num_prefix(self) -> int:
        """Positions before the text whose keys and values come with the adapter."""
        return 0 if self.adapter is None else self.adapter.num_prefix

    @property
    def num_positions(self) -> int:
        """Positions of a batch, of all its rows, that take memory on a server; for limits."""
        return self.batch_size * (self.seq_len + self.num_prefix)

    def tensors(self) -> dict[str, Tensor]:
        """What has to be encoded."""
        values = ((name, getattr(self, name)) for name in TENSOR_NAMES)
        return {name: value for name, value in values if value is not None}

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor], *, batch_size: int, seq_len: int) -> Self:
        """The inverse of `tensors`; unknown names (of newer peers) are ignored."""
        known: dict[str, Any] = {name: tensor for name, tensor in tensors.items() if name in TENSOR_NAMES}
        return cls(batch_size=batch_size, seq_len=seq_len, **known)

    def with_hidden(self, hidden_states: Tensor) -> Self:
        """The same call for the next blocks."""
        return replace(self, hidden_states=hidden_states)

    def with_tensors(self, tensors: dict[str, Tensor]) -> Self:
        """The same call with these tensors instead of its own, by name; other names are ignored."""
        known: dict[str, Any] = {name: tensor for name, tensor in tensors.items() if name in TENSOR_NAMES}
        return replace(self, **known)

    def detached(self) -> Self:
        """The same call outside of autograd's graph."""
        detached = self.from_tensors(
            {name: tensor.detach() for name, tensor in self.tensors().items()},
            batch_size=self.batch_size,
            seq_len=self.seq_len,
        )
        return replace(detached, adapter=self.adapter)

    def to(self, device: torch.device, dtype: torch.dtype) -> Self:
        """On another device, with the floating-point tensors in another dtype (masks keep theirs)."""
        moved: dict[str, Any] = {name: tensor.to(device) for name, tensor in self.tensors().items()}
        for name in ("hidden_states", "inputs_embeds"):
            if name in moved:
                moved[name] = moved[name].to(dtype)
        return replace(self, **moved)

    def rows(self, start: int, end: int, traits: BlockTraits) -> Self:
        """Samples `[start, end)` of the batch."""
        count = end - start

        def cut(tensor: Tensor | None, axis: int) -> Tensor | None:
            if tensor is None or tensor.shape[axis] != self.batch_size:  # [1, seq]: the same for all samples
                return tensor
            return tensor.narrow(axis, start, count)

        return replace(
            self,
            hidden_states=self.hidden_states.narrow(traits.batch_axis, start, count),
            batch_size=count,
            attention_mask=cut(self.attention_mask, 0),
            position_ids=cut(self.position_ids, -2),
            token_type_ids=cut(self.token_type_ids, 0),
            input_ids=cut(self.input_ids, 0),
            inputs_embeds=cut(self.inputs_embeds, 0),
        )

    def columns(self, start: int, end: int, past: int, traits: BlockTraits) -> Self:
        """Positions `[start, end)` of this call's sequence, which itself follows `past` positions."""
        count = end - start

        def cut(tensor: Tensor | None, axis: int) -> Tensor | None:
            return None if tensor is None else tensor.narrow(axis, start, count)

        mask = self.attention_mask
        if mask is not None:
            mask = mask[..., : past + end]
            mask = mask[..., start:end, :] if mask.ndim > 2 else mask
        return replace(
            self,
            hidden_states=self.hidden_states.narrow(traits.batch_axis + 1, start, count),
            seq_len=count,
            attention_mask=mask,
            position_ids=cut(self.position_ids, -1),
            token_type_ids=cut(self.token_type_ids, -1),
            input_ids=cut(self.input_ids, 1),
            inputs_embeds=cut(self.inputs_embeds, 1),
        )


TENSOR_NAMES = tuple(
    field.name for field in fields(BlockInputs) if field.name not in ("batch_size", "seq_len", "adapter", "trained")
)


def check_mask(mask: Tensor, batch_size: int, seq_len: int, past: int) -> None:
    """Whether it has a column for each of the `past` positions and of the call's, no more and no fewer.

    Models pad and cut masks of another width without a word.

    Raises:
        ConfigurationError: it hasn't.
    """
    shape, width = list(mask.shape), past + seq_len
    rows = (batch_size,) if len(shape) == 2 else (1, batch_size)
    if (
        len(shape) not in (2, 3, 4)
        or shape[0] not in rows
        or shape[-1] != width
        or (len(shape) > 2 and shape[-2] != seq_len)
    ):
        raise ConfigurationError(
            f"attention_mask must be [{batch_size}, {width}] or [{batch_size}, 1, {seq_len}, {width}], with a column "
            f"for each position of the text{f', {past} earlier ones included' if past else ''}, not {shape}"
        )
