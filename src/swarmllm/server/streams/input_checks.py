"""Check that tensors are what their header says, and that no index in them is outside its table.

Blocks broadcast shapes that fit by chance, so a few bytes too many could make them allocate gigabytes. A mask of
another width than the text's can't be cut, so all of a prompt would run at once. An index outside its table ends a
GPU's whole context. Called by `connection` before anything is queued.
"""

import asyncio
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TypeVar

import torch
from torch import Tensor

from swarmllm.errors import CorruptActivationsError, RemoteProtocolError, SessionLengthExceededError
from swarmllm.models.adapters.block_adapter import BlockAdapter, checked
from swarmllm.models.adapters.dropout import SEEDS
from swarmllm.models.architecture import text_config
from swarmllm.models.boundary.block_inputs import BlockInputs, mask_names
from swarmllm.models.span.block_span import BlockSpan
from swarmllm.models.span.trials import random_inputs
from swarmllm.network.wire.compression import THREAD_BYTES
from swarmllm.network.wire.frames import Message
from swarmllm.network.wire.messages import AdapterHeader, BatchHeader, StepHeader
from swarmllm.network.wire.tensor_codec import decode_tensors, decompressed_bytes
from swarmllm.server.peers.pushes import Pushed

T = TypeVar("T")

NOTHING: Mapping[str, Tensor] = MappingProxyType({})
MAX_NUMBERS = 1 << 16
"""Largest number of adapters, as in `Patch`."""
MAX_POSITION_KINDS = 8
"""Most kinds of `position_ids`; 3 or 4 in today's models with several."""


async def off_loop(read: Callable[[], T], message: Message) -> T:
    """Run `read`, which decodes the message's tensors; in a thread if it would block the event loop too long."""
    num_bytes = decompressed_bytes(message.header.get("tensors"), len(message.payload))
    return read() if num_bytes < THREAD_BYTES else await asyncio.to_thread(read)


