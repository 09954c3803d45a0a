"""Charts of results, one per benchmark, next to their JSON.

matplotlib draws them; `make bench` installs it. Without it, a line says that there is no chart.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from common import RESULTS

Points = tuple[Sequence[Any], Sequence[float]]


def lines(name: str, title: str, x_label: str, series: Mapping[str, Points], *, markers: bool = True) -> None:
    """Write results/NAME.svg with a line per series of (xs, ys)."""
    axes = _axes(title)
    if axes is None:
        return
    for label, (xs, ys) in series.items():
        axes.plot(xs, ys, label=label, marker="o" if markers else None)
    axes.set_xlabel(x_label)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    _save(axes, name)


def bars(name: str, title: str, values: Mapping[str, float], marks: Mapping[str, float] | None = None) -> None:
    """Write results/NAME.svg with a bar per value, and a red line across it at its mark (the best possible value), if
    any."""
    axes = _axes(title, height=1.2 + 0.3 * len(values))
    if axes is None:
        return
    drawn = axes.barh(list(values), list(values.values()), color="#4878a8")
    axes.bar_label(drawn, fmt="%.3g", padding=4)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    places = list(values)
    for label, value in (marks or {}).items():
        place = places.index(label)
        axes.plot([value, value], [place - 0.4, place + 0.4], color="#c03030", linewidth=2)
    _save(axes, name)


def _axes(title: str, *, height: float = 4.0) -> Any:
    """matplotlib's axes; None without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        print("no picture: matplotlib isn't installed, `make bench` would install it")
        return None
    axes = Figure(figsize=(8, height), layout="constrained").add_subplot()
    axes.set_title(title, loc="left", fontsize=11)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return axes


def _save(axes: Any, name: str) -> None:
    RESULTS.mkdir(exist_ok=True)
    axes.figure.savefig(RESULTS / f"{name}.svg")
