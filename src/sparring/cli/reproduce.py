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
from rich.table import Table

from sparring.cli.arguments import parse
from sparring.cli.console import Screen, let_go
from sparring.cli.evaluate import make_folder
from sparring.cli.paper_item import show
from sparring.cli.progress import TrainingBar
from sparring.cli.train import breakable, pick_device, stopping
from sparring.data import describe
from sparring.errors import RunFailed, UserError
from sparring.evaluation.protocols import find as find_protocol
from sparring.paper import Bench, Job, Stopped, carry_out, cost, plan, results, specs, state, wanting
from sparring.paper.collect import Collected, collect
from sparring.paper.headline import headline
from sparring.paper.plan import default_seeds
from sparring.paper.render import draw
from sparring.paper.specs import Item, Robustness, Scale
from sparring.seeds import check_seed
from sparring.training.checkpoint import write_text
from sparring.training.gpu_sharing import run_together

DESCRIPTION = """Regenerate a table or figure of the paper, beside the paper's own numbers. Finished runs are used
again, interrupted ones continue. Without an item: the list of items, their cost on one H200, and what is measured.

Examples:
  sparring reproduce
  sparring reproduce fig-motivation
  sparring reproduce table1 --scale lite
  sparring reproduce table1 --rows 'fat-*' --seeds 0 1 2 --max-minutes 8.5
  sparring reproduce fig-tau --scale full --rows 'small_cnn-*' --at-once 11
  sparring reproduce table1 --draw
  sparring reproduce --draw"""

_PATIENCE = 3600.0  # seconds that a CPU takes without being asked to
_WORTH_TELLING = 600.0  # seconds on a CPU


@dataclass(frozen=True)
class Options:
    """What to reproduce, how much of it, and where."""

    item: Annotated[str | None, tyro.conf.Positional] = None
    """table1 ... table4, fig-tau, fig-bps, fig-eps, ...; the list unless given."""
    scale: Literal["lite", "full"] = "lite"
    """full is the paper's networks, epochs and trials; lite a shorter schedule that keeps the comparison."""
    rows: tuple[str, ...] = ()
    """Only the rows or points whose names fit: fat-8, small_cnn-*. All unless given."""
    seeds: tuple[int, ...] = ()
    """Seeds to train with; one at lite, the paper's trials at full unless given."""
    limit: int | None = None
    """Measure on the first so many test images: a quick try, kept apart from the results (results/ITEM/limitN)."""
    at_once: int = 1
    """Processes that share the rows and the GPU (under NVIDIA's MPS, where it is): four do 1.5 times as much as one."""
    share: int | None = None
    """Per cent of the GPU that each of these may use. 200 / at-once unless given: best with four, and with eleven."""
    max_minutes: float | None = None
    """Stop cleanly after so many minutes, between two steps; the same command continues."""
    show: bool = True
    """Show the table and draw it when the work is done."""
    draw: bool = False
    """Only draw from the results that are there; train and measure nothing. Without an item: all of them."""
    plan: bool = False
    """Only list the jobs: their state and cost."""
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
            raise UserError(f"{folder} is a file. {flag} is a folder.")
    if options.item is None:
        _refuse_what_needs_an_item(options)
        (_draw_all if options.draw else _list)(screen, options)
        return 0
    item = specs.find(options.item)
    if options.plan and options.draw:
        raise UserError("--plan lists the jobs and --draw draws what is there. Give one of them.")
    if options.draw and (options.rows or options.seeds):
        raise UserError("--draw draws all that is measured. Leave out --rows and --seeds.")
    if options.draw and options.scale == "full" and not _any_at(item, options):
        there = f"sparring reproduce {item.name} --draw"
        raise UserError(f"nothing of {item.name} is measured at scale full. What is there: {there}.")
    jobs = _jobs(item, options)
    if options.plan:
        screen.print(_planned(jobs))
        return 0
    finished = True
    if not options.draw:
        device = pick_device(options.device)
        _possible(item, jobs, options, device)
        if options.show:
            _say_what_is_there(jobs, options, screen)
        if device.type == "cpu" and cost.on_a_cpu(jobs) > _WORTH_TELLING:
            screen.print(f"note: on a CPU this takes about {cost.spell(cost.on_a_cpu(jobs))}", highlight=False)
        finished = _work(jobs, options, device, screen, shlex.join(["sparring", "reproduce", *argv]))
    if not options.show:
        return 0
    # A drawing shows what there is most of, unless it is told; `lite` may just be the default.
    wanted = None if options.draw and options.scale == "lite" else options.scale
    collected = collect(item, options.results, options.limit, wanted)
    show(collected, screen)
    if not finished:
        left = len(wanting(jobs))
        screen.print(f"Time is up with {left} of {_count(jobs)} left. The same command continues.", highlight=False)
    elif not collected.found:
        screen.print(f"Nothing of {item.name} is measured yet. Begin with: sparring reproduce {item.name}")
    return 0