class InputChecks:
    """Checks of the inputs of these blocks."""

    def __init__(self, blocks: BlockSpan) -> None:
        """Call it in the device thread: it runs the code that the model runs before its blocks."""
        hidden = random_inputs(blocks, 1).hidden_states
        self._blocks = blocks
        self._sample_shape = tuple(hidden.shape)
        self.hidden_bytes = hidden.nbytes
        """Bytes of one position's hidden states."""

    def read(
        self, header: StepHeader | BatchHeader, message: Message, pushed: Mapping[str, Tensor] = NOTHING
    ) -> tuple[BlockInputs, Tensor | None]:
        """Decode the message's tensors: the inputs, with those in `pushed`, and the gradient of the outputs if there is
        one.

        Raises:
            RemoteProtocolError: they are not what the header says.
        """
        tensors = _with_pushed(header, message, pushed)
        grad_outputs = tensors.pop("grad_outputs", None)
        batch, seq = header.batch_size, header.seq_len
        hidden = self._hidden_shape(batch, seq)
        if "hidden_states" not in tensors:
            raise RemoteProtocolError("hidden_states are missing")
        _check_floats("hidden_states", tensors["hidden_states"], hidden)
        if grad_outputs is not None:
            _check_floats("grad_outputs", grad_outputs, hidden)
        inputs = BlockInputs.from_tensors(tensors, batch_size=batch, seq_len=seq)
        if inputs.inputs_embeds is not None:
            _check_floats("inputs_embeds", inputs.inputs_embeds, (batch, seq, self._blocks.embedding_dim))
        if inputs.attention_mask is not None:
            past = header.position if isinstance(header, StepHeader) else 0
            _check_mask(inputs.attention_mask, batch, seq, past)
        self._check_encoder_outputs(inputs, header)
        self._check_pictures(inputs)
        _check_ids("input_ids", inputs.input_ids, batch, seq, self._blocks.vocab_size)
        _check_ids("token_type_ids", inputs.token_type_ids, batch, seq, self._blocks.num_token_types)
        _check_ids("dropout_seeds", inputs.dropout_seeds, batch, seq, SEEDS)
        _check_ids("adapter_numbers", inputs.adapter_numbers, batch, seq, MAX_NUMBERS)
        _check_positions(inputs.position_ids, batch, seq, self._blocks.table_positions)
        return inputs, grad_outputs

    def _check_pictures(self, inputs: BlockInputs) -> None:
        """Check the inputs of vision models: masks by kind of block, and tensors that are added between blocks."""
        kinds, mask = inputs.mask_kinds, inputs.attention_mask
        if kinds is not None:
            limit = len(mask_names(self._blocks.stack.config))
            if mask is None or mask.ndim != 4 or kinds.shape != mask.shape[1:2] or len(kinds) > limit:
                raise RemoteProtocolError("mask_kinds must name the kind of each mask of attention_mask")
            _check_indices("mask_kinds", kinds, limit)
        self._check_per_layer(inputs)
        given = (inputs.deepstack, inputs.deepstack_mask, inputs.deepstack_at)
        if all(one is None for one in given):
            return
        deepstack, places, levels = given
        batch, seq, width = inputs.batch_size, inputs.seq_len, self._sample_shape[-1]
        if self._blocks.deepstack is None or deepstack is None or places is None or levels is None or levels.ndim != 1:
            raise RemoteProtocolError("these blocks take no deepstack, or a part of it is missing")
        _check_indices("deepstack_at", levels, self._blocks.num_blocks)
        _check_floats("deepstack", deepstack, (batch, seq, len(levels), width))
        if places.dtype != torch.bool or tuple(places.shape) not in ((batch, seq), (batch, seq, 1)):
            raise RemoteProtocolError(f"deepstack_mask must be bools of shape {[batch, seq]}, got {list(places.shape)}")

    def _check_per_layer(self, inputs: BlockInputs) -> None:
        if (found := inputs.per_layer_inputs) is None:
            return
        config = text_config(self._blocks.stack.config)
        width = getattr(config, "hidden_size_per_layer_input", None)
        if not width:
            raise RemoteProtocolError("these blocks take no per_layer_inputs")
        shape = (inputs.batch_size, inputs.seq_len, self._blocks.num_blocks, width)
        _check_floats("per_layer_inputs", found, shape)

    def _check_encoder_outputs(self, inputs: BlockInputs, header: StepHeader | BatchHeader) -> None:
        """Check encoder outputs: they come with the first positions of a text, and with each request without a
        session."""
        width, hidden, mask = self._blocks.source_dim, inputs.encoder_hidden_states, inputs.encoder_attention_mask
        is_wanted = width > 0 and not (isinstance(header, StepHeader) and header.position)
        if (hidden is not None) != is_wanted or (mask is not None and not is_wanted):
            raise RemoteProtocolError(
                f"encoder_hidden_states {'are missing' if is_wanted else 'must be left out'}: a decoder takes them "
                "with the first step of a session and with each request without a session"
            )
        if hidden is not None:
            _check_floats("encoder_hidden_states", hidden, (inputs.batch_size, max(1, inputs.source_len), width))
        if mask is not None and not self._blocks.masks_source:
            raise RemoteProtocolError("these blocks attend to all encoder outputs: leave encoder_attention_mask out")
        if mask is not None and (mask.shape != (inputs.batch_size, inputs.source_len) or mask.is_floating_point()):
            raise RemoteProtocolError(f"encoder_attention_mask must be integers, as many as positions: {mask.shape}")

    def check_length(self, num_positions: int) -> None:
        """Check the length of a request's rows, with the adapter's prefix.

        Raises:
            SessionLengthExceededError: the model's table of positions is shorter.
        """
        longest = self._blocks.longest_text
        if longest is not None and num_positions > longest:
            raise SessionLengthExceededError(f"this model has {longest} positions, {num_positions} are asked for")

    def read_gradient(self, header: BatchHeader, message: Message, pushed: Mapping[str, Tensor] = NOTHING) -> Tensor:
        """Decode the gradient of the outputs, which comes alone if the forward was kept.

        Raises:
            RemoteProtocolError: it isn't there, or isn't what the header says.
        """
        tensors = _with_pushed(header, message, pushed)
        if tensors.keys() != {"grad_outputs"}:
            raise RemoteProtocolError("BACKWARD of a kept forward comes with grad_outputs alone")
        _check_floats("grad_outputs", tensors["grad_outputs"], self._hidden_shape(header.batch_size, header.seq_len))
        return tensors["grad_outputs"]

    def read_pushed(self, header: BatchHeader, name: str, pushed: Pushed, sender: str) -> dict[str, Tensor]:
        """Decode the tensor of this name that the server `sender` has pushed for a request.

        Raises:
            CorruptActivationsError: it is another tensor, or can't be right.
        """
        payload = pushed.message.payload
        try:
            tensors = decode_tensors(pushed.header.tensors, payload, max_bytes=len(payload))
            if tensors.keys() != {name}:
                raise RemoteProtocolError(f"{name} alone should have come")
            _check_floats(name, tensors[name], self._hidden_shape(header.batch_size, header.seq_len))
        except RemoteProtocolError as error:  # the client gets the error, and is not the sender
            raise CorruptActivationsError(
                f"a server passed on another tensor than the client asked for: {error}", sender
            ) from None
        return tensors

    def read_adapter(self, header: AdapterHeader, message: Message) -> BlockAdapter:
        """Decode the message's adapter, on the blocks' device.

        Raises:
            RemoteProtocolError: it doesn't fit the blocks.
        """
        tensors = decode_tensors(header.tensors, message.payload, max_bytes=len(message.payload))
        if tensors.keys() != {"values"}:
            raise RemoteProtocolError("an adapter comes as one tensor named values")
        values = tensors["values"].to(self._blocks.device)
        plain = len(self._sample_shape) == 3 and self._blocks.traits.batch_axis == 0
        hidden_size = self._sample_shape[-1] if plain else None
        blocks = self._blocks
        return checked(header.patches, values, blocks.slots, hidden_size, blocks.cache_sizes.key_value_shapes)

    def _hidden_shape(self, batch: int, seq: int) -> tuple[int, ...]:
        axis = self._blocks.traits.batch_axis
        return (*self._sample_shape[:axis], batch, seq, *self._sample_shape[axis + 2 :])


