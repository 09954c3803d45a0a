"""Pictures on the chat page, in a real browser."""

import base64
from collections.abc import Callable

import pytest
from playwright.sync_api import Page, expect
from test_pages import ANSWERS, DONE, say, settings, violations
from test_pictures import directory, local, vision, written  # noqa: F401
from vision_model import as_png, picture
from web_gateway import RunningGateway

pytestmark = pytest.mark.slow

GIVE = """([kind, data, type]) => {
    const bytes = Uint8Array.from(atob(data), (one) => one.charCodeAt(0));
    const transfer = new DataTransfer();
    transfer.items.add(new File([bytes], "one", { type }));
    const text = document.getElementById("text");
    const event = kind === "paste"
        ? new ClipboardEvent("paste", { clipboardData: transfer, bubbles: true, cancelable: true })
        : new DragEvent("drop", { dataTransfer: transfer, bubbles: true, cancelable: true });
    return text.dispatchEvent(event);
}"""
THUMBNAILS = "#attached img"


def give(page: Page, kind: str, data: bytes, media_type: str = "image/png") -> None:
    """Paste or drop a file."""
    taken_over = not page.evaluate(GIVE, [kind, base64.b64encode(data).decode(), media_type])
    assert taken_over


def test_a_picture_is_pasted_dropped_removed_and_sent(
    page: Page,
    vision: RunningGateway,  # noqa: F811
    written: Callable[..., str],  # noqa: F811
) -> None:
    red, blue = picture("red"), picture("blue")
    page.goto(f"{vision.url}/")
    expect(page.get_by_role("button", name="Attach a picture or a text file")).to_be_visible()
    settings(page, Temperature="0", Longest_answer="8")
    give(page, "paste", as_png(red))
    expect(page.locator(THUMBNAILS)).to_have_count(1)
    give(page, "drop", as_png(blue))
    expect(page.locator(THUMBNAILS)).to_have_count(2)
    assert violations(page) == []
    page.get_by_role("button", name="Remove picture 2").click()
    expect(page.locator(THUMBNAILS)).to_have_count(1)
    give(page, "drop", b"not a picture")
    expect(page.locator("#unseen")).to_contain_text("is no picture")
    with page.expect_request("**/v1/chat/completions") as asked:
        say(page, "What is it?")
    content = (asked.value.post_data_json or {})["messages"][-1]["content"]
    assert [part["type"] for part in content] == ["image_url", "text"]
    expect(page.locator(DONE)).to_have_count(1)
    expect(page.locator(THUMBNAILS)).to_have_count(0)
    expect(page.locator(".message.user img")).to_have_count(1)
    assert page.locator(".message.user img").evaluate("one => [one.naturalWidth, one.naturalHeight]") == [40, 30]
    # A model of random weights may end its answer, or not: what it says begins as the local model's.
    answer = page.locator(f"{ANSWERS} .body").inner_text().strip()
    assert answer
    assert violations(page) == []
    page.reload()
    expect(page.locator(".message.user img")).to_have_count(1)


def test_an_edited_message_keeps_its_picture(page: Page, vision: RunningGateway) -> None:  # noqa: F811
    page.goto(f"{vision.url}/")
    settings(page, Temperature="0", Longest_answer="8")
    give(page, "paste", as_png(picture("green")))
    expect(page.locator(THUMBNAILS)).to_have_count(1)
    say(page, "What is it?")
    expect(page.locator(DONE)).to_have_count(1)
    page.locator(".message.user").hover()
    page.get_by_role("button", name="Edit", exact=True).click()
    expect(page.locator(THUMBNAILS)).to_have_count(1)
    page.keyboard.press("Escape")
    expect(page.locator(THUMBNAILS)).to_have_count(0)


def test_large_pictures_are_made_smaller(page: Page, vision: RunningGateway) -> None:  # noqa: F811
    page.goto(f"{vision.url}/")
    expect(page.get_by_role("button", name="Attach a picture or a text file")).to_be_visible()
    give(page, "paste", as_png(picture("red", (3000, 1000))))
    expect(page.locator(THUMBNAILS)).to_have_count(1)
    size = page.locator(THUMBNAILS).evaluate("one => one.decode().then(() => [one.naturalWidth, one.naturalHeight])")
    assert size == [1024, 341]


def test_a_model_that_reads_text_only_says_so(page: Page, gateway: RunningGateway) -> None:
    page.goto(f"{gateway.url}/")
    expect(page.locator("#model")).not_to_have_text("…")
    expect(page.get_by_role("button", name="Attach a text file")).to_be_visible()
    give(page, "paste", as_png(picture("red")))
    expect(page.locator("#unseen")).to_contain_text("reads text only")
    expect(page.locator(THUMBNAILS)).to_have_count(0)
    assert violations(page) == []
