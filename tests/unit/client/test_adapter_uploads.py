"""Adapters that a client has sent to servers, and how long it remembers them."""

from types import SimpleNamespace
from typing import Any

import pytest

from swarmllm.client.view import swarm_view
from swarmllm.client.view.swarm_view import AdapterUploads
from swarmllm.data_structures import Span


class Adapter:
    """One part, which is the same on every server."""

    version = 1
    patches = ()

    def part(self, _: Span) -> "Adapter":
        return self

    def flat(self) -> None:
        pass


async def test_servers_without_number_are_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swarm_view, "MAX_HANDLES", 10)
    monkeypatch.setattr(swarm_view, "AdapterHeader", lambda **_: None)

    async def request(*_: Any, **__: Any) -> None:
        pass

    uploads, adapter = AdapterUploads(None), Adapter()  # type: ignore[arg-type]
    for number in (*range(100), *range(90, 100)):
        connection: Any = SimpleNamespace(peer_id=f"peer {number}", request=request)
        await uploads.handle(connection, adapter, Span(0, 1), timeout_s=1)  # type: ignore[arg-type]
    assert len(uploads._handles) == 10
    assert len(uploads._locks) == 0
    assert uploads.num_uploads == 100, "the latest ones are remembered"
