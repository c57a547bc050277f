"""Our findings on an item: the paper's claim checked against our results, in sentences made from the data."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sparring.paper.claims import by_best, by_radius, by_tau
from sparring.paper.collect import Collected, cells, table_rows
from sparring.paper.leaderboard import standing
from sparring.paper.results import JobResult
from sparring.paper.specs import Mixture, Row
from sparring.report.comparison import Ours, TableRow, noise_of, rounded

_FEW = 3  # missing rows are named up to this number, then counted
_CLAIMED = ("natural", "pgd20")  # what the paper's claims are about


def findings(collected: Collected) -> list[str]:
    """One finding per comparison or line, and what is not measured yet."""
    measured = [row for row in collected.item.rows if collected.of(row)]
    if not measured:
        return ["not yet measured."]
    by_kind: dict[str, Callable[[Collected, Sequence[Row]], list[str]]] = {
        "table": _table,
        "lines": _lines,
        "course": _course,
        "motivation": _motivation,
        "loss": _loss,
        "mixture": _mixture,
        "benchmark": _benchmark,
    }
    return [*filter(None, [*by_kind[collected.item.kind](collected, measured), _missing(collected, measured)])]


def _missing(collected: Collected, measured: Sequence[Row]) -> str:
    """The rows that are not measured at the scale shown."""
    wanted = [row for row in collected.item.rows if collected.scale(row.group) in row.configs]
    table = collected.item.kind in ("table", "benchmark")
    rest = [row.label if table else row.name for row in wanted if row not in measured]
    if not rest:
        return ""
    named = ", ".join(rest) if len(rest) <= _FEW else f"{len(rest)} of {len(wanted)} rows"
    return f"Not yet measured: {named}."


def _table(collected: Collected, measured: Sequence[Row], *, judged: bool = True) -> list[str]:
    """Every method against its baseline in the paper, with the paper's own differences in brackets.

    Args:
        judged: say whether the paper's claim is confirmed.
    """
    by_name = dict(zip((row.name for row in collected.item.rows), table_rows(collected), strict=True))
    pairs = [(by_name[row.name], by_name[row.against]) for row in measured if row.against]
    compared = [_pair(new, old, collected.item.columns, judged=judged) for new, old in pairs if old.ours]
    if not compared:
        return ["there is no method and baseline to compare yet."]
    cells = [cell for pair in pairs for row in pair for cell in row.ours.values()]
    brackets = "; in brackets, the paper's differences" if any(row.paper for pair in pairs for row in pair) else ""
    return [*compared, f"In points, {_errors(cells)}{brackets}."]


def _benchmark(collected: Collected, measured: Sequence[Row]) -> list[str]:
    """Our methods among those of the benchmark, and every friendly one against its baseline."""
    names = {row.name for row in measured}
    pairs = [row for row in measured if row.against in names]
    return [*standing(collected), *(_table(collected, measured, judged=False) if pairs else [])]


def _errors(cells: Sequence[Ours]) -> str:
    """What the ± of differences between these cells includes."""
    how = "paired by image" if all(cell.right for cell in cells) else "of independent samples"
    seeds = ", without the spread over seeds" if all(len(cell.values) == 1 for cell in cells) else ""
    return f"± two standard errors {how}{seeds}"


def _pair(new: TableRow, old: TableRow, columns: Mapping[str, str], *, judged: bool = True) -> str:
    """The differences in points. Confirmed: better in natural or PGD-20 accuracy, and worse in no column but FGSM.

    Better and worse mean beyond the noise (`noise_of`). A gain under PGD that neither C&W nor AutoAttack shares is
    reported as such. FGSM decides nothing: a single step says little about robustness.
    """
    beyond: dict[str, float] = {}  # column -> change beyond the noise
    spelled: dict[str, str] = {}
    for column in columns:
        if column in new.ours and column in old.ours:
            change = new.ours[column].median - old.ours[column].median
            paper = [row.paper[column][0] for row in (new, old) if column in row.paper]
            theirs = f" ({rounded(paper[0] - paper[1], sign=True)})" if len(paper) == 2 else ""
            noise = noise_of(new.ours[column], old.ours[column])
            spelled[column] = f"{column} {rounded(change, sign=True)} ± {rounded(noise)}{theirs}"
            if abs(change) > noise:
                beyond[column] = change
    better = {columns[column] for column, change in beyond.items() if change > 0}
    worse = any(change < 0 for column, change in beyond.items() if columns[column] != "fgsm")
    finding = "confirmed" if better & {"natural", "cw30", "autoattack"} else "confirmed under PGD alone"
    if not better & set(_CLAIMED):
        finding = "not confirmed"
    elif worse:
        finding = "a trade-off"
    sure = "; ".join(spelled[column] for column in beyond)
    rest = "; ".join(spelled[column] for column in spelled if column not in beyond)
    parts = [f"Beyond the noise: {sure}." if sure else "", f"Within the noise: {rest}." if rest else ""]
    head = f"{new.label} against {old.label}"
    return " ".join([f"{head}: {finding}." if judged else f"{head}.", *filter(None, parts)])


def _lines(collected: Collected, measured: Sequence[Row]) -> list[str]:
    """The item's check if it has one; natural and PGD-20 accuracy at the ends of every line, and at the marks."""
    item = collected.item
    parts: list[str] = []
    claimed = [column for column, attack in item.columns.items() if attack in _CLAIMED]
    for group in dict.fromkeys(row.group for row in measured):
        every = {
            column: _points(collected, [row for row in measured if row.group == group], column) for column in claimed
        }
        places = dict.fromkeys(tuple(points) for lines in every.values() for points in lines.values())
        labels = list(dict.fromkeys(label for lines in every.values() for label in lines))
        name = labels[0] if len(labels) == 1 else group
        checked = _check(collected, group, name)
        parts += checked
        if checked and item.check in ("radius", "best"):  # they report the numbers themselves
            continue
        for xs in places:  # one, unless some points are missing
            changes = [_along(column, lines, xs, name) for column, lines in every.items()]
            where = " → ".join(f"{x:g}" for x in xs)
            parts.append(f"{name}, {item.xlabel} {where}: {'; '.join(filter(None, changes))}.")
    if any("±" in part for part in parts):
        every_cell = [cell for row in measured for cell in cells(collected.of(row), item.columns).values()]
        parts.append(f"In points, {_errors(every_cell)}.")
    return parts or [f"too few points to show a trend over {item.xlabel}."]


