"""The inputs of one forward call through some blocks, as they travel on the wire; and where a call may be cut.

The client shell makes them, `network/` encodes them, and a server's `BlockSpan` uses them up.

The client asks here before it cuts prompts, batches and replays. Servers ask before they compute a prompt in pieces
between decode steps. A call must stay whole for three reasons:

    chunked_prefill is False     the blocks' caches take whole prompts or single tokens
    the mask                     some positions see later ones, for example the positions of one picture
    the length of the call       some rotary embeddings choose the frequencies of all positions by the largest one:
                                 LongRoPE has two tables, dynamic NTK one for each length (`BlockTraits.arithmetic`)

The last reason is also one against joining: calls that were computed with different tables can't be computed as one.

Models with vision give their text model more than embeddings. These inputs travel as tensors, and become arguments
again on a server. `shell/stack_forward` packs them, `span/block_span` unpacks them:

    masks of several kinds         a dict with a mask for each kind of block (Gemma 3: positions of a picture attend to
                                   each other) → `attention_mask` and `mask_kinds`
    values added between blocks    outputs of inner blocks of the tower, at the positions of pictures (Qwen3-VL: one
                                   list entry for each of the first blocks, Granite: a dict by block) → `deepstack`,
                                   `deepstack_mask` and `deepstack_at`
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import inf
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedConfig

from swarmllm.data_structures import BlockTraits
from swarmllm.errors import ConfigurationError
from swarmllm.models.adapters.block_adapter import BlockAdapter
from swarmllm.models.boundary.device_copies import in_host_memory, on_device
from swarmllm.models.boundary.inner_states import InnerStates

AXES = {
    "position_ids": (-2, -1),
    "token_type_ids": (0, -1),
    "input_ids": (0, 1),
    "inputs_embeds": (0, 1),
    "dropout_seeds": (0, 1),
    "adapter_numbers": (0, 1),
    "per_layer_inputs": (0, 1),
    "deepstack": (0, 1),
    "deepstack_mask": (0, 1),
}
"""Batch and sequence axis of the tensors that travel with the hidden states and the mask."""

SOURCE = ("encoder_hidden_states", "encoder_attention_mask")
"""The encoder's outputs and their mask, for the blocks of a decoder."""

BESIDE = ("inputs_embeds", "encoder_hidden_states", "per_layer_inputs", "deepstack")
"""Tensors that all servers of a route get besides hidden states; their gradients add up."""


