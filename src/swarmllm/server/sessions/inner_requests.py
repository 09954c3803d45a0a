"""What clients want to see of the inside of their steps and batches: how much that is, and how it is answered.

Called by `step_runner` and `streams/batch_request`, before anything is computed, and by who answers.
"""

from swarmllm.data_structures import Span
from swarmllm.errors import ConfigurationError
from swarmllm.models.architecture import text_config
from swarmllm.models.boundary.inner_states import MAX_ANSWER_BYTES, InnerStates
from swarmllm.models.span.block_span import BlockSpan
from swarmllm.network.wire.messages import BatchHeader, StepHeader

INNER_FACTOR = 2
"""What is wanted is there twice: as it was found, and as one tensor to be sent."""


def wanted_inner(
    header: StepHeader | BatchHeader, span: Span, blocks: BlockSpan, position_bytes: int
) -> tuple[InnerStates | None, int]:
    """What is wanted of these blocks, and the bytes that it takes; None and 0: nothing.

    `position_bytes` are those of one position's hidden states.

    Raises:
        ConfigurationError: it is more than one answer may bring.
    """
    wanted = header.inner
    if wanted is None:
        return None, 0
    num_heads = int(getattr(text_config(blocks.stack.config), "num_attention_heads", None) or 1)
    inner = InnerStates(wanted.outputs, attentions=wanted.attentions, num_heads=num_heads)
    if not inner.wants(span):
        return None, 0
    past = header.position if isinstance(header, StepHeader) else 0
    num_bytes = inner.num_bytes(span, header.batch_size, header.seq_len, past, position_bytes)
    if num_bytes > MAX_ANSWER_BYTES:
        what = "attention weights" if wanted.attentions else "hidden states"
        raise ConfigurationError(
            f"{what} of {num_bytes >> 20} MB in blocks {span} are more than the {MAX_ANSWER_BYTES >> 20} MB that a "
            "server answers at once: ask for a shorter text or fewer rows"
        )
    return inner, num_bytes
