"""`sparring compare`: what differs between runs and what came out, seeds averaged; or every run as a row of CSV."""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich import box
from rich.measure import Measurement
from rich.table import Table

from sparring.cli.arguments import parse
from sparring.cli.console import WIDE, Screen
from sparring.errors import UserError
from sparring.report.entries import Entry, expanded, is_result, open_result, open_run, run_folders
from sparring.report.evaluations import attack_of
from sparring.report.identity import to_show
from sparring.report.labels import labels, without_seed
from sparring.report.settings import SEED, by_seed, cell, common, differing, headings, mean

DESCRIPTION = """Print what differs between runs and what came out: validation, test results, cost.

Runs that differ in their seed alone are averaged: mean ± standard deviation. Results that `result.save("mine.json")`
wrote of any model are rows, too. Accuracies are in %; in CSV they are fractions, and every run has its own rows.

Examples:
  sparring compare runs
  sparring compare runs/fat-digits-seed0 runs/madry-digits-seed0 mine.json
  sparring compare runs --csv"""
_VALIDATED = "Accuracy on validation images (%), and the cost of training"


@dataclass(frozen=True)
class Options:
    """What is compared."""

    paths: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Run folders, folders of runs, patterns in quotes ('runs/fat-*'), and files that `result.save` wrote."""
    csv: bool = False
    """Print one row per run and way of measuring as CSV, every setting and number in full. To a file: --csv > FILE."""


@dataclass(frozen=True)
class _Row:
    """Runs that differ in their seed alone, or one result."""

    name: str
    entries: tuple[Entry, ...]

    @property
    def settings(self) -> dict[str, Any]:
        return dict(self.entries[0].settings)


@dataclass(frozen=True)
class _Say:
    """How numbers are printed: '98.21', or '98.21 ± 0.30' of several."""

    digits: int = 2  # of accuracies
    joint: str = " "  # between a mean and its spread, and between the words of a heading

    def __call__(self, values: Sequence[float], digits: int | None = None) -> str:
        middle, spread = mean(values)
        form = f",.{self.digits if digits is None else digits}f"
        return f"{middle:{form}}" if spread is None else f"{middle:{form}}{self.joint}± {spread:{form}}"

    def heading(self, name: str) -> str:
        """A heading, in as many lines as the numbers."""
        return name.replace(" ", self.joint, 1)


def run(argv: list[str]) -> int:
    """The command."""
    options = parse(Options, argv, prog="sparring compare", description=DESCRIPTION)
    if not options.paths:
        raise UserError("which runs? Name run folders or a folder of them: sparring compare runs.")
    entries, damaged = _read(options.paths)
    if not entries:
        raise UserError(damaged[0] if damaged else f"no run and no result in {', '.join(map(str, options.paths))}.")
    if options.csv:
        _write_csv(entries)
    else:
        _show(entries)
    for why in damaged:
        print(f"left out: {why}", file=sys.stderr if options.csv else sys.stdout)
    return 0


def _read(paths: Sequence[Path]) -> tuple[list[Entry], list[str]]:
    """The runs and results of the paths, and why some cannot be read.

    Raises:
        UserError: a path is neither a run, nor a folder of runs, nor a result.
    """
    entries: dict[Path, Entry] = {}
    damaged: dict[str, None] = {}
    for path in expanded(paths):
        if is_result(path):
            try:
                entries.setdefault(path.resolve(), open_result(path))
            except UserError as error:
                damaged[str(error)] = None
            continue
        if not path.exists():
            raise UserError(f"{path} does not exist. Give run folders, folders of runs, or results (.json).")
        if path.is_file():
            raise UserError(f"{path} is neither a run folder nor a result (.json). Give the folder of its run.")
        folders = run_folders(path)
        if not folders:
            raise UserError(f"{path} holds no run. Train one: sparring train fat-digits.")
        for folder in folders:
            if folder.resolve() not in entries:
                try:
                    entry = open_run(folder)
                except UserError as error:
                    damaged[str(error)] = None
                else:
                    entries[folder.resolve()] = entry
                    damaged |= dict.fromkeys(entry.damaged)
    return list(entries.values()), list(damaged)


def _rows(entries: Sequence[Entry]) -> list[_Row]:
    """The finished runs, seeds together, and the results; named by what differs."""
    groups = by_seed([(entry.settings, entry) for entry in entries])
    names = labels({group[0].path: group[0].config for group in groups if group[0].config is not None})
    return [
        _Row(
            without_seed(names[group[0].path]) if len(group) > 1 else names.get(group[0].path, group[0].path.stem),
            tuple(group),
        )
        for group in groups
    ]


def _show(entries: Sequence[Entry]) -> None:
    """Print the tables: settings with validation and cost, then test results, one table per way of measuring."""
    screen = Screen()
    rows = _rows([entry for entry in entries if entry.finished])
    trained = [row for row in rows if row.settings]
    settings = to_show([row.settings for row in trained])
    columns = headings(differing(settings))
    ways = list(dict.fromkeys(how for row in rows for entry in row.entries for how in entry.measured))

    def tables(shown: dict[str, str], say: _Say) -> dict[str, Table]:
        found = {_VALIDATED: _trained(trained, shown, say)} if trained else {}
        return found | {f"Accuracy on test data (%): {how}": _tested(how, rows, shown, say) for how in ways}

    # A narrow terminal gets the settings in a table of their own, then fewer digits, then spreads below the means.
    for shown, say in ((columns, _Say()), ({}, _Say()), ({}, _Say(1)), ({}, _Say(1, "\n"))):
        made = tables(shown, say)
        widest = max((_width(screen, table) for table in made.values()), default=0)
        if not screen.is_terminal or widest <= screen.width:
            break
    if columns and not shown:
        made = {"What differs": _settings(trained, columns), **made}
    wide = Screen(width=max(screen.width, WIDE if not screen.is_terminal else widest))
    for title, table in made.items():
        screen.print(title, style="bold", highlight=False, soft_wrap=True)
        wide.print(table)
    if shared := ", ".join(f"{name} {value}" for name, value in common(settings).items() if value != ""):
        screen.print(f"Common to all: {shared}.", highlight=False, soft_wrap=True)
    for entry in entries:
        if not entry.finished:
            last = entry.history[-1] if entry.history else {}
            so_far = f", natural {_percent(last['natural'])} %, PGD-10 {_percent(last['pgd10'])} %" if last else ""
            screen.print(f"unfinished: {entry.path} ({entry.stage}{so_far})", highlight=False, soft_wrap=True)


def _width(screen: Screen, table: Table) -> int:
    """The columns that a table takes where nothing is folded."""
    return Measurement.get(screen, screen.options.update(width=WIDE), table).maximum


def _settings(rows: Sequence[_Row], columns: dict[str, str]) -> Table:
    table = _table(rows, columns)
    for row in rows:
        table.add_row(*_begin(row, rows, columns))
    return table


def _trained(rows: Sequence[_Row], columns: dict[str, str], say: _Say) -> Table:
    table = _table(rows, columns)
    picks: dict[str, Callable[[Entry], Any]] = {
        "best natural": lambda entry: entry.best["natural"],
        "best PGD-10": lambda entry: entry.best["pgd10"],
        "last natural": lambda entry: entry.history[-1]["natural"],
        "last PGD-10": lambda entry: entry.history[-1]["pgd10"],
    }
    for name in (*picks, "BPs", "seconds"):
        table.add_column(say.heading(name), justify="right", no_wrap=True)
    for row in rows:
        accuracies = [say([100 * pick(entry) for entry in row.entries]) for pick in picks.values()]
        backprops, seconds = ([_cost(entry)[i] for entry in row.entries] for i in (0, 1))
        table.add_row(*_begin(row, rows, columns), *accuracies, say(backprops, 1), say(seconds, 0))
    return table


def _tested(how: str, rows: Sequence[_Row], columns: dict[str, str], say: _Say) -> Table:
    """The rows that were measured in one way."""
    found = {row: [entry.measured[how] for entry in row.entries if how in entry.measured] for row in rows}
    here = [row for row in rows if found[row]]
    table = _table(here, columns)
    attacks = list(dict.fromkeys(name for row in here for numbers in found[row] for name in numbers.accuracies))
    for name in attacks:
        table.add_column(say.heading(name), justify="right", no_wrap=True)
    for row in here:
        values = [[100 * m.accuracies[name] for m in found[row] if name in m.accuracies] for name in attacks]
        cells = [say(each) if each else "" for each in values]
        table.add_row(*_begin(row, here, columns, len(found[row])), *cells)
    return table


def _table(rows: Sequence[_Row], columns: dict[str, str]) -> Table:
    """A table that begins with the run, its settings and its seeds."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for word in ("run", *columns.values()):
        table.add_column(word, no_wrap=True)
    if any(row.settings for row in rows):
        table.add_column("seeds" if _several(rows) else "seed", justify="right", no_wrap=True)
    return table


