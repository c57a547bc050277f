"""The result of an evaluation: one entry per attack, the worst case, a table for people and JSON for programs.

An accuracy is a fraction; JSON holds per-example verdicts as a string of 1 (correct) and 0 (wrong), and the labels, so
that any attack can be read by class.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from torch import Tensor

from sparring import schedules
from sparring.attacks.threat import Norm
from sparring.errors import UserError, did_you_mean
from sparring.evaluation.sanity.explain import command
from sparring.files.json_text import DEPTH, FIX, Damaged, deeper_than, parse, read_json
from sparring.files.result_json import ABOUT, RESULT
from sparring.files.schema import both
from sparring.training.checkpoint import write_text

WORST = "worst"

_RESULT = both(
    RESULT,
    lambda facts: "" if any(r["name"] == WORST for r in cast(Any, facts)["records"]) else "it has no worst case",
)
_REACH = 0.9  # of the radius: an attack whose steps add up to less is reported below the table


class NotAResult(UserError):
    """A file is JSON of something else."""


@dataclass(frozen=True, eq=False)
class Repeat:
    """One seed's verdicts of one attack, restarts included: an example is correct if it withstood all of them."""

    seed: int
    correct: Tensor  # bool per example, on the CPU
    seconds: float

    @property
    def accuracy(self) -> float:
        """The fraction of correct examples."""
        return float(self.correct.double().mean())


@dataclass(frozen=True, eq=False)
class AttackResult:
    """The result of one attack, with all that is needed to run it again."""

    name: str
    serves: tuple[str, ...]  # the protocols' own names for it: pgd20@dat, pgd20@trades-random
    n: int
    eps: float  # the exact float: 0.031 is not 8/255
    steps: int
    step_size: float
    loss: str
    start: str | None
    restarts: int
    precision: str  # of the gradients; verdicts are fp32 (float64 for a float64 model)
    repeats: tuple[Repeat, ...]
    detail: dict[str, Any] = field(default_factory=dict)  # AutoAttack: version, accuracy after each part
    norm: Norm = "linf"  # in which eps and step_size are measured

    @property
    def accuracy(self) -> float:
        """The mean over seeds of the accuracy at the final iterate."""
        return statistics.fmean(repeat.accuracy for repeat in self.repeats)

    @property
    def spread(self) -> float | None:
        """The standard deviation over seeds; None with one seed."""
        return statistics.stdev(repeat.accuracy for repeat in self.repeats) if len(self.repeats) > 1 else None

    @property
    def correct(self) -> Tensor:
        """Bool per example, on the CPU: correct under every seed. With one seed its mean is the accuracy."""
        return torch.stack([repeat.correct for repeat in self.repeats]).all(dim=0)

    @property
    def worst(self) -> float:
        """The fraction correct under every seed."""
        return float(self.correct.double().mean())

    @property
    def seed(self) -> int:
        """The first seed."""
        return self.repeats[0].seed

    @property
    def seeds(self) -> tuple[int, ...]:
        """Every seed."""
        return tuple(repeat.seed for repeat in self.repeats)

    @property
    def seconds(self) -> float:
        """Time taken by all seeds, summed over every part of a resumed evaluation."""
        return sum(repeat.seconds for repeat in self.repeats)

    @property
    def radius(self) -> str:
        """eps for people to read, with its norm where that is not the usual one; empty without attack."""
        return schedules.radius_text(self.eps, self.norm) if self.eps else ""

    def __repr__(self) -> str:
        """One line, without verdicts."""
        return f"<AttackResult {self.name}: accuracy {self.accuracy:.4f} on {self.n} images, eps {self.radius}>"

    def as_dict(self) -> dict[str, Any]:
        """The same as plain JSON values."""
        return {
            "name": self.name,
            "serves": list(self.serves),
            "accuracy": self.accuracy,
            "spread": self.spread,
            "worst_over_seeds": self.worst,
            "n": self.n,
            "eps": self.eps,
            "norm": self.norm,
            "steps": self.steps,
            "step_size": self.step_size,
            "loss": self.loss,
            "start": self.start,
            "restarts": self.restarts,
            "precision": self.precision,
            "seconds": self.seconds,
            "detail": self.detail,
            "runs": [
                {"seed": r.seed, "accuracy": r.accuracy, "seconds": r.seconds, "correct": _spell(r.correct)}
                for r in self.repeats
            ],
        }

    @classmethod
    def from_dict(cls, facts: Mapping[str, Any]) -> AttackResult:
        """Read what `as_dict` wrote; a file without a norm holds L-infinity."""
        repeats = tuple(Repeat(r["seed"], _read(r["correct"]), r["seconds"]) for r in facts["runs"])
        same = ("name", "n", "eps", "steps", "step_size", "loss", "start", "restarts", "precision", "detail")
        norm = facts.get("norm", "linf")
        return cls(**{key: facts[key] for key in same}, norm=norm, serves=tuple(facts["serves"]), repeats=repeats)


