"""A model that a gateway offers: a name, a client in the swarm, a tokenizer. Each kind of model is a subclass.

`model_choice` opens them. How a model joins the swarm, and is closed again if it can't be used, is here once for all.
"""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

from swarmllm.api import (
    ClientModelConfig,
    ConfigurationError,
    LocalFallback,
    default_cache_dir,
    hub_token,
    open_model,
    require_room,
    user_path,
)
from swarmllm.gateway.settings import with_adapter

UNKNOWN_LENGTH = 8192
"""Tokens of a model that doesn't say how many it takes. Assumed."""


@dataclass(frozen=True)
class Use:
    """The purpose of a kind of models, in the words of messages."""

    what: str
    verb: str
    negation: str
    route: str
    code: str
    """Code of the error if a model of another kind is asked for this use."""


def shortest(*lengths: int | None) -> int:
    """The least of the known lengths."""
    return min((one for one in lengths if one), default=UNKNOWN_LENGTH)


@contextmanager
def opened(config: ClientModelConfig, **options: Any) -> Iterator[tuple[Any, Any]]:
    """The distributed model and its tokenizer. If an error leaves the block, the model leaves the swarm.

    Raises:
        SwarmError: the swarm or the checkpoint can't be used.
    """
    swarm, tokenizer = open_model(config, **options)
    try:
        yield swarm, tokenizer
    except BaseException:
        swarm.close()
        raise


def hub_options(revision: str | None) -> dict[str, Any]:
    """Arguments of `from_pretrained` that say where a checkpoint's files are."""
    return {"revision": revision, "token": hub_token(), "cache_dir": default_cache_dir()}


def load_processor(kind: Any, model: str, revision: str | None, what: str) -> Any:
    """A processor of transformers; `kind` is its Auto class, `what` its name in the error.

    Raises:
        ConfigurationError: the checkpoint has none that can be used.
    """
    try:
        return kind.from_pretrained(model, trust_remote_code=False, **hub_options(revision))
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        if not user_path(model).exists():
            require_room(model, error, default_cache_dir())
        reason = str(error).strip().split("\n")[0]
        raise ConfigurationError(f"{model} has no {what} that can be used: {reason}") from None


class OfferedModel:
    """A model that requests can name. It serves all requests; any thread may call it."""

    use: ClassVar[Use]
    local: LocalFallback | None = None
    """A model on this machine that goes on when the swarm can't, or None."""

    def __init__(self, swarm: Any, tokenizer: Any, *, name: str | None, max_length: int) -> None:
        """`name` None: as the swarm knows the model, with its adapter."""
        view = swarm.swarm
        self.swarm = swarm
        """The distributed model."""
        self.tokenizer = tokenizer
        self.name = name or with_adapter(view.model_name, view.config.active_adapter)
        """In the API."""
        self.fingerprint = view.fingerprint
        self.longest = max_length
        """Most tokens, by the settings and the model."""
        self.num_scores: int = swarm.get_input_embeddings().weight.shape[0]
        """Number of tokens in the model's tables, padding included."""
        self._uses = 0
        self._unused = asyncio.Event()

    @property
    def max_length(self) -> int:
        """Most tokens of a text; of a prompt and its answer together."""
        return self.longest

    def about(self) -> dict[str, Any]:
        """Facts for the page of the swarm."""
        return {
            "architecture": next(iter(self.swarm.config.architectures or ()), self.swarm.config.model_type),
            "parameters": self.swarm.num_parameters(),
            "context_tokens": self.max_length,
        }

    @contextmanager
    def used(self) -> Iterator[None]:
        """Within the block, the model stays open. In the web server's event loop, like the next three."""
        self.begin_use()
        try:
            yield
        finally:
            self.end_use()

    def begin_use(self) -> None:
        """Count one more user."""
        self._uses += 1
        self._unused.clear()

    def end_use(self) -> None:
        """Count one user less."""
        self._uses -= 1
        if not self._uses:
            self._unused.set()

    async def unused(self) -> None:
        """Return when nobody uses the model."""
        while self._uses:
            await self._unused.wait()

    def start(self) -> None:
        """Start what the first request would wait for otherwise; returns at once."""

    def close(self) -> None:
        """Leave the swarm."""
        self.swarm.close()

    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt, after the special tokens that the tokenizer puts before any text."""
        return list(self.tokenizer(text, add_special_tokens=special_tokens).input_ids)

    def decode(self, ids: Sequence[int], *, special_tokens: bool = False) -> str:
        """Text of tokens, special ones left out."""
        return str(
            self.tokenizer.decode(ids, skip_special_tokens=not special_tokens, clean_up_tokenization_spaces=False)
        )

    def token_text(self, token_id: int) -> str:
        """One token as text, special ones by name."""
        return str(self.tokenizer.decode([token_id], clean_up_tokenization_spaces=False))
