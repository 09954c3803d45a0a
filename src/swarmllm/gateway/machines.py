"""The routes of a swarm of machines, for a gateway that runs beside one machine's agent (`swarmllm up`).

`MachinesPages` shows what the agent knows and passes commands on to it. It also offers the swarm's models in the
gateway, and withdraws them. It knows the agent as a protocol only; `commands/up` brings both together.

Everybody who reaches the gateway may look. Commands and the invite need the *page key*, which is part of the address
that `swarmllm up` prints. It comes in a header, which no page of another site can send. The swarm's own key never comes
here, except within the invite.
"""

import asyncio
import hmac
import shlex
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from swarmllm.api import ClientModelConfig
from swarmllm.gateway.apis.request_bodies import Body
from swarmllm.gateway.apis.responder import Kind, read_body, read_request
from swarmllm.gateway.engine.model_choice import ModelChoice
from swarmllm.gateway.errors import ApiError
from swarmllm.gateway.routes import JSON, Routes, get, post
from swarmllm.gateway.settings import GatewayConfig

MAX_COMMAND_BYTES = 1 << 14
"""Largest body of a command: a long path, and its field."""
CATALOGUE_S = 5.0
"""Seconds for which a catalogue is shown again. It takes seconds of computing, and everybody may ask for it."""


class Offered(Protocol):
    """A model that the swarm should serve."""

    @property
    def name(self) -> str: ...

    @property
    def manifest(self) -> str:
        """Digest of its files: another one means another model of the same name."""

    @property
    def ready(self) -> bool:
        """All of its blocks are online."""

    @property
    def initial_peers(self) -> Sequence[str]: ...

    @property
    def swarm_name(self) -> str | None: ...


class Agent(Protocol):
    """One machine of the swarm, in the gateway's event loop."""

    changed: asyncio.Event
    """Set when `picture` or `offered` has changed. `MachinesPages.follow` clears it."""

    def picture(self) -> dict[str, Any]:
        """Machines, models and commands, as JSON."""

    def offered(self) -> Sequence[Offered]:
        """The models that the swarm should serve, in their order."""

    def invite(self) -> str:
        """A text that makes another machine a member."""

    async def prepare(self, name: str) -> str | Path:
        """Fetch the client's part of a model; returns its directory. Raises: SwarmError: it can't be had now."""

    async def catalogue(self) -> list[dict[str, Any]]:
        """Models that could be served, and how they would fit, as JSON."""

    async def preview(self, model: str, add: bool) -> dict[str, Any]:
        """The change that `use` would make, as JSON. Raises: SwarmError: the model can't be used."""

    async def use(self, model: str, *, add: bool = False) -> dict[str, Any]:
        """Command the swarm to serve this model, in place of the others or besides them; returns the command.

        Raises:
            SwarmError: the model can't be used.
        """

    async def drop(self, name: str) -> dict[str, Any]:
        """Command the swarm to serve this model no longer; returns the command. Raises: SwarmError: it doesn't."""


class UseRequest(Body):
    """`POST /api/machines/use` and `/api/machines/preview`."""

    model: str = Field(min_length=1, max_length=4096, description="A name from /api/machines/models, or a path.")
    add: bool = Field(False, description="Serve it besides the present models, not in their place.")


class DropRequest(Body):
    """`POST /api/machines/drop`."""

    name: str = Field(min_length=1, max_length=4096, description="A name from the models of /api/machines.")


_COMMAND: Any = {"answer_types": (JSON,), "is_rated": False, "needs_key": False}
"""These routes check the page key themselves. The gateway's API keys are for the APIs."""


