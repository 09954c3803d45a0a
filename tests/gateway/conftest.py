"""One swarm that nobody kills, and one gateway in front of it, for most tests here."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from web_gateway import DTYPE, RunningGateway, local_swarm, running_gateway

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
    """What the local model writes after a prompt, taking the likeliest token each time."""

    def write(ids: list[int], max_tokens: int) -> str:
        with torch.no_grad():
            output = local.generate(torch.tensor([ids]), max_new_tokens=max_tokens, do_sample=False)[0]
        return str(tokenizer.decode(output[len(ids) :], skip_special_tokens=True))

    return write


THINKING = "{% for message in messages %}{{ message.content }}\n{% endfor %}Once upon a time<think>\n{# </think> #}"


@pytest.fixture(scope="module")
def thinking(swarm: LocalSwarm) -> Iterator[RunningGateway]:
    """A model that thinks and thinks."""
    with running_gateway(swarm.initial_peers) as gateway:
        model = gateway.gateway.models.first
        model.tokenizer = copy.deepcopy(model.tokenizer)
        model.tokenizer.chat_template = THINKING
        yield gateway
