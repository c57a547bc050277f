"""`sparring reproduce`: a table or figure of the paper, from training to the finished table or picture."""

from __future__ import annotations

import math
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
import tyro

from sparring.cli.arguments import parse
from sparring.cli.console import Screen, let_go
from sparring.cli.launching import FOLDER, Launcher, check, hand_in, wait_for
from sparring.cli.paper_item import show
from sparring.cli.paper_listing import count, list_items, list_jobs
from sparring.cli.progress import command_bar
from sparring.cli.result_folder import make_folder
from sparring.cli.signals import breakable, stopped
from sparring.data import describe
from sparring.errors import RunFailed, UserError
from sparring.evaluation.protocols import find as find_protocol
from sparring.files.leftovers import sweep
from sparring.launch import Unit
from sparring.launch.slurm import DEFAULT, Slurm
from sparring.paper import Job, Stopped, Workspace, carry_out, cost, plan, remaining, results, specs
from sparring.paper.collect import collect
from sparring.paper.headline import headline
from sparring.paper.plan import home
from sparring.paper.render import draw
from sparring.paper.specs import Item, Robustness
from sparring.seeds import check_seed
from sparring.training.checkpoint import write_text
from sparring.training.distributed import pick_device
from sparring.training.gpu_sharing import run_together
from sparring.training.signals import stopping

DESCRIPTION = """Reproduce a table or figure of the paper, beside the paper's own numbers. Finished runs are reused,
interrupted ones resume. Without an item: list the items, their cost on one H200, and what is measured.

Examples:
  sparring reproduce
  sparring reproduce fig-motivation
  sparring reproduce table1 --scale lite
  sparring reproduce table1 --rows 'fat-*' --seeds 0 1 2 --max-minutes 8.5
  sparring reproduce fig-tau --scale full --rows 'small_cnn-*' --at-once 11
  sparring reproduce fastat --scale full --rows fat madry
  sparring reproduce table1 --launcher slurm --slurm.partition gpu
  sparring reproduce table1 --draw
  sparring reproduce --draw"""

HEADLINE = "headline.md"
_PATIENCE = 3600.0  # seconds: longer work runs on a CPU only with --device cpu
_WORTH_A_NOTE = 600.0  # seconds: longer work on a CPU is announced


