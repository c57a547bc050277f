"""What the attack in eight bits costs in accuracy: the same trainings in fp8 and in bf16, seed by seed, on one GPU.

    SPARRING_DATA=DATA python3 benchmarks/fp8_cifar10.py work RUNS OUT.json [--at-once 4] [--minutes 20]
    SPARRING_DATA=DATA python3 benchmarks/fp8_cifar10.py work RUNS OUT.json --model wrn-34-10 --epochs 10 --seeds 0
    python3 benchmarks/fp8_cifar10.py table OUT.json

CIFAR-10, batch 128, one cycle, FAT (tau 0, 1, 2) and Madry. Test set: natural, PGD-20 and C&W of the dat protocol on
10,000 images, AutoAttack on 1,000; gradients in bf16, verdicts in fp32, weights of the last epoch.

`work` trains and measures what the file lacks, several runs side by side; called again it goes on. `table` prints fp8
minus bf16: the mean over seeds and its standard error.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from methods_cifar10 import QUICK_DAT, EpochPrinter
from precision_cifar10 import CONFIG

from sparring.data import load
from sparring.evaluation import evaluate
from sparring.recipes import cifar10
from sparring.training import run_folder
from sparring.training.config import Config, to_json
from sparring.training.gpu_sharing import run_queue
from sparring.training.loop import Interrupted, train
from sparring.training.signals import stopping

METHODS = {"madry": replace(CONFIG, objective=cifar10.MADRY.objective), "fat": CONFIG}
PRECISIONS = ("bf16", "fp8")
COLUMNS = {"natural": "natural", "pgd20": "PGD-20", "cw30": "C&W", "autoattack": "AutoAttack"}


def config_of(name: str, given: argparse.Namespace) -> Config:
    """The configuration of a run named METHOD-PRECISION-SEED."""
    method, precision, seed = name.split("-")
    changes = {
        "model": given.model,
        "epochs": given.epochs,
        "precision": precision,
        "seed": int(seed),
        "validation": 100,
    }
    return replace(METHODS[method], **changes)


def one(name: str, given: argparse.Namespace) -> None:
    """Train and measure one run, and write its row."""
    config, data, folder = config_of(name, given), load("cifar10"), given.runs / f"{given.model}-{name}"
    if given.images:
        data = replace(data, train=data.train.head(given.images), test=data.test.head(given.images))
    tracker = EpochPrinter(name)
    with stopping() as stop:
        same = {"device": given.device, "data": data, "tensorboard": False, "resume": True}
        try:
            model = train(config, folder, tracker=tracker, stop=stop, **same)
        except Interrupted as stopped:
            sys.exit(f"{name}: {stopped}")
    began = time.perf_counter()
    shared: dict[str, Any] = {"precision": "bf16", "doubts": False}
    found = evaluate(model, data.test.x, data.test.y, QUICK_DAT, **shared)
    accuracies = {record.name: record.accuracy for record in found if record.name != "worst"}
    images = min(given.autoattack, len(data.test))
    attacked = evaluate(model, data.test.x, data.test.y, "autoattack", limit=images, **shared)["autoattack"]
    metrics = run_folder.read_metrics(folder)
    row = {
        "config": to_json(config),
        "n": len(data.test),
        "n_autoattack": images,
        "accuracy": accuracies | {"autoattack": attacked.accuracy},
        "seconds of AutoAttack, alone on the GPU": attacked.seconds if given.at_once == 1 else None,
        "backprops": statistics.mean(record["backprops"] for record in metrics),
        "seconds with other runs on the GPU": sum(record["seconds"] for record in metrics),
        **run_folder.environment(torch.device(given.device)),
    }
    partial = row_of(name, given).with_suffix(".part")
    partial.write_text(json.dumps(row))
    partial.rename(row_of(name, given))
    print(f"{name}: {row['accuracy']}; measured in {time.perf_counter() - began:.1f} s", flush=True)


def row_of(name: str, given: argparse.Namespace) -> Path:
    return given.runs / f"{given.model}-{name}.json"


def work(given: argparse.Namespace) -> bool:
    """Carry out what is missing, and add it to the file; whether all is there."""
    given.runs.mkdir(parents=True, exist_ok=True)
    known = json.loads(given.out.read_text())["runs"] if given.out.exists() else {}
    names = [
        f"{method}-{precision}-{seed}" for seed in given.seeds for method in given.methods for precision in PRECISIONS
    ]
    missing = [name for name in names if name not in known and not row_of(name, given).exists()]
    own = [sys.executable, __file__, "one", str(given.runs), str(given.out), "--device", given.device]
    own += ["--model", given.model, "--epochs", str(given.epochs), "--autoattack", str(given.autoattack)]
    own += ["--images", str(given.images), "--at-once", str(given.at_once)]
    late = time.monotonic() + 60 * given.minutes
    with stopping() as stop:
        ended = run_queue(
            [[*own, "--name", name] for name in missing],
            at_once=given.at_once,
            device=torch.device(given.device),
            stop=lambda: stop() or time.monotonic() > late,
            tell=lambda number, line: print(line, flush=True),
        )
    for name, end in zip(missing, ended, strict=True):
        if end.code:
            print(f"{name} failed: {end.complaint}", flush=True)
    rows = {name: json.loads(row_of(name, given).read_text()) for name in names if row_of(name, given).exists()}
    command = f"python3 benchmarks/fp8_cifar10.py work RUNS OUT.json --model {given.model} --epochs {given.epochs}"
    given.out.write_text(json.dumps({"command": command, "model": given.model, "runs": known | rows}, indent=1) + "\n")
    left = [name for name in names if name not in known | rows]
    print(f"missing: {' '.join(left) or 'nothing'}", flush=True)
    return not left


def table(path: Path) -> None:
    """Print, for each method, both means and the difference seed by seed."""
    runs = json.loads(path.read_text())["runs"]
    print(f"| {path.stem} | " + " | ".join(COLUMNS.values()) + " | BPs |\n|---" + "|---:" * (len(COLUMNS) + 1) + "|")
    for method in METHODS:
        pairs = [
            [numbers(runs[f"{method}-{precision}-{seed}"]) for precision in PRECISIONS]
            for seed in range(100)
            if all(f"{method}-{precision}-{seed}" in runs for precision in PRECISIONS)
        ]
        if not pairs:
            continue
        for place, precision in enumerate(PRECISIONS):
            means = [statistics.mean(column) for column in zip(*(pair[place] for pair in pairs), strict=True)]
            print(
                f"| {method}, {precision}, {len(pairs)} seeds | " + " | ".join(f"{mean:.2f}" for mean in means) + " |"
            )
        apart = [[eight - half for half, eight in zip(*pair, strict=True)] for pair in pairs]
        cells = [f"{statistics.mean(column):+.2f} ± {error(column):.2f}" for column in zip(*apart, strict=True)]
        print(f"| {method}, fp8 minus bf16 | " + " | ".join(cells) + " |")


def numbers(row: dict[str, Any]) -> list[float]:
    """Accuracies in per cent, and back-propagations."""
    return [*(100 * row["accuracy"][name] for name in COLUMNS), row["backprops"]]


def error(values: tuple[float, ...]) -> float:
    """The standard error of a mean."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["work", "one", "table"])
    parser.add_argument("runs", type=Path)
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--methods", nargs="+", choices=[*METHODS], default=[*METHODS])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--autoattack", type=int, default=1000, help="test images")
    parser.add_argument("--images", type=int, default=0, help="train and measure on the first ones only, to try this")
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--minutes", type=float, default=9.0, help="after which runs are stopped")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--name", help="of the one run")
    given = parser.parse_args()
    if given.what == "table":
        if not given.runs.is_file():
            parser.error(f"there is no file {given.runs}")
        table(given.runs)
    elif given.out is None or (given.what == "one" and given.name is None):
        parser.error("work needs RUNS and OUT.json; one, which it starts, also --name")
    elif given.what == "one":
        one(given.name, given)
    else:
        sys.exit(0 if work(given) else 1)


if __name__ == "__main__":
    main()
