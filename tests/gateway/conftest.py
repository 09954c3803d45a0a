"""One swarm that nobody kills, and one gateway in front of it, for most tests here; a browser for those of pages."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from web_gateway import DTYPE, WITH_TOOLS, RunningGateway, local_swarm, running_gateway

from swarmllm import LocalSwarm, embedded_model_path


@pytest.fixture(scope="session")
def swarm() -> Iterator[LocalSwarm]:
    """Two servers with half of the embedded model's blocks each."""
    with local_swarm((0, 4), (4, 8)) as swarm:
        yield swarm


@pytest.fixture(scope="session")
def gateway(swarm: LocalSwarm) -> Iterator[RunningGateway]:
    """Open to everybody on this machine."""
    with running_gateway(swarm.initial_peers, max_concurrent=32, max_waiting=4, max_choices=4) as gateway:
        gateway.wait_until_seen(2)
        yield gateway


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(embedded_model_path())


@pytest.fixture(scope="session")
def local() -> Any:
    """The same model in this process."""
    return AutoModelForCausalLM.from_pretrained(embedded_model_path(), dtype=DTYPE).requires_grad_(False)


@pytest.fixture(scope="session")
def greedy(local: Any, tokenizer: Any) -> Any:
    """A function that continues a prompt with the local model, greedily."""

    def write(ids: list[int], max_tokens: int) -> str:
        with torch.no_grad():
            output = local.generate(torch.tensor([ids]), max_new_tokens=max_tokens, do_sample=False)[0]
        return str(tokenizer.decode(output[len(ids) :], skip_special_tokens=True))

    return write


@pytest.fixture(scope="session")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of fewer blocks, which writes something else."""
    directory = tmp_path_factory.mktemp("models") / "other"
    shutil.copytree(embedded_model_path(), directory)
    model = AutoModelForCausalLM.from_pretrained(embedded_model_path(), dtype="auto", num_hidden_layers=6)
    model.save_pretrained(directory)
    return directory


THINKING = "{% for message in messages %}{{ message.content }}\n{% endfor %}Once upon a time<think>\n{# </think> #}"


@pytest.fixture(scope="session")
def thinking(swarm: LocalSwarm) -> Iterator[RunningGateway]:
    """A model that thinks and thinks."""
    with running_gateway(swarm.initial_peers, chat_template=THINKING) as gateway:
        yield gateway


@pytest.fixture(scope="session")
def tooled(swarm: LocalSwarm) -> Iterator[RunningGateway]:
    """A model whose template knows tools."""
    with running_gateway(swarm.initial_peers, chat_template=WITH_TOOLS) as gateway:
        yield gateway


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A browser; each test has a profile of its own in it. While it is open, no test can run an event loop."""
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("needs Chromium, which is not installed here")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A page that fails the test if its scripts fail or it asks another host."""
    context = browser.new_context()
    page = context.new_page()
    page.set_default_timeout(30_000)
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on(
        "request",
        lambda request: None if request.url.startswith("http://127.0.0.1:") else wrong.append(f"asked {request.url}"),
    )
    yield page
    context.close()
    assert not wrong
