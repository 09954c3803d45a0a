"""`/v1/audio/transcriptions` and `/v1/audio/translations`: what is said in a file with sound. Part of `app`."""

import asyncio
import logging
from collections.abc import AsyncIterator
from functools import partial

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from swarmllm.gateway.apis.openai_answers import DONE, sse
from swarmllm.gateway.apis.responder import KEEPALIVE_S, Responder, cancelled_when_gone
from swarmllm.gateway.apis.transcripts import usage, written
from swarmllm.gateway.engine.engine import Waiter, queue_full
from swarmllm.gateway.engine.hearing_model import HearingModel, Transcript
from swarmllm.gateway.engine.room import Taken
from swarmllm.gateway.engine.sounds import checked_bytes, kept_bytes, read_sound, unpacked_bytes
from swarmllm.gateway.errors import ApiError
from swarmllm.gateway.guard import CALLER, UNUSED
from swarmllm.gateway.requests.audio_request import TranscriptionRequest, TranslationRequest
from swarmllm.gateway.requests.unknown_fields import unused_fields
from swarmllm.gateway.requests.uploads import Form, read_form

logger = logging.getLogger(__name__)
FILE = "file"
"""The field that is one."""
SIGN_OF_LIFE = b": still listening\n\n"


class AudioRoutes:
    """The handlers; made once per gateway."""

    def __init__(self, responder: Responder) -> None:
        self._responder = responder
        self._num_files = 0
        """That come or wait or are heard."""

    async def transcriptions(self, request: Request) -> Response:
        """`POST /v1/audio/transcriptions`"""
        return await self._answer(request, TranscriptionRequest)

    async def translations(self, request: Request) -> Response:
        """`POST /v1/audio/translations`"""
        return await self._answer(request, TranslationRequest)

    async def _answer(self, request: Request, kind: type[TranscriptionRequest]) -> Response:
        config = self._responder.config
        if self._num_files >= config.max_concurrent + config.max_waiting:
            raise queue_full(config.max_concurrent)
        self._num_files += 1
        try:
            form = await read_form(request, FILE, config.max_audio_bytes)
        except BaseException:
            self._num_files -= 1
            raise
        try:
            body = self._responder.parse(kind, form.fields)
            request.scope[UNUSED] = unused_fields(body)
            model = self._responder.models.hearer(body.model)
            model.options(body.wanted())  # refused now, not when its turn comes
        except BaseException:
            self._free(form)
            raise
        hearing = _Hearing(self._responder, model, body, form, request.scope[CALLER])
        hearing.task.add_done_callback(lambda _: self._free(form))
        if body.stream:
            return _StreamedTranscript(hearing)
        async with cancelled_when_gone(request.receive, hearing.waiter):
            heard, seconds = await hearing.task
        text, media_type = written(body, heard, seconds)
        return Response(text, media_type=media_type)

    def _free(self, form: Form) -> None:
        form.close()
        self._num_files -= 1


class _Hearing:
    """A file under way: a worker thread hears it, and the event loop is told of the text by and by."""

    def __init__(
        self, responder: Responder, model: HearingModel, body: TranscriptionRequest, form: Form, caller: str
    ) -> None:
        self._engine, self._room = responder.engine, responder.memory
        self._model, self._body, self._form, self._caller = model, body, form, caller
        self._longest_s = responder.config.max_audio_s
        self.waiter = Waiter(responder.engine)
        self._loop = asyncio.get_running_loop()
        self._pieces: asyncio.Queue[str | None] = asyncio.Queue()
        """Of the text; None: it is going to begin, or has ended."""
        self.task = asyncio.create_task(self._hear_in_turn(), name="hear a file")
        self.task.add_done_callback(lambda _: self._pieces.put_nowait(None))

    async def begun(self) -> None:
        """Return when the file has been read. Raises: what keeps it from being heard."""
        await self._pieces.get()
        if self.task.done():
            await self.task

    async def piece(self, timeout_s: float) -> str | None:
        """More of the text; None: nothing in that time, or it has ended."""
        try:
            return await asyncio.wait_for(self._pieces.get(), timeout_s)
        except TimeoutError:
            return None

    @property
    def has_ended(self) -> bool:
        """Whether all of the text has been given."""
        return self.task.done() and self._pieces.empty()

    def _tell(self, piece: str | None) -> None:
        self._loop.call_soon_threadsafe(self._pieces.put_nowait, piece)

    async def _hear_in_turn(self) -> tuple[Transcript, float]:
        """What was heard, and the sound's length in seconds, once there is memory for it.

        Raises:
            ApiError: it needs more than all; and what hearing raises.
        """
        needed = await asyncio.to_thread(unpacked_bytes, self._form.file, self._model.rate, self._longest_s)
        if needed > self._room.size:
            raise ApiError(
                400,
                f"the sound takes {needed >> 20} MiB of memory when it is unpacked, and this gateway has "
                f"{self._room.size >> 20} for all: send it in parts, as WAV, or raise --max_input_bytes",
                param=FILE,
                code="audio_too_long",
            )
        memory = await self._room.take(needed, self._caller)
        try:
            return await self._engine.compute(partial(self._hear, memory))
        finally:
            memory.free()

    def _hear(self, memory: Taken) -> tuple[Transcript, float]:
        """In a worker thread."""
        self.waiter.go_on()
        samples = read_sound(self._form.file, self._model.rate, self._longest_s)
        self._loop.call_soon_threadsafe(memory.shrink, checked_bytes(samples, memory.amount))
        self._tell(None)
        has_features = False

        def tell(piece: str) -> None:
            nonlocal has_features
            if not has_features:  # the first text has been made of them
                has_features = True
                self._loop.call_soon_threadsafe(memory.shrink, kept_bytes(samples))
            self._tell(piece)

        heard = self._model.write(samples, self._body.wanted(), self.waiter.go_on, tell)
        self._engine.count_written(heard.num_tokens)
        return heard, len(samples) / self._model.rate


class _StreamedTranscript(Response):
    """The text as server-sent events; when whoever reads them has gone, the hearing ends."""

    def __init__(self, hearing: _Hearing) -> None:
        super().__init__(
            headers={"cache-control": "no-store", "x-accel-buffering": "no"}, media_type="text/event-stream"
        )
        self._hearing = hearing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(key, value) for key, value in self.raw_headers if key != b"content-length"]
        async with cancelled_when_gone(receive, self._hearing.waiter):
            await self._hearing.begun()
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            async for data in _events(self._hearing):
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _events(hearing: _Hearing) -> AsyncIterator[bytes]:
    while not hearing.has_ended:
        piece = await hearing.piece(KEEPALIVE_S)
        if piece is not None:
            yield sse({"type": "transcript.text.delta", "delta": piece})
        elif not hearing.task.done():
            yield SIGN_OF_LIFE
    error = hearing.task.exception()
    if error is not None:
        known = ApiError.of(error if isinstance(error, Exception) else Exception(error))
        if known.status == 500:
            logger.error("hearing a file failed", exc_info=error)
        yield sse(known.body()) + DONE
        return
    heard, seconds = hearing.task.result()
    yield sse({"type": "transcript.text.done", "text": heard.text, "usage": usage(seconds)}) + DONE
