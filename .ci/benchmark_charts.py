"""Draw the charts of docs/benchmarks.md from that page's tables: docs/assets/benchmark-*.svg.

    python .ci/benchmark_charts.py

`tests/unit/test_deployment_docs.py` compares them.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "benchmarks.md"
WIDTH, LABEL_WIDTH, VALUE_WIDTH = 760, 270, 150
TOP, ROW, BAR = 46, 24, 14


@dataclass(frozen=True)
class Chart:
    """Bars for one column of a table below a heading of the page."""

    name: str
    title: str
    section: str
    rows: tuple[tuple[str, str], ...]
    """The first cells of each row, with `|` between them, and its label."""
    column: int
    """Column of the values; the first cell of a row is 0."""
    unit: str = ""
    mark: float | None = None
    """A value to compare with, drawn as a line."""


CHARTS = (
    Chart(
        "one-stream",
        "One text through servers on one machine: tokens/s as a share of the local model's",
        "## Inference, one stream",
        (
            ("hidden 512 × 8, fp32|1", "hidden 512, 1 server"),
            ("hidden 512 × 8, fp32|2", "hidden 512, 2 servers"),
            ("hidden 512 × 8, fp32|4", "hidden 512, 4 servers"),
            ("hidden 2048 × 16, bf16|1", "hidden 2048, 1 server"),
            ("hidden 2048 × 16, bf16|2", "hidden 2048, 2 servers"),
        ),
        2,
        mark=1.0,
    ),
    Chart(
        "clients",
        "Clients at once on two servers: tokens/s of all together",
        "## Many clients",
        (("1", "1 client"), ("8", "8 clients"), ("32", "32 clients (another run)")),
        1,
        unit=" tokens/s",
    ),
    Chart(
        "distance",
        "One text over a network: tokens/s, hidden 512 × 12, after 128 tokens",
        "## Slow networks",
        (
            ("local", "local model"),
            ("offload to disk", "the same, offloaded to disk"),
            ("3 servers, 1 Gbit/s, round trip 4 ms", "3 servers, 4 ms"),
            ("12 servers, 1 Gbit/s, 4 ms", "12 servers, 4 ms"),
            ("3 servers, 100 Mbit/s, 100 ms", "3 servers, 100 ms"),
            ("12 servers, 100 Mbit/s, 100 ms", "12 servers, 100 ms"),
        ),
        1,
        unit=" tokens/s",
    ),
    Chart(
        "guesses",
        "With guesses, 50 ms one way: times the tokens/s without them",
        "## Speculation",
        (
            ("50 ms|list copies, greedy", "copies of a list"),
            ("50 ms|code rename, prescribed", "a renaming in code"),
            ("50 ms|sampled at temperature 3", "nothing that can be guessed"),
            ("50 ms|story, by the model's own head", "a story, by the model's own head"),
        ),
        7,
        mark=1.0,
    ),
    Chart(
        "recovery",
        "A server is lost in mid-text: seconds until the text goes on, median",
        "## Chaos",
        (
            ("KILL", "killed"),
            ("two KILLs", "two killed"),
            ("TERM", "stopped politely"),
            ("STOP", "frozen"),
            ("out of memory", "out of memory"),
        ),
        7,
        unit=" s",
    ),
)


def tables(page: str, section: str) -> Iterator[list[str]]:
    """The rows of all tables below a heading, as cells without emphasis."""
    begin = page.index(f"{section}\n")
    end = re.search(r"^##", page[begin + 3 :], re.MULTILINE)
    text = page[begin : begin + 3 + end.start()] if end else page[begin:]
    for line in re.findall(r"^\| (.+) \|$", text, re.MULTILINE):
        yield [cell.strip(" *") for cell in line.split("|")]


def values(chart: Chart, page: str) -> list[tuple[str, float]]:
    """Label and value of each bar."""
    rows = list(tables(page, chart.section))
    found = []
    for beginning, label in chart.rows:
        wanted = beginning.split("|")
        row = next(row for row in rows if all(map(_is, row, wanted)))
        number = re.match(r"[\d.]+", row[chart.column].lstrip("*"))
        assert number, f"{chart.name}: {row}"
        found.append((label, float(number[0])))
    return found


def _is(cell: str, wanted: str) -> bool:
    return cell == wanted or cell.startswith(f"{wanted} (")


def drawn(chart: Chart, page: str) -> str:
    """The chart as SVG."""
    bars = values(chart, page)
    most = max(*(value for _, value in bars), chart.mark or 0)
    scale = (WIDTH - LABEL_WIDTH - VALUE_WIDTH) / most
    height = TOP + ROW * len(bars) + 8
    told = "; ".join(f"{label}: {value:g}{chart.unit}" for label, value in bars)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"',
        f'font-family="sans-serif" font-size="13" role="img"><title>{escape(f"{chart.title}. {told}")}</title>',
        f'<rect width="{WIDTH}" height="{height}" rx="10" fill="#fbfaf7"/>',
        f'<text x="16" y="27" font-size="14" font-weight="bold" fill="#1e1c18">{escape(chart.title)}</text>',
    ]
    for place, (label, value) in enumerate(bars):
        top = TOP + ROW * place
        end = LABEL_WIDTH + value * scale
        if chart.mark is not None and value <= chart.mark:
            end = LABEL_WIDTH + chart.mark * scale  # next to the line, not on it
        parts += [
            f'<text x="{LABEL_WIDTH - 10}" y="{top + 12}" text-anchor="end" fill="#635d52">{escape(label)}</text>',
            f'<rect x="{LABEL_WIDTH}" y="{top}" width="{value * scale:.1f}" height="{BAR}" rx="3" fill="#0d6a5b"/>',
            f'<text x="{end + 8:.1f}" y="{top + 12}" fill="#1e1c18">{value:g}{chart.unit}</text>',
        ]
    if chart.mark is not None:
        x = f"{LABEL_WIDTH + chart.mark * scale:.1f}"
        parts.append(f'<path d="M{x} {TOP - 6}V{height - 8}" stroke="#8a5a00" stroke-dasharray="3 3" fill="none"/>')
    return "\n".join([*parts, "</svg>\n"])


def path_of(chart: Chart) -> Path:
    """The path of a chart's file."""
    return ROOT / "docs" / "assets" / f"benchmark-{chart.name}.svg"


if __name__ == "__main__":
    for one in CHARTS:
        path_of(one).write_text(drawn(one, PAGE.read_text()), encoding="utf-8")
