"""Friendly data by definition against PGD-K-tau at equal BPs; tau by rule against the paper's schedule. Writes JSON.

    python benchmarks/gpu_friendly_search.py results/friendly/digits-search.json --data digits --question search
    python benchmarks/gpu_friendly_search.py results/friendly/digits-tau.json --data digits --question tau
    python benchmarks/gpu_friendly_search.py OUT.json --data cifar10 --question search --seeds 1

`search`: PGD-K-tau at tau 0 to 3 is a curve of accuracy over back-propagations; is a search by rho above it? `tau`: the
paper's schedule and both rules. `noprojection`: Appendix B. A contender differs from the base in what is declared below
and in nothing else. A trial is written as soon as it is done, and one that is in the file is not run again. Digits: the
recipe `fat-digits` on the CPU (protocol mart at eps 0.3). CIFAR-10: ResNet-18, the schedule of gpu_methods.py (protocol
dat).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from sparring import runs
from sparring.config import Config
from sparring.data import load
from sparring.evaluation import evaluate
from sparring.recipes import cifar10, quickstart
from sparring.schedules import constant, parse
from sparring.train import train

Contenders = dict[str, dict[str, Any]]  # name -> the objective and what of the attack is its own


def fat(tau: str) -> dict[str, Any]:
    return {"objective": "fat", "tau": parse(tau)}


def by(case: str, rho: float, **more: Any) -> dict[str, Any]:
    return {"objective": f"fat-by-{case}", "rho": constant(rho), **more}


def unhalved(rho: float) -> dict[str, Any]:
    """By probability without the bisection, which is the search of ATES: what the halving alone does."""
    return {"objective": "ates", "margin": constant(rho)}


def free(tau: int, step_size: float) -> dict[str, Any]:
    return {"objective": "fat", "tau": constant(tau), "step_size": step_size, "project": False, "start": None}


@dataclass(frozen=True)
class Base:
    """What all contenders on a data set share."""

    config: Config
    protocol: str
    questions: dict[str, Contenders]


TAUS = {f"fat tau {tau}": fat(tau) for tau in "0123"}
SCHEDULE = {"fat, the paper's schedule": fat("0,1@41.7%,2@75%")}
BASES = {
    "digits": Base(
        quickstart.FAT,
        "mart",
        {
            "search": TAUS
            | {f"by loss, rho {rho:g}": by("loss", rho) for rho in (0.1, 0.5, 1.0, 2.0)}
            | {f"by probability, rho {rho:g}": by("probability", rho) for rho in (0.1, 0.3, 0.6)}
            | {"by loss, rho 0.5, downhill": by("loss", 0.5, downhill=True)}
            | {f"stop at {rho:g}, not halved": unhalved(rho) for rho in (0.1, 0.3)},
            "tau": SCHEDULE
            | {f"paced, share {share:g}": {"objective": "fat-paced", "share": share} for share in (0.25, 0.34)}
            | {f"patient, {patience}": {"objective": "fat-patient", "patience": patience} for patience in (1, 2)},
            "noprojection": {
                f"tau {tau}, alpha {alpha:g}": free(tau, alpha) for tau in (0, 1, 3) for alpha in (0.03, 0.05, 0.075)
            },
        },
    ),
    "cifar10": Base(
        replace(
            cifar10.FAT,
            epochs=15,
            batch_size=256,
            lr=parse("one-cycle:0.3"),
            weight_decay=5e-4,
            attack=replace(cifar10.FAT.attack, noise=0.0),  # a search by rho has none
        ),
        "dat",
        {
            "search": TAUS
            | {f"by loss, rho {rho:g}": by("loss", rho) for rho in (0.1, 0.5, 1.0)}
            | {"by probability, rho 0.2": by("probability", 0.2)},
            "tau": {"fat, the paper's schedule": fat("0,1@40%,2@75%")}
            | {"paced": {"objective": "fat-paced", "share": 0.25}}
            | {"patient": {"objective": "fat-patient", "patience": 2}},
            "noprojection": {
                f"tau {tau}, alpha {alpha:g}": free(tau, alpha) for tau in (0, 1, 3) for alpha in (0.003, 0.007, 0.015)
            },
        },
    ),
}


def trial(config: Config, protocol: str, data: Any, device: torch.device) -> dict[str, Any]:
    """One training, measured on the test images at the radius it validates at."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        model = train(config, Path(folder) / "run", data=data, device=device, tensorboard=False)
        seconds = time.perf_counter() - began
        epochs = runs.read_metrics(Path(folder) / "run")
    precision = "bf16" if device.type == "cuda" else "fp32"
    eps = config.validation_eps if protocol == "mart" else None
    result = evaluate(model, data.test.x, data.test.y, protocol, eps=eps, precision=precision, doubts=False)
    return {
        "seconds": seconds,
        "backprops": statistics.fmean(record["backprops"] for record in epochs),
        "tau": [record["tau"] for record in epochs],
        **{record.name: record.accuracy for record in result},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--data", choices=BASES, required=True)
    parser.add_argument("--question", choices=["search", "tau", "noprojection"], required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--only", nargs="*", default=[], help="contenders whose name holds one of these words")
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    base, data = BASES[given.data], load(given.data)
    config = replace(base.config, epochs=given.epochs or base.config.epochs)
    found: dict[str, Any] = json.loads(given.out.read_text()) if given.out.exists() else {"contenders": {}}
    command = " ".join(["python benchmarks/gpu_friendly_search.py", *sys.argv[1:]])
    found |= {"n": len(data.test), **runs.environment(device), "command": command, "epochs": config.epochs}
    for seed in range(given.seeds):  # every contender once before any twice
        for name, own in base.questions[given.question].items():
            if given.only and not any(word in name for word in given.only):
                continue
            trials = found["contenders"].setdefault(name, {})
            if str(seed) in trials:
                continue
            attack = {key: value for key, value in own.items() if key != "objective"}
            one = replace(config, objective=own["objective"], attack=replace(config.attack, **attack), seed=seed)
            trials[str(seed)] = measured = trial(one, base.protocol, data, device)
            numbers = {key: round(100 * measured[key], 2) for key in ("natural", "pgd20", "cw30", "worst")}
            print(f"{name}, seed {seed}: {measured['backprops']:.2f} BPs, {numbers}", flush=True)
            given.out.parent.mkdir(parents=True, exist_ok=True)
            given.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
