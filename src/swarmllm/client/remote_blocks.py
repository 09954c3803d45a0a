"""`model.remote_blocks`: all blocks of the model, or a slice of them, as a module.

It runs blocks without KV caches, on servers and in this process, and opens sessions for forwards with a cache. The
client shell calls it as a `BlocksRunner` (`shell/blocks_proxy`); users call it, or a slice of it, on hidden states.

Hidden states between blocks that servers answer have no gradient. If a loss may need one, the client asks for the
blocks up to each wanted place instead; the results are then part of autograd's graph (`pieces_with_gradient`).
"""

from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor, nn

from swarmllm.client.batches.batch_runner import BatchRunner
from swarmllm.client.local_blocks import NONE_HERE, LocalBlocks
from swarmllm.client.session.chain import noise_for
from swarmllm.client.session.inference_session import InferenceSession, block_inputs
from swarmllm.client.view.swarm_view import SwarmView
from swarmllm.data_structures import BlockTraits, Span
from swarmllm.errors import ConfigurationError
from swarmllm.models.boundary.block_inputs import BESIDE, BlockInputs


class RemoteBlocks(nn.Module):
    """Blocks `[span.start, span.end)`, without parameters here. Gradients flow to the inputs."""

    def __init__(
        self, view: SwarmView, batches: BatchRunner, traits: BlockTraits, span: Span, local: LocalBlocks = NONE_HERE
    ) -> None:
        super().__init__()
        self.local = local
        """The blocks that run in this process; the others are on servers."""
        self.span = span
        self._view = view
        self._noise = noise_for(view.config, traits)
        self.batches = batches
        self.traits = traits

    def forward(
        self,
        hidden_states: Tensor,
        *,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        input_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        """Hidden states `[batch, seq, hidden]` → hidden states of that shape, after these blocks, without a KV cache.

        Args:
            attention_mask: `[batch, seq]` of 0 and 1, if the batch is padded. Padding isn't computed if that makes no
                difference to the texts: its hidden states are zeros then.
            input_ids: only for models whose blocks need them.
            inputs_embeds: the same.

        Raises:
            ConfigurationError: the inputs don't fit the model.
            SwarmError: the swarm can't do it.
        """
        inputs = block_inputs(
            self.traits,
            self._view.hidden_size,
            hidden_states,
            attention_mask=attention_mask,
            position_ids=position_ids,
            input_ids=input_ids,
            inputs_embeds=inputs_embeds,
        )
        return self.run_blocks(inputs)

    def __len__(self) -> int:
        return len(self.span)

    def __getitem__(self, index: int | slice) -> "RemoteBlocks":
        if isinstance(index, int):
            if not -len(self) <= index < len(self):
                raise IndexError(f"there is no block {index} among {len(self)}")  # it ends loops over the blocks
            index = slice(index, index + 1) if index >= 0 else slice(len(self) + index, len(self) + index + 1)
        start, end, step = index.indices(len(self))
        if step != 1 or start >= end:
            raise ConfigurationError(
                f"remote_blocks can be sliced into contiguous, non-empty parts of its {len(self)} blocks, "
                f"not [{index.start}:{index.stop}:{index.step}]"
            )
        span = Span(self.span.start + start, self.span.start + end)
        return RemoteBlocks(self._view, self.batches, self.traits, span, self.local)

    def extra_repr(self) -> str:
        return f"blocks {self.span}"

    # ------------------------------------------------------------------ BlocksRunner, for the client shell

    def run_blocks(self, inputs: BlockInputs, part: Span | None = None) -> Tensor:
        """The outputs of all these blocks, or of those of `part`, without a KV cache."""
        for span, here in self.local.parts(part or self.span):
            if here is None:
                inputs = self._noise(inputs)
            for piece in pieces_with_gradient(inputs, span, self.local, self.traits):
                # Inner states include padding, also where each is the output of a request of its own.
                wanted = inputs if piece is span else replace(inputs, inner=None, whole=True)
                hidden = self.batches(wanted, piece) if here is None else here.forward(wanted, piece)
                inputs = inputs.with_hidden(hidden)
                if inputs.inner is not None and piece is not span and piece.end - 1 in inputs.inner.outputs:
                    inputs.inner.found[piece.end - 1] = hidden
        return inputs.hidden_states

    def new_session(self, batch_size: int, max_length: int | None, *, grows: bool = False) -> InferenceSession:
        """A session of `batch_size` rows of `max_length` positions, or of more if it `grows`."""
        return InferenceSession(
            self._view,
            self.traits,
            self.batches.spot_checks,
            batch_size=batch_size,
            max_length=max_length,
            grows=grows,
            local=self.local,
            span=self.span,
        )

    def new_cache_session(self, batch_size: int, max_length: int | None) -> InferenceSession:
        """A session for `generate()` and forwards with use_cache, which don't know how long the text will be."""
        return self.new_session(batch_size, max_length, grows=True)

    def longest_row(self) -> int:
        """Most positions of one row that any server computes without a session."""
        return self._view.max_batch_tokens


def pieces_with_gradient(inputs: BlockInputs, part: Span, local: LocalBlocks, traits: BlockTraits) -> list[Span]:
    """`part` in pieces that end where hidden states with gradients are wanted; `part` itself if there are none.

    Raises:
        ConfigurationError: attention weights are wanted, or outputs of a block behind which the model can't be cut.
    """
    inner = inputs.inner
    if inner is None or not inner.wants(part) or not _has_gradients(inputs, local):
        return [part]
    if inner.attentions:
        raise ConfigurationError(
            "attention weights come from servers without a gradient: call the model within torch.no_grad() for them"
        )
    ends = [block_idx + 1 for block_idx in inner.within(part) if block_idx + 1 < part.end]
    for cut in traits.forbidden_cuts:
        if cut in ends:
            raise ConfigurationError(
                f"hidden states before block {cut} of this model have no gradient, because it can't be cut there: call "
                "the model within torch.no_grad() for them"
            )
    bounds = [part.start, *ends, part.end]
    return [Span(start, end) for start, end in pairwise(bounds)]


def _has_gradients(inputs: BlockInputs, local: LocalBlocks) -> bool:
    given = [inputs.hidden_states, *(getattr(inputs, name) for name in BESIDE), *inputs.trained]
    trained = (parameter for block in local.modules().values() for parameter in block.parameters())
    return torch.is_grad_enabled() and (
        any(tensor is not None and tensor.requires_grad for tensor in given)
        or any(parameter.requires_grad for parameter in trained)
    )
