"""Leaving out padding: which rows of a batch form a micro-batch, and which positions of them are text.

Rows are ordered by length, the longest first, and each micro-batch is cut to its longest text. Results are put back in
place. Outputs and gradients of padding are zeros, and the caller's values there are never sent. Without padding nothing
is moved or copied. (EnergonAI, section 4.3, leaves padding out between the attentions of its workers; here it isn't
sent either.)

If the longest row of a batch decides how all others are computed (`decisive_rows`), a micro-batch without such
a row gets a copy of one, whose outputs are dropped.

`BlockTraits.skips_padding` (from `models/span/probes`) says on which sides padding can be left out without a
change to the texts; otherwise it is computed like text. Pure. Used by `batches/batch_runner`.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf

import torch
from torch import Tensor

from swarmllm.data_structures import BlockTraits
from swarmllm.models.boundary.block_inputs import BlockInputs, decisive_rows

logger = logging.getLogger(__name__)
_INSTEAD = "to have it computed, open the model with client_config=ClientConfig(compute_padding=True)"


@dataclass(frozen=True, eq=False)
class Excerpt:
    """The place of a micro-batch in its batch."""

    rows: Tensor
    """Their indices in the batch."""
    first: int
    end: int
    """Positions [first, end)."""
    padding: Tensor | None
    """`[rows, end - first]`: True where the micro-batch is padding; None: all of it is text."""
    has_copy: bool = False
    """One more row follows, a copy that decides how the others are computed."""


class Layout:
    """The places of the texts of one batch, without their tensors."""

    def __init__(self, inputs: BlockInputs, traits: BlockTraits) -> None:
        self._traits, self._size = traits, (inputs.batch_size, inputs.seq_len)
        self._prefix = inputs.num_prefix
        self._decisive = decisive_rows(inputs, traits)
        self._stays_whole = self._decisive is not None and inputs.inner is not None
        self._firsts, self._ends = _texts(inputs, traits)
        true_lengths = self._ends - self._firsts
        self.is_whole = bool((true_lengths == inputs.seq_len).all())
        """There is no padding to leave out."""
        lengths = true_lengths.clamp(min=1).tolist()  # servers refuse empty rows
        self._order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], int(self._firsts[row])))
        self._lengths = [lengths[row] + self._prefix for row in self._order]
        self.num_tokens = sum(self._lengths)
        """Positions to compute, those of prefixes included."""
        self.longest = max(self._lengths)
        """Positions of the longest row."""

    def split(self, shares: Sequence[float]) -> list[range]:
        """Ranges of rows, in the order of length, with about these shares of all tokens."""
        if self._stays_whole:
            shares = [float(place == 0) for place in range(len(shares))]
        before = [0, *accumulate(self._lengths)]
        ends = [
            min(range(len(before)), key=lambda place: abs(before[place] - part * self.num_tokens))
            for part in accumulate(shares)
        ]
        return [range(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]

    def tokens_of(self, part: range) -> int:
        return sum(self._lengths[part.start : part.stop])

    def micro_batches(self, part: range, max_tokens: int) -> Iterator[range]:
        """Groups of rows of at most `max_tokens`, as wide as their longest row; a longer row is a group of its own."""
        start = part.start
        if self._stays_whole:
            yield part
            return
        if self._decisive is not None:
            max_tokens -= self._lengths[part.start]
        while start < part.stop:
            most, left = max(1, max_tokens // self._lengths[start]), part.stop - start
            size = -(-left // -(-left // most))  # groups of about equal size if their lengths are
            while size > 1 and size * self._width(range(start, start + size)) > max_tokens:
                size -= 1  # texts may begin or end at different positions
            yield range(start, start + size)
            start += size

    def _columns(self, rows: Tensor) -> tuple[int, int]:
        """The positions [first, end) of the texts of these rows."""
        return int(self._firsts[rows].min()), max(1, int(self._ends[rows].max()))

    def _width(self, part: range) -> int:
        first, end = self._columns(torch.tensor(self._order[part.start : part.stop]))
        return end - first + self._prefix

    def cut(self, inputs: BlockInputs, part: range) -> tuple[BlockInputs, Excerpt]:
        """(these rows of the batch as a micro-batch, their place)."""
        if self.is_whole:
            rows = torch.arange(part.start, part.stop)
            if self._decisive is not None and not set(self._decisive) & set(part):
                with_copy = torch.cat([rows, torch.tensor(self._decisive[:1])])
                excerpt = Excerpt(rows, 0, inputs.seq_len, None, has_copy=True)
                return inputs.rows_in_order(with_copy, self._traits), excerpt
            return inputs.rows(part.start, part.stop, self._traits), Excerpt(rows, 0, inputs.seq_len, None)
        rows = torch.tensor(self._order[part.start : part.stop])
        first, end = self._columns(rows)
        positions = torch.arange(first, end)
        padding = (positions < self._firsts[rows, None]) | (positions >= self._ends[rows, None])
        excerpt = Excerpt(rows, first, end, padding if bool(padding.any()) else None)
        cut = inputs.cut_to(first, end, self._traits).rows_in_order(rows, self._traits)
        if excerpt.padding is not None:  # its values must not reach the texts, not even multiplied by 0
            cleared = {name: _cleared(getattr(cut, name), excerpt.padding, self._axis(name)) for name in _floats(cut)}
            cut = cut.with_tensors(cleared)
        return cut, excerpt

    def take(self, whole: Tensor, excerpt: Excerpt) -> Tensor:
        """The gradient of a micro-batch's outputs, `[…, rows, end - first, …]`, taken from that of the batch."""
        axis = self._traits.batch_axis
        if self.is_whole:
            of_rows = whole.narrow(axis, int(excerpt.rows[0]), len(excerpt.rows))
            if not excerpt.has_copy:
                return of_rows
            return torch.cat([of_rows, torch.zeros_like(of_rows.narrow(axis, 0, 1))], dim=axis)
        part = whole.narrow(axis + 1, excerpt.first, excerpt.end - excerpt.first)
        part = part.index_select(axis, excerpt.rows.to(whole.device))
        return part if excerpt.padding is None else _cleared(part, excerpt.padding, axis)

    def put_back(self, name: str, parts: Sequence[tuple[Tensor, Excerpt]]) -> Tensor:
        """Join `hidden_states` or `inputs_embeds` of the micro-batches, or their gradients, to those of the batch."""
        axis, (like, _) = self._axis(name), parts[0]
        if self.is_whole:
            return torch.cat([tensor.narrow(axis, 0, len(excerpt.rows)) for tensor, excerpt in parts], dim=axis)
        whole = like.new_zeros((*like.shape[:axis], *self._size, *like.shape[axis + 2 :]))
        for tensor, excerpt in parts:
            known = tensor if excerpt.padding is None else _cleared(tensor, excerpt.padding, axis)
            columns = whole.narrow(axis + 1, excerpt.first, excerpt.end - excerpt.first)
            columns.index_copy_(axis, excerpt.rows.to(whole.device), known)
        return whole

    def reads_padding(self, grad_outputs: Tensor) -> bool:
        """True if outputs of padding, which weren't computed, have a gradient."""
        if self.is_whole:
            return False
        positions = torch.arange(self._size[1])
        padding = (positions < self._firsts[:, None]) | (positions >= self._ends[:, None])
        axis = self._traits.batch_axis
        return bool(grad_outputs.movedim((axis, axis + 1), (0, 1))[padding.to(grad_outputs.device)].any())

    def _axis(self, name: str) -> int:
        return self._traits.batch_axis if name == "hidden_states" else 0


