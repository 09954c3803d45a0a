"""The models that a gateway offers, by the names that requests use. `__main__` opens them, the APIs ask for them.

Models may come and go while the gateway runs. `offer` adds a name. Its model is opened at the first use, in a thread,
one model at a time. `withdraw` takes the name away. Requests that use the model end as usual; then it leaves its swarm.

    offered ──first use──> opening ──> open ──withdrawn──> in use ──last request ends──> closed
       ^                      │          │
       └──failed; tried again─┘          └──its client died──> offered again

All changes happen in the web server's event loop.
"""

import asyncio
import gc
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Self, TypeVar

import torch

from swarmllm.api import (
    ClientModelConfig,
    ConfigurationError,
    Task,
    open_checkpoint,
    task_of,
    user_path,
)
from swarmllm.gateway.engine.audio_model import AudioModel
from swarmllm.gateway.engine.embedding_model import EmbeddingModel, RankingModel, recipe_of
from swarmllm.gateway.engine.language_model import LanguageModel
from swarmllm.gateway.engine.offered_model import OfferedModel, hub_options
from swarmllm.gateway.errors import RETRY_AFTER_S, ApiError
from swarmllm.gateway.settings import GatewayConfig, with_adapter

logger = logging.getLogger(__name__)

Kind = TypeVar("Kind", bound=OfferedModel)
Choose = Callable[[str | None], Kind]
"""A method of `ModelChoice` that finds an open model by name."""
WRITES = (Task.CAUSAL_LM, Task.SEQ_TO_SEQ_LM, Task.IMAGE_TEXT_TO_TEXT)

OPENING_S = 60.0
"""Longest time that a request waits for its model to be opened. Assumed: people and their programs wait about as
long."""
LINGER_S = 3.0
"""Longest time that the end of the gateway waits for requests that use withdrawn models."""


class Offer:
    """A name that requests can use, and its model once that is open."""

    def __init__(
        self,
        name: str,
        settings: Callable[[], Awaitable[ClientModelConfig]] | None = None,
        model: OfferedModel | None = None,
    ) -> None:
        """`settings` gives the settings of the client; it may wait until the files are here."""
        self.name = name
        self.settings = settings
        self.model = model
        self.opening: asyncio.Task[None] | None = None
        self.may_cancel = False
        """The opening waits for files or for its turn, so it can be cancelled."""
        self.failure: tuple[Exception, float] | None = None
        """The error of the last try to open it, and the time by the event loop's clock."""


