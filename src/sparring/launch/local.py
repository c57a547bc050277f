"""Units on this machine: one after the other in this process, or several processes side by side.

A unit that fails does not end the others: in a sweep, a learning rate that is too large is a result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from sparring.errors import RunFailed, UserError
from sparring.launch.unit import Unit
from sparring.training.gpu_sharing import run_queue
from sparring.training.loop import Diverged

Failures = Mapping[str, str]  # why a unit failed, by its name


class Stopped(Exception):
    """The units were asked to stop, and have saved their places."""


def in_turn(units: Sequence[Unit], call: Callable[[list[str]], object], tell: Callable[[str], None]) -> Failures:
    """Run the units in this process, in order.

    Args:
        call: runs the words of a unit. What it raises where the run itself fails is noted; a stop is passed on.
    """
    failures: dict[str, str] = {}
    for number, unit in enumerate(units, 1):
        tell(f"{number} of {len(units)}: {unit.name}")
        try:
            call(list(unit.words))
        except (UserError, Diverged) as error:
            failures[unit.name] = str(error)
            tell(f"failed: {error}")
        except RunFailed as error:
            raise Stopped(str(error)) from error
    return failures


def side_by_side(
    units: Sequence[Unit],
    *,
    at_once: int,
    device: torch.device,
    stop: Callable[[], bool],
    tell: Callable[[str], None],
) -> Failures:
    """Run the units in processes, at most `at_once` at a time.

    Raises:
        Stopped: `stop` returned True; all have saved their places.
    """
    ended = run_queue(
        [unit.command for unit in units],
        at_once=at_once,
        device=device,
        stop=stop,
        tell=lambda number, line: tell(f"{units[number].name}: {line}"),
    )
    if any(each.code is None for each in ended):
        raise Stopped("stopped all processes; saved")
    return {unit.name: each.complaint for unit, each in zip(units, ended, strict=True) if each.code}
