"""The web application: the list of all APIs, the pages' files, health, and answers to errors.

`gateway/__main__` serves `Waiting` until the swarm is complete, then `Gateway`. `swarmllm up` serves a `Gateway` with
`MachinesPages`, whose models come and go. This module knows the APIs by name only: each is a `Dialect` in `apis/`,
listed in `DIALECTS`.
"""

import asyncio
import gzip
import hashlib
import json
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from swarmllm.api import MissingBlocksError, SwarmError, SwarmView, one_line
from swarmllm.gateway.apis.anthropic import Anthropic
from swarmllm.gateway.apis.audio import Audio
from swarmllm.gateway.apis.embeddings import Embeddings
from swarmllm.gateway.apis.ollama import Ollama
from swarmllm.gateway.apis.openai import OpenAI
from swarmllm.gateway.apis.responder import Dialect, Responder
from swarmllm.gateway.apis.responses import Responses
from swarmllm.gateway.apis.websocket import OverWebSocket
from swarmllm.gateway.engine.engine import Engine
from swarmllm.gateway.engine.model_choice import NO_MODEL, ModelChoice, Offer, first_name
from swarmllm.gateway.engine.offered_model import OfferedModel
from swarmllm.gateway.errors import RETRY_AFTER_S, ApiError
from swarmllm.gateway.guard import Guard, Rates
from swarmllm.gateway.machines import MachinesPages
from swarmllm.gateway.metrics import GatewayMetrics
from swarmllm.gateway.monitor import SwarmWatch
from swarmllm.gateway.routes import JSON, Routes, RouteTable, get
from swarmllm.gateway.settings import GatewayConfig
from swarmllm.gateway.training_runs import TrainingRuns

STATUSES = ("ok", "unopened", "degraded", "dead")
"""States of a model in /health, from the best on."""

logger = logging.getLogger(__name__)

RETRY_S = 1.0
"""Seconds between two tries to join the swarm. Each try itself waits `route_timeout_s` for servers."""

DIRECTORY = Path(__file__).with_name("pages")
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".woff2": "font/woff2",
}


