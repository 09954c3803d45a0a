"""Eight honest clients beside one hostile peer of each kind, in short: benchmarks/hostile_soak.py."""

from pathlib import Path

import pytest
from hostile_peers import CLIENTS, floods_a_key
from soak_run import Soak

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
