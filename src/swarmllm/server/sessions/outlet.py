"""Where the outputs of a session go: over a link to the next server, or to the client. Used by `session`."""

from dataclasses import dataclass, replace

from swarmllm.data_structures import Span
from swarmllm.models.boundary.block_inputs import BlockInputs
from swarmllm.models.boundary.inner_states import InnerStates
from swarmllm.network.wire.compression import Outgoing, compressed
from swarmllm.network.wire.messages import ResultHeader, StepHeader, Timings
from swarmllm.network.wire.protocol import FrameStream, MessageType
from swarmllm.network.wire.tensor_codec import encode_tensors
from swarmllm.server.peers.links import Link


@dataclass(frozen=True, eq=False, slots=True)
class Outlet:
    """One way for outputs; a session that is linked anew gets another."""

    owner: FrameStream
    """The client, who gets the outputs when there is no link: it relays them, or has what it wants."""
    end: int
    """The block behind those of this session."""
    compression: str
    """How hidden states are sent, as in ServerConfig."""
    link: Link | None = None
    session: str = ""
    """Id of the session over there."""

    async def compressed(self, header: StepHeader, outputs: BlockInputs, *, exactly: bool = False) -> Outgoing:
        """What a step sends; `exactly`: as these outputs are, because they have been sent before."""
        if header.position:  # the next server has the source since the begin
            outputs = outputs.without_source()
        tensors = outputs.tensors()
        if header.ones_mask:
            tensors.pop("attention_mask", None)
        stream = self.owner if self.link is None else self.link.stream
        return await compressed(tensors, stream, self.compression, exactly=exactly)

    async def send(self, header: StepHeader, outgoing: Outgoing, timings: Timings, replay_hops: int) -> None:
        """Send the outputs of the step of that header.

        Raises:
            PeerError: the stream to the next server, or to the client, broke.
        """
        if self.link is None:
            descriptors, chunks = encode_tensors({"hidden_states": outgoing["hidden_states"]})
            result = ResultHeader(id=header.id, end=self.end, position=header.position, timings=timings)
            await self.owner.send(MessageType.RESULT, result.model_dump() | {"tensors": descriptors}, chunks)
            return
        descriptors, chunks = encode_tensors(outgoing)
        changed = {"session": self.session, "timings": timings, "replay_hops": replay_hops, "tensors": descriptors}
        await self.link.send(MessageType.STEP, header.model_dump() | changed, chunks)

    async def show(self, header: StepHeader, inner: InnerStates, span: Span) -> None:
        """Send the owner what it wants to see of the inside of the step of that header.

        Raises:
            PeerError: its stream broke.
            ConfigurationError: it can't be sent.
        """
        blocks, attentions, tensors = inner.as_answer(span)
        descriptors, chunks = encode_tensors(tensors)
        shown = ResultHeader(
            id=header.id, end=self.end, position=header.position, shows=True, blocks=blocks, attentions=attentions
        )
        await self.owner.send(MessageType.RESULT, shown.model_dump() | {"tensors": descriptors}, chunks)

    def unlinked(self) -> "Outlet":
        """The way to the owner."""
        return replace(self, link=None, session="")

    def forget(self) -> None:
        """Send nothing more this way."""
        if self.link is not None:
            self.link.forget(self.session)