@dataclass(kw_only=True, eq=False, slots=True)
class BlockInputs:
    """The inputs of one call; tensors that the caller didn't give are None.

    Never change one in place. The class isn't frozen, because that would cost 10 µs at every hop of every token.
    """

    hidden_states: Tensor
    """Opaque: `[batch, seq, hidden]` for most models, other axes around (batch, seq) for some (`batch_axis`)."""
    batch_size: int
    seq_len: int
    attention_mask: Tensor | None = None
    """`[batch, past + seq]` of 0 and 1, or `[batch, 1, seq, past + seq]`, as the caller gave it."""
    mask_kinds: Tensor | None = None
    """`[kinds]`: the kinds of blocks that the masks of `attention_mask` `[batch, kinds, seq, past + seq]` are for."""
    position_ids: Tensor | None = None
    """`[batch or 1, seq]`, or `[kinds, batch or 1, seq]`."""
    token_type_ids: Tensor | None = None
    """`[batch, seq]`, from older clients. No block needs them: they are part of the embeddings."""
    input_ids: Tensor | None = None
    """`[batch, seq]`; only if the blocks need it (`BlockTraits.extra_inputs`)."""
    inputs_embeds: Tensor | None = None
    """`[batch, seq, embedding]`; only if the blocks need it."""
    encoder_hidden_states: Tensor | None = None
    """`[batch, encoder positions, hidden]`; in a session only with the first positions, as blocks keep it."""
    encoder_attention_mask: Tensor | None = None
    """`[batch, encoder positions]`."""
    per_layer_inputs: Tensor | None = None
    """`[batch, seq, blocks, …]`: Gemma 4's values of each token for each block, in place of `input_ids`: a picture may
    have no token."""
    deepstack: Tensor | None = None
    """`[batch, seq, levels, hidden]`: values added between blocks at the positions of pictures."""
    deepstack_mask: Tensor | None = None
    """`[batch, seq]` or `[batch, seq, …]` of bool: where there are pictures."""
    deepstack_at: Tensor | None = None
    """`[levels]`: the blocks at which each level is added, as the stack numbers them."""
    dropout_seeds: Tensor | None = None
    """`[batch, seq]`; only if there is dropout (`adapters/dropout`)."""
    adapter_numbers: Tensor | None = None
    """`[batch, seq]`; only if the adapter has patches for some tokens (`Patch.number`)."""
    adapter: BlockAdapter | None = None
    """The adapter that the blocks compute with; it travels separately, by handle."""
    trained: tuple[Tensor, ...] = ()
    """Parameters that `adapter.tensors()` are copies of, in their order, on a client; gradients go to them."""
    inner: InnerStates | None = None
    """A request for outputs and attention weights of blocks, and the place for them."""
    whole: bool = False
    """True if the caller, a client's model, looks at outputs of padding; otherwise they needn't be computed."""
    of_texts_alone: bool = False
    """True if it is known that no code looks at outputs of padding."""

    @property
    def num_prefix(self) -> int:
        """Positions before the text whose keys and values come with the adapter."""
        return 0 if self.adapter is None else self.adapter.num_prefix

    @property
    def num_positions(self) -> int:
        """Positions of a batch, of all its rows, that take memory on a server; for limits."""
        return self.batch_size * (self.seq_len + self.num_prefix)

    @property
    def row_tokens(self) -> int:
        """Positions of one row of a batch."""
        return self.seq_len + self.num_prefix

    def has_ones_mask(self, past: int) -> bool:
        """True if a server can make the mask itself: reading it once more costs less than sending it every time."""
        mask, shape = self.attention_mask, (self.batch_size, past + self.seq_len)
        return mask is not None and mask.dtype == torch.int64 and mask.shape == shape and bool(mask.all())

    def looks_ahead(self, past: int) -> bool:
        """True if some positions attend to later ones (for example those of one picture), so that a prompt stays
        whole."""
        mask = self.attention_mask
        if mask is None or mask.ndim == 2:
            return False
        return bool(_shown(mask).triu(past + 1).any())

    def sees_from(self, position: int, count: int) -> bool:
        """True if the mask lets some of the first `count` positions attend to the text from `position` on."""
        mask = self.attention_mask
        return mask is not None and mask.ndim > 2 and bool(_shown(mask)[..., :count, position:].any())

    def tensors(self) -> dict[str, Tensor]:
        """The tensors to encode, by name."""
        values = ((name, getattr(self, name)) for name in TENSOR_NAMES)
        return {name: value for name, value in values if value is not None}

    def source(self) -> dict[str, Tensor]:
        """The fields of `SOURCE` that were given."""
        return {name: tensor for name, tensor in self.source_fields().items() if tensor is not None}

    def source_fields(self) -> dict[str, Any]:
        """All fields of `SOURCE`; None in place of a field that wasn't given."""
        return {name: getattr(self, name) for name in SOURCE}

    @property
    def source_len(self) -> int:
        """Positions of the encoder's outputs; 0: there are none, or they have been given before."""
        return 0 if self.encoder_hidden_states is None else self.encoder_hidden_states.shape[1]

    def without_source(self) -> Self:
        """The same call for blocks that have been given it."""
        if self.encoder_hidden_states is None:
            return self
        return replace(self, encoder_hidden_states=None, encoder_attention_mask=None)

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor], *, batch_size: int, seq_len: int) -> Self:
        """The inverse of `tensors`; unknown names (of newer peers) are ignored."""
        known: dict[str, Any] = {name: tensor for name, tensor in tensors.items() if name in TENSOR_NAMES}
        return cls(batch_size=batch_size, seq_len=seq_len, **known)

    def with_hidden(self, hidden_states: Tensor) -> Self:
        """The same call for the next blocks."""
        return replace(self, hidden_states=hidden_states)

    def with_tensors(self, tensors: dict[str, Tensor]) -> Self:
        """The same call with these tensors instead of its own, by name; other names are ignored."""
        known: dict[str, Any] = {name: tensor for name, tensor in tensors.items() if name in TENSOR_NAMES}
        return replace(self, **known)

    def detached(self) -> Self:
        """The same call outside of autograd's graph."""
        detached = self.from_tensors(
            {name: tensor.detach() for name, tensor in self.tensors().items()},
            batch_size=self.batch_size,
            seq_len=self.seq_len,
        )
        known = {name: getattr(self, name) for name in ("adapter", "inner", "whole", "of_texts_alone")}
        return replace(detached, **known)

    def copied(self) -> Self:
        """The same call with tensors of its own: later changes in place by callers change nothing here."""
        detached = self.detached()
        return detached.with_tensors({name: tensor.clone() for name, tensor in detached.tensors().items()})

    def on_host(self) -> Self:
        """The same call with all tensors in host memory, outside of autograd's graph, ready to be sent.

        It waits for the device here, once, so that the event loop needn't wait later.
        """
        tensors = self.tensors()
        if all(tensor.device.type == "cpu" for tensor in tensors.values()):
            return self
        return self.with_tensors(dict(zip(tensors, in_host_memory(list(tensors.values())), strict=True)))

    def to(self, device: torch.device, dtype: torch.dtype) -> Self:
        """The same call on another device, with floating-point tensors in another dtype (masks keep theirs)."""
        moved: dict[str, Any] = {name: tensor.to(device) for name, tensor in self.tensors().items()}
        for name in ("hidden_states", *BESIDE):
            if name in moved:
                moved[name] = moved[name].to(dtype)
        return replace(self, **moved)

    def rows(self, start: int, end: int, traits: BlockTraits) -> Self:
        """Samples `[start, end)` of the batch."""
        return self._of_rows(end - start, lambda tensor, axis: tensor.narrow(axis, start, end - start), traits)

    def rows_in_order(self, order: Tensor, traits: BlockTraits) -> Self:
        """These samples of the batch; some may come more than once."""
        return self._of_rows(
            len(order), lambda tensor, axis: tensor.index_select(axis, order.to(tensor.device)), traits
        )

    def _of_rows(self, batch_size: int, take: Callable[[Tensor, int], Tensor], traits: BlockTraits) -> Self:
        def taken(tensor: Tensor | None, axis: int) -> Tensor | None:
            if tensor is None or tensor.shape[axis] != self.batch_size:  # [1, seq]: the same for all samples
                return tensor
            return take(tensor, axis)

        beside: dict[str, Any] = {name: taken(getattr(self, name), axis) for name, (axis, _) in AXES.items()}
        beside |= {name: take(tensor, 0) for name, tensor in self.source().items()}
        return replace(
            self,
            hidden_states=take(self.hidden_states, traits.batch_axis),
            batch_size=batch_size,
            attention_mask=taken(self.attention_mask, 0),
            inner=None if self.inner is None else self.inner.fresh(),
            **beside,
        )

    def columns(self, start: int, end: int, past: int, traits: BlockTraits) -> Self:
        """Positions `[start, end)` of this call's sequence, which itself follows `past` positions."""
        count = end - start
        mask = self.attention_mask
        if mask is not None:
            mask = mask[..., : past + end]
            mask = mask[..., start:end, :] if mask.ndim > 2 else mask
        given = {
            name: (tensor, axis) for name, (_, axis) in AXES.items() if (tensor := getattr(self, name)) is not None
        }
        beside: dict[str, Any] = {name: tensor.narrow(axis, start, count) for name, (tensor, axis) in given.items()}
        return replace(
            self,
            hidden_states=self.hidden_states.narrow(traits.batch_axis + 1, start, count),
            seq_len=count,
            attention_mask=mask,
            inner=None if self.inner is None else self.inner.fresh(),
            **beside,
        )

    def cut_to(self, start: int, end: int, traits: BlockTraits) -> Self:
        """Positions `[start, end)` of a batch as a batch of their own, without the positions before them.

        They keep their `position_ids`: without these, blocks would count from 0.
        """
        cut = self.columns(start, end, 0, traits)
        mask, positions = cut.attention_mask, cut.position_ids
        if start and positions is None:
            positions = torch.arange(start, end, device=self.hidden_states.device)[None]
        return replace(cut, attention_mask=None if mask is None else mask[..., start:], position_ids=positions)


