"""Run folders for the page: rows of the table with their training history, and strips of an attack on the model.

Reads what training and evaluation wrote to a folder. Only the strips are computed here.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparring import weights
from sparring.data import load
from sparring.errors import UserError
from sparring.files.json_text import FIX, Damaged
from sparring.files.schema import anything, fields, items, nothing_or, number, text, whole
from sparring.models import built_in
from sparring.report.attack_path import AttackPath, attack_path, choose
from sparring.report.content import Method
from sparring.report.evaluations import Evaluations, Measured, measured_of_file, of_run
from sparring.report.identity import settings_of
from sparring.report.labels import resumed
from sparring.schedules import radius_text
from sparring.training import run_folder
from sparring.training.config import Config
from sparring.training.run_folder import RunFolder

_CANDIDATES = 1000  # test images among which those of the strips are chosen


_HISTORY = items(
    fields(
        epoch=whole(1),
        natural=number(0, 1),
        pgd10=number(0, 1),
        backprops=number(0, 1e9),
        seconds=number(0, 1e12),
        loss=nothing_or(number(-1e30, 1e30, finite=False)),  # NaN where the run diverged
        lr=nothing_or(number(0, 1e30)),
        optional=("loss", "lr"),
        others=anything,
    )
)
_STARTS = items(
    fields(device=text(1000), threads=whole(), at_once=nothing_or(whole()), optional=("at_once",), others=anything)
)


@dataclass(frozen=True, eq=False)
class Run:
    """A run folder as it was when it was opened: every file is read once, also while the run is training."""

    run: RunFolder
    history: Sequence[Mapping[str, Any]]  # a record per epoch
    starts: Sequence[Mapping[str, Any]]  # of the training
    evaluations: Evaluations
    settings: Mapping[str, Any]  # by which it is compared with others (`identity.settings_of`)

    @property
    def folder(self) -> Path:
        """Where it is."""
        return self.run.folder

    @property
    def config(self) -> Config:
        """Its configuration."""
        return self.run.config

    @property
    def finished(self) -> bool:
        """Whether it has trained all its epochs."""
        return len(self.history) >= self.config.epochs

    @property
    def hardware(self) -> str:
        """'trained on x86_64 CPU, 2 threads, resumed once; evaluated on x86_64 CPU'."""
        trained = " and ".join(dict.fromkeys(map(_machine, self.starts))) or "hardware that is not recorded"
        parts = [", ".join(filter(None, [f"trained on {trained}", resumed(len(self.starts))]))]
        evaluated = " and ".join(self.evaluations.devices)
        return "; ".join([*parts, *([f"evaluated on {evaluated}"] if evaluated else [])])


def open_run(folder: Path) -> Run:
    """The run in a folder.

    Raises:
        UserError: its own files are damaged. A damaged evaluation is left out and named in `evaluations`.
    """
    run = run_folder.open_run(folder)
    run.check_parts()
    history, starts = run_folder.whole_history(folder), run_folder.read_environment(folder)
    for name, check, value in ((run_folder.METRICS, _HISTORY, history), (run_folder.ENVIRONMENT, _STARTS, starts)):
        if wrong := check(value):
            raise Damaged(f"{folder / name} is damaged: {wrong}. {FIX}")
    return Run(run, history, starts, of_run(folder, run.config), settings_of(run))


def methods(folder: Path, name: str = "") -> list[Method]:
    """The rows of the run in a folder; see `rows_of`."""
    return rows_of(open_run(folder), name)


def rows_of(run: Run, name: str = "") -> list[Method]:
    """The rows of a run: one per way of measuring; validation accuracy of the last epoch if it was never evaluated.

    Args:
        name: the run's name on the page; the folder's name by default.
    """
    if not run.history:
        raise UserError(
            f"{run.folder} has no finished epoch yet. Continue it: sparring train --out {run.folder} --resume."
        )
    rows = run.evaluations.measured
    if not rows:
        held = f"{run.config.validation:,} validation images of {run.config.data}"
        how = f"{_validated_at(run.config)}, {held}, last epoch"
        last = run.history[-1]
        rows = {how: Measured({"Natural (validation)": last["natural"], "PGD-10 (validation)": last["pgd10"]})}
    return [_method(run, name or run.folder.name, measured, numbers) for measured, numbers in rows.items()]


def _method(run: Run, name: str, measured: str, numbers: Measured) -> Method:
    """A row. Its cost is that of the epochs before the evaluation: training may have continued afterwards."""
    spent = run.history[: numbers.epochs]
    return Method(
        name=name,
        about=_about(run.config, len(spent)),
        accuracies=numbers.accuracies,
        backprops=statistics.fmean(record["backprops"] for record in spent) if spent else 0.0,
        by_class=numbers.by_class,
        seconds=sum(record["seconds"] for record in spent),
        history=run.history,
        measured=measured,
        doubts=numbers.doubts,
        task=f"{run.config.data}, {run.config.model}, {len(spent)} epochs",
        held_out=run.config.validation,
        images=run.config.data,
        validated_at=_validated_at(run.config),
    )


def _validated_at(config: Config) -> str:
    return f"eps {radius_text(config.validation_radius, config.objective.norm)}"


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


def _machine(start: Mapping[str, Any]) -> str:
    """Where one start of a training ran: the device, its threads, and how many processes shared it."""
    threads, at_once = start["threads"], start.get("at_once") or 1
    shared = f", {at_once} processes at once" if at_once > 1 else ""
    return f"{start['device']}, {threads} thread{'s' if threads > 1 else ''}{shared}"


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
