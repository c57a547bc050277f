"""Pictures as files: panels of lines, and planes of points. Small PNGs on white, for a folder or a document.

A page draws lines as SVG (`charts`). Colour is never the only cue: lines and classes have their own styles and markers.
"""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray
from PIL import Image

from sparring.report.charts import COLOURS, INK, line_style, style

_DPI = 110
_SHADES = 96  # colours of a PNG
MARKERS = ("o", "^", "s", "D")
FILLS = (COLOURS[2], COLOURS[1], COLOURS[3], COLOURS[5])
Points = Sequence[Sequence[float]]  # pairs (x, y)
Corner = NDArray[np.float64]  # (x, y)


@dataclass(frozen=True)
class Lines:
    """One panel: name -> (x, y), and the standard deviation of y where there are several seeds."""

    title: str
    series: Mapping[str, tuple[Sequence[float], Sequence[float]]]
    spread: Mapping[str, Sequence[float]] = field(default_factory=dict)


def grid(
    panels: Sequence[Lines],
    *,
    xlabel: str,
    title: str,
    columns: int = 3,
    most: float | None = None,
    all_names: Iterable[str] = (),
) -> bytes:
    """The panels side by side with one legend, as PNG.

    Args:
        all_names: the series of all pictures that belong together: a series has the same style in each of them.
    """
    with style():
        rows = math.ceil(len(panels) / columns)
        wide = min(columns, len(panels))
        names = list(dict.fromkeys(name for panel in panels for name in panel.series))
        inches = 3.1 * wide + 0.2 if wide > 1 else 4.4
        columns_of_names = _legend_columns(names, inches)
        below = 0.2 * math.ceil(len(names) / columns_of_names)
        figure = Figure(figsize=(inches, 2.35 * rows + 0.55 + below), layout="constrained")
        axes = np.atleast_1d(figure.subplots(rows, wide, squeeze=False)).flatten()
        order = list(dict.fromkeys([*all_names, *names]))
        handles: dict[str, Any] = {}
        for place, panel in zip(axes, panels, strict=False):
            _plain(place, panel.title)
            for name, (x, y) in panel.series.items():
                (handles[name],) = place.plot(x, y, **_line(order.index(name), len(x)))
                if name in panel.spread:
                    low, high = np.subtract(y, panel.spread[name]), np.add(y, panel.spread[name])
                    place.fill_between(x, low, high, color=handles[name].get_color(), alpha=0.15, linewidth=0)
            place.set_xlabel(xlabel)
            place.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=xlabel in ("epoch", "tau")))
            bottom, top = place.get_ylim()
            if most is not None:
                place.set_ylim(max(bottom, -0.02 * most), min(top, 1.02 * most))
        for place in axes[len(panels) :]:
            place.set_visible(False)
        figure.legend(
            [handles[name] for name in names],
            names,
            loc="outside lower center",
            ncols=columns_of_names,
            frameon=False,
        )
        _heading(figure, title)
        return png(figure)


@dataclass(frozen=True)
class Plane:
    """One panel of points by class."""

    title: str
    points: Points
    labels: Sequence[int]
    behind: Points | None = None  # drawn faintly below the points
    probability: Sequence[Sequence[float]] | None = None  # of class 1 on a grid over the unit square; 0.5 is drawn


def planes(
    rows: Sequence[Sequence[Plane]],
    classes: Sequence[str],
    *,
    title: str,
    row_names: Sequence[str] = (),
    size: float = 2.2,
) -> bytes:
    """Rows of planes as PNG. The planes of a row share their axes; points `outside` them are drawn at the edge."""
    with style():
        wide = max(len(row) for row in rows)
        figure = Figure(figsize=(size * wide + 0.3, (size + 0.2) * len(rows) + 0.6), layout="constrained")
        axes = figure.subplots(len(rows), wide, squeeze=False)
        for number, row in enumerate(rows):
            low, high = _limits(row)
            for place, plane in zip(axes[number], row, strict=False):
                _plane(place, plane, len(classes), low, high)
                place.set_xlim(low[0], high[0])
                place.set_ylim(low[1], high[1])
            if row_names:
                axes[number][0].set_ylabel(row_names[number], fontweight="bold")
        marks = [
            axes[0][0].plot([], [], marker=MARKERS[i], color=FILLS[i], linestyle="none")[0] for i in range(len(classes))
        ]
        figure.legend(marks, classes, loc="outside lower center", ncols=len(classes), frameon=False)
        _heading(figure, title)
        return png(figure)


