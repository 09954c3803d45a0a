"""The commands in compose files, manifests and units start what they say, without containers."""

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from swarmllm import embedded_model_path

ROOT = Path(__file__).parents[2]


def loaded() -> Any:
    """`.ci/without_containers.py`."""
    spec = importlib.util.spec_from_file_location("without_containers", ROOT / ".ci" / "without_containers.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


deployment = loaded()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "names"),
    [
        ("examples/monitoring/compose.yaml", ["first", "second", "gateway"]),
        ("docs/deployment.md", ["systemd server", "systemd dht", "systemd gateway", "kubernetes server"]),
    ],
)
def test_what_it_describes_comes_up_writes_and_ends(file: str, names: list[str]) -> None:
    said = list(deployment.run(ROOT / file))
    assert [line.partition(" is up:")[0] for line in said if " is up:" in line] == names
    assert any(" writes " in line for line in said)
    assert said[-1].startswith("all of them ended in order")


def test_the_model_of_the_compose_file_is_where_the_image_has_it() -> None:
    """Not started above, where MODEL names the one of this tree."""
    text = (ROOT / "examples" / "monitoring" / "compose.yaml").read_text()
    (python,) = re.findall(r"^ARG PYTHON=(\S+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    inside = Path(embedded_model_path()).relative_to(ROOT / "src")
    assert set(re.findall(r"MODEL:-([^}]+)}", text)) == {f"/opt/venv/lib/python{python}/site-packages/{inside}"}


def test_words_of_compose() -> None:
    assert deployment.interpolated(["${A:-b}", {"x": "$$${A}"}, "${C:-}d", 3], {"A": "a"}) == ["a", {"x": "$a"}, "d", 3]
    assert deployment.interpolated("${A:-b}", {}) == "b"


def test_ports_and_places_are_this_machines_own(tmp_path: Path) -> None:
    here = deployment.Machine(tmp_path)
    words = ["swarmllm", "server", "--host_maddrs=/ip4/0.0.0.0/tcp/31337", "--metrics_port=9400", "--identity_path"]
    first = deployment.Service("first", [*words, "/cache/first.key"])
    _, _, host, metrics, _, identity = here.localized(first)
    assert re.fullmatch(r"--host_maddrs=/ip4/127\.0\.0\.1/tcp/(?!31337)\d+", host)
    assert re.fullmatch(r"--metrics_port=(?!9400)\d+", metrics)
    assert Path(identity).parent.parent == tmp_path
    assert here.localized(deployment.Service("dht", ["swarmllm", "dht"]))[-1] == "--host_maddrs=/ip4/127.0.0.1/tcp/0"


def test_the_peer_is_put_into_the_document() -> None:
    """A renamed placeholder must fail here, not only in the slow test above, which CI runs every fourth commit."""
    services = list(deployment.of_document(ROOT / "docs" / "deployment.md", "/ip4/PEER"))
    peers = [service.argv[service.argv.index("--initial_peers") + 1] for service in services[:1] + services[2:]]
    assert peers == ["/ip4/PEER"] * 3
