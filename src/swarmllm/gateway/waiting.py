"""What a gateway answers before its swarm is complete: the pages, and 503 with what is missing. Used by `__main__`."""

import asyncio
import logging
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from swarmllm.command_line import one_line
from swarmllm.errors import MissingBlocksError
from swarmllm.gateway.engine.model_choice import ModelChoice
from swarmllm.gateway.errors import RETRY_AFTER_S, ApiError
from swarmllm.gateway.guard import Guard, Rates
from swarmllm.gateway.page_files import PageFiles
from swarmllm.gateway.settings import GatewayConfig

logger = logging.getLogger(__name__)

RETRY_S = 1.0
"""Between two tries, each of which itself waits `route_timeout_s` for servers."""


class Waiting:
    """`app` is what a web server runs; from `go_on` on it is the real one."""

    def __init__(self, config: GatewayConfig) -> None:
        self.config = config
        self.reason = "the gateway is still joining the swarm"
        """One sentence."""
        self._real: ASGIApp | None = None
        self._own: ASGIApp = Guard(self._starlette(), config, Rates(None), lambda _path, _status: None)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The lifespan is the web server's, and so not that of the real one."""
        real = self._real if scope["type"] != "lifespan" else None
        await (real or self._own)(scope, receive, send)

    @property
    def app(self) -> ASGIApp:
        return self

    def go_on(self, app: ASGIApp) -> None:
        """The swarm is complete."""
        self._real = app

    async def models(self) -> ModelChoice:
        """Join the swarm of each model, as soon as all of its blocks are served.

        Raises:
            SwarmError: a model can't be used, whoever comes.
        """
        told = False
        while True:
            try:
                return await asyncio.to_thread(ModelChoice.open, self.config)
            except MissingBlocksError as error:
                self.reason = one_line(error)
                if not told:
                    logger.warning("waiting for the swarm: %s", self.reason)
                told = True
            await asyncio.sleep(RETRY_S)

    def _starlette(self) -> Starlette:
        pages = PageFiles()
        return Starlette(
            routes=[
                Route("/", pages.chat),
                Route("/swarm", pages.swarm),
                Route("/static/{name:path}", pages.file),
                Route("/health", self._health),
                Route("/api/swarm", self._swarm),
            ],
            exception_handlers={ApiError: self._answer_error, HTTPException: self._not_yet},
        )

    @property
    def _names(self) -> list[str]:
        return list(self.config.served_name or self.config.model)

    async def _health(self, _: Request) -> Response:
        found = {"status": "waiting", "model": self._names[0], "missing_blocks": [], "reason": self.reason}
        return JSONResponse(found, 503, {"Retry-After": str(RETRY_AFTER_S)})

    async def _swarm(self, _: Request) -> Response:
        found: dict[str, Any] = {"model": self._names[0], "known": False, "waiting": self.reason, "num_blocks": 0}
        nothing = dict.fromkeys(("missing_blocks", "route", "servers", "events", "history"), ())
        return JSONResponse(
            {**found, **nothing, **dict.fromkeys(("bottleneck", "expected_ms_per_token", "tokens_per_s", "about"))}
        )

    async def _not_yet(self, request: Request, _: Exception) -> Response:
        error = ApiError(503, self.reason, code="MissingBlocksError", retry_after_s=RETRY_AFTER_S)
        return error.response(request.url.path)

    async def _answer_error(self, request: Request, error: Exception) -> Response:
        return ApiError.of(error).response(request.url.path)
