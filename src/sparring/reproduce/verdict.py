"""What we see in an item's results, in a sentence or two made from the data: the paper's claim, held against them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sparring.recipes.paper import Mixture, Row
from sparring.reproduce.collect import Collected, cells, lines
from sparring.reproduce.results import Result

_FEW = 3  # rows that are named; more are counted


def seen(collected: Collected) -> str:
    """The verdict on what is measured, and what is not."""
    measured = [row for row in collected.item.rows if collected.of(row)]
    if not measured:
        return "not yet measured."
    say: dict[str, Callable[[Collected, Sequence[Row]], str]] = {
        "table": _table,
        "lines": _lines,
        "course": _course,
        "motivation": _motivation,
        "loss": _loss,
        "mixture": _mixture,
    }
    return " ".join(filter(None, [say[collected.item.kind](collected, measured), _missing(collected, measured)]))


def _missing(collected: Collected, measured: Sequence[Row]) -> str:
    rest = [row.name for row in collected.item.rows if row not in measured]
    if not rest:
        return ""
    named = ", ".join(rest) if len(rest) <= _FEW else f"{len(rest)} of {len(collected.item.rows)} rows"
    return f"Not yet measured: {named}."


def _table(collected: Collected, measured: Sequence[Row]) -> str:
    """Who is best by which attack, here and in the paper."""
    every = lines(collected)
    parts = []
    for column in collected.item.columns:
        ours = {line.label: line.ours[column].middle for line in every if column in line.ours}
        if len(ours) > 1:
            paper = {label: line.paper[column][0] for label in ours for line in every if _has(line, label, column)}
            same = f"; the paper's {_best(paper)}" if len(paper) == len(ours) else ""
            parts.append(f"{column} {_best(ours)}{same}")
    if not parts:
        return "one method alone says nothing about the comparison."
    return f"the best of the measured methods by attack: {'. '.join(parts)}."


def _has(line: Any, label: str, column: str) -> bool:
    return bool(line.label == label and column in line.paper)


def _best(values: Mapping[str, float]) -> str:
    label = max(values, key=lambda name: values[name])
    return f"{label} ({values[label]:.2f} %)"


def _lines(collected: Collected, measured: Sequence[Row]) -> str:
    """How far each attack's accuracy goes from the first point of a line to its last."""
    item, parts = collected.item, []
    for column, attack in item.columns.items():
        changes = []
        for label in dict.fromkeys((row.group, row.label) for row in measured):
            points = [
                (row.x, cells(collected.of(row), {column: attack})[column].middle)
                for row in measured
                if (row.group, row.label) == label
                and row.x is not None
                and column in cells(collected.of(row), {column: attack})
            ]
            if len(points) > 1:
                changes.append(max(points)[1] - min(points)[1])
        if changes:
            parts.append(f"{column} {_range(changes, '{:+.1f}')}")
    if not parts:
        return f"too few points to see a course over {item.xlabel}."
    return f"from the smallest {item.xlabel} to the largest accuracy changes by, in points: {', '.join(parts)}."


def _course(collected: Collected, measured: Sequence[Row]) -> str:
    courses = [result["history"]["backprops"] for row in measured for result in collected.of(row)]
    grow = sum(course[-1] > course[0] for course in courses)
    return (
        f"back-propagations per image grow in {grow} of {len(courses)} run{'s' if len(courses) > 1 else ''}: "
        f"{_range([course[0] for course in courses], '{:.1f}')} in the first epoch, "
        f"{_range([course[-1] for course in courses], '{:.1f}')} in the last."
    )


def _motivation(collected: Collected, measured: Sequence[Row]) -> str:
    found = _found(collected, measured)
    worst, friendly = ([one["mixing"][kind][-1]["amidst"] for one in found] for kind in ("pgd", "friendly"))
    fewer = sum(a > b for a, b in zip(worst, friendly, strict=True))
    return (
        f"{_confirmed(fewer, len(found))} on a problem made to show it: PGD leaves {_range(worst, '{:.0%}')} of the "
        f"points amidst the other class, early-stopped PGD {_range(friendly, '{:.0%}')}."
    )


def _loss(collected: Collected, measured: Sequence[Row]) -> str:
    found = _found(collected, measured)
    smaller = sum(one["bound"]["min_min"] < one["bound"]["min_max"] for one in found)
    low, high = ([one["bound"][name] for one in found] for name in ("min_min", "min_max"))
    empty = " Both are above 1, where a bound on a risk says nothing." if min(low) > 1 else ""
    return (
        f"{_confirmed(smaller, len(found))}: the bound on the risk is {_range(low, '{:.1f}')} with friendly data and "
        f"{_range(high, '{:.1f}')} with the worst case, at rho = 0.{empty} A point that stopped on the way up can "
        "hardly have the larger loss: how much smaller it is was measured. For a rho above 0: sparring bound."
    )


def _mixture(collected: Collected, measured: Sequence[Row]) -> str:
    """Foreign neighbours among natural data, and purity of each set, in every layer of every seed."""
    parts = []
    for row in measured:
        what = row.measure
        assert isinstance(what, Mixture)
        layers = [one["mixing"][str(layer)] for one in _found(collected, [row]) for layer in what.layers]
        less = sum(layer["friendly"]["foreign"] < layer["pgd"]["foreign"] for layer in layers)
        purer = sum(layer["pgd"]["purity"] > layer["natural"]["purity"] for layer in layers)
        worst, friendly = f"PGD-{what.steps}", f"PGD-{what.steps}-0"
        in_part = "confirmed in part" if less == len(layers) and purer else _confirmed(less, len(layers), "layers")
        text = (
            f"{row.label}: {in_part}. Held against natural data, {friendly} mixes the classes less than {worst} in "
            f"{less} of {len(layers)} layers."
        )
        if purer:
            ours, natural = (_range([one[kind]["purity"] for one in layers], "{:.0%}") for kind in ("pgd", "natural"))
            text += (
                f" But among themselves {worst} data are purer than natural data in {purer} of {len(layers)} layers: "
                f"{ours} of their neighbours are of their own class, natural {natural}."
            )
        parts.append(text)
    return " ".join(parts)


def _found(collected: Collected, rows: Sequence[Row]) -> list[Mapping[str, Any]]:
    several: list[Result] = [result for row in rows for result in collected.of(row)]
    return [result["found"] for result in several]


def _confirmed(holds: int, of: int, what: str = "seeds") -> str:
    """In words, with the count."""
    if of == 1:
        return f"{'confirmed' if holds else 'not confirmed'} (one {what.removesuffix('s')})"
    word = "confirmed" if holds == of else "confirmed in part" if holds else "not confirmed"
    return f"{word} ({holds} of {of} {what})"


def _range(values: Sequence[float], form: str) -> str:
    """'76% to 93%', or one number where they print alike."""
    low, high = form.format(min(values)), form.format(max(values))
    return low if low == high else f"{low} to {high}"
