"""A model that writes text: its client in the swarm, its tokenizer, and perhaps a local copy.

`model_choice` opens it; `engine` and `generation` use it. `MiddleForm` writes prompts for the text between two others
(requests with a `suffix`). Code models were trained on that: special tokens stand around both texts.
"""

import logging
import math
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Self

from transformers import GenerationConfig

from swarmllm.api import (
    CHOICE_FIELDS,
    SCORE_FIELDS,
    TOKEN_FIELDS,
    ClientModelConfig,
    ConfigurationError,
    LocalFallback,
    cache_argument,
    decoder_stack,
    has_vision,
    preferred_stops,
)
from swarmllm.gateway.engine.chat_templates import ChatTemplates
from swarmllm.gateway.engine.offered_model import OfferedModel, Use, opened, shortest
from swarmllm.gateway.engine.vision import PictureProcessor
from swarmllm.gateway.errors import ApiError
from swarmllm.gateway.output_parsing import (
    BEGIN_THOUGHTS,
    EFFORTS,
    END_THOUGHTS,
    CallForm,
    HarmonyForm,
    ReasoningReader,
    form_of,
    speaks_harmony,
    special_tokens,
    template_of,
    thinks,
)
from swarmllm.gateway.sampling import Grammars
from swarmllm.gateway.text import MAX_HELD_TOKENS, Spelling

logger = logging.getLogger(__name__)


