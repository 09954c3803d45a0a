"""What may be asked of a file with sound: OpenAI's fields beside it. `uploads` has read the form."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator

from swarmllm.gateway.engine.hearing_model import Wanted
from swarmllm.gateway.requests.unknown_fields import ANYTHING, Body, Harmless

MAX_PROMPT_CHARS = 1 << 14
TIMED = ("srt", "vtt", "verbose_json")
"""Formats with the times of segments."""


def _as_list(value: Any) -> Any:
    """One text, where several may come."""
    return [value] if isinstance(value, str) else value


def _or_none(value: Any) -> Any:
    """Forms send fields that nobody has filled in as well."""
    return None if value == "" else value


class TranscriptionRequest(Body):
    """`POST /v1/audio/transcriptions`, a form."""

    translates: ClassVar[bool] = False
    harmless: ClassVar[Harmless] = {
        # of OpenAI's other models
        **dict.fromkeys(("chunking_strategy", "include", "keywords", "languages"), ()),
        **dict.fromkeys(("known_speaker_names", "known_speaker_references"), ()),
        "user": ANYTHING,
        # of vLLM
        **dict.fromkeys(("seed", "top_p", "top_k", "min_p", "to_language", "vllm_xargs", "hotwords"), ()),
        **dict.fromkeys(("frequency_penalty", "repetition_penalty", "presence_penalty", "length_penalty"), ()),
        **dict.fromkeys(("max_completion_tokens", "use_beam_search", "n", "stream_include_usage"), ()),
        "stream_continuous_usage_stats": ("false", "False", "0"),
        "request_id": ANYTHING,
    }
    file: Annotated[str, Field(description="WAV, or what ffmpeg reads.", json_schema_extra={"format": "binary"})]
    model: Annotated[str | None, BeforeValidator(_or_none)] = Field(
        None, description="Left out: the first model that hears."
    )
    language: Annotated[Annotated[str, Field(max_length=64)] | None, BeforeValidator(_or_none)] = Field(
        None, description="ISO-639-1, of models that know several; left out: the model finds out."
    )
    prompt: Annotated[Annotated[str, Field(max_length=MAX_PROMPT_CHARS)] | None, BeforeValidator(_or_none)] = Field(
        None, description="What was said before, or how words are written."
    )
    response_format: Annotated[
        Literal["json", "text", "srt", "verbose_json", "vtt"], BeforeValidator(lambda value: value or "json")
    ] = "json"
    temperature: Annotated[Annotated[float, Field(ge=0, le=1)] | None, BeforeValidator(_or_none)] = Field(
        None, description="0: higher where what is written is improbable."
    )
    timestamp_granularities: Annotated[list[Literal["word", "segment"]] | None, BeforeValidator(_as_list)] = None
    stream: Annotated[bool | None, BeforeValidator(_or_none)] = None

    @field_validator("timestamp_granularities")
    @classmethod
    def _are_of_segments(cls, value: list[str] | None, info: ValidationInfo) -> list[str] | None:
        if value and info.data.get("response_format") != "verbose_json":
            raise ValueError("goes with response_format verbose_json")
        if "word" in (value or ()):
            raise ValueError("can only be segment here: times of words need attentions, which stay on servers")
        return value

    @field_validator("stream")
    @classmethod
    def _is_of_text(cls, value: bool | None, info: ValidationInfo) -> bool | None:
        if value and info.data.get("response_format") != "json":
            raise ValueError("goes with response_format json")
        return value

    def wanted(self) -> Wanted:
        """How the sound is to be written down."""
        return Wanted(
            translates=self.translates,
            language=self.language,
            prompt=self.prompt,
            temperature=self.temperature,
            timestamps=self.response_format in TIMED,
            details=self.response_format == "verbose_json",
        )


class TranslationRequest(TranscriptionRequest):
    """`POST /v1/audio/translations`, a form: what is said, in English."""

    translates: ClassVar[bool] = True
