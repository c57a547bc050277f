"""Collected results as files and as parts of the page: tables in Markdown, figures in PNG and SVG. Measures nothing."""

from __future__ import annotations

import re
import statistics
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from markupsafe import Markup

from sparring.paper import leaderboard, planes
from sparring.paper.collect import Collected, about, cells, pictured, table_rows
from sparring.paper.findings import findings
from sparring.paper.notes import notes
from sparring.paper.specs import Item, Row
from sparring.report import board, charts, panels
from sparring.report.comparison import Ours, TableRow, markdown, rounded
from sparring.report.content import Drawing, Exhibit, Picture
from sparring.report.panels import Lines
from sparring.training.checkpoint import replacing, write_text

Curves = dict[str, tuple[list[float], list[float]]]
_TAUS = ("tau 0", "tau 1", "tau 2", "tau 3")


def draw(collected: Collected) -> dict[Path, str]:
    """Write an item's table or figures beside its results; return the files with their captions."""
    item, home, made = collected.item, collected.home, {}
    home.mkdir(parents=True, exist_ok=True)
    if item.kind == "table":
        path = home / "table.md"
        write_text(path, _document(collected))
        return {path: ""}
    if item.kind == "benchmark":
        made[home / "table.md"] = ""
        write_text(home / "table.md", _benchmark(collected))
    for name, picture in pictures(collected).items():
        path = home / f"{name}.png"
        with replacing(path) as temporary:
            temporary.write_bytes(picture.png)
        made[path] = picture.caption
    return made


def exhibit(collected: Collected) -> Exhibit:
    """An item for the page. Line figures are drawn panel by panel there, so that they fit a phone."""
    item = collected.item
    table = table_rows(collected) if item.kind == "table" else []
    drawings: Sequence[Drawing] = ()
    if item.kind == "table":
        drawings = _tradeoffs(item.name, table)
    elif item.kind in ("lines", "course"):
        drawings = _curves(collected) if item.kind == "lines" else _course_curves(collected)
    return Exhibit(
        name=item.name,
        where=item.where,
        title=item.title,
        claim=item.claim,
        findings=findings(collected),
        columns=[column for column in item.columns if any(column in {**row.ours, **row.paper} for row in table)],
        rows=table,
        drawings=drawings,
        pictures=() if item.kind in ("table", "lines", "course") else tuple(pictures(collected).values()),
        notes=notes(collected),
        board=leaderboard.board(collected) if item.kind == "benchmark" else None,
    )


def _document(collected: Collected) -> str:
    """A table as a Markdown file."""
    item = collected.item
    below = "".join(f"\n- {note}" for note in notes(collected))
    table = markdown(list(item.columns), table_rows(collected))
    ours = "\n\n" + listed("What we find:", findings(collected)) if collected.found else ""
    limit = f" --limit {collected.limit}" if collected.limit else ""
    return (
        f"# {item.where}: {item.title}\n\nTest accuracy in per cent. What the paper claims: {item.claim}{ours}\n\n"
        f"{table}{below}\n"
        f"\nDrawn from the JSON files beside this one: `sparring reproduce {item.name} --draw{limit}`\n"
    )


def _benchmark(collected: Collected) -> str:
    """A benchmark as a Markdown file."""
    item = collected.item
    below = "".join(f"\n- {note}" for note in notes(collected))
    ours = "\n\n" + listed("What we find:", findings(collected)) if collected.found else ""
    limit = f" --limit {collected.limit}" if collected.limit else ""
    return (
        f"# {item.where}: {item.title}\n\n{item.claim} Test accuracy in per cent; seconds of the whole training; peak "
        f"memory of the GPU.{ours}\n\n{board.markdown(leaderboard.board(collected))}{below}\n"
        f"\nDrawn from the JSON files beside this one: `sparring reproduce {item.name} --draw{limit}`\n"
    )


def listed(head: str, sentences: Sequence[str]) -> str:
    """The sentences as text: a single one after the head, several as a list below it."""
    return f"{head} {sentences[0]}" if len(sentences) == 1 else "\n- ".join([head, *sentences])


