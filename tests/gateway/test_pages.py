"""The chat page and the picture of the swarm in a real browser, in front of a real swarm."""

import json
import re
from pathlib import Path
from typing import Any, Literal

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, Route, expect
from test_parts import big_swarm, server
from web_gateway import RunningGateway, local_swarm, running_gateway, wait_until

from swarmllm import LocalSwarm, embedded_model_path
from swarmllm.data_structures import SwarmSnapshot
from swarmllm.gateway.monitor import Contact, SwarmPicture
from swarmllm.network.p2p.identity import Identity
from swarmllm.training.run_log import LOG_FILE, signed_line

pytestmark = pytest.mark.slow

expect.set_options(timeout=120_000)
ANSWERS = ".message.assistant"
DONE = ".message.assistant[aria-busy=false]"


def say(page: Page, text: str) -> None:
    page.get_by_label("Message").fill(text)
    page.keyboard.press("Enter")


def delete(page: Page, title: str) -> None:
    """As somebody with a mouse does: the sign is there where the mouse is."""
    page.get_by_role("button", name=title, exact=True).hover()
    page.get_by_role("button", name=f"Delete “{title}”").click()


def settings(page: Page, **values: str) -> None:
    page.get_by_role("button", name="Settings").click()
    for label, value in values.items():
        page.get_by_label(label.replace("_", " "), exact=False).first.fill(value)
    page.get_by_role("button", name="Done").click()


def test_a_conversation(page: Page, gateway: RunningGateway) -> None:
    page.goto(f"{gateway.url}/")
    expect(page.get_by_role("heading", name="embedded")).to_be_visible()
    expect(page.locator("#health-text")).to_have_text("2 servers")
    settings(page, Temperature="0")
    say(page, "Tell me a story about a fox.")
    expect(page.locator(DONE)).to_have_count(1)
    first = page.locator(f"{ANSWERS} .body").inner_text()
    assert len(first) > 20
    foot = page.locator(f"{ANSWERS} .foot")
    expect(foot).to_contain_text("tokens/s")
    expect(foot.locator(".hop")).to_have_count(2)

    page.get_by_role("button", name="Regenerate").click()
    expect(page.locator(DONE)).to_have_count(1)
    expect(page.locator(f"{ANSWERS} .body")).to_have_text(first)  # the likeliest tokens are the same again

    say(page, "What is the sun?")
    expect(page.locator(DONE)).to_have_count(2)
    page.reload()
    expect(page.locator(".message")).to_have_count(4)
    expect(page.locator(f"{ANSWERS} .body").first).to_have_text(first)
    page.get_by_role("button", name="New conversation").click()
    expect(page.locator(".message")).to_have_count(0)
    page.get_by_role("button", name="Tell me a story about a fox.", exact=True).first.click()
    expect(page.locator(".message")).to_have_count(4)
    page.get_by_role("button", name="Delete", exact=False).click()
    page.reload()
    expect(page.locator("#conversations li")).to_have_count(0)


def test_a_message_before_the_model_is_known_is_sent_later(page: Page, gateway: RunningGateway) -> None:
    held: list[Route] = []

    def hold(route: Route) -> None:
        held.append(route)

    page.route("**/v1/models", hold)
    page.goto(f"{gateway.url}/")
    say(page, "Tell me a story.")
    expect(page.get_by_label("Message")).to_have_value("Tell me a story.")
    expect(page.locator(".message")).to_have_count(0)
    for route in held:
        route.continue_()
    expect(page.locator(DONE)).to_have_count(1)
    expect(page.get_by_label("Message")).to_have_value("")


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_the_pages_can_be_used_by_everybody(
    browser: Browser, gateway: RunningGateway, theme: Literal["light", "dark"], width: int
) -> None:
    """axe-core finds nothing: contrast, names, roles, landmarks, order of headings."""
    context = browser.new_context(color_scheme=theme, viewport={"width": width, "height": 900})
    page = context.new_page()
    page.goto(f"{gateway.url}/")
    settings(page, Temperature="0")
    say(page, "Tell me a story about a fox.")
    expect(page.locator(DONE)).to_have_count(1)
    assert violations(page) == []
    page.get_by_role("button", name="Settings").click()
    assert violations(page) == []
    page.goto(f"{gateway.url}/swarm")
    expect(page.locator("#table tbody tr")).to_have_count(2)
    assert violations(page) == []
    context.close()


