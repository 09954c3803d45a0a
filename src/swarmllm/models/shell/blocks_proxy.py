"""The only module in the client's block list: it hands the hidden states to a `BlocksRunner`.

What the blocks need besides, `stack_forward` notes before (`StackCall`). Where something else than the blocks is to be
run (`embed`, `head`), it takes their place by `detour`.
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
from swarmllm.models.adapters.block_adapter import BlockAdapter
from swarmllm.models.boundary.block_inputs import BlockInputs
from swarmllm.models.boundary.inner_states import InnerStates
from swarmllm.models.shell.remote_cache import CacheSession, RemoteCache


class BlocksRunner(Protocol):
    """Runs the blocks; implemented by the client."""

    def run_blocks(self, inputs: BlockInputs, cache: RemoteCache | None, part: Span | None = None) -> Tensor:
        """All blocks on `inputs`: with a cache, its session advances by `inputs.seq_len`; without, differentiable.

        `part`: only these; then others behind them will follow, up to the last one.
        """
        ...

    def new_cache_session(self, batch_size: int, max_length: int | None) -> CacheSession:
        """Begin a session for `batch_size` rows; it grows beyond `max_length` positions if need be."""
        ...

    def longest_row(self) -> int:
        """Positions that one row of a batch without a cache may have."""
        ...


@dataclass(frozen=True)
class StackCall:
    """The arguments of one forward of the stack; the proxy reads them in the middle of it."""

    batch_size: int
    seq_len: int
    tensors: dict[str, Tensor]
    cache: RemoteCache | None
    has_embeds: bool
    """Whether the hidden states may be a tensor of the caller's own."""
    adapter: BlockAdapter | None
    trained: tuple[Tensor, ...]
    inner: InnerStates | None = None
    """What the caller wants to see of the inside of the blocks."""
    used_up: tuple[Any, ...] = ()
    """What the blocks add themselves, so that the model's own forward must find nothing of it behind them."""
    played: list[Tensor] = field(default_factory=list)
    """The result of all blocks, or of a piece of them, once there is one, where they are played back one by one."""
    hears: bool = False
    """Whether hidden states come of sound, so that only they show how many there are (`heard`)."""
    hooked: frozenset[int] = frozenset()
    """Where hidden states pass through hooks of users; see `HollowBlocks.hooked`."""

    @property
    def is_played(self) -> bool:
        """Whether the model meets its blocks one by one."""
        return self.inner is not None or bool(self.hooked)


_call: ContextVar[StackCall | None] = ContextVar("swarmllm_call", default=None)
_reads_padding: ContextVar[bool | None] = ContextVar("swarmllm_reads_padding", default=None)
_given_mask: ContextVar[Tensor | None] = ContextVar("swarmllm_given_mask", default=None)
_detour: ContextVar[Callable[[Tensor], Tensor] | None] = ContextVar("swarmllm_detour", default=None)


@contextmanager
def calling(call: StackCall) -> Iterator[None]:
    """Within, the blocks are run for that call."""
    token = _call.set(call)
    try:
        yield
    finally:
        _call.reset(token)


def current_call() -> StackCall | None:
    """The call for which blocks are run now; None: there is none, or something else runs instead of them."""
    return None if is_detoured() else _call.get()


@contextmanager
def forward_of_model(mask: Tensor | None, *, reads_padding: bool | None) -> Iterator[None]:
    """Within, the model's forward runs with that mask; outputs of padding are wanted as well if it `reads_padding`.

    None: nobody knows, because whoever gets the model's outputs may look at them.
    """
    tokens = _given_mask.set(mask), _reads_padding.set(reads_padding)
    try:
        yield
    finally:
        _given_mask.reset(tokens[0])
        _reads_padding.reset(tokens[1])


def given_mask() -> Tensor | None:
    """The mask that the forward of the whole model was given; models that see make others of it for their stack."""
    return _given_mask.get()


