"""The results of an item: which files count, which scale a group is shown at, and the rows of a table."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sparring.errors import UserError
from sparring.paper import results
from sparring.paper.plan import home
from sparring.paper.result_schema import unpack
from sparring.paper.results import JobResult
from sparring.paper.specs import Course, Item, Row, Scale
from sparring.report.comparison import Ours, TableRow

NETWORKS = {
    "small_cnn": "Small CNN",
    "resnet18": "ResNet-18",
    "tiny_cnn": "Tiny CNN",
    "preact_resnet18": "PreActResNet-18",
}
SCALES: tuple[Scale, Scale] = ("full", "lite")


@dataclass(frozen=True)
class Collected:
    """An item and its results."""

    item: Item
    home: Path  # the folder of its results
    found: Mapping[tuple[str, Scale], Sequence[JobResult]]  # (row, scale) -> one per seed, sorted by seed
    begun: Sequence[JobResult]  # runs that are unfinished, or that diverged
    other: int  # files whose declaration is not the current one: not shown
    wanted: Scale | None = None  # the scale to show, where there are results at it
    limit: int | None = None  # number of test images; None: all
    unread: Sequence[str] = ()  # why files could not be read

    def scale(self, group: str) -> Scale:
        """The wanted scale, otherwise the one at which more of a group's rows are measured (full if equally many).

        Rows of a group are compared with one another, so all of them are shown at the same scale.
        """
        rows = [row for row in self.item.rows if row.group == group]
        counts = {scale: sum((row.name, scale) in self.found for row in rows) for scale in SCALES}
        if self.wanted and counts[self.wanted]:
            return self.wanted
        if not any(counts.values()):
            return "lite" if any("lite" in row.configs for row in rows) else "full"
        return max(SCALES, key=lambda scale: counts[scale])

    def of(self, row: Row) -> Sequence[JobResult]:
        """The results of a row at the scale that its group is shown at; may be empty."""
        return self.found.get((row.name, self.scale(row.group)), ())

    def groups(self) -> dict[str, list[Row]]:
        """The rows that have results, by group."""
        groups: dict[str, list[Row]] = {}
        for row in self.item.rows:
            if self.of(row):
                groups.setdefault(row.group, []).append(row)
        return groups

    def measured(self, scale: Scale, seeds: Sequence[int]) -> int:
        """The number of results of these seeds at a scale."""
        several = [self.found.get((row.name, scale), ()) for row in self.item.rows]
        return sum(result["seed"] in seeds for each in several for result in each)


def collect(item: Item, folder: Path, limit: int | None = None, wanted: Scale | None = None) -> Collected:
    """The results of an item in a results folder; with `limit`, those measured on the first `limit` images."""
    rows = {row.name: row for row in item.rows}
    found: dict[tuple[str, Scale], list[JobResult]] = {}
    begun, unread, other = [], list[str](), 0
    for path in sorted(home(folder, item, limit).glob("*-seed*.json")):
        try:
            result = results.read(path)
        except UserError as error:
            unread.append(str(error))
            continue
        if result is None:  # a folder
            continue
        row, scale = rows.get(result["row"]), result["scale"]
        own = path.name == results.file_name(result["row"], scale, result["seed"])  # a copied file is not another seed
        if not own or row is None or scale not in row.configs or not _declared(row, scale, result, limit):
            other += 1
        elif results.finished(result):
            found.setdefault((row.name, scale), []).append(result)
        elif result["config"] is None:  # nothing is trained here that could have begun
            other += 1
        else:
            begun.append(result)
    for name, scale, result in _shared_courses(item, folder):
        several = found.setdefault((name, scale), [])
        if result["seed"] not in [own["seed"] for own in several]:
            several.append(result)
    for several in found.values():
        several.sort(key=lambda result: int(result["seed"]))
    return Collected(item, home(folder, item, limit), found, begun, other, wanted, limit, unread)


def _shared_courses(item: Item, folder: Path) -> Iterator[tuple[str, Scale, JobResult]]:
    """Results of other items that serve rows which need only the course of a training."""
    needing = [row for row in item.rows if isinstance(row.measure, Course)]
    for theirs, result in results.courses(folder) if needing else ():
        for row in needing:
            for scale, config in row.configs.items():
                if config is not None and theirs == replace(config, seed=theirs.seed):
                    yield row.name, scale, {**result, "row": row.name, "scale": scale, "found": {}}


def _declared(row: Row, scale: Scale, result: Mapping[str, Any], limit: int | None) -> bool:
    config = row.configs[scale]
    if config is not None:
        config = replace(config, seed=result["seed"])
    return results.matches(result, config, row.measure, limit)


def table_rows(collected: Collected) -> list[TableRow]:
    """A table: every row of the item, measured or not."""
    return [_table_row(row, collected.of(row), collected.item.columns) for row in collected.item.rows]


def _table_row(row: Row, several: Sequence[JobResult], columns: Mapping[str, str]) -> TableRow:
    if not several:
        return TableRow(row.label, "", {}, row.paper, network(row.group))
    backprops = [statistics.fmean(result["history"]["backprops"]) for result in several]
    return TableRow(
        row.label,
        about(several),
        cells(several, columns),
        row.paper,
        network(row.group),
        statistics.fmean(backprops),
    )


def cells(several: Sequence[JobResult], columns: Mapping[str, str]) -> dict[str, Ours]:
    """Our accuracies by column, over the seeds that have them."""
    found = {}
    for column, attack in columns.items():
        facts = [result["found"]["attacks"].get(attack) for result in several]
        known = [fact for fact in facts if fact is not None]
        if known:
            counts = {fact["n"] for fact in known}
            right = tuple(unpack(fact["right"], fact["n"]) for fact in known if "right" in fact)
            found[column] = Ours(
                tuple(fact["accuracy"] for fact in known),
                min(counts),
                right if len(right) == len(known) and len(counts) == 1 else (),
            )
    return found


def about(several: Sequence[JobResult]) -> str:
    """'ResNet-18, 30 epochs, 3 seeds'; only the seeds if nothing was trained."""
    config = several[0]["config"]
    seeds = "1 seed" if len(several) == 1 else f"{len(several)} seeds"
    if config is None:
        return seeds
    epochs = "1 epoch" if config["epochs"] == 1 else f"{config['epochs']} epochs"
    return f"{network(config['model'])}, {epochs}, {seeds}"


def network(name: str) -> str:
    """The printed name of a network: 'ResNet-18' for 'resnet18'."""
    return NETWORKS.get(name, name.upper())


def pictured(collected: Collected) -> dict[str, list[Row]]:
    """The rows of each picture of lines, by group ('' if all share one). A single x makes no line: no picture."""
    groups = collected.groups()
    if collected.item.together and groups:
        groups = {"": [row for rows in groups.values() for row in rows]}
    return {group: rows for group, rows in groups.items() if len({row.x for row in rows}) > 1}