def violations(page: Page) -> list[tuple[str, str]]:
    """Violations found by axe-core, and their places."""
    found = Axe().run(page).response["violations"]
    return [(one["id"], node["html"]) for one in found for node in one["nodes"]]


def test_thoughts_are_folded(page: Page, thinking: RunningGateway) -> None:
    page.goto(f"{thinking.url}/")
    say(page, "Tell me a story.")
    thoughts = page.locator(f"{ANSWERS} .thoughts")
    expect(thoughts.locator("summary")).to_be_visible()
    expect(thoughts.locator("div")).to_be_hidden()
    thoughts.locator("summary").click()
    expect(thoughts.locator("div")).to_be_visible()
    page.wait_for_timeout(300)  # it is drawn again and again meanwhile
    expect(thoughts.locator("div")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator(DONE)).to_have_count(1)
    expect(thoughts.locator("div")).not_to_be_empty()
    assert violations(page) == []


def test_stopping_frees_the_session_and_keeps_the_text(page: Page, gateway: RunningGateway) -> None:
    page.goto(f"{gateway.url}/")
    settings(page, Temperature="2", Seed="1")  # so hot that it rarely comes to an end
    say(page, "Tell me a very long story.")
    expect(page.locator(f"{ANSWERS} .body")).not_to_be_empty()
    page.keyboard.press("Escape")
    expect(page.locator(DONE)).to_have_count(1)
    expect(page.locator(".notices")).to_have_text("Stopped.")
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    text = page.locator(f"{ANSWERS} .body").inner_text()
    page.reload()
    expect(page.locator(f"{ANSWERS} .body")).to_have_text(text)


def test_markup_of_a_model_is_harmless(page: Page, gateway: RunningGateway) -> None:
    text = """# Title\n\n**bold** `code` [good](https://example.com) [bad](javascript:document.title='harm')
<img src="https://example.com/x.png" onerror="document.title='harm'"><script>document.title='harm'</script>
<style>body { display: none }</style><form action="https://example.com"><input></form>

```python\nprint("<b>")\n```\n"""
    conversation = {"id": "one", "title": "t", "messages": [{"role": "assistant", "content": text}]}
    page.add_init_script(f"localStorage['swarmllm.conversations'] = {json.dumps(json.dumps([conversation]))}")
    page.goto(f"{gateway.url}/#one")
    body = page.locator(f"{ANSWERS} .body")
    expect(body.locator("h1")).to_have_text("Title")
    expect(body.locator("strong")).to_have_text("bold")
    expect(body.locator("pre code")).to_have_text('print("<b>")\n')
    expect(body.locator("a[href]")).to_have_count(1)
    assert body.locator("img, script, style, form, input").count() == 0
    assert "harm" not in page.title()


ITEMS = "#conversations li"


def another_tab(page: Page, url: str) -> Page:
    tab = page.context.new_page()
    tab.set_default_timeout(30_000)
    tab.goto(url)
    return tab


def test_tabs_keep_out_of_each_others_conversations(page: Page, gateway: RunningGateway) -> None:
    """Each writes its own while both are open; both see both, and what one deletes is gone in the other."""
    page.goto(f"{gateway.url}/")
    other = another_tab(page, f"{gateway.url}/")
    settings(page, Temperature="0")
    expect(other.locator("#temperature")).to_have_value("0")
    settings(other, Longest_answer="12")
    expect(page.locator("#max_tokens")).to_have_value("12")
    say(page, "Tell me a story about a fox.")
    say(other, "Where does the rain come from?")
    for tab in (page, other):
        expect(tab.locator(DONE)).to_have_count(1)
        expect(tab.locator(".message")).to_have_count(2)
        expect(tab.locator(ITEMS)).to_have_count(2)
    for tab in (page, other):
        tab.reload()
        expect(tab.locator(ITEMS)).to_have_count(2)
        expect(tab.locator(".message")).to_have_count(2)
    expect(page.locator(".message.user")).to_contain_text("fox")
    delete(page, "Where does the rain come from?")
    for tab in (page, other):
        expect(tab.locator(ITEMS)).to_have_count(1)
    expect(other.locator(".message")).to_have_count(0)  # the one it showed
    other.reload()
    expect(other.locator(ITEMS)).to_have_count(1)


