"""Metrics of a gateway and its servers; the dashboard in examples/ uses no others."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from web_gateway import RunningGateway, metrics_page, running_gateway, server_metrics

from swarmllm import LocalSwarm


@pytest.fixture(scope="module")
def gateway(swarm: LocalSwarm) -> Iterator[RunningGateway]:
    """One whose steps can be counted: others send guesses along while a busy machine makes loopback slow."""
    with running_gateway(swarm.initial_peers, speculation="off", max_choices=4) as gateway:
        gateway.wait_until_seen(2)
        yield gateway


def test_metrics_of_servers(gateway: RunningGateway, swarm: LocalSwarm) -> None:
    before = [server_metrics(server) for server in swarm.servers]
    gateway.http.post("/v1/completions", json={"prompt": [[1, 5, 6, 7]], "max_tokens": 5, "logit_bias": {"2": -100}})
    for server, old in zip(swarm.servers, before, strict=True):
        now = server_metrics(server)
        done = {name: now[name] - old[name] for name in now}
        assert done["swarmllm_server_steps_total"] == 5
        assert done["swarmllm_server_tokens_total"] == 4 + 4
        assert done["swarmllm_server_received_bytes_total"] > 0
        assert done["swarmllm_server_sent_bytes_total"] > 0
        assert now["swarmllm_server_blocks"] == 4
        assert now["swarmllm_server_cache_bytes"] > 0
        assert now["swarmllm_relay_reservations"] == now["swarmllm_relay_bytes_total"] == 0


def test_metrics_of_the_gateway(gateway: RunningGateway, swarm: LocalSwarm) -> None:
    def samples() -> dict[tuple[str, str], float]:
        text = gateway.http.get("/metrics").text
        return {
            (sample.name, sample.labels.get("peer_id", sample.labels.get("status", ""))): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if "le" not in sample.labels and sample.labels.get("route", "/v1/completions") == "/v1/completions"
        }

    before = samples()
    answer = gateway.http.post(
        "/v1/completions", json={"prompt": [[1, 5, 6]], "max_tokens": 7, "n": 2, "logit_bias": {"2": -100}}
    )
    assert answer.status_code == 200
    done = {key: value - before.get(key, 0) for key, value in samples().items()}
    assert done["swarmllm_gateway_tokens_total", ""] == 14
    assert done["swarmllm_gateway_prompt_tokens_total", ""] == 3
    assert done["swarmllm_gateway_requests_total", "200"] == 1
    assert done["swarmllm_pipeline_construct_ms_count", ""] == 1
    assert done["swarmllm_first_token_ms_count", ""] == 1
    assert done["swarmllm_tokens_per_second_count", ""] == 1
    for server in swarm.servers:
        assert done["swarmllm_shard_latency_ms_count", server.peer_id] == 7
    assert {"swarmllm_failovers_total", "swarmllm_fallback_to_local_total"} <= {name for name, _ in done}
    assert "swarmllm_shard_corruption_detected_total" in {name for name, _ in done}


def test_the_dashboard_asks_for_metrics_that_exist(gateway: RunningGateway, swarm: LocalSwarm, repo_root: Path) -> None:
    dashboard = json.loads((repo_root / "examples/monitoring/dashboard.json").read_text())
    asked = set(re.findall(r"swarmllm_\w+", json.dumps([panel.get("targets") for panel in dashboard["panels"]])))
    text = gateway.http.get("/metrics").text
    known = {sample.name for family in text_string_to_metric_families(text) for sample in family.samples}
    known |= {f"swarmllm_{name}" for name in ("swarm_errors_total", "shard_latency_ms_bucket")}
    known |= set(server_metrics(swarm.servers[0]))
    assert asked
    assert asked <= known


def test_the_table_of_deployment_names_what_is_exported(
    gateway: RunningGateway, swarm: LocalSwarm, repo_root: Path
) -> None:
    """Without the ending `_total` of counters, as the page says."""
    table = re.findall(r"^\| `(swarmllm_\w+)` \|", (repo_root / "docs/deployment.md").read_text(), re.MULTILINE)
    pages = (gateway.http.get("/metrics").text, metrics_page(swarm.servers[0]))
    assert set(table) == {family.name for page in pages for family in text_string_to_metric_families(page)}
