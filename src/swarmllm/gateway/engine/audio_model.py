"""An audio model: its client in the swarm, and transformers' own pipeline for speech around it.

`model_choice` opens it, `apis/audio` asks it. Beside the text, a Whisper finds segments, times and probabilities;
`TranscriptBuilder` collects them.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from traceback import clear_frames
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from swarmllm.api import (
    SPEECH_FIELDS,
    ClientModelConfig,
    ConfigurationError,
    SwarmError,
    decoder_stack,
    max_positions,
)
from swarmllm.gateway.engine.offered_model import OfferedModel, Use, load_processor, opened, shortest
from swarmllm.gateway.errors import ApiError

Samples = NDArray[np.float32]
"""`[samples]`, of one channel, mostly between -1 and 1."""
FALLBACK = {
    "temperature": (0.0, 0.2, 0.4, 0.6, 0.8, 1.0),
    "logprob_threshold": -1.0,
    "compression_ratio_threshold": 1.35,
    "no_speech_threshold": 0.6,
}
"""For temperature 0. Where Whisper's text is improbable or repeats itself, Whisper writes that piece again, at the next
temperature. The temperatures are from its paper (section 4.5), the thresholds from transformers' documentation."""
NEVER = {"logprob_threshold": float("-inf"), "no_speech_threshold": 2.0}
"""Thresholds that no text fails. With them, transformers computes the values that it would compare."""


@dataclass(frozen=True, kw_only=True)
class SpeechOptions:
    """How to write down a sound."""

    translates: bool = False
    """Translate into English."""
    language: str | None = None
    prompt: str | None = None
    temperature: float | None = None
    """None: the checkpoint's own."""
    timestamps: bool = False
    details: bool = False
    """Also fill in the probabilities of segments."""


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Some seconds of the sound, with their text."""

    start_s: float
    end_s: float
    text: str
    tokens: tuple[int, ...]
    """With the tokens of times."""
    seek: int
    """Start of the piece of sound that this segment is from, in hundredths of a second."""
    temperature: float
    avg_logprob: float | None
    no_speech_prob: float | None


@dataclass
class Transcript:
    """The text of a sound, as far as it is known."""

    text: str = ""
    segments: list[Segment] = field(default_factory=list)
    language: str | None = None
    """Its English name; None: the model doesn't tell."""
    num_tokens: int = 0


@dataclass
class _Piece:
    """One window of sound: a Whisper takes 30 s at a time."""

    seek: int
    temperature: float
    avg_logprob: float | None
    no_speech_prob: float | None


class TranscriptBuilder:
    """Collects the results of one `generate()` of a Whisper, piece by piece, in the thread that runs it."""

    def __init__(self, model: "AudioModel", on_text: Callable[[str], None]) -> None:
        self._model, self._on_text = model, on_text
        self._piece: _Piece | None = None
        self._tokens: list[int] = []
        self._num_told = 0
        self.transcript = Transcript()

    def piece(self, given: dict[str, Any], found: Any) -> None:
        """Take the arguments and the result of `generate_with_fallback`."""
        from transformers.generation.logits_process import WhisperNoSpeechDetection

        config = given["generation_config"]
        temperature = config.temperature if config.do_sample else 0.0
        (tokens, *_), (outputs, *_), *_ = found
        has_scores = isinstance(outputs, dict) and "scores" in outputs
        probable = None
        if has_scores and len(tokens):
            whole = outputs["sequences"][given["decoder_input_ids"].shape[-1] :][: len(outputs["scores"])]
            probable = float(self._model.swarm._retrieve_avg_logprobs(outputs["scores"], whole, temperature))
        processors = given["logits_processor"] or ()
        silence = next((one for one in processors if isinstance(one, WhisperNoSpeechDetection)), None)
        silent = None if silence is None else float(silence.no_speech_prob[0])
        self._piece = _Piece(int(given["seek"][0]), temperature, probable, silent)
        if self.transcript.language is None:
            self.transcript.language = self._model.language_in(given["decoder_input_ids"][0].tolist())

    def segments(self, found: list[dict[str, Any]]) -> None:
        """Take the segments of the last piece."""
        assert self._piece is not None  # generate() makes them of it
        for one in found:
            tokens = one["tokens"].tolist()
            self._tokens += tokens
            self.transcript.segments.append(
                Segment(
                    start_s=float(one["start"]),
                    end_s=float(one["end"]),
                    text=self._model.text_of(tokens),
                    tokens=tuple(tokens),
                    seek=self._piece.seek,
                    temperature=self._piece.temperature,
                    avg_logprob=self._piece.avg_logprob,
                    no_speech_prob=self._piece.no_speech_prob,
                )
            )
        self.tell(self._model.text_of(self._tokens).rstrip("\ufffd"))  # a character may be in two pieces

    def tell(self, text: str) -> None:
        """Pass on the new part of the text."""
        if len(text) > self._num_told:
            self._on_text(text[self._num_told :])
            self._num_told = len(text)

    @property
    def num_tokens(self) -> int:
        return len(self._tokens)