def losses(sets: Mapping[str, Points], *, title: str, names: Mapping[str, str], stacked: bool = False) -> bytes:
    """Loss against margin as PNG: one panel per set, the 0/1 loss as a step, the mean as a dotted line."""
    with style():
        size = (3.4, 2.5 * len(sets) + 0.4) if stacked else (3.0 * len(sets) + 0.2, 2.9)
        figure = Figure(figsize=size, layout="constrained")
        shape = (len(sets), 1) if stacked else (1, len(sets))
        axes = figure.subplots(*shape, sharex=True, sharey=True, squeeze=False).flatten()
        everything = np.concatenate([np.asarray(points, dtype=float) for points in sets.values()])
        (left, _), (right, top) = everything.min(axis=0), everything.max(axis=0)
        room = 0.02 * (right - left)
        left, right = min(left, 0.0) - room, max(right, 0.0) + room
        for place, (name, points) in zip(axes, sets.items(), strict=True):
            margin, loss = np.asarray(points, dtype=float).T
            _plain(place, f"{names[name]}\nmean {loss.mean():.2f} bits, {np.mean(margin <= 0):.0%} wrong")
            for wrong in (False, True):
                here = (margin <= 0) == wrong
                place.plot(
                    margin[here], loss[here], MARKERS[wrong], color=FILLS[wrong], markersize=3, alpha=0.5, linewidth=0
                )
            place.plot([left, 0, 0, right], [1, 1, 0, 0], color=INK, linewidth=1.2)
            place.axhline(loss.mean(), color=INK, linestyle=":", linewidth=1.2)
            place.set_xlim(left, right)
            place.set_ylim(-0.03 * max(top, 1.0), 1.04 * max(top, 1.0))
        for place in axes[-1:] if stacked else axes:
            place.set_xlabel("margin of the true class (logits)")
        for place in axes if stacked else axes[:1]:
            place.set_ylabel("loss (bits)")
        _heading(figure, title)
        return png(figure)


def _legend_columns(names: Sequence[str], inches: float) -> int:
    """How many names of a legend fit side by side; the line and the gap take about 0.75 inch per name."""
    return max(1, min(len(names), 5, int(inches / (0.75 + 0.08 * max(map(len, names))))))


def _heading(figure: Figure, title: str) -> None:
    """Print the title, wrapped to the figure's width."""
    lines = textwrap.fill(title, int(12 * figure.get_figwidth()))
    figure.suptitle(lines, fontsize=10, fontweight="bold", x=0.01, ha="left")


def png(figure: Figure) -> bytes:
    """A figure as a small PNG on white."""
    raw, small = io.BytesIO(), io.BytesIO()
    figure.savefig(raw, format="png", dpi=_DPI, facecolor="white")
    Image.open(raw).convert("RGB").quantize(_SHADES, kmeans=2, dither=Image.Dither.NONE).save(
        small, format="PNG", optimize=True
    )
    return small.getvalue()


def _line(index: int, count: int) -> dict[str, Any]:
    return {**line_style(index), "markevery": max(1, round(count / 8)), "linewidth": 1.5}


def _plain(axes: Axes, title: str) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.grid(axis="y", color=INK, alpha=0.15, linewidth=0.8)
    axes.set_title(title, fontsize=9, loc="left")


def _limits(row: Sequence[Plane]) -> tuple[Corner, Corner]:
    """The corners of a row's axes: the unit square if there are probabilities, otherwise around its points.

    A few outliers must not squeeze all other points into a corner: an axis reaches a tenth of the width of the middle
    98 % beyond it, or less where the points end sooner.
    """
    if any(plane.probability is not None for plane in row):
        return np.zeros(2), np.ones(2)
    points = np.concatenate([np.asarray(plane.points, dtype=float) for plane in row])
    low, high = np.percentile(points, (1, 99), axis=0)
    room = np.where(high > low, 0.1 * (high - low), np.inf)  # nearly all points coincide: show all of them
    some = 0.05 * np.ptp(points, axis=0) + 1e-9
    return np.maximum(low - room, points.min(axis=0) - some), np.minimum(high + room, points.max(axis=0) + some)


def outside(rows: Sequence[Sequence[Plane]]) -> int:
    """The number of points beyond their row's axes."""
    return sum(
        int(((points < low) | (points > high)).any(axis=1).sum())
        for row in rows
        for low, high in [_limits(row)]
        for points in (np.asarray(plane.points, dtype=float) for plane in row)
    )


def _plane(axes: Axes, plane: Plane, classes: int, low: Corner, high: Corner) -> None:
    axes.set_title(plane.title, fontsize=8.5, loc="left")
    axes.set_xticks([])
    axes.set_yticks([])
    if plane.probability is not None:
        axis = np.linspace(0, 1, len(plane.probability))
        axes.contour(axis, axis, np.asarray(plane.probability), levels=[0.5], colors=INK, linewidths=1.2)
    points, labels = np.clip(plane.points, low, high), np.asarray(plane.labels)
    behind = None if plane.behind is None else np.clip(plane.behind, low, high)
    for label in range(classes):
        here = labels == label
        if behind is not None:
            axes.plot(
                *behind[here].T, MARKERS[label], color=FILLS[label], markersize=3.2, alpha=0.22, markeredgewidth=0,
                clip_on=False,
            )  # fmt: skip
        axes.plot(
            *points[here].T, MARKERS[label], color=FILLS[label], markersize=3.4, markeredgecolor="white",
            markeredgewidth=0.3, clip_on=False, zorder=3,
        )  # fmt: skip
