"""A model that a gateway offers: its client in the swarm, its tokenizer, and perhaps a local copy.

Made by `model_choice`; `engine` and `generation` use it.
"""

import inspect
import logging
import threading
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Self

from swarmllm.client.local_fallback import LocalFallback
from swarmllm.client.text_generation import open_model
from swarmllm.config import ClientModelConfig
from swarmllm.decoding.options import DEFAULTS
from swarmllm.errors import ConfigurationError
from swarmllm.gateway.call_forms import CallForm, form_of, special_tokens, template_of
from swarmllm.gateway.grammar import Grammars
from swarmllm.gateway.harmony import EFFORTS, HarmonyForm, speaks_harmony
from swarmllm.gateway.reasoning import BEGIN, END, ReasoningReader, thinks
from swarmllm.gateway.sampling import SAMPLING_NAMES
from swarmllm.gateway.text import MAX_HELD_TOKENS
from swarmllm.models.architecture import cache_argument, decoder_stack

logger = logging.getLogger(__name__)


class LanguageModel:
    """One model for all requests; generating on it from several threads at once is fine."""

    def __init__(
        self, swarm: Any, tokenizer: Any, *, name: str, max_length: int, local: LocalFallback | None = None
    ) -> None:
        self.swarm = swarm
        """The distributed model."""
        self.tokenizer = tokenizer
        self.local = local
        """A model on this machine that goes on when the swarm can't, or None."""
        self.name = name
        """In the API."""
        self.fingerprint = swarm.swarm.fingerprint
        self.cache_name = cache_argument(decoder_stack(swarm))
        positions = getattr(swarm.config.get_text_config(), "max_position_embeddings", None)
        self.max_length: int = min(max_length, positions or max_length)
        """Most tokens of a prompt and its answer."""
        self.eos_ids = _eos_ids(swarm.generation_config, tokenizer)
        self.pad_id: int = next((i for i in (tokenizer.pad_token_id, *self.eos_ids) if i is not None), 0)
        self.num_scores: int = swarm.get_output_embeddings().weight.shape[0]
        """Width of the logits."""
        self._grammars: Grammars | None = None
        self._making_grammar = threading.Lock()

    @classmethod
    def open(cls, config: ClientModelConfig, *, name: str | None, max_length: int) -> Self:
        """Join the swarm and load what the gateway needs itself.

        Raises:
            SwarmError: the swarm or the checkpoint can't be used.
        """
        swarm, tokenizer = open_model(config)
        try:
            # `generation` goes on with it, and tells whoever reads.
            fallback, swarm.local_fallback = swarm.local_fallback, None
            if name is None:
                name = ":".join(filter(None, (swarm.swarm.model_name, config.active_adapter)))
            return cls(swarm, tokenizer, name=name, max_length=max_length, local=fallback)
        except BaseException:
            swarm.close()
            raise

    def close(self) -> None:
        """Leave the swarm."""
        self.swarm.close()

    def grammars(self) -> Grammars:
        """For answers that follow a constraint; its tables are made when they are first needed.

        Raises:
            ConfigurationError: this tokenizer can't be used for it.
        """
        with self._making_grammar:
            if self._grammars is None:
                self._grammars = Grammars(self.tokenizer, self.num_scores)
            return self._grammars

    def preferred_sampling(self) -> dict[str, Any]:
        """What the checkpoint prefers if a request says nothing; OpenAI's defaults if it has no preference."""
        config = self.swarm.generation_config
        found = {name: getattr(config, name, None) for name in (*SAMPLING_NAMES, *DEFAULTS)}
        return {name: value for name, value in found.items() if value is not None and config.do_sample}

    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt, with whatever the tokenizer puts before it."""
        return list(self.tokenizer(text, add_special_tokens=special_tokens).input_ids)

    @cached_property
    def call_form(self) -> CallForm | HarmonyForm:
        """How it writes calls of tools.

        Raises:
            ConfigurationError: it writes none, or in a form that isn't known here.
        """
        return HarmonyForm() if self.speaks_harmony else form_of(self.name, self.tokenizer)

    @property
    def speaks_harmony(self) -> bool:
        """Whether its answers are messages in channels."""
        return speaks_harmony(self.tokenizer)

    @property
    def thinks(self) -> bool:
        """Whether it may think before it answers."""
        return self.speaks_harmony or thinks(self.tokenizer)

    @property
    def efforts(self) -> dict[str, dict[str, Any]]:
        """How much it can be told to think, and how its chat template is told."""
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
        go_on: bool = False,
    ) -> list[int]:
        """Token ids of a conversation, up to where the assistant's answer begins; or up to the end of the last message
        to `go_on` with.

        `template_options` are what the model's template knows besides messages, like `enable_thinking`.

        Raises:
            ConfigurationError: the model has no chat template, or the template refuses these messages.
        """
        from jinja2 import TemplateError

        if not self.tokenizer.chat_template:
            raise ConfigurationError(f"{self.name} has no chat template: use /v1/completions")
        # What steers the tokenizer isn't the template's.
        if self.speaks_harmony:  # its template has another name for thoughts
            messages = [
                {"thinking": one["reasoning_content"], **one} if "reasoning_content" in one else one for one in messages
            ]
        if taken := template_options.keys() & inspect.signature(self.tokenizer.apply_chat_template).parameters.keys():
            raise ConfigurationError(f"chat_template_kwargs can't hold {min(taken)}: leave it out")
        try:
            encoded = self.tokenizer.apply_chat_template(
                messages,
                tools=list(tools) or None,
                **template_options,
                add_generation_prompt=not go_on,
                continue_final_message=go_on,
                return_dict=True,
                tokenize=True,
            )
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise ConfigurationError(f"the model's chat template can't take these messages: {error}") from None
        return list(encoded["input_ids"])

    def reasoning_reader(self, prompt_ids: Sequence[int]) -> ReasoningReader | None:
        """For one answer; None: this model doesn't think aloud."""
        if not thinks(self.tokenizer):
            return None
        end = self.tokenizer.decode(prompt_ids[-MAX_HELD_TOKENS:], skip_special_tokens=False)
        return ReasoningReader(begun=str(end).rstrip().endswith(BEGIN))

    @property
    def thought_markers(self) -> frozenset[int]:
        """Special tokens between which it thinks."""
        if self.speaks_harmony:
            return HarmonyForm().markers(self.tokenizer)
        return special_tokens(self.tokenizer, frozenset((BEGIN, END)))

    def decode(self, ids: Sequence[int], *, special_tokens: bool = False) -> str:
        """Text of tokens, special ones left out."""
        return str(
            self.tokenizer.decode(ids, skip_special_tokens=not special_tokens, clean_up_tokenization_spaces=False)
        )

    def token_text(self, token_id: int) -> str:
        """One token as text, special ones by name."""
        return str(self.tokenizer.decode([token_id], clean_up_tokenization_spaces=False))


def _eos_ids(generation_config: Any, tokenizer: Any) -> frozenset[int]:
    configured = generation_config.eos_token_id
    ids = configured if isinstance(configured, list) else [configured]
    return frozenset(int(i) for i in (*ids, tokenizer.eos_token_id) if i is not None)
