"""What passes between the blocks of one call, kept for a client that wants to see it (`boundary/inner_states`).

Outputs are those that the blocks return, before anything that the model does between two blocks. Attention weights come
from transformers' own code: newer models collect them by hooks in their blocks, older ones return them from each block.
Only eager attention has them, so a call that wants them runs with it, whatever the blocks usually run with. Made by
`block_span` for each such call, in the thread that runs the blocks.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils.output_capturing import _active_collector

from swarmllm.errors import ConfigurationError
from swarmllm.models.block_slots import BlockSlots
from swarmllm.models.boundary.block_inputs import BlockInputs
from swarmllm.models.boundary.inner_states import MAX_PLACE, InnerStates, Map, fits_attention
from swarmllm.models.span.attention import attending, attention_configs


class InnerRecording:
    """The recording of one call."""

    def __init__(self, inner: InnerStates, stack: PreTrainedModel, slots: BlockSlots) -> None:
        self._inner, self._stack, self._slots = inner, stack, slots
        self.arguments: dict[str, Any] = {"output_attentions": True} if inner.attentions else {}
        """What the stack's forward is to be given besides its usual arguments."""
        if inner.attentions:
            parameters = inspect.signature(stack.forward).parameters
            takes_more = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
            if "output_attentions" not in parameters and not takes_more:
                raise ConfigurationError(
                    f"{type(stack).__name__} has no attention weights: leave output_attentions out"
                )

    @contextmanager
    def running(self) -> Iterator[None]:
        """Within, the blocks attend in a way that has weights, if those are wanted."""
        if self._inner.attentions and self._slots.block_output == 1:  # the model looks for weights behind it now
            self._slots.extras = (None,) * MAX_PLACE
        try:
            with attending(attention_configs(self._stack) if self._inner.attentions else (), "eager"):
                yield
        finally:
            self._slots.extras = None

    def record(self, block_idx: int, block: Callable[[], Any]) -> Any:
        """Run the block, and keep what is wanted of it."""
        inner, collected = self._inner, _collected()
        num_before = len(collected)
        result = block()
        hidden, *others = result if isinstance(result, tuple) else (result,)
        if block_idx in inner.outputs:
            inner.found[block_idx] = hidden.detach().to("cpu", copy=True)  # some models go on in place
        if inner.attentions:
            maps: list[Map] = [(block_idx, 0, weights) for weights in collected[num_before:]]
            returned = enumerate(others[:MAX_PLACE], start=1)
            if not maps:
                maps = [(block_idx, place, one) for place, one in returned if isinstance(one, Tensor)]
            inner.maps[block_idx] = [
                (idx, place, weights.detach().to("cpu", copy=True)) for idx, place, weights in maps
            ]
        return result

    def check(self, inputs: BlockInputs, past: int) -> None:
        """Whether all that was found is what it is called.

        Raises:
            ConfigurationError: these blocks attend in another way.
        """
        end = past + inputs.seq_len + inputs.num_prefix
        for weights in (one[2] for maps in self._inner.maps.values() for one in maps):
            if not fits_attention(weights, inputs.batch_size, inputs.seq_len, end):
                raise ConfigurationError(
                    f"the attention weights of {type(self._stack).__name__} are {list(weights.shape)}, not "
                    "[batch, heads, seq, past + seq]: leave output_attentions out"
                )


def _collected() -> list[Tensor]:
    """Attention weights that transformers has collected in this forward."""
    collector = _active_collector.get()
    found: list[Tensor] = [] if collector is None else collector.get("attentions", [])
    return found
