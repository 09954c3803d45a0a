"""From a checked request to its answer over HTTP, whole or as a stream, in the shape of any API.

All routes use it. Each API has a subclass of `Answer`, which takes note of a generation's events and writes them in the
API's own shape. `Responder` reads requests, has the engine begin, and sends the answers.
"""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Protocol, TypeVar

from pydantic import ValidationError
from pydantic_core import from_json
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from swarmllm.gateway.apis.chat_request import ChatMessage, ChatRequest, picture_urls
from swarmllm.gateway.apis.remote_pictures import RemotePictures
from swarmllm.gateway.apis.request_bodies import Body, CompletionRequest, Sampling, refuse_unknown, unused_fields
from swarmllm.gateway.engine.engine import Answering, Engine
from swarmllm.gateway.engine.generation import GenerationOptions
from swarmllm.gateway.engine.language_model import LanguageModel
from swarmllm.gateway.engine.model_choice import ModelChoice
from swarmllm.gateway.engine.vision import (
    Room,
    Taken,
    bad_picture,
    default_bytes,
    free_memory,
    keep_memory,
    unpacked_bytes,
)
from swarmllm.gateway.errors import ApiError
from swarmllm.gateway.guard import CALLER, UNUSED, Rates
from swarmllm.gateway.routes import Routes
from swarmllm.gateway.sampling import TokenLogprob
from swarmllm.gateway.settings import GatewayConfig
from swarmllm.gateway.text import Event, PromptScores, SwarmEvent, TextPiece

KEEPALIVE_S = 15.0
"""Seconds of silence after which a stream gives a sign of life. Assumed: proxies give up after 30 or 60."""

