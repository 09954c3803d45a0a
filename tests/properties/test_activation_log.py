"""The log of activations is what a naive list of columns is, whatever is appended, forgotten and reordered."""

from dataclasses import dataclass, field

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from torch import Tensor

from swarmllm.data_structures import BlockTraits
from swarmllm.models.boundary.activation_log import ActivationLog
from swarmllm.models.boundary.block_inputs import BlockInputs

MAX_TOKENS = 6


@dataclass
class Naive:
    """One entry per position: hidden states, position and mask of all rows, always up to date."""

    hidden: list[Tensor] = field(default_factory=list)
    positions: list[Tensor] = field(default_factory=list)
    seen: list[Tensor] = field(default_factory=list)
    """The positions that each position attends to, up to itself."""

    def rollback(self, position: int) -> None:
        del self.hidden[position:], self.positions[position:], self.seen[position:]

    def select(self, rows: list[int]) -> None:
        self.hidden = [column[rows] for column in self.hidden]
        self.positions = [column[rows] for column in self.positions]
        self.seen = [column[rows] for column in self.seen]


def attended(inputs: BlockInputs, start: int, position: int) -> Tensor:
    """`[batch, position + 1]`: what the call, which begins at `start`, lets one of its positions attend to."""
    mask = inputs.attention_mask
    if mask is None:
        return torch.ones(inputs.batch_size, position + 1, dtype=torch.bool)
    assert mask.shape[-1] == start + inputs.seq_len
    row = mask if mask.ndim == 2 else mask[:, 0, position - start]
    return row[:, : position + 1].bool()


