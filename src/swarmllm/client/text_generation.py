"""Settings, models with their tokenizer, conversations: for the commands `generate` and `chat` and for the gateway."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from swarmllm.config import ClientConfig, ClientModelConfig, default_cache_dir, hub_token, require_positive
from swarmllm.decoding.options import DecodingOptions
from swarmllm.errors import ConfigurationError, SessionLengthExceededError

COLDEST = 1e-6
"""The lowest temperature above 0: divided by less, scores can be infinite, and nothing can be drawn from them."""


@dataclass(frozen=True, kw_only=True)
class TextConfig(ClientModelConfig, DecodingOptions):
    """The text that is written."""

    max_new_tokens: int = 128
    """Most tokens to write. Assumed: a paragraph or two."""
    temperature: float | None = None
    """How freely to sample. Without it, top_p, top_k, seed and other ways to draw tokens, the likeliest is taken."""
    top_p: float | None = None
    """Sample from the likeliest tokens with this share of probability."""
    top_k: int | None = None
    """Sample from this many likeliest tokens."""
    seed: int | None = None
    """Sample the same text each time."""

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


def open_model(config: ClientModelConfig, *, seed: int | None = None, features: bool = False) -> tuple[Any, Any]:
    """The distributed model, to be closed by the caller, and its tokenizer; `features`: without its head.

    Raises:
        ConfigurationError: the model has no tokenizer; and what `AutoDistributedModel.from_pretrained` raises.
    """
    import torch
    import transformers

    from swarmllm.client.distributed_model import AutoDistributedModel, AutoDistributedModelForFeatureExtraction
    from swarmllm.models.checkpoint.tokenizer import load_tokenizer

    transformers.logging.set_verbosity_error()
    show_progress = sys.stderr.isatty()
    if not show_progress:
        transformers.logging.disable_progress_bar()
    kind = AutoDistributedModelForFeatureExtraction if features else AutoDistributedModel
    model = kind.from_pretrained(
        config.model,
        revision=config.revision,
        dtype=config.dtype,
        client_config=ClientConfig(**config.client_settings()),
        progress=show_progress,
    )
    if features:  # embeddings are made of the texts alone
        model.remote_blocks.batches.padding_notices.told_of_outputs = True
    try:
        tokenizer = load_tokenizer(
            config.model, revision=config.revision, token=hub_token(), cache_dir=default_cache_dir()
        )
    except ConfigurationError:
        model.close()
        raise
    if not features and model.generation_config.pad_token_id is None:
        model.generation_config.pad_token_id = tokenizer.pad_token_id or tokenizer.eos_token_id
    if seed is not None:
        torch.manual_seed(seed)
    return model, tokenizer


class Conversation:
    """Turns of a user and the model, all on one session, so that each turn computes only what is new.

    With the tokenizer's chat template if it has one; without, the model goes on with the text so far, and what the
    user says is part of it.
    """

    def __init__(self, model: Any, tokenizer: Any, session: Any, options: dict[str, Any]) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._session = session
        self._options = options
        self._messages: list[dict[str, str]] = []
        self._text_ids: list[int] = []

    @property
    def messages(self) -> list[dict[str, str]]:
        """What has been said, as chat templates take it; the system prompt first, if there is one."""
        return list(self._messages)

    @property
    def system(self) -> str | None:
        """The system prompt."""
        first = next(iter(self._messages), None)
        return first["content"] if first is not None and first["role"] == "system" else None

    def clear(self) -> None:
        """Begin anew; the system prompt stays."""
        system = self.system
        self._messages = [] if system is None else [{"role": "system", "content": system}]
        self._text_ids = []

    def instruct(self, system: str) -> None:
        """Begin anew with this system prompt.

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
        """The model's next turn. `options` go to `generate()`, e.g. a streamer; a turn that fails leaves no trace.

        Raises:
            SessionLengthExceededError: the conversation fills the session.
            SwarmError: the swarm fails.
        """
        import torch

        turn = {"role": "user", "content": said}
        ids = self._templated([*self._messages, turn]) if self._tokenizer.chat_template else self._continued(said)
        room = self._session.max_length - len(ids)
        if room < 1:
            raise SessionLengthExceededError(
                f"the conversation has reached its {self._session.max_length} tokens: begin anew"
            )
        options = {**self._options, "max_new_tokens": min(room, self._options["max_new_tokens"]), **options}
        input_ids = torch.tensor([ids])
        output = self._model.generate(
            input_ids, attention_mask=torch.ones_like(input_ids), tokenizer=self._tokenizer, **options
        )[0].tolist()
        answer = str(self._tokenizer.decode(output[len(ids) :], skip_special_tokens=True))
        self._messages += [turn, {"role": "assistant", "content": answer}]
        self._text_ids = output[:-1] if output[-1] == self._tokenizer.eos_token_id else output
        return answer

    def _templated(self, messages: Sequence[dict[str, str]]) -> list[int]:
        encoded = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
        return list(encoded["input_ids"])

    def _continued(self, said: str) -> list[int]:
        if not self._text_ids:
            return list(self._tokenizer(said).input_ids)
        return [*self._text_ids, *self._tokenizer(f"\n{said}", add_special_tokens=False).input_ids]
