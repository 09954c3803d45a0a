"""What passes between blocks, for those who look at it: the model's own loop over blocks, played back.

Which entries a model returns, before or after its final norm, is decided by its own forward: older ones note hidden
states in their loop over the blocks, newer ones by hooks on the blocks' classes. So a call that wants them meets as
many blocks as a local one would: the first runs all blocks elsewhere, and each returns what its block has returned
there (`boundary/inner_states`). Between them, the model's code does what it always does. Where blocks have hooks
(`block_hooks`), the blocks run piece by piece: the first of each piece runs it, and the last one returns its result.

    hidden states   what each block returns, or what the model's code makes of it
    attentions      of blocks whose hooks collect them: put where those would have; of others: returned beside

Made by `hollow_blocks`, shown to the model by `blocks_proxy`'s current call.
"""

from functools import cache
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils.output_capturing import (
    _CAN_RECORD_REGISTRY,
    _active_collector,
    resolve_hidden_states_indices,
    selected_hidden_states,
)

from swarmllm.data_structures import Span
from swarmllm.errors import ConfigurationError, LocalProtocolError
from swarmllm.models.architecture import text_config
from swarmllm.models.boundary.inner_states import InnerStates
from swarmllm.models.shell.block_hooks import share_hooks
from swarmllm.models.shell.blocks_proxy import BlocksProxy, current_call
from swarmllm.models.shell.hollow_modules import HollowModule


class _Playback(nn.Module):
    """Mixed into the class of a block, for hooks that look for that class."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        proxy: BlocksProxy = self.__dict__["proxy"]
        block_idx: int = self.__dict__["block_idx"]
        call = current_call()
        if call is None or not call.is_played:
            raise LocalProtocolError("blocks were played back outside the forward of their model")
        given: Tensor = args[0] if args else kwargs[proxy.first_argument]
        hidden = given
        num_blocks, first = self.__dict__["num_blocks"], self.__dict__["first"]
        start = max([0, *(bound for bound in call.hooked if bound <= block_idx)])
        end = min([num_blocks, *(bound for bound in call.hooked if bound > block_idx)])
        if block_idx == start:
            part = None if end - start == num_blocks else Span(first + start, first + end)
            call.played[:] = [proxy.run(given, part)]
        if block_idx == end - 1:
            hidden = call.played[0]
        elif call.inner is not None and block_idx in call.inner.outputs:
            hidden = call.inner.found[block_idx]
        for inside in self.children():
            inside(given, hidden)
        return _as_returned(hidden, call.inner, block_idx, proxy.traits.block_output)

    def __getattr__(self, name: str) -> Any:  # models ask their blocks for attention_type and the like
        if "like" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.__dict__["like"], name)


class _Inside(_Playback):
    """A block within a block, as in Zamba: it ends what the outer one returns, and transformers' hooks are here."""

    def forward(self, given: Tensor, hidden: Tensor) -> Tensor:
        return hidden


def _as_returned(hidden: Tensor, inner: InnerStates | None, block_idx: int, block_output: int) -> Any:
    """What the block has returned; what it has put elsewhere is put there."""
    beside: dict[int, Tensor] = {}
    for _, place, weights in inner.maps.get(block_idx, ()) if inner is not None and inner.attentions else ():
        if place:
            beside[place] = weights
        elif (collector := _active_collector.get()) is not None and "attentions" in collector:
            collector["attentions"].append(weights)
    length = max(block_output, 1 + max(beside, default=0))
    if not beside and block_output == 0:
        return hidden
    return (hidden, *(beside.get(place) for place in range(1, length)))


@cache
def _playback_class(kind: Any, cls: Any) -> Any:
    return type(cls.__name__, (kind, cls), {"__module__": cls.__module__})


def _stand_in(kind: Any, like: nn.Module) -> nn.Module:
    bare: Any = next(cls for cls in type(like).__mro__ if not issubclass(cls, HollowModule))
    found: nn.Module = object.__new__(_playback_class(kind, bare))
    nn.Module.__init__(found)
    found.__dict__["like"] = like
    return found


def playback(proxy: BlocksProxy, block_idx: int, like: nn.Module, num_blocks: int, first: int) -> nn.Module:
    """A stand-in for one block of a stack, whose looks and hooks are those of `like`.

    `first` is the number that the first block of the stack has in the whole model.
    """
    found = _stand_in(_Playback, like)
    found.__dict__.update(proxy=proxy, block_idx=block_idx, num_blocks=num_blocks, first=first)
    share_hooks(found, like)
    for name, inside in like.named_children():
        if isinstance(inside, GradientCheckpointingLayer):
            found._modules[name] = _stand_in(_Inside, inside)
    return found


# ---------------------------------------------------------------------- what is wanted


def wanted_inner(stack: PreTrainedModel, config: PreTrainedConfig, kwargs: dict[str, Any]) -> InnerStates | None:
    """What the caller of the stack's forward wants to see of the inside; None: nothing.

    Raises:
        ConfigurationError: it can't be had.
    """
    hidden, attentions, routers = (
        wanted if (wanted := kwargs.get(name)) is not None else getattr(config, name, False)
        for name in ("output_hidden_states", "output_attentions", "output_router_logits")
    )
    if routers:
        raise ConfigurationError(
            "output_router_logits is not available: the blocks run on the servers, which return hidden states"
        )
    if attentions and (used := getattr(config, "_attn_implementation", None)) != "eager":
        raise ConfigurationError(
            f"output_attentions needs eager attention, and this model is loaded with {used}: give from_pretrained() "
            'attn_implementation="eager"'
        )
    if not hidden and not attentions:
        return None
    settings = text_config(config)
    num_blocks = int(settings.num_hidden_layers)
    outputs = _wanted_outputs(stack, hidden, num_blocks) if hidden else ()
    num_heads = int(getattr(settings, "num_attention_heads", None) or 1)
    return InnerStates(outputs, attentions=bool(attentions), num_heads=num_heads)


def _wanted_outputs(stack: PreTrainedModel, hidden: Any, num_blocks: int) -> set[int]:
    """Blocks whose outputs the model's code needs to return what is wanted; the last one's come anyway."""
    every = set(range(num_blocks - 1))
    selected = selected_hidden_states(hidden)
    kind = _CAN_RECORD_REGISTRY.get(stack).get("hidden_states")
    if selected is None or not isinstance(kind, type):
        return every
    # As many as blocks, and what enters the first one: entry k is what block k - 1 returns.
    return {idx - 1 for idx in resolve_hidden_states_indices(stack, selected)} & every
