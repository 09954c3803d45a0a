"""The model that a gateway serves: its client in the swarm, its tokenizer, and perhaps a local copy.

Made by `gateway/__main__`; `engine` and `generation` use it.
"""

import logging
import threading
from collections.abc import Sequence
from typing import Any, Self

import torch

from swarmllm.client.generation import TextConfig, open_model
from swarmllm.errors import ConfigurationError
from swarmllm.gateway.grammar import JsonGrammar
from swarmllm.gateway.settings import GatewayConfig
from swarmllm.models.architecture import cache_argument, decoder_stack

logger = logging.getLogger(__name__)


class LanguageModel:
    """One model for all requests; generating on it from several threads at once is fine."""

    def __init__(self, swarm: Any, tokenizer: Any, config: GatewayConfig, *, local: Any = None) -> None:
        self.swarm = swarm
        """The distributed model."""
        self.tokenizer = tokenizer
        self.local = local
        """The same model on this machine alone, or None."""
        self.name = config.served_name or swarm.swarm.model_name
        self.fingerprint = swarm.swarm.fingerprint
        self.cache_name = cache_argument(decoder_stack(swarm))
        positions = getattr(swarm.config.get_text_config(), "max_position_embeddings", None)
        self.max_length: int = min(config.max_length, positions or config.max_length)
        """Most tokens of a prompt and its answer."""
        self.eos_ids = _eos_ids(swarm.generation_config, tokenizer)
        self.pad_id: int = next((i for i in (tokenizer.pad_token_id, *self.eos_ids) if i is not None), 0)
        self.num_scores: int = swarm.get_output_embeddings().weight.shape[0]
        """Width of the logits."""
        self._grammar: JsonGrammar | None = None
        self._making_grammar = threading.Lock()

    @classmethod
    def open(cls, config: GatewayConfig) -> Self:
        """Join the swarm and load what the gateway needs itself.

        Raises:
            SwarmError: the swarm or the checkpoint can't be used.
        """
        torch.set_num_threads(config.num_threads)
        swarm, tokenizer = open_model(
            TextConfig(model=config.model, revision=config.revision, dtype=config.dtype, **config.client_settings())
        )
        try:
            local = None if config.fallback_to_local is None else _open_local(config.fallback_to_local, tokenizer)
            return cls(swarm, tokenizer, config, local=local)
        except BaseException:
            swarm.close()
            raise

    def close(self) -> None:
        """Leave the swarm."""
        self.swarm.close()

    def json_grammar(self) -> JsonGrammar:
        """For answers that follow a schema; its tables are made when they are first needed.

        Raises:
            ConfigurationError: this tokenizer can't be used for it.
        """
        with self._making_grammar:
            if self._grammar is None:
                self._grammar = JsonGrammar(self.tokenizer, self.num_scores)
            return self._grammar

    def preferred_sampling(self) -> dict[str, Any]:
        """What the checkpoint prefers if a request says nothing; OpenAI's defaults if it has no preference."""
        config = self.swarm.generation_config
        found = {name: getattr(config, name, None) for name in ("temperature", "top_p", "top_k", "min_p")}
        return {name: value for name, value in found.items() if value is not None and config.do_sample}

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt, with whatever the tokenizer puts before it."""
        return list(self.tokenizer(text).input_ids)

    def encode_chat(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        """Token ids of a conversation, up to where the assistant's answer begins.

        Raises:
            ConfigurationError: the model has no chat template, or the template refuses these messages.
        """
        from jinja2 import TemplateError

        if not self.tokenizer.chat_template:
            raise ConfigurationError(f"{self.name} has no chat template: use /v1/completions")
        try:
            encoded = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise ConfigurationError(f"the model's chat template can't take these messages: {error}") from None
        return list(encoded["input_ids"])

    def decode(self, ids: Sequence[int]) -> str:
        """Text of tokens, special ones left out."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def token_text(self, token_id: int) -> str:
        """One token as text, special ones by name."""
        return str(self.tokenizer.decode([token_id], clean_up_tokenization_spaces=False))


def _eos_ids(generation_config: Any, tokenizer: Any) -> frozenset[int]:
    configured = generation_config.eos_token_id
    ids = configured if isinstance(configured, list) else [configured]
    return frozenset(int(i) for i in (*ids, tokenizer.eos_token_id) if i is not None)


def _open_local(name: str, tokenizer: Any) -> Any:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        other = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        if other.get_vocab() != tokenizer.get_vocab():
            raise ConfigurationError(f"--fallback_to_local {name} has another tokenizer than the swarm's model")
        model = AutoModelForCausalLM.from_pretrained(name, dtype="auto", trust_remote_code=False)
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigurationError):
            raise
        reason = str(error).strip().split("\n")[0]
        raise ConfigurationError(f"--fallback_to_local {name} can't be loaded: {reason}") from None
    logger.info("loaded %s as the local fallback", name)
    return model.eval().requires_grad_(False)
