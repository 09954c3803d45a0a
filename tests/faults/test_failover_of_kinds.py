"""Servers of vision, encoder-decoder and speech models die: texts and gradients are those of an undisturbed run.

A new server gets the whole prompt again: pictures, encoder outputs, and the rows that beams have chosen.
"""

import copy
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from fault_tools import at_token
from swarm_models import OPTIONS
from tests.numerics.architectures import ENCODER_DECODERS, Subject
from tests.numerics.client_properties import TARGET, given_to
from tests.numerics.tiny_encoder_decoders import save_tiny_model, tiny_model
from tests.numerics.tiny_vision_models import inputs_of as picture_of

from swarmllm import AutoDistributedModel, AutoDistributedModelForSeq2SeqLM, LocalSwarm

pytestmark = pytest.mark.rotates(5, whole_file=True)

ONE_STACK = [(0, 1), (1, 3), (3, 4)]
TWO_STACKS = [(0, 3), (3, 5), (5, 6), (6, 7)]
"""Spans of 4 blocks, and of 4 blocks of an encoder and 3 of a decoder. Each has two servers."""
SUBJECTS = {
    "bart": "encoder-decoder",
    "gemma3": "vision",
    "qwen3_vl": "vision",
    "whisper": "speech",
    "moonshine": "speech",
    "speech_to_text": "speech",
}
SLOW = pytest.mark.slow


def on(*deaths: tuple[str, int, int]) -> pytest.MarkDecorator:
    """Model, block whose server dies, beams. The first of each model is fast."""
    seen: set[str] = set()
    cells = []
    for name, block, beams in deaths:
        cells.append(pytest.param(name, block, beams, marks=SLOW if name in seen or name in LESS_USUAL else ()))
        seen.add(name)
    return pytest.mark.parametrize(("name", "block", "beams"), cells)


LESS_USUAL = frozenset({"moonshine", "speech_to_text"})


@pytest.fixture
def subject(name: str, tmp_path: Path) -> Subject:
    return Subject(SUBJECTS[name], name, tmp_path, group=pytest.fail)


@pytest.fixture
def swarm(subject: Subject) -> Iterator[LocalSwarm]:
    spans = ONE_STACK if subject.kind == "vision" else TWO_STACKS
    with LocalSwarm(str(subject.directory()), spans=spans * 2, **OPTIONS) as swarm:
        yield swarm


@contextmanager
def client_of(subject: Subject, swarm: LocalSwarm) -> Iterator[Any]:
    with AutoDistributedModel.from_pretrained(str(subject.directory()), initial_peers=swarm.initial_peers) as model:
        model.generation_config = copy.deepcopy(subject.local.generation_config)
        yield model


def given(subject: Subject) -> dict[str, Any]:
    return picture_of(subject.local) if subject.kind == "vision" else given_to(subject)


