"""`sparring sweep`: many runs of recipes, overrides and seeds, on this machine or a cluster."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.table import Table

from sparring.cli import compare, train
from sparring.cli.arguments import parse
from sparring.cli.console import Screen, let_go
from sparring.cli.launching import FOLDER, Launcher, check, hand_in, wait_for
from sparring.cli.result_folder import make_folder
from sparring.cli.signals import stopped
from sparring.cli.sweep_file import Run, Sweep, read, runs
from sparring.errors import RunFailed, UserError
from sparring.launch import local
from sparring.launch.slurm import DEFAULT, Slurm, states, submitted
from sparring.training.distributed import pick_device
from sparring.training.signals import stopping

DESCRIPTION = """Train every combination of recipes, overrides and seeds that a file of TOML declares. All of them are
checked before the first begins. Finished runs are kept, interrupted ones resume: the same command does what is missing.

A file, here tau.toml:
  recipe = "fat-digits"          # or a list
  seeds = [0, 1, 2]
  out = "runs/sweeps/tau"
  [set]                          # in every run: the flags of `sparring train` without their dashes
  epochs = 10
  [grid]                         # every combination of these
  attack.tau = [0, 1, 3]

Examples:
  sparring sweep tau.toml --plan
  sparring sweep tau.toml --at-once 4
  sparring sweep tau.toml --launcher slurm --slurm.partition gpu --slurm.time 120
  sparring sweep tau.toml --launcher slurm --wait"""


@dataclass(frozen=True)
class Options:
    """Which sweep, and where it runs."""

    file: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")]
    """The file of the sweep, in TOML."""
    launcher: Launcher = "local"
    """local: on this machine. slurm: as an array of jobs."""
    at_once: int = 1
    """Processes of this machine that share the runs and the GPU (with NVIDIA MPS if present)."""
    plan: bool = False
    """Only list the runs and their states."""
    wait: bool = False
    """Wait until the jobs have ended."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    slurm: Slurm = DEFAULT


def run(argv: list[str]) -> int:
    """The command."""
    options = parse(Options, argv, prog="sparring sweep", description=DESCRIPTION)
    if options.at_once < 1:
        raise UserError(f"--at-once must be at least 1 process, got {options.at_once}. Write for example 4.")
    check(options.launcher, options.slurm, wait=options.wait, at_once=options.at_once)
    sweep = read(options.file)
    planned = runs(sweep, device=options.device)
    screen = Screen()
    if options.plan:
        screen.print(_listed(planned, sweep, options))
        return 0
    make_folder(sweep.out, "out in the file")
    again = shlex.join(["sparring", "sweep", *argv])
    missing = [each for each in planned if not each.finished]
    if len(missing) < len(planned):
        _say(screen, f"already finished: {len(planned) - len(missing)} of {len(planned)} runs.")
    if missing and options.launcher == "slurm":
        if not _by_slurm(missing, sweep, options, screen):
            return 0
    elif missing:
        _here(missing, options, screen, again)
    return compare.run([str(sweep.out)])


def _say(screen: Screen, line: str) -> None:
    screen.print(line, highlight=False, soft_wrap=True)


def _listed(planned: Sequence[Run], sweep: Sweep, options: Options) -> Table:
    """The runs and their states; with the Slurm launcher, also their jobs."""
    jobs: dict[str, str] = {}
    if options.launcher == "slurm":
        known = submitted(sweep.out / FOLDER)
        alive = states(known.values()) if known else {}
        jobs = {name: f", job {number} {alive[number]}" for name, number in known.items() if number in alive}
    table = Table(box=None, pad_edge=False)
    table.add_column("run", no_wrap=True, min_width=max(len(each.unit.name) for each in planned))
    table.add_column("state", no_wrap=True)
    for each in planned:
        table.add_row(each.unit.name, each.state + jobs.get(each.unit.name, ""))
    done = sum(each.finished for each in planned)
    table.add_row(f"{len(planned)} runs in {sweep.out}", f"{done} finished")
    return table


def _here(missing: Sequence[Run], options: Options, screen: Screen, again: str) -> None:
    """Train the runs on this machine."""
    device = pick_device(options.device)
    units = [each.unit for each in missing]

    def tell(line: str) -> None:
        _say(screen, line)

    try:
        if options.at_once == 1:
            failures = local.in_turn(units, lambda words: train.run(words[1:]), tell)
        else:
            with stopping() as stop:
                failures = local.side_by_side(units, at_once=options.at_once, device=device, stop=stop, tell=tell)
    except local.Stopped as where:
        raise stopped(f"{str(where).partition(' Continue with: ')[0].rstrip('.')}. Continue with: {again}") from None
    except BrokenPipeError:
        let_go()
        raise RunFailed(f"stopped, because the output pipe was closed. Continue with: {again}") from None
    if failures:
        name, why = next(iter(failures.items()))
        raise RunFailed(f"{len(failures)} of {len(units)} runs failed; {name}: {why} To try again: {again}")


def _by_slurm(missing: Sequence[Run], sweep: Sweep, options: Options, screen: Screen) -> bool:
    """Hand the runs to Slurm; whether they were awaited."""
    units = [each.unit for each in missing]
    folder = sweep.out / FOLDER
    found = hand_in(units, folder, options.slurm, name=sweep.path.stem, tell=lambda line: _say(screen, line))
    if not options.wait:
        _say(screen, shlex.join(["sparring", "compare", str(sweep.out)]) + " shows what has finished.")
        return False
    with stopping() as stop:
        wait_for(
            units,
            found,
            folder,
            finished=lambda: [each.unit.name for each in missing if each.finished],
            stop=stop,
            tell=lambda line: _say(screen, line),
        )
    return True
