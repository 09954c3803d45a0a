"""Pictures of results, one per benchmark, beside their JSON. Drawn by matplotlib, which `make bench` installs."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common import RESULTS

Points = tuple[Sequence[Any], Sequence[float]]


def lines(name: str, title: str, x_label: str, series: Mapping[str, Points], *, markers: bool = True) -> Path:
    """results/NAME.svg: a line per series of (xs, ys)."""
    figure, axes = _figure(title)
    for label, (xs, ys) in series.items():
        axes.plot(xs, ys, label=label, marker="o" if markers else None)
    axes.set_xlabel(x_label)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    return _saved(figure, name)


def bars(name: str, title: str, values: Mapping[str, float], marks: Mapping[str, float] | None = None) -> Path:
    """results/NAME.svg: a bar per value, and a red line across it where `marks` has one (what is possible at best)."""
    figure, axes = _figure(title, height=1.2 + 0.3 * len(values))
    drawn = axes.barh(list(values), list(values.values()), color="#4878a8")
    axes.bar_label(drawn, fmt="%.3g", padding=4)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    places = list(values)
    for label, value in (marks or {}).items():
        place = places.index(label)
        axes.plot([value, value], [place - 0.4, place + 0.4], color="#c03030", linewidth=2)
    return _saved(figure, name)


def _figure(title: str, *, height: float = 4.0) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, height), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, loc="left", fontsize=11)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure, axes


def _saved(figure: Any, name: str) -> Path:
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.svg"
    figure.savefig(path)
    return path
