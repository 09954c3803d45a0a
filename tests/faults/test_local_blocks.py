"""Blocks on the client's machine beside servers that die: what comes out is what one machine computes.

In process, over ranges, servers, lengths and deaths at random.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from swarm_in_process import Blocks, InProcessSwarm
from test_repairs import Fate, deaths, layouts
from tests.numerics.tiny_models import save_tiny
from torch import Tensor

from swarmllm.client.local_blocks import LocalBlocks, LocalSpan
from swarmllm.client.remote_blocks import RemoteBlocks
from swarmllm.client.session.chain import ActivationNoise
from swarmllm.client.session.inference_session import InferenceSession
from swarmllm.data_structures import Span
from swarmllm.errors import ConfigurationError
from swarmllm.models.boundary.block_inputs import BlockInputs
from swarmllm.models.checkpoint.checkpoint import open_checkpoint
from swarmllm.models.span.block_span import BlockSpan
from swarmllm.models.span.loading import load_block_span
from swarmllm.network.wire.protocol import MessageType

pytestmark = pytest.mark.rotates(6, whole_file=True)

HIDDEN, NUM_BLOCKS = 64, 6
TYPES = {"llama": 6, "gemma3_text": 4, "qwen3_next": 4}
"""Caches that can be rolled back anywhere, that forget early, and that can't be rolled back; and numbers of blocks."""
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("step"), st.integers(1, 9)),
        st.tuples(st.just("back"), st.integers(1, 6)),
        st.tuples(st.just("rows"), st.lists(st.integers(0, 9), min_size=1, max_size=3)),
        st.tuples(st.just("ahead"), st.lists(st.integers(1, 4), min_size=1, max_size=3)),
        st.tuples(st.just("remember"), st.integers(1, 5)),
        st.tuples(st.just("fork"), st.just(0)),
    ),
    min_size=2,
    max_size=8,
)


class Here:
    """The blocks of a checkpoint as a client has them, and as a reference; loaded once."""

    def __init__(self, blocks: Blocks, directory: Path) -> None:
        self.blocks = blocks
        self._checkpoint = open_checkpoint(str(directory))
        self._loaded: dict[Span, BlockSpan] = {}

    def of(self, span: Span) -> BlockSpan:
        if span not in self._loaded:
            self._loaded[span] = load_block_span(self._checkpoint, span, dtype=torch.float32, progress=False)
        return self._loaded[span]

    def local(self, ranges: Sequence[tuple[int, int]]) -> LocalBlocks:
        return LocalBlocks([LocalSpan(self.of(Span(*ends))) for ends in ranges])

    def whole(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """The outputs of all blocks for a batch."""
        blocks = self.of(Span(0, self.blocks.num_blocks))
        return blocks.forward(inputs_of(hidden, mask), blocks.span, blocks.new_cache())


def inputs_of(hidden: Tensor, mask: Tensor | None) -> BlockInputs:
    return BlockInputs(hidden_states=hidden, batch_size=hidden.shape[0], seq_len=hidden.shape[1], attention_mask=mask)


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory, blocks: Blocks, llama: Path) -> Iterator[dict[str, Here]]:
    found = {"llama": Here(blocks, llama)}
    for name in TYPES.keys() - {"llama"}:
        directory = tmp_path_factory.mktemp(name)
        save_tiny(name, directory)
        found[name] = Here(Blocks(directory), directory)
    yield found
    for name in TYPES.keys() - {"llama"}:
        found[name].blocks.close()


@st.composite
def ranges(draw: st.DrawFn, num_blocks: int) -> list[tuple[int, int]]:
    """Blocks of the client: some, and not all."""
    cuts = sorted(draw(st.sets(st.integers(0, num_blocks), min_size=2, max_size=4)))
    found = list(zip(cuts[::2], cuts[1::2], strict=False))
    return [(1, num_blocks)] if found == [(0, num_blocks)] else found