BODY_TIMEOUT_S = 60.0
"""For a whole request to arrive. Assumed: 1 MiB over the slowest line that people use."""
MAX_CONTAINERS = 1 << 15
"""Objects and lists in a body, as in a header between peers. 4096 messages of a few parts have half as many."""
_dumps = partial(json.dumps, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*+"')
LARGE_BYTES = 1 << 13
"""A body from which on checking and tokenizing it takes milliseconds, in which others want to be served."""

Kind = TypeVar("Kind", bound=Body)
Result = TypeVar("Result")
Given = TypeVar("Given")
Translated = TypeVar("Translated")
Asked = ChatRequest | CompletionRequest


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


Made = TypeVar("Made", bound=Answer)
Shape = Callable[[Asked, LanguageModel, list[list[int]], GenerationOptions], Made]
"""Makes an answer of an API."""


class Responder:
    """Made once per gateway."""

    def __init__(self, models: ModelChoice, engine: Engine, config: GatewayConfig, rates: Rates) -> None:
        self.models = models
        self.engine = engine
        self.config = config
        self.rates = rates
        num_bytes = default_bytes() if config.max_input_bytes is None else config.max_input_bytes
        of_fetched = num_bytes // 4 if config.picture_hosts else 0
        self.pictures = RemotePictures(config.picture_hosts, num_bytes=of_fetched, max_waiting=config.max_waiting)
        self.memory = Room(num_bytes - of_fetched, most=config.max_waiting)
        """For pictures and sounds that are unpacked."""

    async def read(self, request: Request, kind: type[Kind]) -> tuple[Kind, int]:
        """The request in a body, and the body's length in bytes.

        Raises:
            ApiError: it is not one, or has a field that isn't honoured.
        """
        data = await read_body(request, self.config.max_body_bytes)
        found, unused = await aside(len(data), lambda: self._parse_and_note(kind, data))
        request.scope[UNUSED] = unused
        return found, len(data)

    def _parse_and_note(self, kind: type[Kind], data: bytes) -> tuple[Kind, list[str]]:
        found = self.parse(kind, data)
        return found, unused_fields(found)

    def parse(self, kind: type[Kind], body: bytes | dict[str, Any]) -> Kind:
        """As `read`, of a body that is there, or the fields of a form."""
        return read_request(kind, body, lenient=self.config.lenient)

    async def prepare(
        self, body: Asked, num_bytes: int, caller: str, default_max_tokens: int | None = None
    ) -> tuple[LanguageModel, list[list[int]], GenerationOptions]:
        """The model that is meant, the prompts' tokens and how to answer them.

        Pictures in the prompts take memory until `free_memory` or, once the engine has begun with them, their end.

        Raises:
            ApiError, SwarmError: that can't be done.
        """
        model = self.models.named(body.model)
        n, most = body.n or 1, self.config.max_choices
        if n > most:
            raise ApiError(400, f"n can be at most {most} here, not {n}", param="n", code="invalid_value")
        longest = self.config.default_max_tokens if default_max_tokens is None else default_max_tokens
        if isinstance(body, ChatRequest):
            async with self.unpacking(model, body.messages, caller) as memory:
                found = await asyncio.get_running_loop().run_in_executor(
                    model.templates.threads, _prepare, model, body, longest
                )
                if memory is not None:
                    keep_memory(found[1], memory, n)
            return found
        weight = LARGE_BYTES if body.is_constrained else num_bytes
        return await aside(weight, lambda: _prepare(model, body, longest))

    @asynccontextmanager
    async def unpacking(
        self, model: LanguageModel, messages: Sequence[ChatMessage], caller: str
    ) -> AsyncIterator[Taken | None]:
        """While inside, pictures of a chat are there, and memory for them, which is freed if this ends by an error.

        Raises:
            ApiError: they can't be had, or need too much.
        """
        if model.picture_processor is None or not picture_urls(messages):
            yield None
            return
        async with self.pictures.fetched(messages, caller):
            needed = await asyncio.get_running_loop().run_in_executor(
                model.templates.threads, unpacked_bytes, picture_urls(messages)
            )
            if needed > self.memory.size:
                raise bad_picture(
                    f"the pictures take {needed >> 20} MiB of memory when they are unpacked, and this gateway has "
                    f"{self.memory.size >> 20} for all: send smaller or fewer ones, or raise max_input_bytes"
                )
            memory = await self.memory.take(needed, caller)
            try:
                yield memory
            except BaseException:
                memory.free()
                raise

    async def begin(
        self, body: Asked, num_bytes: int, caller: str, shape: Shape[Made], default_max_tokens: int | None = None
    ) -> tuple[Answering, Made]:
        """Have the engine begin to generate; what it makes, and the answer in that shape.

        Raises:
            ApiError, SwarmError: that can't be done.
        """
        model, prompts, options = await self.prepare(body, num_bytes, caller, default_max_tokens)
        try:
            answer = shape(body, model, prompts, options)
            return self.engine.start(model, prompts, options), answer
        except BaseException:
            free_memory(prompts)
            raise

    async def answer(
        self,
        request: Request,
        body: Asked,
        num_bytes: int,
        shape: Shape[Answer],
        *,
        stream: bool,
        default_max_tokens: int | None = None,
    ) -> Response:
        """Generate, and answer in that shape.

        Raises:
            ApiError, SwarmError: that can't be done.
        """
        answering, answer = await self.begin(body, num_bytes, request.scope[CALLER], shape, default_max_tokens)
        if stream:
            return StreamedAnswer(answering, answer)
        async with cancelled_when_gone(request.receive, answering):
            async for event in answering:
                answer.add(event)
        if answer.error is not None:
            raise answer.error
        return await asyncio.to_thread(lambda: LargeAnswer(answer.whole()))


class Dialect(Routes):
    """One API that people's programs know. `app` lists them all.

    A dialect has a `Body` for each request, which it translates to a chat or a completion, and an `Answer`, which
    writes our events in its own shape; its errors may have a shape, too. A new one is a new file like these.
    """

    def __init__(self, responder: Responder) -> None:
        self._responder = responder


def _prepare(
    model: LanguageModel, body: Asked, default_max_tokens: int
) -> tuple[LanguageModel, list[list[int]], GenerationOptions]:
    prompts = [body.prompt(model)] if isinstance(body, ChatRequest) else body.prompts(model)
    options = body.options(model, max(map(len, prompts)), default_max_tokens)
    if isinstance(body, ChatRequest):
        options = replace(options, new_reader=partial(body.reader, model, prompts[0], options))
    if options.constraint is not None:
        model.grammars().matcher(options.constraint)  # refused now, not in the middle of an answer
    return model, prompts, options


class StreamedAnswer(Response):
    """A stream; when whoever reads them has gone, the generation ends, also while no token comes."""

    def __init__(self, answering: Answering, answer: Answer) -> None:
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        if answering.place:
            headers["x-queue-place"] = str(answering.place)
        super().__init__(headers=headers, media_type=answer.media_type)
        self._answering = answering
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(key, value) for key, value in self.raw_headers if key != b"content-length"]
        async with cancelled_when_gone(receive, self._answering):
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            async for data in stream(self._answering, self._answer):
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def stream(answering: Answering, answer: Answer) -> AsyncIterator[bytes]:
    """The lines of the stream; what happens at the same time goes out together."""
    if begun := answer.begin():
        yield begun
    while not answering.has_ended:
        events = await answering.some(KEEPALIVE_S)
        if lines := b"".join(map(answer.pieces, events)):
            yield lines
        elif not events and answer.sign_of_life:
            yield answer.sign_of_life
        if answer.error is not None:
            answering.cancel()
            yield answer.failure(answer.error)
            return
    yield answer.end()


