"""`/v1/audio/transcriptions` and `/v1/audio/translations`: the text that is spoken in a file with sound.

This module holds, in this order: the fields of requests, the handlers, the formats of transcripts. `audio_files` reads
the form and its file.
"""

import asyncio
import json
import logging
import math
import zlib
from collections.abc import AsyncIterator
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from swarmllm.gateway.apis.audio_files import Form, checked_bytes, kept_bytes, read_form, read_sound, unpacked_bytes
from swarmllm.gateway.apis.request_bodies import ANYTHING, Body, Harmless, unused_fields
from swarmllm.gateway.apis.responder import DONE, KEEPALIVE_S, Dialect, Responder, cancelled_when_gone, sse
from swarmllm.gateway.engine.audio_model import AudioModel, Segment, SpeechOptions, Transcript
from swarmllm.gateway.engine.engine import Waiter, queue_full
from swarmllm.gateway.engine.vision import Taken
from swarmllm.gateway.errors import ApiError
from swarmllm.gateway.guard import CALLER, UNUSED
from swarmllm.gateway.routes import EVENTS, FORM, JSON, post

MAX_PROMPT_CHARS = 1 << 14
TIMED = ("srt", "vtt", "verbose_json")
"""Formats that hold times of segments."""

logger = logging.getLogger(__name__)
FILE = "file"
"""Name of the field with the file."""
SIGN_OF_LIFE = b": still listening\n\n"
_FORM: Any = {"body_type": FORM, "answer_types": (JSON, EVENTS, "text/plain")}


def _as_list(value: Any) -> Any:
    """Accept a single text where a list may come."""
    return [value] if isinstance(value, str) else value


def _or_none(value: Any) -> Any:
    """Take an empty field as left out, because forms send those too."""
    return None if value == "" else value


class TranscriptionRequest(Body):
    """`POST /v1/audio/transcriptions`, a form."""

    is_form: ClassVar[bool] = True
    translates: ClassVar[bool] = False
    harmless: ClassVar[Harmless] = {
        # OpenAI's, for other models
        **dict.fromkeys(("chunking_strategy", "include", "keywords", "languages"), ()),
        **dict.fromkeys(("known_speaker_names", "known_speaker_references"), ()),
        "user": ANYTHING,
        # vLLM's
        **dict.fromkeys(("seed", "top_p", "top_k", "min_p", "to_language", "vllm_xargs", "hotwords"), ()),
        **dict.fromkeys(("frequency_penalty", "repetition_penalty", "presence_penalty", "length_penalty"), ()),
        **dict.fromkeys(("max_completion_tokens", "use_beam_search", "n", "stream_include_usage"), ()),
        "stream_continuous_usage_stats": ("false", "False", "0"),
        "request_id": ANYTHING,
    }
    file: Annotated[str, Field(description="WAV, or what ffmpeg reads.", json_schema_extra={"format": "binary"})]
    model: Annotated[str | None, BeforeValidator(_or_none)] = Field(
        None, description="Left out: the first audio model."
    )
    language: Annotated[Annotated[str, Field(max_length=64)] | None, BeforeValidator(_or_none)] = Field(
        None, description="ISO-639-1, for models of several languages; left out: the model detects it."
    )
    prompt: Annotated[Annotated[str, Field(max_length=MAX_PROMPT_CHARS)] | None, BeforeValidator(_or_none)] = Field(
        None, description="Text before this sound, or the spelling of words."
    )
    response_format: Annotated[
        Literal["json", "text", "srt", "verbose_json", "vtt"], BeforeValidator(lambda value: value or "json")
    ] = "json"
    temperature: Annotated[Annotated[float, Field(ge=0, le=1)] | None, BeforeValidator(_or_none)] = Field(
        None, description="0: raised where the text is improbable."
    )
    timestamp_granularities: Annotated[list[Literal["word", "segment"]] | None, BeforeValidator(_as_list)] = None
    stream: Annotated[bool | None, BeforeValidator(_or_none)] = None

    @field_validator("timestamp_granularities")
    @classmethod
    def _are_of_segments(cls, value: list[str] | None, info: ValidationInfo) -> list[str] | None:
        if value and info.data.get("response_format") != "verbose_json":
            raise ValueError("needs response_format verbose_json")
        if "word" in (value or ()):
            raise ValueError("can only be segment here: times of words need attentions, which stay on servers")
        return value

    @field_validator("stream")
    @classmethod
    def _is_of_text(cls, value: bool | None, info: ValidationInfo) -> bool | None:
        if value and info.data.get("response_format") != "json":
            raise ValueError("needs response_format json")
        return value

    def speech_options(self) -> SpeechOptions:
        """The options for the model."""
        return SpeechOptions(
            translates=self.translates,
            language=self.language,
            prompt=self.prompt,
            temperature=self.temperature,
            timestamps=self.response_format in TIMED,
            details=self.response_format == "verbose_json",
        )


