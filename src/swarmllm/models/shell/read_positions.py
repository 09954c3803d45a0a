"""Whether the head of a model, or its loss, looks at outputs of padding: then a batch can't do without them.

Mostly it doesn't. But a loss counts labels of padding unless they are -100, a head for classes may take what it has for
the last token, and answers are looked for everywhere. The model's forward, which `loading` gives a subclass for it,
notes it before the stack runs; `blocks_proxy` says it to whoever runs the blocks.
"""

import functools
import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from swarmllm.models.architecture import decoder_stack, is_encoder
from swarmllm.models.shell.blocks_proxy import forward_of_model

IGNORED = -100
"""The label that no loss of transformers counts."""


def adopt_head(model: PreTrainedModel) -> None:
    """Give the model a subclass with our forward, if it has a head."""
    cls = type(model)
    if decoder_stack(model) is model:
        return
    positional = [parameter for parameter in inspect.signature(cls.forward).parameters if parameter != "self"]

    @functools.wraps(cls.forward)
    def forward(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(positional, args, strict=False)), **kwargs}
        mask = given.get("attention_mask")
        mask = mask if isinstance(mask, Tensor) and mask.ndim == 2 else None
        with forward_of_model(mask, reads_padding=reads_padding(self, given)):
            return cls.forward(self, *args, **kwargs)

    model.__class__ = type(cls.__name__, (cls,), {"forward": forward, "__module__": cls.__module__})


def reads_padding(model: PreTrainedModel, given: dict[str, Any]) -> bool | None:
    """Whether a forward of the model with these arguments looks at positions that the mask `[batch, seq]` hides.

    None: it doesn't, but has no loss either, so whoever gets its outputs may.
    """
    mask, labels, task = given.get("attention_mask"), given.get("labels"), type(model).__name__
    if task.endswith("ForQuestionAnswering"):
        return True
    if not isinstance(mask, Tensor) or mask.ndim != 2:
        return False
    if task.endswith("ForSequenceClassification"):
        read = _read_by_head_for_classes(model, given.get("input_ids"), mask)
    elif labels is None and isinstance(kept := given.get("logits_to_keep"), int) and kept > 0:  # as of generate()
        read = torch.zeros_like(mask, dtype=torch.bool)
        read[:, -kept:] = True
    elif labels is None:
        return None
    else:
        read = labels != IGNORED
        read[:, :-1] |= labels[:, 1:] != IGNORED  # what language models predict a label from
    if read.ndim != 2 or len(read) != len(mask) or read.shape[1] > mask.shape[1]:
        return True  # a mistake, or unknown
    hidden = mask[:, mask.shape[1] - read.shape[1] :].to(read.device) == 0  # of a prefix, nothing comes back
    return bool((read & hidden).any())


def _read_by_head_for_classes(model: PreTrainedModel, ids: Tensor | None, mask: Tensor) -> Tensor:
    """True at one position of each row: the first of encoders, what decoders take for the text's last one."""
    pad = model.config.get_text_config().pad_token_id
    is_text = torch.ones_like(mask) if ids is None or pad is None else ids != pad
    last = (torch.arange(is_text.shape[-1], device=is_text.device) * is_text).argmax(dim=-1, keepdim=True)
    position = torch.zeros_like(last) if is_encoder(model.config) else last
    return torch.zeros_like(is_text, dtype=torch.bool).scatter_(-1, position, True)
