"""The only module in the client's block list: it runs all blocks of the model, wherever they are.

A `Call` says what the blocks are given besides hidden states. `stack_forward` makes it. The proxy adds the hidden
states and hands its `inputs` to the session of the call's cache or, without a cache, to a `BlocksRunner`. `embed()` and
`head()` run something else in place of the blocks (`Call.instead`).
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from swarmllm.data_structures import BlockTraits, Span
from swarmllm.errors import ConfigurationError, LocalProtocolError
from swarmllm.models.boundary.block_inputs import BlockInputs
from swarmllm.models.shell.remote_cache import CacheSession, RemoteCache


class BlocksRunner(Protocol):
    """Runs the blocks without a KV cache, and opens sessions; implemented by the client."""

    def run_blocks(self, inputs: BlockInputs, part: Span | None = None) -> Tensor:
        """The outputs of all blocks, or of the blocks of `part`; differentiable."""
        ...

    def new_cache_session(self, batch_size: int, max_length: int | None) -> CacheSession:
        """A new session of `batch_size` rows; it grows beyond `max_length` positions if need be."""
        ...

    def longest_row(self) -> int:
        """Most positions of one row that servers compute without a session."""
        ...


@dataclass(frozen=True, eq=False)
class Call:
    """One call of the model, as far as this thread or task has got with it."""

    model_mask: Tensor | None = None
    """The mask that the model's forward was given. Models with vision make another one of it for their stack."""
    reads_padding: bool | None = None
    """True: the model's head or loss reads outputs of padding. None: unknown, as its caller may read them."""
    instead: Callable[[Tensor], Tensor] | None = None
    """Runs in place of the blocks."""
    inputs: BlockInputs | None = None
    """The inputs of the blocks, whose hidden states the model's code is computing. None: the stack's forward has not
    begun."""
    cache: RemoteCache | None = None
    hidden_is_callers: bool = False
    """The hidden states may be a tensor of the user, and be changed in place later."""
    used_up: tuple[Any, ...] = ()
    """Lists and dicts to clear when the blocks have run: the blocks have added their contents themselves."""
    played: list[Tensor] = field(default_factory=list)
    """The output of the blocks that ran last, while the model's code goes through them one by one (`playback`)."""
    from_audio: bool = False
    """The hidden states come from audio, so only they tell their number (`with_actual_size`)."""
    hooked: frozenset[int] = frozenset()
    """Boundaries at which users' hooks read hidden states; see `HollowBlocks.hooked`."""

    @property
    def is_played(self) -> bool:
        """True if the model's code goes through the blocks one by one."""
        return self.inputs is not None and (self.inputs.inner is not None or bool(self.hooked))


_call: ContextVar[Call | None] = ContextVar("swarmllm_call", default=None)
"""The call under way in this thread or task. transformers' own code lies between the forwards that make the call and
the block list that runs it, and can't hand it on as an argument."""


def current_call() -> Call:
    """The call under way; an empty one if there is none."""
    return _call.get() or Call()


@contextmanager
def calling(call: Call) -> Iterator[Call]:
    """Within, `call` is under way."""
    token = _call.set(call)
    try:
        yield call
    finally:
        _call.reset(token)


