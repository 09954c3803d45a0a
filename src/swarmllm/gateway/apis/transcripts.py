"""What was heard, in the formats of OpenAI's API for speech. Used by `audio_routes`."""

import json
import math
import zlib
from typing import Any

from swarmllm.gateway.engine.hearing_model import Segment, Transcript
from swarmllm.gateway.requests.audio_request import TranscriptionRequest


def usage(seconds: float) -> dict[str, Any]:
    """Begun seconds count."""
    return {"type": "duration", "seconds": math.ceil(seconds)}


def written(body: TranscriptionRequest, heard: Transcript, seconds: float) -> tuple[str, str]:
    """The answer as it was asked for, and its media type; `seconds` is how long the sound is."""
    if body.response_format == "text":
        return heard.text + "\n", "text/plain"
    if body.response_format == "srt":
        return _subtitles(heard, ","), "text/plain"
    if body.response_format == "vtt":
        return "WEBVTT\n\n" + _subtitles(heard, "."), "text/plain"
    found: dict[str, Any] = {"text": heard.text, "usage": usage(seconds)}
    if body.response_format == "verbose_json":
        found |= {
            "task": "translate" if body.translates else "transcribe",
            "language": "english" if body.translates else heard.language,
            "duration": seconds,
            "segments": [_segment(number, one) for number, one in enumerate(heard.segments)],
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


def _subtitles(heard: Transcript, point: str) -> str:
    """The segments with something in them; with numbers, as SRT wants them and WebVTT allows."""
    spoken = [one for one in heard.segments if one.text.strip()]
    return "".join(
        f"{number}\n{_time(one.start_s, point)} --> {_time(one.end_s, point)}\n{_cue(one.text)}\n\n"
        for number, one in enumerate(spoken, start=1)
    )


def _cue(text: str) -> str:
    """One line, which no cue can be made in: neither by an empty line nor by an arrow."""
    return " ".join(text.split()).replace("-->", "->")


def _time(seconds: float, point: str) -> str:
    ms = round(1000 * seconds)
    return f"{ms // 3_600_000:02}:{ms // 60_000 % 60:02}:{ms // 1000 % 60:02}{point}{ms % 1000:03}"
