"""The page of the machines in a real browser, in front of an agent that commands nobody; and the chat page, which
follows the models that come and go."""

import re
from collections.abc import Iterator
from typing import Any, Literal

import pytest
from axe_playwright_python.sync_playwright import Axe
from fake_agent import GB, KEY, FakeAgent, FakeOffer, hosted, machine, served, two_machines
from playwright.sync_api import Browser, Page, expect
from web_gateway import NAME, RunningGateway, running_gateway, wait_until

from swarmllm import LocalSwarm, embedded_model_path
from swarmllm.gateway.machines import MachinesPages, qr_rows

pytestmark = pytest.mark.slow

expect.set_options(timeout=120_000)
LARGE = "org/a-model-with-a-rather-long-name-70B-Instruct"
DESK, ATTIC = (machine(name)["peer_id"] for name in ("desk", "attic"))


@pytest.fixture(scope="module")
def fake() -> FakeAgent:
    return FakeAgent()


@pytest.fixture(scope="module")
def machines(fake: FakeAgent) -> Iterator[RunningGateway]:
    with running_gateway([], model=(), machines=lambda config: MachinesPages(fake, KEY, config)) as gateway:
        yield gateway


@pytest.fixture
def agent(fake: FakeAgent, machines: RunningGateway) -> FakeAgent:
    """Two machines without a model, and three models to choose from."""
    fake.shown, fake.asked, fake.offers = two_machines(), [], []
    fake.listed = [
        choice("org/small", text="fits with q4_k, about 33 tokens/s on desk", is_here=True),
        choice("tiny/old", text="fits with int8, about 90 tokens/s on attic"),
        choice("org/enormous", fits=False, text="needs 200 GB more, with q4_k"),
    ]
    machines.run(setattr, machines.gateway.machines, "_listed_at", -1000.0)
    return fake


def choice(name: str, **more: Any) -> dict[str, Any]:
    return {"model": name, "is_here": False, "num_blocks": 24, "fits": True, "text": "", "problem": None, **more}


