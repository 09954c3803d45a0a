"""Settings, models with their tokenizer, conversations: for the commands `generate` and `chat` and for the gateway.

Commands and gateway decide themselves how tokens are chosen. Of a checkpoint's generation_config.json, they use only
the fields that are listed here.
"""

import asyncio
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swarmllm.command_line import announced_imports
from swarmllm.config import (
    ClientConfig,
    ClientModelConfig,
    default_cache_dir,
    default_initial_peers,
    hub_token,
    require_positive,
)
from swarmllm.decoding.options import ADDED, DECODING_TOKENIZER, DecodingOptions
from swarmllm.errors import ConfigurationError, SessionLengthExceededError

logger = logging.getLogger(__name__)

TOKEN_FIELDS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "forced_bos_token_id")
"""Tokens with a special meaning."""
SCORE_FIELDS = (
    *("suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "sequence_bias", "encoder_repetition_penalty"),
    *("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty"),
    *("min_length", "min_new_tokens", "remove_invalid_values", "renormalize_logits"),
)
"""Changes of scores before a token is chosen."""
CHOICE_FIELDS = (
    *("do_sample", "temperature", "top_k", "top_p", "top_h", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff"),
    *("repetition_penalty", *sorted(ADDED)),
)
"""Ways to choose a token."""
TEXT_FIELDS = (*TOKEN_FIELDS, *SCORE_FIELDS, *CHOICE_FIELDS, "stop_strings")
"""Fields of a checkpoint's generation_config.json that are taken over for texts."""
SPEECH_FIELDS = (
    *TEXT_FIELDS,
    *("num_beams", "length_penalty", "early_stopping", "max_length", "max_new_tokens", "forced_eos_token_id"),
    *("alignment_heads", "is_multilingual", "lang_to_id", "task_to_id", "language", "task", "return_timestamps"),
    *("no_timestamps_token_id", "prev_sot_token_id", "max_initial_timestamp_index", "prompt_condition_type"),
    *("condition_on_prev_tokens", "compression_ratio_threshold", "logprob_threshold", "no_speech_threshold"),
)
"""The same for models with audio: transformers' own pipeline calls `generate()`, and Whisper has fields of its own."""
CALL_FIELDS = frozenset(
    (
        *("max_length", "max_new_tokens", "use_cache", "cache_implementation", "cache_config", "max_cache_len"),
        *("return_dict_in_generate", "output_scores", "output_logits", "output_attentions", "output_hidden_states"),
        *("compile_config", "disable_compile", "continuous_batching_config", "prefill_chunk_size", "low_memory"),
        *("prompt_lookup_num_tokens", "max_matching_ngram_size", "num_assistant_tokens", "is_assistant", "use_mtp"),
        *("num_assistant_tokens_schedule", "assistant_confidence_threshold", "assistant_early_exit"),
        *("assistant_lookbehind", "target_lookbehind", "assistant_ensemble_weight", "speculation_type"),
        *("transformers_version", "_from_model_config"),
    )
)
"""Fields that don't change the text: its length, how it is computed, and further outputs."""

COLDEST = 1e-6
"""The lowest temperature: divided by less, scores can be infinite, and nothing can be drawn from them."""


FINDS_MODEL = frozenset({"--model", "--config", "--initial_peers"})
"""Flags with which a command doesn't look at the swarm of this machine for a model."""


def with_model_here(argv: Sequence[str] | None) -> list[str]:
    """The words of a command, with the one model of the swarm of this machine (`swarmllm up`) if they name none."""
    words = list(sys.argv[1:] if argv is None else argv)
    flags = {word.partition("=")[0].replace("-", "_").replace("__", "--", 1) for word in words if word[:2] == "--"}
    if FINDS_MODEL & flags or {"-h", "--help"} & set(words) or default_initial_peers():
        return words
    from swarmllm.network.p2p.discovery import find_swarm_here  # takes 0.2 s, and --help needs none

    here = asyncio.run(find_swarm_here())
    if here is None or len(here.places) != 1 or not here.places[0] or not Path(here.places[0]).exists():
        return words
    return ["--model", here.places[0], *words]


@dataclass(frozen=True, kw_only=True)
class TextConfig(ClientModelConfig, DecodingOptions):
    """Settings of the text that is written."""

    max_new_tokens: int | None = 128
    """Most tokens to write. Assumed: a paragraph or two."""
    temperature: float | None = None
    """Randomness of sampling. If no option about sampling is given, the likeliest token is taken."""
    top_p: float | None = None
    """Sample from the likeliest tokens with this share of probability."""
    top_k: int | None = None
    """Sample from this many likeliest tokens."""
    seed: int | None = None
    """Number for the random generator: the same seed gives the same text."""

    def __post_init__(self) -> None:
        super().__post_init__()
        DecodingOptions.__post_init__(self)
        require_positive(self, "max_new_tokens", "top_k")
        if self.temperature is not None and not self.temperature >= COLDEST:
            raise ConfigurationError(
                f"temperature must be at least {COLDEST:g}, not {self.temperature}; "
                "for the likeliest tokens leave it out"
            )
        if self.seed is not None and not -(1 << 63) <= self.seed < 1 << 64:
            raise ConfigurationError(f"seed must be a number of 64 bits, not {self.seed}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ConfigurationError(f"top_p must be above 0 and at most 1, not {self.top_p}")

    def generation_options(self) -> dict[str, Any]:
        """Arguments of `generate()`. Samples if anything about sampling is given, whatever the checkpoint prefers."""
        sampling = {name: getattr(self, name) for name in ("temperature", "top_p", "top_k")}
        drawing = {name: value for name, value in sampling.items() if value is not None}
        return {
            "max_new_tokens": self.max_new_tokens,
            "do_sample": bool(drawing or self.drawing()) or self.seed is not None,
            **drawing,
            **self.given(),
        }


def open_model(
    config: ClientModelConfig,
    *,
    seed: int | None = None,
    features: bool = False,
    taken_over: Sequence[str] = TEXT_FIELDS,
) -> tuple[Any, Any]:
    """The distributed model, to be closed by the caller, and its tokenizer.

    `features`: the model comes without its head. `taken_over`: fields of its generation_config.json that it keeps.

    Raises:
        ConfigurationError: the model has no tokenizer, or its generation_config.json can't be used; and what
            `AutoDistributedModel.from_pretrained` raises.
    """
    with announced_imports():
        import torch
        import transformers

        from swarmllm.client.distributed_model import (
            AutoDistributedModel,
            AutoDistributedModelForFeatureExtraction,
            device_of,
        )
        from swarmllm.models.checkpoint.checkpoint import load_tokenizer

    transformers.logging.set_verbosity_error()
    show_progress = sys.stderr.isatty()
    if not show_progress:
        transformers.logging.disable_progress_bar()
    kind = AutoDistributedModelForFeatureExtraction if features else AutoDistributedModel
    model = kind.from_pretrained(
        config.model,
        revision=config.revision,
        dtype=config.dtype,
        device_map=device_of(config.device, "--device"),
        client_config=ClientConfig(**config.client_settings()),
        progress=show_progress,
    )
    if features:  # embeddings are made from the texts alone
        model.remote_blocks.batches.padding_notices.told_of_outputs = True
    try:
        tokenizer = load_tokenizer(
            config.model, revision=config.revision, token=hub_token(), cache_dir=default_cache_dir()
        )
        if model.can_generate():
            take_over_preferences(model, tokenizer, taken_over, name=config.model)
    except ConfigurationError:
        model.close()
        raise
    if seed is not None:
        torch.manual_seed(seed)
    return model, tokenizer


def context_length(model: Any) -> int | None:
    """Positions that a model was made for; None: it doesn't say."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


def take_over_preferences(model: Any, tokenizer: Any, names: Sequence[str], *, name: str) -> None:
    """Give the model a generation config with the fields `names` of its own one, and otherwise transformers' defaults.

    Raises:
        ConfigurationError: a field has a value that can't be used.
    """
    from transformers import GenerationConfig

    from swarmllm.models.checkpoint.sources import first_line

    defaults = GenerationConfig._get_default_generation_params()
    given = {
        key: value
        for key, value in model.generation_config.to_dict().items()
        if value is not None and value != defaults.get(key)
    }
    taken = {key: value for key, value in given.items() if key in names}
    others = [key for key in sorted(given.keys() - taken.keys() - CALL_FIELDS) if hasattr(GenerationConfig(), key)]
    if others:
        logger.warning("%s: generation_config.json asks for %s, which is not done here", name, ", ".join(others))
    if taken.get("temperature") == 0:  # transformers refuses 0; it means the likeliest token
        del taken["temperature"]
        taken["do_sample"] = False
    try:
        model.generation_config = GenerationConfig(**taken)
        _settle_padding(model, tokenizer)
        _try_preferences(model, tokenizer)
    except (ValueError, TypeError, IndexError, KeyError, AttributeError, RuntimeError, OverflowError) as error:
        raise ConfigurationError(
            f"generation_config.json of {name} can't be used: {first_line(error)}: correct the file or delete it"
        ) from None


def _settle_padding(model: Any, tokenizer: Any) -> None:
    """Set a token for padding that the model has; some checkpoints lack it."""
    config, size = model.generation_config, model.get_input_embeddings().weight.shape[0]
    if not 0 <= (-1 if config.pad_token_id is None else config.pad_token_id) < size:
        config.pad_token_id = tokenizer.pad_token_id or tokenizer.eos_token_id


def _try_preferences(model: Any, tokenizer: Any) -> None:
    """Try the generation config on meaningless scores. Raises what transformers raises."""
    import torch
    from transformers import GenerationConfig

    config, _ = model._prepare_generation_config(GenerationConfig(), **{DECODING_TOKENIZER: tokenizer})
    if not all(isinstance(one, str) and one for one in preferred_stops(config)):
        raise ConfigurationError("stop_strings must be texts")
    size = model.get_output_embeddings().weight.shape[0]
    ids = torch.zeros(1, 4, dtype=torch.long, device=model.device)
    model._prepare_special_tokens(config, kwargs_has_attention_mask=True, device=model.device)
    processors = model._get_logits_processor(
        generation_config=config, input_ids_seq_length=ids.shape[1], encoder_input_ids=ids, device=model.device
    )
    processors(ids, torch.zeros(1, size, device=model.device))


def preferred_stops(config: Any) -> tuple[Any, ...]:
    """The texts that end an answer, by a generation config."""
    stops = config.stop_strings or ()
    return (stops,) if isinstance(stops, str) else tuple(stops)


def answer_streamer(tokenizer: Any) -> Any:
    """A streamer for `generate()` that prints the answer without its prompt, and without the space that many models
    begin with."""
    from transformers import TextStreamer

    class Answer(TextStreamer):
        begun = False

        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            shown = text if self.begun else text.lstrip()
            self.begun = self.begun or bool(shown)
            super().on_finalized_text(shown, stream_end)

    return Answer(tokenizer, skip_prompt=True, skip_special_tokens=True)


class Conversation:
    """Turns of a user and the model, all on one session: each turn computes only its new tokens.

    It uses the tokenizer's chat template if there is one. Without, the user's words are appended to the text so far,
    and the model continues it.
    """

    def __init__(
        self, model: Any, tokenizer: Any, session: Any, options: dict[str, Any], *, max_length: int | None = None
    ) -> None:
        """`max_length`: most tokens of the whole conversation; default: the session's."""
        self._model = model
        self._tokenizer = tokenizer
        self._max_length = session.max_length if max_length is None else max_length
        self._options = options
        self.cut: str | None = None
        """The reason, in words, why the last answer was cut; None: the model ended it."""
        self._messages: list[dict[str, str]] = []
        self._text_ids: list[int] = []

    @property
    def messages(self) -> list[dict[str, str]]:
        """All turns so far, as chat templates take them; the system prompt first, if there is one."""
        return list(self._messages)

    @property
    def system(self) -> str | None:
        """The system prompt."""
        first = next(iter(self._messages), None)
        return first["content"] if first is not None and first["role"] == "system" else None

    def clear(self) -> None:
        """Begin again; the system prompt stays."""
        system = self.system
        self._messages = [] if system is None else [{"role": "system", "content": system}]
        self._text_ids = []

    def instruct(self, system: str) -> None:
        """Begin again with this system prompt.

        Raises:
            ConfigurationError: the model takes none.
        """
        from jinja2 import TemplateError

        messages = [{"role": "system", "content": system}]
        if not self._tokenizer.chat_template:
            raise ConfigurationError("this model has no chat template, so it takes no system prompt")
        try:
            text = self._tokenizer.apply_chat_template([*messages, {"role": "user", "content": "-"}], tokenize=False)
        except TemplateError:
            text = ""
        if system.strip() not in text:
            raise ConfigurationError("this model's chat template has no place for a system prompt")
        self._messages, self._text_ids = messages, []

    def reply(self, said: str, **options: Any) -> str:
        """The model's answer. `options` go to `generate()`, e.g. a streamer. A turn that fails leaves no trace.

        Raises:
            SessionLengthExceededError: the conversation fills the session.
            SwarmError: the swarm fails.
        """
        import torch

        turn = {"role": "user", "content": said}
        ids = self._templated([*self._messages, turn]) if self._tokenizer.chat_template else self._continued(said)
        room, limit = self._max_length - len(ids), self._options["max_new_tokens"]
        if room < 1:
            raise SessionLengthExceededError(f"the conversation has reached its {self._max_length} tokens: begin anew")
        left = room if limit is None else min(room, limit)
        options = {**self._options, "max_new_tokens": left, **options}
        input_ids = torch.tensor([ids], device=self._model.device)
        output = self._model.generate(
            input_ids, attention_mask=torch.ones_like(input_ids), tokenizer=self._tokenizer, **options
        )[0].tolist()
        answer = str(self._tokenizer.decode(output[len(ids) :], skip_special_tokens=True))
        self.cut = None
        if len(output) - len(ids) >= left and output[-1] not in self._ends():
            self.cut = (
                f"it has the {left} tokens of max_new_tokens"
                if left < room
                else f"the conversation has reached its {self._max_length} tokens"
            )
        self._messages += [turn, {"role": "assistant", "content": answer}]
        self._text_ids = output[:-1] if output[-1] == self._tokenizer.eos_token_id else output
        return answer

    def _ends(self) -> list[int]:
        """The tokens that end the model's answers."""
        ends = self._model.generation_config.eos_token_id
        return ends if isinstance(ends, list) else [ends]

    def _templated(self, messages: Sequence[dict[str, str]]) -> list[int]:
        encoded = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
        return list(encoded["input_ids"])

    def _continued(self, said: str) -> list[int]:
        if not self._text_ids:
            return list(self._tokenizer(said).input_ids)
        return [*self._text_ids, *self._tokenizer(f"\n{said}", add_special_tokens=False).input_ids]
