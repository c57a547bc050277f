"""`sparring report`: one self-contained page about runs, and about the paper's tables and figures beside ours."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import tyro

from sparring.cli.arguments import name_model, parse
from sparring.errors import UserError
from sparring.files.leftovers import sweep
from sparring.paper import specs
from sparring.paper.collect import collect
from sparring.paper.render import exhibit
from sparring.report.attack_path import AttackPath
from sparring.report.averages import averaged
from sparring.report.content import Exhibit, Method, Sweep
from sparring.report.entries import expanded, is_result, run_folders
from sparring.report.gather import Run, open_run, rows_of, rows_of_file, strips
from sparring.report.identity import to_show
from sparring.report.labels import labels, several, without_seed
from sparring.report.method_charts import sweep_drawings
from sparring.report.page import write_page
from sparring.report.settings import by_seed, cell, common, differing, headings
from sparring.training import run_folder

DESCRIPTION = """Write one HTML page: tables with the paper's numbers, curves, trade-offs, attacks step by step.
It loads nothing from the network, and works on a phone and in print.

Examples:
  sparring report
  sparring report results/table1 results/fig-tau
  sparring report runs/first runs/second --out compare.html
  sparring report mine.json runs/first"""

_NAMED = 100  # files or folders that a page names one by one


@dataclass(frozen=True)
class Options:
    """What goes on the page."""

    paths: Annotated[tuple[Path, ...], tyro.conf.Positional] = (Path("results"),)
    """Run folders or a folder of them, patterns in quotes ('runs/fat-*'), results of a model (files of `result.save`),
    folders of the paper's results (results/table1), or the folder of all of them."""
    out: Path = Path("report.html")
    """File of the page."""
    title: str | None = None
    """Heading of the page."""
    model: str | None = None
    """The network of runs whose network is your own: package.module:make."""
    strips: Annotated[int, tyro.conf.arg(aliases=("--walks",))] = 2
    """Number of images whose attack is shown step by step; 0 for none. The model is that of the most robust run on
    validation images (PGD-10, last epoch) that has suitable images."""


def run(argv: list[str]) -> int:
    """The command."""
    options = parse(Options, argv, prog="sparring report", description=DESCRIPTION)
    name_model(options.model)
    if options.strips < 0:
        raise UserError(f"--strips (or --walks) must be at least 0, got {options.strips}. Write 0 for none.")
    if options.out.is_dir():
        raise UserError(f"{options.out} is a folder. Name a file: --out {options.out / 'report.html'}.")
    sweep(options.out.parent, options.out.name.__eq__)
    given = expanded(options.paths)
    results = [path for path in given if is_result(path)]
    found = {path: run_folders(path) for path in given if path not in results}
    folders = list({folder.resolve(): folder for each in found.values() for folder in each}.values())
    exhibits = [one for path, each in found.items() if not each for one in _exhibits(path)]
    foreign, unread = _foreign(results)
    runs, damaged = _opened(folders)
    young = [run.folder for run in runs if not run.history]
    ready = [run for run in runs if run.history]
    if not ready and not exhibits and not foreign:
        if damaged or unread:
            raise UserError([*unread, *damaged][0])
        for run in runs:
            rows_of(run)  # raises the error
    groups = _groups(ready)
    names = {
        run.folder: name if len(group) == 1 else f"{name}, seed {run.config.seed}"
        for name, group in groups.items()
        for run in group
    }
    methods = [row for name, group in groups.items() for row in _averaged(name, group)] + foreign
    wrong = [*unread, *damaged, *(why for run in ready for why in run.evaluations.damaged)]
    notes = [f"Left out: {why}" for why in wrong[:_NAMED]]
    notes += [f"Left out: {len(wrong) - _NAMED:,} more that cannot be read."] if len(wrong) > _NAMED else []
    notes.append(_left_out("no finished epoch", young))
    notes.append(_left_out("not an evaluation", [path for run in ready for path in run.evaluations.others]))
    left_out = " ".join(filter(None, notes))
    if not methods and not exhibits:
        where = ", ".join(map(str, options.paths))
        raise UserError(
            f"nothing to report in {where}: no run and no result. Make one: sparring reproduce fig-motivation."
        )
    shown, strips_note = _strips(ready, names, options.strips, options.model)
    software = run_folder.environment(torch.device("cpu"))
    facts = {
        "Sources": ", ".join(map(str, options.paths)),
        **({"Hardware": _hardware(ready, names)} if names else {}),
        "Versions": "sparring {sparring}, torch {torch}, Python {python} (of the page)".format(**software),
        "Command": shlex.join(["sparring", "report", *argv]),
    }
    if any(name != folder.name for folder, name in names.items()):
        facts["Runs"] = several([f"{name}: {folder}" for folder, name in names.items()], _NAMED)
    write_page(
        options.out,
        title=options.title or _title(methods, exhibits, len(names) + len(results)),
        lead=_lead(methods, exhibits, len(names), len(results)),
        methods=methods,
        exhibits=exhibits,
        strips=shown,
        strips_note=strips_note,
        facts=facts,
        note=" ".join(filter(None, [left_out, _weak(methods)])),
        sweep=_sweep(groups, methods),
    )
    if left_out:
        print(left_out)
    print(f"wrote {options.out}")
    return 0