def busy(agent: FakeAgent) -> None:
    """One model is ready, one is being loaded, and one does not fit."""
    desk, attic = agent.shown["machines"]
    hosts = [{"peer_id": ATTIC, "machine": "attic", "start": 0, "end": 50}]
    hosts.append({"peer_id": DESK, "machine": "desk", "start": 50, "end": 80})
    old = [{"peer_id": ATTIC, "machine": "attic", "start": 0, "end": 24}]
    agent.shown["models"] = [
        served("tiny/old", 24, hosts=old, one_tokens_per_s=14.23),
        served(LARGE, 80, "loading", hosts=hosts),
        served("org/huge", 120, "does not fit", missing_bytes=77 * GB),
    ]
    from_others = {"bytes_from_machines": 8 * GB // 10, "bytes_from_hub": 4 * GB // 10}
    desk["hosted"] = [hosted(LARGE, 50, 80, "fetching", done_bytes=12 * GB // 10, total_bytes=3 * GB, **from_others)]
    attic["hosted"] = [hosted("tiny/old", 0, 24), hosted(LARGE, 0, 50, "waiting")]
    attic |= {"used_bytes": 4 * GB, "round_trip_ms": 3.21, "seen_s": 31.0}
    agent.shown["leaving"] = [{"name": "tiny/older", "sessions": 1}]


def with_key(page: Page, machines: RunningGateway) -> None:
    page.goto(f"{machines.url}/swarm#key={KEY}")
    expect(page.locator("#catalogue li")).to_have_count(3)


def violations(page: Page) -> list[Any]:
    return [(one["id"], [node["html"] for node in one["nodes"]]) for one in Axe().run(page).response["violations"]]


def test_machines_and_their_models(page: Page, machines: RunningGateway, agent: FakeAgent) -> None:
    """All of it can be seen without a key. Unknown values are not shown."""
    page.goto(f"{machines.url}/swarm")
    expect(page.locator("#verdict")).to_have_text("No model is in use yet.")
    expect(page.locator("#lead")).to_have_text(
        "2 machines with 32 GB of memory for models. Machines of this local network may join without an invite."
    )
    expect(page.locator("#events")).to_have_text("Nothing was commanded yet.")
    desk = page.locator("#machines > li").first
    expect(desk).to_contain_text("desk")
    expect(desk).to_contain_text("this machine")
    expect(desk.locator(".facts")).to_have_text("0 MB of 16 GB of memory in use · 100 GB free on the disk")
    expect(desk.get_by_role("meter", name="Memory of desk")).to_have_attribute("aria-valuenow", "0")

    busy(agent)
    expect(page.locator("#verdict")).to_have_text(
        f"tiny/old is ready. {LARGE} is being loaded. org/huge does not fit: 77 GB of memory are missing."
    )
    attic = page.locator("#machines > li").nth(1)
    expect(attic.locator(".facts").first).to_have_text(
        "4 GB of 16 GB of memory in use · 100 GB free on the disk · 3.2 ms away"
    )
    expect(attic).to_contain_text("not seen for 31 s")
    expect(attic.locator(".parts li")).to_have_text(
        ["tiny/old · blocks 0:24 · online", f"{LARGE} · blocks 0:50 · waiting"]
    )
    expect(desk.locator(".parts li")).to_have_text(
        f"{LARGE} · blocks 50:80 · fetching · 1.2 GB of 3 GB, 800 MB from other machines, 400 MB from the hub"
    )
    expect(desk.get_by_role("progressbar")).to_have_attribute("aria-valuenow", "40")
    small, large, _ = page.locator("#models > li").all()
    expect(small).to_contain_text("24 blocks · q4_k · about 14.2 tokens/s expected for one text")
    expect(large.locator(".strip li")).to_have_text(["attic 0:50", "desk 50:80"])
    expect(large.get_by_role("progressbar")).to_have_count(0)  # attic doesn't know yet how much it needs
    expect(large).not_to_contain_text("tokens/s")
    expect(page.locator("#leaving")).to_have_text("tiny/older is on its way out: 1 session still uses it.")

    agent.shown["machines"][1]["hosted"][1] |= {"state": "fetching", "total_bytes": 5 * GB, "done_bytes": 2 * GB}
    expect(large.get_by_role("progressbar")).to_have_attribute("aria-valuenow", "40")
    expect(page.locator("#verdict")).to_contain_text("is being loaded: 40 %.")
    agent.shown["machines"][1]["hosted"][1]["problem"] = "the disk is full"
    agent.shown["models"][1]["problem"] = "the disk is full"
    expect(page.locator("#models .problem")).to_have_text("the disk is full")
    expect(attic.locator(".problem")).to_have_text("the disk is full")
    expect(page).to_have_title(re.compile("^⚠ "))


def test_only_the_key_shows_what_commands(page: Page, machines: RunningGateway, agent: FakeAgent) -> None:
    busy(agent)
    page.goto(f"{machines.url}/swarm")
    expect(page.locator("#catalogue li")).to_have_count(3)
    expect(page.locator("#looking")).to_contain_text("swarmllm up")
    for hidden in ("Use org/small", "Drop tiny/old", "Copy"):
        expect(page.get_by_role("button", name=hidden)).to_have_count(0)
    page.goto(f"{machines.url}/#key={KEY}")  # the address of the chat page has it as well
    expect(page).to_have_url(f"{machines.url}/")
    page.goto(f"{machines.url}/swarm")
    expect(page.get_by_role("button", name="Use org/small")).to_be_visible()
    expect(page.locator("#looking")).to_be_hidden()
    expect(page.locator("#line")).to_have_text(f"swarmllm up {agent.invite()}")
    expect(page.locator("#phone")).to_be_hidden()  # no phone reaches a gateway on loopback
    page.goto(f"{machines.url}/swarm?#key=wrong")
    expect(page.locator("#looking")).to_be_visible()
    expect(page.get_by_role("button", name="Use org/small")).to_have_count(0)
    assert page.evaluate("localStorage['swarmllm.page_key']") is None
    assert not agent.asked


def test_a_change_is_shown_before_it_is_commanded(page: Page, machines: RunningGateway, agent: FakeAgent) -> None:
    with_key(page, machines)
    assert "key" not in page.url
    dialog = page.get_by_role("dialog")
    page.get_by_role("button", name="Use org/small").click()
    expect(dialog.locator(".sides > div").first).to_have_text(re.compile("Now.*no model"))
    expect(dialog.locator(".sides > div").last).to_have_text("Thenorg/smalldesk 0:24")
    expect(dialog).to_contain_text("To be loaded: 3 GB on desk.")
    expect(dialog).to_contain_text("about 14.2 tokens/s for one text, about 40 tokens/s for all together")
    expect(dialog.get_by_role("radio")).to_have_count(0)
    dialog.get_by_role("button", name="Cancel").click()
    expect(dialog).to_be_hidden()
    assert agent.asked == [("preview", "org/small", False)]
    page.get_by_role("button", name="Use org/small").click()
    dialog.get_by_role("button", name="Use it").click()
    expect(page.locator("#events li")).to_contain_text("desk: use org/small")
    assert agent.asked[-1] == ("use", "org/small", False)

    busy(agent)
    expect(page.locator("#catalogue li").nth(1)).to_contain_text("in use")
    page.get_by_role("button", name="Use org/small").click()
    dialog.get_by_text("Besides").click()
    expect(dialog.locator(".sides > div").last).to_contain_text("tiny/old")
    dialog.get_by_role("button", name="Use it").click()
    expect(page.locator("#events li").first).to_contain_text("desk: add org/small")

    page.get_by_role("button", name="Drop tiny/old").click()
    dialog.get_by_role("button", name="Drop it").click()
    expect(page.locator("#models > li")).to_have_count(2)
    assert agent.asked[-1] == ("drop", "tiny/old")


def test_another_model_can_be_named(page: Page, machines: RunningGateway, agent: FakeAgent) -> None:
    with_key(page, machines)
    page.get_by_label("Search").fill("SMALL")
    expect(page.locator("#catalogue li")).to_have_count(2)  # one of the list, and this very name
    page.get_by_label("Search").fill("no/such")
    page.get_by_role("button", name="Use no/such").click()
    expect(page.get_by_role("dialog").locator(".problem")).to_contain_text("choose one of the list")
    expect(page.get_by_role("button", name="Use it")).to_be_disabled()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_be_hidden()
    assert agent.asked == [("preview", "no/such", False)]


def test_names_of_strangers_stay_text(page: Page, machines: RunningGateway, agent: FakeAgent) -> None:
    evil = "<img src=x onerror=\"document.title='harm'\"><script>document.title='harm'</script>"
    busy(agent)
    for one in agent.shown["machines"]:
        one |= {"name": evil, "peer_id": f'{one["peer_id"][:5]}"><b>', "page": "javascript:document.title='harm'"}
        one["hosted"] = [hosted(evil, 0, 4, problem=evil, quant_type=evil, state="fetching", total_bytes=9)]
    agent.shown["swarm"]["name"] = evil
    host = {"peer_id": evil, "machine": evil, "start": 0, "end": 4}
    agent.shown["models"] = [served(evil, 4, "loading", hosts=[host], problem=evil, quant_type=evil)]
    agent.shown["commands"] = [{"number": 1, "what": evil, "by": evil, "peer_id": evil, "at": 1.0}]
    agent.shown["leaving"] = [{"name": evil, "sessions": 0}]
    agent.listed = [choice(evil, text=evil, problem=evil), *agent.listed[1:]]
    with_key(page, machines)
    for place in ("#verdict", "#models", "#machines", "#catalogue", "#events", "#leaving"):
        expect(page.locator(place)).to_contain_text(evil)
    page.get_by_label("Search").fill(f"{evil}!")
    page.locator("#catalogue button").last.click()
    expect(page.get_by_role("dialog").locator(".sides")).to_contain_text(evil)
    assert page.locator("main img, main script, main b, dialog img, dialog script").count() == 0
    assert "harm" not in page.title().replace(evil, "")


def test_with_the_keyboard_alone(page: Page, machines: RunningGateway, agent: FakeAgent) -> None:
    with_key(page, machines)
    button = page.get_by_role("button", name="Use org/small")
    for _ in range(20):
        page.keyboard.press("Tab")
        if button.evaluate("one => one === document.activeElement"):
            break
    busy(agent)
    expect(page.locator("#models > li")).to_have_count(3)
    assert button.evaluate("one => one === document.activeElement")  # redrawing took nothing away
    page.keyboard.press("Enter")
    expect(page.get_by_role("radio").first).to_be_focused()
    page.keyboard.press("ArrowDown")
    expect(page.locator(".sides > div").last).to_contain_text("tiny/old")
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    expect(page.get_by_role("button", name="Use it")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("#events li")).to_contain_text("desk: add org/small")


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 360])
def test_everybody_can_use_it(
    browser: Browser, machines: RunningGateway, agent: FakeAgent, theme: Literal["light", "dark"], width: int
) -> None:
    """Nothing runs over a phone's edge, and axe-core finds nothing."""
    busy(agent)
    agent.shown["machines"][0]["hosted"][0]["problem"] = "x" * 200
    page = browser.new_context(color_scheme=theme, viewport={"width": width, "height": 800}).new_page()
    try:
        with_key(page, machines)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert violations(page) == []
        page.get_by_role("button", name="Use org/small").click()
        expect(page.locator(".sides")).to_be_visible()
        assert violations(page) == []
        assert page.locator("dialog").evaluate("one => one.scrollWidth <= one.clientWidth")
    finally:
        page.context.close()


def test_the_qr_code_of_the_page(
    page: Page, machines: RunningGateway, agent: FakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = f"http://192.168.1.5:8080/swarm#key={KEY}"
    monkeypatch.setattr(machines.gateway.machines, "_page", lambda: address)
    with_key(page, machines)
    drawn = page.locator("#qr path").get_attribute("d") or ""
    rows = qr_rows(address)
    dark = {(x, y) for y, row in enumerate(rows) for x, one in enumerate(row) if one == "1"}
    assert {(int(x) - 4, int(y) - 4) for x, y in re.findall(r"M(\d+) (\d+)h1v1h-1z", drawn)} == dark
    expect(page.get_by_role("img", name="QR code")).to_be_visible()


def test_a_gateway_that_is_gone(page: Page, machines: RunningGateway, agent: FakeAgent) -> None:
    with_key(page, machines)
    page.route("**/api/machines", lambda route: route.abort())
    expect(page.locator("#verdict")).to_have_text(
        "The gateway can’t be reached. This page shows the last that it knew."
    )
    page.unroute("**/api/machines")
    expect(page.locator("#verdict")).to_have_text("No model is in use yet.")


def test_the_chat_page_follows_the_models(
    page: Page, machines: RunningGateway, agent: FakeAgent, swarm: LocalSwarm
) -> None:
    where: dict[str, Any] = {"initial_peers": swarm.initial_peers, "place": embedded_model_path()}

    def change(*offers: FakeOffer) -> None:
        agent.offers = list(offers)
        machines.run(agent.changed.set)

    page.goto(f"{machines.url}/")
    expect(page.locator("#waits")).to_have_text("No model is served now. Choose one.")
    expect(page.get_by_role("heading", name="no model")).to_be_visible()
    expect(page.get_by_role("link", name="Choose one")).to_have_attribute("href", "/swarm")
    page.get_by_label("Message").fill("Tell me a story about a fox.")
    page.keyboard.press("Enter")
    expect(page.locator(".message")).to_have_count(0)
    change(FakeOffer(NAME, **where))
    expect(page.locator(".message.assistant[aria-busy=false]")).to_have_count(1)  # sent once the model was there
    expect(page.locator("#waits")).to_have_text("")
    expect(page.get_by_role("heading", name=NAME)).to_be_visible()
    expect(page.locator("#health-text")).to_have_text("2 servers")

    change(FakeOffer(NAME, **where), FakeOffer("second", **where))
    expect(page.get_by_role("combobox", name="Model")).to_be_visible()
    page.get_by_role("combobox", name="Model").select_option("second")
    page.get_by_label("Message").fill("And one about a dog.")
    page.keyboard.press("Enter")
    expect(page.locator(".message.assistant[aria-busy=false]")).to_have_count(2)
    page.locator("#health").click()
    expect(page).to_have_url(f"{machines.url}/swarm?model=second")  # the servers of this model
    expect(page.locator("#table tbody tr")).to_have_count(2)
    expect(page.locator("#join-card")).to_be_hidden()  # nobody starts servers by hand
    expect(page.get_by_role("link", name="Machines")).to_be_visible()
    change(*agent.offers, FakeOffer("third", **where))
    wait_until(lambda: "third" in machines.gateway.models, "it is offered")
    page.goto(f"{machines.url}/swarm?model=third")  # looking at its servers opens it
    expect(page.locator("#table tbody tr")).to_have_count(2)
    page.goto(f"{machines.url}/?model={NAME}")
    expect(page.get_by_role("combobox", name="Model")).to_have_value(NAME)
    change()
    expect(page.locator("#waits")).to_have_text("No model is served now. Choose one.")
    models = machines.gateway.models
    wait_until(lambda: not models.offers and not models._leaving, "all models were closed")
