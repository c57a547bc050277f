"""On digits: friendly data by definition against PGD-K-tau at equal BPs; tau by rule against the paper's schedule.

    python benchmarks/friendly_search.py results/friendly/digits-search.json --question search
    python benchmarks/friendly_search.py results/friendly/digits-tau.json --question tau
    python benchmarks/friendly_search.py results/friendly/digits-noprojection.json --question noprojection

`search`: PGD-K-tau at tau 0 to 3 is a curve of accuracy over back-propagations; is a search by rho above it? `tau`: the
paper's schedule and two rules. `noprojection`: Appendix B. A contender differs from the recipe `fat-digits` only in
what is declared below. Each trial is written when it ends; one that is in the file is skipped. Protocol mart at eps
0.3. On CIFAR-10: methods_cifar10.py.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from sparring.data import Dataset, load
from sparring.evaluation import evaluate
from sparring.recipes import digits
from sparring.training import run_folder
from sparring.training.config import Config, with_objective
from sparring.training.loop import train

CPU = torch.device("cpu")
FAT = digits.FAT


def fat(tau: str) -> Config:
    return with_objective(FAT, tau=tau)


def by(case: str, rho: float, **more: Any) -> Config:
    return with_objective(FAT, f"fat-by-{case}", rho=rho, **more)


def without_bisection(rho: float) -> Config:
    """By probability without the bisection, which is the search of ATES: isolates what the bisection does."""
    return with_objective(FAT, "ates", margin=rho)


def without_projection(tau: int, step_size: float) -> Config:
    return with_objective(FAT, tau=tau, step_size=step_size, project=False, start=None)


QUESTIONS: dict[str, dict[str, Config]] = {
    "search": {f"fat tau {tau}": fat(tau) for tau in "0123"}
    | {f"by loss, rho {rho:g}": by("loss", rho) for rho in (0.1, 0.5, 1.0, 2.0)}
    | {f"by probability, rho {rho:g}": by("probability", rho) for rho in (0.1, 0.3, 0.6)}
    | {"by loss, rho 0.5, downhill": by("loss", 0.5, downhill=True)}
    | {f"stop at {rho:g}, not halved": without_bisection(rho) for rho in (0.1, 0.3)},
    "tau": {"fat, the paper's schedule": fat("0,1@41.7%,2@75%")}
    | {f"paced, share {share:g}": with_objective(FAT, "fat-paced", share=share) for share in (0.25, 0.34)}
    | {f"patient, {patience}": with_objective(FAT, "fat-patient", patience=patience) for patience in (1, 2)},
    "noprojection": {
        f"tau {tau}, alpha {alpha:g}": without_projection(tau, alpha)
        for tau in (0, 1, 3)
        for alpha in (0.03, 0.05, 0.075)
    },
}


def trial(config: Config, data: Dataset) -> dict[str, Any]:
    """One training, measured on the test images at the radius it validates at."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        model = train(config, Path(folder) / "run", data=data, device=CPU, tensorboard=False)
        seconds = time.perf_counter() - began
        epochs = run_folder.read_metrics(Path(folder) / "run")
    result = evaluate(model, data.test.x, data.test.y, "mart", eps=config.validation_radius, doubts=False)
    return {
        "seconds": seconds,
        "backprops": statistics.fmean(record["backprops"] for record in epochs),
        "tau": [record["tau"] for record in epochs],
        **{record.name: record.accuracy for record in result},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--question", choices=[*QUESTIONS], required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=FAT.epochs)
    given = parser.parse_args()
    data = load("digits")
    found: dict[str, Any] = json.loads(given.out.read_text()) if given.out.exists() else {"contenders": {}}
    command = " ".join(["python benchmarks/friendly_search.py", *sys.argv[1:]])
    found |= {"n": len(data.test), **run_folder.environment(CPU), "command": command, "epochs": given.epochs}
    for seed in range(given.seeds):  # every contender once before any twice
        for name, config in QUESTIONS[given.question].items():
            trials = found["contenders"].setdefault(name, {})
            if str(seed) in trials:
                continue
            trials[str(seed)] = measured = trial(replace(config, epochs=given.epochs, seed=seed), data)
            numbers = {key: round(100 * measured[key], 2) for key in ("natural", "pgd20", "cw30", "worst")}
            print(f"{name}, seed {seed}: {measured['backprops']:.2f} BPs, {numbers}", flush=True)
            given.out.parent.mkdir(parents=True, exist_ok=True)
            given.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
