"""`sparring report`: one self-contained page about runs, and about the paper's tables and figures beside ours."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import tyro

from sparring.cli.arguments import parse
from sparring.errors import UserError
from sparring.paper import specs
from sparring.paper.collect import collect
from sparring.paper.render import exhibit
from sparring.report.attack_path import AttackPath
from sparring.report.content import Exhibit, Method
from sparring.report.gather import hardware, not_evaluations, strips
from sparring.report.gather import methods as rows_of
from sparring.report.labels import labels
from sparring.report.page import write_page
from sparring.training import run_folder

DESCRIPTION = """Write one HTML page: tables with the paper's numbers, curves, trade-offs, attacks step by step.
It loads nothing from the network, and works on a phone and in print.

Examples:
  sparring report
  sparring report results/table1 results/fig-tau
  sparring report runs/first runs/second --out compare.html"""


@dataclass(frozen=True)
class Options:
    """What goes on the page."""

    paths: Annotated[tuple[Path, ...], tyro.conf.Positional] = (Path("results"),)
    """Run folders or a folder of them, folders of results (results/table1), or the folder of all results."""
    out: Path = Path("report.html")
    """File of the page."""
    title: str | None = None
    """Heading of the page."""
    strips: Annotated[int, tyro.conf.arg(aliases=("--walks",))] = 2
    """Number of images whose attack is shown step by step; 0 for none. The model is that of the most robust run on
    validation images (PGD-10, last epoch) that has suitable images."""


def run(argv: list[str]) -> int:
    """The command."""
    options = parse(Options, argv, prog="sparring report", description=DESCRIPTION)
    if options.strips < 0:
        raise UserError(f"--strips must be at least 0, got {options.strips}. Write 0 for none.")
    if options.out.is_dir():
        raise UserError(f"{options.out} is a folder. Name a file: --out {options.out / 'report.html'}.")
    found = {path: _run_folders(path) for path in options.paths}
    folders = list({folder.resolve(): folder for each in found.values() for folder in each}.values())
    exhibits = [one for path, each in found.items() if not each for one in _exhibits(path)]
    damaged = {folder: why for folder in folders if (why := _damage(folder))}
    young = [folder for folder in folders if folder not in damaged and not run_folder.read_metrics(folder)]
    ready = [folder for folder in folders if folder not in damaged and folder not in young]
    if not ready and not exhibits:
        if damaged:
            raise UserError(next(iter(damaged.values())))
        ready = young  # the first of them raises the error
    names = labels({folder: run_folder.open_run(folder).config for folder in ready})
    methods = [row for folder, name in names.items() for row in rows_of(folder, name)]
    left_out = " ".join(
        filter(
            None,
            [
                *(f"Left out: {why}" for why in damaged.values()),
                _left_out("no finished epoch", young),
                _left_out("not an evaluation", [path for folder in ready for path in not_evaluations(folder)]),
            ],
        )
    )
    if not methods and not exhibits:
        given = ", ".join(map(str, options.paths))
        raise UserError(
            f"nothing to report in {given}: no run and no result. Make one: sparring reproduce fig-motivation."
        )
    shown, strips_note = _strips(names, options.strips)
    where = run_folder.environment(torch.device("cpu"))
    facts = {
        "Sources": ", ".join(map(str, options.paths)),
        **({"Hardware": _hardware(names)} if names else {}),
        "Versions": f"sparring {where['sparring']}, torch {where['torch']}, Python {where['python']} (of the page)",
        "Command": shlex.join(["sparring", "report", *argv]),
    }
    if any(name != folder.name for folder, name in names.items()):
        facts["Runs"] = "; ".join(f"{name}: {folder}" for folder, name in names.items())
    write_page(
        options.out,
        title=options.title or _title(methods, exhibits),
        lead=_lead(methods, exhibits),
        methods=methods,
        exhibits=exhibits,
        strips=shown,
        strips_note=strips_note,
        facts=facts,
        note=" ".join(filter(None, [left_out, _weak(methods)])),
    )
    if left_out:
        print(left_out)
    print(f"wrote {options.out}")
    return 0


def _run_folders(path: Path) -> list[Path]:
    """The folder itself if it is a run, otherwise the runs in it."""
    if (path / run_folder.CONFIG).is_file():
        return [path]
    return sorted(config.parent for config in path.glob(f"*/{run_folder.CONFIG}")) if path.is_dir() else []


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


def _damage(folder: Path) -> str:
    """The error in a run's own files; '' if they can be read."""
    try:
        run_folder.open_run(folder)
        run_folder.whole_history(folder)
        run_folder.read_environment(folder)
    except UserError as error:
        return str(error)
    return ""


def _left_out(why: str, paths: list[Path]) -> str:
    """'Left out (why): a, b.'; '' without paths."""
    return f"Left out ({why}): {', '.join(map(str, paths))}." if paths else ""


def _strips(names: Mapping[Path, str], count: int) -> tuple[list[AttackPath], str]:
    """Strips of the most robust run that has suitable images, and a sentence: which run it is, or why there are none.

    Robustness is that on validation images: every run has it, measured by the same attack.
    """
    if not names or not count:
        return [], ""
    why_not = []
    for folder in sorted(names, key=_robust, reverse=True):
        try:
            paths = strips(folder, count)
        except UserError as error:  # for example, its data are missing
            why_not.append(str(error))
            continue
        if paths:
            why = ", the most robust run on validation images (PGD-10, last epoch) that has such images"
            return paths, f"The model is that of {names[folder]}{why if len(names) > 1 else ''}."
    none = "no run with available data has a correctly classified test image that PGD fools before its last step."
    return [], f"No attack is shown: {why_not[0] if len(why_not) == len(names) else none}"


def _robust(folder: Path) -> float:
    """PGD-10 accuracy on validation images after the last epoch."""
    return float(run_folder.read_metrics(folder)[-1]["pgd10"])


def _hardware(names: Mapping[Path, str]) -> str:
    """The hardware of the runs, stated once if it is the same for all."""
    found: dict[str, list[str]] = {}
    for folder, name in names.items():
        found.setdefault(hardware(folder), []).append(name)
    if len(found) == 1:
        return next(iter(found))
    return ". ".join(f"{', '.join(each)}: {where}" for where, each in found.items())


def _title(methods: list[Method], exhibits: list[Exhibit]) -> str:
    if exhibits:
        return "Friendly adversarial training: the paper's numbers and ours"
    names = _names(methods)
    return f"{len(names)} runs compared" if len(names) > 1 else names[0]


def _names(methods: list[Method]) -> list[str]:
    """The runs' names, each once: a run has one row per way of measuring."""
    return list(dict.fromkeys(method.name for method in methods))


def _lead(methods: list[Method], exhibits: list[Exhibit]) -> str:
    parts = []
    if methods:
        names = _names(methods)
        parts.append(f"{len(names)} run{'s' if len(names) > 1 else ''}: {', '.join(names)}.")
    if exhibits:
        parts.append(
            f"From the paper: {', '.join(one.where for one in exhibits)}. Our numbers were measured "
            "by this package; images, seeds and hardware are stated beside them. The paper's numbers are as published."
        )
    return " ".join(parts)
