"""The head with weights in few bits, for tokens that are only chosen.

The head of a large vocabulary reads more memory for a token than a block does. Where a checkpoint stores its weight in
few bits, the head multiplies by it as it is stored (`keep_head_as_stored`): the file's own values, which the head's own
weight rounds to the model's dtype, and a part of the memory to read.
`ClientConfig(head="int8")` rounds any other one (`round_head`), in the format of servers with `--quant_type int8`.

The head's own weight stays as it is: embeddings may share it, checkpoints hold it, and training changes it. So forwards
that record gradients multiply by the head's own weight, and the copy takes memory in addition. A changed weight is
noticed if torch counts the change, or if a sample of its numbers differs; a few rows that are changed through `.data`
are not. Called by `client/distributed_model`.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from swarmllm.errors import ConfigurationError
from swarmllm.machine_memory import into_huge_pages
from swarmllm.models.checkpoint.checkpoint import Checkpoint
from swarmllm.models.published_formats.stored_format import PackedTensor
from swarmllm.models.quantization import kernels
from swarmllm.models.quantization.decoded import KERNELS, GgufBlocks
from swarmllm.models.quantization.packed import Int8, Packed

SAMPLE = 64
"""At least so many weights are compared, because torch doesn't count all changes: peft merges adapters into
`weight.data`."""


class PackedHead(nn.Linear):
    """A linear layer that multiplies by a packed copy of its weight where no gradients are recorded."""

    def forward(self, input: Tensor) -> Tensor:
        """`[…, hidden]` → `[…, vocabulary]`."""
        packed = None if torch.is_grad_enabled() else self._copy()
        return super().forward(input) if packed is None else packed.linear(input, self.bias)

    def _copy(self) -> Packed | None:
        """The copy, which belongs to the weight as it is now; None: there is none."""
        known: _Copy | None = self.__dict__.get("copy")
        return known.packed if known is not None and known.is_of(self.weight) else None

    def hold(self, packed: Packed) -> None:
        """Multiply by this copy of the weight from now on."""
        # In __dict__, so that it is neither saved nor moved. Replaced as a whole: other threads may run the head.
        self.__dict__["copy"] = _Copy(self.weight, packed.mapped(into_huge_pages))


class RoundedHead(PackedHead):
    """Its copy is made when it is first needed, and again when the weight has changed."""

    def _copy(self) -> Packed | None:
        if (packed := super()._copy()) is None:
            packed = Int8.quantize(self.weight.detach()).for_device(self.weight.device)
            self.hold(packed)
        return packed


class _Copy:
    """A packed copy, and the weight that it was made of."""

    def __init__(self, weight: Tensor, packed: Packed) -> None:
        self.packed, self._about = packed, _about(weight)

    def is_of(self, weight: Tensor) -> bool:
        (before, sample), (now, sample_now) = self._about, _about(weight)
        return before == now and torch.equal(sample, sample_now)


def _about(weight: Tensor) -> tuple[tuple[Any, ...], Tensor]:
    """What changes if the weight does: facts, and some of the values."""
    count = 0 if weight.is_inference() else weight._version
    sample = weight.detach().reshape(-1)[:: max(1, weight.numel() // SAMPLE)].clone()
    return (weight.data_ptr(), count, weight.shape, weight.dtype, weight.device), sample


def round_head(model: PreTrainedModel) -> None:
    """Let the head of the model multiply by weights of 8 bits.

    Raises:
        ConfigurationError: it has no head for tokens, or none that is a plain linear layer.
    """
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear:
        kind = "no head for tokens" if head is None else f"a {type(head).__name__} for its head"
        raise ConfigurationError(f"head='int8' is for linear heads, and this model has {kind}: leave it out")
    head.__class__ = RoundedHead


def keep_head_as_stored(model: PreTrainedModel, checkpoint: Checkpoint) -> None:
    """Let the head multiply by its weight as the checkpoint stores it, if kernels of this processor know that form.

    Raises:
        WeightsError: the checkpoint's files are damaged.
    """
    head = model.get_output_embeddings()
    if not checkpoint.comes_packed or type(head) is not nn.Linear or not head.weight.is_cpu or not kernels.library():
        return
    parameters = model.named_parameters(remove_duplicate=False)  # embeddings may share the weight, under their name
    names = checkpoint.weight_map().keys() & {name for name, one in parameters if one is head.weight}
    for name, lazy in checkpoint.tensors(names, packed_for=head.weight.dtype).items():
        stored = lazy[...] if checkpoint.kept_bits(name) else None
        packed = stored.packed if isinstance(stored, PackedTensor) and not stored.transposed else None
        if isinstance(packed, GgufBlocks) and packed.kind in KERNELS and packed.shape == head.weight.shape:
            head.__class__ = PackedHead
            cast(PackedHead, head).hold(packed.for_device(head.weight.device))
            return
