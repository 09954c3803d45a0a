"""What the answers of all APIs share: they take note of a generation's events.

Each API's own shape is a subclass: `openai_answers`, and those in `other_apis`. `responder` sends them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from swarmllm.gateway.engine.generation import GenerationOptions
from swarmllm.gateway.engine.language_model import LanguageModel
from swarmllm.gateway.errors import ApiError
from swarmllm.gateway.requests.request_bodies import Sampling
from swarmllm.gateway.tokens.events import Event, PromptScores, SwarmEvent, TextPiece
from swarmllm.gateway.tokens.sampling import TokenLogprob


@dataclass
class CallInAnswer:
    """One call of a tool, as far as it has come."""

    id: str
    name: str
    arguments: str = ""


@dataclass
class Choice:
    """One of the answers to a request, as far as it has come."""

    text: str = ""
    reasoning: str = ""
    calls: list[CallInAnswer] = field(default_factory=list)
    logprobs: list[TokenLogprob | None] = field(default_factory=list)
    finish_reason: str | None = None
    stopped_by: str | None = None
    """A stop string."""
    begun: bool = False
    """For those who write: whether they have."""

    def take(self, event: TextPiece) -> TextPiece:
        """The same event; an answer that stops with calls has them as its reason."""
        for piece in event.calls:
            if piece.is_new:
                self.calls.append(CallInAnswer(piece.id, piece.name))
            self.calls[piece.place].arguments += piece.arguments
        if self.calls and event.finish_reason == "stop":
            event = replace(event, finish_reason="tool_calls")
        self.text += event.text
        self.reasoning += event.reasoning
        self.logprobs.append(event.logprob)
        self.finish_reason = event.finish_reason or self.finish_reason
        self.stopped_by = event.stopped_by or self.stopped_by
        return event


class Answer:
    """The answer to one request: `begin`, `pieces` of each event and `end` (or `failure`) make a stream, and `whole`,
    when all events have been added, what isn't streamed."""

    media_type: ClassVar[str] = "text/event-stream"
    """The media type of a stream."""
    sign_of_life: ClassVar[bytes] = b": still there\n\n"
    """In a stream, when nothing comes for long."""

    def __init__(
        self, _request: Sampling, model: LanguageModel, prompts: Sequence[list[int]], options: GenerationOptions
    ) -> None:
        self._model = model
        self._prompts = prompts
        self._choices = [Choice() for _ in range(options.n * len(prompts))]
        self._prompt_tokens = 0
        self._completion_tokens = 0
        self._swarm_events: list[dict[str, Any]] = []
        self._traces: list[dict[str, Any]] = []
        self.error: ApiError | None = None
        """Set when the answer can't be completed."""

    def add(self, event: Event) -> Event:
        """Take note of an event; returns what of it can be told now."""
        if isinstance(event, TextPiece):
            return self._choices[event.index].take(event)
        if isinstance(event, PromptScores):
            self._choices[event.index].logprobs += event.logprobs
        elif isinstance(event, SwarmEvent):
            self._swarm_events.append({"event": event.name, **event.details})
        else:
            self._prompt_tokens += event.prompt_tokens
            self._completion_tokens += event.completion_tokens
            self._traces.append(event.trace)
            if event.error is not None and self.error is None:
                self.error = ApiError.of(event.error)
        return event

    def begin(self) -> bytes:
        """What a stream begins with."""
        return b""

    def pieces(self, event: Event) -> bytes:
        """What to send for an event; `error` may be set after it."""
        raise NotImplementedError

    def end(self) -> bytes:
        """What comes after all events."""
        raise NotImplementedError

    def failure(self, error: ApiError) -> bytes:
        """What comes instead of the end."""
        raise NotImplementedError

    def whole(self) -> dict[str, Any]:
        """The JSON of an answer that isn't streamed."""
        raise NotImplementedError
