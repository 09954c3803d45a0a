"""docs/commands.md is what the parsers say, and docs/deployment.md names flags and metrics that there are."""

import importlib.util
import re
import shlex
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from swarmllm.__main__ import COMMANDS

ROOT = Path(__file__).parents[2]
PICTURE = re.compile(r"!\[[^\]]+\]\(([^)]+)\)")
DEPLOYMENT = (ROOT / "docs" / "deployment.md").read_text()
REAL_MODEL = (ROOT / "docs" / "real-model.md").read_text()


def script_of(name: str) -> Any:
    """A script of .ci/."""
    spec = importlib.util.spec_from_file_location(name, ROOT / ".ci" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    script = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


def test_the_reference_of_commands_is_what_the_parsers_say() -> None:
    script = script_of("command_reference")
    assert script.DOCUMENT.read_text() == script.reference(), "run python .ci/command_reference.py"


def test_charts_show_the_tables_of_benchmarks() -> None:
    script = script_of("benchmark_charts")
    page = script.PAGE.read_text()
    for chart in script.CHARTS:
        path = script.path_of(chart)
        assert f"(assets/{path.name})" in page
        assert path.read_text() == script.drawn(chart, page), "run python .ci/benchmark_charts.py"


def test_the_first_pages_show_a_failover() -> None:
    """As a small animation of about 20 seconds, and no page shows a picture that is missing or large."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    shown = {page: [page.parent / name for name in PICTURE.findall(page.read_text())] for page in pages}
    recording = ROOT / "docs" / "failover.gif"
    assert recording in shown[ROOT / "README.md"]
    assert recording in shown[ROOT / "docs" / "index.md"]
    assert all(picture.stat().st_size < 500_000 for pictures in shown.values() for picture in pictures)
    delays = re.findall(rb"\x21\xf9\x04.(..)", recording.read_bytes(), re.DOTALL)  # of frames, in 1/100 s
    seconds = sum(int.from_bytes(delay, "little") for delay in delays) / 100
    assert 15 < seconds < 30


LINES = re.findall(r"^(?:ExecStart=\S*/)?swarmllm (.+)$", DEPLOYMENT + REAL_MODEL, re.MULTILINE)
(ARGS,) = re.findall(r"args: \[(.+)\]", DEPLOYMENT)


@pytest.mark.parametrize("line", [*LINES, "server " + ARGS.replace(",", "")])
def test_command_lines_can_be_parsed(line: str) -> None:
    name, *arguments = shlex.split(line)
    import_module(COMMANDS[name].module).build_parser().parse_settings(arguments)


def test_it_lists_all_metrics() -> None:
    assert len(LINES) > 6
    names = set()
    for room in ("gateway", "server"):
        text = (ROOT / "src" / "swarmllm" / room / "metrics.py").read_text()
        text = re.sub(r'InfoMetricFamily\("(\w+)"', r'InfoMetricFamily("\1_info"', text)  # Prometheus adds this ending
        names |= set(re.findall(r'"(swarmllm_\w+)"', text))
        names |= {f"swarmllm_server_{name}" for name in re.findall(r'yield \(?\s*"(\w+)",\s*"', text)}
    assert set(re.findall(r"^\| `(\w+)` \|", DEPLOYMENT, re.MULTILINE)) == names
