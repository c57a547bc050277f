"""Figures as inline SVG: curves by epoch and the trade-off plot.

Drawn with matplotlib's objects (no pyplot, so no figure stays open), text as paths, transparent background. Colours are
the page's: ink becomes `currentColor` and the series `var(--series-N)`, so one drawing serves light, dark and print.
Colour is never the only cue: every series has its own line style and marker, its band has edges in the same style, and
its name is printed at its end.
"""

from __future__ import annotations

import html
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from sparring.report.labels import shorten

Series = Mapping[str, tuple[Sequence[float], Sequence[float]]]  # name -> (x, y)

INK = "#123456"  # replaced by currentColor
COLOURS = ("#6b7280", "#b45309", "#0f766e", "#6d28d9", "#be123c", "#1d4ed8")  # the page's --series-1 ... in light mode
_DASHES = (":", "--", "-", "-.", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 1)))
_MARKERS = ("o", "s", "^", "D", "v", "P")
_SIZE = (4.6, 2.9)  # inches: 442 px, so that 9-pt text stays readable on a phone
_LEFT = 0.08  # fraction of the width: room for "12.5" beside the axis
_ABOVE = 16  # longest name that is printed above its point, in letters
_TICKS = 30  # letters of all ticks together that fit below the axis
_GAP = 0.085  # fraction of the axes' height: the least distance between two names


def curves(
    series: Series,
    *,
    name: str,
    title: str,
    alt: str,
    spread: Mapping[str, Sequence[float]] | None = None,
    most: float | None = None,
    xlabel: str = "epoch",
    all_names: Iterable[str] = (),
    ticks: Sequence[str] = (),
) -> str:
    """Lines over x (epochs unless `xlabel` says otherwise), each with its name at its end, as one <svg> element.

    Args:
        name: prefix of the drawing's ids, unique on its page.
        all_names: the series of all drawings that belong together: a series has the same style in each of them.
        spread: the standard deviation of y over seeds, drawn as a band.
        most: the largest possible value (100 for per cent); without it the axis starts at 0.
        ticks: names for x = 0, 1, ...: classes, for example. Long ones are printed at a slant.
    """
    with style():
        figure = Figure(figsize=_SIZE)
        axes = _axes(figure, right=_room(series), title=title, xlabel=xlabel)
        ends, styles = {}, _styles(series, all_names)
        for label, (x, y) in series.items():
            line = styles[label]
            axes.plot(x, y, markevery=1 if ticks else _sparse(len(x)), clip_on=False, **line)
            if spread and label in spread:
                _band(axes, x, y, spread[label], line)
            if len(x):
                ends[label] = (x[-1], y[-1], line["color"])
        bottom, top = axes.get_ylim()
        if most is None:
            axes.set_ylim(-0.02 * top, top)
        else:
            axes.set_ylim(max(bottom, -0.02 * most), min(top, 1.02 * most))
        if ticks:
            slant: dict[str, Any] = {"rotation": 40, "ha": "right"} if sum(map(len, ticks)) > _TICKS else {}
            axes.set_xticks(range(len(ticks)), list(shorten(ticks).values()), fontsize=7.5, **slant)
            if slant:
                left, _, wide, _ = axes.get_position().bounds
                axes.set_position((left, 0.21, wide, 0.66))
                axes.set_xlabel("")
        else:
            axes.xaxis.set_major_locator(MaxNLocator(integer=xlabel in ("epoch", "tau"), nbins=6))
        left, right = axes.get_xlim()
        early = {label: styles[label] for label, (x, _, _) in ends.items() if x < right - 0.1 * (right - left)}
        _name_ends(axes, ends, early)
        return _svg(figure, name, alt)


def _band(axes: Axes, x: Sequence[float], y: Sequence[float], spread: Sequence[float], line: Mapping[str, Any]) -> None:
    """Draw y ± spread as a tint that lets other lines show through, with thin edges in the line's own style."""
    low, high = np.subtract(y, spread), np.add(y, spread)
    axes.fill_between(x, low, high, color=line["color"], alpha=0.16, linewidth=0)
    if len(x) == 1:  # a band has no width here: draw a bar
        axes.vlines(x, low, high, color=line["color"], linewidth=0.7, alpha=0.8)
    for edge in (low, high):
        axes.plot(x, edge, color=line["color"], linestyle=line["linestyle"], linewidth=0.7, alpha=0.8)


def tradeoff(
    points: Mapping[str, tuple[float, float]],
    *,
    name: str,
    xlabel: str,
    ylabel: str,
    alt: str,
    all_names: Iterable[str] = (),
) -> str:
    """One named point per method, as one <svg> element; up and to the right is better. `all_names` as in `curves`."""
    with style():
        figure = Figure(figsize=_SIZE)
        # Names are printed above the points, or beside the axes where they would overlap or leave the drawing.
        crowded = _crowded(list(points.values())) or any(len(label) > _ABOVE for label in points)
        axes = _axes(figure, right=_room(points) if crowded else 0.95, title=ylabel, xlabel=xlabel)
        axes.margins(*((0.1, 0.1) if crowded else (0.22, 0.16)))
        ends, styles = {}, _styles(points, all_names)
        for label, (x, y) in points.items():
            dot = styles[label]
            axes.plot([x], [y], **(dot | {"linestyle": "none", "markersize": 7 if crowded else 8}))
            ends[label] = (x, y, dot["color"])
        if crowded:
            _name_ends(axes, ends)
        else:
            shown = shorten(list(ends))
            for label, (x, y, colour) in ends.items():
                axes.annotate(
                    shown[label],
                    (x, y),
                    xytext=(0, 8),
                    textcoords="offset points",
                    ha="center",
                    va="bottom",
                    color=colour,
                    fontweight="bold",
                )
        # In the title's line: inside the axes it could cover a point.
        figure.text(0.95, 0.935, "better ↗", ha="right", color=INK, alpha=0.75)
        return _svg(figure, name, alt)


