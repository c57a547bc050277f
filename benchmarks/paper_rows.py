"""Rows of several items of `sparring reproduce`, several at once on one GPU, for a limited time.

    SPARRING_DATA=DATA python3 benchmarks/paper_rows.py table1:dat 'fig-no-projection:resnet18-*' --minutes 20

Each ITEM:ROWS names rows of an item as `--rows` does; those that are measured are skipped. The next row starts when one
ends, if its estimated time, `--slower` times that of a GPU of its own, is left. When the time is up, the others save
their place and stop. Results are those of `sparring reproduce ITEM --rows ROW`, in the same files.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

from sparring.errors import UserError
from sparring.paper import Job, cost, plan, remaining, specs
from sparring.training.gpu_sharing import run_queue
from sparring.training.signals import stopping


def wanted(named: list[str], scale: str) -> list[Job]:
    """The jobs that are left, in the order in which they are named."""
    found: list[Job] = []
    for each in named:
        item, _, rows = each.partition(":")
        folders = {"runs_folder": Path("runs/paper"), "results_folder": Path("results")}
        found += remaining(plan(specs.find(item), scale=scale, rows=[rows] if rows else [], **folders))
    return found


def command(job: Job, device: str) -> list[str]:
    words = [sys.executable, "-m", "sparring", "reproduce", job.item, "--scale", job.scale, "--device", device]
    return [*words, "--rows", job.row.name, "--seeds", str(job.seed), "--no-show"]


def later(words: list[str], until: float, needs: float) -> list[str]:
    """A command that starts another one if that many seconds are left, and says so where they are not."""
    code = (
        "import os, sys, time\n"
        f"left = {until} - time.time()\n"
        f"if left < {needs}: sys.exit(print(f'not begun: {needs:.0f} s needed, {{left:.0f}} left'))\n"
        "os.execv(sys.argv[1], sys.argv[1:])"
    )
    return [sys.executable, "-c", code, *words]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="+", metavar="ITEM:ROWS")
    parser.add_argument("--scale", choices=["lite", "full"], default="lite")
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--slower", type=float, default=5.0, help="by which a row takes longer beside the others")
    parser.add_argument("--device", default="cuda")
    given = parser.parse_args()
    if given.at_once < 1 or given.minutes <= 0:
        parser.error(f"--at-once must be at least 1 and --minutes above 0, got {given.at_once} and {given.minutes:g}")
    try:
        jobs = wanted(given.rows, given.scale)
    except UserError as error:
        parser.error(str(error))
    until = time.time() + 60 * given.minutes
    commands = [later(command(job, given.device), until, given.slower * cost.left([job])) for job in jobs]
    with stopping() as stop:
        ended = run_queue(
            commands,
            at_once=given.at_once,
            device=torch.device(given.device),
            stop=lambda: stop() or time.time() > until,
            tell=lambda number, line: print(f"{jobs[number].name}: {line}", flush=True),
        )
    for job, end in zip(jobs, ended, strict=True):
        if end.code:
            print(f"{job.name} failed: {end.complaint}", flush=True)
    left = wanted(given.rows, given.scale)
    print(f"measured {len(jobs) - len(left)} of {len(jobs)}; left: {', '.join(job.name for job in left) or 'none'}")
    sys.exit(1 if any(end.code for end in ended) else 0)


if __name__ == "__main__":
    main()
