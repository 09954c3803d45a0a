"""What is special about models that see: their towers run here, and pictures are part of single texts.

Used by `distributed_model`; what a picture is to the blocks, `models/shell/vision_inputs` knows.
"""

from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers import PreTrainedModel

from swarmllm.errors import ConfigurationError
from swarmllm.models.shell.vision_inputs import forget_offsets

_TEXT = frozenset(
    ("input_ids", "attention_mask", "position_ids", "token_type_ids", "mm_token_type_ids", "inputs_embeds")
)


class SeesPictures(PreTrainedModel if TYPE_CHECKING else object):  # type: ignore[misc]
    """Mixed into the distributed model."""

    def generate(self, inputs: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        """transformers' `generate()`. Inside an inference session it takes text alone.

        A session knows its text by its tokens, which are the same for all pictures.
        """
        if self.active_cache_session() is not None:
            _require_text("inside an inference session, generate() takes", kwargs)
            forget_offsets(self)
        return super().generate(inputs, *args, **kwargs)

    def embed(self, input_ids: Tensor, **kwargs: Any) -> Tensor:
        """Everything before the first block, of a text without pictures: `[batch, seq, hidden]`."""
        _require_text("embed() takes", kwargs)
        hidden: Tensor = super().embed(input_ids, **kwargs)
        return hidden


def _require_text(who: str, kwargs: dict[str, Any]) -> None:
    for name, value in kwargs.items():
        if isinstance(value, Tensor) and name not in _TEXT:
            raise ConfigurationError(
                f"{who} text alone, and no {name}: give pictures to generate() or to the model, outside of sessions"
            )
