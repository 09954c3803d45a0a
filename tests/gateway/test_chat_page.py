"""Conversations on the chat page, in a real browser."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import FilePayload, Page, Route, expect
from test_pages import ANSWERS, DONE, ITEMS, say, settings, violations
from web_gateway import RunningGateway

pytestmark = pytest.mark.slow

TEXT = r"""Euler wrote $e^{i\pi} + 1 = 0$, it costs $5 or $6, and

$$\sum_{i=1}^{n} i = \frac{n(n+1)}{2}$$

Unknown: $\unknowncommand{x}$, H<sub>2</sub>O, <kbd>Esc</kbd>

```python
def f(x):  # <b>comment</b>
    return "text" * 3
```

مرحبا بالعالم
"""


def opened(page: Page, url: str, *messages: dict[str, Any], **more: Any) -> None:
    conversation = {"id": "one", "title": "First", "messages": list(messages), "revision": "1", **more}
    page.goto(f"{url}/static/icon.svg")
    page.evaluate("one => localStorage['swarmllm.conversation.one'] = one", json.dumps(conversation))
    page.goto(f"{url}/#one")
    expect(page.locator(".message")).to_have_count(len(messages))


def test_no_text_of_a_model_is_lost(page: Page, gateway: RunningGateway) -> None:
    opened(page, gateway.url, {"role": "user", "content": "Hm"}, {"role": "assistant", "content": TEXT})
    body = page.locator(f"{ANSWERS} .body")
    expect(body.locator("math")).to_have_count(2)
    expect(body.locator("math[display=block] munderover")).to_have_count(1)
    expect(body.locator("math msup").first).to_have_text("eiπ")
    expect(body.locator(".katex-html")).to_have_count(2)
    expect(body).to_contain_text("it costs $5 or $6")
    expect(body).to_contain_text(r"$\unknowncommand{x}$")
    expect(body.locator("sub, kbd")).to_have_count(2)
    expect(body.locator(".code-top span")).to_have_text("python")
    expect(body.locator(".code-comment")).to_have_text("# <b>comment</b>")
    expect(body.locator(".code-string")).to_have_text('"text"')
    expect(body.locator("pre code")).to_have_text('def f(x):  # <b>comment</b>\n    return "text" * 3\n')
    expect(body.locator("p").last).to_have_attribute("dir", "auto")
    assert body.locator("p").last.evaluate("one => getComputedStyle(one).direction") == "rtl"
    assert violations(page) == []


LAID_OUT = r"""
\[\begin{aligned} f(x) &= (x+1)^2 \\ &= x^2 + 2x + 1 \end{aligned}\]

$$\begin{pmatrix} a & b \\ c & d \end{pmatrix}$$

- [x] bread
- [ ] butter

3. third

| left | middle | right |
|:-----|:------:|------:|
| a | b | 1 |

