"""Blocks in this process that leave padding out as a client does, or give something else for it if nobody looks."""

from tests.numerics.in_process_swarm import InProcessRunner, InProcessSwarm, Route
from torch import Tensor

from swarmllm.client.batches.padding import Layout
from swarmllm.data_structures import BlockTraits, Span
from swarmllm.models.boundary.block_inputs import BlockInputs


class PaddedRunner(InProcessRunner):
    """Micro-batches of at most `max_tokens`, by length; `shapes` are those of the hidden states that were sent."""

    def __init__(self, swarm: InProcessSwarm, traits: BlockTraits, max_tokens: int) -> None:
        super().__init__(swarm.route)
        self.traits, self.max_tokens = traits, max_tokens
        self.shapes: list[tuple[int, ...]] = []

    def run_blocks(self, inputs: BlockInputs, part: Span | None = None) -> Tensor:
        layout = Layout(inputs, self.traits)
        parts = []
        for rows in layout.micro_batches(range(inputs.batch_size), self.max_tokens):
            cut, place = layout.cut(inputs, rows)
            self.shapes.append(tuple(cut.hidden_states.shape))
            parts.append((super().run_blocks(cut, part), place))
        return layout.put_back("hidden_states", parts)


class NothingForPadding(InProcessRunner):
    """All is computed, but what the mask hides comes back as something else, unless it is wanted (`was_whole`)."""

    def __init__(self, route: Route) -> None:
        super().__init__(route)
        self.was_whole: list[bool] = []

    def run_blocks(self, inputs: BlockInputs, part: Span | None = None) -> Tensor:
        output = super().run_blocks(inputs, part)
        mask = inputs.attention_mask
        self.was_whole.append(inputs.whole)
        if inputs.whole or mask is None:
            return output
        return output.where((mask != 0)[..., None], 7.0)


def skipping_padding(swarm: InProcessSwarm, max_tokens: int) -> PaddedRunner:
    """Have the client of the swarm leave padding out."""
    said = [set(server.traits.skips_padding) for server, _ in swarm.route]
    traits = swarm.traits.model_copy(update={"skips_padding": tuple(sorted(set.intersection(*said)))})
    runner = PaddedRunner(swarm, traits, max_tokens)
    swarm.runner.run_blocks = runner.run_blocks  # type: ignore[method-assign]
    return runner