def _check(collected: Collected, group: str, name: str) -> list[str]:
    """The item's check on one group of its rows; empty if there are too few points."""
    item = collected.item
    attacks = {attack: attack for attack in item.columns.values()}
    every: dict[str, dict[float, Mapping[str, Ours]]] = {}
    for row in item.rows:
        if row.group == group and row.x is not None and collected.of(row):
            every.setdefault(row.label, {})[row.x] = cells(collected.of(row), attacks)
    if item.check == "radius":
        return by_radius(name, every)
    if item.check == "best":
        return by_best(name, every)
    return [*filter(None, (by_tau(name, line, item.marks[0]) for line in every.values() if item.check == "tau"))]


def _along(column: str, lines: Mapping[str, Mapping[float, float]], xs: tuple[float, ...], known: str) -> str:
    """'Natural tau 0 82.1 → 79.0, tau 1 ...': the lines that have these points; the line `known` is not named."""
    each = [
        f"{'' if label == known else f'{label} '}{' → '.join(map(rounded, points.values()))}"
        for label, points in lines.items()
        if tuple(points) == xs
    ]
    return f"{column} {', '.join(each)}" if each else ""


def _points(collected: Collected, rows: Sequence[Row], column: str) -> dict[str, dict[float, float]]:
    """{'tau 1': {0.03: 84.2, 0.15: 79.9}}: ends and marks of every line that has more than one point."""
    item = collected.item
    points: dict[str, dict[float, float]] = {}
    for row in rows:
        cell = cells(collected.of(row), {column: item.columns[column]}).get(column)
        if cell is not None and row.x is not None:
            points.setdefault(row.label, {})[row.x] = cell.median
    return {
        label: {x: ys[x] for x in sorted(ys) if x in (min(ys), *item.marks, max(ys))}
        for label, ys in points.items()
        if len(ys) > 1
    }


