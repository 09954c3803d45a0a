"""A server's blocks, stack by stack: mostly one part; two where they begin in a model's encoder and end in its decoder.

Made by `span_loader`. Requests are for blocks of one stack, as nobody but the client has what lies between the two.
"""

from dataclasses import dataclass

from swarmllm.data_structures import BlockTraits, Span, StackTraits
from swarmllm.errors import BlocksNotServedError
from swarmllm.models.span.block_span import BlockSpan
from swarmllm.server.streams.input_checks import InputChecks


@dataclass(frozen=True, eq=False)
class StackPart:
    """Blocks of one stack."""

    blocks: BlockSpan
    inputs: InputChecks


@dataclass(frozen=True, eq=False)
class StackParts:
    """All parts, in the order of their blocks."""

    parts: tuple[StackPart, ...]

    @property
    def span(self) -> Span:
        """All blocks."""
        return Span(self.parts[0].blocks.span.start, self.parts[-1].blocks.span.end)

    @property
    def digests(self) -> str:
        """What of the checkpoint each block was made of."""
        return "".join(part.blocks.digests for part in self.parts)

    @property
    def traits(self) -> BlockTraits:
        """What is announced of the blocks."""
        first, last = self.parts[0].blocks, self.parts[-1].blocks
        if not first.is_of_encoder:
            return last.traits
        encoder = StackTraits(**first.traits.model_dump(exclude={"encoder"}))
        cuts = tuple(cut for part in self.parts for cut in part.blocks.traits.forbidden_cuts)
        main = BlockTraits() if last is first else last.traits
        return main.model_copy(update={"encoder": encoder, "forbidden_cuts": cuts})

    def of(self, start: int, end: int) -> StackPart:
        """The part that holds these blocks.

        Raises:
            BlocksNotServedError: none does.
        """
        for part in self.parts:
            if start < end and Span(start, end) in part.blocks.span:
                return part
        raise BlocksNotServedError(f"this server holds blocks {self.span}, not {start}:{end} within one stack")
