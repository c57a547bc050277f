"""One self-contained HTML page: what came out, why, how it went, how it was made.

The page asks the network for nothing and runs no script (its own Content-Security-Policy forbids both); it serves
desktop, phone, dark and print, and nothing on it is said by colour alone. Every sentence about the data is made from
the data. This module writes what it is given: it measures nothing.
"""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from markupsafe import Markup, escape
from numpy.typing import NDArray
from PIL import Image

from sparring._version import __version__
from sparring.report import charts
from sparring.report.attack_path import AttackPath
from sparring.report.comparison import Line, best, spell
from sparring.schedules import pixels
from sparring.training.checkpoint import write_text

_LEAST_PIXELS = 96  # smaller images are enlarged, every pixel a square
_MANY = 9  # columns of numbers: with more a row is set as a grid, as on a phone
_COLUMNS = {  # what the usual columns mean, for a reader who is new to them
    "Natural": "the test images as they are",
    "FGSM": "after one large step against the model",
    "PGD-20": "after twenty small steps, each where the loss rises fastest",
    "C&W": "the same with a loss that aims at the margin between two classes",
    "AutoAttack": "four strong attacks one after the other",
}


@dataclass(frozen=True)
class Method:
    """One row of the table and one line of each figure."""

    name: str
    about: str
    accuracies: Mapping[str, float]  # fractions, on test data: "Natural", "FGSM", "PGD-20", ...
    backprops: float  # mean backward passes per training image
    seconds: float
    history: Sequence[Mapping[str, Any]]  # the records of metrics.jsonl; may be empty
    measured: str = ""  # how the accuracies were: eps, images, protocol; numbers are compared where it is the same
    doubts: Sequence[str] = ()  # reasons not to believe them
    task: str = ""  # data, network, length: costs are compared where it is the same
    held_out: int = 0  # validation images behind the history; 0: not told
    images: str = ""  # the data set; courses are drawn together where it is the same
    validated_at: str = ""  # the radius of the history's PGD-10; so here too


@dataclass(frozen=True)
class _Cell:
    """A number as it is printed."""

    column: str
    text: str  # empty: not measured
    best: bool
    share: float | None = None  # of the bar beneath it


@dataclass(frozen=True)
class Drawing:
    """A figure and what to see in it."""

    svg: Markup  # our own drawing: names are paths in it, or escaped
    caption: str
    heading: str = ""  # of the group that begins with it


@dataclass(frozen=True)
class Picture:
    """A drawing that is too rich for lines: PNG."""

    png: bytes
    alt: str
    caption: str
    narrow: bytes = b""  # the same with its panels one below the other, for a phone


@dataclass(frozen=True)
class Exhibit:
    """A table or a figure of a paper, with our numbers beside its own."""

    name: str  # short, for addresses within the page
    where: str  # in the paper
    title: str
    see: str  # what to look for
    seen: Sequence[str] = ()  # what came of it here, a sentence or two each
    columns: Sequence[str] = ()
    lines: Sequence[Line] = ()
    drawings: Sequence[Drawing] = ()
    pictures: Sequence[Picture] = ()
    notes: Sequence[str] = ()


def write_page(
    path: Path,
    *,
    title: str,
    lead: str,
    methods: Sequence[Method] = (),
    exhibits: Sequence[Exhibit] = (),
    walks: Sequence[AttackPath] = (),
    walked: str = "",
    facts: Mapping[str, str],
    note: str = "",
) -> None:
    """Write the page, whole or not at all.

    Args:
        lead: one sentence: what the page shows.
        exhibits: tables and figures of a paper beside ours, a section each.
        walks: from `report.walk`; the strip is left out without them.
        walked: whose model they are walked on, or why there are none: a sentence.
        facts: how it was made: images, hardware, command, seed, versions. "Command" is set as code.
        note: stands below the table of methods, for instance the spread over seeds.
    """
    columns = _columns(methods)
    parts = tables(methods)
    page = _templates().get_template("page.html")
    text = page.render(
        title=title,
        lead=lead,
        columns=columns,
        meanings={name: _COLUMNS[name] for name in columns if name in _COLUMNS},
        tables=[(_columns(part), list(zip(part, table(part), strict=True))) for part in parts],
        stars=any(cell.best for part in parts for row in table(part) for cell in row),
        methods=methods,
        note=note,
        exhibits=exhibits,
        walks=walks,
        walked=walked,
        drawings=drawings(methods),
        facts=facts,
        version=__version__,
    )
    write_text(path, text)