@dataclass(frozen=True, eq=False)
class Result:
    """Attack results by name: `result["pgd20"]`, `result["natural"]`, `result["worst"]`, `result["pgd20@dat"]`.

    "worst" is the per-example worst case over all attacks inside one ball: an example counts as correct only if it is
    correct without attack and under every attack, seed and restart at that eps or less (a smaller ball lies inside a
    larger one; an adversarial example at twice eps proves nothing about eps). The ball is the largest of the protocols'
    eps; where they differ, each smaller one has its own entry, such as worst@0.031.
    """

    records: dict[str, AttackResult]
    n: int
    software: dict[str, str]
    about: dict[str, Any] = field(default_factory=dict)  # the caller's own facts: model, data set
    doubts: tuple[dict[str, Any], ...] = ()  # each: name, why, evidence, page
    labels: Tensor | None = None  # int64 per example, on the CPU; None in a file that has none

    def __getitem__(self, name: str) -> AttackResult:
        if name in self.records:
            return self.records[name]
        for record in self.records.values():
            if name in record.serves:
                return record
        raise KeyError(
            f"no attack {name!r} in this result.{did_you_mean(name, self.records)} It has {list(self.records)}."
        )

    def __iter__(self) -> Iterator[AttackResult]:
        return iter(self.records.values())

    @property
    def worst_case(self) -> AttackResult:
        """The per-example worst case."""
        return self.records[WORST]

    def per_class(self, name: str = WORST) -> dict[int, float]:
        """The accuracy under an attack (all seeds) by class, of the classes that occur, in order.

        Raises:
            UserError: the result was read from a file without labels.
        """
        if self.labels is None:
            raise UserError("this result has no labels, so it cannot be read by class. Evaluate the model again.")
        correct = self[name].correct.double()
        return {label: float(correct[self.labels == label].mean()) for label in sorted(set(self.labels.tolist()))}

    def save(self, path: Path | str) -> None:
        """Write the result as JSON; `sparring compare` and `sparring report` take the file."""
        if not isinstance(path, str | Path):
            raise UserError(f"save takes the path of a file, got {type(path).__name__}. Write for example 'mine.json'.")
        path = Path(path)
        if path.is_dir():
            raise UserError(f"{path} is a folder. Give a file: {path / 'result.json'}.")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, self.to_json())
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror}. Choose another file.") from None

    def as_dict(self) -> dict[str, Any]:
        """The same as plain JSON values."""
        return {
            "format": 1,
            "n": self.n,
            "about": self.about,
            "software": self.software,
            "doubts": list(self.doubts),
            "labels": None if self.labels is None else " ".join(map(str, self.labels.tolist())),
            "records": [{**record.as_dict(), "software": self.software} for record in self],
        }

    def to_json(self) -> str:
        """The result as JSON text; `Result.from_json` reads it back."""
        return json.dumps(self.as_dict(), indent=1)

    def __repr__(self) -> str:
        """One line: accuracies in per cent."""
        each = ", ".join(f"{record.name} {100 * record.accuracy:.2f}" for record in self)
        doubts = f"; doubts: {', '.join(doubt['name'] for doubt in self.doubts)}" if self.doubts else ""
        return f"<Result, {self.n} images, accuracy in %: {each}{doubts}>"

    @classmethod
    def from_json(cls, text: str) -> Result:
        """Read what `to_json` wrote.

        Raises:
            UserError: the text is no result, or a damaged one.
        """
        return cls._of(parse(text, "the text of a result", _RESULT))

    @classmethod
    def read(cls, path: Path | str) -> Result:
        """Read a file that `save` wrote.

        Raises:
            UserError: the file cannot be read, or holds no result, or a damaged one.
        """
        facts = read_json(Path(path))
        if not isinstance(facts, dict) or "records" not in facts:
            raise NotAResult(f"{path} is not a result of an evaluation. Give a file that `result.save` wrote.")
        if wrong := _RESULT(facts):
            raise Damaged(f"{path} is damaged: {wrong}. {FIX}")
        return cls._of(facts)

    @classmethod
    def _of(cls, facts: Mapping[str, Any]) -> Result:
        """The result of values that have passed the check."""
        records = {r["name"]: AttackResult.from_dict(r) for r in facts["records"]}
        given = facts.get("labels")
        labels = None if given is None else torch.tensor([int(word) for word in given.split()], dtype=torch.int64)
        return cls(records, facts["n"], facts["software"], facts["about"], tuple(facts["doubts"]), labels)

    def table(self) -> RenderableType:
        """A table for the terminal: a row per attack, the confidence interval, and the doubts."""
        title = f"Accuracy on {self.n} images (%)"
        table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        several = any(len(record.repeats) > 1 for record in self)
        for column in ["attack", "accuracy", *(["± seeds"] if several else []), "eps", "steps", "s"]:
            table.add_column(column, justify="right", no_wrap=True)
        table.columns[0].justify = "left"
        table.add_column("loss, start", overflow="fold", min_width=8)
        for record in self:
            if record.name.startswith(WORST):
                table.add_section()
            cells = [record.name, f"{100 * record.accuracy:.2f}"]
            if several:
                cells.append("" if record.spread is None else f"{100 * record.spread:.2f}")
            how = [record.loss, record.start or "", f"{record.restarts} restarts" if record.restarts > 1 else ""]
            steps = f"{record.steps} of {pixels(record.step_size)}" if record.steps else ""
            cells += [record.radius, steps, f"{record.seconds:.1f}"]
            table.add_row(*cells, ", ".join(word for word in how if word))
        low, high = interval(self.worst_case.accuracy, self.n)
        trust = f"The worst case is {100 * low:.1f} to {100 * high:.1f} % (95 % confidence, {self.n} images)."
        reach = [
            f"{r.name}: {r.steps} steps of {pixels(r.step_size)} reach only {pixels(r.steps * r.step_size)} of eps "
            f"{pixels(r.eps)}. The protocols dat, mart and quick scale their steps with eps."
            for r in self
            if 0 < r.steps * r.step_size < _REACH * r.eps
        ]
        doubts = [
            line
            for d in self.doubts
            for line in (f"Doubt: {d['name']}: {d['why']} {d['evidence']}", f"  {command(d['name'])}")
        ]
        return Group(table, *(Text(line) for line in [trust, *reach, *doubts]))


