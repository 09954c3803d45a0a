"""Machines that plan themselves: real agents with real servers, each in processes and a directory of its own."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from running_machines import Machine, is_ready, online

from swarmllm import AutoDistributedModel, ClientConfig, embedded_model_path

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

MODEL, NAME = embedded_model_path(), "embedded"
THREE_BLOCKS = "0.0153GB"
"""Memory for three of the eight blocks with their caches."""


@pytest.fixture
def running() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def covered(blocks: dict[str, tuple[int, int]]) -> bool:
    return {block for start, end in blocks.values() for block in range(start, end)} == set(range(8))


def written(machine: Machine, tokens: int = 12) -> list[int]:
    """Text that a client writes with the machines' servers."""
    (offered,) = machine.tell(offered=True)
    config = ClientConfig(initial_peers=offered["peers"], swarm_name=offered["swarm_name"])
    with AutoDistributedModel.from_pretrained(MODEL, client_config=config) as model:
        ids = model.generate(torch.tensor([[1, 50, 60]]), max_new_tokens=tokens, do_sample=False)
        return list(ids[0].tolist())


def test_machines_share_a_model_and_follow_who_comes_and_goes(tmp_path: Path, running: ExitStack) -> None:
    def start(name: str, invite: str = "") -> Machine:
        return running.enter_context(Machine(tmp_path, name, invite=invite, max_memory=THREE_BLOCKS))

    a = start("a")
    invite = a.tell(invite=True)
    b, c = start("b", invite), start("c", invite)
    a.wait_for(lambda picture: len(picture["machines"]) == 3)
    b.tell(use=MODEL)  # any member may command
    for machine in (a, b, c):
        picture = machine.wait_for(lambda picture: is_ready(picture, NAME))
        (command,) = picture["commands"]
        assert (command["number"], command["what"], command["by"]) == (1, f"use {NAME}", "b")
    # Servers tell the swarm that they are online; their machines tell each other a moment later.
    blocks = online(a.wait_for(lambda picture: covered(online(picture, NAME))), NAME)
    assert len(blocks) == 3
    for machine in a.picture["machines"]:
        (hosted,) = machine["hosted"]  # b has the whole model, the others took their pieces from it
        assert (hosted["bytes_from_machines"] > 0) == (machine["name"] != "b")
        assert hosted["bytes_from_hub"] == 0
    text = written(a)
    # A fourth machine joins, and takes blocks as well. The others keep theirs.
    d = start("d", c.tell(invite=True))
    picture = d.wait_for(lambda picture: "d" in online(picture, NAME))
    assert {name: span for name, span in online(picture, NAME).items() if name != "d"} == blocks
    # One is killed: the plan follows.
    c.kill()
    left = {"a", "b", "d"}
    a.wait_for(lambda picture: online(picture, NAME).keys() == left and covered(online(picture, NAME)))
    b.wait_for(lambda picture: online(picture, NAME).keys() == left and covered(online(picture, NAME)))
    assert written(b) == text
    # It comes back as it was, without an invite.
    c.start()
    c.wait_for(lambda picture: len(picture["machines"]) == 4 and "c" in online(picture, NAME))
    # A model that nobody wants any more ends when its sessions have ended.
    a.tell(drop=NAME)
    for machine in (a, d):
        picture = machine.wait_for(lambda picture: not picture["models"])
        assert [one["what"] for one in picture["commands"]][-1] == f"drop {NAME}"
