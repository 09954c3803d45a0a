"""The models that a gateway offers, by the names that requests use. `__main__` opens them, the APIs ask for them."""

from collections.abc import Iterator, Sequence
from typing import Self, TypeVar

import torch

from swarmllm.api import (
    ClientModelConfig,
    ConfigurationError,
    Task,
    open_checkpoint,
    task_of,
)
from swarmllm.gateway.engine.audio_model import AudioModel
from swarmllm.gateway.engine.embedding_model import EmbeddingModel, RankingModel, recipe_of
from swarmllm.gateway.engine.language_model import LanguageModel
from swarmllm.gateway.engine.offered_model import OfferedModel, hub_options
from swarmllm.gateway.errors import ApiError
from swarmllm.gateway.settings import GatewayConfig

Kind = TypeVar("Kind", bound=OfferedModel)
WRITES = (Task.CAUSAL_LM, Task.SEQ_TO_SEQ_LM, Task.IMAGE_TEXT_TO_TEXT)


class ModelChoice:
    """At least one model. Each has a client of its own in the swarm."""

    def __init__(self, models: Sequence[OfferedModel]) -> None:
        self._by_name = {model.name: model for model in models}
        if len(self._by_name) < len(models):
            names = ", ".join(model.name for model in models)
            raise ConfigurationError(f"two models have the same name ({names}): give each one by served_name")

    @classmethod
    def open(cls, config: GatewayConfig) -> Self:
        """Join the swarm of each model.

        Raises:
            SwarmError: a model can't be used. The others are closed again.
        """
        torch.set_num_threads(config.num_threads)
        opened: list[OfferedModel] = []
        try:
            for name, client in config.each_model():
                opened.append(_open(client, name, config.max_length))
            return cls(opened)
        except BaseException:
            for one in opened:
                one.close()
            raise

    def __iter__(self) -> Iterator[OfferedModel]:
        return iter(self._by_name.values())

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    @property
    def first(self) -> LanguageModel:
        """The first model that writes text: for requests without a model."""
        return self.named(None)

    @property
    def has_local(self) -> bool:
        """Some model can answer without the swarm."""
        return any(model.local is not None for model in self)

    def named(self, name: str | None) -> LanguageModel:
        """The text model of this name; None: the first one.

        Raises:
            ApiError: there is none, or this model does something else. The next three raise it, too.
        """
        return self._of_kind(name, LanguageModel)

    def embedder(self, name: str | None) -> EmbeddingModel:
        """The embedding model of this name; None: the first one."""
        return self._of_kind(name, EmbeddingModel)

    def ranker(self, name: str | None) -> RankingModel | EmbeddingModel:
        """The ranking or embedding model of this name; None: the first ranking model, else the first embedding
        model."""
        first = [one for kind in (RankingModel, EmbeddingModel) for one in self if isinstance(one, kind)]
        found = self.any(name) if name is not None or not first else first[0]
        return found if isinstance(found, EmbeddingModel) else self._of_kind(found.name, RankingModel)

    def transcriber(self, name: str | None) -> AudioModel:
        """The audio model of this name; None: the first one."""
        return self._of_kind(name, AudioModel)

    def _of_kind(self, name: str | None, kind: type[Kind]) -> Kind:
        found = self.any(name) if name is not None else self._first(kind)
        if isinstance(found, kind):
            return found
        does, lacks = found.use, kind.use
        names = ", ".join(model.name for model in self if isinstance(model, kind))
        mend = f"name one that does: {names}" if names else f"start the gateway with --model of {lacks.what} as well"
        message = f"{found.name} {does.verb} and {lacks.negation}: ask {does.route}, or {mend}"
        raise ApiError(400, message, param="model", code=lacks.code)

    def any(self, name: str | None) -> OfferedModel:
        """The model of this name, of any kind; None: the first of all.

        Raises:
            ApiError: there is none.
        """
        if name is None:
            return next(iter(self))
        if name not in self._by_name:
            known = ", ".join(map(repr, self._by_name))
            message = f"the model {name!r} is not served here; {known} {'is' if len(self._by_name) == 1 else 'are'}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return self._by_name[name]

    def _first(self, kind: type[OfferedModel]) -> OfferedModel:
        """The first model of this kind; without one, the first of all."""
        return next((model for model in self if isinstance(model, kind)), self.any(None))

    def start(self) -> None:
        """Start what the first request would wait for otherwise; returns at once."""
        for model in self:
            if isinstance(model, LanguageModel) and model.tokenizer.chat_template:
                model.templates.start()

    def close(self) -> None:
        """Leave the swarms."""
        for model in self:
            model.close()


def _open(config: ClientModelConfig, name: str | None, max_length: int | None) -> OfferedModel:
    """Open a model as its files say what it is for.

    Raises:
        ConfigurationError: the gateway has no use for such a model; and errors of opening it.
    """
    checkpoint = open_checkpoint(config.model, **hub_options(config.revision))
    recipe = recipe_of(checkpoint)
    if recipe is not None:
        return EmbeddingModel.open(config, recipe, name=name, max_length=max_length)
    task = task_of(checkpoint.config)
    if task == Task.SPEECH_SEQ_TO_SEQ:
        return AudioModel.open(config, name=name, max_length=max_length)
    if task == Task.SEQUENCE_CLASSIFICATION:
        if (num_labels := checkpoint.config.num_labels) != 1:
            raise ConfigurationError(
                f"{config.model} tells {num_labels} classes of texts apart, and a gateway offers classifiers that give "
                "one score for a pair of texts: use it from Python"
            )
        return RankingModel.open(config, name=name, max_length=max_length)
    if task in WRITES:
        return LanguageModel.open(config, name=name, max_length=max_length)
    raise ConfigurationError(
        f"{config.model} is a {task.value}, and a gateway offers models that write text, give embeddings, rank texts "
        "or write down speech: use it from Python"
    )
