"""Servers of encoder-decoders die in mid-text, and tokens and gradients are those of an undisturbed run."""

import copy
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from fault_tools import at_token
from swarm_models import OPTIONS
from tests.numerics.architectures import ENCODER_DECODERS
from tests.numerics.tiny_encoder_decoders import save_tiny_model, tiny_model
from transformers import PreTrainedModel

from swarmllm import AutoDistributedModelForSeq2SeqLM, LocalSwarm

pytestmark = pytest.mark.rotates(3, whole_file=True)

SPANS = [(0, 3), (3, 5), (5, 6), (6, 7)]
"""Of 4 blocks of the encoder and 3 of the decoder; each twice."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("bart", tmp_path_factory.mktemp("bart"))


@pytest.fixture(scope="module")
def local() -> PreTrainedModel:
    return tiny_model("bart")


@pytest.fixture
def swarm(directory: Path) -> Iterator[LocalSwarm]:
    with LocalSwarm(str(directory), spans=SPANS * 2, **OPTIONS) as swarm:
        yield swarm


def source() -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 100, (2, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1:, 6:] = 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("block", [4, pytest.param(5, marks=pytest.mark.slow), 6])
@pytest.mark.parametrize("beams", [1, 3])
def test_death_of_a_decoders_server_in_mid_text(
    swarm: LocalSwarm,
    directory: Path,
    local: PreTrainedModel,
    beams: int,
    block: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The new server gets the encoder's outputs again, with the rows that beams have chosen."""
    options = {"max_new_tokens": 14, "do_sample": False, "num_beams": beams}
    expected = local.generate(**source(), **options)
    with AutoDistributedModelForSeq2SeqLM.from_pretrained(str(directory), initial_peers=swarm.initial_peers) as model:
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

        generated = model.generate(**source(), **options, logits_processor=at_token(6, strike))
        assert sessions[-1].num_repairs >= 1
    assert generated.tolist() == expected.tolist()


def test_death_between_forward_and_backward(swarm: LocalSwarm, directory: Path, local: PreTrainedModel) -> None:
    labels = torch.randint(3, 100, (2, 5), generator=torch.Generator().manual_seed(2))
    local.zero_grad()
    local(**source(), labels=labels).loss.backward()
    want = local.get_input_embeddings().weight.grad
    with AutoDistributedModelForSeq2SeqLM.from_pretrained(str(directory), initial_peers=swarm.initial_peers) as model:
        loss = model(**source(), labels=labels).loss
        for server in swarm.servers[: len(SPANS)]:
            server.kill()
        loss.backward()
        got = model.get_input_embeddings().weight.grad
    assert float((got - want).norm()) <= 1e-4 * float(want.norm())


@pytest.mark.slow
@pytest.mark.parametrize("name", ENCODER_DECODERS)
def test_servers_of_every_type_die_while_several_texts_are_written(name: str, tmp_path: Path) -> None:
    """One with the encoder's last block and the decoder's first in mid-text, and then one of the encoder's alone."""
    local, directory = tiny_model(name), str(save_tiny_model(name, tmp_path))
    options = {"max_new_tokens": 12, "do_sample": False, "num_beams": 3}
    random = torch.Generator().manual_seed(4)
    texts = [torch.randint(3, 100, (rows, length), generator=random) for rows, length in ((1, 9), (2, 5), (1, 14))]
    wanted = [local.generate(input_ids=text, **options).tolist() for text in texts]
    with (
        LocalSwarm(directory, spans=SPANS * 2, **OPTIONS) as swarm,
        AutoDistributedModelForSeq2SeqLM.from_pretrained(directory, initial_peers=swarm.initial_peers) as model,
        ThreadPoolExecutor(len(texts)) as pool,
    ):
        model.generation_config = copy.deepcopy(local.generation_config)

        def write(text: torch.Tensor, **more: Any) -> Any:
            return model.generate(input_ids=text, **options, **more).tolist()

        def kill(span: tuple[int, int]) -> None:
            next(s for s in swarm.servers if (s.span.start, s.span.end) == span and s.alive).kill()

        others = [pool.submit(write, text) for text in texts[1:]]
        first = write(texts[0], logits_processor=at_token(5, lambda: kill(SPANS[1])))
        assert [first, *(other.result() for other in others)] == wanted
        kill(SPANS[0])
        assert list(pool.map(write, texts)) == wanted


@pytest.mark.parametrize("span", [SPANS[0], SPANS[1]])
def test_a_server_of_the_encoder_has_died_when_the_next_text_begins(
    swarm: LocalSwarm, directory: Path, local: PreTrainedModel, span: tuple[int, int]
) -> None:
    """The client still has streams to it; the second has some of the decoder, too."""
    options = {"max_new_tokens": 8, "do_sample": False, "num_beams": 2}
    expected = local.generate(**source(), **options)
    with AutoDistributedModelForSeq2SeqLM.from_pretrained(str(directory), initial_peers=swarm.initial_peers) as model:
        model.generation_config = copy.deepcopy(local.generation_config)
        assert model.generate(**source(), **options).tolist() == expected.tolist()
        next(server for server in swarm.servers if (server.span.start, server.span.end) == span).kill()
        assert model.generate(**source(), **options).tolist() == expected.tolist()
