"""The routes of a swarm of machines. Everybody may look; only the key of the page commands."""

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2 as httpx
import pytest
import segno
from fake_agent import KEY, FakeAgent, FakeOffer, machine, two_machines
from web_gateway import NAME, RunningGateway, running_gateway, wait_until

from swarmllm import LocalSwarm, embedded_model_path
from swarmllm.gateway.__main__ import bound_sockets, served_machines
from swarmllm.gateway.machines import MAX_COMMAND_BYTES, MachinesPages, qr_rows
from swarmllm.gateway.settings import GatewayConfig

COMMANDS: list[tuple[str, dict[str, Any]]] = [
    ("preview", {"model": "some/model"}),
    ("use", {"model": "some/model", "add": True}),
    ("drop", {"name": "some/model"}),
]
BEARER = {"Authorization": f"Bearer {KEY}"}


@pytest.fixture(scope="module")
def fake() -> FakeAgent:
    return FakeAgent()


@pytest.fixture(scope="module")
def machines(fake: FakeAgent) -> Iterator[RunningGateway]:
    """A gateway of one machine."""
    with running_gateway([], model=(), machines=lambda config: MachinesPages(fake, KEY, config)) as gateway:
        yield gateway


@pytest.fixture
def agent(fake: FakeAgent, machines: RunningGateway) -> Iterator[FakeAgent]:
    """The agent as it was at the start; it serves nothing."""
    fake.shown, fake.listed, fake.asked = two_machines(), [], []
    yield fake
    fake.offers = []
    machines.run(fake.changed.set)
    models = machines.gateway.models
    wait_until(lambda: not models.offers and not models._leaving and not models._dropped, "all models were closed")


def test_everybody_may_look(machines: RunningGateway, agent: FakeAgent) -> None:
    agent.listed = [{"model": "some/model", "fits": True}]
    assert machines.http.get("/api/machines").json() == agent.shown
    assert machines.http.get("/api/machines/models").json() == {"models": agent.listed}
    assert not agent.asked


def test_those_who_ask_at_once_share_a_catalogue(machines: RunningGateway, agent: FakeAgent) -> None:
    """It takes time, and needs no key."""
    machines.run(agent.may_list.clear)
    machines.run(setattr, machines.gateway.machines, "_listed_at", -1000.0)
    before = agent.num_listings
    with ThreadPoolExecutor(8) as at_once:
        asked = [at_once.submit(machines.http.get, "/api/machines/models") for _ in range(8)]
        wait_until(lambda: agent.num_listings > before, "it is being listed")
        machines.run(agent.may_list.set)
        assert {one.result().status_code for one in asked} == {200}
    assert agent.num_listings == before + 1


@pytest.mark.parametrize(("route", "body"), COMMANDS)
def test_the_key_of_the_page_commands(
    machines: RunningGateway, agent: FakeAgent, route: str, body: dict[str, Any]
) -> None:
    path = f"/api/machines/{route}"
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": KEY}, {"X-Api-Key": KEY}, {"Cookie": KEY}):
        refused = machines.http.post(path, json=body, headers=headers)
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "page_key_needed")
        assert "swarmllm up" in refused.json()["error"]["message"]
    assert machines.http.post(f"{path}?key={KEY}", json=body).status_code == 401
    assert not agent.asked
    assert machines.http.post(path, json=body, headers=BEARER).status_code == 200
    assert agent.asked == [(route, *body.values(), *([False] if route == "preview" else []))]


def test_the_key_gives_the_invite(machines: RunningGateway, agent: FakeAgent) -> None:
    assert machines.http.get("/api/machines/invite").status_code == 401
    shown = machines.http.get("/api/machines/invite", headers=BEARER)
    assert shown.headers["cache-control"] == "no-store"
    assert shown.json() == {
        "invite": agent.invite(),
        "command": f"swarmllm up {agent.invite()}",
        "page": None,  # this gateway listens on loopback
        "qr": None,
    }


