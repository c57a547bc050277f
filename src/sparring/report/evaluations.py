"""Evaluations as numbers: what a result file holds, by how it was measured, and the files of a run's evaluation/.

Only what was measured alike shares a row. Knows neither training nor pages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from sparring.errors import UserError
from sparring.evaluation import PROTOCOLS, AttackResult, Result
from sparring.evaluation.protocols import PGDAttack
from sparring.evaluation.result import NotAResult
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


@dataclass(frozen=True)
class Measured:
    """The numbers of one way of measuring a model."""

    accuracies: Mapping[str, float]  # by column
    doubts: tuple[str, ...] = ()
    epochs: int | None = None  # trained before this evaluation; None: all
    n: int = 0  # images
    by_class: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # column -> class -> accuracy


@dataclass(frozen=True)
class Evaluations:
    """What RUN/evaluation holds."""

    measured: Mapping[str, Measured]  # by how it was measured
    devices: tuple[str, ...]  # that it was measured on
    others: tuple[Path, ...] = ()  # files that are no evaluations
    damaged: tuple[str, ...] = ()  # why files cannot be read


def of_run(folder: Path, config: Config) -> Evaluations:
    """The evaluations of a run, oldest first. A file that cannot be read is left out, and named."""
    results: list[Result] = []
    others: list[Path] = []
    damaged: list[str] = []
    for path in sorted((folder / run_folder.EVALUATION).glob("*.json"), key=_age):
        if path.stem == "bound" or path.stem.startswith("bound-"):  # of `sparring bound`: losses, not accuracies
            continue
        try:
            results.append(Result.read(path))
        except NotAResult:
            others.append(path)
        except UserError as error:
            damaged.append(str(error))
    devices = tuple(dict.fromkeys(map(_device, results)))
    return Evaluations(_measured(results, config), devices, tuple(others), tuple(damaged))


def _age(path: Path) -> int:
    """When a file was written; 0 where it has just gone."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def measured_of_file(path: Path) -> dict[str, Measured]:
    """The numbers of one result, by how they were measured: one entry per radius.

    Raises:
        UserError: the file is not a result.
    """
    give = "Give run folders, or files of `result.save(...)` or `sparring evaluate --json`."
    try:
        found = _measured([Result.read(path)])
    except NotAResult:
        raise UserError(f"{path} is not a result. {give}") from None
    if not found:
        raise UserError(f"{path} is not a result: it has no attack of a protocol. {give}")
    return found


def _measured(results: Sequence[Result], config: Config | None = None) -> dict[str, Measured]:
    """Results by how they were measured: only what was measured alike shares a row.

    Of two that differ only in their number of images the larger one counts, then the later one.
    """
    found: dict[tuple[str, ...], tuple[int, Measured]] = {}
    for result in results:
        doubts = tuple(f"{doubt['name']}: {doubt['why']} {doubt['evidence']}" for doubt in result.doubts)
        where = str(result.about.get("data") or (config.data if config else "the caller's data"))
        which = "best checkpoint" if result.about.get("which") == "best" else ""
        facts = result.about.get("facts", {})
        epoch, spent = facts.get("epoch"), None
        if config and isinstance(epoch, int) and (epoch != config.epochs or facts.get("step")):
            spent = None if which else epoch  # the best epoch is chosen among all: it costs all of them
            which = f"{which or 'checkpoint'} of {run_folder.stage(facts)}"
        for eps, records in _groups(result).items():
            key = (radius_text(eps, records[-1].norm), where, _protocols(records), which, _how(records))
            if key not in found or result.n >= found[key][0]:
                numbers = Measured(_accuracies(records, eps), doubts, spent, result.n, _by_class(result, records, eps))
                found[key] = (result.n, numbers)
    rows = {}
    for (eps_text, where, *rest), (n, numbers) in found.items():
        images = "1 image" if n == 1 else f"{n:,} images"
        rows[", ".join(filter(None, [f"eps {eps_text}", f"{images} of {where}", *rest]))] = numbers
    return rows


def attack_of(column: str) -> str:
    """The name of the attack in a column: pgd20 for 'PGD-20', pgd20@trades for 'PGD-20 (trades)'."""
    heading, _, protocol = column.partition(" (")
    name = _ATTACKS.get(heading, heading)
    return f"{name}@{protocol.removesuffix(')')}" if protocol else name


def _device(result: Result) -> str:
    """'x86_64 CPU' for 'cpu: x86_64': spelled as in the environment of a training."""
    kind, _, name = result.software.get("device", "a device: that is not recorded").partition(": ")
    return f"{name} CPU" if kind == "cpu" else name


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
    whole = {eps: natural + list(records.values()) for eps, records in groups.items()}
    return {eps: records for eps, records in whole.items() if any(record.eps <= eps for record in records)}


def _accuracies(records: Sequence[AttackResult], eps: float) -> dict[str, float]:
    """Accuracies by column, with the worst case over the attacks inside the ball."""
    found = {}
    for record in records:
        name, _, protocol = record.name.partition("@")
        found[COLUMNS.get(name, name) + (f" ({protocol})" if protocol else "")] = record.accuracy
    found[COLUMNS["worst"]] = float(_worst(records, eps).double().mean())
    order = {heading: place for place, heading in enumerate(COLUMNS.values())}
    return {
        name: found[name] for name in sorted(found, key=lambda name: order.get(name.partition(" (")[0], len(order)))
    }


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