@on(
    *(("bart", block, beams) for block in (4, 5, 6) for beams in (3, 1)),
    *((name, block, beams) for name in ("gemma3", "qwen3_vl") for block in (0, 1, 3) for beams in (1, 3)),
    *((name, 4, beams) for name in ("whisper", "moonshine", "speech_to_text") for beams in (3, 1)),
)
def test_a_server_dies_in_mid_text(
    subject: Subject, swarm: LocalSwarm, block: int, beams: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Block 4 of two stacks is the decoder's first, on a server that has the encoder's last, too."""
    options = {"max_new_tokens": 14, "do_sample": False, "num_beams": beams}
    expected = subject.local.generate(**given(subject), **options).tolist()
    with client_of(subject, swarm) as model:
        sessions: list[Any] = []
        new_session = model.remote_blocks.new_cache_session

        def noted(*args: Any) -> Any:
            sessions.append(new_session(*args))
            return sessions[-1]

        monkeypatch.setattr(model.remote_blocks, "new_cache_session", noted)

        def strike() -> None:
            (victim,) = (hop.server.peer_id for hop in sessions[-1].route if block in hop.span)
            next(server for server in swarm.servers if server.peer_id == victim).kill()

        found = model.generate(**given(subject), **options, logits_processor=at_token(6, strike))
        assert found.tolist() == expected
        assert sessions[-1].num_repairs >= 1


@pytest.mark.parametrize("name", ["bart", "gemma3", pytest.param("qwen3_vl", marks=SLOW), "whisper"])
def test_servers_die_between_forward_and_backward(subject: Subject, swarm: LocalSwarm) -> None:
    """Gradients reach embeddings, vision towers and the front ends for sound."""
    inputs = given(subject)
    labels = inputs["input_ids"] if subject.kind == "vision" else TARGET
    local = subject.local
    local.zero_grad()
    local(**inputs, labels=labels).loss.backward()
    wanted = {name: one.grad for name, one in local.named_parameters() if one.grad is not None}
    with client_of(subject, swarm) as model:
        loss = model(**inputs, labels=labels).loss
        for server in swarm.servers[: len(swarm.servers) // 2]:
            server.kill()
        loss.backward()
        found = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    assert any("embed" in name or "shared" in name for name in found)
    largest = max(float(grad.norm()) for grad in wanted.values())
    for name, grad in found.items():
        assert float((grad - wanted[name]).norm()) <= 1e-4 * float(wanted[name].norm()) + 1e-6 * largest, name


@pytest.mark.parametrize("span", [TWO_STACKS[0], pytest.param(TWO_STACKS[1], marks=SLOW)])
@pytest.mark.parametrize("name", ["bart"])
def test_a_server_of_the_encoder_has_died_when_the_next_text_begins(
    subject: Subject, swarm: LocalSwarm, span: tuple[int, int]
) -> None:
    """The client still has streams to it. The second server has some of the decoder, too."""
    options = {"max_new_tokens": 8, "do_sample": False, "num_beams": 2}
    expected = subject.local.generate(**given(subject), **options).tolist()
    with client_of(subject, swarm) as model:
        assert model.generate(**given(subject), **options).tolist() == expected
        next(server for server in swarm.servers if (server.span.start, server.span.end) == span).kill()
        assert model.generate(**given(subject), **options).tolist() == expected


@pytest.mark.slow
@pytest.mark.parametrize("name", ENCODER_DECODERS)
def test_servers_of_every_type_die_while_several_texts_are_written(name: str, tmp_path: Path) -> None:
    """The server with the last block of the encoder and the first of the decoder; then one of the encoder alone."""
    local, directory = tiny_model(name), str(save_tiny_model(name, tmp_path))
    options = {"max_new_tokens": 12, "do_sample": False, "num_beams": 3}
    random = torch.Generator().manual_seed(4)
    texts = [torch.randint(3, 100, (rows, length), generator=random) for rows, length in ((1, 9), (2, 5), (1, 14))]
    wanted = [local.generate(input_ids=text, **options).tolist() for text in texts]
    with (
        LocalSwarm(directory, spans=TWO_STACKS * 2, **OPTIONS) as swarm,
        AutoDistributedModelForSeq2SeqLM.from_pretrained(directory, initial_peers=swarm.initial_peers) as model,
        ThreadPoolExecutor(len(texts)) as pool,
    ):
        model.generation_config = copy.deepcopy(local.generation_config)

        def write(text: torch.Tensor, **more: Any) -> Any:
            return model.generate(input_ids=text, **options, **more).tolist()

        def kill(span: tuple[int, int]) -> None:
            next(s for s in swarm.servers if (s.span.start, s.span.end) == span and s.alive).kill()

        others = [pool.submit(write, text) for text in texts[1:]]
        first = write(texts[0], logits_processor=at_token(5, lambda: kill(TWO_STACKS[1])))
        assert [first, *(other.result() for other in others)] == wanted
        kill(TWO_STACKS[0])
        assert list(pool.map(write, texts)) == wanted
