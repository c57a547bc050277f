"""Run folders for the page: rows of the table with their training history, and strips of an attack on the model.

Reads what training and evaluation wrote to a folder. Only the strips are computed here.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparring import weights
from sparring.data import load
from sparring.errors import UserError
from sparring.evaluation import PROTOCOLS, AttackResult, Result
from sparring.evaluation.protocols import PGDAttack
from sparring.models import built_in
from sparring.report.attack_path import AttackPath, attack_path, choose
from sparring.report.content import Method
from sparring.report.labels import resumed
from sparring.schedules import radius_text
from sparring.training import run_folder
from sparring.training.config import Config

# Attack -> column heading. Other attacks keep their own names.
COLUMNS = {
    "natural": "Natural",
    "fgsm": "FGSM",
    "pgd10": "PGD-10",
    "pgd20": "PGD-20",
    "pgd20-2eps": "PGD-20, 2 eps",
    "pgd100": "PGD-100",
    "cw30": "C&W",
    "autoattack": "AutoAttack",
    "worst": "Worst case",
}
_ATTACKS = {heading: name for name, heading in COLUMNS.items()}
_Read = tuple[Result, dict[float, list[AttackResult]], tuple[str, ...]]  # result, attacks by radius, doubts
_CANDIDATES = 1000  # test images among which those of the strips are chosen


@dataclass(frozen=True)
class Measured:
    """The numbers of one way of measuring a model."""

    accuracies: Mapping[str, float]  # by column
    doubts: tuple[str, ...] = ()
    epochs: int | None = None  # trained before this evaluation; None: all
    n: int = 0  # images
    by_class: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # column -> class -> accuracy


def methods(folder: Path, name: str = "") -> list[Method]:
    """The rows of a run: one per way of measuring; validation accuracy of the last epoch if it was never evaluated.

    Args:
        name: the run's name on the page; the folder's name by default.
    """
    run = run_folder.open_run(folder)
    history = history_of(folder)
    if not history:
        raise UserError(f"{folder} has no finished epoch yet. Continue it: sparring train --out {folder} --resume.")
    rows = measured_of_run(folder, run.config)
    if not rows:
        held = f"{run.config.validation:,} validation images of {run.config.data}"
        how = f"{_validated_at(run.config)}, {held}, last epoch"
        last = history[-1]
        rows = {how: Measured({"Natural (validation)": last["natural"], "PGD-10 (validation)": last["pgd10"]})}
    return [_method(run, history, name or folder.name, measured, numbers) for measured, numbers in rows.items()]


def _method(
    run: run_folder.RunFolder, history: Sequence[Mapping[str, Any]], name: str, measured: str, numbers: Measured
) -> Method:
    """A row. Its cost is that of the epochs before the evaluation: training may have continued afterwards."""
    spent = history[: numbers.epochs]
    return Method(
        name=name,
        about=_about(run.config, len(spent)),
        accuracies=numbers.accuracies,
        backprops=statistics.fmean(record["backprops"] for record in spent) if spent else 0.0,
        by_class=numbers.by_class,
        seconds=sum(record["seconds"] for record in spent),
        history=history,
        measured=measured,
        doubts=numbers.doubts,
        task=f"{run.config.data}, {run.config.model}, {len(spent)} epochs",
        held_out=run.config.validation,
        images=run.config.data,
        validated_at=_validated_at(run.config),
    )


def _validated_at(config: Config) -> str:
    return f"eps {radius_text(config.validation_radius, config.objective.norm)}"


def attack_of(column: str) -> str:
    """The name of the attack in a column: pgd20 for 'PGD-20', pgd20@trades for 'PGD-20 (trades)'."""
    heading, _, protocol = column.partition(" (")
    name = _ATTACKS.get(heading, heading)
    return f"{name}@{protocol.removesuffix(')')}" if protocol else name


def rows_of_file(path: Path, name: str) -> list[Method]:
    """The rows of a result of any model, one per radius. What its training cost is unknown."""
    return [
        Method(
            name=name,
            about=f"result in {path}",
            accuracies=numbers.accuracies,
            backprops=None,
            seconds=None,
            history=(),
            measured=how,
            doubts=numbers.doubts,
            by_class=numbers.by_class,
        )
        for how, numbers in measured_of_file(path).items()
    ]


def history_of(folder: Path) -> list[dict[str, Any]]:
    """The records of a run, one per epoch; refused where some are missing or lack their numbers."""
    history = run_folder.whole_history(folder)
    needed = ("natural", "pgd10", "backprops", "seconds")
    if any(not isinstance(record.get(name), int | float) for record in history for name in needed):
        raise UserError(f"{folder / run_folder.METRICS} is damaged: a record lacks its numbers. Restore the file.")
    return history


def measured_of_run(folder: Path, config: Config) -> dict[str, Measured]:
    """The numbers in RUN/evaluation, by how they were measured."""
    return _measured([read for read in _evaluations(folder).values() if read], config)


def measured_of_file(path: Path) -> dict[str, Measured]:
    """The numbers of one result, by how they were measured: one entry per radius.

    Raises:
        UserError: the file is not a result.
    """
    read = _evaluation(path)
    found = _measured([read]) if read else {}
    if not found:
        raise UserError(
            f"{path} is not a result. Give run folders, or files of `result.save(...)` or `sparring evaluate --json`."
        )
    return found


def _measured(evaluations: Sequence[_Read], config: Config | None = None) -> dict[str, Measured]:
    """Evaluations by how they were measured: only what was measured alike shares a row.

    Of two that differ only in their number of images the larger one counts, then the later one.
    """
    found: dict[tuple[str, ...], tuple[int, Measured]] = {}
    for result, groups, doubts in evaluations:
        where = str(result.about.get("data") or (config.data if config else "the caller's data"))
        which = "best checkpoint" if result.about.get("which") == "best" else ""
        facts = result.about.get("facts", {})
        epoch, spent = facts.get("epoch"), None
        if config and isinstance(epoch, int) and (epoch != config.epochs or facts.get("step")):
            spent = None if which else epoch  # the best epoch is chosen among all: it costs all of them
            which = f"{which or 'checkpoint'} of {run_folder.stage(facts)}"
        for eps, records in groups.items():
            key = (radius_text(eps, records[-1].norm), where, _protocols(records), which, _how(records))
            if key not in found or result.n >= found[key][0]:
                numbers = Measured(_accuracies(records, eps), doubts, spent, result.n, _by_class(result, records, eps))
                found[key] = (result.n, numbers)
    rows = {}
    for (eps_text, where, *rest), (n, numbers) in found.items():
        images = "1 image" if n == 1 else f"{n:,} images"
        rows[", ".join(filter(None, [f"eps {eps_text}", f"{images} of {where}", *rest]))] = numbers
    return rows


def hardware(folder: Path) -> str:
    """'trained on x86_64 CPU, 2 threads, resumed once; evaluated on x86_64 CPU'."""
    starts = run_folder.read_environment(folder)  # one entry per start of the training
    trained = " and ".join(dict.fromkeys(map(_machine, starts))) or "hardware that is not recorded"
    parts = [", ".join(filter(None, [f"trained on {trained}", resumed(len(starts))]))]
    evaluated = " and ".join(dict.fromkeys(_device(read[0]) for read in _evaluations(folder).values() if read))
    return "; ".join([*parts, *([f"evaluated on {evaluated}"] if evaluated else [])])


def _machine(start: Mapping[str, Any]) -> str:
    """Where one start of a training ran: the device, its threads, and how many processes shared it."""
    threads, at_once = start["threads"], start.get("at_once") or 1
    shared = f", {at_once} processes at once" if at_once > 1 else ""
    return f"{start['device']}, {threads} thread{'s' if threads > 1 else ''}{shared}"


def _device(result: Result) -> str:
    """'x86_64 CPU' for 'cpu: x86_64': spelled as in the environment of a training."""
    kind, _, name = result.software.get("device", "a device: that is not recorded").partition(": ")
    return f"{name} CPU" if kind == "cpu" else name


def not_evaluations(folder: Path) -> list[Path]:
    """The files in RUN/evaluation that cannot be read as evaluations."""
    return [path for path, read in _evaluations(folder).items() if read is None]


def _evaluations(folder: Path) -> dict[Path, _Read | None]:
    """The files in RUN/evaluation, oldest first; None if unreadable."""
    found: dict[Path, _Read | None] = {}
    for path in sorted((folder / run_folder.EVALUATION).glob("*.json"), key=lambda path: path.stat().st_mtime_ns):
        if path.stem == "bound" or path.stem.startswith("bound-"):  # of `sparring bound`: losses, not accuracies
            continue
        found[path] = _evaluation(path)
    return found


def _evaluation(path: Path) -> _Read | None:
    """A result, its attacks by radius and its doubts; None if the file is no result."""
    try:
        result = Result.from_json(path.read_text(encoding="utf-8"))
        doubts = tuple(f"{doubt['name']}: {doubt['why']} {doubt['evidence']}" for doubt in result.doubts)
        return result, _groups(result), doubts
    except (ValueError, KeyError, TypeError, AttributeError, OSError):
        return None


def _groups(result: Result) -> dict[float, list[AttackResult]]:
    """The attacks of a result by their protocol's radius; PGD-20 at twice eps belongs to its protocol's radius."""
    groups: dict[float, dict[str, AttackResult]] = {}
    for record in result:
        entered: set[float] = set()
        for served in record.serves if record.eps > 0 else ():
            attack, _, protocol = served.partition("@")
            declared = PROTOCOLS[protocol].attacks if protocol in PROTOCOLS else ()
            times = next((one.times_eps for one in declared if isinstance(one, PGDAttack) and one.name == attack), 1.0)
            eps = record.eps / times
            if eps not in entered:  # one attack may be PGD-20 to one protocol, and PGD-20 at twice eps to another
                group = groups.setdefault(eps, {})
                own = record.name if record.name.partition("@")[0] == attack else attack
                own = f"{own}@{protocol}" if own in group else own
                group[own] = replace(record, name=own)
                entered.add(eps)
    natural = [record for record in result if record.name == "natural"]
    return {eps: natural + list(records.values()) for eps, records in groups.items()}


def _accuracies(records: Sequence[AttackResult], eps: float) -> dict[str, float]:
    """Accuracies by column, with the worst case over the attacks inside the ball."""
    found = {}
    for record in records:
        name, _, protocol = record.name.partition("@")
        found[COLUMNS.get(name, name) + (f" ({protocol})" if protocol else "")] = record.accuracy
    found[COLUMNS["worst"]] = float(_worst(records, eps).double().mean())
    order = [*COLUMNS.values(), *found]
    return {name: found[name] for name in sorted(found, key=lambda name: order.index(name.partition(" (")[0]))}


def _worst(records: Sequence[AttackResult], eps: float) -> Tensor:
    """Whether each example is correct under all attacks inside the ball."""
    return torch.stack([record.correct for record in records if record.eps <= eps]).all(dim=0)


def _by_class(result: Result, records: Sequence[AttackResult], eps: float) -> dict[str, dict[str, float]]:
    """Natural accuracy and the worst case by class; empty where the result has no labels."""
    labels = result.labels
    if labels is None or not len(labels):
        return {}
    facts = result.about.get("facts", {}).get("model", {})
    names = result.about.get("classes") or facts.get("classes") or []
    correct = {record.name: record.correct for record in records if record.name == "natural"}
    correct["worst"] = _worst(records, eps)
    return {
        COLUMNS[column]: {
            str(names[label]) if label < len(names) else str(label): float(right[labels == label].double().mean())
            for label in sorted(set(labels.tolist()))
        }
        for column, right in correct.items()
    }


def _protocols(records: Sequence[AttackResult]) -> str:
    """'protocol dat', 'protocols dat + autoattack'."""
    names = list(dict.fromkeys(name.partition("@")[2] for record in records for name in record.serves))
    names = [name for name in names if name]
    return f"protocol{'s' if len(names) > 1 else ''} {' + '.join(names)}" if names else ""


def _how(records: Sequence[AttackResult]) -> str:
    """The settings that differ from the defaults: seeds, restarts, gradients in bf16."""
    attacks = [record for record in records if record.eps > 0]
    seeds = sorted({seed for record in attacks for seed in record.seeds})
    restarts = max(record.restarts for record in attacks)
    parts = [
        f"seed{'s' if len(seeds) > 1 else ''} {' '.join(map(str, seeds))}" if seeds != [0] else "",
        f"{restarts} restarts" if restarts > 1 else "",
        *sorted({str(getattr(record, "norm", "linf")) for record in attacks} - {"linf"}),
        *sorted({f"{record.precision} gradients" for record in attacks if record.precision != "fp32"}),
    ]
    return ", ".join(filter(None, parts))


def _about(config: Config, done: int) -> str:
    epochs = (
        f"{config.epochs} epoch{'s' if config.epochs > 1 else ''}"
        if done >= config.epochs
        else f"{done} of {config.epochs} epochs"
    )
    return f"{config.objective.name} on {config.data}, {config.model}, {epochs}, seed {config.seed}"


def strips(folder: Path, count: int, own: str | None = None) -> list[AttackPath]:
    """Attacks on test images, step by step: from the image itself in tenths of the radius, so that the crossing shows.

    Empty if no image is worth showing: none that the model gets right is fooled before the last step. `own` names the
    network of a run whose network is not built in.
    """
    config = run_folder.open_run(folder).config
    named = None if built_in(config.model) else own
    data, model = load(config.data), weights.load_model(folder, model=named)
    split = data.test.head(_CANDIDATES)
    x, y = split.x.float() / 255, split.y
    eps, steps = config.objective.radius, config.objective.most_backprops
    settings: dict[str, Any] = {"eps": eps, "step_size": eps / 10, "steps": steps, "norm": config.objective.norm}
    picked = choose(model, x, y, count=count, **settings)
    return attack_path(model, x[picked], y[picked], tau=0, classes=data.classes, **settings)
