"""Runs that differ in their seed alone as one method: means, and standard deviations beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from sparring.report.content import Method
from sparring.report.settings import mean


def averaged(methods: Sequence[Method], seeds: Sequence[int]) -> Method:
    """The mean of one method under several seeds, measured in the same way."""
    first = methods[0]
    if len(methods) == 1:
        return first
    columns = [name for name in first.accuracies if all(name in each.accuracies for each in methods)]
    accuracies = {name: mean([each.accuracies[name] for each in methods]) for name in columns}
    history, bands = _history([each.history for each in methods])
    spoken = ", ".join(map(str, sorted(seeds)))
    return replace(
        first,
        about=f"{first.about.removesuffix(f', seed {seeds[0]}')}, mean ± standard deviation of seeds {spoken}",
        accuracies={name: middle for name, (middle, _) in accuracies.items()},
        spread={name: deviation for name, (_, deviation) in accuracies.items() if deviation is not None},
        backprops=_of([each.backprops for each in methods]),
        seconds=_of([each.seconds for each in methods]),
        history=history,
        bands=bands,
        doubts=[f"{doubt} (seed {seed})" for each, seed in zip(methods, seeds, strict=True) for doubt in each.doubts],
        by_class=_by_class([each.by_class for each in methods]),
    )


def _of(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return mean(known)[0] if len(known) == len(values) else None


def _history(
    histories: Sequence[Sequence[Mapping[str, Any]]],
) -> tuple[list[dict[str, Any]], list[dict[str, float]]]:
    """Means and deviations of the numbers of every epoch that all runs have."""
    means, bands = [], []
    for records in zip(*histories, strict=False):
        names = [name for name in records[0] if all(_number(record.get(name)) for record in records)]
        found = {name: mean([record[name] for record in records]) for name in names}
        means.append({name: middle for name, (middle, _) in found.items()} | {"epoch": records[0]["epoch"]})
        bands.append({name: deviation for name, (_, deviation) in found.items() if deviation is not None})
    return means, bands


def _by_class(found: Sequence[Mapping[str, Mapping[str, float]]]) -> dict[str, dict[str, float]]:
    """The mean by column and class, of what all have."""
    return {
        column: {
            name: mean([each[column][name] for each in found])[0]
            for name in classes
            if all(name in each[column] for each in found)
        }
        for column, classes in found[0].items()
        if all(column in each for each in found)
    }


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
