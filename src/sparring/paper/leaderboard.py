"""A benchmark of others beside our results: the table of all methods, where ours stand, and the picture."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from sparring.paper import results
from sparring.paper.collect import Collected, about, cells
from sparring.paper.results import JobResult
from sparring.paper.specs import PublishedMethod, Row
from sparring.report.board import Board, BoardLine
from sparring.report.comparison import rounded
from sparring.report.content import Picture
from sparring.report.scatter import Dot, scatter

SECONDS, MEMORY = "seconds", "GiB"
_FLOOR = 0.83  # of the best AutoAttack accuracy of others: those below it would squeeze the picture, and are only named


@dataclass(frozen=True)
class _Place:
    """A method of ours: accuracies in per cent."""

    row: Row
    natural: float
    autoattack: float
    seconds: float
    beside: int  # processes that shared the GPU; above 1, seconds say little
    error: float  # two standard errors over images of the less certain accuracy, in points


def board(collected: Collected) -> Board:
    """All methods: ours in the order of the item, then the others, the most robust first."""
    item = collected.item
    ours = [_ours(collected, row) for row in item.rows]
    theirs = [_theirs(one, collected) for one in sorted(item.others, key=lambda one: -one.autoattack)]
    return Board([*item.columns, SECONDS, MEMORY], [*ours, *theirs])


def _ours(collected: Collected, row: Row) -> BoardLine:
    several = collected.of(row)
    if not several:
        return BoardLine(row.label, "ours: not yet measured", {}, ours=True)
    numbers = {column: cell.text for column, cell in cells(several, collected.item.columns).items()}
    numbers[SECONDS] = _timed(seconds(several), at_once(several))
    memory = [result["peak_memory_gib"] for result in several if result.get("peak_memory_gib")]
    if memory:
        numbers[MEMORY] = f"{max(memory):.2f}"
    return BoardLine(row.label, f"ours, {about(several)}", numbers, ours=True)


def _theirs(one: PublishedMethod, collected: Collected) -> BoardLine:
    numbers = {column: f"{getattr(one, attack):.2f}" for column, attack in collected.item.columns.items()}
    for column, attack in collected.item.columns.items():
        if attack == "autoattack":
            numbers[column] += f" ± {one.autoattack_spread:.2f}"
    numbers |= {SECONDS: f"{one.seconds:,.0f}", MEMORY: f"{one.memory_gib:.2f}"}
    return BoardLine(one.name, "theirs, 3 seeds", numbers, ours=False)


def seconds(several: Sequence[JobResult]) -> float:
    """Seconds of training, all in (the median over seeds); those of the epochs alone where no more was recorded.

    Of runs that had the GPU to themselves, if there are any.
    """
    alone = [result for result in several if results.at_once(result) == 1] or several
    return statistics.median(float(result.get("wall_seconds") or result["training_seconds"]) for result in alone)


def at_once(several: Sequence[JobResult]) -> int:
    """How many runs shared the GPU of the one whose seconds are shown."""
    return min(results.at_once(result) for result in several)


def _timed(seconds: float, beside: int) -> str:
    """'1,234', or '1,234 (3 at once)'."""
    return f"{seconds:,.0f}{f' ({beside} at once)' if beside > 1 else ''}"


def _places(collected: Collected) -> list[_Place]:
    """Our methods with both accuracies."""
    found = []
    for row in collected.item.rows:
        several = collected.of(row)
        both = cells(several, {"natural": "natural", "autoattack": "autoattack"})
        if len(both) == 2:
            error = max(2 * math.sqrt(cell.median * (100 - cell.median) / cell.n) for cell in both.values())
            natural, autoattack = (cell.median for cell in both.values())
            found.append(_Place(row, natural, autoattack, seconds(several), at_once(several), error))
    return found


def standing(collected: Collected) -> list[str]:
    """Each of our methods among the others: better in both accuracies than how many, and worse in both than which."""
    places, others, sentences = _places(collected), collected.item.others, list[str]()
    for place in places:
        ahead = [one for one in others if place.natural > one.natural and place.autoattack > one.autoattack]
        behind = [one.name for one in others if place.natural < one.natural and place.autoattack < one.autoattack]
        sentences.append(
            f"{place.row.label} ({rounded(place.natural)} natural, {rounded(place.autoattack)} AutoAttack): better in "
            f"both than {len(ahead)} of {len(others)} published methods, worse in both than "
            f"{', '.join(behind) if behind else 'none'}."
        )
    if places:
        every = sorted(place.seconds for place in places if place.beside == 1)
        published = sorted(one.seconds for one in others)
        sentences.append(
            f"A lead or a lag of less than {rounded(max(place.error for place in places))} points, two standard errors "
            "over images, decides nothing."
        )
        if every:
            sentences.append(
                f"Training takes {_range(every)} s (ours) and {_range(published)} s (theirs). The GPUs differ, so the "
                "ratio is not one of methods alone."
            )
    return sentences


def _range(ordered: Sequence[float]) -> str:
    """'134 to 473', or one number if both print alike."""
    low, high = f"{ordered[0]:,.0f}", f"{ordered[-1]:,.0f}"
    return low if low == high else f"{low} to {high}"


def pictures(collected: Collected) -> dict[str, Picture]:
    """Natural accuracy against AutoAttack, seconds as the area of a point; {} if nothing of ours is measured."""
    places, item = _places(collected), collected.item
    if not places:
        return {}
    best = max((one.autoattack for one in item.others), default=0.0)
    floor = min(_FLOOR * best, *(place.autoattack for place in places))
    shown = [one for one in item.others if one.autoattack >= floor]
    dots = [Dot(one.name, one.natural, one.autoattack, one.seconds) for one in shown]
    dots += [
        Dot(
            place.row.label,
            place.natural,
            place.autoattack,
            place.seconds,
            ours=True,
            filled=_friendly(collected.of(place.row)[0]),
        )
        for place in places
    ]
    title = f"{item.where}: natural against AutoAttack accuracy"
    drawn = scatter(
        dots,
        xlabel="natural accuracy (%)",
        ylabel="AutoAttack accuracy (%)",
        title=title,
        legend=("ours, friendly", "ours, worst case", f"published ({len(shown)})"),
    )
    low = "; ".join(
        f"{one.name} {rounded(one.natural)} and {rounded(one.autoattack)}" for one in item.others if one not in shown
    )
    each = "; ".join(
        f"{place.row.label} {rounded(place.natural)} and {rounded(place.autoattack)} in "
        f"{_timed(place.seconds, place.beside)} s"
        for place in places
    )
    caption = (
        f"Natural and AutoAttack accuracy, ours: {each}. Up and right is better; the area of a point is its training "
        f"time, on different GPUs.{f' Published methods below the picture: {low}.' if low else ''}"
    )
    return {item.name: Picture(drawn, title, caption)}


def _friendly(result: JobResult) -> bool:
    """Whether a method stops its attack early, by the backward passes that it took."""
    return bool(min(result["history"]["backprops"]) < result["config"]["attack"]["steps"])
