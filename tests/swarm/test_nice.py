"""A server with --nice slows down while other programs keep the cores busy, says so, and loses nobody."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import torch
from swarm_models import NUM_BLOCKS, OPTIONS, connected, generate_seeded, names, prompt, wait_until
from transformers import PreTrainedModel

from swarmllm import LocalSwarm
from swarmllm.data_structures import ServerInfo

BUSY = "while True: pass"


@contextmanager
def busy_machine() -> Iterator[None]:
    """Programs of the owner that want every core."""
    programs = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(psutil.cpu_count() or 1)]
    try:
        yield
    finally:
        for program in programs:
            program.kill()
        for program in programs:
            program.wait()


@pytest.mark.slow
def test_a_polite_server_gives_way_and_comes_back(llama: Path, local: PreTrainedModel) -> None:
    ids = prompt()
    expected = generate_seeded(local, ids, max_new_tokens=200)
    with (
        LocalSwarm(llama, spans=[(0, NUM_BLOCKS)], nice=True, update_period=1, throughput=1000.0, **OPTIONS) as swarm,
        connected(llama, swarm.initial_peers) as model,
    ):
        log_path = swarm.servers[0].log_path

        def polite() -> ServerInfo:
            (server,) = (s for s in model.swarm.servers() if s.peer_id == swarm.servers[0].peer_id)
            return server

        with torch.no_grad(), model.inference_session(max_length=2048) as session:
            generated = feed = ids

            def step() -> None:
                nonlocal generated, feed
                hidden = session.step(model.embed(feed))
                feed = model.head(hidden)[:, -1].argmax(-1, keepdim=True)
                generated = torch.cat([generated, feed], dim=1)

            step()
            assert names(session.route) == [swarm.servers[0].peer_id]
            other = swarm.add_server((0, NUM_BLOCKS), nice=False)
            before = polite()  # other programs may take some of the cores already
            with busy_machine():
                wait_until(lambda: polite().speed_share < 0.5, "the server to give way")
                slow = polite()
                assert slow.throughput == pytest.approx(1000 * slow.speed_share)
                alone_ms = before.decode_ms_per_block * before.speed_share
                assert slow.decode_ms_per_block == pytest.approx(alone_ms / slow.speed_share)
                assert "giving way" in log_path.read_text()

                def moved() -> bool:
                    step()
                    return names(session.route) == [other.peer_id]

                wait_until(moved, "a move to the server that has time")
            wait_until(lambda: polite().speed_share > slow.speed_share, "more speed when the others have ended")
            step()
            assert session.num_repairs == 0
        assert polite().throughput > slow.throughput
    length = min(generated.shape[1], expected.shape[1])
    assert generated[:, :length].tolist() == expected[:, :length].tolist()