def tables(methods: Sequence[Method]) -> list[list[Method]]:
    """The methods table by table: those measured alike, to be compared down a column.

    One table for all where no two are and it is not too wide.
    """
    alike: dict[str, list[Method]] = {}
    for method in methods:
        alike.setdefault(method.measured, []).append(method)
    if len(alike) == len(methods) > 0 and len(_columns(methods)) + 2 <= _MANY:
        return [list(methods)]
    return list(alike.values())


def table(methods: Sequence[Method]) -> list[list[_Cell]]:
    """The methods' rows: accuracies in per cent, mean BPs, seconds; the best of each column marked.

    Best is the highest accuracy among those measured alike and, among the methods that train for the same task against
    an attack, the fewest BPs: training against none is always the cheapest. Seconds depend on what else the machine
    did: none is best. Numbers that print alike are equally good.
    """
    rows: list[list[_Cell]] = [[] for _ in methods]
    for name in _columns(methods):
        winners = {
            how: _winner([one.accuracies[name] for one in methods if one.measured == how and name in one.accuracies])
            for how in {method.measured for method in methods}
        }
        for row, method in zip(rows, methods, strict=True):
            value = method.accuracies.get(name)
            text = "" if value is None else percent(value)
            row.append(_Cell(name, text, best=bool(text) and text == winners[method.measured], share=value))
    fighting = [method for method in methods if method.backprops > 0]
    fewest = {
        task: _winner(
            list({one.name: -one.backprops for one in fighting if one.task == task}.values()),
            lambda value: brief(-value),
        )
        for task in {one.task for one in fighting}
    }
    for row, method in zip(rows, methods, strict=True):
        text = brief(method.backprops)
        row.append(_Cell("Mean BPs", text, best=method in fighting and text == fewest[method.task]))
        row.append(_Cell("Seconds", brief(method.seconds), best=False))
    return rows


def drawings(methods: Sequence[Method]) -> list[Drawing]:
    """The figures for which there are numbers: natural and PGD-10 accuracy and BPs by epoch, and the trade-off."""
    backprops = _series(methods, "backprops", 1.0)
    how, points = _tradeoff_points(methods)
    found = []
    names = [method.name for method in methods]
    for number, (of, group) in enumerate(_alike(methods, lambda method: method.images).items()):
        if natural := _series(group, "natural", 100.0):
            told = (
                f"{of}Images as they are{_held_out(group)}: how soon each method gets there, and where it ends. "
                f"Last epoch: {_last(natural, '{:.1f} %')}."
            )
            what = "Natural accuracy on validation images (%)"
            found.append(_curves(natural, f"natural{number or ''}", what, told, names, of))
    every = _alike(methods, lambda method: ", ".join(filter(None, [method.images, method.validated_at])))
    for number, (of, group) in enumerate(every.items()):
        if robust := _series(group, "pgd10", 100.0):
            at = f", {group[0].validated_at}" if group[0].validated_at and not of else ""
            told = (
                f"{of}The same images attacked{at}. A line along the floor is a model "
                f"without a defence. Last epoch: {_last(robust, '{:.1f} %')}."
            )
            what = "Accuracy under PGD-10 on validation images (%)"
            found.append(_curves(robust, f"pgd10{number or ''}", what, told, names, of))
    if backprops:
        what = "Backward passes per training image"
        last = _last(backprops, "{:.1f}")
        told = (
            "What the attack costs. A flat line takes all its steps on every image; one below it stops early, and "
            f"where it rises the model has become harder to fool. Last epoch: {last}."
        )
        found.append(_curves(backprops, "backprops", what, told, names, most=None))
    if len(points) > 1:
        what = "Accuracy under PGD-20 on test images (%)"
        each = "; ".join(f"{name} {x:.1f} and {y:.1f}" for name, (x, y) in points.items())
        svg = charts.tradeoff(
            points, name="tradeoff", xlabel="natural accuracy (%)", ylabel=what, alt=f"{what} against natural: {each}."
        )
        told = "The trade-off: right is better on images as they are, up is better under attack. Look for the corner."
        told += f" Measured with {how}." if how else ""
        found.append(Drawing(Markup(svg), told))
    return found


def _alike(methods: Sequence[Method], key: Callable[[Method], str]) -> dict[str, list[Method]]:
    """The methods whose courses may be drawn together, by what they share, as 'digits: '; '' where all share it."""
    groups: dict[str, list[Method]] = {}
    for method in methods:
        groups.setdefault(key(method), []).append(method)
    if len(groups) < 2:
        return {"": list(methods)}
    return {f"{what}: " if what else "": group for what, group in groups.items()}