def _opened(folders: Sequence[Path]) -> tuple[list[Run], list[str]]:
    """The runs that can be read, and why others cannot."""
    runs, damaged = [], []
    for folder in folders:
        try:
            runs.append(open_run(folder))
        except UserError as error:
            damaged.append(str(error))
    return runs, damaged


def _foreign(results: Sequence[Path]) -> tuple[list[Method], list[str]]:
    """The rows of the results that can be read, and why others cannot."""
    rows, unread = [], []
    for path, name in _stems(results).items():
        try:
            rows += rows_of_file(path, name)
        except UserError as error:
            unread.append(str(error))
    return rows, unread


def _groups(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Finished runs that differ in their seed alone, together, by name. Others are alone."""
    found = by_seed([(run.settings if run.finished else {}, run) for run in runs])
    names = labels({group[0].folder: group[0].config for group in found})
    own = [names[group[0].folder] for group in found]
    said = [without_seed(name) if len(group) > 1 else name for name, group in zip(own, found, strict=True)]
    count = Counter(said)
    said = [name if count[name] == 1 else whole for name, whole in zip(said, own, strict=True)]
    return dict(zip(said, found, strict=True))


def _averaged(name: str, group: Sequence[Run]) -> list[Method]:
    """The rows of a group: one per way of measuring, over the seeds that were measured so."""
    alike: dict[str, dict[int, Method]] = {}
    for run in group:
        for row in rows_of(run, name):
            alike.setdefault(row.measured, {})[run.config.seed] = row
    return [averaged(list(rows.values()), list(rows)) for rows in alike.values()]


def _stems(results: Sequence[Path]) -> dict[Path, str]:
    """The names of results: their files', with folders where they would be equal."""
    stems = Counter(path.stem for path in results)
    return {path: path.stem if stems[path.stem] == 1 else str(path.with_suffix("")) for path in results}


def _sweep(groups: Mapping[str, Sequence[Run]], methods: Sequence[Method]) -> Sweep | None:
    """What differs between the runs; None for a single one."""
    whole = [group[0].settings for group in groups.values()]
    settings = dict(zip(groups, to_show(whole), strict=True))
    if len(settings) < 2:
        return None
    columns = headings(differing(list(settings.values())))
    shared = ", ".join(f"{name} {value}" for name, value in common(list(settings.values())).items() if value != "")
    rows = [(name, [cell(each, column) for column in columns]) for name, each in settings.items()]
    drawn = []
    if len(columns) == 1:
        ((column, word),) = columns.items()
        with suppress(ValueError, KeyError):  # a schedule, or a name
            drawn = sweep_drawings(methods, word, {name: float(each[column]) for name, each in settings.items()})
    return Sweep(list(columns.values()), rows, shared, drawn)


def _exhibits(path: Path) -> list[Exhibit]:
    """The items in a folder of results, which may be that of one item or of all."""
    if not path.exists():
        folder = Path("results") / path
        if str(path) in specs.ITEMS and folder.is_dir():
            raise UserError(f"{path} does not exist. Give the folder of its results: sparring report {folder}.")
        raise UserError(
            f"{path} does not exist. Give run folders or folders of results; to make results: sparring reproduce ITEM."
        )
    if path.is_dir() and path.name in specs.ITEMS:
        names, top = [path.name], path.parent
    else:
        names, top = list(specs.ITEMS), path
    collected = [collect(specs.ITEMS[name], top) for name in names]
    for line in (line for one in collected for line in one.unread):
        print(f"left out: {line}")
    found = [exhibit(one) for one in collected if one.found or one.begun]
    limited = sorted(one.name for one in path.glob("limit*") if path.name in specs.ITEMS)
    if not found and limited:
        raise UserError(
            f"{path} has only results on fewer images ({', '.join(limited)}), which a page does not show. "
            f"Measure all images: sparring reproduce {path.name}."
        )
    if not found and not (path.is_dir() and path.name == "results"):
        raise UserError(f"{path} holds neither a run nor results of the paper's items. Check the path.")
    return found


def _weak(methods: list[Method]) -> str:
    """A note if no number was measured with AutoAttack."""
    if not methods or any("AutoAttack" in name for method in methods for name in method.accuracies):
        return ""
    return (
        "No number here was measured with AutoAttack, the standard test of a robustness claim: `sparring evaluate "
        "RUN --protocol autoattack`."
    )


def _left_out(why: str, paths: list[Path]) -> str:
    """'Left out (why): a, b.'; '' without paths."""
    return f"Left out ({why}): {several([str(path) for path in paths], _NAMED)}." if paths else ""


def _strips(
    runs: Sequence[Run], names: Mapping[Path, str], count: int, model: str | None = None
) -> tuple[list[AttackPath], str]:
    """Strips of the most robust run that has suitable images, and a sentence: which run it is, or why there are none.

    Robustness is that on validation images: every run has it, measured by the same attack.
    """
    if not names or not count:
        return [], ""
    why_not = []
    for run in sorted(runs, key=lambda run: float(run.history[-1]["pgd10"]), reverse=True):
        folder = run.folder
        try:
            paths = strips(folder, count, model)
        except UserError as error:  # for example, its data are missing
            why_not.append(str(error))
            continue
        if paths:
            why = ", the most robust run on validation images (PGD-10, last epoch) that has such images"
            said = f"The model is that of {names[folder]}{why if len(names) > 1 else ''}."
            unopened = f" A more robust run could not be opened: {why_not[0]}" if why_not else ""
            return paths, said + unopened
    none = "no run with available data has a correctly classified test image that PGD fools before its last step."
    return [], f"No attack is shown: {why_not[0] if len(why_not) == len(names) else none}"


def _hardware(runs: Sequence[Run], names: Mapping[Path, str]) -> str:
    """The hardware of the runs, stated once if it is the same for all."""
    found: dict[str, list[str]] = {}
    for run in runs:
        found.setdefault(run.hardware, []).append(names[run.folder])
    if len(found) == 1:
        return next(iter(found))
    return ". ".join(f"{several(each)}: {where}" for where, each in found.items())


def _title(methods: list[Method], exhibits: list[Exhibit], count: int) -> str:
    if exhibits:
        return "Friendly adversarial training: the paper's numbers and ours"
    names = _names(methods)
    what = "runs" if all(method.history for method in methods) else "models"
    return f"{count} {what} compared" if len(names) > 1 else names[0]


def _names(methods: list[Method]) -> list[str]:
    """The runs' names, each once: a run has one row per way of measuring."""
    return list(dict.fromkeys(method.name for method in methods))


def _lead(methods: list[Method], exhibits: list[Exhibit], runs: int, results: int) -> str:
    parts = []
    if methods:
        counted = [f"{n} {word}{'s' if n > 1 else ''}" for n, word in ((runs, "run"), (results, "result")) if n]
        parts.append(f"{' and '.join(counted)}: {several(_names(methods))}.")
    if exhibits:
        items = [one.where for one in exhibits if not one.board]
        others = [one.where for one in exhibits if one.board]
        parts += [f"From the paper: {', '.join(items)}."] if items else []
        parts += [f"By the protocols of others: {', '.join(others)}."] if others else []
        parts.append(
            "Our numbers were measured by this package; images, seeds and hardware are stated beside them. "
            f"{'The paper’s' if items else 'Published'} numbers are as published."
        )
    return " ".join(parts)