def _with_pushed(header: StepHeader | BatchHeader, message: Message, pushed: Mapping[str, Tensor]) -> dict[str, Tensor]:
    tensors = decode_tensors(header.tensors, message.payload, max_bytes=len(message.payload))
    if twice := tensors.keys() & pushed.keys():
        raise RemoteProtocolError(f"{min(twice)} come from another server, so they can't come with the request too")
    return {**tensors, **pushed}


def _check_floats(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape or not tensor.is_floating_point():
        raise RemoteProtocolError(
            f"{name} must be floats of shape {list(shape)}, got {tensor.dtype} of {list(tensor.shape)}"
        )


def _check_mask(mask: Tensor, batch: int, seq: int, past: int) -> None:
    """Check a mask. Some models count positions by adding up a mask of two axes, so it may hold only 0 and 1."""
    shape, width = tuple(mask.shape), past + seq
    if len(shape) == 2:
        good = shape == (batch, width) and bool(((mask == 0) | (mask == 1)).all())
    else:
        good = len(shape) in (3, 4) and shape[0] in (1, batch) and shape[-2:] == (seq, width)
    if not good:
        raise RemoteProtocolError(
            f"attention_mask must be [{batch}, {width}] of 0 and 1 or [{batch}, 1, {seq}, {width}], got {list(shape)}"
        )


def _check_ids(name: str, ids: Tensor | None, batch: int, seq: int, limit: int) -> None:
    if ids is None:
        return
    if ids.shape != (batch, seq) or ids.is_floating_point():
        raise RemoteProtocolError(f"{name} must be integers of shape {[batch, seq]}, got {list(ids.shape)}")
    _check_range(name, ids, range(limit))


def _check_positions(positions: Tensor | None, batch: int, seq: int, table: range | None) -> None:
    if positions is None:
        return
    shape = tuple(positions.shape)
    good = len(shape) in (2, 3) and shape[-2] in (1, batch) and shape[-1] == seq
    if not good or (len(shape) == 3 and shape[0] > MAX_POSITION_KINDS) or positions.is_floating_point():
        found = f"{positions.dtype} of shape {list(shape)}"
        raise RemoteProtocolError(f"position_ids must be integers of shape {[batch, seq]}, got {found}")
    if table is not None:
        _check_range("position_ids", positions, table)


def _check_indices(name: str, indices: Tensor, limit: int) -> None:
    """Check that these are different integers below the limit."""
    if indices.is_floating_point() or not 0 < len(indices) <= limit or len({*indices.tolist()}) != len(indices):
        raise RemoteProtocolError(f"{name} must be different integers")
    _check_range(name, indices, range(limit))


def _check_range(name: str, ids: Tensor, allowed: range) -> None:
    if int(ids.min()) < allowed.start or int(ids.max()) >= allowed.stop:
        raise RemoteProtocolError(f"{name} must lie in [{allowed.start}, {allowed.stop})")
