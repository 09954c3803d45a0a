"""The plan of a chaos run, from numbers alone: text N is the same in every run, so a failed one can be run again.

A text is generated (or trained on) by a swarm of a random layout, and disturbed at a random moment. Pure: no clock, no
swarm. Used by `chaos_run`.
"""

import random
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

NUM_BLOCKS = 8
TEXTS_PER_LAYOUT = 20
VARIANTS = 12
"""Prompts, and what else differs, of each kind."""
PREFILL_SHARE = 0.25
"""Share of the texts that are disturbed before the first token."""

Blocks = tuple[int, int]
"""Half-open."""


class Kind(Enum):
    """How a text comes about; `chaos_kinds` has a function for each."""

    BEAM = "beam"
    CHAT = "chat"
    ROLL_BACK = "roll-back"
    ASSISTED = "assisted"
    NGRAM = "n-gram speculation"
    PROMPT_LOOKUP = "prompt lookup"
    SAMPLING = "sampling"
    PADDED_BATCH = "left-padded batch"
    LONG_PREFILL = "long prefill"
    TRAINING = "training"
    GUESSED_SAMPLING = "sampling with n-gram speculation"
    DROPOUT = "adapter with dropout in train mode"


class Disturbance(Enum):
    """An event during a text; `chaos_swarm` carries it out."""

    KILL = "KILL"
    TWO_KILLS = "two KILLs"
    TERM = "TERM"
    STOP = "STOP"
    DAEMON_KILL = "p2pd KILL"
    DAEMON_STOP = "p2pd STOP"
    CLIENT_LEAVES = "client leaves"
    OUT_OF_MEMORY = "out of memory"

    @property
    def spares_servers(self) -> bool:
        """True if all of them serve on."""
        return self in (Disturbance.CLIENT_LEAVES, Disturbance.OUT_OF_MEMORY)


@dataclass(frozen=True)
class Text:
    """One text and its disturbance."""

    number: int
    kind: Kind
    variant: int
    disturbance: Disturbance
    moment: float
    """Which share of the text's steps is over by then; 0 = none, so it is within the prefill."""
    delay_s: float
    """From then on; 0 = before the next step is sent."""

    def __str__(self) -> str:
        when = "in the prefill" if not self.moment else f"after {self.moment:.0%}"
        return f"{self.number}: {self.kind.value} {self.variant}, {self.disturbance.value} {when} +{self.delay_s:.3f} s"


def text(number: int) -> Text:
    """Text `number` of all. Each kind meets each disturbance once in 96 of them, and all kinds come in each layout."""
    choice = random.Random(f"text {number}")
    kind = list(Kind)[number % len(Kind)]
    disturbance = list(Disturbance)[(number + number // len(Kind)) % len(Disturbance)]
    in_prefill = choice.random() < (0.8 if kind is Kind.LONG_PREFILL else PREFILL_SHARE)
    longest_s = (0.6 if kind is Kind.LONG_PREFILL else 0.08) if in_prefill else 0.03
    delay_s = 0.0 if not in_prefill and choice.random() < 0.5 else choice.uniform(0, longest_s)
    moment = 0.0 if in_prefill else choice.uniform(0.02, 0.95)
    return Text(number, kind, choice.randrange(VARIANTS), disturbance, moment, delay_s)


def layout(number: int) -> list[Blocks]:
    """The spans of 3 to 7 servers in layout `number`: mostly two chains through the model, of which some spans overlap.

    So any one server can be spared; in one of eight layouts there is one chain only, and hardly any can.
    """
    choice = random.Random(f"layout {number}")
    num_servers = choice.randint(3, 7)
    first = choice.randint(min(2, num_servers // 2), num_servers // 2)
    lengths = [num_servers] if choice.random() < 1 / 8 else [first, num_servers - first]
    spans = [span for length in lengths for span in _chain(choice, length)]
    choice.shuffle(spans)
    return spans


def _chain(choice: random.Random, length: int) -> list[Blocks]:
    cuts = [0, *sorted(choice.sample(range(1, NUM_BLOCKS), length - 1)), NUM_BLOCKS]
    more = [choice.choice([0, 0, 0, 1, 2]) for _ in range(2 * length)]
    spans = zip(cuts, cuts[1:], more[:length], more[length:], strict=False)
    return [(max(0, start - before), min(NUM_BLOCKS, end + after)) for start, end, before, after in spans]


def covers(spans: Iterable[Blocks]) -> bool:
    """True if each block has a server."""
    served = {block for start, end in spans for block in range(start, end)}
    return len(served) == NUM_BLOCKS


def layout_of(number: int) -> int:
    """The layout in which text `number` runs."""
    return number // TEXTS_PER_LAYOUT
