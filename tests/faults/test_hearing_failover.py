"""Servers of models that hear die in mid-text, and tokens are those of an undisturbed run; real processes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fault_tools import at_token
from swarm_models import OPTIONS
from tests.numerics.tiny_hearing_models import SPECIFIC, save_tiny_model, sound
from transformers import AutoModelForSpeechSeq2Seq, PreTrainedModel

from swarmllm import AutoDistributedModel, AutoDistributedModelForSpeechSeq2Seq, LocalSwarm

pytestmark = pytest.mark.rotates(3, whole_file=True)

SPANS = [(0, 3), (3, 5), (5, 6), (6, 7)]
"""Of 4 blocks of the encoder and 3 of the decoder; each twice."""


NAMES = [pytest.param(name, marks=() if name == "whisper" else pytest.mark.slow) for name in sorted(SPECIFIC)]


@pytest.fixture(scope="module", params=NAMES)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def local(directory: Path) -> PreTrainedModel:
    return AutoModelForSpeechSeq2Seq.from_pretrained(directory)


@pytest.fixture
def swarm(directory: Path) -> Iterator[LocalSwarm]:
    with LocalSwarm(str(directory), spans=SPANS * 2, **OPTIONS) as swarm:
        yield swarm


@pytest.mark.parametrize("beams", [1, 3])
def test_death_of_a_decoders_server_in_mid_text(
    swarm: LocalSwarm, directory: Path, local: PreTrainedModel, beams: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one with the encoder's last block and the decoder's first; afterwards, one of the encoder alone."""
    options = {"max_new_tokens": 14, "do_sample": False, "num_beams": beams}
    expected = local.generate(**sound(local), **options).tolist()
    with AutoDistributedModel.from_pretrained(str(directory), initial_peers=swarm.initial_peers) as model:
        sessions: list[Any] = []
        new_session = model.remote_blocks.new_cache_session

        def noted(*args: Any) -> Any:
            sessions.append(new_session(*args))
            return sessions[-1]

        monkeypatch.setattr(model.remote_blocks, "new_cache_session", noted)

        def kill(block: int) -> None:
            (victim,) = (hop.server.peer_id for hop in sessions[-1].route if block in hop.span)
            next(server for server in swarm.servers if server.peer_id == victim).kill()

        found = model.generate(**sound(local), **options, logits_processor=at_token(6, lambda: kill(4)))
        assert found.tolist() == expected
        assert sessions[-1].num_repairs >= 1
        next(server for server in swarm.servers if (server.span.start, server.span.end) == SPANS[0]).kill()
        assert model.generate(**sound(local), **options).tolist() == expected


def test_death_between_forward_and_backward(swarm: LocalSwarm, directory: Path, local: PreTrainedModel) -> None:
    """Gradients reach the front end, through both stacks."""
    labels = torch.randint(3, 100, (2, 5), generator=torch.Generator().manual_seed(2))
    local.zero_grad()
    local(**sound(local), labels=labels).loss.backward()
    peers = swarm.initial_peers
    with AutoDistributedModelForSpeechSeq2Seq.from_pretrained(str(directory), initial_peers=peers) as model:
        loss = model(**sound(local), labels=labels).loss
        for server in swarm.servers[: len(SPANS)]:
            server.kill()
        loss.backward()
        got = {name: one.grad for name, one in model.named_parameters() if "conv" in name and one.grad is not None}
    want = {name: one.grad for name, one in local.named_parameters() if name in got}
    assert got
    for name, grad in got.items():
        assert float((grad - want[name]).norm()) <= 1e-4 * float(want[name].norm()), name
