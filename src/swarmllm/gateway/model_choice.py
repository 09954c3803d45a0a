"""The models that a gateway offers, by the names that requests use. Opened by `__main__`, asked by the routes."""

from collections.abc import Iterator, Sequence
from typing import Self

import torch

from swarmllm.errors import ConfigurationError
from swarmllm.gateway.errors import ApiError
from swarmllm.gateway.language_model import LanguageModel
from swarmllm.gateway.settings import GatewayConfig


class ModelChoice:
    """One model at least, each with a client of its own in the swarm."""

    def __init__(self, models: Sequence[LanguageModel]) -> None:
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
        opened: list[LanguageModel] = []
        try:
            for name, client in config.each_model():
                opened.append(LanguageModel.open(client, name=name, max_length=config.max_length))
            return cls(opened)
        except BaseException:
            for one in opened:
                one.close()
            raise

    @property
    def first(self) -> LanguageModel:
        """The one that requests mean which name none."""
        return next(iter(self))

    def __iter__(self) -> Iterator[LanguageModel]:
        return iter(self._by_name.values())

    def named(self, name: str | None) -> LanguageModel:
        """The model of this name.

        Raises:
            ApiError: there is none.
        """
        if name is None:
            return self.first
        if name not in self._by_name:
            known = ", ".join(map(repr, self._by_name))
            message = f"the model {name!r} is not served here; {known} {'is' if len(self._by_name) == 1 else 'are'}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return self._by_name[name]

    def close(self) -> None:
        """Leave the swarms."""
        for model in self:
            model.close()