class Text:
    """A session beside a log of all that it has seen; the rows of a batch begin with padding."""

    def __init__(self, here: Here, swarm: InProcessSwarm, local: LocalBlocks, num_rows: int, padding: int) -> None:
        self._here = here
        self.session = swarm.session(max_length=64, batch_size=num_rows, grows=True, local=local)
        self.session.record_past()
        self.seen = torch.zeros(num_rows, 0, HIDDEN)
        self.num_padding = [padding * row for row in range(num_rows)]
        self._generator = torch.Generator().manual_seed(7)

    def mask(self, length: int) -> Tensor:
        columns = torch.arange(length)
        mask = torch.stack([columns >= min(number, length - 1) for number in self.num_padding]).long()
        return torch.ones_like(mask) if self.num_padding == [0] * len(mask) else mask

    def more(self, count: int) -> Tensor:
        """Hidden states of new positions, which have been seen now."""
        rows = len(self.num_padding)
        hidden = torch.randn(1, count, HIDDEN, generator=self._generator).expand(rows, -1, -1)
        hidden = hidden * torch.arange(1, rows + 1)[:, None, None]
        self.seen = torch.cat([self.seen, hidden], dim=1)
        return hidden

    def check(self, output: Tensor, end: int) -> None:
        """The outputs for positions before `end`, where a row isn't padding."""
        start, mask = end - output.shape[1], self.mask(self.seen.shape[1])[:, :end]
        expected = self._here.whole(self.seen[:, :end], mask)[:, start:]
        shown = mask[:, start:, None].bool()
        torch.testing.assert_close(output.masked_fill(~shown, 0), expected.masked_fill(~shown, 0), rtol=1e-3, atol=1e-4)

    def do(self, what: str, value: Any) -> None:
        end = self.seen.shape[1]
        assert self.session.position == end
        match what:
            case "step":
                hidden = self.more(value)
                self.check(self.session.run_step(inputs_of(hidden, self.mask(end + value))), end + value)
            case "remember":
                self.session.remember(inputs_of(self.more(value), self.mask(end + value)))
            case "back":
                self.session.position = max(0, end - value)
                self.seen = self.seen[:, : max(0, end - value)]
            case "rows" if end:
                chosen = [index % len(self.num_padding) for index in value]
                self.session.select_batch(chosen)
                self.seen, self.num_padding = self.seen[chosen], [self.num_padding[row] for row in chosen]
            case "fork":
                twin = self.session.fork()
                self.session.close()
                self.session = twin
            case "ahead":
                self.ahead(value)

    def ahead(self, lengths: list[int]) -> None:
        """Steps under way, of which the first one's result shows that the others are wrong."""
        for count in lengths:
            end = self.seen.shape[1]
            hidden = self.more(count)
            self.session.send(inputs_of(hidden, self.mask(end + count)), end)
        end = self.seen.shape[1] - sum(lengths[1:])
        first = self.session.receive()
        if len(lengths) > 1:
            self.seen = self.seen[:, :end]
            hidden = self.more(1)
            self.session.send(inputs_of(hidden, self.mask(end + 1)), end)
            self.check(self.session.receive(), end + 1)
        self.check(first, end)
        self.session.abandon()


@settings(max_examples=12, phases=set(Phase) - {Phase.shrink}, suppress_health_check=list(HealthCheck), deadline=None)
@given(st.data(), st.integers(1, 3), st.sampled_from([0, 0, 2]), st.sampled_from([4, 1024]), STEPS)
@pytest.mark.parametrize("kind", TYPES)
def test_a_session_is_as_one_machine(
    kinds: dict[str, Here], kind: str, data: st.DataObject, num_rows: int, padding: int, chunk: int, steps: Any
) -> None:
    """Whatever is here, whatever servers there are, whoever dies."""
    here = kinds[kind]
    num_blocks = here.blocks.num_blocks
    local = here.local(data.draw(ranges(num_blocks)))
    layout = data.draw(layouts()) if num_blocks == NUM_BLOCKS else [(0, 2), (1, num_blocks), (0, num_blocks)]
    with InProcessSwarm(here.blocks, layout, prefill_chunk_tokens=chunk) as swarm:
        swarm.on_message = Fate(swarm, data.draw(deaths))
        text = Text(here, swarm, local, num_rows, 0 if kind == "qwen3_next" else padding)
        for what, value in [("step", 6), *steps]:
            text.do(what, value)
        text.session.close()


@settings(max_examples=12, phases=set(Phase) - {Phase.shrink}, suppress_health_check=list(HealthCheck), deadline=None)
@given(st.data(), layouts(), st.integers(1, 3), st.integers(1, 9), st.sampled_from([0, 2]))
def test_a_batch_is_as_one_machine(
    kinds: dict[str, Here], data: st.DataObject, layout: Any, num_rows: int, length: int, padding: int
) -> None:
    """Its outputs, and the gradients of what goes in."""
    here = kinds["llama"]
    everything = here.of(Span(0, NUM_BLOCKS))
    local = here.local(data.draw(ranges(NUM_BLOCKS)))
    mask = torch.stack([torch.arange(length) >= min(padding * row, length - 1) for row in range(num_rows)]).long()
    hidden, weights = torch.randn(2, num_rows, length, HIDDEN, generator=torch.Generator().manual_seed(length))
    shown = mask[..., None].bool()

    def results(forward: Any) -> tuple[Tensor, Tensor]:
        given = hidden.clone().requires_grad_()
        output = forward(given).masked_fill(~shown, 0)
        (output * weights).sum().backward()
        assert given.grad is not None
        return output.detach(), given.grad

    with InProcessSwarm(here.blocks, layout) as swarm:
        swarm.on_message = Fate(swarm, data.draw(deaths), kinds={MessageType.FORWARD, MessageType.BACKWARD})
        blocks = RemoteBlocks(swarm.view, swarm.batches, swarm.traits, everything.span, local)
        got = results(lambda given: blocks(given, attention_mask=mask))
        span = data.draw(st.sampled_from([slice(0, 3), slice(1, 5), slice(3, 4)]))
        of_slice = blocks[span](hidden)
    expected = results(lambda given: everything.forward(inputs_of(given, mask)))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        of_slice, everything.forward(inputs_of(hidden, None), Span(span.start, span.stop)), rtol=1e-4, atol=1e-5
    )