def test_the_page_s_address_for_a_phone() -> None:
    agent = FakeAgent()
    pages = MachinesPages(agent, KEY, GatewayConfig(model=(), host="0.0.0.0"))
    assert pages._page() == f"http://192.168.1.5:8080/swarm#key={KEY}"
    agent.shown["machines"] = [machine("desk", is_here=True), machine("attic", page="http://192.168.1.9:8080/")]
    assert pages._page() is None
    rows = qr_rows("http://192.168.1.5:8080/")
    assert len({len(row) for row in rows} | {len(rows)}) == 1
    assert rows == ["".join(map(str, row)) for row in segno.make_qr("http://192.168.1.5:8080/", error="m").matrix]


@pytest.mark.parametrize("route", [route for route, _ in COMMANDS])
@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"", 400, "invalid_json"),
        (b"[]", 400, "invalid_value"),
        (b'{"name": "m", "model": 7}', 400, None),
        (b'{"name": "m", "model": "m", "quant": "q4_k"}', 400, "unknown_parameter"),
        (b'{"name": "", "model": ""}', 400, None),
        (b"[" * MAX_COMMAND_BYTES, 400, None),
        (b" " * (MAX_COMMAND_BYTES + 1), 413, "body_too_large"),
        (json.dumps({"name": "x" * 5000, "model": "x" * 5000}).encode(), 400, None),
    ],
)
def test_other_bodies_are_refused_in_a_sentence(
    machines: RunningGateway, agent: FakeAgent, route: str, body: bytes, status: int, code: str | None
) -> None:
    refused = machines.http.post(f"/api/machines/{route}", content=body, headers=BEARER)
    error = refused.json()["error"]
    assert refused.status_code == status
    assert code in (None, error["code"])
    assert error["message"]
    assert "\n" not in error["message"]
    assert not agent.asked


def test_a_giant_body_without_the_key_is_not_read(machines: RunningGateway, agent: FakeAgent) -> None:
    refused = machines.http.post("/api/machines/use", content=b"x" * (1 << 22))
    assert refused.status_code == 401
    assert not agent.asked


def test_the_agent_s_refusals_are_told(machines: RunningGateway, agent: FakeAgent) -> None:
    refused = machines.http.post("/api/machines/use", json={"model": "no/such"}, headers=BEARER)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "configuration")
    assert refused.json()["error"]["message"].startswith("no/such is not among the models")


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"Origin": "https://elsewhere.example"}, "cross_origin"),
        ({"Origin": "null"}, "cross_origin"),
        ({"Host": "rebound.example"}, "unknown_host"),
    ],
)
def test_pages_of_others_command_nothing_even_with_the_key(
    machines: RunningGateway, agent: FakeAgent, headers: dict[str, str], code: str
) -> None:
    for route, body in COMMANDS:
        refused = machines.http.post(f"/api/machines/{route}", json=body, headers={**BEARER, **headers})
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, code)
    assert machines.http.get("/api/machines/invite", headers={**BEARER, **headers}).status_code == 403
    assert not agent.asked


def test_gateways_without_machines_have_no_such_routes(gateway: RunningGateway, machines: RunningGateway) -> None:
    for path in ("/api/machines", "/api/machines/models", "/api/machines/invite"):
        assert gateway.http.get(path).status_code == 404
    assert gateway.http.post("/api/machines/use", json={"model": "m"}, headers=BEARER).status_code == 404
    told = [path for path in gateway.http.get("/openapi.json").json()["paths"] if "machines" in path]
    assert not told
    document = machines.http.get("/openapi.json").json()
    told = [path for path in document["paths"] if "machines" in path]
    assert sorted(told) == [f"/api/machines{end}" for end in ("", "/drop", "/invite", "/models", "/preview", "/use")]
    assert {"UseRequest", "DropRequest"} <= document["components"]["schemas"].keys()
    assert "<title>swarmllm swarm</title>" in gateway.http.get("/swarm").text


