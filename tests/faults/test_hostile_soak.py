"""Eight honest clients beside one hostile peer of each kind, in short: benchmarks/hostile_soak.py."""

from pathlib import Path

import psutil
import pytest
from hostile_peers import CLIENTS, floods_a_key
from soak_run import HostilePeers, Soak
from swarm_models import save_llama

from swarmllm import LocalSwarm

MEMORY_MB = 600.0
"""That a server may grow by: some times what it was seen to, far from what the attacks send."""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_honest_clients_beside_one_hostile_peer_of_each_kind(tmp_path: Path) -> None:
    figures = Soak(tmp_path, hidden_size=64).run(num_pairs=1, phase_s=25.0)
    assert len(figures.texts) > 16
    assert not figures.wrong
    assert not figures.died
    assert not figures.logged
    at_it = {attack.__name__ for attack in (*CLIENTS, floods_a_key)}  # who serves waits for somebody to come
    assert figures.did.keys() >= at_it
    for name, held in figures.memory.items():
        assert max(held) < held[0] + MEMORY_MB, name


@pytest.mark.slow
def test_hostile_peers_end_with_their_input(tmp_path: Path) -> None:
    """With their daemons, in the midst of it, and although nobody is left whom they could tell."""
    model = save_llama(tmp_path / "checkpoint", num_blocks=2, hidden_size=64)
    with (
        LocalSwarm(model, spans=[(0, 2)], num_threads=1, quant_type="none") as swarm,
        HostilePeers(model, swarm.servers, 64) as peers,
    ):
        daemons = psutil.Process(peers.pid).children()
        peers.begin(())
        for server in swarm.servers:
            server.kill()
    assert len(daemons) > len(CLIENTS)
    assert not psutil.wait_procs(daemons, timeout=60)[1]
