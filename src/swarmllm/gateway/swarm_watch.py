"""Watch the swarm for `/api/swarm`: look into the DHT, and keep a line to the servers to notice at once who dies.

A record in the DHT outlives its server by a minute; a stream that the server answers pings on does not. A death is
also reported to the client, so that new sessions avoid the peer. Runs in the client's event loop, read from the web
server's. Entered and left by `app`.
"""

import asyncio
import hashlib
import json
import logging
import shlex
import time
from collections.abc import Coroutine
from typing import Any, Self

from swarmllm.api import Connection, ServerInfo, SwarmError, SwarmView
from swarmllm.gateway.metrics import GatewayMetrics
from swarmllm.gateway.swarm_picture import Contact, SwarmPicture

logger = logging.getLogger(__name__)

PERIOD_S = 2.0
"""Between two looks. Assumed: what happens shall be seen within a few seconds."""
RETRY_S = 10.0
"""Before a server that couldn't be reached is dialled again."""
MAX_LINES = 128
"""Servers to keep a line to; of larger swarms those on the best route come first, the others go without."""
STALLED_S = 60.0
"""Without a look that has ended, for whatever reason. Assumed: some times as long as the longest one takes."""
MAX_DIALS = 16
"""At a time."""


class SwarmWatch:
    """`async with` it; then `as_json` is up to date."""

    def __init__(self, view: SwarmView, name: str, metrics: GatewayMetrics, about: dict[str, Any]) -> None:
        """`about`: facts of the model, for people."""
        self._view = view
        self._name = name
        self._metrics = metrics
        self._states: dict[str, int] = {}
        self._picture = SwarmPicture(name, view.fingerprint, view.num_blocks, view.spans, view.look_ups.encoder_blocks)
        self._lines: dict[str, Connection] = {}
        self._failed_at: dict[str, float] = {}
        self._changed: asyncio.Event | None = None
        self._stopping = False
        self._looked_at = time.monotonic()
        peers = view.config.initial_peers or ()
        # Without addresses, a server finds the swarm on the local network.
        server = ["swarmllm", "server", "--model", view.model_place, *(["--initial_peers", *peers] if peers else [])]
        self._beside = {"join": shlex.join(server), "about": about}
        """What is shown beside the picture: the command that adds a server, and what `about` says."""
        self._shown = self._render()

    def as_json(self) -> tuple[str, bytes]:
        """An entity tag, and the JSON."""
        return self._shown

    def missing_blocks(self) -> list[int]:
        """Blocks that nobody serves who can be reached."""
        return self._picture.missing_blocks()

    @property
    def client_is_alive(self) -> bool:
        """Whether the client's event loop still does what it is there for."""
        return self._view.loop.is_running and time.monotonic() - self._looked_at < STALLED_S

    async def __aenter__(self) -> Self:
        self._view.loop.call_soon(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stopping = True
        self._view.loop.call_soon(self._stop())

    # ------------------------------------------------------------------ in the client's event loop

    async def _run(self) -> None:
        self._changed = asyncio.Event()
        try:
            while not self._stopping:
                self._changed.clear()
                await self._look()
                self._looked_at = time.monotonic()
                try:
                    async with asyncio.timeout(PERIOD_S):
                        await self._changed.wait()
                except TimeoutError:
                    continue
        finally:
            for line in self._lines.values():
                line.close()

    async def _stop(self) -> None:
        if self._changed is not None:
            self._changed.set()

    async def _look(self) -> None:
        try:
            snapshot = await self._view.look_ups.refresh()
        except SwarmError as error:
            logger.info("could not look into the DHT: %s", error)
            return
        snapshot = self._picture.completed(snapshot, self._lines)
        online = {server.peer_id: server for server in snapshot.online()}
        for peer_id in self._lines.keys() - online.keys():
            self._lines.pop(peer_id).close()
        self._failed_at = {peer: at for peer, at in self._failed_at.items() if peer in online}
        await self._dial([server for server in self._by_importance(online) if self._wants_line(server.peer_id)])
        contacts = {peer_id: Contact(reachable=False) for peer_id in self._failed_at}
        for peer_id, line in self._lines.items():
            contacts[peer_id] = Contact(True, line.round_trip_s)
        self._picture.update(snapshot, contacts, time.time())
        self._shown = await asyncio.to_thread(self._render)
        self._metrics.swarm.missing_blocks.labels(self._name).set(len(self.missing_blocks()))
        self._states = {**dict.fromkeys(self._states, 0), **self._picture.counts()}
        for state, count in self._states.items():
            self._metrics.swarm.servers.labels(self._name, state).set(count)

    def _by_importance(self, online: dict[str, ServerInfo]) -> list[ServerInfo]:
        route = {hop["peer_id"] for hop in json.loads(self._shown[1])["route"]} if len(online) > MAX_LINES else set()
        return sorted(online.values(), key=lambda server: (server.peer_id not in route, server.peer_id))[:MAX_LINES]

    def _wants_line(self, peer_id: str) -> bool:
        return peer_id not in self._lines and time.monotonic() - self._failed_at.get(peer_id, -RETRY_S) >= RETRY_S

    async def _dial(self, servers: list[ServerInfo]) -> None:
        room = asyncio.Semaphore(MAX_DIALS)

        async def dial(server: ServerInfo) -> None:
            async with room:
                try:
                    self._lines[server.peer_id] = await self._view.open_connection(server, self._on_answer)
                    self._failed_at.pop(server.peer_id, None)
                except SwarmError as error:
                    self._lose(server.peer_id, error)

        dials: list[Coroutine[Any, Any, None]] = [dial(server) for server in servers]
        await asyncio.gather(*dials)

    def _on_answer(self, connection: Connection, answer: object, _request: int | None) -> None:
        """We ask for nothing, so this is the end of the line."""
        if self._lines.get(connection.peer_id) is connection and isinstance(answer, SwarmError):
            del self._lines[connection.peer_id]
            self._lose(connection.peer_id, answer)
            if self._changed is not None:
                self._changed.set()

    def _lose(self, peer_id: str, error: SwarmError) -> None:
        if peer_id not in self._failed_at:
            self._view.report(error)
        self._failed_at[peer_id] = time.monotonic()

    def _render(self) -> tuple[str, bytes]:
        shown = self._picture.as_json() | self._beside
        body = json.dumps(shown, ensure_ascii=False, separators=(",", ":")).encode()
        return f'"{hashlib.blake2b(body, digest_size=12).hexdigest()}"', body
