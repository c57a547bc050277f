"""The recipe `fast-cifar10-resnet18` on one GPU: choose its settings on held-out images, then train several seeds.

    SPARRING_DATA=DATA python3 benchmarks/fast_recipe.py trials OUT.json
    SPARRING_DATA=DATA python3 benchmarks/fast_recipe.py final OUT.json [--epochs N ...]
    SPARRING_DATA=DATA python3 benchmarks/fast_recipe.py final OUT.json --best TRIALS.json ...

`trials` trains the candidates one after the other and measures them on held-out training images only (n = 4,000), the
last weights and their average. `final` trains the chosen candidate (k5), or the best of given trials, seed after seed,
alone on the GPU, and measures each on the test set once, by the protocol dat.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

from sparring.data import hold_out, load
from sparring.evaluation import evaluate
from sparring.models import build
from sparring.recipes import cifar10
from sparring.schedules import parse
from sparring.seeds import Draw, derive_seed
from sparring.training import run_folder
from sparring.training.config import Config, to_json, with_objective
from sparring.training.loop import train
from sparring.training.validation import validate

DEVICE = torch.device("cuda")
HELD = 4000
RUNS = Path(tempfile.gettempdir())
BASE = replace(
    with_objective(cifar10.FAT, tau="0,1@40%,2@75%"),
    lr=parse("one-cycle:0.3"),
    weight_decay=5e-4,
    batch_size=256,
    epochs=30,
    ema=0.997,
)


def fewer(steps: int, step_size: float, tau: str, epochs: int) -> Config:
    """A candidate with fewer, longer steps, which leaves time for more epochs."""
    return replace(with_objective(BASE, steps=steps, step_size=step_size, tau=tau), epochs=epochs)


# Each takes about 85 s alone, estimated from the times of steps. The candidate with the highest sum of natural and
# PGD-10 accuracy on held-out images is chosen.
CANDIDATES = {
    "256": BASE,
    "k7": fewer(7, 0.01, "0,1@45%", 37),
    "k5": fewer(5, 0.0125, "0,1@65%", 45),
}


def synchronise() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class Clock:
    """A tracker that records when the first step was done and when the run ended."""

    def __init__(self, name: str) -> None:
        self.name = name

    def begin(self, config, *, steps, epoch, engine):
        """Start the clock."""
        self.began = time.perf_counter()
        self.first = None

    def step(self, epoch, step, backprops):
        """Record the time of the first step."""
        if self.first is None:
            synchronise()
            self.first = time.perf_counter()

    def epoch(self, record, *, best):
        """Print epochs 1, 2 and every fourth."""
        if record["epoch"] % 4 == 0 or record["epoch"] < 3:
            print(
                f"{self.name}: epoch {record['epoch']} natural {record['natural']:.3f} pgd10 {record['pgd10']:.3f} "
                f"{record['backprops']:.2f} BPs {record['seconds']:.2f} s at {time.perf_counter() - self.first:.1f} s",
                flush=True,
            )

    def end(self):
        """Record the seconds since the first step."""
        synchronise()
        self.seconds = time.perf_counter() - self.first


def judge(folder: Path, data, config) -> dict:
    """Natural and PGD-10 accuracy on the held-out images: of the average, and of the last weights."""
    last = run_folder.open_run(folder).last(DEVICE)
    _, held = hold_out(data.train, config.validation, seed=derive_seed(config.seed, Draw.HOLD_OUT))
    found = {}
    for part in ("model", "live"):
        if not last.part(part):
            continue
        model = build(config.model, num_classes=10).to(DEVICE)
        model.load_state_dict(last.part(part))
        natural, robust = validate(model.eval(), held.to(DEVICE), eps=8 / 255, seed=0)
        found["average" if part == "model" else "last"] = {"natural": natural, "pgd10": robust}
    return found


def trials(out: Path, names: list[str]) -> None:
    data = load("cifar10")
    configs = {name: replace(CANDIDATES[name], validation=HELD) for name in names or CANDIDATES}
    found = {"n": HELD, **run_folder.environment(DEVICE)}
    for name, config in configs.items():
        clock, folder = Clock(name), RUNS / "trials" / name
        train(config, folder, device=DEVICE, data=data, tensorboard=False, overwrite=True, tracker=clock)
        row = {"config": to_json(config), "seconds": clock.seconds}
        found[name] = row | judge(folder, data, config)
        print(name, {key: found[name][key] for key in ("average", "last")}, flush=True)
        out.write_text(json.dumps(found, indent=1))


def best(files: list[Path]) -> str:
    """The candidate with the highest sum of natural and PGD-10 accuracy of the average."""
    tried = {name: row for file in files for name, row in json.loads(file.read_text()).items() if name in CANDIDATES}
    return max(tried, key=lambda name: tried[name]["average"]["natural"] + tried[name]["average"]["pgd10"])


def final(out: Path, given: argparse.Namespace) -> None:
    data = load("cifar10")
    name = best(given.best) if given.best else given.candidate
    config = CANDIDATES[name]
    if given.epochs:
        config = replace(config, epochs=given.epochs)
    if given.tau:
        config = with_objective(config, tau=given.tau)
    config = replace(config, ema=0.0 if given.no_average else given.ema or config.ema)
    if given.lr:
        config = replace(config, lr=parse(given.lr))
    found = {"candidate": name, "config": to_json(config), **run_folder.environment(DEVICE), "seeds": {}}

    def measure(seed: int, clock: Clock, model) -> None:
        result = evaluate(model, data.test.x, data.test.y, "dat", precision="bf16", doubts=False)
        row = {record.name: record.accuracy for record in result}
        metrics = run_folder.read_metrics(RUNS / "final" / str(seed))
        start = clock.first - clock.began
        found["seeds"][seed] = {
            "seconds": clock.seconds,
            "start_up_s": start,
            "runs_at_once": 1,
            "dat": row,
            "epochs": metrics,
        }
        print(f"seed {seed}: {clock.seconds:.1f} s after {start:.1f} s of start-up;", end=" ")
        print({name: f"{100 * accuracy:.2f}" for name, accuracy in row.items()}, flush=True)
        out.write_text(json.dumps(found, indent=1))

    for seed in given.seeds:
        clock = Clock(f"seed {seed}")
        same = {"device": DEVICE, "data": data, "tensorboard": False, "overwrite": True}
        model = train(replace(config, seed=seed), RUNS / "final" / str(seed), tracker=clock, **same)
        measure(seed, clock, model)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["trials", "final"])
    parser.add_argument("out", type=Path)
    parser.add_argument("--names", nargs="*", default=[])
    parser.add_argument("--candidate", default="k5", choices=CANDIDATES)
    parser.add_argument("--best", type=Path, nargs="*", help="files of trials; instead of --candidate")
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--tau")
    parser.add_argument("--lr")
    parser.add_argument("--ema", type=float)
    parser.add_argument("--no-average", action="store_true")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    given = parser.parse_args()
    if given.what == "trials":
        trials(given.out, given.names)
    else:
        final(given.out, given)


if __name__ == "__main__":
    main()
