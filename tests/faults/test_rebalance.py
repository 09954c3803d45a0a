"""Servers that move, leave and come back while somebody generates: the same tokens, and no error."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from fault_tools import at_token
from swarm_models import OPTIONS, connected, prompt, wait_until
from transformers import PreTrainedModel

from swarmllm import LocalSwarm
from swarmllm.data_structures import ServerState
from swarmllm.demo.local_swarm import LocalServer

pytestmark = pytest.mark.rotates(3)

PROMPT = prompt(length=9)
HALVES = [(0, 3), (3, 6)]


def local_swarm(llama: Path, *spans: tuple[int, int]) -> LocalSwarm:
    """Servers that are told what to serve. Short periods, so that they look around often."""
    return LocalSwarm(llama, spans=spans, update_period=1, **OPTIONS)


def tokens(model: Any, count: int = 12, **options: Any) -> list[list[int]]:
    generated: list[list[int]] = model.generate(PROMPT, max_new_tokens=count, do_sample=False, **options).tolist()
    return generated


def online(model: Any) -> dict[str, tuple[int, int]]:
    """The servers and their blocks now."""
    servers = model.swarm.servers()
    return {s.peer_id: (s.start, s.end) for s in servers if s.state == ServerState.ONLINE}


def log_of(server: LocalServer) -> str:
    return server.log_path.read_text(errors="replace")


def test_a_server_moves_into_a_gap_while_a_client_generates(llama: Path, local: PreTrainedModel) -> None:
    """Two servers on the same blocks; the only one of the others leaves; one of the two moves."""
    with local_swarm(llama, *HALVES) as swarm:
        mover = swarm.add_server(num_blocks=3)
        assert mover.span is not None
        here = (mover.span.start, mover.span.end)
        (gap,) = set(HALVES) - {here}
        leaving, staying = (swarm.servers[HALVES.index(half)] for half in (gap, here))
        with connected(llama, swarm.initial_peers, route_timeout_s=60) as model:
            assert tokens(model, 30, logits_processor=at_token(5, leaving.terminate)) == tokens(local, 30)
            assert leaving.wait() == 0
            assert online(model) == {mover.peer_id: gap, staying.peer_id: here}, "who was told what to serve stays"
            assert "moving from blocks" in log_of(mover)
            assert not re.search("moving|claiming", log_of(staying))
            assert tokens(model, 30) == tokens(local, 30)


@pytest.mark.slow
def test_a_server_stays_where_it_is_while_it_could_load_nothing_else(
    llama: Path, local: PreTrainedModel, tmp_path: Path
) -> None:
    """Its model's directory is gone when others need it: it goes on, and moves when the files are back."""
    files, away = tmp_path / "checkpoint", tmp_path / "away"
    shutil.copytree(llama, files)
    with local_swarm(files, *HALVES) as swarm:
        mover = swarm.add_server(num_blocks=3)
        assert mover.span is not None
        here = (mover.span.start, mover.span.end)
        (gap,) = set(HALVES) - {here}
        with connected(llama, swarm.initial_peers, route_timeout_s=60) as model:
            files.rename(away)
            swarm.servers[HALVES.index(gap)].stop()
            wait_until(lambda: "can't be loaded" in log_of(mover), "a try to move")
            assert mover.alive
            assert online(model)[mover.peer_id] == here
            away.rename(files)
            assert tokens(model, 30) == tokens(local, 30)
            assert online(model)[mover.peer_id] == gap


def test_leaving_politely_in_the_midst_of_a_generation(llama: Path, local: PreTrainedModel) -> None:
    """SIGTERM: the session is handed over before the blocks go; exit code 0, and nobody is blamed."""
    with (
        local_swarm(llama, HALVES[0], *HALVES) as swarm,
        connected(llama, swarm.initial_peers) as model,
    ):
        used = model.swarm.route()[0].server.peer_id
        (leaving,) = [server for server in swarm.servers if server.peer_id == used]
        assert tokens(model, 30, logits_processor=at_token(4, leaving.terminate)) == tokens(local, 30)
        assert leaving.wait() == 0
        assert set(model.swarm.counts) <= {"repairs", "blocks_not_served"}, "it was told in time, so nothing broke"


@pytest.mark.slow
def test_a_server_comes_back_under_its_old_name(llama: Path, local: PreTrainedModel, tmp_path: Path) -> None:
    """After SIGKILL, with the same identity: the same peer, found again, used again by a client that saw it die."""
    identity = tmp_path / "identity"
    with local_swarm(llama, HALVES[0]) as swarm:
        first = swarm.add_server(HALVES[1], identity_path=identity)
        revived: list[LocalServer] = []

        def restart() -> None:
            first.kill()
            revived.append(swarm.add_server(HALVES[1], identity_path=identity))

        with connected(llama, swarm.initial_peers, route_timeout_s=60) as model:
            assert tokens(model, logits_processor=at_token(4, restart)) == tokens(local)
            assert revived[0].peer_id == first.peer_id
            assert online(model)[first.peer_id] == HALVES[1]
            assert tokens(model) == tokens(local)
