"""Servers that die while a gateway streams, swarms that can't be repaired, and what the gateway says about it."""

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from web_gateway import NAME, RunningGateway, local_swarm, running_gateway, wait_until

from swarmllm import LocalSwarm, embedded_model_path
from swarmllm.gateway import monitor
from swarmllm.gateway.engine.generation import Generation

PROMPT = "Once upon a time"
LONG: dict[str, Any] = {
    "prompt": PROMPT,
    "max_tokens": 100,
    "temperature": 0,
    "logit_bias": {"2": -100},
    "stream": True,
    "swarm_events": True,
}


@pytest.fixture
def mortal() -> Iterator[LocalSwarm]:
    """Two servers for the second half of the blocks."""
    with local_swarm((0, 4), (4, 8), (4, 8)) as swarm:
        yield swarm


def chunks_of(gateway: RunningGateway, **more: Any) -> Iterator[dict[str, Any]]:
    """The chunks of a stream, as they come."""
    with gateway.http.stream("POST", "/v1/completions", json={**LONG, **more}) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))


def text_of(chunks: list[dict[str, Any]]) -> str:
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])


AtToken = Callable[[int, Callable[[Generation], None]], None]


@pytest.fixture
def at_token(monkeypatch: pytest.MonkeyPatch) -> AtToken:
    """Has something done before the gateway goes on from a token. Whoever reads the stream may be far behind it."""
    on_step = Generation.on_step

    def do_at(token: int, act: Callable[[Generation], None]) -> None:
        steps = itertools.count(1)

        def hooked(self: Generation, pieces: Any) -> None:
            on_step(self, pieces)
            if next(steps) == token:
                act(self)

        monkeypatch.setattr(Generation, "on_step", hooked)

    return do_at


@pytest.mark.slow
def test_servers_die_while_it_streams(mortal: LocalSwarm, at_token: AtToken, tmp_path: Path) -> None:
    """One dies: the other takes over with the same text. Both are gone: the local model goes on, with the same text.

    On a busy machine a server that lives may seem dead as well, so other failures may be told beside these.
    """
    # A local model is opened in the checkpoint's type, and in bfloat16, with AMX, another word is the likeliest.
    AutoModelForCausalLM.from_pretrained(embedded_model_path(), dtype=torch.float32).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(embedded_model_path()).save_pretrained(tmp_path)
    settings: dict[str, Any] = {"fallback_to_local": str(tmp_path)}
    with running_gateway(mortal.initial_peers, **settings) as gateway:
        gateway.wait_until_seen(3)
        undisturbed = text_of(list(chunks_of(gateway)))

        second_half = {server.peer_id: server for server in mortal.servers[1:]}
        at_token(20, lambda generation: second_half[generation.route[1].server.peer_id].kill())
        chunks = list(chunks_of(gateway))
        assert text_of(chunks) == undisturbed
        (used,) = [server for server in second_half.values() if not server.alive]
        (other,) = [server for server in second_half.values() if server.alive]
        events = [chunk["swarm"] for chunk in chunks if "swarm" in chunk]
        assert events[0]["event"] == "route"
        told = [one["event"] for one in events if one.get("peer_id") == used.peer_id]
        assert told in ([], ["shard_status"])  # none if the loss is noticed before the next step
        failovers = [one for one in events if one["event"] == "shard_failover"]
        (failover,) = [one for one in failovers if used.peer_id in {hop["peer_id"] for hop in one["lost"]}]
        assert other.peer_id in {hop["peer_id"] for hop in failover["replaced_by"]}

        wait_until(
            lambda: any(
                (event["kind"], event["peer_id"]) == ("unreachable", used.peer_id)
                for event in gateway.swarm()["events"]
            ),
            "the monitor saw the death",
        )

        at_token(20, lambda _: other.kill())
        chunks = list(chunks_of(gateway))
        events = [chunk["swarm"] for chunk in chunks if "swarm" in chunk]
        assert events[-1]["event"] == "pipeline_aborted"
        assert events[-1]["fallback_to_local"] is True
        assert text_of(chunks) == undisturbed
        wait_until(lambda: gateway.swarm()["missing_blocks"] == [4, 5, 6, 7], "the monitor saw the gap")
        assert gateway.http.get("/health").json()["status"] == "degraded"
        metrics = gateway.http.get("/metrics").text
        assert "swarmllm_failovers_total 0.0" not in metrics
        assert "swarmllm_fallback_to_local_total 1.0" in metrics


@pytest.mark.slow
def test_without_a_local_model_the_stream_ends_with_an_error(mortal: LocalSwarm, at_token: AtToken) -> None:
    def kill_both(_: Generation) -> None:
        for server in mortal.servers[1:]:
            server.kill()

    with running_gateway(mortal.initial_peers) as gateway:
        gateway.wait_until_seen(3)
        at_token(20, kill_both)
        chunks = list(chunks_of(gateway))
        assert chunks[-2]["swarm"]["event"] == "pipeline_aborted"
        assert chunks[-1]["error"]["type"] == "server_error"
        response = gateway.http.post("/v1/completions", json={"prompt": PROMPT, "model": NAME})
        assert response.status_code == 503
        assert "retry-after" in response.headers
        assert gateway.http.get("/health").status_code == 503


def test_a_dead_client_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the monitor saw last: nobody would get an answer any more."""
    with local_swarm((0, 8)) as swarm, running_gateway(swarm.initial_peers) as gateway:
        gateway.wait_until_seen(1)
        assert gateway.http.get("/health").json()["status"] == "ok"
        with monkeypatch.context() as patch:
            patch.setattr(monitor, "STALLED_S", 0.0)  # so long ago is the last look of an event loop that hangs
            assert gateway.http.get("/health").json()["status"] == "dead"
        assert gateway.http.get("/health").status_code == 200
        gateway.gateway.models.close()
        answer = gateway.http.get("/health")
        assert (answer.status_code, answer.json()["status"]) == (503, "dead")
