"""The items of the paper and the jobs of one item as tables: states and costs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from sparring.cli.console import Screen
from sparring.paper import Job, cost, plan, remaining, specs, state
from sparring.paper.collect import Collected, collect
from sparring.paper.plan import default_seeds
from sparring.paper.specs import Item, Scale


def count(jobs: Sequence[Job]) -> str:
    """'1 job', '4 jobs'."""
    return "1 job" if len(jobs) == 1 else f"{len(jobs)} jobs"


def list_jobs(jobs: Sequence[Job]) -> Table:
    """The jobs with their states and costs."""
    table = Table(box=None, pad_edge=False)
    # Names are never cut: they are the values of --rows.
    table.add_column("row", no_wrap=True, min_width=max(len(job.row.name) for job in jobs))
    for title in ("seed", "state", "cost on one H200"):
        table.add_column(title, no_wrap=True)
    for job in jobs:
        # A job without training counts as "trained" from the start.
        shown = "missing" if job.config is None and remaining([job]) else state(job)
        table.add_row(job.row.name, str(job.seed), shown, cost.spell(cost.seconds([job])))
    table.add_row(f"{count(jobs)} at scale {jobs[0].scale}", "", "", f"{cost.spell(cost.seconds(jobs))} in all")
    return table


def list_items(screen: Screen, results: Path) -> None:
    """Print every item: its cost at either scale, how much of it is measured, and what it is."""
    table = Table(box=None, pad_edge=False)
    table.add_column("item", no_wrap=True)
    for scale in ("lite", "full"):
        table.add_column(scale, no_wrap=True, justify="right")
        table.add_column("done", no_wrap=True, justify="right")
    table.add_column("what")
    unread: list[str] = []
    for item in specs.ITEMS.values():
        found = collect(item, results)
        unread += found.unread
        costs = (*_costs(item, found, "lite"), *_costs(item, found, "full"))
        table.add_row(item.name, *costs, f"{item.where}. {item.title}")
    screen.print(table)
    screen.print(
        "\nlite, full: estimated time on one H200 for all rows and seeds, one after the other (a run shared by "
        "several items counts in each). done: rows and seeds measured, of all; +1: one more has started.\n"
        "One of them: sparring reproduce ITEM    Its jobs: sparring reproduce ITEM --plan",
        highlight=False,
    )
    for line in unread:
        screen.print(line, highlight=False, soft_wrap=True)


def _costs(item: Item, found: Collected, scale: Scale) -> tuple[str, str]:
    """The cost of a scale, and how many of its jobs are done or started."""
    jobs = plan(item, scale=scale, runs_folder=Path(), results_folder=Path())
    if not jobs:
        return "-", "-"
    done = found.measured(scale, default_seeds(item, scale))
    begun = sum(result["scale"] == scale for result in found.begun)
    return cost.spell(cost.seconds(jobs)), f"{done}/{len(jobs)}{f' +{begun}' if begun else ''}"