FORBIDDING_FIELDS = frozenset(
    (
        *("suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "forced_bos_token_id"),
        *("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "min_length", "min_new_tokens"),
    )
)
"""Fields of a checkpoint that give tokens no chance at all. JSON, for example, repeats its `", "`."""


def _forbids(sequence_bias: Any) -> bool:
    """True if it gives some tokens no chance: JSON of Python has an infinity."""
    biases = sequence_bias or ()
    numbers = biases.values() if isinstance(biases, Mapping) else (bias for _, bias in biases)
    return -math.inf in numbers


class LanguageModel(OfferedModel):
    """A model that writes text."""

    use = Use("a model that writes text", "writes text", "writes no text", "/v1/chat/completions", "no_text")

    def __init__(
        self,
        swarm: Any,
        tokenizer: Any,
        *,
        name: str | None,
        max_length: int | None,
        local: LocalFallback | None = None,
        picture_processor: PictureProcessor | None = None,
    ) -> None:
        positions = getattr(swarm.config.get_text_config(), "max_position_embeddings", None)
        self._most_room = 0
        self._is_given_length = max_length is not None
        super().__init__(swarm, tokenizer, name=name, max_length=shortest(max_length, positions))
        self.local = local
        self.take_preferences()
        self.picture_processor = picture_processor
        """Turns pictures into inputs of the model; None: the model reads text only."""
        self.templates = ChatTemplates()
        self.cache_name = cache_argument(decoder_stack(swarm))
        self.num_scores = swarm.get_output_embeddings().weight.shape[0]
        self._grammars: Grammars | None = None
        self._making_grammar = threading.Lock()

    @classmethod
    def open(cls, config: ClientModelConfig, *, name: str | None, max_length: int | None) -> Self:
        """Join the swarm. Raises: SwarmError: the swarm or the checkpoint can't be used."""
        with opened(config) as (swarm, tokenizer):
            # `generation` uses the fallback itself, because it reports it to the client.
            fallback, swarm.local_fallback = swarm.local_fallback, None
            processor = PictureProcessor(config.model, config.revision) if has_vision(swarm.config) else None
            return cls(swarm, tokenizer, name=name, max_length=max_length, local=fallback, picture_processor=processor)

    def start(self) -> None:
        if self.tokenizer.chat_template:
            self.templates.start()

    def close(self) -> None:
        self.templates.close()
        super().close()

    def take_preferences(self) -> None:
        """Take the generation config away from the models.

        Requests say how `generate()` is called. transformers would fill in the rest from the models' own configs.
        """
        self.preferences: GenerationConfig = self.swarm.generation_config
        """The checkpoint's own preferences."""
        for model in (self.swarm, *([] if self.local is None else [self.local.model])):
            model.generation_config = GenerationConfig()
        self.eos_ids = _eos_ids(self.preferences, self.tokenizer)
        self.pad_id: int = next((i for i in (self.tokenizer.pad_token_id, *self.eos_ids) if i is not None), 0)

    @property
    def max_length(self) -> int:
        """Most tokens of a prompt and its answer: the configured limit, or else the model's positions and the largest
        cache that servers have had free since the gateway started."""
        if self._is_given_length:
            return self.longest
        self._most_room = max(self._most_room, self.swarm.swarm.look_ups.snapshot.cache_room())
        return min(self.longest, self._most_room or self.longest)

    @cached_property
    def middle_form(self) -> "MiddleForm | None":
        """How the model is asked for the text between two others; None: it was not trained on that."""
        return MiddleForm.of(self.tokenizer)

    def grammars(self) -> Grammars:
        """Grammars for constrained answers. The first call builds the tables.

        Raises:
            ConfigurationError: they can't be built for this tokenizer.
        """
        with self._making_grammar:
            if self._grammars is None:
                self._grammars = Grammars(self.tokenizer, self.num_scores)
            return self._grammars

    def preferred_sampling(self) -> dict[str, Any]:
        """The checkpoint's sampling options, for requests that give none; without any, OpenAI's defaults hold."""
        found = self._preferred(name for name in CHOICE_FIELDS if name != "do_sample")
        return found if self.preferences.do_sample else {}

    def preferred_scores(self, *, has_ends: bool, is_constrained: bool) -> dict[str, Any]:
        """The checkpoint's options that change scores, as fields of a GenerationConfig. Some are left out if no token
        ends a text, or if a grammar says which tokens may come: they could forbid all of these."""
        found = self._preferred((*SCORE_FIELDS, *TOKEN_FIELDS))
        unused = {"eos_token_id", "pad_token_id"}
        if not has_ends:
            unused |= {"min_length", "min_new_tokens", "exponential_decay_length_penalty"}
        if is_constrained:
            unused |= FORBIDDING_FIELDS
            if _forbids(found.get("sequence_bias")):
                unused.add("sequence_bias")
        return {name: value for name, value in found.items() if name not in unused}

    @property
    def preferred_stops(self) -> tuple[str, ...]:
        """Texts that end an answer, by the checkpoint."""
        return preferred_stops(self.preferences)

    def _preferred(self, names: Iterable[str]) -> dict[str, Any]:
        found = {name: getattr(self.preferences, name, None) for name in names}
        return {name: value for name, value in found.items() if value is not None}

    @cached_property
    def spelling(self) -> Spelling:
        """Gives the bytes of the model's tokens."""
        return Spelling(self.tokenizer)

    @cached_property
    def call_form(self) -> CallForm | HarmonyForm:
        """The form in which the model writes calls of tools.

        Raises:
            ConfigurationError: it writes none, or in an unknown form.
        """
        return HarmonyForm() if self.speaks_harmony else form_of(self.name, self.tokenizer)

    @property
    def speaks_harmony(self) -> bool:
        """The model's answers are messages in channels."""
        return speaks_harmony(self.tokenizer)

    @property
    def thinks(self) -> bool:
        """The model may think before it answers."""
        return self.speaks_harmony or thinks(self.tokenizer)

    @property
    def efforts(self) -> dict[str, dict[str, Any]]:
        """The levels of thinking that can be asked for, and the template variables of each."""
        text = template_of(self.tokenizer)
        known = EFFORTS if self.speaks_harmony else ("none", "minimal", "low", "medium", "high", "xhigh", "max")
        found = {name: {"reasoning_effort": name} for name in known if "reasoning_effort" in text}
        return found | ({"none": {"enable_thinking": False}} if "enable_thinking" in text else {})

    def encode_chat(
        self,
        messages: Sequence[dict[str, Any]],
        template_options: dict[str, Any],
        tools: Sequence[dict[str, Any]] = (),
        *,
        pictures: Sequence[str] = (),
        go_on: bool = False,
    ) -> list[int]:
        """Token ids of a conversation, up to the start of the assistant's answer; with `go_on`, up to the end of the
        last message.

        `template_options` are variables of the chat template, like `enable_thinking`. `pictures` are the data URLs of
        all pictures in the messages; with some, the result is a `PicturePrompt`.

        Raises:
            ApiError: the model reads text only, a picture can't be read, or the template leaves a message out.
            ConfigurationError: there is no chat template, or template, tokenizer or processor refuse these messages.
        """
        processor = self.picture_processor if pictures else None
        if processor is not None:
            template = processor.template
        elif pictures:
            message = f"{self.name} reads text only, so leave out what is of type 'image_url'"
            raise ApiError(400, message, param="messages")
        elif not self.tokenizer.chat_template:
            raise ConfigurationError(f"{self.name} has no chat template: use /v1/completions")
        else:
            template = self.tokenizer.get_chat_template(None, list(tools) or None)
        if self.speaks_harmony:  # its template calls thoughts by another name
            messages = [
                {"thinking": one["reasoning_content"], **one} if "reasoning_content" in one else one for one in messages
            ]
        own = self.tokenizer.special_tokens_map
        render = partial(self.templates.render, template, tools=tools, given=template_options, own=own, go_on=go_on)
        text = render(messages)
        if missing := self.templates.without_place(template, messages, text, render):
            raise ApiError(400, f"the chat template of {self.name} has no place for {missing}", param="messages")
        if processor is not None:
            return processor.encode(text, pictures)
        try:
            return list(self.tokenizer(text, add_special_tokens=False).input_ids)
        except (TypeError, ValueError) as error:  # for example, half of a surrogate pair
            raise ConfigurationError(f"the model's tokenizer can't take these messages: {error}") from None

    def reasoning_reader(self, prompt_ids: Sequence[int]) -> ReasoningReader | None:
        """A reader of thoughts for one answer; None: the model writes none."""
        if not thinks(self.tokenizer):
            return None
        end = self.tokenizer.decode(prompt_ids[-MAX_HELD_TOKENS:], skip_special_tokens=False)
        return ReasoningReader(begun=str(end).rstrip().endswith(BEGIN_THOUGHTS))

    @property
    def thought_markers(self) -> frozenset[int]:
        """Special tokens around thoughts."""
        if self.speaks_harmony:
            return HarmonyForm().markers(self.tokenizer)
        return special_tokens(self.tokenizer, frozenset((BEGIN_THOUGHTS, END_THOUGHTS)))


def _eos_ids(generation_config: Any, tokenizer: Any) -> frozenset[int]:
    configured = generation_config.eos_token_id
    ids = configured if isinstance(configured, list) else [configured]
    return frozenset(int(i) for i in (*ids, tokenizer.eos_token_id) if i is not None)


@dataclass(frozen=True)
class MiddleForm:
    """Ids of the tokens around prefix and suffix."""

    before_prefix: int
    before_suffix: int
    before_middle: int | None
    """None: the suffix comes first, and the middle follows the prefix."""
    ends: frozenset[int]
    """Tokens that end the middle, besides the model's own end-of-text tokens."""

    @classmethod
    def of(cls, tokenizer: Any) -> Self | None:
        """The form for which a tokenizer has tokens, or None."""
        for names in _FORMS:
            found = [_token(tokenizer, name) for name in names]
            if None not in found:
                prefix, suffix, *middle = found
                ends = {_token(tokenizer, name) for name in _ENDS} | {*found}
                return cls(prefix, suffix, middle[0] if middle else None, frozenset(ends - {None}))
        return None

    def prompt(self, begin: list[int], prefix: list[int], suffix: list[int]) -> list[int]:
        """Token ids of the prompt; `begin` holds the special tokens that the tokenizer puts before any text."""
        if self.before_middle is None:
            return [*begin, self.before_suffix, *suffix, self.before_prefix, *prefix]
        return [*begin, self.before_prefix, *prefix, self.before_suffix, *suffix, self.before_middle]


_FORMS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen 2.5 and 3 Coder, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek Coder
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM 4, CodeGeeX
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
    ("[PREFIX]", "[SUFFIX]"),  # Codestral
)
"""The tokens before prefix, suffix and middle, by the descriptions of these models."""


_ENDS = ("<|fim_pad|>", "<fim_pad>", "<fim-pad>", "<|file_sep|>", "<file_sep>", "<|file_separator|>", "▁<EOT>")


def _token(tokenizer: Any, name: str) -> Any:
    token = tokenizer.convert_tokens_to_ids(name)
    return token if token is not None and tokenizer.convert_ids_to_tokens(token) == name else None
