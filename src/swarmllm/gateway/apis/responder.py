"""Reads requests and answers them over HTTP, whole or as a stream, in the shape of each API.

`Responder` reads a request, starts the engine, and sends the answer. Each API subclasses `Dialect` for its handlers,
and `Answer` to write the events of a generation in its own shape.
"""

import asyncio
import codecs
import json
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
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
from swarmllm.gateway.apis.request_bodies import (
    MOST_NAMES,
    Body,
    CompletionRequest,
    Sampling,
    refuse_unknown,
    unused_fields,
)
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
"""Seconds of silence after which a stream sends a sign of life. Assumed: proxies give up after 30 or 60."""

BODY_TIMEOUT_S = 60.0
"""Seconds for a whole request to arrive. Assumed: 1 MiB over the slowest line in use."""
MAX_CONTAINERS = 1 << 15
"""Most objects and lists in a body, the same limit as for headers between peers. 4096 messages with a few parts have
half as many."""
DONE = b"data: [DONE]\n\n"
"""The end of a stream of OpenAI's."""
to_json = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode
"""As json.dumps, which would make an encoder each time."""
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"')
_CONTAINERS = (dict, list)
LARGE_BYTES = 1 << 13
"""A body of at least this size takes milliseconds to check and tokenize: that happens in a thread."""

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
    """The stop text that ended it."""
    begun: bool = False
    """A stream has sent the start of this answer."""

    def take(self, event: TextPiece) -> TextPiece:
        """Add a piece; returns it for the stream. The reason of an answer that stops after calls is "tool_calls"."""
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
    """The answer to one request, in the shape of an API.

    A stream consists of `begin`, `pieces` for each event, and `end` or `failure`. `whole` is the answer without a
    stream, after all events were added.
    """

    media_type: ClassVar[str] = "text/event-stream"
    """Media type of a stream."""
    sign_of_life: ClassVar[bytes] = b": still there\n\n"
    """Sent in a stream after a long silence."""

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
        """The reason why the answer can't be completed."""

    def add(self, event: Event) -> Event:
        """Add an event; returns the event for the stream."""
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
        """The start of a stream."""
        return b""

    def pieces(self, event: Event) -> bytes:
        """The bytes for an event; `error` may be set afterwards."""
        raise NotImplementedError

    def end(self) -> bytes:
        """The end of a stream, after all events."""
        raise NotImplementedError

    def failure(self, error: ApiError) -> bytes:
        """The end of a stream that fails."""
        raise NotImplementedError

    def whole(self) -> dict[str, Any]:
        """The JSON of an answer without a stream."""
        raise NotImplementedError


Made = TypeVar("Made", bound=Answer)
Shape = Callable[[Asked, LanguageModel, list[list[int]], GenerationOptions], Made]
"""Makes the answer of an API."""


