"""Whether a run can be given another length, and what that changes.

Schedules that follow the length of a run would have had other values in the epochs already trained: such a run is
another run, unless its schedules are given anew. Knows no files.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from sparring.errors import UserError
from sparring.schedules import Schedule
from sparring.training.config import Config, same

_PER_EPOCH = 4  # places in an epoch at which the past is compared


def scheduled(config: Config) -> dict[str, Schedule]:
    """The schedules of a run, by their names on the command line: lr, attack.tau."""
    own = {name: value for name, value in vars(config).items() if isinstance(value, Schedule)}
    attack = {f"attack.{name}": value for name, value in vars(config.objective).items() if isinstance(value, Schedule)}
    return own | attack


def same_but_for_length(run: Config, wanted: Config) -> bool:
    """Whether two configurations differ in their length, and else in schedules alone."""
    if run.epochs == wanted.epochs or type(run.objective) is not type(wanted.objective):
        return False
    schedules: dict[str, Any] = {name: value for name, value in vars(wanted).items() if isinstance(value, Schedule)}
    attack = {name: value for name, value in vars(wanted.objective).items() if isinstance(value, Schedule)}
    objective = replace(run.objective, **attack)  # type: ignore[type-var]
    return same(replace(run, epochs=wanted.epochs, objective=objective, **schedules), wanted)


def lengthen(folder: object, run: Config, wanted: Config, *, begun: int, renewed: Collection[str]) -> dict[str, Any]:
    """What a run of another length leaves behind, for its config.json: the earlier length and schedules.

    Args:
        begun: epochs that were trained, the one in progress included.
        renewed: the schedules that the caller gave for the longer run, by name; "attack" stands for all of its own.

    Raises:
        UserError: fewer epochs than were trained, or a schedule that would change the past.
    """
    if wanted.epochs < begun:
        raise UserError(
            f"{folder} has trained {begun} epochs, --epochs {wanted.epochs} is fewer. Give more, or train another run: "
            "--out."
        )
    before, after = scheduled(run), scheduled(wanted)
    for name, schedule in before.items():
        given = schedule != after[name] or name in renewed or ("attack" in renewed and name.startswith("attack."))
        if not given and _past(schedule, begun, run.epochs) != _past(schedule, begun, wanted.epochs):
            raise UserError(
                f"--{name} {schedule} follows the length of the run: of {wanted.epochs} epochs, the first {begun} "
                f"would have had other values. Give it anew (--{name} ...), or train another run: --out."
            )
    changed = {name: str(schedule) for name, schedule in before.items() if schedule != after[name]}
    return {"epochs": run.epochs, "trained": begun, **changed}


def in_words(folder: object, earlier: dict[str, Any], wanted: Config) -> str:
    """What a longer run changes, in one line."""
    after = scheduled(wanted)
    changed = [f"{name} {value} -> {after[name]}" for name, value in earlier.items() if name in after]
    planned = f"epochs {earlier['epochs']} -> {wanted.epochs}"
    trained = f"{earlier['trained']} epoch{'s' if earlier['trained'] != 1 else ''}"
    return f"{folder} goes on after {trained}: {'; '.join([planned, *changed])}."


def _past(schedule: Schedule, begun: int, epochs: int) -> list[float]:
    """The values of the epochs that were trained, rounded as far as the arithmetic is."""
    places = [1 + place / _PER_EPOCH for place in range(begun * _PER_EPOCH)]
    values = [schedule.at(place, epochs) for place in places]
    return [0.0 if not value else float(f"{value:.9g}") if math.isfinite(value) else value for value in values]