class PaddingNotices:
    """Warnings, each logged once, about differences from a local model when padding isn't computed."""

    def __init__(self) -> None:
        self.told_of_outputs = self._told_of_gradients = False

    def of_outputs(self, layout: Layout, inputs: BlockInputs) -> None:
        """Call it for each batch. It says nothing if the model's own loss or head reads the texts alone."""
        if self.told_of_outputs or layout.is_whole or inputs.of_texts_alone:
            return
        self.told_of_outputs = True
        logger.warning(
            "padding at the ends of texts isn't computed: hidden states there are zeros, which is "
            "right for losses and averages over the texts alone; %s",
            _INSTEAD,
        )

    def of_gradients(self, layout: Layout, grad_outputs: Tensor) -> None:
        """Call it for each backward."""
        if self._told_of_gradients or not layout.reads_padding(grad_outputs):
            return
        self._told_of_gradients = True
        logger.warning(
            "the loss takes in positions that attention_mask hides, which aren't computed, so loss and gradients are "
            "not those of a local model: leave these positions out of the loss; or, %s",
            _INSTEAD,
        )


def _texts(inputs: BlockInputs, traits: BlockTraits) -> tuple[Tensor, Tensor]:
    """The first position of each row to compute, and the one behind the last."""
    count, length, mask = inputs.batch_size, inputs.seq_len, inputs.attention_mask
    firsts, ends = torch.zeros(count, dtype=torch.long), torch.full((count,), length)
    if mask is None or mask.ndim != 2 or not traits.skips_padding or traits.even_length < inf:
        return firsts, ends
    if inputs.whole or inputs.inner is not None:  # inner states include padding
        return firsts, ends
    shown = (mask != 0).cpu()
    places = torch.arange(length)
    # Prompts and prefixes of an adapter must keep their distance to the text.
    begins_anywhere = inputs.adapter is None or not (inputs.adapter.num_prompts or inputs.num_prefix)
    if "left" in traits.skips_padding and begins_anywhere:
        firsts = places.where(shown, length).amin(dim=1)
    if "right" in traits.skips_padding:
        ends = (places + 1).where(shown, 0).amax(dim=1)
    return firsts.where(shown.any(dim=1), 0), ends.where(shown.any(dim=1), 0)


def _floats(inputs: BlockInputs) -> list[str]:
    return ["hidden_states"] if inputs.inputs_embeds is None else ["hidden_states", "inputs_embeds"]


def _cleared(tensor: Tensor, padding: Tensor, axis: int) -> Tensor:
    """`[…, rows, seq, …]` with zeros where there is padding."""
    shape = (*(1,) * axis, *padding.shape, *(1,) * (tensor.ndim - axis - 2))
    return tensor.masked_fill(padding.to(tensor.device).view(shape), 0.0)