def pictures(collected: Collected) -> dict[str, Picture]:
    """The pictures of a figure by file name: one per group that has results."""
    make = {
        "lines": _line_pictures,
        "course": _course_pictures,
        "mixture": planes.mixtures,
        "motivation": planes.motivations,
        "loss": planes.losses,
        "benchmark": leaderboard.pictures,
    }[collected.item.kind]
    return make(collected)


# Line figures: accuracy by tau, eps or alpha.


def _by_line(collected: Collected, rows: Sequence[Row], column: str) -> tuple[Curves, dict[str, list[float]]]:
    """Line -> (x, median in per cent), and the deviation over seeds if every point of a line has one."""
    series: Curves = {}
    spread: dict[str, list[float | None]] = {}
    for row in sorted(rows, key=lambda row: row.x or 0.0):
        cell = cells(collected.of(row), {column: collected.item.columns[column]}).get(column)
        if cell is not None and row.x is not None:
            xs, ys = series.setdefault(row.label, ([], []))
            xs.append(row.x)
            ys.append(cell.median)
            spread.setdefault(row.label, []).append(cell.spread)
    known = {name: [v for v in values if v is not None] for name, values in spread.items()}
    return series, {name: values for name, values in known.items() if len(values) == len(series[name][0])}


def _line_pictures(collected: Collected) -> dict[str, Picture]:
    item, found, drawn = collected.item, {}, _lined(collected)
    for group, rows in pictured(collected).items():
        shown = [Lines(f"{column} (%)", *each) for column, each in drawn[group].items()]
        title = group or item.title
        png = panels.grid(shown, xlabel=item.xlabel, title=_wrap(title), most=100.0, all_names=_names(item))
        caption = f"{_trained(collected, rows)} Every panel has its own y axis."
        found[_slug(group) or item.name] = Picture(png, title, caption)
    return found


def _curves(collected: Collected) -> list[Drawing]:
    """The line figures for the page: one drawing per panel."""
    item, found, drawn = collected.item, [], _lined(collected)
    for group, rows in pictured(collected).items():
        heading = group
        for column, (series, spread) in drawn[group].items():
            title = f"{column} accuracy (%)"
            alt = _ends(f"{title} by {item.xlabel}", series) + _bands(series, spread)
            svg = charts.curves(
                series,
                name=f"{item.name}-{_slug(group)}-{_slug(column)}",
                title=title,
                alt=alt,
                spread=spread,
                most=100.0,
                xlabel=item.xlabel,
                all_names=_names(item),
            )
            found.append(Drawing(Markup(svg), f"{alt} {_trained(collected, rows)}", heading))
            heading = ""
    return found


def _lined(collected: Collected) -> dict[str, dict[str, tuple[Curves, dict[str, list[float]]]]]:
    """Picture -> column -> lines and deviations, as from `_by_line`; empty columns are left out."""
    every = {
        group: {column: _by_line(collected, rows, column) for column in collected.item.columns}
        for group, rows in pictured(collected).items()
    }
    return {group: {column: each for column, each in columns.items() if each[0]} for group, columns in every.items()}


def _names(item: Item) -> list[str]:
    """The names of all lines of an item, measured or not, ordered so that a tau has the same style in every figure."""
    names = dict.fromkeys(row.label for row in item.rows)
    return [*(_TAUS if names.keys() & set(_TAUS) else ()), *(name for name in names if name not in _TAUS)]


def _ends(title: str, series: Mapping[str, tuple[Sequence[float], Sequence[float]]]) -> str:
    each = "; ".join(
        f"{name} {', '.join(f'{rounded(y)} at {x:g}' for x, y in dict.fromkeys([(xs[0], ys[0]), (xs[-1], ys[-1])]))}"
        for name, (xs, ys) in series.items()
    )
    return f"{title}: {each}."


def _bands(series: Curves, spread: Mapping[str, Sequence[float]]) -> str:
    """The sentence that explains the bands, naming their lines if not all have one; '' without bands."""
    if not spread:
        return ""
    of = "each line" if spread.keys() == series.keys() else ", ".join(spread)
    widest = max(value for values in spread.values() for value in values)
    return f" The band around {of} is ± the standard deviation over seeds, at most {widest:.1f} points."


