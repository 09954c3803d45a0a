"""A server dies while several speculative steps are under way: the tokens are those of an undisturbed run."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fault_tools import Doom, Faulty, at_token
from swarm_models import connected, generate_seeded, prompt, save_head_beside
from tests.planners import FixedPlanner
from transformers import PreTrainedModel

pytestmark = pytest.mark.rotates(6, whole_file=True)

NUM_TOKENS = 24


@pytest.fixture
def ahead(llama: Path, swarm: Faulty) -> Iterator[Any]:
    """Its draft model is the model itself, so that there are always steps under way."""
    living = [server.peer_id for server in swarm.living]
    with connected(llama, swarm.initial_peers, allowed_servers=living, speculation=str(llama)) as model:
        model.speculator.planner = FixedPlanner()
        yield model


@pytest.fixture
def by_head(llama: Path, swarm: Faulty, tmp_path: Path) -> Iterator[Any]:
    """Its checkpoint has a head that guesses."""
    living = [server.peer_id for server in swarm.living]
    directory = save_head_beside(llama, tmp_path / "checkpoint")
    with connected(directory, swarm.initial_peers, allowed_servers=living, speculation="mtp") as model:
        model.speculator.planner = FixedPlanner()
        yield model


@pytest.mark.parametrize("do_sample", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    "place", [pytest.param("first", marks=pytest.mark.slow), "middle", pytest.param("last", marks=pytest.mark.slow)]
)
def test_death_while_steps_are_under_way(
    ahead: Any, swarm: Faulty, local: PreTrainedModel, doom: Doom, place: str, do_sample: bool
) -> None:
    _survives(ahead, swarm, local, doom, place, do_sample)


@pytest.mark.parametrize(
    ("place", "do_sample"),
    [
        ("middle", True),
        pytest.param("first", False, marks=pytest.mark.slow),
        pytest.param("last", False, marks=pytest.mark.slow),
    ],
)
def test_death_while_the_head_guesses(
    by_head: Any, swarm: Faulty, local: PreTrainedModel, doom: Doom, place: str, do_sample: bool
) -> None:
    _survives(by_head, swarm, local, doom, place, do_sample)


def _survives(model: Any, swarm: Faulty, local: PreTrainedModel, doom: Doom, place: str, do_sample: bool) -> None:
    options = {"max_new_tokens": NUM_TOKENS, "do_sample": do_sample, "temperature": 0.5}
    expected = generate_seeded(local, prompt(), **options)
    under_way = []
    with model.inference_session(max_length=100) as session:

        def strike() -> None:
            under_way.append(session.num_under_way)
            doom(swarm.on_route(session.route, place), lambda: session.num_under_way)

        generated = generate_seeded(model, prompt(), **options, logits_processor=at_token(8, strike))
        assert 1 <= session.num_repairs <= 2  # the dead server's neighbour may notice before the client does

    assert under_way[0] >= 2, "nothing was under way"
    assert generated.tolist() == expected.tolist()