class TranslationRequest(TranscriptionRequest):
    """`POST /v1/audio/translations`, a form: the speech, in English."""

    translates: ClassVar[bool] = True


class Audio(Dialect):
    """Handlers of speech."""

    def __init__(self, responder: Responder) -> None:
        super().__init__(responder)
        self.num_files = 0
        """Files that arrive, wait or are transcribed."""

    @post("/v1/audio/transcriptions", "Write down speech.", TranscriptionRequest, **_FORM)
    async def transcriptions(self, request: Request) -> Response:
        return await self._answer(request, TranscriptionRequest)

    @post("/v1/audio/translations", "Write down speech in English.", TranslationRequest, **_FORM)
    async def translations(self, request: Request) -> Response:
        return await self._answer(request, TranslationRequest)

    async def _answer(self, request: Request, kind: type[TranscriptionRequest]) -> Response:
        config = self._responder.config
        if self.num_files >= config.max_concurrent + config.max_waiting:
            raise queue_full(config.max_concurrent)
        self.num_files += 1
        try:
            form = await read_form(request, FILE, config.max_audio_bytes)
        except BaseException:
            self.num_files -= 1
            raise
        try:
            body = self._responder.parse(kind, form.fields)
            request.scope[UNUSED] = unused_fields(body)
            models = self._responder.models
            async with models.using(models.transcriber, body.model) as model:
                model.generate_arguments(body.speech_options())  # refuse it now, not when its turn comes
                transcription = _Transcription(self._responder, model, body, form, request.scope[CALLER])
        except BaseException:
            self._free(form)
            raise
        transcription.task.add_done_callback(lambda _: self._free(form))
        if body.stream:
            return _StreamedTranscript(transcription)
        async with cancelled_when_gone(request.receive, transcription.waiter):
            transcript, seconds = await transcription.task
        text, media_type = written(body, transcript, seconds)
        return Response(text, media_type=media_type)

    def _free(self, form: Form) -> None:
        form.close()
        self.num_files -= 1


class _Transcription:
    """A file under way. A worker thread transcribes it, and sends pieces of the text to the event loop."""

    def __init__(
        self, responder: Responder, model: AudioModel, body: TranscriptionRequest, form: Form, caller: str
    ) -> None:
        self._engine, self._room = responder.engine, responder.memory
        self._model, self._body, self._form, self._caller = model, body, form, caller
        self._longest_s = responder.config.max_audio_s
        self.waiter = Waiter(responder.engine)
        self._loop = asyncio.get_running_loop()
        self._pieces: asyncio.Queue[str | None] = asyncio.Queue()
        """Pieces of the text. None: the file has been read, or the transcription has ended."""
        self.task = asyncio.create_task(self._transcribe_in_turn(), name="transcribe a file")
        self.task.add_done_callback(lambda _: self._pieces.put_nowait(None))
        model.begin_use()
        self.task.add_done_callback(lambda _: model.end_use())

    async def begun(self) -> None:
        """Return when the file has been read. Raises: the error that prevents its transcription."""
        await self._pieces.get()
        if self.task.done():
            await self.task

    async def piece(self, timeout_s: float) -> str | None:
        """The next piece of the text; None: no piece came in that time, or the text has ended."""
        try:
            return await asyncio.wait_for(self._pieces.get(), timeout_s)
        except TimeoutError:
            return None

    @property
    def has_ended(self) -> bool:
        """All of the text has been given."""
        return self.task.done() and self._pieces.empty()

    def _tell(self, piece: str | None) -> None:
        self._loop.call_soon_threadsafe(self._pieces.put_nowait, piece)

    async def _transcribe_in_turn(self) -> tuple[Transcript, float]:
        """Wait for memory, then transcribe; returns the transcript and the sound's length in seconds.

        Raises:
            ApiError: the sound needs more than all memory for sounds; and errors of the transcription.
        """
        needed = await asyncio.to_thread(unpacked_bytes, self._form.file, self._model.rate, self._longest_s)
        if needed > self._room.size:
            raise ApiError(
                400,
                f"the sound takes {needed >> 20} MiB of memory when it is unpacked, and this gateway has "
                f"{self._room.size >> 20} for all: send it in parts, as WAV, or raise max_input_bytes",
                param=FILE,
                code="audio_too_long",
            )
        memory = await self._room.take(needed, self._caller)
        try:
            return await self._engine.compute(partial(self._transcribe, memory))
        finally:
            memory.free()

    def _transcribe(self, memory: Taken) -> tuple[Transcript, float]:
        """Transcribe the file. It runs in a worker thread."""
        self.waiter.go_on()
        samples = read_sound(self._form.file, self._model.rate, self._longest_s)
        self._loop.call_soon_threadsafe(memory.shrink, checked_bytes(samples, memory.amount))
        self._tell(None)
        has_features = False

        def tell(piece: str) -> None:
            nonlocal has_features
            if not has_features:  # features exist once there is text
                has_features = True
                self._loop.call_soon_threadsafe(memory.shrink, kept_bytes(samples))
            self._tell(piece)

        transcript = self._model.write(samples, self._body.speech_options(), self.waiter.go_on, tell)
        self._engine.count_written(transcript.num_tokens)
        return transcript, len(samples) / self._model.rate


