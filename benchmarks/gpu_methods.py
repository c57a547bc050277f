"""On one H200: every method under one and the same short schedule, for README's table of methods.

    PYTHONPATH=src:site SPARRING_DATA=DATA python3 benchmarks/gpu_methods.py train RUNS [--names ...] [--minutes 9]
    PYTHONPATH=src:site SPARRING_DATA=DATA python3 benchmarks/gpu_methods.py measure RUNS OUT.json [--minutes 9]
    PYTHONPATH=src python3 benchmarks/gpu_methods.py table RUNS results/methods/h200.json

ResNet-18 on CIFAR-10, 15 epochs, one cycle, batch 256, no average of the weights unless the method is that; one seed.
`train` goes on where it was; `measure` takes the models that are trained and not yet in OUT.json: natural, PGD-20 and
C&W of the dat protocol on 10,000 images, AutoAttack on 1,000, in several processes, for AutoAttack on few images leaves
a GPU idle. Both stop before the minutes are over, and can be called again. `table` prints what README shows.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from sparring import runs
from sparring.config import Config, to_json
from sparring.data import load
from sparring.evaluation import evaluate
from sparring.recipes import cifar10 as r
from sparring.schedules import parse
from sparring.train import Interrupted, train
from sparring.weights import load_model

SEED, AA_IMAGES = 0, 1000
RECIPES = {
    "madry": r.MADRY,
    "fat": r.FAT,
    "trades": r.TRADES,
    "fat-trades": r.FAT_FOR_TRADES,
    "mart": r.MART,
    "fat-mart": r.FAT_FOR_MART,
    "dat": r.DAT,
    "cat": replace(r.CAT, attack=replace(r.CAT.attack, patience=1)),  # 15 epochs are too few for a patience of 10
    "ates": r.ATES,
    "fat-by-loss": r.FAT_BY_LOSS,
    "fat-by-probability": r.FAT_BY_PROBABILITY,
    "fat-paced": r.FAT_PACED,
    "fat-patient": replace(r.FAT_PATIENT, attack=replace(r.FAT_PATIENT.attack, patience=2)),
    "fat-ema": replace(r.FAT_EMA, ema=0.997),
    "fat-awp": r.FAT_AWP,
    "no-projection": replace(r.FAT, attack=replace(r.FAT.attack, project=False, start=None, noise=0.0)),
    "standard": r.STANDARD,
}


def short(config: Config) -> Config:
    """The schedule that all methods share."""
    return replace(
        config, epochs=15, batch_size=256, lr=parse("one-cycle:0.3"), weight_decay=5e-4, precision="bf16", seed=SEED
    )


METHODS = {name: short(config) for name, config in RECIPES.items()}


class Say:
    """One line for an epoch in five."""

    def __init__(self, name: str) -> None:
        self.name = name

    def begin(self, config, *, steps, epoch, engine):
        """Watch."""
        self.began = time.perf_counter()

    def step(self, epoch, step, backprops):
        """Watch."""

    def epoch(self, record, *, best):
        """Watch."""
        if record["epoch"] % 5 == 0:
            print(
                f"{self.name}: epoch {record['epoch']} natural {record['natural']:.3f} pgd10 {record['pgd10']:.3f} "
                f"{record['backprops']:.2f} BPs {record['seconds']:.2f} s",
                flush=True,
            )

    def end(self):
        """Watch."""
        print(f"{self.name}: {time.perf_counter() - self.began:.1f} s", flush=True)


def train_all(given: argparse.Namespace, late: float) -> None:
    data = load("cifar10")
    for name in given.names or METHODS:
        if time.monotonic() > late:
            print("time is up", flush=True)
            return
        try:
            train(
                METHODS[name],
                given.runs / name,
                device=given.device,
                data=data,
                resume=True,
                tensorboard=False,
                watch=Say(name),
                stop=lambda: time.monotonic() > late,
            )
        except Interrupted as stopped:
            print(f"{name}: {stopped}", flush=True)
            return


def measure_one(name: str, given: argparse.Namespace) -> None:
    """In a process of its own: prints one line of JSON."""
    images = load("cifar10").test
    model = load_model(given.runs / name, device=given.device)
    dat = evaluate(model, images.x, images.y, "dat", precision="bf16", doubts=False)
    row = {"config": to_json(METHODS[name]), "dat": {record.name: record.accuracy for record in dat}, "n": len(images)}
    aa = evaluate(model, images.x, images.y, "autoattack", limit=AA_IMAGES, precision="bf16", doubts=False)
    metrics = runs.read_metrics(given.runs / name)
    row["autoattack"] = {"accuracy": aa["autoattack"].accuracy, "n": AA_IMAGES, "eps": aa["autoattack"].eps}
    row["backprops"] = sum(record["backprops"] for record in metrics) / len(metrics)
    row["seconds"] = sum(record["seconds"] for record in metrics[1:]) / (len(metrics) - 1)  # the first has the start-up
    row |= runs.environment(torch.device(given.device))
    print("RESULT " + json.dumps(row), flush=True)


def measure_all(given: argparse.Namespace, late: float) -> None:
    found = json.loads(given.out.read_text()) if given.out.exists() else {}
    ready = []
    for name in given.names or METHODS:
        metrics = runs.read_metrics(given.runs / name) if (given.runs / name).exists() else []
        if name not in found and len(metrics) == METHODS[name].epochs:
            ready.append(name)

    def one(name: str) -> None:
        if time.monotonic() > late:
            return
        words = [sys.executable, __file__, "one", str(given.runs), str(given.out), "--names", name]
        said = subprocess.run([*words, "--device", given.device], capture_output=True, text=True).stdout
        line = next((line for line in said.splitlines() if line.startswith("RESULT ")), None)
        if line is None:
            print(f"{name}: failed", flush=True)
            return
        found[name] = json.loads(line.removeprefix("RESULT "))
        dat, aa = found[name]["dat"], found[name]["autoattack"]["accuracy"]
        print(
            f"{name:20} natural {100 * dat['natural']:.2f} PGD-20 {100 * dat['pgd20']:.2f} C&W {100 * dat['cw30']:.2f} "
            f"AutoAttack {100 * aa:.1f} {found[name]['backprops']:.2f} BPs {found[name]['seconds']:.2f} s",
            flush=True,
        )
        given.out.write_text(json.dumps(found, indent=1))

    with ThreadPoolExecutor(given.at_once) as pool:
        list(pool.map(one, ready))


def show(found: dict[str, Any]) -> None:
    """The table, in the order of METHODS."""
    print("| method | natural | PGD-20 | C&W | AutoAttack | mean BPs | s an epoch |\n|---|---|---|---|---|---|---|")
    for name in METHODS:
        if name in found:
            row = found[name]
            numbers = [row["dat"][attack] for attack in ("natural", "pgd20", "cw30")] + [row["autoattack"]["accuracy"]]
            told = " | ".join(f"{100 * number:.1f}" for number in numbers)
            print(f"| `{name}` | {told} | {row['backprops']:.1f} | {row['seconds']:.1f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["train", "measure", "one", "table"])
    parser.add_argument("runs", type=Path)
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--names", nargs="*", choices=[*METHODS], default=[])
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--device", default="cuda")
    given = parser.parse_args()
    late = time.monotonic() + 60 * given.minutes
    if given.what == "train":
        train_all(given, late)
    elif given.what == "measure":
        measure_all(given, late)
    elif given.what == "table":
        show(json.loads(given.out.read_text()))
    else:
        measure_one(given.names[0], given)


if __name__ == "__main__":
    main()
