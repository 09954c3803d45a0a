"""Events of a request that is answered: from the worker threads (`generation`) to the answers (`responder`)."""

from dataclasses import dataclass
from typing import Any

from swarmllm.gateway.tokens.sampling import TokenLogprob


@dataclass(frozen=True)
class CallPiece:
    """What was added to one call of a tool."""

    place: int
    """Among the calls of its answer."""
    id: str
    name: str
    arguments: str
    """Only what is new."""
    is_new: bool


@dataclass(frozen=True)
class TextPiece:
    """One more token of one answer."""

    index: int
    """The number of the answer, as in the API's `choices`."""
    text: str
    """What it makes certain; may be empty."""
    logprob: TokenLogprob | None = None
    finish_reason: str | None = None
    """`stop` or `length`, with the last piece of this answer."""
    reasoning: str = ""
    """What the model only thinks, which `text` is without."""
    calls: tuple[CallPiece, ...] = ()
    """What was added to calls, which `text` is without."""
    stopped_by: str | None = None
    """The stop string that came, with the last piece."""


@dataclass(frozen=True)
class PromptScores:
    """The log probabilities of a prompt's tokens, of the first not a number; for `echo` with `logprobs`."""

    index: int
    logprobs: tuple[TokenLogprob, ...]


@dataclass(frozen=True)
class SwarmEvent:
    """A diagnostic: `queue`, `route`, `shard_status`, `shard_failover` or `pipeline_aborted`."""

    name: str
    details: dict[str, Any]


@dataclass(frozen=True)
class Ended:
    """A prompt's answers are complete, or (with an error) as complete as they will be."""

    first_index: int
    """The number among the prompt's answers."""
    prompt_tokens: int
    completion_tokens: int
    trace: dict[str, Any]
    error: Exception | None = None
    cancelled: bool = False


Event = TextPiece | PromptScores | SwarmEvent | Ended
