"""Time of PGD-K-tau over the time of PGD-K on the same batch, on a CPU.

    python benchmarks/bench_attack.py            # Small CNN and tiny CNN, batch 128, one thread
    python benchmarks/bench_attack.py --full [--out OUT.json]    # three networks, batches 64 to 256, 1 and 2 threads

An example that takes b of K steps is computed b + 1 times, so a batch with a mean of b should cost about (b + 1) / K of
PGD-K. The bound is 1.15 times that. "model" is what `friendly_pgd` does with a module, "engine" with the folded network
in two passes that `sparring train` takes on a CPU. Both attacks run in turn. With one thread the clock is the CPU time
of the process, so that a busy machine disturbs little; with two it is the wall clock of an idle machine. Prints one
line per batch: mean BPs, the measured ratio (median, with the range), the bound, and whether it holds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from sparring.attacks import friendly_pgd, pgd
from sparring.attacks.checks import Model
from sparring.engine.cpu import attack_for
from sparring.models import build
from sparring.training import run_folder

STEPS, REPEATS, SIDE = 10, 5, 16
# The larger the step, the sooner an untrained network is fooled.
SIZES = {"tiny_cnn": (0.08, 0.03, 0.015), "small_cnn": (0.08, 0.04, 0.025, 0.02), "resnet18": (0.02, 0.008)}
QUICK = [("tiny_cnn", 128, 1), ("small_cnn", 128, 1)]
FULL = [(name, batch, threads) for name in SIZES for batch in (64, 128, 256) for threads in (1, 2)]


@dataclass(frozen=True)
class Line:
    """One measurement."""

    network: str
    path: str
    batch: int
    threads: int
    backprops: float
    ratios: list[float]

    @property
    def ratio(self) -> float:
        """The median."""
        return statistics.median(self.ratios)

    @property
    def bound(self) -> float:
        """The most it may be."""
        return 1.15 * (self.backprops + 1) / STEPS

    def __str__(self) -> str:
        low, high = min(self.ratios), max(self.ratios)
        verdict = "holds" if self.ratio <= self.bound else "DOES NOT HOLD"
        return (
            f"{self.network:9} {self.path:6} batch {self.batch:3}, {self.threads} thread: {self.backprops:5.2f} BPs of "
            f"{STEPS}: {self.ratio:.2f} of PGD-{STEPS} ({low:.2f}-{high:.2f}), bound {self.bound:.2f}: {verdict}"
        )


def images(model: torch.nn.Module, batch: int) -> tuple[Tensor, Tensor]:
    """Images with the labels that the model predicts; every ninth label is another one."""
    x = torch.rand(batch, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        y = model(x).argmax(dim=1)
    y[::9] = (y[::9] + 1) % 10
    return x, y


def seconds(work: Callable[[], object], clock: Callable[[], float]) -> float:
    began = clock()
    work()
    return clock() - began


def measure(name: str, path: str, model: Model, x: Tensor, y: Tensor, threads: int, size: float, repeats: int) -> Line:
    setting = {"eps": 1.0, "step_size": size, "steps": STEPS}
    clock = time.process_time if threads == 1 else time.perf_counter
    taken = friendly_pgd(model, x, y, tau=0, **setting).backprops
    ratios = []
    for _ in range(repeats):
        plain = seconds(lambda: pgd(model, x, y, start=None, **setting), clock)
        friendly = seconds(lambda: friendly_pgd(model, x, y, tau=0, **setting), clock)
        ratios.append(friendly / plain)
    return Line(name, path, len(x), threads, taken.double().mean().item(), ratios)


def main() -> bool:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--networks", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--batches", nargs="+", type=int, default=[64, 128, 256])
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    lines: list[Line] = []
    for name, batch, threads in FULL if asked.full else QUICK:
        if name not in asked.networks or batch not in asked.batches or threads not in asked.threads:
            continue
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        model = build(name, num_classes=10, size=(SIDE, SIDE)).eval()
        x, y = images(model, batch)
        engine = attack_for(model, x[:8], half=False).network
        assert engine is not None
        for size in SIZES[name]:
            for path, network in (("model", model), ("engine", engine)):
                lines.append(measure(name, path, network, x, y, threads, size, asked.repeats))
                print(lines[-1], flush=True)
    if asked.out:
        words = [word for word in sys.argv[1:] if word not in ("--out", str(asked.out))]
        command = " ".join(["python benchmarks/bench_attack.py", *words])
        where = {**run_folder.environment(torch.device("cpu")), "command": command}
        found = [{**asdict(line), "bound": line.bound, "holds": line.ratio <= line.bound} for line in lines]
        asked.out.write_text(json.dumps({"n": asked.repeats, **where, "lines": found}, indent=1) + "\n")
    return all(line.ratio <= line.bound for line in lines)


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
