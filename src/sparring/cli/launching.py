"""What `sweep` and `reproduce` share about launchers: flags that do not go together, and the report of a submission."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Literal

from sparring.cli.signals import stopped
from sparring.errors import RunFailed, UserError
from sparring.launch import Unit
from sparring.launch.slurm import Slurm, Submission, cancel, log_of, states, submit, whole

Launcher = Literal["local", "slurm"]
FOLDER = "slurm"  # of the logs and of jobs.json, beside the run folders
_LOOK = 5.0  # seconds between two looks at the queue


def check(launcher: Launcher, slurm: Slurm, *, wait: bool, at_once: int) -> None:
    """Refuse flags that the launcher does not read."""
    if launcher == "slurm" and at_once != 1:
        raise UserError(
            f"--at-once {at_once} is for processes of this machine. For jobs write --slurm.at-most {at_once}."
        )
    if launcher == "local" and wait:
        raise UserError("--wait is for jobs of a cluster; runs on this machine are always awaited. Leave it out.")
    for name, field in Slurm.__dataclass_fields__.items():
        if launcher == "local" and getattr(slurm, name) != field.default:
            raise UserError(f"--slurm.{name.replace('_', '-')} is for jobs of a cluster. Add --launcher slurm.")


def hand_in(units: Sequence[Unit], folder: Path, slurm: Slurm, *, name: str, tell: Callable[[str], None]) -> Submission:
    """Submit what is not in the queue yet, and say which jobs there are, where they log and how to end them."""
    found = submit(units, folder, slurm, name=name)
    numbers = [*found.queued.values(), *found.new.values()]
    if found.queued:
        tell(f"already in the queue: {len(found.queued)} of {len(units)}")
    if found.new:
        tell(f"submitted: {len(found.new)} as job {', '.join(whole(found.new.values()))}")
        for unit, number in found.new.items():
            tell(f"  {number}  {unit}")
    tell(f"logs: {folder}    state: squeue --me    cancel: {cancel(numbers)}")
    return found


def wait_for(
    units: Sequence[Unit],
    submission: Submission,
    folder: Path,
    *,
    finished: Callable[[], Collection[str]],
    stop: Callable[[], bool],
    tell: Callable[[str], None],
) -> None:
    """Wait until no job is in the queue, with a line whenever something changes.

    Args:
        finished: the names of the units whose results are there.

    Raises:
        RunFailed: some have ended without their results, or a signal ended the wait; the jobs go on.
    """
    numbers = {**submission.queued, **submission.new}
    before = ""
    while True:
        alive = states(numbers.values())  # before the results: what has left the queue has written them
        running = sum(state == "running" for state in alive.values())
        line = f"{len(finished())} of {len(units)} finished, {running} running, {len(alive) - running} queued"
        if line != before:
            tell(line)
            before = line
        if not alive:
            break
        end = time.monotonic() + _LOOK
        while time.monotonic() < end:
            if stop():
                raise stopped(f"stopped waiting; the jobs go on. To end them: {cancel(list(alive))}")
            time.sleep(0.1)
    done = finished()
    failed = [unit.name for unit in units if unit.name not in done]
    if failed:
        log = log_of(numbers[failed[0]], folder).with_suffix(".err")
        raise RunFailed(
            f"{len(failed)} of {len(units)} jobs ended without a result: {', '.join(failed[:3])}"
            f"{', ...' if len(failed) > 3 else ''}. See {shlex.quote(str(log))}; the same command submits them again."
        )