def _course(collected: Collected, measured: Sequence[Row]) -> list[str]:
    """Backward passes of the friendly runs: those that do not always take all K steps."""
    every = [result for row in measured for result in collected.of(row)]
    friendly = [one for one in every if min(one["history"]["backprops"]) < one["config"]["attack"]["steps"]]
    if not friendly:
        return ["no friendly run is measured yet."]
    courses = [result["history"]["backprops"] for result in friendly]
    grow = sum(course[-1] > course[0] for course in courses)
    saved = [1 - statistics.fmean(one["history"]["backprops"]) / one["config"]["attack"]["steps"] for one in friendly]
    return [
        f"{_confirmed(grow, len(courses), 'runs')}: friendly training takes "
        f"{_range([course[0] for course in courses], '{:.1f}')} backward passes per image in the first epoch and "
        f"{_range([course[-1] for course in courses], '{:.1f}')} in the last; a whole run saves "
        f"{_range(saved, '{:.0%}')} of K."
    ]


def _motivation(collected: Collected, measured: Sequence[Row]) -> list[str]:
    found = _found(collected, measured)
    worst, friendly = ([one["mixing"][kind][-1]["amidst"] for one in found] for kind in ("pgd", "friendly"))
    fewer = sum(a > b for a, b in zip(worst, friendly, strict=True))
    return [
        f"{_confirmed(fewer, len(found))} on a problem built to show it: PGD moves {_range(worst, '{:.0%}')} of the "
        f"points amid the other class, early-stopped PGD {_range(friendly, '{:.0%}')}."
    ]


def _loss(collected: Collected, measured: Sequence[Row]) -> list[str]:
    found = _found(collected, measured)
    smaller = sum(one["bound"]["min_min"] < one["bound"]["min_max"] for one in found)
    low, high = ([one["bound"][name] for one in found] for name in ("min_min", "min_max"))
    vacuous = " Both exceed 1, so neither constrains the risk." if min(low) > 1 else ""
    return [
        f"{_confirmed(smaller, len(found))}: the bound on the risk is {_range(low, '{:.1f}')} with friendly data and "
        f"{_range(high, '{:.1f}')} with the worst case, at rho = 0.{vacuous} The friendly bound can hardly be the "
        "larger one, since its attack stops early: the finding is the size of the gap. For rho above 0: "
        "`sparring bound`."
    ]


def _mixture(collected: Collected, measured: Sequence[Row]) -> list[str]:
    """The share of foreign natural neighbours, and the purity of each set, in every layer of every seed."""
    parts = []
    for row in measured:
        what = row.measure
        assert isinstance(what, Mixture)
        layers = [one["mixing"][str(layer)] for one in _found(collected, [row]) for layer in what.layers]
        less = sum(layer["friendly"]["foreign"] < layer["pgd"]["foreign"] for layer in layers)
        mixed = sum(layer["friendly"]["purity"] <= layer["pgd"]["purity"] for layer in layers)
        worst, friendly = f"PGD-{what.steps}", f"PGD-{what.steps}-0"
        in_part = "confirmed in part" if less == len(layers) and mixed else _confirmed(less, len(layers), "layers")
        text = (
            f"{row.label}: {in_part}. Relative to natural data, {friendly} mixes the classes less than {worst} in "
            f"{less} of {len(layers)} layers."
        )
        if mixed:
            pure = {kind: _range([one[kind]["purity"] for one in layers], "{:.0%}") for kind in layers[0]}
            text += (
                f" But {friendly} data by themselves are no purer than {worst} data in {mixed} of {len(layers)} "
                f"layers: {pure['friendly']} of their neighbours are of their own class, {worst} {pure['pgd']}, "
                f"natural {pure['natural']}."
            )
        parts.append(text)
    return parts


def _found(collected: Collected, rows: Sequence[Row]) -> list[Mapping[str, Any]]:
    several: list[JobResult] = [result for row in rows for result in collected.of(row)]
    return [result["found"] for result in several]


def _confirmed(holds: int, of: int, what: str = "seeds") -> str:
    """'confirmed (3 of 3 seeds)', 'confirmed in part (2 of 3 seeds)', 'not confirmed (one run)'."""
    if of == 1:
        return f"{'confirmed' if holds else 'not confirmed'} (one {what.removesuffix('s')})"
    word = "confirmed" if holds == of else "confirmed in part" if holds else "not confirmed"
    return f"{word} ({holds} of {of} {what})"


def _range(values: Sequence[float], form: str) -> str:
    """'76% to 93%', or one number if both print alike."""
    low, high = form.format(min(values)), form.format(max(values))
    return low if low == high else f"{low} to {high}"