def test_a_tab_follows_the_conversation_that_another_goes_on_with(page: Page, gateway: RunningGateway) -> None:
    page.goto(f"{gateway.url}/")
    settings(page, Temperature="0", Longest_answer="12")
    say(page, "Tell me a story about a fox.")
    expect(page.locator(DONE)).to_have_count(1)
    other = another_tab(page, page.url)
    say(other, "What is the sun?")
    for tab in (page, other):
        expect(tab.locator(DONE)).to_have_count(2)
        expect(tab.locator(ITEMS)).to_have_count(1)
    expect(page.locator(".body").last).to_have_text(other.locator(".body").last.inner_text())


def test_messages_of_two_tabs_are_all_kept(page: Page, gateway: RunningGateway) -> None:
    """The same conversation, gone on with in both before either has heard of the other: there are two then."""
    page.goto(f"{gateway.url}/")
    settings(page, Temperature="0", Longest_answer="12")
    say(page, "Tell me a story about a fox.")
    expect(page.locator(DONE)).to_have_count(1)
    other = another_tab(page, page.url)
    other.evaluate("addEventListener('storage', (event) => event.stopImmediatePropagation(), true)")
    say(page, "What is the sun?")
    expect(page.locator(DONE)).to_have_count(2)
    other.evaluate(
        """() => import("/static/store.js").then((store) => {
            const one = store.all()[0];
            one.revision = "older";
            one.messages = [...one.messages.slice(0, 2), { role: "user", content: "What is the moon?" }];
            store.save(one);
        })"""
    )
    page.reload()
    expect(page.locator(ITEMS)).to_have_count(2)
    kept = page.evaluate("JSON.stringify(localStorage)")
    assert "sun" in kept
    assert "moon" in kept


def test_conversations_of_older_pages_are_taken_over(page: Page, gateway: RunningGateway) -> None:
    older = [
        {"id": f"m0{index}", "title": f"Title {index}", "messages": [{"role": "user", "content": f"Text {index}"}]}
        for index in range(3)
    ]
    page.goto(f"{gateway.url}/static/icon.svg")
    page.evaluate(f"localStorage['swarmllm.conversations'] = {json.dumps(json.dumps([*older, 5, None]))}")
    page.goto(f"{gateway.url}/#m01")
    expect(page.locator(ITEMS)).to_have_count(3)
    expect(page.locator(".message")).to_contain_text("Text 1")
    delete(page, "Title 1")
    page.reload()
    expect(page.locator(ITEMS)).to_have_count(2)


def test_a_full_storage_is_told(page: Page, gateway: RunningGateway) -> None:
    page.goto(f"{gateway.url}/")
    settings(page, Temperature="0", Longest_answer="12")
    say(page, "Tell me a story about a fox.")
    expect(page.locator(DONE)).to_have_count(1)
    expect(page.locator("#full")).to_be_hidden()
    page.evaluate(
        """() => {
            const messages = [{ role: "user", content: "x".repeat(1000) }];
            const much = { id: "0", title: "Much", messages, revision: "1" };
            localStorage["swarmllm.conversation.0"] = JSON.stringify(much);
            for (let size = 1 << 22; size; size >>= 1) {
                try {
                    for (let n = 0; ; n++) localStorage[`filler${size}.${n}`] = "x".repeat(size);
                } catch { /* full: with smaller pieces, until nothing fits */ }
            }
        }"""
    )
    page.reload()
    expect(page.locator(ITEMS)).to_have_count(2)
    say(page, "What is the sun?")
    expect(page.locator("#full")).to_contain_text("no room left")
    expect(page.locator(DONE)).to_have_count(2)
    delete(page, "Much")
    expect(page.locator("#full")).to_be_hidden()
    page.reload()
    expect(page.locator(".message")).to_have_count(4)


def test_the_command_to_join_works_in_any_directory(gateway: RunningGateway) -> None:
    command = gateway.swarm()["join"].split()
    assert command[:4] == ["swarmllm", "server", "--model", str(embedded_model_path())]


