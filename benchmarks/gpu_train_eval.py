"""On one H200: train FAT on CIFAR-10 (ResNet-18), timed, then measure it. Writes JSON.

    PYTHONPATH=src:carry/site SPARRING_DATA=DATA python3 benchmarks/gpu_train_eval.py OUT_FOLDER [--epochs 20]

Prints the epochs as they end, then the dat protocol on the test set (gradients in bf16, verdicts in fp32).
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path

import torch

from sparring import runs
from sparring.data import load
from sparring.evaluation import evaluate
from sparring.recipes import cifar10
from sparring.schedules import parse
from sparring.train import train

DEVICE = torch.device("cuda")


class Lines:
    """Prints the epochs."""

    def begin(self, config, *, steps, epoch, engine):
        """Watch."""
        print(engine, flush=True)
        self.began = time.perf_counter()

    def step(self, epoch, step, backprops):
        """Watch."""
        if epoch == 1 and step == 1:
            torch.cuda.synchronize()
            print(f"first step after {time.perf_counter() - self.began:.1f} s", flush=True)

    def epoch(self, record, *, best):
        """Watch."""
        at = time.perf_counter() - self.began
        print(
            f"epoch {record['epoch']:3} loss {record['loss']:.3f} natural {record['natural']:.3f} "
            f"pgd10 {record['pgd10']:.3f} {record['backprops']:.2f} BPs tau {record['tau']} "
            f"{record['seconds']:.2f} s, {at:.1f} s since the start",
            flush=True,
        )

    def end(self):
        """Watch."""
        torch.cuda.synchronize()
        self.took = time.perf_counter() - self.began


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--objective", default="fat")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--tau", default="0,1@40%,2@75%")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--run", type=Path, default=Path("run"))
    given = parser.parse_args()
    config = replace(
        cifar10.FAT,
        objective=given.objective,
        epochs=given.epochs,
        lr=parse("one-cycle:0.2"),
        weight_decay=5e-4,
        attack=replace(cifar10.FAT.attack, tau=parse(given.tau)),
        precision="bf16",
        seed=given.seed,
    )
    data = load("cifar10")
    watch = Lines()
    model = train(config, given.run, device=DEVICE, data=data, watch=watch, tensorboard=False, resume=True)
    print(f"trained in {watch.took:.1f} s, peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB", flush=True)
    found = {"config": str(config), "train_seconds": watch.took, "epochs": runs.read_metrics(given.run)}
    found |= runs.environment(DEVICE)
    x, y = data.test.x, data.test.y
    result = evaluate(model, x, y, "dat", precision="bf16", doubts=False)
    found["dat"] = {record.name: record.accuracy for record in result}
    print({name: f"{100 * accuracy:.2f}" for name, accuracy in found["dat"].items()}, flush=True)
    (given.out / f"train-{given.objective}-{given.seed}.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
