"""Every architecture of transformers × every property of a swarm that runs it; or it is refused with a reason.

In one process: a client and two servers (`in_process_swarm`). `make test` takes the architectures whose turn it is by
the commit's hash, with all properties; `make test-slow` takes the others. `-k llama` runs one architecture, `-k
beam_search` one property.

A property that isn't for an architecture says so beside its code, and checks there that it is refused, if that can be
checked: `ONE_BY_ONE`, `NOT_PAGED`, `NO_HEADS`, `PICTURES_ONLY` …
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tests.numerics import client_properties as client
from tests.numerics import exactness
from tests.numerics import server_properties as server
from tests.numerics.architectures import (
    ALL,
    REFUSED_ENCODER_DECODERS,
    TEXT,
    VISION_ENCODER_DECODERS,
    Subject,
)
from tests.numerics.tiny_encoder_decoders import tiny_config
from tests.selection import COMMIT, NOT_NOW, part_of, turn_of
from transformers import AutoConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from swarmllm.errors import UnsupportedModelError
from swarmllm.models.architecture import REFUSED_ARCHITECTURES, check_supported
from swarmllm.models.checkpoint.checkpoint import open_checkpoint
from swarmllm.models.parallel.shared import Group

Property = Callable[[Subject], None]
PROPERTIES: dict[str, tuple[Property, ...]] = {
    "text": (
        *map(client.as_local, exactness.CHECKS),
        client.assisted,
        client.offloaded_blocks,
        client.matrices_over_two_processes,
        client.skipped_padding,
        client.hidden_states,
        client.attentions,
        client.hooks_on_blocks,
        client.prefix_tuning,
        server.any_span,
        server.one_block_of_each_kind,
        server.interleaved_clients,
        server.sessions_together,
        server.steps_as_lines,
        server.sessions_on_pages,
        server.steps_on_pages_read_nothing_on_the_host,
        server.clients_find_the_traits_of_servers,
        server.clients_find_traits_in_half_precision,
    ),
    "vision": (
        client.text_with_a_picture,
        client.text_without_a_picture,
        client.generation_about_a_picture,
        client.gradients_of_the_vision_tower,
        server.sessions_with_several_axes_together,
        server.clients_find_the_traits_of_servers,
    ),
    "encoder-decoder": (
        client.logits_of_two_stacks,
        client.generation_of_two_stacks,
        client.gradients_of_two_stacks,
        client.hooks_on_two_stacks,
        server.sessions_with_encoder_outputs_together,
        server.throughput_of_stacks_with_few_positions,
        server.clients_find_the_traits_of_servers,
    ),
    "speech": (
        client.logits_of_two_stacks,
        client.generation_of_two_stacks,
        client.gradients_of_two_stacks,
        server.sessions_with_encoder_outputs_together,
        server.throughput_of_stacks_with_few_positions,
        server.clients_find_the_traits_of_servers,
    ),
}
"""By kind of model."""
ALWAYS = frozenset({"llama", "whisper"})
NUM_TURNS = 36


def cells() -> Iterator[object]:
    """The table, architecture by architecture, so that each tiny model is made once."""
    for kind, names in ALL.items():
        for name in names:
            now = name in ALWAYS or part_of(name, NUM_TURNS) == turn_of(COMMIT, NUM_TURNS)
            for check in PROPERTIES[kind]:
                marks = [pytest.mark.share(name), *([] if now else [NOT_NOW])]
                yield pytest.param(kind, name, check, id=f"{name}-{check.__name__}", marks=marks)


@pytest.fixture(scope="module")
def group() -> Iterator[Callable[[], Group]]:
    """Two processes for the matrices of blocks, made when they are asked for."""
    groups: list[Group] = []

    def found() -> Group:
        if not groups:
            groups.append(Group([torch.device("cpu")] * 2))
        return groups[0]

    yield found
    for one in groups:
        one.close()


@pytest.fixture(scope="module")
def subject_of(tmp_path_factory: pytest.TempPathFactory, group: Callable[[], Group]) -> Callable[[str, str], Subject]:
    """The subject of the last test, if this one has the same."""
    last: list[Subject] = []

    def found(kind: str, name: str) -> Subject:
        if not last or (last[0].kind, last[0].name) != (kind, name):
            last[:] = [Subject(kind, name, tmp_path_factory.mktemp("architecture"), group)]
        return last[0]

    return found


@pytest.mark.filterwarnings("ignore::UserWarning:peft")  # of blocks that a prefix leaves out
@pytest.mark.parametrize(("kind", "name", "check"), list(cells()))
def test_it_holds(kind: str, name: str, check: Property, subject_of: Callable[[str, str], Subject]) -> None:
    check(subject_of(kind, name))


def test_as_many_as_promised() -> None:
    assert len(TEXT) >= 115
    assert len(ALL["vision"]) >= 50
    num_not_together = sum(name in ALL["text"] for name in server.ONE_BY_ONE)
    assert len(ALL["text"]) - num_not_together >= 118
    num_rounded = sum(name in ALL["text"] for name in client.ADDS_UP_OTHERWISE)
    assert len(ALL["text"]) - num_rounded >= 100
    assert len(client.WITH_PREFIXES) >= 85
    assert len(server.TRACED & {*TEXT}) >= 44


# ---------------------------------------------------------------------- refused architectures

NO_DEFAULT_CONFIG = frozenset({"gemma3n", "gemma4_assistant", "gemma4_unified_assistant"})
"""Their default configs need further packages, or contradict themselves."""


def config_of(model_type: str) -> object:
    if model_type in NO_DEFAULT_CONFIG:
        config = AutoConfig.for_model("llama")
        config.model_type = model_type
        return config
    return CONFIG_MAPPING[model_type]()


@pytest.mark.parametrize("model_type", sorted({*REFUSED_ARCHITECTURES, *VISION_ENCODER_DECODERS} - {"t5gemma2"}))
def test_refused_with_a_reason(model_type: str) -> None:
    with pytest.raises(UnsupportedModelError, match=model_type):
        check_supported(config_of(model_type))


@pytest.mark.parametrize("name", REFUSED_ENCODER_DECODERS)
def test_encoder_decoders_are_refused_with_a_reason(name: str) -> None:
    with pytest.raises(UnsupportedModelError, match="can't be split over servers: it"):
        check_supported(tiny_config(name))


def test_refused_when_it_is_opened(tmp_path: Path) -> None:
    AutoConfig.for_model("xlstm").save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="recurrent states"):
        open_checkpoint(str(tmp_path))