def test_the_gateway_offers_what_the_swarm_serves(
    machines: RunningGateway, agent: FakeAgent, swarm: LocalSwarm
) -> None:
    """From the time when the blocks are online; until the swarm drops it, or other files have its name."""

    def names() -> list[str]:
        return [one["id"] for one in machines.http.get("/v1/models").json()["data"]]

    def ask(model: str) -> Any:
        return machines.http.post("/v1/completions", json={"prompt": "Once", "max_tokens": 4, "model": model})

    def change(*offers: FakeOffer) -> None:
        agent.offers = list(offers)
        machines.run(agent.changed.set)

    where: dict[str, Any] = {"initial_peers": swarm.initial_peers, "place": embedded_model_path()}
    change(FakeOffer(NAME, ready=False, **where))
    wait_until(lambda: ask(NAME).status_code == 503, "the gateway knows that it is being loaded")
    assert ask(NAME).json()["error"]["code"] == "model_loading"
    assert names() == []
    change(FakeOffer(NAME, **where), FakeOffer(NAME, manifest="f" * 64, ready=False))  # two of a name: the first counts
    wait_until(lambda: names() == [NAME], "it is offered")
    assert not agent.asked  # its client's part is fetched when somebody asks for it
    assert ask(NAME).status_code == 200
    assert agent.asked == [("prepare", NAME)]
    (first,) = machines.gateway.models
    change(FakeOffer(NAME, ready=False, **where))  # a machine was lost: it stays
    assert ask(NAME).status_code == 200
    assert list(machines.gateway.models) == [first]
    change(FakeOffer(NAME, manifest="1" * 64, **where))  # its files have changed
    wait_until(lambda: not list(machines.gateway.models), "the old model is withdrawn")
    assert ask(NAME).status_code == 200
    assert agent.asked == [("prepare", NAME)] * 2
    change()
    wait_until(lambda: names() == [], "it is dropped")


def test_a_broken_agent_is_told_in_a_sentence(
    machines: RunningGateway, agent: FakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail() -> list[dict[str, Any]]:
        raise OSError("the disk is gone")

    machines.run(setattr, machines.gateway.machines, "_listed_at", -1000.0)
    monkeypatch.setattr(agent, "catalogue", fail)
    answer = machines.http.get("/api/machines/models")
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")
    monkeypatch.undo()
    machines.run(setattr, machines.gateway.machines, "_listed_at", -1000.0)
    assert machines.http.get("/api/machines/models").status_code == 200


def test_a_picture_is_asked_for_in_the_gateway_s_loop(machines: RunningGateway, agent: FakeAgent) -> None:
    loops: list[asyncio.AbstractEventLoop] = []
    whole = agent.picture

    def noted() -> dict[str, Any]:
        loops.append(asyncio.get_running_loop())
        return whole()

    agent.picture = noted  # type: ignore[method-assign]
    try:
        assert machines.http.get("/api/machines").status_code == 200
    finally:
        del agent.picture  # type: ignore[method-assign]
    assert loops == [machines.loop]


def test_the_gateway_of_a_machine_ends_with_its_block() -> None:
    """As `swarmllm up` runs it, in the agent's event loop."""

    async def run() -> None:
        config = GatewayConfig(model=(), port=0, num_threads=1)
        sockets = bound_sockets(config)
        async with (
            served_machines(config, FakeAgent(), KEY, sockets) as address,
            httpx.AsyncClient(base_url=address) as client,
        ):
            assert (await client.get("api/machines")).json() == two_machines()
            assert (await client.post("api/machines/drop", json={"name": "m"}, headers=BEARER)).status_code == 200
            assert "<title>swarmllm machines</title>" in (await client.get("swarm")).text
            assert "<title>swarmllm swarm</title>" in (await client.get("swarm?model=m")).text
        assert all(one.fileno() == -1 for one in sockets)

    asyncio.run(run())