class LogAgainstNaive(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.log = ActivationLog(BlockTraits())
        self.naive = Naive()
        self.counter = 0
        self.computed: list[tuple[int, BlockInputs]] = []
        """The steps as they were computed, without rows' choices."""
        self.chosen = False

    @property
    def length(self) -> int:
        return len(self.naive.hidden)

    @property
    def rows(self) -> int:
        return len(self.naive.hidden[0]) if self.naive.hidden else 1

    @rule(data=st.data(), seq_len=st.integers(1, 3), batch=st.integers(1, 3))
    def append(self, data: st.DataObject, seq_len: int, batch: int) -> None:
        position = data.draw(st.integers(0, self.length), label="position")
        rows = self.rows if position else batch
        self.naive.rollback(position)
        numbers = torch.arange(self.counter, self.counter + rows * seq_len, dtype=torch.float32).view(rows, seq_len)
        self.counter += rows * seq_len
        mask = self.mask(data, rows, position, seq_len)
        seen = torch.ones(rows, position + seq_len) if mask is None else mask
        if seen.ndim == 2:
            seen = seen[:, None, None].expand(-1, 1, seq_len, -1).tril(position)
        self.naive.seen += [seen[:, 0, column, : position + column + 1] for column in range(seq_len)]
        positions = torch.arange(position, position + seq_len)[None] + 100 * torch.arange(rows)[:, None]
        self.naive.hidden += list(numbers.T)
        self.naive.positions += list(positions.T)
        inputs = BlockInputs(
            hidden_states=numbers[:, :, None],
            batch_size=rows,
            seq_len=seq_len,
            attention_mask=mask,
            position_ids=positions,
        )
        self.log.append(position, inputs)
        self.computed = [*(one for one in self.computed if one[0] < position), (position, inputs)]

    def mask(self, data: st.DataObject, rows: int, position: int, seq_len: int) -> Tensor | None:
        """None, the mask of the step before continued, or any other one."""
        kind = data.draw(st.sampled_from(["none", "continued", "new", "four axes"]), label="mask")
        if kind == "none":
            return None
        width = position + seq_len
        shape = (rows, 1, seq_len, width) if kind == "four axes" else (rows, width)
        mask = torch.tensor(data.draw(st.lists(st.integers(0, 1), min_size=rows, max_size=rows)))
        mask = mask.view(-1, *[1] * (len(shape) - 1)).repeat(1, *shape[1:])
        if kind == "continued" and position:
            mask[:, :position] = self.naive.seen[-1]
        return mask

    @rule(data=st.data())
    def rollback(self, data: st.DataObject) -> None:
        position = data.draw(st.integers(0, self.length), label="position")
        self.naive.rollback(position)
        self.log.rollback(position)
        self.computed = [one for one in self.computed if one[0] < position]

    @precondition(lambda self: self.length > 0)
    @rule(data=st.data())
    def select(self, data: st.DataObject) -> None:
        rows = data.draw(st.lists(st.integers(0, self.rows - 1), min_size=1, max_size=4), label="rows")
        self.naive.select(rows)
        self.log.select_batch(rows)
        self.chosen = True

    @invariant()
    def gives_the_steps_as_they_were_computed(self) -> None:
        if self.chosen:  # steps that were cut after a choice of rows aren't given whole
            return
        steps = list(self.log.steps())
        assert len(steps) == len(self.computed) == self.log.num_steps
        for (position, step), (expected_at, expected) in zip(steps, self.computed, strict=True):
            assert (position, step.seq_len) == (expected_at, expected.seq_len)
            assert step.tensors().keys() == expected.tensors().keys()
            for name, tensor in expected.tensors().items():
                assert torch.equal(step.tensors()[name], tensor), name

    @invariant()
    def cuts_them_where_they_were_cut(self) -> None:
        cuts = list(range(0, self.length, 2))
        bounds = {position for position, _ in self.log.steps()} | set(cuts)
        assert [position for position, _ in self.log.steps(cuts)] == sorted(bounds)
        some = [position for position, _ in self.log.steps(cuts, start=1, end=4)]
        assert some == [bound for bound in sorted(bounds) if 1 <= bound < 4]

    @invariant()
    def replays_the_same(self) -> None:
        assert self.log.length == self.length
        pieces = list(self.log.replay(MAX_TOKENS))
        assert bool(pieces) == (self.length > 0)
        if not pieces:
            return
        assert self.log.batch_size == self.rows
        expected = 0
        for start, piece in pieces:
            end = start + piece.seq_len
            assert start == expected
            is_short = piece.seq_len == 1 or piece.seq_len * piece.batch_size <= MAX_TOKENS
            assert is_short or piece.looks_ahead(start)
            assert torch.equal(piece.hidden_states[:, :, 0], torch.stack(self.naive.hidden[start:end], dim=1))
            assert torch.equal(piece.position_ids, torch.stack(self.naive.positions[start:end], dim=1))
            for position in range(start, end):
                assert torch.equal(attended(piece, start, position), self.naive.seen[position].bool())
            expected = end
        assert expected == self.length


TestLogAgainstNaive = LogAgainstNaive.TestCase
TestLogAgainstNaive.settings = settings(max_examples=60, stateful_step_count=20)


@given(given_by_step=st.lists(st.sampled_from([None, 1, 2]), min_size=1, max_size=5))
def test_positions_that_only_some_steps_give(given_by_step: list[int | None]) -> None:
    log = ActivationLog(BlockTraits())
    for position, rows in enumerate(given_by_step):
        positions = None if rows is None else torch.full((rows, 1), position)
        log.append(
            position,
            BlockInputs(hidden_states=torch.zeros(2, 1, 3), batch_size=2, seq_len=1, position_ids=positions),
        )

    ((_, whole),) = log.replay(100)

    if set(given_by_step) == {None}:
        assert whole.position_ids is None
    else:
        assert whole.position_ids[-1].tolist() == list(range(len(given_by_step)))


def test_a_long_text_token_by_token_takes_memory_in_proportion() -> None:
    log = ActivationLog(BlockTraits())
    message = torch.zeros(1 << 20)
    for position in range(100):
        mask = torch.ones(1, position + 1, dtype=torch.int64)
        positions = message.view(torch.int64)[:1].view(1, 1)
        log.append(
            position,
            BlockInputs(
                hidden_states=torch.zeros(1, 1, 3), batch_size=1, seq_len=1, attention_mask=mask, position_ids=positions
            ),
        )

    kept = [tensor for entry in log._entries for tensor in entry.inputs.tensors().values()]
    assert sum(tensor.untyped_storage().nbytes() for tensor in kept) == 100 * (3 * 4 + 8)


def test_only_a_cut_within_what_sees_itself_needs_the_whole_step() -> None:
    """As of a picture with text on both sides: cut behind the picture, the rest is computed as any text is."""
    mask = torch.ones(1, 1, 8, 8, dtype=torch.bool).tril()
    mask[..., 2:5, 2:5] = True
    log = ActivationLog(BlockTraits())
    log.append(0, BlockInputs(hidden_states=torch.zeros(1, 8, 3), batch_size=1, seq_len=8, attention_mask=mask))
    for position, is_cut_ahead in ((7, False), (5, False), (4, True), (3, True), (2, False)):
        log.rollback(position)
        assert log.is_cut_ahead == is_cut_ahead
