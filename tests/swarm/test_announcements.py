"""What real servers announce about themselves, and what a client sees of it."""

from pathlib import Path

import pytest
from swarm_models import OPTIONS, connected, wait_until

from swarmllm import LocalSwarm


@pytest.mark.rotates(2)
def test_servers_measure_their_network(llama: Path) -> None:
    with (
        LocalSwarm(llama, num_servers=2, update_period=1, **OPTIONS) as swarm,
        connected(llama, swarm.initial_peers) as model,
    ):
        wait_until(lambda: all(server.network_mbps > 0 for server in model.swarm.servers()), "both have measured")
        servers = model.swarm.servers()
    assert len(servers) == 2
    hidden_bytes = model.config.hidden_size * 4
    for server in servers:
        assert 0 < server.throughput <= 1.001 * server.network_mbps * 1e6 / 8 / hidden_bytes  # the lesser of the two
