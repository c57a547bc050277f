"""Every method under one short schedule on CIFAR-10, and two ablations of FAT's stopping rule, on one GPU.

    SPARRING_DATA=DATA python3 benchmarks/methods_cifar10.py work RUNS [--again] [--names ...]
    python3 benchmarks/methods_cifar10.py collect RUNS OUT.json
    python3 benchmarks/methods_cifar10.py tables results/methods/h200.json

ResNet-18, 15 epochs, one cycle, batch 256, no average of the weights but in `fat-ema`. METHODS: the table of
methods, one seed. TAU: tau by rule against the paper's schedule, three seeds. SEARCH: friendly data by definition
against PGD-K-tau at equal back-propagations. A run that two of them need is trained once.

`work` trains and measures every run that is neither in RESULTS (unless --again) nor claimed by another process, so
several processes can share the list. It stops after --minutes or at a SIGTERM, and continues when called again.
Test set: natural, PGD-20 and C&W of the dat protocol on 10,000 images, AutoAttack on 1,000 for METHODS; gradients in
bf16, verdicts in fp32, weights of the last epoch. `collect` adds finished runs to a file, `tables` prints it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from sparring.data import Dataset, load
from sparring.errors import UserError
from sparring.evaluation import evaluate
from sparring.evaluation.protocols import dat
from sparring.paper.specs.scales import one_cycle
from sparring.recipes import cifar10 as r
from sparring.training import run_folder
from sparring.training.config import Config, to_json, with_objective
from sparring.training.loop import Interrupted, train
from sparring.training.signals import stopping

RESULTS = Path("results/methods/h200.json")
AA_IMAGES = 1000
QUICK_DAT = replace(dat, attacks=tuple(attack for attack in dat.attacks if attack.name in ("pgd20", "cw30")))


RECIPES = {
    "fat": r.FAT,
    "madry": r.MADRY,
    "trades": r.TRADES,
    "fat-trades": r.FAT_FOR_TRADES,
    "mart": r.MART,
    "fat-mart": r.FAT_FOR_MART,
    "dat": r.DAT,
    "cat": with_objective(r.CAT, patience=1),  # 15 epochs are too few for a patience of 10
    "ates": r.ATES,
    "fat-by-loss": r.FAT_BY_LOSS,
    "fat-by-probability": r.FAT_BY_PROBABILITY,
    "fat-paced": r.FAT_PACED,
    "fat-patient": with_objective(r.FAT_PATIENT, patience=2),
    "fat-ema": replace(r.FAT_EMA, ema=0.99),  # over half an epoch, as the recipe's 0.995 is at batch 128
    "fat-awp": r.FAT_AWP,
    "no-projection": with_objective(r.FAT, project=False, start=None, noise=0.0),
    "standard": r.STANDARD,
}
METHODS = [*RECIPES]
TAU = {rule: [rule, f"{rule}, seed 1", f"{rule}, seed 2"] for rule in ("fat", "fat-paced", "fat-patient")}
_SEEDS = {f"{rule}, seed {seed}": replace(RECIPES[rule], seed=seed) for rule in TAU for seed in (1, 2)}
# A search by rho has no noise in its steps, so PGD-K-tau has none here either.
_CURVE = {f"tau {tau}": with_objective(r.FAT, noise=0.0, tau=tau) for tau in range(6)}
_LOSSES = {f"fat-by-loss, rho {rho:g}": with_objective(r.FAT_BY_LOSS, rho=rho) for rho in (0.1, 1.0)}
SEARCH = [*_CURVE, "fat-by-loss, rho 0.1", "fat-by-loss", "fat-by-loss, rho 1", "fat-by-probability"]


def short(config: Config) -> Config:
    """The schedule that all runs share."""
    return replace(one_cycle(config, 15), precision="bf16")


ALL = {name: short(config) for name, config in (RECIPES | _SEEDS | _CURVE | _LOSSES).items()}


class EpochPrinter:
    """A tracker that prints one line every five epochs."""

    def __init__(self, name: str) -> None:
        self.name = name

    def begin(self, config, *, steps, epoch, engine):
        """Start the clock."""
        self.began = time.perf_counter()

    def step(self, epoch, step, backprops):
        """Print nothing."""

    def epoch(self, record, *, best):
        """Print every fifth epoch."""
        if record["epoch"] % 5 == 0:
            print(
                f"{self.name}: epoch {record['epoch']} natural {record['natural']:.3f} pgd10 {record['pgd10']:.3f} "
                f"{record['backprops']:.2f} BPs {record['seconds']:.2f} s",
                flush=True,
            )

    def end(self):
        """Print the time of the whole run."""
        print(f"{self.name}: {time.perf_counter() - self.began:.1f} s", flush=True)


def work(given: argparse.Namespace, stop: Callable[[], bool]) -> bool:
    """Train and measure the runs; False if one failed or was interrupted."""
    data, known, well = load("cifar10"), {} if given.again else read(RESULTS), True
    for name in given.names or ALL:
        if name in known:
            continue
        try:
            with run_folder.claimed(given.runs / f"{name}.claim"):
                if not result_of(given.runs, name).exists():
                    one(name, given, data, stop)
        except UserError:
            continue  # claimed by another process
        except Interrupted as stopped:
            print(f"{name}: {stopped}", flush=True)
            return False
        except Exception:  # the other runs go on
            traceback.print_exc()
            well = False
    return well


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())["runs"] if path.exists() else {}


def result_of(folder: Path, name: str) -> Path:
    return folder / f"{name}.json"


def one(name: str, given: argparse.Namespace, data: Dataset, stop: Callable[[], bool]) -> None:
    """Train and measure one run, and write its row."""
    config, folder = ALL[name], given.runs / name
    same = {"device": given.device, "data": data, "resume": True, "tensorboard": False}
    model = train(config, folder, tracker=EpochPrinter(name), stop=stop, **same)
    began = time.perf_counter()
    shared: dict[str, Any] = {"precision": "bf16", "doubts": False, "store": folder / "verdicts"}
    found = evaluate(model, data.test.x, data.test.y, QUICK_DAT, **shared)
    metrics = run_folder.read_metrics(folder)
    row = {
        "config": to_json(config),
        "n": len(data.test),
        "dat": {record.name: record.accuracy for record in found if record.name != "worst"},
        "backprops": sum(record["backprops"] for record in metrics) / len(metrics),
        "tau": [record["tau"] for record in metrics],
        "validation": {key: metrics[-1][key] for key in ("natural", "pgd10")},
        "seconds with other runs on the GPU": sum(record["seconds"] for record in metrics),
    }
    if name in METHODS:
        attacked = evaluate(model, data.test.x, data.test.y, "autoattack", limit=AA_IMAGES, **shared)["autoattack"]
        row["autoattack"] = {"accuracy": attacked.accuracy, "n": AA_IMAGES, "eps": attacked.eps}
    row |= run_folder.environment(torch.device(given.device))
    partial = result_of(given.runs, name).with_suffix(".part")
    partial.write_text(json.dumps(row))
    partial.rename(result_of(given.runs, name))
    print(f"{name}: {numbers_of(row)}; measured in {time.perf_counter() - began:.1f} s", flush=True)


def collect(given: argparse.Namespace) -> None:
    done = {name: result_of(given.runs, name) for name in ALL}
    rows = read(RESULTS) | {name: json.loads(path.read_text()) for name, path in done.items() if path.exists()}
    given.out.write_text(json.dumps({"runs": rows}, indent=1) + "\n")
    print(f"{len([name for name in ALL if name in rows])} of {len(ALL)} runs are done", flush=True)


def numbers_of(row: dict[str, Any], autoattack: bool = True) -> str:
    numbers = [row["dat"][attack] for attack in ("natural", "pgd20", "cw30")]
    numbers += [row["autoattack"]["accuracy"]] if autoattack and "autoattack" in row else []
    return " | ".join([*(f"{100 * number:.1f}" for number in numbers), f"{row['backprops']:.1f}"])


def tables(rows: dict[str, Any]) -> None:
    groups = {"natural | PGD-20 | C&W | AutoAttack": METHODS, "natural | PGD-20 | C&W": SEARCH}
    for head, names in groups.items():
        print(f"\n| | {head} | mean BPs |\n" + "|---" * (head.count("|") + 3) + "|")
        for name in names:
            if name in rows:
                print(f"| `{name}` | {numbers_of(rows[name], names is METHODS)} |")
    print("\n| tau, three seeds | natural | PGD-20 | C&W | mean BPs |\n|---|---|---|---|---|")
    for rule, names in TAU.items():
        found = [rows[name] for name in names if name in rows]
        columns = [[100 * row["dat"][attack] for row in found] for attack in ("natural", "pgd20", "cw30")]
        columns.append([row["backprops"] for row in found])
        print(f"| `{rule}` | " + " | ".join(" / ".join(f"{x:.2f}" for x in column) for column in columns) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["work", "collect", "tables"])
    parser.add_argument("runs", type=Path)
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--names", nargs="*", choices=[*ALL], default=[])
    parser.add_argument("--again", action="store_true", help="run again what is in RESULTS")
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--device", default="cuda")
    given = parser.parse_args()
    if given.what == "work":
        late = time.monotonic() + 60 * given.minutes
        with stopping() as stopped:
            sys.exit(0 if work(given, lambda: stopped() or time.monotonic() > late) else 1)
    elif given.what == "collect":
        collect(given)
    else:
        tables(read(given.runs))


if __name__ == "__main__":
    main()