def test_a_step_that_is_refused_replaces_nothing(kinds: dict[str, Here]) -> None:
    here = kinds["llama"]
    with InProcessSwarm(here.blocks, [(0, 6)]) as swarm:
        text = Text(here, swarm, here.local([(4, 6)]), 1, 0)
        text.do("step", 5)
        hidden = text.more(2)
        text.session.send(inputs_of(hidden, None), 5)
        with pytest.raises(ConfigurationError, match="the session has 1 rows"):
            text.session.send(inputs_of(hidden.expand(3, -1, -1), None), 5)
        text.check(text.session.receive(), 7)
        text.do("step", 1)
        text.session.close()


class Recorded(ActivationNoise):
    """Keeps what it gives."""

    def __init__(self, scale: float) -> None:
        super().__init__(scale)
        self.given: list[Tensor] = []

    def __call__(self, inputs: BlockInputs) -> BlockInputs:
        noisy = super().__call__(inputs)
        self.given.append(noisy.hidden_states)
        return noisy


def recorded(session: InferenceSession) -> Recorded:
    """The noise of all chains of the session, from now on."""
    noise = Recorded(0.3)
    for chain in session.chains:
        chain.noise = noise
    return noise


@pytest.mark.parametrize("ranges", [[], [(0, 1)], [(2, 3)]], ids=str)
def test_noise_is_added_once(kinds: dict[str, Here], ranges: list[tuple[int, int]]) -> None:
    """Servers that take another one's place, and copies of a session, are given what was given before."""
    here, local = kinds["llama"], kinds["llama"].local(ranges)
    parts = list(local.parts(Span(0, NUM_BLOCKS)))
    seen: dict[Span, list[Tensor]] = {part: [] for part, is_here in parts if is_here is None}

    def expected(hidden: Tensor) -> Tensor:
        for part, is_here in parts:
            hidden = torch.cat(seen[part], dim=1) if is_here is None else hidden
            blocks = here.of(Span(0, NUM_BLOCKS))
            hidden = blocks.forward(inputs_of(hidden, None), part, blocks.new_cache(part)).clone()
        return hidden

    def step(session: InferenceSession, count: int) -> None:
        noise = recorded(session)
        hidden = torch.randn(1, count, HIDDEN, generator=torch.Generator().manual_seed(count))
        whole.append(hidden)
        output = session.run_step(inputs_of(hidden, None))
        for of_part, noisy in zip(seen.values(), noise.given[-len(seen) :], strict=True):
            of_part.append(noisy)
        torch.testing.assert_close(output, expected(torch.cat(whole, dim=1))[:, -count:], rtol=1e-3, atol=1e-4)
        assert not torch.equal(noise.given[-len(seen)], hidden)

    whole: list[Tensor] = []
    with (
        InProcessSwarm(here.blocks, [(0, 6), (0, 6)]) as swarm,
        swarm.session(max_length=32, local=local) as session,
    ):
        step(session, 5)
        swarm.kill(swarm.server(session.route[0].server.peer_id))
        step(session, 2)
        assert session.num_repairs >= len(seen)
        with session.fork() as twin:
            noise = recorded(twin)
            twin.run_step(inputs_of(torch.ones(1, 3, HIDDEN), None))
            assert len(noise.given) == len(seen), "what follows; the past of each part is that of the session"


def test_noise_on_batches(kinds: dict[str, Here]) -> None:
    here = kinds["llama"]
    hidden = torch.randn(2, 5, HIDDEN, generator=torch.Generator().manual_seed(0))
    with InProcessSwarm(here.blocks, [(0, 6)], activation_noise=0.5) as swarm:
        for ranges in ([], [(0, 1)]):
            blocks = RemoteBlocks(swarm.view, swarm.batches, swarm.traits, Span(0, 6), here.local(ranges))
            noise = blocks._noise = Recorded(0.5)
            output, (given,) = blocks(hidden), noise.given
            start = 1 if ranges else 0
            everything = here.of(Span(0, NUM_BLOCKS))
            exact = everything.forward(inputs_of(hidden, None), Span(0, 1)) if start else hidden
            error = (given - exact).norm() / exact.norm()
            assert 0.4 < float(error) < 0.6
            expected = everything.forward(inputs_of(given, None), Span(start, NUM_BLOCKS))
            torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)
