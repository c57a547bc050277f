"""Does bf16 on the fast engine end where fp32 on the plain path ends? 20 epochs of FAT on ResNet-18, several seeds.

PYTHONPATH=src:site SPARRING_DATA=DATA python3 benchmarks/gpu_precision.py RUNS OUT.json --way plain --seeds 0
PYTHONPATH=src:site SPARRING_DATA=DATA python3 benchmarks/gpu_precision.py RUNS OUT.json --way fast --seeds 0 1 2

A run that is not through when the minutes are over is saved, and goes on when called again. Test set, n = 10,000,
protocol dat with fp32 gradients (torch's own TF32 setting) for both ways.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path

import torch
from gpu_methods import Say

from sparring import runs
from sparring.config import to_json
from sparring.data import load
from sparring.evaluation import evaluate
from sparring.recipes import cifar10
from sparring.schedules import parse
from sparring.train import Interrupted, train

CONFIG = replace(
    cifar10.FAT,
    epochs=20,
    lr=parse("one-cycle:0.2"),
    weight_decay=5e-4,
    attack=replace(cifar10.FAT.attack, tau=parse("0,1@40%,2@75%")),
)
WAYS = {"plain": ("fp32", "plain"), "fast": ("bf16", "fast"), "fast-fp32": ("fp32", "fast")}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("runs", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--way", choices=WAYS, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--device", default="cuda")
    given = parser.parse_args()
    late = time.monotonic() + 60 * given.minutes
    data = load("cifar10")
    precision, engine = WAYS[given.way]
    for seed in given.seeds:
        config = replace(CONFIG, precision=precision, seed=seed)
        folder = given.runs / f"{given.way}-{seed}"
        same = {"device": given.device, "data": data, "tensorboard": False, "resume": True, "engine": engine}
        try:
            watch = Say(folder.name)
            model = train(config, folder, watch=watch, stop=lambda: time.monotonic() > late, **same)
        except Interrupted as stopped:
            print(f"{folder.name}: {stopped}", flush=True)
            return
        result = evaluate(model, data.test.x, data.test.y, "dat", precision="fp32", doubts=False)
        found = json.loads(given.out.read_text()) if given.out.exists() else {"n": len(data.test), "runs": {}}
        metrics = runs.read_metrics(folder)
        found["runs"][folder.name] = {
            "config": to_json(config),
            "engine": engine,
            **runs.environment(torch.device(given.device)),
            "dat": {record.name: record.accuracy for record in result},
            "seconds": sum(record["seconds"] for record in metrics),
            "backprops": [round(record["backprops"], 3) for record in metrics],
        }
        given.out.write_text(json.dumps(found, indent=1))
        print(folder.name, {record.name: f"{100 * record.accuracy:.2f}" for record in result}, flush=True)


if __name__ == "__main__":
    main()