class Gateway(Routes):
    """All parts of one gateway; a web server runs its `app`."""

    error_paths = ("/api/swarm",)

    def __init__(self, models: ModelChoice, config: GatewayConfig, machines: MachinesPages | None = None) -> None:
        """`machines`: the machines on which the models run, if this gateway is one of them."""
        self.models = models
        self.config = config
        self.machines = machines
        self.metrics = GatewayMetrics()
        self.metrics.read_from(models.counts)
        self.engine = Engine(self.metrics, max_concurrent=config.max_concurrent, max_waiting=config.max_waiting)
        self.watches: dict[OfferedModel, SwarmWatch] = {}
        self._is_watching = False
        self._follow()
        models.on_change = self._follow
        rates = Rates(config.requests_per_minute)
        self.runs = TrainingRuns(config.runs_directory())
        self.responder = Responder(models, self.engine, config, rates)
        self.dialects = {kind: kind(self.responder) for kind in DIALECTS}
        self._table = TABLE if machines is None else TABLE_WITH_MACHINES
        self.app: ASGIApp = Guard(self._starlette(), self._table, config, rates, self._on_response)

    def _starlette(self) -> Starlette:
        files = PageFiles(has_machines=self.machines is not None)
        parts = (*self.dialects.values(), self, files, self.runs, *([] if self.machines is None else [self.machines]))
        answer_error = partial(_answer_error, self._table)
        return Starlette(
            routes=[route for one in parts for route in one.bound()],
            exception_handlers={
                ApiError: answer_error,
                SwarmError: answer_error,
                HTTPException: partial(_answer_http_error, self._table),
                ClientDisconnect: _answer_nobody,
                Exception: answer_error,
            },
            lifespan=lambda _: self.watching(),
        )

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Within the block, the gateway watches the swarm. At the end it cancels what is under way."""
        self._is_watching = True
        for watch in self.watches.values():
            watch.start()
        following = set()
        if self.machines is not None:
            following.add(asyncio.create_task(self.machines.follow(self.models), name="follow the swarm's models"))
        for task in following:
            task.add_done_callback(_log_failure)
        try:
            yield
        finally:
            for task in following:
                task.cancel()
                await asyncio.wait({task})
            await self.engine.close()
            await self.models.settle()
            self._is_watching = False
            for watch in self.watches.values():
                watch.stop()

    def _follow(self) -> None:
        """Watch the swarms of the open models, and no others."""
        open_models = set(self.models)
        for model in self.watches.keys() - open_models:
            self.watches.pop(model).stop()
        for model in self.models:
            if model not in self.watches:
                may_join = self.machines is None  # machines start servers by themselves
                watch = SwarmWatch(model.swarm.swarm, model.name, self.metrics, model.about(), may_join=may_join)
                self.watches[model] = watch
                if self._is_watching:
                    watch.start()
                    self._notice_end(model)

    def _notice_end(self, model: OfferedModel) -> None:
        """If the client of a model dies that was opened while the gateway runs, only this model needs a new one."""
        view: SwarmView = model.swarm.swarm
        loop = asyncio.get_running_loop()

        async def wait() -> None:
            await view.daemon_exited()
            logger.warning("the peer-to-peer daemon (p2pd) of %s died; the next request starts another", model.name)
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self.models.reopen, model)

        view.loop.call_soon(wait())

    @get("/health", "Tell whether an answer could begin now.", errors=(503, 403), error_type=JSON, needs_key=False)
    async def health(self, _: Request) -> Response:
        """The state of the best model, and of each one if there are several."""
        found = [self._health_of(offer) for offer in self.models.offers]
        if not found:
            no_model: dict[str, Any] = {"status": "waiting", "model": None, "missing_blocks": [], "reason": NO_MODEL}
            return JSONResponse(no_model, 503, {"Retry-After": str(RETRY_AFTER_S)})
        best = min(found, key=lambda one: (STATUSES.index(one["status"]), len(one["missing_blocks"])))
        can_answer = best["status"] != "dead" and (not best["missing_blocks"] or self.models.has_local)
        more = {"models": found} if len(found) > 1 else {}
        return JSONResponse({**best, **more}, 200 if can_answer else 503)

    def _health_of(self, offer: Offer) -> dict[str, Any]:
        if offer.model is None:
            return {"status": "unopened", "model": offer.name, "missing_blocks": []}
        watch = self.watches[offer.model]
        missing = watch.missing_blocks()
        status = "dead" if not watch.client_is_alive else "degraded" if missing else "ok"
        return {"status": status, "model": offer.name, "missing_blocks": missing}

    @get("/metrics", "Figures for Prometheus.", errors=(403,), answer_type="text/plain", needs_key=False)
    async def show_metrics(self, _: Request) -> Response:
        return Response(self.metrics.page(), media_type=self.metrics.content_type)

    @get("/api/swarm", "The servers and their blocks.", errors=(403,), needs_key=False)
    async def swarm(self, request: Request) -> Response:
        """The same JSON for all clients: it is written once per change."""
        name = request.query_params.get("model")
        offers = [offer for offer in self.models.offers if name is None or offer.name == name]
        if name is None and not offers:
            return JSONResponse(_nothing_yet("", NO_MODEL))
        if offers and offers[0].model is None:
            return JSONResponse(_nothing_yet(offers[0].name, "its first use opens it here") | {"opens": True})
        etag, body = self.watches[self.models.any(name)].as_json()
        headers = {"etag": etag, "cache-control": "no-cache"}
        if request.headers.get("if-none-match") == etag:
            return Response(status_code=304, headers=headers)
        return Response(body, media_type="application/json", headers=headers)

    @get("/openapi.json", needs_key=False)
    async def openapi(self, _: Request) -> Response:
        return JSONResponse(self._table.document)

    def _on_response(self, path: str, status: int) -> None:
        """Count an answer. All unknown paths count as one, since there is no end of them."""
        self.metrics.requests.labels(path if path in self._table.paths else "other", str(status)).inc()


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        logger.error("%s failed: the list of models stays as it is", task.get_name(), exc_info=task.exception())


async def _answer_error(table: RouteTable, request: Request, error: Exception) -> Response:
    return table.answer(ApiError.of(error), request.url.path)


async def _answer_http_error(table: RouteTable, request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    messages = {
        404: f"there is nothing at {json.dumps(request.url.path)}",
        405: f"{json.dumps(request.url.path)} takes no {request.method}",
    }
    return table.answer(ApiError(status, messages.get(status, "the request can't be answered")), request.url.path)


async def _answer_nobody(_request: Request, _error: Exception) -> Response:
    return Response(status_code=499)


def _nothing_yet(name: str, reason: str) -> dict[str, Any]:
    """The JSON of `/api/swarm` while there is no swarm to look at."""
    found: dict[str, Any] = {"model": name, "known": False, "waiting": reason, "num_blocks": 0}
    nothing: dict[str, Any] = dict.fromkeys(("missing_blocks", "route", "servers", "events", "history"), ())
    unknown = ("bottleneck", "expected_ms_per_token", "tokens_per_s", "about")
    return {**found, **nothing, **dict.fromkeys(unknown)}


class Waiting(Routes):
    """A gateway before its swarm is complete; a web server runs its `app`. From `go_on` on, the real one answers."""

    def __init__(self, config: GatewayConfig) -> None:
        """Raises: SwarmError: the directory or file of the first model can't be used."""
        self.config = config
        self.name = first_name(config)
        """The model that it waits for."""
        self.missing_blocks: Sequence[int] | None = None
        """None until it has looked at the swarm."""
        self.reason = "the gateway is still joining the swarm"
        """The reason for waiting, in one sentence."""
        self._real: ASGIApp | None = None
        self._own: ASGIApp = Guard(self._starlette(), TABLE, config, Rates(None), lambda _path, _status: None)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on. The lifespan is the web server's own, not that of the real application."""
        real = self._real if scope["type"] != "lifespan" else None
        await (real or self._own)(scope, receive, send)

    @property
    def app(self) -> ASGIApp:
        return self

    def go_on(self, app: ASGIApp) -> None:
        """The swarm is complete: let this application answer."""
        self._real = app

    async def models(self) -> ModelChoice:
        """Join the swarm of each model, as soon as all of its blocks are served.

        Raises:
            SwarmError: a model can't be used, however complete its swarm is.
        """
        told = False
        while True:
            turns: list[str] = []
            try:
                return await asyncio.to_thread(ModelChoice.open, self.config, turns.append)
            except MissingBlocksError as error:
                self.name, self.missing_blocks, self.reason = turns[-1], error.block_idxs, one_line(error)
                if not told:
                    logger.warning("waiting for the swarm: %s", self.reason)
                told = True
            await asyncio.sleep(RETRY_S)

    def _starlette(self) -> Starlette:
        return Starlette(
            routes=[*PageFiles().bound(), *self.bound()],
            exception_handlers={ApiError: partial(_answer_error, TABLE), HTTPException: self._not_yet},
        )

    @get("/health")
    async def health(self, _: Request) -> Response:
        missing = None if self.missing_blocks is None else list(self.missing_blocks)
        found = {"status": "waiting", "model": self.name, "missing_blocks": missing, "reason": self.reason}
        return JSONResponse(found, 503, {"Retry-After": str(RETRY_AFTER_S)})

    @get("/api/swarm")
    async def swarm(self, _: Request) -> Response:
        return JSONResponse(_nothing_yet(self.name, self.reason))

    async def _not_yet(self, request: Request, _: Exception) -> Response:
        error = ApiError(503, self.reason, code="MissingBlocksError", retry_after_s=RETRY_AFTER_S)
        return TABLE.answer(error, request.url.path)


