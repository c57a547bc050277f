"""The jobs of an item and their states: a job is one row at one scale with one seed.

A run is named by its configuration, not by the item: a run that two items share is trained once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from sparring.errors import UserError, did_you_mean
from sparring.paper import results
from sparring.paper.specs import Course, Item, Row, Scale
from sparring.training import checkpoint, run_folder
from sparring.training.config import Config, differences, same

JobState = Literal["missing", "interrupted", "trained", "measured", "diverged"]


@dataclass(frozen=True)
class Job:
    """One result to produce."""

    item: str
    row: Row
    scale: Scale
    seed: int
    limit: int | None  # number of test images; None: all
    config: Config | None
    folder: Path | None  # of the run
    path: Path  # of the result

    @property
    def name(self) -> str:
        """As printed: 'table1 fat-8 (lite, seed 0)'."""
        return f"{self.item} {self.row.name} ({self.scale}, seed {self.seed})"

    @property
    def declared(self) -> dict[str, Any]:
        """The declaration of its result, as in the file."""
        return results.declared(self.config, self.row.measure, self.limit)


def plan(
    item: Item,
    *,
    scale: Scale,
    runs_folder: Path,
    results_folder: Path,
    seeds: Sequence[int] = (),
    rows: Sequence[str] = (),
    limit: int | None = None,
) -> list[Job]:
    """The jobs of an item: every row that has this scale (or matches `rows`, such as fat-*), with every seed."""
    jobs = []
    for row in chosen(item, scale, rows):
        for seed in seeds or default_seeds(item, scale):
            config = row.configs[scale]
            if config is not None:
                config = replace(config, seed=seed)
            folder = None if config is None else runs_folder / key(config)
            path = home(results_folder, item, limit) / results.file_name(row.name, scale, seed)
            jobs.append(Job(item.name, row, scale, seed, limit, config, folder, path))
    return jobs


def default_seeds(item: Item, scale: Scale) -> range:
    """As many seeds as the paper at full scale, one at lite."""
    return range(item.trials if scale == "full" else 1)


def chosen(item: Item, scale: Scale, patterns: Sequence[str] = ()) -> list[Row]:
    """The rows that have this scale and match a pattern, in the item's order."""
    rows = [row for row in item.rows if scale in row.configs]
    for pattern in patterns:
        if not any(fnmatchcase(row.name, pattern) for row in rows):
            names = [row.name for row in rows]
            known = ", ".join(names[:6]) + (f", ... ({len(names)} in all)" if len(names) > 6 else "")
            raise UserError(
                f"{item.name} has no row {pattern!r} at scale {scale}.{did_you_mean(pattern, names)} Known: {known}. "
                f"All: sparring reproduce {item.name} --scale {scale} --plan."
            )
    return [row for row in rows if not patterns or any(fnmatchcase(row.name, pattern) for pattern in patterns)]


def home(results_folder: Path, item: Item, limit: int | None) -> Path:
    """The folder of an item's results. Results on fewer images have their own, so they never replace full ones."""
    return results_folder / item.name / (f"limit{limit}" if limit else "")


def key(config: Config) -> str:
    """A run's folder name: its main settings, and a digest of every difference from the defaults.

    Fields at their defaults do not enter the digest, so adding a field to `Config` renames no run.
    """
    name = config.objective.name
    changes = [f"objective {Config().objective.name} -> {name}"] if name != Config().objective.name else []
    changes += differences(Config(objective=type(config.objective)()), config)
    digest = hashlib.sha256("; ".join(changes).encode()).hexdigest()[:10]
    data = config.data.replace(":", "-")
    return f"{data}-{config.model}-{name}-{config.epochs}-seed{config.seed}-{digest}"


def state(job: Job) -> JobState:
    """The state of a job, from the files on disk."""
    found = results.read(job.path)
    as_declared = found is not None and results.matches(found, job.config, job.row.measure, job.limit)
    if as_declared and found is not None and found["state"] in ("measured", "diverged"):
        return "measured" if results.finished(found) else "diverged"
    if job.config is None or job.folder is None:
        return "trained"
    if not (job.folder / run_folder.CONFIG).exists():
        return "measured" if _shared(job, job.config) else "missing"
    # The checkpoint decides: metrics.jsonl is briefly one record ahead of it.
    done = checkpoint.read_facts(job.folder / run_folder.LAST).get("epoch", 0)
    return "trained" if done >= job.config.epochs else "interrupted"


def remaining(jobs: Sequence[Job]) -> list[Job]:
    """The jobs still to do. A diverged run counts as done: it would diverge again."""
    return [job for job in jobs if state(job) not in ("measured", "diverged")]


def _shared(job: Job, config: Config) -> bool:
    """Whether a job needs only the course of a training, and a result of another item has it."""
    if not isinstance(job.row.measure, Course):
        return False
    return any(same(config, theirs) for theirs, _ in results.courses(job.path.parent.parent))