def _trained(collected: Collected, rows: Sequence[Row]) -> str:
    """What was trained for these rows: network, epochs, seeds."""
    each = dict.fromkeys(about(collected.of(row)) for row in rows)
    return f"{'; '.join(each)}."


# Backward passes by epoch.


def _courses(collected: Collected) -> dict[str, Curves]:
    """Group -> line -> (epochs, backward passes per image as the mean over seeds)."""
    found: dict[str, Curves] = {}
    for group, rows in collected.groups().items():
        for row in rows:
            histories = [result["history"] for result in collected.of(row)]
            means = [statistics.fmean(values) for values in zip(*(h["backprops"] for h in histories), strict=True)]
            found.setdefault(group, {})[row.label] = ([float(epoch) for epoch in histories[0]["epoch"]], means)
    return found


def _course_curves(collected: Collected) -> list[Drawing]:
    """The courses for the page: one drawing per group."""
    found, courses = [], _courses(collected)
    for group, series in courses.items():
        title, name = f"{group}: backward passes per image", f"{collected.item.name}-{_slug(group)}"
        svg = charts.curves(series, name=name, title=title, alt=_ends(title, series), all_names=_names(collected.item))
        found.append(Drawing(Markup(svg), _trained(collected, collected.groups()[group])))
    return found


def _course_pictures(collected: Collected) -> dict[str, Picture]:
    courses = _courses(collected)
    if not courses:
        return {}
    drawn = [Lines(group, series) for group, series in courses.items()]
    png = panels.grid(drawn, xlabel="epoch", title=collected.item.title, all_names=_names(collected.item))
    every = [row for rows in collected.groups().values() for row in rows]
    return {collected.item.name: Picture(png, collected.item.title, _trained(collected, every))}


# The trade-off plots of a table.


def _tradeoffs(name: str, table: Sequence[TableRow]) -> list[Drawing]:
    """Natural against robust accuracy: ours under AutoAttack where it was measured and under PGD-20, the paper's."""
    ours = {robust: _points([(row.label, row.ours) for row in table], robust) for robust in ("AutoAttack", "PGD-20")}
    paper = {
        _brief(row.label): (row.paper["Natural"][0], row.paper["PGD-20"][0])
        for row in table
        if {"Natural", "PGD-20"} <= row.paper.keys()
    }
    found = []
    for whose, robust, points in (
        ("ours", "AutoAttack", ours["AutoAttack"]),
        ("ours", "PGD-20", ours["PGD-20"]),
        ("the paper's", "PGD-20", paper),
    ):
        if len(points) > 1 and ours["PGD-20"]:
            each = "; ".join(f"{label} {rounded(x)} and {rounded(y)}" for label, (x, y) in points.items())
            what = f"Trade-off, {whose}: {robust} accuracy (%)"
            alt = f"{what} against natural accuracy: {each}."
            svg = charts.tradeoff(
                points,
                name=f"{name}-{_slug(whose)}-{_slug(robust)}",
                xlabel="natural accuracy (%)",
                ylabel=what,
                alt=alt,
                all_names=(_brief(row.label) for row in table),
            )
            caption = f"Natural and {robust} accuracy, {whose}: {each}. Up and right is better."
            found.append(Drawing(Markup(svg), caption))
    return found


def _points(rows: Iterable[tuple[str, Mapping[str, Ours]]], robust: str) -> dict[str, tuple[float, float]]:
    """Our natural and robust accuracy in per cent, of the methods that have both."""
    return {
        _brief(label): (ours["Natural"].median, ours[robust].median)
        for label, ours in rows
        if {"Natural", robust} <= ours.keys()
    }


def _brief(label: str) -> str:
    """A method's name, short enough for a drawing."""
    return label.replace("FAT for ", "FAT-")


def _slug(text: str) -> str:
    """A group's name as a file name, without the part in brackets."""
    return re.sub(r"[^a-z0-9]+", "-", re.sub(r"\(.*?\)", "", text).lower()).strip("-")


def _wrap(text: str, width: int = 100) -> str:
    return "\n".join(textwrap.wrap(text, width))