def all_on_device(calls: Sequence[BlockInputs], device: torch.device) -> list[BlockInputs]:
    """The same calls with all tensors on that device, by few copies."""
    named = [call.tensors() for call in calls]
    moved = iter(on_device([tensor for one in named for tensor in one.values()], device))
    return [call.with_tensors({name: next(moved) for name in one}) for call, one in zip(calls, named, strict=True)]


_NO_TENSORS = ("batch_size", "seq_len", "adapter", "trained", "inner", "whole", "of_texts_alone")


TENSOR_NAMES = tuple(field.name for field in fields(BlockInputs) if field.name not in _NO_TENSORS)


def _shown(mask: Tensor) -> Tensor:
    """True where a mask of several axes lets a position attend."""
    return mask == 0 if mask.is_floating_point() else mask != 0


def check_mask(mask: Tensor, batch_size: int, seq_len: int, past: int) -> None:
    """Check that a mask has a column for each of the `past` positions and of the call's, no more and no fewer.

    Models pad and cut masks of another width without an error.

    Raises:
        ConfigurationError: it hasn't.
    """
    shape, width = list(mask.shape), past + seq_len
    rows = (batch_size,) if len(shape) == 2 else (1, batch_size)
    if (
        len(shape) not in (2, 3, 4)
        or shape[0] not in rows
        or shape[-1] != width
        or (len(shape) > 2 and shape[-2] != seq_len)
    ):
        raise ConfigurationError(
            f"attention_mask must be [{batch_size}, {width}] or [{batch_size}, 1, {seq_len}, {width}], with a column "
            f"for each position of the text{f', {past} earlier ones included' if past else ''}, not {shape}"
        )