class LargeAnswer(JSONResponse):
    """JSON that is written piece by piece: in one call, the interpreter would be held for 1 s per million numbers."""

    def render(self, content: Any) -> bytes:
        return _in_pieces(content).encode()


def _in_pieces(content: Any) -> str:
    if isinstance(content, dict):
        return "{" + ",".join(f"{_dumps(name)}:{_in_pieces(value)}" for name, value in content.items()) + "}"
    if isinstance(content, list) and content and isinstance(content[0], dict | list):
        return f"[{','.join(map(_in_pieces, content))}]"
    return _dumps(content)


class UnderWay(Protocol):
    """What is computed for a client."""

    def cancel(self) -> None:
        """Nobody waits for it any more."""


@asynccontextmanager
async def cancelled_when_gone(receive: Receive, answering: UnderWay) -> AsyncIterator[None]:
    """While inside, a client that hangs up ends what is computed for it; so does leaving."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        answering.cancel()

    watching = asyncio.create_task(watch(), name="watch for a client that hangs up")
    try:
        yield
    finally:
        watching.cancel()
        answering.cancel()


async def aside(num_bytes: int, function: Callable[[], Result]) -> Result:
    """What a function makes of so many bytes of a request, which is small or goes to a thread."""
    return function() if num_bytes < LARGE_BYTES else await asyncio.to_thread(function)


async def translated(num_bytes: int, translate: Callable[[Given], Translated], given: Given) -> Translated:
    """The chat or completion that `translate` makes of a request of so many bytes.

    Raises:
        ApiError: no chat can be like that.
    """
    try:
        return await aside(num_bytes, lambda: translate(given))
    except ValidationError as error:
        raise ApiError.invalid(error) from None


def read_request(kind: type[Kind], body: bytes | dict[str, Any], *, lenient: bool) -> Kind:
    """The request in a body, which is JSON, or in the fields of a form.

    Raises:
        ApiError: it is not one, or has a field that isn't honoured.
    """
    given = body if isinstance(body, dict) else read_json(body)
    try:
        found = kind.model_validate(given)
    except ValidationError as error:
        raise ApiError.invalid(error) from None
    refuse_unknown(found, lenient=lenient)
    return found


def read_json(text: bytes) -> Any:
    """What a JSON text says, in plain objects; the interpreter is held for some hundredths of a second at most.

    pydantic's own reader holds it for 1 s with 350,000 empty lists, as does the garbage collector with what they are.

    Raises:
        ApiError: it is none, or of too many objects and lists.
    """
    if _num_containers(text) > MAX_CONTAINERS and _num_containers(_STRING.sub(b"", text)) > MAX_CONTAINERS:
        raise ApiError(
            400, f"the JSON has more than {MAX_CONTAINERS} objects and lists: send fewer", code="invalid_json"
        )
    try:
        return from_json(text)
    except ValueError as error:
        raise ApiError(400, f"Invalid JSON: {error}", code="invalid_json") from None


def _num_containers(text: bytes) -> int:
    return text.count(b"[") + text.count(b"{")


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The body, of which no more is read than is allowed.

    Raises:
        ApiError: it is larger, or doesn't come.
    """
    found = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for chunk in request.stream():
                found += chunk
                if len(found) > max_bytes:
                    raise ApiError(413, f"the body is larger than {max_bytes} bytes", code="body_too_large")
    except TimeoutError:
        raise ApiError(408, f"the body did not come within {BODY_TIMEOUT_S:g} s", code="timeout") from None
    return bytes(found)