$\href{javascript:alert(1)}{x}$ $\includegraphics{https://example.com/x}$ <input type="text"> <input type="checkbox">
"""


def test_layout_that_models_write(page: Page, gateway: RunningGateway) -> None:
    """Matrices, aligned formulas, tasks, numbers of lists, columns of tables; nothing that could do harm."""
    opened(page, gateway.url, {"role": "user", "content": "Hm"}, {"role": "assistant", "content": LAID_OUT})
    body = page.locator(f"{ANSWERS} .body")
    expect(body.locator("math[display=block] mtable")).to_have_count(2)
    assert page.evaluate("document.fonts.check('16px KaTeX_Main')")
    tasks = body.locator("li.task input")
    assert [[task.is_checked(), task.is_disabled()] for task in tasks.all()] == [[True, True], [False, True]]
    expect(body.locator("input")).to_have_count(2)
    expect(body.locator("ol")).to_have_attribute("start", "3")
    sides = body.locator("td").evaluate_all("all => all.map((one) => getComputedStyle(one).textAlign)")
    assert [side.removeprefix("-webkit-") for side in sides] == ["left", "center", "right"]
    expect(body.locator("a[href], img")).to_have_count(0)
    assert violations(page) == []


def test_rename_search_export_and_undo(page: Page, gateway: RunningGateway, tmp_path: Path) -> None:
    opened(page, gateway.url, {"role": "user", "content": "Apples"}, {"role": "assistant", "content": "Pears"})
    name = page.get_by_label("Name of the conversation")
    for given, key, expected in (("Never", "Escape", "First"), ("  ", "Enter", "First"), ("Fruit", "Enter", "Fruit")):
        page.get_by_role("button", name="Rename “First”").click()
        expect(name).to_have_value("First")
        name.fill(given)
        assert violations(page) == []
        name.press(key)
        expect(name).to_have_count(0)
        expect(page.locator(f"{ITEMS} .title")).to_have_text(expected)
    page.get_by_role("button", name="Rename “Fruit”").click()
    name.fill("Fruit of the year")
    page.get_by_label("Message").click()  # leaving the field keeps it
    expect(page.locator(f"{ITEMS} .title")).to_have_text("Fruit of the year")
    page.get_by_role("button", name="Rename “Fruit of the year”").click()
    name.fill("Fruit")
    name.press("Enter")
    expect(page.get_by_role("button", name="Delete “Fruit”")).to_be_visible()
    expect(page.locator(f"{ITEMS} .title")).to_have_text("Fruit")
    with page.expect_download() as download:
        page.get_by_role("button", name="Export this conversation").click()
    download.value.save_as(tmp_path / "x.md")
    assert (tmp_path / "x.md").read_text() == "# Fruit\n\n## You\n\nApples\n\n## Model\n\nPears\n"
    page.get_by_role("button", name="Delete “Fruit”").click()
    expect(page.locator(ITEMS)).to_have_count(0)
    page.get_by_role("button", name="Undo").click()
    expect(page.locator(ITEMS)).to_have_count(1)
    expect(page.locator(".message")).to_have_count(2)
    page.reload()
    expect(page.locator(ITEMS)).to_have_count(1)
    page.get_by_role("button", name="New conversation").click()
    settings(page, Temperature="0", Longest_answer="8")
    say(page, "What is the sun?")
    expect(page.locator(DONE)).to_have_count(1)
    page.get_by_label("Search conversations").fill("pears")
    expect(page.locator(ITEMS)).to_have_count(1)
    expect(page.locator(f"{ITEMS} .title")).to_have_text("Fruit")
    page.get_by_label("Search conversations").fill("")
    page.locator(f"{ITEMS} .title", has_text="Fruit").click()
    expect(page.locator(f"{ANSWERS} .body")).to_have_text("Pears")
    page.go_back()
    expect(page.locator(".message.user .body")).to_have_text("What is the sun?")


def test_an_edit_that_is_given_up_and_a_broken_answer_that_goes_on(page: Page, gateway: RunningGateway) -> None:
    page.goto(f"{gateway.url}/")
    settings(page, Temperature="0", Longest_answer="8")
    say(page, "Tell me a story about a fox.")
    expect(page.locator(DONE)).to_have_count(1)
    expect(page.locator("#context")).to_contain_text("of 2048 tokens left")
    first = page.locator(f"{ANSWERS} .body").inner_text()
    with page.expect_request("**/v1/chat/completions") as asked:
        page.get_by_role("button", name="Continue").click()
    body = asked.value.post_data_json or {}
    assert body["continue_final_message"] is True
    assert body["messages"][-1]["role"] == "assistant"
    expect(page.locator(f"{ANSWERS} .body")).not_to_have_text(first)
    expect(page.locator(DONE)).to_have_count(1)
    assert page.locator(f"{ANSWERS} .body").inner_text().startswith(first)
    page.get_by_role("button", name="Edit", exact=True).click()
    expect(page.get_by_text("stays as another version")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_text("stays as another version")).to_be_hidden()
    expect(page.get_by_label("Message")).to_have_value("")


SAID = ".message.user"


def test_regenerate_and_edit_keep_versions(page: Page, gateway: RunningGateway) -> None:
    page.goto(f"{gateway.url}/")
    settings(page, Temperature="1", Longest_answer="8")
    say(page, "Tell me a story about a fox.")
    expect(page.locator(DONE)).to_have_count(1)
    first = page.locator(f"{ANSWERS} .body").inner_text()
    expect(page.locator(".versions")).to_have_count(0)
    page.get_by_role("button", name="Regenerate").click()
    expect(page.locator(f"{DONE} .versions")).to_contain_text("2/2")
    second = page.locator(f"{ANSWERS} .body").inner_text()
    page.get_by_role("button", name="Previous version").click()
    expect(page.locator(f"{DONE} .versions")).to_contain_text("1/2")
    expect(page.locator(f"{ANSWERS} .body")).to_have_text(first)
    expect(page.get_by_role("button", name="Previous version")).to_be_disabled()
    expect(page.get_by_role("button", name="Next version")).to_be_focused()
    say(page, "And then?")
    expect(page.locator(DONE)).to_have_count(2)

    page.locator(SAID).first.get_by_role("button", name="Edit", exact=True).click()
    assert violations(page) == []
    expect(page.get_by_label("Message")).to_have_value("Tell me a story about a fox.")
    with page.expect_request("**/v1/chat/completions") as asked:
        say(page, "Tell me a story about a hen.")
    assert len((asked.value.post_data_json or {})["messages"]) == 1
    expect(page.locator(DONE)).to_have_count(1)
    expect(page.locator(f"{SAID} .body")).to_have_text("Tell me a story about a hen.")
    expect(page.locator(f"{ITEMS} .title")).to_have_text("Tell me a story about a hen.")
    expect(page).to_have_title("Tell me a story about a hen. · swarmllm")
    expect(page.locator(f"{SAID} .versions")).to_contain_text("2/2")
    page.reload()
    page.locator(SAID).get_by_role("button", name="Previous version").click()
    expect(page.locator(f"{ITEMS} .title")).to_have_text("Tell me a story about a fox.")
    expect(page.locator(f"{SAID} .body")).to_have_text(["Tell me a story about a fox.", "And then?"])
    expect(page.locator(f"{ANSWERS} .versions")).to_have_count(1)
    page.locator(ANSWERS).get_by_role("button", name="Next version").click()
    expect(page.locator(f"{ANSWERS} .body")).to_have_text(second)
    assert violations(page) == []


def test_a_chosen_title_stays(page: Page, gateway: RunningGateway) -> None:
    opened(page, gateway.url, {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"})  # title: First
    settings(page, Longest_answer="4")
    page.get_by_role("button", name="Edit", exact=True).click()
    say(page, "c")
    expect(page.locator(f"{DONE} .rate")).to_be_visible()
    expect(page.locator(f"{ITEMS} .title")).to_have_text("First")


def test_a_reload_during_an_answer_ends_it(page: Page, gateway: RunningGateway) -> None:
    page.goto(f"{gateway.url}/")
    settings(page, Temperature="2", Seed="1")
    say(page, "Tell me a very long story.")
    expect(page.locator(f"{ANSWERS} .body")).not_to_be_empty()
    page.reload()
    expect(page.locator(".notices")).to_have_text("The page was left, so the answer ends here.")
    expect(page.locator(DONE)).to_have_count(1)
    expect(page.get_by_role("button", name="Continue")).to_be_visible()
    page.reload()
    expect(page.locator(".notices li")).to_have_count(1)


def test_an_answer_of_another_page(page: Page, gateway: RunningGateway) -> None:
    """It is busy as long as that page lives, and cut if that page was lost without a word."""
    page.goto(f"{gateway.url}/")
    settings(page, Temperature="2", Seed="1")
    say(page, "Tell me a very long story.")
    expect(page.locator(f"{ANSWERS} .body")).not_to_be_empty()
    with page.context.expect_page() as opening:
        page.evaluate("url => void open(url)", page.url)
    other = opening.value
    expect(other.locator(f"{ANSWERS}[aria-busy=true]")).to_have_count(1)
    page.keyboard.press("Escape")
    expect(other.locator(DONE)).to_have_count(1)
    expect(other.locator(".notices")).to_have_text("Stopped.")
    other.close()
    lost = {"role": "assistant", "content": "Once", "writing": True}
    page.goto(f"{gateway.url}/static/icon.svg")
    opened(page, gateway.url, {"role": "user", "content": "a"}, lost)
    expect(page.locator(".notices")).to_have_text("The page was left, so the answer ends here.")
    expect(page.locator(DONE)).to_have_count(1)


def test_a_message_that_is_too_long_is_not_sent(page: Page, gateway: RunningGateway) -> None:
    page.goto(f"{gateway.url}/")
    settings(page, Longest_answer="4")
    expect(page.locator("#about")).to_contain_text(
        "parameters in 8 blocks, on 2 servers now. It reads up to 2K tokens."
    )
    text = "dog " * 3000
    page.get_by_label("Message").fill(text)
    expect(page.locator("#long")).to_have_text(
        re.compile(r"This message has 3,0\d\d tokens; embedded takes 2,048 with its answer. Shorten it.")
    )
    assert violations(page) == []
    page.keyboard.press("Enter")
    page.get_by_label("Message").fill("cat " * 3000)
    page.keyboard.press("Enter")  # at once: it is counted first
    expect(page.locator("#long")).not_to_be_empty()
    expect(page.locator(".message")).to_have_count(0)
    say(page, "dog " * 600)  # more bytes than tokens are left, but not more tokens
    expect(page.locator(DONE)).to_have_count(1)
    expect(page.locator("#long")).to_be_hidden()
    page.get_by_label("Message").fill("dog " * 1900)
    expect(page.locator("#long")).to_contain_text("With the conversation so far, this message has")
    page.get_by_role("button", name="New conversation").click()
    page.get_by_label("Message").fill("dog")
    expect(page.locator("#long")).to_be_hidden()
    page.get_by_label("Message").fill("dog " * 300_000)
    expect(page.locator("#long")).to_contain_text("This message is too long: the body is larger than 1048576 bytes.")


def test_text_files_are_attached(page: Page, gateway: RunningGateway) -> None:
    page.goto(f"{gateway.url}/")
    settings(page, Longest_answer="4")
    chosen: list[FilePayload] = [
        {"name": "windows.txt", "mimeType": "text/plain", "buffer": "é\r\nb\r\n".encode("utf-16")},
        {"name": "code.md", "mimeType": "", "buffer": b"```\nx\n```\n"},
        {"name": "gone.txt", "mimeType": "text/plain", "buffer": b"gone"},
    ]
    page.locator("#file").set_input_files(chosen)
    files = page.locator("#attached .files summary")
    expect(files).to_have_text(["windows.txt", "code.md", "gone.txt"])
    page.get_by_role("button", name="Remove gone.txt").click()
    expect(files).to_have_text(["windows.txt", "code.md"])
    unreadable: FilePayload = {"name": "a.pdf", "mimeType": "application/pdf", "buffer": b"%PDF-1.7\n\xff\x00"}
    page.locator("#file").set_input_files(unreadable)
    expect(page.locator("#unseen")).to_contain_text("a.pdf is no text file. Save it as text in UTF-8")
    assert violations(page) == []
    with page.expect_request("**/v1/chat/completions") as asked:
        say(page, "Read.")
    content = (asked.value.post_data_json or {})["messages"][-1]["content"]
    assert content == "windows.txt:\n```\né\nb\n```\n\ncode.md:\n````\n```\nx\n```\n````\n\nRead."
    expect(page.locator(DONE)).to_have_count(1)
    expect(page.locator("#attached .files")).to_have_count(0)
    page.reload()
    page.locator(f"{SAID} .files summary", has_text="code.md").click()
    expect(page.locator(f"{SAID} .files details[open] pre")).to_have_text("```\nx\n```\n")
    assert violations(page) == []
    page.locator(SAID).get_by_role("button", name="Edit", exact=True).click()
    expect(files).to_have_text(["windows.txt", "code.md"])


def test_a_broken_answer_can_be_gone_on_with_after_a_reload(page: Page, gateway: RunningGateway) -> None:
    """The page knows it once the gateway has told its model."""
    broken = {"role": "assistant", "content": "b", "finish": "length"}
    opened(page, gateway.url, {"role": "user", "content": "a"}, broken)
    expect(page.get_by_role("button", name="Continue")).to_be_visible()


def test_nothing_is_regenerated_before_the_model_is_known(page: Page, gateway: RunningGateway) -> None:
    held: list[Route] = []

    def hold(route: Route) -> None:
        held.append(route)

    page.route("**/v1/models", hold)
    opened(page, gateway.url, {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"})
    expect(page.get_by_role("button", name="Copy")).to_be_visible()
    expect(page.get_by_role("button", name="Regenerate")).to_have_count(0)
    for route in held:
        route.continue_()
    expect(page.get_by_role("button", name="Regenerate")).to_be_visible()


def test_the_way_back_to_the_end(page: Page, gateway: RunningGateway) -> None:
    page.set_viewport_size({"width": 390, "height": 700})
    text = "\n\n".join("line" for _ in range(100))
    opened(page, gateway.url, {"role": "user", "content": "a"}, {"role": "assistant", "content": text})
    back = page.get_by_role("button", name="To the end")
    expect(back).to_be_hidden()
    page.locator("#scroll").evaluate("one => one.scrollTop = 0")
    expect(back).to_be_visible()
    assert violations(page) == []
    back.click()
    expect(back).to_be_hidden()
    expect(page.locator(f"{ANSWERS} p").last).to_be_in_viewport()


def test_a_system_prompt_of_ones_own(page: Page, tooled: RunningGateway) -> None:
    """With a template that has a place for it: the embedded model's has none."""
    opened(page, tooled.url, {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, system="Old")
    page.get_by_role("button", name="Settings").click()
    own = page.get_by_label("System prompt of this conversation")
    expect(own).to_have_value("Old")
    own.fill("Be short.")
    page.get_by_label("Longest answer").fill("4")
    page.get_by_role("button", name="Done").click()
    with page.expect_request("**/v1/chat/completions") as asked:
        say(page, "And?")
    assert (asked.value.post_data_json or {})["messages"][0] == {"role": "system", "content": "Be short."}
    expect(page.locator(DONE)).to_have_count(2)


def test_a_selection_survives_new_text(page: Page, gateway: RunningGateway) -> None:
    page.goto(f"{gateway.url}/")
    settings(page, Temperature="2", Seed="1")
    say(page, "Tell me a very long story.")
    expect(page.locator(f"{ANSWERS} .body")).to_have_text(re.compile(r".{20,}"))
    page.evaluate(
        """() => {
            const text = document.querySelector(".message.assistant .body p").firstChild;
            getSelection().setBaseAndExtent(text, 2, text, 12);
        }"""
    )
    selected = page.evaluate("getSelection().toString()")
    before = len(page.locator(f"{ANSWERS} .body").inner_text())
    expect(page.locator(f"{ANSWERS} .body")).to_have_text(re.compile(f".{{{before + 20},}}", re.DOTALL))
    assert page.evaluate("getSelection().toString()") == selected != ""
    page.keyboard.press("Escape")
    expect(page.locator(DONE)).to_have_count(1)


def test_files_are_compressed_and_kept(gateway: RunningGateway) -> None:
    first = gateway.http.get("/static/chat.js")
    assert first.headers["content-encoding"] == "gzip"
    plain = gateway.http.get("/static/chat.js", headers={"accept-encoding": "identity"})
    assert "content-encoding" not in plain.headers
    assert plain.content == first.content
    again = gateway.http.get("/static/chat.js", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_the_page_of_the_api(page: Page, gateway: RunningGateway) -> None:
    page.goto(f"{gateway.url}/docs")
    expect(page.locator("#status")).to_contain_text("is refused by its name")
    page.locator("summary", has_text="/v1/chat/completions").click()
    expect(page.locator("details[open] td code", has_text="reasoning_effort").first).to_be_visible()
    assert violations(page) == []


@pytest.mark.parametrize(("width", "theme"), [(1280, "light"), (390, "dark")])
def test_nothing_is_wider_than_the_screen(page: Page, gateway: RunningGateway, width: int, theme: Any) -> None:
    page.emulate_media(color_scheme=theme)
    page.set_viewport_size({"width": width, "height": 900})
    opened(page, gateway.url, {"role": "user", "content": "Explain"}, {"role": "assistant", "content": TEXT})
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.goto(f"{gateway.url}/docs")
    expect(page.locator("#status")).to_contain_text("is refused by its name")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.goto(f"{gateway.url}/swarm")
    expect(page.locator("#join")).to_contain_text("swarmllm server --model")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