class ModelChoice:
    """Models by name. Each has a client of its own in the swarm."""

    def __init__(self, models: Iterable[OfferedModel] = (), *, max_length: int | None = None) -> None:
        models = tuple(models)
        self._offers = {model.name: Offer(model.name, model=model) for model in models}
        if len(self._offers) < len(models):
            names = ", ".join(model.name for model in models)
            raise ConfigurationError(f"two models have the same name ({names}): give each one by served_name")
        self._max_length = max_length
        self._turn = asyncio.Lock()
        self._leaving: dict[OfferedModel, asyncio.Task[None]] = {}
        """Models whose name is gone, while requests use them."""
        self._dropped: set[asyncio.Task[None]] = set()
        """Openings whose name is gone."""
        self._past_counts: Counter[str] = Counter()
        self.on_change: Callable[[], None] = lambda: None
        """Called when a model was opened, or is no longer offered."""
        self.coming: Collection[str] = ()
        """Names that will be offered once servers have loaded their blocks."""

    @classmethod
    def open(cls, config: GatewayConfig, on_turn: Callable[[str], None] = lambda name: None) -> Self:
        """Join the swarm of each model. `on_turn(name)` is called when a model's turn comes.

        Raises:
            SwarmError: a model can't be used. The others are closed again.
        """
        torch.set_num_threads(config.num_threads)
        opened: list[OfferedModel] = []
        try:
            for name, client in config.each_model():
                on_turn(name or _name_in_swarm(client))
                opened.append(_open(client, name, config.max_length))
            return cls(opened, max_length=config.max_length)
        except BaseException:
            for one in opened:
                one.close()
            raise

    # ------------------------------------------------------------------ models come and go

    def offer(self, name: str, settings: Callable[[], Awaitable[ClientModelConfig]]) -> None:
        """Offer one more model. Its first use opens it with these settings.

        Raises:
            ConfigurationError: the name is offered already.
        """
        if name in self._offers:
            raise ConfigurationError(f"a model {name!r} is offered already: withdraw it first")
        self._offers[name] = Offer(name, settings)

    def withdraw(self, name: str) -> None:
        """Offer a model no longer. Requests that use it end as usual; then its client leaves the swarm."""
        offer = self._offers.pop(name)
        if offer.opening is not None:
            self._dropped.add(offer.opening)
            offer.opening.add_done_callback(self._dropped.discard)
            if offer.may_cancel:
                offer.opening.cancel()
        self._let_go(offer)

    def reopen(self, model: OfferedModel) -> None:
        """A model's client has died: the next request opens the model anew."""
        offer = self._offers.get(model.name)
        if offer is not None and offer.model is model and offer.settings is not None:
            self._let_go(offer)

    def _let_go(self, offer: Offer) -> None:
        model, offer.model = offer.model, None
        if model is not None:
            self._leaving[model] = asyncio.create_task(self._close_when_unused(model), name=f"close {model.name}")
            self.on_change()

    async def _close_when_unused(self, model: OfferedModel) -> None:
        await model.unused()
        await asyncio.to_thread(model.close)
        self._past_counts += model.swarm.swarm.counts
        del self._leaving[model], model
        gc.collect()  # circles hold its weights

    async def settle(self) -> None:
        """At the end of the gateway: wait for models that are being opened or closed."""
        for offer in self._offers.values():
            if offer.opening is not None and offer.may_cancel:
                offer.opening.cancel()
        openings = {offer.opening for offer in self._offers.values() if offer.opening is not None} | self._dropped
        if openings:
            await asyncio.wait(openings)
        if self._leaving:
            await asyncio.wait(set(self._leaving.values()), timeout=LINGER_S)

    def close(self) -> None:
        """Leave the swarms."""
        for model in (*self, *self._leaving):
            model.close()

    def start(self) -> None:
        """Start what the first request would wait for otherwise; returns at once."""
        for model in self:
            model.start()

    def counts(self) -> Counter[str]:
        """Counts of all clients since the gateway began, closed ones too."""
        return sum((model.swarm.swarm.counts for model in (*self, *self._leaving)), self._past_counts)

    # ------------------------------------------------------------------ for requests

    @asynccontextmanager
    async def using(self, choose: Choose[Kind], name: str | None) -> AsyncIterator[Kind]:
        """Within the block the model stays open, even if it is withdrawn. It is opened first if need be.

        `choose` is `named`, `embedder`, `ranker`, `transcriber` or `any`.

        Raises:
            ApiError: there is no such model, or it can't be opened now.
        """
        model = await self._open_first(choose) if name is None else await self._open_named(choose, name)
        with model.used():
            yield model

    async def _open_named(self, choose: Choose[Kind], name: str) -> Kind:
        if name in self._offers:
            await self._be_open(self._offers[name])
        return choose(name)

    async def _open_first(self, choose: Choose[Kind]) -> Kind:
        """Open one model after the other, until one is of the right kind."""
        failure: ApiError | None = None
        for offer in tuple(self._offers.values()):
            try:
                await self._be_open(offer)
            except ApiError as error:
                failure = failure or error
                continue
            with suppress(ApiError):
                if (found := choose(None)) is offer.model:
                    return found
        try:
            return choose(None)
        except ApiError as error:
            raise failure or error from None

    async def _be_open(self, offer: Offer) -> None:
        """Return when the model is open.

        Raises:
            ApiError: it can't be opened now, or takes longer than this request waits.
        """
        if offer.model is not None:
            return
        loop = asyncio.get_running_loop()
        if offer.opening is None:
            if offer.failure is not None and loop.time() - offer.failure[1] < RETRY_AFTER_S:
                raise _not_open(offer.name, offer.failure[0])
            offer.opening = asyncio.create_task(self._open_in_turn(offer), name=f"open {offer.name}")
        await asyncio.wait({offer.opening}, timeout=OPENING_S)
        if self._offers.get(offer.name) is not offer:
            raise self._unknown(offer.name)
        if offer.model is None:
            raise _not_open(offer.name, None if offer.failure is None else offer.failure[0])

    async def _open_in_turn(self, offer: Offer) -> None:
        """Open a model. It never raises: the error is `offer.failure`."""
        assert offer.settings is not None
        try:
            offer.failure, offer.may_cancel = None, True
            config = await offer.settings()
            async with self._turn:
                offer.may_cancel = False
                model = await asyncio.to_thread(_open, config, offer.name, self._max_length)
        except Exception as error:
            logger.warning("can't open %s: %s", offer.name, error, exc_info=ApiError.of(error).status == 500)
            offer.failure = error, asyncio.get_running_loop().time()
            return
        finally:
            offer.opening, offer.may_cancel = None, False
        model.start()
        offer.model = model
        if self._offers.get(offer.name) is offer:
            self.on_change()
        else:
            self._let_go(offer)

    # ------------------------------------------------------------------ open models

    def __iter__(self) -> Iterator[OfferedModel]:
        """The models that are open."""
        return (offer.model for offer in self._offers.values() if offer.model is not None)

    def __contains__(self, name: str) -> bool:
        return name in self._offers

    @property
    def offers(self) -> tuple[Offer, ...]:
        """All names, and their models if they are open."""
        return tuple(self._offers.values())

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
        by_page = any(offer.settings for offer in self.offers)
        add = "choose {} on the page /swarm" if by_page else "start the gateway with --model of {} as well"
        mend = f"name one that does: {names}" if names else add.format(lacks.what)
        message = f"{found.name} {does.verb} and {lacks.negation}: ask {does.route}, or {mend}"
        raise ApiError(400, message, param="model", code=lacks.code)

    def any(self, name: str | None) -> OfferedModel:
        """The model of this name, of any kind; None: the first of all.

        Raises:
            ApiError: there is none, or it isn't open.
        """
        if name is None:
            found = next(iter(self), None)
            if found is None:
                raise ApiError(503, NO_MODEL, code="no_model", retry_after_s=RETRY_AFTER_S)
            return found
        if name not in self._offers:
            raise self._unknown(name)
        model = self._offers[name].model
        if model is None:
            raise _not_open(name, None)
        return model

    def _first(self, kind: type[OfferedModel]) -> OfferedModel:
        """The first model of this kind; without one, the first of all."""
        return next((model for model in self if isinstance(model, kind)), self.any(None))

    def _unknown(self, name: str) -> ApiError:
        if name in self.coming:
            message = f"the machines are still loading {name!r}: the page /swarm shows how far they are"
            return ApiError(503, message, param="model", code="model_loading", retry_after_s=RETRY_AFTER_S)
        known = ", ".join(map(repr, self._offers))
        others = f"{known} {'is' if len(self._offers) == 1 else 'are'}" if known else NO_MODEL
        message = f"the model {name!r} is not served here; {others}"
        return ApiError(404, message, param="model", code="model_not_found")


NO_MODEL = "no model is served now: choose one on the page /swarm"


def _not_open(name: str, failure: Exception | None) -> ApiError:
    if failure is None:
        message = f"{name} is still being opened here: try again in a moment"
        return ApiError(503, message, param="model", code="model_opening", retry_after_s=RETRY_AFTER_S)
    error = ApiError.of(failure)
    message = f"{name} can't be opened here now: {error}"
    return ApiError(503, message, param="model", code=error.code, retry_after_s=RETRY_AFTER_S)


def first_name(config: GatewayConfig) -> str:
    """The name of the first model in requests, which is known before its swarm is.

    Raises:
        SwarmError: the model's directory or file can't be used.
    """
    name, client = config.each_model()[0]
    return name or _name_in_swarm(client)


def _name_in_swarm(config: ClientModelConfig) -> str:
    """The name of a model without one of its own. It never holds the path to a directory or file."""
    name = config.model
    if user_path(name).exists():
        name = open_checkpoint(name, **hub_options(config.revision)).public_name
    return with_adapter(name, config.active_adapter)


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
