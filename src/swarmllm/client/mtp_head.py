"""The head for multi-token prediction that a checkpoint has, loaded and run on the client's machine.

Loaded by `speculative_generation`, asked by `speculation/mtp_drafter`. Where its tensors are, `checkpoint/mtp_layouts`
says; its block is run as servers run theirs, by the architecture's own forward.
"""

import copy
import logging
import threading
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from swarmllm.client.local_blocks import LocalSpan
from swarmllm.data_structures import Span
from swarmllm.errors import ConfigurationError, UnsupportedModelError, WeightsMismatchError
from swarmllm.models.boundary.block_inputs import BlockInputs
from swarmllm.models.checkpoint.checkpoint import Checkpoint
from swarmllm.models.checkpoint.mtp_layouts import MtpWeights, find_mtp_weights
from swarmllm.models.checkpoint.skeleton import block_bytes
from swarmllm.models.span.loading import load_block_span
from swarmllm.models.span.span_cache import SpanCache

logger = logging.getLogger(__name__)
AUTO_BYTES = 1 << 30
"""Assumed: what a client reads and keeps unasked. MiMo-7B's head has 0.4 GiB, DeepSeek-V3's 11 in 8 bits."""


class MtpHead:
    """Guesses the token after the next one from a hidden state and the next token; any thread may call it."""

    def __init__(self, model: PreTrainedModel, block: LocalSpan, weights: MtpWeights) -> None:
        """Raises: WeightsMismatchError: the head doesn't fit the model."""
        self._embed, self._head = model.get_input_embeddings(), model.get_output_embeddings()
        self._block = block
        self._hidden_first = weights.layout.hidden_first
        layout = weights.layout
        names = (layout.token_norm, layout.hidden_norm, layout.projection, layout.final_norm)
        read = {name: lazy[...] for name, lazy in weights.checkpoint.tensors(names).items()}
        size = read[layout.final_norm].shape[-1]
        norm = _norm_of(block.modules()[weights.block_idx], size)
        projection = nn.Linear(2 * size, size, bias=False, device="meta")
        parts = zip(names, (norm, copy.deepcopy(norm), projection, copy.deepcopy(norm)), strict=True)
        self._parts = nn.ModuleList(_with_weight(part, read[name], name) for name, part in parts)
        self._parts.requires_grad_(False)
        self._moving = threading.Lock()

    def new_cache(self) -> SpanCache:
        """An empty cache of pairs, which `states` fills and which can be rolled back."""
        return self._block.new_cache(record_past=True)

    @torch.no_grad()
    def states(self, tokens: list[int], hidden: Tensor, cache: SpanCache) -> Tensor:
        """Feed pairs: hidden states `[seq, hidden]` behind the final norm, of the model or of this head, each with the
        token after it. Returns what the head makes of them, `[seq, hidden]`, for `best` or for its next pair.
        """
        token_norm, hidden_norm, projection, final_norm = self._parts_for(hidden)
        ids = torch.tensor([tokens], device=hidden.device)
        pair = token_norm(self._embed(ids).to(hidden.dtype)), hidden_norm(hidden[None])
        joined = torch.cat(pair[::-1] if self._hidden_first else pair, dim=-1)
        inputs = BlockInputs(hidden_states=projection(joined), batch_size=1, seq_len=len(tokens))
        found: Tensor = final_norm(self._block.forward(inputs, cache=cache))
        return found[0]

    def _parts_for(self, hidden: Tensor) -> nn.ModuleList:
        """In its dtype and where it is. Never moved in place: other threads may be computing with them."""
        with self._moving:
            weight = next(self._parts.parameters())
            if (weight.device, weight.dtype) != (hidden.device, hidden.dtype):
                self._parts = copy.deepcopy(self._parts).to(hidden.device, hidden.dtype)
            return self._parts

    @torch.no_grad()
    def best(self, state: Tensor) -> int:
        """The token that the model's head finds likeliest after this state `[hidden]`."""
        return int(self._head(state).argmax())


def load_mtp_head(model: PreTrainedModel, weights: MtpWeights, dtype: torch.dtype) -> MtpHead:
    """Read a head that the checkpoint has.

    Raises:
        UnsupportedModelError: its block can't guess: it has no cache that can be rolled back, or needs more inputs.
        WeightsError: its tensors are missing, damaged, or don't fit the model.
    """
    span = Span(weights.block_idx, weights.block_idx + 1)
    blocks = load_block_span(weights.checkpoint, span, dtype=dtype, device=model.device, progress=False)
    traits = blocks.traits
    if not (blocks.keeps_cache and traits.rollback) or traits.extra_inputs or traits.batch_axis:
        raise UnsupportedModelError(
            f"the head for multi-token prediction of {weights.checkpoint.name} can't guess ahead here: "
            'use speculation="ngram" or a small model'
        )
    logger.info("loaded the head for multi-token prediction of %s", weights.checkpoint.name)
    return MtpHead(model, LocalSpan(blocks), weights)


def wanted_mtp_weights(checkpoint: Checkpoint) -> MtpWeights:
    """The head of a checkpoint of which it is known that it is wanted.

    Raises:
        ConfigurationError: it has none.
    """
    found = find_mtp_weights(checkpoint)
    if found is None:
        raise ConfigurationError(
            f"{checkpoint.name} has no head for multi-token prediction: "
            'use speculation="auto", "ngram" or a small model'
        )
    return found


def small_mtp_weights(checkpoint: Checkpoint, dtype: torch.dtype) -> MtpWeights | None:
    """The head of a checkpoint if it has one that is small enough to be read unasked."""
    found = find_mtp_weights(checkpoint)
    if found is None:
        return None
    num_bytes = block_bytes(found.checkpoint, dtype)[found.block_idx]
    if num_bytes <= AUTO_BYTES:
        return found
    logger.info(
        'the head for multi-token prediction of %s takes %.1f GB here: speculation="mtp" has it guess all the same',
        checkpoint.name,
        num_bytes / 1e9,
    )
    return None


def _norm_of(block: nn.Module, size: int) -> nn.Module:
    """A norm of the architecture's own kind, as the first one of its block is."""
    for part in block.children():
        weight: Any = getattr(part, "weight", None)
        if weight is not None and weight.shape == (size,):
            return copy.deepcopy(part)
    raise WeightsMismatchError(f"the head for multi-token prediction has size {size}, and no norm of the block has")


def _with_weight(part: nn.Module, weight: Tensor, name: str) -> nn.Module:
    expected: Tensor = part.weight  # type: ignore[assignment]
    if weight.shape != expected.shape:
        raise WeightsMismatchError(f"{name} should be {list(expected.shape)}, not {list(weight.shape)}")
    part.weight = nn.Parameter(weight, requires_grad=False)
    return part
