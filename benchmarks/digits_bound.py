"""Theorem 1 on digits for standard, Madry's and friendly training, three seeds each.

    python benchmarks/digits_bound.py results/bound-digits.json

Trains each recipe with seeds 0, 1 and 2 on the CPU and checks the theorem on the 450 test images at eps 0.3, rho 0.1
bits, with AutoAttack.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from sparring import recipes
from sparring.data import load
from sparring.paper import bound
from sparring.training import run_folder
from sparring.training.loop import train

NAMES = ("standard-digits", "madry-digits", "fat-digits")
SEEDS = range(3)


def main(out: Path) -> None:
    data = load("digits")
    found: dict[str, object] = {**run_folder.environment(torch.device("cpu"))}
    found["command"] = f"python benchmarks/digits_bound.py {out}"
    for name in NAMES:
        config = recipes.find(name).config
        trials = []
        for seed in SEEDS:
            with tempfile.TemporaryDirectory() as folder:
                model = train(replace(config, seed=seed), Path(folder) / "run", data=data, tensorboard=False)
            result = bound.estimate(model, data.test.x, data.test.y, eps=config.validation_radius, seed=seed)
            trials.append(result.as_dict())
            numbers = {key: round(trials[-1][key]["value"], 3) for key in ("risk", "friendly", "conventional")}
            print(name, seed, numbers, f"rho up to {result.largest_rho}", result.findings(), flush=True)
        found[name] = trials
        out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