class _StreamedTranscript(Response):
    """The text as server-sent events. If the reader hangs up, the transcription ends."""

    def __init__(self, transcription: _Transcription) -> None:
        super().__init__(
            headers={"cache-control": "no-store", "x-accel-buffering": "no"}, media_type="text/event-stream"
        )
        self._transcription = transcription

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(key, value) for key, value in self.raw_headers if key != b"content-length"]
        async with cancelled_when_gone(receive, self._transcription.waiter):
            await self._transcription.begun()
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            async for data in _events(self._transcription):
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _events(transcription: _Transcription) -> AsyncIterator[bytes]:
    while not transcription.has_ended:
        piece = await transcription.piece(KEEPALIVE_S)
        if piece is not None:
            yield sse({"type": "transcript.text.delta", "delta": piece})
        elif not transcription.task.done():
            yield SIGN_OF_LIFE
    error = transcription.task.exception()
    if error is not None:
        known = ApiError.of(error if isinstance(error, Exception) else Exception(error))
        if known.status == 500:
            logger.error("transcribing a file failed", exc_info=error)
        yield sse(known.body()) + DONE
        return
    transcript, seconds = transcription.task.result()
    yield sse({"type": "transcript.text.done", "text": transcript.text, "usage": usage(seconds)}) + DONE


def usage(seconds: float) -> dict[str, Any]:
    """The field `usage`: the length of the sound, rounded up."""
    return {"type": "duration", "seconds": math.ceil(seconds)}


def written(body: TranscriptionRequest, transcript: Transcript, seconds: float) -> tuple[str, str]:
    """The answer in the requested format, and its media type; `seconds` is the length of the sound."""
    if body.response_format == "text":
        return transcript.text + "\n", "text/plain"
    if body.response_format == "srt":
        return _subtitles(transcript, ","), "text/plain"
    if body.response_format == "vtt":
        return "WEBVTT\n\n" + _subtitles(transcript, "."), "text/plain"
    found: dict[str, Any] = {"text": transcript.text, "usage": usage(seconds)}
    if body.response_format == "verbose_json":
        found |= {
            "task": "translate" if body.translates else "transcribe",
            "language": "english" if body.translates else transcript.language,
            "duration": seconds,
            "segments": [_segment(number, one) for number, one in enumerate(transcript.segments)],
        }
    return json.dumps(found, ensure_ascii=False), "application/json"


def _segment(number: int, one: Segment) -> dict[str, Any]:
    text = one.text.encode()
    return {
        "id": number,
        "seek": one.seek,
        "start": round(one.start_s, 2),
        "end": round(one.end_s, 2),
        "text": one.text,
        "tokens": one.tokens,
        "temperature": one.temperature,
        "avg_logprob": one.avg_logprob,
        "compression_ratio": len(text) / len(zlib.compress(text)),
        "no_speech_prob": one.no_speech_prob,
    }


def _subtitles(transcript: Transcript, point: str) -> str:
    """The spoken segments as cues with numbers, which SRT requires and WebVTT allows."""
    spoken = [one for one in transcript.segments if one.text.strip()]
    return "".join(
        f"{number}\n{_time(one.start_s, point)} --> {_time(one.end_s, point)}\n{_cue(one.text)}\n\n"
        for number, one in enumerate(spoken, start=1)
    )


def _cue(text: str) -> str:
    """The text in one line, without anything that could begin another cue."""
    return " ".join(text.split()).replace("-->", "->")


def _time(seconds: float, point: str) -> str:
    ms = round(1000 * seconds)
    return f"{ms // 3_600_000:02}:{ms // 60_000 % 60:02}:{ms // 1000 % 60:02}{point}{ms % 1000:03}"