class AudioModel(OfferedModel):
    """A model that writes down what is said in a sound."""

    use = Use("an audio model", "writes down sound", "takes no sound", "/v1/audio/transcriptions", "no_audio")

    def __init__(self, swarm: Any, tokenizer: Any, extractor: Any, *, name: str | None, max_length: int | None) -> None:
        from transformers import AutomaticSpeechRecognitionPipeline

        known = getattr(swarm.config, "max_target_positions", None) or max_positions(decoder_stack(swarm))
        super().__init__(swarm, tokenizer, name=name, max_length=shortest(max_length, known))
        self.rate: int = extractor.sampling_rate
        """Samples per second."""
        self._pipeline = AutomaticSpeechRecognitionPipeline(swarm, feature_extractor=extractor, tokenizer=tokenizer)
        self._building = threading.local()
        self._settings = swarm.generation_config
        self.is_whisper = self._pipeline.type == "seq2seq_whisper"
        self.has_times = self.is_whisper and hasattr(self._settings, "no_timestamps_token_id")
        if self.is_whisper:
            self._have_it_tell()

    @classmethod
    def open(cls, config: ClientModelConfig, *, name: str | None, max_length: int | None) -> Self:
        """Join the swarm. Raises: SwarmError: the swarm or the checkpoint can't be used."""
        from transformers import AutoFeatureExtractor

        with opened(config, taken_over=SPEECH_FIELDS) as (swarm, tokenizer):
            extractor = load_processor(AutoFeatureExtractor, config.model, config.revision, "feature extractor")
            return cls(swarm, tokenizer, extractor, name=name, max_length=max_length)

    @property
    def languages(self) -> dict[str, str]:
        """Language codes that the model takes, and their names; empty if it knows English alone."""
        from transformers.models.whisper.tokenization_whisper import LANGUAGES

        if not self.is_whisper or not getattr(self._settings, "is_multilingual", True):
            return {}
        codes = (token.strip("<|>") for token in getattr(self._settings, "lang_to_id", ()))
        return {code: LANGUAGES.get(code, code) for code in codes}

    @property
    def translates(self) -> bool:
        """The model can translate into English."""
        return bool(self.languages) and "translate" in getattr(self._settings, "task_to_id", ())

    def language_in(self, tokens: list[int]) -> str | None:
        """Name of the language that one of these tokens stands for."""
        if not self.languages:
            return "english" if self.is_whisper else None
        ids = {place: token.strip("<|>") for token, place in self._settings.lang_to_id.items()}
        return next((self.languages[ids[one]] for one in tokens if one in ids), None)

    def text_of(self, tokens: list[int]) -> str:
        """Text of tokens, without special tokens and times."""
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))

    def write(
        self,
        samples: Samples,
        wanted: SpeechOptions,
        go_on: Callable[[], None] = lambda: None,
        on_text: Callable[[str], None] = lambda _: None,
    ) -> Transcript:
        """Write down a sound. `go_on` is called before each token, `on_text` with each new piece of text.

        Raises:
            ApiError: the model can't do that.
            SwarmError: the swarm fails.
        """
        arguments = self.generate_arguments(wanted)

        def still_wanted(ids: Tensor, _scores: Any, **_: Any) -> Tensor:
            go_on()
            return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

        is_long = self.is_whisper and len(samples) > self._pipeline.feature_extractor.n_samples
        if is_long and not self.has_times:
            raise _refused("file", f"{self.name} writes no times, and a long sound needs them")
        times = {"return_timestamps": True} if wanted.timestamps or is_long else {}
        builder = self._building.to = TranscriptBuilder(self, on_text)
        try:
            go_on()
            sound = {"raw": samples, "sampling_rate": self.rate}
            found: Any = self._pipeline(
                sound, generate_kwargs={**arguments, "stopping_criteria": [still_wanted]}, **times
            )
        except BaseException as error:
            clear_frames(error.__traceback__)  # frames hold sessions, which servers keep until the garbage is collected
            if isinstance(error, SwarmError) or not isinstance(error, ValueError):
                raise
            reason = str(error).strip().split("\n")[0]
            raise ConfigurationError(f"{self.name} can't take this sound: {reason}") from None
        finally:
            self._building.to = None
        transcript, transcript.text = builder.transcript, found["text"]
        transcript.num_tokens = builder.num_tokens or len(self.encode(transcript.text, special_tokens=False))
        builder.tell(transcript.text)
        return transcript

    def generate_arguments(self, options: SpeechOptions) -> dict[str, Any]:
        """Arguments of `generate()`.

        Raises:
            ApiError: the model can't do that.
        """
        found: dict[str, Any] = self._language_and_task(options)
        if options.timestamps and not self.has_times:
            raise _refused("response_format", f"{self.name} writes no times: choose json or text")
        if options.prompt:
            found["prompt_ids"] = self._prompt_ids(options.prompt)
        temperature = options.temperature
        if temperature is not None and self.is_whisper:
            found |= FALLBACK if temperature == 0 else {"temperature": temperature}
        elif temperature is not None:
            drawn = {"do_sample": True, "temperature": temperature, "num_beams": 1}
            found |= drawn if temperature else {"do_sample": False}
        if options.details:
            missing = (name for name in NEVER if getattr(self._settings, name, None) is None and name not in found)
            found = {"temperature": 0.0} | found | {name: NEVER[name] for name in missing}
        return found

    def _language_and_task(self, options: SpeechOptions) -> dict[str, Any]:
        """Raises: ApiError: the model can't do that."""
        known, language = self.languages, (options.language or "").lower()
        if options.translates and not self.translates:
            raise _refused("model", f"{self.name} can't translate: ask /v1/audio/transcriptions")
        if not known:
            if language and not (self.is_whisper and language in ("en", "english")):
                raise _refused("language", f"{self.name} has one language, which can't be chosen: leave it out")
            return {}
        if language and language not in (*known, *known.values()):
            raise _refused("language", f"{language[:32]!r} is no language of {self.name}: {', '.join(sorted(known))}")
        chosen = {"language": language} if language else {}
        return {**chosen, "task": "translate" if options.translates else "transcribe"}

    def _prompt_ids(self, prompt: str) -> Tensor:
        """Raises: ApiError: the model takes none, or not this one."""
        if not self.is_whisper:
            raise _refused("prompt", f"{self.name} takes no prompt: leave it out")
        try:
            ids = self.tokenizer.get_prompt_ids(prompt, return_tensors="pt")
        except ValueError:  # a special token is in it
            raise _refused("prompt", "the prompt can't hold special tokens of the model") from None
        num_tokens, longest = len(ids) - 1, self.swarm.config.max_target_positions // 2 - 1  # Whisper's own limit
        if num_tokens > longest:
            raise _refused("prompt", f"the prompt has {num_tokens} tokens, and {self.name} takes {longest}")
        return torch.as_tensor(ids)

    def _have_it_tell(self) -> None:
        """Wrap two methods of transformers' loop over pieces: they tell the thread's builder what they find."""
        swarm, building = self.swarm, self._building
        with_fallback, retrieve = swarm.generate_with_fallback, swarm._retrieve_segment

        def piece(**given: Any) -> Any:
            found = with_fallback(**given)
            if builder := getattr(building, "to", None):
                builder.piece(given, found)
            return found

        def segments(**given: Any) -> Any:
            found = retrieve(**given)
            if builder := getattr(building, "to", None):
                builder.segments(found[0])
            return found

        swarm.generate_with_fallback, swarm._retrieve_segment = piece, segments


def _refused(param: str, message: str) -> ApiError:
    return ApiError(400, message, param=param, code="unsupported_value")