def check_about(about: object) -> None:
    """Refuse facts of the caller that a file could not keep, or that its readers would take for others."""
    if about is None:
        return
    if not isinstance(about, Mapping):
        raise UserError(f"about must be a dict of facts to keep, got {type(about).__name__}.")
    try:
        plain = json.loads(json.dumps(dict(about)))
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(f"about must hold what JSON can: {error}. Write numbers and texts.") from None
    if deeper_than(plain, DEPTH - 2):  # in a result it stands a level deeper
        raise UserError(f"about is nested deeper than {DEPTH - 2} levels. Keep the facts that identify the model.")
    if wrong := ABOUT(plain):
        raise UserError(f"about cannot be kept: {wrong}. Give that fact another name.")


def interval(accuracy: float, n: int) -> tuple[float, float]:
    """Wilson's 95 % confidence interval of an accuracy measured on n images."""
    z = 1.959963984540054
    middle = (accuracy + z * z / (2 * n)) / (1 + z * z / n)
    reach = z * math.sqrt(accuracy * (1 - accuracy) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return max(middle - reach, 0.0), min(middle + reach, 1.0)


def pixels(value: float) -> str:
    """As `schedules.pixels`; empty for 0, which means no attack."""
    return schedules.pixels(value) if value else ""


def _spell(correct: Tensor) -> str:
    return "".join("1" if right else "0" for right in correct.tolist())


def _read(text: str) -> Tensor:
    return torch.tensor([letter == "1" for letter in text], dtype=torch.bool)