def _any_at(item: Item, options: Options) -> bool:
    """Whether anything is measured at the scale that was asked for."""
    return any(scale == options.scale for _, scale in collect(item, options.results, options.limit).found)


def _refuse_what_needs_an_item(options: Options) -> None:
    """Without an item there is nothing to choose from: a flag would be ignored."""
    named = [row for row in options.rows if row in specs.ITEMS]
    if named:
        raise UserError(f"the item goes first: sparring reproduce {named[0]} --rows ...")
    for name, field in Options.__dataclass_fields__.items():
        if name not in ("item", "draw", "results") and getattr(options, name) != field.default:
            flag = f"--{name.replace('_', '-')}"
            raise UserError(f"{flag} needs an item: sparring reproduce ITEM {flag} ... The items: sparring reproduce.")


def _say_what_is_there(jobs: Sequence[Job], options: Options, screen: Screen) -> None:
    """What is not measured now, because it was before."""
    left = wanting(jobs)
    done = [job for job in jobs if job not in left]
    if done:
        again = "" if left else " Nothing is run; to measure it anew: --results FOLDER."
        folder = done[0].path.parent
        screen.print(f"already measured: {len(done)} of {_count(jobs)}, in {folder}.{again}", highlight=False)
    for job in left:
        found = results.read(job.path)
        if found is not None and not results.matches(found, job.config, job.row.measure, job.limit):
            old = f"{job.path.name}.old"
            screen.print(f"{job.path} was made by another declaration than today's: kept as {old}", highlight=False)


def _count(jobs: Sequence[Job]) -> str:
    return "1 job" if len(jobs) == 1 else f"{len(jobs)} jobs"


def _jobs(item: Item, options: Options) -> list[Job]:
    if options.limit is not None and options.limit < 1:
        raise UserError(f"--limit must be at least 1 image, got {options.limit}. Leave it out for all of them.")
    if options.max_minutes is not None and not 0 < options.max_minutes < math.inf:
        raise UserError(f"--max-minutes must be above 0, got {options.max_minutes}. Leave it out for no limit.")
    if options.at_once < 1:
        raise UserError(f"--at-once must be at least 1 run, got {options.at_once}.")
    if options.share is not None and not 1 <= options.share <= 100:
        raise UserError(f"--share must be 1 to 100 per cent, got {options.share}.")
    if options.share is not None and options.share < 100 and options.at_once == 1:
        raise UserError(f"--share {options.share} is for several processes. Give --at-once too, or leave it out.")
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