@contextmanager
def detour(instead: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Within, this runs instead of the blocks."""
    token = _detour.set(instead)
    try:
        yield
    finally:
        _detour.reset(token)


def is_detoured() -> bool:
    """Whether something else runs instead of the blocks."""
    return _detour.get() is not None


def heard(
    call: StackCall, block: nn.Module, hidden: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> StackCall:
    """The call with what the first block is given, where the model hears or its encoder pads the text: servers make the
    same of a mask of padding.

    Raises:
        ConfigurationError: it is more than padding that is hidden, or something is known of the text's positions only.
    """
    if call.tensors.keys() - {"attention_mask"}:
        raise ConfigurationError(
            "this encoder pads the text, so its adapters can have neither dropout nor adapter_names: set lora_dropout=0"
        )
    given = inspect.signature(block.forward).bind(*args, **kwargs).arguments
    mask: Tensor | None = given.get("attention_mask")
    tensors = dict(call.tensors)
    if mask is not None:
        shown = mask if mask.dtype == torch.bool else mask == 0
        if mask.ndim == 2:
            shown = mask != 0 if mask.max() > 0 else mask == 0
        elif not torch.equal(shown, shown[:, :1, :1].expand_as(shown)):
            raise ConfigurationError("the encoder's mask hides more than padding, which servers can't be told")
        else:
            shown = shown[:, 0, 0]
        tensors["attention_mask"] = shown.expand(hidden.shape[0], -1).long()
    return replace(call, batch_size=hidden.shape[0], seq_len=hidden.shape[1], tensors=tensors, hears=False)


class BlocksProxy(nn.Module):
    """The only entry of the client's block list: all blocks of the model at once."""

    def __init__(self, block: nn.Module, runner: BlocksRunner, traits: BlockTraits, end: int, *, encodes: bool) -> None:
        """`end`: one more than the last block's number; `encodes`: the blocks are an encoder's beside a decoder."""
        super().__init__()
        # through __dict__: none of these is a submodule
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
        setattr(self.__dict__["block"], name, value)  # which refuses

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden: Tensor = args[0] if args else kwargs[self.first_argument]
        traits: BlockTraits = self.traits
        call = current_call()
        padded = call is not None and self.encodes and hidden.shape[1] != call.seq_len
        if call is not None and (call.hears or padded):
            with calling(heard(call, self.block, hidden, args, kwargs)):
                output = self.run(hidden)
        else:
            output = self.run(hidden)
        return output if traits.block_output == 0 else (output, *(None,) * (traits.block_output - 1))

    def run(self, hidden: Tensor, part: Span | None = None) -> Tensor:
        """All blocks, or a part of them after the others, for the forward of the model that is under way."""
        if (instead := _detour.get()) is not None:
            return instead(hidden)
        call = _call.get()
        if call is None:
            raise LocalProtocolError("the blocks were called outside the forward of their model")
        inputs = BlockInputs(
            hidden_states=hidden,
            batch_size=call.batch_size,
            seq_len=call.seq_len,
            adapter=call.adapter,
            trained=call.trained,
            inner=call.inner,
            whole=_reads_padding.get() is True or bool(call.hooked),
            of_texts_alone=_reads_padding.get() is False,
            **call.tensors,
        )
        cache = call.cache
        output: Tensor = self.runner.run_blocks(inputs, None if cache is None or cache.deferred else cache, part)
        for added in call.used_up:
            added.clear()
        if cache is None:
            return output
        cache.has_graph |= hidden.requires_grad or any(tensor.requires_grad for tensor in call.trained)
        if cache.deferred:
            cache.deferred = part is not None and part.end < self.end
            cache.session.remember(_remembered(inputs, call.has_embeds or bool(call.hooked)), part)
        elif cache.has_graph and torch.is_grad_enabled():
            output = _no_gradient(output)
            if inputs.inner is not None:
                inputs.inner.found = {idx: _no_gradient(one) for idx, one in inputs.inner.found.items()}
        return output


def _remembered(inputs: BlockInputs, has_embeds: bool) -> BlockInputs:
    """Outside of the graph, and with copies of what callers may change in place later."""
    copies = {
        name: tensor.detach().clone()
        for name, tensor in inputs.tensors().items()
        if has_embeds or name != "hidden_states"
    }
    return replace(inputs.detached().with_tensors(copies), inner=None)


def _no_gradient(output: Tensor) -> Tensor:
    refusing: Tensor = _NoGradient.apply(output, torch.zeros((), requires_grad=True))  # type: ignore[no-untyped-call]
    return refusing


class _NoGradient(torch.autograd.Function):
    """The result of a step with a remote cache: a backward through it is refused instead of silently cut off."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, *_: Tensor) -> Tensor:
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        raise ConfigurationError(
            "gradients don't flow through a KV cache on servers: call the model with the whole text and without "
            "past_key_values, best with use_cache=False"
        )
