"""What the commands `generate` and `chat` share: flags, a model of the swarm with its tokenizer, conversations."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from swarmllm.command_line import add_client_flags, add_initial_peers_flags
from swarmllm.config import ClientConfig, default_cache_dir, hub_token
from swarmllm.errors import ConfigurationError, SessionLengthExceededError


@dataclass(frozen=True, kw_only=True)
class TextConfig(ClientConfig):
    """Which model writes, and how; and how it uses its servers."""

    model: str
    """Hub id or local directory; the same checkpoint as the servers'."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    dtype: str = "auto"
    """Of the client's own part; auto = as stored."""
    max_new_tokens: int = 128
    """Most tokens to write. Assumed: a paragraph or two."""
    temperature: float | None = None
    """Of sampling; none of temperature, top_p, top_k and seed = the likeliest token each time."""
    top_p: float | None = None
    """Sample from the likeliest tokens that have this share of the probability."""
    top_k: int | None = None
    """Sample from so many likeliest tokens."""
    seed: int | None = None
    """Of sampling: the same seed, the same text."""
    max_length: int = 2048
    """Tokens of a whole conversation that the servers keep in their caches."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("max_new_tokens", "top_k", "max_length"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigurationError(f"{name} must be at least 1, not {value}")
        if self.temperature is not None and not self.temperature > 0:
            raise ConfigurationError(
                f"temperature must be greater than 0, not {self.temperature}; for the likeliest tokens leave it out"
            )
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ConfigurationError(f"top_p must be above 0 and at most 1, not {self.top_p}")

    def generation_options(self) -> dict[str, Any]:
        """Arguments of `generate()`. Samples if anything about sampling is given, whatever the checkpoint prefers."""
        sampling = {name: getattr(self, name) for name in ("temperature", "top_p", "top_k")}
        given = {name: value for name, value in sampling.items() if value is not None}
        return {
            "max_new_tokens": self.max_new_tokens,
            "do_sample": bool(given) or self.seed is not None,
            **given,
        }


def add_text_flags(parser: argparse.ArgumentParser) -> None:
    """Flags named as the fields of TextConfig, which give their defaults."""
    add = parser.add_argument
    add("--model", required=True, help="hub id or local directory")
    add("--revision", help="branch, tag or commit on the hub")
    add_initial_peers_flags(parser)
    add("--identity_path", metavar="FILE", help="key that is this client's peer id, for private swarms")
    add("--active_adapter", metavar="NAME", help="an adapter that servers offer, see `swarmllm status`")
    add("--dtype", "--torch_dtype", help="of the client's own part; auto = as stored")
    writing = parser.add_argument_group("writing")
    writing.add_argument("--max_new_tokens", type=int, metavar="N", help="most tokens to write at a time")
    writing.add_argument("--temperature", type=float, metavar="T", help="sample, not only the likeliest token")
    writing.add_argument("--top_p", type=float, metavar="P", help="sample from this share of the probability")
    writing.add_argument("--top_k", type=int, metavar="K", help="sample from the K likeliest tokens")
    writing.add_argument("--seed", type=int, metavar="N", help="sample the same text each time")
    add_client_flags(parser)


def open_model(config: TextConfig) -> tuple[Any, Any]:
    """The distributed model, to be closed by the caller, and its tokenizer.

    Raises:
        ConfigurationError: the model has no tokenizer; and what `AutoDistributedModel.from_pretrained` raises.
    """
    import torch
    import transformers

    from swarmllm.client.distributed_model import AutoDistributedModel

    transformers.logging.set_verbosity_error()
    show_progress = sys.stderr.isatty()
    if not show_progress:
        transformers.logging.disable_progress_bar()
    model = AutoDistributedModel.from_pretrained(
        config.model,
        revision=config.revision,
        dtype=config.dtype,
        client_config=ClientConfig(**config.client_settings()),
        progress=show_progress,
    )
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            config.model,
            revision=config.revision,
            token=hub_token(),
            cache_dir=default_cache_dir(),
            trust_remote_code=False,
        )
    except (OSError, ValueError) as error:
        model.close()
        reason = str(error).strip().split("\n")[0]
        raise ConfigurationError(f"{config.model} has no tokenizer that transformers can load: {reason}") from None
    if model.generation_config.pad_token_id is None:
        model.generation_config.pad_token_id = tokenizer.pad_token_id or tokenizer.eos_token_id
    if config.seed is not None:
        torch.manual_seed(config.seed)
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

    def clear(self) -> None:
        """Begin anew."""
        self._messages, self._text_ids = [], []

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
        output = self._model.generate(input_ids, attention_mask=torch.ones_like(input_ids), **options)[0].tolist()
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