def _possible(item: Item, jobs: Sequence[Job], options: Options, device: torch.device) -> None:
    """Refuse, before the first step, what cannot be done here: data that are not there, weeks on a CPU."""
    ahead = wanting(jobs)
    if device.type == "cpu" and options.device == "auto" and not _soon(ahead):
        raise UserError(
            f"{item.name} at scale {options.scale} needs a GPU: about {cost.spell(cost.left(ahead))} on an H200; "
            f"none is here. Run it on a machine with CUDA, or {_instead(item, ahead, options)}; to insist on the "
            "CPU add --device cpu."
        )
    here = {found.name: found for found in describe()}
    for spec in sorted({job.config.data.partition(":")[0] for job in ahead if job.config is not None}):
        if not here[spec].present:
            raise UserError(f"{item.name} needs {spec}, which is not here. Get it: {here[spec].how}.")
    for job in ahead:  # a protocol that does not exist is told before the training
        if isinstance(job.row.measure, Robustness):
            find_protocol(job.row.measure.protocol)
    if ahead:
        make_folder(ahead[0].path.parent, "--results")
    if any(job.config is not None for job in ahead):
        make_folder(options.runs, "--runs")


def _soon(jobs: Sequence[Job]) -> bool:
    """Whether a CPU does it in about an hour."""
    return cost.on_a_cpu(jobs) <= _PATIENCE


def _instead(item: Item, ahead: Sequence[Job], options: Options) -> str:
    """What a CPU can do: the short scale, a row of it, or other items."""
    jobs = {
        name: plan(other, scale="lite", runs_folder=options.runs, results_folder=options.results)
        for name, other in specs.ITEMS.items()
    }
    if options.scale == "full" and jobs.get(item.name) and _soon(jobs[item.name]):
        return "the short version here with --scale lite"
    names = dict.fromkeys(job.row.name for job in ahead)
    rows = [name for name in names if _soon([job for job in ahead if job.row.name == name])]
    if rows:
        return f"a part of it here with --rows {' '.join(rows)}"
    short = [name for name, each in jobs.items() if each and _soon(each)]
    return f"try what a CPU does in minutes: sparring reproduce {short[0]}" if short else "fewer rows of it with --rows"


def _work(jobs: Sequence[Job], options: Options, device: torch.device, screen: Screen, again: str) -> bool:
    """Carry the jobs out; whether they all came to their end before the time was up."""
    until = math.inf if options.max_minutes is None else time.monotonic() + 60 * options.max_minutes

    def tell(line: str) -> None:
        screen.print(line, highlight=False, soft_wrap=True)

    try:
        with stopping() as stop:
            if options.at_once > 1:
                return _share(jobs, options, device, stop, tell)
            bench = Bench(
                device,
                stop=lambda: stop() or time.monotonic() > until,
                breakable=lambda: breakable(until),
                tracker=lambda job: TrainingBar(screen, title=_title(job, options)),
                tell=tell,
                progress=True,
            )
            carry_out(jobs, bench)
    except Stopped as stopped:
        if time.monotonic() <= until:
            raise RunFailed(f"stopped {stopped}. Continue with: {again}") from None
        tell(f"stopped {stopped}")
        return False
    except KeyboardInterrupt:
        raise RunFailed(f"interrupted; the steps since the last checkpoint are lost. Continue with: {again}") from None
    except BrokenPipeError:
        let_go()
        raise RunFailed(f"stopped, because nobody reads the output any more. Continue with: {again}") from None
    return True


def _title(job: Job, options: Options) -> str:
    """Before a line about an epoch: the row, and its seed where there may be others."""
    return f"{job.row.name} seed {job.seed} " if options.seeds else f"{job.row.name} "


def _share(
    jobs: Sequence[Job],
    options: Options,
    device: torch.device,
    stop: Callable[[], bool],
    tell: Callable[[str], None],
) -> bool:
    """The same by several processes of this command; each looks at the clock itself."""
    commands = [_command(share, options, device) for share in cost.share_out(wanting(jobs), options.at_once)]
    if commands and not run_together(commands, device=device, share=options.share, stop=stop, tell=tell):
        raise Stopped("all processes; saved")
    return not wanting(jobs)


