"""Servers of a model that sees die in mid-text: the new ones get the picture's part of the prompt again."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fault_tools import at_token
from swarm_models import OPTIONS
from tests.numerics.tiny_vision_models import inputs_of, tiny_model
from transformers import PreTrainedModel

from swarmllm import AutoDistributedModelForImageTextToText, LocalSwarm

pytestmark = pytest.mark.rotates(3, whole_file=True)

SPANS = [(0, 1), (1, 3), (3, 4)]
"""Of 4 blocks; each twice."""


@pytest.fixture(scope="module", params=["qwen3_vl", "gemma3"])
def local(request: pytest.FixtureRequest) -> PreTrainedModel:
    return tiny_model(request.param)


@pytest.fixture(scope="module")
def directory(local: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(local.config.model_type)
    local.save_pretrained(path)
    return path


@pytest.fixture
def swarm(directory: Path) -> Iterator[LocalSwarm]:
    with LocalSwarm(str(directory), spans=SPANS * 2, **OPTIONS) as swarm:
        yield swarm


@pytest.mark.parametrize("block", [0, pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("beams", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_death_in_mid_text(
    swarm: LocalSwarm,
    directory: Path,
    local: PreTrainedModel,
    block: int,
    beams: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = {"max_new_tokens": 14, "do_sample": False, "num_beams": beams}
    expected = local.generate(**inputs_of(local), **options)
    with AutoDistributedModelForImageTextToText.from_pretrained(
        str(directory), initial_peers=swarm.initial_peers
    ) as model:
        model.generation_config = copy.deepcopy(local.generation_config)
        sessions: list[Any] = []
        new_session = model.remote_blocks.new_cache_session

        def noted(*args: Any) -> Any:
            sessions.append(new_session(*args))
            return sessions[-1]

        monkeypatch.setattr(model.remote_blocks, "new_cache_session", noted)

        def strike() -> None:
            (victim,) = (hop.server.peer_id for hop in sessions[-1].route if block in hop.span)
            next(server for server in swarm.servers if server.peer_id == victim).kill()

        generated = model.generate(**inputs_of(local), **options, logits_processor=at_token(6, strike))
        assert sessions[-1].num_repairs >= 1
    assert generated.tolist() == expected.tolist()


def test_death_between_forward_and_backward(swarm: LocalSwarm, directory: Path, local: PreTrainedModel) -> None:
    given = inputs_of(local)
    local.zero_grad()
    local(**given, labels=given["input_ids"]).loss.backward()
    want = {name: one.grad for name, one in local.named_parameters() if one.grad is not None}
    with AutoDistributedModelForImageTextToText.from_pretrained(
        str(directory), initial_peers=swarm.initial_peers
    ) as model:
        loss = model(**given, labels=given["input_ids"]).loss
        for server in swarm.servers[: len(SPANS)]:
            server.kill()
        loss.backward()
        got = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    largest = max(float(grad.norm()) for grad in want.values())
    for name, grad in got.items():
        assert float((grad - want[name]).norm()) <= 1e-4 * float(want[name].norm()) + 1e-6 * largest, name