class Responder:
    """Reads requests and sends answers, for all APIs of a gateway."""

    def __init__(self, models: ModelChoice, engine: Engine, config: GatewayConfig, rates: Rates) -> None:
        self.models = models
        self.engine = engine
        self.config = config
        self.rates = rates
        num_bytes = default_bytes() if config.max_input_bytes is None else config.max_input_bytes
        of_fetched = num_bytes // 4 if config.picture_hosts else 0
        self.pictures = RemotePictures(config.picture_hosts, num_bytes=of_fetched, max_waiting=config.max_waiting)
        self.memory = Room(num_bytes - of_fetched, most=config.max_waiting)
        """Memory for unpacked pictures and sounds."""

    async def read(self, request: Request, kind: type[Kind]) -> tuple[Kind, int]:
        """Read a request; returns it and its length in bytes.

        Raises:
            ApiError: it is not such a request, or has a field that can't be honoured.
        """
        data = await read_body(request, self.config.max_body_bytes)
        found, unused = await aside(len(data), lambda: self._parse_and_note(kind, data))
        request.scope[UNUSED] = unused
        return found, len(data)

    def _parse_and_note(self, kind: type[Kind], data: bytes) -> tuple[Kind, list[str]]:
        found = self.parse(kind, data)
        return found, unused_fields(found)

    def parse(self, kind: type[Kind], body: bytes | dict[str, Any]) -> Kind:
        """Check a body that has been read already, or the fields of a form. Raises as `read`."""
        return read_request(kind, body, lenient=self.config.lenient)

    async def prepare(
        self, body: Asked, num_bytes: int, caller: str, default_max_tokens: int | None = None
    ) -> tuple[LanguageModel, list[list[int]], GenerationOptions]:
        """The model, the token ids of each prompt, and the options of the generation.

        Pictures in the prompts take memory until `free_memory`, or until the engine is done with them.

        Raises:
            ApiError, SwarmError: the request can't be answered.
        """
        async with self.models.using(self.models.named, body.model) as model:
            return await self._prepare(model, body, num_bytes, caller, default_max_tokens)

    async def _prepare(
        self, model: LanguageModel, body: Asked, num_bytes: int, caller: str, default_max_tokens: int | None
    ) -> tuple[LanguageModel, list[list[int]], GenerationOptions]:
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
        """Within the block, the pictures of a chat are fetched and have their memory. An error frees that memory.

        Raises:
            ApiError: a picture can't be fetched, or they need too much memory.
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
        """Start to generate; returns the running generation and an empty answer in this shape.

        Raises:
            ApiError, SwarmError: the request can't be answered.
        """
        async with self.models.using(self.models.named, body.model) as model:
            _, prompts, options = await self._prepare(model, body, num_bytes, caller, default_max_tokens)
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
        """Generate, and answer in this shape.

        Raises:
            ApiError, SwarmError: the request can't be answered.
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
    """One API that people's programs know. `app` lists all of them.

    A dialect has a `Body` for each request, which it translates to a chat or a completion. It has an `Answer`, which
    writes our events in its own shape. It may have its own shape of errors. A new dialect is a new file in this
    package, and a name in `DIALECTS` of `gateway/app`.
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
        model.grammars().matcher(options.constraint)  # refuse it now, not in the middle of an answer
    return model, prompts, options


class StreamedAnswer(Response):
    """A stream. If its reader hangs up, the generation ends, even while no token comes.

    A request that fails before the first token is answered with the error's status, as without a stream.
    """

    def __init__(self, answering: Answering, answer: Answer) -> None:
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        if answering.place:
            headers["x-queue-place"] = str(answering.place)
        super().__init__(headers=headers, media_type=answer.media_type)
        self._answering = answering
        self._answer = answer
        self._has_begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(key, value) for key, value in self.raw_headers if key != b"content-length"]
        async with cancelled_when_gone(receive, self._answering):
            lines = self._lines()
            first = asyncio.ensure_future(anext(lines))
            try:
                if not self._answering.place:  # those in the queue see their place at once
                    await asyncio.wait((first,), timeout=KEEPALIVE_S)
                if first.done():
                    first.result()  # raises the failure
                self._has_begun = True
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                await send({"type": "http.response.body", "body": await first, "more_body": True})
                async for data in lines:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
            finally:
                first.cancel()

    async def _lines(self) -> AsyncIterator[bytes]:
        """The bytes of the stream. Events that come at the same time go out together, its start with the first ones.

        Raises:
            ApiError: it has failed before it has begun.
        """
        answering, answer = self._answering, self._answer
        start = answer.begin()
        while not answering.has_ended:
            events = await answering.some(KEEPALIVE_S)
            lines = b"".join(map(answer.pieces, events))
            if answer.error is not None:
                answering.cancel()
                if not lines and not self._has_begun:
                    raise answer.error
                yield start + lines + answer.failure(answer.error)
                return
            if lines := lines or (b"" if events else answer.sign_of_life):
                yield start + lines
                start = b""
        yield start + answer.end()


def sse(data: dict[str, Any], kind: str | None = None) -> bytes:
    """Encode one server-sent event, with its kind as its name."""
    name = "" if kind is None else f"event: {kind}\n"
    return f"{name}data: {to_json(data)}\n\n".encode()


class LargeAnswer(JSONResponse):
    """JSON that is encoded piece by piece: one call would hold the interpreter for 1 s per million numbers."""

    def render(self, content: Any) -> bytes:
        return _in_pieces(content).encode()


def _in_pieces(content: Any) -> str:
    if isinstance(content, dict):
        return "{" + ",".join(f"{to_json(name)}:{_in_pieces(value)}" for name, value in content.items()) + "}"
    if isinstance(content, list) and content and isinstance(content[0], dict | list):
        return f"[{','.join(map(_in_pieces, content))}]"
    return to_json(content)


class UnderWay(Protocol):
    """Work for a client that can be cancelled."""

    def cancel(self) -> None:
        """The client has gone."""


@asynccontextmanager
async def cancelled_when_gone(receive: Receive, answering: UnderWay) -> AsyncIterator[None]:
    """Within the block, work for a client is cancelled if the client hangs up. The end of the block cancels it as
    well."""

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
    """Run a function on a request of so many bytes: here if it is small, else in a thread."""
    return function() if num_bytes < LARGE_BYTES else await asyncio.to_thread(function)


async def translated(num_bytes: int, translate: Callable[[Given], Translated], given: Given) -> Translated:
    """Translate a request of so many bytes into a chat or a completion.

    Raises:
        ApiError: the result is no valid chat.
    """
    try:
        return await aside(num_bytes, lambda: translate(given))
    except ValidationError as error:
        raise ApiError.invalid(error) from None


def read_request(kind: type[Kind], body: bytes | dict[str, Any], *, lenient: bool) -> Kind:
    """Check a request: the JSON of a body, or the fields of a form.

    Raises:
        ApiError: it is not such a request, or has a field that can't be honoured.
    """
    given = body if isinstance(body, dict) else read_json(body)
    try:
        found = kind.model_validate(given)
    except ValidationError as error:
        raise ApiError.invalid(error) from None
    refuse_unknown(found, lenient=lenient)
    return found


def read_json(text: bytes) -> Any:
    """Read JSON into plain objects. It holds the interpreter for some hundredths of a second at most.

    pydantic's own reader holds it for 1 s with 350,000 empty lists; so does the garbage collector afterwards.

    A byte order mark is left out, which many programs on Windows write.

    Raises:
        ApiError: it is no JSON, has too many objects and lists, or an object has a field twice.
    """
    text = text.removeprefix(codecs.BOM_UTF8)
    if text.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise ApiError(400, "Invalid JSON: it is in UTF-16: send it in UTF-8", code="invalid_json")
    if _num_containers(text) > MAX_CONTAINERS and _num_containers(_STRING.sub(b"", text)) > MAX_CONTAINERS:
        raise ApiError(
            400, f"the JSON has more than {MAX_CONTAINERS} objects and lists: send fewer", code="invalid_json"
        )
    try:
        found = from_json(text)
    except ValueError as error:
        raise ApiError(400, f"Invalid JSON: {error}", code="invalid_json") from None
    # Each field has one colon outside strings, and pydantic's reader keeps only the last of those with the same name.
    if _num_fields(found) not in (text.count(b":"), _STRING.sub(b"", text).count(b":")):
        raise ApiError(400, f"the JSON has {_twice(text)} twice in one object: give it once", code="invalid_json")
    return found


def _num_containers(text: bytes) -> int:
    return text.count(b"[") + text.count(b"{")


def _num_fields(found: Any) -> int:
    """Number of fields in all objects."""
    num, left = 0, [found]
    while left:
        one = left.pop()
        if isinstance(one, dict):
            num += len(one)
            one = [*one.values()]
        if isinstance(one, list):
            left += [part for part in one if isinstance(part, _CONTAINERS)]
    return num


def _twice(text: bytes) -> str:
    """Name of a field that an object has twice, in quotation marks."""
    names: list[str] = []

    def note(fields: list[tuple[str, Any]]) -> None:
        names.extend(name for name, num in Counter(name for name, _ in fields).items() if num > 1)

    with suppress(ValueError, RecursionError):
        json.loads(text, object_pairs_hook=note)
    return repr(names[0][:MOST_NAMES]) if names else "a field"


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Read a body, up to the limit.

    Raises:
        ApiError: it is larger, or comes too slowly.
    """
    too_large = ApiError(413, f"the body is larger than {max_bytes} bytes", code="body_too_large")
    if claimed_bytes(request) > max_bytes:
        raise too_large
    found = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for chunk in request.stream():
                found += chunk
                if len(found) > max_bytes:
                    raise too_large
    except TimeoutError:
        raise ApiError(408, f"the body did not come within {BODY_TIMEOUT_S:g} s", code="timeout") from None
    return bytes(found)


def claimed_bytes(request: Request) -> int:
    """Length of the body by the request's head; 0: it says none.

    A client with `Expect: 100-continue` sends its body only if it isn't refused by this.
    """
    claimed = request.headers.get("content-length", "")
    return int(claimed) if claimed.isdecimal() else 0
