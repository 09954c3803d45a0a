"""The speed that a server announces: what it measured at first, then what its real steps took."""

from pathlib import Path

import pytest
import torch
from swarm_models import EVERYTHING, OPTIONS, connected, generate_seeded, prompt, wait_until

from swarmllm import LocalSwarm
from swarmllm.data_structures import ServerInfo


@pytest.mark.rotates(3)
def test_announced_speeds_follow_real_steps(llama: Path) -> None:
    """Steps, prompts, and forwards without a session; the DHT has the new figures within a period."""
    with (
        LocalSwarm(llama, spans=[EVERYTHING], update_period=1, **OPTIONS) as swarm,
        connected(llama, swarm.initial_peers, speculation="off") as model,
    ):

        def record() -> ServerInfo:
            (server,) = model.swarm.servers()
            return server

        first = record()
        assert (first.step_ms_p50, first.step_ms_p95, first.token_ms) == (0, 0, 0)
        with torch.no_grad():
            model.remote_blocks(model.embed(prompt(batch=8, length=100)))
        wait_until(lambda: record().throughput != first.throughput, "another speed of forwards")
        assert record().decode_ms_per_block == first.decode_ms_per_block, "nobody has decoded yet"

        after_forward = record().throughput
        generate_seeded(model, prompt(length=150), max_new_tokens=30)
        wait_until(lambda: record().tokens_served >= 150 + 29, "the text to be counted")
        now = record()
        assert now.throughput != after_forward
        assert now.decode_ms_per_block != first.decode_ms_per_block
        assert 0 < now.step_ms_p50 < now.token_ms, "a client waits for the step and does its own work"
        assert now.step_ms_p50 <= now.step_ms_p95
        other = swarm.add_server(EVERYTHING)
        wait_until(lambda: "Mbit/s" in other.log_path.read_text(), "a probe of the network")
