"""What differs between runs, read off their flat configurations, and runs that differ in their seed alone.

Works on names and values only: no field of a configuration is known here but the seed.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from sparring.training.config import spelled

Settings = Mapping[str, Any]  # names as the command line has them: epochs, attack.eps
SEED = "seed"
T = TypeVar("T")


def differing(runs: Sequence[Settings]) -> list[str]:
    """The settings in which runs differ, without the seed. One that an objective does not have is no difference."""
    return [name for name in _names(runs) if len({_key(run[name]) for run in runs if name in run}) > 1]


def common(runs: Sequence[Settings]) -> dict[str, str]:
    """The settings that all runs which have them share, without the seed, spelled."""
    varied = set(differing(runs))
    shared = {name: next(run[name] for run in runs if name in run) for name in _names(runs) if name not in varied}
    return {name: spelled(value) for name, value in shared.items()}


def headings(names: Sequence[str]) -> dict[str, str]:
    """Settings as column headings: 'step size' for attack.step_size, unless another setting is called that."""
    short = [name.rpartition(".")[2].replace("_", " ") for name in names]
    return {name: word if short.count(word) == 1 else name for name, word in zip(names, short, strict=True)}


def cell(run: Settings, name: str) -> str:
    """A setting as it is printed; '' where the run does not have it."""
    return spelled(run[name]) if name in run else ""


def by_seed(runs: Sequence[tuple[Settings, T]]) -> list[list[T]]:
    """Runs that differ in their seed alone, together. A second run with the same seed is not one more seed."""
    groups: list[list[T]] = []
    open_to: dict[str, dict[Any, int]] = {}  # settings -> seed -> how many groups with these settings have it
    places: dict[str, list[int]] = {}  # settings -> their groups
    for settings, run in runs:
        key, seed = _key({name: value for name, value in settings.items() if name != SEED}), settings.get(SEED)
        own = places.setdefault(key, []) if settings else []
        taken = open_to.setdefault(key, {})
        number = taken.get(seed, 0)  # a seed's second run goes to the second group, and so on
        if number < len(own):
            groups[own[number]].append(run)
        else:
            own.append(len(groups))
            groups.append([run])
        if settings:
            taken[seed] = number + 1
    return groups


def mean(values: Sequence[float]) -> tuple[float, float | None]:
    """The mean, and the standard deviation where there are several values."""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None


def _names(runs: Sequence[Settings]) -> list[str]:
    return [name for name in dict.fromkeys(name for run in runs for name in run) if name != SEED]


def _key(value: object) -> str:
    """A value of JSON as text: equal values have equal texts."""
    return json.dumps(value, sort_keys=True, default=str)
