"""What a client asks servers about the inside of their blocks, and what they answer (`boundary/inner_states`).

Used by sessions and batches alike.
"""

from collections.abc import Iterator

from swarmllm.client.view.connection import Result
from swarmllm.data_structures import BlockTraits, Span
from swarmllm.models.boundary.block_inputs import BlockInputs
from swarmllm.models.boundary.inner_states import ANSWER_BYTES, InnerStates
from swarmllm.network.wire.messages import WantedInner


def wanted_header(inputs: BlockInputs, span: Span | None = None) -> WantedInner | None:
    """The wish as requests say it, for the blocks of `span` (default: all)."""
    inner = inputs.inner
    if inner is None:
        return None
    outputs = sorted(inner.outputs) if span is None else inner.within(span)
    return WantedInner(outputs=tuple(outputs), attentions=inner.attentions)


def take_inner(answer: Result, span: Span, inputs: BlockInputs, traits: BlockTraits, past: int = 0) -> None:
    """Put what a server has answered about its blocks to where it is wanted.

    Raises:
        RemoteProtocolError: it can't be read.
        CorruptActivationsError: it can't be right.
    """
    if inputs.inner is not None and inputs.inner.wants(span):
        inputs.inner.take(
            answer.header.blocks,
            answer.header.attentions,
            answer.tensors(),
            span=span,
            like=inputs.hidden_states,
            batch_axis=traits.batch_axis,
            end=past + inputs.seq_len + inputs.num_prefix,
            mask=inputs.attention_mask,
            peer_id=answer.peer_id,
        )


def position_bytes(inputs: BlockInputs) -> int:
    """Hidden states of one position, in the widest dtype that a server may compute in."""
    return 4 * inputs.hidden_states.numel() // (inputs.batch_size * inputs.seq_len)


def tokens_at_once(inner: InnerStates, inputs: BlockInputs, span: Span) -> int:
    """Positions of one step that are to be asked for together, so that no answer gets too large."""
    return max(1, ANSWER_BYTES // max(1, len(inner.within(span)) * position_bytes(inputs)))


def parts_at_once(inputs: BlockInputs, span: Span, traits: BlockTraits) -> Iterator[Span]:
    """Parts of `span` of which one request may ask what is wanted: mostly all of it at once."""
    inner, start = inputs.inner, span.start
    if inner is not None and inner.wants(span):
        for end in range(span.start + 1, span.end):
            num_bytes = inner.num_bytes(
                Span(start, end + 1), inputs.batch_size, inputs.seq_len, inputs.num_prefix, position_bytes(inputs)
            )
            if num_bytes > ANSWER_BYTES and end not in traits.forbidden_cuts:
                yield Span(start, end)
                start = end
    yield Span(start, span.end)
