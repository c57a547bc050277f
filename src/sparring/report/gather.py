"""Run folders for the page: a row of the table each, its course, and walks of an attack on its model.

Reads what training and evaluation left in a folder; measures nothing but the walks.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from sparring import runs, weights
from sparring.config import Config
from sparring.data import load
from sparring.errors import UserError
from sparring.evaluation import Result
from sparring.report.page import Method
from sparring.report.walk import Walk, choose, walk

# As the page prints an attack. What is not here keeps its own name.
COLUMNS = {
    "natural": "Natural",
    "fgsm": "FGSM",
    "pgd10": "PGD-10",
    "pgd20": "PGD-20",
    "pgd100": "PGD-100",
    "cw30": "C&W",
    "autoattack": "AutoAttack",
    "worst": "Worst case",
}
_LOOKED_AT = 1000  # test images among which the walks are chosen


def method(folder: Path) -> Method:
    """A run as a row: its accuracies on test data where it was evaluated, else those on validation data."""
    run = runs.open_run(folder)
    history = run.metrics()
    if not history:
        raise UserError(f"{folder} has no finished epoch yet. Continue it: sparring train --out {folder} --resume.")
    accuracies = _evaluated(folder)
    if not accuracies:
        accuracies = {"Natural (validation)": history[-1]["natural"], "PGD-10 (validation)": history[-1]["pgd10"]}
    return Method(
        name=folder.name,
        about=_about(run.config, len(history)),
        accuracies=accuracies,
        backprops=statistics.fmean(record["backprops"] for record in history),
        seconds=sum(record["seconds"] for record in history),
        history=history,
    )


def _evaluated(folder: Path) -> dict[str, float]:
    """The accuracies in RUN/evaluation, of the most images where there are several."""
    found: dict[str, tuple[int, float]] = {}
    for path in sorted((folder / "evaluation").glob("*.json")):
        try:
            result = Result.from_json(path.read_text(encoding="utf-8"))
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{path} is not a result of sparring evaluate. Delete it, and evaluate again.") from None
        for record in result:
            name = COLUMNS.get(record.name.partition("@")[0], record.name)
            if record.n > found.get(name, (0, 0.0))[0]:
                found[name] = (record.n, record.accuracy)
    order = [*COLUMNS.values(), *found]
    return {name: found[name][1] for name in sorted(found, key=order.index)}


def _about(config: Config, done: int) -> str:
    epochs = f"{config.epochs} epochs" if done >= config.epochs else f"{done} of {config.epochs} epochs"
    return f"{config.objective} on {config.data}, {config.model}, {epochs}, seed {config.seed}"


def strips(folder: Path, count: int) -> list[Walk]:
    """Walks on test images, from the image itself in tenths of the radius, so that the crossing can be watched."""
    config = runs.open_run(folder).config
    data, model = load(config.data), weights.load_model(folder)
    split = data.test.head(_LOOKED_AT)
    x, y = split.x.float() / 255, split.y
    eps, steps = config.attack.at(config.epochs, config.epochs).eps, config.attack.steps
    settings: dict[str, Any] = {"eps": eps, "step_size": eps / 10, "steps": steps}
    picked = choose(model, x, y, count=count, **settings)
    return walk(model, x[picked], y[picked], tau=0, classes=data.classes, **settings)