def check_positions(position_ids: Tensor, batch_size: int, seq_len: int) -> None:
    """Check that there is a whole number for each token of the call, on one axis or several.

    Models with vision make positions of a mask for all of the text, and then fail behind a cache.

    Raises:
        ConfigurationError: there isn't.
    """
    if position_ids.is_floating_point() or position_ids.dtype == torch.bool:
        raise ConfigurationError(f"position_ids must be integers, not {position_ids.dtype}: give position_ids.long()")
    shape = list(position_ids.shape)
    if len(shape) not in (2, 3) or shape[-2] not in (1, batch_size) or shape[-1] != seq_len:
        raise ConfigurationError(
            f"position_ids must be [{batch_size}, {seq_len}], one for each token of this call, not {shape}: give "
            "position_ids of these tokens alone (if you gave none, the model has made them of attention_mask)"
        )


def arithmetic(inputs: BlockInputs, past: int, traits: BlockTraits) -> int:
    """A number that is equal for calls with the same frequencies of positions; this call follows `past` positions of
    text."""
    if traits.even_length == inf:
        return 0
    if inputs.position_ids is None:
        return traits.arithmetic(past + inputs.num_prefix + inputs.seq_len)
    return traits.arithmetic(int(inputs.position_ids.max()) + 1)


def uncut(inputs: BlockInputs, past: int, traits: BlockTraits) -> int:
    """Positions of the shortest first piece; after it the call may be cut anywhere. If it is the whole, no cut."""
    if not traits.chunked_prefill or inputs.looks_ahead(past):
        return inputs.seq_len
    if traits.even_length == inf:
        return 1
    by_column = _arithmetics(_lengths(inputs, past).amax(dim=1), traits)
    whole = _arithmetics(_lengths(inputs, past).amax(dim=(1, 2)), traits)
    differs = (by_column != whole[:, None]).any(dim=0).nonzero()
    return min(int(differs[-1]) + 2, inputs.seq_len) if len(differs) else 1