class MachinesPages(Routes):
    """Handlers for the machines' page, and the link between the agent's models and the gateway's."""

    error_paths = ("/api/machines",)

    def __init__(self, agent: Agent, page_key: str, config: GatewayConfig) -> None:
        self._agent, self._page_key, self._config = agent, page_key, config
        self._wanted: dict[str, Offered] = {}
        self._manifests: dict[str, str] = {}
        """Manifests of the models that are offered in the gateway."""
        self._listing: asyncio.Task[list[dict[str, Any]]] | None = None
        self._listed_at = 0.0

    # ------------------------------------------------------------------ looking

    @get("/api/machines", "Machines, models and commands of the swarm.", errors=(403,), needs_key=False)
    async def picture(self, _: Request) -> Response:
        return JSONResponse(self._agent.picture(), headers={"cache-control": "no-store"})

    @get("/api/machines/models", "Models that the machines could serve.", errors=(403,), needs_key=False)
    async def catalogue(self, _: Request) -> Response:
        """All who ask at the same time get the same answer."""
        loop, listing = asyncio.get_running_loop(), self._listing
        if listing is None or (listing.done() and loop.time() - self._listed_at > CATALOGUE_S):
            listing = self._listing = asyncio.create_task(self._list(), name="list models for the machines")
        found = await asyncio.shield(listing)
        return JSONResponse({"models": found}, headers={"cache-control": "no-store"})

    async def _list(self) -> list[dict[str, Any]]:
        try:
            return await self._agent.catalogue()
        finally:
            self._listed_at = asyncio.get_running_loop().time()

    # ------------------------------------------------------------------ commands

    @post("/api/machines/preview", "Show what a command to use a model would change.", UseRequest, **_COMMAND)
    async def preview(self, request: Request) -> Response:
        body = await self._read(request, UseRequest)
        return JSONResponse(await self._agent.preview(body.model, body.add))

    @post("/api/machines/use", "Command the swarm to serve a model.", UseRequest, **_COMMAND)
    async def use(self, request: Request) -> Response:
        body = await self._read(request, UseRequest)
        return JSONResponse(await self._agent.use(body.model, add=body.add))

    @post("/api/machines/drop", "Command the swarm to serve a model no longer.", DropRequest, **_COMMAND)
    async def drop(self, request: Request) -> Response:
        body = await self._read(request, DropRequest)
        return JSONResponse(await self._agent.drop(body.name))

    @get("/api/machines/invite", "The line that adds a machine, and the page's address.", needs_key=False)
    async def invite(self, request: Request) -> Response:
        """`page` and its QR code are null if no other machine can reach the page."""
        self._require_key(request)
        invite, page = self._agent.invite(), self._page()
        found = {"invite": invite, "command": shlex.join(["swarmllm", "up", invite]), "page": page}
        return JSONResponse({**found, "qr": page and qr_rows(page)}, headers={"cache-control": "no-store"})

    def _page(self) -> str | None:
        """The page's address with its key, for a phone; None: only this machine can reach it."""
        own = (one.get("page") for one in self._agent.picture()["machines"] if one.get("is_here"))
        address = next(own, None)
        if not address or self._config.on_loopback:
            return None
        return f"{address.rstrip('/')}/swarm#key={self._page_key}"

    async def _read(self, request: Request, kind: type[Kind]) -> Kind:
        """Read a command.

        Raises:
            ApiError: the page key is missing, or it is no such command.
        """
        self._require_key(request)
        return read_request(kind, await read_body(request, MAX_COMMAND_BYTES), lenient=False)

    def _require_key(self, request: Request) -> None:
        kind, _, key = request.headers.get("authorization", "").partition(" ")
        if kind.lower() != "bearer" or not hmac.compare_digest(key.strip().encode(), self._page_key.encode()):
            raise ApiError(
                401,
                "only people with the key of this page may do that: open the address that `swarmllm up` printed",
                code="page_key_needed",
            )

    # ------------------------------------------------------------------ the models of the gateway

    async def follow(self, models: ModelChoice) -> None:
        """Offer each model from the time when its blocks are online until the swarm drops it. Runs until cancelled."""
        while True:
            self._agent.changed.clear()
            self._offer(models, self._agent.offered())
            await self._agent.changed.wait()

    def _offer(self, models: ModelChoice, offered: Sequence[Offered]) -> None:
        self._wanted = {one.name: one for one in reversed(offered)}  # of two with the same name, the first one
        for name, manifest in tuple(self._manifests.items()):
            if name not in self._wanted or self._wanted[name].manifest != manifest:
                del self._manifests[name]
                models.withdraw(name)
        for one in dict.fromkeys(one.name for one in offered):
            if self._wanted[one].ready and one not in self._manifests:
                self._manifests[one] = self._wanted[one].manifest
                models.offer(one, partial(self._settings, one))
        models.coming = self._wanted.keys() - self._manifests.keys()

    async def _settings(self, name: str) -> ClientModelConfig:
        """The settings of a model's client. Raises: SwarmError: its files can't be had now."""
        place = await self._agent.prepare(name)
        one, config = self._wanted[name], self._config  # still wanted: `withdraw` would have cancelled this
        swarm = {"initial_peers": tuple(one.initial_peers), "swarm_name": one.swarm_name, "lan_discovery": False}
        return ClientModelConfig(
            model=str(place), dtype=config.dtype, device=config.device, **(config.client_settings() | swarm)
        )


def qr_rows(text: str) -> list[str]:
    """The QR code of a text: a row of `0` and `1` for each line, without the margin."""
    import segno  # here, because few gateways show one

    return ["".join("1" if dark else "0" for dark in row) for row in segno.make_qr(text, error="m").matrix]
