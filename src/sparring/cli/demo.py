"""`sparring demo`: standard, worst-case and friendly training on digits, compared in one table and on one page."""

from __future__ import annotations

import json
import math
import os
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from sparring import schedules
from sparring.cli.arguments import parse
from sparring.cli.console import Screen
from sparring.cli.progress import command_bar
from sparring.cli.signals import stopped
from sparring.data import Dataset, load
from sparring.errors import UserError
from sparring.evaluation import evaluate
from sparring.files.leftovers import sweep, target
from sparring.objectives import FAT, KTauPGD, Progress
from sparring.recipes import digits
from sparring.report.attack_path import attack_path, choose
from sparring.report.content import Method
from sparring.report.page import percent, write_page
from sparring.training import run_folder
from sparring.training.checkpoint import write_text
from sparring.training.config import Config
from sparring.training.loop import Interrupted, train
from sparring.training.signals import stopping

DESCRIPTION = """Train three models on 8x8 digits, attack them, and write one page that shows what happened and why.

Examples:
  sparring demo
  sparring demo --seed 3 --out runs/demo-3"""

PROTOCOL = "mart"  # PGD-20 and C&W-30 in steps of eps/10, uniform start
# Column of the table -> attack.
ATTACKS = {"Natural": "natural", "FGSM": "fgsm", "PGD-20": "pgd20", "C&W": "cw30"}
# The digits recipes in larger batches, FAT with a growing tau. A step on 8x8 images has a fixed cost, which a larger
# batch pays less often: so fewer backward passes take less time on a CPU as well (benchmarks/bench_cpu_saving.py).
EPOCHS = 20
FRIENDLY = FAT(**digits.ATTACK, tau="0,1@40%,2@75%")
TRIALS = {
    name: (replace(config, batch_size=128, epochs=EPOCHS), about)
    for name, config, about in (
        ("Standard", digits.STANDARD, "trained on the images as they are"),
        ("Madry", digits.MADRY, "trained on the worst case: all 10 steps of PGD"),
        (
            "FAT",
            replace(digits.FAT, objective=FRIENDLY),
            "trained on friendly data: each attack stops soon after it fools the model",
        ),
    )
}


@dataclass(frozen=True)
class Options:
    """Where to write, and the seed."""

    out: Path = Path("runs/demo")
    """Folder for the page and the three runs; a demo that is already there is replaced."""
    seed: int = 0
    epochs: int = EPOCHS
    """Fewer are faster and less accurate."""


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread, unless the user has set a number: on images of 8x8 pixels a second one saves Madry a
    fourteenth and FAT nothing (benchmarks/bench_cpu_saving.py), and it waits for every busy core.
    """
    before = torch.get_num_threads()
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@one_thread()
def run(argv: list[str]) -> int:
    """The command."""
    options = parse(Options, argv, prog="sparring demo", description=DESCRIPTION)
    _check_folder(options.out)
    began = time.perf_counter()
    data, console = load("digits"), Screen()
    console.print(
        f"Digits: {len(data.train)} training and {len(data.test)} test images, 8x8. "
        f"Attacks may change every pixel by up to {digits.EPS} of its range.",
        highlight=False,
    )
    methods, models = [], {}
    try:
        with stopping() as stop:
            for name, (config, about) in TRIALS.items():
                config = replace(config, seed=options.seed, epochs=options.epochs)
                folder = options.out / name.lower()
                bar = command_bar(console, title=f"{name:9}", lines=False)
                models[name] = train(
                    config, folder, overwrite=True, data=data, tracker=bar, stop=stop, tensorboard=False
                )
                methods.append(_measure(name, about, config, models[name], data, folder))
                console.print(_line(methods[-1]), highlight=False, soft_wrap=True)
    except Interrupted:
        again = shlex.join(["sparring", "demo", *argv])
        raise stopped(f"the demo was interrupted. Start it again with: {again}") from None
    lead = conclusion(methods[1], methods[2], len(data.test))
    page = options.out / "index.html"
    _write(page, lead, methods, models["FAT"], data, options)
    write_text(options.out / "demo.json", json.dumps(_as_data(methods, options, len(data.test)), indent=2) + "\n")
    console.print(_table(methods, len(data.test)))
    console.print(lead, highlight=False)
    console.print(
        f"\n{time.perf_counter() - began:.0f} s. The page: {page}\n"
        f"Measure FAT again: {_again(options.out)}\n"
        f"Use a model: sparring.load_model({str(options.out / 'fat')!r})",
        highlight=False,
        soft_wrap=True,
    )
    return 0


def _check_folder(out: Path) -> None:
    """Refuse a folder that holds anything but a demo."""
    if not out.is_dir():
        return
    page = {"index.html"} if (out / "demo.json").is_file() else set()
    own = {"demo.json", *page, *(name.lower() for name in TRIALS if (out / name.lower() / run_folder.CONFIG).is_file())}
    written = ("demo.json", "index.html")
    sweep(out, written.__contains__)
    others = sorted(
        entry.name
        for entry in out.iterdir()
        if entry.name not in own
        and (target(entry) or ("",))[0] not in written  # half-written, by a demo that was killed
    )
    if others:
        raise UserError(f"{out} holds something else ({others[0]}). Choose an empty or a new folder with --out.")


def _measure(name: str, about: str, config: Config, model: torch.nn.Module, data: Dataset, folder: Path) -> Method:
    """One row: accuracies on the test images at the training radius, written as by `sparring evaluate`."""
    origin = {
        "model": str(folder),
        "which": "last",
        "facts": {"epoch": config.epochs},
        "data": config.data,
        "data_note": data.note,
    }
    x, y, eps = data.test.x, data.test.y, config.validation_radius
    found = evaluate(model, x, y, PROTOCOL, eps=eps, doubts=False, about=origin)
    evaluation = folder / run_folder.EVALUATION
    evaluation.mkdir(exist_ok=True)
    write_text(evaluation / f"{PROTOCOL}-eps{schedules.spell(eps)}.json", found.to_json())
    history = run_folder.read_metrics(folder)
    return Method(
        name=name,
        about=about,
        accuracies={column: found[attack].accuracy for column, attack in ATTACKS.items()},
        backprops=sum(record["backprops"] for record in history) / len(history),
        seconds=sum(record["seconds"] for record in history),
        history=history,
        held_out=config.validation,
    )


def _again(out: Path) -> str:
    """The command that repeats the demo's measurement of the friendly model."""
    words = ["sparring", "evaluate", str(out / "fat"), "--protocol", PROTOCOL, "--eps", schedules.spell(digits.EPS)]
    return shlex.join(words)


