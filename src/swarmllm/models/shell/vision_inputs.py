"""What a model that sees gives its text model besides embeddings: checked here, and made ready to travel.

Its tower and projector run in the client; the text model's forward is then given embeddings, and more where the
positions of a picture see each other, or inner outputs of the tower are added between blocks (`boundary/pictures`).
Masks that the text model would make itself are left to the servers. Called by `stack_forward`.
"""

from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.masking_utils import create_masks_for_generate

from swarmllm.errors import ConfigurationError
from swarmllm.models.boundary.pictures import DeepstackArguments, pack_masks
from swarmllm.models.shell.blocks_proxy import given_mask
from swarmllm.models.shell.remote_cache import RemoteCache

_TRAVELS = frozenset(
    (
        *("input_ids", "inputs_embeds", "attention_mask", "position_ids", "token_type_ids", "per_layer_inputs"),
        *("cache_position", "labels"),
    )
)
"""Tensors that servers are given or know themselves, and labels, which are passed on to stacks that don't read them."""


_OFFSETS = "rope_deltas"
"""Under this name models with positions of several axes keep by how much those of the last text's pictures are behind
the number of its tokens, for the next call that continues it."""
_KEY = "swarm_offsets_key"
_offsets: ContextVar[Mapping[object, Any]] = ContextVar("swarmllm_offsets", default=MappingProxyType({}))
"""By the module's `_KEY`, in each thread or task: texts are written at the same time."""


@dataclass(frozen=True, eq=False)
class Seen:
    """The arguments of a text model's forward as far as they have their usual forms, and what travels beside them."""

    kwargs: dict[str, Any]
    tensors: dict[str, Tensor] = field(default_factory=dict)
    used_up: tuple[Any, ...] = ()
    """Lists and dicts that have to be empty once the blocks have run."""


def seen_by(stack: PreTrainedModel, kwargs: dict[str, Any], given: Tensor, cache: RemoteCache | None) -> Seen:
    """Make everything ready to travel; what `kwargs` has for use between blocks is replaced by a copy that ends empty.

    Raises:
        ConfigurationError: there is something among them that can't be transported.
    """
    deepstack = DeepstackArguments.of(stack)
    own = set() if deepstack is None else {deepstack.features, deepstack.mask}
    for name, value in kwargs.items():
        if name not in _TRAVELS | own and any(True for _ in _tensors(value)):
            raise ConfigurationError(
                f"{type(stack).__name__} is given {name} besides embeddings, which servers don't take: run this model "
                "locally, or without what it sees"
            )
    tensors: dict[str, Tensor] = {}
    used_up: list[Any] = []
    if deepstack is not None and (features := kwargs.get(deepstack.features)) is not None:
        tensors |= deepstack.pack(kwargs, stack.config.num_hidden_layers)
        kwargs[deepstack.features] = dict(features) if isinstance(features, dict) else list(features)
        used_up.append(kwargs[deepstack.features])
    usual = dict(kwargs)
    mask = kwargs.get("attention_mask")
    if isinstance(mask, dict) or (isinstance(mask, Tensor) and mask.ndim == 4):
        usual["attention_mask"] = None
        if _is_usual(stack, mask, kwargs, given, cache):
            usual["attention_mask"] = given_mask()
        else:
            tensors |= pack_masks(mask, stack.config) if isinstance(mask, dict) else {"attention_mask": mask}
    return Seen(usual, tensors, tuple(used_up))


def keep_offsets_apart(model: PreTrainedModel) -> None:
    """Give each thread or task its own offsets of positions, which code of models that see keeps in its modules."""
    for part in model.modules():
        if _OFFSETS in vars(part):
            del vars(part)[_OFFSETS]
            vars(part)[_KEY] = object()
            cls = type(part)
            members = {_OFFSETS: property(_get_offsets, _set_offsets), "__module__": cls.__module__}
            part.__class__ = type(cls.__name__, (cls,), members)


def forget_offsets(model: PreTrainedModel) -> None:
    """What follows goes on with a text that has no pictures."""
    for part in model.modules():
        if _KEY in vars(part):
            _set_offsets(part, None)


def _get_offsets(part: Any) -> Any:
    return _offsets.get().get(vars(part)[_KEY])


def _set_offsets(part: Any, value: Any) -> None:
    _offsets.set({**_offsets.get(), vars(part)[_KEY]: value})


def _is_usual(
    stack: PreTrainedModel, mask: Any, kwargs: dict[str, Any], given: Tensor, cache: RemoteCache | None
) -> bool:
    """Whether the text model would make the same of the mask that the whole model was given."""
    embeds = kwargs.get("inputs_embeds")
    if embeds is None:
        embeds = given[..., None].to(stack.dtype)
    made = create_masks_for_generate(stack.config, embeds, given_mask(), cache, position_ids=None)
    if not isinstance(mask, dict):
        return isinstance(made, Tensor) and torch.equal(made, mask)
    if not isinstance(made, dict):
        made = dict.fromkeys(mask, made)
    return all(_same(mask[name], made.get(name)) for name in mask)


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.dtype == other.dtype and torch.equal(one, other)


def _tensors(value: Any) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _tensors(part)