def pieces(inputs: BlockInputs, past: int, traits: BlockTraits, max_tokens: int) -> Iterator[tuple[int, int]]:
    """Columns `[start, end)` of pieces of at most `max_tokens` in all rows, where that is possible."""
    size, length = max(1, max_tokens // inputs.batch_size), inputs.seq_len
    start = 0
    if length > size and (first := uncut(inputs, past, traits)) > 1:
        start = min(length, max(first, size))
        yield 0, start
    if start < length:
        num_pieces = -(-(length - start) // size)
        size = -(-(length - start) // num_pieces)  # all about equally long
    for begin in range(start, length, size):
        yield begin, min(begin + size, length)


def decisive_rows(inputs: BlockInputs, traits: BlockTraits) -> list[int] | None:
    """The rows that decide how all rows of the batch are computed. None: each row alone gives the same results."""
    if traits.even_length == inf or inputs.position_ids is None or inputs.position_ids.shape[-2] == 1:
        return None
    lengths = _lengths(inputs, 0).amax(dim=(0, 2))
    decides = _arithmetics(lengths, traits) == _arithmetics(lengths.max(), traits)
    return None if bool(decides.all()) else decides.nonzero().flatten().tolist()


def _lengths(inputs: BlockInputs, past: int) -> Tensor:
    """`[kinds, rows or 1, seq]`: the length that each position by itself would have."""
    given = inputs.position_ids
    if given is None:
        start = past + inputs.num_prefix + 1
        return torch.arange(start, start + inputs.seq_len)[None, None]
    return given.reshape(-1, *given.shape[-2:]).cpu() + 1


def _arithmetics(lengths: Tensor, traits: BlockTraits) -> Tensor:
    """`BlockTraits.arithmetic` of each."""
    found = -torch.bucketize(lengths, torch.tensor(traits.length_borders, dtype=lengths.dtype))
    beyond = traits.own_length_beyond
    return found if beyond is None else found.where(lengths <= beyond, lengths)


# ---------------------------------------------------------------------- inputs of models with vision

_DEEPSTACK, _MASKS = "deepstack", ("visual_pos_masks", "vision_mask")


@dataclass(frozen=True)
class DeepstackArguments:
    """The two arguments of a text model's forward for values that are added between its blocks."""

    features: str
    mask: str
    by_block: bool
    """True if the features are a dict by block, added before it; False if a list, added after each of the first
    blocks."""

    @classmethod
    def of(cls, stack: nn.Module) -> "DeepstackArguments | None":
        """The arguments that the forward of `stack` takes; None: it takes none."""
        parameters = inspect.signature(stack.forward).parameters
        features = next((name for name in parameters if name.startswith(_DEEPSTACK)), None)
        mask = next((name for name in _MASKS if name in parameters), None)
        if features is None or mask is None:
            return None
        return cls(features, mask, "dict" in str(parameters[features].annotation))

    def pack(self, kwargs: Mapping[str, Any], num_blocks: int) -> dict[str, Tensor]:
        """The tensors to send for these arguments; gradients flow to the arguments.

        Raises:
            ConfigurationError: something would be added after the last block, where no server does it.
        """
        features, mask = kwargs.get(self.features), kwargs.get(self.mask)
        if features is None or mask is None:
            return {}
        levels = features if isinstance(features, dict) else dict(enumerate(features))
        if not levels:
            return {}
        if max(levels) >= num_blocks - (not self.by_block):
            raise ConfigurationError(
                f"this model adds features of pictures after block {max(levels)} of {num_blocks}, where no server can"
            )
        where = mask if mask.ndim == 2 else mask[..., 0]
        first = next(iter(levels.values()))
        whole = first.new_zeros(*where.shape, len(levels), first.shape[-1])
        stacked = torch.stack([level.to(first) for level in levels.values()], dim=1)
        return {
            "deepstack": whole.masked_scatter(where[..., None, None], stacked),
            "deepstack_mask": mask if mask.ndim == 2 else mask[..., :1],
            "deepstack_at": torch.tensor(list(levels)),
        }

    def unpack(self, inputs: BlockInputs) -> dict[str, Any]:
        """The arguments again."""
        if inputs.deepstack is None or inputs.deepstack_mask is None or inputs.deepstack_at is None:
            return {}
        mask = inputs.deepstack_mask
        found = inputs.deepstack[mask if mask.ndim == 2 else mask[..., 0]]
        levels = {int(block): found[:, level] for level, block in enumerate(inputs.deepstack_at)}
        return {self.features: levels if self.by_block else list(levels.values()), self.mask: mask}


def mask_names(config: PreTrainedConfig) -> list[str]:
    """The kinds of blocks that have a mask of their own, as the text model's config names them."""
    return sorted({*(getattr(config, "layer_types", None) or ())})


def pack_masks(masks: Mapping[str, Tensor | None], config: PreTrainedConfig) -> dict[str, Tensor]:
    """The tensors to send for a dict of masks; a kind without a mask hides only later positions.

    Raises:
        ConfigurationError: a mask has another form.
    """
    names = mask_names(config)
    given = {name: mask for name, mask in masks.items() if mask is not None and name in names}
    if any(mask.ndim != 4 or mask.shape[1] != 1 for mask in given.values()):
        raise ConfigurationError("masks by kinds of blocks must be of [batch, 1, seq, past + seq] each")
    if not given:
        return {}
    kinds = torch.tensor([names.index(name) for name in given])
    return {"attention_mask": torch.cat(list(given.values()), dim=1), "mask_kinds": kinds}


def unpack_masks(inputs: BlockInputs, config: PreTrainedConfig, cache: Cache | None) -> Any:
    """The mask as the text model takes it: for each kind of block as wide as the keys that its blocks have."""
    mask = inputs.attention_mask
    if mask is None or mask.ndim != 4:
        return mask
    if mask.dtype == torch.bool and config._attn_implementation == "eager":
        smallest = torch.finfo(inputs.hidden_states.dtype).min
        mask = torch.zeros(mask.shape, dtype=inputs.hidden_states.dtype, device=mask.device).masked_fill(
            ~mask, smallest
        )
    if inputs.mask_kinds is None:
        return mask
    names, types = mask_names(config), list(config.layer_types)
    masks: dict[str, Tensor | None] = dict.fromkeys(names)
    for place, kind in enumerate(inputs.mask_kinds.tolist()):
        one = mask[:, place : place + 1]
        if cache is not None:
            length, offset = cache.get_mask_sizes(inputs.seq_len, types.index(names[kind]))
            one = one[..., offset : offset + length]
        masks[names[kind]] = one
    return masks