class PageFiles(Routes):
    """Answers with the files in `pages/`, if their kind is known."""

    def __init__(self, *, has_machines: bool = False) -> None:
        """`has_machines`: /swarm shows the machines; /swarm?model=NAME, the servers of a model."""
        self._has_machines = has_machines
        self._files = {
            path.relative_to(DIRECTORY).as_posix(): path.read_bytes()
            for path in DIRECTORY.rglob("*")
            if path.suffix in MEDIA_TYPES
        }
        self._compressed = {name: gzip.compress(data, mtime=0) for name, data in self._files.items()}
        self._etags = {
            name: f'"{hashlib.blake2b(data, digest_size=12).hexdigest()}"' for name, data in self._files.items()
        }

    @get("/", needs_key=False)
    async def chat(self, request: Request) -> Response:
        return self._answer(request, "chat.html")

    @get("/swarm", needs_key=False)
    async def swarm(self, request: Request) -> Response:
        shows_machines = self._has_machines and "model" not in request.query_params
        return self._answer(request, "machines.html" if shows_machines else "swarm.html")

    @get("/docs", needs_key=False)
    async def docs(self, request: Request) -> Response:
        return self._answer(request, "docs.html")

    @get("/static/{name:path}", needs_key=False)
    async def file(self, request: Request) -> Response:
        return self._answer(request, request.path_params["name"])

    def _answer(self, request: Request, name: str) -> Response:
        if name not in self._files:
            raise ApiError(404, "there is no such file")
        headers = {"etag": self._etags[name], "cache-control": "no-cache", "vary": "Accept-Encoding"}
        if request.headers.get("if-none-match") == self._etags[name]:
            return Response(status_code=304, headers=headers)
        data = self._files[name]
        if "gzip" in request.headers.get("accept-encoding", ""):
            data, headers["content-encoding"] = self._compressed[name], "gzip"
        return Response(data, media_type=MEDIA_TYPES[Path(name).suffix], headers=headers)


DIALECTS: tuple[type[Dialect], ...] = (OpenAI, Responses, Anthropic, Ollama, Embeddings, Audio, OverWebSocket)
"""All APIs of a gateway. A new one is a class in `apis/` and its name here."""
TABLE = RouteTable((*DIALECTS, Gateway, PageFiles, TrainingRuns))
TABLE_WITH_MACHINES = RouteTable((*DIALECTS, Gateway, PageFiles, TrainingRuns, MachinesPages))
