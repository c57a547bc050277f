"""Named points in a plane as PNG: accuracy against accuracy, and the area of a point is a cost.

Ours stand out by colour and bold names; others are grey.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox

from sparring.report.charts import COLOURS, INK, style
from sparring.report.panels import png

_OURS, _THEIRS = COLOURS[2], "#9ca3af"
_AREA = 0.1  # square points per second
_SIZES = {"5 min": 300.0, "30 min": 1800.0, "2 h": 7200.0}  # in the legend
_DIRECTIONS = (0, 90, 180, 270, 45, 135, 225, 315)  # degrees, tried in this order for a name
_DISTANCES = (3.0, 9.0, 16.0, 25.0, 36.0, 48.0)  # points between the edges of a point and of its name


@dataclass(frozen=True)
class Dot:
    """One method."""

    name: str
    x: float
    y: float
    seconds: float
    ours: bool = False
    filled: bool = True  # others of ours are rings


def scatter(dots: Sequence[Dot], *, xlabel: str, ylabel: str, title: str, legend: Sequence[str] = ()) -> bytes:
    """The points with their names, as PNG; up and to the right is better.

    Args:
        legend: what a filled point, a ring and a grey point stand for.
    """
    with style():
        figure = Figure(figsize=(7.6, 5.6))
        FigureCanvasAgg(figure)  # names are placed by their printed size
        axes = figure.add_axes((0.075, 0.18, 0.9, 0.71))
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        axes.grid(color=INK, alpha=0.12, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.set_xlabel(f"{xlabel} →")
        figure.text(0.01, 0.96, title, fontsize=10, fontweight="bold")
        figure.text(0.01, 0.915, f"{ylabel} ↑")
        for dot in sorted(dots, key=lambda dot: -dot.seconds):  # small points stay visible
            axes.scatter(dot.x, dot.y, s=_AREA * dot.seconds, zorder=4 if dot.ours else 3, **_look(dot))
        radius = 1.05 * max(
            (math.sqrt(_AREA * dot.seconds) / 2 for dot in dots), default=0.0
        )  # in points, and some air
        width, height = (72 * side for side in axes.get_position().size * figure.get_size_inches())
        axes.margins(x=max(0.07, radius / (width - 2 * radius)), y=max(0.07, radius / (height - 2 * radius)))
        _legends(axes, legend)
        _name(figure, axes, sorted(dots, key=lambda dot: not dot.ours))
        return png(figure)


def _look(dot: Dot) -> dict[str, Any]:
    if not dot.ours:
        return {"color": _THEIRS, "alpha": 0.55, "linewidth": 0}
    return {"facecolor": _OURS if dot.filled else "white", "edgecolor": _OURS, "linewidth": 1.6}


def _legends(axes: Axes, names: Sequence[str]) -> None:
    """What the points stand for, and what their areas mean."""
    looks: list[dict[str, Any]] = [
        {"color": _OURS, "markeredgecolor": _OURS},
        {"color": "white", "markeredgecolor": _OURS, "markeredgewidth": 1.6},
        {"color": _THEIRS, "markeredgecolor": _THEIRS, "alpha": 0.6},
    ]
    marks = [axes.plot([], [], "o", markersize=7, **look)[0] for look in looks[: len(names)]]
    below: dict[str, Any] = {"ncols": 3, "frameon": False, "fontsize": 8.5}
    first = axes.legend(marks, names, loc="upper left", bbox_to_anchor=(-0.02, -0.12), handletextpad=0.1, **below)
    axes.add_artist(first)
    sizes = [
        axes.plot([], [], "o", color="none", markeredgecolor=INK, markersize=math.sqrt(_AREA * seconds))[0]
        for seconds in _SIZES.values()
    ]
    lengths = [f"{name} of training" if name == list(_SIZES)[-1] else name for name in _SIZES]
    axes.legend(
        sizes, lengths, loc="upper right", bbox_to_anchor=(1.02, -0.1), handlelength=3.0, columnspacing=0.8, **below
    )


def _name(figure: Figure, axes: Axes, dots: Sequence[Dot]) -> None:
    """Print every name beside its point, where it covers neither a point nor another name; far ones get a line."""
    figure.canvas.draw()
    scale = figure.dpi / 72
    centres = {dot.name: _pixels(axes, dot) for dot in dots}
    radii = {dot.name: math.sqrt(_AREA * dot.seconds) / 2 * scale for dot in dots}
    renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    taken = [
        Bbox.from_bounds(x - radii[name], y - radii[name], 2 * radii[name], 2 * radii[name])
        for name, (x, y) in centres.items()
    ]
    inside = axes.get_window_extent()
    for dot in dots:
        look: dict[str, Any] = {
            "color": _OURS if dot.ours else "#6b7280",
            "fontweight": "bold" if dot.ours else "normal",
        }
        text = axes.text(dot.x, dot.y, dot.name, fontsize=8.5 if dot.ours else 7.5, zorder=5, **look)
        box = text.get_window_extent(renderer)
        place, far = _place(box.width, box.height, centres[dot.name], radii[dot.name], taken, inside, scale)
        x, y = axes.transData.inverted().transform((place.x0, place.y0))
        text.set_position((x, y))
        text.set_verticalalignment("bottom")
        taken.append(place)
        if far:
            here = centres[dot.name]
            nearest = (min(max(here[0], place.x0), place.x1), min(max(here[1], place.y0), place.y1))
            ends = axes.transData.inverted().transform([here, nearest])
            axes.plot(*ends.T, color=look["color"], linewidth=0.6, zorder=2)


def _pixels(axes: Axes, dot: Dot) -> tuple[float, float]:
    """The centre of a point on the canvas."""
    x, y = axes.transData.transform((dot.x, dot.y))
    return float(x), float(y)


def _place(
    width: float,
    height: float,
    centre: tuple[float, float],
    radius: float,
    taken: Sequence[Bbox],
    inside: Bbox,
    scale: float,
) -> tuple[Bbox, bool]:
    """The nearest free place for a name, and whether it is far from its point; the one with least overlap if none."""
    best, least = (Bbox.from_bounds(centre[0], centre[1], width, height), False), math.inf
    for distance, degrees in itertools.product(_DISTANCES, _DIRECTIONS):
        dx, dy = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
        reach = radius + distance * scale
        x = centre[0] + dx * (reach + width / 2) - width / 2
        y = centre[1] + dy * (reach + height / 2) - height / 2
        box = Bbox.from_bounds(x, y, width, height)
        if box.x0 < inside.x0 or box.x1 > inside.x1 or box.y0 < inside.y0 or box.y1 > inside.y1:
            continue
        overlaps = [Bbox.intersection(box, other) for other in taken]
        covered = sum(one.width * one.height for one in overlaps if one is not None)
        if covered < least:
            best, least = (box, distance > _DISTANCES[1]), covered
        if covered == 0:
            break
    return best
