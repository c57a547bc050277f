"""Every digits recipe over three seeds: the accuracies that `sparring recipes` lists as expected.

    python benchmarks/digits_recipes.py results/digits-recipes.json

Trains each recipe with seeds 0, 1 and 2 on the CPU and measures it on the 450 test images at the radius it was trained
for (protocol mart: PGD-20 and C&W-30 in steps of eps/10).
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

from sparring import recipes
from sparring.data import load
from sparring.evaluation import evaluate
from sparring.training import run_folder
from sparring.training.loop import train

SEEDS = range(3)


def main(out: Path, names: list[str]) -> None:
    data = load("digits")
    found: dict[str, object] = {"n": len(data.test), **run_folder.environment(torch.device("cpu"))}
    found["command"] = " ".join(["python benchmarks/digits_recipes.py", str(out), *names])
    for recipe in recipes.RECIPES.values():
        if recipe.config.data != "digits" or (names and recipe.name not in names):
            continue
        trials = []
        for seed in SEEDS:
            config = replace(recipe.config, seed=seed)
            with tempfile.TemporaryDirectory() as folder:
                began = time.perf_counter()
                model = train(config, Path(folder) / "run", data=data, tensorboard=False)
                seconds = time.perf_counter() - began
                metrics = run_folder.read_metrics(Path(folder) / "run")
            result = evaluate(model, data.test.x, data.test.y, "mart", eps=config.validation_radius, doubts=False)
            accuracies = {record.name: record.accuracy for record in result}
            backprops = sum(record["backprops"] for record in metrics) / len(metrics)
            trials.append({"seed": seed, "seconds": seconds, "backprops": backprops, **accuracies})
        found[recipe.name] = {"eps": recipe.config.validation_radius, "trials": trials}
        spread = {
            key: f"{100 * min(t[key] for t in trials):.1f}-{100 * max(t[key] for t in trials):.1f}"
            for key in ("natural", "pgd20", "cw30", "worst")
        }
        print(recipe.name, spread, [round(t["seconds"]) for t in trials], flush=True)
        out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), sys.argv[2:])