def _crowded(points: Sequence[tuple[float, float]]) -> bool:
    """Whether names above the points would overlap: two points are close in both directions."""
    wide = max(x for x, _ in points) - min(x for x, _ in points) or 1.0
    high = max(y for _, y in points) - min(y for _, y in points) or 1.0
    pairs = [(one, other) for i, one in enumerate(points) for other in points[:i]]
    return any(abs(a[0] - b[0]) < 0.3 * wide and abs(a[1] - b[1]) < 0.18 * high for a, b in pairs)


def _room(names: Iterable[str]) -> float:
    """Right end of the axes, as a fraction of the width, that leaves room for the longest name."""
    longest = max(map(len, shorten(list(names)).values()))
    return max(0.5, min(0.77, 0.955 - 0.0185 * longest))  # 0.0185: width of a bold letter


def style() -> AbstractContextManager[None]:
    """Context in which matplotlib has its default settings, whatever the user's own are."""
    return matplotlib.rc_context(
        {
            **{key: matplotlib.rcParamsDefault[key] for key in matplotlib.rcParamsDefault if "backend" not in key},
            "svg.fonttype": "path",
            "svg.hashsalt": "sparring",  # equal drawings have equal bytes
            "text.parse_math": False,  # a name may contain a dollar sign
            "font.size": 9,
            "text.color": INK,
            "axes.edgecolor": INK,
            "xtick.color": INK,
            "ytick.color": INK,
        }
    )


def _axes(figure: Figure, *, right: float, title: str, xlabel: str) -> Axes:
    """Thin axes with a faint grid; the y axis is named above it, horizontally."""
    axes = figure.add_axes((_LEFT, 0.15, right - _LEFT, 0.72))
    axes.patch.set_visible(False)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.grid(axis="y", color=INK, alpha=0.15, linewidth=0.8)
    axes.tick_params(length=0, pad=5)
    axes.set_axisbelow(True)
    axes.set_xlabel(xlabel, color=INK)
    axes.margins(x=0.03)
    figure.text(0.0, 0.935, title, fontsize=9.5, fontweight="bold")
    return axes


def line_style(index: int) -> dict[str, Any]:
    """Line style, marker and colour of the n-th series; the first thirty all differ."""
    return {
        "color": COLOURS[index % len(COLOURS)],
        "linestyle": _DASHES[index % len(_DASHES)],
        "marker": _MARKERS[(index + index // len(COLOURS)) % len(_MARKERS)],
        "linewidth": 1.8,
        "markersize": 4.5,
    }


def _styles(names: Iterable[str], all_names: Iterable[str]) -> dict[str, dict[str, Any]]:
    return {name: line_style(index) for index, name in enumerate(dict.fromkeys([*all_names, *names]))}


def _sparse(count: int) -> int:
    """The stride that puts markers on about six points of a line."""
    return max(1, round(count / 6))


def _name_ends(
    axes: Axes, ends: Mapping[str, tuple[float, float, str]], early: Mapping[str, Mapping[str, Any]] | None = None
) -> None:
    """Print every line's name beside its end, pushed apart where names would touch.

    Args:
        early: the styles of lines that end far from the names. A leader line that long could be taken for data, so a
            marker beside the name identifies the line instead.
    """
    bottom, top = axes.get_ylim()
    heights = _spread({label: (y - bottom) / (top - bottom) for label, (_, y, _) in ends.items()})
    shown = shorten(list(ends))
    for label, (x, y, colour) in ends.items():
        marked = label in (early or {})
        if early and marked:
            at = ([1.035], [heights[label]])
            axes.plot(*at, transform=axes.transAxes, clip_on=False, **{**early[label], "linestyle": "none"})
        axes.annotate(
            shown[label],
            (x, y),
            xytext=(1.055, heights[label]),
            textcoords="axes fraction",
            va="center",
            color=colour,
            fontweight="bold",
            annotation_clip=False,
            arrowprops=None
            if marked
            else {
                "arrowstyle": "-",
                "color": colour,
                "linewidth": 0.7,
                "shrinkA": 1,
                "shrinkB": 3,
                "relpos": (0, 0.5),
            },
        )


def _spread(heights: Mapping[str, float]) -> dict[str, float]:
    """Heights in [0, 1] at least `_GAP` apart and in the same order, by one sweep up and one down."""
    order = sorted(heights, key=lambda label: heights[label])
    placed = [heights[label] for label in order]
    for i in range(1, len(placed)):
        placed[i] = max(placed[i], placed[i - 1] + _GAP)
    ceiling = 1.0
    for i in reversed(range(len(placed))):
        placed[i] = min(placed[i], ceiling)
        ceiling = placed[i] - _GAP
    return dict(zip(order, placed, strict=True))


def _svg(figure: Figure, name: str, alt: str) -> str:
    """The <svg> element alone, in the page's colours, with prefixed ids and no external reference."""
    text = io.StringIO()
    figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r'xlink:href="#', f'href="#{name}-', svg).replace("url(#", f"url(#{name}-")
    svg = svg.replace(INK, "currentColor")
    for number, colour in enumerate(COLOURS, 1):
        svg = svg.replace(colour, f"var(--series-{number}, {colour})")
    box = re.search(r'viewBox="[^"]*"', svg)
    assert box is not None
    label = html.escape(alt, quote=True)
    head = f'<svg role="img" aria-label="{label}" {box[0]} stroke-linejoin="round" stroke-linecap="butt">'
    return head + re.sub(r"\n\s*", "\n", svg[svg.index(">") + 1 :]).strip()