def _held_out(methods: Sequence[Method]) -> str:
    """' (n = 120)', with every number where the methods' differ."""
    counts = sorted({method.held_out for method in methods if method.held_out})
    return f" (n = {' or '.join(f'{count:,}' for count in counts)})" if counts else ""


def _tradeoff_points(methods: Sequence[Method]) -> tuple[str, dict[str, tuple[float, float]]]:
    """Natural and PGD-20 accuracy in per cent of the methods measured alike; how, where most are."""
    alike: dict[str, dict[str, tuple[float, float]]] = {}
    for method in methods:
        if {"Natural", "PGD-20"} <= method.accuracies.keys():
            point = (100 * method.accuracies["Natural"], 100 * method.accuracies["PGD-20"])
            alike.setdefault(method.measured, {})[method.name] = point
    return max(alike.items(), key=lambda one: len(one[1])) if alike else ("", {})


def percent(fraction: float) -> str:
    """'98.2' for 0.98222."""
    return f"{100 * fraction:.1f}"


def brief(value: float) -> str:
    """One decimal below a hundred, none above."""
    return f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def chance(probability: float) -> str:
    """A probability in whole per cent, without claiming 0 or 100."""
    if probability < 0.01:
        return "<1\u00a0%"
    return f"{100 * probability:.0f}\u00a0%" if probability <= 0.99 else ">99\u00a0%"


def unbroken(text: str) -> Markup:
    """A number and its per cent sign stay on one line, and so does an attack's name (PGD-20-0); `this` is code."""
    kept = str(escape(text.replace(" %", "\u00a0%")))
    whole = re.sub(r"PGD-\d+(-\d+)?", r'<span class="whole">\g<0></span>', kept)  # of what is escaped already
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", whole))


def png(image: NDArray[np.float32]) -> str:
    """An image in [0, 1] as a data: address, enlarged by a whole factor so that its pixels stay squares."""
    pixels = np.rint(np.clip(image, 0, 1) * 255).astype(np.uint8)
    times = max(1, -(-_LEAST_PIXELS // max(pixels.shape[:2])))
    pixels = pixels.repeat(times, axis=0).repeat(times, axis=1)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format="PNG", optimize=True)
    return embedded(file.getvalue())


def embedded(png: bytes) -> str:
    """A PNG as a data: address."""
    return "data:image/png;base64," + base64.b64encode(png).decode("ascii")


def _templates() -> jinja2.Environment:
    folder = resources.files(__package__ or "sparring.report")
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(lambda name: (folder / name).read_text(encoding="utf-8")),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"chance": chance, "png": png, "unbroken": unbroken, "embedded": embedded, "spell": spell}
    environment.filters["pixels"] = pixels
    environment.globals |= {"best": best, "many": _MANY}
    return environment


def _columns(methods: Sequence[Method]) -> list[str]:
    """The names of all accuracies, in the order in which they first appear."""
    return list(dict.fromkeys(name for method in methods for name in method.accuracies))


def _winner(values: Sequence[float], spell: Callable[[float], str] = percent) -> str | None:
    """The highest as it is printed, where there are two or more to compare."""
    return spell(max(values)) if len(values) > 1 else None


def _series(methods: Sequence[Method], key: str, times: float) -> dict[str, tuple[list[float], list[float]]]:
    """(epochs, values) of every method that recorded any."""
    series = {}
    for method in methods:
        kept = [(record["epoch"], times * record[key]) for record in method.history if record.get(key) is not None]
        if kept:
            series[method.name] = ([epoch for epoch, _ in kept], [value for _, value in kept])
    return series


def _curves(
    series: charts.Series,
    name: str,
    what: str,
    told: str,
    among: Sequence[str],
    of: str = "",
    most: float | None = 100.0,
) -> Drawing:
    """Lines of some methods, which look alike in every drawing of all of them (`among`)."""
    alt = f"{of}{what}, by epoch. Last epoch: {_last(series, '{:.1f}')}."
    svg = charts.curves(series, name=name, title=what, alt=alt, most=most, among=among)
    return Drawing(Markup(svg), told)


def _last(series: charts.Series, form: str) -> str:
    """'FAT 98.2 %, Madry 95.8 %': the ends of the lines, highest first."""
    ends = sorted(series.items(), key=lambda item: -item[1][1][-1])
    return ", ".join(f"{name} {form.format(values[-1])}" for name, (_, values) in ends)
