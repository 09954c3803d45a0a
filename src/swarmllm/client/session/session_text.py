"""The text of a session: its inputs so far, and for how many more its servers have room.

Used by chains and local legs. Pure: it checks inputs before anything is sent, and keeps what replays need.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from swarmllm.data_structures import BlockTraits
from swarmllm.errors import ConfigurationError, SessionLengthExceededError
from swarmllm.models.adapters.block_adapter import BlockAdapter
from swarmllm.models.boundary.activation_log import ActivationLog
from swarmllm.models.boundary.block_inputs import BlockInputs, pieces
from swarmllm.network.wire.messages import MAX_POSITION, Pieces


def owned(inputs: BlockInputs) -> BlockInputs:
    """Copies, because users may change their tensors in place, such as position_ids in a loop."""
    return inputs.with_tensors({name: tensor.detach().clone() for name, tensor in inputs.tensors().items()})


@dataclass(eq=False)
class TextRoom:
    """Positions for which servers keep room."""

    max_length: int
    grows: bool = False
    """A text that reaches `max_length` gets a longer session; otherwise it is refused."""
    guessed: bool = False
    """`max_length` is more than the caller asked for: if servers lack the room, less will do."""
    too_small: set[str] = field(default_factory=set)
    """Servers whose whole cache is smaller than `max_length`."""
    _needed_length: int = 0
    """Positions computed or asked for so far."""

    def length_for(self, position: int, num_tokens: int) -> int:
        """The `max_length` with which `num_tokens` can follow `position`.

        Raises:
            SessionLengthExceededError: the session is too short and doesn't grow.
        """
        wanted, max_length = position + num_tokens, self.max_length
        if self.grows and max_length < wanted <= MAX_POSITION:
            # Twice as long each time: all replays together then cost less than computing the text once.
            max_length = min(MAX_POSITION, max(wanted, 2 * max_length))
        if wanted > max_length:
            raise SessionLengthExceededError(
                f"{position} + {num_tokens} tokens are more than the session's max_length of "
                f"{max_length}: open it with a larger max_length"
            )
        return max_length

    def take(self, needed_length: int, max_length: int) -> None:
        """Keep room for `max_length` from now on, and note that `needed_length` is in use."""
        self.guessed = self.guessed or max_length > self.max_length
        self.max_length, self._needed_length = max_length, needed_length

    def ask_for_less(self) -> bool:
        """Lower a guessed `max_length` for which a server has no room; returns whether that was possible."""
        if not self.guessed or self.max_length <= self._needed_length:
            return False
        self.max_length = self._needed_length + (self.max_length - self._needed_length) // 4
        self.too_small.clear()
        return True


@dataclass(eq=False)
class SessionText:
    """The inputs of one batch of texts. `position` counts the positions with outputs that the client has got."""

    traits: BlockTraits
    room: TextRoom
    record_past: bool = False
    shows: bool = False
    """The last step asked for inner states, which older servers don't answer."""
    position: int = 0
    batch_size: int = 1
    adapter: BlockAdapter | None = None
    """The adapter of all computations so far."""
    source_length: int = 0
    """Positions of the encoder outputs."""
    num_selections: int = 0
    """Counts `select_batch`."""
    selection: tuple[int, ...] | None = None
    """Rows to keep from the next step on; that step tells the servers."""
    computes_anew: bool = False
    """True if the next servers don't repair anything: they compute the past for the first time, or for a session with
    other settings. It may go in long calls then, and repairs replay those."""
    _log: ActivationLog = field(init=False)
    _pieces: list[tuple[int, Pieces]] = field(init=False, default_factory=list)
    """(position, pieces) of the steps that servers computed in pieces."""

    def __post_init__(self) -> None:
        self._log = ActivationLog(self.traits)

    def twin(self) -> "SessionText":
        """An empty text with the same settings."""
        return SessionText(self.traits, replace(self.room, _needed_length=0), self.record_past)

    def admit(self, position: int, inputs: BlockInputs) -> bool:
        """Take the sizes and adapter of `inputs` at `position`; False: the servers need new sessions for them.

        Raises:
            SessionLengthExceededError, ConfigurationError: they can't follow; nothing has changed.
        """
        max_length = self.room.length_for(position, inputs.seq_len)
        is_same_adapter = (self.adapter and self.adapter.version) == (inputs.adapter and inputs.adapter.version)
        if position and not is_same_adapter:
            raise ConfigurationError(
                "the adapter has changed since the session began, or its dropout by train() or eval(): change it back, "
                "set the session's position to 0, or open another one"
            )
        kept = min(position, self.position)
        if kept and inputs.batch_size != self._log.batch_size:
            raise ConfigurationError(f"the session has {self._log.batch_size} rows, these inputs {inputs.batch_size}")
        has_rows = kept > 0 or inputs.batch_size == self.batch_size  # servers have room for this many rows
        has_source = position > 0 or inputs.source_len <= self.source_length
        fits = is_same_adapter and has_rows and has_source and max_length == self.room.max_length
        fits = fits and self.goes_back_alike(kept)
        self.source_length = max(self.source_length, inputs.source_len)
        self.room.take(position + inputs.seq_len, max_length)
        self.batch_size = inputs.batch_size
        self.computes_anew = self.computes_anew or not fits
        if not is_same_adapter:
            self.adapter = inputs.adapter
        return fits

    def append(self, position: int, inputs: BlockInputs, pieces: Pieces = ()) -> None:
        """Note that all blocks have seen `inputs` at `position`, and nothing behind them.

        `inputs` are `owned`. `pieces`: those in which servers say that they have computed it.
        """
        self._log.append(position, inputs)
        self.position = position + inputs.seq_len
        while self._pieces and self._pieces[-1][0] >= position:
            self._pieces.pop()
        if pieces:
            self._pieces.append((position, pieces))

    def remember(self, inputs: BlockInputs) -> None:
        """Note that all blocks have seen `inputs` elsewhere, behind `position`; no cache has them yet."""
        self.append(self.position, owned(inputs))
        self.computes_anew = True
        self.adapter = inputs.adapter
        self.source_length = max(self.source_length, inputs.source_len)

    def select_batch(self, indices: Sequence[int]) -> None:
        """Keep these rows of the batch, in this order, from the next step on."""
        chosen = tuple(indices)
        if self.selection is None:
            self.num_selections += 1
            self.selection = chosen
        else:
            self.selection = tuple(self.selection[index] for index in chosen)
        self._log.select_batch(chosen)

    def chunks(self, inputs: BlockInputs, max_tokens: int) -> Iterator[BlockInputs]:
        """The inputs of a long prompt in chunks, so that several servers work at once."""
        for start, end in pieces(inputs, self.position, self.traits, max_tokens):
            whole = end - start == inputs.seq_len
            yield inputs if whole else inputs.columns(start, end, self.position, self.traits)

    def goes_back_alike(self, position: int) -> bool:
        """True if rolling a cache back to `position` gives the same as computing the text up to there again."""
        return self._log.goes_back_alike(position)

    def was_computed_as(self, length: int, position: int) -> bool:
        """True if everything before `position` was computed as in a prompt of `length` positions."""
        return self._log.was_computed_as(length + (self.adapter.num_prefix if self.adapter else 0), position)

    def replay(self, max_tokens: int) -> Iterator[tuple[int, BlockInputs]]:
        """(position, inputs) of everything up to `position`, in chunks of about `max_tokens`.

        Raises:
            ConfigurationError: as `past`.
        """
        self._require_whole_masks()
        if self.computes_anew:
            self._log.compute_anew(max_tokens)
            self._pieces.clear()
        return self._log.replay(max_tokens)

    @property
    def is_cut_ahead(self) -> bool:
        """True if the text was cut within a step whose mask looks ahead: only `steps` computes it again."""
        self._log.rollback(self.position)
        return self._log.is_cut_ahead

    def _require_whole_masks(self) -> None:
        if self.is_cut_ahead:
            raise ConfigurationError(
                "this text was cut within a part whose positions look at later ones (a picture, or a prefix that sees "
                "itself), so it can go on, but not be copied or moved: copy it before you cut it, or begin it anew"
            )

    @property
    def num_steps(self) -> int:
        """Steps in which everything up to `position` was computed."""
        return self._log.num_steps

    @property
    def has_cut_steps(self) -> bool:
        """True if a rollback has cut some step; `steps` gives it whole."""
        return self._log.has_cut_steps

    def steps(self, block: int) -> list[tuple[int, BlockInputs]]:
        """(position, inputs) of each step as the server of this block computed it, up to `position`."""
        self._log.rollback(self.position)
        return list(self._log.steps(self.cuts(block)))

    def cuts(self, block: int) -> list[int]:
        """The positions at which the server of this block has cut steps into pieces."""
        found: list[int] = []
        for position, told in self._pieces:
            for start, end, lengths in told:
                if start <= block < end:
                    found += accumulate(lengths[:-1], initial=position)
        return found

    def past(self) -> list[tuple[int, BlockInputs]]:
        """(position, inputs) of everything up to `position`, in as few calls as possible, mostly one.

        Raises:
            ConfigurationError: no call computes it in the same way (`is_cut_ahead`).
        """
        self._require_whole_masks()
        return [(position, replace(inputs, adapter=self.adapter)) for position, inputs in self._log.calls()]