@dataclass(frozen=True)
class Options:
    """What to reproduce, how much of it, and where."""

    item: Annotated[str | None, tyro.conf.Positional] = None
    """table1 ... table4, fig-tau, fig-bps, fig-eps, ..., or a public benchmark: fastat, fastat-tiny (Tiny ImageNet).
    Without it, list them all."""
    scale: Literal["lite", "full"] = "lite"
    """full: the paper's networks, epochs and seeds. lite: a shorter schedule that keeps the comparison."""
    rows: tuple[str, ...] = ()
    """Only the rows or points whose names match: fat-8, small_cnn-*. By default all."""
    seeds: tuple[int, ...] = ()
    """Seeds to train with; by default one at lite, and as many as in the paper at full."""
    limit: int | None = None
    """Measure on the first N test images only; written to results/ITEM/limitN, apart from full results."""
    at_once: int = 1
    """Processes that share the rows and the GPU (with NVIDIA MPS if present): four do 1.5 times the work of one."""
    share: int | None = None
    """Per cent of the GPU that each process may use; by default 200 / at-once, which was best with 4 and with 11."""
    launcher: Launcher = "local"
    """local: on this machine. slurm: as an array of jobs, one for each training run and what is measured on it."""
    wait: bool = False
    """Wait until the jobs have ended, then draw."""
    slurm: Slurm = DEFAULT
    max_minutes: float | None = None
    """Stop cleanly after this many minutes, between two steps; the same command continues."""
    show: bool = True
    """Print and draw the table or figure when the work is done."""
    draw: bool = False
    """Only draw from existing results; train and measure nothing. Without an item: draw all items."""
    plan: bool = False
    """Only list the jobs with their states and costs."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    results: Path = Path("results")
    """Folder of the results."""
    runs: Path = Path("runs/paper")
    """Folder of the run folders."""


def run(argv: list[str]) -> int:
    """The command."""
    options = parse(Options, argv, prog="sparring reproduce", description=DESCRIPTION)
    screen = Screen()
    for flag, folder in (("--results", options.results), ("--runs", options.runs)):
        if folder.exists() and not folder.is_dir():
            raise UserError(f"{folder} is a file. Give a folder: {flag} FOLDER.")
    if options.item is None:
        _refuse_flags_that_need_an_item(options)
        if options.draw:
            _draw_all(screen, options)
        else:
            list_items(screen, options.results)
        return 0
    item = specs.find(options.item)
    if options.plan and options.draw:
        raise UserError("--plan lists the jobs and --draw draws existing results. Give one of them.")
    if options.draw and (options.rows or options.seeds):
        raise UserError("--draw draws everything that is measured. Leave out --rows and --seeds.")
    if options.draw and options.scale == "full" and not _any_at(item, options):
        command = f"sparring reproduce {item.name} --draw"
        raise UserError(f"nothing of {item.name} is measured at scale full. To draw what exists: {command}.")
    jobs = _jobs(item, options)
    _check_launcher(options)
    if options.plan:
        screen.print(list_jobs(jobs))
        return 0
    sweep(home(options.results, item, options.limit), _written)
    finished = True
    if options.launcher == "slurm":
        if options.show:
            _report_existing(jobs, screen)
        if not _by_slurm(jobs, options, screen):
            return 0
    elif not options.draw:
        device = pick_device(options.device)
        _check_feasible(item, jobs, options, device)
        if options.show:
            _report_existing(jobs, screen)
        if device.type == "cpu" and cost.on_a_cpu(jobs) > _WORTH_A_NOTE:
            screen.print(f"note: on a CPU this takes about {cost.spell(cost.on_a_cpu(jobs))}", highlight=False)
        finished = _work(jobs, options, device, screen, shlex.join(["sparring", "reproduce", *argv]))
    if not options.show:
        return 0
    # --draw alone shows the scale with the most results: `lite` is also the default of --scale.
    wanted = None if options.draw and options.scale == "lite" else options.scale
    collected = collect(item, options.results, options.limit, wanted)
    show(collected, screen)
    if not finished:
        left = len(remaining(jobs))
        screen.print(f"Time is up with {left} of {count(jobs)} left. The same command continues.", highlight=False)
    elif not collected.found:
        screen.print(f"Nothing of {item.name} is measured yet. Start with: sparring reproduce {item.name}")
    return 0


def _written(name: str) -> bool:
    """Whether the folder of an item has files of this name."""
    return name == "table.md" or name.endswith(".png") or (name.endswith(".json") and "-seed" in name)


def _any_at(item: Item, options: Options) -> bool:
    """Whether anything is measured at the requested scale."""
    return any(scale == options.scale for _, scale in collect(item, options.results, options.limit).found)


def _refuse_flags_that_need_an_item(options: Options) -> None:
    """Without an item these flags would be ignored."""
    named = [row for row in options.rows if row in specs.ITEMS]
    if named:
        raise UserError(f"the item goes first: sparring reproduce {named[0]} --rows ...")
    for name, field in Options.__dataclass_fields__.items():
        if name not in ("item", "draw", "results") and getattr(options, name) != field.default:
            flag = f"--{name.replace('_', '-')}"
            raise UserError(f"{flag} needs an item: sparring reproduce ITEM {flag} ... The items: sparring reproduce.")


def _report_existing(jobs: Sequence[Job], screen: Screen) -> None:
    """Print how many jobs are already measured, and which results will be replaced."""
    left = remaining(jobs)
    done = [job for job in jobs if job not in left]
    if done:
        again = "" if left else " Nothing is run; to measure again: --results FOLDER."
        folder = done[0].path.parent
        screen.print(f"already measured: {len(done)} of {count(jobs)}, in {folder}.{again}", highlight=False)
    for job in left:
        found = results.read(job.path)
        if found is not None and not results.matches(found, job.config, job.row.measure, job.limit):
            old = f"{job.path.name}.old"
            screen.print(f"{job.path} has another declaration than the current one: kept as {old}", highlight=False)


def _jobs(item: Item, options: Options) -> list[Job]:
    if options.limit is not None and options.limit < 1:
        raise UserError(f"--limit must be at least 1 image, got {options.limit}. Leave it out to use all images.")
    if options.max_minutes is not None and not 0 < options.max_minutes < math.inf:
        raise UserError(f"--max-minutes must be above 0, got {options.max_minutes}. Leave it out for no limit.")
    if options.at_once < 1:
        raise UserError(f"--at-once must be at least 1 process, got {options.at_once}. Write for example 4.")
    if options.share is not None and not 1 <= options.share <= 100:
        raise UserError(f"--share must be 1 to 100 per cent, got {options.share}. Leave it out for the default.")
    if options.share is not None and options.share < 100 and options.at_once == 1:
        raise UserError(f"--share {options.share} is for several processes. Give --at-once as well, or leave it out.")
    for seed in options.seeds:
        check_seed(seed)
    jobs = plan(
        item,
        scale=options.scale,
        runs_folder=options.runs,
        results_folder=options.results,
        seeds=tuple(dict.fromkeys(options.seeds)),
        rows=options.rows,
        limit=options.limit,
    )
    if options.limit is not None and not any(isinstance(job.row.measure, Robustness) for job in jobs):
        raise UserError(f"--limit is for items that measure accuracy under attack; {item.name} does not. Leave it out.")
    if not jobs:
        other = "full" if options.scale == "lite" else "lite"
        raise UserError(f"{item.name} has nothing at scale {options.scale}. Write --scale {other}.")
    return jobs


def _check_feasible(item: Item, jobs: Sequence[Job], options: Options, device: torch.device) -> None:
    """Refuse before any work what this machine cannot do: missing data, weeks on a CPU, folders it cannot write."""
    ahead = remaining(jobs)
    if device.type == "cpu" and options.device == "auto" and not _soon(ahead):
        raise UserError(
            f"{item.name} at scale {options.scale} needs a GPU (about {cost.spell(cost.left(ahead))} on an H200), and "
            f"there is none. Run it on a machine with CUDA, or {_instead(item, ahead, options)}; to use the "
            "CPU anyway add --device cpu."
        )
    here = {source.name: source for source in describe()}
    for spec in sorted({job.config.data.partition(":")[0] for job in ahead if job.config is not None}):
        if not here[spec].present:
            raise UserError(f"{item.name} needs {spec}, which is missing. Get it: {here[spec].how}.")
    for job in ahead:  # an unknown protocol is an error before the training
        if isinstance(job.row.measure, Robustness):
            find_protocol(job.row.measure.protocol)
    if ahead:
        make_folder(ahead[0].path.parent, "--results")
    if any(job.config is not None for job in ahead):
        make_folder(options.runs, "--runs")


def _soon(jobs: Sequence[Job]) -> bool:
    """Whether a CPU finishes in about an hour."""
    return cost.on_a_cpu(jobs) <= _PATIENCE


def _instead(item: Item, ahead: Sequence[Job], options: Options) -> str:
    """What to do on a CPU instead: the lite scale, some rows, or another item."""
    jobs = {
        name: plan(other, scale="lite", runs_folder=options.runs, results_folder=options.results)
        for name, other in specs.ITEMS.items()
    }
    if options.scale == "full" and jobs.get(item.name) and _soon(jobs[item.name]):
        return "run the short version here with --scale lite"
    names = dict.fromkeys(job.row.name for job in ahead)
    rows = [name for name in names if _soon([job for job in ahead if job.row.name == name])]
    if rows:
        return f"run a part of it here with --rows {' '.join(rows)}"
    short = [name for name, each in jobs.items() if each and _soon(each)]
    return f"try what a CPU does in minutes: sparring reproduce {short[0]}" if short else "run fewer rows with --rows"


def _work(jobs: Sequence[Job], options: Options, device: torch.device, screen: Screen, again: str) -> bool:
    """Carry out the jobs; whether all of them finished before the time was up."""
    until = math.inf if options.max_minutes is None else time.monotonic() + 60 * options.max_minutes

    def log(line: str) -> None:
        screen.print(line, highlight=False, soft_wrap=True)

    try:
        with stopping() as stop:
            if options.at_once > 1:
                return _share(jobs, options, device, stop, log)
            workspace = Workspace(
                device,
                stop=lambda: stop() or time.monotonic() > until,
                breakable=lambda: breakable(until),
                tracker=lambda job: command_bar(screen, title=_title(job, options)),
                log=log,
                progress=True,
            )
            carry_out(jobs, workspace)
    except Stopped as where:
        if time.monotonic() <= until:
            raise stopped(f"stopped {where}. Continue with: {again}") from None
        log(f"stopped {where}")
        return False
    except KeyboardInterrupt:
        raise stopped(f"interrupted; the steps since the last checkpoint are lost. Continue with: {again}") from None
    except BrokenPipeError:
        let_go()
        raise RunFailed(f"stopped, because the output pipe was closed. Continue with: {again}") from None
    return True


def _title(job: Job, options: Options) -> str:
    """The start of a line about an epoch: the row, and its seed if seeds were given."""
    return f"{job.row.name} seed {job.seed} " if options.seeds else f"{job.row.name} "


def _check_launcher(options: Options) -> None:
    """Refuse flags that the launcher does not read."""
    check(options.launcher, options.slurm, wait=options.wait, at_once=options.at_once)
    if options.launcher == "local":
        return
    if options.draw:
        raise UserError("--draw draws existing results here. Leave out --launcher slurm.")
    if options.max_minutes is not None:
        raise UserError("--max-minutes is for work on this machine. For jobs write --slurm.time MINUTES.")
    if options.slurm.gpus > 1:
        raise UserError(f"a run of the paper takes one GPU, got --slurm.gpus {options.slurm.gpus}. Leave it out.")


def _by_slurm(jobs: Sequence[Job], options: Options, screen: Screen) -> bool:
    """Hand what is missing to Slurm; whether all of it is there."""
    groups = _by_run(remaining(jobs))
    if not groups:
        return True

    def tell(line: str) -> None:
        screen.print(line, highlight=False, soft_wrap=True)

    item, folder = jobs[0].item, options.runs / FOLDER
    make_folder(jobs[0].path.parent, "--results")
    make_folder(options.runs, "--runs")
    units = [Unit(name, tuple(_command(group, options, options.device)[3:])) for name, group in groups.items()]
    found = hand_in(units, folder, options.slurm, name=item, tell=tell)
    if not options.wait:
        tell(f"{_drawing(item, options)} draws what is measured.")
        return False

    def finished() -> list[str]:
        return [name for name, group in groups.items() if not remaining(group)]

    with stopping() as stop:
        wait_for(units, found, folder, finished=finished, stop=stop, tell=tell)
    return True


def _drawing(item: str, options: Options) -> str:
    """The command that draws what these jobs measure."""
    words = ["sparring", "reproduce", item, "--draw"]
    words += ["--scale", options.scale] if options.scale == "full" else []
    words += ["--limit", str(options.limit)] if options.limit else []
    words += ["--results", str(options.results)] if options.results != Options.results else []
    return shlex.join(words)


def _by_run(jobs: Sequence[Job]) -> dict[str, list[Job]]:
    """Jobs by the run that they train or measure: each group is independent of the others.

    Rows that share a run are one group; a run has one seed, so that a command can name the group exactly.
    """
    groups: dict[str, list[Job]] = {}
    for job in jobs:
        name = f"{job.item}-{job.path.stem}" if job.folder is None else job.folder.name
        groups.setdefault(name, []).append(job)
    return groups


def _share(
    jobs: Sequence[Job],
    options: Options,
    device: torch.device,
    stop: Callable[[], bool],
    log: Callable[[str], None],
) -> bool:
    """Carry out the jobs in several processes of this command, each with its own time limit."""
    commands = [_command(share, options, str(device)) for share in cost.share_out(remaining(jobs), options.at_once)]
    if commands and not run_together(commands, device=device, share=options.share, stop=stop, tell=log):
        raise Stopped("all processes; saved")
    return not remaining(jobs)


def _command(share: Sequence[Job], options: Options, device: str) -> list[str]:
    """The command that carries out exactly these jobs."""
    rows = dict.fromkeys(job.row.name for job in share)
    seeds = dict.fromkeys(str(job.seed) for job in share)
    words = [sys.executable, "-m", "sparring", "reproduce", share[0].item, "--no-show", "--scale", options.scale]
    words += ["--rows", *rows, "--seeds", *seeds, "--device", device]
    words += ["--results", str(options.results), "--runs", str(options.runs)]
    words += ["--limit", str(options.limit)] if options.limit else []
    return words + (["--max-minutes", f"{options.max_minutes:.3f}"] if options.max_minutes else [])


def _draw_all(screen: Screen, options: Options) -> None:
    """Draw every item that has results, and the headline of the tables."""
    sweep(options.results, HEADLINE.__eq__)
    for item in specs.ITEMS.values():
        sweep(home(options.results, item, None), _written)
    found = [collect(item, options.results) for item in specs.ITEMS.values()]
    for collected in found:
        for path in draw(collected) if collected.found or collected.begun else ():
            screen.print(f"wrote {path}", highlight=False, soft_wrap=True)
    if not any(collected.found or collected.begun for collected in found):
        raise UserError(f"there are no results in {options.results}. Start with: sparring reproduce fig-motivation.")
    path, text = options.results / HEADLINE, headline(options.results)
    if text:
        write_text(path, text)
        screen.print(f"wrote {path}", highlight=False, soft_wrap=True)
    else:
        screen.print(f"{path} is not written: none of its tables is measured.", highlight=False, soft_wrap=True)