def with_actual_size(
    call: Call, block: nn.Module, hidden: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Call:
    """The call with the size and the mask that the first block is given.

    For encoders of audio, and for encoders that pad their text themselves. Both are unknown before that block.

    Raises:
        ConfigurationError: the mask hides more than padding, or the call has tensors for the unpadded positions.
    """
    assert call.inputs is not None
    if call.inputs.tensors().keys() - {"hidden_states", "attention_mask"}:
        raise ConfigurationError(
            "this encoder pads the text, so its adapters can have neither dropout nor adapter_names: set lora_dropout=0"
        )
    given = inspect.signature(block.forward).bind(*args, **kwargs).arguments
    mask: Tensor | None = given.get("attention_mask")
    if mask is None:
        mask = call.inputs.attention_mask
    else:
        shown = mask if mask.dtype == torch.bool else mask == 0
        if mask.ndim == 2:
            shown = mask != 0 if mask.max() > 0 else mask == 0
        elif not torch.equal(shown, shown[:, :1, :1].expand_as(shown)):
            raise ConfigurationError("the encoder's mask hides more than padding, which servers can't be told")
        else:
            shown = shown[:, 0, 0]
        mask = shown.expand(hidden.shape[0], -1).long()
    batch_size, seq_len = hidden.shape[:2]
    return replace(call, inputs=replace(call.inputs, batch_size=batch_size, seq_len=seq_len, attention_mask=mask))


class BlocksProxy(nn.Module):
    """The only entry of the client's block list: runs all blocks at once."""

    def __init__(self, block: nn.Module, runner: BlocksRunner, traits: BlockTraits, end: int, *, encodes: bool) -> None:
        """`end`: the last block's number plus one; `encodes`: the blocks are those of an encoder that has a decoder."""
        super().__init__()
        # Through __dict__, because none of these is a submodule.
        self.__dict__.update(block=block, runner=runner, traits=traits, end=end, encodes=encodes)
        self.__dict__["first_argument"] = next(iter(inspect.signature(block.forward).parameters))

    def __getattr__(self, name: str) -> Any:  # models ask their blocks for attention_type and the like
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "block" not in self.__dict__:
                raise
            return getattr(self.__dict__["block"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__["block"], name, value)  # it refuses

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden: Tensor = args[0] if args else kwargs[self.first_argument]
        call, num_outputs = current_call(), self.traits.block_output
        if call.inputs is not None and (call.from_audio or (self.encodes and hidden.shape[1] != call.inputs.seq_len)):
            call = with_actual_size(call, self.block, hidden, args, kwargs)
        output = self.run_call(call, hidden)
        return output if num_outputs == 0 else (output, *(None,) * (num_outputs - 1))

    def run_call(self, call: Call, hidden: Tensor, part: Span | None = None) -> Tensor:
        """Run all blocks of a call, or those of `part` after the blocks before it."""
        if call.instead is not None:
            return call.instead(hidden)
        if call.inputs is None:
            raise LocalProtocolError("the blocks were called outside the forward of their model")
        inputs, cache = call.inputs.with_hidden(hidden), call.cache
        if cache is None or cache.deferred:
            output: Tensor = self.runner.run_blocks(inputs, part)
        else:
            output = cache.session.run_step(inputs, part)
        for added in call.used_up:
            added.clear()
        if cache is None:
            return output
        cache.has_graph |= hidden.requires_grad or any(tensor.requires_grad for tensor in inputs.trained)
        if cache.deferred:
            cache.deferred = part is not None and part.end < self.end
            cache.session.remember(_remembered(inputs, call.hidden_is_callers or bool(call.hooked)), part)
        elif cache.has_graph and torch.is_grad_enabled():
            output = _no_gradient(output)
            if inputs.inner is not None:
                inputs.inner.found = {idx: _no_gradient(one) for idx, one in inputs.inner.found.items()}
        return output


def _remembered(inputs: BlockInputs, copy_hidden: bool) -> BlockInputs:
    """The inputs without a graph, with copies of all tensors that users may change in place later."""
    copies = {
        name: tensor.detach().clone()
        for name, tensor in inputs.tensors().items()
        if copy_hidden or name != "hidden_states"
    }
    return replace(inputs.detached().with_tensors(copies), inner=None)


def _no_gradient(output: Tensor) -> Tensor:
    refusing: Tensor = _NoGradient.apply(output, torch.zeros((), requires_grad=True))  # type: ignore[no-untyped-call]
    return refusing


class _NoGradient(torch.autograd.Function):
    """Refuse a backward through a step with a remote cache, which would silently end there."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, *_: Tensor) -> Tensor:
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        raise ConfigurationError(
            "gradients don't flow through a KV cache on servers: call the model with the whole text and without "
            "past_key_values, best with use_cache=False"
        )