def _begin(row: _Row, rows: Sequence[_Row], columns: dict[str, str], count: int | None = None) -> list[str]:
    """The first cells of a row: its name, its settings, and its seed or their number."""
    cells = [row.name, *(cell(row.settings, name) for name in columns)]
    if not any(each.settings for each in rows):
        return cells
    seeds = str(count or len(row.entries)) if _several(rows) else str(row.settings.get(SEED, ""))
    return [*cells, seeds if row.settings else ""]


def _several(rows: Sequence[_Row]) -> bool:
    return any(len(row.entries) > 1 for row in rows)


def _cost(entry: Entry) -> tuple[float, float]:
    """Mean backward passes per image, and seconds of training."""
    history = entry.history
    return mean([record["backprops"] for record in history])[0], sum(record["seconds"] for record in history)


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.2f}"


def _write_csv(entries: Sequence[Entry]) -> None:
    """Every run and result, one row per way of measuring; a run that was never evaluated has one row."""
    rows = [row for entry in entries for row in _records(entry)]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    table = csv.DictWriter(sys.stdout, sorted(columns, key=lambda name: name.startswith("test.")), lineterminator="\n")
    table.writeheader()
    table.writerows(rows)


def _records(entry: Entry) -> list[dict[str, Any]]:
    """The rows of one run or result: path, status, settings, validation, cost, and the test results of each way."""
    status = "result" if entry.config is None else "finished" if entry.finished else "unfinished"
    facts: dict[str, Any] = {"path": str(entry.path), "status": status, "recipe": entry.recipe, **entry.settings}
    facts["epochs_done"] = len(entry.history) if entry.config else ""
    if entry.history:
        for which, record in (("best", entry.best), ("last", entry.history[-1])):
            facts |= {f"{which}.{name}": record.get(name) for name in ("epoch", "natural", "pgd10", "loss")}
        facts["backprops"], facts["seconds"] = _cost(entry)
    tests = [
        {"measured": how, "n": numbers.n}
        | {f"test.{attack_of(name)}": value for name, value in numbers.accuracies.items()}
        for how, numbers in entry.measured.items()
    ]
    return [facts | test for test in tests or [{}]]
