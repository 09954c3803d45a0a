"""`WS /ws/generate`: OpenAI's chats and completions as messages of a WebSocket.

Answers are the chunks of OpenAI's streams.

A message is the JSON of a chat request (with `messages`) or a completion (with `prompt`). It may have an `id`, a number
or a short string, which all its answers repeat as `request`. Several requests may be under way. `{"cancel": id}` ends
one; closing the socket ends all. After the last chunk comes `{"done": true}`, with `unused_fields` if there are any, or
`{"error": …}`.
"""

import asyncio
from contextlib import suppress
from typing import Any

from starlette.websockets import WebSocket, WebSocketDisconnect

from swarmllm.api import SwarmError
from swarmllm.gateway.apis.chat_request import ChatRequest
from swarmllm.gateway.apis.openai import OpenAIAnswer
from swarmllm.gateway.apis.request_bodies import CompletionRequest, unused_fields
from swarmllm.gateway.apis.responder import Dialect, Responder, aside, read_json, to_json
from swarmllm.gateway.engine.engine import Answering
from swarmllm.gateway.errors import ApiError
from swarmllm.gateway.guard import CALLER
from swarmllm.gateway.routes import websocket

TOO_BIG = 1009
TRY_AGAIN_LATER = 1013
MAX_REQUESTS = 16
"""Requests under way on one socket."""
MAX_ID_CHARS = 128


class OverWebSocket(Dialect):
    """Handler of the WebSocket."""

    def __init__(self, responder: Responder) -> None:
        super().__init__(responder)
        self._max_bytes = responder.config.max_body_bytes
        self._max_sockets = max(1, responder.config.max_connections // 2)
        self._open: dict[_Conversation, WebSocket] = {}  # in the order of their last messages
        self._closing: set[asyncio.Task[None]] = set()

    @websocket("/ws/generate")
    async def generate(self, socket: WebSocket) -> None:
        """Serve one socket until it closes."""
        offered = socket.scope.get("subprotocols", [])
        await socket.accept(subprotocol=offered[0] if offered else None)
        conversation = _Conversation(socket, self._responder)
        if len(self._open) >= self._max_sockets and not self._make_room():
            await socket.close(TRY_AGAIN_LATER, f"{self._max_sockets} sockets are answered at the moment")
            return
        try:
            async with asyncio.TaskGroup() as tasks:
                try:
                    while True:
                        self._open.pop(conversation, None)
                        self._open[conversation] = socket
                        text = await socket.receive_text()
                        if len(text) > self._max_bytes:
                            await socket.close(TOO_BIG, f"a message is larger than {self._max_bytes} bytes")
                            break
                        await conversation.take(text, tasks, socket.scope[CALLER])
                except (WebSocketDisconnect, KeyError):  # KeyError: a message of bytes, not of text
                    pass
                finally:
                    self._open.pop(conversation, None)
                    conversation.cancel_all()
        except* (WebSocketDisconnect, RuntimeError):  # RuntimeError: the socket is closed already
            pass

    def _make_room(self) -> bool:
        """Close the idle socket that has been silent for longest. Returns False if there is none."""
        for conversation, socket in self._open.items():
            if conversation.is_idle:
                del self._open[conversation]
                closing = asyncio.create_task(_dismiss(socket), name="close a WebSocket")
                self._closing.add(closing)
                closing.add_done_callback(self._closing.discard)
                return True
        return False


async def _dismiss(socket: WebSocket) -> None:
    """Close a socket. Run it as a task: its client may take a minute to confirm."""
    with suppress(WebSocketDisconnect, RuntimeError):
        await socket.close(TRY_AGAIN_LATER, "other clients need a socket")


class _Conversation:
    def __init__(self, socket: WebSocket, responder: Responder) -> None:
        self._socket = socket
        self._responder = responder
        self._under_way: dict[str, Answering | None] = {}

    @property
    def is_idle(self) -> bool:
        """No request is under way."""
        return not self._under_way

    async def take(self, text: str, tasks: asyncio.TaskGroup, caller: str) -> None:
        """Take one message. It counts for the caller's rate limit, unless it cancels a request."""
        label: Any = None
        try:
            data = text.encode()
            message = await aside(len(data), lambda: _read(data))
            if "cancel" in message:
                self._cancel(str(_label(message["cancel"])))
                return
            self._responder.rates.take(caller)
            label = _label(message.get("id"))
            if str(label) in self._under_way:
                raise ApiError(400, f"a request {label!r} is under way", param="id", code="invalid_value")
            if len(self._under_way) >= MAX_REQUESTS:
                raise ApiError(429, f"one socket may have {MAX_REQUESTS} requests under way", code="queue_full")
            body = await aside(len(data), lambda: self._asked(message))
        except ApiError as error:
            await self._send(label, error.body())
        else:
            self._under_way[str(label)] = None
            tasks.create_task(self._answer(label, body, len(data)), name="answer on a WebSocket")

    def _asked(self, message: dict[str, Any]) -> ChatRequest | CompletionRequest:
        parse = self._responder.parse
        message = {"stream": True, **message}
        return parse(ChatRequest, message) if "messages" in message else parse(CompletionRequest, message)

    def cancel_all(self) -> None:
        """End all requests: the socket is closed."""
        for answering in self._under_way.values():
            if answering is not None:
                answering.cancel()

    def _cancel(self, label: str) -> None:
        answering = self._under_way.get(label)
        if answering is not None:
            answering.cancel()

    async def _answer(self, label: Any, body: ChatRequest | CompletionRequest, num_bytes: int) -> None:
        answering: Answering | None = None
        try:
            caller = self._socket.scope[CALLER]
            answering, answer = await self._responder.begin(body, num_bytes, caller, OpenAIAnswer)
            self._under_way[str(label)] = answering
            async for event in answering:
                for chunk in answer.chunks(event):
                    await self._send(label, chunk)
            if answer.error is not None:
                raise answer.error
            for chunk in answer.last_chunks():
                await self._send(label, chunk)
            unused = [name for name in await asyncio.to_thread(unused_fields, body) if name != "id"]
            await self._send(label, {"done": True, **({"unused_fields": unused} if unused else {})})
        except (ApiError, SwarmError) as error:
            await self._send(label, ApiError.of(error).body())
        finally:
            if answering is not None:
                answering.cancel()
            del self._under_way[str(label)]

    async def _send(self, label: Any, message: dict[str, Any]) -> None:
        if label is not None:
            message = {**message, "request": label}
        await self._socket.send_text(to_json(message))


def _read(data: bytes) -> dict[str, Any]:
    """Read a message. Raises: ApiError: it is no JSON object."""
    message = read_json(data)
    if not isinstance(message, dict):
        raise ApiError(400, "a message is a JSON object", code="invalid_value")
    return message


def _label(given: Any) -> str | int | None:
    """Check the id of a request, if it has one. Raises: ApiError: it is no number or string, or too long."""
    if given is None or (isinstance(given, str | int) and len(str(given)) <= MAX_ID_CHARS):
        return given
    raise ApiError(
        400, f"an id is a number or a string of at most {MAX_ID_CHARS} characters", param="id", code="invalid_value"
    )
