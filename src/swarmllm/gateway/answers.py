"""The shapes of OpenAI's answers, whole and in chunks, made of a generation's events.

Used by `openai_routes` and `websocket`. What swarms have besides is in one field, `swarm`, and only when it was asked
for.
"""

import itertools
import math
import secrets
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from swarmllm.gateway.errors import ApiError
from swarmllm.gateway.events import Event, PromptScores, SwarmEvent, TextPiece
from swarmllm.gateway.generation import GenerationOptions
from swarmllm.gateway.language_model import LanguageModel
from swarmllm.gateway.reasoning import ReasoningReader
from swarmllm.gateway.request_bodies import ChatRequest, CompletionRequest
from swarmllm.gateway.sampling import TokenLogprob
from swarmllm.gateway.tool_calls import CallReader


@dataclass
class _Choice:
    text: str = ""
    finish_reason: str | None = None
    logprobs: list[TokenLogprob | None] = field(default_factory=list)
    begun: bool = False
    reasoning: str = ""
    reasoning_reader: ReasoningReader | None = None
    reader: CallReader | None = None
    """Finds calls of tools in the text."""

    def take(self, event: TextPiece) -> TextPiece:
        """The same event, with thoughts apart, and without what is or may become a call."""
        if self.reasoning_reader is not None:
            thoughts, said = self.reasoning_reader.take(event.text, last=event.finish_reason is not None)
            event = replace(event, text=said, reasoning=thoughts)
            self.reasoning += thoughts
        if self.reader is not None:
            last = event.finish_reason is not None
            said = self.reader.take(event.text, last=last)
            reason = "tool_calls" if self.reader.calls else event.finish_reason
            event = replace(event, text=said, finish_reason=reason)
        self.text += event.text
        self.finish_reason = event.finish_reason or self.finish_reason
        self.logprobs.append(event.logprob)
        return event

    @cached_property
    def calls(self) -> list[dict[str, Any]]:
        """As the API has them; to be asked for when the answer has ended."""
        return [
            {
                "id": f"call_{secrets.token_hex(12)}",
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in (() if self.reader is None else self.reader.calls)
        ]


class Answer:
    """The answer to one request; `chunks(event)` for streams, or `add(event)` and at last `whole()`."""

    def __init__(
        self,
        request: ChatRequest | CompletionRequest,
        model: LanguageModel,
        prompts: list[list[int]],
        options: GenerationOptions,
        *,
        trace: bool = False,
    ) -> None:
        self._request = request
        self._chat = isinstance(request, ChatRequest)
        self._model = model
        self._trace = trace
        self._n = request.n or 1
        self._prompts = prompts
        self._id = f"{'chatcmpl' if self._chat else 'cmpl'}-{secrets.token_hex(12)}"
        self._created = int(time.time())
        self._choices = [_Choice() for _ in range(self._n * len(prompts))]
        if isinstance(request, ChatRequest):
            for choice in self._choices:
                choice.reader = request.call_reader(model)
                if options.constraint is None:  # which holds from the first token on
                    choice.reasoning_reader = model.reasoning_reader(prompts[0])
        self._prompt_tokens = 0
        self._completion_tokens = 0
        self._swarm_events: list[dict[str, Any]] = []
        self._traces: list[dict[str, Any]] = []
        self.error: ApiError | None = None
        """Set when the answer can't be completed."""

    # ------------------------------------------------------------------ whole

    def add(self, event: Event) -> Event:
        """Take note of an event; returns what of it can be told now."""
        if isinstance(event, TextPiece):
            return self._choices[event.index].take(event)
        if isinstance(event, PromptScores):
            self._choices[event.index].logprobs += [self._unscored(event.index), *event.logprobs]
        elif isinstance(event, SwarmEvent):
            self._swarm_events.append({"event": event.name, **event.details})
        else:
            self._prompt_tokens += event.prompt_tokens
            self._completion_tokens += event.completion_tokens
            self._traces.append(event.trace)
            if event.error is not None and self.error is None:
                self.error = ApiError.of(event.error)
        return event

    def whole(self) -> dict[str, Any]:
        """The JSON of the answer, when all has been added."""
        choices = []
        for index, choice in enumerate(self._choices):
            text = self._echo(index) + choice.text
            item = {"index": index, "finish_reason": choice.finish_reason or "length", "logprobs": None}
            if self._wants_logprobs:
                item["logprobs"] = self._logprobs(choice.logprobs)
            if self._chat:
                message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
                if choice.reasoning:
                    message["reasoning_content"] = choice.reasoning
                if choice.calls:
                    message |= {"content": text or None, "tool_calls": choice.calls}
                item["message"] = message
            else:
                item["text"] = text
            choices.append(item)
        answer = {**self._head("chat.completion" if self._chat else "text_completion"), "choices": choices}
        answer["usage"] = self._usage()
        swarm = self._swarm()
        return {**answer, "swarm": swarm} if swarm else answer

    # ------------------------------------------------------------------ chunks

    def chunks(self, event: Event) -> Iterator[dict[str, Any]]:
        """What to send for an event; `error` may be set after it."""
        event = self.add(event)
        if isinstance(event, SwarmEvent):
            if self._request.swarm_events:
                yield self._chunk([], swarm=self._swarm_events[-1])
        elif isinstance(event, PromptScores):
            yield from self._begin(event.index, [self._unscored(event.index), *event.logprobs])
        elif isinstance(event, TextPiece):
            yield from self._begin(event.index, None)
            if event.finish_reason == "tool_calls":
                event = yield from self._calls(event)
            if event.text or event.reasoning or event.finish_reason or event.logprob is not None:
                yield self._chunk([self._piece(event)])
        elif event.error is None and not self._chat and self._request.max_tokens == 0:
            for index in range(event.first_index, event.first_index + self._n):
                yield from self._begin(index, None)
                yield self._chunk([self._piece(TextPiece(index, "", None, "length"))])

    def last_chunks(self) -> Iterator[dict[str, Any]]:
        """What comes after all choices."""
        options = self._request.stream_options
        if options is not None and options.include_usage:
            yield {**self._chunk([]), "usage": self._usage()}
        if self._trace:
            yield self._chunk([], swarm={"event": "trace", "traces": self._traces})

    def _begin(self, index: int, scores: list[TokenLogprob | None] | None) -> Iterator[dict[str, Any]]:
        """The first chunk of a choice: its role, or the prompt that is echoed."""
        choice = self._choices[index]
        if choice.begun:
            return
        choice.begun = True
        item: dict[str, Any] = {"index": index, "logprobs": None, "finish_reason": None}
        if self._chat:
            yield self._chunk([{**item, "delta": {"role": "assistant", "content": ""}}])
        elif echoed := self._echo(index):
            if scores is not None:
                item["logprobs"] = self._logprobs(scores)
            yield self._chunk([{**item, "text": echoed}])

    def _calls(self, event: TextPiece) -> Generator[dict[str, Any], None, TextPiece]:
        """What is said before calls, and these; returns what is left: that the answer has ended."""
        if event.text or event.reasoning or event.logprob is not None:
            yield self._chunk([{**self._piece(event), "finish_reason": None}])
        for place, call in enumerate(self._choices[event.index].calls):
            item = {"index": event.index, "logprobs": None, "finish_reason": None}
            yield self._chunk([{**item, "delta": {"tool_calls": [{"index": place, **call}]}}])
        return replace(event, text="", reasoning="", logprob=None)

    def _piece(self, event: TextPiece) -> dict[str, Any]:
        logprobs = None if event.logprob is None else self._logprobs([event.logprob])
        item = {"index": event.index, "logprobs": logprobs, "finish_reason": event.finish_reason}
        if self._chat:
            delta = {"reasoning_content": event.reasoning, "content": event.text}
            return {**item, "delta": {name: text for name, text in delta.items() if text}}
        return {**item, "text": event.text}

    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        return {**self._head(kind), "choices": choices, **more}

    # ------------------------------------------------------------------ parts

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model.name,
            "system_fingerprint": self._model.fingerprint[:16],
        }

    def _usage(self) -> dict[str, int]:
        prompt, completion = self._prompt_tokens, self._completion_tokens
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    def _swarm(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if self._request.swarm_events:
            found["events"] = self._swarm_events
        if self._trace:
            found["traces"] = self._traces
        return found

    def _echo(self, index: int) -> str:
        request = self._request
        if isinstance(request, ChatRequest) or not request.echo:
            return ""
        return self._model.decode(self._prompts[index // self._n])

    @property
    def _wants_logprobs(self) -> bool:
        asked = self._request.logprobs
        return bool(asked) if self._chat else asked is not None

    def _unscored(self, index: int) -> TokenLogprob:
        """The first token of a prompt, which follows nothing."""
        return TokenLogprob(self._prompts[index // self._n][0], float("nan"), ())

    def _logprobs(self, given: list[TokenLogprob | None]) -> dict[str, Any]:
        found = [logprob for logprob in given if logprob is not None]
        text = self._model.token_text
        if self._chat:
            return {
                "content": [
                    {
                        **_named(text(one.token_id), one.logprob),
                        "top_logprobs": [_named(text(token), logprob) for token, logprob in one.top],
                    }
                    for one in found
                ],
                "refusal": None,
            }
        tokens = [text(one.token_id) for one in found]
        offsets = list(itertools.accumulate(map(len, tokens), initial=0))[:-1]
        return {
            "tokens": tokens,
            "token_logprobs": [None if math.isnan(one.logprob) else _finite(one.logprob) for one in found],
            "top_logprobs": [
                None if math.isnan(one.logprob) else {text(token): _finite(logprob) for token, logprob in one.top}
                for one in found
            ],
            "text_offset": offsets,
        }


def _named(token: str, logprob: float) -> dict[str, Any]:
    return {"token": token, "logprob": _finite(logprob), "bytes": list(token.encode())}


def _finite(logprob: float) -> float:
    """JSON knows no -inf, which a processor of the checkpoint may give."""
    return max(logprob, -9999.0)