def _as_data(methods: list[Method], options: Options, images: int) -> dict[str, Any]:
    """The table as JSON."""
    rows = {m.name: {**m.accuracies, "backprops": m.backprops, "seconds": m.seconds} for m in methods}
    return {"n": images, "seed": options.seed, "methods": rows, **run_folder.environment(torch.device("cpu"))}


def conclusion(madry: Method, fat: Method, images: int) -> str:
    """One sentence on what the numbers show. A difference within one standard error counts as none."""

    def ahead(column: str) -> int:
        one, other = fat.accuracies[column], madry.accuracies[column]
        noise = math.sqrt((one * (1 - one) + other * (1 - other)) / images)
        return 0 if abs(one - other) <= noise else 1 if one > other else -1

    accurate = {1: "more accurate", 0: "about as accurate", -1: "less accurate"}[ahead("Natural")]
    robust = {1: "more robust", 0: "about as robust", -1: "less robust"}[ahead("PGD-20")]
    return (
        f"Friendly training is {accurate} on clean images ({percent(fat.accuracies['Natural'])} % against "
        f"{percent(madry.accuracies['Natural'])} % for worst-case training), {robust} under PGD-20 "
        f"({percent(fat.accuracies['PGD-20'])} % against {percent(madry.accuracies['PGD-20'])} %), and needs "
        f"{fat.backprops:.1f} instead of {madry.backprops:.1f} backward passes per image to make its training data."
    )


def _line(method: Method) -> str:
    return (
        f"{method.name:9}trained in {method.seconds:.0f} s: natural {percent(method.accuracies['Natural'])} %, "
        f"PGD-20 {percent(method.accuracies['PGD-20'])} %"
    )


def _table(methods: list[Method], images: int) -> Table:
    title = f"Test accuracy, %, {images} images. Protocol {PROTOCOL}: steps of eps/10"
    table = Table("", *ATTACKS, "mean BPs", "seconds", title=title, title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    for method in methods:
        accuracies = [percent(method.accuracies[column]) for column in ATTACKS]
        table.add_row(method.name, *accuracies, f"{method.backprops:.1f}", f"{method.seconds:.0f}")
    return table


def _write(
    page: Path, lead: str, methods: list[Method], model: torch.nn.Module, data: Dataset, options: Options
) -> None:
    attack = FRIENDLY.search(Progress(1, options.epochs))
    assert isinstance(attack, KTauPGD)
    # Smaller steps than in training, and tau 0, so that the crossing is visible and the stop comes right after it.
    eps, step_size, steps = attack.eps, attack.eps / 10, attack.steps
    x, y = data.test.x.float() / 255, data.test.y
    picked = choose(model, x, y, eps=eps, step_size=step_size, steps=steps)
    strips = attack_path(
        model, x[picked], y[picked], eps=eps, step_size=step_size, steps=steps, tau=0, classes=data.classes
    )
    where = run_folder.environment(torch.device("cpu"))
    write_page(
        page,
        title="Friendly adversarial training on digits",
        lead=lead,
        methods=methods,
        strips=strips,
        facts={
            "Data": f"{data.note}; {len(data.train)} training and {len(data.test)} test images",
            "Attack in training": f"eps {eps:g}, {steps} steps of {attack.step_size:g}; FAT with tau {FRIENDLY.tau}",
            "Attack in the strips": f"eps {eps:g}, {steps} steps of {step_size:g}, tau 0, on the FAT model",
            "Attacks in the table": f"protocol {PROTOCOL}: eps as in training; PGD-20 and C&W (30 steps) with steps of "
            "eps/10, random start",
            "Seed": str(options.seed),
            "Hardware": f"{where['device']}, {where['threads']} thread{'s' if where['threads'] > 1 else ''}",
            "Versions": f"sparring {where['sparring']}, torch {where['torch']}, Python {where['python']}",
            "Command": where["command"],
        },
        note=f"PGD-20 and C&W follow the protocol {PROTOCOL}, with steps of eps/10. To measure FAT again: "
        f"`{_again(options.out)}`. Other protocols give other numbers: dat has steps of eps/4.",
    )