def test_a_server_dies_while_it_answers(page: Page) -> None:
    """All servers have the same name, as if their owner had named a group."""
    spans = (0, 4), (4, 8), (4, 8)
    with local_swarm(*spans, public_name="desk") as swarm, running_gateway(swarm.initial_peers) as gateway:
        gateway.wait_until_seen(3)
        page.goto(f"{gateway.url}/")
        settings(page, Temperature="2", Seed="1")
        say(page, "Tell me a very long story.")
        hop = page.locator(f"{ANSWERS} .hop").nth(1)
        expect(page.locator(f"{ANSWERS} .body")).not_to_be_empty()
        used = (hop.get_attribute("title") or "").split(",")[0]
        (victim,) = [server for server in swarm.servers if server.peer_id == used]
        before = len(page.locator(f"{ANSWERS} .body").inner_text())
        victim.kill()
        expect(page.locator(".notices .good")).to_contain_text("took over. Nothing was lost.")
        expect(page.locator(f"{ANSWERS} .hop.new")).to_have_count(1)
        wait_until(lambda: len(page.locator(f"{ANSWERS} .body").inner_text()) > before, "the answer went on")
        page.keyboard.press("Escape")
        expect(page.locator(DONE)).to_have_count(1)
        assert page.locator(".notices .bad").count() == 0

        page.goto(f"{gateway.url}/swarm")
        dead = page.locator(f"#picture .bar[data-peer='{used}']")
        expect(dead).to_have_class("bar unreachable")
        expect(page.locator("#events")).to_contain_text("can’t be reached")
        expect(page.locator("#timeline .mark.lost")).to_have_count(1)
        expect(page.locator("#timeline .traffic").last).to_be_visible()
        expect(page.locator("#timeline svg")).to_have_attribute(
            "aria-label", re.compile("8 of 8 blocks served.* 1 lost$")
        )
        expect(page.locator("#about")).to_contain_text("parameters · 8 blocks · 2048 tokens of context")
        expect(page.locator("#table tbody tr").first).to_contain_text(" GB")  # memory free, as announced
        expect(page.locator("#verdict")).to_have_text(
            re.compile(r"All 8 blocks are served\. If .+ is lost too, every text stops: .+ blocks 0:4, 4:8\.$")
        )
        for server in swarm.servers:
            server.kill()
        expect(page.locator("#verdict")).to_contain_text("served by nobody")
        expect(page.locator("#advice")).to_contain_text("--block_indices 0:8")
        expect(page.locator("#join")).to_contain_text(f"swarmllm server --model {embedded_model_path()}")
        expect(page.locator("#events")).to_contain_text("blocks 0:4")
        expect(page.locator("#picture .cell.missing")).to_have_count(8)


def test_the_picture_of_500_servers_and_126_blocks(page: Page, gateway: RunningGateway) -> None:
    snapshot = big_swarm()
    picture = SwarmPicture("large/model", "f", 126)
    picture.update(snapshot, {one.peer_id: Contact(True, 0.05) for one in snapshot.servers[:128]}, 1.0)
    shown: dict[str, Any] = picture.as_json()
    page.route("**/api/swarm", lambda route: route.fulfill(json=shown, headers={"etag": '"1"'}))
    page.goto(f"{gateway.url}/swarm")
    expect(page.locator("#picture .bar")).to_have_count(500)
    expect(page.locator("#table tbody tr")).to_have_count(500)
    expect(page.locator("#picture .cell.missing")).to_have_count(3)
    expect(page.locator("#verdict")).to_have_text("3 of 126 blocks are served by nobody.")
    page.get_by_label("Filter servers").fill("node-77")
    expect(page.locator("#table tbody tr")).to_have_count(1)
    page.locator("#table tbody tr").click()
    expect(page.locator("#picture .bar.chosen")).to_have_count(1)
    page.get_by_label("Filter servers").fill("")
    page.get_by_role("button", name="Tokens/s at most", exact=True).click()
    expect(page.locator("th[aria-sort]")).to_contain_text("Tokens/s at most")


