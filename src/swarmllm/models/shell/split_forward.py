"""One forward of a client shell in two halves: up to the blocks, and from them on.

In between the blocks' inputs travel, and other forwards may begin. Speculation uses it (`speculation/sampling_loop`);
the blocks' side is whoever gets `inputs` and gives the hidden states back.
"""

from collections.abc import Sequence
from typing import Any, NoReturn

from torch import Tensor
from transformers import PreTrainedModel

from swarmllm.data_structures import Span
from swarmllm.errors import LocalProtocolError
from swarmllm.models.architecture import cache_argument, decoder_stack
from swarmllm.models.block_slots import ForwardStopped
from swarmllm.models.boundary.block_inputs import BlockInputs
from swarmllm.models.shell.remote_cache import RemoteCache


class SplitForward:
    """A step that begins at `position`; the session of the cache that the model sees meanwhile.

    The model's own code runs in both halves, with the same arguments; what it computed before the blocks is computed
    again in the second one, which costs less than to keep a forward suspended.
    """

    def __init__(self, model: PreTrainedModel, position: int, of_text: RemoteCache | None = None) -> None:
        """`of_text`: the cache of the text that the step belongs to, and with whose adapter it goes on."""
        self.position = position
        self.cache = RemoteCache(model.config, self, 1)
        """The cache to give to the model: it says that `position` positions have been seen."""
        if of_text is not None:
            self.cache.go_on_with_adapter_of(of_text)
        self._model = model
        self._kwargs: dict[str, Any] = {}
        self._inputs: BlockInputs | None = None
        self._hidden: Tensor | None = None

    def begin(self, model_inputs: dict[str, Any]) -> BlockInputs:
        """The first half: the forward's arguments → what the blocks are to be run on."""
        self._kwargs = {**model_inputs, cache_argument(decoder_stack(self._model)): self.cache}
        try:
            self._model(**self._kwargs, return_dict=True)
        except ForwardStopped:
            if self._inputs is not None:
                return self._inputs
        raise LocalProtocolError(f"the forward of {type(self._model).__name__} never reached its blocks")

    def finish(self, hidden: Tensor) -> Any:
        """The second half: hidden states after the last block → the model's output; its cache means nothing."""
        self._hidden = hidden
        return self._model(**self._kwargs, return_dict=True)

    # ------------------------------------------------------------------ a session, for this one step

    is_generating = False

    def run(self, inputs: BlockInputs, part: Span | None = None) -> Tensor:
        """Called where the blocks would run."""
        if self._hidden is None:
            self._inputs = inputs
            raise ForwardStopped
        return self._hidden

    def select_batch(self, indices: Sequence[int]) -> None:
        raise LocalProtocolError("rows can't be chosen within a step")

    def record_past(self) -> None:
        raise LocalProtocolError("a session records its past from its begin on")

    def remember(self, inputs: BlockInputs, part: Span | None = None) -> None:
        raise LocalProtocolError("a step has no past of its own")

    def fork(self) -> NoReturn:
        raise LocalProtocolError("a step can't be copied")

    def close(self) -> None:
        """Nothing to free: the session is somebody else's."""
