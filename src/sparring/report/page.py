"""One self-contained HTML page: the results, the reason for them, training curves, how it was made.

The page requests nothing from the network and runs no script (its own Content-Security-Policy forbids both). It works
on a desktop, on a phone, in dark mode and in print, and nothing on it depends on colour alone. Every sentence about the
data is made from the data. This module writes what it is given: it measures nothing.
"""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import jinja2
import numpy as np
from markupsafe import Markup, escape
from numpy.typing import NDArray
from PIL import Image

from sparring._version import __version__
from sparring.report.attack_path import AttackPath
from sparring.report.comparison import best, spell
from sparring.report.content import Exhibit, Method, Sweep
from sparring.report.method_charts import class_drawings, drawings
from sparring.schedules import pixels
from sparring.training.checkpoint import write_text

_LEAST_PIXELS = 96  # smaller images are enlarged by a whole factor
_MANY = 9  # columns of numbers: a table with more is laid out as a grid, as on a phone
_COLUMNS = {  # what the usual columns mean, for a reader who does not know the attacks
    "Natural": "the test images as they are",
    "FGSM": "after one large step against the model",
    "PGD-20": "after twenty small steps, each along the sign of the loss gradient",
    "C&W": "the same with a loss on the margin between two classes",
    "AutoAttack": "four strong attacks one after the other",
}


@dataclass(frozen=True)
class _Cell:
    """A number as it is printed."""

    column: str
    text: str  # empty: not measured
    best: bool
    share: float | None = None  # length of the bar below it, as a fraction
    spread: str = ""  # the standard deviation over seeds


def write_page(
    path: Path,
    *,
    title: str,
    lead: str,
    methods: Sequence[Method] = (),
    exhibits: Sequence[Exhibit] = (),
    strips: Sequence[AttackPath] = (),
    strips_note: str = "",
    facts: Mapping[str, str],
    note: str = "",
    sweep: Sweep | None = None,
) -> None:
    """Write the page, atomically.

    Args:
        lead: what the page shows, in one sentence.
        exhibits: tables and figures of the paper beside ours, one section each.
        strips: attacks to show step by step (`report.attack_path`); without them their section is left out.
        strips_note: one sentence: whose model they attack, or why there are none.
        facts: how it was made: images, hardware, command, seed, versions. "Command" is set as code.
        note: printed below the table of methods.
        sweep: the settings that differ between the methods; without it their section is left out.
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
        strips=strips,
        strips_note=strips_note,
        drawings=drawings(methods),
        sweep=sweep,
        classes=class_drawings(methods),
        facts=facts,
        version=__version__,
    )
    write_text(path, text.encode("utf-8", "replace").decode())  # the name of a folder may not be UTF-8


def tables(methods: Sequence[Method]) -> list[list[Method]]:
    """The methods split into tables: one for each way of measuring, so that a column can be compared.

    One table for all where every method was measured in a way of its own and the columns fit.
    """
    alike: dict[str, list[Method]] = {}
    for method in methods:
        alike.setdefault(method.measured, []).append(method)
    if len(alike) == len(methods) > 0 and len(_columns(methods)) + 2 <= _MANY:
        return [list(methods)]
    return list(alike.values())


def table(methods: Sequence[Method]) -> list[list[_Cell]]:
    """The methods' rows: accuracies in per cent, mean BPs, seconds, with the best of each column marked.

    Best is the highest accuracy among methods measured in the same way, and the fewest BPs among the methods that train
    for the same task against an attack (training without one is always the cheapest). No time is best: seconds depend
    on what else ran on the machine. Numbers that print alike are equally good.
    """
    rows: list[list[_Cell]] = [[] for _ in methods]
    for name in _columns(methods):
        alike: dict[str, list[float]] = {method.measured: [] for method in methods}
        for method in methods:
            if name in method.accuracies:
                alike[method.measured].append(method.accuracies[name])
        winners = {how: _winner(values) for how, values in alike.items()}
        for row, method in zip(rows, methods, strict=True):
            value = method.accuracies.get(name)
            text = "" if value is None else percent(value)
            spread = percent(method.spread[name]) if name in method.spread else ""
            row.append(_Cell(name, text, bool(text) and text == winners[method.measured], value, spread))
    spent: dict[str, dict[str, float]] = {}  # task -> method -> minus its BPs, where it trains against an attack
    for method in methods:
        if method.backprops:
            spent.setdefault(method.task, {})[method.name] = -method.backprops
    fewest = {task: _winner(list(each.values()), lambda value: brief(-value)) for task, each in spent.items()}
    for row, method in zip(rows, methods, strict=True):
        text = "" if method.backprops is None else brief(method.backprops)
        row.append(_Cell("Mean BPs", text, best=bool(method.backprops) and text == fewest[method.task]))
        row.append(_Cell("Seconds", "" if method.seconds is None else brief(method.seconds), best=False))
    return rows


def percent(fraction: float) -> str:
    """'98.2' for 0.98222."""
    return f"{100 * fraction:.1f}"


def brief(value: float) -> str:
    """One decimal below a hundred, none above."""
    return f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def chance(probability: float) -> str:
    """A probability in whole per cent that never reads 0 or 100."""
    if probability < 0.01:
        return "<1\u00a0%"
    return f"{100 * probability:.0f}\u00a0%" if probability <= 0.99 else ">99\u00a0%"


def unbroken(text: str) -> Markup:
    """Escaped text in which '5 %' and 'PGD-20-0' stay on one line, and `this` is code."""
    kept = str(escape(text.replace(" %", "\u00a0%")))
    whole = re.sub(r"PGD-\d+(-\d+)?", r'<span class="whole">\g<0></span>', kept)  # `kept` is escaped
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", whole))


def png(image: NDArray[np.float32]) -> str:
    """An image in [0, 1] as a data: URL, enlarged by a whole factor so that its pixels stay squares."""
    pixels = np.rint(np.clip(image, 0, 1) * 255).astype(np.uint8)
    times = max(1, -(-_LEAST_PIXELS // max(pixels.shape[:2])))
    pixels = pixels.repeat(times, axis=0).repeat(times, axis=1)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format="PNG", optimize=True)
    return embedded(file.getvalue())


def embedded(png: bytes) -> str:
    """A PNG as a data: URL."""
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
    """The names of all accuracies, in order of first appearance."""
    return list(dict.fromkeys(name for method in methods for name in method.accuracies))


def _winner(values: Sequence[float], spell: Callable[[float], str] = percent) -> str | None:
    """The highest value as printed, where there are at least two."""
    return spell(max(values)) if len(values) > 1 else None