def test_a_swarm_at_a_glance(page: Page, gateway: RunningGateway) -> None:
    """The speed of one chat leads, then what the next loss stops; all columns that matter are seen at 1280 pixels."""
    servers = [
        server(
            *(idx, start, start + 8),
            public_name=f"workstation-{idx}.lab",
            hardware="NVIDIA GeForce RTX 4090, 24 GB",
            decode_ms_per_block=2.0,
            tokens_served=1_000_000,
            memory_left_bytes=11_000_000_000,
            machine="a1b2c3d4" if start else "",
        )
        for idx, start in enumerate([0, 8, 16, 0])
    ]
    picture = SwarmPicture("large/model", "f", 24)
    for minute in range(30):
        picture.update(SwarmSnapshot(24, tuple(servers)), {}, 1_790_000_000.0 + 60 * minute)
    shown: dict[str, Any] = picture.as_json()
    page.route("**/api/swarm", lambda route: route.fulfill(json=shown, headers={"etag": '"1"'}))
    page.set_viewport_size({"width": 1280, "height": 900})
    page.goto(f"{gateway.url}/swarm")
    expect(page.locator("#table tbody tr")).to_have_count(4)
    expect(page.locator(".tiles div").first).to_contain_text("One chat now")
    expect(page.locator("#one-chat")).to_have_text(f"≈ {1000 / shown['expected_ms_per_token']:.1f} tokens/s")
    expect(page.locator("#verdict")).to_have_text(
        "All 24 blocks are served. If workstation-1.lab or workstation-2.lab is lost, every text stops: "
        "no other servers have blocks 8:16, 16:24."
    )
    assert page.locator(".scroll").evaluate("one => one.scrollWidth <= one.clientWidth")
    expect(page.locator("th", has_text="Hardware")).to_be_hidden()
    page.get_by_role("button", name="Show all columns").click()
    expect(page.locator("th", has_text="Hardware")).to_be_visible()
    expect(page.locator("td", has_text="a1b2c3")).to_have_count(2)
    shown["servers"][0]["identity_shared"] = True
    expect(page.locator("td", has_text="online, identity used twice")).to_have_count(1)
    minutes = page.locator("#timeline .minute")
    expect(minutes).to_have_count(10)
    page.get_by_role("button", name="Show the last hour").click()
    expect(minutes).to_have_count(30)
    expect(page.get_by_role("heading", name="The last hour")).to_be_visible()
    assert violations(page) == []


def test_the_picture_of_two_stacks(page: Page, gateway: RunningGateway) -> None:
    """An encoder of 4 blocks and a decoder of 6, each counted from 0, as in `swarmllm status`."""
    servers = tuple(server(idx, start, end) for idx, (start, end) in enumerate([(0, 4), (3, 6), (6, 9)]))
    picture = SwarmPicture("translator", "f", 10, encoder_blocks=4)
    picture.update(SwarmSnapshot(10, servers[:2], 4), {}, 1.0)
    picture.update(SwarmSnapshot(10, servers, 4), {}, 2.0)
    page.route("**/api/swarm", lambda route: route.fulfill(json=picture.as_json(), headers={"etag": '"1"'}))
    page.goto(f"{gateway.url}/swarm")
    written = ["encoder 0:4", "encoder 3:4, decoder 0:2", "decoder 2:5"]
    rows = page.locator("#table tbody tr")
    expect(rows).to_have_count(3)
    for row, blocks in zip(rows.all(), written, strict=True):
        expect(row).to_contain_text(blocks)
    expect(page.locator("#picture .stack")).to_have_text(["encoder 0", "decoder 0"])
    expect(page.locator("#picture .between")).to_have_count(1)
    titles = page.locator("#picture .bar title").all_text_contents()
    assert sorted(title.split(": ", 1)[1] for title in titles) == sorted(f"{blocks}, online" for blocks in written)
    expect(page.locator("#events")).to_contain_text("decoder 2:5")
    expect(page.locator("#advice")).to_contain_text("without a server of decoder 5:6. Start one with:")


