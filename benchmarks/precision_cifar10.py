"""Test accuracy of FAT trained in bf16 on the fast engine against fp32: 20 epochs of ResNet-18, several seeds, one GPU.

    SPARRING_DATA=DATA python3 benchmarks/precision_cifar10.py RUNS OUT.json --way plain --seeds 0
    SPARRING_DATA=DATA python3 benchmarks/precision_cifar10.py RUNS OUT.json --way fast --seeds 0 1 2
    SPARRING_DATA=DATA python3 benchmarks/precision_cifar10.py RUNS OUT.json --given plain-0=FILE

A run that is not finished after --minutes is saved, and continues when called again. The last line measures given
weights. Test set, n = 10,000, protocol dat, gradients in bf16 and verdicts in fp32 (fp32 gradients give the same
accuracies to 0.06 points: results/evaluation/speed-h200.json).
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from methods_cifar10 import EpochPrinter

from sparring.data import Dataset, load
from sparring.evaluation import evaluate
from sparring.recipes import cifar10
from sparring.schedules import parse
from sparring.training import run_folder
from sparring.training.config import to_json, with_objective
from sparring.training.loop import Interrupted, train
from sparring.training.signals import stopping
from sparring.weights import load_model

CONFIG = replace(
    with_objective(cifar10.FAT, tau="0,1@40%,2@75%"),
    epochs=20,
    lr=parse("one-cycle:0.2"),
    weight_decay=5e-4,
)
WAYS = {"plain": ("fp32", "plain"), "fast": ("bf16", "fast"), "fast-fp32": ("fp32", "fast")}


def measure(name: str, model: torch.nn.Module, data: Dataset, given: argparse.Namespace, facts: dict[str, Any]) -> None:
    """Measure a run's test accuracies and add them to the file."""
    result = evaluate(model, data.test.x, data.test.y, "dat", precision="bf16", doubts=False)
    found = json.loads(given.out.read_text()) if given.out.exists() else {"n": len(data.test), "runs": {}}
    accuracies = {record.name: record.accuracy for record in result}
    found["runs"][name] = {**facts, **run_folder.environment(torch.device(given.device)), "dat": accuracies}
    found["runs"][name]["natural_in_other_ways"] = in_other_ways(model, data)
    given.out.write_text(json.dumps(found, indent=1))
    print(name, {attack: f"{100 * accuracy:.2f}" for attack, accuracy in accuracies.items()}, flush=True)
    print(name, found["runs"][name]["natural_in_other_ways"], flush=True)


@torch.no_grad()
def in_other_ways(model: torch.nn.Module, data: Dataset) -> dict[str, float]:
    """Natural accuracy of the same model with its weights rounded to bf16, and wholly in bf16.

    Separates what training in bf16 costs from what measuring in fp32 costs.
    """
    rounded = copy.deepcopy(model)
    for layer in rounded.modules():
        if isinstance(layer, (torch.nn.Conv2d, torch.nn.Linear)):
            layer.weight.copy_(layer.weight.bfloat16().float())
    x, y = data.test.x, data.test.y

    def accuracy(one: torch.nn.Module, half: bool) -> float:
        device = next(one.parameters()).device
        right = 0
        for images, labels in zip(x.split(1000), y.split(1000), strict=True):
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=half):
                right += int((one(images.to(device) / 255).argmax(1) == labels.to(device)).sum())
        return right / len(x)

    model.eval()
    rounded.eval()
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        return {"as_it_is": accuracy(model, False), "rounded": accuracy(rounded, False), "bf16": accuracy(model, True)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("runs", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--way", choices=WAYS)
    parser.add_argument("--given", nargs="*", default=[], help="NAME=FILE of weights to measure")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--device", default="cuda")
    given = parser.parse_args()
    late = time.monotonic() + 60 * given.minutes
    data = load("cifar10")
    for word in given.given:
        name, _, path = word.partition("=")
        measure(name, load_model(path, device=given.device), data, given, {"engine": name.partition("-")[0]})
    for seed in given.seeds if given.way else ():
        precision, engine = WAYS[given.way]
        config = replace(CONFIG, precision=precision, seed=seed)
        folder = given.runs / f"{given.way}-{seed}"
        same = {"device": given.device, "data": data, "tensorboard": False, "resume": True, "engine": engine}
        try:
            with stopping() as stop:
                over = lambda: stop() or time.monotonic() > late  # noqa: E731
                model = train(config, folder, tracker=EpochPrinter(folder.name), stop=over, **same)
        except Interrupted as stopped:
            sys.exit(f"{folder.name}: {stopped}")
        metrics = run_folder.read_metrics(folder)
        facts = {
            "config": to_json(config),
            "engine": engine,
            "seconds": sum(record["seconds"] for record in metrics),
            "backprops": [round(record["backprops"], 3) for record in metrics],
        }
        measure(folder.name, model, data, given, facts)


if __name__ == "__main__":
    main()