def _command(share: Sequence[Job], options: Options, device: torch.device) -> list[str]:
    """The command that does these jobs and no other."""
    rows = dict.fromkeys(job.row.name for job in share)
    seeds = dict.fromkeys(str(job.seed) for job in share)
    words = [sys.executable, "-m", "sparring", "reproduce", share[0].item, "--no-show", "--scale", options.scale]
    words += ["--rows", *rows, "--seeds", *seeds, "--device", str(device)]
    words += ["--results", str(options.results), "--runs", str(options.runs)]
    words += ["--limit", str(options.limit)] if options.limit else []
    return words + (["--max-minutes", f"{options.max_minutes:.3f}"] if options.max_minutes else [])


def _planned(jobs: Sequence[Job]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("row", no_wrap=True, min_width=max(len(job.row.name) for job in jobs))  # whole: --rows asks for it
    for title in ("seed", "state", "cost on one H200"):
        table.add_column(title, no_wrap=True)
    for job in jobs:
        how_far = "missing" if job.config is None and wanting([job]) else state(job)  # nothing has to be trained
        table.add_row(job.row.name, str(job.seed), how_far, cost.spell(cost.seconds([job])))
    table.add_row(f"{_count(jobs)} at scale {jobs[0].scale}", "", "", f"{cost.spell(cost.seconds(jobs))} in all")
    return table


def _list(screen: Screen, options: Options) -> None:
    """Every item: what it costs at either scale, what is measured, what it is."""
    table = Table(box=None, pad_edge=False)
    table.add_column("item", no_wrap=True)
    for scale in ("lite", "full"):
        table.add_column(scale, no_wrap=True, justify="right")
        table.add_column("done", no_wrap=True, justify="right")
    table.add_column("what")
    unread: list[str] = []
    for item in specs.ITEMS.values():
        found = collect(item, options.results)
        unread += found.unread
        costs = (*_costs(item, found, "lite"), *_costs(item, found, "full"))
        table.add_row(item.name, *costs, f"{item.where}. {item.title}")
    screen.print(table)
    screen.print(
        "\nlite, full: time on one H200 for all rows and seeds one after the other, estimated from the times of a step "
        "(runs that items share are counted in each). done: rows and seeds that are measured, of all; +1: one more is "
        "begun.\n"
        "One of them: sparring reproduce ITEM    Its jobs: sparring reproduce ITEM --plan",
        highlight=False,
    )
    for line in unread:
        screen.print(line, highlight=False, soft_wrap=True)


def _draw_all(screen: Screen, options: Options) -> None:
    """Every item that has results, and the headline of the tables."""
    found = [collect(item, options.results) for item in specs.ITEMS.values()]
    for collected in found:
        for path in draw(collected) if collected.found or collected.begun else ():
            screen.print(f"wrote {path}", highlight=False, soft_wrap=True)
    if not any(collected.found or collected.begun for collected in found):
        raise UserError(f"there are no results in {options.results}. Begin with: sparring reproduce fig-motivation.")
    text = headline(options.results)
    if text:
        path = options.results / "headline.md"
        write_text(path, text)
        screen.print(f"wrote {path}", highlight=False, soft_wrap=True)
    else:
        path = options.results / "headline.md"
        screen.print(f"{path} is not written: none of its tables is measured.", highlight=False, soft_wrap=True)


def _costs(item: Item, found: Collected, scale: Scale) -> tuple[str, str]:
    """What a scale costs, and how many of its jobs are done or begun."""
    jobs = plan(item, scale=scale, runs_folder=Path(), results_folder=Path())
    if not jobs:
        return "-", "-"
    done = found.measured(scale, default_seeds(item, scale))
    begun = sum(result["scale"] == scale for result in found.begun)
    return cost.spell(cost.seconds(jobs)), f"{done}/{len(jobs)}{f' +{begun}' if begun else ''}"
