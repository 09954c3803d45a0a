"""FORWARD and BACKWARD: requests of clients without a session. Called by `connection`."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from swarmllm.data_structures import Span
from swarmllm.errors import CorruptActivationsError, RemoteProtocolError, ServerOverloadedError
from swarmllm.models.adapters.block_adapter import BlockAdapter
from swarmllm.models.boundary.inner_states import InnerStates, plausible
from swarmllm.network.wire.compression import Outgoing, compressed
from swarmllm.network.wire.messages import BatchHeader, ResultHeader, parse
from swarmllm.network.wire.protocol import FrameStream, Message, MessageType
from swarmllm.server.device.forward_backward import KeptForward, Turns, forward, gradients, record
from swarmllm.server.device.scheduler import Priority
from swarmllm.server.peers.links import Links
from swarmllm.server.peers.pushes import push
from swarmllm.server.sessions.step_runner import INNER_FACTOR, wanted_inner
from swarmllm.server.streams.input_checks import NOTHING, off_loop
from swarmllm.server.streams.serving import Serving, StackBlocks


async def answer_request(
    serving: Serving, links: Links, compression: str, stream: FrameStream, message: Message
) -> tuple[ResultHeader, Outgoing]:
    """Answer FORWARD with outputs, and BACKWARD with gradients of the inputs.

    BACKWARD uses a kept forward, or the inputs alone. `compression` is used if the client leaves it to the server.

    Raises:
        SwarmError: one sentence for the client.
    """
    header = parse(BatchHeader, message.header, None)
    compression = compression if header.compression == "auto" else header.compression
    request = _Request(serving, links, compression, stream, message, header)
    adapter = request.checked_adapter()
    if header.source is None:
        return await request.answer(adapter, NOTHING)
    async with serving.pushes.taken(header.source, stream.peer_id) as pushed:
        serving.check_stays()
        read = partial(request.stack.inputs.read_pushed, header, request.passed_on, pushed, header.source.peer_id)
        return await request.answer(adapter, await off_loop(read, pushed.message))


@dataclass(frozen=True, eq=False, slots=True)
class _Request:
    serving: Serving
    links: Links
    compression: str
    stream: FrameStream
    message: Message
    header: BatchHeader

    @property
    def span(self) -> Span:
        """The blocks to run."""
        return Span(self.header.start, self.header.end)

    @property
    def stack(self) -> StackBlocks:
        """The server's blocks of the stack that the request names."""
        return self.serving.stack_of(self.header.start, self.header.end)

    @property
    def passed_on(self) -> str:
        """Name of the tensor that goes from server to server, in the direction of this request."""
        return "hidden_states" if self.message.type == MessageType.FORWARD else "grad_outputs"

    def checked_adapter(self) -> BlockAdapter | None:
        """Check the blocks and the size of the request, and return its adapter.

        Raises:
            SwarmError: this server doesn't have the blocks or the adapter, or the request is too large for it.
        """
        header, serving = self.header, self.serving
        stack = self.stack
        adapter = serving.adapter_of(header, self.stream.peer_id)
        num_prefix = 0 if adapter is None else adapter.num_prefix
        num_tokens = header.batch_size * (header.seq_len + num_prefix)
        if num_tokens > serving.max_batch_tokens:
            raise ServerOverloadedError(
                f"a request of {num_tokens} tokens is above this server's limit of {serving.max_batch_tokens}"
            )
        stack.inputs.check_length(header.seq_len + num_prefix)
        return adapter

    async def answer(self, adapter: BlockAdapter | None, pushed: Mapping[str, Tensor]) -> tuple[ResultHeader, Outgoing]:
        """Compute, pass tensors on to the next server if it waits for them, and return the answer for the client."""
        header, serving = self.header, self.serving
        inner, num_bytes = wanted_inner(header, self.span, self.stack.blocks, self.stack.inputs.hidden_bytes)
        if inner is None:
            return await self._computed(adapter, pushed)
        if header.keep or self.message.type != MessageType.FORWARD:
            raise RemoteProtocolError("inner states can be asked for by FORWARD without keep only")
        num_bytes *= INNER_FACTOR
        if not serving.limits.take_now(self.stream.peer_id, num_bytes):
            raise ServerOverloadedError("this client asks for too many inner states at once")
        try:
            answer, tensors = await self._computed(adapter, pushed, inner)
            blocks, attentions, shown = inner.as_answer(self.span)
            return answer.model_copy(update={"blocks": blocks, "attentions": attentions}), {**tensors, **shown}
        finally:
            serving.limits.give_back(self.stream.peer_id, num_bytes)

    async def _computed(
        self, adapter: BlockAdapter | None, pushed: Mapping[str, Tensor], inner: InnerStates | None = None
    ) -> tuple[ResultHeader, Outgoing]:
        header, serving, span = self.header, self.serving, self.span
        turns = await self._turns(adapter, pushed, inner)
        account = serving.limits.standing.account(self.stream.peer_id)
        timed = await serving.device_thread.run_in_turns(turns, Priority.SESSIONLESS, account)
        if self.message.type == MessageType.FORWARD:
            serving.device_thread.note_forward(len(span), header.batch_size * header.seq_len, timed.compute_us)
        kept, result = timed.value
        if kept is not None:
            serving.kept_forwards.put(self.stream.peer_id, header.id, kept)
        sent = None
        if header.target is not None:
            tensor = result["hidden_states"]
            sent = await push(self.links, header.target, self.passed_on, tensor, self.compression)
        if sent is not None:  # the client gets the same tensors as its target
            others = {name: tensor for name, tensor in result.items() if name != "hidden_states"}
            result = others if header.without_pushed else others | {"hidden_states": sent}
        timings = ((span.start, timed.queue_us, timed.compute_us),)
        answer = ResultHeader(id=header.id, end=span.end, timings=timings, pushed=sent is not None)
        return answer, await compressed(result, self.stream, self.compression, exactly=sent is not None)

    async def _turns(
        self, adapter: BlockAdapter | None, pushed: Mapping[str, Tensor], inner: InnerStates | None
    ) -> Turns[tuple[KeptForward | None, dict[str, Tensor]]]:
        """Return the device thread's work for this request: a forward to keep for a backward, and the answer."""
        header, message, serving, span = self.header, self.message, self.serving, self.span
        blocks, checks = self.stack.blocks, self.stack.inputs
        if header.forward is not None:
            grad_outputs = await off_loop(partial(checks.read_gradient, header, message, pushed), message)
            return _nothing_kept(
                serving.kept_forwards.take(self.stream.peer_id, header.forward).gradients(grad_outputs)
            )
        inputs, given = await off_loop(partial(checks.read, header, message, pushed), message)
        if inputs.batch_size * inputs.source_len > serving.max_batch_tokens:
            raise ServerOverloadedError(
                f"encoder outputs of {inputs.batch_size * inputs.source_len} tokens are above this server's limit of "
                f"{serving.max_batch_tokens}"
            )
        axis = blocks.traits.batch_axis
        if "hidden_states" in pushed and not plausible(inputs.hidden_states, axis, inputs.attention_mask):
            sender = None if header.source is None else header.source.peer_id
            raise CorruptActivationsError("a server passed on NaN, infinite or absurd values", sender)
        inputs = replace(inputs, adapter=adapter, inner=inner)
        if header.ones_mask:
            inputs = replace(inputs, attention_mask=torch.ones(inputs.batch_size, inputs.seq_len, dtype=torch.int64))
        short_turns = len(serving.sessions) > 0
        if message.type == MessageType.FORWARD and header.keep:
            return _kept(record(blocks, inputs, span, short_turns=short_turns))
        if message.type == MessageType.FORWARD:
            return _nothing_kept(forward(blocks, inputs, span, short_turns=short_turns))
        if given is None:
            raise RemoteProtocolError("BACKWARD needs grad_outputs")
        return _nothing_kept(gradients(blocks, inputs, span, given, short_turns=short_turns))


def _kept(turns: Turns[KeptForward]) -> Turns[tuple[KeptForward, dict[str, Tensor]]]:
    kept = yield from turns
    return kept, {"hidden_states": kept.outputs}


def _nothing_kept(turns: Turns[dict[str, Tensor]]) -> Turns[tuple[None, dict[str, Tensor]]]:
    return None, (yield from turns)