def test_a_choice_of_models(page: Page, swarm: LocalSwarm) -> None:
    """The same model twice, under two names, is enough for the page."""
    models, names = (embedded_model_path(),) * 2, ("first", "second")
    with running_gateway(swarm.initial_peers, model=models, served_name=names) as gateway:
        page.goto(f"{gateway.url}/")
        choice = page.get_by_role("combobox", name="Model")
        expect(choice).to_have_value("first")
        expect(page.locator("#model")).to_have_class("only-read")
        choice.select_option("second")
        with page.expect_request("**/v1/chat/completions") as asked:
            say(page, "What is the sun?")
        assert (asked.value.post_data_json or {})["model"] == "second"
        expect(page.locator(DONE)).to_have_count(1)
        page.reload()
        expect(choice).to_have_value("second")
        assert Axe().run(page).response["violations"] == []

        page.locator("#health").click()
        expect(page).to_have_url(f"{gateway.url}/swarm?model=second")
        expect(page.get_by_role("combobox", name="Model")).to_have_value("second")
        expect(page).to_have_title("second · swarm")
        page.get_by_role("combobox", name="Model").select_option("first")
        expect(page).to_have_title("first · swarm")
        page.goto(f"{gateway.url}/swarm?model=gone")
        expect(page).to_have_title("first · swarm")


def log_of_a_run(directory: Path, num_rounds: int, *, is_measured: bool = True) -> Identity:
    """The log of a home that trains with two others. One of them names itself like a script, and lies."""
    here, desk, liar = (Identity.generate() for _ in range(3))
    lines = []
    for number in range(num_rounds):
        shared = 4.0 / (1 + number)
        members = [
            {
                "peer_id": one.peer_id,
                "name": name,
                "tokens": 1000,
                "loss": shared + 0.1,
                "share": share,
                "own_loss": own,
            }
            | {"shared_loss": claim}
            for one, name, share, own, claim in (
                (here, "attic", 1.0, shared + 0.3, shared),
                (desk, "desk", 1.0, shared + 0.2, shared),
                (liar, "<img src=x onerror=alert(1)>", 0.5, 0.1, 0.1),
            )
        ]
        if not is_measured:
            members = [member | {"own_loss": None, "shared_loss": None} for member in members]
        figures = {"tokens": 3000 * (number + 1), "sent_bytes": 2_000_000, "received_bytes": 4_000_000, "at": 1.8e9}
        fields = {"run": here.peer_id, "round": number, "members": members, **figures}
        lines.append(json.dumps(signed_line(fields, here)))
    directory.mkdir(parents=True)
    (directory / LOG_FILE).write_text("\n".join(lines) + "\n")
    return here


@pytest.mark.parametrize(("theme", "width"), [("light", 1280), ("dark", 390)])
def test_common_trainings_are_drawn(
    browser: Browser, gateway: RunningGateway, tmp_path: Path, theme: Literal["light", "dark"], width: int
) -> None:
    before, gateway.gateway.runs.directory = gateway.gateway.runs.directory, tmp_path
    context = browser.new_context(color_scheme=theme, viewport={"width": width, "height": 900})
    try:
        page = context.new_page()
        page.goto(f"{gateway.url}/swarm")
        expect(page.locator("#table tbody tr")).to_have_count(2)
        expect(page.locator("#runs")).to_be_hidden()

        log_of_a_run(tmp_path / "pirate" / "together", 40)
        log_of_a_run(tmp_path / "plain", 1, is_measured=False)
        page.reload()
        expect(page.locator("#runs .run")).to_have_count(2)
        check_runs(page)
        assert violations(page) == []
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    finally:
        context.close()
        gateway.gateway.runs.directory = before


def check_runs(page: Page) -> None:
    run = page.locator("#runs .run", has_text="pirate/together")
    facts = "3 homes in it · 120K tokens in all · 2 MB sent and 4 MB received here"
    expect(run.locator(".facts")).to_contain_text(facts)
    expect(run.locator("svg[role=img]")).to_have_attribute("aria-label", re.compile("all together 4.000 → 0.100"))
    expect(run.locator(".chart .curve")).to_have_count(4)
    expect(run.locator("tbody tr")).to_have_count(4)
    expect(run.locator("tbody tr", has_text="attic (here)")).to_contain_text("4.300 → 0.400")
    liar = run.locator("tbody tr", has_text="<img src=x")
    expect(liar).to_contain_text("40 rounds shortened, 37 claims differ from what was measured here")
    plain = page.locator("#runs .run", has_text="This run has no common texts")
    expect(plain.locator(".chart circle")).to_have_count(3)
    expect(plain.locator("tbody tr")).to_have_count(3)
